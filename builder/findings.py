"""What a rule or check has to say: `Finding`, its severities, its text and JSON forms, and the exit code they add up to.

The JSON shape is a contract (``check`` and others print it): fields may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from builder.errors import ExitCode


class Severity(StrEnum):
    """`error` is proven to break, `warning` may break or costs something, `note` is worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Finding(BaseModel):
    """One statement of one rule about one subject.

    ``rule`` is a stable kebab-case name; ``subject`` a package, file or field; ``where`` is `file:line` of the input
    that the user wrote, when there is one; ``source`` is where the knowledge comes from (a URL, issue or measurement).
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    rule: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    severity: Severity
    subject: str
    message: str
    hint: str = ""
    source: str = ""
    evidence: dict[str, JsonValue] = Field(default_factory=dict)
    because: str = ""
    where: str = ""

    def __str__(self) -> str:
        """One line what and where, then `because`, then `hint`; no full stop, nothing that only colour would tell."""
        lines = [f"{self.severity}: {self.message} [{self.rule}]"]
        for label, text in (
            ("at", self.where),
            ("because", self.because),
            ("hint", self.hint),
            ("source", self.source),
        ):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


def sort_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then by rule and subject, so that output does not depend on the order of the rules."""
    rank = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}
    return sorted(
        findings, key=lambda finding: (rank[finding.severity], finding.rule, finding.subject, finding.message)
    )


def exit_code(findings: Sequence[Finding]) -> ExitCode:
    """`FINDINGS` (3) if any finding is an error, else 0."""
    return ExitCode.FINDINGS if any(finding.severity is Severity.ERROR for finding in findings) else ExitCode.OK
