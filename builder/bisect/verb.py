"""`builder bisect GOOD BAD -- COMMAND`: the one change that breaks COMMAND, the release within it, and the lock that proves it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.abi.verb import base_named
from builder.abi.wheels import Index, Target
from builder.bisect.changes import Change, changes, conflicts, mixed, with_needs
from builder.bisect.journal import Journal
from builder.bisect.runners import Container, Environment, Runner, Static, errors
from builder.bisect.search import Found, Result, search
from builder.display import note
from builder.errors import UsageError
from builder.files import write_atomic
from builder.interrupts import check
from builder.lock import Artefact, Lock, check_current, lock_path, read_lock
from builder.matrix import LoadedMatrix, find_matrix, load
from builder.settings import Settings

LIMIT = 3600
"""Seconds that COMMAND may take for one lock."""

NAME = "bisect"
"""The name that locks and images of a bisection have."""


@dataclass(frozen=True)
class Outcome:
    """What a bisection found.

    ``culprit`` is the change, ``release`` the first release within it that is bad (after which one), ``alone`` whether
    this change on top of the good lock is enough, ``lock`` the first bad lock, ``before`` the last good one.
    """

    changes: int
    tested: int
    culprit: str
    suspects: tuple[str, ...]
    why: str
    alone: str
    release: str
    lock: Path | None
    before: Path | None
    skipped: tuple[str, ...]
    log: Path
    steps: tuple[dict[str, Any], ...] = ()


@dataclass
class _State:
    """What one bisection goes by."""

    good: Lock
    bad: Lock
    runner: Runner
    journal: Journal
    allowed: set[tuple[str, str]]
    loaded: LoadedMatrix
    broken: set[tuple[str, str]]
    """What the rules call broken in one of the two stacks themselves: no reason to leave a state between them out."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    told: set[str] = field(default_factory=set)
    """Digests of the locks that stand in the steps."""

    def test(self, lock: Lock, title: str) -> tuple[Result, str]:
        """Tell of a lock, from the log if it was told before; what cannot be valid is skipped and said."""
        check()
        known = self.journal.recall(lock.digest)
        began = time.monotonic()
        if known is not None:
            result, why = known
        elif invalid := "" if isinstance(self.runner, Static) else self._invalid(lock):
            result, why = Result.SKIP, invalid
        else:
            note(f"{title} …")
            result, why = self.runner.test(lock)
        if known is None:
            self.journal.note(lock.digest, title, result, why, time.monotonic() - began)
        if lock.digest not in self.told:
            self.told.add(lock.digest)
            self.steps.append({"title": title, "result": str(result), "why": why})
            if result is Result.SKIP:
                self.skipped.append(f"{title}: {why}")
        note(f"{title}: {result} ({why}{', from the log' if known is not None else ''})")
        return result, why

    def _invalid(self, lock: Lock) -> str:
        """Why a state between the two stacks cannot be valid, by METADATA or by the rules; empty where nothing says so."""
        for who, what in sorted(conflicts(lock) - self.allowed):
            return f"{who} requires {what}"
        for key, message in sorted(errors(self.loaded, lock).items()):
            if key not in self.broken:
                return message
        return ""


def bisect(arguments: argparse.Namespace, matrices: Path, settings: Settings) -> Outcome:
    """Search. Raises `UsageError` where the good stack is bad or the bad one good, or nothing is asked."""
    good_matrix, good = _side(arguments.good, matrices)
    bad_matrix, bad = _side(arguments.bad, matrices)
    command = list(arguments.command)
    if not command and not arguments.static:
        raise UsageError(
            "no COMMAND", hint="`builder bisect GOOD BAD -- COMMAND`, or `--static` to go by verdicts alone"
        )
    if command and arguments.static:
        raise UsageError("COMMAND with `--static`", hint="verdicts alone need none")
    if good.python != bad.python:
        because = f"{good.matrix} has {good.python}, {bad.matrix} has {bad.python}"
        raise UsageError(
            "the two stacks have different Pythons", because=because, hint="write a matrix with the other Python first"
        )
    row = _row(good, bad, arguments.within)
    folder = arguments.log or Path(f"bisect-{good.matrix}-{bad.matrix}")
    question = f"{good.digest[:12]} {bad.digest[:12]} {' '.join(command) or 'static'}"
    question += " --host" if arguments.host else ""
    journal = Journal(folder, question)
    static = Static(good_matrix, good, bad_matrix, bad) if arguments.static else None
    runner = static or _runner(arguments, good_matrix, command, settings, folder)
    good, bad = good.model_copy(update={"matrix": NAME}), bad.model_copy(update={"matrix": NAME})
    broken = {*errors(good_matrix, good), *errors(good_matrix, bad)}
    state = _State(good, bad, runner, journal, conflicts(good) | conflicts(bad), good_matrix, broken)
    _ends(state)
    found = search(len(row), lambda number: state.test(_at(state, row, number), _title(row, number))[0])
    return _outcome(state, row, found, settings, folder, good_matrix)


def _row(good: Lock, bad: Lock, within: str | None) -> list[Change]:
    """The changes that are searched; at least one. Raises `UsageError`."""
    row = changes(good, bad)
    if not row:
        raise UsageError(
            "there is nothing to search for",
            because=f"{good.matrix} and {bad.matrix} have the same wheels",
            hint="`builder diff` tells what else differs",
        )
    if within is None:
        return row
    name = canonicalize_name(within)
    if not (found := [change for change in row if name in change.names]):
        there = name in good.by_name and name in bad.by_name
        raise UsageError(
            f"`{name}` is the same in both stacks" if there else f"`{name}` is in neither stack", where="--within"
        )
    return found


def _side(name: str, matrices: Path) -> tuple[LoadedMatrix, Lock]:
    path = find_matrix(name, matrices)
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    return loaded, lock


def _runner(
    arguments: argparse.Namespace,
    loaded: LoadedMatrix,
    command: Sequence[str],
    settings: Settings,
    folder: Path,
) -> Runner:
    if arguments.host:
        return Environment(folder.absolute(), command, settings, LIMIT)
    return Container(loaded, command, settings)


def _ends(state: _State) -> None:
    """The good stack has to be good and the bad one bad, or there is nothing to search for."""
    static = isinstance(state.runner, Static)
    result, why = state.test(state.bad, "all changes")
    if result is Result.SKIP:
        raise _untold("bad", f"all changes: {why}", state.journal)
    if result is not Result.BAD:
        hint = "search with a COMMAND: the rules have no error for it" if static else "name a COMMAND that fails on it"
        raise UsageError("the bad stack is not bad", because=f"all changes: {result} ({why})", hint=hint)
    if static:
        return
    result, why = state.test(state.good, "no change")
    if result is Result.SKIP:
        raise _untold("good", f"no change: {why}", state.journal)
    if result is not Result.GOOD:
        raise UsageError(
            "the good stack is not good",
            because=f"no change: {result} ({why})",
            hint="name a COMMAND that succeeds on it",
        )


def _untold(which: str, why: str, journal: Journal) -> UsageError:
    return UsageError(
        f"whether the {which} stack is {which} cannot be told",
        because=why,
        hint=f"see to that, and remove `{journal.folder}`, which remembers it; then search again",
    )


def _at(state: _State, row: Sequence[Change], number: int) -> Lock:
    """The lock with the first `number` changes; those that are not in the row come with the last."""
    return mixed(state.good, row[:number], NAME)


def _title(row: Sequence[Change], number: int) -> str:
    return f"{number} of {len(row)} changes, up to {row[number - 1].title}"


def _outcome(
    state: _State, row: Sequence[Change], found: Found, settings: Settings, folder: Path, loaded: LoadedMatrix
) -> Outcome:
    suspects = row[found.good : found.bad]
    before, after = _at(state, row, found.good), _at(state, row, found.bad)
    places = _keep(folder, before, after)
    culprit = suspects[0] if len(suspects) == 1 else None
    alone, release, why = "", "", ""
    last = next((step for step in reversed(state.steps) if step["result"] == "bad"), None)
    why = last["why"] if last else ""
    if culprit is not None:
        needs = with_needs(row, state.good, culprit, state.allowed)
        others = f" with the {len(needs) - 1} that it cannot be without" if len(needs) > 1 else ""
        result, said = state.test(mixed(state.good, needs, NAME), f"only {culprit.title}{others}")
        alone = {
            Result.BAD: f"this change{others or ' alone'}, on top of the good stack, is enough",
            Result.GOOD: f"this change{others or ' alone'} is not enough: it takes more of the ones before it",
            Result.SKIP: f"this change{others or ' alone'} could not be tried: {said}",
        }[result]
        release = _within(state, row[: found.good], culprit, settings, loaded)
    return Outcome(
        changes=len(row),
        tested=state.journal.tests,
        culprit=culprit.title if culprit is not None else "",
        suspects=tuple(change.title for change in suspects),
        why=why,
        alone=alone,
        release=release,
        lock=places[1],
        before=places[0],
        skipped=tuple(state.skipped),
        log=folder,
        steps=tuple(state.steps),
    )


def _keep(folder: Path, before: Lock, after: Lock) -> tuple[Path, Path]:
    """Write the two locks that prove it."""
    places = folder / "last-good.lock.json", folder / "first-bad.lock.json"
    for place, lock in zip(places, (before, after), strict=True):
        write_atomic(place, lock.text())
    return places


def _within(state: _State, applied: Sequence[Change], culprit: Change, settings: Settings, loaded: LoadedMatrix) -> str:
    """The first bad release of a single package, among the index's between the two."""
    name = culprit.names[0]
    old, new = culprit.before[name], culprit.after[name]
    if len(culprit.names) > 1 or old is None or new is None or old.index != "default" or new.index != "default":
        return ""
    first, last = sorted((Version(old.version), Version(new.version)))
    index = Index(settings, Target(state.good.python, base_named(loaded.matrix.base.release)))
    between = [v for v in index.versions(name, SpecifierSet(f">{first},<{last}")) if not v.is_prerelease]
    if Version(old.version) > Version(new.version):
        between.reverse()
    row = [old, *(_artefact(index, old, version) for version in between), new]

    def test(number: int) -> Result:
        artefacts = {**mixed(state.good, applied, NAME).by_name, name: row[number]}
        lock = state.good.model_copy(update={"artefacts": tuple(artefacts[each] for each in sorted(artefacts))})
        return state.test(lock, f"{name} {row[number].version}")[0]

    found = search(len(row) - 1, test)
    if found.skipped:
        return f"{name}: bad somewhere after {row[found.good].version}, up to {row[found.bad].version}"
    return f"{name} {row[found.bad].version} is the first bad release, {row[found.good].version} the last good one"


def _artefact(index: Index, like: Artefact, version: Version) -> Artefact:
    """A release of a package as a lock has it."""
    release = index.release(like.name, version)
    requires = tuple(sorted(str(each).partition(";")[0].strip() for each in index.requires(release)))
    return like.model_copy(
        update={
            "version": str(version),
            "metadata_version": str(version),
            "file": release.file,
            "sha256": release.sha256,
            "size": release.size,
            "requires": requires,
        }
    )


def as_json(found: Outcome) -> dict[str, Any]:
    """The outcome as data."""
    return {
        "culprit": found.culprit or None,
        "release": found.release or None,
        "suspects": list(found.suspects),
        "why": found.why,
        "alone": found.alone or None,
        "changes": found.changes,
        "tested": found.tested,
        "skipped": list(found.skipped),
        "steps": list(found.steps),
        "last_good": str(found.before) if found.before else None,
        "first_bad": str(found.lock) if found.lock else None,
        "log": str(found.log),
    }


def as_text(found: Outcome) -> str:
    """The outcome for people: the change first."""
    if found.culprit:
        lines = [f"it is {found.culprit}"]
        lines += [f"  {text}" for text in (found.release, found.why and f"because: {found.why}", found.alone) if text]
    else:
        lines = [f"it is one of these {len(found.suspects)} changes, and no state between them could be told"]
        lines += [f"  {title}" for title in found.suspects]
    lines += ["", f"{found.changes} {'change' if found.changes == 1 else 'changes'}, {found.tested} tests"]
    lines += [f"skipped: {text}" for text in found.skipped]
    lines += [f"last good: {found.before}", f"first bad: {found.lock}", f"log: {found.log}"]
    return "\n".join(lines)
