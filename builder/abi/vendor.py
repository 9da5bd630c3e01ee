"""`builder abi` beside a torch that no index has: a vendor's build, a nightly, one from source (facts/vendor-builds.yaml).

What such a torch exports cannot be read, so nothing that looks for its names is `ok`. One thing is known of some of them:
they have the new std::string ABI. A file that needs a name with the old one is broken there; the shipped tables tell which
names those are, for the public releases changed from the old one to the new (facts/string-abi.yaml).
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from builder.abi import tables
from builder.abi.model import Exports, Extension, Facts, Known, MissingSymbol, Wheel
from builder.facts import StringAbiFact, VendorBuildFact, load_facts
from builder.smoke.link import base_name, nearest, qualified_prefixes

_OLD_STRING, _NEW_STRING = "Ss", "NSt7__cxx11"


class OldStrings:
    """Names of a provider that have the old std::string in them: the tables have a twin of each with the new one."""

    def __init__(self, package: str) -> None:
        fact = next((fact for fact in load_facts(StringAbiFact) if fact.package == package), None)
        self._old = _exports(package, fact.old) if fact else []
        self._new = _exports(package, fact.new) if fact else []

    def twin(self, symbol: str) -> str | None:
        """What a torch with the new ABI exports in place of a name with the old one; `None` for any other name."""
        base = base_name(symbol) if _OLD_STRING in symbol else None
        if base is None or not _has(self._old, symbol) or _has(self._new, symbol):
            return None
        names = [
            name
            for exports in self._new
            for prefix in qualified_prefixes(symbol)
            for name in exports.starting(prefix)
            if base_name(name) == base and _NEW_STRING in name
        ]
        return nearest(symbol, {base: names})


def _exports(package: str, version: str) -> list[Exports]:
    if version not in tables.versions(package):
        return []
    wheel = tables.wheels(next(iter(tables.files(package, version).values())), _unread)[0][0]
    return [wheel.read(file).exports for file in wheel.natives]


def _unread(name: str, version: str, file: str) -> Facts:
    raise LookupError(f"{name} {version} {file}")


def _has(several: list[Exports], symbol: str) -> bool:
    return any(exports.versions(symbol) for exports in several)


def judge(wheel: Wheel, known: Known, package: str, version: Version, fact: VendorBuildFact) -> Iterator[Extension]:
    """What is known of a wheel's native files beside such a build of ``package``."""
    build = f"{package} {version}"
    strings = OldStrings(package) if fact.new_strings else None
    for file in sorted(wheel.natives):
        facts = wheel.read(file)
        strong = [symbol.name for symbol in facts.undefined if not symbol.weak]
        owned = [name for name in strong if known.owner(name) == package]
        missing = tuple(
            MissingSymbol(name, twin, build) for name in owned if strings is not None and (twin := strings.twin(name))
        )
        reason = f"{build} is {fact.what}, and what it exports was not read: {fact.because}"
        yield Extension(
            file,
            str(wheel),
            "broken" if missing else "uncertain" if owned or facts.trouble else "ok",
            len(strong),
            missing,
            because=(f"{build} is {fact.what}, which has the new std::string ABI, and the file the old one",)
            if missing
            else (),
            reasons=(facts.trouble or reason,) if (owned or facts.trouble) and not missing else (),
            notes=(fact.hint,) if owned else (),
        )
