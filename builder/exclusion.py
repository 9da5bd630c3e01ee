"""Bytes of a dynamic table that can be nothing but what they are, though only their place in the stream is known.

Most of a dynamic table is zeros, and deflate copies those from zeros before them, as far back as a megabyte. So the end of
a stream (`builder.deflate`) has all that tells one table from another and lacks the zeros. It does say where each lacking
byte was copied from, and bytes of one place are alike. A place is known as soon as one of them can have one value alone:

* a table without DT_STRTAB, DT_SYMTAB, DT_STRSZ or DT_SYMENT is no dynamic table of an object that is linked to (gABI,
  chapter 5, "Dynamic Section"): where one line alone can be it, it is;
* tags end at 38 or begin at DT_LOOS, and none is above DT_HIPROC: all between is reserved, and no linker writes it;
* an address lies in the image, a size, a count or the index of a name within the file; symbols and relocations with
  addends have 24 bytes each, and the relocations of the PLT are of that kind.

A byte that any of this contradicts, certain or not, means that nothing follows. What is read with such a table is checked
as ever: by bounds, and each exported name by its hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

MOST_LINES, MOST_ROUNDS = 512, 16
"""Lines of a table that is looked at, a real one has about 40; and how often what became known is gone through."""

_LINE, _HALF, _END = 16, 8, 0
# Tags of the gABI, and those of GNU's in the ranges that the LSB has for values and addresses.
_REQUIRED = (5, 6, 10, 11)  # STRTAB, SYMTAB, STRSZ, SYMENT
_EXACT = {9: 24, 11: 24, 20: 7}  # RELAENT, SYMENT, PLTREL
# PLTGOT, HASH, STRTAB, SYMTAB, RELA, INIT, FINI, JMPREL, INIT_ARRAY, FINI_ARRAY, GNU_HASH, VERSYM, VERDEF, VERNEED
_ADDRESSES = frozenset({3, 4, 5, 6, 7, 12, 13, 23, 25, 26, 0x6FFFFEF5, 0x6FFFFFF0, 0x6FFFFFFC, 0x6FFFFFFE})
# NEEDED, PLTRELSZ, RELASZ, STRSZ, SONAME, RPATH, INIT_ARRAYSZ, FINI_ARRAYSZ, RUNPATH, RELACOUNT, VERDEFNUM, VERNEEDNUM
_SIZES = frozenset({1, 2, 8, 10, 14, 15, 27, 28, 29, 0x6FFFFFF9, 0x6FFFFFFD, 0x6FFFFFFF})
# The highest byte of a tag's four from which on it may be a system's or a processor's (DT_LOOS is 0x6000000D).
_OTHERS = 0x60


class _Contradiction(Exception):
    """A byte that would have to have two values."""


def settle(table: bytes, origins: Sequence[int | None], image: int, size: int) -> bytes | None:
    """A dynamic table with all of its bytes; None where one before its end (DT_NULL) may still be another.

    ``origins`` has None for each byte of ``table`` that is certain, else the place that it was copied from. ``image`` is
    the address behind the last that is loaded, ``size`` the file's. Behind the end there are zeros. A table of more than
    `MOST_LINES` is not looked at.
    """
    if len(table) > MOST_LINES * _LINE:
        return None
    lines = [_Line(table, origins, at) for at in range(0, len(table) - _LINE + 1, _LINE)]
    places: dict[int, int] = {}
    try:
        for _ in range(MOST_ROUNDS):
            known = len(places)
            _required(lines, places)
            # What follows the end of the table may be anything.
            before = list(itertools.takewhile(lambda line: not line.may_be(places, _END), lines))
            _tags(before, places)
            _values(before, places, image, size)
            if len(places) == known:
                break
    except _Contradiction:
        return None
    found = bytearray()
    for line in lines:
        if line.tag(places) == _END:
            break
        for value in (*line.bytes(places, 0), *line.bytes(places, _HALF)):
            if value is None:
                return None
            found.append(value)
    return bytes(found.ljust(len(table), b"\0"))


class _Line:
    """A tag and its value, of which some bytes are known by place alone."""

    def __init__(self, table: bytes, origins: Sequence[int | None], at: int) -> None:
        self._table, self._origins, self._at = table, origins, at

    def bytes(self, places: dict[int, int], half: int) -> list[int | None]:
        """The eight bytes of the tag (``half`` 0) or of the value, as far as they are known."""
        found: list[int | None] = []
        for at in range(self._at + half, self._at + half + _HALF):
            place = self._origins[at]
            found.append(self._table[at] if place is None else places.get(place))
        return found

    def tag(self, places: dict[int, int]) -> int | None:
        """The tag, where all of it is known."""
        known = [value for value in self.bytes(places, 0) if value is not None]
        return int.from_bytes(bytes(known), "little") if len(known) == _HALF else None

    def may_be(self, places: dict[int, int], tag: int) -> bool:
        """Whether the tag can be this one, as far as it is known."""
        wanted = tag.to_bytes(_HALF, "little")
        return all(value in (None, want) for value, want in zip(self.bytes(places, 0), wanted, strict=True))

    def put(self, places: dict[int, int], half: int, first: int, value: int) -> None:
        """Say what the bytes from ``first`` to the end of a half are: those of a number. Raises `_Contradiction`."""
        wanted = value.to_bytes(_HALF, "little")
        for index in range(first, _HALF):
            place = self._origins[self._at + half + index]
            there = self._table[self._at + half + index] if place is None else places.setdefault(place, wanted[index])
            if there != wanted[index]:
                raise _Contradiction


def _required(lines: Sequence[_Line], places: dict[int, int]) -> None:
    for tag in _REQUIRED:
        fitting = [line for line in lines if line.may_be(places, tag)]
        if not fitting:
            raise _Contradiction
        if len(fitting) == 1:
            fitting[0].put(places, 0, 0, tag)


def _tags(lines: Sequence[_Line], places: dict[int, int]) -> None:
    for line in lines:
        line.put(places, 0, 4, 0)
        highest = line.bytes(places, 0)[3]
        if highest is not None and highest < _OTHERS:
            line.put(places, 0, 1, 0)


def _values(lines: Sequence[_Line], places: dict[int, int], image: int, size: int) -> None:
    for line in lines:
        tag = line.tag(places)
        if tag in _EXACT:
            line.put(places, _HALF, 0, _EXACT[tag])
        elif tag in _ADDRESSES or tag in _SIZES:
            most = image if tag in _ADDRESSES else size
            line.put(places, _HALF, (most.bit_length() + 7) // 8, 0)
