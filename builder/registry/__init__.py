"""Images in registries: what is there, how they get there, how they come from there.

Layers travel through the engine's own push and pull; manifests, configs and what is attached to an image go through a
small client of our own.

    client = RegistryClient(Reference.parse("REGISTRY/NAME"), settings)          client.py, auth.py
    pushed = push_image(engine, image, reference, progress=note)                 transport.py
    pulled = pull_image(engine, reference, digest, progress=note)                pull.py
    report = push(path, "REGISTRY/NAME", key=…)                                  push.py: what `builder push` does
    predicted(rows, have)                                                        predict.py: compressed bytes per layer
"""
