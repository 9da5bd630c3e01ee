"""Parts of a member of a wheel: as much of its two ends as its facts need, and what it costs to have more.

Of a member that is compressed both ends are known as far as they were fetched: see `builder.members`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence

from builder.deflate import MAX_INFLATED, DeflateError, Prefix, Tail, recover_tail
from builder.elf_image import Image
from builder.elf_view import Absent, OutOfReachError
from builder.exclusion import settle
from builder.remote import Span

HEAD, TAIL = 16 * 1024, 64 * 1024
"""Compressed bytes of a member's beginning and end that are fetched first."""

UNCLEAR = 320 * 1024
"""Compressed bytes of an end in which bytes that are needed stay unknown, before a member is rather taken as a whole."""

STEP = 64 * 1024
"""Compressed bytes by which the end grows at least: blocks of the wheels that were looked at have 20 to 60 KiB."""

NAMES_RATIO = 12
"""Bytes of symbols and their names in one compressed byte: 9 to 13 in the largest tables looked at, whatever is before them."""

SMALL = 256 * 1024
"""Compressed bytes of a member that is rather fetched at once than in parts."""

WHOLE, WHOLE_INFLATED = 12 << 20, 256 << 20
"""Compressed bytes and bytes of the largest member that is taken as a whole where parts of it do not do.

libtorch_python.so is one, with 9 MB: the names of its own symbol table are before its dynamic strings, so that these
refer to what is megabytes before them.
"""

MOST_HEAD, MOST_TAIL = 8 << 20, 16 << 20
"""Compressed bytes at the two ends of a larger member that are fetched before something is left uncertain."""

MOST_DYNAMIC = 2 << 20
"""Compressed bytes that are fetched for the dynamic table where the section table leads to all others."""

_PIECE, _SLACK = 65536, 65536

_Read = Callable[[int, int], bytes]


class Stored:
    """A member that is not compressed, as a `PartialSource`."""

    how = "parts"

    def __init__(self, info: zipfile.ZipInfo, start: int, head: int, tail: int) -> None:
        self.size, self._start = info.compress_size, start
        self._wanted: list[Span] = [(0, head)]
        self._here: list[tuple[int, bytes]] = []

    @property
    def looked_at(self) -> int:
        """Bytes that were read."""
        return sum(len(data) for _, data in self._here)

    def take(self, read: _Read) -> None:
        """Read what was wanted, and is in the wheel by now."""
        for start, end in self._wanted:
            self._here.append((start, read(self._start + start, end - start)))
        self._wanted = []

    def want(self, spans: Sequence[Span]) -> list[Span]:
        """The parts of the wheel that these parts (offset, length) of the member are in."""
        self._wanted = [(at, min(at + max(length, _SLACK), self.size)) for at, length in spans]
        return self.lacking()

    def want_whole(self) -> bool:
        """Whether the member can be had as a whole: no need, all of it is in reach."""
        return False

    def settle(self) -> bool:
        """Whether anything became known without more of it: no."""
        return False

    def lacking(self) -> list[Span]:
        """What `take` will read."""
        return [(self._start + start, self._start + end) for start, end in self._wanted]

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of the member. Raises `Absent`."""
        for start, data in self._here:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        raise Absent([(offset, length)])

    def reaches(self, offset: int, length: int) -> bool:
        """Always."""
        return True

    read_known = read


class Deflated:
    """A compressed member as a `PartialSource`: its beginning and its end, each as far as it was asked for."""

    def __init__(self, info: zipfile.ZipInfo, start: int, head: int, tail: int) -> None:
        self.size, self._packed, self._start = info.file_size, info.compress_size, start
        self._head = Prefix(self.size)
        self._tail: Tail | None = None
        # Compressed bytes at the two ends that are wanted, and those of the end that were searched for a block start.
        self._of_head, self._of_tail, self._searched = head, tail, 0
        self._goal = min(self.size, MAX_INFLATED)
        self._unclear = 0
        self._no_more = False
        # Where the dynamic table is, and the table, once `settle` has it; the end for which that was tried last.
        self._settled: tuple[int, bytes] | None = None
        self._tried: Tail | None = None

    @property
    def whole(self) -> bool:
        """Whether all of it is wanted."""
        return self._of_head >= self._packed

    @property
    def how(self) -> str:
        """As `Native.how`."""
        return "whole" if self.whole else "parts"

    @property
    def looked_at(self) -> int:
        """Compressed bytes that were fetched."""
        return min(self._packed, self._of_head + self._of_tail)

    def lacking(self) -> list[Span]:
        """What `take` will read."""
        end = self._start + self._packed
        spans = [(self._start + self._head.fed, self._start + self._of_head)]
        if self._of_tail > self._searched and not self.whole:
            spans.append((end - self._of_tail, end))
        return [span for span in spans if span[0] < span[1]]

    def take(self, read: _Read) -> None:
        """Inflate what was wanted, and is in the wheel by now. Raises `DeflateError`."""
        head = self._head
        while head.fed < self._of_head and (self.whole or len(head.data) < self._goal):
            head.feed(read(self._start + head.fed, min(_PIECE, self._of_head - head.fed)))
        if head.fed == self._packed and (not head.ended or len(head.data) != self.size):
            raise DeflateError(f"its {self._packed} bytes do not inflate to the {self.size} that are stated")
        if self._of_tail > self._searched and not self.whole:
            stream = read(self._start + self._packed - self._of_tail, self._of_tail)
            found = recover_tail(stream, self._of_tail - self._searched)
            if found is not None and len(found.data) > self.size:
                raise DeflateError(f"its end inflates to more than the {self.size} bytes that are stated")
            # Where the limit of what may be inflated was met, an earlier search may have led further back.
            if found is not None and (self._tail is None or len(found.data) > len(self._tail.data)):
                self._tail = found
            self._searched = self._of_tail

    def read(self, offset: int, length: int) -> bytes:
        """Certain bytes of the member. Raises `Absent`, or `OutOfReachError` where that would cost too much."""
        found = self._find(offset, length)
        if found is not None and (found[1] is None or not found[1].strip(b"\0")):
            return found[0]
        self._miss(offset, length)
        raise AssertionError

    def read_known(self, offset: int, length: int) -> bytes:
        """As `read`, but with `HOLE` for bytes that stay unknown."""
        try:
            return self.read(offset, length)
        except OutOfReachError:
            found = self._find(offset, length)
            if found is None or found[1] is None:
                raise
        # Unknown bytes are those in which zeros and 0xFF before the end came out: 0xFF in `unknown`.
        return (int.from_bytes(found[0], "little") | int.from_bytes(found[1], "little")).to_bytes(length, "little")

    def reaches(self, offset: int, length: int) -> bool:
        """Whether a part is at hand or worth fetching."""
        if (found := self._find(offset, length)) and (found[1] is None or not found[1].strip(b"\0")):
            return True
        if self._no_more:
            return False
        if self._packed <= WHOLE:
            return True
        if self._at_end(offset, length):
            return self._tail_for(offset) <= MOST_DYNAMIC
        return self._of_head + self._head_guess(offset + length) <= MOST_DYNAMIC

    def settle(self) -> bool:
        """Whether the unknown bytes of the dynamic table became known, since they can be nothing else."""
        tail = self._tail
        if tail is None or tail is self._tried or self._settled is not None:
            return False
        self._tried = tail
        try:
            image = Image(self)
            span = image.dynamic_span()
        except Absent:
            return False
        at = (span[0] if span is not None else 0) - (self.size - len(tail.data))
        if span is None or at < 0:
            return False
        end = at + span[1]
        table = settle(tail.data[at:end], tail.origins(at, end), image.end, self.size)
        self._settled = (span[0], table) if table is not None else None
        return self._settled is not None

    def _find(self, offset: int, length: int) -> tuple[bytes, bytes | None] | None:
        """Bytes and which of them are unknown (None: none), where they are at hand."""
        if self._settled is not None and (offset, length) == (self._settled[0], len(self._settled[1])):
            return self._settled[1], None
        if offset + length <= len(self._head.data):
            return bytes(self._head.data[offset : offset + length]), None
        if self._tail is None:
            return None
        at = offset - (self.size - len(self._tail.data))
        if at < 0:
            return None
        return self._tail.data[at : at + length], self._tail.unknown[at : at + length]

    def _miss(self, offset: int, length: int) -> None:
        if self._no_more:
            raise OutOfReachError(f"{length} bytes of it are not known for certain", offset)
        raise Absent([(offset, length)])

    def _at_end(self, offset: int, length: int) -> bool:
        """Whether fewer bytes lie between a part and the end that is known than between it and the beginning."""
        end = len(self._tail.data) if self._tail is not None else 0
        return max(self.size - offset - end, 0) < offset + length - len(self._head.data)

    def want(self, spans: Sequence[Span]) -> list[Span]:
        """The parts of the wheel that are worth fetching for these parts (offset, length) of the member."""
        head, tail = self._of_head, self._of_tail
        for offset, length in spans:
            if self._at_end(offset, length):
                tail = max(tail, self._tail_for(offset))
            else:
                head = max(head, self._head_for(offset + length))
        # An end that was reached and is still not clear: its names are repeated from before it.
        self._unclear += self._tail is not None and tail == self._of_tail + self._step()
        small = self._packed <= WHOLE and (head + tail > self._packed // 2 or (self._unclear > 2 and tail > UNCLEAR))
        if small and self.want_whole():
            return self.lacking()
        head, tail = min(head, MOST_HEAD, self._packed), min(tail, MOST_TAIL, self._packed)
        if head + tail >= self._packed and self.size <= WHOLE_INFLATED:
            head, tail = self._packed, 0
        if (head, tail) == (self._of_head, self._of_tail):
            self._no_more = True
            return []
        self._of_head, self._of_tail = head, tail
        return self.lacking()

    def want_whole(self) -> bool:
        """Want all of it; False where it is too large, or already here."""
        if self.whole or self._packed > WHOLE or self.size > WHOLE_INFLATED:
            return False
        self._of_head, self._of_tail, self._no_more = self._packed, 0, False
        return True

    def _step(self) -> int:
        """How much further back to look: slowly at first, but not for ever."""
        return max(STEP, self._of_tail // (4 if self._of_tail < UNCLEAR else 2 if self._unclear < 6 else 1))

    def _tail_for(self, offset: int) -> int:
        """Compressed bytes at the end in which what is from ``offset`` on should be."""
        back = self.size - offset
        if self._tail is None or len(self._tail.data) >= back:
            # No block starts in what is here, or what is before it is needed: a block further back.
            return self._of_tail + self._step()
        used = self._of_tail - self._tail.start // 8
        return max(self._of_tail + STEP, used * (back + _SLACK) * 11 // (10 * len(self._tail.data)) + STEP)

    def _head_for(self, end: int) -> int:
        """Compressed bytes at the beginning in which what is before ``end`` should be."""
        self._goal = max(self._goal, end)
        names = (end - len(self._head.data)) // NAMES_RATIO + HEAD // 4
        return self._of_head + max(min(self._head_guess(end), names, 3 * self._of_head), self._of_head // 4)

    def _head_guess(self, end: int) -> int:
        """Compressed bytes from the beginning that is here to ``end``, if they are compressed as those before."""
        here = max(len(self._head.data), 1)
        return self._head.fed * (end - here) // here
