"""One root exception; every class has its exit code, and every instance says what, where, why and what to do.

Exit codes are a contract (docs and other people's scripts rely on them) and live here alone.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Exit statuses of `builder`. 0 is fine, 1 anything unforeseen."""

    OK = 0
    UNFORESEEN = 1
    USAGE = 2
    FINDINGS = 3
    LOCK = 4
    UNREACHABLE = 5
    BUILD = 6
    INTEGRITY = 7


class BuilderError(Exception):
    """Root of every error a user can cause or see.

    ``what`` is one line without a full stop; ``where`` is `file:line` or the like; ``because`` may have several lines.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.UNFORESEEN

    def __init__(self, what: str, *, where: str = "", because: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.because, self.hint = what, where, because, hint

    def __str__(self) -> str:
        """The text form: `error: WHAT`, then `at`, `because` and `hint` lines where there is something to say."""
        lines = [f"error: {self.what}"]
        for label, text in (("at", self.where), ("because", self.because), ("hint", self.hint)):
            if text:
                first, *rest = text.rstrip("\n").split("\n")
                lines.append(f"  {label}: {first}")
                lines += [f"    {line}" for line in rest]
        return "\n".join(lines)


class UsageError(BuilderError):
    """Wrong usage or an invalid input file."""

    exit_code = ExitCode.USAGE


class LockError(BuilderError):
    """No resolution, or a lock that no longer matches its matrix or the archive."""

    exit_code = ExitCode.LOCK


class UnreachableError(BuilderError):
    """An index, archive or registry that does not answer."""

    exit_code = ExitCode.UNREACHABLE


class BuildError(BuilderError):
    """The engine is absent or too old, or a build failed."""

    exit_code = ExitCode.BUILD


class IntegrityError(BuilderError):
    """Bytes that are not the ones that were pinned."""

    exit_code = ExitCode.INTEGRITY
