"""`builder abi`: do the native files of these releases fit together, and with `--find`, which releases of a package do."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.abi import tables
from builder.abi.judge import Judge
from builder.abi.model import Exports, Extension, Facts, Known, Wheel
from builder.abi.report import Candidate, Report
from builder.abi.wheels import Index, Release, Target, parse, pin, resolve
from builder.errors import UsageError
from builder.facts import BaseFact, ProviderFact, VendorBuildFact, load_facts
from builder.ledger import applying, exceptions, smoke_facts
from builder.members import Members
from builder.nativefacts import PARTS, ElfFacts
from builder.settings import Settings
from builder.tags import glibc_needed, is_native, machine_of
from builder.vendors import vendor_build

CANDIDATES = 12
"""Releases that `--find` looks at where it is not told which: the newest."""

FURTHER = 40
"""Packages that are looked up beyond what is named, where a library is still missing."""

_NO_MORE = object()

WORKERS = 8
"""Wheels that are looked up at a time: what one costs is latency."""

CUDA_PINS = "cuda-toolkit"
"""The distribution by which torch pins CUDA from 13 on: it has extras, and no files."""

_DATA = re.compile(r"[^/]+\.data/(purelib|platlib)/(.+)")


class _Listed(Exports):
    """The names in facts that were read."""

    def __init__(self, facts: ElfFacts) -> None:
        self._facts = facts

    def versions(self, name: str) -> Sequence[str | None]:
        return self._facts.exports.get(name, ())

    def starting(self, prefix: str) -> Iterable[str]:
        # Asked for each missing symbol in each round, of libraries with 200,000 names.
        return self._sorted[bisect_left(self._sorted, prefix) : bisect_left(self._sorted, prefix + chr(sys.maxunicode))]

    @cached_property
    def _sorted(self) -> list[str]:
        return sorted(self._facts.exports)


def facts_of(read: ElfFacts | None, trouble: str) -> Facts:
    """The facts of a native member as the verdict takes them."""
    if read is None:
        return Facts(None, (), (), (), (), (), (), _Listed(ElfFacts("", "")), PARTS, trouble)
    return Facts(
        read.soname,
        read.needed,
        read.rpath,
        read.runpath,
        read.verneed,
        read.verdef,
        read.undefined,
        _Listed(read),
        read.uncertain,
        machine=read.machine,
    )


def wheel_of(release: Release, members: Members, machine: str) -> Wheel:
    """A wheel whose facts are read when they are asked for; ``machine`` is the target's."""
    places = {installed(member): member for member in members.names}
    read: dict[str, Facts] = {}

    def facts(file: str) -> Facts:
        if file not in read:
            native = members.read([places[file]])[places[file]]
            read[file] = facts_of(native.facts, native.trouble)
        return read[file]

    glibc = glibc_needed(release.file, machine) or (0, 0)
    return Wheel(release.name, release.version, tuple(places), facts, glibc[1] or None)


def installed(member: str) -> str:
    """Where a member goes, relative to site-packages."""
    found = _DATA.fullmatch(member)
    return found[2] if found else member


class Question:
    """What one command asks. Wheels that were opened once serve for every candidate."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self._settings, self.target = settings, target
        self.index = Index(settings, target)
        self._wheels: dict[str, Wheel] = {}
        self._providers = load_facts(ProviderFact)
        self._judged: dict[tuple[str, ...], list[Extension]] = {}

    def wheel(self, release: Release, *, whole: bool = False) -> Wheel:
        """The wheel of a release; ``whole`` says that all of its files will be asked for."""
        if release.file not in self._wheels:
            members = self.index.members(release)
            if whole and members.names:
                members.read()
            self._wheels[release.file] = wheel_of(release, members, self.target.machine)
        return self._wheels[release.file]

    # The set.

    def providers(self, pins: dict[str, Version], others: Sequence[Release]) -> list[Wheel]:
        """torch, where it is named or required by the others, and what it pins itself."""
        found: list[Wheel] = []
        for fact in self._providers:
            version = pins.get(fact.distribution)
            if version is None:
                wanted = self._required(others, fact.distribution)
                release = self.index.newest(fact.distribution, wanted) if wanted is not None else None
                version = Version(release.version) if release else None
            if version is None:
                continue
            release = self.index.release(fact.distribution, version)
            if shipped := tables.wheels(release.sha256, self.from_index) if others else []:
                for wheel, file, size in shipped:
                    found.append(wheel)
                    self.index.count(file, size)
                continue
            found.append(self.wheel(release))
            found += [self.wheel(item) for item in self.pinned(release, pins, fact)]
        return found

    def from_index(self, name: str, version: str, file: str) -> Facts:
        """A library that a table names and says no more of."""
        return self.wheel(self.index.release(name, Version(version))).read(file)

    def _required(self, named: Iterable[Release], distribution: str) -> SpecifierSet | None:
        specifier = None
        for release in named:
            for requirement in self.index.requires(release):
                if requirement.name == distribution:
                    specifier = requirement.specifier & (specifier or SpecifierSet())
        return specifier

    def pinned(self, release: Release, pins: dict[str, Version], fact: ProviderFact) -> list[Release]:
        """What a provider requires of the distributions that have none of its names: CUDA's, as a rule."""
        found: dict[str, Release] = {}
        queue = [(release, frozenset[str]())]
        with ThreadPoolExecutor(WORKERS) as pool:
            while queue:
                wanted: dict[str, Requirement] = {}
                for item, extras in queue:
                    for requirement in self.index.requires(item, extras):
                        # cuda-toolkit has nothing but pins of them, under extras.
                        if requirement.name not in found and _pinned_by(fact, requirement.name):
                            wanted.setdefault(requirement.name, requirement)
                got = pool.map(lambda item: self._release(item, pins), wanted.values())
                queue = []
                for requirement, one in zip(wanted.values(), got, strict=True):
                    if one is not None:
                        found[one.name] = one
                        queue.append((one, frozenset(requirement.extras)))
                queue = [item for item in queue if item[0].name == CUDA_PINS]
            releases = [item for name, item in sorted(found.items()) if name != CUDA_PINS]
            list(pool.map(self.wheel, releases))
        return releases

    def _release(self, requirement: Requirement, pins: dict[str, Version]) -> Release | None:
        version = pins.get(requirement.name) or pin(requirement)
        if version is not None:
            return self.index.release(requirement.name, version)
        return self.index.newest(requirement.name, requirement.specifier)

    # The verdict.

    def known(self, wheels: Iterable[Wheel], *, whole: bool) -> Known:
        """The facts, for these wheels."""
        said = smoke_facts()
        versions = {wheel.name: wheel.version for wheel in wheels}
        return Known(
            base=self.target.base,
            python=self.target.python,
            providers=self._providers,
            drivers={name: str(fact["symbols"]) for name, fact in said["driver_libraries"].items()},
            os_packages=said["os_packages"],
            cuda_sonames=said["cuda_sonames"],
            owners=said["symbol_owners"],
            loaded_first=said.get("loaded_first", ()),
            shared_files=said.get("shared_files", ()),
            whole=whole,
            # They were read on x86_64.
            base_exports=tables.base_exports() if self.target.machine == "x86_64" else {},
            machine=self.target.machine,
            exceptions=[entry for entry in exceptions() if applying(entry, versions)],
        )

    def judge(self, pins: dict[str, Version]) -> tuple[list[Wheel], list[Extension]]:
        """The wheels of a set of pins, and what is known of the native files of those that are named.

        Providers are judged themselves only where nothing else is named, or where what is named takes the place of
        something that they pin: then their own files are what may not fit.
        """
        provided = {fact.distribution for fact in self._providers}
        asked = [fact for fact in self._providers if fact.distribution in pins]
        replaced = any(_pinned_by(fact, name) for fact in asked for name in pins)
        with ThreadPoolExecutor(WORKERS) as pool:
            looked_up = {name: pool.submit(self.index.release, name, version) for name, version in pins.items()}
            opened = {
                name: pool.submit(lambda found: self.wheel(found.result(), whole=True), found)
                for name, found in looked_up.items()
                if name not in provided
            }
            # What takes its time here and waits for nothing.
            smoke_facts(), exceptions()
            releases = {name: found.result() for name, found in looked_up.items()}
            releases = {name: release for name, release in releases.items() if name not in provided}
            if replaced:
                # One of them is looked up as what a provider pins as well: once.
                wait(opened.values())
            # The tables have what torch exports and not what it needs.
            others = [] if replaced else list(releases.values())
            around = self.providers(pins, others)
            own = [found.result() for found in opened.values()]
        wheels = [*own, *(wheel for wheel in around if wheel.name not in releases)]
        subjects = own if own and not replaced else [wheel for wheel in wheels if wheel.name in pins]
        found = self._judge(wheels, subjects, whole=False)
        further = self._further(releases.values(), {wheel.name for wheel in wheels})
        for _ in range(FURTHER):
            if not self._lacking(wheels, found):
                break
            more = next(further, _NO_MORE)
            if isinstance(more, Wheel):
                wheels.append(more)
            if more is not None:
                found = self._judge(wheels, subjects, whole=more is _NO_MORE)
            if more is _NO_MORE:
                break
        return wheels, found

    def _judge(self, wheels: list[Wheel], subjects: list[Wheel], *, whole: bool) -> list[Extension]:
        judge = Judge(wheels, self.known(wheels, whole=whole))
        return [item for wheel in subjects for item in judge.judge(wheel)]

    def _lacking(self, wheels: list[Wheel], found: Iterable[Extension]) -> bool:
        """Whether something may be in a wheel that nobody named."""
        files = {file for wheel in wheels for file in wheel.natives}
        names = {wheel.name for wheel in wheels}
        for fact in smoke_facts().get("loaded_first", ()):
            if fact["distribution"] in names and not files.issuperset(p for p in fact["libraries"] if "*" not in p):
                return True
        return any(item.sought for item in found)

    def _further(self, releases: Iterable[Release], names: set[str]) -> Iterator[Wheel | None]:
        """Wheels that the named ones require, near ones first; None for one without native files."""
        queue, seen = list(releases), set(names)
        while queue:
            for requirement in self.index.requires(queue.pop(0)):
                if requirement.name in seen:
                    continue
                seen.add(requirement.name)
                try:
                    got = self.index.newest(requirement.name, requirement.specifier)
                except UsageError:
                    got = None
                if got is not None:
                    queue.append(got)
                yield None if got is None or not is_native(got.file) else self.wheel(got)


def _pinned_by(fact: ProviderFact, name: str) -> bool:
    return name == CUDA_PINS or any(fnmatchcase(name, other) for other in fact.elsewhere)


def base_named(name: str, machine: str = "x86_64") -> BaseFact:
    """The base of a command line: `bookworm`, or `debian:bookworm`, as it is on a machine. Raises `UsageError`."""
    facts: tuple[BaseFact, ...] = load_facts(BaseFact)
    for fact in facts:
        if name in (fact.release, f"{fact.distribution}:{fact.release}"):
            if (found := fact.on(machine)) is not None:
                return found
            known = ", ".join(f"`{other.release}`" for other in facts if other.on(machine))
            raise UsageError(f"what `{name}` has on {machine} is not known", hint=f"known: {known}")
    known = ", ".join(f"`{fact.release}`" for fact in facts)
    raise UsageError(f"the base `{name[:100]}` is not known", hint=f"known: {known}")


def ask(
    lines: Sequence[str],
    settings: Settings,
    *,
    python: str,
    base: str,
    find: str | None,
    platform: str = "linux/amd64",
) -> Report:
    """Answer one command line. Raises `UsageError`, `LockError`, `UnreachableError`, `IntegrityError`."""
    with _without_collector():
        return _ask(lines, settings, python, base, find, platform)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Names by the hundred thousand are made and kept, and hardly a cycle: looking for some took 7 % of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _ask(lines: Sequence[str], settings: Settings, python: str, base: str, find: str | None, platform: str) -> Report:
    if not re.fullmatch(r"3\.\d{1,2}", python):
        raise UsageError(f"`{python[:100]}` is not a Python version", hint="as in `--python 3.11`")
    machine = machine_of(platform)
    target = Target(python, base_named(base, machine), machine)
    asked = parse(lines)
    sought = _sought(find, asked) if find else None
    asked = [requirement for requirement in asked if sought is None or requirement.name != sought.name]
    question = Question(settings, target)
    pins = {requirement.name: version for requirement in asked if (version := pin(requirement))}
    exact = len(pins)
    if exact < len(asked):
        resolved = resolve(asked, target, settings)
        pins = {requirement.name: resolved[requirement.name] for requirement in asked}
    build = next(((name, fact) for name in pins if (fact := vendor_build(name, str(pins[name])))), None)
    if build is not None and len(pins) > 1 and sought is None and not question.index.has(build[0], pins[build[0]]):
        return _beside(question, pins, *build)
    if sought is not None:
        report = _find(question, pins, sought)
    else:
        wheels, found = question.judge(pins)
        report = Report(_shown(pins), tuple(map(str, wheels)), target, tuple(found))
    report = replace(report, bytes_read=question.index.bytes_read, bytes_total=question.index.bytes_total)
    fitting = _fitting(question, pins, report.extensions)
    # With `--find` the answer says when the index was asked, and is not kept for long (`builder.abi.answers`).
    lasting = len(pins) == exact and (sought is not None or not question.index.open_ended)
    return replace(report, fitting=fitting, lasting=lasting)


def _beside(question: Question, pins: dict[str, Version], package: str, fact: VendorBuildFact) -> Report:
    """The others beside a build of a package that is no release."""
    from builder.abi import vendor

    wheels = [
        question.wheel(question.index.release(name, version), whole=True)
        for name, version in pins.items()
        if name != package
    ]
    known = question.known(wheels, whole=False)
    found = [item for wheel in wheels for item in vendor.judge(wheel, known, package, pins[package], fact)]
    return Report(
        _shown(pins),
        tuple(map(str, wheels)),
        question.target,
        tuple(found),
        bytes_read=question.index.bytes_read,
        bytes_total=question.index.bytes_total,
    )


def _sought(text: str, asked: Sequence[Requirement]) -> Requirement:
    try:
        found = Requirement(text)
    except InvalidRequirement:
        raise UsageError(f"`{text[:100]}` is not a package", where="--find", hint="as in `--find torch`") from None
    found.name = canonicalize_name(found.name)
    for requirement in asked:
        if requirement.name == found.name:
            found.specifier &= requirement.specifier
    if len(asked) - any(requirement.name == found.name for requirement in asked) == 0:
        raise UsageError("there is nothing that it is to fit", where="--find", hint="`sgl-kernel==0.3.21 --find torch`")
    return found


def _find(question: Question, pins: dict[str, Version], sought: Requirement) -> Report:
    specifier = sought.specifier
    known = tables.versions(sought.name)
    if not specifier and known:
        specifier = SpecifierSet(f">={known[0]}")
    versions = question.index.versions(sought.name, specifier)
    left_out = 0
    if not sought.specifier and not known:
        left_out = max(0, len(versions) - CANDIDATES)
        versions = versions[left_out:]
    from builder.display import note

    candidates = []
    for version in versions:
        note(f"{sought.name} {version} …")
        _, found = question.judge({**pins, sought.name: version})
        if lacking := sorted({name for item in found for name in item.lacking}):
            # No release of another package changes that.
            named = " ".join(_shown(pins))
            raise UsageError(
                f"the set has no {lacking[0]}, which its native files need",
                because="none is named, and none of what is named requires one",
                hint=f"name it: `builder abi {named} {lacking[0]}==VERSION --find {sought.name}`",
            )
        candidates.append(Candidate(str(version), tuple(found)))
    return Report(_shown(pins), (), question.target, (), sought.name, tuple(candidates), left_out)


def _shown(pins: Mapping[str, Version]) -> tuple[str, ...]:
    return tuple(f"{name}=={version}" for name, version in pins.items())


def _fitting(question: Question, pins: dict[str, Version], found: Sequence[Extension]) -> tuple[str, ...] | None:
    """Releases of torch that what is broken fits, where telling costs nothing; None where it does."""
    names = {name for item in found for name in item.blames}
    if len(names) != 1 or len(pins) < 2 or not (versions := tables.versions(name := names.pop())):
        return None
    # Another index's builds are not in the tables, and each would have to be read.
    if not tables.wheels(question.index.release(name, pins[name]).sha256, question.from_index):
        return None
    fits = []
    for version in versions:
        try:
            _, others = question.judge({**pins, name: Version(version)})
        except UsageError:
            continue  # none for this Python
        if all(item.verdict == "ok" for item in others):
            fits.append(f"{name} {version}")
    return tuple(fits)
