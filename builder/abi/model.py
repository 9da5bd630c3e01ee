"""What a link verdict takes and gives: facts of files, wheels, what is known of names; and what is known of a file then."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from builder.facts import BaseFact, ProviderFact
from builder.nativefacts import Undefined
from builder.smoke.link import version_key

Word = Literal["ok", "broken", "uncertain"]


class Exports(Protocol):
    """The names that a file exports, however they are kept."""

    def versions(self, name: str) -> Collection[str | None]:
        """The versions under which ``name`` is exported (None: unversioned); empty where it is not."""

    def starting(self, prefix: str) -> Iterable[str]:
        """The exported names that start like this."""


@dataclass(frozen=True)
class Facts:
    """What the loader needs to know of one file; ``uncertain`` as in `builder.nativefacts.ElfFacts`."""

    soname: str | None
    needed: tuple[str, ...]
    rpath: tuple[str, ...]
    runpath: tuple[str, ...]
    verneed: tuple[tuple[str, str], ...]
    verdef: tuple[str, ...]
    undefined: Sequence[Undefined]
    exports: Exports
    uncertain: tuple[str, ...] = ()
    trouble: str = ""
    """Why nothing is known of it, where that is so."""
    machine: str = ""
    """As in `builder.elf.Elf`; empty where that was not looked at."""


@dataclass(frozen=True)
class Wheel:
    """A wheel as it would be installed. ``natives`` are its native files, relative to site-packages."""

    name: str
    version: str
    natives: tuple[str, ...]
    read: Callable[[str], Facts]
    promised: int | None = None
    """The minor version of glibc that its platform tag asks for; None where it has none."""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Known:
    """What the facts say of names: whose they are, what is opened first, what fails by design."""

    base: BaseFact
    python: str
    """The interpreter's version, as in 3.11."""
    providers: Sequence[ProviderFact]
    drivers: Mapping[str, str]
    """Libraries of the host's driver, and the pattern of their names."""
    os_packages: Mapping[str, str]
    cuda_sonames: Mapping[str, Mapping[str, Any]]
    owners: Mapping[str, Sequence[str]]
    loaded_first: Sequence[Mapping[str, Any]] = ()
    shared_files: Sequence[Mapping[str, Any]] = ()
    whole: bool = False
    """Whether the set has all that the named wheels require: what none of its wheels has is in no wheel."""
    base_exports: Mapping[str, Exports] = field(default_factory=dict)
    """Names that libraries of the base have, as far as they are known."""
    machine: str = "x86_64"
    """What the target runs on, as `uname -m` has it."""
    exceptions: Sequence[Mapping[str, Any]] = ()
    """Entries of the ledger that apply to the wheels of the set."""

    def in_base(self, symbol: str) -> bool:
        """Whether one of the base's libraries has a name, under a version that the base goes up to."""
        return any(self.reached(version) for item in self.base_exports.values() for version in item.versions(symbol))

    def reached(self, version: str | None) -> bool:
        """Whether the base goes up to a symbol version; True for a family that it says nothing of."""
        family, _, number = (version or "").rpartition("_")
        newest = self.base.versions.get(family)
        return not (newest and number[:1].isdigit()) or version_key(number) <= version_key(newest)

    def owner(self, symbol: str) -> str | None:
        """The distribution that a symbol belongs to by its name."""
        for distribution, patterns in self.owners.items():
            if any(re.search(pattern, symbol) for pattern in patterns):
                return distribution
        return None


@dataclass(frozen=True)
class MissingSymbol:
    """A symbol that nothing in the file's scope defines, and the nearest name that there is."""

    symbol: str
    nearest: str | None
    lacking: str
    """What would have to have it: `torch 2.10.0`; empty where that is not known."""


@dataclass(frozen=True)
class Extension:
    """What is known of one native file. ``reasons`` say why it is uncertain, ``notes`` are worth knowing."""

    file: str
    distribution: str
    verdict: Word
    symbols: int
    """Strong undefined symbols that were looked at."""
    missing_symbols: tuple[MissingSymbol, ...] = ()
    missing_libraries: tuple[str, ...] = ()
    missing_versions: tuple[str, ...] = ()
    by_design: str = ""
    """What follows where the file cannot load here and need not (facts/exceptions.yaml); its verdict is `ok` then."""
    sought: tuple[str, ...] = ()
    """Missing libraries that may be in a wheel that nobody named."""
    packages: tuple[str, ...] = ()
    """OS packages that it needs."""
    lacking: tuple[str, ...] = ()
    """Packages that the set does not have and that a missing library is known to be of (facts/providers.yaml)."""
    because: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def blames(self) -> tuple[str, ...]:
        """The distributions whose release is not the one that the file was built for, where it is broken for that."""
        names = (missing.lacking.partition(" ")[0] for missing in self.missing_symbols if self.verdict == "broken")
        return tuple(dict.fromkeys(name for name in names if name))
