"""`builder patches --models`: which model classes of a release can be EAGLE-3's target, from its wheel on an index."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.errors import UsageError
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import load
from builder.patches.engine import decode
from builder.patches.listing import Opener, cost, cost_json
from builder.patches.models import FOLDER, ModelTable, model_table
from builder.patches.releases import Traffic
from builder.patches.source import Source


@dataclass(frozen=True)
class Targets:
    """The model classes of a release of sglang, and what it cost to look."""

    version: str
    table: ModelTable
    traffic: Traffic
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The table as data."""
        found = {"package": "sglang", "version": self.version}
        return {**found, **self.table.as_json(), **cost_json(self.traffic, self.seconds)}

    def as_text(self) -> str:
        """The table for people."""
        return f"sglang {self.version}\n\n{self.table.as_text()}\n\n{cost(self.traffic, self.seconds)}"


def targets(where: Path | Mapping[str, str], opener: Opener) -> Targets:
    """The classes of the release in ``where``: a matrix, or releases by package.

    Raises `UsageError` where sglang is not among them, and what ``opener`` raises.
    """
    began = time.monotonic()
    wheel = _wheel(where, opener)
    wheel.read_all([name for name in wheel.entries if name.startswith(FOLDER)])

    def read(file: str) -> str | None:
        return decode(wheel.read(file))[1] if file in wheel.entries else None

    table = model_table(read, sorted(wheel.entries))
    return Targets(wheel.version, table, opener.traffic, time.monotonic() - began)


def _wheel(where: Path | Mapping[str, str], opener: Opener) -> Source:
    if not isinstance(where, Path):
        if "sglang" not in where:
            raise UsageError("`--models` looks at sglang", hint="name its release: `--sglang V`")
        return opener.release("sglang", where["sglang"])
    loaded = load(where)
    lock = read_lock(lock_path(where))
    check_current(lock, loaded.matrix, lock_path(where))
    if "sglang" not in lock.by_name:
        raise UsageError("`--models` looks at sglang", where=str(where), because="the lock has no `sglang`")
    indexes = {name: index.url for name, index in loaded.matrix.indexes.items()}
    return opener.artefact(lock.by_name["sglang"], indexes)
