"""`python -m tests.gpu_kernels.faults --out FOLDER`: on a real GPU, checks that fault and hang on purpose, each followed by one that has to hold.

Needs torch and nvcc. What has no end in itself ends after a minute, should nobody stop it. Exit status 0 where all went as expected, else 3.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder.smoke.child import Workspace
from builder.smoke.gpu import Given, Runner, machine
from builder.smoke.gpu_case import Case, Look
from builder.smoke.tree import Tree

SOURCE = """
__global__ void wild(int *at) { at[1ll << 40] = 1; }
__global__ void spin(long long until, int *at) {
  long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - start < until);
  *at = 1;
}
extern "C" const char *launch(int which) {
  int *at;
  cudaError_t error = cudaMalloc(&at, 4);
  if (!error) {
    if (which) spin<<<1, 1>>>(60ll * 1000 * 1000 * 1000, at); else wild<<<1, 1>>>(at);
    error = cudaGetLastError();
  }
  if (!error) error = cudaDeviceSynchronize();
  return error ? cudaGetErrorString(error) : "";
}
"""
PLACE = "FAULTS_CODE"
OTHER = {9: "sm_120a", 12: "sm_90a"}
"""A target that a device of that major has no use for."""
LIMIT = 25.0
"""Seconds for the check that hangs; importing torch takes about four."""


def _launch(name: str, which: int) -> None:
    library = ctypes.CDLL(str(Path(os.environ[PLACE]) / name))
    library.launch.restype = ctypes.c_char_p
    if words := library.launch(which).decode():
        raise RuntimeError(f"CUDA error: {words}")


def _start() -> Any:
    import torch  # type: ignore[import-not-found,unused-ignore]

    torch.zeros(1, device="cuda")
    return torch


def no_image(look: Look) -> None:
    """A kernel of which the file has code for another device."""
    _start()
    look.true("torch is there", True)
    _launch("other.so", 0)


def wild(look: Look) -> None:
    """A kernel that writes where nothing is: torch is told of it afterwards."""
    torch = _start()
    try:
        _launch("own.so", 0)
    except RuntimeError as error:
        look.say(str(error))
    torch.zeros(1, device="cuda").add_(1).cpu()
    look.true("not come to", True)


def index(look: Look) -> None:
    """An index that is out of range, which torch's kernel asserts."""
    torch = _start()
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].cpu()
    look.true("not come to", True)


def spin(look: Look) -> None:
    """A kernel that does not end for a minute."""
    _start()
    _launch("own.so", 1)
    look.true("not come to", True)


EXPECTED = {
    "no_image": ("no kernel image is available for execution on the device", "the file has no code for this GPU"),
    "wild": ("illegal memory access", "a kernel has read or written outside"),
    "index": ("device-side assert triggered", "a kernel has found an index"),
    "spin": ("ran out of time", ""),
}


def compiled(folder: Path, capability: str) -> None:
    """The kernels for this device, and for another. Raises `CalledProcessError` as nvcc fails."""
    major, minor = (int(part) for part in capability.split("."))
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    (folder / "faults.cu").write_text(SOURCE, encoding="utf-8")
    for name, target in (("own", f"sm_{major}{minor}"), ("other", OTHER.get(major, "sm_120a"))):
        command = [nvcc, f"-arch={target}", "-Xcompiler", "-fPIC", "-shared", "-o", str(folder / f"{name}.so")]
        subprocess.run([*command, str(folder / "faults.cu")], check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them on the first GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_kernels.faults", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where faults.json goes")
    out: Path = parser.parse_args(arguments).out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        site = Path(name).resolve() / "env/lib/python3/site-packages"
        site.mkdir(parents=True)
        with Workspace(Tree.read(site)) as workspace:
            found = machine(workspace)
            if not found.gpus:
                print(f"no GPU: {found.error}", file=sys.stderr)
                return 3
            del found.gpus[1:]
            compiled(Path(name), found.gpus[0]["capability"])
            cases = []
            for fault in EXPECTED:
                limit = LIMIT if fault == "spin" else 120.0
                cases.append(Case(fault, f"tests.gpu_kernels.faults:{fault}", limit))
                cases.append(Case(f"after-{fault}", "gpu_torch:matmul"))
            given = Given(environment={PLACE: name})
            checks = Runner(workspace, found, given, lambda text: print(text, flush=True), cases).run()
    wrong = []
    for check in checks:
        words, because = EXPECTED.get(check["name"], ("", ""))
        told = str(check["detail"])
        as_expected = check["ok"] if not words else words in told and check.get("because", "").startswith(because)
        wrong += [] if as_expected and bool(words) != check["ok"] else [check["name"]]
    data = {"gpu": found.gpus[0], "driver": found.driver, "checks": checks, "not_as_expected": wrong}
    (out / "faults.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"{len(checks)} checks, not as expected: {', '.join(wrong) or 'none'}")
    return 3 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
