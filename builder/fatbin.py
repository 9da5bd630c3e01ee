"""Fat binaries: which GPU images an ELF file has, and how large the kernels in them are.

Standard library only, Python 3.9 or newer: this file is copied into images and runs there. Headers are never compressed,
so that what there is can be told without unpacking anything: `scan_file`, `scan` and `scan_stream` read headers alone and
skip the rest, however large the file is. The kernels of an image that is compressed can be told where the system has
libzstd (gcc needs it as well): `read` and `read_file`, which take the whole file into memory.

The layout is not documented by NVIDIA; it was found by compiling each target with nvcc 13.0 and comparing
(shared/facts/abi.md, section C).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC, VERSION, ENTRY = 0xBA55ED50, 1, 0x0101
STUB = 384
"""Bytes of code up to which a kernel is taken for a stub: what is left of one whose body is guarded away for a target
(shared/facts/abi.md, section C)."""

MAX_IMAGES = 1 << 17
"""Containers and images that a file may have. libtorch_cuda of torch 2.11.0 has 2,789 images: far more are no compiler's."""

KEPT = 1 << 20
"""Bytes before the section table that are kept of a stream: the sections' names, which linkers and patchelf put there."""

Take = Callable[[int, int], bytes]
"""The bytes at an offset, that many; fewer where the file ends."""

_CONTAINER = struct.Struct("<IHHQ")
_START = struct.pack("<IHH", MAGIC, VERSION, _CONTAINER.size)
# kind, 0x0101, header size, stored size, compressed size, options, minor, major, arch, name offset and length, flags,
# zero, uncompressed size
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_PTX, _CUBIN = 1, 2
_LZ4, _ZSTD, _SUFFIX_A, _SUFFIX_F = 0x2000, 0x8000, 0x100000, 0x200000
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SHT_NULL, _SHT_NOBITS = 0, 8
# Bytes. The largest image of flashinfer's fused all-reduce has 30 MB: one that claims more than this is damaged or hostile.
_MAX_IMAGE = 1 << 30
# Bytes: a name is a path, as a rule.
_MAX_NAME = 4096
# Bytes: the names of all sections.
_MAX_NAMES = 1 << 26
# Bytes looked at in one go.
_PIECE = 1 << 16


class FatbinError(ValueError):
    """Not an ELF64 little-endian file, or a fat binary of another layout; the message says what and where."""


class _TooMany(FatbinError):
    """More images than a compiler makes."""


@dataclass(frozen=True)
class Image:
    """Code for one target in a container. ``target`` as nvcc writes it (`120a`); ``size`` in bytes, uncompressed.

    ``kind`` is `cubin`, `ptx`, or `kind-N` for one that is neither. ``kernels`` are the sizes of its functions' code in
    bytes by mangled name; None for PTX, where it cannot be unpacked, and where only headers were read. ``isa`` is the
    version of PTX (major, minor), None for all else; ``source`` what the compiler called it, nothing as a rule.
    """

    kind: str
    target: str
    size: int
    compression: str
    kernels: dict[str, int] | None
    isa: tuple[int, int] | None = None
    source: str = ""

    @property
    def name(self) -> str:
        """`sm_120a`, or `compute_120` for PTX."""
        return f"{_PREFIXES.get(self.kind, self.kind)}_{self.target}"

    @property
    def real(self) -> int | None:
        """Kernels that are more than a stub; None where that cannot be told."""
        return None if self.kernels is None else sum(size > STUB for size in self.kernels.values())


_PREFIXES = {"cubin": "sm", "ptx": "compute"}


@dataclass(frozen=True)
class Container:
    """The images of one compiled source; the driver takes one of them. ``offset`` in bytes, in its section.

    The section of a fat binary that is a file of its own has no name.
    """

    section: str
    offset: int
    images: tuple[Image, ...]


# --- the whole file, kernels and all ----------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str]) -> tuple[Container, ...]:
    """Every container of an ELF file, in order; none where it has no device code. Raises OSError or FatbinError."""
    return read(Path(path).read_bytes())


def read(data: bytes) -> tuple[Container, ...]:
    """Every container of an ELF file's bytes. Raises FatbinError."""

    def whole(found: _Found) -> Image:
        image = found.image
        if image.kind != "cubin":
            return image
        payload = data[found.at : found.at + found.size]
        return replace(image, kernels=_kernels(payload, image.compression, image.size))

    return _every(lambda at, size: data[at : at + size], len(data), whole)


def sections(data: bytes) -> list[tuple[str, bytes]]:
    """The sections of an ELF64 file that have bytes in it: names and contents. Raises FatbinError."""
    found = _sections(lambda at, size: data[at : at + size], len(data))
    return [(section.name, data[section.at : section.at + section.size]) for section in found]


# --- headers alone ----------------------------------------------------------------------------------------------------


def scan_file(path: str | os.PathLike[str]) -> tuple[Container, ...]:
    """Every container of a file, in order, without kernels. Raises OSError or FatbinError.

    By `pread`, and not mapped: a file that is cut off meanwhile is an error then and no signal.
    """
    with Path(path).open("rb", buffering=0) as file:
        handle = file.fileno()
        return scan(lambda at, size: os.pread(handle, size, at), os.fstat(handle).st_size)


def scan(take: Take, size: int) -> tuple[Container, ...]:
    """Every container of a file of ``size`` bytes that can be read anywhere, in order, without kernels. Raises FatbinError.

    Besides ELF files it knows a fat binary that is a file of its own (`nvcc --fatbin`).
    """
    return _every(take, size, lambda found: found.image)


def scan_stream(chunks: Iterable[bytes]) -> tuple[Container, ...]:
    """The same of a file that comes once and in order; ``chunks`` are read to their end.

    Where the sections are is known at the end only. So a container is found by what it starts with, wherever it is, and
    at the end those in the sections have to fill these. Raises FatbinError, and what ``chunks`` raise.
    """
    stream = _Stream(chunks)
    head = stream.take(0, 64)
    if _bare(head):
        walk = _walk(stream, 0)
        return _filling(_Section("", 0, stream.end), walk)
    table = _table(head)
    stream.keep(max(0, table.at - KEPT), table.end)
    walk = _walk(stream, len(head))
    named = _named(table, stream.kept, stream.end)
    return tuple(one for section in _with_code(named, stream.end) for one in _filling(section, walk))


# --- ELF --------------------------------------------------------------------------------------------------------------


class _Section(NamedTuple):
    """A section: its name, where it is in the file, its size in bytes."""

    name: str
    at: int
    size: int


class _Table(NamedTuple):
    """Where the table of sections is, how many rows it has, and which of them has the names."""

    at: int
    rows: int
    names: int

    @property
    def end(self) -> int:
        return self.at + self.rows * _SECTION.size


def _table(head: bytes) -> _Table:
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        raise FatbinError("not an ELF64 little-endian file")
    (start,) = struct.unpack_from("<Q", head, 40)
    size, count, names = struct.unpack_from("<HHH", head, 58)
    if count and (size != _SECTION.size or names >= count):
        raise _no_table(count, size, start)
    return _Table(start, count, names)


def _no_table(count: int, size: int, start: int) -> FatbinError:
    return FatbinError(f"a table of {count} sections of {size} bytes at {start:#x} that does not fit the file")


def _sections(take: Take, size: int) -> list[_Section]:
    return _named(_table(take(0, 64)), take, size)


def _named(table: _Table, take: Take, size: int) -> list[_Section]:
    """The sections that have bytes in a file of ``size`` bytes."""
    if not table.rows:
        return []
    rows = take(table.at, table.end - table.at) if table.end <= size else b""
    if len(rows) != table.end - table.at:
        raise _no_table(table.rows, _SECTION.size, table.at)
    fields = list(_SECTION.iter_unpack(rows))
    for row in fields:
        if row[1] not in (_SHT_NULL, _SHT_NOBITS) and row[4] + row[5] > size:
            raise FatbinError(f"truncated: a section of {row[5]} bytes at {row[4]:#x} in a file of {size}")
    _, _, _, _, at, length, *_ = fields[table.names]
    strings = take(at, min(length, _MAX_NAMES))
    if len(strings) != min(length, _MAX_NAMES):
        raise FatbinError(f"the sections' names, {length} bytes at {at:#x}, are not right before the table of sections")
    present = [row for row in fields if row[1] not in (_SHT_NULL, _SHT_NOBITS)]
    return [_Section(_name(strings, row[0]), row[4], row[5]) for row in present]


def _name(strings: bytes, at: int) -> str:
    # No farther than a name is long: that of each of 65,279 sections may be asked for.
    return strings[at : at + _MAX_NAME].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def _with_code(named: list[_Section], size: int) -> list[_Section]:
    """The sections that fat binaries lie in. Together they are no larger than the file, or it would be read without end."""
    found = [section for section in named if section.name in SECTIONS]
    if sum(section.size for section in found) > size:
        raise FatbinError(f"{len(found)} sections of fat binaries that lie over each other")
    return found


# --- containers -------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """An image, and where its payload is in the file."""

    image: Image
    at: int
    size: int


class _Room:
    """Counts containers and images; raises `_TooMany`."""

    def __init__(self) -> None:
        self._left = MAX_IMAGES

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooMany(f"more than {MAX_IMAGES:,} containers and images: no compiler makes as many")


def _bare(head: bytes) -> bool:
    return head[: len(_START)] == _START


def _every(take: Take, size: int, image: Callable[[_Found], Image]) -> tuple[Container, ...]:
    room = _Room()
    if _bare(take(0, len(_START))):
        return tuple(_containers(_Section("", 0, size), take, image, room))
    parts = _with_code(_sections(take, size), size)
    return tuple(one for part in parts for one in _containers(part, take, image, room))


def _containers(section: _Section, take: Take, image: Callable[[_Found], Image], room: _Room) -> list[Container]:
    found = []
    limit = section.at + section.size
    at = section.at
    while (at := _behind_zeros(take, section.at, at, limit)) < limit:
        end, images = _container(take, section, at, limit, room)
        found.append(Container(section.name, at - section.at, tuple(image(one) for one in images)))
        at = end
    return found


def _behind_zeros(take: Take, origin: int, at: int, limit: int) -> int:
    """Where the next container starts: between those of several object files there is padding, to a multiple of eight."""
    at = origin + ((at - origin + 7) & ~7)
    while at < limit:
        piece = take(at, min(_PIECE, limit - at))
        rest = piece.lstrip(b"\0")
        if rest or not piece:
            return at + ((len(piece) - len(rest)) & ~7)
        at += len(piece)
    return limit


def _container(take: Take, section: _Section, at: int, limit: int | None, room: _Room) -> tuple[int, list[_Found]]:
    """The end of the container at ``at``, and its images. Without ``limit`` that of the file counts."""
    where = f"at {at - section.at:#x} of `{section.name}`" if section.name else f"at {at:#x}"
    head = take(at, _CONTAINER.size)
    if head[: len(_START)] != _START or len(head) < _CONTAINER.size:
        raise FatbinError(f"no fat binary of a known layout {where}")
    size = _CONTAINER.unpack(head)[3]
    end = at + _CONTAINER.size + size
    if limit is not None and end > limit:
        raise FatbinError(f"truncated: a container of {size} bytes {where}")
    room.take()
    images = []
    entry = at + _CONTAINER.size
    while entry < end:
        room.take()
        found, entry = _entry(take, section, entry, end)
        images.append(found)
    # A stream's end is known only when it is there.
    if not take(end - 1, 1):
        raise FatbinError(f"truncated: a container of {size} bytes {where}")
    return end, images


def _entry(take: Take, section: _Section, at: int, end: int) -> tuple[_Found, int]:
    """The image whose header is at ``at``, and where the next one is."""
    fields = take(at, _ENTRY.size)
    if at + _ENTRY.size > end or len(fields) < _ENTRY.size:
        raise _other_entry(section, at)
    kind, known, header, stored, packed, _, minor, major, arch, named, length, flags, _, size = _ENTRY.unpack(fields)
    payload = at + header
    if known != ENTRY or header < _ENTRY.size or payload + stored > end or packed > stored:
        raise _other_entry(section, at)
    source = b""
    if _ENTRY.size <= named and named + length <= header and 0 < length <= _MAX_NAME:
        source = take(at + named, length)
    compression = "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else ""
    image = Image(
        "cubin" if kind == _CUBIN else "ptx" if kind == _PTX else f"kind-{kind}",
        f"{arch}{'a' if flags & _SUFFIX_A else 'f' if flags & _SUFFIX_F else ''}",
        size if compression else packed or stored,
        compression,
        None,
        (major, minor) if kind == _PTX else None,
        source.rstrip(b"\0").decode("utf-8", "backslashreplace"),
    )
    return _Found(image, payload, packed or stored), payload + stored


def _other_entry(section: _Section, at: int) -> FatbinError:
    where = f"{at - section.at:#x} of `{section.name}`" if section.name else f"{at:#x}"
    return FatbinError(f"an entry of another layout at {where}")


# --- streams ----------------------------------------------------------------------------------------------------------


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
            hit = self._buffer.find(_START, self._skipped)
            # What may be the start of one is looked at again with what follows.
            behind = hit if hit >= 0 else len(self._buffer) - (0 if self._ended else len(_START) - 1)
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
    room = _Room()
    nowhere = _Section("", 0, 0)
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
            at, images = _container(stream.take, nowhere, hit, None, room)
        except _TooMany:
            raise
        except FatbinError as error:
            # Code may hold these bytes, to compare with.
            if len(walk.failed) < MAX_IMAGES:
                walk.failed[hit] = error
            first = hit if first is None else first
            at = last = max(stream.at, hit + len(_START))
            continue
        walk.spans.append(_Span(hit, at, tuple(found.image for found in images)))
        walk.gaps.append((first, last))
        first, last = None, 0


def _filling(section: _Section, walk: _Walk) -> tuple[Container, ...]:
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


# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernels(payload: bytes, compression: str, size: int) -> dict[str, int] | None:
    """Sizes of code by function: a cubin has a section for each."""
    cubin = payload if not compression else _unpacked(payload, size) if compression == "zstd" else None
    if cubin is None:
        return None
    prefix = ".text."
    return {name[len(prefix) :]: len(code) for name, code in sections(cubin) if name.startswith(prefix)}


@lru_cache(maxsize=1)
def _zstd() -> Any:
    try:
        library = ctypes.CDLL("libzstd.so.1")
    except OSError:
        return None
    library.ZSTD_decompress.restype = ctypes.c_size_t
    library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
    return library


def _unpacked(payload: bytes, size: int) -> bytes | None:
    """What zstd makes of an image; None without libzstd. Raises FatbinError where it is not ``size`` bytes."""
    if size > _MAX_IMAGE:
        raise FatbinError(f"an image of {size} bytes, more than the {_MAX_IMAGE} that are plausible")
    if (library := _zstd()) is None:
        return None
    out = ctypes.create_string_buffer(size)
    if library.ZSTD_decompress(out, size, payload, len(payload)) != size:
        raise FatbinError(f"an image that zstd does not unpack to {size} bytes")
    return out.raw
