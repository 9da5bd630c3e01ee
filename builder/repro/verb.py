"""`builder repro`: a report's facts, the matrix they make, what it leaves open, what follows, and which of it is why."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version

from builder.abi.verb import base_named
from builder.abi.wheels import Target
from builder.agree import KERNELS
from builder.display import note
from builder.errors import ExitCode, LockError, UnreachableError, UsageError
from builder.facts import BaseFact, DistributionFact, load_facts
from builder.fields import MATRIX_NAME
from builder.files import write_atomic
from builder.findings import Finding, Severity
from builder.matrix import list_matrices, load, parse_matrix
from builder.origins import DirectFile
from builder.reports.model import Fact, Report, Symptom
from builder.reports.model import Origin as Said
from builder.reports.parse import parse
from builder.repro.explain import Explanation, explain, from_symptom_alone, order
from builder.repro.live import Live, Origin, origin
from builder.repro.matrixtext import MADE
from builder.repro.model import Reconstruction
from builder.repro.predict import Ask, Prediction, predict
from builder.repro.releases import Releases
from builder.repro.stack import python_of, reconstruct
from builder.repro.verdicts import asks
from builder.resolve import UnnamedPrereleaseError, resolve
from builder.settings import Settings

MOST = 4_000_000
"""Bytes of a report that are read."""

ROUNDS = 5
"""Resolutions that are tried: each names the pre-releases that it came upon."""


@dataclass(frozen=True)
class Answer:
    """All that is said of one report."""

    report: Report
    made: Reconstruction
    prediction: Prediction
    why: tuple[Explanation, ...]
    nearest: str | None
    written: Path | None = None
    origin: Origin | None = None
    unreached: UnreachableError | None = None
    """Why nothing was resolved: the index did not answer. Then there are facts and symptoms, no matrix and no findings."""

    @property
    def exit_code(self) -> ExitCode:
        """0, or that of an index that does not answer."""
        return ExitCode.OK if self.unreached is None else self.unreached.exit_code


def read_report(source: str) -> str:
    """The text of a report: a file, or standard input for `-`. Bytes that are no UTF-8 are read as far as they go.

    What is longer than `MOST` is read up to there, and that is said.
    """
    try:
        if source == "-":
            data = sys.stdin.buffer.read(MOST + 1)
        else:
            with Path(source).open("rb") as file:
                data = file.read(MOST + 1)
    except OSError as error:
        raise UsageError(
            "the report cannot be read", where=source or "''", because=error.strerror or str(error)
        ) from error
    if len(data) > MOST:
        note(f"the report is longer than {MOST:,} bytes: what comes after them is not read")
    return data[:MOST].decode("utf-8", errors="replace")


def repro(
    text: str,
    settings: Settings,
    matrices: Path,
    *,
    name: str | None = None,
    when: date | None = None,
    static: bool = True,
    live: Live | None = None,
) -> Answer:
    """Everything that a report's text leads to. ``name`` is the matrix to write, if one is to be.

    ``static`` says whether wheels may be read for verdicts; ``live`` is what the text was made from, where it was
    looked at and not pasted. Where the index does not answer, what was read is given all the same, and `Answer.unreached`
    says so. Raises `UsageError`.
    """
    report = parse(text)
    if not report.symptoms and not any(fact.value or fact.absent for fact in report.facts.values()):
        raise UsageError(
            "nothing in the report was recognised" if text.strip() else "the report is empty",
            hint="paste what `python3 -m sglang.check_env` prints, `pip freeze`, or the error",
        )
    if name is not None:
        _free(name, matrices)
    today = datetime.now(UTC).date()
    base = _base(report)
    target = Target(python_of(report), base_named(base))
    index = Releases(settings, target)
    note("looking the packages up …")
    found = origin(live, matrices) if live is not None else None
    try:
        known = known_files(matrices)
        describe = partial(reconstruct, report, index, name=name or "report", today=today, when=when, files=known)
        made = describe() if name is None else _lockable(describe, settings)
        note("judging …")
        asked = _told(asks(report, made, settings, base)) if static else {}
        prediction = predict(report, made, index, today=today, asks=asked)
    except UnreachableError as error:
        note(str(error))
        nothing = Reconstruction(name or "report", builds_here=report.value("arch") != "aarch64")
        return Answer(report, nothing, Prediction(()), explain(report, ()), None, origin=found, unreached=error)
    why = explain(report, prediction.findings)
    nearest = _nearest(made, matrices)
    written = _write(made, matrices) if name is not None else None
    return Answer(report, made, prediction, why, nearest, written, found)


def _lockable(describe: Callable[..., Reconstruction], settings: Settings) -> Reconstruction:
    """The matrix that a report describes, such that it can be locked; where it cannot, that is one of the things open.

    What only a resolver finds are pre-releases that packages further down ask for: vllm's opentelemetry.
    """
    named: set[str] = set()
    made = describe()
    for _ in range(ROUNDS):
        note("seeing that it can be locked …")
        try:
            resolve(parse_matrix(made.text, Path(f"{made.name}.yaml")).matrix, settings)
        except UnnamedPrereleaseError as error:
            if not set(error.packages) - named:
                break
            named.update(error.packages)
            made = describe(prereleases=named)
        except LockError:
            break
        else:
            return made
    told = f"it has no resolution as of {made.as_of}: `builder lock {made.name}` says why, and what can be done"
    return describe(prereleases=named, open_too=[told])


_READING = {
    "abi": "reading what the wheels need of each other",
    "patches": "looking for what the patch sets would change",
    "arch": "looking which GPUs the kernels have code for",
}


def _told(asked: Mapping[str, Ask]) -> dict[str, Ask]:
    """The verdicts, each of which says what it does before it does: some read for minutes."""

    def told(name: str, ask: Ask) -> Ask:
        def telling() -> Sequence[Finding]:
            note(f"{_READING[name]} …")
            return ask()

        return telling

    return {name: told(name, ask) for name, ask in asked.items()}


def known_files(matrices: Path) -> dict[tuple[str, str], DirectFile]:
    """The wheels on no index that our matrices name, by name and version."""
    found = {}
    for path in list_matrices(matrices):
        for file in load(path).matrix.files:
            found[file.name, file.pinned_version] = file
    return found


def _base(report: Report) -> str:
    """The base that is nearest to the report's C library: the newest that is not newer, else the oldest."""
    rows = [fact for fact in load_facts(BaseFact) if "GLIBC" in fact.versions]
    rows.sort(key=lambda fact: Version(fact.versions["GLIBC"]))
    libc = report.value("libc")
    if libc is None:
        return str(load_facts(DistributionFact)[0].release)
    fits = [fact for fact in rows if Version(fact.versions["GLIBC"]) <= Version(libc)]
    return str((fits[-1] if fits else rows[0]).release)


def _nearest(made: Reconstruction, matrices: Path) -> str | None:
    """The matrix that has the most of the report's stack, by packages of the same version.

    What `--write` made of a report is none: that a report is like itself, or like another, leads to no stack that works.
    """
    best, count = None, 0
    for path in list_matrices(matrices):
        loaded = load(path)
        if loaded.text.startswith(MADE):
            continue
        pins = loaded.matrix.stack.pins()
        same = sum(name in made.pins and made.pins[name].wanted == version for name, version in pins.items())
        if same > count:
            best, count = path.stem, same
    return best


def _free(name: str, matrices: Path) -> None:
    """Raise `UsageError` for a name that no matrix can have, and for one that is taken."""
    if not MATRIX_NAME.fullmatch(name):
        because = "a matrix is called as its file: a-z, 0-9, and . _ - after the first"
        raise UsageError(f"`{name[:80]}` is no name for a matrix", where="--write", because=because)
    if (path := matrices / f"{name}.yaml").exists():
        raise UsageError(f"`{path}` is there already", hint="name another with `--write`, or remove it")


def _write(made: Reconstruction, matrices: Path) -> Path:
    path = matrices / f"{made.name}.yaml"
    parse_matrix(made.text, path)
    write_atomic(path, made.text)
    return path


# --- said ------------------------------------------------------------------------------------------------------------


def as_json(answer: Answer) -> dict[str, Any]:
    """The report of `--json`: matrix, facts and findings as the contract has them, and what belongs to them."""
    findings = answer.prediction.findings
    shown = order(findings, answer.why)
    place = {number: at for at, number in enumerate(shown)}
    return {
        "matrix": str(answer.written) if answer.written else None,
        "text": answer.made.text or None,
        "facts": [fact.as_json() for fact in answer.report.facts.values()],
        "conflicts": [conflict.as_json() for conflict in answer.report.conflicts],
        "symptoms": [
            each.symptom.as_json()
            | {
                "explained_by": [place[number] for number in each.findings],
                "known": _known(each.symptom, answer.report),
            }
            for each in answer.why
        ],
        "findings": [findings[number].model_dump(mode="json") for number in shown],
        "instead": answer.made.instead,
        "open": answer.made.open,
        "left_out": answer.made.left_out,
        "not_asked": list(answer.prediction.unasked),
        "notes": list(answer.report.notes),
        "nearest": answer.nearest,
        "origin": None
        if answer.origin is None
        else {
            "matrix": answer.origin.matrix,
            "lock": answer.origin.lock,
            "as_locked": answer.origin.same,
            "differs": list(answer.origin.differs),
        },
        "builds_here": answer.made.builds_here,
        "unreached": None if answer.unreached is None else answer.unreached.what,
    }


def _known(symptom: Symptom, report: Report) -> list[dict[str, str]]:
    return [
        {"because": because, "hint": hint, "source": source}
        for because, hint, source in from_symptom_alone(symptom, report)
    ]


def as_text(answer: Answer) -> str:
    """The report for people: what is known, what went wrong and why, what else was found, what is open, what to type."""
    parts = [
        _facts(answer.report),
        _symptoms(answer),
        _findings(answer),
        _left(answer),
        _next(answer),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _facts(report: Report) -> list[str]:
    rows = []
    for names, fact in _grouped(report):
        value = "not installed" if fact.absent else fact.value if fact.origin is not Said.UNKNOWN else "?"
        where = f"line {fact.line}" if fact.line else ""
        origin = "" if fact.origin is Said.STATED else str(fact.origin)
        because = fact.because if fact.origin is Said.INFERRED else ""
        rows.append((names, value, where, " ".join(filter(None, [origin, f"({because})" if because else ""]))))
    widths = [max((len(row[at]) for row in rows), default=0) for at in range(3)]
    lines = [f"facts ({', '.join(filter(None, report.sources)) or 'nothing was recognised'})"]
    for row in rows:
        lines.append(
            "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)) + f"  {row[3]}"
        )
    lines = [line.rstrip() for line in lines]
    for conflict in report.conflicts:
        said = ", ".join(f"{fact.value or 'not installed'} (line {fact.line})" for fact in conflict.values)
        lines.append(f"  conflict: {conflict.name}: {said}; {conflict.chosen.value} is taken: {conflict.because}")
    return lines + [f"  note: {text}" for text in report.notes]


def _grouped(report: Report) -> Iterator[tuple[str, Fact]]:
    """The facts; GPUs of one value and origin as one row."""
    groups: dict[tuple[str, str, Said], list[str]] = {}
    for name, fact in report.facts.items():
        kind, _, index = name.partition(".")
        if kind in ("gpu", "capability") and index.isdigit():
            groups.setdefault((kind, fact.value, fact.origin), []).append(index)
    done = set()
    for name, fact in report.facts.items():
        kind, _, index = name.partition(".")
        key = (kind, fact.value, fact.origin)
        if key in groups and index.isdigit():
            if key not in done:
                done.add(key)
                yield f"{kind} {_ranges(groups[key])}", fact
        else:
            yield name.removeprefix("package."), fact


def _ranges(indexes: Sequence[str]) -> str:
    numbers = sorted(map(int, indexes))
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _symptoms(answer: Answer) -> list[str]:
    lines = []
    for each in answer.why:
        lines.append(f"symptom: {each.symptom.text} (line {each.symptom.line})")
        for number in each.findings:
            lines += _indented(answer.prediction.findings[number], "this is why")
        if not each.findings:
            alone = from_symptom_alone(each.symptom, answer.report)
            for because, hint, source in alone:
                lines += [f"  because: {because}", f"  hint: {hint}", f"  source: {source}"]
            if not alone:
                lines.append("  nothing that was found explains it")
    return lines


def _indented(finding: Finding, head: str) -> list[str]:
    first, *rest = str(finding).split("\n")
    return [f"  {head}: {first.partition(': ')[2]}", *(f"  {line}" for line in rest)]


def _findings(answer: Answer) -> list[str]:
    explained = {number for each in answer.why for number in each.findings}
    rest = [finding for number, finding in enumerate(answer.prediction.findings) if number not in explained]
    lines = [str(finding) for finding in rest if finding.severity is not Severity.NOTE]
    notes = [finding for finding in rest if finding.severity is Severity.NOTE]
    lines += [f"note: {finding.message} [{finding.rule}]" for finding in notes]
    return [*(["what else follows"] if lines else []), *lines]


def _left(answer: Answer) -> list[str]:
    made = answer.made
    lines = [f"instead: {text}" for text in made.instead]
    lines += [f"open: {text}" for text in made.open]
    lines += [f"left out: {text}" for text in made.left_out]
    lines += [f"not asked: {text}" for text in answer.prediction.unasked]
    return [*(["what the matrix cannot have from the report"] if lines else []), *lines]


def _next(answer: Answer) -> list[str]:
    made = answer.made
    if answer.origin is not None and answer.origin.matrix is not None and not answer.origin.differs:
        return [
            (
                f"it is the stack of matrix {answer.origin.matrix}: lock {answer.origin.lock[:12]}, all of its "
                f"{answer.origin.same} packages as locked"
            )
        ]
    lines = _origin(answer.origin)
    if answer.unreached is not None:
        lines.append(f"nothing was resolved and no rule was asked: {answer.unreached.what}")
        lines.append("hint: again where the index answers; `--live --report-only` prints a report to take there")
        return lines
    lines.append(f"resolved as of {made.as_of}: {made.as_of_because}")
    if answer.nearest:
        lines.append(f"nearest known matrix: {answer.nearest}")
    if not made.builds_here:
        lines += ["the report's machine is aarch64: it cannot be built here", *_elsewhere(answer)]
    elif answer.written is None:
        lines.append("hint: `--write NAME` writes the matrix; then `builder lock NAME` and `make image MATRIX=NAME`")
    else:
        name = answer.written.stem
        lines.append(f"written: {answer.written}; next: `builder lock {name}`, then `make image MATRIX={name}`")
    return lines


def _elsewhere(answer: Answer) -> list[str]:
    """What can be done with a stack of another processor: no image, but its wheels can be read."""
    names = [name for name in ("torch", *KERNELS) if name in answer.made.pins]
    asked = " ".join(f"{name}=={answer.made.pins[name].version}" for name in names)
    lines = [f"written, with x86_64's wheels: {answer.written}"] if answer.written is not None else []
    if len(names) > 1:
        lines.append(f"hint: `builder abi {asked} --platform linux/arm64` reads that machine's own wheels")
    return lines


def _origin(found: Origin | None) -> list[str]:
    if found is None:
        return []
    known = f"matrix {found.matrix}" if found.matrix else "a matrix that is not here, or was locked again since"
    lines = [f"built from {known}, lock {found.lock[:12]}: {found.same} packages as locked, {len(found.differs)} not"]
    return lines + [f"  {text}" for text in found.differs[:20]]


def when_of(text: str | None) -> date | None:
    """`--date`: the day of the report."""
    if text is None:
        return None
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            day = date.fromisoformat(text)
            if day > datetime.now(UTC).date():
                raise UsageError(f"`{text}` is in the future", where="--date")
            return day
    except ValueError:
        pass
    raise UsageError(f"`{text[:40]}` is not a date", where="--date", because="it takes YYYY-MM-DD")
