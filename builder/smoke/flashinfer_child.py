"""Runs isolated in a child: import flashinfer, then its nvcc flags for each target. A script of its own.

Prints one JSON object a line: {"what": "import", "error", "version", "cubin"}, then {"what": TARGET, "error", "flags"}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def main() -> None:
    """`flashinfer_child.py SITE_PACKAGES TARGET…`, TARGET as in FLASHINFER_CUDA_ARCH_LIST."""
    site_packages, *targets = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    if targets:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = targets[0]
    try:
        import flashinfer  # type: ignore[import-not-found,unused-ignore]
        from flashinfer.compilation_context import CompilationContext  # type: ignore[import-not-found,unused-ignore]
    except BaseException:  # noqa: BLE001 - what it raises is the answer
        print(json.dumps({"what": "import", "error": traceback.format_exc(limit=-3)}))
        return
    try:
        import flashinfer_cubin  # type: ignore[import-not-found,unused-ignore]

        cubin = str(flashinfer_cubin.__version__)
    except ModuleNotFoundError:
        cubin = ""
    print(json.dumps({"what": "import", "error": "", "version": flashinfer.__version__, "cubin": cubin}))
    for target in targets:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = target
        try:
            flags, error = "\n".join(CompilationContext().get_nvcc_flags_list()), ""
        except BaseException:  # noqa: BLE001 - what it raises is the answer
            flags, error = "", traceback.format_exc(limit=-1)
        print(json.dumps({"what": target, "error": error, "flags": flags}))


if __name__ == "__main__":
    main()
