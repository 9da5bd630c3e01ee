"""`NVIDIA_REQUIRE_CUDA`: what an image asks of the driver, in the words that NVIDIA's container toolkit reads. Pure.

The toolkit takes words with blanks between them as alternatives, and what has commas between as all of it
(internal/requirements/constraints of NVIDIA/nvidia-container-toolkit, and dsl.c of libnvidia-container, read 2026-11-30). A
container of an image whose value does not hold is refused before it starts, so an untrue one costs hosts that would do
(case 071: `cuda>=12.8` on a driver that runs CUDA 12.8 by minor-version compatibility).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from builder.driver import DriverNeeds, driver_needs, reported_cuda
from builder.facts import DriverMajorFact, load_facts
from builder.lock import Lock
from builder.matrix import Matrix

VARIABLE = "NVIDIA_REQUIRE_CUDA"

CAPABILITIES = ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")
"""The driver's parts that a container of ours uses: CUDA, and nvidia-smi with NVML. Without a value the toolkit gives the
same; an image from which ours is derived may have asked for less."""

_RULE = re.compile(r"(cuda|driver|arch|brand)(!=|<=|>=|=|<|>)([A-Za-z0-9.]{1,40})")


def stack_driver(matrix: Matrix, lock: Lock, gpus: tuple[str, ...] = ()) -> DriverNeeds | None:
    """What a stack asks of a driver on a host with these GPUs of its targets; with none of them, what its wheels ask.

    `driver_needs` takes all of a matrix's GPUs together, and a host with an H200 need not know an RTX PRO 6000.
    """
    return driver_needs(matrix, lock, gpus=gpus)


def require_cuda(needs: DriverNeeds | None) -> str:
    """The value for a stack: the CUDA release that the oldest driver of its CUDA major reports, `cuda>=13.0`.

    Not the release that it was built with: every later release of the major runs on such a driver. Not `driver>=…`: on WSL
    the number is that of Windows' driver. No `brand=…,driver>=…` beside it, which NVIDIA's images have for their
    forward-compatibility libraries: ours have none. What the GPUs ask for is not in it, since a driver that does not know a
    GPU does not show it. Empty where nothing is known to ask for.
    """
    if needs is None:
        return ""
    floor = next((fact.driver for fact in load_facts(DriverMajorFact) if fact.major == needs.major), None)
    cuda = reported_cuda(floor) if floor else None
    return f"cuda>={cuda}" if cuda else ""


def holds(expression: str, known: Mapping[str, str | None]) -> bool | None:
    """Whether a host meets an expression; None where that depends on what is not known, or is in words that we do not know.

    ``known`` has `cuda`, `driver`, `arch` and `brand`, as far as they are known.
    """
    alternatives = expression.split()
    if not alternatives:
        return True
    answers = [_all_of(alternative, known) for alternative in alternatives]
    return True if True in answers else None if None in answers else False


def _all_of(text: str, known: Mapping[str, str | None]) -> bool | None:
    answers = [_rule(word, known) for word in text.split(",") if word]
    return False if False in answers else None if None in answers else True


def _rule(text: str, known: Mapping[str, str | None]) -> bool | None:
    match = _RULE.fullmatch(text)
    has = known.get(match[1]) if match else None
    if match is None or has is None:
        return None
    if match[1] == "brand":
        same = has.lower() == match[3].lower()
        return {"=": same, "!=": not same}.get(match[2])
    left, right = _numbers(has), _numbers(match[3])
    if left is None or right is None:
        return None
    # `580` is as much as `580.0`; a branch alone says nothing of what comes after it.
    width = max(len(left), len(right))
    left, right = left + (0,) * (width - len(left)), right + (0,) * (width - len(right))
    return {
        "=": left == right,
        "!=": left != right,
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
    }[match[2]]


def _numbers(text: str) -> tuple[int, ...] | None:
    return tuple(map(int, text.split("."))) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6}){0,3}", text) else None


def same_major(expression: str, cuda: str | None) -> bool:
    """Whether all that an expression asks for is a newer minor release of the CUDA major that a driver reports."""
    asked = re.findall(r"cuda>=([0-9]{1,2})\.", expression)
    return bool(asked) and cuda is not None and {cuda.split(".")[0]} == set(asked)
