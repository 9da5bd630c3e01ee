"""Compiling into the image, with a stand-in for flashinfer: what is asked, where it goes, who owns it, what is refused."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builder.smoke import precompile

# Compiles a C file into the workspace, as ninja would, and leaves what it was told beside it.
FLASHINFER = """\
import os, pathlib, subprocess
from types import SimpleNamespace

AOT = pathlib.Path({aot!r})


def gen_trtllm_comm_module():
    work = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"])
    made = work / "trtllm_comm.so"

    def build(verbose):
        source = work / "a.c"
        source.write_text("int used(void) {{ return 1; }} static int hidden(void) {{ return 2; }} int other(void) {{ return hidden(); }}")
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(source)], check=True)
        (AOT.parent / "told").write_text(" ".join(sorted(n + "=" + v for n, v in os.environ.items() if n.startswith("FLASHINFER") or n in ("HOME", "CC"))))

    return SimpleNamespace(build=build, jit_library_path=made, aot_path=AOT / "trtllm_comm" / "trtllm_comm.so")
"""


def site_packages(folder: Path, aot: str = "flashinfer/data/aot") -> Path:
    packages = folder / "site-packages"
    for name in ("flashinfer/jit", "flashinfer/data"):
        (packages / name).mkdir(parents=True)
    (packages / "flashinfer/__init__.py").write_text("")
    (packages / "flashinfer/jit/__init__.py").write_text("")
    (packages / "flashinfer/jit/comm.py").write_text(FLASHINFER.format(aot=str(packages / aot)))
    info = packages / "flashinfer_python-0.6.12.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("flashinfer_python-0.6.12.dist-info/RECORD,,\n")
    return packages


def run(packages: Path, work: Path, *targets: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", precompile.__file__, "--site-packages", str(packages), "--work", str(work)]
    return subprocess.run(
        [*command, "--module", "gen_trtllm_comm_module", *targets],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_module_lies_where_flashinfer_looks_and_is_owned(tmp_path: Path) -> None:
    packages = site_packages(tmp_path)
    done = run(packages, tmp_path / "work", "12.0a", "9.0a", FLASHINFER_EXTRA_CUDAFLAGS="-G", CC="clang")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "compiled flashinfer/data/aot/trtllm_comm/trtllm_comm.so for 12.0a, 9.0a\n"
    data = (packages / "flashinfer/data/aot/trtllm_comm/trtllm_comm.so").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert (packages / "flashinfer_python-0.6.12.dist-info/RECORD").read_text() == (
        "flashinfer_python-0.6.12.dist-info/RECORD,,\n"
        f"flashinfer/data/aot/trtllm_comm/trtllm_comm.so,sha256={digest},{len(data)}\n"
    )
    # What a caller's environment says does not reach the compiler, and no name is left but those that are exported.
    assert (packages / "flashinfer/data/told").read_text() == (
        f"FLASHINFER_CUDA_ARCH_LIST=12.0a 9.0a FLASHINFER_WORKSPACE_BASE={tmp_path}/work HOME={tmp_path}/work/home"
    )
    assert (b"used" in data, b"hidden" in data) == (True, False)
    assert not (tmp_path / "work").exists()


def test_two_compilations_are_equal(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        packages = site_packages(tmp_path / name)
        assert run(packages, tmp_path / "work", "12.0a").returncode == 0
        made.append((packages / "flashinfer/data/aot/trtllm_comm/trtllm_comm.so").read_bytes())
    assert made[0] == made[1]


def test_another_package_that_brings_compiled_modules(tmp_path: Path) -> None:
    done = run(site_packages(tmp_path, "flashinfer_jit_cache/jit_cache"), tmp_path / "work", "12.0a")
    assert done.returncode == 1
    assert done.stderr == (
        f"error: flashinfer loads compiled modules from {tmp_path}/site-packages/flashinfer_jit_cache/jit_cache/trtllm_comm, "
        "not from its own folder\n"
        "  hint: flashinfer-jit-cache has modules that were compiled without the patch: take it out of the matrix\n"
    )


def test_a_module_that_is_there_already(tmp_path: Path) -> None:
    packages = site_packages(tmp_path)
    there = packages / "flashinfer/data/aot/trtllm_comm/trtllm_comm.so"
    there.parent.mkdir(parents=True)
    there.write_bytes(b"x")
    done = run(packages, tmp_path / "work", "12.0a")
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {there} is there already\n  hint: this flashinfer brings the module itself\n",
    )
    assert there.read_bytes() == b"x"


def test_a_compilation_that_fails_fails_the_step(tmp_path: Path) -> None:
    packages = site_packages(tmp_path)
    text = (packages / "flashinfer/jit/comm.py").read_text()
    (packages / "flashinfer/jit/comm.py").write_text(text.replace('"gcc"', '"false"'))
    assert run(packages, tmp_path / "work", "12.0a").returncode == 1
    assert "trtllm_comm.so" not in (packages / "flashinfer_python-0.6.12.dist-info/RECORD").read_text()


def test_a_folder_that_another_run_left_is_no_place_to_compile(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    with pytest.raises(FileExistsError):
        precompile.prepare(tmp_path, ["12.0a"])
