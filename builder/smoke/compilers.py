"""The compilers work for each GPU target, without a GPU: `nvcc`, `triton`, and what `flashinfer` asks nvcc for."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builder.elf import read_file
from builder.elf_image import ElfError
from builder.smoke.child import Outcome, Workspace, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Result, not_applicable
from builder.smoke.spec import Gpu, Spec

# Seconds; on two shared cores nvcc takes 3 to 8 for one of these, Triton 5 to 20 with its import.
_NVCC_TIMEOUT, _CHILD_TIMEOUT = 180.0, 300.0

# Uses device headers (bf16: needs crt and the target's intrinsics), the runtime, and the driver through its stub.
_SOURCE = """\
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
__global__ void add(float *x, const __nv_bfloat16 *y) { x[threadIdx.x] += __bfloat162float(y[threadIdx.x]); }
extern "C" int smoke(float *x) {
  int devices = 0;
  cuInit(0);
  cuDeviceGetCount(&devices);
  add<<<1, 32>>>(x, nullptr);
  return devices + (int)cudaGetLastError();
}
int main() { return smoke(nullptr); }
"""
# What is built, and how nvcc is told.
_KINDS = {"program": (), "shared module": ("-shared", "-Xcompiler", "-fPIC")}


def check_nvcc(spec: Spec, workspace: Workspace) -> Result:
    """Compile and link a program and a shared module for each target, as JIT builders do: through CUDA_HOME alone.

    Linked against libcudart, and against libcuda by the link-time stub in `lib64/stubs`; no `-L` is given.
    """
    if spec.cuda_jit == "none":
        return not_applicable("the matrix has no CUDA compiler (jit: none)", "artefacts")
    if not spec.gpus:
        return not_applicable("the matrix names no GPU target", "artefacts")
    result = Result(0, 2 * len(spec.gpus), "artefacts")
    folder = workspace.root / "nvcc"
    folder.mkdir(exist_ok=True)
    (folder / "smoke.cu").write_text(_SOURCE, encoding="utf-8")
    jobs = [(gpu, what) for gpu in spec.gpus for what in _KINDS]
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            verdicts = list(pool.map(lambda job: _build(spec, workspace, folder, *job), jobs))
    except OSError as error:
        result.expected = None
        nvcc = Path(spec.cuda_home) / "bin" / "nvcc"
        result.add("error", "nvcc", f"nvcc cannot be run: {error.strerror}", because=f"it should be `{nvcc}`")
        return result
    result.looked_at = len(verdicts)
    failed: dict[tuple[Gpu, str], list[str]] = {}
    for (gpu, what), trouble in zip(jobs, verdicts, strict=True):
        if trouble:
            failed.setdefault((gpu, trouble), []).append(what)
    for (gpu, trouble), kinds in failed.items():
        _report_nvcc(result, gpu, " or a ".join(kinds), trouble)
    made = [f"sm_{gpu.nvcc} {what}" for (gpu, what), trouble in zip(jobs, verdicts, strict=True) if not trouble]
    result.detail = f"compiled and linked: {', '.join(made)}" if made else "nothing could be built"
    return result


def _build(spec: Spec, workspace: Workspace, folder: Path, gpu: Gpu, what: str) -> str:
    """Compile and link one; what went wrong, or nothing. Raises OSError when nvcc cannot be started."""
    output = folder / f"smoke_{gpu.nvcc}_{what.split()[0]}"
    command = [f"{spec.cuda_home}/bin/nvcc", f"-arch=sm_{gpu.nvcc}", *_KINDS[what], "-o", str(output)]
    command += [str(folder / "smoke.cu"), "-cudart", "shared", "-lcuda"]
    outcome = workspace.run(command, timeout=_NVCC_TIMEOUT, extra=home_environment(spec))
    return _trouble(output, spec) if outcome.code == 0 else f"{outcome.tail(8)}\nnvcc {outcome.ended}"


def _report_nvcc(result: Result, gpu: Gpu, what: str, said: str) -> None:
    hint = ""
    if "Unsupported .version" in said:
        hint = "cicc (nvidia-nvvm) is newer than ptxas (nvidia-cuda-nvcc): `compiler-coherent` names the versions"
    elif "cannot find -l" in said:
        hint = "CUDA_HOME lacks what a linker looks for: lib64 with unversioned names, lib64/stubs, a real `bin`"
    elif "Unsupported gpu architecture" in said or "is not defined for option" in said:
        hint = "this nvcc is too old for that target"
    result.add(
        "error", f"sm_{gpu.nvcc}", f"nvcc cannot build a {what} for sm_{gpu.nvcc}", because=said.strip(), hint=hint
    )


def _trouble(output: Path, spec: Spec) -> str:
    """What is wrong with what nvcc made: it has to need the driver and the runtime, and to hold device code."""
    try:
        elf = read_file(output)
    except (OSError, ElfError) as error:
        return f"it cannot be read: {error}"
    for wanted in ("libcuda.so.1", f"libcudart.so.{spec.cuda_major}"):
        if wanted not in elf.needed:
            return f"it does not need `{wanted}`, only {', '.join(elf.needed)}"
    return "" if b".nv_fatbin" in output.read_bytes() else "it holds no device code"


def _child(native: Native, script: str, *arguments: str) -> tuple[Outcome, list[dict[str, str]]]:
    """Run a child script; its answers are the lines of standard output that are JSON objects."""
    command = native.workspace.python_command(script, str(native.tree.site_packages), *arguments)
    assert native.stubs is not None
    outcome = native.workspace.run(
        command,
        timeout=_CHILD_TIMEOUT,
        extra={**home_environment(native.spec), "TRITON_LIBCUDA_PATH": str(native.workspace.stubs)},
    )
    answers = []
    for line in outcome.out.splitlines():
        if line.startswith("{"):
            answers.append(json.loads(line))
    return outcome, answers


def check_triton(native: Native, ledger: Ledger) -> Result:
    """Triton compiles a kernel for each target with its own ptxas, and its C modules with the C compiler."""
    spec = native.spec
    locked = spec.locked("triton")
    if locked is None:
        return not_applicable("triton is not in the lock", "artefacts")
    if not spec.gpus:
        return not_applicable("the matrix names no GPU target", "artefacts")
    result = Result(0, 1 + 2 * len(spec.gpus), "artefacts")
    outcome, answers = _child(native, "triton_child.py", *(gpu.capability for gpu in spec.gpus))
    made = []
    for answer in answers:
        result.looked_at += 1
        if answer["error"]:
            _report_triton(result, locked.version, answer["what"], answer["error"])
        else:
            made.append(answer["what"])
    if outcome.code != 0:
        result.expected = None
        _report_triton(result, locked.version, "anything", f"the process {outcome.ended}\n{outcome.tail()}")
    result.detail = f"triton {locked.version} made: {', '.join(made)}" if made else "nothing could be built"
    return result


def _report_triton(result: Result, version: str, what: str, said: str) -> None:
    hint = ""
    if "Python.h" in said:
        hint = "Triton compiles against Python.h: add the Python headers (`python3-dev`) to the base's packages"
    elif "C compiler" in said or "'gcc'" in said or "cc1" in said:
        hint = "Triton needs a C compiler at run time: add `gcc` and `libc6-dev` to the base's packages"
    last = said.strip().splitlines()
    result.add(
        "error",
        what,
        f"triton {version} cannot build {what}: {shorten(last[-1], 200) if last else 'it said nothing'}",
        because="\n".join(last[-10:-1]),
        hint=hint,
    )


def check_flashinfer(native: Native) -> Result:
    """flashinfer imports, its python and cubin packages agree, and it asks nvcc for exactly the target."""
    spec = native.spec
    locked, cubin = spec.locked("flashinfer-python"), spec.locked("flashinfer-cubin")
    if locked is None:
        return not_applicable("flashinfer is not in the lock", "targets")
    result = Result(0, len(spec.gpus), "targets")
    outcome, answers = _child(native, "flashinfer_child.py", *(gpu.flashinfer for gpu in spec.gpus))
    facts = {answer["what"]: answer for answer in answers}
    if outcome.code != 0 or "import" not in facts or facts["import"]["error"]:
        said = facts.get("import", {}).get("error") or f"the process {outcome.ended}\n{outcome.tail()}"
        result.expected = None
        lines = said.strip().splitlines()
        result.add(
            "error",
            "flashinfer",
            f"flashinfer {locked.version} cannot be imported: {shorten(lines[-1], 200)}",
            because="\n".join(lines[-10:-1]),
            hint="flashinfer raises at import unless flashinfer-cubin has its own version" if "cubin" in said else "",
        )
        return result
    version = facts["import"]["version"]
    if version.split("+")[0] != locked.version.split("+")[0]:
        result.add("error", "flashinfer", f"flashinfer says it is {version}, the lock has {locked.version}")
    if cubin is not None and facts["import"]["cubin"].split("+")[0] != version.split("+")[0]:
        result.add(
            "error",
            "flashinfer-cubin",
            f"flashinfer-cubin says it is {facts['import']['cubin'] or 'nothing'}, flashinfer is {version}",
            because="flashinfer raises at import unless both are of one version",
        )
    for gpu in spec.gpus:
        answer = facts.get(gpu.flashinfer)
        if answer is not None:
            result.looked_at += 1
            _check_flags(result, gpu, answer)
    result.detail = (
        f"flashinfer {version}, cubin {facts['import']['cubin'] or 'not in the lock'}; flags for "
        + ", ".join(gpu.flashinfer for gpu in spec.gpus)
    )
    return result


def _check_flags(result: Result, gpu: Gpu, answer: dict[str, str]) -> None:
    wanted = f"-gencode=arch=compute_{gpu.nvcc},code=sm_{gpu.nvcc}"
    flags = answer["flags"].split("\n")
    targets = [flag for flag in flags if "arch" in flag]
    if answer["error"]:
        result.add(
            "error", gpu.flashinfer, f"flashinfer has no flags for {gpu.flashinfer}: {shorten(answer['error'], 200)}"
        )
    elif targets != [wanted]:
        result.add(
            "error",
            gpu.flashinfer,
            f"flashinfer would compile for {' '.join(targets) or 'no target'}, "
            f"the target {gpu.flashinfer} is `{wanted}`",
            because=f"with FLASHINFER_CUDA_ARCH_LIST={gpu.flashinfer} in the environment, as a server's workers set it",
        )
