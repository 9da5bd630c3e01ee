"""The SBOM: its whole text, what a validator says, and what must not be in it."""

from __future__ import annotations

import json

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from builder.files import canonical_json
from builder.lock import read_lock
from builder.trust.layout import digest_of
from builder.trust.proof import Proof
from builder.trust.sbom import _links, components, image_in, sbom, wheels_in
from tests.made import ROOT, artefact, direct, golden, lock_of, sha, tiny
from tests.trust_made import MadeImage

IMAGE = f"sha256:{sha('image')}"


def proof_of(*artefacts: object) -> Proof:
    lock = lock_of(tiny().matrix, *artefacts)  # type: ignore[arg-type]
    listed = tuple(
        {"name": a.name, "version": a.version, "file": a.file, "sha256": a.sha256, "layer": a.layer}
        for a in lock.artefacts
    )
    return Proof(lock, {}, listed)


def patched() -> Proof:
    """sglang patched by a set and by a user's diff, sgl-kernel from a URL, numpy as it is."""
    kernel = direct("sgl-kernel", "0.3.21+cu130")
    proof = proof_of(kernel, artefact("numpy", "2.2.6"), artefact("sglang", "0.5.9", requires=("numpy>=1", "gone")))
    made = {
        "name": "sglang",
        "version": "0.5.9+sm120.diff1",
        "file": "sglang-0.5.9+sm120.diff1-py3-none-any.whl",
        "sha256": sha("patched"),
        "layer": "sglang",
    }
    report = {
        "package": "sglang",
        "patched_version": "0.5.9+sm120.diff1",
        "sets": ["sm120"],
        "sites": [{"id": "S2", "before": "needed"}, {"id": "S1", "before": "needed"}, {"id": "S3", "before": "native"}],
        "files": [{"file": "a.py", "diff": "--- a/a.py\n+++ b/a.py\n"}],
        "diffs": [{"file": "mine.diff", "sha256": sha("mine.diff")}],
    }
    installed = tuple(made if item["name"] == "sglang" else item for item in proof.installed)
    return Proof(proof.lock, {}, installed, (report,), {"patches.diff": sha("diff"), "patches.json": sha("report")})


def valid(document: object) -> bool:
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document))
    assert error is None, error
    return True


def test_the_whole_text() -> None:
    labels = {"sglang-stack.inputs": sha("inputs"), "sglang-stack.cuda": "13.0.2", "sglang-stack.gpus": "12.0,9.0"}
    said = sbom(patched(), IMAGE, labels, {"numpy": ("BSD-3-Clause AND MIT",), "sglang": ("Apache-2.0",)})
    golden("sbom.json", json.dumps(said, indent=1, sort_keys=True) + "\n")
    assert valid(said)


@pytest.mark.parametrize("name", ["cu130-next", "cu130"])
def test_a_validator_accepts_what_our_locks_give(name: str) -> None:
    lock = read_lock(ROOT / "matrices" / f"{name}.lock.json")
    listed = [{k: getattr(a, k) for k in ("name", "version", "file", "sha256", "layer")} for a in lock.artefacts]
    said = sbom(Proof(lock, {}, tuple(listed)), IMAGE, {})
    assert valid(said)
    assert components(said) == len(lock.artefacts) + len(lock.base.packages)
    assert wheels_in(said) == {a.name: (a.version, a.sha256) for a in lock.artefacts}
    assert image_in(said) == IMAGE


def test_made_twice_it_is_the_same() -> None:
    assert canonical_json(sbom(patched(), IMAGE, {})) == canonical_json(sbom(patched(), IMAGE, {}))


def test_another_image_has_another_serial_number() -> None:
    one, two = (sbom(patched(), f"sha256:{sha(word)}", {})["serialNumber"] for word in ("one", "two"))
    assert one != two


def test_no_credentials() -> None:
    # A matrix takes no URL with a password; a token may hide in one all the same.
    url = "https://me:secret@wheels.example/a-1.0-py3-none-any.whl?token=secret#secret"
    (link,) = _links(artefact("a").model_copy(update={"url": url}))
    assert str(link.url) == "https://wheels.example/a-1.0-py3-none-any.whl"


@pytest.mark.parametrize(
    ("words", "licences"),
    [
        ((), None),
        (("MIT",), [{"license": {"id": "MIT"}}]),
        (("BSD License", "MIT"), [{"license": {"id": "MIT"}}, {"license": {"name": "BSD License"}}]),
        (("MIT OR Apache-2.0",), [{"expression": "MIT OR Apache-2.0"}]),
        # An expression stands alone, or not at all.
        (("MIT OR Apache-2.0", "BSD License"), [{"license": {"name": "BSD License"}}]),
        (("MIT OR Apache-2.0", "MIT AND ISC"), [{"expression": "MIT OR Apache-2.0"}]),
        (("Dual license — see <LICENSE>",), [{"license": {"name": "Dual license — see <LICENSE>"}}]),
    ],
)
def test_licences(words: tuple[str, ...], licences: object) -> None:
    said = sbom(proof_of(artefact("a")), IMAGE, {}, {"a": words})
    assert next(item for item in said["components"] if item["name"] == "a").get("licenses") == licences
    assert valid(said)


def test_the_packages_of_the_os() -> None:
    said = sbom(MadeImage().proof, digest_of(b""), {})
    assert [item["purl"] for item in said["components"] if item["purl"].startswith("pkg:deb")] == [
        "pkg:deb/debian/base-files@12.4%2Bdeb12u15?arch=amd64&distro=bookworm",
        "pkg:deb/debian/tini@0.19.0-1?arch=amd64&distro=bookworm",
    ]


def test_two_of_a_name() -> None:
    said = sbom(proof_of(artefact("a")), IMAGE, {})
    wheel = next(item for item in said["components"] if item["name"] == "a")
    with pytest.raises(ValueError, match="a is there twice"):
        wheels_in({"components": [wheel, wheel]})
