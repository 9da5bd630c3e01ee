"""Writing files so that nothing is ever half-written, and canonical JSON."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes | str, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write `data` beside `path` and rename: readers see the old content or the new, never a part.

    Without ``durable`` that does not hold if the machine stops: for what is checked when it is read, and can be had again.

    Raises `OSError` (a full disk among them) with the old file untouched and nothing left behind.
    """
    raw = data.encode() if isinstance(data, str) else data
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(mode)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_private(path: Path, text: str) -> Path:
    """Write a file that only we can read, from its first byte on."""
    path.touch(mode=0o600)
    path.write_text(text, encoding="utf-8")
    return path


def canonical_json(value: object) -> bytes:
    """One spelling for one value: sorted keys, no spaces, UTF-8. Digests of locks are over these bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pretty_size(count: float) -> str:
    """Bytes for people, in powers of ten as registries and disks count: `4.64 GB`."""
    unit = "B"
    for larger in ("kB", "MB", "GB"):
        # From 999.5 on, three digits would round to 1000.
        if abs(count) < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 999.5 else f"{count:.3g} {unit}"
