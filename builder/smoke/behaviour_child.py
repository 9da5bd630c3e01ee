"""Runs isolated in a child: cases of `behaviour`, each in a fork of its own, with a GPU faked. A script of its own.

`behaviour_child.py SITE_PACKAGES`; reads one JSON object from standard input: {"capability", "arch", "sites", "patched",
"before": {file: upstream's text}, "file_of": {site: file}, "cases": [name]}. Prints one JSON object a line for each case:
{"case", "comparisons", "wrong": [[what, expected, got]], "error"}.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def compare(case: Any, installed: Any) -> dict[str, Any]:
    """Run a case to its end, or to what it raises."""
    wrong: list[tuple[str, str, str]] = []
    comparisons, error = 0, ""
    try:
        for item in case.run(installed):
            comparisons += 1
            if item.got != item.expected:
                wrong.append((item.what, item.expected, item.got))
    except BaseException:  # noqa: BLE001 - what a case raises is the answer
        error = traceback.format_exc(limit=-4)
    return {"case": case.name, "comparisons": comparisons, "wrong": wrong, "error": error}


def in_fork(case: Any, installed: Any) -> dict[str, Any]:
    """Run a case in a process of its own."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        with os.fdopen(writable, "w", encoding="utf-8") as file:
            json.dump(compare(case, installed), file)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    try:
        return dict(json.loads(text))
    except ValueError:
        ended = f"the process ended with {os.waitstatus_to_exitcode(status)}"
        return {"case": case.name, "comparisons": 0, "wrong": [], "error": ended}


def main() -> None:
    """Run the cases that standard input names."""
    (site_packages,) = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The cases lie beside this file; what they test must not find them.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from builder.smoke import fake_gpu
    from builder.smoke.behaviour import CASES
    from builder.smoke.behaviour_case import Installed

    del sys.path[0]
    cases = [case for case in CASES if case.name in request["cases"]]
    installed = Installed(
        frozenset(request["sites"]),
        frozenset(request["patched"]),
        request["arch"],
        dict(request["before"]),
        dict(request["file_of"]),
    )
    for module in ("torch", *dict.fromkeys(name for case in cases for name in case.imports)):
        try:
            loaded = importlib.import_module(module)
        except BaseException:  # noqa: BLE001, S112 - the forks will say so
            continue
        if module == "torch":
            fake_gpu.fake(loaded, request["capability"])
    for case in cases:
        print(json.dumps(in_fork(case, installed)), file=answers, flush=True)
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
