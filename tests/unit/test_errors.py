"""Errors: their text, and that exit codes are a contract."""

from __future__ import annotations

import pytest

from builder.errors import (
    BuilderError,
    BuildError,
    ExitCode,
    IntegrityError,
    LockError,
    UnreachableError,
    UsageError,
)


def test_exit_codes_are_those_of_the_design() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "OK": 0,
        "UNFORESEEN": 1,
        "USAGE": 2,
        "FINDINGS": 3,
        "LOCK": 4,
        "UNREACHABLE": 5,
        "BUILD": 6,
        "INTEGRITY": 7,
    }


@pytest.mark.parametrize(
    ("error", "code"),
    [(UsageError, 2), (LockError, 4), (UnreachableError, 5), (BuildError, 6), (IntegrityError, 7), (BuilderError, 1)],
)
def test_every_class_has_its_exit_code(error: type[BuilderError], code: int) -> None:
    assert error("x").exit_code == code
    assert isinstance(error("x"), BuilderError)


def test_an_error_is_one_line_where_there_is_no_more_to_say() -> None:
    assert str(UsageError("no such matrix")) == "error: no such matrix"


def test_an_error_says_what_where_why_and_what_to_do() -> None:
    error = LockError(
        "the lock is out of date", where="x.lock.json:3", because="two changed:\n- torch\n- triton\n", hint="run `lock`"
    )
    assert str(error) == (
        "error: the lock is out of date\n"
        "  at: x.lock.json:3\n"
        "  because: two changed:\n"
        "    - torch\n"
        "    - triton\n"
        "  hint: run `lock`"
    )
