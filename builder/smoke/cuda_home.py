"""Lay out CUDA_HOME over the CUDA wheels, with what a linker expects and the wheels lack.

Wheels have `lib` and versioned names only (`libcudart.so.13`), so that compiling works and linking a JIT module fails
(facts/stacks.md, section 3.2). CUDA_HOME gets `lib64` with unversioned names and `stubs/libcuda.so`, generated from the
driver API's own header for linking alone: it is on no loader path, its soname is the real driver's.

Standard library only; runs in the build, on the image's Python, as `python3 -P …/cuda_home.py` beside `stub.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import stub  # type: ignore[import-not-found,unused-ignore]  # it lies beside this file in the build

# `CUresult CUDAAPI cuInit(unsigned int Flags);` declares, `#define cuMemAlloc cuMemAlloc_v2` names what is exported.
_DECLARED = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(")
_RENAMED = re.compile(r"^\s*#\s*define\s+cu[A-Z]\w*\s+(cu[A-Z]\w*)\s*$", re.MULTILINE)


def driver_names(header_text: str) -> list[str]:
    """The functions of the driver API that `cuda.h` declares, with the versioned names that programs link to."""
    return sorted(set(_DECLARED.findall(header_text)) | set(_RENAMED.findall(header_text)))


def wheel_root(site_packages: str) -> str:
    """The folder that the CUDA wheels share (`nvidia/cu13`); `SystemExit` with the reason if it is not one folder."""
    parent = os.path.join(site_packages, "nvidia")
    roots = [
        os.path.join(parent, name)
        for name in sorted(os.listdir(parent) if os.path.isdir(parent) else ())
        if os.path.isfile(os.path.join(parent, name, "bin", "nvcc"))
    ]
    if len(roots) != 1:
        found = ", ".join(roots) or "none"
        raise SystemExit(
            f"error: CUDA_HOME needs one folder with nvcc below {parent}, found {found}\n"
            "  hint: name the compiler's wheels under `cuda.compiler`, or write `jit: none`"
        )
    return roots[0]


def unversioned(name: str) -> str | None:
    """`libcudart.so.13` → `libcudart.so`; None for a name that has no version."""
    match = re.fullmatch(r"(lib[\w+.-]+?\.so)\.[\d.]+", name)
    return match.group(1) if match else None


def lay_out(root: str, home: str) -> None:
    """Make `home` over the wheels' folder `root`: links only, but for the generated stub."""
    os.makedirs(os.path.join(home, "bin"))
    for name in sorted(os.listdir(os.path.join(root, "bin"))):
        os.symlink(os.path.join(root, "bin", name), os.path.join(home, "bin", name))
    for name in ("include", "nvvm"):
        os.symlink(os.path.join(root, name), os.path.join(home, name))
    lib64 = os.path.join(home, "lib64")
    os.makedirs(os.path.join(lib64, "stubs"))
    os.symlink("lib64", os.path.join(home, "lib"))
    names = sorted(os.listdir(os.path.join(root, "lib")))
    for name in names:
        os.symlink(os.path.join(root, "lib", name), os.path.join(lib64, name))
    for name in names:
        plain = unversioned(name)
        if plain is not None and not os.path.lexists(os.path.join(lib64, plain)):
            os.symlink(name, os.path.join(lib64, plain))
    with open(os.path.join(root, "include", "cuda.h"), encoding="utf-8", errors="replace") as file:
        symbols = driver_names(file.read())
    if not symbols:
        raise SystemExit("error: cuda.h declares no driver function: the stub for libcuda would be empty")
    stub.write_stub(os.path.join(lib64, "stubs", "libcuda.so"), "libcuda.so.1", symbols)


def main(argv: list[str]) -> int:
    """Return 0; an existing `home` is an error."""
    parser = argparse.ArgumentParser(description="lay out CUDA_HOME over the CUDA wheels")
    parser.add_argument("--site-packages", required=True)
    parser.add_argument("--home", required=True)
    arguments = parser.parse_args(argv)
    lay_out(wheel_root(arguments.site_packages), arguments.home)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
