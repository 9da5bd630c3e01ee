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
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from builder import parts, zipdir
from builder.cache import not_writable
from builder.deflate import DeflateError
from builder.elf_image import ElfError
from builder.elf_view import Absent, OutOfReachError, read_partial
from builder.errors import IntegrityError
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.nativefacts import FORMAT, ElfFacts
from builder.remote import RangedFile, Span
from builder.smoke.tree import is_shared_object

# No member has this name. 2: what is called `.so.1.1.1k` is one of them.
_LISTING = "names, 2"
_LOCAL_HEADER, _SPARE = 30, 256
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
            start, found = zipdir.members(file, b".so")
        except _DAMAGED as error:
            raise self._damaged(str(error)) from error
        infos: dict[str, zipfile.ZipInfo] = {}
        for info in found:
            if is_shared_object(info.filename) and infos.setdefault(info.filename, info) is not info:
                raise self._damaged(f"it has `{info.filename}` twice")
        if self._said(_LISTING) is None:
            self._write(_LISTING, {"names": list(infos)})
        return _Directory(file, fetch, start, infos)

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
        kind = parts.Stored if info.compress_type == zipfile.ZIP_STORED else parts.Deflated
        part = kind(info, start, head, tail)
        facts, trouble = None, ""
        while facts is None and not trouble:
            try:
                part.take(self._bytes)
                facts = read_partial(part, info.filename.rpartition("/")[2])
            except Absent as absent:
                if not part.settle():
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
        small = info.compress_size <= max(parts.SMALL, parts.HEAD + parts.TAIL)
        head = info.compress_size if small else parts.HEAD
        stored = info.compress_type == zipfile.ZIP_STORED
        tail = 0 if small or stored else parts.TAIL
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
            packed = zlib.compress(canonical_json({"format": FORMAT, "of": name, **said}), 1)
            write_atomic(place, packed, durable=False)
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
