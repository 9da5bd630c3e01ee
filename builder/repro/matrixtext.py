"""A reconstruction as the text of a matrix, which says at its top what is open and what stands in another's place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from builder.errors import UsageError
from builder.facts import CudaFact, DistributionFact, load_facts
from builder.fields import EnvName
from builder.reports.model import Report
from builder.repro.clashes import clashes
from builder.repro.model import STACK, Index, Reconstruction, installed_extras, pinned_cuda, requirements_of
from builder.repro.yamltext import quoted

MADE = "# Made by `builder repro` from a report."
"""How a matrix begins that was made here."""


def lines(made: Reconstruction, report: Report, index: Index) -> Iterator[str]:
    """The matrix, line by line."""
    # The body first: making it tells what else is open.
    body = list(_body(made, report, index))
    yield f"{MADE} What the report does not say, or cannot be had:"
    for line in [*made.instead, *made.open, *made.left_out] or ["nothing"]:
        yield f"#   {line}"
    yield from body


def _body(made: Reconstruction, report: Report, index: Index) -> Iterator[str]:
    yield f"summary: {quoted('The stack of a bug report')}"
    yield f"# {made.as_of_because}."
    yield f"as_of: {made.as_of}"
    yield "platform: linux/amd64"
    yield f'python: "{made.python}"'
    distribution = _distribution(made.python)
    yield f"base: {{kind: archive, distribution: {distribution[0]}, release: {distribution[1]}}}"
    yield from _cuda(made, report, index)
    yield f"gpus: [{', '.join(quoted(gpu) for gpu in made.gpus)}]"
    yield from _stack(made)
    if extras := list(_extras(made)):
        yield "extras:"
        yield from (f"  - {line}" for line in extras)
    if pre := sorted(_prereleases(made, index)):
        yield f"prereleases: [{', '.join(pre)}]"
    if direct := [pin.file for pin in made.pins.values() if pin.file is not None]:
        yield "files:"
        for file in direct:
            yield f"  - name: {file.name}"
            yield f"    url: {quoted(file.url)}"
            yield f"    sha256: {file.sha256}"
            if file.requires:
                yield f"    requires: [{', '.join(quoted(item) for item in file.requires)}]"
            if file.metadata_version:
                yield f"    metadata_version: {file.metadata_version}"
    yield from _environment(made, report)
    yield from _overrides(made, index)


def _extras(made: Reconstruction) -> Iterator[str]:
    """The packages that have no key of their own, and the extras of those that have one and are little without."""
    for name, pin in sorted(made.pins.items()):
        extras = ",".join(installed_extras(name, pin.version)) if pin.file is None else ""
        if extras:
            yield f'"{name}[{extras}]=={pin.version}"'
        elif name not in STACK and name not in _compiler(made):
            yield f"{name}=={pin.version}"


def _prereleases(made: Reconstruction, index: Index) -> set[str]:
    """Packages of which the report has a pre-release, or a pinned package asks for one that has no final release then."""
    found = {pin.name for pin in made.pins.values() if Version(pin.version).is_prerelease} | made.prereleases
    for pin in made.pins.values():
        for requirement in requirements_of(pin, index):
            if not requirement.specifier.prereleases or requirement.name in made.pins:
                continue
            newest = index.newest_of(requirement.name, str(requirement.specifier), made.as_of)
            if newest is not None and Version(newest).is_prerelease:
                found.add(requirement.name)
    return found


def _environment(made: Reconstruction, report: Report) -> Iterator[str]:
    """The report's variables: what it was run with is part of what failed. Those that an image sets itself are left out."""
    found = variables(report)
    for name in [name for name in found if not _may_be_set(name)]:
        made.left_out.append(f"{name}={found.pop(name)}: the image or its build owns that variable")
    if found:
        yield "environment:"
    for name, value in found.items():
        yield f"  {name}: {quoted(value)}"


def _may_be_set(name: str) -> bool:
    try:
        TypeAdapter(EnvName).validate_python(name)
    except ValidationError:
        return False
    return True


def variables(report: Report) -> dict[str, str]:
    """The environment variables that a report names and that may be handed on: builder.reports reads no others."""
    return {
        name.removeprefix("env."): fact.value
        for name, fact in report.facts.items()
        if name.startswith("env.") and fact.value
    }


def _distribution(python: str) -> tuple[str, str]:
    """The release whose own Python this is; for one that no release has, the first."""
    rows = load_facts(DistributionFact)
    row = next((fact for fact in rows if fact.python == python), rows[0])
    return row.distribution, row.release


def _cuda_fact(made: Reconstruction) -> CudaFact | None:
    minor = ".".join(made.cuda.split(".")[:2])
    return next((fact for fact in load_facts(CudaFact) if fact.covers(minor)), None)


def _compiler(made: Reconstruction) -> tuple[str, ...]:
    """The compiler's parts, which have a place of their own in a matrix."""
    fact = _cuda_fact(made)
    return fact.compiler if fact is not None and fact.jit else ()


def _cuda(made: Reconstruction, report: Report, index: Index) -> Iterator[str]:
    """The CUDA of the torch, and the compiler's parts: the report's own, else the newest of that release."""
    made.cuda = _torch_cuda(made, report, index)
    minor = ".".join(made.cuda.split(".")[:2])
    wanted = _compiler(made)
    parts: dict[str, str] = {}
    for name in wanted:
        stated = made.pins[name].version if name in made.pins else None
        found = (
            stated if stated and stated.startswith(f"{minor}.") else index.newest_of(name, f"=={minor}.*", made.as_of)
        )
        if found:
            parts[name] = found
    if wanted and len(parts) == len(wanted):
        yield "cuda:"
        yield f"  version: {made.cuda}"
        yield "  compiler:"
        yield from (f"    {name}: {found}" for name, found in parts.items())
    else:
        yield f"cuda: {{version: {made.cuda}, jit: none}}"


def _torch_cuda(made: Reconstruction, report: Report, index: Index) -> str:
    """`13.0.2`: what torch pins, else what the report says of it, else of nvcc, else what the newest torch pins."""
    torch = made.pins.get("torch")
    if torch is not None and (pinned := pinned_cuda(requirements_of(torch, index))):
        return pinned
    for name in ("torch_cuda", "nvcc"):
        if (value := report.value(name)) is not None:
            made.open.append(f"CUDA's release is taken from {name.replace('_', ' ')}, {value}")
            return f"{'.'.join(value.split('.')[:2])}.0"
    # Of the report's time: a torch that came later brings a CUDA that the rest was not made for.
    newest = index.newest_of("torch", "", made.as_of) or index.newest_of("torch", "")
    found = pinned_cuda(index.requires("torch", newest)) if newest else ""
    if not found:
        raise UsageError("the report says nothing of a CUDA, and the index has no torch that does")
    made.open.append(f"no CUDA is stated: {found}, which torch {newest} requires")
    return found


def stack_lines(versions: Mapping[str, str], notes: Mapping[str, str] | None = None) -> Iterator[str]:
    """A matrix's `stack:` from the versions of packages; ``notes`` are comments behind some of them."""
    pins = {name: versions[name] for name in STACK if name in versions}
    if not pins:
        yield "stack: {}"
        return
    yield "stack:"
    cubin = pins.pop("flashinfer-cubin", "none")
    for name, version in pins.items():
        note = (notes or {}).get(name, "")
        if name != "flashinfer-python":
            yield f"  {name}: {version}{note}"
        elif cubin == version:
            yield f"  flashinfer: {version}{note}"
        else:
            yield f"  flashinfer: {{python: {version}, cubin: {cubin}}}{note}"


def _stack(made: Reconstruction) -> Iterator[str]:
    notes = {name: f"  # the report has {pin.wanted}" for name, pin in made.pins.items() if pin.version != pin.wanted}
    yield from stack_lines({name: pin.version for name, pin in made.pins.items()}, notes)


def _overrides(made: Reconstruction, index: Index) -> Iterator[str]:
    """What cannot be had together: a resolver refuses it undeclared."""
    pins = {name: pin.version for name, pin in made.pins.items()}
    stated = {name: requirements_of(pin, index) for name, pin in made.pins.items()}
    found = clashes(pins, stated, index, made.as_of)
    for clash in found:
        if clash.absent:
            made.instead.append(
                f"{clash.package}{clash.pin}, which {clash.who} requires: no wheel, and a build compiles nothing; "
                f"{f'{clash.ours} instead' if clash.ours else f'no release had one by {made.as_of}, and a later `--date` may find one'}"
            )
        elif clash.ours is None:
            made.open.append(
                f"{clash.who} requires {clash.package}{clash.pin}, which does not go with {clash.against}: "
                f"no release of {clash.package} was found that does; one has to be declared under `overrides`"
            )
    if any(clash.ours is not None for clash in found):
        yield "overrides:"
    for clash in found:
        if clash.ours is None:
            continue
        because = f"it goes with {clash.against}" if clash.against else "the report has it"
        if clash.absent:
            because = "it is the nearest release that has a wheel"
        yield f"  - package: {clash.package}"
        yield f"    pin: {quoted(clash.pin)}"
        yield f"    ours: {clash.ours}"
        yield f"    because: {because}, and {clash.who} requires another"
        yield f"    source: METADATA of {clash.who}; {'the index' if clash.against or clash.absent else 'the report'}"
