"""The tar file of a bundle: plain files with plain names, written with fixed headers, read with suspicion.

Python's tarfile reads what any tar program ever wrote, among it headers that announce gigabytes of names, links and paths
that lead elsewhere. A bundle needs none of it, so this reads one kind of member and refuses all else; nothing is unpacked.
"""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from builder.errors import IntegrityError
from builder.trust.layout import SMALL, FormError

BLOCK: Final = 512
CHUNK: Final = 1 << 20
MAX_MEMBERS: Final = 1000

_BLOB: Final = "blobs/sha256/"
_NAME: Final = re.compile(rb"(?:oci-layout|index\.json|manifest\.json|blobs/sha256/[0-9a-f]{64})")
_OCTAL: Final = re.compile(rb"[ ]*([0-7]{1,11})[\0 ]*")

Report = Callable[[int], None]
"""Is told of bytes as they pass."""


@dataclass(frozen=True)
class Member:
    """A file in the archive: where its bytes are, and how many."""

    name: str
    offset: int
    size: int


def header(name: str, size: int) -> bytes:
    """The header of a member: no time, no owner. GNU's form, for files of 8 GiB and more."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o644
    return info.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return b"\0" * (-size % BLOCK)


def members(file: IO[bytes], length: int) -> dict[str, Member]:
    """The members of an archive of `length` bytes by name, from its headers alone. Raises `FormError`."""
    found: dict[str, Member] = {}
    at = 0
    while True:
        file.seek(at)
        block = file.read(BLOCK)
        if len(block) < BLOCK:
            raise FormError(f"it ends in the middle, at byte {length:,}")
        if block == b"\0" * BLOCK:
            break
        member = _member(block, at + BLOCK)
        at = member.offset + member.size + len(padding(member.size))
        if at > length:
            raise FormError(f"it ends in the middle: `{member.name}` has {member.size:,} bytes, the file {length:,}")
        if member.name in found:
            raise FormError(f"it has `{member.name}` twice")
        if len(found) == MAX_MEMBERS:
            raise FormError(f"it has more than {MAX_MEMBERS} files")
        found[member.name] = member
    if length - at > 2 * BLOCK or file.read(BLOCK) != b"\0" * BLOCK:
        raise FormError(f"after its last file there is more: {length - at:,} bytes")
    return found


def _member(block: bytes, offset: int) -> Member:
    name = block[:100].rstrip(b"\0")
    if block[257:262] != b"ustar" or _checksum(block) != _number(block[148:156]):
        raise FormError(f"at byte {offset - BLOCK:,} there is no tar header")
    shown = name.decode("ascii", "replace")[:100]
    if block[156:157] not in (b"0", b"\0") or block[157:257].strip(b"\0") or block[345:500].strip(b"\0"):
        raise FormError(f"`{shown}` is no plain file with a plain name")
    if not _NAME.fullmatch(name):
        raise FormError(f"it has a file that no bundle has: `{shown}`")
    return Member(name.decode(), offset, _number(block[124:136]))


def _checksum(block: bytes) -> int:
    return sum(block[:148]) + 8 * 32 + sum(block[156:])


def _number(data: bytes) -> int:
    if data[:1] == b"\x80":
        # GNU's binary form.
        return int.from_bytes(data[1:], "big")
    match = _OCTAL.fullmatch(data)
    if match is None:
        raise FormError("a tar header has a number that is none")
    return int(match[1], 8)


class Archive:
    """A bundle's file, open for reading. Raises `IntegrityError` where it is none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self.length = os.fstat(self._file.fileno()).st_size
            self.members: Mapping[str, Member] = members(self._file, self.length)
        except FormError as error:
            self._file.close()
            raise damaged(path, str(error)) from error
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def small(self, name: str) -> bytes:
        """A small member. Raises `FormError` where it is missing, or larger than what is small."""
        member = self._member(name)
        if member.size > SMALL:
            raise FormError(f"`{name}` has {member.size:,} bytes, more than {SMALL:,}")
        return b"".join(self.chunks(name))

    def blob(self, digest: str, limit: int = SMALL) -> bytes:
        """A blob of at most `limit` bytes, its digest checked. Raises `FormError`."""
        name = _BLOB + digest.removeprefix("sha256:")
        if self._member(name).size > limit:
            raise FormError(f"the blob {digest} has more than {limit:,} bytes")
        return b"".join(self.hashed(digest))

    def hashed(self, digest: str) -> Iterator[bytes]:
        """The bytes of a blob; raises `FormError` at the end where they are not what the digest says."""
        name = _BLOB + digest.removeprefix("sha256:")
        found = hashlib.sha256()
        for chunk in self.chunks(name):
            found.update(chunk)
            yield chunk
        if f"sha256:{found.hexdigest()}" != digest:
            raise FormError(f"a blob is not what its digest says: {digest} has sha256:{found.hexdigest()}")

    def size(self, digest: str) -> int:
        """The bytes of a blob. Raises `FormError` where there is none."""
        return self._member(_BLOB + digest.removeprefix("sha256:")).size

    def chunks(self, name: str) -> Iterator[bytes]:
        """The bytes of a member, a megabyte at a time. Raises `FormError` where the file ends before."""
        member = self._member(name)
        left, at = member.size, member.offset
        while left:
            self._file.seek(at)
            chunk = self._file.read(min(CHUNK, left))
            if not chunk:
                raise FormError(f"it ends in the middle of `{name}`")
            left -= len(chunk)
            at += len(chunk)
            yield chunk

    def _member(self, name: str) -> Member:
        if name not in self.members:
            raise FormError(f"it has no `{name}`")
        return self.members[name]


def damaged(path: Path, because: str) -> IntegrityError:
    """The error for a file that is no bundle, or not whole."""
    return IntegrityError(
        "the bundle cannot be used",
        where=str(path),
        because=because,
        hint="copy it again, or make it again: `builder bundle MATRIX -o FILE`",
    )


def blob_name(digest: str) -> str:
    """Where a blob is in a layout."""
    return _BLOB + digest.removeprefix("sha256:")
