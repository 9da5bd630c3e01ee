"""Facts of a host × needs of a stack → findings and a verdict. Pure; each rule is a function, and says nothing of what it
does not know: what is decisive and not known makes the verdict uncertain (`not-known`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

from builder.doctor import container_rules, driver_rules, gpu_rules, peer_rules
from builder.doctor.facts import HostFacts
from builder.doctor.hints import listed
from builder.doctor.needs import Needs
from builder.findings import Finding, Severity, sort_findings

Verdict = Literal["ok", "broken", "uncertain"]

Rule = Callable[[HostFacts, Needs | None], Iterable[Finding]]


@dataclass(frozen=True)
class Diagnosis:
    """What was found of one host. ``needs`` is None where the host was looked at by itself."""

    facts: HostFacts
    needs: Needs | None
    findings: tuple[Finding, ...]
    verdict: Verdict


def evaluate(facts: HostFacts, needs: Needs | None = None) -> Diagnosis:
    """All that is to be said. `broken`: something is proven to fail; `uncertain`: what decides is not known."""
    findings = sort_findings(found for rule in RULES for found in rule(facts, needs))
    verdict: Verdict = "ok"
    if any(finding.severity is Severity.ERROR for finding in findings):
        verdict = "broken"
    elif any(finding.evidence.get("decides") for finding in findings):
        verdict = "uncertain"
    return Diagnosis(facts, needs, tuple(findings), verdict)


def not_known(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """What decides whether a stack runs, and is not known."""
    if facts.gpus == ():
        return
    open_: dict[str, str] = {}
    if facts.driver.version is None and facts.driver.cuda is None and facts.driver.loaded is not False:
        open_["driver.version"] = "the driver"
    if facts.gpus is None:
        open_["gpus"] = "the GPUs"
    elif any(gpu.capability is None for gpu in facts.gpus):
        open_["gpus.capability"] = "the compute capability of a GPU"
    if facts.engine is None and container_rules.engine_is_absent(facts) is None:
        open_["engine"] = "the engine"
    elif facts.engine is not None and facts.toolkit.installed is None and not container_rules.has_runtime(facts):
        open_["toolkit.version"] = "the container toolkit"
    if needs is not None and needs.unpacked and facts.disk.data_root_free is None:
        open_["disk.data_root_free"] = "the free disk"
    if not open_:
        return
    reasons: dict[str, list[str]] = {}
    for path, words in open_.items():
        reasons.setdefault(facts.why_unknown(path) or "the facts do not say", []).append(words)
    because = "; ".join(
        f"{listed(words)}: {reason}" if len(reasons) > 1 else reason for reason, words in reasons.items()
    )
    paths: list[JsonValue] = list(open_)
    yield Finding(
        rule="not-known",
        severity=Severity.NOTE,
        subject=next(iter(open_)),
        message=f"{listed(list(open_.values()), most=6)} {'are' if len(open_) > 1 else 'is'} not known",
        because=because,
        hint="collect on the host itself, as root: `builder doctor --collect`, or from here with `--host ssh://HOST`",
        evidence={"decides": True, "unknown": paths},
    )


RULES: tuple[Rule, ...] = (*driver_rules.RULES, *gpu_rules.RULES, *container_rules.RULES, *peer_rules.RULES, not_known)
"""Every rule, in no particular order."""
