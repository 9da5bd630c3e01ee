"""`builder list`: the matrices, with their stacks and states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder.bootstrap import engine_host
from builder.errors import BuilderError
from builder.lock import inputs_digest, lock_path, read_lock
from builder.matrix import list_matrices, load_matrix


def inventory(folder: Path) -> list[dict[str, Any]]:
    """A row for each matrix: its stack, the state of its lock, and whether the engine has its image."""
    images = _images()
    rows = []
    for path in list_matrices(folder):
        row: dict[str, Any] = {"name": path.stem, "summary": "", "stack": {}, "lock": "", "image": ""}
        valid = False
        try:
            matrix = load_matrix(path)
            valid = True
            row |= {"summary": matrix.summary, "stack": matrix.stack.pins(), "cuda": matrix.cuda.version}
            lock = read_lock(lock_path(path))
            row["lock"] = "locked" if lock.inputs == inputs_digest(matrix) else "out of date"
            row["image"] = "unknown" if images is None else _state(images, matrix.name, lock.digest)
        except BuilderError as error:
            row["lock"] = "none" if valid and not lock_path(path).exists() else "invalid"
            row["problem"] = error.what
        rows.append(row)
    return rows


def _state(images: dict[str, set[str]], name: str, digest: str) -> str:
    built = images.get(name, set())
    return "built" if digest in built else "older" if built else "not built"


def _images() -> dict[str, set[str]] | None:
    """Matrix → lock digests of its images; None where no engine answers (nothing is known then)."""
    if engine_host() is None:
        return None
    from builder.engine import connect
    from builder.labels import LABEL

    try:
        found: dict[str, set[str]] = {}
        for image in connect().ours(f"{LABEL}=image"):
            found.setdefault(image.labels.get(f"{LABEL}.matrix", ""), set()).add(image.labels.get(f"{LABEL}.lock", ""))
        return found
    except BuilderError:
        return None


def as_text(rows: list[dict[str, Any]]) -> str:
    """The table for people."""
    if not rows:
        return "no matrices"
    lines = []
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        state = f"lock: {row['lock']}, image: {row['image'] or 'unknown'}"
        lines.append(f"{row['name']:<{width}}  {state}")
        indent = " " * (width + 2)
        lines += [f"{indent}{text}" for text in (row["summary"], row.get("problem", "")) if text]
        if row["stack"]:
            stack = ", ".join(f"{name} {version}" for name, version in row["stack"].items())
            lines.append(f"{indent}CUDA {row['cuda']}: {stack}")
    return "\n".join(lines)
