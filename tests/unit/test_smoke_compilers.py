"""`compiler-coherent`, `nvcc`, `triton` and `flashinfer` with stand-ins for the tools: what they say, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.smoke.child import Workspace
from builder.smoke.compilers import check_flashinfer, check_nvcc, check_triton
from builder.smoke.cuda import check_compiler
from builder.smoke.report import Check, Result
from builder.smoke.spec import Spec
from tests.unit.smoke_made import Site, finished, said

PARTS = {
    "nvcc": {"distribution": "nvidia-cuda-nvcc", "file": "bin/nvcc", "how": "run"},
    "cicc": {
        "distribution": "nvidia-nvvm",
        "file": "nvvm/bin/cicc",
        "how": "scan",
        "consequence": "ptxas cannot read its PTX",
        "source": "measured",
    },
    "nvvm wheel": {"distribution": "nvidia-nvvm", "file": "", "how": "wheel"},
    "cuda.h": {
        "distribution": "nvidia-cuda-runtime",
        "file": "include/cuda.h",
        "how": "header",
        "macro": "CUDA_VERSION",
    },
}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.spec_data["cuda"]["jit"] = "nvcc"
    made.spec_data["facts"]["compiler_parts"] = PARTS
    for name, version in (
        ("nvidia-cuda-nvcc", "13.0.88"),
        ("nvidia-nvvm", "13.0.88"),
        ("nvidia-cuda-runtime", "13.0.96"),
    ):
        made.wheel(name, version)
    return made


def home(site: Site, *, nvcc: str = "13.0", cicc: str = "13.0", header: int = 13000, script: str = "") -> Path:
    """A CUDA_HOME with stand-ins."""
    root = Path(site.spec_data["cuda"]["home"])
    for folder in ("bin", "nvvm/bin", "include"):
        (root / folder).mkdir(parents=True)
    program = root / "bin" / "nvcc"
    program.write_text(script or f"#!/bin/sh\necho 'Cuda compilation tools, release {nvcc}, V{nvcc}.88'\n")
    program.chmod(0o755)
    (root / "nvvm/bin/cicc").write_bytes(
        b"\x7fELF\0Cuda compilation tools, release " + cicc.encode() + b", V" + cicc.encode()
    )
    (root / "include/cuda.h").write_text(f"#define CUDA_VERSION {header}\n")
    return root


def run(site: Site, check: Callable[[Spec, Workspace], Result]) -> Result:
    with Workspace(site.tree) as workspace:
        return check(site.spec, workspace)


def coherent(site: Site) -> Result:
    with Workspace(site.tree) as workspace:
        return check_compiler(site.spec, site.tree, workspace)


def test_compiler_of_one_release(site: Site) -> None:
    home(site)
    check = finished(coherent(site))
    assert (check.ok, check.looked_at, check.detail) == (
        True,
        4,
        "CUDA 13.0: nvcc 13.0, cicc 13.0, nvvm wheel 13.0, cuda.h 13.0",
    )


def test_newer_nvvm_is_named_as_the_cause(site: Site) -> None:
    home(site, cicc="13.5")
    site.artefacts.clear()
    (site.packages / "nvidia_nvvm-13.0.88.dist-info").rename(site.packages / "nvidia_nvvm-13.5.37.dist-info")
    metadata = site.packages / "nvidia_nvvm-13.5.37.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("13.0.88", "13.5.37"))
    assert said(coherent(site), "compiler-coherent") == (
        "error: cicc (nvidia-nvvm 13.5.37) is of CUDA 13.5, the stack's compiler is CUDA 13.0 [compiler-coherent]\n"
        "  because: ptxas cannot read its PTX\n"
        "  hint: pin nvidia-nvvm to the version that belongs to CUDA 13.0.2\n"
        "  source: measured"
    )


def test_header_of_another_release(site: Site) -> None:
    home(site, header=12080)
    assert said(coherent(site), "compiler-coherent") == (
        "error: cuda.h (nvidia-cuda-runtime 13.0.96) is of CUDA 12.8, the stack's compiler is CUDA 13.0 [compiler-coherent]\n"
        "  hint: pin nvidia-cuda-runtime to the version that belongs to CUDA 13.0.2"
    )


def test_part_that_is_not_there(site: Site) -> None:
    root = home(site)
    (root / "nvvm/bin/cicc").unlink()
    assert said(coherent(site), "compiler-coherent") == (
        f"error: cicc is not at `{root}/nvvm/bin/cicc` [compiler-coherent]\n  hint: it is in the wheel nvidia-nvvm"
    )


def test_part_that_does_not_say_its_release(site: Site) -> None:
    root = home(site, script="#!/bin/sh\necho hello\n")
    assert said(coherent(site), "compiler-coherent") == (
        "error: nvcc (nvidia-cuda-nvcc 13.0.88) does not say which release it is [compiler-coherent]\n"
        f"  because: looked at `{root}/bin/nvcc`"
    )


@pytest.mark.parametrize("check", [coherent, lambda site: run(site, check_nvcc)])
def test_stack_without_a_compiler(site: Site, check: Callable[[Site], Result]) -> None:
    site.spec_data["cuda"]["jit"] = "none"
    done = finished(check(site))
    assert (done.ok, done.looked_at, done.detail) == (
        True,
        0,
        "not applicable: the matrix has no CUDA compiler (jit: none)",
    )


def nvcc(site: Site, script: str) -> tuple[Check, str]:
    home(site, script="#!/bin/sh\n" + script)
    result = run(site, check_nvcc)
    return finished(result), said(result, "nvcc")


MISMATCH = "echo \"ptxas fatal   : Unsupported .version 9.5; current version is '9.0'\" >&2; exit 255\n"


def test_nvcc_that_cannot_compile(site: Site) -> None:
    check, text = nvcc(site, MISMATCH)
    assert (check.looked_at, check.expected, text) == (
        2,
        2,
        (
            "error: nvcc cannot build a program or a shared module for sm_120a [nvcc]\n"
            "  because: ptxas fatal   : Unsupported .version 9.5; current version is '9.0'\n"
            "    nvcc ended with status 255\n"
            "  hint: cicc (nvidia-nvvm) is newer than ptxas (nvidia-cuda-nvcc): `compiler-coherent` names the versions"
        ),
    )


def test_nvcc_that_cannot_link(site: Site) -> None:
    text = nvcc(site, 'echo "/usr/bin/ld: cannot find -lcudart" >&2; exit 1\n')[1]
    assert text.splitlines()[-1] == (
        "  hint: CUDA_HOME lacks what a linker looks for: lib64 with unversioned names, lib64/stubs, a real `bin`"
    )


def test_nvcc_that_makes_something_else(site: Site) -> None:
    text = nvcc(site, 'while [ "$1" != -o ]; do shift; done; cp /proc/self/exe "$2"\n')[1]
    assert text.splitlines()[0] == "error: nvcc cannot build a program or a shared module for sm_120a [nvcc]"
    assert text.splitlines()[1].startswith("  because: it does not need `libcuda.so.1`, only ")


def test_nvcc_that_is_not_there(site: Site) -> None:
    result = run(site, check_nvcc)
    assert said(result, "nvcc") == (
        f"error: nvcc cannot be run: No such file or directory [nvcc]\n  because: it should be `{site.spec.cuda_home}/bin/nvcc`"
    )


def triton(site: Site) -> tuple[Check, str]:
    with site.native() as (native, ledger):
        result = check_triton(native, ledger)
    return finished(result), said(result, "triton")


def test_stack_without_triton(site: Site) -> None:
    check, _ = triton(site)
    assert (check.ok, check.looked_at, check.detail) == (True, 0, "not applicable: triton is not in the lock")


def test_triton_that_does_not_import(site: Site) -> None:
    site.wheel("triton", "3.6.0", {"triton/__init__.py": "raise ImportError('libtriton.so: broken')\n"})
    check, text = triton(site)
    assert not check.ok
    assert text.splitlines()[0] == (
        "error: triton 3.6.0 cannot build anything: ImportError: libtriton.so: broken [triton]"
    )


TRITON = {
    "triton/__init__.py": "from types import SimpleNamespace\n"
    "from triton import runtime\n"
    "def jit(fn):\n    return fn\n"
    "def compile(source, target):\n"
    "    return SimpleNamespace(asm={'cubin': b'\\x7fELF', 'ptx': f'.target sm_{target[1]}a'}, metadata=None)\n",
    "triton/language.py": "constexpr = int\n",
    "triton/runtime.py": "class Driver:\n    active = None\n"
    "    def set_active(self, driver):\n        self.active = driver\ndriver = Driver()\n",
    "triton/compiler.py": "def ASTSource(fn, signature, constexprs):\n    return fn\n",
    "triton/backends/__init__.py": "",
    "triton/backends/compiler.py": "def GPUTarget(*what):\n    return what\n",
    "triton/backends/nvidia/__init__.py": "",
    "triton/backends/nvidia/driver.py": "def CudaUtils():\n    return 1\ndef CudaLauncher(source, metadata):\n    return 1\n",
}


def test_triton_that_builds(site: Site) -> None:
    site.wheel("triton", "3.6.0", TRITON)
    check, text = triton(site)
    assert (text, check.looked_at, check.expected) == ("", 3, 3)
    assert check.detail == "triton 3.6.0 made: driver module, kernel for sm_120, launcher for sm_120"


def test_triton_whose_launcher_is_the_active_driver_s(site: Site) -> None:
    """As from 3.8 on: no driver is active where there is no GPU."""
    driver = (
        "import triton\ndef CudaUtils():\n    return 7\n"
        "def CudaLauncher(source, metadata):\n    assert triton.runtime.driver.active.utils == 7\n"
    )
    site.wheel("triton", "3.8.0", {**TRITON, "triton/backends/nvidia/driver.py": driver})
    assert triton(site)[1] == ""


def test_triton_without_the_python_headers(site: Site) -> None:
    driver = (
        "import os\ndef CudaUtils():\n"
        "    os.write(2, b'main.c:1:10: fatal error: Python.h: No such file or directory\\n')\n"
        "    raise RuntimeError('gcc returned 1')\n"
        "def CudaLauncher(source, metadata):\n    return 1\n"
    )
    site.wheel("triton", "3.6.0", {**TRITON, "triton/backends/nvidia/driver.py": driver})
    lines = triton(site)[1].splitlines()
    assert (lines[0], lines[1], lines[-1]) == (
        "error: triton 3.6.0 cannot build driver module: RuntimeError: gcc returned 1 [triton]",
        "  because: main.c:1:10: fatal error: Python.h: No such file or directory",
        "  hint: Triton compiles against Python.h: add the Python headers (`python3-dev`) to the base's packages",
    )


FLAGS = "        return [f'-gencode=arch=compute_{a},code=sm_{a}', '-O3']\n"


def flashinfer(
    site: Site, *, flags: str = FLAGS, version: str = "0.6.12", cubin: str = "0.6.12", init: str = ""
) -> str:
    context = (
        "import os\nclass CompilationContext:\n    def get_nvcc_flags_list(self):\n"
        "        a = os.environ['FLASHINFER_CUDA_ARCH_LIST'].replace('.', '')\n" + flags
    )
    site.wheel(
        "flashinfer-python",
        "0.6.12",
        {
            "flashinfer/__init__.py": f"{init}\n__version__ = '{version}'\n",
            "flashinfer/compilation_context.py": context,
        },
    )
    site.wheel("flashinfer-cubin", "0.6.12", {"flashinfer_cubin/__init__.py": f"__version__ = '{cubin}'\n"})
    with site.native() as (native, _):
        return said(check_flashinfer(native), "flashinfer")


def test_flashinfer_that_asks_for_the_target(site: Site) -> None:
    assert flashinfer(site) == ""


def test_flashinfer_that_asks_for_another_target(site: Site) -> None:
    assert flashinfer(site, flags="        return ['-gencode=arch=compute_120f,code=sm_120f']\n") == (
        "error: flashinfer would compile for -gencode=arch=compute_120f,code=sm_120f, the target 12.0a is "
        "`-gencode=arch=compute_120a,code=sm_120a` [flashinfer]\n"
        "  because: with FLASHINFER_CUDA_ARCH_LIST=12.0a in the environment, as a server's workers set it"
    )


def test_flashinfer_whose_cubins_are_of_another_version(site: Site) -> None:
    assert flashinfer(site, cubin="0.6.11") == (
        "error: flashinfer-cubin says it is 0.6.11, flashinfer is 0.6.12 [flashinfer]\n"
        "  because: flashinfer raises at import unless both are of one version"
    )


def test_flashinfer_that_does_not_import(site: Site) -> None:
    text = flashinfer(site, init="raise RuntimeError('flashinfer-cubin version (0.6.3) does not match')")
    assert text.splitlines()[0] == (
        "error: flashinfer 0.6.12 cannot be imported: RuntimeError: flashinfer-cubin version (0.6.3) does not match [flashinfer]"
    )
    assert text.splitlines()[-1] == "  hint: flashinfer raises at import unless flashinfer-cubin has its own version"


def test_stack_without_flashinfer(site: Site) -> None:
    with site.native() as (native, _):
        assert finished(check_flashinfer(native)).detail == "not applicable: flashinfer is not in the lock"
