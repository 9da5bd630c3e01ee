"""One finding for one matter: what the wheels show and a rule said already is said once, the cause before what follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import JsonValue

from builder.findings import Finding, Severity, sort_findings

_CUDA_RULES = ("torch-cuda", "kernel-cuda", "cuda-majors-mixed")
"""Rules that say which CUDA is the odd one: wheels of it fail for that reason."""


def merged(rules: Sequence[Finding], static: Iterable[Finding]) -> list[Finding]:
    """All findings, errors first, and of one severity the rules' before the links' before the GPUs'."""
    kept = list(rules)
    rest: list[Finding] = []
    for finding in static:
        same = [rule for rule in kept if _is_same(finding, rule)]
        root = next((rule for rule in same if rule.rule in _CUDA_RULES), None)
        if root is None and same and finding.severity is not Severity.ERROR:
            root = same[0]
        if root is not None:
            # The rule has the cause, or knows the consequence: the wheel's words go with it.
            kept[next(i for i, rule in enumerate(kept) if rule is root)] = _with_proof(root, finding)
        else:
            kept = [rule for rule in kept if not any(rule is each for each in same)]
            rest.append(_with_rules(finding, same))
    # One torch that several wheels do not fit is what most else follows from.
    causes = [finding for finding in rest if "wheels" in finding.evidence and finding.rule == "link-broken"]
    links = [finding for finding in rest if not finding.rule.startswith("arch-") and finding not in causes]
    gpus = [finding for finding in rest if finding.rule.startswith("arch-")]
    rank = {severity: number for number, severity in enumerate((Severity.ERROR, Severity.WARNING, Severity.NOTE))}
    found = [*causes, *sort_findings(kept), *sort_findings(links), *sort_findings(gpus)]
    return sorted(found, key=lambda finding: rank[finding.severity])


def _is_same(finding: Finding, rule: Finding) -> bool:
    """Whether a rule's finding is about the same matter as a wheel's."""
    if finding.rule == "link-uncertain":
        return rule.rule == "requirement-missing" and finding.subject in _strings(rule.evidence.get("required_by"))
    if finding.rule != "link-broken":
        return False
    cause = str(finding.evidence["cause"])
    wheels = finding.evidence.get("wheels")
    subjects = set(wheels) if isinstance(wheels, dict) else {finding.subject}
    if rule.rule in _CUDA_RULES:
        named = {
            rule.subject,
            *_strings(rule.evidence.get("required_by")),
            *_strings(rule.evidence.get("distributions")),
        }
        return (
            cause == "cuda"
            and rule.severity is Severity.ERROR
            and (bool(subjects & named) or rule.rule == "torch-cuda")
        )
    if rule.rule == "conflict-undeclared":
        if finding.severity is not Severity.ERROR:
            return False
        by = set(_strings(rule.evidence.get("required_by")))
        # Either what it needs is of another release than it requires, or it is one that others do not want.
        return (
            rule.subject in subjects
            or (rule.subject == cause and bool(by & subjects or wheels))
            or (cause == "cuda" and rule.subject == "torch" and bool(by & subjects))
        )
    if rule.rule == "built-for-torch":
        return rule.subject in subjects
    if rule.rule in ("known-incompatible", "known-cost") and rule.severity is not Severity.NOTE:
        together = rule.evidence.get("together")
        names = set(together) if isinstance(together, dict) else {rule.subject}
        return rule.subject in subjects and (cause in names or finding.severity is not Severity.ERROR)
    return False


def _strings(value: JsonValue) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def _with_proof(rule: Finding, wheel: Finding) -> Finding:
    if wheel.rule != "link-broken":
        return rule.model_copy(update={"evidence": {**rule.evidence, "wheel": wheel.evidence}})
    proof = wheel.because.split(": ", 1)[0]
    seen = f"as its wheel shows, {proof}"
    return rule.model_copy(
        update={
            "because": rule.because if proof in rule.because else f"{rule.because}; {seen}".removeprefix("; "),
            "evidence": {**rule.evidence, "wheel": wheel.evidence},
            "source": _together([rule.source, wheel.source]),
        }
    )


def _with_rules(wheel: Finding, rules: Sequence[Finding]) -> Finding:
    if not rules:
        return wheel
    return wheel.model_copy(
        update={
            "source": _together([wheel.source, *(rule.source for rule in rules)]),
            "hint": wheel.hint or rules[0].hint,
            "evidence": {**wheel.evidence, "rules": [rule.rule for rule in rules]},
        }
    )


def _together(sources: Sequence[str]) -> str:
    return "; ".join(dict.fromkeys(part for source in sources for part in source.split("; ")))
