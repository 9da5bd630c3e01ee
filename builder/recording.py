"""What `builder run --record DIR` keeps of a run: the command, what it printed and its exit status, under the lock's digest.

A folder a run, so that it can be handed on: but for what COMMAND itself says it has no host's name, no path of the host and no
value of a secret.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, BinaryIO

from builder.display import note
from builder.errors import UsageError
from builder.files import write_atomic
from builder.yamlsource import SECRET_NAME

COMMAND, OUTPUT, STATUS = "command.json", "output.log", "status"


@dataclass
class Recording:
    """The folder of one run. `status` is written last: a folder without it is of a run that was not seen to end."""

    folder: Path

    def finish(self, status: int) -> None:
        """Write down the exit status."""
        write_atomic(self.folder / STATUS, f"{status}\n")


def begin(place: Path, said: Mapping[str, Any], lock: str, now: datetime) -> Recording:
    """Make `DIR/<UTC time>-<first 12 of the lock's digest>` with the command in it. Raises `UsageError`."""
    name = f"{now.astimezone(UTC):%Y%m%dT%H%M%SZ}-{lock[:12] or 'nolock'}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            folder = place / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                continue
            break
        else:
            raise UsageError("too many runs in one second", where=str(place / name))
        write_atomic(folder / COMMAND, json.dumps(said, indent=2, ensure_ascii=False) + "\n")
        (folder / OUTPUT).touch()
    except OSError as error:
        raise UsageError(
            "the run cannot be recorded",
            where=str(place),
            because=error.strerror or str(error),
            hint="name a folder that can be written to",
        ) from error
    return Recording(folder)


def told(environment: Sequence[str]) -> dict[str, str | None]:
    """The variables of a run by name; null for the value of a secret, and of one that was handed on from here."""
    found: dict[str, str | None] = {}
    for item in environment:
        name, stated, value = item.partition("=")
        found[name] = value if stated and not SECRET_NAME.fullmatch(name.upper()) else None
    return found


class Tee:
    """Hands what a process prints on to our own stdout and stderr, each to its own, and both to one log, as they come."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._log: BinaryIO = log.open("ab", buffering=0)
        self._trouble: OSError | None = None
        self._guard = threading.Lock()
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._threads = [
            threading.Thread(target=self._pump, args=(source, target.buffer), daemon=True)
            for source, target in pairs
            if source is not None
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, source: IO[bytes], target: BinaryIO) -> None:
        while data := source.read1(1 << 16):  # type: ignore[attr-defined]
            with self._guard:
                # A disk that is full must not stop the process, which waits until somebody reads on.
                if self._trouble is None:
                    try:
                        self._log.write(data)
                    except OSError as error:
                        self._trouble = error
            try:
                target.write(data)
                target.flush()
            except (BrokenPipeError, ValueError):
                continue  # nobody reads it any more: the log still does

    def join(self) -> None:
        """Wait for the last of it; say so where the log has not all of it."""
        for thread in self._threads:
            thread.join()
        self._log.close()
        if self._trouble is not None:
            note(f"the log of the run is not whole: {self._trouble.strerror or self._trouble}")
