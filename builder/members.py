"""Native members of a wheel, read without the wheel: both ends of each, and no more of it than its facts need.

A shared object in a wheel is one deflate stream. What a link verdict needs lies at its two ends (`builder.elf_view`):
the beginning is inflated as far as it is asked for, the end is recovered without what is before it (`builder.deflate`),
and where that leaves a byte unknown that is needed, more is fetched, or the member as a whole if it is not too large.
Facts are kept by the wheel's sha256 and the member's name, so a second time costs nothing.

Parts of a member cannot be compared with its hash in RECORD: they are as trustworthy as the connection (TLS) and the
index that they came from. Names that are exported agree with the hashes that the linker left for them.
"""

from __future__ import annotations

import json
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from builder.cache import not_writable
from builder.deflate import MAX_INFLATED, DeflateError, Prefix, Tail, recover_tail
from builder.elf import ElfError
from builder.elf_view import Absent, OutOfReachError, read_partial
from builder.errors import IntegrityError
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.nativefacts import FORMAT, ElfFacts
from builder.remote import RangedFile, Span
from builder.smoke.tree import is_shared_object

HEAD, TAIL = 16 * 1024, 128 * 1024
"""Compressed bytes of a member's beginning and end that are fetched first."""

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

# No member has this name.
_LISTING = ""
_LOCAL_HEADER, _PIECE, _SLACK, _SPARE = 30, 65536, 65536, 256
# What `zipfile` raises on a file that is no wheel.
_DAMAGED = (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, ValueError, KeyError)

Progress = Callable[[int, int, int], None]
"""Called with the members that are read, those that were asked for, and the compressed bytes that were looked at."""


@dataclass(frozen=True)
class Native:
    """A native member; ``facts`` is None where it is no sound ELF64 file, and ``trouble`` says why.

    ``how`` is `kept` (from an earlier run), `parts` or `whole`; ``looked_at`` counts its compressed bytes, of ``packed``.
    """

    member: str
    facts: ElfFacts | None
    trouble: str
    how: str
    packed: int
    looked_at: int


_Steps = Generator[list[Span], None, Native]
"""The reading of one member: yields the parts of the wheel that have to be here next."""


Opened = tuple[IO[bytes] | RangedFile, Callable[[list[Span]], None]]
"""A wheel, and what is told of the parts of it that will be read next."""


@dataclass(frozen=True)
class _Directory:
    """An open wheel: its native members, and where its directory starts."""

    file: IO[bytes] | RangedFile
    fetch: Callable[[list[Span]], None]
    start: int
    infos: dict[str, zipfile.ZipInfo]


class Members:
    """The native members of one wheel. Raises `IntegrityError` for a damaged wheel, and what ``fetch`` raises.

    ``fetch`` is told of the parts of ``file`` that will be read next. ``cache`` is the folder in which facts of the
    wheel with this ``sha256`` are kept, None for nowhere. Several threads may read; they take turns.
    """

    def __init__(
        self,
        name: str,
        sha256: str,
        file: IO[bytes] | RangedFile,
        fetch: Callable[[list[Span]], None],
        cache: Path | None,
    ) -> None:
        self._prepare(name, sha256, lambda: (file, fetch), cache)
        self.names: tuple[str, ...] = tuple(self._directory.infos)
        """The members called `x.so`, `x.so.12` and the like, in the wheel's order."""

    @classmethod
    def lazy(cls, name: str, sha256: str, opened: Callable[[], Opened], cache: Path | None) -> Members:
        """The same for a wheel that is only opened if something of it was not kept by an earlier run."""
        made = cls.__new__(cls)
        made._prepare(name, sha256, opened, cache)
        kept = made._said(_LISTING)
        if kept is not None and isinstance(kept.get("names"), list) and all(isinstance(n, str) for n in kept["names"]):
            made.names = tuple(kept["names"])
        else:
            made.names = tuple(made._directory.infos)
        return made

    def _prepare(self, name: str, sha256: str, opened: Callable[[], Opened], cache: Path | None) -> None:
        self._name, self._opened, self._lock = name, opened, threading.Lock()
        self._folder = cache / "native" / sha256[:2] / sha256 if cache is not None else None

    @cached_property
    def _directory(self) -> _Directory:
        file, fetch = self._opened()
        try:
            archive = zipfile.ZipFile(file)
        except _DAMAGED as error:
            raise self._damaged(str(error)) from error
        infos: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if is_shared_object(info.filename) and infos.setdefault(info.filename, info) is not info:
                raise self._damaged(f"it has `{info.filename}` twice")
        if self._said(_LISTING) is None:
            self._write(_LISTING, {"names": list(infos)})
        return _Directory(file, fetch, archive.start_dir, infos)

    def read(self, names: Iterable[str] | None = None, progress: Progress = lambda *_: None) -> dict[str, Native]:
        """Read these members (or all), several at once. Raises `KeyError` for one that is not in `names`."""
        wanted = list(dict.fromkeys(self.names if names is None else names))
        if unknown := set(wanted) - set(self.names):
            raise KeyError(min(unknown))
        with self._lock:
            done = {name: kept for name in wanted if (kept := self._kept(name)) is not None}
            progress(len(done), len(wanted), 0)
            self._read([name for name in wanted if name not in done], done, len(wanted), progress)
        return {name: done[name] for name in wanted}

    def _read(self, lacking: list[str], done: dict[str, Native], count: int, progress: Progress) -> None:
        # A file that a wheel has several times (`libmscclpp.so*`) is read once.
        first: dict[tuple[int, int, int], str] = {}
        again: dict[str, str] = {}
        for name in lacking:
            info = self._directory.infos[name]
            other = first.setdefault((info.CRC, info.file_size, info.compress_size), name)
            if other != name:
                again[name] = other
        active = {name: self._steps(self._directory.infos[name]) for name in lacking if name not in again}
        looked_at = 0
        while active:
            # What all of them lack is fetched together.
            spans: list[Span] = []
            for name, steps in list(active.items()):
                try:
                    spans += next(steps)
                except StopIteration as stop:
                    done[name] = stop.value
                    looked_at += done[name].looked_at
                    del active[name]
                    self._keep(done[name])
                    progress(len(done), count, looked_at)
            if spans:
                self._directory.fetch(spans)
        for name, other in again.items():
            done[name] = replace(done[other], member=name)
            self._keep(done[name])
            progress(len(done), count, looked_at)

    def _steps(self, info: zipfile.ZipInfo) -> _Steps:
        """Read one member."""
        start, head, tail = yield from self._begin(info)
        kind = _Stored if info.compress_type == zipfile.ZIP_STORED else _Deflated
        part = kind(info, start, head, tail)
        facts, trouble = None, ""
        while facts is None and not trouble:
            try:
                part.take(self._bytes)
                facts = read_partial(part, info.filename.rpartition("/")[2])
            except Absent as absent:
                yield part.want(absent.spans)
            except OutOfReachError as error:
                if not part.want_whole():
                    trouble = f"cannot be read in parts, and is too large to be read as a whole: {error}"
                else:
                    yield part.lacking()
            except (ElfError, DeflateError) as error:
                trouble = str(error)
        return Native(info.filename, facts, trouble, part.how, info.compress_size, part.looked_at)

    def _begin(self, info: zipfile.ZipInfo) -> Generator[list[Span], None, tuple[int, int, int]]:
        """Where a member's data starts in the wheel, and how much of its beginning and end is here."""
        if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise self._damaged(f"`{info.filename}` is encrypted, or compressed in a way that wheels do not use")
        small = info.compress_size <= max(SMALL, HEAD + TAIL)
        head = info.compress_size if small else HEAD
        stored = info.compress_type == zipfile.ZIP_STORED
        tail = 0 if small or stored else TAIL
        # The header before the data repeats the name; its extra fields may be others than the directory's.
        header = _LOCAL_HEADER + len(info.filename) + len(info.extra)
        guess = info.header_offset + header
        end = guess + info.compress_size
        limit = self._directory.start
        if info.header_offset < 0 or end > limit or (stored and info.file_size != info.compress_size):
            raise self._damaged(f"`{info.filename}` cannot be where the directory says")
        spans = [(info.header_offset, min(guess + head + _SPARE, limit))]
        if tail:
            spans.append((end - tail, min(end + _SPARE, limit)))
        yield spans
        fields = self._bytes(info.header_offset, _LOCAL_HEADER)
        if fields[:4] != b"PK\x03\x04":
            raise self._damaged(f"`{info.filename}` cannot be where the directory says")
        start = info.header_offset + _LOCAL_HEADER + sum(struct.unpack_from("<HH", fields, 26))
        if start + info.compress_size > limit:
            raise self._damaged(f"`{info.filename}` cannot be where the directory says")
        return start, head, tail

    def _bytes(self, start: int, length: int) -> bytes:
        file = self._directory.file
        file.seek(start)
        data = file.read(length)
        if data is None or len(data) != length:
            raise self._damaged(f"it ends before byte {start + length:,}")
        return data

    def _damaged(self, because: str) -> IntegrityError:
        return IntegrityError(f"`{self._name}` is a damaged wheel", because=because)

    # What is kept.

    def _place(self, name: str) -> Path | None:
        return self._folder / f"{sha256_hex(name.encode())[:32]}.json.z" if self._folder is not None else None

    def _said(self, name: str) -> dict[str, Any] | None:
        """What an earlier run wrote under this name; None where there is nothing, or nothing that can be used."""
        place = self._place(name)
        if place is None:
            return None
        try:
            said = json.loads(zlib.decompress(place.read_bytes()))
        except (OSError, ValueError, zlib.error):
            # Not there, damaged since, or not to be read: what was kept is of use, and never needed.
            return None
        return said if isinstance(said, dict) and (said.get("format"), said.get("of")) == (FORMAT, name) else None

    def _write(self, name: str, said: dict[str, Any]) -> None:
        place = self._place(name)
        if place is None:
            return
        try:
            write_atomic(place, zlib.compress(canonical_json({"format": FORMAT, "of": name, **said}), 1))
        except OSError as error:
            raise not_writable(place, error) from error

    def _kept(self, name: str) -> Native | None:
        said = self._said(name)
        if said is None:
            return None
        try:
            facts = ElfFacts.from_json(said["facts"]) if said["facts"] is not None else None
            return Native(name, facts, str(said["trouble"]), "kept", int(said["packed"]), 0)
        except (ValueError, KeyError, TypeError):
            return None

    def _keep(self, native: Native) -> None:
        facts = native.facts.as_json() if native.facts is not None else None
        self._write(native.member, {"facts": facts, "trouble": native.trouble, "packed": native.packed})


_Read = Callable[[int, int], bytes]


class _Stored:
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


class _Deflated:
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

    def _find(self, offset: int, length: int) -> tuple[bytes, bytes | None] | None:
        """Bytes and which of them are unknown (None: none), where they are at hand."""
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
        small = self._packed <= WHOLE and (head + tail > self._packed // 2 or self._unclear > 1)
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
        return max(TAIL, self._of_tail // (2 if self._unclear < 4 else 1))

    def _tail_for(self, offset: int) -> int:
        """Compressed bytes at the end in which what is from ``offset`` on should be."""
        back = self.size - offset
        if self._tail is None or len(self._tail.data) >= back:
            # No block starts in what is here, or what is before it is needed: a block further back.
            return self._of_tail + self._step()
        used = self._of_tail - self._tail.start // 8
        return max(self._of_tail + TAIL, used * (back + _SLACK) * 11 // (10 * len(self._tail.data)) + TAIL)

    def _head_for(self, end: int) -> int:
        """Compressed bytes at the beginning in which what is before ``end`` should be."""
        self._goal = max(self._goal, end)
        return self._of_head + min(max(self._head_guess(end), self._of_head // 2), 3 * self._of_head)

    def _head_guess(self, end: int) -> int:
        """Compressed bytes from the beginning that is here to ``end``, if they are compressed as those before."""
        here = max(len(self._head.data), 1)
        return self._head.fed * (end - here) // here
