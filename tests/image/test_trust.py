"""Signed in a real registry, verified there: by us, and by the real cosign. What was tampered with is not taken.

The image is a small real one, with a wheel that a diff of its own patches.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from builder.build import Prepared, build_image, prepare
from builder.cli import main
from builder.engine import Buildx, Engine, Image
from builder.errors import IntegrityError
from builder.lock import Lock
from builder.registry.client import RegistryClient
from builder.settings import Settings
from builder.trust.attach import attach, attachments, subject
from builder.trust.cosign import SigningKey, signing_key
from builder.trust.layout import parse_manifest, tag_of
from builder.trust.verify import verify_engine, verify_remote
from tests.image.engines import Registry
from tests.image.onhosts import make_key

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]

DIFF = """\
--- a/packaging/__init__.py
+++ b/packaging/__init__.py
@@ -5,3 +5,3 @@
 __title__ = "packaging"
-__summary__ = "Core utilities for Python packages"
+__summary__ = "Core utilities for Python packages, changed"
 __uri__ = "https://github.com/pypa/packaging"
"""

TEXT = f"""\
summary: A stack to sign
as_of: 2026-08-01
platform: linux/amd64
python: "3.11"
base: {{kind: archive, distribution: debian, release: bookworm}}
cuda: {{version: 13.0.2, jit: none}}
gpus: ["12.0"]
stack: {{}}
extras: [packaging==26.2, six==1.17.0]
patches:
  diffs:
    - {{package: packaging, file: summary.diff, sha256: {hashlib.sha256(DIFF.encode()).hexdigest()}}}
budget: {{image: 1 GB}}
"""


@dataclass(frozen=True)
class Signed:
    """An image in a registry, signed and attested, and who did it."""

    prepared: Prepared
    image: Image
    registry: Registry
    client: RegistryClient
    key: SigningKey
    digest: str
    tag: str

    @property
    def lock(self) -> Lock:
        return self.prepared.lock

    @property
    def reference(self) -> str:
        return f"{self.client.name}:{self.tag}"

    @property
    def pub(self) -> str:
        return str(self.key.path.with_name("cosign.pub"))


def key_pair(cosign: str, folder: Path) -> SigningKey:
    """A key pair as a user makes one."""
    return signing_key(make_key(cosign, folder))


@pytest.fixture(scope="module")
def trusted(make_small: Callable[..., Path], built_small: Image) -> Prepared:
    # The OS is the one that small stacks share, with a compiler: one with a compiler has to have it bootstrapped.
    path = make_small("trusted", TEXT)
    (path.parent / "summary.diff").write_text(DIFF, encoding="utf-8")
    return prepare(path)


@pytest.fixture(scope="module")
def built(trusted: Prepared, engine: Engine, buildx: Buildx, settings: Settings) -> Image:
    return build_image(trusted, engine, buildx, settings)


@pytest.fixture(scope="module")
def signed(
    trusted: Prepared,
    built: Image,
    engine: Engine,
    settings: Settings,
    docker: Docker,
    cosign: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Signed]:
    folder = tmp_path_factory.mktemp("signed")
    with Registry(folder / "registry") as registry:
        client = RegistryClient(f"{registry.address}/team/stack", settings)
        tag = f"trusted-{trusted.lock.digest[:12]}"
        docker("tag", built.id, f"{client.name}:{tag}")
        docker("push", f"{client.name}:{tag}")
        docker("rmi", f"{client.name}:{tag}")
        key = key_pair(cosign, folder / "key")
        put(engine, built.id, trusted, client, tag, key)
        digest = client.image(tag)[0]
        yield Signed(trusted, built, registry, client, key, digest, tag)
        client.close()


def put(engine: Engine, image: str, prepared: Prepared, client: RegistryClient, tag: str, key: SigningKey) -> None:
    """What a push does once the image is there."""
    found = client.manifest(tag)
    assert found is not None
    config = client.blob(parse_manifest(found[0]).config.digest)
    name, inputs = client.name, prepared.rendered.digest
    attach(client, attachments(subject(engine, image, prepared.loaded, found[0], config, name, inputs), key))


@pytest.fixture
def elsewhere(signed: Signed, tmp_path: Path, settings: Settings) -> Iterator[Signed]:
    """The same in a registry of its own, to be damaged."""
    shutil.copytree(signed.registry.data, tmp_path / "registry" / "data")
    with Registry(tmp_path / "registry") as registry:
        client = RegistryClient(f"{registry.address}/team/stack", settings)
        key, tag = signed.key, signed.tag
        yield Signed(signed.prepared, signed.image, registry, client, key, signed.digest, tag)
        client.close()


def refusal(found: Signed, reference: str = "", **options: object) -> str:
    """The message of a verification that fails; the signature was made for the first registry's name."""
    with pytest.raises(IntegrityError) as caught:
        verify_remote(found.client, reference or found.tag, found.key.public, **options).require()  # type: ignore[arg-type]
    return str(caught.value)


def test_cosign_itself_accepts_the_signature(signed: Signed, cosign: str) -> None:
    said = subprocess.run(
        [cosign, "verify", "--key", signed.pub, "--insecure-ignore-tlog=true", *_PLAIN, at(signed)],
        capture_output=True,
        text=True,
        check=True,
    )
    (claim,) = json.loads(said.stdout)
    assert claim["critical"]["image"]["docker-manifest-digest"] == signed.digest
    assert claim["critical"]["identity"]["docker-reference"] == signed.client.name


_PLAIN = ("--allow-http-registry=true", "--allow-insecure-registry=true")


def at(signed: Signed) -> str:
    return f"{signed.client.name}@{signed.digest}"


def attested(signed: Signed, cosign: str, kind: str) -> dict[str, object]:
    """The statement of a kind that cosign verified."""
    import base64

    said = subprocess.run(
        [
            *(cosign, "verify-attestation", "--key", signed.pub, "--insecure-ignore-tlog=true"),
            *_PLAIN,
            *("--type", kind, at(signed)),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, object] = json.loads(base64.b64decode(json.loads(said.stdout)["payload"]))
    return found


def test_cosign_accepts_the_sbom_and_a_validator_its_form(signed: Signed, cosign: str) -> None:
    statement = attested(signed, cosign, "cyclonedx")
    bom = statement["predicate"]
    assert isinstance(bom, dict)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    assert len(bom["components"]) == len(signed.lock.artefacts) + len(signed.lock.base.packages)
    assert bom["metadata"]["component"]["bom-ref"] == signed.image.id
    patched = next(item for item in bom["components"] if item["name"] == "packaging")
    assert patched["version"] == "26.2+diff1"
    (ancestor,) = patched["pedigree"]["ancestors"]
    assert ancestor["hashes"][0]["content"] == signed.lock.by_name["packaging"].sha256
    urls = [item["diff"]["url"] for item in patched["pedigree"]["patches"]]
    assert f"urn:sha256:{hashlib.sha256(DIFF.encode()).hexdigest()}" in urls
    # As their METADATA has them.
    assert patched["licenses"] and "MIT" in json.dumps(next(c for c in bom["components"] if c["name"] == "six"))


def test_cosign_accepts_the_provenance(signed: Signed, cosign: str) -> None:
    statement = attested(signed, cosign, "slsaprovenance1")
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    text = json.dumps(statement["predicate"])
    predicate = json.loads(text)
    internal = predicate["buildDefinition"]["internalParameters"]
    assert internal["lock"] == {"sha256": signed.lock.digest}
    assert internal["rendersTheseInputs"] is True
    assert str(signed.prepared.loaded.path.parent) not in text and os.uname().nodename not in text


def test_what_was_signed_is_verified(signed: Signed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", signed.reference, "--pub", signed.pub, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert {check["name"]: check["ok"] for check in said["checks"]} == dict.fromkeys(
        ("signature", "digest", "labels", "lock", "sbom", "provenance", "contents", "stand-in"), True
    )
    assert (said["ok"], said["digest"], said["image"]) == (True, signed.digest, signed.image.id)


def test_no_layer_is_fetched_but_the_proof(signed: Signed) -> None:
    before = len(signed.registry.requests())
    verify_remote(signed.client, signed.tag, signed.key.public).require()
    fetched = {request.blob for request in signed.registry.requests()[before:] if request.blob}
    manifest = signed.client.manifest(signed.digest)
    assert manifest is not None
    layers = [layer.digest for layer in parse_manifest(manifest[0]).layers]
    assert fetched & set(layers) == {layers[-1]}


def test_pushed_again_nothing_changes(signed: Signed, engine: Engine) -> None:
    before = [signed.client.manifest(tag_of(signed.digest, suffix)) for suffix in ("sig", "att")]
    put(engine, signed.image.id, signed.prepared, signed.client, signed.tag, signed.key)
    assert [signed.client.manifest(tag_of(signed.digest, suffix)) for suffix in ("sig", "att")] == before


def test_an_image_of_the_engine_has_no_signature(signed: Signed, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "sglang-stack:trusted"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        "sglang-stack:trusted: consistent; it has no signature, so who made it was not verified"
    )
    assert main(["verify", "sglang-stack:trusted", "--pub", signed.pub]) == 2


def test_another_lock_here(signed: Signed, reference_lock: Lock) -> None:
    said = refusal(signed, lock=reference_lock)
    assert (
        f"lock: the image's lock is {signed.lock.digest[:12]}, the one here is {reference_lock.digest[:12]}: " in said
    )


# ------------------------------------------------------------------------------------------------------- faults


def test_another_key(signed: Signed, cosign: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = key_pair(cosign, tmp_path / "other")
    assert main(["verify", signed.reference, "--pub", str(tmp_path / "other" / "cosign.pub")]) == 7
    assert capsys.readouterr().err == (
        f"error: the image is not verified: signature\n"
        f"  at: {signed.reference}, {signed.digest}\n"
        f"  because: signature: no signature is by the key {other.public.fingerprint[:12]}…, or it was changed since: "
        "cosign says: no matching signatures: invalid signature when validating ASN.1 encoded signature\n"
        "    passed: digest, labels, stand-in\n"
        "    not looked at: lock, sbom, provenance, contents\n"
        "  hint: give the public key of who signed it: `--pub FILE`\n"
    )


def test_a_tag_moved_to_an_image_that_is_not_signed(elsewhere: Signed, docker: Docker) -> None:
    docker("tag", "sglang-stack-base:" + base_tag(docker), f"{elsewhere.client.name}:{elsewhere.tag}")
    docker("push", f"{elsewhere.client.name}:{elsewhere.tag}")
    docker("rmi", f"{elsewhere.client.name}:{elsewhere.tag}")
    digest = elsewhere.client.image(elsewhere.tag)[0]
    assert refusal(elsewhere) == (
        "error: the image is not verified: signature, labels\n"
        f"  at: {elsewhere.client.name}:{elsewhere.tag}, {digest}\n"
        "  because: signature: the image is not signed\n"
        "    labels: it is not an image of this builder: it has no label `sglang-stack=image`\n"
        "    passed: digest, stand-in\n"
        "    not looked at: lock, sbom, provenance, contents\n"
        "  hint: take one that is signed; to sign this one: `builder push` or `builder bundle` with `--key`"
    )


def base_tag(docker: Docker) -> str:
    return docker("images", "--format", "{{.Tag}}", "sglang-stack-base").stdout.split()[0]


def test_a_signature_copied_onto_another_image(elsewhere: Signed, docker: Docker) -> None:
    docker("tag", "sglang-stack-base:" + base_tag(docker), f"{elsewhere.client.name}:base")
    docker("push", f"{elsewhere.client.name}:base")
    docker("rmi", f"{elsewhere.client.name}:base")
    victim = elsewhere.client.image("base")[0]
    for suffix in ("sig", "att"):
        found = elsewhere.client.manifest(tag_of(elsewhere.digest, suffix))
        assert found is not None
        elsewhere.client.put_manifest(tag_of(victim, suffix), *found)
    assert f"signature: what is signed is another image: {elsewhere.digest}\n" in refusal(elsewhere, victim)


def test_copied_from_another_registry(elsewhere: Signed, signed: Signed) -> None:
    assert refusal(elsewhere) == (
        "error: the image is not verified: signature\n"
        f"  at: {elsewhere.reference}, {elsewhere.digest}\n"
        f"  because: signature: it is signed as `{signed.client.name}`, not as `{elsewhere.client.name}`\n"
        "    passed: digest, labels, stand-in\n"
        "    not looked at: lock, sbom, provenance, contents\n"
        "  hint: where you copied it from there on purpose, say so: `builder verify IMAGE --signed-as REGISTRY/NAME`"
    )
    verify_remote(elsewhere.client, elsewhere.tag, elsewhere.key.public, signed_as=signed.client.name).require()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("config", "digest: a blob in the registry is not what its digest says: its bytes have sha256:"),
        ("proof", "lock: a blob in the registry is not what its digest says: its bytes have sha256:"),
        ("payload", "signature: a blob in the registry is not what its digest says: its bytes have sha256:"),
        ("envelope", "sbom: a blob in the registry is not what its digest says: its bytes have sha256:"),
    ],
)
def test_a_blob_that_was_tampered_with(elsewhere: Signed, signed: Signed, which: str, words: str) -> None:
    manifests = {
        name: elsewhere.client.manifest(reference)
        for name, reference in (
            ("image", elsewhere.digest),
            ("sig", tag_of(elsewhere.digest, "sig")),
            ("att", tag_of(elsewhere.digest, "att")),
        )
    }
    parsed = {name: parse_manifest(found[0]) for name, found in manifests.items() if found is not None}
    digest = {
        "config": parsed["image"].config.digest,
        "proof": parsed["image"].layers[-1].digest,
        "payload": parsed["sig"].layers[0].digest,
        "envelope": parsed["att"].layers[0].digest,
    }[which]
    path = elsewhere.registry.blob_path(digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    assert words in refusal(elsewhere, signed_as=signed.client.name)


def test_a_list_of_images_under_the_tag(elsewhere: Signed) -> None:
    found = elsewhere.client.manifest(elsewhere.digest)
    assert found is not None
    kind = "application/vnd.docker.distribution.manifest.list.v2+json"
    row = {
        "mediaType": found[1],
        "digest": elsewhere.digest,
        "size": len(found[0]),
        "platform": {"os": "linux", "architecture": "amd64"},
    }
    listed = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": [row]}).encode()
    digest = elsewhere.client.put_manifest("trusted", listed, kind)
    assert refusal(elsewhere, "trusted") == (
        "error: the image is not verified: digest\n"
        f"  at: {elsewhere.client.name}:trusted, {digest}\n"
        "  because: digest: it names a list of images, not an image: what is signed is one image\n"
        "    not looked at: signature, labels, lock, sbom, provenance, contents, stand-in"
    )


def test_a_tag_that_names_another_lock(signed: Signed) -> None:
    found = signed.client.manifest(signed.digest)
    assert found is not None
    signed.client.put_manifest("trusted-0123456789ab", *found)
    assert f"labels: the tag says `trusted-0123456789ab`, the image is `{signed.tag}`\n" in refusal(
        signed, "trusted-0123456789ab"
    )


def test_the_lock_beside_the_image_of_an_engine(signed: Signed, engine: Engine) -> None:
    other = signed.lock.model_copy(update={"as_of": "2026-07-01"})
    with pytest.raises(IntegrityError, match="as_of 2026-07-01 → 2026-08-01"):
        verify_engine(engine, signed.image.id, lock=other).require()
