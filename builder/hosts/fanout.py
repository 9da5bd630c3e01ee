"""Several hosts at once: a few at a time, a line for each, one that fails does not keep the others from going on.

An interrupt ends what is under way in order: a host that is getting its names gets all of them, no other gets any.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from builder.board import Board

GRACE = 30.0
"""Seconds that a host has to end after an interrupt; a connection that does not is left behind with the process."""

R = TypeVar("R")


class Stopped(Exception):
    """Raised inside of the work on a host after an interrupt."""


class Reporter:
    """What the work on one host talks to."""

    def __init__(self, name: str, board: Board, stop: threading.Event) -> None:
        self.name, self._board, self._stop = name, board, stop
        self.guard = threading.Lock()
        self.stage = ""

    def at(self, stage: str, text: str = "") -> None:
        """The host is at that stage now. Raises `Stopped` after an interrupt."""
        self.check()
        self.stage = stage
        self._board.at(self.name, stage, text)

    def say(self, text: str) -> None:
        """More about the stage. Raises `Stopped` after an interrupt."""
        self.check()
        self._board.at(self.name, self.stage, " ".join(text.split()))

    def check(self) -> None:
        if self._stop.is_set():
            raise Stopped

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """What is done in here is done to its end, or not begun."""
        with self.guard:
            self.check()
            yield


class FanOut(Generic[R]):
    """Runs ``work`` for each name in threads. ``cancel`` ends the connections of one from outside.

    ``work`` catches what it expects; `KeyboardInterrupt` in the waiting thread stops all and sets ``interrupted``.
    """

    def __init__(
        self, board: Board, work: Callable[[str, Reporter], R], cancel: Callable[[str], None], jobs: int
    ) -> None:
        self._board, self._work, self._cancel, self._jobs = board, work, cancel, jobs
        self._stop = threading.Event()
        self.results: dict[str, R] = {}
        self.interrupted = False

    def run(self, names: Sequence[str]) -> dict[str, R]:
        """The results by name, in the order of ``names``; after an interrupt only of those that ended."""
        waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        reporters = {name: Reporter(name, self._board, self._stop) for name in names}
        for name in names:
            waiting.put(name)

        def serve(over: threading.Event) -> None:
            try:
                while not self._stop.is_set():
                    name = waiting.get_nowait()
                    with contextlib.suppress(Stopped):
                        self.results[name] = self._work(name, reporters[name])
            except queue.Empty:
                pass
            finally:
                over.set()

        # Events tell that a thread is over: a `join` that an interrupt ends takes a running thread for one that has ended
        # (Python 3.11).
        started: list[threading.Event] = []
        try:
            for number in range(max(1, min(self._jobs, len(names)))):
                over = threading.Event()
                # Not an executor's: those are waited for at the end of the process, whatever they hang at.
                thread = threading.Thread(target=serve, args=(over,), name=f"hosts-{number}", daemon=True)
                started.append(over)
                thread.start()
            for over in started:
                # In short turns: an interrupt is not delivered in the middle of a wait without an end.
                while not over.wait(0.2):
                    pass
        except KeyboardInterrupt:
            self.interrupted = True
            self._end(started, reporters)
        return {name: self.results[name] for name in names if name in self.results}

    def _end(self, started: Sequence[threading.Event], reporters: dict[str, Reporter]) -> None:
        self._stop.set()
        for name, reporter in reporters.items():
            # One that is being named is let go on.
            if reporter.guard.acquire(timeout=GRACE):
                try:
                    if reporter.stage and name not in self.results:
                        self._cancel(name)
                finally:
                    reporter.guard.release()
        for over in started:
            over.wait(GRACE)
