"""Large members of wheels, read once and in order: out of a file, or as they come from an index. Nothing of them is kept.

A shared object of these wheels unpacks to a gigabyte and more, of which a few kilobytes are looked at. So a member is
fetched in windows, inflated piece by piece and compared with RECORD's sha256 on the way.
"""

from __future__ import annotations

import base64
import hashlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import IO

from builder.errors import UsageError
from builder.lock import Artefact
from builder.patches.releases import Releases
from builder.remote import PartialWheel, RangedFile

WINDOW = 2 * 1024 * 1024
"""Bytes of a range: 106 requests for the 222 MB that flash_ops of sgl-kernel 0.3.21 has compressed."""

AHEAD = 4
"""Windows that are fetched while one is inflated."""

PIECE = 1024 * 1024
"""Bytes that are inflated at a time, whatever a member claims to unpack to."""

FED = 64 * 1024
"""Bytes that are given to zlib at a time: what it does not use at once it copies."""

Report = Callable[[int], None]
"""Is told of compressed bytes as they are used."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")


class StreamedWheel(PartialWheel):
    """A wheel whose members can be streamed as well. ``windows`` gives the bytes of the file from one offset to another.

    ``remote`` says whether they come over the network.
    """

    def __init__(
        self,
        path: Path,
        file: IO[bytes] | RangedFile,
        fetch: Callable[[list[tuple[int, int]]], None],
        windows: Callable[[int, int], Iterator[bytes]],
    ) -> None:
        super().__init__(path, file, fetch)
        self.remote = isinstance(file, RangedFile)
        self._windows = windows

    def packed_size(self, member: str) -> int:
        """Bytes of a member as it is in the wheel. Raises `KeyError`."""
        return self._infos[member].compress_size

    def stream(self, member: str, report: Report = lambda _: None) -> Iterator[bytes]:
        """The content of a member that RECORD has, in pieces; after the last one it has been compared with RECORD.

        Raises `KeyError`, `IntegrityError` for another content or a damaged wheel, and what the windows raise.
        """
        entry = self.entries[member]
        hashed = hashlib.sha256()
        size = 0
        try:
            for piece in self._inflated(member, report):
                size += len(piece)
                if size > entry.size:
                    break
                hashed.update(piece)
                yield piece
        except (zlib.error, ValueError, struct.error) as error:
            raise self._damaged(f"`{member}`: {error}") from error
        digest = base64.urlsafe_b64encode(hashed.digest()).rstrip(b"=").decode()
        if size != entry.size or f"sha256={digest}" != entry.digest:
            raise self._damaged(f"`{member}` is not the file that RECORD has the hash of")

    def _inflated(self, member: str, report: Report) -> Iterator[bytes]:
        info = self._infos[member]
        packed = _payload(self._windows(*self._span(member)), info.compress_size)
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("encrypted, or of another compression than deflate")
        if info.compress_type == zipfile.ZIP_STORED:
            for piece in packed:
                report(len(piece))
                yield piece
            return
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        for piece in packed:
            report(len(piece))
            while piece and not inflate.eof:
                yield inflate.decompress(piece, PIECE)
                piece = inflate.unconsumed_tail
        yield inflate.flush()
        if not inflate.eof:
            raise ValueError("it ends too soon")


def _payload(windows: Iterator[bytes], size: int) -> Iterator[bytes]:
    """What is behind a member's local header, in pieces that zlib can be given. Raises `ValueError`."""
    head = b""
    while len(head) < _LOCAL_HEADER.size and (more := next(windows, b"")):
        head += more
    if len(head) < _LOCAL_HEADER.size or head[:4] != b"PK\x03\x04":
        raise ValueError("it has no header where the directory says")
    _, name, extra = _LOCAL_HEADER.unpack_from(head)
    skip = _LOCAL_HEADER.size + name + extra
    for window in chain([head], windows):
        payload = memoryview(window)[skip:][:size]
        skip = max(0, skip - len(window))
        size -= len(payload)
        for start in range(0, len(payload), FED):
            yield bytes(payload[start : start + FED])
    if size:
        raise ValueError("it ends too soon")


def open_file(path: Path) -> StreamedWheel:
    """A wheel on this machine. Raises as `PartialWheel`, and `UsageError` for a file that cannot be read."""
    try:
        archive = path.open("rb")
    except OSError as error:
        raise UsageError(f"`{path.name}` cannot be read", where=str(path), because=str(error)) from error

    def windows(start: int, end: int) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(start)
            while start < end and (piece := file.read(min(PIECE, end - start))):
                start += len(piece)
                yield piece

    return StreamedWheel(path, archive, lambda _: None, windows)


class _WindowedFile(RangedFile):
    """A remote file of which parts can be read without being kept."""

    def windows(self, start: int, end: int) -> Iterator[bytes]:
        """The bytes from ``start`` to ``end``, some windows fetched ahead. Raises as `RangedFile`."""
        spans = iter([(at, min(at + WINDOW, end)) for at in range(start, end, WINDOW)])
        self._url  # noqa: B018 - once, before several threads want it
        pool = ThreadPoolExecutor(AHEAD)
        try:
            coming = [pool.submit(self._part, *span) for span in islice(spans, AHEAD)]
            while coming:
                data = _result(coming.pop(0))
                self.requests += 1
                self.bytes_read += len(data)
                coming += [pool.submit(self._part, *span) for span in islice(spans, 1)]
                yield data
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[tuple[int, bytes]]) -> bytes:
    return future.result()[1]


class StreamedReleases(Releases):
    """`Releases` whose wheels can be streamed."""

    def release(self, name: str, version: str) -> StreamedWheel:
        """As `Releases.release`."""
        wheel = super().release(name, version)
        # From a server without byte ranges the whole wheel came.
        return wheel if isinstance(wheel, StreamedWheel) else open_file(wheel.path)

    def _local(self, path: Path) -> PartialWheel:
        self._opened.append((path.stat().st_size, lambda: (0, 0)))
        return open_file(path)

    def _ranged(self, wanted: Artefact, url: Callable[[], str]) -> PartialWheel:
        folder = self._settings.cache / "ranges" / wanted.sha256[:2] / wanted.sha256
        file = _WindowedFile(folder, wanted.file, wanted.sha256, self._client, url, wanted.size)
        self._opened.append((file.size, lambda: (file.bytes_read, file.requests)))
        return StreamedWheel(Path(wanted.file), file, file.fetch, file.windows)
