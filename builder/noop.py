"""Nothing changed: known from the bytes of every input, before anything is parsed, and told from what the build told.

The fingerprint covers the matrix, its lock, and every file of the builder that can decide an image. The engine still has
the last word: the image has to be there, under both its names, with the label of these inputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from builder.engine import Engine
from builder.files import write_atomic
from builder.labels import INPUTS_LABEL

ROOT = Path(__file__).resolve().parent.parent


def fingerprint(path: Path, diffs: Sequence[str] = ()) -> str:
    """The sha256 of everything that decides the image of the matrix at `path`, with its own `diffs` (relative to it).

    Raises `OSError` for a missing file.
    """
    lock = path.with_name(path.name.removesuffix(path.suffix) + ".lock.json")
    files = [path, lock, ROOT / "Dockerfile.base"]
    for folder in ("builder", "templates"):
        files += sorted(file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".yaml", ".j2", ".sh"))
    digest = hashlib.sha256(version("uv").encode())
    for file in [*files, *(path.parent / name for name in diffs)]:
        content = file.read_bytes()
        digest.update(f"\0{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def _stamp(path: Path, cache: Path) -> Path:
    return cache / "contexts" / f"{path.stem}.built.json"


def remember(
    path: Path, cache: Path, inputs: str, data: Mapping[str, Any], text: str, diffs: Sequence[str] = ()
) -> None:
    """Keep what a build told, for the next time. ``diffs`` are the files that the matrix applies, relative to it."""
    kept = {"fingerprint": fingerprint(path, diffs), "diffs": list(diffs), "inputs": inputs, "data": data, "text": text}
    write_atomic(_stamp(path, cache), json.dumps(kept))


def recall(path: Path, cache: Path, engine: Engine) -> tuple[dict[str, Any], str] | None:
    """The report and text of the image that these inputs gave; None if there is anything to do."""
    try:
        kept = json.loads(_stamp(path, cache).read_text(encoding="utf-8"))
        if kept["fingerprint"] != fingerprint(path, kept["diffs"]):
            return None
        data, text, inputs = kept["data"], kept["text"], kept["inputs"]
        images = [engine.find(name) for name in data["image"]["names"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for image in images:
        if image is None or image.id != data["image"]["id"] or image.labels.get(INPUTS_LABEL) != inputs:
            return None
    return {**data, "built": False}, text
