"""What `builder arch` has to say: findings on the devices that are asked for, and the report as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from builder import arch
from builder.arch import Coverage, Loading, Pair, dotted
from builder.errors import ExitCode
from builder.facts import GpuFact, load_facts
from builder.facts.devices import ArchRunFact, PtxFact
from builder.fatbin import Container
from builder.findings import Finding, Severity, exit_code, sort_findings
from builder.patches.listing import cost, cost_json
from builder.patches.releases import Traffic

_NO_IMAGE = "the file loads all the same; its first kernel fails with `no kernel image is available` (CUDA error 209)"


@dataclass(frozen=True)
class Library:
    """A shared object that was looked at. ``file`` is a path, or a member of the wheel ``wheel``; ``digest`` what RECORD says
    of it. ``error`` is why it could not be read."""

    file: str
    wheel: str
    distribution: str
    version: str
    digest: str
    containers: tuple[Container, ...]
    loading: Loading
    error: str = ""


@dataclass(frozen=True)
class Asked:
    """The devices that are asked for, and the newest PTX that their driver knows; None where no driver is named."""

    gpus: tuple[Pair, ...]
    isa: Pair | None
    driver: str = ""


@dataclass(frozen=True)
class Report:
    """What was looked at and what it means. ``seconds`` is how long it took."""

    asked: Asked
    libraries: tuple[Library, ...]
    findings: tuple[Finding, ...]
    traffic: Traffic
    seconds: float

    @property
    def exit_code(self) -> ExitCode:
        """3 where a finding is an error."""
        return exit_code(self.findings)


# --- what it means ----------------------------------------------------------------------------------------------------


def evaluate(libraries: Sequence[Library], question: Asked) -> list[Finding]:
    """What is to be said of libraries on the devices that are asked for."""
    found: list[Finding] = []
    seen: set[tuple[str, Loading]] = set()
    for library in libraries:
        if _content(library) in seen:
            continue
        seen.add(_content(library))
        if library.error:
            found.append(
                Finding(
                    rule="arch-unreadable",
                    severity=Severity.ERROR,
                    subject=library.file,
                    message=f"the GPU code of `{library.file}` cannot be read",
                    because=library.error,
                )
            )
        # Devices of which the same is to be said share a finding.
        groups: dict[tuple[bool, Coverage], list[Pair]] = {}
        for device in question.gpus if library.containers else ():
            coverage = arch.cover(library.containers, device, question.isa)
            groups.setdefault((library.loading.on(device), coverage), []).append(device)
        for (loaded, coverage), together in groups.items():
            found += _said(library, loaded, coverage, together, question)
    if question.gpus and any(library.containers for library in libraries):
        found += [told] if (told := run_only(question.gpus)) is not None else []
    return sort_findings(found)


def _content(library: Library) -> tuple[str, Loading]:
    """What is one matter: the same content under several names, unless the package treats these differently."""
    return library.digest or library.file, replace(library.loading, file="")


def _said(
    library: Library, loaded: bool, coverage: Coverage, together: Sequence[Pair], question: Asked
) -> Iterator[Finding]:
    loading, on = library.loading, ", ".join(map(dotted, together))
    base: dict[str, Any] = {
        "subject": library.file,
        "source": loading.source,
        "evidence": {"devices": [dotted(gpu) for gpu in together], "covered": coverage.covered, "of": coverage.of},
    }
    some = f"code for {on} in {coverage.covered} of {coverage.of} containers only"
    message = f"`{library.file}` has {some if coverage.covered else f'no code for {on}'}"
    have = arch.names(library.containers, "cubin") + arch.names(library.containers, "ptx")
    if coverage.whole:
        if coverage.isa is not None and loaded:
            count = sum(count for name, count in coverage.by if name.startswith("compute"))
            needs = "" if question.isa else f"; {_newer_driver(coverage.isa)}"
            yield Finding(
                rule="arch-compiled-there",
                severity=Severity.NOTE,
                message=f"`{library.file}` has PTX and no cubin for {on} in {count} of {coverage.of} containers",
                because=f"the driver compiles PTX when the file is first used, and keeps it in its cache{needs}",
                **base,
            )
    elif not loaded:
        yield Finding(
            rule="arch-not-loaded",
            severity=Severity.NOTE,
            message=f"{message}, and is not loaded there",
            because=loading.otherwise,
            **base,
        )
    elif coverage.newer:
        newest = max(image.isa for each in library.containers for image in each.images if image.isa)
        yield Finding(
            rule="arch-newer-ptx",
            severity=Severity.WARNING if loading.only_for else Severity.ERROR,
            message=f"{message} that a {question.driver} takes",
            because=f"there is PTX {dotted(newest)} for it, and the driver compiles PTX {dotted(question.isa or (0, 0))} at most",
            hint=_newer_driver(newest),
            **base,
        )
    else:
        consequence = f"it is only for {loading.only_for}: {loading.otherwise}" if loading.only_for else _NO_IMAGE
        yield Finding(
            rule="arch-uncovered",
            severity=Severity.WARNING if loading.only_for else Severity.ERROR,
            message=message,
            because=f"it has {', '.join(have) or 'nothing'}; {consequence}",
            **base,
        )


def _newer_driver(isa: Pair) -> str:
    rows = [row for row in load_facts(PtxFact) if arch.pair(row.isa) >= isa]
    if not rows:
        return f"PTX {dotted(isa)} needs a driver that is newer than any in facts/ptx.yaml"
    return f"PTX {dotted(isa)} needs a driver for CUDA {rows[0].cuda} or newer (branch {rows[0].driver})"


def run_only(gpus: Sequence[Pair]) -> Finding | None:
    """On which of the devices the rules are what is documented, and not what was run; None where they were run on all."""
    runs = {arch.pair(fact.capability): fact for fact in load_facts(ArchRunFact)}
    others = [dotted(gpu) for gpu in gpus if gpu not in runs]
    if not others:
        return None
    ran = "; ".join(f"{fact.cases} cases on an {fact.device}, driver {fact.driver}" for fact in runs.values())
    return Finding(
        rule="arch-not-run",
        severity=Severity.NOTE,
        subject=", ".join(others),
        message=f"what runs on {', '.join(others)} is told by NVIDIA's documented rules, not by a run",
        because=f"they were run for {', '.join(dotted(gpu) for gpu in runs)} only: {ran}",
        source="CUDA programming guide, Binary Compatibility; facts/abi.md section C",
    )


def evidence_of(device: Pair) -> str:
    """`run` where the rules were run on such a device, else `documented`."""
    return "run" if dotted(device) in {fact.capability for fact in load_facts(ArchRunFact)} else "documented"


# --- telling ----------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report as data: a contract; fields may be added, never renamed."""
    return {
        "ok": report.exit_code == ExitCode.OK,
        "files": [_file_json(library, report.asked) for library in report.libraries],
        "findings": [finding.model_dump(mode="json") for finding in report.findings],
        "driver": report.asked.driver or None,
        "newest_ptx": dotted(report.asked.isa) if report.asked.isa else None,
        **cost_json(report.traffic, report.seconds),
    }


def _file_json(library: Library, question: Asked) -> dict[str, Any]:
    images = [image for each in library.containers for image in each.images]
    isas = {image.isa for image in images if image.isa}
    return {
        "file": library.file,
        "wheel": library.wheel or None,
        "distribution": library.distribution or None,
        "version": library.version or None,
        "containers": len(library.containers),
        "images": arch.names(library.containers, "cubin"),
        "ptx": arch.names(library.containers, "ptx"),
        "ptx_isa": [dotted(isa) for isa in sorted(isas)],
        "other": sorted({image.name for image in images if image.kind not in ("cubin", "ptx")}),
        "error": library.error or None,
        "gpus": {
            dotted(gpu): _gpu_json(arch.cover(library.containers, gpu, question.isa), library.loading, gpu)
            for gpu in devices(question)
        },
    }


def _gpu_json(coverage: Coverage, loading: Loading, device: Pair) -> dict[str, Any]:
    return {
        "covered": coverage.covered,
        "of": coverage.of,
        "by": dict(coverage.by),
        "newer_ptx": dict(coverage.newer),
        "loaded": loading.on(device),
        "only_for": loading.only_for or None,
        "evidence": evidence_of(device),
    }


def devices(question: Asked) -> tuple[Pair, ...]:
    """The devices that are asked for, or else those of facts/gpus.yaml."""
    return question.gpus or tuple(arch.pair(fact.capability) for fact in load_facts(GpuFact))


def as_text(report: Report) -> str:
    """The report for people: a table for each wheel, what is to be said of it, and what it cost."""
    lines: list[str] = []
    for title, libraries in _grouped(report.libraries):
        lines += [*([title] if title else []), *_table(libraries, report.asked), ""]
    for finding in report.findings:
        lines += [str(finding), ""]
    lines += _verdicts(report)
    # Of files on this machine there is nothing to say.
    lines += [cost(report.traffic, report.seconds)] if report.traffic.bytes_total else []
    return "\n".join(lines).rstrip("\n")


def _grouped(libraries: Iterable[Library]) -> Iterator[tuple[str, list[Library]]]:
    groups: dict[str, list[Library]] = {}
    for library in libraries:
        title = f"{library.distribution} {library.version}, {library.wheel}" if library.wheel else ""
        groups.setdefault(title, []).append(library)
    yield from groups.items()


def _table(libraries: Sequence[Library], question: Asked) -> Iterator[str]:
    """A row a file: how many of its containers have an image for each device, by which; and what images there are."""
    rows: dict[tuple[str, Loading], list[Library]] = {}
    bare = [library for library in libraries if not library.containers and not library.error]
    for library in libraries:
        if library not in bare:
            rows.setdefault(_content(library), []).append(library)
    table = [["file", *(dotted(gpu) for gpu in devices(question)), "images"]]
    for together in rows.values():
        library = together[0]
        name = library.file if len(together) == 1 else f"{library.file} ({len(together)} names)"
        images = arch.names(library.containers, "cubin") + arch.names(library.containers, "ptx")
        table.append([name, *(_cell(library, gpu, question) for gpu in devices(question)), " ".join(images)])
    if len(table) > 1:
        widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
        for row in table:
            yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        if any(cell.startswith("(") for row in table for cell in row[1:-1]):
            yield "  ( ) the package does not load the file on that device"
    if bare:
        yield f"  no GPU code in {len(bare)} more: {', '.join(library.file for library in bare)}"


def _cell(library: Library, device: Pair, question: Asked) -> str:
    if library.error:
        return "unreadable"
    coverage = arch.cover(library.containers, device, question.isa)
    if question.gpus:
        by = [name if len(coverage.by) == 1 else f"{name} {count}" for name, count in coverage.by]
        text = f"{coverage.covered}/{coverage.of} {', '.join(by) or 'none'}"
    else:
        text = "all" if coverage.whole else f"{coverage.covered}/{coverage.of}" if coverage.covered else "none"
    return text if library.loading.on(device) else f"({text})"


def _verdicts(report: Report) -> Iterator[str]:
    """A line for each device that is asked for."""
    names = {fact.capability: fact.names[0] for fact in load_facts(GpuFact)}
    for gpu in map(dotted, report.asked.gpus):
        errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
        lacking = [error.subject for error in errors if _about(error, gpu)]
        if lacking:
            said = f"not covered by {', '.join(lacking)}"
        elif any(library.containers for library in report.libraries):
            said = "covered by every file that is loaded there"
        else:
            said = "nothing to cover: no file that was looked at has GPU code"
        yield f"{gpu}, {names.get(gpu, 'no device known')}: {said}"


def _about(finding: Finding, gpu: str) -> bool:
    """Whether a finding is about a device; one that names none is about all."""
    named = finding.evidence.get("devices")
    return not isinstance(named, list) or gpu in named
