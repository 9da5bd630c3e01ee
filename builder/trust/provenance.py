"""Where an image comes from: a SLSA provenance v1 predicate, from its lock. No host, path or time is in it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from builder import __version__
from builder.files import canonical_json, sha256_hex
from builder.labels import INPUTS_LABEL
from builder.lock import Lock
from builder.matrix import LoadedMatrix
from builder.trust.proof import Proof
from builder.trust.sbom import purls

BUILD_TYPE: Final = "urn:sglang-stack:build:v1"
BUILDER_ID: Final = "urn:sglang-stack:builder"

ROOT = Path(__file__).resolve().parents[2]
_DECIDES: Final = ("builder", "templates", "Dockerfile.base", "pyproject.toml", "requirements")
"""What of a checkout decides an image, beside the matrix."""


@dataclass(frozen=True)
class Checkout:
    """The builder that makes the statement: its git revision, and `clean`, `dirty` or `unknown`."""

    revision: str = "unknown"
    state: str = "unknown"


def checkout(root: Path = ROOT) -> Checkout:
    """The revision of this checkout; unknown where it is none, or there is no git."""
    try:
        top = _git(root, "rev-parse", "--show-toplevel")
        if Path(top.strip()).resolve() != root.resolve():
            return Checkout()
        revision = _git(root, "rev-parse", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", *_DECIDES).strip()
    except (OSError, subprocess.SubprocessError):
        return Checkout()
    return Checkout(revision, "dirty" if changed else "clean")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


def matrix_digest(loaded: LoadedMatrix) -> str:
    """The sha256 of what a matrix says, whatever its comments and order."""
    return sha256_hex(canonical_json(loaded.matrix.model_dump(mode="json", by_alias=True)))


def provenance(
    loaded: LoadedMatrix,
    proof: Proof,
    labels: Mapping[str, str],
    *,
    rendered: str = "",
    made_by: Checkout | None = None,
) -> dict[str, Any]:
    """The predicate. `rendered` is the inputs digest that this checkout gives for the matrix now, "" if it was not computed.

    Equal to the image's, it says that the image is what this revision builds; otherwise who built it is not known, and
    the predicate says so.
    """
    lock, inputs = proof.lock, labels.get(INPUTS_LABEL, "")
    here = made_by or checkout()
    digests = {
        name: proof.digests[name] for name in ("smoke.json", "patches.json", "patches.diff") if name in proof.digests
    }
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": {"matrix": {"name": lock.matrix, "digest": {"sha256": matrix_digest(loaded)}}},
            "internalParameters": {
                "lock": {"sha256": lock.digest},
                "inputs": {"sha256": inputs},
                "asOf": lock.as_of,
                "platform": lock.platform,
                "resolver": {"name": lock.resolver.name, "version": lock.resolver.version},
                "rendersTheseInputs": bool(rendered) and rendered == inputs,
            },
            "resolvedDependencies": _dependencies(lock, here),
        },
        "runDetails": {
            "builder": {
                "id": BUILDER_ID,
                "version": {"sglang-stack-builder": __version__, "revision": here.revision, "checkout": here.state},
            },
            "byproducts": [{"name": name, "digest": {"sha256": value}} for name, value in sorted(digests.items())],
        },
    }


def _dependencies(lock: Lock, here: Checkout) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for purl, name, sha256 in purls(lock):
        rows.append({"uri": purl, "name": name, **({"digest": {"sha256": sha256}} if sha256 else {})})
    if lock.base.reference is not None:
        name, _, digest = lock.base.reference.partition("@sha256:")
        rows.append({"name": name, "uri": f"oci:{lock.base.reference}", "digest": {"sha256": digest}})
    if here.revision != "unknown":
        rows.append({"name": "sglang-stack-builder", "digest": {"gitCommit": here.revision}})
    return rows


def wheels_in(predicate: Mapping[str, Any]) -> dict[str, str]:
    """File → sha256 of the wheels that a provenance names. Raises KeyError or the like for a damaged one."""
    rows = predicate["buildDefinition"]["resolvedDependencies"]
    return {
        str(row["name"]): str(row["digest"]["sha256"])
        for row in rows
        if str(row.get("uri", "")).startswith("pkg:pypi/")
    }


def pinned_in(predicate: Mapping[str, Any]) -> tuple[str, str]:
    """The lock and inputs digests that a provenance names. Raises KeyError or the like for a damaged one."""
    internal = predicate["buildDefinition"]["internalParameters"]
    return str(internal["lock"]["sha256"]), str(internal["inputs"]["sha256"])
