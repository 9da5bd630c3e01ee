"""What is to be said of a lock's native files: one finding a wheel, whatever the number of its files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from packaging.specifiers import SpecifierSet
from pydantic import JsonValue

from builder.abi import tables
from builder.abi.model import Extension
from builder.facts import BaseFact, ProviderFact, load_facts
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.lockrules import listed, named, place, satisfies, written
from builder.rulebook import Context
from builder.smoke.link import demangle, version_key
from builder.static.hints import Hints, pins
from builder.static.links import PROVIDER, Links
from builder.static.locked import Unread

SOURCE = "the dynamic tables of the wheels that the lock names"
_KNOWN = "known: "
_FOREIGN = re.compile(r"is CUDA (\d+)'s, the set is CUDA (\d+)")


def link_findings(context: Context, lock: Lock, links: Links, hints: Hints | None) -> Iterator[Finding]:
    """A finding for each wheel that has broken files, and one for each of which something is not known.

    Several wheels that were built for another torch are one matter, where there is a torch that they all fit.
    """
    broken = {
        name: _Broken(lock, links, lock.by_name[name], [item for item in found if item.verdict == "broken"])
        for name, found in links.extensions.items()
        if any(item.verdict == "broken" for item in found)
    }
    together = [name for name, each in broken.items() if each.cause == PROVIDER and not each.expected]
    fits = hints.torch_for(together) if hints is not None and len(together) > 1 else None
    if fits is not None and PROVIDER not in pins(lock, PROVIDER, together):
        held = {version for version in pins(lock, PROVIDER, together).values()}
        if not held or fits in held:
            yield _one_torch(context, lock, [broken.pop(name) for name in together], fits)
    for each in broken.values():
        yield _finding(context, lock, each, hints)
    for name, found in links.extensions.items():
        doubtful = [item for item in found if item.verdict == "uncertain"]
        # What a wheel that was not read may have is said once, with that wheel.
        if doubtful and not links.unread:
            yield _uncertain(context, lock.by_name[name], doubtful, len(found))


class _Broken:
    """A wheel with files that do not load, and why."""

    def __init__(self, lock: Lock, links: Links, artefact: Artefact, files: Sequence[Extension]) -> None:
        self.artefact, self.files = artefact, files
        self.of = len(links.extensions[artefact.name])
        known = [item for item in files if any(text.startswith(_KNOWN) for text in item.because)]
        self.expected = len(known) == len(files)
        """Whether all of it is in the ledger (facts/exceptions.yaml)."""
        # Of the others, what is in the ledger is not the matter.
        shown = files if self.expected else [item for item in files if item not in known or item.missing_symbols]
        self.symbols = list({each.symbol: each for item in shown for each in item.missing_symbols}.values())
        self.symbols.sort(key=lambda each: each.nearest is None)
        self.libraries = list(
            dict.fromkeys(n for item in shown if item not in known or self.expected for n in item.missing_libraries)
        )
        self.versions = list(dict.fromkeys(n for item in shown for n in item.missing_versions))
        self.lacking = list(dict.fromkeys(each.lacking for each in self.symbols if each.lacking))
        self.because = list(dict.fromkeys(text for item in shown for text in item.because))
        self.foreign = next((found for text in self.because if (found := _FOREIGN.search(text))), None)
        names = [each.symbol for each in self.symbols]
        self.owner = _owner(lock, links, artefact, names) if names and not self.lacking else None
        self.plain = demangle(sorted({t for each in self.symbols for t in (each.symbol, each.nearest) if t}))

    @property
    def cause(self) -> str:
        """`cuda`, `base`, `library`, or the distribution that lacks what is needed."""
        if self.foreign is not None:
            return "cuda"
        if self.versions:
            return "base"
        if self.lacking:
            return self.lacking[0].partition(" ")[0]
        return self.owner.name if self.owner is not None else "library"

    @property
    def message(self) -> str:
        """What is wrong, in a line."""
        name = named(self.artefact)
        if self.foreign is not None:
            return f"{name} is linked to CUDA {self.foreign[1]}, the set is CUDA {self.foreign[2]}"
        if self.versions:
            return f"{name} needs {listed(self.versions)}, which the set has not"
        if self.lacking:
            return f"{name} does not load beside {listed(self.lacking)}"
        if self.owner is not None:
            return f"{name} does not load beside {named(self.owner)}"
        if self.libraries:
            return f"{name} needs {_first([f'`{lib}`' for lib in self.libraries])}, which no wheel of the lock has"
        return f"{name} does not load in this set"

    @property
    def words(self) -> str:
        """How much of it, and what it lacks."""
        lacks = self.libraries if self.foreign is not None or not self.symbols else []
        words = [f"nothing in the set has {_first([f'`{lib}`' for lib in lacks])}"] if lacks else []
        words += [text for text in self.because if "at most" in text or "does not define" in text]
        words += [self.names] if self.symbols else []
        if self.expected:
            words += [text.removeprefix(_KNOWN) for text in self.because if text.startswith(_KNOWN)]
        what = f"{len(self.files)} of its {self.of} native files" if self.of > 1 else "its native file"
        return f"{what} cannot be loaded: {'; '.join(words)}"

    @property
    def names(self) -> str:
        """The first name that is missing, what there is instead, and how many more."""
        first, rest = self.symbols[0], len(self.symbols) - 1
        text = f"`{self.plain[first.symbol]}` is not there"
        text += f", the nearest is `{self.plain[first.nearest]}`" if first.nearest else ""
        return text + (f"; and {rest} more name{'s' if rest > 1 else ''}" if rest else "")

    @property
    def evidence(self) -> dict[str, JsonValue]:
        """All of it, as data."""
        return {
            "cause": self.cause,
            "files": [item.file for item in self.files],
            "symbols": [
                {
                    "symbol": each.symbol,
                    "demangled": self.plain[each.symbol],
                    "nearest": self.plain[each.nearest] if each.nearest else None,
                }
                for each in self.symbols
            ],
            "libraries": list(self.libraries),
            "versions": list(self.versions),
            "lacking": list(self.lacking),
        }


def _first(words: Sequence[str], most: int = 4) -> str:
    return (
        listed(list(words))
        if len(words) <= most
        else f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"
    )


def _finding(context: Context, lock: Lock, broken: _Broken, hints: Hints | None) -> Finding:
    hint, at = ("", "") if broken.expected else _hint(context, lock, broken, hints)
    near = [broken.owner.name] if broken.owner is not None else []
    return Finding(
        rule="link-broken",
        severity=Severity.WARNING if broken.expected else Severity.ERROR,
        subject=broken.artefact.name,
        message=broken.message,
        because=broken.words,
        hint=hint,
        where=at or place(context, broken.artefact.name, *near, PROVIDER),
        source=SOURCE,
        evidence=broken.evidence,
    )


def _one_torch(context: Context, lock: Lock, broken: Sequence[_Broken], fits: str) -> Finding:
    """Wheels that fail for one reason: the torch that the lock has."""
    torch = lock.by_name[PROVIDER]
    names = listed([named(each.artefact) for each in broken])
    return Finding(
        rule="link-broken",
        severity=Severity.ERROR,
        subject=PROVIDER,
        message=f"{names} do not load beside {named(torch)}",
        because=f"native files that cannot be loaded: {listed([f'{len(each.files)} of {each.of} of {each.artefact.name}' for each in broken])}; "
        f"{broken[0].names}",
        hint=f"{_write(context, PROVIDER, fits)}, which they fit, and lock again",
        where=place(context, PROVIDER),
        source=SOURCE,
        evidence={"cause": PROVIDER, "wheels": {each.artefact.name: each.evidence for each in broken}},
    )


def _owner(lock: Lock, links: Links, artefact: Artefact, symbols: Sequence[str]) -> Artefact | None:
    """The wheel whose library would have a name, by the form of the name (facts/providers.yaml)."""
    libraries = [
        library
        for fact in load_facts(ProviderFact)
        for library, pattern in fact.names.items()
        if any(re.search(pattern, symbol) for symbol in symbols)
    ]
    for wheel in links.wheels:
        if wheel.name != artefact.name and any(
            fnmatchcase(file.rpartition("/")[2], library) for file in wheel.natives for library in libraries
        ):
            return lock.by_name.get(wheel.name)
    return None


def _hint(context: Context, lock: Lock, broken: _Broken, hints: Hints | None) -> tuple[str, str]:
    """What to write, and where; empty where nothing is known."""
    artefact, owner, matrix = broken.artefact, broken.owner, context.loaded.matrix
    again = f"lock again: `builder lock {matrix.name}`"
    if owner is not None and (wanted := pins(lock, owner.name).get(artefact.name)):
        for i, override in enumerate(matrix.overrides):
            if override.package == owner.name:
                text = f"write `ours: {wanted}` in the override of {owner.name}, or remove it, and {again}"
                return text, context.loaded.where("overrides", i, "ours")
        return f"{again}; {artefact.name} requires {owner.name} {wanted}", ""
    if broken.cause == "base":
        bases = bases_with(broken.versions)
        return f"take {' or '.join(bases)}, or a release of {artefact.name} for an older system" if bases else "", ""
    if broken.cause == "library" and not broken.symbols:
        return f"add the package that has it to `extras`, or leave {artefact.name} out; then {again}", ""
    if broken.cause not in (PROVIDER, "cuda") or hints is None:
        return "", ""
    torch = lock.version_of(PROVIDER) or ""
    held = [
        name
        for name, version in pins(lock, PROVIDER, [artefact.name]).items()
        if satisfies(torch, SpecifierSet(f"=={version}"))
    ]
    words = []
    if fitting := hints.release_of(artefact.name):
        by = [name for name, version in pins(lock, artefact.name).items() if version == fitting]
        if by and written(matrix, artefact.name) is None:
            return f"{again}; {named(lock.by_name[by[0]])} requires {artefact.name} {fitting}", ""
        words.append(_write(context, artefact.name, fitting) + (f", which {by[0]} requires" if by else ""))
    # Where others pin this torch, it is not torch that has to change.
    if not (held and words) and (version := hints.torch_for([artefact.name])):
        words.append(_write(context, PROVIDER, version))
    if not words:
        text = f"no release of {artefact.name} near {artefact.version} fits, and no torch from {tables.versions(PROVIDER)[0]} on"
        return f"{text}: leave {artefact.name} out", ""
    return f"{', or '.join(words)}; then {again}", ""


def bases_with(versions: Sequence[str]) -> list[str]:
    """The bases whose libraries go up to these symbol versions, as a matrix names them (facts/bases.yaml)."""
    wanted = [version.rpartition("_")[::2] for version in versions]
    return sorted(
        f"{fact.distribution} {fact.release}"
        for fact in load_facts(BaseFact)
        if fact.distribution in ("debian", "ubuntu")
        and all(f in fact.versions and version_key(number) <= version_key(fact.versions[f]) for f, number in wanted)
    )


def _write(context: Context, package: str, version: str) -> str:
    """An edit of the matrix that sets a release."""
    found = written(context.loaded.matrix, package)
    if found is not None and found[0] == "stack":
        direct = any(file.name == package for file in context.loaded.matrix.files)
        return f"write `{package}: {version}` under `stack`" + (", with its wheel under `files`" if direct else "")
    if found is not None and found[0] == "extras":
        return f"write `{package}=={version}` under `extras`"
    return f"add `{package}=={version}` to `extras`"


def _uncertain(context: Context, artefact: Artefact, files: Sequence[Extension], of: int) -> Finding:
    reasons = list(dict.fromkeys(reason for item in files for reason in item.reasons))
    more = f"; and {len(reasons) - 1} more of that kind" if len(reasons) > 1 else ""
    what = f"{len(files)} of its {of} native files" if of > 1 else "its native file"
    return Finding(
        rule="link-uncertain",
        severity=Severity.NOTE,
        subject=artefact.name,
        message=f"whether {named(artefact)} loads is not known: {what}",
        because=f"{reasons[0]}{more}" if reasons else "",
        hint=f"the load test of a build tells: `builder build {context.loaded.matrix.name}`",
        where=place(context, artefact.name),
        source=SOURCE,
        evidence={"files": [item.file for item in files], "reasons": list(reasons)},
    )


def unread_findings(context: Context, links: Links) -> Iterator[Finding]:
    """The wheels that were not looked at, by what stood in the way; and what hangs on them."""
    groups: dict[tuple[str, bool], list[Unread]] = {}
    for each in links.unread:
        groups.setdefault((each.because, each.other), []).append(each)
    doubtful = {
        name: [item.file for item in found if item.verdict == "uncertain"]
        for name, found in links.extensions.items()
        if any(item.verdict == "uncertain" for item in found)
    }
    for (because, other), group in groups.items():
        names = [each.artefact.name for each in group]
        with_it = PROVIDER in names or (group == list(links.unread) and doubtful)
        hang = (
            f"; so nothing is known of {_some(list(doubtful))}, which may need {'it' if len(names) == 1 else 'them'}"
            if with_it and doubtful
            else ""
        )
        yield Finding(
            rule="wheel-replaced" if other else "wheel-unread",
            severity=Severity.ERROR if other else Severity.NOTE,
            subject=names[0],
            message=f"{listed([named(each.artefact) for each in group])}: "
            + ("not the file that the lock pins" if other else "not looked at"),
            because=f"{because}{hang}",
            hint=_way(context, group),
            where=place(context, *names),
            source="the lock",
            evidence={"wheels": list(names), "files": {k: list(v) for k, v in doubtful.items()} if with_it else {}},
        )


def _way(context: Context, group: Sequence[Unread]) -> str:
    if group[0].other and group[0].artefact.index is not None:
        return f"lock again: `builder lock {context.loaded.matrix.name}`"
    if group[0].other:
        return f"take what is there now: `builder lock {context.loaded.matrix.name} --repin {group[0].artefact.name}`"
    if group[0].artefact.index is not None:
        return "see that the index answers; another is named with `--index NAME=URL`"
    files = listed([f"`{each.artefact.file}`" for each in group])
    return f"put {files} into a folder and name it: `--wheels DIR`"


def _some(names: Sequence[str], most: int = 4) -> str:
    if len(names) <= most:
        return listed(list(names))
    return f"{', '.join(names[: most - 1])} and {len(names) - most + 1} more wheels"


def doubts(links: Links) -> dict[str, Any]:
    """For the JSON: files by verdict."""
    verdicts = [item.verdict for found in links.extensions.values() for item in found]
    return {word: verdicts.count(word) for word in ("ok", "broken", "uncertain")}
