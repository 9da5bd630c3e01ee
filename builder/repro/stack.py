"""A report's facts → a matrix: pins from the report, the rest as of its date, everything that cannot be had named.

Nothing is put in the place of something else without a line that says so: `Reconstruction.open` and `.instead`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import date, timedelta
from typing import get_args

from packaging.requirements import Requirement
from packaging.version import Version

from builder.facts import DistributionFact, GpuFact, load_facts
from builder.matrix import Matrix
from builder.origins import DirectFile
from builder.reports.model import Report
from builder.repro.matrixtext import lines
from builder.repro.model import STACK, Index, Pin, Reconstruction, minor_of, pinned_cuda, requirements_of
from builder.rulebook import local_cuda

PYTHONS: tuple[str, ...] = get_args(Matrix.model_fields["python"].annotation)
"""What a matrix can name."""


def reconstruct(
    report: Report,
    index: Index,
    *,
    name: str,
    today: date,
    when: date | None = None,
    files: Mapping[tuple[str, str], DirectFile] | None = None,
    prereleases: Collection[str] = (),
    open_too: Sequence[str] = (),
) -> Reconstruction:
    """The matrix that a report describes.

    ``when`` is the day of the report, where it is known; ``files`` are wheels on no index that our matrices know, by
    name and version. ``prereleases`` are packages that have to be named besides those that the report's own packages
    ask for, ``open_too`` what else is open. Asks the index, and raises what that raises where it does not answer.
    """
    made = Reconstruction(name, open=list(open_too), prereleases=frozenset(prereleases))
    _python(made, report)
    _machine(made, report)
    _pins(made, report, index, files or {})
    _gpus(made, report)
    _date(made, index, today, when)
    made.text = "\n".join(lines(made, report, index)) + "\n"
    return made


def _python(made: Reconstruction, report: Report) -> None:
    made.python = python_of(report)
    said = report.value("python")
    if said is None:
        made.open.append(f"Python is not stated: {made.python}")
    elif (minor := minor_of(said)) != made.python:
        made.instead.append(f"Python {minor}: images are made for {PYTHONS[0]} to {PYTHONS[-1]}; {made.python} instead")


def python_of(report: Report) -> str:
    """The report's Python, or the nearest that a matrix can name; where it states none, that of the first base."""
    said = report.value("python")
    if said is None:
        return str(load_facts(DistributionFact)[0].python)
    minor = minor_of(said)
    if minor in PYTHONS:
        return minor
    return PYTHONS[-1] if Version(minor) > Version(PYTHONS[-1]) else PYTHONS[0]


def _machine(made: Reconstruction, report: Report) -> None:
    arch = report.facts.get("arch")
    if arch is not None and arch.value == "aarch64":
        made.builds_here = False
        inferred = " (inferred from the GPU)" if arch.because else ""
        made.instead.append(
            f"aarch64{inferred}: images are built for x86_64 only, its wheels are not those of the report"
        )


def _pins(made: Reconstruction, report: Report, index: Index, files: Mapping[tuple[str, str], DirectFile]) -> None:
    for package, fact in report.packages():
        if fact.absent or not fact.value:
            continue
        pin = _pin(made, package, fact.value, fact.line, index, files)
        if pin is None:
            continue
        made.pins[package] = pin
        if pin.instead:
            made.instead.append(f"{package} {pin.wanted}: {pin.instead}")
    if "sgl-kernel" in made.pins and "sglang-kernel" in made.pins:
        made.left_out.append("sgl-kernel beside sglang-kernel: both own one import package, a matrix names one of them")
        kept = made.pins.pop("sgl-kernel")
        made.open.append(f"the report has sgl-kernel {kept.wanted} too")
    if made.pins and "torch" not in made.pins and set(STACK) & set(made.pins):
        _torch(made, report, index)


def _torch(made: Reconstruction, report: Report, index: Index) -> None:
    """The torch that the others require, where the report names none."""
    for name in ("sglang", "vllm", "torchvision", "torchaudio", "sgl-kernel", "sglang-kernel"):
        if name not in made.pins:
            continue
        for requirement in requirements_of(made.pins[name], index):
            if requirement.name == "torch" and (found := index.newest_of("torch", str(requirement.specifier))):
                made.pins["torch"] = Pin("torch", found, found, 0)
                made.open.append(f"torch is not stated: {found}, which {name} {made.pins[name].version} requires")
                return
    for name, pin in sorted(made.pins.items()):
        for requirement in requirements_of(pin, index):
            if requirement.name == "torch" and (found := _exact(requirement)) and index.exists("torch", found):
                made.pins["torch"] = Pin("torch", found, found, 0)
                made.open.append(f"torch is not stated: {found}, which {name} {pin.version} requires")
                return
    made.open.append("torch is not stated, and nothing in the report requires one release")
    for name in STACK:
        if name in made.pins:
            pin = made.pins.pop(name)
            made.left_out.append(f"{name} {pin.wanted}: needs a torch, and none is known")


def _exact(requirement: Requirement) -> str | None:
    """The one version that a requirement takes; None where it takes several."""
    return next(
        (each.version for each in requirement.specifier if each.operator == "==" and "*" not in each.version), None
    )


def _pin(
    made: Reconstruction,
    package: str,
    wanted: str,
    line: int,
    index: Index,
    files: Mapping[tuple[str, str], DirectFile],
) -> Pin | None:
    if (package, wanted) in files:
        return Pin(package, wanted, wanted, line, file=files[package, wanted])
    public, _, local = wanted.partition("+")
    if not local and index.exists(package, wanted):
        if index.yanked(package, wanted):
            made.open.append(f"{package} {wanted} was taken back by its publisher since")
        return Pin(package, wanted, wanted, line)
    what = _unreleased(wanted)
    if local and not what and index.exists(package, public):
        why = f"the default index has no local versions; {public}, which may be for another CUDA"
        if package == "torch" and _same_cuda(index, public, local):
            why = ""
        return Pin(package, public, wanted, line, f"{why} instead" if why else "")
    near = index.near(package, public)
    if near is None:
        made.left_out.append(f"{package} {wanted}: {what or 'not on the default index'}")
        return None
    return Pin(package, near, wanted, line, f"{what or 'not on the default index'}; {near} instead")


def _unreleased(wanted: str) -> str:
    if ".nv" in wanted:
        return "a vendor's build, on no index"
    if re.search(r"\.dev\d", wanted):
        return "a nightly or a commit, on no index"
    return "a build of somebody's own, on no index" if re.search(r"\+(?:g|git)?[0-9a-f]{6,}", wanted) else ""


def _same_cuda(index: Index, public: str, local: str) -> bool:
    """Whether the default index's torch of this release brings the CUDA that the local version names."""
    wanted = local_cuda(f"{public}+{local}")
    return wanted is not None and minor_of(pinned_cuda(index.requires("torch", public))) == wanted


def _gpus(made: Reconstruction, report: Report) -> None:
    known = {fact.capability for fact in load_facts(GpuFact)}
    found = [fact.value for name, fact in report.facts.items() if name.startswith("capability.") and fact.value]
    for value in dict.fromkeys(found):
        if value in known:
            made.gpus = (*made.gpus, value)
        else:
            made.left_out.append(f"compute capability {value}: no stack here is made for it")
    if not made.gpus:
        made.gpus = ("9.0",)
        made.open.append("no GPU that is known here is stated: compute capability 9.0")


def _date(made: Reconstruction, index: Index, today: date, when: date | None) -> None:
    if when is not None:
        made.as_of, made.as_of_because = when, "given"
        _younger(made, index, when)
        return
    days = {
        pin.name: day
        for pin in made.pins.values()
        if pin.file is None
        and pin.version == pin.wanted.partition("+")[0]
        and (day := index.uploaded(pin.name, pin.version))
    }
    if days:
        newest = max(days, key=lambda name: (days[name], name))
        # A day is resolved as of its beginning: the newest package has to be in it.
        made.as_of = min(days[newest] + timedelta(days=1), today)
        made.as_of_because = f"inferred: the day after {newest} {made.pins[newest].version}, the newest package in it"
    else:
        made.as_of, made.as_of_because = today, "today: nothing in the report has a date"


def _younger(made: Reconstruction, index: Index, when: date) -> None:
    """Say which packages of the report were not there yet on the day that was given: a resolver will not find them."""
    days = {
        f"{pin.name} {pin.version}": day
        for pin in made.pins.values()
        if pin.file is None and (day := index.appeared(pin.name, pin.version)) and day >= when
    }
    if not days:
        return
    names = sorted(days, key=lambda name: (days[name], name), reverse=True)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    said = ", ".join(f"{name} came on {days[name]}" for name in names[:3])
    made.open.append(
        f"the report is younger than --date {when}: {said}{more}; as of that day they cannot be locked. "
        f"Name {days[names[0]] + timedelta(days=1)} or later, or leave --date out"
    )
