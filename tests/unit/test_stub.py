"""The stub library against the loader, the linkers and readelf."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder import elf, elf_hash
from builder.smoke import stub

if TYPE_CHECKING:
    from pathlib import Path

SONAME = "libcuda.so.1"
NAMES = ["cuInit", "cuGetProcAddress", "cuGetProcAddress_v2", *(f"cuFunction{i}" for i in range(42))]

IDENTIFIERS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,30}", fullmatch=True)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / SONAME
    stub.write_stub(path, SONAME, NAMES)
    return path


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def loads_here(path: Path) -> bool:
    return elf.read_file("/proc/self/exe").machine == elf.read_file(path).machine


def test_every_function_says_that_there_is_no_device(library: Path) -> None:
    if not loads_here(library):
        pytest.skip("this machine is not x86_64")
    loaded = ctypes.CDLL(str(library))
    assert {loaded[name]() for name in NAMES} == {100}


def test_name_that_is_not_there_is_not_found(library: Path) -> None:
    if not loads_here(library):
        pytest.skip("this machine is not x86_64")
    with pytest.raises(AttributeError):
        ctypes.CDLL(str(library))["cuAbsent"]


@pytest.mark.parametrize("hash_style", ["sysv", "gnu"])
def test_program_links_and_runs(library: Path, hash_style: str) -> None:
    gcc = tool("gcc")
    folder = library.parent
    (folder / "libcuda.so").symlink_to(SONAME)
    (folder / "main.c").write_text("int cuInit(unsigned); int main(void) { return cuInit(0); }")
    subprocess.run(
        [gcc, "main.c", "-L.", "-lcuda", f"-Wl,--hash-style={hash_style}", "-o", "main"], cwd=folder, check=True
    )
    assert elf.read_file(folder / "main").needed[0] == SONAME
    result = subprocess.run([folder / "main"], env={"LD_LIBRARY_PATH": str(folder), "LD_BIND_NOW": "1"}, check=False)
    assert result.returncode == 100


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_readelf_has_nothing_to_complain_about(tmp_path: Path, machine: str) -> None:
    stub.write_stub(tmp_path / SONAME, SONAME, NAMES, machine)
    result = subprocess.run(
        [tool("readelf"), "--all", "--wide", SONAME], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert result.stderr == ""
    assert all(f" FUNC    GLOBAL DEFAULT    5 {name}\n" in result.stdout for name in NAMES)


def test_strip_leaves_it_loadable(library: Path) -> None:
    subprocess.run([tool("strip"), library], check=True)
    assert elf.read_file(library).exports_names == set(NAMES)


def test_no_segment_is_writable_and_executable(library: Path) -> None:
    text = subprocess.run([tool("readelf"), "-lW", library], capture_output=True, text=True, check=True).stdout
    assert "RWE" not in text
    assert "GNU_STACK      0x000000 0x0000000000000000 0x0000000000000000 0x000000 0x000000 RW " in text


def test_same_input_gives_the_same_bytes() -> None:
    assert stub.stub_bytes(SONAME, NAMES) == stub.stub_bytes(SONAME, NAMES)


def test_order_and_repetition_of_names_do_not_matter() -> None:
    assert stub.stub_bytes(SONAME, [*reversed(NAMES), "cuInit"]) == stub.stub_bytes(SONAME, NAMES)


def test_bytes_are_those_known() -> None:
    """Whatever the Python version or machine; they are part of no image, but a change should be meant."""
    data = stub.stub_bytes(SONAME, ["cuInit", "cuDeviceGet"])
    assert hashlib.sha256(data).hexdigest() == "3d7ed4297a4cadc17f31fe68f960c875484a7731f1fd07840fa20e18091aa1f3"


def test_x86_64_code() -> None:
    # mov eax, 100; ret
    assert bytes.fromhex("b864000000c3") in stub.stub_bytes(SONAME, ["f"])


def test_aarch64_code() -> None:
    data = stub.stub_bytes(SONAME, ["f"], "aarch64")
    assert elf.read(elf.BytesSource(data)).machine == "aarch64"
    # mov w0, #100; ret, as GNU as assembles them.
    assert bytes.fromhex("800c8052c0035fd6") in data


def test_library_without_functions(tmp_path: Path) -> None:
    path = tmp_path / "libempty.so"
    stub.write_stub(path, "libempty.so", [])
    if not loads_here(path):
        pytest.skip("this machine is not x86_64")
    ctypes.CDLL(str(path))
    assert elf.read_file(path).symbols == ()


@given(st.sets(IDENTIFIERS, max_size=20), st.sampled_from(["x86_64", "aarch64"]))
@settings(deadline=None, max_examples=50)
def test_reader_finds_what_was_written(names: set[str], machine: str) -> None:
    file = elf.read(elf.BytesSource(stub.stub_bytes(SONAME, names, machine)))
    assert (file.soname, file.machine, file.needed) == (SONAME, machine, ())
    assert file.exports_names == names
    assert file.gnu_hash_ok is True


@given(IDENTIFIERS)
def test_hash_is_the_readers(name: str) -> None:
    assert stub._gnu_hash(name.encode()) == elf_hash.gnu_hash(name.encode())


@pytest.mark.parametrize("name", ["", "a\0b", "cuInité", "f@V1", "a b", "1st", "a\n"])
def test_bad_symbol_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"^not a symbol name: "):
        stub.stub_bytes(SONAME, ["cuInit", name])


@pytest.mark.parametrize("soname", ["", "lib\0.so", "dir/lib.so", "bücher.so", "a b.so"])
def test_bad_soname(soname: str) -> None:
    with pytest.raises(ValueError, match=r"^not a soname: "):
        stub.stub_bytes(soname, NAMES)


def test_unknown_machine() -> None:
    with pytest.raises(ValueError, match=r"^no stub for machine `riscv`, only for `x86_64`, `aarch64`$"):
        stub.stub_bytes(SONAME, NAMES, "riscv")


def test_one_string_is_not_a_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"^symbols has to be several names, not one string$"):
        stub.stub_bytes(SONAME, "cuInit")
