"""What differs between two locks, as changes that can be made one after the other.

Packages that pin each other exactly change together: torch with its CUDA wheels and triton, flashinfer's two halves. A
stack with one of them and not the other would be another fault than the one that is looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.layers import ORDER
from builder.lock import Artefact, Lock

# Lower layers first: what a later step changes leaves the layers below it as they are, and they are built once.
LAYERS = ORDER


@dataclass(frozen=True)
class Change:
    """Packages that change together. ``before`` and ``after`` have `None` for one that is not there."""

    before: Mapping[str, Artefact | None]
    after: Mapping[str, Artefact | None]

    @property
    def names(self) -> tuple[str, ...]:
        """The packages, the most telling first: the one that pins the others."""
        return tuple(self.after)

    @property
    def title(self) -> str:
        """`kernels 0.14.1 → 0.17.0`, and how many others with it."""
        first = self.names[0]
        more = f" and {len(self.names) - 1} with it" if len(self.names) > 1 else ""
        return f"{first} {_version(self.before[first])} → {_version(self.after[first])}{more}"


def _version(artefact: Artefact | None) -> str:
    return artefact.version if artefact is not None else "none"


def changes(good: Lock, bad: Lock) -> list[Change]:
    """The changes from one lock to the other, in an order in which each state is as valid as it can be.

    A change comes after those that its new packages require, and before those that its old packages would not go with;
    of several that may come next, the one in the lowest layer does. Changes that each have to come before the other are one.
    """
    before, after = good.by_name, bad.by_name
    changed = [
        name
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or before[name].sha256 != after[name].sha256
    ]
    groups = _groups(changed, [*good.artefacts, *bad.artefacts])
    earlier = _earlier(groups, before, after)
    groups, earlier = _condensed(groups, earlier)
    made = []
    for group in groups:
        names = sorted(group, key=lambda name: (-_pins(name, group, [good, bad]), name))
        made.append(Change({name: before.get(name) for name in names}, {name: after.get(name) for name in names}))
    return [made[number] for number in _ordered(made, earlier)]


def _earlier(
    groups: Sequence[set[str]], before: Mapping[str, Artefact], after: Mapping[str, Artefact]
) -> list[set[int]]:
    """For each group the groups that have to change before it."""
    of = {name: number for number, group in enumerate(groups) for name in group}
    earlier: list[set[int]] = [set() for _ in groups]
    for number, group in enumerate(groups):
        for name in group:
            if name in after:
                # What the new package requires and the old environment has not.
                earlier[number] |= {of[other] for other in _unmet(after[name], before) if other in of}
            if name in before:
                # What would be too new for the old package: it has to wait.
                for other in _unmet(before[name], after):
                    if other in of and of[other] != number:
                        earlier[of[other]].add(number)
        earlier[number].discard(number)
    return earlier


def _unmet(artefact: Artefact, have: Mapping[str, Artefact]) -> Iterator[str]:
    for requirement in map(Requirement, artefact.requires):
        name = str(canonicalize_name(requirement.name))
        other = have.get(name)
        if other is None or not requirement.specifier.contains(Version(other.metadata_version), prereleases=True):
            yield name


def _condensed(groups: Sequence[set[str]], earlier: Sequence[set[int]]) -> tuple[list[set[str]], list[set[int]]]:
    """The groups, with those joined that each have to come before the other."""
    reach = [set(found) for found in earlier]
    for middle in range(len(groups)):
        for found in reach:
            if middle in found:
                found |= reach[middle]
    first = [min([number, *(o for o in reach[number] if number in reach[o])]) for number in range(len(groups))]
    kept = sorted(set(first))
    place = {number: at for at, number in enumerate(kept)}
    joined: list[set[str]] = [set() for _ in kept]
    before: list[set[int]] = [set() for _ in kept]
    for number, group in enumerate(groups):
        at = place[first[number]]
        joined[at] |= group
        before[at] |= {place[first[other]] for other in earlier[number]} - {at}
    return joined, before


def _ordered(made: Sequence[Change], earlier: Sequence[set[int]]) -> Iterator[int]:
    left = sorted(range(len(made)), key=lambda number: (_layer(made[number]), made[number].names[0]))
    done: set[int] = set()
    while left:
        number = next(each for each in left if earlier[each] <= done)
        left.remove(number)
        done.add(number)
        yield number


def _layer(change: Change) -> int:
    found = [each.layer for each in (*change.before.values(), *change.after.values()) if each is not None]
    return min((LAYERS.index(layer) if layer in LAYERS else len(LAYERS) for layer in found), default=len(LAYERS))


def _groups(names: Sequence[str], artefacts: Iterable[Artefact]) -> list[set[str]]:
    """The names, joined where one pins the other exactly."""
    parent = {name: name for name in names}

    def root(name: str) -> str:
        while parent[name] != name:
            name = parent[name]
        return name

    for artefact in artefacts:
        if artefact.name not in parent:
            continue
        for name in pinned(artefact):
            if name in parent:
                parent[root(name)] = root(artefact.name)
    groups: dict[str, set[str]] = {}
    for name in names:
        groups.setdefault(root(name), set()).add(name)
    return list(groups.values())


def pinned(artefact: Artefact) -> Iterator[str]:
    """The packages that an artefact requires in one version."""
    for requirement in map(Requirement, artefact.requires):
        if any(each.operator in ("==", "===") and not each.version.endswith(".*") for each in requirement.specifier):
            yield canonicalize_name(requirement.name)


def _pins(name: str, group: set[str], locks: Sequence[Lock]) -> int:
    return sum(len(set(pinned(lock.by_name[name])) & group) for lock in locks if name in lock.by_name)


def mixed(good: Lock, applied: Iterable[Change], name: str) -> Lock:
    """The good lock with some changes made."""
    artefacts = dict(good.by_name)
    for change in applied:
        for package, artefact in change.after.items():
            if artefact is None:
                artefacts.pop(package, None)
            else:
                artefacts[package] = artefact
    found = tuple(artefacts[package] for package in sorted(artefacts))
    return good.model_copy(update={"artefacts": found, "matrix": name})


def with_needs(row: Sequence[Change], good: Lock, change: Change, allowed: set[tuple[str, str]]) -> list[Change]:
    """The change with those others that it cannot be without: what it requires, and what does not go with it as it was."""
    chosen = [change]
    while True:
        lock = mixed(good, chosen, good.matrix)
        names: set[str] = set()
        for who, what in conflicts(lock) - allowed:
            names |= {who, str(canonicalize_name(Requirement(what).name))}
        more = [each for each in row if each not in chosen and names & set(each.names)]
        if not more:
            return chosen
        chosen += more


def conflicts(lock: Lock) -> set[tuple[str, str]]:
    """What the lock's packages require and it does not have: who, and what."""
    found = set()
    for artefact in lock.artefacts:
        for text in artefact.requires:
            requirement = Requirement(text)
            other = lock.by_name.get(canonicalize_name(requirement.name))
            if other is None or not requirement.specifier.contains(Version(other.metadata_version), prereleases=True):
                found.add((artefact.name, text))
    return found
