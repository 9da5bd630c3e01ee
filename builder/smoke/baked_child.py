"""Runs isolated in a child: load a compiled module of flashinfer as a server would that may write nothing. A script of its own.

`baked_child.py SITE_PACKAGES FOLDER TARGETS FUNCTION…`: FOLDER is for flashinfer's caches, TARGETS as in
FLASHINFER_CUDA_ARCH_LIST, FUNCTION of flashinfer/jit/comm.py. Where it may, it becomes another user first. Prints one JSON
object a line for each function: {"function", "file", "flags", "uid", "error"}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

# Whom nothing belongs to (the user `nobody` of Debian and Ubuntu).
NOBODY = 65534


def become_nobody(folder: str) -> None:
    """Give FOLDER to another user and become that one, where this process is root's."""
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def close_folder(folder: str) -> None:
    """No folder below can be written into any more."""
    for path, _, _ in os.walk(folder):
        os.chmod(path, 0o555)


def load(function: str, answer: dict[str, object]) -> None:
    """Load the function's module; fills ``answer`` as far as it gets. Raises what flashinfer raises."""
    from flashinfer.jit import comm  # type: ignore[import-not-found,unused-ignore]

    spec = getattr(comm, function)()
    answer.update(file=str(spec.aot_path), flags=list(spec.extra_cuda_cflags))
    spec.build_and_load()


def main() -> None:
    """Import flashinfer, take away what a compilation needs, and load."""
    site_packages, folder, targets, *functions = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    become_nobody(folder)
    os.environ.update(
        HOME=folder,
        TMPDIR=folder,
        XDG_CACHE_HOME=folder,
        FLASHINFER_WORKSPACE_BASE=folder,
        FLASHINFER_CUDA_ARCH_LIST=targets,
    )
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        # Its import makes folders and a log; with no writable home it raises, whatever is compiled.
        import flashinfer.jit  # type: ignore[import-not-found,unused-ignore]  # noqa: F401

        trouble = ""
    except BaseException:  # noqa: BLE001 - what it raises is the answer
        trouble = traceback.format_exc(limit=-3)
    close_folder(folder)
    os.environ["PATH"] = folder
    for function in functions:
        answer: dict[str, object] = {
            "function": function,
            "file": "",
            "flags": [],
            "uid": os.geteuid(),
            "error": trouble,
        }
        try:
            if not trouble:
                load(function, answer)
        except BaseException:  # noqa: BLE001 - what it raises is the answer
            answer["error"] = traceback.format_exc(limit=-3)
        print(json.dumps(answer), file=answers, flush=True)
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
