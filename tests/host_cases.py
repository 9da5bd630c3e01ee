"""`builder doctor` on recorded hosts, compared with what was said in their reports: the table of docs/doctor.md.

python -m tests.host_cases            # print the table
python -m tests.host_cases --write    # write what doctor says today beside the hosts, to be read as a difference
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from builder.doctor.evaluate import Diagnosis, evaluate
from builder.doctor.facts import read_facts
from builder.doctor.needs import Needs, of_matrix
from builder.doctor.report import as_text
from builder.findings import Severity
from builder.lock import lock_path, read_lock
from builder.matrix import load
from tests.made import ROOT

HOSTS = Path(__file__).parent / "unit" / "hosts"


@dataclass(frozen=True)
class HostCase:
    """One host and one question: of a report (``case``, ``said``, ``agrees``) or made (``made``)."""

    host: str
    needs: Any
    case: str = ""
    said: str = ""
    agrees: str = ""
    note: str = ""
    made: str = ""

    @property
    def name(self) -> str:
        asked = self.needs if isinstance(self.needs, str) else "image"
        return self.host if asked == "none" else f"{self.host}.{asked}"

    @property
    def expected(self) -> Path:
        """The whole text that doctor prints."""
        return HOSTS / f"{self.name}.txt"

    def diagnosis(self) -> Diagnosis:
        return evaluate(read_facts(HOSTS / f"{self.host}.json"), needs_of(self.needs))

    def text(self) -> str:
        return as_text(self.host, self.diagnosis()) + "\n"


def cases() -> list[HostCase]:
    """All of `tests/unit/hosts/cases.yaml`."""
    rows = YAML(typ="safe").load((HOSTS / "cases.yaml").read_text(encoding="utf-8"))
    return [HostCase(**{**row, "agrees": _word(row.get("agrees", ""))}) for row in rows]


def _word(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def needs_of(given: Any) -> Needs | None:
    """A matrix's needs, those put in by hand, or none."""
    if given == "none":
        return None
    return _matrix(given) if isinstance(given, str) else Needs.model_validate(given)


@cache
def _matrix(name: str) -> Needs:
    path = ROOT / "matrices" / f"{name}.yaml"
    return of_matrix(load(path).matrix, read_lock(lock_path(path)))


def table() -> str:
    """The Markdown of both tables, and the counts."""
    reports = [case for case in cases() if case.case]
    agrees = Counter(case.agrees for case in reports)
    asked = f"{len(reports)} questions of {len({case.case for case in reports})} cases"
    lines = [
        f"{asked}: {agrees['yes']} agree, {agrees['in part']} in part, {agrees['no']} not.",
        "",
        "| case | asked about | what was said | what doctor says | agrees |",
        "|---|---|---|---|---|",
    ]
    for case in reports:
        note = f": {case.note}" if case.note else ""
        lines.append(f"| {case.case} | {_asked(case)} | {case.said} | {_says(case)} | {case.agrees}{note} |")
    lines += ["", "| made host | asked about | what doctor says |", "|---|---|---|"]
    lines += [f"| {case.made} | {_asked(case)} | {_says(case)} |" for case in cases() if case.made]
    return "\n".join(lines) + "\n"


def _asked(case: HostCase) -> str:
    needs = needs_of(case.needs)
    return "the host" if needs is None else f"`{needs.subject}`" if isinstance(case.needs, str) else needs.subject


def _says(case: HostCase) -> str:
    diagnosis = case.diagnosis()
    # That a report leaves most of a host open is the same for all of them.
    shown = [finding for finding in diagnosis.findings if finding.rule != "not-known"]
    words = [f"{_level(finding.severity)}{finding.message} (`{finding.rule}`)" for finding in shown]
    return f"**{diagnosis.verdict}**" + (f": {'; '.join(words)}" if words else "")


def _level(severity: Severity) -> str:
    return "" if severity is Severity.ERROR else f"{severity}: "


def main() -> int:
    if "--write" in sys.argv[1:]:
        for case in cases():
            case.expected.write_text(case.text(), encoding="utf-8")
    print(table(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
