"""Fat binaries: which images there are, for what, and what is refused."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import pytest

from builder import fatbin
from builder.fatbin import FatbinError, read
from tests.unit.fatbin_made import LZ4, A, F, compressed, container, cubin, elf, entry, module


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
