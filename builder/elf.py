"""Dynamic-linking facts of ELF64 little-endian files: what a shared object needs, what it offers, under which versions.

Standard library only, Python 3.10 or newer: this file is copied into images and runs there.

Every table is found as the dynamic loader finds it, from the program headers through PT_DYNAMIC, so a stripped section
table or one that patchelf has rewritten changes nothing. Only headers and dynamic tables are read, through a `Source`,
and never a byte beyond a table's own (but for a few words after the last .gnu.hash chain).

Whatever the bytes are, the outcome is an `Elf` or an `ElfError`: offsets are checked against the file, and tables,
chains and names have upper bounds.

Layouts are those of the System V gABI (chapters 4, 5), symbol versions of the LSB core specification ("Symbol
Versioning"), .gnu.hash of glibc's elf/dl-lookup.c (the format has no other normative description).
"""

from __future__ import annotations

import os
import re
import struct
import sys
from array import array
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

# Bytes. The largest table in libtorch_cuda has 7 MB: a file that claims more than this for one is damaged or hostile.
MAX_TABLE = 64 << 20
# libtorch_cpu has 75,000. A symbol costs about 400 bytes of memory here and, worst of all, 15 µs.
MAX_SYMBOLS = 1 << 19
MAX_DYNAMIC = 1 << 20
MAX_INTERPRETER = 4096
# A version index has 15 bits (LSB, .gnu.version).
MAX_VERSIONS = 1 << 15
# Linkers merge names with common tails, so names may add up to more than the string table, yet not to a multiple of it.
# The allowance is in bytes and lets tiny tables overlap as they like.
NAME_OVERLAP, NAME_ALLOWANCE = 2, 1 << 16

_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_SHT_DYNSYM = 11
_DT_NULL, _DT_NEEDED, _DT_HASH, DT_STRTAB, _DT_SYMTAB, _DT_RELA = 0, 1, 4, 5, 6, 7
DT_STRSZ, _DT_SYMENT, _DT_INIT, _DT_FINI, DT_SONAME, DT_RPATH = 10, 11, 12, 13, 14, 15
_DT_TEXTREL, _DT_JMPREL, DT_RUNPATH, _DT_FLAGS = 22, 23, 29, 30
_DT_GNU_HASH, _DT_VERSYM, _DT_VERDEF, _DT_VERNEED = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
# What may follow the symbol table in memory.
_CODE_TABLES = (_DT_RELA, _DT_INIT, _DT_FINI, _DT_JMPREL)
_TABLES = (_DT_HASH, DT_STRTAB, _DT_GNU_HASH, _DT_VERSYM, _DT_VERDEF, _DT_VERNEED, *_CODE_TABLES)
_DF_TEXTREL = 4
_VER_FLG_BASE, _VERSION_HIDDEN, _VERSION_INDEX = 1, 0x8000, 0x7FFF
_SYMBOL, _DYNAMIC = struct.Struct("<IBBHQQ"), struct.Struct("<QQ")
_PROGRAM_HEADER, _SECTION_HEADER = struct.Struct("<IIQQQQQQ"), struct.Struct("<IIQQQQIIQQ")
_VERNEED, _VERNAUX = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_VERDEF, _VERDAUX = struct.Struct("<HHHHIII"), struct.Struct("<II")

# Numbers without a name here are given as numbers.
_TYPES = {0: "none", 1: "rel", 2: "exec", 3: "dyn", 4: "core"}
_MACHINES = {21: "ppc64", 62: "x86_64", 183: "aarch64", 190: "cuda", 243: "riscv"}
_BINDINGS = {0: "local", 1: "global", 2: "weak", 10: "unique"}
_SYMBOL_TYPES = {0: "notype", 1: "object", 2: "func", 3: "section", 4: "file", 5: "common", 6: "tls", 10: "ifunc"}
_VISIBILITIES = ("default", "internal", "hidden", "protected")
# By st_info.
_INFO = tuple((_BINDINGS.get(i >> 4, str(i >> 4)), _SYMBOL_TYPES.get(i & 15, str(i & 15))) for i in range(256))

_EIGHT_BYTES = pow(33, 8, 1 << 32)
# The start value 5381 for a name with that many bytes of padding in front: multiplying by 33 can be undone modulo
# 2**32.
_PADDED_START = tuple(5381 * pow(33, -padding, 1 << 32) % (1 << 32) for padding in range(8))
_BATCH = 4096


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


class BytesSource:
    """A file that is already in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


@final
class FileSource:
    """A file on disk, read in place; a context manager. Raises OSError as `open` does."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115 - closed by close()
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Symbol:
    """One entry of the dynamic symbol table.

    ``name`` is UTF-8; bytes that are not become backslash escapes. ``version`` is None for an unversioned symbol,
    ``library`` the file that an undefined versioned symbol is expected in (verneed). ``binding``, ``type`` and
    ``visibility`` are the gABI's names in lower case, without prefix; a number where there is no name.
    ``default_version`` is true for `name@@version`: defined here under a version definition that is not hidden.
    """

    name: str
    version: str | None
    library: str | None
    defined: bool
    weak: bool
    binding: str
    type: str
    visibility: str
    default_version: bool


@dataclass(frozen=True)
class Elf:
    """What the dynamic loader needs to know of one file; all tuples are in file order.

    ``rpath`` and ``runpath`` are split at colons, with $ORIGIN as it stands (a loader that finds both ignores
    ``rpath``). ``verneed`` holds (file, version) pairs, ``verdef`` the versions defined here without the base entry,
    which only repeats the file's own name. ``symbols`` leaves out entry 0. ``gnu_hash_ok`` is None without .gnu.hash,
    otherwise whether each exported name can be found through it: it tells a damaged name or table apart from a sound
    one.
    """

    path: str
    machine: str
    type: str
    interpreter: str | None = None
    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    symbols: tuple[Symbol, ...] = ()
    verneed: tuple[tuple[str, str], ...] = ()
    verdef: tuple[str, ...] = ()
    gnu_hash_ok: bool | None = None
    has_textrel: bool = False

    @cached_property
    def undefined_strong(self) -> tuple[Symbol, ...]:
        """Symbols that some other object has to define, or loading (or the first call) fails."""
        return tuple(s for s in self.symbols if not s.defined and not s.weak and s.binding != "local")

    @cached_property
    def undefined_weak(self) -> tuple[Symbol, ...]:
        """Symbols that are null when no other object defines them."""
        return tuple(s for s in self.symbols if not s.defined and s.weak)

    @cached_property
    def exported(self) -> tuple[Symbol, ...]:
        """Symbols that other objects can bind to."""
        return tuple(s for s in self.symbols if _is_exported(s))

    @cached_property
    def exports_names(self) -> frozenset[str]:
        """The names of `exported`, without versions."""
        return frozenset(s.name for s in self.exported)


def _is_exported(symbol: Symbol) -> bool:
    return (
        symbol.defined
        and symbol.binding in ("global", "weak", "unique")
        and symbol.visibility in ("default", "protected")
    )


def gnu_hash(name: bytes) -> int:
    """The 32-bit hash of .gnu.hash: 5381, then 33 h + byte for each byte (glibc, dl_new_hash)."""
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


def _gnu_hashes(names: Iterable[bytes]) -> dict[bytes, int]:
    """`gnu_hash` of many names, 2 to 4 times as fast: a byte loop took half of the time of reading libtorch_cpu.

    Names are padded in front to multiples of 8 and joined to one integer. Its lanes of 8, 16 and 32 bits are then
    combined in pairs, high * 33**n + low, all at once, so that 8 bytes are one 64-bit lane (at most 2**44) when the
    loop starts.
    """
    distinct, hashes = list(dict.fromkeys(names)), {}
    for start in range(0, len(distinct), _BATCH):
        batch = distinct[start : start + _BATCH]
        joined = b"".join([name.rjust(len(name) + -len(name) % 8, b"\0") for name in batch])
        lanes = int.from_bytes(joined, "big")
        for size, factor in ((1, 33), (2, 33**2), (4, 33**4)):
            low = int.from_bytes((bytes(size) + b"\xff" * size) * (len(joined) // (2 * size)), "big")
            lanes = (lanes & low) + factor * (lanes >> 8 * size & low)
        words = iter(struct.unpack(f">{len(joined) // 8}Q", lanes.to_bytes(len(joined), "big")))
        for name in batch:
            value = _PADDED_START[-len(name) % 8]
            for word in islice(words, -(-len(name) // 8)):
                value = (value * _EIGHT_BYTES + word) & 0xFFFFFFFF
            hashes[name] = value
    return hashes


def read_file(path: str | os.PathLike[str]) -> Elf:
    """Read the file at ``path``. Raises ElfError, or OSError where the file cannot be opened or read."""
    with FileSource(path) as source:
        return read(source, os.fspath(path))


def read(source: Source, path: str = "") -> Elf:
    """Read one ELF file; ``path`` is only passed on. A file without PT_DYNAMIC gives empty tuples.

    Raises ElfError, and whatever ``source.read`` raises.
    """
    image = Image(source)
    interpreter = image.interpreter()
    dynamic = Dynamic(image)
    needs, definitions = dynamic.version_needs(), dynamic.version_definitions()
    symbols, gnu_hash_ok = dynamic.symbols(needs, definitions)
    tags = dynamic.tags
    return Elf(
        path,
        image.machine,
        image.type,
        interpreter,
        soname=dynamic.text(tags[DT_SONAME], "soname") if DT_SONAME in tags else None,
        needed=tuple(dynamic.text(at, "name of a needed library") for at in dynamic.needed),
        rpath=dynamic.paths(DT_RPATH, "rpath"),
        runpath=dynamic.paths(DT_RUNPATH, "runpath"),
        symbols=symbols,
        verneed=tuple((library, version) for _, library, version in needs),
        verdef=tuple(version for _, version in definitions),
        gnu_hash_ok=gnu_hash_ok,
        has_textrel=_DT_TEXTREL in tags or bool(tags.get(_DT_FLAGS, 0) & _DF_TEXTREL),
    )


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
        self._dynamic: tuple[int, int, int] | None = None
        self._interpreter: tuple[int, int] | None = None
        for kind, _, offset, address, _, size, _, _ in _PROGRAM_HEADER.iter_unpack(table):
            if kind == _PT_LOAD:
                if size and offset + size > self._size:
                    raise ElfError(f"truncated: segment of {size} bytes in a file that ends at {self._size:#x}", offset)
                self._loads.append((address, offset, size))
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
        return _text(self.read(offset, size, "interpreter name").split(b"\0", 1)[0])

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
        return offset, size - size % _DYNAMIC.size

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


class Dynamic:
    """The tables that the dynamic table leads to; ``tags`` is {tag: value}, the last of a kind winning as in glibc.

    For files of which not all is at hand: ``table`` is taken instead of the image's own dynamic table, ``read_strings``
    instead of the image's `read` for the string table, and a name ends with the first byte ``hole`` in it, if there is
    one.
    """

    def __init__(
        self,
        image: Image,
        table: bytes | None = None,
        read_strings: Callable[[int, int, str], bytes] | None = None,
        hole: bytes = b"",
    ) -> None:
        self._hole, self._ends = hole, re.compile(b"[\\0" + re.escape(hole) + b"]")
        self._image = image
        self.tags: dict[int, int] = {}
        self.needed: list[int] = []
        for tag, value in _DYNAMIC.iter_unpack(image.dynamic() if table is None else table):
            if tag == _DT_NULL:
                break
            if tag == _DT_NEEDED:
                self.needed.append(value)
            else:
                self.tags[tag] = value
        self._strings_at, self.strings = 0, b""
        if DT_STRTAB in self.tags:
            self._strings_at, end = self._locate(DT_STRTAB, "dynamic string table")
            size = self.tags.get(DT_STRSZ, end - self._strings_at)
            self.strings = (read_strings or image.read)(self._strings_at, size, "dynamic string table")
        self._names: dict[int, tuple[bytes, str]] = {}
        self._allowance = len(self.strings) * NAME_OVERLAP + NAME_ALLOWANCE

    def _locate(self, tag: int, what: str) -> tuple[int, int]:
        return self._image.locate(self.tags[tag], what)

    def name(self, at: int, what: str) -> tuple[bytes, str]:
        """A string without its NUL, as bytes and as text, by its index in the string table."""
        known = self._names.get(at)
        if known is not None:
            return known
        if at >= len(self.strings):
            raise ElfError(f"{what}: index {at:#x} in a string table of {len(self.strings)} bytes", self._strings_at)
        if self._hole and (stop := self._ends.search(self.strings, at)):
            end = stop.end() if stop[0] == self._hole else stop.start()
        else:
            end = self.strings.find(b"\0", at)
        if end < 0:
            raise ElfError(f"{what}: string without an end", self._strings_at + at)
        self._allowance -= end - at
        if self._allowance < 0:
            raise ElfError("strings overlap more than any linker makes them", self._strings_at)
        raw = self.strings[at:end]
        self._names[at] = found = (raw, _text(raw))
        return found

    def text(self, at: int, what: str) -> str:
        return self.name(at, what)[1]

    def paths(self, tag: int, what: str) -> tuple[str, ...]:
        text = self.text(self.tags[tag], what) if tag in self.tags else ""
        return tuple(text.split(":")) if text else ()

    def _records(self, start: int, end: int, layout: struct.Struct, what: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(offset, fields) of each record of a list whose last field is the distance to the next, 0 at the end.

        Like glibc, follows a list to its end and leaves the counts in its head (DT_VERNEEDNUM, vn_cnt …) alone.
        Distances are unsigned, so a list only moves on.
        """
        offset = start
        for _ in range(MAX_VERSIONS):
            if offset + layout.size > end:
                raise ElfError(f"{what} outside its segment", offset)
            fields: tuple[int, ...] = layout.unpack(self._image.read(offset, layout.size, what))
            yield offset, fields
            if not fields[-1]:
                return
            offset += fields[-1]
        raise ElfError(f"{what}: list of more than {MAX_VERSIONS}", start)

    def version_needs(self) -> list[tuple[int, str, str]]:
        """(version index, file, version) of each version that is needed."""
        found: list[tuple[int, str, str]] = []
        if _DT_VERNEED not in self.tags:
            return found
        start, end = self._locate(_DT_VERNEED, "version needs")
        for offset, (revision, _, file, aux, _) in self._records(start, end, _VERNEED, "version need"):
            if revision != 1:
                raise ElfError(f"version need of revision {revision}, not 1", offset)
            library = self.text(file, "file of a version need")
            for at, (_, _, index, name, _) in self._records(offset + aux, end, _VERNAUX, "needed version"):
                found.append((index & _VERSION_INDEX, library, self.text(name, "needed version")))
                if len(found) > MAX_VERSIONS:
                    raise ElfError(f"more than {MAX_VERSIONS} needed versions", at)
        return found

    def version_definitions(self) -> list[tuple[int, str]]:
        """(version index, version) of each version defined here, but for the base entry."""
        found: list[tuple[int, str]] = []
        if _DT_VERDEF not in self.tags:
            return found
        start, end = self._locate(_DT_VERDEF, "version definitions")
        for offset, record in self._records(start, end, _VERDEF, "version definition"):
            revision, flags, index, _, _, aux, _ = record
            if revision != 1:
                raise ElfError(f"version definition of revision {revision}, not 1", offset)
            # The first name is the version's own, the others are those of its parents.
            _, (name, _) = next(self._records(offset + aux, end, _VERDAUX, "name of a version definition"))
            if not flags & _VER_FLG_BASE:
                found.append((index & _VERSION_INDEX, self.text(name, "version definition")))
        return found

    def symbol_table(self) -> tuple[bytes, array[int], GnuHash | None]:
        """The dynamic symbol table with entry 0, 24 bytes a symbol; their version indexes; .gnu.hash."""
        if _DT_SYMTAB not in self.tags:
            return b"", array("H"), None
        image, size = self._image, _SYMBOL.size
        offset, end = self._locate(_DT_SYMTAB, "dynamic symbol table")
        if self.tags.get(_DT_SYMENT, size) != size:
            raise ElfError(f"dynamic symbols of {self.tags[_DT_SYMENT]} bytes, not {size}", offset)
        table = read_gnu_hash(image, self.tags[_DT_GNU_HASH]) if _DT_GNU_HASH in self.tags else None
        count, most = self._symbol_count(table), (end - offset) // size
        if count > MAX_SYMBOLS:
            raise ElfError(f"{count} dynamic symbols, more than the {MAX_SYMBOLS} that are plausible", offset)
        if count > most:
            raise ElfError(f"dynamic symbol table of {count} entries, its segment has room for {most}", offset)
        data = image.read(offset, count * size, "dynamic symbol table")
        indexes = array("H", bytes(count * 2))
        if _DT_VERSYM in self.tags:
            at, _ = self._locate(_DT_VERSYM, "symbol versions")
            indexes = _array("H", image.read(at, count * 2, "symbol versions"))
        return data, indexes, table

    def symbols(
        self, needs: list[tuple[int, str, str]], definitions: list[tuple[int, str]]
    ) -> tuple[tuple[Symbol, ...], bool | None]:
        """The dynamic symbols without entry 0, and the verdict of the .gnu.hash self-check."""
        data, indexes, table = self.symbol_table()
        # An index that neither of these explains counts as unversioned, as it does for glibc.
        needed = {index: (version, library) for index, library, version in needs}
        defined_here = dict(definitions)
        symbols: list[Symbol] = []
        raws: list[bytes] = []
        for (at, info, other, section, _, _), index in zip(_SYMBOL.iter_unpack(data), indexes, strict=True):
            raw, name = self.name(at, "symbol name") if at else (b"", "")
            binding, kind = _INFO[info]
            defined, number = section != 0, index & _VERSION_INDEX
            version, library, default = None, None, False
            if defined and number in defined_here:
                version, default = defined_here[number], not index & _VERSION_HIDDEN
            elif number in needed:
                version, library = needed[number]
                if defined:
                    # A copy relocation: the executable now holds the library's variable, under the library's version.
                    library = None
            weak, visibility = binding == "weak", _VISIBILITIES[other & 3]
            symbols.append(Symbol(name, version, library, defined, weak, binding, kind, visibility, default))
            raws.append(raw)
        del symbols[:1], raws[:1]
        return tuple(symbols), table.finds(symbols, raws) if table is not None else None

    def _symbol_count(self, table: GnuHash | None) -> int:
        """Entries of the dynamic symbol table with entry 0; no tag states it."""
        counts: list[int] = []
        if _DT_HASH in self.tags:
            at, _ = self._locate(_DT_HASH, "hash table")
            counts.append(struct.unpack("<II", self._image.read(at, 8, "hash table"))[1])
        if table is not None and table.chain:
            counts.append(table.first + len(table.chain))
        if counts:
            return max(counts)
        # A file that exports nothing has an empty .gnu.hash, in which GNU ld writes `first symbol 1` whatever is
        # imported.
        size = self._image.section_of_symbols(self.tags[_DT_SYMTAB])
        if size is not None:
            return size // _SYMBOL.size
        rooms = [self._distance(tag, entry) for tag, entry in ((_DT_SYMTAB, _SYMBOL.size), (_DT_VERSYM, 2))]
        known = [room for room in rooms if room is not None]
        if known:
            return min(known)
        if table is not None and table.first > 1:
            return table.first
        offset, _ = self._locate(_DT_SYMTAB, "dynamic symbol table")
        raise ElfError("dynamic symbol table of unknown length: no hash table, no section, no table behind it", offset)

    def _distance(self, tag: int, entry: int) -> int | None:
        """Entries of ``entry`` bytes between a table and the next one in memory."""
        if tag not in self.tags:
            return None
        start = self.tags[tag]
        following = [self.tags[t] - start for t in _TABLES if self.tags.get(t, 0) > start]
        return min(following) // entry if following else None


@dataclass(frozen=True)
class GnuHash:
    """The table at DT_GNU_HASH; ``chain[i]`` belongs to symbol ``first + i``. Undefined symbols come before."""

    first: int
    shift: int
    bloom: array[int]
    buckets: array[int]
    chain: array[int]

    def explains(self, names: Mapping[int, bytes]) -> bool:
        """Whether each name, by the index of its symbol, hashes to that symbol's word: less than `finds`, and faster.

        A name with a wrong byte passes once in 2**31 times.
        """
        first, chain = self.first, self.chain
        end = first + len(chain)
        if any(not first <= index < end for index in names):
            return False
        hashes = _gnu_hashes(names.values())
        return all(chain[index - first] | 1 == hashes[raw] | 1 for index, raw in names.items())

    def finds(self, symbols: list[Symbol], raws: list[bytes]) -> bool:
        """Whether a lookup, done as in glibc's do_lookup_x, reaches every exported symbol.

        ``raws`` are the symbols' names; both lists lack entry 0.
        """
        first, shift, bloom, buckets, chain = self.first, self.shift, self.bloom, self.buckets, self.chain
        end, mask = first + len(chain), len(bloom) - 1
        if not buckets or mask < 0 or mask & len(bloom):
            return not any(_is_exported(s) for s in symbols)
        hashes = _gnu_hashes(raw for symbol, raw in zip(symbols, raws, strict=True) if _is_exported(symbol))
        chain_start = first
        for index, (symbol, raw) in enumerate(zip(symbols, raws, strict=True), 1):
            if first < index <= end and chain[index - first - 1] & 1:
                chain_start = index
            if not _is_exported(symbol):
                continue
            if not first <= index < end:
                return False
            value = hashes[raw]
            word = bloom[(value >> 6) & mask]
            if not (word >> (value & 63)) & (word >> ((value >> shift) & 63)) & 1:
                return False
            if chain[index - first] | 1 != value | 1 or not chain_start <= buckets[value % len(buckets)] <= index:
                return False
        return True


def read_gnu_hash(image: Image, address: int) -> GnuHash:
    """Header (u32 buckets, first symbol, bloom words, shift), u64 bloom words, u32 buckets, and one u32 a symbol.

    How many symbols there are is told by the end mark (bit 0) of the chain that starts last.
    """
    what = "GNU hash table"
    offset, end = image.locate(address, what)
    count, first, words, shift = struct.unpack("<IIII", image.read(offset, 16, what))
    buckets_at = offset + 16 + words * 8
    chain_at = buckets_at + count * 4
    if chain_at > end:
        raise ElfError(f"{what} outside its segment", offset)
    bloom = _array("Q", image.read(offset + 16, words * 8, what))
    buckets = _array("I", image.read(buckets_at, count * 4, what))
    last = max(buckets, default=0)
    if not last:
        return GnuHash(first, shift, bloom, buckets, array("I"))
    if last < first:
        raise ElfError(f"{what}: bucket of symbol {last}, before the first hashed symbol {first}", buckets_at)
    known, step, ended = last - first, 8, False
    while not ended:
        at = chain_at + known * 4
        step = min(step, (end - at) // 4)
        if step <= 0:
            raise ElfError(f"{what}: chain without an end", at)
        for word in _array("I", image.read(at, step * 4, what)):
            known += 1
            if word & 1:
                ended = True
                break
        step *= 2
    return GnuHash(first, shift, bloom, buckets, _array("I", image.read(chain_at, known * 4, what)))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def _array(code: str, data: bytes) -> array[int]:
    values = array(code, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
