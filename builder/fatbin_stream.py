"""Fat binaries of a file that comes once and in order: what `fatbin.scan` finds, while the file passes by.

Where an ELF file's sections are is known at its end only. So a container is found by what it starts with, wherever it is,
and at the end those in the sections have to fill these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from builder.fatbin import (
    MAX_IMAGES,
    START,
    Container,
    FatbinError,
    Image,
    Room,
    Section,
    TooManyError,
    is_bare,
    read_container,
    section_table,
    sections_of_table,
    with_code,
)

KEPT = 1 << 20
"""Bytes before the section table that are kept of a stream: the sections' names, which linkers and patchelf put there."""


def scan_stream(chunks: Iterable[bytes]) -> tuple[Container, ...]:
    """Every container of a file, in order, without kernels; ``chunks`` are read to their end.

    Raises FatbinError, and what ``chunks`` raise.
    """
    stream = _Stream(chunks)
    head = stream.take(0, 64)
    if is_bare(head):
        walk = _walk(stream, 0)
        return _filling(Section("", 0, stream.end), walk)
    table = section_table(head)
    stream.keep(max(0, table.at - KEPT), table.end)
    walk = _walk(stream, len(head))
    named = sections_of_table(table, stream.kept, stream.end)
    return tuple(one for section in with_code(named, stream.end) for one in _filling(section, walk))


class _Stream:
    """A file that comes once and in order, some of it in memory: what is behind ``at``, and what is to be kept."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._buffer, self._skipped = b"", 0
        self._start = 0  # of the buffer, in the file
        self._keep = (0, 0)
        self._kept = bytearray()
        self._ended = False

    @property
    def at(self) -> int:
        """Where in the file we are: what is before cannot be had any more."""
        return self._start + self._skipped

    @property
    def end(self) -> int:
        """Where the file ends, once it did; else where what has come ends."""
        return self._start + len(self._buffer)

    def keep(self, start: int, end: int) -> None:
        """Keep these bytes when they come. Before anything else has come than the file's head."""
        self._keep = (start, end)
        self._remember(self._start, self._buffer)

    def kept(self, at: int, size: int) -> bytes:
        """Some of the bytes that were kept."""
        start = at - self._keep[0]
        return bytes(self._kept[start : start + size]) if start >= 0 else b""

    def _remember(self, at: int, chunk: bytes) -> None:
        start, end = self._keep
        if at < end and at + len(chunk) > start:
            self._kept += chunk[max(0, start - at) : end - at]

    def _more(self) -> bool:
        """Have the next chunk; False at the end."""
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return False
        self._remember(self.end, chunk)
        rest = self._buffer[self._skipped :]
        self._start, self._skipped, self._buffer = self.at, 0, rest + chunk if rest else chunk
        return True

    def _go(self, at: int) -> None:
        while at > self.end and not self._ended:
            self._skipped = len(self._buffer)
            self._more()
        self._skipped = max(self._skipped, min(at - self._start, len(self._buffer)))

    def take(self, at: int, size: int) -> bytes:
        """The bytes at ``at``, which is not before where we are; then we are there. A few thousand at most."""
        self._go(at)
        while self.end < at + size and self._more():
            pass
        return self._buffer[at - self._start : at - self._start + size]

    def find(self, at: int) -> tuple[int | None, int | None, int]:
        """The next place from ``at`` on that starts like a container; None at the end. We are there then.

        And of the bytes up to it where the first is that is not zero (None: nowhere), and the end of the last.
        """
        first, last = None, 0
        self._go(at)
        while True:
            hit = self._buffer.find(START, self._skipped)
            # What may be the start of one is looked at again with what follows.
            behind = hit if hit >= 0 else len(self._buffer) - (0 if self._ended else len(START) - 1)
            piece = self._buffer[self._skipped : max(behind, self._skipped)]
            if rest := piece.lstrip(b"\0"):
                first = self.at + len(piece) - len(rest) if first is None else first
                last = self.at + len(piece.rstrip(b"\0"))
            self._skipped += len(piece)
            if hit >= 0:
                return self.at, first, last
            if self._ended:
                return None, first, last
            self._more()


class _Span(NamedTuple):
    """A container in a stream: where it is in the file, and what is in it."""

    start: int
    end: int
    images: tuple[Image, ...]


class _Walk(NamedTuple):
    """What a stream has: containers, and the gap before each and behind the last one. Of a gap, where the first byte is that
    is not zero (None: nowhere), and the end of the last one. ``failed`` is why what starts like a container is none."""

    spans: list[_Span]
    gaps: list[tuple[int | None, int]]
    failed: dict[int, FatbinError]


def _walk(stream: _Stream, at: int) -> _Walk:
    """Every container from ``at`` to the end of a stream, wherever it lies."""
    walk = _Walk([], [], {})
    room = Room()
    nowhere = Section("", 0, 0)
    first: int | None = None if at == 0 else 0
    last = at
    while True:
        hit, low, high = stream.find(at)
        if low is not None:
            first, last = low if first is None else first, high
        if hit is None:
            walk.gaps.append((first, last))
            return walk
        try:
            at, images = read_container(stream.take, nowhere, hit, None, room)
        except TooManyError:
            raise
        except FatbinError as error:
            # Code may hold these bytes, to compare with.
            if len(walk.failed) < MAX_IMAGES:
                walk.failed[hit] = error
            first = hit if first is None else first
            at = last = max(stream.at, hit + len(START))
            continue
        walk.spans.append(_Span(hit, at, tuple(found.image for found in images)))
        walk.gaps.append((first, last))
        first, last = None, 0


def _filling(section: Section, walk: _Walk) -> tuple[Container, ...]:
    """The containers in a section, which have nothing before, between and behind them but zeros. Raises FatbinError."""
    end = section.at + section.size
    inside = [at for at, span in enumerate(walk.spans) if section.at <= span.start < end]
    clear = section.at  # up to where all is explained
    for at in inside:
        span, (first, last) = walk.spans[at], walk.gaps[at]
        # The gap before the first one reaches beyond the section.
        if (last > clear if at == inside[0] else first is not None) or span.end > end:
            break
        clear = span.end
    else:
        first = walk.gaps[inside[-1] + 1][0] if inside else section.at
        if not section.size or (first is None or first >= end):
            return tuple(
                Container(section.name, walk.spans[at].start - section.at, walk.spans[at].images) for at in inside
            )
    failed = next((error for at, error in sorted(walk.failed.items()) if section.at <= at < end), None)
    where = f"at {clear - section.at:#x} of `{section.name}`" if section.name else f"at {clear:#x}"
    raise FatbinError(f"no fat binary of a known layout {where}" + (f": {failed}" if failed else ""))
