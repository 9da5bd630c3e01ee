"""Members of wheels in a stream: what comes is what RECORD has, or an error, in little memory."""

from __future__ import annotations

import io
import random
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as rules
from hypothesis import strategies as st

from builder.errors import IntegrityError, UsageError
from builder.streaming import open_file
from builder.zipdir import sound
from tests import loopback as site_of

pytestmark = pytest.mark.processes

NAME = "part-1.0-py3-none-any.whl"
NOISE = random.Random(3).randbytes(300_000)
FILES = {"part/noise.bin": NOISE, "part/zeros.bin": bytes(3_000_000), "part/empty.bin": b"", "part/one.bin": b"x"}


def packed(kind: int = zipfile.ZIP_DEFLATED, files: dict[str, bytes] = FILES) -> bytes:
    """The wheel's bytes, its members stored or deflated."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(site_of.wheel("part", "1.0", files=files)[1])) as old,
        zipfile.ZipFile(buffer, "w", kind) as new,
    ):
        for info in old.infolist():
            # RECORD is read at once, whatever the rest is packed with.
            how = zipfile.ZIP_STORED if info.filename.endswith("RECORD") else kind
            new.writestr(zipfile.ZipInfo(info.filename, info.date_time), old.read(info), how)
    return buffer.getvalue()


def at(folder: Path, data: bytes) -> Path:
    path = folder / NAME
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_member_as_it_is(tmp_path: Path, kind: int) -> None:
    wheel = open_file(at(tmp_path, packed(kind)))
    assert not wheel.remote
    for member, data in FILES.items():
        told: list[int] = []
        assert b"".join(wheel.stream(member, told.append)) == data
        assert sum(told) == wheel.packed_size(member)


def test_what_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """64 MB of zeros out of 64 kB, and 32 MB that do not compress."""
    zeros, noise = bytes(64_000_000), random.Random(4).randbytes(32_000_000)
    wheel = open_file(at(tmp_path, packed(files={"part/zeros.bin": zeros, "part/noise.bin": noise})))
    del zeros, noise
    tracemalloc.start()
    counted = [sum(map(len, wheel.stream(f"part/{name}.bin"))) for name in ("zeros", "noise")]
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counted == [64_000_000, 32_000_000]
    assert most < 6_000_000


def refused(folder: Path, data: bytes, member: str = "part/noise.bin") -> str:
    with pytest.raises(IntegrityError) as caught:
        for _ in open_file(at(folder, data)).stream(member):
            pass
    return str(caught.value)


def test_another_content(tmp_path: Path) -> None:
    data = packed(zipfile.ZIP_STORED)
    where = data.index(NOISE) + 1000
    assert refused(tmp_path, data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]) == (
        f"error: `{NAME}` is a damaged wheel\n  because: `part/noise.bin` is not the file that RECORD has the hash of"
    )


def test_a_member_that_is_not_where_the_directory_says(tmp_path: Path) -> None:
    data = packed()
    where = data.index(b"part/noise.bin") - 30
    assert refused(tmp_path, data[:where] + b"XX" + data[where + 2 :]).endswith(
        "`part/noise.bin`: it has no header where the directory says"
    )


def test_a_compression_that_is_none_of_a_wheels(tmp_path: Path) -> None:
    assert refused(tmp_path, packed(zipfile.ZIP_LZMA)).endswith("encrypted, or of another compression than deflate")


def test_a_member_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    data = bytearray(packed())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        real = archive.getinfo("part/zeros.bin").file_size
    entry = data.rindex(b"part/zeros.bin") - 46
    assert struct.unpack_from("<I", data, entry + 24) == (real,)
    struct.pack_into("<I", data, entry + 24, 2_000_000)
    # RECORD says the same as the directory, or the wheel is refused before.
    said = bytes(data).replace(b",3000000\n", b",2000000\n")
    with zipfile.ZipFile(io.BytesIO(said)) as archive:
        info = archive.getinfo("part-1.0.dist-info/RECORD")
        start = said.index(b"part-1.0.dist-info/RECORD") + len(info.filename)
        crc = zlib.crc32(said[start : start + info.file_size])
    fixed = bytearray(said)
    struct.pack_into("<I", fixed, fixed.rindex(b"part-1.0.dist-info/RECORD") - 46 + 16, crc)
    assert refused(tmp_path, bytes(fixed), "part/zeros.bin").endswith("is not the file that RECORD has the hash of")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"`part-1.0-py3-none-any.whl` cannot be read"):
        open_file(tmp_path / NAME)


@rules(max_examples=200)
@given(st.data())
def test_damage_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes changed anywhere: the content that RECORD has, or `IntegrityError`."""
    whole = bytearray(packed(files={"part/noise.bin": NOISE[:300], "part/text.bin": b"text " * 200}))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = at(tmp_path_factory.mktemp("x"), bytes(whole))
    try:
        wheel = open_file(path)
        found = {name: b"".join(wheel.stream(name)) for name in wheel.entries if name.startswith("part/")}
    except IntegrityError:
        return
    assert all(found[name] in (NOISE[:300], b"text " * 200) for name in found)


def test_a_directory_that_counts_from_before_the_file() -> None:
    # hypothesis found it: a size of the directory that is too large makes `zipfile` seek to before the beginning.
    whole = bytearray(packed(files={"part/text.bin": b"text " * 200}))
    end = whole.rindex(b"PK\x05\x06")
    size = int.from_bytes(whole[end + 12 : end + 16], "little")
    whole[end + 16 : end + 20] = (end - size + 7).to_bytes(4, "little")
    with pytest.raises(zipfile.BadZipFile, match="before the file's beginning"):
        sound(zipfile.ZipFile(io.BytesIO(whole)))
