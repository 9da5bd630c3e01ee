"""Ctrl-C: held back where something is done whole, remembered where Python drops it, one exit status."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.interrupts import check, held_back, remembered

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """As a terminal starts a program, whatever started the tests."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_waits_for_the_end_of_what_is_done_whole() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_an_interrupt_nothing_is_held() -> None:
    with held_back():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_comes_after_an_error_too() -> None:
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        raise OSError("it broke")


def test_where_interrupts_are_ignored_this_one_is() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_back():
        signal.raise_signal(signal.SIGINT)
    with remembered():
        signal.raise_signal(signal.SIGINT)
        check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_is_left_alone() -> None:
    said = []

    def run() -> None:
        with held_back():
            said.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert said == [signal.default_int_handler]


class Closed(io.RawIOBase):
    """A file object that is interrupted while the interpreter closes it: Python drops what comes out of there."""

    def close(self) -> None:
        signal.raise_signal(signal.SIGINT)
        super().close()


def test_one_that_a_finaliser_swallowed_comes_at_the_next_step() -> None:
    with remembered():
        check()
        left = Closed()
        del left
        with pytest.raises(KeyboardInterrupt):
            check()
    check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_it_is_raised_as_always_besides() -> None:
    with remembered():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


@pytest.mark.processes
def test_the_exit_status_is_one_whatever_was_interrupted(tmp_path: Path) -> None:
    # As a module: of those CPython sees to the signal at the end, as it does not for `-c` or a script.
    code = """
        import signal, sys
        from builder import cli, verbs
        def interrupted(_):
            exec("signal.raise_signal(signal.SIGINT)", {"signal": signal})
        verbs.do_list = interrupted
        sys.exit(cli.main(["list"]))
    """
    (tmp_path / "asked.py").write_text(textwrap.dedent(code))
    argv = [sys.executable, "-m", "asked"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "interrupted: what was not finished is not tagged\n")
