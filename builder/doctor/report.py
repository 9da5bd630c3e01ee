"""A diagnosis for people and as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from builder.doctor.evaluate import Diagnosis
from builder.doctor.facts import Gpu, HostFacts
from builder.doctor.hints import listed, mebibytes
from builder.doctor.needs import Needs
from builder.files import pretty_size
from builder.findings import Finding, Severity


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The shape of docs/distribution.md."""
    return {
        "host": diagnosis.facts.as_json(),
        "verdict": diagnosis.verdict,
        "findings": [finding.model_dump(mode="json") for finding in diagnosis.findings],
        "needs": needs_json(diagnosis.needs),
    }


def needs_json(needs: Needs | None) -> dict[str, Any] | None:
    """The needs as data; None where a host was looked at by itself."""
    if needs is None:
        return None
    return needs.model_dump(mode="json")


def as_text(name: str, diagnosis: Diagnosis) -> str:
    """What was found, the findings, and one line with the verdict."""
    lines = [name, *facts_lines(diagnosis.facts)]
    if diagnosis.needs is not None:
        lines += [f"needs of {diagnosis.needs.subject}", *needs_lines(diagnosis.needs)]
    if diagnosis.findings:
        lines += ["", *map(str, diagnosis.findings)]
    subject = f"{diagnosis.needs.subject} on {name}" if diagnosis.needs is not None else name
    return "\n".join([*lines, "", f"{subject}: {verdict(diagnosis)}"])


def verdict(diagnosis: Diagnosis) -> str:
    """`broken, 1 error, 2 warnings`."""
    counts = [_count(diagnosis.findings, severity) for severity in (Severity.ERROR, Severity.WARNING)]
    return ", ".join([diagnosis.verdict, *filter(None, counts)])


def _count(findings: Sequence[Finding], severity: Severity) -> str:
    count = sum(finding.severity is severity for finding in findings)
    return f"{count} {severity}{'s' if count > 1 else ''}" if count else ""


def facts_lines(facts: HostFacts) -> list[str]:
    """A short table of what was found; what is not known says so."""
    rows = [
        ("system", _system(facts)),
        ("driver", _driver(facts)),
        ("GPUs", _gpus(facts)),
        ("links", _links(facts)),
        ("engine", _engine(facts)),
        ("toolkit", _toolkit(facts)),
        ("disk", _disk(facts)),
        ("memory", _memory(facts)),
    ]
    return [f"  {label:<8}  {text}" for label, text in rows if text]


def _unknown(facts: HostFacts, path: str) -> str:
    why = facts.why_unknown(path)
    return f"not known ({why})" if why else "not known"


def _system(facts: HostFacts) -> str:
    os = facts.os
    name = " ".join(part for part in (os.id, os.version) if part)
    parts = [name, f"kernel {os.kernel}" if os.kernel else "", os.arch or "", "WSL" if os.wsl else ""]
    parts += ["in a container"] if os.container else []
    return ", ".join(part for part in parts if part) or _unknown(facts, "os.id")


def _driver(facts: HostFacts) -> str:
    driver = facts.driver
    if driver.version is None and driver.cuda is None:
        return "none" if driver.loaded is False else _unknown(facts, "driver.version")
    cuda = f"CUDA {driver.cuda}" if driver.cuda else ""
    text = f"{driver.version} ({cuda})" if driver.version and cuda else driver.version or cuda
    return text + {True: ", open kernel modules", False: ", proprietary kernel modules", None: ""}[driver.open]


def _gpus(facts: HostFacts) -> str:
    if facts.gpus is None:
        return _unknown(facts, "gpus")
    groups: dict[str, list[Gpu]] = {}
    for gpu in facts.gpus:
        groups.setdefault(_gpu(gpu), []).append(gpu)
    return "; ".join(f"{len(gpus)} × {text}" for text, gpus in groups.items()) or "none"


def _gpu(gpu: Gpu) -> str:
    text = f"{gpu.name or 'unnamed'} ({gpu.capability or 'capability not known'})"
    text += f", {pretty_size(gpu.memory)}" if gpu.memory else ""
    return text + (", MIG on" if gpu.mig == "on" else "")


def _links(facts: HostFacts) -> str:
    if len(facts.gpus or ()) < 2:
        return ""
    pcie = facts.pcie
    parts = [{"nvlink": "NVLink", "pcie": "PCIe", "mixed": "NVLink and PCIe", None: ""}[pcie.topology]]
    if pcie.p2p is not None:
        whole = all(cell in ("OK", "X") for row in pcie.p2p for cell in row)
        parts.append("peer access between all" if whole else "peer access not between all")
    parts.append({"on": "IOMMU on", "off": "IOMMU off", "passthrough": "IOMMU passes through", None: ""}[pcie.iommu])
    parts.append({True: "ACS redirects", False: "ACS does not redirect", None: ""}[pcie.acs])
    if facts.fabric.nvswitch:
        parts.append(f"NVSwitch, fabric manager {facts.fabric.fabricmanager or 'not known'}")
    return ", ".join(part for part in parts if part) or _unknown(facts, "pcie.iommu")


def _engine(facts: HostFacts) -> str:
    engine = facts.engine
    if engine is None:
        return _unknown(facts, "engine")
    parts = [f"{engine.kind} {engine.version or ''}".strip(), f"{engine.store} store" if engine.store else ""]
    parts += ["without root" if engine.rootless else "", f"cgroup {engine.cgroup}" if engine.cgroup else ""]
    gpu = [name for name in engine.runtimes or () if "nvidia" in name]
    parts.append(f"runtime {listed(gpu)}" if gpu else "")
    return ", ".join(part for part in parts if part)


def _toolkit(facts: HostFacts) -> str:
    toolkit = facts.toolkit
    text = toolkit.version or ("installed" if toolkit.installed else "")
    if toolkit.installed is False:
        text = "not installed"
    if specs := toolkit.cdi_specs:
        text = ", ".join(part for part in (text, f"{len(specs)} CDI file{'s' if len(specs) > 1 else ''}") if part)
    return text or _unknown(facts, "toolkit.version")


def _disk(facts: HostFacts) -> str:
    free, total = facts.disk.data_root_free, facts.disk.data_root_total
    if free is None:
        return _unknown(facts, "disk.data_root_free")
    text = f"{pretty_size(free)}" + (f" of {pretty_size(total)}" if total else "") + " free"
    return text + (f" in {facts.engine.data_root}" if facts.engine is not None and facts.engine.data_root else "")


def _memory(facts: HostFacts) -> str:
    parts = [pretty_size(facts.memory.total) if facts.memory.total else ""]
    parts.append(f"/dev/shm {pretty_size(facts.shm.host)}" if facts.shm.host else "")
    default = facts.shm.container_default
    parts.append(f"{mebibytes(default)} of it in a container by default" if default else "")
    return ", ".join(part for part in parts if part)


def needs_lines(needs: Needs) -> list[str]:
    """What a stack needs, as a short table."""
    rows = [("GPUs", ", ".join(needs.gpus) + (f", on {needs.platform}" if needs.platform else ""))]
    if needs.driver is not None:
        rows.append(("driver", f"{needs.driver.minimum_driver} or later: {needs.driver.because}"))
    if needs.require:
        first = needs.require.split()[0]
        rows.append(("toolkit", f"`{first}`" + (" or …" if first != needs.require else "")))
    if needs.unpacked:
        about = "about " if needs.estimated else ""
        text = f"{about}{pretty_size(needs.unpacked)} unpacked"
        if needs.compressed:
            text += f", {about}{pretty_size(needs.compressed)} to pull"
        rows.append(("disk", text))
    return [f"  {label:<8}  {text}" for label, text in rows if text]


def matrices_text(rows: Sequence[tuple[str, Diagnosis | None, str]]) -> str:
    """Which of the matrices a host runs: name, verdict, and what decides."""
    width = max((len(name) for name, _, _ in rows), default=0)
    lines = ["stacks on it"]
    for name, diagnosis, why in rows:
        lines.append(f"  {name:<{width}}  {diagnosis.verdict if diagnosis else 'not known':<9}  {why}".rstrip())
    return "\n".join(lines)


def decides(diagnosis: Diagnosis, known: Sequence[Finding] = ()) -> str:
    """The message that makes a verdict what it is, of those that are not said of the host already."""
    said = {(finding.rule, finding.message) for finding in known}
    for finding in diagnosis.findings:
        if finding.severity is Severity.ERROR or (diagnosis.verdict == "uncertain" and finding.evidence.get("decides")):
            return finding.message if (finding.rule, finding.message) not in said else f"{finding.rule}, as above"
    return ""
