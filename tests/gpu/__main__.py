"""`python -m tests.gpu --wheels FOLDER --out FOLDER` runs everything; docs/gpu.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.gpu.driver import Run, unpack
from tests.gpu.scenarios import Scenario, lanes


def selected(only: Sequence[str]) -> list[list[list[Scenario]]]:
    """The steps, less the scenarios whose part or name has none of the words."""

    def wanted(scenario: Scenario) -> bool:
        text = f"{scenario.part} {scenario.name}"
        return not only or any(word in text for word in only)

    chosen = [[[item for item in lane if wanted(item)] for lane in step] for step in lanes()]
    needed = {item.needs for step in chosen for lane in step for item in lane}
    return [[[item for item in lane if wanted(item) or item.name in needed] for lane in step] for step in lanes()]


def main(arguments: list[str]) -> int:
    """0 where every check holds, 3 where one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="what `python -m tests.gpu.prepare` has written")
    parser.add_argument("--out", type=Path, required=True, help="where report.json and log.txt go")
    parser.add_argument("--seconds", type=float, default=540, help="how long everything may take")
    parser.add_argument("--arch", default="9.0a", help="what flashinfer is compiled for: that of the GPUs")
    parser.add_argument("--only", action="append", default=[], help="a word of the part or name; may be given again")
    parser.add_argument("--list", action="store_true", help="name the scenarios and run none")
    given = parser.parse_args(arguments)
    steps = selected(given.only)
    if given.list:
        for scenario in (item for step in steps for lane in step for item in lane):
            print(f"{scenario.part}: {scenario.name} ({scenario.run}, at most {scenario.limit:g} s)")
        return 0
    if not (given.wheels / "manifest.json").exists():
        parser.error(f"{given.wheels} has no manifest.json: run `python -m tests.gpu.prepare {given.wheels}` first")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        run = Run(given.wheels, given.out, Path(scratch), given.seconds, given.arch)
        unpack(given.wheels, Path(scratch))
        good = run.all(steps)
    wrong = [item for item in run.checks if not item["ok"]]
    print(f"{len(run.checks) - len(wrong)} of {len(run.checks)} checks hold")
    for item in wrong:
        print(f"fails: {item['part']}: {item['scenario']}: {item['name']}: {item['detail'][:300]}")
    return 0 if good else 3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
