"""Rules over the lock: what its wheels require of each other, of CUDA, of the OS, and what they cost.

What is known about single releases is in `knownrules`. Importing `builder.rules` registers both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.facts import CudaFact, CudaMajorFact, DistributionFact, ImportPackageFact, UnpackedFact, load_facts
from builder.files import pretty_size
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.matrix import Matrix
from builder.rulebook import Context, local_cuda, rule
from builder.tags import glibc_needed, platforms_of
from builder.yamlsource import PathElement

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

EvaluateLock = Callable[[Context, Lock], Iterator[Finding]]


def lock_rule(name: str) -> Callable[[EvaluateLock], EvaluateLock]:
    """Register the decorated function as a rule that is evaluated where there is a lock."""

    def register(evaluate: EvaluateLock) -> EvaluateLock:
        @wraps(evaluate)
        def with_lock(context: Context) -> Iterable[Finding]:
            return () if context.lock is None else evaluate(context, context.lock)

        rule(name, needs_lock=True)(with_lock)
        return evaluate

    return register


@cache
def parsed(requirement: str) -> Requirement:
    """A requirement in its parts; its name is normalised."""
    made = Requirement(requirement)
    made.name = canonicalize_name(made.name)
    return made


def named(artefact: Artefact) -> str:
    """How a message calls a wheel: `torch 2.11.0`."""
    return f"{artefact.name} {artefact.version}"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them: `a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def written(matrix: Matrix, package: str) -> tuple[PathElement, ...] | None:
    """Where the matrix says something about ``package``; `None` where it does not."""
    if package in matrix.stack.pins():
        if package.startswith("flashinfer-"):
            return "stack", "flashinfer", package.removeprefix("flashinfer-")
        return "stack", package
    if package in matrix.cuda.compiler:
        return "cuda", "compiler", package
    places: list[tuple[str, Iterable[str]]] = [
        ("extras", (parsed(extra).name for extra in matrix.extras)),
        ("files", (file.name for file in matrix.files)),
        ("overrides", (override.package for override in matrix.overrides)),
    ]
    return next(((field, i) for field, names in places for i, name in enumerate(names) if name == package), None)


def place(context: Context, *packages: str) -> str:
    """`matrices/NAME.yaml:LINE` of the first of ``packages`` that the matrix names, else of the matrix."""
    paths = (written(context.loaded.matrix, package) for package in packages)
    return context.loaded.where(*next((path for path in paths if path is not None), ()))


def stated(lock: Lock) -> Iterator[tuple[Artefact, Requirement]]:
    """Every requirement in the lock, with the wheel whose METADATA states it."""
    for artefact in lock.artefacts:
        for text in artefact.requires:
            yield artefact, parsed(text)


def requirers(lock: Lock, package: str) -> list[tuple[Artefact, Requirement]]:
    """Who requires ``package``, and what of it."""
    return [(artefact, requirement) for artefact, requirement in stated(lock) if requirement.name == package]


def satisfies(version: str, specifier: SpecifierSet) -> bool:
    """PEP 440, pre-releases included: `==0.5.9` takes `0.5.9+sm120`; `>0.5.9`, `===0.5.9` and `!=0.5.9` refuse it."""
    return specifier.contains(version, prereleases=True)


@lock_rule("conflict-undeclared")
def _undeclared(context: Context, lock: Lock) -> Iterator[Finding]:
    """A requirement that the lock does not satisfy and no override declares."""
    overrides = {override.package: override for override in context.loaded.matrix.overrides}
    broken: dict[tuple[str, SpecifierSet], list[Artefact]] = defaultdict(list)
    for artefact, requirement in stated(lock):
        locked = lock.version_of(requirement.name)
        if locked is not None and not satisfies(locked, requirement.specifier):
            broken[requirement.name, requirement.specifier].append(artefact)
    for (package, specifier), by in broken.items():
        declared = overrides.get(package)
        if declared is not None and SpecifierSet(declared.pin) == specifier:
            continue
        ours, pin = lock.version_of(package), str(specifier)
        if declared is None:
            because = "no override declares it, so it may be an accident"
            entry = f'{{package: {package}, pin: "{pin}", ours: {ours}, because: …, source: …}}'
            hint = f"take a release that fits, or add `{entry}` to `overrides`"
        elif (package, SpecifierSet(declared.pin)) in broken:
            because = f"the override of {package} declares `{declared.pin}`, and an override covers one pin"
            hint = f"take releases that require the same {package}"
        else:
            because = f"the override of {package} declares `{declared.pin}`, which nothing requires"
            hint = f'write `pin: "{pin}"`'
        yield Finding(
            rule="conflict-undeclared",
            severity=ERROR,
            subject=package,
            message=f"{listed([named(a) for a in by])} {'requires' if len(by) == 1 else 'require'} `{package}{pin}`, the lock has {ours}",
            because=because,
            hint=hint,
            where=place(context, package, *(artefact.name for artefact in by)),
            source=f"METADATA of {by[0].file}",
            evidence={"package": package, "pin": pin, "has": ours, "required_by": [artefact.name for artefact in by]},
        )


@lock_rule("conflict-stale")
def _stale(context: Context, lock: Lock) -> Iterator[Finding]:
    """An override that declares a conflict which is not there (any more)."""
    # The lock has no requirements of extras: where one was asked for, that nothing states a pin is not proven.
    extras = sorted({requirement.name for _, requirement in stated(lock) if requirement.extras})
    for i, override in enumerate(context.loaded.matrix.overrides):
        by = requirers(lock, override.package)
        if any(requirement.specifier == SpecifierSet(override.pin) for _, requirement in by):
            continue
        locked = lock.version_of(override.package)
        if locked is not None and any(not satisfies(locked, requirement.specifier) for _, requirement in by):
            continue  # another pin is broken instead: `conflict-undeclared` says that
        missing = locked is None
        now = [f"{named(artefact)} requires `{requirement}`" for artefact, requirement in by if requirement.specifier]
        because = listed(now) or f"no METADATA bounds {override.package}"
        proven = missing or not extras
        if missing:
            because = f"the lock has no {override.package}"
        elif extras:
            because += f"; extras of {listed(extras)} were not looked at"
        yield Finding(
            rule="conflict-stale",
            severity=ERROR if proven else WARNING,
            subject=override.package,
            message=f"nothing requires `{override.package}{override.pin}`, which an override declares",
            because=because,
            hint="remove the override, or write the pin that it breaks",
            where=context.loaded.where("overrides", i, "pin"),
            source="METADATA of the lock's wheels",
            evidence={"package": override.package, "pin": override.pin},
        )


@lock_rule("override-mismatch")
def _mismatch(context: Context, lock: Lock) -> Iterator[Finding]:
    """An override whose version is not the locked one."""
    for i, override in enumerate(context.loaded.matrix.overrides):
        locked = lock.version_of(override.package)
        if locked is not None and not satisfies(locked, SpecifierSet(f"=={override.ours}")):
            yield Finding(
                rule="override-mismatch",
                severity=ERROR,
                subject=override.package,
                message=f"the override says {override.package} {override.ours}, the lock has {locked}",
                because="the reason that it gives is about another release",
                hint=f"lock again: `builder lock {context.loaded.matrix.name}`",
                where=context.loaded.where("overrides", i, "ours"),
                source="the lock",
                evidence={"package": override.package, "ours": override.ours, "has": locked},
            )


@lock_rule("requirement-missing")
def _missing(context: Context, lock: Lock) -> Iterator[Finding]:
    """A requirement whose distribution is not in the lock at all."""
    missing: dict[str, list[tuple[Artefact, Requirement]]] = defaultdict(list)
    for artefact, requirement in stated(lock):
        if lock.version_of(requirement.name) is None:
            missing[requirement.name].append((artefact, requirement))
    for package, by in missing.items():
        artefact, requirement = by[0]
        direct = any(each.url is not None for each, _ in by)
        yield Finding(
            rule="requirement-missing",
            severity=ERROR,
            subject=package,
            message=f"{named(artefact)} requires `{requirement}`, and the lock has no {package}",
            because="the image would lack it",
            hint=f"lock again: `builder lock {context.loaded.matrix.name}`"
            + (f"; see that `requires` of {artefact.name} under `files` is right" if direct else ""),
            where=place(context, *(each.name for each, _ in by)),
            source=f"METADATA of {artefact.file}",
            evidence={"package": package, "required_by": [each.name for each, _ in by]},
        )


@lock_rule("compiler-incoherent")
def _compiler(context: Context, lock: Lock) -> Iterator[Finding]:
    """The parts of the CUDA compiler have to be of one release."""
    cuda = context.loaded.matrix.cuda
    fact = next((fact for fact in load_facts(CudaFact) if fact.covers(cuda.minor)), None)
    if cuda.jit == "none" or fact is None:
        return
    parts = [artefact for name in fact.compiler if (artefact := lock.by_name.get(name)) is not None]
    right = [part for part in parts if part.version.startswith(f"{cuda.minor}.")]
    # All of these have the version of the first of them that is of the release: nvcc, if it is.
    model = next((part for part in right if part.name in fact.lockstep), None)
    for part in parts:
        beside = f" beside {named(model)}" if model is not None else ""
        wanted = model.version if model is not None and part.name in fact.lockstep else f"{cuda.minor}.…"
        if part not in right:
            message = f"{named(part)}{beside} is not of CUDA {cuda.minor}"
        elif model is not None and part.name in fact.lockstep and part.version != model.version:
            message = f"{named(part)}{beside}: the two have to be equal"
        else:
            continue
        yield Finding(
            rule="compiler-incoherent",
            severity=ERROR,
            subject=part.name,
            message=message,
            because=fact.incoherent or fact.because,
            hint=f"write `{part.name}: {wanted}` under `cuda.compiler`, and lock again",
            where=context.loaded.where("cuda", "compiler", part.name),
            source=fact.source,
            evidence={"part": part.name, "has": part.version, "cuda": cuda.version},
        )


def cuda_major(artefact: Artefact) -> tuple[int, str] | None:
    """The CUDA major that a wheel's files belong to and who says so; `None` where no fact covers it."""
    for fact in sorted(load_facts(CudaMajorFact), key=lambda fact: fact.major != "both"):
        if artefact.name not in fact.packages and not artefact.name.endswith(fact.suffixes or ("\0",)):
            continue
        if fact.versions is not None and not satisfies(artefact.version, SpecifierSet(fact.versions)):
            continue
        if fact.major == "both":
            return None
        return Version(artefact.version).major if fact.major == "version" else fact.major, fact.source
    tagged = local_cuda(artefact.version)
    return (int(tagged.split(".")[0]), "the wheels' local versions") if tagged is not None else None


@lock_rule("cuda-majors-mixed")
def _majors(context: Context, lock: Lock) -> Iterator[Finding]:
    """One image has one CUDA major."""
    home = int(context.loaded.matrix.cuda.version.split(".")[0])
    of_major: dict[int, dict[str, tuple[Artefact, str]]] = defaultdict(dict)
    for artefact in lock.artefacts:
        if (known := cuda_major(artefact)) is not None:
            of_major[known[0]][artefact.name] = artefact, known[1]
    if home not in of_major:
        return
    for major in sorted(of_major.keys() - {home}):
        foreign = of_major[major]
        by: dict[str, list[str]] = defaultdict(list)
        for artefact, requirement in stated(lock):
            if requirement.name in foreign and artefact.name not in foreign:
                by[artefact.name].append(requirement.name)
        reasons = [f"{named(lock.by_name[name])} requires {listed(what)}" for name, what in by.items()]
        yield Finding(
            rule="cuda-majors-mixed",
            severity=ERROR,
            subject=f"CUDA {major}",
            message=f"CUDA {major} beside CUDA {home}: {listed([named(artefact) for artefact, _ in foreign.values()])}",
            because="; ".join(reasons) or f"no wheel of the lock requires {'it' if len(foreign) == 1 else 'them'}",
            hint=f"take {listed(list(by)) or 'releases'} for CUDA {home}, or leave {'it' if len(by) == 1 else 'them'} out",
            where=place(context, *by, *foreign),
            source="; ".join(dict.fromkeys(source for _, source in foreign.values())),
            evidence={"major": major, "image": home, "distributions": list(foreign), "required_by": list(by)},
        )


def matching(lock: Lock, requirement: str) -> Artefact | None:
    """The lock's wheel that ``requirement`` is about; `None` where it has none, or of another version."""
    wanted = parsed(requirement)
    artefact = lock.by_name.get(wanted.name)
    return artefact if artefact is not None and satisfies(artefact.version, wanted.specifier) else None


@lock_rule("import-package-twice")
def _import_package(context: Context, lock: Lock) -> Iterator[Finding]:
    """Two distributions that install one import package."""
    for fact in load_facts(ImportPackageFact):
        owners = [artefact for each in fact.distributions if (artefact := matching(lock, each)) is not None]
        if len(owners) > 1:
            yield Finding(
                rule="import-package-twice",
                severity=ERROR,
                subject=fact.package,
                message=f"{listed([named(owner) for owner in owners])} install one import package, `{fact.package}`",
                because="the files of the one are overwritten by the other's",
                hint=fact.hint,
                where=place(context, *(owner.name for owner in owners)),
                source=fact.source,
                evidence={"import_package": fact.package, "distributions": [owner.name for owner in owners]},
            )


@lock_rule("prerelease-unnamed")
def _prerelease(context: Context, lock: Lock) -> Iterator[Finding]:
    """A pre-release that neither the matrix names nor any METADATA pins."""
    matrix = context.loaded.matrix
    overridden = {override.package for override in matrix.overrides}
    for artefact in lock.artefacts:
        if not Version(artefact.version).is_prerelease or artefact.name in matrix.prereleases:
            continue
        by = requirers(lock, artefact.name)
        pinned = any(clause.operator in ("==", "===") for _, requirement in by for clause in requirement.specifier)
        # A pin of the matrix names its pre-release already, or is refused (`agree`).
        if pinned or artefact.name in overridden:
            continue
        yield Finding(
            rule="prerelease-unnamed",
            severity=ERROR,
            subject=artefact.name,
            message=f"{named(artefact)} is a pre-release, and `prereleases` does not name it",
            because=listed([f"{named(each)} requires `{requirement}`" for each, requirement in by])
            or "no METADATA requires it",
            hint=f"add `{artefact.name}` to `prereleases`, or a release of it to `extras`",
            where=context.loaded.where("prereleases"),
            source="facts/stacks.md section 3.7; design decision 2",
            evidence={"package": artefact.name, "version": artefact.version},
        )


@lock_rule("wheel-platform")
def _platform(context: Context, lock: Lock) -> Iterator[Finding]:
    """A wheel whose platform tag wants a newer C library than the base has."""
    base = context.loaded.matrix.base
    facts = [fact for fact in load_facts(DistributionFact) if fact.glibc is not None]
    known = {(fact.distribution, fact.release): _glibc(fact) for fact in facts}
    fact = next((f for f in facts if (f.distribution, f.release) == (base.distribution, base.release)), None)
    if fact is None:
        return
    for artefact in lock.artefacts:
        needs = glibc_needed(artefact.file)
        if needs is not None and needs <= _glibc(fact):
            continue
        enough = [f"{name} {release}" for (name, release), has in known.items() if needs is not None and has >= needs]
        has = f"{base.distribution} {base.release} has {fact.glibc}"
        yield Finding(
            rule="wheel-platform",
            severity=ERROR,
            subject=artefact.name,
            message=f"{named(artefact)} needs glibc {needs[0]}.{needs[1]}, {has}"
            if needs is not None
            else f"{named(artefact)} is not for {context.loaded.matrix.platform}",
            because=f"its wheel is tagged {listed(sorted(platforms_of(artefact.file)))}",
            hint=f"take {' or '.join(enough)}, or a release of {artefact.name} with a wheel for it"
            if enough
            else f"take a release of {artefact.name} with a wheel for it",
            where=context.loaded.where("base", "release") if needs else place(context, artefact.name),
            source=fact.source,
            evidence={"file": artefact.file, "glibc": fact.glibc},
        )


def _glibc(fact: DistributionFact) -> tuple[int, ...]:
    return Version(fact.glibc or "0").release[:2]


@lock_rule("metadata-version")
def _metadata_version(context: Context, lock: Lock) -> Iterator[Finding]:
    """A wheel whose METADATA states another version than its file's name."""
    for artefact in lock.artefacts:
        if Version(artefact.metadata_version) != Version(artefact.version):
            yield Finding(
                rule="metadata-version",
                severity=NOTE,
                subject=artefact.name,
                message=f"the METADATA of {named(artefact)} says {artefact.metadata_version}",
                because="uv installs it and reports that version, pip discards the file",
                hint="nothing to do in the image; install it with uv elsewhere",
                where=place(context, artefact.name),
                source="facts/stacks.md section 1; case 091 (sgl-project/sglang#14327)",
                evidence={"file": artefact.file, "metadata_version": artefact.metadata_version},
            )


@lock_rule("size-unknown")
def _size_unknown(context: Context, lock: Lock) -> Iterator[Finding]:
    """Wheels of unknown size, which no budget can count."""
    unknown = [artefact.name for artefact in lock.artefacts if artefact.size is None]
    if unknown and context.loaded.matrix.budget is not None:
        yield Finding(
            rule="size-unknown",
            severity=NOTE,
            subject="budget",
            message=f"the budget is checked without {listed(unknown)}",
            because="their sources state no size" if len(unknown) > 1 else "its source states no size",
            hint="add `size` under `files` where it is known",
            where=place(context, *unknown),
            source="the lock",
            evidence={"unknown": list(unknown)},
        )


@lock_rule("size-budget")
def _size_budget(context: Context, lock: Lock) -> Iterator[Finding]:
    """Wheels that unpack to more than the image may have."""
    budget = context.loaded.matrix.budget
    fact = load_facts(UnpackedFact)[0]
    sizes: Mapping[str, int] = {artefact.name: artefact.size or 0 for artefact in lock.artefacts}
    wheels = sum(sizes.values())
    unpacked = wheels * fact.files // fact.wheels
    if budget is None or unpacked <= budget.image:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
    yield Finding(
        rule="size-budget",
        severity=WARNING,
        subject="budget",
        message=f"the wheels unpack to about {pretty_size(unpacked)}, the budget is {pretty_size(budget.image)}",
        because=f"they have {pretty_size(wheels)}, and {fact.files / fact.wheels:.2f} bytes come of each; "
        f"the largest are {listed([f'{name} ({pretty_size(sizes[name])})' for name in largest])}",
        hint="raise `budget.image`, or leave out what is not needed",
        where=context.loaded.where("budget", "image"),
        source=f"{fact.stack}: {fact.source}",
        evidence={"wheels": wheels, "unpacked": unpacked, "budget": budget.image},
    )
