"""`builder check`: everything that can be known about a lock: the rules, and what its wheels say of linking and of GPUs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

from builder.errors import ExitCode, UsageError
from builder.files import pretty_size
from builder.findings import Finding, Severity, exit_code
from builder.lock import Lock
from builder.lockrules import listed
from builder.rules import RULES, Context, evaluate_rules
from builder.settings import Settings
from builder.static import answers
from builder.static.answers import Looked
from builder.static.merge import merged
from builder.static.words import several
from builder.tags import is_native, wheel_tags

UNCERTAIN = frozenset(
    {"link-uncertain", "wheel-unread", "wheels-unread", "wheel-unproven", "arch-unread", "arch-unreadable"}
)
"""Rules whose findings say that something is not known."""


@dataclass(frozen=True)
class Checked:
    """What is known of a lock. ``looked_at`` counts what it rests on; ``unread`` are wheels that could not be looked at."""

    matrix: str
    findings: tuple[Finding, ...]
    looked_at: Mapping[str, Any]
    bytes_read: int = 0
    bytes_total: int = 0
    seconds: float = 0.0
    index_unread: bool = False
    """Whether something was not looked at because an index does not answer."""

    @property
    def verdict(self) -> str:
        """`broken` by an error; `uncertain` where something was asked of the wheels and is not known; else `ok`."""
        if exit_code(self.findings) != ExitCode.OK:
            return "broken"
        rules = {finding.rule for finding in self.findings}
        return "uncertain" if rules & UNCERTAIN else "ok"

    def exit_code(self, *, strict: bool) -> ExitCode:
        """3 for an error (with ``strict`` for what is uncertain, too), else 5 where an index did not answer."""
        if self.verdict == "broken":
            return ExitCode.FINDINGS
        if self.index_unread:
            return ExitCode.UNREACHABLE
        return ExitCode.FINDINGS if strict and self.verdict == "uncertain" else ExitCode.OK

    def as_json(self, *, strict: bool) -> dict[str, Any]:
        """The JSON of `--json`: a contract; fields may be added, never renamed."""
        return {
            "ok": self.exit_code(strict=strict) == ExitCode.OK,
            "matrix": self.matrix,
            "verdict": self.verdict,
            "findings": [finding.model_dump(mode="json") for finding in self.findings],
            "looked_at": dict(self.looked_at),
            "bytes_read": self.bytes_read,
            "bytes_total": self.bytes_total,
            "seconds": round(self.seconds, 3),
        }

    def as_text(self) -> str:
        """The findings, then a line with the verdict and what it rests on."""
        return "\n".join([*map(str, self.findings), "; ".join(self._last())])

    def _last(self) -> Iterator[str]:
        said = self.looked_at
        word = {"ok": "fine", "broken": "broken", "uncertain": "nothing wrong was found"}[self.verdict]
        yield f"{self.matrix}: {word}, {said['rules']} rules over {_count(said['wheels'], 'wheel')}"
        if "native_files" not in said:
            yield "no wheel was looked at"
            return
        files = f"{_count(said['native_files'], 'native file')} with {_count(said['symbols'], 'symbol')}"
        yield files + (f", {said['by_design']} cannot load by design" if said["by_design"] else "")
        if said["given"]:
            yield f"{_count(said['given'], 'wheel')} as torch was released with"
        if said["gpu_files"]:
            yield f"GPU code for {listed(said['gpus'])} in {_count(said['gpu_files'], 'file')}"
        if said["unread"]:
            yield f"{_count(len(said['unread']), 'wheel')} not looked at"
        read = f"read {pretty_size(self.bytes_read)} of {pretty_size(self.bytes_total)}"
        yield f"{read if self.bytes_read else 'nothing was read'} in {self.seconds:.1f} s"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check(context: Context, lock: Lock, settings: Settings, *, wheels: bool = True) -> Checked:
    """Evaluate the rules, and look into the wheels unless that is not wanted. Raises `UsageError` for a bad cache."""
    began = time.monotonic()
    rules = [*evaluate_rules(context), *_other_pythons(context, lock)]
    looked_at: dict[str, Any] = {"rules": len(RULES) + 1, "wheels": len(lock.artefacts)}
    static = _looked(context, lock, settings) if wheels else Looked()
    return Checked(
        context.loaded.matrix.name,
        tuple(merged(rules, static.findings)),
        looked_at | static.looked_at,
        static.bytes_read,
        static.bytes_total,
        time.monotonic() - began,
        static.index_unread,
    )


def _other_pythons(context: Context, lock: Lock) -> Iterator[Finding]:
    """Wheels that the lock's Python does not take, by their tags."""
    python = {(tag.interpreter, tag.abi) for tag in wheel_tags(lock.python, 2, 99)}
    others = [
        artefact
        for artefact in lock.artefacts
        if not any((tag.interpreter, tag.abi) in python for tag in _tags(artefact.file))
    ]
    if others:
        direct = [artefact.name for artefact in others if artefact.index is None]
        again = f"lock again: `builder lock {context.loaded.matrix.name}`"
        yield Finding(
            rule="wheel-python",
            severity=Severity.ERROR,
            subject=others[0].name,
            message=f"{several(others)} {'is' if len(others) == 1 else 'are'} not for Python {lock.python}",
            because=f"`{others[0].file}` is for {_for(others[0].file)}",
            hint=f"name the wheel of {listed(direct)} for Python {lock.python} under `files`" if direct else again,
            where=context.loaded.where("python"),
            source="the wheels' tags",
            evidence={"python": lock.python, "wheels": [artefact.name for artefact in others]},
        )


def _tags(file: str) -> Iterable[Tag]:
    return parse_wheel_filename(file)[3]


def _for(file: str) -> str:
    return listed(sorted({f"{tag.interpreter} {tag.abi}" for tag in _tags(file)}))


def _looked(context: Context, lock: Lock, settings: Settings) -> Looked:
    """What the wheels say: as it was kept, or looked up now."""
    # What may be out of reach is asked for each time; without such wheels a kept answer costs no more than finding it.
    direct = any(artefact.index is None and is_native(artefact.file) for artefact in lock.artefacts)
    if not direct and (kept := answers.recall(context, lock, (), settings)) is not None:
        return kept
    from builder.static.looking import Looking, unknown_base

    try:
        looking = Looking(context, lock, settings)
    except UsageError as error:
        return unknown_base(context, error)
    unreachable = looking.unreachable()
    state = looking.state(unreachable)
    if direct and (kept := answers.recall(context, lock, state, settings)) is not None:
        return kept
    found = looking.look(unreachable)
    # What may be otherwise the next time, with the same lock, is not kept: code that was too large, a wheel that was replaced.
    passing = any(each.rule in ("arch-unread", "wheel-replaced") for each in found.findings)
    if not found.index_unread and not passing:
        answers.remember(found, context, lock, state, settings)
    return found
