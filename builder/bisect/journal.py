"""The log of a bisection: one JSON line a test, so that it can be taken up again, and read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builder.bisect.search import Result
from builder.errors import UsageError
from builder.files import write_atomic


class Journal:
    """The tests of one bisection, by the digest of the lock that was tested. ``question`` tells one from another."""

    def __init__(self, folder: Path, question: str) -> None:
        self.folder, self._path = folder, folder / "log.jsonl"
        self._lines: list[dict[str, Any]] = []
        if self._path.is_file():
            try:
                self._lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
                asked = self._lines[0]["question"] if self._lines else question
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError("the log of the bisection is damaged", where=str(self._path)) from error
            if asked != question:
                raise UsageError(
                    "the folder has the log of another bisection",
                    where=str(self._path),
                    because=f"that one was of {asked}",
                    hint="name another folder with `--log`, or remove this one",
                )
        if not self._lines:
            self._lines.append({"question": question})
            self._write()

    def recall(self, key: str) -> tuple[Result, str] | None:
        """What was found of a lock before, and why."""
        found = next((line for line in reversed(self._lines) if line.get("lock") == key), None)
        return (Result(found["result"]), str(found["why"])) if found is not None else None

    def note(self, key: str, title: str, result: Result, why: str, seconds: float) -> None:
        """Write down a test."""
        line = {"lock": key, "title": title, "result": str(result), "why": why, "seconds": round(seconds, 1)}
        self._lines.append(line)
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in self._lines))

    @property
    def tests(self) -> int:
        """Tests that were written down."""
        return len(self._lines) - 1
