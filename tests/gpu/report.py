"""`python -m tests.gpu.report report.json` prints the results as the tables of docs/gpu.md."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _cell(value: object) -> str:
    return " ".join(str(value).replace("|", "\\|").split())


def markdown(report: dict[str, Any]) -> str:
    """One table of checks for each part, what was measured, and the stand-ins."""
    checks: list[dict[str, Any]] = report["checks"]
    good = sum(item["ok"] for item in checks)
    lines = [f"{good} of {len(checks)} checks hold, in {report['seconds']:.0f} s.", ""]
    lines += ["| machine | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in report["machine"].items()]
    for part in dict.fromkeys(item["part"] for item in checks):
        lines += ["", f"**{part}**", "", "| scenario | check | | detail |", "|---|---|---|---|"]
        for item in (item for item in checks if item["part"] == part):
            mark = "holds" if item["ok"] else "**fails**"
            lines.append(f"| {_cell(item['scenario'])} | {_cell(item['name'])} | {mark} | {_cell(item['detail'])} |")
    if report["notes"]:
        lines += ["", "Measured, not judged:", "", "| scenario | what | |", "|---|---|---|"]
        lines += [f"| {_cell(n['scenario'])} | {_cell(n['name'])} | {_cell(n['value'])} |" for n in report["notes"]]
    lines += ["", "Stand-ins:", "", *(f"- `{_cell(name)}`" for name in report["standins"])]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the tables of one report."""
    (path,) = arguments
    print(markdown(json.loads(Path(path).read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
