"""Fat binaries: which GPU images an ELF file has, and how large the kernels in them are.

Standard library only, Python 3.9 or newer: this file is copied into images and runs there. Headers are never compressed,
so that what there is can be told without unpacking anything: `scan_file` and `scan` read headers alone and skip the
rest, however large the file is (`fatbin_stream` does so where the file comes once and in order). The kernels of an image
that is compressed can be told where the system has libzstd (gcc needs it as well): `read` and `read_file`, which take
the whole file into memory.

The layout is not documented by NVIDIA; it was found by compiling each target with nvcc 13.0 and comparing
(shared/facts/abi.md, section C).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
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

Take = Callable[[int, int], bytes]
"""The bytes at an offset, that many; fewer where the file ends."""

_CONTAINER = struct.Struct("<IHHQ")
START = struct.pack("<IHH", MAGIC, VERSION, _CONTAINER.size)
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


class TooManyError(FatbinError):
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

    def whole(found: Found) -> Image:
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


# --- ELF --------------------------------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section: its name, where it is in the file, its size in bytes."""

    name: str
    at: int
    size: int


class SectionTable(NamedTuple):
    """Where the table of sections is, how many rows it has, and which of them has the names."""

    at: int
    rows: int
    names: int

    @property
    def end(self) -> int:
        return self.at + self.rows * _SECTION.size


def section_table(head: bytes) -> SectionTable:
    """Where an ELF64 file's header, its first 64 bytes, has the table of sections. Raises FatbinError."""
    if head[:6] != b"\x7fELF\x02\x01" or len(head) < 64:
        raise FatbinError("not an ELF64 little-endian file")
    (start,) = struct.unpack_from("<Q", head, 40)
    size, count, names = struct.unpack_from("<HHH", head, 58)
    if count and (size != _SECTION.size or names >= count):
        raise _no_table(count, size, start)
    return SectionTable(start, count, names)


def _no_table(count: int, size: int, start: int) -> FatbinError:
    return FatbinError(f"a table of {count} sections of {size} bytes at {start:#x} that does not fit the file")


def _sections(take: Take, size: int) -> list[Section]:
    return sections_of_table(section_table(take(0, 64)), take, size)


def sections_of_table(table: SectionTable, take: Take, size: int) -> list[Section]:
    """The sections that have bytes in a file of ``size`` bytes. Raises FatbinError."""
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
    return [Section(_name(strings, row[0]), row[4], row[5]) for row in present]


def _name(strings: bytes, at: int) -> str:
    # No farther than a name is long: that of each of 65,279 sections may be asked for.
    return strings[at : at + _MAX_NAME].split(b"\0", 1)[0].decode("utf-8", "backslashreplace")


def with_code(named: list[Section], size: int) -> list[Section]:
    """The sections that fat binaries lie in. Raises FatbinError.

    Together they are no larger than the file, or it would be read without end.
    """
    found = [section for section in named if section.name in SECTIONS]
    if sum(section.size for section in found) > size:
        raise FatbinError(f"{len(found)} sections of fat binaries that lie over each other")
    return found


# --- containers -------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """An image, and where its payload is in the file."""

    image: Image
    at: int
    size: int


class Room:
    """Counts containers and images; raises `TooManyError`."""

    def __init__(self) -> None:
        self._left = MAX_IMAGES

    def take(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise TooManyError(f"more than {MAX_IMAGES:,} containers and images: no compiler makes as many")


def is_bare(head: bytes) -> bool:
    """Whether a file that starts like this is a fat binary of its own, and no ELF file."""
    return head[: len(START)] == START


def _every(take: Take, size: int, image: Callable[[Found], Image]) -> tuple[Container, ...]:
    room = Room()
    if is_bare(take(0, len(START))):
        return tuple(_containers(Section("", 0, size), take, image, room))
    parts = with_code(_sections(take, size), size)
    return tuple(one for part in parts for one in _containers(part, take, image, room))


def _containers(section: Section, take: Take, image: Callable[[Found], Image], room: Room) -> list[Container]:
    found = []
    limit = section.at + section.size
    at = section.at
    while (at := _behind_zeros(take, section.at, at, limit)) < limit:
        end, images = read_container(take, section, at, limit, room)
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


def read_container(take: Take, section: Section, at: int, limit: int | None, room: Room) -> tuple[int, list[Found]]:
    """The end of the container at ``at``, and its images. Without ``limit`` that of the file counts. Raises FatbinError."""
    where = f"at {at - section.at:#x} of `{section.name}`" if section.name else f"at {at:#x}"
    head = take(at, _CONTAINER.size)
    if head[: len(START)] != START or len(head) < _CONTAINER.size:
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


def _entry(take: Take, section: Section, at: int, end: int) -> tuple[Found, int]:
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
    return Found(image, payload, packed or stored), payload + stored


def _other_entry(section: Section, at: int) -> FatbinError:
    where = f"{at - section.at:#x} of `{section.name}`" if section.name else f"{at:#x}"
    return FatbinError(f"an entry of another layout at {where}")


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
