"""The live display: BuildKit's events to rows, and the lines where stderr is no terminal."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from builder import display
from builder.display import LOG_LINES, Display, Progress, Stage, row


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A clock that stands still: `clock["now"] += 1` moves it."""
    time = {"now": 1000.0}
    monkeypatch.setattr("builder.display.time.monotonic", lambda: time["now"])
    return time


def progress() -> Progress:
    sizes = {"torch": 500_000_000, "nvidia-cublas": 400_000_000}
    return Progress([Stage("torch", "torch and CUDA libraries", sizes), Stage("proof_native", "smoke test, native part"),
                     Stage("export", "export")])  # fmt: skip


def vertex(name: str, **fields: Any) -> dict[str, Any]:
    return {"vertexes": [{"digest": f"sha256:{name}", "name": name, **fields}]}


def log(name: str, text: str, stream: int = 2) -> dict[str, Any]:
    data = base64.b64encode(text.encode()).decode()
    return {"logs": [{"vertex": f"sha256:{name}", "stream": stream, "data": data}]}


def rows(progress: Progress) -> list[tuple[str, str, str, str, str, str]]:
    return [row(stage) for stage in progress.stages.values()]


STEP = "[torch 2/2] RUN --mount=type=bind,source=tools"


def test_before_anything_happens() -> None:
    assert rows(progress()) == [
        ("torch and CUDA libraries", "waiting", "0/2", "0 B/900 MB", "", ""),
        ("smoke test, native part", "waiting", "", "", "", ""),
        ("export", "waiting", "", "", "", ""),
    ]


def test_a_step_that_runs(clock: dict[str, float]) -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    clock["now"] += 12
    shown.feed(log(STEP, "Downloading torch (476.8MiB)\nDownloading nvidia-cublas (400MiB)\n Downloaded torch\n"))
    assert rows(shown)[0] == ("torch and CUDA libraries", "running", "1/2", "500 MB/900 MB", "12 s", "torch")


def test_packages_are_counted_in_any_spelling() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    shown.feed(log(STEP, " + nvidia_cublas==13.0\n + other==1\n"))
    assert rows(shown)[0][2:4] == ("1/2", "400 MB/900 MB")


def test_a_step_that_ended(clock: dict[str, float]) -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    clock["now"] += 61
    shown.feed(vertex(STEP, started="t", completed="t"))
    clock["now"] += 100
    assert rows(shown)[0] == ("torch and CUDA libraries", "done", "2/2", "900 MB/900 MB", "61 s", "")


def test_a_step_out_of_the_cache() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t", completed="t", cached=True))
    assert rows(shown)[0] == ("torch and CUDA libraries", "kept", "", "", "", "")


def test_of_two_steps_the_second_runs_on(clock: dict[str, float]) -> None:
    shown = progress()
    shown.feed(vertex("[torch 1/3] FROM python", started="t", completed="t", cached=True))
    shown.feed(vertex("[torch 2/3] RUN a", started="t"))
    shown.feed(vertex("[torch 2/3] RUN a", started="t", completed="t"))
    shown.feed(vertex("[torch 3/3] RUN b", started="t"))
    assert rows(shown)[0][1] == "running"
    shown.feed(vertex("[torch 3/3] RUN b", started="t", completed="t"))
    assert rows(shown)[0][1] == "done"


def test_a_step_with_a_platform_in_its_name() -> None:
    shown = progress()
    shown.feed(vertex("[linux/amd64 torch 2/2] RUN a", started="t"))
    assert rows(shown)[0][1] == "running"


@pytest.mark.parametrize("name", ["[internal] load build definition", "[other 1/2] RUN x", "load metadata", ""])
def test_steps_of_no_row_are_passed_over(name: str) -> None:
    shown = progress()
    shown.feed(vertex(name, started="t", completed="t"))
    assert {state for _, state, *_ in rows(shown)} == {"waiting"}


def test_the_export_tells_what_it_is_at() -> None:
    shown = progress()
    shown.feed(vertex("exporting to image", started="t"))
    shown.feed({"statuses": [{"id": "exporting layers", "vertex": "sha256:x"}]})
    assert rows(shown)[2] == ("export", "running", "", "", "0 s", "exporting layers")


def test_the_smoke_test_tells_what_it_is_at() -> None:
    shown = progress()
    step = "[proof_native 2/2] RUN python3"
    shown.feed(vertex(step, started="t"))
    shown.feed(log(step, "ok  needed  412 files\n"))
    assert rows(shown)[1][5] == "ok  needed  412 files"


def test_lines_come_whole_whatever_pieces_they_arrive_in() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    pieces = ["one\ntw", "o\r\nthr", "ee", "\n"]
    assert [shown.feed(log(STEP, piece)) for piece in pieces] == [
        [("torch", "one")],
        [("torch", "two")],
        [],
        [("torch", "three")],
    ]


def test_two_streams_do_not_mix() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    shown.feed(log(STEP, "out", 1))
    assert shown.feed(log(STEP, "err\n", 2)) == [("torch", "err")]
    assert shown.feed(log(STEP, "put\n", 1)) == [("torch", "output")]


def test_a_step_that_fails_keeps_its_words_to_the_last_without_a_line_break() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    shown.feed(log(STEP, "error: first\nand last"))
    shown.feed(vertex(STEP, started="t", completed="t", error="exit code: 1"))
    assert shown.failed == ("torch", "exit code: 1")
    assert shown.failed_log == ["error: first", "and last"]
    assert rows(shown)[0][1] == "FAILED"


def test_words_that_arrive_after_the_failure_are_kept_as_well() -> None:
    shown = progress()
    shown.feed(vertex(STEP, error="exit code: 1"))
    shown.feed(log(STEP, "late\n"))
    assert shown.failed_log == ["late"]


def test_the_first_failure_is_the_cause_and_what_was_cancelled_is_not() -> None:
    shown = progress()
    shown.feed(vertex("[proof_native 1/1] RUN x", error="context canceled"))
    shown.feed(vertex(STEP, error="exit code: 1"))
    shown.feed(vertex("[proof_native 1/1] RUN x", error="exit code: 2"))
    assert shown.failed == ("torch", "exit code: 1")


def test_a_failure_of_a_step_without_a_row_is_named_by_the_step() -> None:
    shown = progress()
    shown.feed(vertex("[internal] load metadata", error="denied"))
    assert shown.failed == ("[internal] load metadata", "denied")


def test_a_step_that_talks_a_lot_keeps_its_last_lines() -> None:
    shown = progress()
    shown.feed(vertex(STEP, started="t"))
    shown.feed(log(STEP, "".join(f"{number}\n" for number in range(LOG_LINES * 2))))
    shown.feed(vertex(STEP, error="x"))
    assert shown.failed_log == [str(number) for number in range(LOG_LINES, LOG_LINES * 2)]


@given(st.dictionaries(st.sampled_from(["vertexes", "statuses", "logs", "other"]), st.none() | st.just([])))
def test_empty_events_are_fine(event: Mapping[str, Any]) -> None:
    assert progress().feed(event) == []


def test_where_stderr_is_no_terminal_each_change_is_a_line(clock: dict[str, float]) -> None:
    out = io.StringIO()
    with Display(progress(), Console(file=out, force_terminal=False, width=200)) as shown:
        shown.feed(vertex(STEP, started="t"))
        shown.feed(log(STEP, "Downloading torch (476.8MiB)\n"))
        clock["now"] += 5
        shown.feed(vertex(STEP, started="t", completed="t"))
        shown.feed(vertex("[proof_native 2/2] RUN x", started="t"))
        shown.feed(log("[proof_native 2/2] RUN x", "ok  needed\n\n"))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "[   0 s] torch and CUDA libraries running 0/2 0 B/900 MB 0 s",
        "[   5 s] torch and CUDA libraries done 2/2 900 MB/900 MB 5 s",
        "[   5 s] smoke test, native part running 0 s",
        "    ok  needed",
    ]


def test_markup_in_what_a_step_says_is_only_text() -> None:
    out = io.StringIO()
    shown = Display(progress(), Console(file=out, force_terminal=False, width=200))
    shown.print("[red]not red[/red] :smile:")
    assert out.getvalue() == "[red]not red[/red] :smile:\n"


def test_on_a_terminal_there_is_a_table() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=120)
    console.print(Display(progress(), console).table())
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "stage                     state    packages       bytes  time  now",
        "torch and CUDA libraries  waiting       0/2  0 B/900 MB",
        "smoke test, native part   waiting",
        "export                    waiting",
    ]


def test_notes_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    display.note("working …")
    assert capsys.readouterr() == ("", "working …\n")
