"""Bundles that somebody made to hurt: every one is refused in words, in bounded memory, before anything is done with it."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.errors import IntegrityError
from builder.files import sha256_hex
from builder.trust.archive import BLOCK, Archive, blob_name, header, members, padding
from builder.trust.layout import FormError

BLOB = blob_name("sha256:" + sha256_hex(b"data"))
END = b"\0" * (2 * BLOCK)


def member(name: str, data: bytes) -> bytes:
    return header(name, len(data)) + data + padding(len(data))


def foreign(name: str = BLOB, size: int = 0, **fields: object) -> bytes:
    """A header as other programs write it."""
    info = tarfile.TarInfo(name)
    info.size = size
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


def words(data: bytes) -> str:
    with pytest.raises(FormError) as caught:
        members(io.BytesIO(data), len(data))
    return str(caught.value)


def test_what_is_written_is_read() -> None:
    data = member("oci-layout", b"{}") + member(BLOB, b"data") + END
    found = members(io.BytesIO(data), len(data))
    assert {name: (item.offset, item.size) for name, item in found.items()} == {
        "oci-layout": (512, 2),
        BLOB: (1536, 4),
    }


def test_other_programs_read_it() -> None:
    data = member("oci-layout", b"{}") + member(BLOB, b"data") + END
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert {(item.name, item.mtime, item.uid, item.mode) for item in archive} == {
            ("oci-layout", 0, 0, 0o644),
            (BLOB, 0, 0, 0o644),
        }


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (foreign("../../etc/passwd"), "it has a file that no bundle has: `../../etc/passwd`"),
        (foreign("/etc/passwd"), "it has a file that no bundle has: `/etc/passwd`"),
        (foreign("blobs/sha256/../../x"), "it has a file that no bundle has: `blobs/sha256/../../x`"),
        (foreign(BLOB, type=tarfile.SYMTYPE, linkname="/etc/passwd"), f"`{BLOB}` is no plain file with a plain name"),
        (foreign(BLOB, type=tarfile.LNKTYPE, linkname="oci-layout"), f"`{BLOB}` is no plain file with a plain name"),
        (foreign(BLOB, type=tarfile.DIRTYPE), f"`{BLOB}/` is no plain file with a plain name"),
        (foreign(BLOB, type=tarfile.FIFOTYPE), f"`{BLOB}` is no plain file with a plain name"),
        (foreign(BLOB, type=tarfile.GNUTYPE_SPARSE), f"`{BLOB}` is no plain file with a plain name"),
        (foreign("x" * 150), "`././@LongLink` is no plain file with a plain name"),
        (foreign(type=tarfile.XHDTYPE, size=8 << 30), f"`{BLOB}` is no plain file with a plain name"),
        (foreign(size=1 << 40), f"it ends in the middle: `{BLOB}` has 1,099,511,627,776 bytes, the file 1,536"),
        (member("index.json", b"a") + foreign("index.json"), "it has `index.json` twice"),
        (b"x" * 512, "at byte 0 there is no tar header"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_bundle_has(data: bytes, said: str) -> None:
    assert words(data + END) == said


def test_a_negative_size() -> None:
    info = tarfile.TarInfo(BLOB).tobuf(tarfile.GNU_FORMAT)
    block = bytearray(info)
    block[124:136] = b"\xff" * 12
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    assert words(bytes(block) + END) == "a tar header has a number that is none"


def test_a_name_in_two_parts() -> None:
    block = tarfile.TarInfo(f"{'e' * 40}/{BLOB}").tobuf(tarfile.USTAR_FORMAT)
    assert block[:100].rstrip(b"\0").decode() == BLOB
    assert words(block + END) == f"`{BLOB}` is no plain file with a plain name"


def test_a_header_that_was_changed() -> None:
    block = bytearray(header(BLOB, 0))
    block[100] ^= 1  # the mode: nothing else looks at it
    assert words(bytes(block) + END) == "at byte 0 there is no tar header"


@pytest.mark.parametrize("length", [0, 100, 512, 513, 1023, 1024, 1100])
def test_a_file_that_ends_in_the_middle(length: int) -> None:
    whole = member(BLOB, b"x" * 600) + END
    assert words(whole[:length]).startswith("it ends in the middle")


def test_something_after_its_end() -> None:
    assert (
        words(member(BLOB, b"x") + END + member("index.json", b"x")) == "after its last file there is more: 2,048 bytes"
    )
    assert words(member(BLOB, b"x") + b"\0" * 512) == "after its last file there is more: 512 bytes"


def test_too_many_files() -> None:
    data = b"".join(header(blob_name("sha256:" + sha256_hex(str(i).encode())), 0) for i in range(1001))
    assert words(data + END) == "it has more than 1000 files"


def test_little_memory_for_large_claims(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(header("index.json", 4 << 30))
        file.seek((4 << 30) + BLOCK)
        file.write(END)
    tracemalloc.start()
    archive = Archive(path)
    try:
        with pytest.raises(FormError) as caught:
            archive.small("index.json")
        with pytest.raises(FormError):
            archive.blob("sha256:" + "0" * 64)
    finally:
        archive.close()
    assert str(caught.value) == "`index.json` has 4,294,967,296 bytes, more than 16,777,216"
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_a_blob_that_is_another(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(member(BLOB, b"date") + END)
    archive = Archive(path)
    with pytest.raises(FormError, match="a blob is not what its digest says"):
        archive.blob("sha256:" + sha256_hex(b"data"))
    archive.close()


def test_no_bundle_at_all(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    path.write_text("no tar archive, and longer than one block: " + "x" * 2000, encoding="utf-8")
    with pytest.raises(IntegrityError) as caught:
        Archive(path)
    assert str(caught.value) == (
        "error: the bundle cannot be used\n"
        f"  at: {path}\n"
        "  because: at byte 0 there is no tar header\n"
        "  hint: copy it again, or make it again: `builder bundle MATRIX -o FILE`"
    )


GOOD = member("oci-layout", b"{}") + member("index.json", b"[]" * 300) + member(BLOB, b"data") + END


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_any_bytes_changed(changes: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in changes:
        data[at] = value
    _never_more(bytes(data))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=3000))
def test_any_bytes(data: bytes) -> None:
    _never_more(data)


def _never_more(data: bytes) -> None:
    """Read, or refused as what it is; and every member lies within the file."""
    try:
        found = members(io.BytesIO(data), len(data))
    except FormError:
        return
    assert all(item.offset + item.size <= len(data) for item in found.values())


@pytest.mark.parametrize("size", [0, 1, 8 << 30, (1 << 40) + 1])
def test_sizes(size: int) -> None:
    from builder.trust.archive import _member

    assert _member(header(BLOB, size), 512).size == size


def test_a_chunk_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "bundle"
    data = bytes(range(256)) * 10000
    path.write_bytes(member("index.json", data) + END)
    archive = Archive(path)
    chunks = list(archive.chunks("index.json"))
    archive.close()
    assert b"".join(chunks) == data and max(map(len, chunks)) == 1 << 20
