"""`baked` with a stand-in for flashinfer: who loads what, with what taken away, and the GPU code that has to be in it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.smoke.__main__ import main as smoke
from builder.smoke.baked import check_baked
from builder.smoke.report import Result
from tests.unit.fatbin_made import F, container, cubin, entry, module
from tests.unit.smoke_made import Site, finished, said

FILE = "flashinfer/data/aot/trtllm_comm/trtllm_comm.so"

# Imports nothing that its process has not got already: another user may not read this machine's Python.
INIT = """\
import os

WORKSPACE = os.environ["FLASHINFER_WORKSPACE_BASE"] + "/cached_ops"
os.makedirs(WORKSPACE, exist_ok=True)
open(WORKSPACE + "/log", "w").close()
"""
COMM = """\
import os
from flashinfer import WORKSPACE

AOT = os.path.dirname(os.path.dirname(__file__)) + "/data/aot/trtllm_comm/trtllm_comm.so"


class Spec:
    aot_path = AOT
    extra_cuda_cflags = ["-O3"] + [
        "-gencode=arch=compute_{0},code=sm_{0}".format(target.replace(".", ""))
        for target in os.environ["FLASHINFER_CUDA_ARCH_LIST"].split(" ")
        if target != "8.9"
    ]

    def build_and_load(self):
        if os.path.exists(AOT):
            return
        with open(WORKSPACE + "/lock", "w"):
            raise AssertionError("it could write")


def gen_trtllm_comm_module():
    return Spec()
"""
BOTH = container(entry(cubin(4096, 256), 90), entry(cubin(4096, 4096), 120))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that any user may read, which those of pytest are not."""
    made = Path(tempfile.mkdtemp(prefix="baked-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def stack(folder: Path, data: bytes | None, *, owned: bool = True, comm: str = COMM, gpus: str = "120a 90a") -> Site:
    site = Site(folder)
    files: dict[str, str | bytes] = {
        "flashinfer/__init__.py": INIT,
        "flashinfer/jit/__init__.py": "",
        "flashinfer/jit/comm.py": comm,
    }
    if data is not None and owned:
        files[FILE] = data
    site.wheel("flashinfer-python", "0.6.12", files, layer="flashinfer")
    if data is not None and not owned:
        (site.packages / FILE).parent.mkdir(parents=True)
        (site.packages / FILE).write_bytes(data)
    site.spec_data["compiled"] = ["gen_trtllm_comm_module"]
    names = {"120a": ("12.0", "12.0a"), "90a": ("9.0", "9.0a"), "89": ("8.9", "8.9")}
    site.spec_data["gpus"] = [
        {"capability": names[arch][0], "nvcc": arch, "flashinfer": names[arch][1]} for arch in gpus.split()
    ]
    return site


def baked(site: Site) -> Result:
    with site.native() as (native, _):
        return check_baked(native)


def test_a_module_with_code_for_each_target(folder: Path) -> None:
    data = module([BOTH, BOTH])
    check = finished(baked(stack(folder, data)), "baked")
    assert (check.ok, check.findings) == (True, ())
    assert (check.looked_at, check.expected, check.unit) == (4, 4, "GPU images")
    who = "another user" if os.geteuid() == 0 else "this user"
    assert check.detail == (
        f"trtllm_comm.so, 0.0 MB, loaded by {who} with no ninja and nothing to write to; "
        "2 containers, kernels for sm_120a 4, sm_90a 2 and 2 stubs"
    )


def test_a_target_that_flashinfer_has_no_code_for_is_not_asked_for(folder: Path) -> None:
    check = finished(baked(stack(folder, module([BOTH]), gpus="120a 89")), "baked")
    assert (check.ok, check.looked_at) == (True, 1)


def test_a_stack_that_compiles_nothing(folder: Path) -> None:
    site = stack(folder, None)
    site.spec_data["compiled"] = []
    assert finished(baked(site)).detail == "not applicable: the build compiles nothing for this stack"


@pytest.mark.parametrize(
    ("containers", "where"),
    [
        ([BOTH, container(entry(cubin(4096), 90))], "1 of its 2 containers"),
        ([BOTH, container(entry(cubin(4096), 90), entry(cubin(256, 384), 120))], "1 of its 2 containers"),
        ([container(entry(cubin(4096), 90), entry(cubin(4096), 120, F))], "1 of its 1 container"),
        ([container(entry(cubin(4096), 90), entry(b".version 9.0", 120, kind=1))], "1 of its 1 container"),
    ],
    ids=["missing", "stubs", "another suffix", "ptx"],
)
def test_a_container_without_code_for_a_target(folder: Path, containers: list[bytes], where: str) -> None:
    assert said(baked(stack(folder, module(containers))), "baked") == (
        f"error: `{FILE}` has no kernel for sm_120a in {where} [baked]\n"
        "  because: the driver refuses a kernel that has no image for its GPU; a name in a list of targets is no code\n"
        "  hint: build again without the cache: `builder build MATRIX --no-cache`"
    )


def test_a_module_without_any_code(folder: Path) -> None:
    lines = said(baked(stack(folder, module([]))), "baked").splitlines()
    assert lines[0] == f"error: `{FILE}` has no kernel for sm_120a in it: it holds no device code [baked]"


def test_code_that_cannot_be_read(folder: Path) -> None:
    assert said(baked(stack(folder, b"what")), "baked") == (
        f"error: the GPU code of `{FILE}` cannot be read: not an ELF64 little-endian file [baked]\n"
        "  hint: build again without the cache: `builder build MATRIX --no-cache`"
    )


def test_a_module_that_no_record_names(folder: Path) -> None:
    assert said(baked(stack(folder, module([BOTH]), owned=False)), "baked").splitlines()[0] == (
        f"error: `{FILE}` is in no RECORD of flashinfer-python [baked]"
    )


def test_a_module_that_is_missing_cannot_be_compiled_by_a_server_that_may_write_nothing(folder: Path) -> None:
    lines = said(baked(stack(folder, None)), "baked").splitlines()
    assert lines[0].startswith(
        "error: flashinfer does not load what gen_trtllm_comm_module stands for: PermissionError"
    )
    assert lines[-1] == f"  hint: `{FILE}` is missing: build again without the cache: `builder build MATRIX --no-cache`"


def test_ninja_is_not_found(folder: Path) -> None:
    # The only folder on PATH is the one that flashinfer has made for itself.
    comm = COMM.replace(
        "        if os.path.exists(AOT):", "        raise AssertionError(os.listdir(os.environ['PATH']))"
    )
    line = said(
        baked(stack(folder, module([BOTH]), comm=comm.replace("            return\n", ""))), "baked"
    ).splitlines()[0]
    assert line.endswith("AssertionError: ['cached_ops'] [baked]")


def test_flashinfer_that_does_not_import(folder: Path) -> None:
    site = stack(folder, module([BOTH]))
    (site.packages / "flashinfer/__init__.py").write_text("raise RuntimeError('cubin')\n")
    assert said(baked(site), "baked").splitlines()[0] == (
        "error: flashinfer does not load what gen_trtllm_comm_module stands for: RuntimeError: cubin [baked]"
    )


def test_a_process_that_ends(folder: Path) -> None:
    site = stack(folder, module([BOTH]), comm="import os\nos._exit(9)\n")
    assert said(baked(site), "baked").splitlines()[0] == (
        "error: the process that loads gen_trtllm_comm_module ended with status 9 [baked]"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_it_is_another_user_who_loads(folder: Path) -> None:
    comm = COMM.replace("        if os.path.exists(AOT):", "        raise AssertionError(os.geteuid())")
    line = said(
        baked(stack(folder, module([BOTH]), comm=comm.replace("            return\n", ""))), "baked"
    ).splitlines()[0]
    assert line.endswith("AssertionError: 65534 [baked]")


def test_the_check_runs_in_the_native_part_where_something_is_compiled(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = stack(folder, module([BOTH]))

    def run(part: str) -> str:
        (folder / "spec.json").write_text(json.dumps(site.spec_data))
        smoke([part, "--spec", str(folder / "spec.json"), "--out", str(folder / "out.json"), "--only", "baked"])
        return capsys.readouterr().out

    assert run("native").startswith("baked              ok      2 GPU images; trtllm_comm.so, ")
    assert run("sglang") == "smoke test of tiny (111111111111): 0 checks, 0 failed\n"
    site.spec_data["compiled"] = []
    assert run("native") == "smoke test of tiny (111111111111): 0 checks, 0 failed\n"
