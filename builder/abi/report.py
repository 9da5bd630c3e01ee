"""What `builder abi` says: the verdict first, then each file that is not fine, what to know, what to do; and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from builder.abi.answers import Answer
from builder.abi.model import Extension, Word
from builder.abi.wheels import Target
from builder.smoke.link import demangle

SHOWN = 6
"""Missing names of a file that are shown; the JSON has all."""

NAMED = 4
"""Wheels that are named in the first line."""

_NOT_PROVEN = "not proven: names that resolve say nothing of layouts; a load test in the image does"


def worst(verdicts: Iterable[Word]) -> Word:
    """The verdict of several."""
    found = set(verdicts)
    return "broken" if "broken" in found else "uncertain" if "uncertain" in found else "ok"


@dataclass(frozen=True)
class Candidate:
    """A release that `--find` looked at."""

    version: str
    extensions: tuple[Extension, ...]

    @property
    def verdict(self) -> Word:
        return worst(item.verdict for item in self.extensions)

    @property
    def missing(self) -> tuple[str, ...]:
        """What is missing, each once: libraries, versions and symbols."""
        names = [
            name
            for item in self.extensions
            if item.verdict == "broken"
            for name in (
                *item.missing_libraries,
                *item.missing_versions,
                *(missing.symbol for missing in item.missing_symbols),
            )
        ]
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class Report:
    """The answer to one question. ``wheels`` are the set's; ``fitting`` releases that would do, where that was cheap to tell."""

    asked: tuple[str, ...]
    """The pins, as in `torch==2.9.1`."""
    wheels: tuple[str, ...]
    target: Target
    extensions: tuple[Extension, ...]
    sought: str = ""
    candidates: tuple[Candidate, ...] = ()
    left_out: int = 0
    bytes_read: int = 0
    bytes_total: int = 0
    lasting: bool = False
    """Whether nothing that an index may add changes the answer, but for the releases that ``sought`` has."""
    fitting: tuple[str, ...] | None = None

    @property
    def verdict(self) -> Word:
        """The worst of the files; of candidates, `ok` where one of them is."""
        if self.sought:
            verdicts = [candidate.verdict for candidate in self.candidates]
            return "ok" if "ok" in verdicts else worst(verdicts or ["broken"])
        return worst(item.verdict for item in self.extensions)


def answer_of(report: Report, now: float) -> Answer:
    """A report as it is printed; ``now`` are seconds since the epoch, at which the index was asked."""
    said = as_json(report)
    if report.sought:
        said["as_of"] = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return Answer(said, as_text(report))


def as_json(report: Report) -> dict[str, Any]:
    """The JSON of `--json` (design, command line)."""
    said: dict[str, Any] = {
        "verdict": report.verdict,
        "python": report.target.python,
        "base": f"{report.target.base.distribution}:{report.target.base.release}",
        "machine": report.target.machine,
        "wheels": list(report.wheels),
    }
    if report.sought:
        said["package"] = report.sought
        said["candidates"] = [
            {"version": item.version, "verdict": item.verdict, "missing": len(item.missing)}
            for item in report.candidates
        ]
    else:
        plain = _plain(report.extensions)
        said["extensions"] = [_extension(item, plain) for item in report.extensions]
        if report.fitting is not None:
            said["fitting"] = list(report.fitting)
    return said | {
        "bytes_read": report.bytes_read,
        "bytes_total": report.bytes_total,
    }


def _extension(item: Extension, plain: dict[str, str]) -> dict[str, Any]:
    return {
        "file": item.file,
        "distribution": item.distribution,
        "verdict": item.verdict,
        "symbols": item.symbols,
        "missing_symbols": [
            {
                "symbol": missing.symbol,
                "demangled": plain[missing.symbol],
                "nearest": plain[missing.nearest] if missing.nearest else None,
                "nearest_symbol": missing.nearest,
                "lacking": missing.lacking or None,
            }
            for missing in item.missing_symbols
        ],
        "missing_libraries": list(item.missing_libraries),
        "missing_versions": list(item.missing_versions),
        "by_design": item.by_design or None,
        "os_packages": list(item.packages),
        "because": list(item.because),
        "uncertain": list(item.reasons),
        "notes": list(item.notes),
    }


def _plain(extensions: Iterable[Extension]) -> dict[str, str]:
    names = {name for e in extensions for m in e.missing_symbols for name in (m.symbol, m.nearest) if name}
    return demangle(sorted(names))


def as_text(report: Report) -> str:
    """The report for people, but for what it cost."""
    return "\n".join(_found(report) if report.sought else _judged(report))


def _judged(report: Report) -> list[str]:
    found = report.extensions
    plain = _plain(found)
    lines = [f"{report.verdict}: {_summary(report)}"]
    if report.verdict == "ok" and found:
        lines.append(f"  {_NOT_PROVEN}")
    for item in found:
        if item.verdict != "ok":
            lines += ["", *_file(item, plain)]
    if fine := [item for item in found if item.verdict == "ok"]:
        lines += ["", *(f"{'by design' if item.by_design else 'ok':<9}  {item.file}" for item in fine)]
    if notes := _notes(found):
        lines += ["", *notes]
    if hint := _hint(report):
        lines += ["", hint]
    return lines


def _summary(report: Report) -> str:
    found = report.extensions
    if not found:
        return "none of these wheels has native code"
    names = list(dict.fromkeys(item.distribution for item in found))
    owners = _listed(names) if len(names) <= NAMED else _count(len(names), "wheel")
    files = f"{_count(len(found), 'native file')} of {owners}"
    where = f"({_target(report.target)})"
    if report.verdict != "ok":
        return f"{sum(item.verdict == report.verdict for item in found)} of {files} {where}"
    excused = sum(bool(item.by_design) for item in found)
    rest = f", but for {excused} that cannot load here by design" if excused else ""
    return f"all names of {files} resolve{rest} {where}"


def _target(target: Target) -> str:
    there = "" if target.machine == "x86_64" else f", {target.machine}"
    return f"Python {target.python}, {target.base.title}{there}"


def _file(item: Extension, plain: dict[str, str]) -> list[str]:
    lines = [f"{item.verdict:<9}  {item.file}"]
    lines += [f"  no library  {name}" for name in item.missing_libraries]
    lines += [f"  no version  {name}" for name in item.missing_versions]
    for missing in item.missing_symbols[:SHOWN]:
        lines.append(f"  no symbol   {plain[missing.symbol]}")
        if missing.nearest:
            lines.append(f"    nearest   {plain[missing.nearest]}")
    if len(item.missing_symbols) > SHOWN:
        lines.append(f"  no symbol   and {len(item.missing_symbols) - SHOWN} more (`--json` has all)")
    lacking = dict.fromkeys(missing.lacking for missing in item.missing_symbols if missing.lacking)
    lines += [f"  because: {item.distribution} was built for another {_release(name)}" for name in lacking]
    lines += [f"  because: {text}" for text in item.because]
    return lines + [f"  not known: {text}" for text in item.reasons]


def _release(shown: str) -> str:
    name, _, version = shown.partition(" ")
    return f"{name}, {version} does not export it"


def _notes(found: Sequence[Extension]) -> list[str]:
    """What is worth knowing, once for all files that it is about."""
    about: dict[str, list[str]] = {}
    for item in found:
        if item.by_design:
            about.setdefault(f"cannot load here by design; consequence: {item.by_design}", []).append(item.file)
        for text in item.notes:
            about.setdefault(text, []).append(item.file)
    lines = [f"note: {_some(files)}: {text}" for text, files in about.items()]
    packages = sorted({package for item in found if not item.by_design for package in item.packages})
    return lines + ([f"note: OS packages that the base has to have: {', '.join(packages)}"] if packages else [])


def _some(files: Sequence[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"`{files[0]}`{more}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _listed(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _hint(report: Report) -> str:
    if report.fitting:
        return f"hint: as far as names tell, these fit: {', '.join(report.fitting)}"
    name = next((name for item in report.extensions for name in item.blames), None)
    if name is None or report.fitting is not None:
        return ""
    others = [pin for pin in report.asked if not pin.startswith(f"{name}==")]
    return f"hint: which releases of {name} fit: `builder abi {' '.join(others)} --find {name}`" if others else ""


def _found(report: Report) -> list[str]:
    fits = [item.version for item in report.candidates if item.verdict == "ok"]
    what = ", ".join(pin.replace("==", " ") for pin in report.asked)
    head = f"{report.sought} {', '.join(fits)}" if fits else f"no release of {report.sought} that was looked at"
    verb = "fit" if len(fits) > 1 else "fits"
    said = f"{head} {verb} {what}"
    if report.verdict == "uncertain":
        said = f"whether a release of {report.sought} fits {what} is not known"
    lines = [f"{said} ({_target(report.target)})"]
    if fits:
        lines.append(f"  {_NOT_PROVEN}")
    lines.append("")
    width = max((len(item.version) for item in report.candidates), default=0)
    plain = _plain(extension for item in report.candidates for extension in item.extensions)
    for item in report.candidates:
        names = [plain.get(name, name) for name in item.missing]
        rest = f"{len(names)} missing: {names[0]}" if names else ""
        if item.verdict == "uncertain":
            rest = next((reason for extension in item.extensions for reason in extension.reasons), "")
        lines.append(f"  {item.version:<{width}}  {item.verdict:<9}  {rest}".rstrip())
    if report.left_out:
        older = f"{_count(report.left_out, 'older release')} {'was' if report.left_out == 1 else 'were'} not looked at"
        lines += ["", f"{older}: `--find '{report.sought}>=VERSION'` says from which on"]
    return lines
