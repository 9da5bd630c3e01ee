"""What was predicted beside what happened, as rows and as text; `python -m tests.gpu_kernels.report report.json` for docs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.smoke.gpu import line, verdict


def compared(plan: Mapping[str, Any], loads: Mapping[str, Any], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each extension: does it open, does sgl_kernel load it, do its kernels run; and was each so predicted.

    ``ran`` is None where no check ran kernels of it: then nothing is said of the prediction.
    """
    rows = []
    for row in plan["extensions"]:
        file = row["file"]
        checks = [check for check in report["checks"] if file in check["files"] and not check["skipped"]]
        held = [check["name"] for check in checks if check["ok"]]
        wrong = [check["name"] for check in checks if not check["ok"]]
        opens = loads[file]["code"] == 0
        ran = bool(held) and not wrong if checks else None
        whole = row["covered"] == row["of"]
        agree = {
            "opens": opens == (row["links"] == "ok") if row["links"] != "uncertain" else True,
            "loaded": bool(checks) == row["loaded"],
            "runs": ran is None or ran == whole,
        }
        rows.append(
            {
                "file": file,
                "predicted": {
                    "opens": row["links"],
                    "covered": row["covered"],
                    "of": row["of"],
                    "loaded": row["loaded"],
                },
                "opens": opens,
                "said": loads[file]["error"],
                "loaded": bool(checks),
                "ran": ran,
                "checks": held,
                "failed": wrong,
                "agree": agree,
                "as_predicted": all(agree.values()),
            }
        )
    return rows


def as_text(data: Mapping[str, Any]) -> str:
    """The tables, for people."""
    plan, report = data["predicted"], data["gpu"]
    torch = report["torch"] or {}
    gpus = ", ".join(f"{gpu['name']} ({gpu['capability']})" for gpu in report["gpus"]) or "no GPU"
    where = f"driver {report['driver']}, torch {torch.get('version')}, Python {data['python']}"
    lines = [
        f"{plan['package']} {plan['version']} on {gpus}, {where}; {data['seconds']:.0f} s",
        f"RECORD: {data['record']['files']} files, {len(data['record']['wrong'])} differ",
        "",
        f"{'extension':<40} {'links':<10} {'opens':<6} {'code':<10} {'loaded':<16} {'kernels':<8} checks",
    ]
    for row in data["extensions"]:
        said = row["predicted"]
        loaded = f"{_yes(said['loaded'])} → {_yes(row['loaded'])}"
        ran = "none run" if row["ran"] is None else "hold" if row["ran"] else "FAIL"
        number = f"{len(row['checks'])} of {len(row['checks']) + len(row['failed'])}"
        code = f"{said['covered']}/{said['of']}"
        lines.append(
            f"{row['file']:<40} {said['opens']:<10} {_yes(row['opens']):<6} {code:<10} {loaded:<16} {ran:<8} {number}"
            + ("" if row["as_predicted"] else "   NOT AS PREDICTED")
        )
        if row["said"]:
            lines.append(f"  {row['said']}")
    lines += ["", *(line(check) for check in report["checks"]), "", verdict(report)]
    return "\n".join(lines)


def markdown(data: Mapping[str, Any]) -> str:
    """The tables of docs/gpu-kernels-h200.md."""
    lines = [
        "| extension | predicted: links, code for it, loaded | opened | loaded by sgl_kernel | kernels | checks that hold |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["extensions"]:
        said = row["predicted"]
        ran = "none run" if row["ran"] is None else "right" if row["ran"] else "**wrong**"
        lines.append(
            f"| {row['file']} | {said['opens']}, {said['covered']} of {said['of']}, {_yes(said['loaded'])} | "
            f"{_yes(row['opens'])} | {_yes(row['loaded'])} | {ran} | {len(row['checks'])} of {len(row['checks']) + len(row['failed'])} |"
        )
    lines += ["", "| check | on | | comparisons | detail |", "|---|---|---|---|---|"]
    # What is the same on several GPUs is one row.
    rows: dict[tuple[str, str, int, str], list[str]] = {}
    for check in data["gpu"]["checks"]:
        state = "holds" if check["ok"] else "skipped" if check["skipped"] else "**fails**"
        words = " ".join(str(check["skipped"] or check["detail"]).split()).replace("|", "\\|")
        row = (check["name"], state, check["looked_at"], words.partition(" comparisons; ")[2] or words)
        rows.setdefault(row, []).append("all together" if check["gpu"] is None else str(check["gpu"]))
    for (name, state, number, words), places in rows.items():
        told = "" if words.endswith((" comparisons", " comparison")) else words
        lines.append(f"| {name} | {', '.join(places)} | {state} | {number} | {told} |")
    return "\n".join(lines)


def _yes(value: object) -> str:
    return "yes" if value else "no"


def main(arguments: list[str]) -> int:
    """Print the tables of one report."""
    (path,) = arguments
    print(markdown(json.loads(Path(path).read_text(encoding="utf-8"))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
