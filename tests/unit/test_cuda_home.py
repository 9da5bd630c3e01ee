"""CUDA_HOME over made wheels: names a linker expects, the stub, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from builder import elf
from tests.made import ROOT

SCRIPT = ROOT / "builder" / "smoke" / "cuda_home.py"
HEADER = """\
typedef int CUresult;
#define CUDAAPI
#define cuMemAlloc cuMemAlloc_v2
#  define cuCtxCreate   cuCtxCreate_v4
#define CU_VERSION 13000
CUresult CUDAAPI cuInit(unsigned int Flags);
CUresult CUDAAPI cuMemAlloc(unsigned long *p, unsigned long n);
CUresult CUDAAPI
    cuCtxCreate(void **p);
"""


@pytest.fixture(autouse=True)
def only_below(tmp_path: Path) -> None:
    """The script also links /usr/local/cuda where there is none: these tests must not, so they run it only where."""
    assert Path("/usr/local/cuda") not in tmp_path.parents


def wheels(tmp_path: Path, name: str = "cu13") -> Path:
    root = tmp_path / "site-packages" / "nvidia" / name
    for folder in ("bin", "include", "nvvm/bin", "lib"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "bin" / "nvcc").write_text("#!/bin/sh\n")
    (root / "bin" / "ptxas").write_text("#!/bin/sh\n")
    (root / "include" / "cuda.h").write_text(HEADER)
    for library in ("libcudart.so.13", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcudart_static.a"):
        (root / "lib" / library).write_bytes(b"")
    return root


LAY_OUT = """\
import os, sys
sys.path.insert(0, sys.argv[1])
import cuda_home
real = os.path.lexists
os.path.lexists = lambda path: path == "/usr/local/cuda" or real(path)
sys.exit(cuda_home.main(sys.argv[2:]))
"""


def lay_out(tmp_path: Path) -> subprocess.CompletedProcess[str]:
    arguments = ["--site-packages", str(tmp_path / "site-packages"), "--home", str(tmp_path / "cuda")]
    return subprocess.run(
        [sys.executable, "-c", LAY_OUT, str(SCRIPT.parent), *arguments], capture_output=True, text=True, check=False
    )


def test_the_folder_has_what_a_linker_expects(tmp_path: Path) -> None:
    root = wheels(tmp_path)
    assert (lay_out(tmp_path).returncode, lay_out(tmp_path).returncode) == (0, 1)
    home = tmp_path / "cuda"
    found = {str(path.relative_to(home)): str(path.readlink()) for path in sorted(home.rglob("*")) if path.is_symlink()}
    assert found == {
        "bin/nvcc": f"{root}/bin/nvcc",
        "bin/ptxas": f"{root}/bin/ptxas",
        "include": f"{root}/include",
        "nvvm": f"{root}/nvvm",
        "lib": "lib64",
        "lib64/libcudart.so": "libcudart.so.13",
        "lib64/libcudart.so.13": f"{root}/lib/libcudart.so.13",
        "lib64/libcudart_static.a": f"{root}/lib/libcudart_static.a",
        "lib64/libnvrtc-builtins.so": "libnvrtc-builtins.so.13.0",
        "lib64/libnvrtc-builtins.so.13.0": f"{root}/lib/libnvrtc-builtins.so.13.0",
        "lib64/libnvrtc.so": "libnvrtc.so.13",
        "lib64/libnvrtc.so.13": f"{root}/lib/libnvrtc.so.13",
    }
    assert [path.name for path in (home / "lib64" / "stubs").iterdir()] == ["libcuda.so"]


def test_a_library_that_has_a_plain_name_keeps_it(tmp_path: Path) -> None:
    root = wheels(tmp_path)
    (root / "lib" / "libnvrtc.so").write_bytes(b"")
    lay_out(tmp_path)
    assert (tmp_path / "cuda" / "lib64" / "libnvrtc.so").readlink() == root / "lib" / "libnvrtc.so"


def test_the_stub_is_the_drivers_by_name_and_has_its_functions(tmp_path: Path) -> None:
    wheels(tmp_path)
    lay_out(tmp_path)
    stub = elf.read_file(str(tmp_path / "cuda" / "lib64" / "stubs" / "libcuda.so"))
    assert stub.soname == "libcuda.so.1"
    assert {symbol.name for symbol in stub.symbols if symbol.defined} == {
        *("cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuCtxCreate", "cuCtxCreate_v4")
    }


def test_two_layouts_are_equal(tmp_path: Path) -> None:
    stubs = []
    for place in ("a", "b"):
        wheels(tmp_path / place)
        lay_out(tmp_path / place)
        stubs.append((tmp_path / place / "cuda" / "lib64" / "stubs" / "libcuda.so").read_bytes())
    assert stubs[0] == stubs[1]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_a_program_links_to_the_stub_with_gcc(tmp_path: Path) -> None:
    wheels(tmp_path)
    lay_out(tmp_path)
    source, library = tmp_path / "x.c", tmp_path / "x.so"
    source.write_text('#include "cuda.h"\nint f(void) { return cuInit(0) + cuMemAlloc(0, 1); }\n')
    home = tmp_path / "cuda"
    subprocess.run(
        [*("gcc", "-shared", "-fPIC", "-Wl,--no-undefined", f"-I{home}/include", str(source), "-o", str(library)),
         f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcuda"],
        check=True,
    )  # fmt: skip
    assert "libcuda.so.1" in elf.read_file(str(library)).needed


NO_NVCC = "  hint: name the compiler's wheels under `cuda.compiler`, or write `jit: none`\n"


def test_wheels_without_nvcc(tmp_path: Path) -> None:
    (wheels(tmp_path) / "bin" / "nvcc").unlink()
    done = lay_out(tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: CUDA_HOME needs one folder with nvcc below {tmp_path}/site-packages/nvidia, found none\n{NO_NVCC}",
    )
    assert not (tmp_path / "cuda").exists()


def test_no_cuda_wheels_at_all(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    assert "found none\n" in lay_out(tmp_path).stderr


def test_two_cudas(tmp_path: Path) -> None:
    one, two = wheels(tmp_path), wheels(tmp_path, "cu12")
    done = lay_out(tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: CUDA_HOME needs one folder with nvcc below {tmp_path}/site-packages/nvidia, found {two}, {one}\n{NO_NVCC}",
    )


def test_a_header_that_declares_nothing(tmp_path: Path) -> None:
    (wheels(tmp_path) / "include" / "cuda.h").write_text("/* nothing */\n")
    done = lay_out(tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cuda.h declares no driver function: the stub for libcuda would be empty\n",
    )
