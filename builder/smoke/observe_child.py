"""Runs isolated in a child: import torch, then tell what is loaded and what was opened into the global scope.

A script of its own (no package is importable in an isolated process). Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any


def mapped() -> list[str]:
    """Files that are mapped executable, in the order of their addresses, each once."""
    found: dict[str, None] = {}
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/"):
                found[fields[5].removesuffix(" (deleted)")] = None
    return list(found)


def main() -> None:
    """`observe_child.py SITE_PACKAGES MODULE`, MODULE empty for a bare python."""
    site_packages, module = sys.argv[1], sys.argv[2]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    before = set(mapped())
    opened: list[str] = []
    real: Any = ctypes._dlopen  # type: ignore[attr-defined]

    def dlopen(name: Any, mode: int = ctypes.DEFAULT_MODE) -> Any:
        handle = real(name, mode)
        if name and mode & os.RTLD_GLOBAL:
            opened.append(os.fsdecode(name))
        return handle

    ctypes._dlopen = dlopen  # type: ignore[attr-defined]
    answer: dict[str, Any] = {"error": "", "version": ""}
    if module:
        try:
            answer["version"] = str(getattr(__import__(module), "__version__", ""))
        except BaseException as error:  # noqa: BLE001 - what the import raises is the answer
            answer["error"] = f"{type(error).__name__}: {error}"
    loaded = mapped()
    by_name = {os.path.basename(path): path for path in loaded}
    roots = [by_name.get(os.path.basename(name), name) for name in opened]
    answer["loaded"] = loaded
    answer["new"] = [path for path in loaded if path not in before]
    answer["opened_global"] = [path for path in roots if os.path.isabs(path)]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
