"""What was put on which host: one small file each, in `$XDG_STATE_HOME/builder/hosts/` on this machine.

A record is of one image on one host; a newer one of the same matrix replaces it. Nothing is left on the host itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder.display import note
from builder.errors import UsageError
from builder.files import sha256_hex, write_atomic

SCHEMA: Final = 1


class Gpu(BaseModel):
    """A GPU of the host, as doctor saw it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str | None = None
    capability: str | None = None


class Smoke(BaseModel):
    """How the smoke test ended. ``gpus`` are those that kernels ran on; none where it was the build's own test alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    ok: bool
    gpus: tuple[str, ...] = ()
    checks: int = 0


class Record(BaseModel):
    """One image on one host. ``image`` is the config digest, ``digest`` the manifest's, ``lock`` the lock's sha256.

    ``date`` is in UTC. ``smoke`` is None where it was not run.
    """

    # A file of a newer builder may say more.
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    schema_: int = Field(SCHEMA, alias="schema")
    host: str
    matrix: str
    lock: str
    image: str
    digest: str
    reference: str
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    smoke: Smoke | None = None
    doctor: str | None = None
    date: str
    builder: str


def folder() -> Path:
    """Where the records lie. Raises `UsageError` where no home folder is known."""
    if os.environ.get("XDG_STATE_HOME"):
        base = Path(os.environ["XDG_STATE_HOME"]).absolute()
    else:
        try:
            base = Path.home() / ".local/state"
        except RuntimeError as error:
            raise UsageError(
                "the home folder is not known", because=str(error), hint="set HOME or XDG_STATE_HOME"
            ) from error
    return base / "builder" / "hosts"


def _stem(host: str) -> str:
    # Readable, and one for one: two names that look alike here have different hashes.
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '_', host)[:60]}-{sha256_hex(host.encode())[:8]}"


def path_of(host: str, matrix: str) -> Path:
    return folder() / f"{_stem(host)}--{matrix}.json"


def write(record: Record) -> Path:
    """Write a record, beside and renamed; its path. Raises `UsageError` where it cannot be written."""
    path = path_of(record.host, record.matrix)
    try:
        write_atomic(path, record.model_dump_json(by_alias=True, indent=1) + "\n", mode=0o600)
    except OSError as error:
        raise UsageError(
            "the record cannot be written", where=str(path), because=error.strerror or str(error)
        ) from error
    return path


def read(host: str, matrix: str) -> Record | None:
    """The record of a matrix on a host; None where there is none, or a damaged one."""
    return _read(path_of(host, matrix))


def _read(path: Path) -> Record | None:
    try:
        found = Record.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        note(f"warning: a record cannot be read: {path}: {str(error).splitlines()[0]}")
        return None
    if found.schema_ != SCHEMA:
        note(f"warning: a record is of schema {found.schema_}, this builder reads {SCHEMA}: {path}")
        return None
    return found


def records() -> list[Record]:
    """Every record, by host and matrix. One that cannot be read is told on standard error."""
    found = (_read(path) for path in folder().glob("*.json"))
    return sorted((record for record in found if record is not None), key=lambda each: (each.host, each.matrix))


def forget(host: str) -> int:
    """Remove the records of a host; how many. Raises `UsageError` where there is none of that name."""
    paths = sorted(folder().glob(f"{_stem(host)}--*.json"))
    if not paths:
        known = sorted({record.host for record in records()})
        raise UsageError(
            f"there is no record of `{host}`",
            because=f"known: {', '.join(f'`{name}`' for name in known)}" if known else "there are no records at all",
            hint="see `builder hosts`",
        )
    for path in paths:
        path.unlink()
    return len(paths)


def as_json(found: Iterable[Record]) -> dict[str, Any]:
    """The shape `hosts` of docs/distribution.md."""
    return {"hosts": [record.model_dump(mode="json", exclude={"schema_"}) for record in found]}


def as_text(found: Iterable[Record]) -> str:
    """A table, a line for each."""
    rows = [("host", "matrix", "lock", "driver", "GPUs", "smoke", "date")]
    for record in found:
        smoke = "not run" if record.smoke is None else "ok" if record.smoke.ok else "FAILED"
        if record.smoke is not None and record.smoke.ok:
            smoke = "ok, on GPUs" if record.smoke.gpus else "ok, no GPU"
        gpus = _gpus(record.gpus)
        rows.append((record.host, record.matrix, record.lock[:12], record.driver or "-", gpus, smoke, record.date[:10]))
    if len(rows) == 1:
        return "no image was put on a host yet"
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _gpus(gpus: Iterable[Gpu]) -> str:
    names = [gpu.name or "unknown" for gpu in gpus]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)) or "-"
