"""Fat binaries: which images there are, for what, and what is refused."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import fatbin, fatbin_stream
from builder.fatbin import Container, FatbinError, read
from tests.unit.fatbin_made import LZ4, A, F, compressed, container, cubin, elf, entry, fuzz, module


def images(*containers: bytes) -> list[list[str]]:
    return [[image.name for image in found.images] for found in read(module(containers))]


def test_the_images_of_each_container() -> None:
    one = container(entry(cubin(512), 90), entry(cubin(512), 120))
    two = container(entry(cubin(512), 100, F), entry(b".version 9.0\n", 80, 0, kind=1), entry(cubin(8), 89, 0))
    assert images(one, two) == [["sm_90a", "sm_120a"], ["sm_100f", "compute_80", "sm_89"]]


def test_containers_of_several_objects_lie_apart() -> None:
    found = read(module([container(entry(cubin(1), 90)), bytes(24), container(entry(cubin(1), 120))]))
    assert [(item.section, item.offset > 0) for item in found] == [(".nv_fatbin", False), (".nv_fatbin", True)]


def test_kernels_of_an_image_that_is_stored_raw() -> None:
    code = cubin(256, 384, 392, 4096)
    (image,) = read(module([container(entry(code, 120))]))[0].images
    assert (image.kernels, image.real) == ({"k0": 256, "k1": 384, "k2": 392, "k3": 4096}, 2)
    # As it is stored: padded to eight bytes.
    assert (image.size, image.compression) == (len(code) + -len(code) % 8, "")


def needs_zstd() -> None:
    try:
        ctypes.CDLL("libzstd.so.1")
    except OSError:
        pytest.skip("libzstd.so.1 is not installed: nothing to unpack with")


def test_kernels_of_an_image_that_zstd_packed() -> None:
    needs_zstd()
    code = cubin(256, 4096)
    (image,) = read(module([container(compressed(code, 120))]))[0].images
    assert (image.name, image.kernels, image.size, image.compression) == (
        "sm_120a",
        {"k0": 256, "k1": 4096},
        len(code),
        "zstd",
    )


def test_an_image_that_does_not_unpack_to_its_size() -> None:
    needs_zstd()
    packed = compressed(cubin(4096), 120)
    wrong = packed[:56] + struct.pack("<Q", 77) + packed[64:]
    with pytest.raises(FatbinError, match="an image that zstd does not unpack to 77 bytes"):
        read(module([container(wrong)]))


def test_an_image_that_claims_too_much() -> None:
    packed = compressed(cubin(1), 120)
    with pytest.raises(FatbinError, match="more than the 1073741824 that are plausible"):
        read(module([container(packed[:56] + struct.pack("<Q", 1 << 40) + packed[64:])]))


def test_kernels_that_cannot_be_unpacked_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin, "_zstd", lambda: None)
    code = cubin(4096)
    packed = entry(b"packed", 90, A | LZ4, size=len(code))
    assert [
        (image.kernels, image.real, image.size)
        for image in read(module([container(compressed(code, 120), packed)]))[0].images
    ] == [(None, None, len(code))] * 2


def test_ptx_has_no_kernels_to_tell() -> None:
    (image,) = read(module([container(entry(b".version 9.0\n", 120, kind=1))]))[0].images
    assert (image.name, image.kernels) == ("compute_120a", None)


def test_a_file_without_device_code() -> None:
    assert read(elf({".text": b"\x90"})) == ()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"MZ", "not an ELF64 little-endian file"),
        (elf({".nv_fatbin": b"\1" * 64}), "no fat binary of a known layout at 0x0 of `.nv_fatbin`"),
        (
            elf({".nv_fatbin": container(entry(cubin(1), 90))[:-8]}),
            "truncated: a container of",
        ),
        (
            elf({".nv_fatbin": container(b"\7" * 64)}),
            "an entry of another layout at 0x10 of `.nv_fatbin`",
        ),
        (elf({"a": b"x"})[:-1], "a table of 3 sections of 64 bytes"),
    ],
)
def test_what_is_not_a_fat_binary_as_we_know_it(data: bytes, message: str) -> None:
    with pytest.raises(FatbinError) as caught:
        read(data)
    assert str(caught.value).startswith(message)


def test_a_file_is_read_from_disk(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_bytes(module([container(entry(cubin(1), 90))]))
    assert len(fatbin.read_file(tmp_path / "x.so")) == 1


# --- headers alone ----------------------------------------------------------------------------------------------------

PTX = b".version 9.0\n"
MAGIC = struct.pack("<IHH", fatbin.MAGIC, fatbin.VERSION, 16)


def every(data: bytes, step: int = 1 << 16) -> tuple[Container, ...]:
    """The containers by `scan`, which `scan_stream` has to agree with, and without kernels `read`."""
    found = fatbin.scan(lambda at, size: data[at : at + size], len(data))
    assert fatbin_stream.scan_stream(data[at : at + step] for at in range(0, len(data), step)) == found
    return found


def named(payload: bytes, name: bytes, arch: int, flags: int = A, kind: int = 2) -> bytes:
    """An entry with a name behind its header."""
    padded = name + bytes(-len(name) % 8)
    plain = bytearray(entry(payload, arch, flags, kind=kind))
    struct.pack_into("<I", plain, 4, 64 + len(padded))
    struct.pack_into("<II", plain, 32, 64, len(name))
    return bytes(plain[:64]) + padded + bytes(plain[64:])


def test_what_headers_tell() -> None:
    one = container(
        entry(cubin(512), 90),
        entry(PTX, 100, F, kind=1),
        entry(b"packed", 120, LZ4, size=999),
        compressed(cubin(8), 121),
        named(PTX, b"a/b.cu", 80, 0, kind=1),
        entry(b"x", 90, 0, kind=8),
    )
    (found,) = every(module([one]))
    assert [(i.kind, i.name, i.compression, i.isa, i.source) for i in found.images] == [
        ("cubin", "sm_90a", "", None, ""),
        ("ptx", "compute_100f", "", (1, 8), ""),
        ("cubin", "sm_120", "lz4", None, ""),
        ("cubin", "sm_121a", "zstd", None, ""),
        ("ptx", "compute_80", "", (1, 8), "a/b.cu"),
        ("kind-8", "kind-8_90", "", None, ""),
    ]
    assert [image.size for image in found.images][2:4] == [999, len(cubin(8))]
    assert all(image.kernels is None for image in found.images)


def test_a_name_that_is_not_in_the_header_is_none() -> None:
    far = bytearray(entry(cubin(1), 90))
    struct.pack_into("<II", far, 32, 60, 1 << 31)
    assert every(module([container(bytes(far))]))[0].images[0].source == ""


def test_a_fat_binary_that_is_a_file_of_its_own(tmp_path: Path) -> None:
    data = container(entry(cubin(1), 90)) + bytes(16) + container(entry(PTX, 75, 0, kind=1))
    found = every(data)
    assert [(one.section, [image.name for image in one.images]) for one in found] == [
        ("", ["sm_90a"]),
        ("", ["compute_75"]),
    ]
    (tmp_path / "x.fatbin").write_bytes(data)
    assert fatbin.scan_file(tmp_path / "x.fatbin") == found


def test_bytes_that_only_look_like_a_container() -> None:
    one = container(entry(cubin(1), 90))
    # In code, to compare with; in data, of another purpose; and before a real one.
    sections = {".text": one[:8] + b"\1\2\3", ".rodata": one, ".nv_fatbin": bytes(8) + one, ".data": one[:20]}
    assert [item.offset for item in every(elf(sections), 32)] == [8]


@pytest.mark.parametrize("step", [1, 7, 64, 1 << 20])
def test_a_stream_in_pieces_of_any_size(step: int) -> None:
    one, two = container(entry(cubin(300), 90)), container(entry(PTX, 120, kind=1))
    data = elf({".text": b"\x90", ".nv_fatbin": one + two, "__nv_relfatbin": bytes(24) + two, ".data": bytes(5000)})
    assert [(item.section, item.offset) for item in every(data, step)] == [
        (".nv_fatbin", 0),
        (".nv_fatbin", len(one)),
        ("__nv_relfatbin", 24),
    ]


def broken(data: bytes) -> tuple[str, str]:
    """What `scan` and `scan_stream` say of it."""
    with pytest.raises(FatbinError) as scanned:
        fatbin.scan(lambda at, size: data[at : at + size], len(data))
    with pytest.raises(FatbinError) as streamed:
        fatbin_stream.scan_stream([data])
    return str(scanned.value), str(streamed.value)


@pytest.mark.parametrize(
    ("data", "scanned", "streamed"),
    [
        (b"MZ", "not an ELF64 little-endian file", "not an ELF64 little-endian file"),
        (
            elf({".nv_fatbin": b"\1" * 64}),
            "no fat binary of a known layout at 0x0 of `.nv_fatbin`",
            "no fat binary of a known layout at 0x0 of `.nv_fatbin`",
        ),
        (
            elf({".nv_fatbin": container(entry(cubin(1), 90)) + b"junk"}),
            "no fat binary of a known layout at 0x1b0 of `.nv_fatbin`",
            "no fat binary of a known layout at 0x1b0 of `.nv_fatbin`",
        ),
        (
            elf({".nv_fatbin": container(b"\7" * 64)}),
            "an entry of another layout at 0x10 of `.nv_fatbin`",
            "no fat binary of a known layout at 0x0 of `.nv_fatbin`: an entry of another layout at 0x50",
        ),
        (
            elf({".nv_fatbin": container(entry(cubin(1), 90))[:-8]}),
            "truncated: a container of 416 bytes at 0x0 of `.nv_fatbin`",
            "no fat binary of a known layout at 0x0 of `.nv_fatbin`",
        ),
        (
            elf({"a": b"x"})[:-1],
            "a table of 3 sections of 64 bytes at 0x4e that does not fit the file",
            "a table of 3 sections of 64 bytes at 0x4e that does not fit the file",
        ),
        (
            container(entry(cubin(1), 90))[:-1],
            "truncated: a container of 416 bytes at 0x0",
            "no fat binary of a known layout at 0x0: truncated: a container of 416 bytes at 0x0",
        ),
    ],
)
def test_what_is_wrong_is_said(data: bytes, scanned: str, streamed: str) -> None:
    assert broken(data) == (scanned, streamed)


def test_sections_that_lie_over_each_other() -> None:
    data = bytearray(elf({".nv_fatbin": container(entry(cubin(1), 90)), "__nv_relfatbin": b""}))
    (table,) = struct.unpack_from("<Q", data, 40)
    data[table + 128 + 24 : table + 128 + 40] = struct.pack("<QQ", 64, len(data) - 64)
    data[table + 64 + 24 : table + 64 + 40] = struct.pack("<QQ", 64, len(data) - 64)
    assert broken(bytes(data))[0] == "2 sections of fat binaries that lie over each other"


def test_more_images_than_a_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin, "MAX_IMAGES", 7)
    few = module([container(entry(b"", 90), entry(b"", 90))] * 2)
    assert len(every(few)) == 2
    message = "more than 7 containers and images: no compiler makes as many"
    assert broken(module([container(entry(b"", 90), entry(b"", 90))] * 3)) == (message, message)


def test_names_that_are_far_from_the_table_are_not_in_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fatbin_stream, "KEPT", 4)
    data = module([container(entry(cubin(1), 90))])
    assert len(fatbin.scan(lambda at, size: data[at : at + size], len(data))) == 1
    with pytest.raises(FatbinError, match="the sections' names, 28 bytes at 0x1f1, are not right before the table"):
        fatbin_stream.scan_stream([data])


def test_what_is_claimed_and_is_not_there_costs_little() -> None:
    """Zeros as far as a hostile file claims, entries of no size: bounded by what is looked at, not by what is claimed."""
    size = 1 << 28
    head = bytearray(elf({".nv_fatbin": b"", ".text": b""}))
    (table,) = struct.unpack_from("<Q", head, 40)
    struct.pack_into("<QQ", head, table + 64 + 24, 1 << 16, size - (1 << 16))

    def take(at: int, count: int) -> bytes:
        return bytes(head[at : at + count]) + bytes(max(0, min(count, size - at) - len(head[at : at + count])))

    began = time.monotonic()
    assert fatbin.scan(take, size) == ()
    assert time.monotonic() - began < 10


images_of = st.builds(
    entry,
    st.binary(max_size=80),
    st.sampled_from([75, 80, 90, 100, 120, 121]),
    st.sampled_from([0, A, F, A | LZ4]),
    kind=st.sampled_from([1, 2, 2, 8]),
)
containers_of = st.lists(images_of, min_size=1, max_size=4).map(lambda found: container(*found))
sections_of = st.lists(st.tuples(st.sampled_from([0, 8, 24]), containers_of), max_size=4).map(
    lambda found: b"".join(bytes(gap) + one + bytes(-len(one) % 8) for gap, one in found)
)


@given(sections_of, sections_of, st.binary(max_size=40), st.integers(1, 400))
def test_a_stream_tells_what_the_file_tells(one: bytes, two: bytes, other: bytes, step: int) -> None:
    # What is read for its size in a unit test is a file of a few kilobytes; `python -m tests.bench.arch` has the large ones.
    parts = {".text": other, ".nv_fatbin": one, ".rodata": two, "__nv_relfatbin": two, ".data": other}
    if any(part and not part.strip(b"\0") for part in (one, two)):
        return
    whole = elf(parts)
    found = every(whole, step)
    assert [replace(c, images=tuple(replace(i, kernels=None) for i in c.images)) for c in found] == list(found)
    assert sum(len(item.images) for item in found) == one.count(b"\x01\x01\x40\0\0\0") + two.count(
        b"\x01\x01\x40\0\0\0"
    )


def outcome(call: Callable[[], tuple[Container, ...]]) -> tuple[Container, ...] | None:
    try:
        return call()
    except FatbinError:
        return None


@given(sections_of, st.data())
def test_damage_is_an_error_or_nothing(section: bytes, data: st.DataObject) -> None:
    """Any bytes changed or cut off: both readers end with containers or `FatbinError`, and never with two answers."""
    whole = bytearray(elf({".text": b"\x90" * 16, ".nv_fatbin": section}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        value = data.draw(st.sampled_from([b"\0", b"\xff", b"\x80\0\0\0", b"\xff" * 8, MAGIC]))
        whole[at : at + len(value)] = value[: len(whole) - at]
    hostile = bytes(whole[: data.draw(st.integers(0, len(whole)))]) if data.draw(st.booleans()) else bytes(whole)
    scanned = outcome(lambda: fatbin.scan(lambda at, size: hostile[at : at + size], len(hostile)))
    streamed = outcome(lambda: fatbin_stream.scan_stream([hostile]))
    if scanned is not None and streamed is not None:
        assert scanned == streamed


def test_fuzz() -> None:
    """4,000 damaged files, from a seed: an answer or `FatbinError` each, none slower than a second, 40 seconds in all.

    `python -m tests.bench.arch --fuzz SECONDS` goes on for as long as one likes, with the same damage.
    """
    count, slowest, seconds = fuzz(4_000, 40.0, seed=5)
    assert (count, slowest < 1.0, seconds < 40.0) == (4_000, True, True)
