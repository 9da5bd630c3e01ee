"""Runs isolated in a child: one check on the GPU that it sees. A script of its own.

`gpu_child.py SITE_PACKAGES MODULE:FUNCTION`; reads one JSON object from standard input: {"jit", "compiled", "rank", "ranks",
"meet"}. Prints JSON objects, one a line: {"event": "mapped", "files"}, the shared objects of site-packages that are loaded by then,
and last {"event": "end", "looked_at", "wrong", "said", "error", "skipped"}; a process that faults ends without one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Run the check to its end, or to what it raises."""
    site_packages, run = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The checks lie beside this file; what they test must not find them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    module, _, function = run.partition(":")
    from builder.smoke.gpu_case import Look, Skip

    check = getattr(importlib.import_module(module if "." in module else f"builder.smoke.{module}"), function)
    del sys.path[0]
    look = Look(
        answers,
        site_packages,
        jit=request.get("jit", "nvcc"),
        compiled=tuple(request.get("compiled", ())),
        rank=request.get("rank", 0),
        ranks=request.get("ranks", 1),
        meet=request.get("meet", ""),
    )
    error = skipped = ""
    try:
        check(look)
    except Skip as reason:
        skipped = str(reason)
    except BaseException:  # noqa: BLE001 - what it raises is the answer
        error = traceback.format_exc(limit=-3)
    look.loaded()
    look.tell("end", looked_at=look.comparisons, wrong=look.wrong, said=look.said, error=error, skipped=skipped)
    answers.close()
    # A context with a fault in it aborts when it is taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
