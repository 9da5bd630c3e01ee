"""Rules over the lock that rest on what is known about single releases: facts about pairs of them, GPUs and the OS."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.facts import (
    CostFact,
    GpuFact,
    IncompatibleFact,
    LaunchFact,
    OsLibraryFact,
    ShadowFact,
    TargetFact,
    TogetherFact,
    TorchBuildFact,
    TritonFact,
    load_facts,
)
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.lockrules import ERROR, NOTE, WARNING, listed, lock_rule, matching, named, place, satisfies
from builder.matrix import Patches
from builder.rulebook import Context


def _together(context: Context, lock: Lock, fact: TogetherFact) -> list[Artefact]:
    """The wheels that ``fact`` is about, if the lock has all of them and the matrix is such a one; else none."""
    matrix = context.loaded.matrix
    if fact.jit is not None and fact.jit != matrix.cuda.jit:
        return []
    if fact.gpus and not set(fact.gpus) & set(matrix.gpus):
        return []
    found = [matching(lock, requirement) for requirement in fact.together]
    return [artefact for artefact in found if artefact is not None] if all(found) else []


def _on(context: Context, fact: TogetherFact) -> str:
    gpus = [gpu for gpu in context.loaded.matrix.gpus if gpu in fact.gpus]
    return f" on GPU {listed(gpus)}" if gpus else ""


@lock_rule("known-incompatible")
def _incompatible(context: Context, lock: Lock) -> Iterator[Finding]:
    """Releases that were seen not to work together."""
    for fact in load_facts(IncompatibleFact):
        wheels = _together(context, lock, fact)
        if not wheels:
            continue
        accepted = fact.accepted_by is not None and is_true(context, fact.accepted_by)
        proven = fact.confidence == "proven"
        verb = "do" if len(wheels) > 1 else "does"
        names = listed([named(wheel) for wheel in wheels])
        what = f"{names} {verb} not work{' together' if len(wheels) > 1 else ''}{_on(context, fact)}"
        likely = f"{names} may not work{' together' if len(wheels) > 1 else ''}{_on(context, fact)}"
        yield Finding(
            rule="known-incompatible",
            severity=NOTE if accepted else ERROR if proven else WARNING,
            subject=wheels[0].name,
            message=what if proven else likely,
            because=fact.because + (f"; the matrix sets `{fact.accepted_by}`" if accepted else ""),
            hint=fact.hint + (f", or set `{fact.accepted_by}: 1` under `environment`" if fact.accepted_by else "")
            if not accepted
            else "",
            where=context.loaded.where("environment", fact.accepted_by or "")
            if accepted
            else place(context, *(wheel.name for wheel in wheels)),
            source=fact.source,
            evidence={"together": {wheel.name: wheel.version for wheel in wheels}, "confidence": fact.confidence},
        )


def is_true(context: Context, variable: str) -> bool:
    """Whether the matrix sets an environment variable that is a switch."""
    return context.loaded.matrix.environment.get(variable, "").lower() in ("1", "true")


@lock_rule("known-cost")
def _cost(context: Context, lock: Lock) -> Iterator[Finding]:
    """Releases that work and cost something."""
    for fact in load_facts(CostFact):
        wheels = _together(context, lock, fact)
        if wheels:
            names = " beside ".join(named(wheel) for wheel in wheels)
            yield Finding(
                rule="known-cost",
                severity=Severity(fact.severity),
                subject=wheels[0].name,
                message=f"{names}: works, at a cost{_on(context, fact)}",
                because=fact.because,
                hint=fact.hint,
                where=place(context, *(wheel.name for wheel in wheels)),
                source=fact.source,
                evidence={"together": {wheel.name: wheel.version for wheel in wheels}},
            )


@lock_rule("built-for-torch")
def _built_for_torch(context: Context, lock: Lock) -> Iterator[Finding]:
    """Compiled code that does not fit the lock's torch."""
    torch = lock.by_name.get("torch")
    for fact in load_facts(TorchBuildFact):
        artefact = lock.by_name.get(fact.package)
        if torch is None or artefact is None or not satisfies(artefact.version, SpecifierSet(fact.versions)):
            continue
        lacks = next((why for pin, why in fact.broken.items() if satisfies(torch.version, SpecifierSet(pin))), None)
        if lacks is None and (fact.torch is None or satisfies(torch.version, SpecifierSet(fact.torch))):
            continue
        # What was measured are the default index's wheels: another build of the same version may be for another torch.
        other = artefact.index != "default"
        if fact.effect == "degrades":
            message = f"{named(artefact)} goes without its compiled operators beside {named(torch)}"
        elif lacks:
            message = f"{named(artefact)} does not load beside {named(torch)}"
        else:
            message = f"{named(artefact)} may not load beside {named(torch)}"
        fitting = _fitting(fact.package, torch.version)
        yield Finding(
            rule="built-for-torch",
            severity=ERROR if lacks and fact.effect == "fails" and not other else WARNING,
            subject=artefact.name,
            message=message,
            because=(lacks or fact.because or "")
            + ("; seen with the default index's wheel, this is another file" if other else ""),
            hint=f"{fitting}, or torch {_words(fact.torch)}" if fact.torch is not None else fitting,
            where=place(context, artefact.name, "torch"),
            source=fact.source,
            evidence={"package": artefact.name, "version": artefact.version, "torch": torch.version},
        )


def _fitting(package: str, torch: str) -> str:
    """Which releases of a package to take for a torch, where that is known."""
    fits = (f for f in load_facts(TorchBuildFact) if f.package == package and f.torch is not None)
    known = [_words(f.versions) for f in fits if satisfies(torch, SpecifierSet(f.torch or ""))]
    if known:
        return f"take {package} {' or '.join(known)}"
    return f"take a {package} for torch {Version(torch).public}"


def _words(pin: str) -> str:
    """A range as a sentence says it: `==2.9.*` is 2.9."""
    return pin.removeprefix("==").removesuffix(".*") if pin.startswith("==") else pin


@lock_rule("os-library-missing")
def _os_library(context: Context, lock: Lock) -> Iterator[Finding]:
    """A wheel that links to a library of the OS which the base does not have."""
    present = {package.name for package in lock.base.packages}
    for fact in load_facts(OsLibraryFact):
        artefact = lock.by_name.get(fact.package)
        # A base by digest whose packages nobody listed says nothing about what is in it.
        if not present or present & set(fact.os_packages) or artefact is None:
            continue
        if satisfies(artefact.version, SpecifierSet(fact.versions)):
            yield Finding(
                rule="os-library-missing",
                severity=ERROR,
                subject=artefact.name,
                message=f"{named(artefact)} needs `{fact.library}`, and the base has none",
                because="no wheel brings it",
                hint=f"add `{fact.os_packages[0]}` to `packages` under `base`, and lock again",
                where=context.loaded.where("base", "packages"),
                source=fact.source,
                evidence={"package": artefact.name, "library": fact.library, "os_packages": list(fact.os_packages)},
            )


@lock_rule("triton-ptxas")
def _triton(context: Context, lock: Lock) -> Iterator[Finding]:
    """A GPU that the assembler in triton's wheel does not know."""
    matrix = context.loaded.matrix
    triton = lock.by_name.get("triton")
    if triton is None or "TRITON_PTXAS_PATH" in matrix.environment:
        return
    known = {fact.cuda: fact for fact in load_facts(TargetFact)}
    named_gpus = {fact.capability: fact for fact in load_facts(GpuFact)}
    for fact in load_facts(TritonFact):
        gpus = [gpu for gpu in matrix.gpus if not known[fact.ptxas].knows(named_gpus[gpu])]
        if not gpus or not satisfies(triton.version, SpecifierSet(fact.versions)):
            continue
        own = "write `TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas` under `environment`, or "
        yield Finding(
            rule="triton-ptxas",
            severity=ERROR,
            subject="triton",
            message=f"{named(triton)} cannot compile for GPU {listed(gpus)}",
            because=f"its ptxas is CUDA {fact.ptxas}'s and does not know {listed([f'sm_{named_gpus[gpu].nvcc_arch}' for gpu in gpus])}",
            hint=(own if matrix.cuda.jit == "nvcc" else "") + "take a torch with a later triton",
            where=context.loaded.where("gpus", matrix.gpus.index(gpus[0])),
            source=f"{fact.source}; {known[fact.ptxas].source}",
            evidence={"triton": triton.version, "ptxas": fact.ptxas, "gpus": list(gpus)},
        )


UNCHECKED = "FLASHINFER_DISABLE_VERSION_CHECK"
"""By which flashinfer takes parts of another version (jit/env.py of 0.5.0 to 0.7.4)."""


@lock_rule("flashinfer-parts")
def _flashinfer_parts(context: Context, lock: Lock) -> Iterator[Finding]:
    """flashinfer refuses to be imported beside parts of another version, whoever brought them."""
    flashinfer = context.loaded.matrix.stack.flashinfer
    main = lock.by_name.get("flashinfer-python")
    # What the matrix itself pins unequal is said by `flashinfer-versions`.
    said = flashinfer is not None and flashinfer.cubin_version is not None
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        part = lock.by_name.get(name)
        if main is None or part is None or (said and name == "flashinfer-cubin"):
            continue
        if Version(part.version).public != Version(main.version).public:
            accepted = is_true(context, UNCHECKED)
            yield Finding(
                rule="flashinfer-parts",
                severity=WARNING if accepted else ERROR,
                subject=name,
                message=f"{named(main)} beside {named(part)}",
                because=f"the matrix sets `{UNCHECKED}`, so flashinfer takes code that was made for another release"
                if accepted
                else "flashinfer raises at import unless the two versions are equal",
                hint="make them equal, or leave the part out",
                where=place(context, name, "flashinfer-python"),
                source="flashinfer/jit/env.py of 0.5.0 to 0.7.4 (`_get_cubin_dir`, `_get_aot_dir`), read 2026-11-30; case 050",
                evidence={"python": main.version, "part": part.version},
            )


@lock_rule("jit-cache-hides-patch")
def _jit_cache(context: Context, lock: Lock) -> Iterator[Finding]:
    """Compiled modules that are loaded instead of what a patch changes."""
    for fact in load_facts(ShadowFact):
        part, patched = lock.by_name.get(fact.package), matching(lock, fact.patched)
        if part is None or patched is None or getattr(context.loaded.matrix.patches, fact.set) is None:
            continue
        proven = fact.confidence == "proven"
        yield Finding(
            rule="jit-cache-hides-patch",
            severity=ERROR if proven else WARNING,
            subject=part.name,
            message=f"{named(part)} {'hides' if proven else 'may hide'} what the patch set `{fact.set}` changes in "
            f"{named(patched)} ({', '.join(fact.sites)})",
            because=fact.because,
            hint=f"leave {part.name} out",
            where=context.loaded.where("patches", fact.set),
            source=fact.source,
            evidence={"version": part.version, "patched": patched.version, "sites": list(fact.sites)},
        )


@lock_rule("launch-flags")
def _launch(context: Context, lock: Lock) -> Iterator[Finding]:
    """What flags of the server do with this stack: one finding for the GPUs, one for each patch set."""
    matrix = context.loaded.matrix
    groups: dict[tuple[str, Severity], list[LaunchFact]] = {}
    for fact in load_facts(LaunchFact):
        if _together(context, lock, fact) and (fact.patches is None or _asked(matrix.patches, fact.patches)):
            severity = WARNING if fact.variable is not None and is_true(context, fact.variable) else NOTE
            groups.setdefault(((fact.patches or "").split(".")[0], severity), []).append(fact)
    for (patch_set, severity), found in groups.items():
        first, flags = found[0], listed([f"`{fact.flag}`" for fact in found])
        variables = [fact.variable for fact in found if fact.variable is not None] if severity is WARNING else []
        set_by = listed([f"`{name}`" for name in variables])
        if variables:
            where = context.loaded.where("environment", variables[0])
        elif first.patches is not None:
            where = context.loaded.where("patches", *first.patches.split("."))
        else:
            where = context.loaded.where("gpus", next(i for i, gpu in enumerate(matrix.gpus) if gpu in first.gpus))
        with_set = f" with the patch set `{patch_set}`" if patch_set else ""
        yield Finding(
            rule="launch-flags",
            severity=severity,
            subject="sglang",
            message=f"a server of {named(_together(context, lock, first)[0])}{_on(context, first)}{with_set}: mind {flags}",
            because="; ".join(fact.because for fact in found)
            + (f"; the matrix sets {set_by} for every server" if variables else ""),
            hint="; ".join(fact.hint for fact in found)
            + (f"; leave {set_by} to `builder run --env`" if variables else ""),
            where=where,
            source="; ".join(fact.source for fact in found),
            evidence={"flags": [fact.flag for fact in found], "variables": list(variables)},
        )


def _asked(patches: Patches, choice: str) -> bool:
    """Whether a matrix asks for a patch set, or for the option of one: `sm120.symm_mem`."""
    name, _, option = choice.partition(".")
    found = getattr(patches, name)
    return found is not None and (not option or getattr(found, option) == "opt-in")
