"""What a verification says of an image that is not what it is called: each check, with its whole words. cosign is a stand-in."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.trust import cosign
from builder.trust.attach import attach
from builder.trust.layout import MANIFEST, digest_of, tag_of
from builder.trust.verify import CHECKS, Verified, verify_engine, verify_remote
from tests.made import artefact, lock_of, sha
from tests.trust_made import INPUTS, NAME, MadeImage, StandInRegistry, key, put_attached

pytestmark = pytest.mark.usefixtures("stand_in_cosign")

OURS = key().public


@pytest.fixture
def image() -> MadeImage:
    return MadeImage()


def there(image: MadeImage, *tags: str) -> StandInRegistry:
    """The image in a registry, signed."""
    registry = image.pushed(StandInRegistry(), *tags)
    attach(registry, image.signed())
    return registry


def verified(image: MadeImage, **options: Any) -> Verified:
    return verify_remote(there(image), "tiny", OURS, **options)


def failed(found: Verified) -> dict[str, str]:
    """The checks that failed, and their words."""
    return {check.name: check.detail for check in found.checks if check.ok is False}


def states(found: Verified) -> str:
    """A letter for each check: ok, failed, not looked at."""
    return "".join({True: "o", False: "F", None: "-"}[check.ok] for check in found.checks)


def test_all_is_well(image: MadeImage) -> None:
    found = verified(image, lock=image.lock)
    assert found.as_text() == (
        f"{NAME}:tiny: verified\n"
        f"  ok      signature   by the key {OURS.fingerprint[:12]}…, as `{NAME}`\n"
        "  ok      digest      manifest and config, 2 layers named\n"
        f"  ok      labels      matrix tiny, lock {image.lock.digest[:12]}, inputs {INPUTS[:12]}\n"
        f"  ok      lock        {image.lock.digest[:12]}, the one here: 2 wheels, 2 packages of the OS\n"
        "  ok      sbom        CycloneDX 1.6, 4 components, 2 wheels as installed\n"
        f"  ok      provenance  {found.checks[5].detail}\n"
        "  ok      contents    smoke test passed, 2 checks; no wheel patched; read out of the uppermost layer\n"
        "  ok      stand-in    no wheel in it stands in for another"
    )
    assert found.require() is found
    assert (found.image, found.digest) == (digest_of(image.config), image.digest)


def test_the_shape(image: MadeImage) -> None:
    said = verified(image).as_json()
    assert set(said) == {"ok", "image", "reference", "digest", "key", "checks"}
    assert [check["name"] for check in said["checks"]] == list(CHECKS)
    assert {"name", "ok", "detail"} == set(said["checks"][0])


# ---------------------------------------------------------------------------------------------------- signature


def test_not_signed(image: MadeImage) -> None:
    found = verify_remote(image.pushed(StandInRegistry()), "tiny", OURS)
    assert states(found) == "Foo----o"
    with pytest.raises(IntegrityError) as caught:
        found.require()
    assert str(caught.value) == (
        "error: the image is not verified: signature\n"
        f"  at: {NAME}:tiny, {image.digest}\n"
        "  because: signature: the image is not signed\n"
        "    passed: digest, labels, stand-in\n"
        "    not looked at: lock, sbom, provenance, contents\n"
        "  hint: take one that is signed; to sign this one: `builder push` or `builder bundle` with `--key`"
    )


def test_by_another_key(image: MadeImage) -> None:
    registry = image.pushed(StandInRegistry())
    attach(registry, image.signed(key("theirs")))
    found = verify_remote(registry, "tiny", OURS)
    assert failed(found) == {
        "signature": f"no signature is by the key {OURS.fingerprint[:12]}…, or it was changed since: cosign says: "
        "no matching signatures: invalid signature when validating ASN.1 encoded signature"
    }


def test_by_two_keys(image: MadeImage) -> None:
    registry = image.pushed(StandInRegistry())
    attach(registry, image.signed(key("theirs")))
    attach(registry, image.signed(key("ours")))
    for word in ("theirs", "ours"):
        assert verify_remote(registry, "tiny", key(word).public).ok


def test_attached_twice_it_is_there_once(image: MadeImage) -> None:
    registry = there(image)
    before = dict(registry.manifests)
    attach(registry, image.signed())
    assert registry.manifests == before


def test_the_signature_of_another_image(image: MadeImage) -> None:
    other = MadeImage()
    other.labels["more"] = "x"
    registry = image.pushed(StandInRegistry())
    made = other.signed()
    put_attached(registry, made)
    for suffix in ("sig", "att"):
        registry.put_manifest(tag_of(image.digest, suffix), *registry.manifests[tag_of(other.digest, suffix)])
    found = verify_remote(registry, "tiny", OURS)
    assert failed(found) == {"signature": f"what is signed is another image: {other.digest}"}


def test_an_attestation_of_another_image(image: MadeImage) -> None:
    other = MadeImage()
    other.labels["more"] = "x"
    registry = there(image)
    put_attached(registry, other.signed())
    registry.put_manifest(tag_of(image.digest, "att"), *registry.manifests[tag_of(other.digest, "att")])
    found = verify_remote(registry, "tiny", OURS)
    assert failed(found) == {
        name: f"no {words} is attached that the key signed for this image: cosign says: "
        "no matching attestations: no matching subject digest found"
        for name, words in (("sbom", "SBOM"), ("provenance", "provenance"))
    }


def test_nothing_attested(image: MadeImage) -> None:
    registry = there(image)
    del registry.manifests[tag_of(image.digest, "att")]
    found = verify_remote(registry, "tiny", OURS)
    assert failed(found) == {"sbom": "no SBOM is attached", "provenance": "no provenance is attached"}


def test_signed_under_another_name(image: MadeImage) -> None:
    registry = image.pushed(StandInRegistry("mirror.example/stack"))
    put_attached(registry, image.signed())
    assert failed(verify_remote(registry, "tiny", OURS)) == {
        "signature": f"it is signed as `{NAME}`, not as `mirror.example/stack`"
    }
    assert verify_remote(registry, "tiny", OURS, signed_as=NAME).ok


@pytest.mark.parametrize("payload", [b"[]", b"{}", b"\xff", b'{"critical": 1}', b'{"critical": {}, "critical": {}}'])
def test_a_payload_that_is_none(image: MadeImage, payload: bytes) -> None:
    from builder.trust.layout import SIGNATURE, make_attachment

    registry = image.pushed(StandInRegistry())
    one = make_attachment(tag_of(image.digest, "sig"), SIGNATURE, [(payload, {})])
    for data in one.blobs.values():
        registry.put_blob(data)
    registry.put_manifest(one.tag, one.manifest, MANIFEST)
    assert failed(verify_remote(registry, "tiny", OURS)) == {
        "signature": "what is signed is another image: nothing that can be read"
    }


@pytest.mark.parametrize(
    ("count", "size", "words"),
    [
        (65, 1, "it has 65 entries, more than 64"),
        (5, 16 << 20, "its entries have 83,886,081 bytes, more than 67,108,864"),
    ],
)
def test_more_attached_than_is_looked_at(image: MadeImage, count: int, size: int, words: str) -> None:
    registry = image.pushed(StandInRegistry())
    row = {"mediaType": "x", "digest": digest_of(b"x"), "size": size}
    many = {"schemaVersion": 2, "config": {**row, "size": 1}, "layers": [row] * count}
    registry.put_manifest(tag_of(image.digest, "sig"), json.dumps(many).encode(), MANIFEST)
    assert failed(verify_remote(registry, "tiny", OURS)) == {
        "signature": f"what is attached to the image cannot be read: {words}"
    }


def test_what_is_attached_is_no_attachment(image: MadeImage) -> None:
    registry = image.pushed(StandInRegistry())
    registry.put_manifest(tag_of(image.digest, "sig"), b'{"schemaVersion": 1}', MANIFEST)
    assert failed(verify_remote(registry, "tiny", OURS)) == {
        "signature": "what is attached to the image cannot be read: schemaVersion is 1, not 2"
    }


# ---------------------------------------------------------------------------------------------- digest and labels


def test_no_such_image(image: MadeImage) -> None:
    with pytest.raises(UnreachableError) as caught:
        verify_remote(there(image), "other", OURS)
    assert str(caught.value) == (
        "error: the registry has no such image\n"
        f"  at: {NAME}:other\n"
        "  hint: images are named MATRIX-<first 12 of the lock digest> there; put it there with `builder push`"
    )


@pytest.mark.parametrize(
    ("media_type", "body"),
    [
        ("application/vnd.oci.image.index.v1+json", {"schemaVersion": 2, "manifests": []}),
        (MANIFEST, {"schemaVersion": 2, "manifests": []}),
        ("", {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.list.v2+json"}),
    ],
)
def test_a_list_of_images(image: MadeImage, media_type: str, body: dict[str, object]) -> None:
    registry = there(image)
    registry.put_manifest("tiny", json.dumps(body).encode(), media_type)
    found = verify_remote(registry, "tiny", OURS)
    assert failed(found) == {"digest": "it names a list of images, not an image: what is signed is one image"}
    assert states(found) == "-F------"


def test_a_config_that_was_changed(image: MadeImage) -> None:
    registry = there(image)
    registry.blobs[digest_of(image.config)] += b" "
    assert failed(verify_remote(registry, "tiny", OURS)) == {
        "digest": "a blob in the registry is not what its digest says: it was changed"
    }


def test_a_config_of_another_size(image: MadeImage) -> None:
    class Longer(MadeImage):
        @property
        def manifest(self) -> bytes:
            size = f'"size":{len(self.config)}'.encode()
            return super().manifest.replace(size, size + b"0", 1)

    assert failed(verified(Longer())) == {"digest": "the config is not the one that the manifest names"}


def test_more_layers_than_the_config_names(image: MadeImage) -> None:
    class More(MadeImage):
        @property
        def config(self) -> bytes:
            raw = json.loads(super().config)
            raw["rootfs"]["diff_ids"].append(digest_of(b"x"))
            return json.dumps(raw).encode()

    assert failed(verified(More())) == {"digest": "the config and the manifest have different numbers of layers"}


def test_for_another_platform(image: MadeImage) -> None:
    class Arm(MadeImage):
        @property
        def config(self) -> bytes:
            return super().config.replace(b'"amd64"', b'"arm64"')

    assert failed(verified(Arm())) == {"digest": "it is for linux/arm64, not linux/amd64"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda labels: labels.pop("sglang-stack"),
            "it is not an image of this builder: it has no label `sglang-stack=image`",
        ),
        (lambda labels: labels.update({"sglang-stack.lock": "x"}), "its label `sglang-stack.lock` is no sha256: 'x'"),
        (lambda labels: labels.pop("sglang-stack.inputs"), "its label `sglang-stack.inputs` is no sha256: ''"),
    ],
)
def test_labels(image: MadeImage, change: Callable[[dict[str, str]], object], words: str) -> None:
    registry = StandInRegistry()
    made = image.signed()
    change(image.labels)
    image.pushed(registry)
    # What was signed is the image before: that the labels are looked at does not rest on it.
    put_attached(registry, made)
    assert failed(verify_remote(registry, "tiny", OURS))["labels"] == words


def test_a_tag_that_names_another_lock(image: MadeImage) -> None:
    found = verify_remote(there(image, "tiny-0123456789ab"), "tiny-0123456789ab", OURS)
    own = f"tiny-{image.lock.digest[:12]}"
    assert failed(found) == {"labels": f"the tag says `tiny-0123456789ab`, the image is `{own}`"}


def test_for_tests_only(image: MadeImage) -> None:
    image.labels["sglang-stack.stand-in"] = "torch"
    assert failed(verified(image)) == {"stand-in": "it is for tests: torch are not what they are called"}


# ---------------------------------------------------------------------------------------------- lock and contents


def test_another_lock_than_the_label_says(image: MadeImage) -> None:
    image.labels["sglang-stack.lock"] = sha("another")
    found = verified(image)
    assert failed(found) == {
        "lock": f"the lock in the image is {image.lock.digest[:12]}, its label says {sha('another')[:12]}"
    }
    assert states(found) == "oooF---o"


def test_the_lock_of_another_matrix(image: MadeImage) -> None:
    image.labels["sglang-stack.matrix"] = "other"
    assert failed(verified(image)) == {"lock": "the lock in the image is of the matrix `tiny`"}


def test_another_lock_than_here(image: MadeImage) -> None:
    here = lock_of(image.loaded.matrix, artefact("numpy", "2.2.7"), artefact("six"))
    assert failed(verified(image, lock=here)) == {
        "lock": f"the image's lock is {image.lock.digest[:12]}, the one here is {here.digest[:12]}: numpy 2.2.7 → 2.2.6"
    }


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("lock.json", b"{}", "/opt/sglang-stack/lock.json is no lock"),
        ("smoke.json", b"[]", "/opt/sglang-stack/smoke.json is no report of the smoke test"),
        ("spec.json", b"{", "/opt/sglang-stack/spec.json is no JSON"),
        ("spec.json", b'{"artefacts": [1]}', "/opt/sglang-stack/spec.json names no wheels"),
        ("patches.json", b"{}", "/opt/sglang-stack/patches.json is no list of reports"),
        ("patches.json", b"[{}]", "/opt/sglang-stack/patches.json is no list of reports"),
        ("patches.json", b'[{"sites": [{}]}]', "/opt/sglang-stack/patches.json is no list of reports"),
    ],
)
def test_a_proof_that_is_none(image: MadeImage, name: str, data: bytes, words: str) -> None:
    made, registry = image.signed(), StandInRegistry()
    good = image.manifest
    image.files[name] = data
    image.pushed(registry)
    # Signed as it is now, since it takes a proof that can be read to make an SBOM.
    from dataclasses import replace

    from builder.trust.attach import payload
    from builder.trust.layout import SIGNATURE, SIGNATURE_ANNOTATION, make_attachment

    claim = payload(NAME, image.digest)
    entry = (claim, {SIGNATURE_ANNOTATION: cosign.sign(key(), claim)})
    put_attached(registry, replace(made, signature=make_attachment(tag_of(image.digest, "sig"), SIGNATURE, [entry])))
    assert good != image.manifest
    assert failed(verify_remote(registry, "tiny", OURS))["lock"].startswith(words)


def test_no_proof(image: MadeImage) -> None:
    made = image.signed()

    class Bare(MadeImage):
        @property
        def layers(self) -> list[bytes]:
            return super().layers[:1]

    bare, registry = Bare(), StandInRegistry()
    bare.pushed(registry)
    from dataclasses import replace

    from builder.trust.attach import payload
    from builder.trust.layout import SIGNATURE, SIGNATURE_ANNOTATION, make_attachment

    claim = payload(NAME, bare.digest)
    entry = (claim, {SIGNATURE_ANNOTATION: cosign.sign(key(), claim)})
    put_attached(registry, replace(made, signature=make_attachment(tag_of(bare.digest, "sig"), SIGNATURE, [entry])))
    assert failed(verify_remote(registry, "tiny", OURS)) == {"lock": "the image has no /opt/sglang-stack/lock.json"}


def test_a_smoke_test_that_failed(image: MadeImage) -> None:
    image.edit("smoke.json", ok=False, checks=[{"name": "load", "ok": False}])
    assert failed(verified(image)) == {"contents": "the smoke test in the image did not pass: load"}


def test_a_smoke_test_without_checks(image: MadeImage) -> None:
    image.edit("smoke.json", checks=[])
    assert failed(verified(image)) == {"contents": "the smoke test in the image did not pass: it has no checks"}


def test_the_report_of_another_image(image: MadeImage) -> None:
    image.edit("smoke.json", lock=sha("another"))
    assert failed(verified(image)) == {"contents": "the smoke test's report in the image is of another lock or matrix"}


def installed(image: MadeImage, **numpy: str) -> None:
    """Exchange what is installed as numpy."""
    artefacts = json.loads(image.files["spec.json"])["artefacts"]
    image.edit("spec.json", artefacts=[{**item, **numpy} if item["name"] == "numpy" else item for item in artefacts])


def report(**fields: object) -> dict[str, Any]:
    site = {"id": "S1", "set": "sm120-symm", "before": "needed"}
    said = {"package": "numpy", "patched_version": "2.2.6+sm120", "sets": ["sm120"], "sites": [site]}
    return {**said, "files": [{"file": "a.py", "diff": "d"}], "diffs": [], **fields}


def test_another_wheel_than_the_lock_pins_and_no_report(image: MadeImage) -> None:
    installed(image, version="2.2.6+sm120", sha256=sha("patched"))
    assert failed(verified(image)) == {"contents": "numpy 2.2.6+sm120 is not the locked wheel, and no report says why"}


def test_a_patched_wheel(image: MadeImage) -> None:
    installed(image, version="2.2.6+sm120", sha256=sha("patched"))
    image.files["patches.json"] = json.dumps([report()]).encode()
    image.labels["sglang-stack.patches"] = "sm120"
    found = verified(image)
    assert found.ok
    assert found.checks[6].detail == ("smoke test passed, 2 checks; 1 wheel patched; read out of the uppermost layer")


def test_a_label_that_names_other_patches(image: MadeImage) -> None:
    installed(image, version="2.2.6+sm120", sha256=sha("patched"))
    image.files["patches.json"] = json.dumps([report()]).encode()
    image.labels["sglang-stack.patches"] = "eagle3,diff1"
    assert failed(verified(image)) == {"contents": "its label names the patches diff1, eagle3, its reports sm120"}


def test_more_installed_than_locked(image: MadeImage) -> None:
    artefacts = json.loads(image.files["spec.json"])["artefacts"]
    image.edit("spec.json", artefacts=[*artefacts, {**artefacts[0], "name": "more"}])
    assert failed(verified(image)) == {"contents": "what the image says is installed is not what its lock pins"}


# --------------------------------------------------------------------------------------------- what is attested


def test_an_sbom_of_other_wheels(image: MadeImage) -> None:
    other = MadeImage()
    installed(other, sha256=sha("another"))
    found = attested_as(image, other)
    assert failed(found) == {
        "sbom": "the SBOM is signed, but it does not fit the image: it differs from the image in numpy"
    }


def test_an_sbom_of_another_config(image: MadeImage) -> None:
    other = MadeImage()
    other.labels["sglang-stack.inputs"] = sha("other inputs")
    found = attested_as(image, other)
    config = digest_of(image.config.replace(INPUTS.encode(), sha("other inputs").encode()))
    assert failed(found)["sbom"] == (
        f"the SBOM is signed, but it does not fit the image: it is of another image: {config[:19]}"
    )


def test_an_sbom_of_another_system(image: MadeImage) -> None:
    other = MadeImage()
    fewer = other.lock.base.model_copy(update={"packages": other.lock.base.packages[:1]})
    other.files["lock.json"] = other.lock.model_copy(update={"base": fewer}).text().encode()
    assert failed(attested_as(image, other))["sbom"] == (
        "the SBOM is signed, but it does not fit the image: it differs from the image in tini"
    )


def test_a_provenance_of_other_inputs(image: MadeImage) -> None:
    other = MadeImage()
    other.labels["sglang-stack.inputs"] = sha("other inputs")
    found = attested_as(image, other)
    assert failed(found)["provenance"] == (
        "the provenance is signed, but it does not fit the image: it names another lock, or other inputs"
    )


def attested_as(image: MadeImage, other: MadeImage) -> Verified:
    """`image`, for which the key signed what is true of `other`."""
    from dataclasses import replace

    from builder.trust.attach import attachments

    about = replace(image.subject(), proof=other.proof)
    if other.labels != image.labels:
        config = image.config.replace(INPUTS.encode(), other.labels["sglang-stack.inputs"].encode())
        about = replace(about, config=config)
    registry = image.pushed(StandInRegistry())
    put_attached(registry, attachments(about, key()))
    return verify_remote(registry, "tiny", OURS)


# ----------------------------------------------------------------------------------------------------- an engine


class StandInEngine:
    """An engine that has one image."""

    host = "unix:///made"

    def __init__(self, image: MadeImage) -> None:
        self.image = image

    def find(self, reference: str) -> Any:
        from builder.engine import Image

        if reference != "sglang-stack:tiny":
            return None
        return Image(digest_of(self.image.config), (reference,), self.image.labels, 1000, ())

    def read_file(self, image: str, path: str) -> bytes:
        from builder.errors import BuildError

        name = path.rpartition("/")[2]
        if name not in self.image.files:
            raise BuildError(f"`{image}` has no {path}")
        return self.image.files[name]


def test_an_image_of_an_engine(image: MadeImage) -> None:
    found = verify_engine(StandInEngine(image), "sglang-stack:tiny")  # type: ignore[arg-type]
    assert states(found) == "--oo--oo"
    assert (found.ok, found.signed, found.digest) == (True, False, "")


def test_an_image_of_an_engine_that_is_not_what_it_says(image: MadeImage) -> None:
    image.edit("smoke.json", ok=False)
    with pytest.raises(IntegrityError) as caught:
        verify_engine(StandInEngine(image), "sglang-stack:tiny").require()  # type: ignore[arg-type]
    assert str(caught.value) == (
        "error: the image is not verified: contents\n"
        "  at: sglang-stack:tiny\n"
        "  because: contents: the smoke test in the image did not pass: its report says so\n"
        "    passed: labels, lock, stand-in\n"
        "    not looked at: signature, digest, sbom, provenance"
    )


def test_no_image_in_the_engine(image: MadeImage) -> None:
    with pytest.raises(UsageError, match="there is no image `other`"):
        verify_engine(StandInEngine(image), "other")  # type: ignore[arg-type]
