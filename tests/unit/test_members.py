"""Native members of wheels, read at their two ends: from a server on loopback and from files, sound, damaged and hostile."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from urllib3.util import Retry

from builder import elf, members, parts
from builder.errors import IntegrityError
from builder.index import NoRangesError, session
from builder.members import Members, Native
from builder.nativefacts import EXPORTED, NEEDED, PATHS, SONAME, UNDEFINED, ElfFacts, facts_of
from builder.remote import RangedFile, Span
from builder.smoke.stub import stub_bytes
from tests.loopback import Loopback, Served, loopback
from tests.made import settings_at
from tests.unit.native_made import as_patchelf, library, wheel

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

STUB = stub_bytes("libx.so.1", ["first", "second", "third"])
MADE = {"part/linked.so": (".rodata",), "part/far.so": (".rodata", ".data")}


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Large members in every layout, and small ones."""
    folder = tmp_path_factory.mktemp("native")
    made = {
        name: library(folder / name, exports=3000, noise=1_500_000, noise_in=where, soname=name.partition("/")[2])
        for name, where in MADE.items()
    }
    moved = library(folder / "moved", exports=3000, noise=1_500_000, soname="libmoved.so.2")
    return {
        **made,
        "part/libmoved.so.2": as_patchelf(moved),
        "part/libmoved-far.so.2": as_patchelf(made["part/far.so"]),
        "part/small.so": library(folder / "small", exports=20),
        "part/stub.so.1": STUB,
        "part/other.txt": b"not a library.so",
    }


@pytest.fixture(scope="session")
def made(files: dict[str, bytes]) -> tuple[str, bytes]:
    """The wheel of them: its name and its bytes."""
    return wheel(files, stored=("part/stub.so.1",))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, made: tuple[str, bytes]) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        server.files["/made.whl"] = Served(made[1])
        yield server


def true(files: dict[str, bytes], name: str) -> ElfFacts:
    return facts_of(elf.read(elf.BytesSource(files[name])))


def ranged(site: Loopback, folder: Path, data: bytes) -> RangedFile:
    sha256 = hashlib.sha256(data).hexdigest()
    client = session(settings_at(folder))
    return RangedFile(
        folder / "ranges", "made-1.0-py3-none-any.whl", sha256, client, lambda: f"{site.url}/made.whl", len(data)
    )


def here(data: bytes, cache: Path | None = None) -> Members:
    return Members("made-1.0-py3-none-any.whl", "a" * 64, io.BytesIO(data), lambda _: None, cache)


def only(data: bytes) -> Native:
    found = here(data).read()
    assert len(found) == 1
    return next(iter(found.values()))


# What is read


def test_the_facts_of_every_member_and_no_more_than_they_need(
    site: Loopback, tmp_path: Path, files: dict[str, bytes], made: tuple[str, bytes]
) -> None:
    file = ranged(site, tmp_path, made[1])
    wheel_ = Members(made[0], "a" * 64, file, file.fetch, None)
    assert wheel_.names == tuple(name for name in files if ".so" in name.rpartition("/")[2] and "txt" not in name)
    before = file.bytes_read
    found = wheel_.read()
    for name, native in found.items():
        assert native.facts == true(files, name), name
        assert native.trouble == ""
    assert {name: native.how for name, native in found.items()} == {
        "part/linked.so": "parts",
        "part/far.so": "whole",
        "part/libmoved.so.2": "parts",
        "part/libmoved-far.so.2": "whole",
        "part/small.so": "whole",
        "part/stub.so.1": "parts",
    }
    assert found["part/linked.so"].packed > 1_500_000
    assert found["part/linked.so"].looked_at < 400_000
    assert file.bytes_read - before < 0.7 * len(made[1])


def test_zeros_that_were_copied_from_far_before_are_not_fetched(files: dict[str, bytes]) -> None:
    """As in sgl_kernel's `_mscclpp`: the zeros of a dynamic table come from those of a megabyte of other tables."""
    noise, random_ = random.Random(1_500_000).randbytes(1_500_000), random.Random(1)
    words = b"".join(struct.pack("<Q", random_.getrandbits(24)) for _ in range(len(noise) // 8))
    data = files["part/linked.so"].replace(noise, words + bytes(len(noise) - len(words)))
    found = only(wheel({"part/a.so": data})[1])
    assert found.facts == facts_of(elf.read(elf.BytesSource(data)))
    assert (found.how, found.packed > 800_000) == ("parts", True)
    assert found.looked_at < 130_000


def test_several_are_fetched_at_once(site: Loopback, tmp_path: Path, made: tuple[str, bytes]) -> None:
    file = ranged(site, tmp_path, made[1])
    rounds: list[list[Span]] = []

    def fetch(spans: list[Span]) -> None:
        rounds.append(spans)
        file.fetch(spans)

    wheel_ = Members(made[0], "a" * 64, file, fetch, None)
    one = wheel_.read(["part/linked.so"])["part/linked.so"]
    assert one.facts is not None
    alone = len(rounds)
    rounds.clear()
    wheel_.read(["part/linked.so", "part/libmoved.so.2"])
    assert len(rounds[0]) == 4
    assert len(rounds) <= alone + 2


def test_a_table_that_is_out_of_reach_is_said(
    files: dict[str, bytes], made: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "WHOLE", 0)
    monkeypatch.setattr(parts, "MOST_DYNAMIC", 300_000)
    for name in ("part/far.so", "part/libmoved-far.so.2"):
        found, facts = here(made[1]).read([name])[name], true(files, name)
        assert found.facts is not None
        assert found.facts.uncertain == (SONAME, NEEDED, PATHS)
        assert (found.facts.needed, found.facts.exported) == (facts.needed, facts.exported)
        assert (found.facts.undefined, found.facts.verneed) == (facts.undefined, facts.verneed)
        assert found.how == "parts"
        assert found.looked_at < found.packed // 4


def with_names_before(data: bytes) -> bytes:
    """The same in patchelf's layout, with the names again and again between the noise and the section table.

    A part of libtorch_python.so is like this: .strtab has the names of .dynstr.
    """
    at = data.index(b"\0puts\0")
    start = data.rindex(b"\0\0", 0, at)
    strings = data[start : data.index(b"$ORIGIN", at)]
    return as_patchelf(data[:-1] + data[-1:] + strings * 40)


def test_names_that_come_from_too_far_back_make_it_whole(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = with_names_before(files["part/linked.so"])
    _, packed = wheel({"part/a.so": data})
    facts = facts_of(elf.read(elf.BytesSource(data)))
    found = only(packed)
    assert (found.how, found.facts) == ("whole", facts)
    monkeypatch.setattr(parts, "WHOLE", 0)
    monkeypatch.setattr(parts, "MOST_DYNAMIC", 0)
    monkeypatch.setattr(parts, "MOST_TAIL", 150_000)
    uncertain = only(packed)
    assert uncertain.how == "parts"
    if uncertain.facts is None:
        assert "cannot be read in parts" in uncertain.trouble
        return
    assert EXPORTED in uncertain.facts.uncertain or UNDEFINED in uncertain.facts.uncertain
    assert set(uncertain.facts.exports) <= set(facts.exports)
    assert set(uncertain.facts.undefined) <= set(facts.undefined)


@pytest.mark.parametrize("level", [1, 6, 9])
def test_any_level_of_compression(files: dict[str, bytes], level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SMALL", 0)
    monkeypatch.setattr(parts, "HEAD", 2048)
    monkeypatch.setattr(parts, "TAIL", 8192)
    monkeypatch.setattr(parts, "STEP", 8192)
    for name in ("part/small.so", "part/libmoved.so.2"):
        _, data = wheel({name: files[name]}, level=level)
        assert only(data).facts == true(files, name)


def test_one_member_that_is_not_there(made: tuple[str, bytes]) -> None:
    with pytest.raises(KeyError, match=r"part/none\.so"):
        here(made[1]).read(["part/small.so", "part/none.so"])


def test_progress_is_told(made: tuple[str, bytes]) -> None:
    told: list[tuple[int, int, int]] = []
    here(made[1]).read(progress=lambda *now: told.append(now))
    assert told[0] == (0, 6, 0)
    assert [done for done, _, _ in told] == list(range(7))
    assert [looked for _, _, looked in told] == sorted(looked for _, _, looked in told)


def test_threads_take_turns(made: tuple[str, bytes]) -> None:
    wheel_ = here(made[1])
    found: list[Native] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(wheel_.read([name])[name])) for name in wheel_.names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(native.member for native in found) == sorted(wheel_.names)
    assert all(native.facts for native in found)


def test_a_server_without_ranges(site: Loopback, tmp_path: Path, made: tuple[str, bytes]) -> None:
    # Who opens the wheel then takes it as a whole; that is no other file to read.
    site.files["/made.whl"].ranges = False
    with pytest.raises(NoRangesError):
        ranged(site, tmp_path, made[1])


# What is kept


def test_a_second_time_costs_nothing(
    site: Loopback, tmp_path: Path, files: dict[str, bytes], made: tuple[str, bytes]
) -> None:
    file = ranged(site, tmp_path, made[1])
    first = Members(made[0], "a" * 64, file, file.fetch, tmp_path).read()
    site.stop()
    asked: list[int] = []

    def opened() -> members.Opened:
        asked.append(1)
        return io.BytesIO(made[1]), lambda _: None

    again = Members.lazy(made[0], "a" * 64, opened, tmp_path)
    second = again.read()
    assert again.names == tuple(first)
    assert not asked
    assert {name: native.facts for name, native in first.items()} == {
        name: native.facts for name, native in second.items()
    }
    assert {(native.how, native.looked_at) for native in second.values()} == {("kept", 0)}
    # Of another wheel nothing is kept.
    assert {n.how for n in Members.lazy(made[0], "b" * 64, opened, tmp_path).read().values()} == {"parts", "whole"}
    assert asked


@pytest.mark.parametrize("damage", [b"", b"\0", zlib.compress(b"[]"), zlib.compress(b'{"format": 0}')])
def test_what_was_damaged_since_is_read_again(made: tuple[str, bytes], tmp_path: Path, damage: bytes) -> None:
    here(made[1], tmp_path).read()
    places = sorted((tmp_path / "native").rglob("*.z"))
    assert len(places) == 7
    for place in places:
        place.write_bytes(damage)
    found = Members.lazy(made[0], "a" * 64, lambda: (io.BytesIO(made[1]), lambda _: None), tmp_path).read()
    assert {native.how for native in found.values()} == {"parts", "whole"}
    assert {native.how for native in here(made[1], tmp_path).read().values()} == {"kept"}


# What is wrong


@pytest.mark.parametrize(
    ("data", "trouble"),
    [
        (b"/* GNU ld script */ INPUT(libx.so.1)", "not an ELF file: starts with `2f2a2047` at offset 0x0"),
        (b"", "not an ELF file: starts with `` at offset 0x0"),
        (STUB[:4] + b"\x01" + STUB[5:], "not a 64-bit ELF file: class 1 at offset 0x4"),
        (STUB[:100], "truncated: program headers of 280 bytes in a file that ends at 0x64 at offset 0x40"),
    ],
)
def test_a_member_that_is_no_sound_elf_file(data: bytes, trouble: str) -> None:
    found = only(wheel({"part/a.so": data})[1])
    assert (found.facts, found.trouble) == (None, trouble)


def test_that_it_is_none_is_kept_too(tmp_path: Path) -> None:
    _, data = wheel({"part/a.so": b"text"})
    first = here(data, tmp_path).read()["part/a.so"]
    second = here(data, tmp_path).read()["part/a.so"]
    assert (second.how, second.trouble, second.facts) == ("kept", first.trouble, None)


def patch(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def directory(data: bytes) -> int:
    """Where the directory's entry of `part/a.so` is."""
    return data.index(b"PK\1\2")


def error(data: bytes) -> str:
    with pytest.raises(IntegrityError) as caught:
        here(data).read()
    return str(caught.value)


DAMAGED = "error: `made-1.0-py3-none-any.whl` is a damaged wheel\n  because: "


def test_a_file_that_is_no_wheel() -> None:
    assert error(b"nothing") == DAMAGED + "File is not a zip file"


def test_a_wheel_that_is_damaged() -> None:
    _, data = wheel({"part/a.so": STUB})
    entry = directory(data)
    place = DAMAGED + "`part/a.so` cannot be where the directory says"
    way = DAMAGED + "`part/a.so` is encrypted, or compressed in a way that wheels do not use"
    assert error(patch(data, 0, b"XX")) == place
    assert error(patch(data, entry + 20, struct.pack("<I", 1 << 30))) == place
    assert error(patch(data, 28, b"\xff\xff")) == place
    assert error(patch(data, entry + 10, b"\x0c\0")) == way
    assert error(patch(data, entry + 8, b"\1\0")) == way


def test_a_member_that_the_wheel_has_twice() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.so", STUB)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.so", STUB)
    assert error(buffer.getvalue()) == DAMAGED + "it has `a.so` twice"


def test_a_stream_that_is_damaged() -> None:
    _, data = wheel({"part/a.so": STUB})
    start = 30 + len("part/a.so")
    assert only(patch(data, start, b"\xff\xff")).trouble.startswith("not a deflate stream: Error -3")
    longer = patch(data, directory(data) + 24, struct.pack("<I", len(STUB) + 1))
    packed = len(zlib.compress(STUB, 6)) - 6
    assert only(longer).trouble == f"its {packed} bytes do not inflate to the {len(STUB) + 1} that are stated"
    shorter = patch(data, directory(data) + 24, struct.pack("<I", len(STUB) - 1))
    assert only(shorter).trouble == f"the stream inflates to more than the {len(STUB) - 1} bytes that are stated"


def test_a_bomb_is_an_error_of_bounded_size() -> None:
    _, data = wheel({"part/a.so": STUB + bytes(300 << 20)}, level=9)
    found = only(data)
    assert found.facts is not None or found.trouble


def test_mutated_members_end_in_facts_or_in_words(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A bounded part of tests/fuzz/test_native.py."""
    monkeypatch.setattr(parts, "SMALL", 0)
    monkeypatch.setattr(parts, "HEAD", 1024)
    monkeypatch.setattr(parts, "TAIL", 2048)
    monkeypatch.setattr(parts, "STEP", 2048)
    _, sound = wheel({"part/a.so": files["part/small.so"]})
    random_, end = random.Random(1), sound.index(b"PK\1\2")
    for _ in range(200):
        data = bytearray(sound)
        for _ in range(random_.randrange(1, 6)):
            data[random_.randrange(end)] = random_.randrange(256)
        try:
            found = only(bytes(data))
        except IntegrityError:
            continue
        assert (found.facts is None) == bool(found.trouble)
