"""Runs isolated in a child: resolve (module, name) pairs with a GPU faked. A script of its own.

`resolve_child.py SITE_PACKAGES CAPABILITY WARM…`; reads a JSON list of pairs from standard input, prints one JSON
object: {"failures": [[module, name, error]], "alone": [module, …], "said": what they printed}. WARM are modules that
are imported before forking, torch first. One fork resolves the pairs in the order given, as one server process would;
what fails there is tried again in a fork of its own, since what was imported before may be the cause: ``alone`` lists
the modules that then resolved.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

Pair = tuple[str, str]
# A fork for each failing module costs up to 15 s: with more than these, the stack is broken and order is not the cause.
MAX_ALONE = 8


def resolve(module: str, name: str, broken: dict[str, str]) -> str:
    """What the import statement raises, or nothing. A module that failed once fails alike for its other names."""
    if module in broken:
        return broken[module]
    try:
        found = importlib.import_module(module)
    except BaseException:  # noqa: BLE001 - what a module raises is the answer
        broken[module] = traceback.format_exc(limit=-8)
        return broken[module]
    if not name or hasattr(found, name):
        return ""
    try:
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        if error.name == f"{module}.{name}":
            return f"ImportError: cannot import name '{name}' from '{module}'"
        return traceback.format_exc(limit=-8)
    except BaseException:  # noqa: BLE001 - what a module raises is the answer
        return traceback.format_exc(limit=-8)
    return ""


def in_fork(pairs: list[Pair], output: int) -> tuple[dict[Pair, str], list[Pair]]:
    """Resolve in a fork; errors by pair, and the pairs that are left when one has ended the process."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        os.dup2(output, 1)
        os.dup2(output, 2)
        broken: dict[str, str] = {}
        with os.fdopen(writable, "w", encoding="utf-8") as answers:
            for pair in pairs:
                print(json.dumps({"at": pair}), file=answers, flush=True)
                if error := resolve(*pair, broken):
                    print(json.dumps({"error": error}), file=answers, flush=True)
            print(json.dumps({"done": True}), file=answers, flush=True)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
    os.close(writable)
    errors: dict[Pair, str] = {}
    at: Pair | None = None
    done = False
    with os.fdopen(readable, encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            done = "done" in answer
            if "at" in answer:
                at = (answer["at"][0], answer["at"][1])
            elif "error" in answer and at is not None:
                errors[at] = answer["error"]
    _, status = os.waitpid(pid, 0)
    if done or at is None:
        return errors, []
    code = os.waitstatus_to_exitcode(status)
    end = f"ended with status {code}"
    with contextlib.suppress(ValueError):
        end = f"was ended by {signal.Signals(-code).name}"
    # The module's other names would end the next process as well.
    for pair in pairs:
        if pair[0] == at[0]:
            errors[pair] = f"the process that imports it {end}"
    return errors, [pair for pair in pairs[pairs.index(at) :] if pair not in errors]


def load_fake_gpu() -> Any:
    """`fake_gpu.py` beside this file, without making its folder importable."""
    spec = importlib.util.spec_from_file_location("_fake_gpu", Path(__file__).with_name("fake_gpu.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Resolve what standard input lists."""
    site_packages, capability, *warm = sys.argv[1:]
    if site_packages not in sys.path:
        sys.path.insert(0, site_packages)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    pairs: list[Pair] = [(module, name) for module, name in json.load(sys.stdin)]
    for module in warm:
        try:
            loaded = importlib.import_module(module)
        except BaseException:  # noqa: BLE001, S112 - the forks will say so, where it matters
            continue
        if module == "torch":
            load_fake_gpu().fake(loaded, capability)
    said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
    failures: dict[Pair, str] = {}
    left = pairs
    while left:
        errors, left = in_fork(left, said.fileno())
        failures.update(errors)
    modules = sorted({module for module, _ in failures})
    alone: list[str] = []
    for module in modules if len(modules) <= MAX_ALONE else []:
        mine = [pair for pair in failures if pair[0] == module]
        errors, _ = in_fork(mine, said.fileno())
        for pair in mine:
            del failures[pair]
        failures.update(errors)
        if not errors:
            alone.append(module)
    rows = [[module, name, error] for (module, name), error in sorted(failures.items())]
    said.seek(0)
    words = said.read()[-200_000:].decode(errors="replace")
    print(json.dumps({"failures": rows, "alone": alone, "said": words}), file=answers, flush=True)
    answers.close()
    os._exit(0)


if __name__ == "__main__":
    main()
