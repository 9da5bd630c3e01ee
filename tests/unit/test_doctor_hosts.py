"""Recorded and made hosts: the whole text that doctor prints of each, and the table in docs/doctor.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.doctor.evaluate import evaluate
from builder.doctor.facts import HostFacts, parse_facts, read_facts
from builder.doctor.readings import facts_of
from builder.errors import UsageError
from tests import host_cases
from tests.host_cases import HOSTS, HostCase
from tests.made import ROOT

CASES = host_cases.cases()


@pytest.mark.parametrize("case", CASES, ids=[f"{case.name}-{case.case}" for case in CASES])
def test_what_doctor_says(case: HostCase) -> None:
    """Another text is written by `python -m tests.host_cases --write`; read the difference first."""
    assert case.text() == case.expected.read_text(encoding="utf-8")


def test_every_host_and_every_text_is_of_a_case() -> None:
    assert {path.stem for path in HOSTS.glob("*.json")} == {case.host for case in CASES}
    assert {path.name for path in HOSTS.glob("*.txt")} == {case.expected.name for case in CASES}


def test_the_table_in_the_documentation() -> None:
    text = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert host_cases.table() in text, "`python -m tests.host_cases` prints it"


def test_six_hosts_and_more_are_made_and_say_so() -> None:
    made = [case for case in CASES if case.made]
    assert len(made) >= 6
    assert all(case.host.startswith("made-") for case in made)
    assert not any(case.host.startswith("made-") for case in CASES if case.case)


def test_two_h200_without_an_engine() -> None:
    text = (HOSTS / "transcripts" / "h200x2.txt").read_text(encoding="utf-8")
    found = evaluate(facts_of(text), host_cases.needs_of("cu130"))
    assert found.verdict == "broken"
    assert [str(finding).splitlines()[0] for finding in found.findings] == [
        "error: there is no container engine [engine-absent]"
    ]


# --- files of facts ---------------------------------------------------------------------------------------------------


def test_a_file_of_a_newer_builder_may_say_more() -> None:
    facts = parse_facts('{"schema": 1, "later": {"a": 1}, "driver": {"version": "580.95.05", "later": 2}}', "x")
    assert facts == HostFacts.model_validate({"schema": 1, "driver": {"version": "580.95.05"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "error: the facts of a host are not JSON\n  at: x\n"
            + "  because: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n",
        ),
        (
            '{"schema": 2}',
            "error: the facts of a host cannot be read\n  at: x\n  because: it is of schema 2, this builder reads 1\n",
        ),
        (
            '{"schema": 1, "gpus": [{"index": 0, "capability": "twelve"}]}',
            "error: the facts of a host cannot be read\n  at: x\n"
            + "  because: gpus.0.capability: String should match pattern '^[1-9][0-9]?\\.[0-9]\\z'\n",
        ),
        (
            '{"schema": 1, "hostname": "alice-pc"}',
            "error: the facts of a host cannot be read\n  at: x\n  because: hostname: Input should be null\n",
        ),
    ],
)
def test_what_is_no_file_of_facts(text: str, message: str) -> None:
    hint = "  hint: `builder doctor --collect > FILE` writes one, on the host or with `--host`"
    with pytest.raises(UsageError) as caught:
        parse_facts(text, "x")
    assert str(caught.value) == message + hint


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the facts of a host cannot be read"):
        read_facts(tmp_path / "none.json")


def test_the_reason_of_a_part_goes_for_all_in_it() -> None:
    facts = HostFacts(unknown={"*": "nothing was asked", "driver": "no shell", "disk.tmp_free": "no `df`"})
    assert [facts.why_unknown(path) for path in ("driver.version", "disk.tmp_free", "disk.quota")] == [
        "no shell",
        "no `df`",
        "nothing was asked",
    ]


def test_the_shape_is_that_of_the_contract() -> None:
    data = json.loads(json.dumps(HostFacts().as_json()))
    assert set(data) >= {
        "schema", "collected", "hostname", "os", "driver", "gpus", "engine", "toolkit", "disk", "memory", "shm", "ulimits",
        "compat", "fabric", "pcie", "network", "present", "unknown",
    }  # fmt: skip
    assert set(data["driver"]) >= {"version", "cuda", "kind", "open"}
    assert set(data["pcie"]) >= {"iommu", "acs", "p2p", "topology"}
    assert set(data["compat"]) >= {"libraries", "on_loader_path", "cuda_driver_loaded", "error"}
    assert data["network"] == {"registry": {"reachable": None}}
