"""Facts of ELF files of which only parts are known: against the reader of whole files, with every byte that is lacking."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder import elf
from builder.elf_image import ElfError
from builder.elf_view import HOLE, Absent, OutOfReachError, read_facts, read_partial
from builder.nativefacts import (
    EXPORTED,
    NEEDED,
    PARTS,
    PATHS,
    SONAME,
    UNDEFINED,
    VERNEED,
    ElfFacts,
    Undefined,
    facts_of,
)
from builder.smoke.stub import stub_bytes
from tests.made import PART_OF
from tests.unit.native_made import as_patchelf, library

STUB = stub_bytes("libx.so.1", ["first", "second", "third"])


@pytest.fixture(scope="session")
def linked(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file as it was linked, with noise between its dynamic table and its end."""
    return library(tmp_path_factory.mktemp("linked"), noise=40_000, noise_in=(".data",))


@pytest.fixture(scope="session")
def patched(linked: bytes) -> bytes:
    """The same as patchelf leaves it."""
    return as_patchelf(linked)


@pytest.fixture(params=["linked", "patched"])
def made(request: pytest.FixtureRequest) -> bytes:
    """Each of the two."""
    data: bytes = request.getfixturevalue(request.param)
    return data


def truth(data: bytes) -> ElfFacts:
    return facts_of(elf.read(elf.BytesSource(data)))


def agrees(found: ElfFacts, true: ElfFacts) -> None:
    """Nothing is wrong: what is not marked is the same, and names that are said are right whatever is marked."""
    for field, part in PART_OF.items():
        if part not in found.uncertain:
            assert getattr(found, field) == getattr(true, field), field
    assert set(found.undefined) <= set(true.undefined)
    assert all(set(versions) <= set(true.exports[name]) for name, versions in found.exports.items())
    assert set(found.verneed) <= set(true.verneed)
    assert set(found.verdef) <= set(true.verdef)
    assert found.complete == (not found.uncertain)


class Parts:
    """A file of which ``known`` bytes are known; ``more`` is asked for those that are not, and raises or lets be."""

    def __init__(self, data: bytes, known: bytearray, dynamic: bool = True, final: bool = False) -> None:
        self.data, self.size, self.known, self._dynamic, self.final = data, len(data), known, dynamic, final

    def read(self, offset: int, length: int) -> bytes:
        if all(self.known[offset : offset + length]):
            return self.data[offset : offset + length]
        if self.final:
            raise OutOfReachError("bytes are not known", offset)
        raise Absent([(offset, length)])

    def read_known(self, offset: int, length: int) -> bytes:
        try:
            return self.read(offset, length)
        except OutOfReachError:
            return b"".join(self.data[i : i + 1] if self.known[i] else HOLE for i in range(offset, offset + length))

    def reaches(self, offset: int, length: int) -> bool:
        return self._dynamic


# What is asked for


@pytest.mark.parametrize("dynamic", [True, False])
def test_asked_for_piece_by_piece_it_is_the_same(made: bytes, dynamic: bool) -> None:
    source, asked = Parts(made, bytearray(len(made)), dynamic), 0
    while True:
        try:
            found = read_partial(source, "libmade.so.1")
            break
        except Absent as absent:
            for offset, length in absent.spans:
                source.known[offset : offset + length] = b"\1" * length
            asked += 1
    true = truth(made)
    agrees(found, true)
    assert found.complete is dynamic
    assert asked < 40
    assert sum(source.known) < len(made) - 30_000


def test_tables_are_asked_for_together(patched: bytes) -> None:
    at = int.from_bytes(patched[40:48], "little")
    known = bytearray(len(patched))
    known[:4096] = b"\1" * 4096
    known[at : at + 64 * 60] = b"\1" * 64 * 60
    with pytest.raises(Absent) as caught:
        read_partial(Parts(patched, known, dynamic=False), "libmade.so.1")
    # Strings, symbols, .gnu.hash, versions, needed and defined versions, as far as they are not in the first page.
    assert len(caught.value.spans) >= 5
    assert str(caught.value).startswith("not at hand: ")


def test_without_the_dynamic_table_names_tell_the_rest(made: bytes) -> None:
    found = read_partial(Parts(made, bytearray(b"\1" * len(made)), dynamic=False), "libmade.so.1")
    true = truth(made)
    assert found.uncertain == (SONAME, NEEDED, PATHS)
    assert (found.soname, found.needed) == (true.soname, true.needed)
    assert (found.rpath, found.runpath) == (true.runpath, ())
    assert (found.undefined, found.exported) == (true.undefined, true.exported)


def test_under_another_name_there_is_no_soname_to_be_recognised(linked: bytes) -> None:
    found = read_partial(Parts(linked, bytearray(b"\1" * len(linked)), dynamic=False), "other.so")
    assert found.soname is None
    assert SONAME in found.uncertain


def test_a_file_without_a_dynamic_table() -> None:
    # A core of zeros: no program headers at all.
    data = b"\x7fELF\2\1\1" + bytes(9) + (1).to_bytes(2, "little") + (62).to_bytes(2, "little") + bytes(44)
    assert read_facts(elf.BytesSource(data)) == ElfFacts("x86_64", "rel")


@pytest.mark.parametrize(
    ("at", "new", "message"),
    [
        (4, 2, "the section table does not say where the dynamic strings are"),
        (16, 0x10, "a section is not where its address is loaded from"),
        (4, 11, "the section table is not that of the dynamic table, which is out of reach"),
    ],
)
def test_a_section_table_that_leads_nowhere(linked: bytes, at: int, new: int, message: str) -> None:
    place = int.from_bytes(linked[40:48], "little")
    symbols = next(
        place + i * 64 for i in range(40) if linked[place + i * 64 + 4 : place + i * 64 + 8] == b"\x0b\0\0\0"
    )
    link = int.from_bytes(linked[symbols + 40 : symbols + 44], "little")
    spot = place + link * 64 + at
    data = linked[:spot] + new.to_bytes(4, "little") + linked[spot + 4 :]
    with pytest.raises(OutOfReachError, match=message):
        read_partial(Parts(data, bytearray(b"\1" * len(data)), dynamic=False), "libmade.so.1")
    # The loader does not look there.
    assert read_facts(elf.BytesSource(data)) == truth(linked)


# What is not known


class Both:
    """Both files, under a name that a report of a failure can print."""

    def __init__(self, linked: bytes, patched: bytes) -> None:
        self.files = {"linked": linked, "patched": patched}


@pytest.fixture(scope="session")
def both(linked: bytes, patched: bytes) -> Both:
    """The two files."""
    return Both(linked, patched)


@settings(max_examples=150, deadline=None)
@given(
    which=st.sampled_from(["linked", "patched"]),
    dynamic=st.booleans(),
    holes=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400)), max_size=8),
)
def test_no_value_comes_from_an_unknown_byte(
    both: Both, which: str, dynamic: bool, holes: list[tuple[float, int]]
) -> None:
    data = both.files[which]
    known = bytearray(b"\1" * len(data))
    # Most of them where the tables are.
    tables = data.index(b"\0puts\0") - 9_000 if which == "linked" else int.from_bytes(data[40:48], "little")
    for place, length in holes:
        at = max(0, tables + int(place * 25_000))
        known[at : at + length] = bytes(len(known[at : at + length]))
    # What is unknown has other values than the true ones, so that a use of it would be seen.
    noise = random.Random(1).randbytes(len(data))
    wrong = bytes(byte if k else other for byte, other, k in zip(data, noise, known, strict=True))
    try:
        found = read_partial(Parts(wrong, known, dynamic, final=True), "libmade.so.1")
    except OutOfReachError:
        return
    agrees(found, truth(data))


def test_a_hole_in_a_name_takes_that_name_away_alone(linked: bytes) -> None:
    at = linked.index(b"\0new_one\0") + 3
    known = bytearray(b"\1" * len(linked))
    known[at] = 0
    found = read_partial(Parts(linked, known, final=True), "libmade.so.1")
    assert found.uncertain == (EXPORTED,)
    assert set(truth(linked).exports) - set(found.exports) == {"new_one"}


def test_a_hole_in_a_needed_library(linked: bytes) -> None:
    at = linked.index(b"\0libm.so.6\0") + 4
    known = bytearray(b"\1" * len(linked))
    known[at] = 0
    found = read_partial(Parts(linked, known, final=True), "libmade.so.1")
    assert found.uncertain == (NEEDED, UNDEFINED, VERNEED)
    assert found.needed == ("libc.so.6",)
    assert {library for library, _ in found.verneed} == {"libc.so.6"}


def test_a_wrong_byte_in_an_exported_name_is_noticed(made: bytes, linked: bytes) -> None:
    # Of the strings that are there, .strtab is after .dynstr in the one and before it in the other.
    find = made.index if made == linked else made.rindex
    at = find(b"\0new_one\0") + 3
    assert read_facts(elf.BytesSource(made[:at] + b"x" + made[at + 1 :])).uncertain == (EXPORTED,)


# Whole files


def test_a_whole_file_gives_what_the_other_reader_reads(made: bytes) -> None:
    found = read_facts(elf.BytesSource(made), "libmade.so.1")
    assert found == truth(made)
    assert found.complete
    assert (found.soname, found.needed, found.verdef) == (
        "libmade.so.1",
        ("libm.so.6", "libc.so.6"),
        ("MADE_1", "MADE_2"),
    )
    assert found.runpath == ("$ORIGIN/../lib", "$ORIGIN")
    assert Undefined("maybe", None, None, True) in found.undefined
    assert {s.library for s in found.undefined if s.name == "puts"} == {"libc.so.6"}
    assert (found.machine, found.type, found.bits) == ("x86_64", "dyn", 64)


def test_a_file_on_disk(linked: bytes, tmp_path: Path) -> None:
    (tmp_path / "libmade.so.1").write_bytes(linked)
    with elf.FileSource(tmp_path / "libmade.so.1") as source:
        assert read_facts(source) == truth(linked)


def test_a_tiny_file() -> None:
    assert read_facts(elf.BytesSource(STUB)) == truth(STUB)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(STUB) - 1), st.integers(0, 255)), min_size=1, max_size=12))
def test_damaged_files_are_an_error_or_facts(changes: list[tuple[int, int]]) -> None:
    data = bytearray(STUB)
    for at, value in changes:
        data[at] = value
    outcomes: list[Callable[[], ElfFacts]] = [
        lambda: read_facts(elf.BytesSource(bytes(data))),
        lambda: read_partial(Parts(bytes(data), bytearray(b"\1" * len(data)), dynamic=False), "x.so"),
    ]
    for outcome in outcomes:
        try:
            assert isinstance(outcome(), ElfFacts)
        except ElfError as error:
            assert str(error)


def test_names_that_overlap_without_end_are_refused_soon() -> None:
    # A megabyte without an end of a string, and a hundred thousand symbols that begin in it.
    count, length = 100_000, 1 << 20
    strings = b"\0" + b"a" * length + b"\0"
    symbols = bytes(24) + b"".join(struct.pack("<IBBHQQ", 1 + i % 50, 0x12, 0, 1, 0, 0) for i in range(count))
    hashes = struct.pack("<II", 1, count + 1)
    tables, at, tags = b"", 64 + 2 * 56, []
    for tag, data in ((5, strings), (6, symbols), (4, hashes)):
        tags += [(tag, at + len(tables))]
        tables += data
    dynamic = b"".join(struct.pack("<QQ", *pair) for pair in [*tags, (10, len(strings)), (0, 0)])
    end = at + len(tables)
    header = b"\x7fELF\2\1\1" + bytes(9) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    size = end + len(dynamic)
    programs = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    programs += struct.pack("<IIQQQQQQ", 2, 4, end, end, end, len(dynamic), len(dynamic), 8)
    data = header + programs + tables + dynamic
    started = time.process_time()
    with pytest.raises(ElfError, match="strings overlap more than any linker makes them"):
        read_facts(elf.BytesSource(data))
    assert time.process_time() - started < 10


# The value


def test_what_an_export_satisfies(linked: bytes) -> None:
    found = read_facts(elf.BytesSource(linked))
    assert found.exports["new_one"] == ("MADE_2",)
    assert found.has("new_one") and found.has("new_one", "MADE_2")
    assert not found.has("new_one", "MADE_1") and not found.has("none")
    assert ElfFacts("x86_64", "dyn", exported=((None, ("f",)),)).has("f", "ANY")
    both = ElfFacts("x86_64", "dyn", exported=((None, ("f",)), ("V1", ("f", "g"))), verdef=("V1",))
    assert both.exports == {"f": (None, "V1"), "g": ("V1",)}


def test_json_and_back(made: bytes) -> None:
    found = read_partial(Parts(made, bytearray(b"\1" * len(made)), dynamic=False), "libmade.so.1")
    text = json.dumps(found.as_json())
    assert ElfFacts.from_json(json.loads(text)) == found
    assert json.dumps(ElfFacts.from_json(json.loads(text)).as_json()) == text
    assert "rpath" in found.as_json() and "runpath" not in found.as_json()


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        lambda undefined, names, uncertain: ElfFacts(
            "x86_64",
            "dyn",
            undefined=tuple(sorted(undefined, key=lambda s: (s.name, s.version or "", s.library or "", s.weak))),
            exported=((None, tuple(sorted(names))),) if names else (),
            uncertain=tuple(part for part in PARTS if part in uncertain),
        ),
        st.sets(
            st.builds(
                Undefined, st.text(), st.none() | st.text(min_size=1), st.none() | st.text(min_size=1), st.booleans()
            )
        ),
        st.sets(st.text()),
        st.sets(st.sampled_from(PARTS)),
    )
)
def test_json_of_any_facts(facts: ElfFacts) -> None:
    assert ElfFacts.from_json(facts.as_json()) == facts


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({}, "not the facts of a native file: KeyError('format')"),
        (None, "not the facts of a native file: TypeError(\"'NoneType' object is not subscriptable\")"),
        ({"format": 0}, "facts of format 0, not 1"),
        ({"format": 1, "machine": 5, "type": "dyn"}, "not the facts of a native file: TypeError(5)"),
        (
            {"format": 1, "machine": "x", "type": "dyn", "needed": [1]},
            "not the facts of a native file: TypeError([1])",
        ),
        (
            {"format": 1, "machine": "x", "type": "dyn", "uncertain": ["all"]},
            "not the facts of a native file: uncertain are all",
        ),
    ],
)
def test_json_that_is_something_else(said: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        ElfFacts.from_json(said)
    assert str(caught.value) == message
