"""Would the loader accept the native files of a set of wheels: from their dynamic tables alone, nothing installed.

The model is the smoke test's, laid over the wheels as if they were installed (`builder.abi.process`): what `import torch`
has loaded, RPATH and RUNPATH, then the base's folders. A library that nobody asks is never read.

`broken` is proof, `ok` is not: that every name resolves says nothing of layouts. What is not known for certain makes a
file `uncertain` and never anything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from builder.abi import variants
from builder.abi.model import Extension, Known, MissingSymbol, Wheel
from builder.abi.process import SITE, Files, Imported, Member, Process, System
from builder.facts import ProviderFact
from builder.nativefacts import EXPORTED, NEEDED, UNDEFINED, VERDEF, Undefined
from builder.smoke.link import base_name, nearest, qualified_prefixes, version_key
from builder.smoke.loader import Object
from builder.smoke.tree import is_extension
from builder.tags import MACHINES

# Where auditwheel puts what a wheel brings along: found by the RPATH of the file that opens them.
_BUNDLE = re.compile(r"[^/]+\.libs/")
_CPYTHON = re.compile(r"\.cpython-3(\d+)-")
# Names of the interpreter, which every extension leaves undefined.
_INTERPRETER = re.compile(r"_?Py[A-Z_]")
# Of C++ names the base can only have those of its own C++ library.
_STANDARD = re.compile(r"_Z(T[VTISWH]|GV)?N?[rVK]*[RO]?(S[tabsiod]|9__gnu_cxx|10__cxxabiv1|nw|na|dl|da)")


@dataclass
class _File:
    """A file while it is being judged."""

    member: Member
    direct: list[Object] = field(default_factory=list)
    libraries: list[str] = field(default_factory=list)
    sought: list[str] = field(default_factory=list)
    """Those that may be in a wheel that nobody named."""
    proven: bool = False
    """Whether one of the libraries is certainly needed and certainly not there."""
    lacking: list[str] = field(default_factory=list)
    """Packages that are not in the set, of which it needs a library."""
    contested: bool = False
    """Whether another wheel brings the same file."""
    packages: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    symbols: list[MissingSymbol] = field(default_factory=list)
    because: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    absent: set[str] = field(default_factory=set)
    """Libraries that are not found, whatever that means."""


class Judge:
    """Judges files of a set of wheels."""

    def __init__(self, wheels: Sequence[Wheel], known: Known) -> None:
        self.wheels, self.known = wheels, known
        system = {*known.base.libraries, *known.base.packages, *known.os_packages, *known.drivers}
        self._files = Files(wheels, system, known.machine)
        self._imported = Imported(self._files, known.providers)
        self._by_name = {wheel.name: wheel for wheel in wheels}

    def judge(self, wheel: Wheel) -> list[Extension]:
        """Every native file of a wheel of the set, in order."""
        members = [Member(file, wheel, self.known.machine) for file in sorted(wheel.natives)]
        # As if it were installed last, where another wheel brings one of its files, too.
        self._files.lay(members)
        judged = self._excused(wheel, [self._judge(member) for member in members])
        foreign = {each.file for each in members if self._is_foreign(each) and not is_extension(each.file)}
        if len(foreign) < len(members):
            judged = [_unloaded(item, self.known.machine) if item.file in foreign else item for item in judged]
        return variants.settle(wheel, judged, self._releases)

    def unopened(self, wheel: Wheel) -> frozenset[str]:
        """The files of a wheel that its package never opens, as they are for another CUDA than torch's, or another torch."""
        return variants.unopened(wheel, self._releases)

    @property
    def _releases(self) -> dict[str, str]:
        torch = self._by_name.get("torch")
        return {"cuda": self._cuda_release, "torch": ".".join(torch.version.split(".")[:2]) if torch else ""}

    def _is_foreign(self, member: Member) -> bool:
        """Whether a file is for another machine."""
        return member.facts.machine in MACHINES.values() and member.facts.machine != self.known.machine

    def _judge(self, member: Member) -> Extension:
        file = _File(member)
        facts = member.facts
        if facts.trouble or UNDEFINED in facts.uncertain:
            file.reasons.append(facts.trouble or "not all names that it needs could be read")
        if self._is_foreign(member):
            file.proven = True
            file.because.append(f"it is for {facts.machine}, and the target is {self.known.machine}")
        loader = self._process(member)
        missing: list[tuple[str, Object]] = []
        root, *file.direct = loader.walk(member.path, missing, lambda item: item.path == member.path)
        for name, _ in missing:
            self._missing_library(file, name)
        self._versions(file)
        looked_at = self._symbols(file, loader, root)
        self._remarks(file)
        broken = file.proven or file.versions or file.symbols
        return Extension(
            member.file,
            str(member.wheel),
            "uncertain" if file.contested or (file.reasons and not broken) else "broken" if broken else "ok",
            looked_at,
            tuple(file.symbols),
            tuple(file.libraries),
            tuple(file.versions),
            sought=tuple(file.sought),
            lacking=tuple(dict.fromkeys(file.lacking)),
            packages=tuple(dict.fromkeys(file.packages)),
            because=tuple(dict.fromkeys(file.because)),
            reasons=tuple(dict.fromkeys(file.reasons)),
            notes=tuple(dict.fromkeys(file.notes)),
        )

    def _process(self, member: Member) -> Process:
        first = [item for item, _ in self._companions(member)]
        beside = member.path.rpartition("/")[0] if _BUNDLE.match(member.file) else ""
        return Process(self._files, self._imported, first, beside)

    def _companions(self, member: Member) -> list[tuple[Member, bool]]:
        """What its own package opens before this file, with whether it does so RTLD_GLOBAL (facts: `loaded_first`)."""
        found = []
        for fact in self.known.loaded_first:
            if fact["distribution"] == member.wheel.name and any(fnmatchcase(member.file, g) for g in fact["files"]):
                for item in self._files.members.values():
                    if any(fnmatchcase(item.file, glob) for glob in fact["libraries"]):
                        found.append((item, bool(fact.get("global"))))
        return found

    # Libraries and their versions.

    def _missing_library(self, file: _File, name: str) -> None:
        file.absent.add(name)
        for fact in self.known.providers:
            if name in _own(fact) and fact.distribution not in self._by_name:
                file.lacking.append(fact.distribution)
                file.reasons.append(
                    f"`{name}` is {fact.distribution}'s, and the set has no {fact.distribution}: none is named or required"
                )
                return
        if there := self._files.named.get(name):
            file.reasons.append(
                f"`{there[0].file}` of {there[0].wheel} is `{name}`, and the loader does not look there: "
                "it is found if something opens it before"
            )
            return
        file.libraries.append(name)
        facts = file.member.facts
        if NEEDED in facts.uncertain and name not in {library for library, _ in facts.verneed}:
            file.reasons.append(f"that it needs `{name}`, which is not there, could not be read for certain")
            return
        if provider := next((fact for fact in self.known.providers if name in _own(fact)), None):
            wheel = self._by_name[provider.distribution]
            built = ": it was built without CUDA" if "cuda" in name else ""
            file.proven = True
            file.because.append(f"`{name}` is {wheel.name}'s, and {wheel} does not have it{built}")
            return
        stem, _, number = name.partition(".so.")
        major = self.known.cuda_sonames.get(f"{stem}.so", {}).get(number.split(".")[0])
        if isinstance(major, int) and self.cuda is not None and major != self.cuda:
            file.proven = True
            file.because.append(f"`{name}` is CUDA {major}'s, the set is CUDA {self.cuda}")
            return
        file.sought.append(name)
        if self.known.whole and self._in_wheels_alone(name):
            file.proven = True
        elif major is None and (number or self.known.whole):
            file.reasons.append(f"`{name}` is in no wheel of the set: whether the base has it is not known")
        else:
            file.reasons.append(f"`{name}` is in no wheel of the set")

    def _in_wheels_alone(self, library: str) -> bool:
        """Whether the facts have a library as that of a package on the index: one that a system has may lack a number, too."""
        return any(fnmatchcase(library, pattern) for fact in self.known.providers for pattern in fact.libraries) or any(
            path.rpartition("/")[2] == library for fact in self.known.loaded_first for path in fact["libraries"]
        )

    @cached_property
    def cuda(self) -> int | None:
        """The CUDA major of the set's runtime; None where there is none, or two."""
        majors = {
            major
            for number, major in self.known.cuda_sonames.get("libcudart.so", {}).items()
            if f"libcudart.so.{number}" in self._files.named
        }
        return majors.pop() if len(majors) == 1 else None

    @cached_property
    def _cuda_release(self) -> str:
        """CUDA's release, as in 13.0: that of the runtime which torch pins; empty where there is none, or two."""
        runtimes = self._files.named.get(f"libcudart.so.{self.cuda}", ()) if self.cuda is not None else ()
        numbers = (re.match(r"\d+\.\d+", item.wheel.version) for item in runtimes)
        return next((found[0] for found in numbers if found), "")

    def _versions(self, file: _File) -> None:
        by_name = {item.name: item for item in file.direct}
        for library, version in file.member.facts.verneed:
            item = by_name.get(library)
            family = version.rpartition("_")[0]
            if isinstance(item, System) and library in self.known.base.libraries:
                if not self.known.reached(version):
                    newest = f"{family}_{self.known.base.versions[family]}"
                    file.versions.append(version)
                    file.because.append(f"`{library}` of {self.known.base.title} has {newest} at most")
            elif isinstance(item, Member) and VERDEF not in item.facts.uncertain and item.facts.verdef:
                absent = version not in item.facts.verdef
                file.versions += [version] * absent
                file.because += [f"`{library}` of {item.wheel} does not define {version}"] * absent

    # Symbols.

    def _symbols(self, file: _File, loader: Process, root: Object) -> int:
        strong = [symbol for symbol in file.member.facts.undefined if not symbol.weak]
        by_name = {item.name: item for item in file.direct}
        gone = set(file.versions)
        open_: list[Undefined] = []
        for symbol in strong:
            if _INTERPRETER.match(symbol.name) or symbol.version in gone:
                continue
            place = by_name.get(symbol.library or "")
            if place is None and symbol.library in file.absent:
                continue  # it is the library that is missing
            if isinstance(place, System) or any(
                re.search(pattern, symbol.name) for soname, pattern in self.known.drivers.items() if soname in by_name
            ):
                continue
            if isinstance(place, Member) and place.has(symbol.name, symbol.version):
                continue
            if symbol.version is None and not self.known.owner(symbol.name) and self.known.in_base(symbol.name):
                continue
            if not self._elsewhere_than(file.absent, symbol):
                continue  # it may be in the library that is missing
            open_.append(symbol)
        if open_:
            self._search(file, loader, root, open_)
        return len(strong)

    def _search(self, file: _File, loader: Process, root: Object, wanted: list[Undefined]) -> None:
        """Look for symbols in what the loader would search, library after library, until all are found."""
        looked: list[Member] = []
        missing: list[tuple[str, Object]] = []
        for item in self._scope(file, loader, root, lambda: wanted, missing):
            looked.append(item)
            wanted[:] = [symbol for symbol in wanted if not item.has(symbol.name, symbol.version)]
            if not wanted:
                return
        absent = {name for name, _ in missing}
        doubtful = [item for item in looked if EXPORTED in item.facts.uncertain]
        for symbol in wanted:
            owner = self.known.owner(symbol.name)
            provider = self._by_name.get(owner) if owner else None
            lacking = str(provider) if provider else ""
            expected = [item for item in doubtful if owner is None or item.wheel.name not in self._elsewhere]
            if expected:
                file.reasons.append(f"`{expected[0].file}` of {expected[0].wheel} could not be read to the end")
            elif not self._elsewhere_than(absent, symbol):
                name, needs = missing[0]
                file.reasons.append(f"`{symbol.name}` may be in `{name}`, which `{needs.name}` needs and does not find")
            elif not (owner or symbol.library or _cpp(symbol.name) or self._at_home(symbol.name, looked)):
                file.reasons.append(
                    f"`{symbol.name}` is in no library of the set that it needs: whether the base has it is not known"
                )
            else:
                near = _nearest(symbol.name, looked)
                file.symbols.append(MissingSymbol(symbol.name, near, lacking))

    def _at_home(self, symbol: str, looked: Iterable[Member]) -> bool:
        """Whether the library that a name belongs to was looked into."""
        libraries = self._libraries(symbol)
        return any(fnmatchcase(item.name, library) for item in looked for library in libraries)

    def _elsewhere_than(self, absent: Collection[str], symbol: Undefined) -> bool:
        """Whether a symbol is certainly not of one of these libraries, which are not found."""
        if not absent:
            return True
        if symbol.library is not None:
            return symbol.library not in absent
        owner = self.known.owner(symbol.name)
        own = {name for fact in self.known.providers if fact.distribution == owner for name in _own(fact)}
        return owner is not None and own.isdisjoint(absent)

    @cached_property
    def _elsewhere(self) -> frozenset[str]:
        """Distributions of the set that no provider's names are in."""
        patterns = [pattern for fact in self.known.providers for pattern in fact.elsewhere]
        return frozenset(w.name for w in self.wheels if any(fnmatchcase(w.name, pattern) for pattern in patterns))

    def _libraries(self, symbol: str) -> list[str]:
        """Patterns of the libraries that a name belongs to, as the facts have it."""
        return [
            library
            for fact in self.known.providers
            for library, pattern in fact.names.items()
            if re.search(pattern, symbol)
        ]

    @cached_property
    def _cost(self) -> Mapping[str, int]:
        """Ranks of the providers' libraries: cheap ones are looked into first."""
        return {root: rank for fact in self.known.providers for rank, root in enumerate(fact.roots)}

    def _scope(
        self,
        file: _File,
        loader: Process,
        root: Object,
        wanted: Callable[[], Iterable[Undefined]],
        missing: list[tuple[str, Object]],
    ) -> Iterator[Member]:
        """The files of wheels in which the loader looks, those first that cost least, and those that could have a name."""

        def useful(item: Object) -> bool:
            """Whether an open name may be in there."""
            if not isinstance(item, Member):
                return False
            return item.wheel.name not in self._elsewhere or any(
                symbol.library == item.name
                or any(fnmatchcase(item.name, library) for library in self._libraries(symbol.name))
                or (_cpp(symbol.name) and self.known.owner(symbol.name) is None)
                for symbol in wanted()
            )

        seen = {root.path}
        direct = [item for item in file.direct if isinstance(item, Member)]
        own = file.member.wheel.name
        direct.sort(key=lambda item: (item.wheel.name != own, self._cost.get(item.file, 0)))
        companions = [item for item, is_global in self._companions(file.member) if is_global]
        for item in self._in_order(direct, companions, loader, root, useful, missing):
            if item.path not in seen and isinstance(item, Member) and useful(item):
                seen.add(item.path)
                yield item
        # A name that is nobody's may be in a library that the file names itself, whose ever that is.
        for item in (*direct, *companions):
            if item.path not in seen and any(self._nobodys(symbol.name) for symbol in wanted()):
                seen.add(item.path)
                yield item

    def _nobodys(self, symbol: str) -> bool:
        """Whether the facts say of no package that a name is its."""
        return self.known.owner(symbol) is None and not self._libraries(symbol)

    def _in_order(
        self,
        direct: Sequence[Object],
        companions: Sequence[Member],
        loader: Process,
        root: Object,
        useful: Callable[[Object], bool],
        missing: list[tuple[str, Object]],
    ) -> Iterator[Object]:
        yield from direct
        yield from companions
        for companion in companions:
            yield from loader.walk(companion.path, missing, useful)
        yield from loader.walk(root.path, missing, useful)
        yield from self._imported.opened_global()
        if isinstance(root, Member):
            yield from self._imported.scope_of(root)

    # What else there is to say.

    def _remarks(self, file: _File) -> None:
        member = file.member
        owners = self._files.owners[member.file]
        shared = any(fnmatchcase(member.file, glob) for fact in self.known.shared_files for glob in fact["files"])
        if len(owners) > 1 and not shared:
            both = " and ".join(map(str, owners))
            file.reasons.append(f"{both} both bring `{member.file}`: the one that is installed last stays")
            file.contested = True
        for item in file.direct:
            package = self.known.base.packages.get(item.name) or self.known.os_packages.get(item.name)
            if package and isinstance(item, System) and item.name not in self.known.base.libraries:
                file.packages.append(package)
        file.notes += [
            f"needs `{name}` when it is opened: the driver's, so no RUN step of a build imports it without a stub"
            for name in member.facts.needed
            if name in self.known.drivers and NEEDED not in member.facts.uncertain
        ]
        numbers = [version_key(version)[1] for _, version in member.facts.verneed if re.match(r"GLIBC_2\.\d", version)]
        needs, promised = max(numbers, default=0), member.wheel.promised
        if promised is not None and needs > promised:
            file.notes.append(f"needs GLIBC_2.{needs}, and the wheel's tag promises glibc 2.{promised} to do")
        if (built := _CPYTHON.search(member.file)) and f"3.{built[1]}" != self.known.python:
            file.notes.append(f"is built for CPython 3.{built[1]}: Python {self.known.python} does not find it by name")

    # Files that fail by design (design, decision 9).

    def _excused(self, wheel: Wheel, found: list[Extension]) -> list[Extension]:
        entries = [(item, self._entry(wheel, item)) for item in found]
        spared = any(item.verdict == "ok" for item in found)
        judged = []
        for item, entry in entries:
            consequence = entry["consequence"] if entry is not None else ""
            # One of several that stand in for each other, or none that anybody opens; else it is the package's loss.
            if consequence and (spared or consequence.startswith("none")):
                item = replace(item, verdict="ok", by_design=consequence, sought=(), because=(), reasons=())
            elif consequence:
                item = replace(item, because=(*item.because, f"known: {consequence}"))
            judged.append(item)
        return judged

    def _entry(self, wheel: Wheel, item: Extension) -> Mapping[str, Any] | None:
        """The entry of the ledger that has what a file lacks."""
        symbols = [missing.symbol for missing in item.missing_symbols]
        libraries = list(item.missing_libraries)
        if item.verdict == "uncertain":
            # What an OS package may bring is not told as missing, and its names are not known.
            needed = self._files.members[f"{SITE}/{item.file}"].facts.needed
            libraries += [name for name in needed if name in self.known.base.packages or name in self.known.os_packages]
        check, names = ("symbols", symbols) if symbols else ("needed", libraries)
        for entry in self.known.exceptions:
            if (
                entry["distribution"] == wheel.name
                and fnmatchcase(item.file, entry["file"])
                and (entry.get("when") or {}).get("cuda", self.cuda) == self.cuda
                and check in entry["checks"]
                and any(entry["words"] in name for name in names)
                and not item.missing_versions
            ):
                return entry
        return None


def _unloaded(item: Extension, machine: str) -> Extension:
    """A file for another machine, beside those for this one: CUTLASS's runtime to link against for aarch64."""
    return Extension(item.file, item.distribution, "ok", 0, by_design=f"none; it is for another machine than {machine}")


def _own(fact: ProviderFact) -> set[str]:
    """The names of a provider's own libraries."""
    return {root.rpartition("/")[2] for root in fact.roots}


def _cpp(name: str) -> bool:
    """Whether a name is C++'s, and not the C++ library's own: then no library of the base has it."""
    return name.startswith("_Z") and not _STANDARD.match(name)


def _nearest(symbol: str, looked: Iterable[Member]) -> str | None:
    base = base_name(symbol)
    if base is None:
        return None
    names = [
        name
        for item in looked
        for prefix in qualified_prefixes(symbol)
        for name in item.facts.exports.starting(prefix)
        if base_name(name) == base
    ]
    return nearest(symbol, {base: names})
