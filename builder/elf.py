"""Dynamic-linking facts of ELF64 little-endian files: what a shared object needs, what it offers, under which versions.

Standard library only, Python 3.10 or newer: this file is copied into images and runs there.

Every table is found as the dynamic loader finds it, from the program headers through PT_DYNAMIC, so a stripped section
table or one that patchelf has rewritten changes nothing. Only headers and dynamic tables are read, through a `Source`,
and never a byte beyond a table's own (but for a few words after the last .gnu.hash chain).

Whatever the bytes are, the outcome is an `Elf` or an `ElfError`: offsets are checked against the file, and tables,
chains and names have upper bounds.

Layouts are those of the System V gABI (chapters 4, 5), symbol versions of the LSB core specification ("Symbol
Versioning"). `elf_image` has the headers, `elf_hash` the table .gnu.hash.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, final

from builder.elf_hash import GnuHash, read_gnu_hash
from builder.elf_image import DYNAMIC, ElfError, Image, Source, array_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

# libtorch_cpu has 75,000. A symbol costs about 400 bytes of memory here and, worst of all, 15 µs.
MAX_SYMBOLS = 1 << 19
# A version index has 15 bits (LSB, .gnu.version).
MAX_VERSIONS = 1 << 15
# Linkers merge names with common tails, so names may add up to more than the string table, yet not to a multiple of it.
# The allowance is in bytes and lets tiny tables overlap as they like.
NAME_OVERLAP, NAME_ALLOWANCE = 2, 1 << 16

_DT_NULL, _DT_NEEDED, _DT_HASH, DT_STRTAB, _DT_SYMTAB, _DT_RELA = 0, 1, 4, 5, 6, 7
DT_STRSZ, _DT_SYMENT, _DT_INIT, _DT_FINI, DT_SONAME, DT_RPATH = 10, 11, 12, 13, 14, 15
_DT_TEXTREL, _DT_JMPREL, DT_RUNPATH, _DT_FLAGS = 22, 23, 29, 30
_DT_GNU_HASH, _DT_VERSYM, _DT_VERDEF, _DT_VERNEED = 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE
# What may follow the symbol table in memory.
_CODE_TABLES = (_DT_RELA, _DT_INIT, _DT_FINI, _DT_JMPREL)
_TABLES = (_DT_HASH, DT_STRTAB, _DT_GNU_HASH, _DT_VERSYM, _DT_VERDEF, _DT_VERNEED, *_CODE_TABLES)
_DF_TEXTREL = 4
_VER_FLG_BASE, _VERSION_HIDDEN, _VERSION_INDEX = 1, 0x8000, 0x7FFF
_SYMBOL = struct.Struct("<IBBHQQ")
_VERNEED, _VERNAUX = struct.Struct("<HHIII"), struct.Struct("<IHHII")
_VERDEF, _VERDAUX = struct.Struct("<HHHHIII"), struct.Struct("<II")

# Numbers without a name here are given as numbers.
_BINDINGS = {0: "local", 1: "global", 2: "weak", 10: "unique"}
_SYMBOL_TYPES = {0: "notype", 1: "object", 2: "func", 3: "section", 4: "file", 5: "common", 6: "tls", 10: "ifunc"}
_VISIBILITIES = ("default", "internal", "hidden", "protected")
# By st_info.
_INFO = tuple((_BINDINGS.get(i >> 4, str(i >> 4)), _SYMBOL_TYPES.get(i & 15, str(i & 15))) for i in range(256))


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
        for tag, value in DYNAMIC.iter_unpack(image.dynamic() if table is None else table):
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
        self._names[at] = found = (raw, text_of(raw))
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
            indexes = array_of("H", image.read(at, count * 2, "symbol versions"))
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
        exported = [raw if _is_exported(symbol) else None for symbol, raw in zip(symbols, raws, strict=True)]
        return tuple(symbols), table.finds(exported) if table is not None else None

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
