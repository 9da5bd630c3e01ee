"""What is to be said of the GPU code in a lock's wheels: one finding a wheel and matter, for all devices that it concerns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from builder import arch
from builder.arch import EVERYWHERE, Loading, Pair, dotted, target_of
from builder.archreport import run_only
from builder.archverb import loadings
from builder.facts import ProviderFact, load_facts
from builder.fatbin import Container
from builder.files import pretty_size
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.lockrules import listed, named, place
from builder.rulebook import Context
from builder.static.gpucode import Code, releases_with_code

SOURCE = "the GPU images in the wheels that the lock names, by NVIDIA's rules (docs/arch.md)"


@dataclass
class _Device:
    """How the files of a wheel stand on one device."""

    lacking: list[str] = field(default_factory=list)
    """Loaded there, and no code for it."""
    asked: list[str] = field(default_factory=list)
    """Only a feature asks for it, and no code for it."""
    spared: list[str] = field(default_factory=list)
    """Not loaded there, or made for other devices only."""
    compiled: list[str] = field(default_factory=list)
    """PTX that the driver compiles."""
    covered: list[str] = field(default_factory=list)
    proven: bool = False
    """Whether one that lacks it is known to be loaded."""


def is_cudas(name: str) -> bool:
    """Whether a distribution is one of CUDA's own: such libraries choose among their kernels, and not all are for all devices."""
    patterns = [pattern for fact in load_facts(ProviderFact) for pattern in fact.elsewhere]
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def gpu_findings(
    context: Context, lock: Lock, codes: Mapping[str, Code], lost: Mapping[str, Collection[str]]
) -> Iterator[Finding]:
    """What the wheels' GPU code means for each device of the matrix; ``lost`` are files that do not load anyway."""
    gpus = [arch.pair(gpu) for gpu in context.loaded.matrix.gpus]
    for name, whole in codes.items():
        artefact = lock.by_name[name]
        members = {file: each for file, each in whole.members.items() if file not in lost.get(name, ())}
        code = Code(members, whole.large, whole.damaged)
        known = {loading.file: loading for loading in loadings(artefact.name, artefact.version)}
        found = {gpu: _device(code, gpu, known) for gpu in gpus}
        yield from _uncovered(context, artefact, code, found, known)
        yield from _unlooked(context, artefact, code)
    if gpus and any(code.members for code in codes.values()) and (note := run_only(gpus)) is not None:
        yield note


def _device(code: Code, gpu: Pair, known: Mapping[str, Loading]) -> _Device:
    device = _Device()
    for file, containers in code.members.items():
        loading = known.get(file, EVERYWHERE)
        coverage = arch.cover(containers, gpu)
        if coverage.whole:
            (device.compiled if coverage.isa is not None else device.covered).append(file)
        elif not loading.on(gpu):
            device.spared.append(file)
        elif loading.only_for:
            device.asked.append(file)
        elif file not in known and _for_single_devices(containers, gpu):
            device.spared.append(file)
        else:
            device.lacking.append(file)
            device.proven |= file in known
    device.proven |= bool(device.lacking) and not device.covered and not device.compiled
    return device


def _for_single_devices(containers: Sequence[Container], gpu: Pair) -> bool:
    """Whether what a device lacks was compiled for single devices on purpose (`sm_90a`): the package chooses then."""
    lacking = [each for each in containers if arch.choose(each.images, gpu)[1] is None]
    targets = [target_of(image) for each in lacking for image in each.images]
    return all(target is not None and target[1] == "a" for target in targets)


def _uncovered(
    context: Context, artefact: Artefact, code: Code, found: Mapping[Pair, _Device], known: Mapping[str, Loading]
) -> Iterator[Finding]:
    groups: dict[tuple[tuple[str, ...], bool], list[Pair]] = {}
    for gpu, device in found.items():
        if device.lacking:
            groups.setdefault((tuple(device.lacking), device.proven), []).append(gpu)
    for (files, proven), gpus in groups.items():
        on = listed([dotted(gpu) for gpu in gpus])
        main = max(files, key=lambda file: len(code.members[file]))
        have = arch.names(code.members[main], "cubin") + arch.names(code.members[main], "ptx")
        base: dict[str, Any] = {
            "rule": "arch-uncovered",
            "subject": artefact.name,
            "where": context.loaded.where("gpus", context.loaded.matrix.gpus.index(dotted(gpus[0]))),
            "source": SOURCE,
            "evidence": {"devices": [dotted(gpu) for gpu in gpus], "files": list(files)},
        }
        images = f"`{main}` has {', '.join(have)}"
        if proven:
            yield Finding(
                severity=Severity.ERROR,
                message=f"{named(artefact)} has no code for GPU {on}",
                because=f"{images}; its first kernel there fails with `no kernel image is available` (CUDA error 209)",
                hint=_other_release(artefact, gpus),
                **base,
            )
            continue
        pinned = artefact.name in context.loaded.matrix.stack.pins()
        yield Finding(
            severity=Severity.WARNING if pinned else Severity.NOTE,
            message=f"{named(artefact)} has no code for GPU {on} in {len(files)} of its {len(code.members)} files with GPU code",
            because=f"{images}; whether it is asked there is not known, its first kernel would fail",
            **base,
        )
    yield from _features(context, artefact, found, known)


def _features(
    context: Context, artefact: Artefact, found: Mapping[Pair, _Device], known: Mapping[str, Loading]
) -> Iterator[Finding]:
    """What a device goes without, as the facts have it."""
    for kind, severity in (("asked", Severity.WARNING), ("spared", Severity.NOTE)):
        groups: dict[tuple[str, ...], list[Pair]] = {}
        for gpu, device in found.items():
            # On a device for which nothing has code, that is said already.
            files = tuple(file for file in getattr(device, kind) if file in known)
            if files and not (device.lacking and device.proven):
                groups.setdefault(files, []).append(gpu)
        for files, gpus in groups.items():
            means = list(dict.fromkeys(known[file].otherwise for file in files if known[file].otherwise))
            needs = list(dict.fromkeys(known[file].only_for for file in files if known[file].only_for))
            on = listed([dotted(gpu) for gpu in gpus])
            yield Finding(
                rule="arch-not-loaded",
                severity=severity,
                subject=artefact.name,
                message=f"{named(artefact)} on GPU {on}: {len(files)} of its files {'has' if len(files) == 1 else 'have'} "
                f"no code for it{'' if kind == 'asked' else ', and is not loaded there' if len(files) == 1 else ', and are not loaded there'}",
                because=(f"only for {listed(needs)}: " if kind == "asked" else "") + "; ".join(means),
                where=place(context, artefact.name),
                source="; ".join(dict.fromkeys(known[file].source for file in files)),
                evidence={"devices": [dotted(gpu) for gpu in gpus], "files": list(files)},
            )


def _other_release(artefact: Artefact, gpus: Sequence[Pair]) -> str:
    on = listed([dotted(gpu) for gpu in gpus])
    fits = [
        version
        for version, code in releases_with_code(artefact.name)
        if all(_covered(artefact.name, version, code, gpu) for gpu in gpus)
    ]
    remove = f"remove {on} from `gpus`"
    if fits:
        return f"take {artefact.name} {listed(fits[-3:])}, which has, or {remove}"
    looked = [version for version, _ in releases_with_code(artefact.name)]
    return (
        f"{remove}: of the releases that are known, {looked[0]} to {looked[-1]}, none has"
        if len(looked) > 1
        else remove
    )


def _covered(name: str, version: str, code: Code, gpu: Pair) -> bool:
    known = {loading.file: loading for loading in loadings(name, version)}
    device = _device(code, gpu, known)
    return not device.lacking and bool(device.covered or device.compiled)


def _unlooked(context: Context, artefact: Artefact, code: Code) -> Iterator[Finding]:
    if code.damaged:
        file, trouble = next(iter(code.damaged.items()))
        yield Finding(
            rule="arch-unreadable",
            severity=Severity.NOTE,
            subject=artefact.name,
            message=f"the GPU code of {named(artefact)} cannot be read",
            because=f"`{file}`: {trouble}",
            where=place(context, artefact.name),
            source=SOURCE,
            evidence={"files": list(code.damaged)},
        )
    if code.large:
        gpus = " ".join(f"--gpu {gpu}" for gpu in context.loaded.matrix.gpus)
        yield Finding(
            rule="arch-unread",
            severity=Severity.NOTE,
            subject=artefact.name,
            message=f"the GPU code of {named(artefact)} was not looked at",
            because=f"it has to be read to its end, and {listed([f'`{file}`' for file in code.large])} "
            f"{'has' if len(code.large) == 1 else 'have'} {pretty_size(sum(code.large.values()))}",
            hint=f"read it once: `builder arch {artefact.name}=={artefact.version} {gpus}`",
            where=place(context, artefact.name),
            source=SOURCE,
            evidence={"files": list(code.large)},
        )
