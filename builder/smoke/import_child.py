"""Runs isolated in a child: a fork server for imports. Each module is imported in a fork of its own.

`import_child.py SITE_PACKAGES WORKERS WARM…`: WARM are modules that are imported before forking, since all of the
forks would import them anyway (what fails there is left to the forks). Reads one module name a line; answers one JSON
object a line: {"module", "code", "said"}. A script of its own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

IMPORTED, RAISED = 0, 3
# Seconds; the slowest, all models at once, takes 15 on an idle core.
TIMEOUT = 300.0


def import_in_fork(module: str, output: int) -> None:
    """In the fork: import, tell what was raised, leave without running exit handlers."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    code, error = IMPORTED, ""
    try:
        importlib.import_module(module)
    except BaseException:  # noqa: BLE001 - what a module raises is the answer
        code, error = RAISED, traceback.format_exc()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(output, f"\n{error}".encode(errors="replace"))
    os._exit(code)


def main() -> None:
    """Serve until standard input ends; at most WORKERS forks at a time."""
    site_packages, workers, *warm = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for module in warm:
        try:
            importlib.import_module(module)
        except BaseException:  # noqa: BLE001, S112 - the forks will say so, where it matters
            continue
    waiting = [line.strip() for line in sys.stdin if line.strip()]
    running: dict[int, tuple[str, Any, float]] = {}
    late: set[int] = set()
    while waiting or running:
        while waiting and len(running) < int(workers):
            module, file = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 - closed when its fork has ended
            pid = os.fork()
            if pid == 0:
                import_in_fork(module, file.fileno())
            running[pid] = (module, file, time.monotonic() + TIMEOUT)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            for other, (_, _, deadline) in running.items():
                if time.monotonic() > deadline:
                    late.add(other)
                    os.kill(other, signal.SIGKILL)
            time.sleep(0.02)
            continue
        if pid not in running:
            continue
        module, file, _ = running.pop(pid)
        file.seek(0)
        said = file.read()[-200_000:].decode(errors="replace")
        file.close()
        code = None if pid in late else os.waitstatus_to_exitcode(status)
        print(json.dumps({"module": module, "code": code, "said": said}), file=answers, flush=True)


if __name__ == "__main__":
    main()
