"""`builder lock`: resolve a matrix, or say what a lock would change."""

from __future__ import annotations

import contextlib
import re
from datetime import date
from pathlib import Path

from builder import base
from builder.display import note
from builder.errors import LockError, UsageError
from builder.files import write_atomic
from builder.lock import Artefact, Base, Lock, Resolver, drift, inputs_digest, lock_path, read_lock, write_lock
from builder.matrix import LoadedMatrix, Matrix, load, parse_matrix
from builder.osimage import lock_base
from builder.resolve import resolve
from builder.settings import Settings


def resolve_lock(loaded: LoadedMatrix, settings: Settings, os_base: Base) -> Lock:
    """The lock of a matrix on a base whose packages are known already."""
    return _lock(loaded.matrix, os_base, *resolve(loaded.matrix, settings))


def _lock(matrix: Matrix, os_base: Base, artefacts: list[Artefact], resolver: Resolver) -> Lock:
    return Lock(
        schema=1,
        matrix=matrix.name,
        inputs=inputs_digest(matrix),
        as_of=str(matrix.as_of),
        platform=matrix.platform,
        python=matrix.python,
        resolver=resolver,
        base=os_base,
        artefacts=tuple(artefacts),
    )


def make_lock(path: Path, settings: Settings, as_of: str | None = None) -> tuple[Lock, list[str]]:
    """Resolve, bootstrap the base, write the lock; return it and what changed against the old one.

    With `as_of` the matrix's date is set as well; the file is written only once that date has a resolution. A lock that
    is there and damaged is replaced, as its message tells the user to.
    """
    text = with_as_of(path, as_of) if as_of else None
    loaded = parse_matrix(text, path) if text else load(path)
    matrix = loaded.matrix
    note(f"resolving {matrix.name} as of {matrix.as_of} …")
    # The index first: it answers in seconds, and no bootstrap is wasted on a matrix that has no resolution.
    artefacts, resolver = resolve(matrix, settings)
    if matrix.base.kind == "archive":
        note(f"bootstrapping {matrix.base.distribution} {matrix.base.release} for its package list …")
    lock = _lock(matrix, lock_base(matrix, settings), artefacts, resolver)
    target = lock_path(path)
    old = None
    with contextlib.suppress(UsageError, LockError):
        old = read_lock(target)
    if text:
        write_atomic(path, text)
    write_lock(lock, target)
    return lock, drift(old, lock) if old else []


def check_lock(path: Path, settings: Settings) -> list[str]:
    """What drifted since the lock was made, one line each: the resolution, and the archive's OS packages.

    Raises `LockError` if there is no lock, or no resolution any more.
    """
    loaded = load(path)
    target = lock_path(path)
    old = read_lock(target)
    lines = []
    if old.inputs != inputs_digest(loaded.matrix):
        lines.append("the matrix was changed after it was locked")
    new_base = old.base
    if old.base.kind == "archive":
        packages = base.archive_versions(loaded.matrix, old.base, settings)
        new_base = old.base.model_copy(update={"packages": packages})
    new = resolve_lock(loaded, settings, new_base)
    lines += drift(old, new)
    if old.resolver != new.resolver:
        lines.append(f"uv {old.resolver.version} → {new.resolver.version}")
    return lines


def with_as_of(path: Path, day: str) -> str:
    """The matrix's text with another `as_of`, the rest as it is. Raises `UsageError`."""
    try:
        if date.fromisoformat(day).isoformat() != day:
            raise ValueError
    except ValueError:
        raise UsageError(f"`{day}` is not a date", because="`--as-of` takes YYYY-MM-DD") from None
    loaded = load(path)
    text, count = re.subn(r"^(as_of:[ \t]*)[^\s#]+", rf"\g<1>{day}", loaded.text, count=1, flags=re.MULTILINE)
    if count != 1:
        raise LockError("the matrix has no `as_of:` line of its own", where=str(path))
    return text
