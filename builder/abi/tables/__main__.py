"""`python -m builder.abi.tables`: read what the releases on the index export, and write the tables that are shipped.

    python -m builder.abi.tables [--from 2.6] [--system /lib/x86_64-linux-gnu]

It reads 5 to 17 MB of each torch release, and the C and C++ libraries of the Debian 12 machine that it runs on.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder import settings
from builder.abi.tables import BLOCK, FORMAT, INDEX, NAMES, pack
from builder.abi.verb import Question, base_named
from builder.abi.wheels import Release, Target
from builder.display import note
from builder.elf import read_file
from builder.facts import ProviderFact, load_facts
from builder.files import write_atomic
from builder.nativefacts import EXPORTED, ElfFacts, facts_of

# Named in the tables, and read from the index if a file ever asks for their names: 14, 10 and 3 MB each (random numbers,
# FFT and sparse kernels lie where the names are), and 89,567 names of libcusparseLt.
_LEFT_OUT = ("libcurand.so*", "libcufft*.so*", "libcusparseLt.so*")

# What the interpreter and C++ code bring into every process.
_BASE = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libz.so.1", "ld-linux-x86-64.so.2")


class Tables:
    """Collects columns of names."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._columns = 0

    def add(self, exported: Iterable[tuple[str | None, Iterable[str]]]) -> list[tuple[str | None, int]]:
        """A library's names by version; the columns that they are."""
        found = []
        for version, names in exported:
            bit = 1 << self._columns
            found.append((version, self._columns))
            self._columns += 1
            for name in names:
                self._names[name] = self._names.get(name, 0) | bit
        return found

    def blocks(self) -> tuple[list[tuple[str, int, int]], list[str], bytes]:
        """First name, offset and size of each block; the sets of columns; the blocks themselves."""
        numbers: dict[int, int] = {}
        rows = [(name, numbers.setdefault(mask, len(numbers))) for name, mask in sorted(self._names.items())]
        data, blocks = bytearray(), []
        for start in range(0, len(rows), BLOCK):
            block = pack(rows[start : start + BLOCK])
            blocks.append((rows[start][0], len(data), len(block)))
            data += block
        return blocks, [f"{mask:x}" for mask in numbers], bytes(data)


def member(facts: ElfFacts, tables: Tables) -> dict[str, Any]:
    """What the index says of one library; what is empty is left out."""
    if EXPORTED in facts.uncertain:
        raise SystemExit(f"the names of {facts.soname} could not all be read: it would be a table that lies")
    said = {
        "soname": facts.soname,
        "needed": facts.needed,
        "rpath": facts.rpath,
        "runpath": facts.runpath,
        "verneed": facts.verneed,
        "verdef": facts.verdef,
        "uncertain": facts.uncertain,
    }
    return {key: value for key, value in said.items() if value} | {"columns": tables.add(facts.exported)}


def collect(question: Question, fact: ProviderFact, first: str, tables: Tables) -> dict[str, Any]:
    """Every release of a provider from `first` on, and what it pins."""
    wheels: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    releases: dict[str, Any] = {}

    def number(release: Release, own: bool) -> int:
        if release.sha256 not in numbers:
            members = question.index.members(release)
            named = [
                name
                for name in members.names
                if own or any(fnmatchcase(name.rpartition("/")[2], library) for library in fact.names)
            ]
            named = [n for n in named if not any(fnmatchcase(n.rpartition("/")[2], out) for out in _LEFT_OUT)]
            read = {name: native.facts for name, native in members.read(named).items()}
            numbers[release.sha256] = len(wheels)
            said = {"name": release.name, "version": release.version, "file": release.file, "size": release.size}
            known = {name: member(facts, tables) for name, facts in read.items() if facts is not None}
            wheels.append({**said, "natives": list(members.names), "members": known})
        return numbers[release.sha256]

    for version in question.index.versions(fact.distribution, SpecifierSet(f">={first}")):
        note(f"{fact.distribution} {version} …")
        release = question.index.release(fact.distribution, version)
        files = question.index.files(fact.distribution, version)
        own = number(release, own=True)
        pinned = [number(item, own=False) for item in question.pinned(release, {}, fact)]
        releases[str(version)] = {"files": files, "wheels": [own, *pinned]}
    return {"releases": {fact.distribution: releases}, "wheels": wheels}


def main() -> None:
    """Write `index.json.z` and `names.bin` beside this file."""
    parser = argparse.ArgumentParser(
        prog="python -m builder.abi.tables", description="Make the tables that are shipped."
    )
    parser.add_argument("--from", dest="first", default="2.6", metavar="VERSION", help="the first torch release")
    parser.add_argument(
        "--system", default="/lib/x86_64-linux-gnu", type=Path, metavar="DIR", help="Debian 12's libraries"
    )
    arguments = parser.parse_args()
    tables = Tables()
    base = base_named("bookworm")
    question = Question(settings.load(), Target("3.11", base))
    said: dict[str, Any] = {"format": FORMAT}
    for fact in load_facts(ProviderFact):
        said |= collect(question, fact, str(Version(arguments.first)), tables)
    said["base"] = {name: tables.add(facts_of(read_file(arguments.system / name)).exported) for name in _BASE}
    said["blocks"], said["masks"], names = tables.blocks()
    folder = Path(__file__).parent
    index = zlib.compress(json.dumps(said, sort_keys=True, separators=(",", ":")).encode(), 9)
    write_atomic(folder / INDEX, index)
    write_atomic(folder / NAMES, names)
    note(f"{len(said['wheels'])} wheels; {INDEX} {len(index):,} bytes, {NAMES} {len(names):,} bytes")


if __name__ == "__main__":
    main()
