"""What a rule is: a function under a stable name, from what may be looked at to findings.

`RULES` holds those that were imported; `builder.rules` imports all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date

from packaging.version import Version

from builder.findings import Finding, sort_findings
from builder.lock import Lock
from builder.matrix import LoadedMatrix


@dataclass(frozen=True)
class Context:
    """What a rule may look at. ``lock`` is `None` as long as the matrix has none, ``driver`` where no host's is asked about.

    ``driver_cuda`` is the CUDA release that is reported on that host, if that was told.
    """

    loaded: LoadedMatrix
    today: date
    lock: Lock | None = None
    driver: str | None = None
    driver_cuda: str | None = None


Evaluate = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """One rule: its name (kebab-case, stable), what it looks for, and how."""

    name: str
    title: str
    evaluate: Evaluate
    needs_lock: bool = False


RULES: dict[str, Rule] = {}


def rule(name: str, *, needs_lock: bool = False) -> Callable[[Evaluate], Evaluate]:
    """Register the decorated function as a rule; the first line of its docstring is the rule's title."""

    def register(evaluate: Evaluate) -> Evaluate:
        if name in RULES:
            raise ValueError(f"two rules are called {name}")
        title = (evaluate.__doc__ or name).strip().split("\n")[0]
        RULES[name] = Rule(name, title, evaluate, needs_lock)
        return evaluate

    return register


def evaluate_rules(context: Context, rules: Mapping[str, Rule] = RULES) -> list[Finding]:
    """The findings of every rule that can be evaluated, errors first."""
    findings: list[Finding] = []
    for each in rules.values():
        if each.needs_lock and context.lock is None:
            continue
        for finding in each.evaluate(context):
            if finding.rule != each.name:
                raise ValueError(f"the rule {each.name} made a finding of {finding.rule}")
            findings.append(finding)
    return sort_findings(findings)


def local_cuda(version: str) -> str | None:
    """The CUDA release in a local version: `13.0` for `2.9.1+cu130`; `None` where it names none."""
    local = Version(version).local or ""
    digits = next((part[2:] for part in local.split(".") if part.startswith("cu") and part[2:].isdigit()), "")
    return f"{digits[:-1]}.{digits[-1]}" if len(digits) == 3 else None
