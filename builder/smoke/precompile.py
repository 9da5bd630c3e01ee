"""Compile modules of flashinfer in the build, for all GPU targets, where a server loads them as they are.

A module in `flashinfer/data/aot` is taken before anything else, with no ninja, lock or writable folder (JitSpec.build_and_load
of flashinfer 0.6.4 and 0.6.12); otherwise each server compiles it when it starts. The flags are flashinfer's own. What is
compiled depends on the wheels alone: a fixed folder, no symbols, and a line in RECORD as for any installed file.

Standard library only, apart from flashinfer; runs in the build, on the image's Python.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def prepare(work: Path, targets: list[str]) -> None:
    """The environment that flashinfer reads when it is imported; nothing of the caller's changes what is compiled."""
    for name in [name for name in os.environ if name.startswith("FLASHINFER_") or name in ("CC", "CXX", "MAX_JOBS")]:
        del os.environ[name]
    home = work / "home"
    home.mkdir(parents=True)
    os.environ.update(
        HOME=str(home),
        TMPDIR=str(work),
        XDG_CACHE_HOME=str(home),
        FLASHINFER_WORKSPACE_BASE=str(work),
        FLASHINFER_CUDA_ARCH_LIST=" ".join(targets),
    )


def compiled(spec: Any) -> bytes:
    """The shared object that flashinfer makes of a `JitSpec`, without symbols. Raises what the compilation raises."""
    spec.build(verbose=True)
    made = Path(spec.jit_library_path)
    subprocess.run(["strip", "--strip-all", str(made)], check=True)
    return made.read_bytes()


def place(target: Path, site_packages: Path) -> str:
    """Where flashinfer looks for the module, relative to site-packages. `SystemExit` if that is not in its own folder, or
    if there is one already."""
    try:
        relative = target.relative_to(site_packages).as_posix()
    except ValueError:
        relative = ""
    if not relative.startswith("flashinfer/"):
        raise SystemExit(
            f"error: flashinfer loads compiled modules from {target.parent}, not from its own folder\n"
            "  hint: flashinfer-jit-cache has modules that were compiled without the patch: take it out of the matrix"
        )
    if target.exists():
        raise SystemExit(f"error: {target} is there already\n  hint: this flashinfer brings the module itself")
    return relative


def install(data: bytes, relative: str, site_packages: Path) -> None:
    """Write the module, and a line for it in RECORD: it goes when flashinfer goes."""
    (record,) = site_packages.glob("flashinfer_python-*.dist-info/RECORD")
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    target = site_packages / relative
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)
    with record.open("a", encoding="utf-8", newline="") as file:
        file.write(f"{relative},sha256={digest},{len(data)}\n")


def main(argv: list[str]) -> int:
    """Return 0; an error is an exception, and fails the build step."""
    parser = argparse.ArgumentParser(description="compile modules of flashinfer into its package")
    parser.add_argument("--site-packages", required=True, type=Path)
    parser.add_argument(
        "--work", required=True, type=Path, help="a folder that is not there yet, the same in each build"
    )
    parser.add_argument("--module", required=True, action="append", help="its function in flashinfer/jit/comm.py")
    parser.add_argument("targets", nargs="+", help="as in FLASHINFER_CUDA_ARCH_LIST")
    arguments = parser.parse_args(argv)
    prepare(arguments.work, arguments.targets)
    from flashinfer.jit import comm  # type: ignore[import-not-found,unused-ignore]

    for name in arguments.module:
        spec = getattr(comm, name)()
        relative = place(Path(spec.aot_path), arguments.site_packages)
        install(compiled(spec), relative, arguments.site_packages)
        print(f"compiled {relative} for {', '.join(arguments.targets)}", flush=True)
    shutil.rmtree(arguments.work)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
