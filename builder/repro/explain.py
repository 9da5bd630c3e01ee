"""Which finding is why: the symbol, library, device or attribute of an error's text matched to what was found.

Two causes may stand behind one message: all that match are given, the most direct first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from builder.agree import KERNELS
from builder.facts import KernelFact, load_facts
from builder.facts.reportmodels import SymptomFact
from builder.findings import Finding, Severity
from builder.ledger import smoke_facts
from builder.reports.model import Report, Symptom

Matches = Callable[[Symptom, Finding], bool]


@dataclass(frozen=True)
class Explanation:
    """A symptom with the findings that produce it, by their places in the list of findings."""

    symptom: Symptom
    findings: tuple[int, ...]


def _has(key: str, part: str) -> Matches:
    def matches(symptom: Symptom, finding: Finding) -> bool:
        values = finding.evidence.get(key)
        wanted = symptom.parts.get(part)
        return wanted is not None and isinstance(values, list) and wanted.partition("@")[0] in values

    return matches


def _rule(*names: str) -> Matches:
    return lambda _, finding: finding.rule in names and finding.severity is not Severity.NOTE


def _rule_at_all(*names: str) -> Matches:
    return lambda _, finding: finding.rule in names


def _names(part: str) -> Matches:
    """The finding speaks of what the symptom names, or of the package that this is in: `a` of `a.b.c`. Whole words count."""

    def matches(symptom: Symptom, finding: Finding) -> bool:
        wanted = symptom.parts.get(part)
        if not wanted:
            return False
        text = f"{finding.subject} {finding.message} {finding.because} {finding.hint}".replace("_", "-")
        words = {wanted.replace("_", "-"), wanted.partition(".")[0].replace("_", "-")}
        return any(re.search(rf"(?<![\w.-]){re.escape(word)}(?!\w)", text) for word in words)

    return matches


def _of_operator(symptom: Symptom, finding: Finding) -> bool:
    """The finding is of the distribution that registers the operator: torchvision of `torchvision::nms`."""
    own = canonicalize_name(symptom.parts.get("operator", "").partition("::")[0])
    owners = set(KERNELS) if own in KERNELS else {own}
    requiring = finding.evidence.get("required_by")
    concerned = [finding.subject, *(map(str, requiring) if isinstance(requiring, list) else ())]
    return any(name in owners or name == f"{own}-python" for name in concerned)


def _lacks(symptom: Symptom, finding: Finding) -> bool:
    """The finding is of patch sites that add this very attribute to this very class."""
    added = finding.evidence.get("adds")
    return isinstance(added, list) and f"{symptom.parts.get('owner')}.{symptom.parts.get('attribute')}" in added


def _of_glibc(symptom: Symptom, _: Finding) -> bool:
    """The version is one of the C library's, of which the rules know; of libstdc++'s they do not."""
    return symptom.parts.get("version", "").startswith("GLIBC_")


def _both(*several: Matches) -> Matches:
    return lambda symptom, finding: all(matches(symptom, finding) for matches in several)


def _major(symptom: Symptom, finding: Finding) -> bool:
    """A library of one CUDA major is missing, and the finding is that two are mixed, or that the kernel is another's."""
    library = symptom.parts.get("library", "")
    return library.startswith(("libcu", "libnv")) and finding.rule in ("cuda-majors-mixed", "kernel-cuda", "torch-cuda")


WHY: Mapping[str, Sequence[Matches]] = {
    "undefined-symbol": (_has("symbols", "symbol"), _rule("built-for-torch", "vendor-build")),
    "missing-library": (_has("libraries", "library"), _major),
    "missing-version": (_has("versions", "version"), _both(_rule("glibc", "wheel-platform"), _of_glibc)),
    "no-kernel-image": (_rule("arch-uncovered", "known-incompatible"),),
    "capability-range": (_rule("arch-uncovered"),),
    "common-ops": (
        _both(_rule("links-broken"), lambda _, f: f.subject in KERNELS),
        _rule("arch-uncovered", "built-for-torch", "kernel-cuda"),
    ),
    "driver-too-old": (_rule("driver"),),
    "driver-insufficient": (_rule("driver"),),
    "container-requirement": (_rule("driver"),),
    "cuda-error-803": (_rule("driver"),),
    "cuda-error-804": (_rule("driver"),),
    "unsupported-architecture": (
        _rule_at_all("launch-flags", "known-incompatible", "known-cost", "backend-not-for-gpu"),
    ),
    "nvcc-architecture": (_rule("gpu-needs-cuda", "compiler-incoherent"),),
    "ptxas-architecture": (_rule("triton-ptxas", "gpu-needs-cuda"),),
    "ptx-version": (_rule("compiler-incoherent"),),
    "cudnn-check": (_both(_rule("known-incompatible"), lambda _, f: "cudnn" in f.message.lower()),),
    "inconsistent-version": (_rule_at_all("metadata-version"),),
    "hash-mismatch": (_rule_at_all("known-content"),),
    "cubin-version": (_rule("flashinfer-versions", "flashinfer-parts", "cubin-missing"),),
    "required-version": (_both(_rule("runtime-check", "known-incompatible"), _names("package")),),
    "missing-operator": tuple(
        _both(_rule(rule), _of_operator) for rule in ("links-broken", "built-for-torch", "conflict-undeclared")
    ),
    "missing-attribute": (
        _both(_rule_at_all("patch-needed"), _lacks),
        _both(_rule_at_all("known-incompatible"), _names("attribute")),
    ),
    "missing-name": (_both(_rule("known-incompatible"), _names("owner")),),
    "hub-kernel": (_both(_rule("known-incompatible"), lambda _, f: "revision or a version" in f.because),),
    "collective-hang": (_rule("no-peer-access", "p2p-not-known"),),
    "missing-module": (_names("module"),),
    "unexpected-argument": (_both(_rule_at_all("known-incompatible"), _names("function")),),
}


def explain(report: Report, findings: Sequence[Finding]) -> tuple[Explanation, ...]:
    """Each symptom of the report with what explains it; an empty list where nothing found does."""
    return tuple(Explanation(symptom, tuple(_of(symptom, findings))) for symptom in report.symptoms)


def _of(symptom: Symptom, findings: Sequence[Finding]) -> Iterator[int]:
    seen: set[int] = set()
    for matches in WHY.get(symptom.kind, ()):
        for number, finding in enumerate(findings):
            if number not in seen and matches(symptom, finding):
                seen.add(number)
                yield number


def order(findings: Sequence[Finding], why: Iterable[Explanation]) -> list[int]:
    """The findings' places as they are shown: what explains a symptom first."""
    first = list(dict.fromkeys(number for each in why for number in each.findings))
    return first + [number for number in range(len(findings)) if number not in first]


def from_symptom_alone(symptom: Symptom, report: Report) -> list[tuple[str, str, str]]:
    """What a symptom says by itself: why, what to do and where that is known from."""
    found = [
        (fact.because, fact.hint, fact.source) for fact in load_facts(SymptomFact) if _about(fact, symptom, report)
    ][:1]
    library = symptom.parts.get("library", "")
    if symptom.kind == "missing-library" and (major := _cuda_major(library)):
        because = f"{library} is CUDA {major}'s: something was compiled for CUDA {major}, and its wheels are not there"
        names = " and ".join(_built_for(major))
        hint = f"of sglang's kernels {names} are; take releases of one CUDA" if names else "take releases of one CUDA"
        found.append((because, hint, "facts/kernels.yaml"))
    if symptom.kind == "undefined-symbol" and (said := _symbol(symptom.parts.get("symbol", ""))):
        found.append(
            (
                said,
                "`builder abi KERNEL==VERSION --find torch` tells which torch it fits",
                "the tables of torch releases",
            )
        )
    return found


def _about(fact: SymptomFact, symptom: Symptom, report: Report) -> bool:
    named = (re.fullmatch(pattern, symptom.parts.get(name, "")) for name, pattern in fact.parts.items())
    if fact.kind != symptom.kind or not all(named):
        return False
    stated = {name: each.value for name, each in report.facts.items()}
    capabilities = {value for name, value in stated.items() if name.startswith("capability.") and value}
    products = " ".join(value for name, value in stated.items() if name.startswith("gpu."))
    if fact.capabilities and not capabilities & set(fact.capabilities):
        return False
    return not fact.products or any(word in products for word in fact.products)


def _built_for(major: str) -> list[str]:
    """The kernel releases that are linked to a CUDA major."""
    return [f"{fact.package} {fact.versions}" for fact in load_facts(KernelFact) if str(fact.cuda_major) == major]


def _cuda_major(library: str) -> str | None:
    name, _, number = library.partition(".so.")
    major = smoke_facts()["cuda_sonames"].get(f"{name}.so", {}).get(number)
    return str(major) if major is not None else None


def _symbol(symbol: str) -> str:
    """Which releases of torch export a name that is torch's, from the tables that are shipped."""
    from builder.abi import tables
    from builder.abi.symbol import exporting
    from builder.smoke.link import demangle

    plain = demangle([symbol])[symbol]
    if not plain.startswith(("c10::", "at::", "torch::", "caffe2::")) and not symbol.startswith(
        ("aoti_torch", "torch_")
    ):
        return ""
    found = exporting(symbol)
    if not found:
        return f"`{plain}` is torch's, and no release from {tables.versions('torch')[0]} on exports it: it was needed by something older"
    return f"`{plain}` is torch's, and {', '.join(found)} export it: what needs it was built for one of them, or before"
