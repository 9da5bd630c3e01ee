"""Wheels read by byte ranges from a server on loopback: what is fetched, what is kept, what is refused."""

from __future__ import annotations

import hashlib
import io
import random
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from urllib3.util import Retry

from builder import remote
from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.index import NoRangesError, session
from builder.remote import PartialWheel, RangedFile, open_local
from tests import loopback as site_of
from tests.loopback import Loopback, loopback, wheel
from tests.made import settings_at

NOISE = random.Random(1)
FILES = {f"part/{name}.py": NOISE.randbytes(200_000) for name in "abcdefghij"}
NAME, DATA = site_of.wheel("part", "1.0", files=FILES)
SHA256 = hashlib.sha256(DATA).hexdigest()
INFO = "part-1.0.dist-info"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        server.add((NAME, DATA), beside=False)
        yield server


def ranged(site: Loopback, folder: Path, expected: int | None = len(DATA), sha256: str = SHA256) -> RangedFile:
    return RangedFile(
        folder / "kept",
        NAME,
        sha256,
        session(settings_at(folder)),
        lambda: f"{site.url}/simple/files/{NAME}",
        expected,
    )


def opened(site: Loopback, folder: Path) -> tuple[PartialWheel, RangedFile]:
    file = ranged(site, folder)
    return PartialWheel(Path(NAME), file, file.fetch), file


def asked(site: Loopback) -> list[str]:
    """The ranges that were asked for since the last call, in order of their start."""
    found = sorted((span for _, span in site.requests), key=lambda span: int(span.split("=")[1].split("-")[0] or -1))
    site.requests.clear()
    return found


def place(member: str) -> int:
    with zipfile.ZipFile(io.BytesIO(DATA)) as archive:
        return archive.getinfo(member).header_offset


# --- what is fetched --------------------------------------------------------------------------------------------------


def test_as_much_of_the_end_as_is_told(site: Loopback, tmp_path: Path) -> None:
    url = f"{site.url}/simple/files/{NAME}"
    RangedFile(tmp_path, NAME, SHA256, session(settings_at(tmp_path)), lambda: url, len(DATA), tail=4096)
    assert asked(site) == ["bytes=-4096"]


def test_one_request_for_the_directory_and_one_for_members_that_are_near(site: Loopback, tmp_path: Path) -> None:
    wheel, file = opened(site, tmp_path)
    assert (wheel.name, wheel.version, wheel.info, wheel.path) == ("part", "1.0", INFO, Path(NAME))
    assert set(wheel.entries) == {*FILES, f"{INFO}/METADATA", f"{INFO}/WHEEL"}
    assert asked(site) == ["bytes=-262144"]
    assert wheel.read_all(["part/b.py", "part/c.py", "part/none.py"]) == {
        "part/b.py": FILES["part/b.py"],
        "part/c.py": FILES["part/c.py"],
    }
    assert asked(site) == [f"bytes={place('part/b.py')}-{place('part/d.py') - 1}"]
    assert wheel.read("part/b.py") == FILES["part/b.py"]
    assert asked(site) == []
    assert (file.requests, file.bytes_read) == (2, 262144 + place("part/d.py") - place("part/b.py"))


def test_members_that_are_far_apart_are_asked_for_apart(site: Loopback, tmp_path: Path) -> None:
    wheel, _ = opened(site, tmp_path)
    asked(site)
    wheel.read_all(["part/e.py", "part/a.py"])
    assert asked(site) == [
        f"bytes={place('part/a.py')}-{place('part/b.py') - 1}",
        f"bytes={place('part/e.py')}-{place('part/f.py') - 1}",
    ]


def test_near_the_whole_of_it_all_of_it_comes_and_its_sha256_is_compared(site: Loopback, tmp_path: Path) -> None:
    wheel, file = opened(site, tmp_path)
    asked(site)
    assert list(wheel.read_all(list(FILES)[:8])) == list(FILES)[:8]
    assert asked(site) == [f"bytes=0-{len(DATA) - 262144 - 1}"]
    assert file.bytes_read == len(DATA)
    other = ranged(site, tmp_path / "other", sha256="0" * 64)
    with pytest.raises(IntegrityError) as caught:
        other.fetch([(0, len(DATA))])
    assert str(caught.value) == (
        f"error: `{NAME}` is not the file that was expected\n"
        f"  because: wanted sha256 {'0' * 64}\n    got    sha256 {SHA256}"
    )
    assert not (tmp_path / "other" / "kept").exists()


def test_a_directory_that_does_not_fit_into_the_first_answer(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "TAIL", (200, 200))
    wheel, _ = opened(site, tmp_path)
    assert wheel.read("part/j.py") == FILES["part/j.py"]
    spans = asked(site)
    assert spans[0] == "bytes=-200"
    assert len(spans) <= 4


@pytest.mark.parametrize(
    ("expected", "count"), [(None, 262144), (1_000_000, 262144), (8_000_000, 500_000), (100_000_000, 1_048_576)]
)
def test_how_much_of_the_end_is_asked_for_first(
    site: Loopback, tmp_path: Path, expected: int | None, count: int
) -> None:
    with pytest.raises(IntegrityError) if expected else nullcontext():
        ranged(site, tmp_path, expected)
    assert asked(site) == [f"bytes=-{count}"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_what_came_is_read_again_without_the_server(site: Loopback, tmp_path: Path) -> None:
    wheel, _ = opened(site, tmp_path)
    wheel.read("part/b.py")
    site.stop()
    again, file = opened(site, tmp_path)
    assert again.read("part/b.py") == FILES["part/b.py"]
    assert (file.requests, file.bytes_read) == (0, 0)
    with pytest.raises(UnreachableError):
        again.read("part/d.py")


def test_a_part_that_a_disk_damaged_is_fetched_again(site: Loopback, tmp_path: Path) -> None:
    opened(site, tmp_path)[0].read("part/b.py")
    asked(site)
    (part,) = [path for path in (tmp_path / "kept").iterdir() if path.name.startswith(f"{place('part/b.py')}-")]
    part.write_bytes(b"x" + part.read_bytes()[1:])
    assert opened(site, tmp_path)[0].read("part/b.py") == FILES["part/b.py"]
    assert asked(site) == [f"bytes={place('part/b.py')}-{place('part/c.py') - 1}"]


def test_a_cache_that_cannot_be_read(site: Loopback, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("no folder")
    with pytest.raises(UsageError) as caught:
        ranged(site, tmp_path)
    assert str(caught.value) == (
        f"error: the cache cannot be used\n  at: {tmp_path}/kept\n  because: Not a directory\n"
        "  hint: keep files elsewhere: BUILDER_CACHE=DIR"
    )


def test_parts_that_overlap_are_joined(site: Loopback, tmp_path: Path) -> None:
    file = ranged(site, tmp_path)
    file.fetch([(10, 1000)])
    file.fetch([(500, 2000), (0, 20)])
    assert asked(site) == ["bytes=-262144", "bytes=0-1999", "bytes=10-999"]
    again = ranged(site, tmp_path)
    assert (again.read(2000), asked(site)) == (DATA[:2000], [])
    assert (again.seek(-5, io.SEEK_END), again.read(100), again.read(1)) == (len(DATA) - 5, DATA[-5:], b"")


@settings(max_examples=60, deadline=None)
@given(calls=st.lists(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 3000)), max_size=4), max_size=6))
def test_whatever_was_fetched_in_whatever_order_is_what_the_file_has(calls: list[list[tuple[int, int]]]) -> None:
    data = NOISE.randbytes(3000)
    asked = []

    def answer(_: object, url: str, value: str, most: int) -> tuple[int, bytes, int]:
        first, _, last = value.removeprefix("bytes=").partition("-")
        start, end = (int(first), int(last) + 1) if first else (len(data) - int(last), len(data))
        asked.append((start, end))
        assert 0 < end - start <= most
        return start, data[start:end], len(data)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(remote, "get_range", answer)
        patch.setattr(remote, "TAIL", (100, 100))
        patch.setattr(remote, "GAP", 50)
        sha256 = hashlib.sha256(data).hexdigest()
        for _ in range(2):
            file = RangedFile(Path(folder), "x", sha256, session(settings_at(Path(folder))), lambda: "", None)
            for spans in calls:
                file.fetch([(min(span), max(span)) for span in spans])
                before = len(asked)
                for start, end in ((min(span), max(span)) for span in spans):
                    file.seek(start)
                    assert file.read(end - start) == data[start:end]
                assert len(asked) == before
        assert file.requests == 0, "the second time all of it is here"


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_server_without_ranges(site: Loopback, tmp_path: Path) -> None:
    site.files[f"/simple/files/{NAME}"].ranges = False
    with pytest.raises(NoRangesError):
        ranged(site, tmp_path)
    # Once a part is here, that is a fault of the server.
    site.files[f"/simple/files/{NAME}"].ranges = True
    file = ranged(site, tmp_path)
    site.files[f"/simple/files/{NAME}"].ranges = False
    with pytest.raises(UnreachableError, match="could not be read by byte ranges"):
        file.fetch([(0, 10)])


HINT = "\n  hint: see that the index answers; a site's certificate authority is set with `BUILDER_CA`"


def test_an_answer_that_breaks_off_is_asked_for_again(site: Loopback, tmp_path: Path) -> None:
    file = ranged(site, tmp_path)
    asked(site)
    served = site.files[f"/simple/files/{NAME}"]
    served.cuts = [100, 200]
    file.fetch([(0, 1000)])
    assert asked(site) == ["bytes=0-999"] * 3
    served.cuts = [100] * 3
    with pytest.raises(UnreachableError) as caught:
        file.fetch([(2000, 3000)])
    host = site.url.removeprefix("http://")
    assert str(caught.value) == (
        f"error: `{NAME}` could not be read by byte ranges\n"
        f"  because: {host} broke the connection off in the middle of the file{HINT}"
    )
    assert asked(site) == ["bytes=2000-2999"] * 3


def test_a_server_that_says_no(site: Loopback, tmp_path: Path) -> None:
    site.files[f"/simple/files/{NAME}"].status = 403
    with pytest.raises(UnreachableError) as caught:
        ranged(site, tmp_path)
    host = site.url.removeprefix("http://")
    because = f"{host} answers 403 Forbidden"
    assert str(caught.value) == f"error: `{NAME}` could not be read by byte ranges\n  because: {because}{HINT}"


@pytest.mark.parametrize("told", [f"bytes 7-106/{len(DATA)}", f"bytes 0-99/{len(DATA) - 1}"])
def test_another_part_than_was_asked_for(site: Loopback, tmp_path: Path, told: str) -> None:
    file = ranged(site, tmp_path)
    site.files[f"/simple/files/{NAME}"].content_range = told
    with pytest.raises(UnreachableError) as caught:
        file.fetch([(0, 100)])
    because = f"the server sent another part than bytes 0 to 99 of {len(DATA)}"
    assert str(caught.value) == f"error: `{NAME}` could not be read by byte ranges\n  because: {because}{HINT}"


def test_a_file_of_another_size(site: Loopback, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError) as caught:
        ranged(site, tmp_path, len(DATA) + 1)
    assert str(caught.value) == (
        f"error: `{NAME}` is not the file that was expected\n"
        f"  because: it has {len(DATA):,} bytes, and {len(DATA) + 1:,} are stated"
    )


def other_wheel(record: str | None = None, **changed: bytes) -> bytes:
    """The wheel with members exchanged behind RECORD's back."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(DATA)) as old, zipfile.ZipFile(buffer, "w") as new:
        for member in old.namelist():
            data = changed.get(Path(member).stem, old.read(member))
            new.writestr(member, record.encode() if record is not None and member.endswith("RECORD") else data)
    return buffer.getvalue()


def local(folder: Path, data: bytes) -> PartialWheel:
    (folder / NAME).write_bytes(data)
    return open_local(folder / NAME)


def test_a_member_that_is_not_the_one_of_record(tmp_path: Path) -> None:
    wheel = local(tmp_path, other_wheel(b=b"y" * 200_000))
    assert wheel.read("part/a.py") == FILES["part/a.py"]
    with pytest.raises(IntegrityError) as caught:
        wheel.read_all(["part/a.py", "part/b.py"])
    assert str(caught.value) == (
        f"error: `{NAME}` is a damaged wheel\n  because: `part/b.py` is not the file that RECORD has the hash of"
    )


def test_a_damaged_member(tmp_path: Path) -> None:
    data = bytearray(DATA)
    data[place("part/b.py") + 1000] ^= 1
    with pytest.raises(IntegrityError) as caught:
        local(tmp_path, bytes(data)).read("part/b.py")
    assert str(caught.value) == (
        f"error: `{NAME}` is a damaged wheel\n  because: `part/b.py`: Bad CRC-32 for file 'part/b.py'"
    )


SIZE = len(FILES["part/a.py"])


@pytest.mark.parametrize(
    ("record", "because"),
    [
        ("part/z.py,sha256=x,1\n", "RECORD names `part/z.py`, which the wheel does not have once"),
        (
            f"part/a.py,sha256=x,{SIZE}\n" * 2,
            "RECORD names `part/a.py`, which the wheel does not have once",
        ),
        (f"part/a.py,md5=x,{SIZE}\n", "RECORD has no sha256 and size of `part/a.py` that could be right"),
        ("part/a.py,sha256=x,5\n", "RECORD has no sha256 and size of `part/a.py` that could be right"),
    ],
)
def test_a_senseless_record(tmp_path: Path, record: str, because: str) -> None:
    with pytest.raises(IntegrityError) as caught:
        local(tmp_path, other_wheel(record))
    assert str(caught.value) == f"error: `{NAME}` is a damaged wheel\n  because: {because}"


def test_what_record_does_not_name_cannot_be_read(tmp_path: Path) -> None:
    wheel = local(tmp_path, other_wheel(""))
    assert wheel.read_all(["part/a.py"]) == {}
    with pytest.raises(KeyError):
        wheel.read("part/a.py")


def test_what_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="is a damaged wheel"):
        local(tmp_path, b"nothing of the kind")
    with pytest.raises(UsageError, match="is not a wheel's file name"):
        (tmp_path / "x.zip").write_bytes(DATA)
        open_local(tmp_path / "x.zip")
    with pytest.raises(UsageError, match="cannot be read"):
        open_local(tmp_path / "absent-1.0-py3-none-any.whl")


def test_a_member_without_a_name_is_no_member(tmp_path: Path) -> None:
    name, data = wheel("thing", "1.0")
    (tmp_path / name).write_bytes(data)
    with zipfile.ZipFile(tmp_path / name, "a") as archive:
        archive.writestr(zipfile.ZipInfo(""), b"x")
    found = open_local(tmp_path / name)
    assert "" not in found.entries


def test_a_wheel_with_the_name_of_another(tmp_path: Path) -> None:
    (tmp_path / "other-1.0-py3-none-any.whl").write_bytes(DATA)
    with pytest.raises(IntegrityError) as caught:
        open_local(tmp_path / "other-1.0-py3-none-any.whl")
    assert str(caught.value) == (
        "error: `other-1.0-py3-none-any.whl` is a damaged wheel\n  because: it has no single RECORD of other"
    )
