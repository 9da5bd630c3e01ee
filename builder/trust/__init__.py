"""What is said of an image and proven by a signature: SBOM, provenance, verification, bundles for closed networks.

Everything is signed and verified on an OCI layout in a folder, so one way serves a registry, a bundle and a test; cosign
itself never touches a network.

`push` calls (all raise `builder.errors.BuilderError`):

    key = signing_key(path)                                                cosign.py: opened before anything is sent
    about = subject(engine, image.id, loaded, manifest, config, client.name, prepared.rendered.digest)        attach.py
    made = attachments(about, key)                                         needs the manifest's bytes as pushed
    there = attach(client, made)                                           blobs first, then the manifests at their tags
    verify_remote(client, digest, key.public, lock=lock).require()         verify.py: read back
    there.as_json()                                                        {"sbom": …, "provenance": …, "signature": …}

`pull` calls `verify_remote(client, tag or digest, pub, lock=the local lock)` before a layer is fetched, and
`verify_engine(engine, image, lock=…)` on what arrived; `load` over hosts calls `verify_bundle(path, pub)` once and
`load_into(engine, path, verified)` on each. `.require()` raises with every check, `.as_json()` is the shape `verify`.
"""
