"""The driver on made-up ranks: what it reports of ranks that fail, hang or say nothing. Needs no GPU, and no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as command
from tests.gpu.driver import Run, unpack
from tests.gpu.rank import Context
from tests.gpu.report import markdown
from tests.gpu.scenarios import SAFE, Scenario, lanes

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes


def holds(context: Context) -> None:
    context.check("holds", True, f"rank {context.rank}")
    context.check("asked for", (os.environ.get("SGLANG_STACK_X") == "1") == (context.rank == 0))
    context.check("no multicast", all(os.environ.get(name) == value for name, value in SAFE.items()))
    context.note("rank", context.rank)
    context.standin("a made-up device")


def differs(context: Context) -> None:
    context.check("holds on one", context.rank == 0, "detail")
    if context.rank == 0:
        context.check("only one comes to it", True, "here")


def raises(context: Context) -> None:
    context.check("before", True)
    if context.rank == 1:
        raise ValueError("broken on purpose")
    time.sleep(600)


def hangs(context: Context) -> None:
    # What a rank has started has to end with it.
    child = subprocess.Popen(["sleep", "600"])
    context.note("child", child.pid)
    time.sleep(600)


def dies(context: Context) -> None:
    os.abort()


HERE = "tests.gpu.test_driver:"


def run(folder: Path, *scenarios: Scenario, seconds: float = 60) -> dict[str, Any]:
    carry, scratch = folder / "carry", folder / "scratch"
    carry.mkdir()
    scratch.mkdir()
    Run(carry, folder / "out", scratch, seconds, grace=1).all([[scenarios]])
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text(encoding="utf-8"))
    return report


def found(report: dict[str, Any], scenario: str) -> dict[str, tuple[bool, str]]:
    return {item["name"]: (item["ok"], item["detail"]) for item in report["checks"] if item["scenario"] == scenario}


def test_what_all_ranks_say_is_there_once(tmp_path: Path) -> None:
    report = run(tmp_path, Scenario("good", "part", f"{HERE}holds", env={"SGLANG_STACK_X": "1"}, without=(1,)))
    checks = found(report, "good")
    assert report["ok"], report
    assert checks["holds"] == (True, "rank 0: rank 0; rank 1: rank 1")
    assert list(checks) == ["every rank ends by itself", "holds", "asked for", "no multicast"]
    assert report["notes"] == [{"part": "part", "scenario": "good", "name": "rank", "value": "0"}]
    assert report["standins"] == ["a made-up device"]


def test_a_check_holds_only_where_every_rank_came_to_it(tmp_path: Path) -> None:
    checks = found(run(tmp_path, Scenario("one", "part", f"{HERE}differs")), "one")
    assert checks["holds on one"] == (False, "detail")
    assert checks["only one comes to it"] == (False, "rank 0: here; rank 1: it did not come to this")


def test_a_rank_that_fails_or_hangs_stops_no_other_scenario(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        Scenario("fails", "part", f"{HERE}raises", limit=30),
        Scenario("hangs", "part", f"{HERE}hangs", limit=2),
        Scenario("dies", "part", f"{HERE}dies", limit=30),
        Scenario("unknown", "part", f"{HERE}nothing_of_the_kind", limit=30),
        Scenario("cannot", "part", f"{HERE}holds", needs="dies"),
        Scenario("good", "part", f"{HERE}holds", env={"SGLANG_STACK_X": "1"}, without=(1,)),
    )
    assert not report["ok"]
    assert "ValueError: broken on purpose" in found(report, "fails")["runs to its end"][1]
    assert found(report, "fails")["before"] == (True, "")
    assert report["seconds"] < 20, "the other rank gets its grace, not all of the limit"
    assert "stopped at the limit" in found(report, "hangs")["every rank ends by itself"][1]
    assert "-6" in found(report, "dies")["every rank ends by itself"][1]
    assert "AttributeError" in found(report, "unknown")["runs to its end"][1]
    assert found(report, "cannot")["runs"] == (False, "not run: 'dies' went wrong")
    assert all(ok for ok, _ in found(report, "good").values())
    (child,) = [item["value"] for item in report["notes"] if item["name"] == "child"]
    state = Path(f"/proc/{child}/stat")
    # Killed, and at most not yet collected by whoever adopted it.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert "broken on purpose" in (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    checks = found(run(tmp_path, Scenario("late", "part", f"{HERE}holds"), seconds=5), "late")
    assert checks == {"runs": (False, "not run: no time is left")}


def test_the_report_as_tables(tmp_path: Path) -> None:
    text = markdown(run(tmp_path, Scenario("one", "part", f"{HERE}differs")))
    assert "0 of 3 checks hold" not in text and "1 of 3 checks hold" in text
    assert "| one | holds on one | **fails** | detail |" in text


def test_every_scenario_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    names = [item.name for step in lanes() for lane in step for item in lane]
    assert len(names) == len(set(names))
    for scenario in (item for step in lanes() for lane in step for item in lane):
        module, _, function = scenario.run.partition(":")
        text = (Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert f"def {function}(context: Context)" in text
        assert not scenario.needs or scenario.needs in names
    assert command.main(["--wheels", "x", "--out", "y", "--list", "--only", "draft"]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["fusion", "capture"]


def test_without_what_is_carried_it_says_so(tmp_path: Path) -> None:
    wanted = [sys.executable, "-m", "tests.gpu", "--wheels", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run(wanted, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "python -m tests.gpu.prepare" in done.stderr


def test_archives_are_laid_out(tmp_path: Path) -> None:
    carry, scratch = tmp_path / "carry", tmp_path / "scratch"
    carry.mkdir()
    scratch.mkdir()
    for name in ("one-1.0-py3-none-any.whl", "two-2.0.zip"):
        with zipfile.ZipFile(carry / name, "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    unpack(carry, scratch)
    assert sorted(path.name for path in (scratch / "site").iterdir()) == ["one", "two"]
