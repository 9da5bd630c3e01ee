"""Put the bug reports that carry an environment report to `builder repro`, and print what it made of each.

`python -m tests.index.reports [--id ID] [--cases FOLDER]`: for each, which fields of the case's `environment` were read, what
the matrix could not have, and whether what was found names the maintainers' cause. Exit status 1 if one came out otherwise
than reports.yaml says.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from builder import settings as site
from builder.reports import forms
from builder.reports.model import Report
from builder.repro.explain import from_symptom_alone
from builder.repro.verb import Answer, repro

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = Path(__file__).with_name("reports.yaml")
CASES = ROOT.parent / "shared" / "cases"

FIELDS = {
    "gpu": ("gpu.0",),
    "compute_capability": ("capability.0",),
    "driver": ("driver",),
    "nvcc": ("nvcc",),
    "python": ("python",),
    "torch": ("package.torch",),
    "sgl_kernel": ("package.sgl-kernel", "package.sglang-kernel"),
    "flashinfer": ("package.flashinfer-python",),
    "sglang": ("package.sglang",),
    "triton": ("package.triton",),
    "transformers": ("package.transformers",),
    "torchao": ("package.torchao",),
    "torchaudio": ("package.torchaudio",),
    "torchvision": ("package.torchvision",),
    "vllm": ("package.vllm",),
    "arch": ("arch",),
    "glibc": ("libc",),
    "os": ("os",),
    "cuda_smi": ("driver_cuda",),
    "cubin": ("package.flashinfer-cubin",),
    "jit_cache": ("package.flashinfer-jit-cache",),
}


def fields(environment: Mapping[str, Any], report: Report, text: str) -> Iterator[tuple[str, str]]:
    """Each field of the case and what became of it: `read`, `inferred`, `not in the text`, or the value that was read."""
    for name, wanted in environment.items():
        if name not in FIELDS:
            continue
        found = next((report.facts[key] for key in FIELDS[name] if key in report.facts), None)
        if found is not None and (found.absent or found.value) and _same(str(wanted), found.value, absent=found.absent):
            yield name, "inferred" if found.because else "read"
        elif found is None or not (found.value or found.absent):
            yield name, "not in the text" if not _stands(str(wanted), text) else "missed"
        else:
            yield name, f"{found.value} for {wanted}"


def _same(wanted: str, found: str, *, absent: bool) -> bool:
    if absent:
        return "not installed" in wanted
    # A case has `8x NVIDIA H20-3e`, `577.00 (Windows-side number …)`, `sglang-kernel 0.4.2`, `550.x`.
    return found in wanted or wanted in found or wanted.rstrip(".x") == found or wanted.startswith(found)


def _stands(wanted: str, text: str) -> bool:
    return (forms.version(wanted) or wanted) in text


def cause(expected: Mapping[str, Any], answer: Answer) -> str:
    """`agree`, `partly`, `no`: whether the expected finding or explanation is there."""
    if "cannot" in expected:
        return "no"
    findings = answer.prediction.findings
    if "rules" in expected:
        explained = {findings[number].rule for each in answer.why for number in each.findings}
        wanted = set(expected["rules"])
        if not wanted <= {finding.rule for finding in findings}:
            return "no"
        good = not answer.why or bool(wanted & explained)
    else:
        kinds = {
            each.symptom.kind for each in answer.why if each.findings or from_symptom_alone(each.symptom, answer.report)
        }
        if expected["symptom"] not in kinds:
            return "no"
        good = True
    return "partly" if "partly" in expected or not good else "agree"


def main() -> int:
    """Print the table and the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.index.reports", description="The cases' environment reports."
    )
    parser.add_argument("--id")
    parser.add_argument("--cases", type=Path, default=CASES)
    given = parser.parse_args()
    yaml = YAML(typ="safe")
    expected = yaml.load(EXPECTED.read_text(encoding="utf-8"))["reports"]
    verdicts: Counter[str] = Counter()
    read: Counter[str] = Counter()
    wrong = []
    print("| case | fields | what the matrix cannot have | the maintainers' cause | what is said | agrees |")
    print("|---|---|---|---|---|---|")
    for path in sorted(given.cases.glob("*.yaml")):
        number = path.name.partition("-")[0]
        case = yaml.load(path.read_text(encoding="utf-8"))
        if not case.get("env_report") or (given.id and number != given.id):
            continue
        text = f"{case['env_report']}\n{case['symptom']}\n"
        answer = repro(text, site.load(), ROOT / "matrices")
        states = list(fields(case["environment"], answer.report, text))
        read.update("other" if " for " in state else state for _, state in states)
        verdict = cause(expected[number], answer)
        verdicts[verdict] += 1
        if verdict == "no" and "cannot" not in expected[number]:
            wrong.append(number)
        print(_row(number, case, answer, states, verdict, expected[number]))
    print()
    print(", ".join(f"{count} {name}" for name, count in verdicts.most_common()))
    print("fields: " + ", ".join(f"{count} {name}" for name, count in read.most_common()))
    if wrong:
        print(f"otherwise than expected: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _row(
    number: str,
    case: Mapping[str, Any],
    answer: Answer,
    states: list[tuple[str, str]],
    verdict: str,
    expected: Mapping[str, Any],
) -> str:
    counts = Counter("other" if " for " in state else state for _, state in states)
    odd = [f"{name}: {state}" for name, state in states if " for " in state or state == "missed"]
    fields_said = ", ".join(f"{count} {name}" for name, count in counts.items()) + (
        f" ({'; '.join(odd)})" if odd else ""
    )
    made = answer.made
    open_said = "; ".join([*made.instead, *made.left_out, *made.open]) or "nothing"
    said = [answer.prediction.findings[place].message for each in answer.why for place in each.findings[:1]] or [
        text[0] for each in answer.why for text in from_symptom_alone(each.symptom, answer.report)[:1]
    ]
    if not said:
        said = [finding.message for finding in answer.prediction.findings if finding.rule in expected.get("rules", ())][
            :2
        ]
    note = expected.get("partly") or expected.get("cannot")
    cells = [
        number,
        fields_said,
        open_said,
        str(case["root_cause"]["text"]),
        "<br>".join(said) or "nothing",
        verdict + (f": {note}" if note else ""),
    ]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
