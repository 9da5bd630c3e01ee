"""The search: in a row of states of which the first is good and the last bad, two neighbours that differ. Pure.

States that cannot be told (they cannot be built, or the command says so with 125) are stepped around, as far as that
goes; where only such states are left between the good and the bad one, the answer is all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """What a state is."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Found:
    """The last good state and the first bad one; between them lie only states that could not be told."""

    good: int
    bad: int
    tested: int

    @property
    def skipped(self) -> int:
        """States between the two that could not be told."""
        return self.bad - self.good - 1


def search(count: int, test: Callable[[int], Result]) -> Found:
    """Search the states 0 (good) to ``count`` (bad); ``test`` is asked about each at most once."""
    good, bad, tested = 0, count, 0
    skipped: set[int] = set()
    while True:
        candidates = [state for state in range(good + 1, bad) if state not in skipped]
        if not candidates:
            return Found(good, bad, tested)
        middle = (good + bad) / 2
        state = min(candidates, key=lambda each: (abs(each - middle), each))
        result = test(state)
        tested += 1
        if result is Result.GOOD:
            good = state
        elif result is Result.BAD:
            bad = state
        else:
            skipped.add(state)
