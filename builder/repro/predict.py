"""What follows from a report's facts: the rules of `check`, the verdicts of `abi` and `arch`, the driver, the patch sites.

The rules look at a lock of what the report says and nothing else. What it does not say is not taken to be missing: a
requirement of something that the report does not name is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from packaging.version import Version

from builder import facts
from builder.errors import BuilderError
from builder.files import sha256_hex
from builder.findings import Finding, Severity, sort_findings
from builder.lock import Artefact, Base, Lock, Resolver, inputs_digest
from builder.matrix import LoadedMatrix, MatrixError, parse_matrix
from builder.reports.model import Report
from builder.repro.matrixtext import stack_lines
from builder.repro.model import STACK, Index, Pin, Reconstruction, minor_of, requirements_of
from builder.repro.yamltext import quoted
from builder.rules import RULES, Context, evaluate_rules

# What a report cannot be asked: whether a matrix is well kept, what an image costs, whether all of a lock is there.
NOT_ABOUT_REPORTS = frozenset(
    {
        "as-of-in-future",
        "budget",
        "conflict-stale",
        "jit-none",
        "launch-flags",
        "override-mismatch",
        "prerelease-unnamed",
        "requirement-missing",
        "size-budget",
        "size-unknown",
        "stand-in",
        "wheel-platform",
        "base-python",
        "os-library-missing",
    }
)


@dataclass(frozen=True)
class Prediction:
    """Findings, and what could not be asked, with the reason."""

    findings: tuple[Finding, ...]
    unasked: tuple[str, ...] = ()


def stated_lock(made: Reconstruction, report: Report, index: Index) -> tuple[LoadedMatrix, Lock]:
    """The report's own versions as a matrix and a lock, for the rules. Raises `MatrixError` where they make none."""
    loaded = parse_matrix(_matrix(made, report), Path(f"{made.name}.yaml"))
    # All that the report names: what no index has is in the environment all the same.
    pins = {
        name: made.pins.get(name, Pin(name, "", fact.value, fact.line))
        for name, fact in report.packages()
        if fact.value and not fact.absent
    }
    names = set(pins)
    artefacts = [_artefact(pin, names, index) for pin in pins.values()]
    matrix = loaded.matrix
    lock = Lock(
        schema=1,
        matrix=matrix.name,
        inputs=inputs_digest(matrix),
        as_of=str(matrix.as_of),
        platform=matrix.platform,
        python=matrix.python,
        resolver=Resolver(name="uv", version="0"),
        base=Base(kind="archive", distribution=matrix.base.distribution, release=matrix.base.release, packages=()),
        artefacts=tuple(sorted(artefacts, key=lambda artefact: artefact.name)),
    )
    return loaded, lock


def _matrix(made: Reconstruction, report: Report) -> str:
    """A matrix with the versions as the report has them, local parts and all."""
    cuda = made.cuda
    if (said := report.value("torch_cuda")) is not None and minor_of(said) != minor_of(cuda):
        cuda = f"{minor_of(said)}.0"
    lines = [
        f"summary: {quoted('The stack of a bug report')}",
        f"as_of: {made.as_of}",
        "platform: linux/amd64",
        f'python: "{made.python}"',
        "base: {kind: archive, distribution: debian, release: bookworm}",
        f"cuda: {{version: {cuda}, jit: none}}",
        f"gpus: [{', '.join(quoted(gpu) for gpu in made.gpus)}]",
    ]
    pins = {name: made.pins[name] for name in STACK if name in made.pins}
    lines += stack_lines({name: _normal(pin.wanted) for name, pin in pins.items()})
    if pre := sorted(pin.name for pin in pins.values() if Version(pin.wanted).is_prerelease):
        lines.append(f"prereleases: [{', '.join(pre)}]")
    return "\n".join(lines) + "\n"


def _normal(version: str) -> str:
    return str(Version(version))


def _artefact(pin: Pin, names: set[str], index: Index) -> Artefact:
    """A package as the report has it. Its requirements are the substitute's only where that is the same release."""
    same = pin.version == pin.wanted.partition("+")[0] or pin.version == pin.wanted
    stated = requirements_of(pin, index) if pin.version and same and not (pin.instead and pin.name == "torch") else ()
    requires = sorted({f"{each.name}{each.specifier}" for each in stated if each.name in names})
    version = _normal(pin.wanted)
    file = f"{pin.name.replace('-', '_')}-{version}-py3-none-any.whl"
    exact = pin.version == pin.wanted and pin.file is None
    return Artefact(
        name=pin.name,
        version=version,
        metadata_version=version,
        file=file,
        sha256=sha256_hex(f"{pin.name} {pin.wanted}".encode()),
        size=None,
        index="default" if exact else None,
        url=None if exact else f"https://nowhere.invalid/{file.replace('+', '%2B')}",
        requires=tuple(requires),
        layer=facts.layer_of(pin.name),
    )


Ask = Callable[[], Sequence[Finding]]
"""A verdict that costs something: it reads wheels."""


def predict(
    report: Report,
    made: Reconstruction,
    index: Index,
    *,
    today: date,
    asks: Mapping[str, Ask] | None = None,
) -> Prediction:
    """Everything that can be said of a report's stack, errors first. ``asks`` are the verdicts by their names."""
    findings: list[Finding] = []
    unasked: list[str] = []
    rules = {name: rule for name, rule in RULES.items() if name not in NOT_ABOUT_REPORTS}
    try:
        loaded, lock = stated_lock(made, report, index)
    except MatrixError as error:
        unasked.append(f"the rules: {error.problems[0].message}")
    else:
        context = Context(loaded, today, lock, driver=report.value("driver"), driver_cuda=_reported(report))
        for name, rule in rules.items():
            try:
                findings += evaluate_rules(context, {name: rule})
            except BuilderError as error:
                unasked.append(f"rule {name}: {error.what}")
    findings += _between_gpus(report)
    for name, ask in (asks or {}).items():
        try:
            findings += ask()
        except BuilderError as error:
            unasked.append(f"{name}: {error.what}" + (f" ({error.because.splitlines()[0]})" if error.because else ""))
    once = {(f.rule, f.subject, f.message): f for f in findings}
    ordered = sort_findings(once.values())
    return Prediction(tuple(_placed(ordered)), tuple(unasked))


def _reported(report: Report) -> str | None:
    """The CUDA that nvidia-smi names beside the driver, where the two can be compared."""
    driver = report.value("driver")
    # A version of two numbers may be Windows', on WSL: those go with other releases.
    cuda = report.value("driver_cuda")
    return minor_of(cuda) if cuda is not None and driver is not None and driver.count(".") != 1 else None


def _between_gpus(report: Report) -> Iterator[Finding]:
    """What `doctor` says of GPUs that reach each other over PCIe: of the IOMMU and ACS no report tells."""
    from builder.doctor.facts import Gpu, HostFacts, Pcie
    from builder.doctor.peer_rules import no_peer_access, redirected

    names = {
        int(index): fact.value
        for name, fact in report.facts.items()
        if (index := name.removeprefix("gpu.")).isdigit() and fact.value
    }
    count = max([*(index + 1 for index in names), int(report.value("gpu_count") or 0)])
    topology = report.value("topology")
    host = HostFacts(
        gpus=tuple(Gpu(index=index, name=names.get(index)) for index in range(count)),
        pcie=Pcie(topology="nvlink" if topology == "nvlink" else "pcie" if topology == "pcie" else None),
        unknown={"pcie": "a report does not tell"},
    )
    if topology == "nvlink":
        return
    for finding in (*no_peer_access(host, None), *redirected(host, None)):
        if finding.rule == "p2p-not-known":
            # On the host itself it is a question; here there is somebody for whom something goes wrong.
            if topology is None and not any(each.kind == "collective-hang" for each in report.symptoms):
                continue
            finding = finding.model_copy(update={"severity": Severity.WARNING})
        yield finding


def _placed(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Without places in a matrix that nobody wrote."""
    for finding in findings:
        yield finding.model_copy(update={"where": ""})
