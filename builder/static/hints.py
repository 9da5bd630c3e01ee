"""Which release would fit instead: looked for only where something is broken, in both directions where that is cheap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.abi import tables
from builder.abi.judge import Judge
from builder.abi.model import Wheel
from builder.abi.verb import Question
from builder.errors import BuilderError
from builder.facts import TorchBuildFact, load_facts
from builder.lock import Lock
from builder.lockrules import satisfies
from builder.static.links import PROVIDER, Links

CANDIDATES = 6
"""Releases of a package that are read in search of one that fits: of a kernel each costs about 4 MB."""

PAGES = 24
"""Releases whose METADATA is looked at before, for what it says of torch."""


class Hints:
    """Looks for releases that would fit a lock, over the wheels that were read for it; ``cuda`` is the major of the matrix."""

    def __init__(self, lock: Lock, question: Question, links: Links, cuda: int) -> None:
        self._lock, self._question, self._links, self._cuda = lock, question, links, cuda

    def torch_for(self, names: Sequence[str]) -> str | None:
        """The newest release of torch for the lock's Python and CUDA that these wheels fit, of those that tables are shipped of."""
        wheels = [wheel for wheel in self._links.wheels if wheel.name in names]
        for version in reversed(tables.versions(PROVIDER)):
            files = tables.files(PROVIDER, version)
            python = self._lock.python.replace(".", "")
            sha256 = next((sha256 for file, sha256 in files.items() if f"-cp{python}-cp{python}-" in file), None)
            given = [wheel for wheel, _, _ in tables.wheels(sha256, self._question.from_index)] if sha256 else []
            runtimes = {file.rpartition("/")[2] for wheel in given for file in wheel.natives}
            if f"libcudart.so.{self._cuda}" not in runtimes:
                continue
            # A library that the tables only name is looked up, and the index may not answer.
            with contextlib.suppress(BuilderError):
                if self._fits([*self._others(given), *given], wheels):
                    return version
        return None

    def release_of(self, name: str) -> str | None:
        """A release of a package that fits the torch of the lock, near the one that is there; None where none was found."""
        try:
            candidates = list(self._near(name))
        except BuilderError:
            return None
        read = 0
        for version in candidates:
            try:
                release = self._question.index.release(name, version)
                if not self._metadata_fits(name, version):
                    continue
                read += 1
                wheel = self._question.wheel(release, whole=True)
                others = [other for other in self._links.wheels if other.name != name]
                if self._fits([*others, wheel], [wheel]):
                    return str(version)
            except BuilderError:
                continue
            if read == CANDIDATES:
                break
        return None

    def _others(self, given: Iterable[Wheel]) -> list[Wheel]:
        """The wheels of the lock but for torch, what the lock has for it, and what ``given`` has."""
        named = {wheel.name for wheel in given} | set(self._links.given) | set(self._links.replaced) | {PROVIDER}
        return [wheel for wheel in self._links.wheels if wheel.name not in named]

    def _fits(self, wheels: Sequence[Wheel], subjects: Sequence[Wheel]) -> bool:
        judge = Judge(wheels, self._question.known(wheels, whole=False))
        return all(item.verdict == "ok" for wheel in subjects for item in judge.judge(wheel))

    def _near(self, name: str) -> Iterator[Version]:
        """Releases of a package: what others of the lock pin, then those of which a fact says that they fit, then near ones."""
        locked = Version(self._lock.by_name[name].version)
        versions = self._question.index.versions(name, SpecifierSet())
        at = sum(version < locked for version in versions)
        near = sorted(
            (version for version in versions if version.public != locked.public),
            key=lambda v: abs(_rank(versions, v) - at),
        )
        torch = self._lock.version_of(PROVIDER) or ""
        wanted = [Version(version) for version in dict.fromkeys(pins(self._lock, name).values())]
        first = [version for version in wanted if version in near]
        first += [version for version in near if version not in first and _told(name, version, torch)]
        return iter([*first, *(version for version in near[:PAGES] if version not in first)])

    def _metadata_fits(self, name: str, version: Version) -> bool:
        """Whether the METADATA of a release takes the lock's torch; it often says nothing of it."""
        torch = self._lock.version_of(PROVIDER)
        release = self._question.index.release(name, version)
        requires = self._question.index.requires(release)
        return torch is None or all(
            satisfies(torch, requirement.specifier) for requirement in requires if requirement.name == PROVIDER
        )


def _rank(versions: Sequence[Version], version: Version) -> int:
    return versions.index(version)


def _told(name: str, version: Version, torch: str) -> bool:
    return any(
        fact.package == name
        and fact.torch is not None
        and satisfies(str(version), SpecifierSet(fact.versions))
        and satisfies(torch, SpecifierSet(fact.torch))
        for fact in load_facts(TorchBuildFact)
    )


def pins(lock: Lock, package: str, but: Iterable[str] = ()) -> Mapping[str, str]:
    """Who in the lock pins a package exactly, and to what: name → version; without the wheels in ``but``."""
    found = {}
    left_out = set(but)
    for artefact in lock.artefacts:
        for text in artefact.requires if artefact.name not in left_out else ():
            requirement = Requirement(text)
            exact = [clause.version for clause in requirement.specifier if clause.operator in ("==", "===")]
            if requirement.name == package and exact and "*" not in exact[0]:
                found[artefact.name] = exact[0]
    return found
