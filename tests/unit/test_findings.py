"""Findings: text, JSON, order, exit code."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from builder.errors import ExitCode
from builder.findings import Finding, Severity, exit_code, sort_findings
from builder.schemas import finding_schema_text

FULL = Finding(
    rule="gpu-needs-cuda",
    severity=Severity.ERROR,
    subject="gpus[0]",
    message="GPU 12.1 needs CUDA 12.9",
    because="no earlier nvcc knows it",
    hint="take CUDA 12.9",
    source="https://docs.example/cuda",
    where="matrices/x.yaml:7",
    evidence={"gpu": "12.1", "looked_at": 1},
)


def plain(rule: str, severity: Severity, subject: str = "s", message: str = "m") -> Finding:
    return Finding(rule=rule, severity=severity, subject=subject, message=message)


def test_a_finding_as_text() -> None:
    assert str(FULL) == (
        "error: GPU 12.1 needs CUDA 12.9 [gpu-needs-cuda]\n"
        "  at: matrices/x.yaml:7\n"
        "  because: no earlier nvcc knows it\n"
        "  hint: take CUDA 12.9\n"
        "  source: https://docs.example/cuda"
    )
    assert str(plain("a", Severity.NOTE)) == "note: m [a]"


def test_a_finding_as_json_has_the_fields_that_others_read_and_fits_its_schema() -> None:
    for finding in (FULL, plain("a", Severity.NOTE)):
        shape = json.loads(finding.model_dump_json())
        assert {"rule", "severity", "subject", "message", "hint", "source", "evidence"} <= set(shape)
        Draft202012Validator(json.loads(finding_schema_text())).validate(shape)
        assert Finding.model_validate_json(finding.model_dump_json()) == finding


@pytest.mark.parametrize("rule", ["", "Upper", "a_b", "a--b", "-a", "a\n", "a b"])
def test_a_rule_has_a_kebab_case_name(rule: str) -> None:
    with pytest.raises(ValidationError):
        plain(rule, Severity.NOTE)


def test_errors_come_first_and_the_order_of_the_rules_does_not_matter() -> None:
    findings = [
        plain("b", Severity.NOTE),
        plain("b", Severity.ERROR),
        plain("a", Severity.ERROR, "t"),
        plain("a", Severity.ERROR, "s"),
        plain("a", Severity.WARNING),
    ]
    assert sort_findings(findings) == sort_findings(reversed(findings))
    assert [(f.severity, f.rule, f.subject) for f in sort_findings(findings)] == [
        ("error", "a", "s"),
        ("error", "a", "t"),
        ("error", "b", "s"),
        ("warning", "a", "s"),
        ("note", "b", "s"),
    ]


@pytest.mark.parametrize(
    ("severities", "code"),
    [
        ([], ExitCode.OK),
        ([Severity.NOTE, Severity.WARNING], ExitCode.OK),
        ([Severity.NOTE, Severity.ERROR], ExitCode.FINDINGS),
    ],
)
def test_only_errors_change_the_exit_code(severities: list[Severity], code: ExitCode) -> None:
    assert exit_code([plain("a", severity) for severity in severities]) is code
