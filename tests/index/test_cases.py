"""Bug reports of cases.yaml, put to the product: those that cost a few megabytes. `python -m tests.index.cases` asks all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builder import settings
from tests.index.cases import Outcome, Said, cases, judge, lacking, told

pytestmark = pytest.mark.index

CASES = {case["id"]: case for case in cases()}
CHEAP = [number for number, case in CASES.items() if case.get("cheap")]
OFFLINE = [
    number for number, case in CASES.items() if "ask" in case and all("check" in question for question in case["ask"])
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty one: no answer rests on what was read before."""
    monkeypatch.setenv("BUILDER_CACHE", str(tmp_path))
    settings.load.cache_clear()
    yield
    settings.load.cache_clear()


def outcome(number: str) -> Outcome:
    return judge(CASES[number], large=False)


@pytest.mark.parametrize("number", CHEAP)
def test_a_report_that_the_wheels_decide(number: str) -> None:
    found = outcome(number)
    assert found.lacking == ()
    assert found.state in (found.expected, "not asked")


@pytest.mark.parametrize("number", OFFLINE)
def test_a_report_that_the_rules_decide(number: str) -> None:
    found = outcome(number)
    assert found.state == found.expected, found.lacking


def test_the_entries() -> None:
    """Each has one way to be counted, and a miss says why."""
    for case in CASES.values():
        assert len({"ask", "outside"} & set(case)) == 1, case["id"]
        assert "missed" not in case or "ask" in case, case["id"]
        assert "outside" in case or case["verdict"], case["id"]


def test_an_answer_that_lacks_something_is_a_miss() -> None:
    expect: dict[str, Any] = {"exit": 3, "verdict": "broken", "symbols": ["f"], "libraries": ["libx.so.1"]}
    report = {"verdict": "uncertain", "extensions": [{"missing_symbols": [], "missing_libraries": [], "notes": []}]}
    said = Said("abi x", 0, report, "")
    assert list(lacking(said, expect)) == ["exit status 0", "verdict uncertain", "symbol f", "library libx.so.1"]
    assert told(said, expect) == ("uncertain", None)
    assert list(lacking(Said("abi x", 5, {}, "error: no index"), expect)) == ["no answer, exit status 5"]
    assert Outcome({"id": "x"}, (), (), None, left_out=True).state == "not asked"
    assert Outcome({"id": "x"}, (), ("symbol f",), None, left_out=True).state == "missed"
