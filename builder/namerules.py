"""Rules on names and release trains: old names of distributions, and releases that belong together."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.facts import CoupledFact, RenamedFact, TorchBuildFact, VendorBuildFact, load_facts
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.lockrules import WARNING, listed, lock_rule, matching, named, parsed, place, satisfies
from builder.rulebook import Context, rule
from builder.tags import is_native
from builder.vendors import vendor_build


def _named_versions(context: Context) -> dict[str, str | None]:
    """Distributions that the matrix or the lock names, with their version where that is known."""
    matrix = context.loaded.matrix
    found: dict[str, str | None] = {override.package: override.ours for override in matrix.overrides}
    for extra in map(parsed, matrix.extras):
        found[extra.name] = next((clause.version for clause in extra.specifier), None)
    found |= (
        {file.name: file.pinned_version for file in matrix.files} | matrix.stack.pins() | dict(matrix.cuda.compiler)
    )
    return found | {artefact.name: artefact.version for artefact in (context.lock.artefacts if context.lock else ())}


@rule("renamed")
def _renamed(context: Context) -> Iterator[Finding]:
    """A distribution under a name that it no longer has."""
    versions = _named_versions(context)
    for fact in load_facts(RenamedFact):
        if fact.beside is not None:
            beside = parsed(fact.beside)
            version = versions.get(beside.name)
            if version is None or not satisfies(version, beside.specifier):
                continue
        for old, new in fact.names.items():
            if old not in versions or (
                fact.versions and not satisfies(versions[old] or "0", SpecifierSet(fact.versions))
            ):
                continue
            both = new in versions
            yield Finding(
                rule="renamed",
                severity=Severity(fact.severity),
                subject=old,
                message=f"`{old}` beside `{new}`, which is its name now" if both else f"`{old}` is called `{new}` now",
                because=fact.because,
                hint=f"leave `{old}` out" if both else f"name `{new}` instead",
                where=place(context, old),
                source=fact.source,
                evidence={"old": old, "new": new, "version": versions[old], "both": both},
            )


@lock_rule("release-train")
def _train(context: Context, lock: Lock) -> Iterator[Finding]:
    """Releases of distributions that are made for each other, and are not of one train."""
    for fact in load_facts(CoupledFact):
        leader = lock.by_name.get(fact.packages[0])
        for place_, name in enumerate(fact.packages[1:]):
            other = lock.by_name.get(name)
            if leader is None or other is None or _said(leader, other):
                continue
            wanted = _wanted(fact, leader, place_)
            if wanted is None or _is_of(other.version, wanted, fact.how):
                continue
            yield Finding(
                rule="release-train",
                severity=WARNING,
                subject=name,
                message=f"{named(leader)} beside {named(other)}, which is not of its release train",
                because=fact.because,
                hint=f"take {name} {wanted}" + (".*" if fact.how == "series" else ""),
                where=place(context, name, leader.name),
                source=fact.source,
                evidence={"leader": leader.name, "version": leader.version, "wanted": wanted, "has": other.version},
            )


def _said(leader: Artefact, other: Artefact) -> bool:
    """Whether METADATA binds one to the other, or a fact on builds covers it: then another rule says more."""
    bound = any(
        requirement.specifier
        for here, there in ((leader, other.name), (other, leader.name))
        for requirement in map(parsed, here.requires)
        if requirement.name == there
    )
    return bound or any(
        fact.package == other.name and satisfies(other.version, SpecifierSet(fact.versions))
        for fact in load_facts(TorchBuildFact)
    )


def _wanted(fact: CoupledFact, leader: Artefact, place_: int) -> str | None:
    if fact.how == "equal":
        return Version(leader.version).public
    row = fact.series.get(_series(leader.version))
    return row[place_] if row is not None else None


def _series(version: str) -> str:
    return ".".join(map(str, Version(version).release[:2]))


def _is_of(version: str, wanted: str, how: str) -> bool:
    return (Version(version).public if how == "equal" else _series(version)) == wanted


@lock_rule("vendor-build")
def _vendor_build(context: Context, lock: Lock) -> Iterator[Finding]:
    """A build that is a vendor's or a nightly, beside public releases that are compiled for a public one."""
    compiled_for_torch = {fact.package for fact in load_facts(TorchBuildFact)}
    for package in dict.fromkeys(fact.package for fact in load_facts(VendorBuildFact)):
        artefact = matching(lock, package)
        fact = vendor_build(package, artefact.version) if artefact is not None else None
        if artefact is None or fact is None:
            continue
        compiled = [
            named(each)
            for each in lock.artefacts
            if each.index == "default"
            and (each.name in compiled_for_torch or (is_native(each.file) and _requires(each, package)))
        ]
        if compiled:
            yield Finding(
                rule="vendor-build",
                severity=WARNING,
                subject=package,
                message=f"{named(artefact)} is {fact.what}, and {listed(compiled)} {'is' if len(compiled) == 1 else 'are'} "
                "compiled for a public release",
                because=fact.because,
                hint=fact.hint,
                where=place(context, package),
                source=fact.source,
                evidence={"package": package, "version": artefact.version, "compiled": list(compiled)},
            )


def _requires(artefact: Artefact, package: str) -> bool:
    return any(parsed(requirement).name == package for requirement in artefact.requires)
