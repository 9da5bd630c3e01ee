"""Ask `builder` about the bug reports in cases.yaml and print what it says beside what would have helped.

`python -m tests.index.cases [--id ID] [--skip-large]` prints docs/cases.md's table and counts; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from builder import cli
from builder.abi.symbol import spans
from builder.lock import Artefact, lock_path, write_lock
from builder.matrix import load
from tests.made import artefact, direct, lock_of

CASES = Path(__file__).with_name("cases.yaml")
MATRIX = {
    "summary": "A stack out of a bug report",
    "as_of": "2026-03-01",
    "platform": "linux/amd64",
    "python": '"3.11"',
    "base": "{kind: archive, distribution: debian, release: bookworm}",
    "cuda": "{version: 13.0.2, jit: none}",
    "gpus": '["12.0"]',
    "stack": "{}",
}
LEVELS = ("note", "warning", "error")


@dataclass(frozen=True)
class Said:
    """What a verb answered: exit status, the report, what it wrote to stderr where it gave none."""

    command: str
    code: int
    report: Mapping[str, Any]
    error: str


@dataclass(frozen=True)
class Outcome:
    """A case beside the answers: what does not hold of the expectations, and the level it was said at."""

    case: Mapping[str, Any]
    said: tuple[str, ...]
    lacking: tuple[str, ...]
    level: str | None
    left_out: bool = False
    circular: bool = False
    """whether all that was found rests on facts that were written from this very case"""

    @property
    def state(self) -> str:
        """`outside`, `missed`, `agreed`, or `not asked` where a part was left out."""
        if "outside" in self.case:
            return "outside"
        if self.lacking:
            return "missed"
        return "not asked" if self.left_out else "agreed"

    @property
    def expected(self) -> str:
        """The state that cases.yaml foresees."""
        return "missed" if "missed" in self.case else "outside" if "outside" in self.case else "agreed"

    @property
    def lower(self) -> bool:
        """Whether the product says it at a lower level than the case asks for."""
        wanted = self.case.get("level")
        return wanted is not None and self.level is not None and LEVELS.index(self.level) < LEVELS.index(wanted)


def cases() -> list[dict[str, Any]]:
    """The entries of cases.yaml."""
    found: list[dict[str, Any]] = YAML(typ="safe").load(CASES.read_text(encoding="utf-8"))["cases"]
    return found


def answer(ask: Mapping[str, Any]) -> Said:
    """Put one question to the product."""
    if "run" in ask:
        return _called(ask["run"], shlex.split(ask["run"]))
    with tempfile.TemporaryDirectory() as folder:
        question = ask["check"]
        path = Path(folder) / "case.yaml"
        lines = {**MATRIX, **{key: value for key, value in question.items() if key in MATRIX}}
        path.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
        wheels = [_wheel(text, requires, question.get("metadata", {})) for text, requires in question["wheels"].items()]
        write_lock(lock_of(load(path).matrix, *wheels), lock_path(path))
        words = ["check", str(path), "--no-wheels"]  # which are made up
        shown = f"check ({', '.join(question['wheels']) or 'no wheels'})"
        if "driver" in question:
            words += ["--driver", question["driver"]]
            shown += f" --driver {question['driver']}"
        if "cuda_driver" in question:
            words += ["--cuda-driver", question["cuda_driver"]]
            shown += f" --cuda-driver {question['cuda_driver']}"
        return _called(shown, words)


def _wheel(text: str, requires: Sequence[str], metadata: Mapping[str, str]) -> Artefact:
    name, version = text.split()
    # The default index has no local versions.
    make = direct if "+" in version else artefact
    stated = {"metadata_version": metadata[name]} if name in metadata else {}
    return make(name, version, requires=tuple(requires), **stated)


def _called(command: str, words: list[str]) -> Said:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = int(cli.main([*words, "--json"]))
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
    text = out.getvalue()
    return Said(command, code, json.loads(text) if text.strip() else {}, err.getvalue())


def lacking(said: Said, expect: Mapping[str, Any]) -> Iterator[str]:
    """What of an expectation does not hold."""
    report = said.report
    if not report and "error" in expect:
        yield from (f"error {words}" for words in expect["error"] if words not in said.error)
        yield from [f"exit status {said.code}"] * (said.code != expect["exit"])
        return
    if not report:
        yield f"no answer, exit status {said.code}"
        return
    if "exit" in expect and said.code != expect["exit"]:
        yield f"exit status {said.code}"
    if "verdict" in expect and report.get("verdict") != expect["verdict"]:
        yield f"verdict {report.get('verdict')}"
    missing = _missing(report)
    names = _names(missing)
    nearest = {each["nearest"] or "" for each in missing}
    yield from (f"symbol {name}" for name in expect.get("symbols", ()) if not _within(name, names))
    yield from (f"nearest {name}" for name in expect.get("nearest", ()) if not _within(name, nearest))
    if "count" in expect and len({each["symbol"] for each in missing}) != expect["count"]:
        yield f"{len({each['symbol'] for each in missing})} symbols"
    libraries = _libraries(report)
    yield from (f"library {name}" for name in expect.get("libraries", ()) if name not in libraries)
    versions = {version for each in report.get("extensions", ()) for version in each.get("missing_versions", ())}
    yield from (f"version {version}" for version in expect.get("versions", ()) if version not in versions)
    for key in ("exported", "absent"):
        yield from (f"{key} {version}" for version in expect.get(key, ()) if version not in report.get(key, ()))
    built = {f"{each['package']} {each['versions']}": each["exported"] for each in report.get("built", ())}
    for exported, builds in expect.get("built", {}).items():
        yield from (f"{name} {exported}" for name in builds if built.get(name) is not (exported == "with"))
    yield from (f"fits {name}" for name in expect.get("fits", ()) if name not in report.get("fitting", ()))
    notes = {note for each in report.get("extensions", ()) for note in each["notes"]}
    yield from (f"note {text}" for text in expect.get("notes", ()) if not _within(text, notes))
    found = {each["version"]: each["verdict"] for each in report.get("candidates", ())}
    for verdict, versions in expect.get("candidates", {}).items():
        yield from (f"{version} is {found.get(version)}" for version in versions if found.get(version) != verdict)
    for wanted in expect.get("findings", ()):
        if _finding(report, wanted) is None:
            yield f"finding {wanted['severity']} {wanted['rule']}"
    files = {each["file"]: each for each in report.get("files", ())}
    for file, gpu in expect.get("covers", ()):
        device = files[file]["gpus"][gpu] if file in files else {"covered": 0, "of": 0}
        if not 0 < device["covered"] == device["of"]:
            yield f"{file} on {gpu}"


def _names(missing: Iterable[Mapping[str, Any]]) -> set[str]:
    return {text for each in missing for text in (each["symbol"], each["demangled"] or "")}


def _within(text: str, found: set[str]) -> bool:
    return any(text in each for each in found)


def _missing(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [symbol for each in report.get("extensions", ()) for symbol in each["missing_symbols"]]


def _libraries(report: Mapping[str, Any]) -> dict[str, None]:
    return dict.fromkeys(name for each in report.get("extensions", ()) for name in each["missing_libraries"])


def _finding(report: Mapping[str, Any], wanted: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for each in report.get("findings", ()):
        text = " ".join((each["message"], each["because"], each["hint"]))
        if (each["rule"], each["severity"]) == (wanted["rule"], wanted["severity"]):
            here = all(word in text for word in wanted["words"])
            if here and not any(word in text for word in wanted.get("without", ())):
                found: Mapping[str, Any] = each
                return found
    return None


def told(said: Said, expect: Mapping[str, Any]) -> tuple[str, str | None]:
    """What the product says about what was expected, in a line; and its level."""
    report = said.report
    if not report:
        line = next((line for line in said.error.splitlines() if "error:" in line), f"exit status {said.code}")
        return line, "error" if "error" in expect else None
    if found := [each for wanted in expect.get("findings", ()) if (each := _finding(report, wanted))]:
        level = max((each["severity"] for each in found), key=LEVELS.index)
        return "; ".join(f"{each['severity']}, {each['message']}" for each in found), level
    if "findings" in report:
        covered = [f"{file} has code for {gpu}" for file, gpu in expect.get("covers", ())]
        return "; ".join(covered) or "nothing of it", None
    if "exported" in report:
        some, others = report["exported"], report["absent"]
        kernels = f"{len(report['built'])} builds of kernels, and whether their torch has it"
        return f"exported by torch {spans(some, others)}, not by {spans(others, some)}; {kernels}", None
    if "candidates" in report:
        fit = [each["version"] for each in report["candidates"] if each["verdict"] == "ok"]
        return f"torch {', '.join(fit) or 'none'} of {len(report['candidates'])} fit", "error"
    parts = [report["verdict"]]
    missing = {each["symbol"]: each for each in _missing(report)}
    if missing:
        shown = [name for name in expect.get("symbols", ()) if _within(name, _names(missing.values()))]
        plural = "s" if len(missing) > 1 else ""
        parts.append(f"{len(missing)} symbol{plural} missing" + (f", among them `{shown[0]}`" if shown else ""))
    if libraries := _libraries(report):
        parts.append(f"no {', '.join(f'`{name}`' for name in libraries)}")
    if lacking_versions := sorted({v for each in report["extensions"] for v in each.get("missing_versions", ())}):
        parts.append(f"no {', '.join(f'`{version}`' for version in lacking_versions)}")
    noted = [
        note
        for text in expect.get("notes", ())
        if (note := next((n for e in report["extensions"] for n in e["notes"] if text in n), None))
    ]
    parts += [f"note, {note}" for note in noted]
    fits = [name for name in expect.get("fits", ()) if name in report.get("fitting", ())]
    parts += [f"fits {', '.join(report['fitting'])}"] if fits else []
    return "; ".join(parts), "error" if report["verdict"] == "broken" else "note" if noted else None


def judge(case: Mapping[str, Any], *, large: bool = True) -> Outcome:
    """Ask all that a case asks. Without ``large``, what fetches hundreds of megabytes is left out."""
    said: list[str] = []
    lacks: list[str] = []
    levels: list[str] = []
    sources: list[str] = []
    left_out = False
    for ask in case.get("ask", ()):
        if not large and (ask.get("large") or case.get("large")):
            left_out = True
            continue
        got = answer(ask)
        found = [each for wanted in ask["expect"].get("findings", ()) if (each := _finding(got.report, wanted))]
        # `abi` and `arch` read the wheels.
        sources += [each["source"] for each in found] if "check" in ask else ["the wheels"]
        line, level = told(got, ask["expect"])
        said.append(f"`{got.command}`: {line}")
        lacks += lacking(got, ask["expect"])
        levels += [level] if level is not None else []
    level = max(levels, key=LEVELS.index) if levels else None
    # `abi` names no fact: where its verdict rests on one that was written from the case, cases.yaml says so.
    circular = case.get("circular", False) or (
        bool(sources) and all(case["id"] in re.findall(r"\b\d{3}\b", source) for source in sources)
    )
    return Outcome(case, tuple(said), tuple(lacks), level, left_out, circular)


def row(outcome: Outcome) -> str:
    """A line of the table."""
    case = outcome.case
    said = "<br>".join(outcome.said)
    why = {"agreed": "yes", "missed": "**missed**"}.get(outcome.state, outcome.state)
    if outcome.state == "missed":
        why += (
            f": {case['missed']}" if "missed" in case else f": {'; '.join(outcome.lacking)}" if outcome.lacking else ""
        )
    elif outcome.state == "agreed":
        why += (f", as {outcome.level}" if outcome.lower else "") + (
            ", a fact from this case" if outcome.circular else ""
        )
    apart = f" ({case['apart']})" if "apart" in case else ""
    cells = (case["id"], case["report"], case["kind"], case["verdict"] + apart, said, why)
    return "| " + " | ".join(text.replace("|", "\\|") for text in cells) + " |"


def summary(outcomes: Sequence[Outcome]) -> str:
    """The counts, and the share."""
    states = Counter(outcome.state for outcome in outcomes)
    decidable = len(outcomes) - states["outside"]
    agreed = [outcome for outcome in outcomes if outcome.state == "agreed"]
    lower = [outcome for outcome in agreed if outcome.lower]
    circular = [outcome for outcome in agreed if outcome.circular]
    others = _share(len(agreed) - len(circular), decidable - len(circular))
    lines = [
        f"* {len(outcomes)} cases: {decidable} decidable, {states['outside']} not decidable from wheels and versions",
        f"* of the decidable: {len(agreed)} agreed, {states['missed']} missed"
        + (f", {states['not asked']} not asked" if states["not asked"] else ""),
        f"* share: {_share(len(agreed), decidable)}",
        f"* agreed, at a lower level than the case asks for: {_ids(lower)}",
        f"* agreed, by nothing but a fact that was written from the case: {_ids(circular)}; without these {others}",
        f"* missed: {_ids([outcome for outcome in outcomes if outcome.state == 'missed'])}",
    ]
    return "\n".join(lines)


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}, {100 * part / max(whole, 1):.0f} %"


def _ids(outcomes: Sequence[Outcome]) -> str:
    return f"{len(outcomes)} ({', '.join(outcome.case['id'] for outcome in outcomes) or 'none'})"


def main() -> int:
    """Print the table; exit status 1 where a case came out otherwise than cases.yaml says."""
    arguments = argparse.ArgumentParser(prog="python -m tests.index.cases", description=__doc__)
    arguments.add_argument("--id", action="append", help="only this case; several times if need be")
    arguments.add_argument("--skip-large", action="store_true", help="leave out what fetches hundreds of megabytes")
    given = arguments.parse_args()
    outcomes = []
    for case in cases():
        if not given.id or case["id"] in given.id:
            print(case["id"], file=sys.stderr)
            outcomes.append(judge(case, large=not given.skip_large))
    print("| case | report | kind | the case's verdict | what the product says | agrees |")
    print("|---|---|---|---|---|---|")
    for outcome in outcomes:
        if outcome.state != "outside":
            print(row(outcome))
    print("\n| case | report | kind | not decidable: |")
    print("|---|---|---|---|")
    for outcome in outcomes:
        if outcome.state == "outside":
            print("| " + " | ".join(outcome.case[key] for key in ("id", "report", "kind", "outside")) + " |")
    print(f"\n{summary(outcomes)}")
    surprises = [outcome for outcome in outcomes if outcome.state not in (outcome.expected, "not asked")]
    for outcome in surprises:
        print(f"{outcome.case['id']}: {outcome.state}, {'; '.join(outcome.lacking)}", file=sys.stderr)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
