"""Fat binaries: which GPU images an ELF file has, and how large the kernels in them are.

Standard library only, Python 3.9 or newer: this file is copied into images and runs there. Headers are never compressed,
so that what there is can be told without unpacking anything. The kernels of an image that is compressed can be told where
the system has libzstd (gcc needs it as well).

The layout is not documented by NVIDIA; it was found by compiling each target with nvcc 13.0 and comparing
(shared/facts/abi.md, section C).
"""

from __future__ import annotations

import ctypes
import os
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
MAGIC, VERSION, ENTRY = 0xBA55ED50, 1, 0x0101
STUB = 384
"""Bytes of code up to which a kernel is taken for a stub: what is left of one whose body is guarded away for a target
(shared/facts/abi.md, section C)."""

_CONTAINER = struct.Struct("<IHHQ")
# kind, 0x0101, header size, stored size, compressed size, options, minor, major, arch, name offset and length, flags,
# zero, uncompressed size
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_PTX, _CUBIN = 1, 2
_LZ4, _ZSTD, _SUFFIX_A, _SUFFIX_F = 0x2000, 0x8000, 0x100000, 0x200000
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SHT_NOBITS = 8
# Bytes. The largest image of flashinfer's fused all-reduce has 30 MB: one that claims more than this is damaged or hostile.
_MAX_IMAGE = 1 << 30


class FatbinError(ValueError):
    """Not an ELF64 little-endian file, or a fat binary of another layout; the message says what and where."""


@dataclass(frozen=True)
class Image:
    """Code for one target in a container. ``target`` as nvcc writes it (`120a`); ``size`` in bytes, uncompressed.

    ``kernels`` are the sizes of its functions' code in bytes by mangled name; None for PTX, and where it cannot be unpacked.
    """

    kind: str
    target: str
    size: int
    compression: str
    kernels: dict[str, int] | None

    @property
    def name(self) -> str:
        """`sm_120a`, or `compute_120` for PTX."""
        return f"{'sm' if self.kind == 'cubin' else 'compute'}_{self.target}"

    @property
    def real(self) -> int | None:
        """Kernels that are more than a stub; None where that cannot be told."""
        return None if self.kernels is None else sum(size > STUB for size in self.kernels.values())


@dataclass(frozen=True)
class Container:
    """The images of one compiled source; the driver takes one of them. ``offset`` in bytes, in its section."""

    section: str
    offset: int
    images: tuple[Image, ...]


def read_file(path: str | os.PathLike[str]) -> tuple[Container, ...]:
    """Every container of an ELF file, in order; none where it has no device code. Raises OSError or FatbinError."""
    return read(Path(path).read_bytes())


def read(data: bytes) -> tuple[Container, ...]:
    """Every container of an ELF file's bytes. Raises FatbinError."""
    found: list[Container] = []
    for name, section in sections(data):
        if name in SECTIONS:
            found += _containers(name, section)
    return tuple(found)


def sections(data: bytes) -> list[tuple[str, bytes]]:
    """The sections of an ELF64 file that have bytes in it: names and contents. Raises FatbinError."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise FatbinError("not an ELF64 little-endian file")
    (start,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    if not count:
        return []
    if size != _SECTION.size or start + count * size > len(data) or names >= count:
        raise FatbinError(f"a table of {count} sections of {size} bytes at {start:#x} that does not fit the file")
    rows = list(_SECTION.iter_unpack(data[start : start + count * size]))
    strings = _bytes(data, rows[names])
    return [(_name(strings, row[0]), _bytes(data, row)) for row in rows if row[1] not in (0, _SHT_NOBITS)]


def _bytes(data: bytes, row: tuple[int, ...]) -> bytes:
    offset, size = row[4], row[5]
    if offset + size > len(data):
        raise FatbinError(f"truncated: a section of {size} bytes at {offset:#x} in a file of {len(data)}")
    return data[offset : offset + size]


def _name(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    return strings[at : end if end >= 0 else len(strings)].decode("utf-8", "backslashreplace")


def _containers(section: str, data: bytes) -> list[Container]:
    found = []
    at = 0
    while at + _CONTAINER.size <= len(data):
        magic, version, header, size = _CONTAINER.unpack_from(data, at)
        if magic == 0:
            at += 8  # padding between containers of several object files
            continue
        if magic != MAGIC or version != VERSION or header < _CONTAINER.size:
            raise FatbinError(f"no fat binary of a known layout at {at:#x} of `{section}`")
        end = at + header + size
        if end > len(data):
            raise FatbinError(f"truncated: a container of {size} bytes at {at:#x} of `{section}`")
        found.append(Container(section, at, tuple(_images(section, data, at + header, end))))
        at = (end + 7) & ~7
    return found


def _images(section: str, data: bytes, at: int, end: int) -> list[Image]:
    found = []
    while at + _ENTRY.size <= end:
        fields = _ENTRY.unpack_from(data, at)
        kind, known, header, stored, compressed = fields[:5]
        arch, flags, size = fields[8], fields[11], fields[13]
        if known != ENTRY or header < _ENTRY.size or at + header + stored > end:
            raise FatbinError(f"an entry of another layout at {at:#x} of `{section}`")
        compression = "zstd" if flags & _ZSTD else "lz4" if flags & _LZ4 else ""
        payload = data[at + header : at + header + (compressed or stored)]
        if kind in (_PTX, _CUBIN):
            target = f"{arch}{'a' if flags & _SUFFIX_A else 'f' if flags & _SUFFIX_F else ''}"
            if not compression:
                size = len(payload)
            kernels = _kernels(payload, compression, size) if kind == _CUBIN else None
            found.append(Image("cubin" if kind == _CUBIN else "ptx", target, size, compression, kernels))
        at += header + stored
    return found


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
