"""Requirements that exclude each other, or that no wheel meets: a resolver refuses them unless an override breaks one.

Looked at are the METADATA of the packages that are pinned, and of what those pin exactly; no further.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Protocol

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.errors import UsageError

_LOWER, _UPPER = frozenset({">", ">=", "~=", "==", "==="}), frozenset({"<", "<=", "~=", "==", "==="})


class Index(Protocol):
    """What is asked of a package index: builder.repro.releases has the real one."""

    def requires(self, name: str, version: str) -> Sequence[Requirement]:
        """What a release requires on the target, with the extras that it is installed with; raises `UsageError` for none."""

    def newest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        """The newest release that a specifier takes, of those that there were before a day."""

    def oldest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        """The oldest release that a specifier takes, of those that there were before a day."""


@dataclass(frozen=True)
class Clash:
    """A requirement that does not hold: who has it, and what to take instead (None where no release fits)."""

    package: str
    pin: str
    """The requirement's specifier, as in `==12.9`."""
    who: str
    """As in `sglang 0.5.9`."""
    ours: str | None
    against: str = ""
    """Whose requirement is kept, with it; empty where the report has ``ours``."""
    absent: bool = False
    """Whether what is required has no wheel for the target, and ``ours`` is the nearest release that has one."""


@dataclass(frozen=True)
class _Stated:
    who: str
    specifier: SpecifierSet


def clashes(
    pins: Mapping[str, str], stated: Mapping[str, Sequence[Requirement]], index: Index, before: date
) -> list[Clash]:
    """The requirements that exclude a pin, or each other, one for each package.

    ``pins`` are versions by name, ``stated`` what each of them requires; releases from ``before`` on are not taken.
    Raises what the index raises where it does not answer.
    """
    found: dict[str, Clash] = {}
    for name, requirements in sorted(stated.items()):
        for clash in _of_pins(f"{name} {pins[name]}", requirements, pins):
            found.setdefault(clash.package, clash)
    others: dict[str, list[_Stated]] = {}
    for name, requirements in sorted(stated.items()):
        for requirement in requirements:
            if requirement.name not in pins:
                others.setdefault(requirement.name, []).append(_Stated(f"{name} {pins[name]}", requirement.specifier))
    for package, each in sorted(others.items()):
        exact = next((item for item in each if _exact(item.specifier)), None)
        if exact is not None and package not in found:
            for clash in _of_exact(package, exact, others, pins, index, before):
                found.setdefault(clash.package, clash)
    return list(found.values())


def _of_pins(who: str, requirements: Sequence[Requirement], pins: Mapping[str, str]) -> Iterator[Clash]:
    for requirement in requirements:
        version = pins.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield Clash(requirement.name, str(requirement.specifier), who, version)


def _of_exact(
    package: str,
    exact: _Stated,
    others: Mapping[str, Sequence[_Stated]],
    pins: Mapping[str, str],
    index: Index,
    before: date,
) -> Iterator[Clash]:
    """What a package that nobody named, but that a pinned one pins exactly, does not go with."""
    version = _exact(exact.specifier)
    assert version is not None
    against = next((item for item in others[package] if not item.specifier.contains(version, prereleases=True)), None)
    if against is not None:
        ours = index.newest_of(package, str(against.specifier), before)
        yield Clash(package, str(exact.specifier), exact.who, ours, f"{against.who}'s `{package}{against.specifier}`")
        return
    try:
        requirements = index.requires(package, str(Version(version)))
    except UsageError:
        base = Version(version).base_version
        older, newer = f"<{base}", f">={base},!={version}"
        ours = index.newest_of(package, older, before) or index.oldest_of(package, newer, before)
        yield Clash(package, str(exact.specifier), exact.who, ours, absent=True)
        return
    yield from _of_pins(f"{package} {version}", requirements, pins)
    excluded = _excluded(requirements, others, index, before)
    if excluded is None:
        return
    library, against = excluded
    # Packages that are released in step have the same numbers; where these two are not, the newest may still fit.
    for specifier in (str(against.specifier), ""):
        ours = index.newest_of(package, specifier, before)
        if ours is not None and _excluded(_requires(package, ours, index), others, index, before) is None:
            break
    else:
        ours = None
    yield Clash(package, str(exact.specifier), exact.who, ours, f"{against.who}'s `{library}{against.specifier}`")


def _excluded(
    requirements: Sequence[Requirement], others: Mapping[str, Sequence[_Stated]], index: Index, before: date
) -> tuple[str, _Stated] | None:
    """The first requirement of a pinned package that leaves no release beside these."""
    for requirement in requirements:
        for other in others.get(requirement.name, ()):
            if _exclude(requirement.name, requirement.specifier, other.specifier, index, before):
                return requirement.name, other
    return None


def _exclude(package: str, one: SpecifierSet, other: SpecifierSet, index: Index, before: date) -> bool:
    """Whether no release answers to both; the index is asked only where two ranges might not meet."""
    for a, b in ((one, other), (other, one)):
        if version := _exact(a):
            return not b.contains(version, prereleases=True)
    operators = [frozenset(each.operator for each in specifier) for specifier in (one, other)]
    if not any(a & _UPPER and b & _LOWER for a, b in (operators, operators[::-1])):
        return False
    both = index.newest_of(package, str(one & other), before)
    return both is None and all(index.newest_of(package, str(each), before) is not None for each in (one, other))


def _requires(name: str, version: str, index: Index) -> Sequence[Requirement]:
    try:
        return index.requires(name, str(Version(version)))
    except UsageError:
        return ()


def _exact(specifier: SpecifierSet) -> str | None:
    """The one version that a specifier takes; None where it may take several."""
    return next((each.version for each in specifier if each.operator == "==" and not each.version.endswith(".*")), None)
