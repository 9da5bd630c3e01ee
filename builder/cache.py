"""Wheels on this machine, by sha256: `CACHE/wheels/ab/abcd…/FILE`. Safe with several builders at once.

A file gets its name by a rename, after its bytes were checked. It is checked again whenever it is used: a stamp would
save a second a gigabyte in a build of minutes, and could not tell a file that a disk damaged later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from builder.errors import BuilderError, BuildError, UsageError
from builder.files import sha256_hex
from builder.settings import Settings

CHUNK = 1024 * 1024
"""Bytes read, hashed and written at a time."""

WAIT = 0.2
"""Seconds between two looks whether another builder is done with a file."""


def note(text: str) -> None:
    """Say something to whoever waits; the display takes a while to import, and as a rule nothing is said."""
    from builder.display import note as shown

    shown(text)


def wheel_path(settings: Settings, sha256: str, file: str) -> Path:
    """Where the wheel `file` with this sha256 is, once it is there."""
    return settings.cache / "wheels" / sha256[:2] / sha256 / file


def file_sha256(path: Path) -> str:
    """The sha256 of a file. Raises `OSError`."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_wheel(settings: Settings, sha256: str, file: str) -> Path | None:
    """The wheel in the cache, its bytes checked; one that was damaged since is removed."""
    path = wheel_path(settings, sha256, file)
    try:
        if file_sha256(path) == sha256:
            return path
        note(f"{path} was damaged since it was fetched: it is removed")
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise not_writable(path, error) from error
    return None


class Stopped(Exception):
    """The work was called off, by an interrupt as a rule; nobody is told of it."""


class Incoming:
    """A file that is being fetched, held for this process alone. ``path`` has no name that anybody would trust."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file = path, file

    def accept(self, target: Path) -> Path:
        """Give it its name, once its bytes are on the disk. The caller has checked them."""
        os.fsync(self.file.fileno())
        os.fchmod(self.file.fileno(), 0o644)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.path.replace(target)
        return target

    def drop(self) -> None:
        """Remove it: it is of no use to the next run."""
        self.path.unlink(missing_ok=True)


@contextlib.contextmanager
def incoming(settings: Settings, key: str, title: str, stop: threading.Event) -> Iterator[Incoming]:
    """The place to fetch what `key` names, with what an interrupted run left there already.

    Of several builders that want the same file one fetches, the others wait: they would fetch gigabytes twice. Raises
    `BuilderError` if the cache cannot be written; an empty file is not left behind.
    """
    path = settings.cache / "wheels" / "incoming" / f"{sha256_hex(key.encode())[:32]}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path, file = _hold(path, title, stop)
    except OSError as error:
        raise not_writable(path, error) from error
    with file:
        try:
            yield Incoming(path, file)
        finally:
            with contextlib.suppress(OSError):
                if _is(path, file) and not path.stat().st_size:
                    path.unlink()


def _hold(path: Path, title: str, stop: threading.Event) -> tuple[Path, FileIO]:
    told = False
    while True:
        file = os.fdopen(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "r+b", buffering=0
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            if not told:
                told = True
                note(f"waiting for another builder, which fetches {title} …")
            if stop.wait(WAIT):
                raise Stopped from None
            continue
        except OSError:
            # Some network file systems have no locks: a name of our own, then.
            file.close()
            own = path.with_suffix(f".{os.getpid()}.part")
            return own, own.open("w+b", buffering=0)
        # The other one may have given the file its name, or removed it, between our two calls.
        if _is(path, file):
            return path, file
        file.close()


def _is(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def not_writable(path: Path, error: OSError) -> BuilderError:
    """The error for a cache that cannot be written or read: a full disk, or anything else."""
    because = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BuildError(
            "the disk is full",
            where=str(path.parent),
            because=because,
            hint="free space: `builder prune --yes`; or keep files elsewhere: BUILDER_CACHE=DIR",
        )
    return UsageError(
        "the cache cannot be used", where=str(path), because=because, hint="keep files elsewhere: BUILDER_CACHE=DIR"
    )
