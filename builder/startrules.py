"""Rules over the lock about what happens when a server starts: what releases assert of each other, and the host's driver."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.driver import compat_in_use, driver_needs, judge_driver, judge_reported
from builder.errors import UsageError
from builder.facts import RuntimeCheckFact, load_facts
from builder.findings import Finding
from builder.knownrules import is_true
from builder.lock import Artefact, Lock
from builder.lockrules import ERROR, NOTE, WARNING, lock_rule, named, place, requirers, satisfies
from builder.rulebook import Context


@lock_rule("driver")
def _driver(context: Context, lock: Lock) -> Iterator[Finding]:
    """A host's driver that is too old for the stack; where one is asked about."""
    matrix, driver, reported = context.loaded.matrix, context.driver, context.driver_cuda
    if driver is None:
        if reported is not None:
            raise UsageError(
                "`--cuda-driver` without `--driver`", hint="name the driver's version, too: the two are compared"
            )
        return
    compat = None
    if reported is not None:
        yield from judge_reported(driver, reported)
        compat = compat_in_use(driver, reported)

    # Which of the GPUs the host has is not known: a driver that is too old for some of them is enough for another host.
    fine = False
    alike: dict[tuple[object, ...], list[str]] = {}
    for gpu in matrix.gpus:
        if (needs := driver_needs(matrix, lock, gpus=(gpu,))) is not None:
            said = [finding.severity for finding in judge_driver(needs, driver, compat)]
            fine = fine or ERROR not in said
            alike.setdefault((needs.because, *said), []).append(gpu)
    for gpus in alike.values():
        needs = driver_needs(matrix, lock, gpus=gpus)
        for finding in judge_driver(needs, driver, compat) if needs is not None else ():
            yield finding.model_copy(update={"severity": WARNING}) if fine and finding.severity is ERROR else finding


@lock_rule("runtime-check")
def _runtime_check(context: Context, lock: Lock) -> Iterator[Finding]:
    """What a release asserts of another one when it starts, and the lock does not have."""
    for fact in load_facts(RuntimeCheckFact):
        artefact = lock.by_name.get(fact.package)
        if artefact is None or not satisfies(artefact.version, SpecifierSet(fact.versions)):
            continue
        other = lock.by_name.get(fact.requires)
        # Installed versions are compared, local parts and all: 0.6.3+site is not older than 0.6.3.
        if other is not None and Version(other.metadata_version) >= Version(fact.minimum):
            continue
        # Where METADATA requires it, that it is missing is said there.
        if other is None and any(each.name == fact.package for each, _ in requirers(lock, fact.requires)):
            continue
        yield _asserted(context, fact, artefact, other)


def _asserted(context: Context, fact: RuntimeCheckFact, artefact: Artefact, other: Artefact | None) -> Finding:
    accepted = fact.skip is not None and is_true(context, fact.skip)
    some = fact.when == "flashinfer"
    has = f"the lock has {other.metadata_version}" if other is not None else "the lock has none"
    skip = f", or set `{fact.skip}: 1` under `environment`" if fact.skip is not None and other is not None else ""
    where = " and `--attention-backend flashinfer` is given" if some and other is None else ""
    return Finding(
        rule="runtime-check",
        severity=NOTE if accepted else WARNING if other is None else ERROR,
        subject=fact.requires,
        message=f"{named(artefact)} asserts `{fact.requires}>={fact.minimum}` when it starts{where}, {has}",
        because=(
            "a server whose attention backend is flashinfer does not start"
            if some
            else "no server starts on a GPU of NVIDIA's"
        )
        + (f"; the matrix sets `{fact.skip}`" if accepted else ""),
        hint=""
        if accepted
        else f"take {fact.requires} {fact.minimum} or later{skip}"
        if other is not None
        else f"add `{fact.requires}` {fact.minimum} or later to the stack"
        + (", or serve with another attention backend" if some else ""),
        where=place(context, fact.requires, fact.package),
        source=f"{fact.source} of {named(artefact)}, as facts/runtime-checks.yaml has it",
        evidence={
            "package": fact.package,
            "requires": fact.requires,
            "minimum": fact.minimum,
            "has": other.metadata_version if other is not None else None,
            "when": fact.when,
        },
    )
