"""Looking into the wheels of a lock, and what was found: for `builder check`, where nothing was kept from before."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from packaging.version import Version

from builder.abi.verb import Question, base_named
from builder.abi.wheels import Target
from builder.display import note
from builder.errors import BuilderError, IntegrityError, UnreachableError, UsageError
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.rulebook import Context
from builder.settings import Settings
from builder.static.answers import Looked
from builder.static.gpucode import Code, look, shipped
from builder.static.gpufindings import gpu_findings, is_cudas
from builder.static.hints import Hints
from builder.static.linkfindings import doubts, link_findings, unread_findings
from builder.static.links import WORKERS, Links, judge
from builder.static.locked import LockedWheels, Unread, unread
from builder.static.words import several
from builder.tags import is_native

EVERY = 3.0
"""Seconds between two lines of progress."""


class Looking:
    """One look into the wheels of a lock. Raises `UsageError` for a base that is not known."""

    def __init__(self, context: Context, lock: Lock, settings: Settings) -> None:
        self._context, self._lock, self._settings = context, lock, settings
        target = Target(lock.python, base_named(f"{lock.base.distribution}:{lock.base.release}"))
        self._question = Question(settings, target)
        indexes = {name: each.url for name, each in context.loaded.matrix.indexes.items()}
        self._index = LockedWheels(settings, target, lock, indexes)
        self._question.index = self._index

    def unreachable(self) -> list[Unread]:
        """The direct files that cannot be looked at now: what can be changes without the lock."""
        direct = [artefact for artefact in self._lock.artefacts if artefact.index is None and is_native(artefact.file)]
        with ThreadPoolExecutor(WORKERS) as pool:
            found = pool.map(self._listing, direct)
            return [unread(artefact, error) for artefact, error in zip(direct, found, strict=True) if error is not None]

    def _listing(self, artefact: Artefact) -> BuilderError | None:
        try:
            release = self._index.release(artefact.name, Version(artefact.version))
            if release.sha256 != artefact.sha256:
                # What was read of it may be kept: where it comes from is told by opening it.
                self._index.open(release)
            self._question.wheel(release)
        except (UnreachableError, IntegrityError) as error:
            return error
        return None

    def look(self, unreachable: Sequence[Unread]) -> Looked:
        """Look into every wheel that can be had."""
        context, lock, index = self._context, self._lock, self._index
        links = judge(lock, self._question, _Progress(context.loaded.matrix.name), unreachable)
        codes, failed = self._codes(links)
        cuda = int(context.loaded.matrix.cuda.version.split(".")[0])
        hints = Hints(lock, self._question, links, cuda)
        findings = [
            *link_findings(context, lock, links, hints),
            *gpu_findings(context, lock, codes, links.lost),
            *unread_findings(context, links),
            *_unproven(context, lock, index),
            *_gpu_unread(context, failed),
        ]
        return Looked(
            findings,
            _looked_at(context, lock, links, codes),
            index.bytes_read,
            index.bytes_total,
            any(each.index for each in (*links.unread, *failed)),
        )

    def state(self, unreachable: Sequence[Unread]) -> list[str]:
        """What an answer depends on besides the lock: why direct files cannot be had, and which are read in parts."""
        return [*(f"{each.artefact.name} {each.other} {each.because}" for each in unreachable), *self._index.unproven]

    def _codes(self, links: Links) -> tuple[dict[str, Code], list[Unread]]:
        """The GPU code of the wheels that were read; those of CUDA's own are left out."""
        lost = {each.artefact.name for each in links.unread}
        by_name = {wheel.name: wheel for wheel in links.wheels}
        failed: list[Unread] = []

        def code(artefact: Artefact) -> Code | None:
            if (known := shipped(artefact.sha256)) is not None:
                return known
            release = self._index.release(artefact.name, Version(artefact.version))
            # The tables do not have what torch needs.
            given = artefact.name in links.given
            try:
                wheel = self._question.wheel(release, whole=True) if given else by_name[artefact.name]
                opened = lambda: self._index.open(release)
                skipped = links.unopened.get(artefact.name, frozenset())
                return look(artefact.file, release.sha256, opened, wheel, self._settings, skipped)
            except (UnreachableError, IntegrityError) as error:
                failed.append(unread(artefact, error))
                return None

        wanted = [a for a in self._lock.artefacts if is_native(a.file) and not is_cudas(a.name) and a.name not in lost]
        with ThreadPoolExecutor(WORKERS) as pool:
            found = dict(zip((artefact.name for artefact in wanted), pool.map(code, wanted), strict=True))
        return {name: each for name, each in found.items() if each is not None}, failed


class _Progress:
    """Tells now and then how far it is."""

    def __init__(self, matrix: str) -> None:
        self._matrix, self._said = matrix, time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        if done < of and time.monotonic() - self._said > EVERY:
            self._said = time.monotonic()
            note(f"{self._matrix}: {done} of {of} wheels read …")


def unknown_base(context: Context, error: UsageError) -> Looked:
    """What is to be said where nothing is known of the base that the wheels are for."""
    said = Finding(
        rule="wheels-unread",
        severity=Severity.NOTE,
        subject="base.release",
        message="the wheels were not looked at: what the base has is not known",
        because=error.what,
        hint=error.hint,
        where=context.loaded.where("base", "release"),
    )
    return Looked([said])


def _gpu_unread(context: Context, failed: Sequence[Unread]) -> Iterator[Finding]:
    if failed:
        yield Finding(
            rule="arch-unread",
            severity=Severity.NOTE,
            subject=failed[0].artefact.name,
            message=f"the GPU code of {several([each.artefact for each in failed])} was not looked at",
            because=failed[0].because,
            hint="see that the index answers; another is named with `--index NAME=URL`",
            where=context.loaded.where(),
            source="the lock",
            evidence={"wheels": [each.artefact.name for each in failed]},
        )


def _unproven(context: Context, lock: Lock, index: LockedWheels) -> Iterator[Finding]:
    if index.unproven:
        wheels = [lock.by_name[name] for name in sorted(index.unproven)]
        yield Finding(
            rule="wheel-unproven",
            severity=Severity.NOTE,
            subject=wheels[0].name,
            message=f"{several(wheels)} {'was' if len(wheels) == 1 else 'were'} read in parts, at {'its' if len(wheels) == 1 else 'their'} own URL",
            because="parts cannot be compared with the pinned sha256, and no index states it: another content would not be noticed",
            hint="a build fetches the whole file and compares it",
            where=context.loaded.where("files"),
            source="the lock",
            evidence={"wheels": [wheel.name for wheel in wheels]},
        )


def _looked_at(context: Context, lock: Lock, links: Links, codes: Mapping[str, Code]) -> dict[str, Any]:
    with_code = [code for code in codes.values() if code.members]
    return {
        "native_wheels": sum(is_native(artefact.file) for artefact in lock.artefacts),
        "given": len(links.given),
        "native_files": links.files,
        "symbols": links.symbols,
        "by_design": links.by_design,
        "verdicts": doubts(links),
        "gpus": list(context.loaded.matrix.gpus),
        "gpu_wheels": len(with_code),
        "gpu_files": sum(len(code.members) for code in with_code),
        "unread": [each.artefact.name for each in links.unread],
    }
