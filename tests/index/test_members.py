"""Native members of real wheels by byte ranges from the package index, against the same members as a whole."""

from __future__ import annotations

import io
import zlib
from pathlib import Path

import pytest
from pypi_simple import PyPISimple

from builder import elf, settings
from builder.index import TIMEOUT, session
from builder.members import Members
from builder.nativefacts import NEEDED, PATHS, SONAME, facts_of
from builder.remote import RangedFile

pytestmark = pytest.mark.index

TORCH = "torch-2.9.1-cp311-cp311-manylinux_2_28_x86_64.whl"
# Names as the whole files have them, counted for shared/facts/abi.md; 0 where no count was written down.
EXPORTED = {
    "torch/lib/libc10.so": 0,
    "torch/lib/libc10_cuda.so": 0,
    "torch/lib/libtorch_cpu.so": 77_673,
    "torch/lib/libtorch_cuda.so": 31_395,
    "torch/lib/libtorch_python.so": 0,
    "torch/lib/libtorch_cuda_linalg.so": 0,
}
COMPARED = ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/lib/libtorch_python.so")


def opened(file: str, folder: Path) -> tuple[RangedFile, str]:
    """A wheel on the index, and its sha256."""
    site = settings.load()
    client = session(site)
    endpoint = {"endpoint": site.index} if site.index else {}
    with PyPISimple(session=client, **endpoint) as index:
        page = index.get_project_page(file.split("-")[0], timeout=TIMEOUT)
    (package,) = [package for package in page.packages if package.filename == file]
    sha256 = package.digests["sha256"]
    return RangedFile(folder / "ranges", file, sha256, client, lambda: package.url, package.size), sha256


def whole(file: RangedFile, data: Members, member: str) -> bytes:
    """A member, all of it."""
    info = data._directory.infos[member]
    file.seek(info.header_offset)
    header = file.read(30)
    start = info.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    file.seek(start)
    found = zlib.decompress(file.read(info.compress_size), -15)
    assert zlib.crc32(found) == info.CRC
    return found


def test_torch_from_its_ends(tmp_path: Path) -> None:
    file, sha256 = opened(TORCH, tmp_path)
    wheel = Members(TORCH, sha256, file, file.fetch, tmp_path)
    assert len(wheel.names) == 14
    found = wheel.read(EXPORTED)
    assert file.bytes_read < 16_000_000 < file.size // 50
    assert file.requests < 45
    for name, count in EXPORTED.items():
        facts = found[name].facts
        assert facts is not None
        # The two large ones have their dynamic table 34 and 99 MB before the end.
        assert facts.uncertain == ((SONAME, NEEDED, PATHS) if count else ()), name
        assert facts.soname == name.rpartition("/")[2]
        if count:
            assert len(facts.exports) == count
    cpu = found["torch/lib/libtorch_cpu.so"].facts
    assert cpu is not None
    assert {"libc10.so", "libgomp.so.1", "libcudart.so.12", "libcupti.so.12"} <= set(cpu.needed)
    for name in COMPARED:
        assert found[name].facts == facts_of(elf.read(elf.BytesSource(whole(file, wheel, name)))), name

    def not_again() -> tuple[io.BytesIO, None]:
        raise AssertionError("opened again")

    again = Members.lazy(TORCH, sha256, not_again, tmp_path)  # type: ignore[arg-type]
    assert {name: native.facts for name, native in again.read(EXPORTED).items()} == {
        name: native.facts for name, native in found.items()
    }
