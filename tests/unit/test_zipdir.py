"""Directories of zip files, beside what `zipfile` makes of them."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from builder import zipdir

NAMES = st.lists(st.sampled_from(["a.so", "b/é.so.1", "c.py", "d", "e.so.txt", "so", "x" * 300 + ".so"]), max_size=8)


def archive(
    names: list[str], *, comment: bytes = b"", before: bytes = b"", method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    buffer = io.BytesIO()
    buffer.write(before)
    with zipfile.ZipFile(buffer, "a", method) as made:
        for number, name in enumerate(dict.fromkeys(names)):
            made.writestr(name, name.encode() * number)
        made.comment = comment
    return buffer.getvalue()


def said(info: zipfile.ZipInfo) -> tuple[object, ...]:
    kept = ("filename", "flag_bits", "compress_type", "CRC", "compress_size", "file_size", "external_attr", "extra")
    return (*(getattr(info, name) for name in kept), info.header_offset)


def by_zipfile(data: bytes) -> tuple[int, list[zipfile.ZipInfo]]:
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        return made.start_dir, [info for info in made.infolist() if ".so" in info.filename]


@given(NAMES, st.sampled_from([b"", b"a comment"]), st.sampled_from([b"", b"a program before it"]))
@example([], b"", b"")
def test_the_same_as_zipfile(names: list[str], comment: bytes, before: bytes) -> None:
    data = archive(names, comment=comment, before=before)
    start, found = zipdir.members(io.BytesIO(data), b".so")
    wanted = by_zipfile(data)
    assert (start, list(map(said, found))) == (wanted[0], list(map(said, wanted[1])))


def test_a_plain_one_is_read_without_zipfile(monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive(["a.so", "c.py"])
    wanted = by_zipfile(data)
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("asked"))
    start, found = zipdir.members(io.BytesIO(data), b".so")
    assert (start, [said(info) for info in found]) == (wanted[0], [said(info) for info in wanted[1]])


@given(NAMES, st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_one_is_as_zipfile_has_it(names: list[str], place: int, byte: int) -> None:
    """But for what `zipfile` refuses for the sake of other members, and for versions of the format."""
    data = bytearray(archive(names))
    data[-1 - place % len(data)] = byte
    try:
        wanted = by_zipfile(bytes(data))[1]
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return
    found = zipdir.members(io.BytesIO(bytes(data)), b".so")[1]
    assert list(map(said, found)) == list(map(said, wanted))
