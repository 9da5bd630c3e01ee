"""Runs isolated in a child: a fork server. Imports torch once, then opens each file in a fork of its own.

Reads one JSON object a line from standard input: {"path", "first"}, where ``first`` lists libraries to open before,
each with whether RTLD_GLOBAL. Answers one a line: {"path", "code", "error", "seconds"}; ``code`` is the exit status,
negative for a signal, null for one that took too long. A script of its own.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import warnings
from typing import Any

OPENED, REFUSED = 0, 3


def open_file(path: str, first: list[tuple[str, bool]], pipe: int) -> None:
    """In the fork: open, say what was said against it, and leave without running destructors."""
    try:
        for library, is_global in first:
            ctypes.CDLL(library, mode=os.RTLD_NOW | (os.RTLD_GLOBAL if is_global else os.RTLD_LOCAL))
        ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except BaseException as error:  # noqa: BLE001 - what the loader raises is the answer
        os.write(pipe, f"{error}".encode(errors="replace")[:8192])
        os._exit(REFUSED)
    os._exit(OPENED)


def start(path: str, first: list[tuple[str, bool]]) -> tuple[int, int]:
    """Fork; the child's standard error goes into the pipe too, for what a library prints before it aborts."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(writable, 2)
        open_file(path, first, writable)
    os.close(writable)
    return pid, readable


def finish(pid: int, readable: int, deadline: float) -> tuple[int | None, str]:
    """Read what the fork has to say until it ends or the deadline passes."""
    said, late = b"", False
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            late = True
            break
        ready, _, _ = select.select([readable], [], [], left)
        if ready:
            part = os.read(readable, 65536)
            if not part:
                break
            said = (said + part)[-8192:]
    os.close(readable)
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return None if late else os.waitstatus_to_exitcode(status), said.decode(errors="replace")


def main() -> None:
    """`load_child.py SITE_PACKAGES MODULE TIMEOUT_SECONDS`, MODULE empty for a bare python."""
    site_packages, module, timeout = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    if module:
        __import__(module)
    warnings.simplefilter("ignore")
    answers: Any = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for line in sys.stdin:
        job = json.loads(line)
        path = job["path"]
        began = time.monotonic()
        code, error = finish(*start(path, job["first"]), began + timeout)
        answer = {"path": path, "code": code, "error": error, "seconds": time.monotonic() - began}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
