"""`builder abi --symbol`: from one name that a loader did not find, which torch releases export it, out of the shipped tables.

Whoever has nothing but `undefined symbol: …` learns which torch an extension was built for and which one is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.abi import tables
from builder.abi.model import Facts, Wheel
from builder.agree import KERNELS
from builder.errors import UsageError
from builder.facts import TorchBuildFact, load_facts
from builder.smoke.link import base_name, demangle, nearest, qualified_prefixes

PACKAGE = "torch"


@dataclass(frozen=True)
class Built:
    """Releases of a package that are compiled for a torch; ``needs`` says whether that torch exports the name."""

    package: str
    versions: str
    torch: str
    exported: bool


@dataclass(frozen=True)
class SymbolReport:
    """Which releases of torch export a name. ``instead`` is the nearest name of each release that does not."""

    symbol: str
    readable: str
    exported: tuple[str, ...]
    absent: tuple[str, ...]
    instead: Mapping[str, str]
    readable_instead: Mapping[str, str]
    built: tuple[Built, ...]

    def as_json(self) -> dict[str, Any]:
        """The report as data: fields may be added, never renamed."""
        return {
            "symbol": self.symbol,
            "demangled": self.readable,
            "package": PACKAGE,
            "exported": list(self.exported),
            "absent": list(self.absent),
            "nearest": {version: self.readable_instead.get(name, name) for version, name in self.instead.items()},
            "built": [
                {"package": it.package, "versions": it.versions, "torch": it.torch, "exported": it.exported}
                for it in self.built
            ],
        }

    def as_text(self) -> str:
        """The report for people."""
        lines = [self.readable] if self.readable != self.symbol else []
        lines += [f"`{self.symbol}`" if lines else self.symbol]
        if not self.exported:
            lines += [
                "",
                f"no {PACKAGE} from {self.absent[0]} to {self.absent[-1]} exports it: it is not {PACKAGE}'s, or of another release",
            ]
            return "\n".join(lines + self._instead())
        lines += ["", f"exported by {PACKAGE} {spans(self.exported, self.absent)}"]
        if self.absent:
            lines += [f"not by      {PACKAGE} {spans(self.absent, self.exported)}"]
            lines += self._instead()
            lines += [
                "",
                f"so an extension that looks for it was compiled for one of the former, and the {PACKAGE} beside it is another",
            ]
        if self.built:
            lines += ["", "what is known of builds:"]
            lines += [
                f"  {it.package} {it.versions}: for {PACKAGE} {it.torch}, which {'exports' if it.exported else 'lacks'} it"
                for it in self.built
            ]
        lines += ["", "hint: which releases fit yours: `builder abi PACKAGE==VERSION --find torch`"]
        return "\n".join(lines)

    def _instead(self) -> list[str]:
        groups: dict[str, list[str]] = {}
        for version, name in self.instead.items():
            groups.setdefault(name, []).append(version)
        others = [*self.exported, *(version for version in self.absent if version not in self.instead)]
        return [
            f"  nearest in {spans(versions, others)}: {self.readable_instead.get(name, name)}"
            for name, versions in groups.items()
        ]


def spans(some: Iterable[str], others: Iterable[str]) -> str:
    """Releases as ranges: `2.6.0 to 2.7.1, 2.9.0`; a range has none of ``others`` in it."""
    runs: list[list[str]] = []
    wanted = set(some)
    for version in sorted({*wanted, *others}, key=Version):
        if version not in wanted:
            runs.append([])
        elif runs:
            runs[-1].append(version)
        else:
            runs.append([version])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs if run)


def look_up(symbol: str) -> SymbolReport:
    """Look a name up, as a linker or loader prints it. Raises `UsageError` for what is none."""
    if not symbol or not symbol.isascii() or not symbol.isprintable() or " " in symbol:
        hint = "as the loader prints it after `undefined symbol:`, mangled: `_ZN3c104cuda9SetDeviceEa`"
        raise UsageError(f"`{symbol[:100]}` is not a symbol", where="--symbol", hint=hint)
    exported: list[str] = []
    absent: list[str] = []
    instead: dict[str, str] = {}
    for version in tables.versions(PACKAGE):
        libraries = _libraries(version)
        if any(library.exports.versions(symbol) for library in libraries):
            exported.append(version)
            continue
        absent.append(version)
        if (near := _nearest(symbol, libraries)) is not None:
            instead[version] = near
    readable = demangle(sorted({symbol, *instead.values()}))
    return SymbolReport(
        symbol,
        readable.get(symbol, symbol),
        tuple(exported),
        tuple(absent),
        instead,
        readable,
        tuple(_built(exported, absent)),
    )


def exporting(symbol: str) -> list[str]:
    """The releases of torch with a library that exports a name, the oldest first."""
    return [
        version
        for version in tables.versions(PACKAGE)
        if any(library.exports.versions(symbol) for library in _libraries(version))
    ]


def _libraries(version: str) -> list[Facts]:
    """The libraries of a torch release itself: the tables have the names of all of them."""
    sha256 = next(iter(tables.files(PACKAGE, version).values()))
    own: Wheel = tables.wheels(sha256, _unknown)[0][0]
    return [own.read(file) for file in own.natives]


def _unknown(name: str, version: str, file: str) -> Facts:
    raise LookupError(f"{name} {version} {file}")


def _nearest(symbol: str, libraries: Sequence[Facts]) -> str | None:
    base = base_name(symbol)
    if base is None:
        return None
    names = [
        name
        for library in libraries
        for prefix in qualified_prefixes(symbol)
        for name in library.exports.starting(prefix)
        if base_name(name) == base
    ]
    return nearest(symbol, {base: names})


def _built(exported: Sequence[str], absent: Sequence[str]) -> Iterable[Built]:
    facts = [fact for fact in load_facts(TorchBuildFact) if fact.torch is not None and fact.package in KERNELS]
    for fact in facts if exported and absent else ():
        torch = SpecifierSet(fact.torch or "")
        there = any(torch.contains(version) for version in exported)
        if there != any(torch.contains(version) for version in absent):
            words = (fact.torch or "").removeprefix("==").removesuffix(".*")
            yield Built(fact.package, fact.versions.removeprefix("=="), words, there)
