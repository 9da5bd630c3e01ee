"""Runs isolated in a child: Triton's driver module, a kernel and its launcher for each target. A script of its own.

Prints one JSON object a line: {"what", "error"}. No GPU: the target is given, the driver library is the stub that
TRITON_LIBCUDA_PATH names.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

SITE_PACKAGES, *TARGETS = sys.argv[1:] if len(sys.argv) > 1 else [""]
if SITE_PACKAGES and SITE_PACKAGES not in sys.path:
    sys.path.insert(0, SITE_PACKAGES)

import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]


@triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


def attempt(what: str, action: Callable[[], Any]) -> Any:
    """Do it and say how it went; a C compiler's words are part of that."""
    saved, error, value = os.dup(2), "", None
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    os.dup2(writable, 2)
    try:
        value = action()
    except BaseException:  # noqa: BLE001 - what it raises is the answer
        error = traceback.format_exc(limit=-3)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(writable)
    with os.fdopen(readable, "rb") as file:
        said = file.read().decode(errors="replace")
    print(json.dumps({"what": what, "error": f"{said}\n{error}" if error else ""}), flush=True)
    return value


def main() -> None:
    """`triton_child.py SITE_PACKAGES CAPABILITY…`."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found,unused-ignore]
    from triton.backends.nvidia import driver  # type: ignore[import-not-found,unused-ignore]
    from triton.compiler import ASTSource  # type: ignore[import-not-found,unused-ignore]

    utils = attempt("driver module", driver.CudaUtils)
    pointers = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    for capability in TARGETS:
        number = int(capability.replace(".", ""))

        def compile_kernel(number: int = number) -> Any:
            source = ASTSource(fn=add, signature=pointers, constexprs={"BLOCK": 128})
            kernel = triton.compile(source, target=GPUTarget("cuda", number, 32))
            if not kernel.asm["cubin"].startswith(b"\x7fELF"):
                raise RuntimeError("the compiled kernel is not a cubin")
            if f".target sm_{number}" not in kernel.asm["ptx"]:
                raise RuntimeError(f"the PTX is not for sm_{number}")
            return source, kernel

        built = attempt(f"kernel for sm_{number}", compile_kernel)

        def build_launcher(built: Any = built) -> Any:
            if built is None:
                raise RuntimeError("there is no kernel to launch")
            source, kernel = built
            # From 3.8 on the launcher is the driver module's, and asked of the driver that is active: here none is.
            triton.runtime.driver.set_active(SimpleNamespace(utils=utils))
            with contextlib.redirect_stdout(io.StringIO()):
                return driver.CudaLauncher(source, kernel.metadata)

        attempt(f"launcher for sm_{number}", build_launcher)


if __name__ == "__main__":
    main()
