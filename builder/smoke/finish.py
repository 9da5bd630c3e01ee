"""Finish a layer inside the build: what a step wrote gets fixed times and modes, and no droppings of the installer.

A layer's content must depend on the lock alone. Only files that this step created or changed are touched (their ctime
is not before the start mark's): touching a file of a lower layer would copy it into this one.

Standard library only; runs on the image's Python.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import sys
import warnings

# Written beside what is installed, by uv and by venv; no RECORD has them.
DROPPINGS = ("uv_cache.json", "uv_build.json")


def changed(top: str, start: int) -> list[str]:
    """`top` and every path below it whose ctime is not before `start` (nanoseconds); links not followed, one file system.

    One look at each entry: the environment has 100,000, and every layer has to look at all that are there by then.
    """
    status = os.lstat(top)
    found = [top] if status.st_ctime_ns >= start else []
    folders = [top]
    while folders:
        with os.scandir(folders.pop()) as listing:
            for entry in listing:
                seen = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    if seen.st_dev != status.st_dev:
                        continue
                    folders.append(entry.path)
                if seen.st_ctime_ns >= start:
                    found.append(entry.path)
    return found


def compile_package(path: str, workers: int) -> None:
    """Bytecode for a package or module that checks its source by hash: an edit in a running container is seen."""
    warnings.simplefilter("ignore")
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    if os.path.isdir(path):
        compileall.compile_dir(path, quiet=2, workers=workers, invalidation_mode=mode)
    elif os.path.isfile(path):
        compileall.compile_file(path, quiet=2, invalidation_mode=mode)


def drop(path: str) -> bool:
    """Remove an installer's dropping, and its line in the RECORD beside it; False if `path` is not one."""
    if not os.path.dirname(path).endswith(".dist-info"):
        return False
    os.unlink(path)
    record = os.path.join(os.path.dirname(path), "RECORD")
    with open(record, encoding="utf-8", newline="") as file:
        lines = [line for line in file if os.path.basename(path) not in line.split(",")[0]]
    with open(record, "w", encoding="utf-8", newline="") as file:
        file.writelines(lines)
    return True


def finish(start_file: str, epoch: int, folders: list[str]) -> None:
    """Fix what the step that made `start_file` wrote below `folders`; the start file goes."""
    start = os.stat(start_file).st_ctime_ns
    os.unlink(start_file)
    for path in ("/opt/venv/.lock",):
        if os.path.exists(path):
            os.unlink(path)
    for folder in folders:
        paths = changed(folder, start)
        # First what goes: it changes a RECORD, whose time is set below.
        gone = {path for path in paths if os.path.basename(path) in DROPPINGS and drop(path)}
        for path in paths:
            if path in gone:
                continue
            if not os.path.islink(path):
                wanted = fixed_mode(path, os.lstat(path).st_mode & 0o7777)
                if wanted is not None:
                    os.chmod(path, wanted)
            os.utime(path, (epoch, epoch), follow_symlinks=False)


def fixed_mode(path: str, mode: int) -> int | None:
    """The mode for a file or folder below /opt or /usr/local, None if it is right already or not ours to set.

    Readable by any --user and writable by root alone: the umask of the machine that built it must not show.
    """
    if not path.startswith(("/opt/", "/usr/local/")):
        return None
    wanted = 0o755 if os.path.isdir(path) or mode & 0o100 else 0o644
    return wanted if wanted != mode else None


def main(argv: list[str]) -> int:
    """Return 0; an error is an exception, and fails the build step."""
    parser = argparse.ArgumentParser(description="fix times and modes of what a build step wrote")
    parser.add_argument("--epoch", type=int, help="seconds since 1970 for every file and folder")
    parser.add_argument("--start", help="a file made at the step's start; it is removed")
    parser.add_argument("--compile", action="append", default=[], help="package folder or module to compile")
    parser.add_argument("folders", nargs="*")
    arguments = parser.parse_args(argv)
    for path in arguments.compile:
        compile_package(path, workers=os.cpu_count() or 1)
    if arguments.start:
        finish(arguments.start, arguments.epoch, arguments.folders)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
