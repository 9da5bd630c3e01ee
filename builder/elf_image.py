"""The headers of an ELF64 little-endian file, and checked reads by offset and by address.

Standard library only, Python 3.10 or newer: this file is copied into images and runs there. Layouts are those of the
System V gABI (chapters 4, 5).
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes. The largest table in libtorch_cuda has 7 MB: a file that claims more than this for one is damaged or hostile.
MAX_TABLE = 64 << 20
MAX_DYNAMIC = 1 << 20
MAX_INTERPRETER = 4096

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_SHT_DYNSYM = 11
DYNAMIC = struct.Struct("<QQ")
"""An entry of the dynamic table: its tag, and a number or an address."""
_PROGRAM_HEADER, _SECTION_HEADER = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")

# Numbers without a name here are given as numbers.
_TYPES = {0: "none", 1: "rel", 2: "exec", 3: "dyn", 4: "core"}
_MACHINES = {21: "ppc64", 62: "x86_64", 183: "aarch64", 190: "cuda", 243: "riscv"}


class ElfError(ValueError):
    """Not an ELF64 little-endian file, truncated, or malformed; the message says what, and at which offset.

    ``offset`` is the place in the file, in bytes, or None where the trouble is an address outside the file.
    """

    def __init__(self, what: str, offset: int | None = None) -> None:
        super().__init__(what if offset is None else f"{what} at offset {offset:#x}")
        self.offset = offset


class Source(Protocol):
    """Where the bytes of one file come from.

    ``size`` is the whole file's, in bytes. ``read`` returns exactly ``length`` bytes from ``offset``; it is only asked
    for ranges inside the file. What it raises passes through `read()` unchanged, so a source that has parts of a file
    may refuse the others in its own words.
    """

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Section:
    """A line of the section table; ``type`` is the gABI's SHT number, ``link`` the index of another section."""

    type: int
    address: int
    offset: int
    size: int
    link: int


class Image:
    """The file header and program headers, and checked reads by offset and by address."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._size = source.size
        ident = self.read(0, min(16, self._size), "ELF identification")
        if ident[:4] != b"\x7fELF":
            raise ElfError(f"not an ELF file: starts with `{ident[:4].hex()}`", 0)
        if len(ident) < 16:
            raise ElfError(f"truncated: the file has {self._size} bytes, its identification alone needs 16", 0)
        if ident[4] != 2:
            raise ElfError(f"not a 64-bit ELF file: class {ident[4]}", 4)
        if ident[5] != 1:
            raise ElfError(f"not a little-endian ELF file: data encoding {ident[5]}", 5)
        header = struct.unpack("<HHIQQQIHHHHHH", self.read(16, 48, "file header"))
        self.type = _TYPES.get(header[0], str(header[0]))
        self.machine = _MACHINES.get(header[1], str(header[1]))
        self._sections = header[5], header[10], header[11]
        segments_at, segment_size, segment_count = header[4], header[8], header[9]
        if segment_count and segment_size != 56:
            raise ElfError(f"program headers of {segment_size} bytes, not 56", 54)
        table = self.read(segments_at, segment_count * 56, "program headers") if segment_count else b""
        self._loads: list[tuple[int, int, int]] = []
        self.end = 0
        """The address behind the last byte that is loaded."""
        self._dynamic: tuple[int, int, int] | None = None
        self._interpreter: tuple[int, int] | None = None
        for kind, _, offset, address, _, size, memory, _ in _PROGRAM_HEADER.iter_unpack(table):
            if kind == _PT_LOAD:
                if size and offset + size > self._size:
                    raise ElfError(f"truncated: segment of {size} bytes in a file that ends at {self._size:#x}", offset)
                self._loads.append((address, offset, size))
                self.end = max(self.end, address + memory)
            elif kind == _PT_DYNAMIC:
                self._dynamic = (address, offset, size)
            elif kind == _PT_INTERP:
                self._interpreter = (offset, size)

    def read(self, offset: int, length: int, what: str, way: Callable[[int, int], bytes] | None = None) -> bytes:
        """Exactly ``length`` bytes of the file; ``way`` is taken instead of the source's own `read`."""
        if length > MAX_TABLE:
            raise ElfError(f"{what} of {length} bytes, more than the {MAX_TABLE} that are plausible", offset)
        if offset + length > self._size:
            raise ElfError(f"truncated: {what} of {length} bytes in a file that ends at {self._size:#x}", offset)
        data = (way or self._source.read)(offset, length)
        if len(data) != length:
            raise ElfError(f"truncated: {what} of {length} bytes, of which {len(data)} could be read", offset)
        return data

    def locate(self, address: int, what: str) -> tuple[int, int]:
        """File offset of an address, and of the end of its segment's bytes in the file."""
        for start, offset, size in self._loads:
            if start <= address < start + size:
                return offset + address - start, offset + size
        raise ElfError(f"{what}: address {address:#x} is in no loadable segment")

    def interpreter(self) -> str | None:
        """The dynamic loader that PT_INTERP names."""
        if self._interpreter is None:
            return None
        offset, size = self._interpreter
        if size > MAX_INTERPRETER:
            raise ElfError(f"interpreter name of {size} bytes, more than {MAX_INTERPRETER}", offset)
        return text_of(self.read(offset, size, "interpreter name").split(b"\0", 1)[0])

    def dynamic_span(self) -> tuple[int, int] | None:
        """Offset and size in bytes of the dynamic table; None where there is none.

        glibc goes by the segment's address. Where that is in no loadable segment, as in some static files, its offset
        counts.
        """
        if self._dynamic is None or not self._dynamic[2]:
            return None
        address, offset, size = self._dynamic
        if any(start <= address < start + length for start, _, length in self._loads):
            offset = self.locate(address, "dynamic table")[0]
        if size > MAX_DYNAMIC:
            raise ElfError(f"dynamic table of {size} bytes, more than {MAX_DYNAMIC}", offset)
        return offset, size - size % DYNAMIC.size

    def dynamic(self) -> bytes:
        """The dynamic table; empty where there is none."""
        span = self.dynamic_span()
        return self.read(*span, "dynamic table") if span is not None else b""

    @property
    def sections_at(self) -> int | None:
        """Offset of the section table; None where there is none that could be one."""
        offset: int
        offset, entry, count = self._sections
        if not offset or not count or entry != _SECTION_HEADER.size or offset + count * entry > self._size:
            return None
        return offset

    def sections(self) -> list[Section]:
        """The section table; empty where there is none.

        The loader never looks at it, so damage there is no error.
        """
        at = self.sections_at
        if at is None:
            return []
        data = self.read(at, self._sections[2] * _SECTION_HEADER.size, "section headers")
        return [Section(h[1], h[3], h[4], h[5], h[6]) for h in _SECTION_HEADER.iter_unpack(data)]

    def section_of_symbols(self, address: int) -> int | None:
        """Size in bytes of the SHT_DYNSYM section at ``address``; None where the section table does not help."""
        return next((s.size for s in self.sections() if s.type == _SHT_DYNSYM and s.address == address), None)


def text_of(raw: bytes) -> str:
    """A name as text: UTF-8, with backslash escapes for what is not."""
    return raw.decode("utf-8", "backslashreplace")


def array_of(code: str, data: bytes) -> array[int]:
    """Little-endian numbers; ``code`` is the array's type code."""
    values = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
