"""Several hosts at once: bounded, each on its own, ended in order by an interrupt."""

from __future__ import annotations

import _thread
import io
import threading
from collections.abc import Callable

import pytest
from rich.console import Console

from builder.board import Board
from builder.hosts.fanout import FanOut, Reporter, Stopped

WAIT = 20.0


def board(names: list[str]) -> tuple[Board, io.StringIO]:
    text = io.StringIO()
    return Board("host", names, Console(file=text, width=200)), text


def fan_out(
    work: Callable[[str, Reporter], str], names: list[str], *, jobs: int = 4, cancel: Callable[[str], None] = lambda _: None
) -> FanOut[str]:  # fmt: skip
    return FanOut(board(names)[0], work, cancel, jobs)


def test_results_come_in_the_order_of_the_names() -> None:
    gates = {"b": threading.Event()}

    def work(name: str, reporter: Reporter) -> str:
        if name == "a":
            assert gates["b"].wait(WAIT)
        else:
            gates["b"].set()
        return name.upper()

    assert fan_out(work, ["a", "b"]).run(["a", "b"]) == {"a": "A", "b": "B"}


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_more_at_a_time_than_asked_for(jobs: int) -> None:
    names = [f"h{number}" for number in range(9)]
    at_once, most = 0, 0
    lock = threading.Lock()
    full = threading.Barrier(jobs)

    def work(name: str, reporter: Reporter) -> str:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        full.wait(WAIT)
        with lock:
            at_once -= 1
        return name

    assert len(fan_out(work, names, jobs=jobs).run(names)) == 9
    assert most == jobs


def interrupted(
    work: Callable[[str, Reporter], str], names: list[str], cancel: Callable[[str], None], ready: threading.Event, jobs: int = 4
) -> FanOut[str]:  # fmt: skip
    """Run it and interrupt it once it is ready."""
    made = fan_out(work, names, jobs=jobs, cancel=cancel)

    def interrupt() -> None:
        assert ready.wait(WAIT)
        _thread.interrupt_main()

    threading.Thread(target=interrupt, daemon=True).start()
    made.run(names)
    return made


@pytest.mark.processes
def test_an_interrupt_ends_connections_and_begins_no_other_host() -> None:
    ready, cancelled = threading.Event(), {"a": threading.Event()}

    def work(name: str, reporter: Reporter) -> str:
        reporter.at("pull")
        ready.set()
        # As a read from an engine that ends when its connection is closed.
        assert cancelled[name].wait(WAIT)
        reporter.at("tag")
        return name

    made = interrupted(work, ["a", "b"], lambda name: cancelled[name].set(), ready, jobs=1)
    assert (made.interrupted, made.results) == (True, {})


@pytest.mark.processes
def test_what_is_being_named_is_named_to_its_end() -> None:
    ready, order = threading.Event(), []

    def work(name: str, reporter: Reporter) -> str:
        reporter.at("tag")
        with reporter.whole():
            ready.set()
            # The interrupt comes here; nobody may cut it off.
            while not reporter.stopped:
                pass
            order.append("named")
        return name

    made = interrupted(work, ["a"], lambda name: order.append("cancelled"), ready)
    assert (made.results, order[0]) == ({"a": "a"}, "named")


def test_after_an_interrupt_nothing_is_begun() -> None:
    stop = threading.Event()
    stop.set()
    reporter = Reporter("a", board(["a"])[0], stop)
    with pytest.raises(Stopped):
        reporter.at("pull")
    with pytest.raises(Stopped):
        reporter.say("…")
    with pytest.raises(Stopped), reporter.whole():
        raise AssertionError("it was begun")


# --- the lines --------------------------------------------------------------------------------------------------------


def test_elsewhere_than_on_a_terminal_a_line_is_printed_for_each_stage() -> None:
    made, text = board(["ssh://gpu1", "local"])
    with made:
        made.at("local", "pull", "278 MB")
        made.at("local", "pull", "1 of 278 MB")
        made.at("ssh://gpu1", "connect")
        made.end("local", "tagged")
    lines = [line.split("] ", 1)[1] for line in text.getvalue().splitlines()]
    assert lines == ["local       pull  278 MB", "ssh://gpu1  connect", "local       tagged"]


def test_what_a_host_says_is_no_markup() -> None:
    made, text = board(["local"])
    with made:
        made.at("local", "[red]x[/red]", "[bold]")
    assert "[red]x[/red]  [bold]" in text.getvalue()


def test_a_terminal_gets_a_table() -> None:
    text = io.StringIO()
    made = Board("host", ["local"], Console(file=text, width=100, force_terminal=True))
    with made:
        made.at("local", "pull", "278 MB")
        made.end("local", "tagged", "[0 s]")
    console = Console(file=io.StringIO(), width=100)
    console.print(made.table())
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert [line.split() for line in shown.splitlines()] == [
        ["host", "state", "time", "now"],
        ["local", "tagged", "0", "s", "[0", "s]"],
    ]
    assert "tagged" in text.getvalue()
