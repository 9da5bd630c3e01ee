"""Matrices and locks for tests: small, valid, each part replaceable. And golden files."""

from __future__ import annotations

import ast
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.lock import Artefact, Base, Lock, OsPackage, Resolver, inputs_digest
from builder.matrix import LoadedMatrix, Matrix, parse_matrix
from builder.nativefacts import EXPORTED, NEEDED, PATHS, SONAME, UNDEFINED, VERDEF, VERNEED
from builder.settings import Settings

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "unit" / "golden"

TINY = """\
summary: A tiny stack
as_of: 2026-03-01
platform: linux/amd64
python: "3.11"
base: {kind: archive, distribution: debian, release: bookworm}
cuda: {version: 13.0.2, jit: none}
gpus: ["12.0"]
stack: {}
"""
SMALL = TINY.replace("A tiny stack", "a small one").replace("stack: {}", "stack:\n  torch: 2.11.0")
"""The tiny matrix with torch."""

PART_OF = {
    "soname": SONAME,
    "needed": NEEDED,
    "rpath": PATHS,
    "runpath": PATHS,
    "undefined": UNDEFINED,
    "exported": EXPORTED,
    "verneed": VERNEED,
    "verdef": VERDEF,
}
"""The part of a file's facts that each field of `ElfFacts` is of."""

OS_PACKAGES = (
    OsPackage(name="base-files", version="12.4+deb12u15", architecture="amd64"),
    OsPackage(name="tini", version="0.19.0-1", architecture="amd64"),
)


def golden(name: str, text: str) -> None:
    """Compare `text` with tests/unit/golden/NAME; `BUILDER_UPDATE=1` writes it anew."""
    path = GOLDEN / name
    if os.environ.get("BUILDER_UPDATE"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs; read the difference, then BUILDER_UPDATE=1"


def tiny(extra: str = "", name: str = "tiny", **changes: str) -> LoadedMatrix:
    """The tiny matrix, with lines added, and top-level lines exchanged: `tiny(python='"3.12"')`."""
    text = TINY
    for key, value in changes.items():
        old = next(line for line in text.splitlines() if line.startswith(f"{key}:"))
        text = text.replace(old, f"{key}: {value}")
    return parse_matrix(text + extra, Path(f"matrices/{name}.yaml"))


def sha(word: str) -> str:
    """A sha256 that is made of a word."""
    return hashlib.sha256(word.encode()).hexdigest()


def artefact(name: str, version: str = "1.0", **fields: Any) -> Artefact:
    """An artefact of the default index, with fields exchanged."""
    data: dict[str, Any] = {
        "name": name,
        "version": version,
        "metadata_version": version,
        "file": f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
        "sha256": sha(f"{name} {version}"),
        "size": 1000,
        "index": "default",
        "url": None,
        "requires": (),
        "layer": "rest",
    }
    return Artefact(**{**data, **fields})


def direct(name: str, version: str, layer: str = "kernels", **fields: Any) -> Artefact:
    """An artefact that is a direct file."""
    file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    url = f"https://wheels.example/{file.replace('+', '%2B')}"
    return artefact(name, version, index=None, url=url, size=None, layer=layer, **fields)


def lock_of(matrix: Matrix, /, *artefacts: Artefact, **fields: Any) -> Lock:
    """The lock of a matrix with these artefacts."""
    base = matrix.base
    reference = base.reference if base.kind == "image" else None
    packages = () if base.kind == "image" else OS_PACKAGES
    data: dict[str, Any] = {
        "schema": 1,
        "matrix": matrix.name,
        "inputs": inputs_digest(matrix),
        "as_of": str(matrix.as_of),
        "platform": matrix.platform,
        "python": matrix.python,
        "resolver": Resolver(name="uv", version="0.13.9"),
        "base": Base(
            kind=base.kind,
            distribution=base.distribution,
            release=base.release,
            reference=reference,
            packages=packages,
        ),
        "artefacts": tuple(sorted(artefacts, key=lambda a: a.name)),
    }
    return Lock(**{**data, **fields})


def settings_at(folder: Path, **fields: Any) -> Settings:
    """Settings with a cache below `folder` and nothing of this machine."""
    return Settings(**{"cache": folder / "cache", **fields})


def lacking(files: Mapping[str, bytes]) -> set[str]:
    """Files of the builder that some of ``files`` import, whenever they do, and that are not among them.

    Both are by path from the folder that has the package. What only type checkers import does not count.
    """
    wanted: set[str] = set()
    for data in files.values():
        tree = ast.parse(data)
        typed = [
            node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        unused = {inner for node in typed for part in node.body for inner in ast.walk(part)}
        for node in ast.walk(tree):
            if node in unused:
                continue
            if isinstance(node, ast.Import):
                wanted.update(name.name for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                wanted.update((node.module, *(f"{node.module}.{name.name}" for name in node.names)))
    paths = (module.replace(".", "/") for module in wanted if module.split(".")[0] == "builder")
    needed = {path for place in paths for path in (f"{place}.py", f"{place}/__init__.py") if (ROOT / path).is_file()}
    return needed - files.keys()
