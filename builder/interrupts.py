"""Ctrl-C: never lost, never in the midst of what has to be done whole, and one exit status whenever it comes.

Python raises `KeyboardInterrupt` at whatever instruction is next. Where that one belongs to a finaliser (a file object's
``close``, a weak reference's callback) the exception is dropped, silently in some, and a search of an hour would go on.
So an interrupt is remembered, and each step that takes long begins with `check`.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_came = False


@contextlib.contextmanager
def remembered() -> Iterator[None]:
    """Inside, SIGINT raises `KeyboardInterrupt` as always and is remembered for `check`.

    For the main thread. Where SIGINT is ignored (`nohup`, a shell's `&`) or somebody else's, it stays so.
    """
    global _came

    def handle(number: int, frame: FrameType | None) -> None:
        global _came
        _came = True
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    try:
        with _handled_by(handle):
            yield
    finally:
        _came = False


def check() -> None:
    """Raise `KeyboardInterrupt` if there was an interrupt: before what takes long, never while clearing up."""
    if _came:
        raise KeyboardInterrupt


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """What is done inside is done whole: an interrupt waits for its end, and comes then.

    Not dropped: what follows (a push, the next state of a bisection) may take minutes. In another thread than the main one
    it does nothing, since interrupts never come there.
    """
    waiting = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal waiting
        waiting = True

    try:
        with _handled_by(hold):
            yield
    finally:
        # Through the handler from before, which may be to ignore it.
        if waiting:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def forget() -> None:
    """Let an interrupt that was told of end the process with an exit status, and not by the signal.

    CPython notes an interrupt that comes while it runs source from a string (a dataclass makes its methods so when its
    module is imported) and, run as `python -m`, in the end kills itself with SIGINT, whoever caught it; the next such run
    clears the note.
    """
    exec("")  # noqa: S102 - of nothing
