"""What a check found, how a run prints it for people, and the JSON that goes into the image.

The JSON is deterministic: no time, host name, uid or temporary path may reach a finding (`Scrubber` sees to the last).
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

# Findings printed per check; all of them are in the JSON.
PRINTED = 12
_RANK = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One statement about one subject (a file, distribution, module or GPU target).

    ``severity`` is `error` (fails the check), `warning` or `note`. ``message`` is one line without a full stop.
    """

    rule: str
    severity: str
    subject: str
    message: str
    because: str = ""
    hint: str = ""
    source: str = ""

    def __str__(self) -> str:
        """The text form: what, then because, hint and source where there is something to say."""
        lines = [f"{self.severity}: {self.message} [{self.rule}]"]
        for label, text in (("because", self.because), ("hint", self.hint), ("source", self.source)):
            if text:
                first, *rest = text.rstrip("\n").split("\n")
                lines.append(f"  {label}: {first}")
                lines += [f"    {line}" for line in rest]
        return "\n".join(lines)


@dataclass(frozen=True)
class Check:
    """The outcome of one check: how much it looked at, against how much there was to look at.

    ``expected`` is None where no independent count exists. ``exceptions`` are the ids of ledger entries that were used.
    """

    name: str
    part: str
    ok: bool
    looked_at: int
    expected: int | None
    unit: str
    detail: str
    findings: tuple[Finding, ...] = ()
    exceptions: tuple[str, ...] = ()
    applicable: bool = True

    def as_json(self) -> dict[str, Any]:
        """The shape that `smoke.json` holds."""
        data = asdict(self)
        data["findings"] = [asdict(finding) for finding in self.findings]
        data["exceptions"] = list(self.exceptions)
        return data


@dataclass
class Result:
    """What a check function hands back; `finish` turns it into a `Check`."""

    looked_at: int = 0
    expected: int | None = None
    unit: str = "files"
    detail: str = ""
    findings: list[Finding] = field(default_factory=list)
    exceptions: set[str] = field(default_factory=set)
    applicable: bool = True

    def add(self, severity: str, subject: str, message: str, **rest: str) -> None:
        """Record a finding under the check's own rule, which `finish` fills in."""
        self.findings.append(Finding(rest.pop("rule", ""), severity, subject, message, **rest))

    def finish(self, name: str, part: str) -> Check:
        """Sort, name the rule, and compare what was looked at with what there was."""
        findings = [
            finding if finding.rule else Finding(**{**asdict(finding), "rule": name}) for finding in self.findings
        ]
        if self.expected is not None and self.looked_at != self.expected:
            findings.append(
                Finding(
                    name,
                    "error",
                    name,
                    f"looked at {self.looked_at} {self.unit}, but there are {self.expected} to look at",
                    because="a check that skips something proves nothing about it",
                )
            )
        findings.sort(key=lambda f: (_RANK.get(f.severity, 3), f.rule, f.subject, f.message))
        ok = not any(finding.severity == "error" for finding in findings)
        return Check(
            name,
            part,
            ok,
            self.looked_at,
            self.expected,
            self.unit,
            self.detail,
            tuple(findings),
            tuple(sorted(self.exceptions)),
            self.applicable,
        )


def not_applicable(why: str, unit: str) -> Result:
    """Nothing to look at, and why: never silent, never a failure."""
    return Result(0, None, unit, f"not applicable: {why}", applicable=False)


class Scrubber:
    """Replaces what differs between two runs (temporary folders, addresses, process ids) in a child's words."""

    def __init__(self, *folders: str | os.PathLike[str]) -> None:
        self._folders = sorted(
            {str(folder) for folder in folders if str(folder) not in ("", "/")}, key=len, reverse=True
        )

    def __call__(self, text: str) -> str:
        """``text`` with our temporary folders as `TMP` and addresses as `0x…`."""
        for folder in self._folders:
            text = text.replace(folder, "TMP")
        text = re.sub(r"(?<!TMP)/tmp/tmp[\w.-]+", "TMP/file", text)
        text = re.sub(r"tmpxft_[0-9a-f]{8}_[0-9a-f]{8}", "tmpxft", text)
        return re.sub(r"\b0x[0-9a-fA-F]{7,16}\b", "0x…", text)


class Reporter:
    """Runs checks one after the other, prints a line for each, and keeps the outcomes."""

    def __init__(self, out: TextIO | None = None, timings: bool = False) -> None:
        self.out = out if out is not None else sys.stdout
        self.timings = timings
        self.checks: list[Check] = []

    def run(self, name: str, part: str, check: Callable[[], Result]) -> Check:
        """Run one check; whatever it raises is a failure of the check, not of the run."""
        started, used = time.monotonic(), _cpu_seconds()
        try:
            result = check()
        except Exception as error:  # noqa: BLE001 - it has proven nothing: say so, go on
            result = Result(unit="files", detail="the check itself broke")
            place = _place(error)
            result.add("error", name, f"the check broke: {type(error).__name__}: {error}", because=place)
        outcome = result.finish(name, part)
        self.checks.append(outcome)
        took = f"{time.monotonic() - started:6.1f} s {_cpu_seconds() - used:6.1f} cpu  " if self.timings else ""
        self.show(outcome, took)
        return outcome

    def show(self, check: Check, took: str = "") -> None:
        """One line, then what went wrong."""
        state = "FAILED" if not check.ok else "ok" if check.applicable else "-"
        amount = count(check.looked_at, check.unit.removesuffix("s"), check.unit) if check.applicable else ""
        parts = [part for part in (amount, check.detail) if part]
        self.say(f"{check.name:<18} {state:<7} {took}{'; '.join(parts)}")
        loud = [finding for finding in check.findings if finding.severity != "note"]
        for finding in loud[:PRINTED]:
            self.say("\n".join("  " + line for line in str(finding).split("\n")))
        if len(loud) > PRINTED:
            self.say(f"  … and {len(loud) - PRINTED} more findings of {check.name} (all are in the JSON report)")

    def say(self, line: str) -> None:
        """Print at once: a build shows its log while it runs."""
        print(line, file=self.out, flush=True)


def _cpu_seconds() -> float:
    """What this process and its children that have ended have used."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _place(error: BaseException) -> str:
    """Where in this package an exception came from: module and line, no absolute path."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        place = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"at {place}"


def document(matrix: str, lock: str, checks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The whole of `smoke.json`."""
    return {
        "schema": 1,
        "ok": all(bool(check["ok"]) for check in checks),
        "image": None,
        "matrix": matrix,
        "lock": lock,
        "checks": list(checks),
    }


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write beside and rename, so that a reader never sees half a file. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def some(items: Iterable[str], limit: int = 3) -> str:
    """`a`, `b`, `c` and 5 more."""
    all_items = list(items)
    shown = ", ".join(f"`{item}`" for item in all_items[:limit])
    rest = len(all_items) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def count(number: int, one: str, many: str = "") -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
