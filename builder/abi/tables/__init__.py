"""What the libraries of torch releases export, shipped: a verdict then reads nothing of them.

Two files, made by `python -m builder.abi.tables` (docs/abi.md). `index.json.z` has, for each release on the default index,
its wheel and the CUDA wheels that it pins: their native files, and of most what a loader has to know. `names.bin` has
every name that one of them exports, sorted, in blocks that are compressed one by one, each name with the number of the
set of columns that have it; a column is one library's names under one version. So a name is found by unpacking one
block, and the names beside it are those that it may be mistaken for.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from packaging.version import Version

from builder.abi.model import Exports, Facts, Wheel

FORMAT = 1
INDEX, NAMES = "index.json.z", "names.bin"

BLOCK = 1024
"""Names in a block: fewer make the file larger (2.2 MB with 512), more take longer to unpack for one name."""


class Names:
    """The names of `names.bin`, and for each the set of columns that have it, as a number with a bit for each."""

    def __init__(
        self, blocks: Sequence[Sequence[Any]], masks: Sequence[str], read: Callable[[int, int], bytes]
    ) -> None:
        self._firsts = [str(first) for first, _, _ in blocks]
        self._places = [(int(offset), int(size)) for _, offset, size in blocks]
        self._masks, self._read = masks, read
        self._unpacked: dict[int, dict[str, int]] = {}

    def columns(self, name: str) -> int:
        """The columns that have a name; 0 where none has."""
        at = bisect_right(self._firsts, name) - 1
        number = self._block(at).get(name) if at >= 0 else None
        return 0 if number is None else int(self._masks[number], 16)

    def starting(self, prefix: str) -> Iterator[tuple[str, int]]:
        """The names that start like this, with their columns."""
        at = max(0, bisect_left(self._firsts, prefix) - 1)
        while at < len(self._firsts) and (self._firsts[at] <= prefix or self._firsts[at].startswith(prefix)):
            for name, number in self._block(at).items():
                if name.startswith(prefix):
                    yield name, int(self._masks[number], 16)
            at += 1

    def _block(self, at: int) -> dict[str, int]:
        if at not in self._unpacked:
            self._unpacked[at] = dict(unpack(self._read(*self._places[at])))
        return self._unpacked[at]


def pack(names: Iterable[tuple[str, int]]) -> bytes:
    """A block: of each name what it has not in common with the one before it."""
    lines, before = [], ""
    for name, number in names:
        common = 0
        most = min(len(before), len(name))
        while common < most and before[common] == name[common]:
            common += 1
        lines.append(f"{common:x}\t{name[common:]}\t{number:x}")
        before = name
    return zlib.compress("\n".join(lines).encode(), 9)


def unpack(block: bytes) -> Iterator[tuple[str, int]]:
    """What `pack` packed."""
    name = ""
    for line in zlib.decompress(block).decode().split("\n"):
        common, rest, number = line.split("\t")
        name = name[: int(common, 16)] + rest
        yield name, int(number, 16)


class _Columns(Exports):
    """The exports of one library of the tables."""

    def __init__(self, names: Names, columns: Iterable[tuple[str | None, int]]) -> None:
        self._names = names
        self._columns = [(version, 1 << number) for version, number in columns]
        self._any = sum(bit for _, bit in self._columns)

    def versions(self, name: str) -> Sequence[str | None]:
        found = self._names.columns(name) & self._any
        return [version for version, bit in self._columns if found & bit] if found else ()

    def starting(self, prefix: str) -> Iterable[str]:
        return (name for name, columns in self._names.starting(prefix) if columns & self._any)


@cache
def _index() -> Mapping[str, Any]:
    folder = resources.files(__package__)
    said: Mapping[str, Any] = json.loads(zlib.decompress((folder / INDEX).read_bytes()))
    return said


@cache
def _names() -> Names:
    data = (resources.files(__package__) / NAMES).read_bytes()
    said = _index()
    return Names(said["blocks"], said["masks"], lambda offset, size: data[offset : offset + size])


def versions(name: str) -> list[str]:
    """The releases of a distribution that there is a table of, the oldest first."""
    return sorted(_index()["releases"].get(name, ()), key=Version)


def files(name: str, version: str) -> Mapping[str, str]:
    """The wheels of a release for any Python, whose libraries are taken to export the same: file name → sha256."""
    found: Mapping[str, str] = _index()["releases"][name][version]["files"]
    return found


def wheels(sha256: str, read: Callable[[str, str, str], Facts]) -> list[tuple[Wheel, str, int]]:
    """The wheel with this sha256 and those that it pins, each with its file name and size in bytes; none if not known.

    ``read`` is asked for a library (name and version of the wheel, file) of which the tables have no more than the name.
    """
    said = _index()
    for releases in said["releases"].values():
        for release in releases.values():
            if sha256 in release["files"].values():
                return [_wheel(said["wheels"][number], read) for number in release["wheels"]]
    return []


def _wheel(said: Mapping[str, Any], read: Callable[[str, str, str], Facts]) -> tuple[Wheel, str, int]:
    name, version, known = said["name"], said["version"], said["members"]

    @cache
    def facts(file: str) -> Facts:
        return _facts(known[file]) if file in known else read(name, version, file)

    return Wheel(name, version, tuple(said["natives"]), facts), said["file"], said["size"]


def _facts(said: Mapping[str, Any]) -> Facts:
    return Facts(
        said.get("soname"),
        tuple(said.get("needed", ())),
        tuple(said.get("rpath", ())),
        tuple(said.get("runpath", ())),
        tuple((library, version) for library, version in said.get("verneed", ())),
        tuple(said.get("verdef", ())),
        (),
        _Columns(_names(), ((version, number) for version, number in said["columns"])),
        tuple(said.get("uncertain", ())),
    )


def base_exports() -> Mapping[str, Exports]:
    """What the libraries of Debian 12 export; a newer base has these names too, an older one those up to its versions."""
    return {
        library: _Columns(_names(), ((version, number) for version, number in columns))
        for library, columns in _index()["base"].items()
    }
