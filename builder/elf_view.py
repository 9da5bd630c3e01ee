"""The facts of an ELF file of which not all is at hand: as much of it is asked for as is needed. Standard library only.

`builder.elf` goes where the loader goes, by the dynamic table. In a file of which only both ends are known that table
may be out of reach (118 MB before the end of libcublasLt.so.12, 99 MB of libtorch_cpu.so). The section table, last in
the file or before what patchelf appended, then leads to the same tables. What the dynamic table alone can say is read
from the strings that nothing else refers to, and is marked as uncertain: equal to the truth in 102 of 102 libraries of
torch 2.9.1, its CUDA libraries and sgl_kernel (shared/facts/abi.md).

A name is certain if each of its bytes is, and if it hashes to its word in .gnu.hash where it is exported.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from builder.elf import (
    DT_RPATH,
    DT_RUNPATH,
    DT_SONAME,
    DT_STRSZ,
    DT_STRTAB,
    MAX_SYMBOLS,
    Dynamic,
)
from builder.elf_hash import GnuHash
from builder.elf_image import DYNAMIC, ElfError, Image, Section, Source, text_of
from builder.nativefacts import (
    EXPORTED,
    NEEDED,
    PARTS,
    PATHS,
    SONAME,
    UNDEFINED,
    VERDEF,
    VERNEED,
    ElfFacts,
    Undefined,
    grouped,
    sorted_undefined,
)

HOLE = b"\xff"
"""What stands for an unknown byte of a string table. A name that has one counts as unknown, whatever put it there."""

_SHT_STRTAB, _SHT_DYNAMIC, _SHT_DYNSYM = 3, 6, 11
# The kind of a section, and the tag of the dynamic table that has its address (gABI; LSB, "Symbol Versioning").
_TAGS = {
    5: 4,  # SHT_HASH
    _SHT_DYNSYM: 6,  # DT_SYMTAB
    0x6FFFFFF6: 0x6FFFFEF5,  # SHT_GNU_HASH
    0x6FFFFFFD: 0x6FFFFFFC,  # SHT_GNU_verdef
    0x6FFFFFFE: 0x6FFFFFFE,  # SHT_GNU_verneed
    0x6FFFFFFF: 0x6FFFFFF0,  # SHT_GNU_versym
}
_HOLE_TEXT = text_of(HOLE)
_LIBRARY = re.compile(r"(?:lib[^/\s]*\.so(?:\.[^/\s]*)?|ld-linux[^/\s]*\.so\.\d+)")
# Bytes; the longest name in torch 2.11.0 has 1,995.
_LONG = 4096
_EXPORTED_BINDINGS, _WEAK, _VISIBLE = (1, 2, 10), 2, (0, 3)


class Absent(Exception):
    """Parts of a file, as (offset, length), that are not at hand yet, or not for certain."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        super().__init__(f"not at hand: {', '.join(f'{length} bytes at {offset:#x}' for offset, length in spans)}")
        self.spans = tuple(spans)


class OutOfReachError(ElfError):
    """Tables that nothing at hand leads to."""


class PartialSource(Source, Protocol):
    """A `Source` whose ``read`` raises `Absent` for what is not at hand, and never returns a byte that may be wrong."""

    def reaches(self, offset: int, length: int) -> bool:
        """Whether a part is at hand, or would be if it were asked for."""

    def read_known(self, offset: int, length: int) -> bytes:
        """As ``read``, but unknown bytes are `HOLE` where they are out of reach."""


class _All:
    """A whole file as a `PartialSource`."""

    def __init__(self, source: Source) -> None:
        self.size, self.read = source.size, source.read
        self.read_known = source.read

    def reaches(self, offset: int, length: int) -> bool:
        return True


def read_facts(source: Source, name: str = "") -> ElfFacts:
    """The facts of a file that is there as a whole; ``name`` is its own, without folders.

    Raises `ElfError`, and what ``source.read`` raises.
    """
    return read_partial(_All(source), name)


def read_partial(source: PartialSource, name: str) -> ElfFacts:
    """The facts of a file that ``source`` has parts of.

    Raises `Absent` where more of it is needed (then call again), `OutOfReachError` where parts do not do, `ElfError`
    for a damaged file, and what ``source.read`` raises.
    """
    image = Image(source)
    span = image.dynamic_span()
    if span is None:
        return ElfFacts(image.machine, image.type)
    whole = source.reaches(*span)
    table = None if whole else _table_of_sections(image, span[0], source)
    # What lacks is asked for together: each time costs a request.
    lacking: list[tuple[int, int]] = []

    def strings(at: int, length: int, what: str) -> bytes:
        try:
            found = image.read(at, length, what, source.read_known)
        except Absent as absent:
            lacking.extend(absent.spans)
            return b""
        # The end of the last name may be what is not known.
        return found + b"\0" if HOLE in found else found

    dynamic = Dynamic(image, table, strings, HOLE)
    try:
        tables = dynamic.symbol_table()
    except Absent as absent:
        lacking.extend(absent.spans)
    if lacking:
        raise Absent(lacking)
    reader = _Reader(dynamic, *tables)
    needs, definitions = reader.versions()
    undefined, exported = reader.symbols(needs, definitions)
    if whole:
        soname, needed, rpath, runpath = reader.said()
    else:
        soname, needed, rpath, runpath = reader.guessed(name, needs)
    return ElfFacts(
        machine=image.machine,
        type=image.type,
        soname=soname,
        needed=needed,
        rpath=rpath,
        runpath=runpath,
        undefined=undefined,
        exported=exported,
        verneed=tuple((library, version) for _, library, version in needs),
        verdef=tuple(version for _, version in definitions),
        uncertain=tuple(part for part in PARTS if part in reader.uncertain),
    )


def _table_of_sections(image: Image, dynamic_at: int, source: PartialSource) -> bytes:
    """What a dynamic table would say of the tables that the section table names; they are asked for all at once."""
    sections = image.sections()
    symbols = [section for section in sections if section.type == _SHT_DYNSYM]
    if [s.offset for s in sections if s.type == _SHT_DYNAMIC] != [dynamic_at] or len(symbols) != 1:
        raise OutOfReachError("the section table is not that of the dynamic table, which is out of reach", dynamic_at)
    strings = sections[symbols[0].link] if symbols[0].link < len(sections) else symbols[0]
    if strings.type != _SHT_STRTAB:
        raise OutOfReachError("the section table does not say where the dynamic strings are", strings.offset)
    said = [(DT_STRTAB, strings.address), (DT_STRSZ, strings.size)]
    found: list[Section] = [strings]
    for section in sections:
        if section.type in _TAGS:
            said.append((_TAGS[section.type], section.address))
            found.append(section)
    if len({tag for tag, _ in said}) != len(said):
        raise OutOfReachError("the section table names two tables of one kind")
    for section in found:
        if image.locate(section.address, "section")[0] != section.offset:
            raise OutOfReachError("a section is not where its address is loaded from", section.offset)
    lacking: list[tuple[int, int]] = []
    for section in found:
        try:
            way = source.read_known if section is strings else source.read
            image.read(section.offset, section.size, "section", way)
        except Absent as absent:
            lacking.extend(absent.spans)
    if lacking:
        raise Absent(lacking)
    return b"".join(DYNAMIC.pack(*pair) for pair in said)


_Needs = list[tuple[int, str, str]]
_Definitions = list[tuple[int, str]]
_Exported = tuple[tuple[str | None, tuple[str, ...]], ...]
_Said = tuple[str | None, tuple[str, ...], tuple[str, ...], tuple[str, ...]]


class _Reader:
    """Facts out of the tables; ``uncertain`` collects the fields that holes in the strings, or a wrong hash, touch."""

    def __init__(self, dynamic: Dynamic, symbols: bytes, indexes: array[int], table: GnuHash | None) -> None:
        self._dynamic, self._symbols, self._indexes, self._table = dynamic, symbols, indexes, table
        self.uncertain: set[str] = set()
        self._referenced: set[int] = set()
        self._unknown: set[int] = set()

    def _whole(self, text: str, part: str) -> bool:
        """Whether a text has no hole in it."""
        if _HOLE_TEXT not in text:
            return True
        self.uncertain.add(part)
        return False

    def versions(self) -> tuple[_Needs, _Definitions]:
        """What `Dynamic` reads, without names that are not known."""
        needs, definitions = self._dynamic.version_needs(), self._dynamic.version_definitions()
        known = [need for need in needs if self._whole(need[1], VERNEED) and self._whole(need[2], VERNEED)]
        defined = [definition for definition in definitions if self._whole(definition[1], VERDEF)]
        self._unknown = {need[0] for need in needs} - {need[0] for need in known}
        self._unknown |= {definition[0] for definition in definitions} - {definition[0] for definition in defined}
        return known, defined

    def symbols(self, needs: _Needs, definitions: _Definitions) -> tuple[tuple[Undefined, ...], _Exported]:
        """Undefined symbols and exported names, as `builder.elf.Elf` has them, without an object for each."""
        words = array("I", self._symbols)
        if sys.byteorder == "big":
            words.byteswap()
        # A symbol is six words: its name's place; binding and type, visibility, section; value and size.
        places, kinds = words[0::6].tolist(), words[1::6].tolist()
        roles = {kind: _role(kind) for kind in set(kinds)}
        self._referenced.update(places)

        needed = {index: (version, library) for index, library, version in needs}
        versions: dict[int, str | None] = {index: version for index, (version, _) in needed.items()}
        versions |= dict(definitions)
        undefined: list[Undefined] = []
        exports: dict[str | None, list[str]] = {}
        hashed: dict[int, bytes] = {}
        names, unknown = self._names, self._unknown
        for symbol, (place, kind, index) in enumerate(zip(places, kinds, self._indexes, strict=True)):
            role = roles[kind]
            if not role or not symbol:
                continue
            raw = names.get(place) if place else b""
            if raw is None or len(raw) > _LONG:
                # A name may begin within another string. `Dynamic.name` bounds what such names, and long ones, add up to.
                raw, name = self._dynamic.name(place, "symbol name")
            else:
                name = text_of(raw)
            number = index & 0x7FFF
            if HOLE in raw or number in unknown:
                self.uncertain.add(EXPORTED if role == _EXPORT else UNDEFINED)
            elif role == _EXPORT:
                hashed[symbol] = raw
                exports.setdefault(versions.get(number), []).append(name)
            else:
                version, library = needed.get(number, (None, None))
                undefined.append(Undefined(name, version, library, role == _UNDEFINED_WEAK))
        if self._table is not None and not self._table.explains(hashed):
            self.uncertain.add(EXPORTED)
        return sorted_undefined(undefined), grouped(exports)

    @cached_property
    def _names(self) -> dict[int, bytes]:
        """The string table's strings by where they start, without the last one if it has no end."""
        strings = self._dynamic.strings
        if strings.count(b"\0") > MAX_SYMBOLS:
            return {}
        raws = strings.split(b"\0")[:-1]
        return dict(zip(accumulate((len(raw) + 1 for raw in raws), initial=0), raws, strict=False))

    def said(self) -> _Said:
        """Soname, needed libraries, rpath and runpath as the dynamic table says them."""
        dynamic = self._dynamic
        soname = dynamic.text(dynamic.tags[DT_SONAME], "soname") if DT_SONAME in dynamic.tags else None
        if soname is not None and not self._whole(soname, SONAME):
            soname = None
        needed = [dynamic.text(at, "name of a needed library") for at in dynamic.needed]
        paths = [dynamic.paths(tag, "search path") for tag in (DT_RPATH, DT_RUNPATH)]
        rpath, runpath = (tuple(path for path in some if self._whole(path, PATHS)) for some in paths)
        return soname, tuple(name for name in needed if self._whole(name, NEEDED)), rpath, runpath

    def guessed(self, name: str, needs: _Needs) -> _Said:
        """The same, from the strings that no symbol refers to."""
        self.uncertain |= {SONAME, NEEDED, PATHS}
        others = [
            text_of(raw)
            for place, raw in self._names.items()
            if 0 < len(raw) <= _LONG and HOLE not in raw and place not in self._referenced
        ]
        # The version that a library's own names are under is often called as it is, and is a symbol.
        own = b"\0" + name.encode() + b"\0" in self._dynamic.strings
        files = {library for _, library, _ in needs}
        libraries = [text for text in others if text != name and (text in files or _LIBRARY.fullmatch(text))]
        paths = [text for text in others if text.startswith("$ORIGIN")]
        # Where patchelf set paths anew, the old ones are there as well, further ahead.
        return (
            name if own else None,
            tuple(dict.fromkeys(libraries)),
            tuple(paths[-1].split(":")) if paths else (),
            (),
        )


_EXPORT, _UNDEFINED, _UNDEFINED_WEAK = 1, 2, 3


def _role(kind: int) -> int:
    """What a symbol with this second word is to other objects; 0: nothing."""
    binding, visibility, section = kind >> 4 & 15, kind >> 8 & 3, kind >> 16
    if section:
        return _EXPORT if binding in _EXPORTED_BINDINGS and visibility in _VISIBLE else 0
    if binding == _WEAK:
        return _UNDEFINED_WEAK
    return _UNDEFINED if binding else 0
