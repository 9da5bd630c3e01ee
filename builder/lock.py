"""What a matrix resolves to: files by hash, each with its layer, and the OS packages of the base.

Resolution is uv's, as of the matrix's date and for its platform only; a build never resolves. The lock's bytes are
deterministic: the same matrix, date and archive give the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from packaging.utils import canonicalize_name
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder.errors import LockError, UsageError
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.matrix import Matrix

SCHEMA = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
# Each of these reaches a requirements file or a Dockerfile: full-match patterns, no white space.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*\z", max_length=100)]
PinnedVersion = Annotated[str, Field(pattern=r"^[0-9A-Za-z.!+_-]{1,80}\z")]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z._+!-]{1,255}\.whl\z")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Artefact(_Model):
    """One wheel. ``size`` is in bytes, null only where the source states none.

    ``metadata_version`` is what an installer reports; ``index`` is `default` or the name of an index of the matrix,
    and null for a direct file, which alone has a ``url``. ``requires`` are the requirements of its METADATA that hold
    for the target.
    """

    name: Name
    version: PinnedVersion
    metadata_version: PinnedVersion
    file: FileName
    sha256: Sha256
    size: int | None
    index: str | None
    url: str | None
    requires: tuple[str, ...]
    layer: str


class OsPackage(_Model):
    """A package of the distribution, as its package database names it."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]+\z", max_length=100)]
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+:~-]+\z", max_length=100)]
    architecture: Literal["amd64", "all"]


class Base(_Model):
    """The OS: how it is made, from which release, and every package in it."""

    kind: Literal["archive", "image"]
    distribution: str
    release: str
    reference: str | None = None
    packages: tuple[OsPackage, ...]


class Resolver(_Model):
    """What resolved, so that a difference can be laid at its door."""

    name: Literal["uv"]
    version: str


class Lock(_Model):
    """A resolved matrix. ``inputs`` is the sha256 of everything in the matrix that decides it."""

    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    matrix: str
    inputs: Sha256
    as_of: str
    platform: str
    python: str
    resolver: Resolver
    base: Base
    artefacts: tuple[Artefact, ...]

    @cached_property
    def digest(self) -> str:
        """The sha256 of the lock's canonical JSON: the name of what it pins."""
        return sha256_hex(canonical_json(self.model_dump(mode="json", by_alias=True)))

    @property
    def by_name(self) -> Mapping[str, Artefact]:
        return {artefact.name: artefact for artefact in self.artefacts}

    def version_of(self, name: str) -> str | None:
        """The version of a distribution, any spelling of its name; None if it is not in the lock."""
        artefact = self.by_name.get(canonicalize_name(name))
        return artefact.version if artefact else None

    def text(self) -> str:
        """The file: one artefact a line, so that a diff of two locks reads as a list of packages."""
        data = self.model_dump(mode="json", by_alias=True)
        artefacts, base = data.pop("artefacts"), data.pop("base")
        packages = base.pop("packages")
        head = json.dumps(data, indent=1, ensure_ascii=False).removesuffix("\n}")
        lines = [head + ",", ' "base": ' + json.dumps(base, ensure_ascii=False).removesuffix("}") + ', "packages": [']
        lines.append(_rows(packages) + "\n ]},")
        lines += [' "artefacts": [', _rows(artefacts) + "\n ]", "}"]
        return "\n".join(lines) + "\n"


def _rows(items: Iterable[object]) -> str:
    return ",\n".join("  " + json.dumps(item, ensure_ascii=False) for item in items)


def lock_path(matrix_path: Path) -> Path:
    """`NAME.lock.json` beside `NAME.yaml`."""
    return matrix_path.with_name(matrix_path.name.removesuffix(matrix_path.suffix) + ".lock.json")


def inputs_digest(matrix: Matrix) -> str:
    """The sha256 of what decides a resolution; a summary, label or budget may change without a new lock."""
    fields = {"as_of", "platform", "python", "base", "cuda", "stack", "extras", "prereleases", "indexes", "files"}
    dumped = matrix.model_dump(mode="json", include={*fields, "overrides"}, by_alias=True)
    dumped["cuda"] = {key: value for key, value in dumped["cuda"].items() if key != "version"}
    for override in dumped["overrides"]:
        override.pop("because"), override.pop("source"), override.pop("runtime_check")
    return sha256_hex(canonical_json(dumped))


def parse_lock(text: str, where: str) -> Lock:
    """A lock from its text. Raises `UsageError` for one that is damaged or of another schema."""
    try:
        data = json.loads(text)
        if isinstance(data, dict) and data.get("schema") != SCHEMA:
            raise UsageError(
                f"the lock is of schema {data.get('schema')!r}, this builder reads {SCHEMA}",
                where=where,
                hint="write it again: `builder lock MATRIX`",
            )
        return Lock.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            "the lock is damaged",
            where=where,
            because=f"{place}: {first['msg']} (got {str(first['input'])[:80]!r})",
            hint="write it again: `builder lock MATRIX`",
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "the lock is not JSON", where=where, because=str(error)[:200], hint="write it again: `builder lock MATRIX`"
        ) from error


def read_lock(path: Path) -> Lock:
    """The lock at `path`. Raises `LockError` if there is none, `UsageError` if it is damaged."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        name = path.name.removesuffix(".lock.json")
        raise LockError("the matrix has no lock", where=str(path), hint=f"make one: `builder lock {name}`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the lock cannot be read", where=str(path), because=str(error)) from error
    return parse_lock(text, str(path))


def write_lock(lock: Lock, path: Path) -> None:
    """Write the lock beside and rename."""
    write_atomic(path, lock.text())


def drift(old: Lock, new: Lock) -> list[str]:
    """What differs between two locks, one line each, in words: `numpy 2.3.5 → 2.4.0`."""
    lines: list[str] = []
    for field in ("as_of", "platform", "python"):
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            lines.append(f"{field} {before} → {after}")
    lines += _drift_of("", {a.name: (a.version, a) for a in old.artefacts}, {a.name: (a.version, a) for a in new.artefacts})
    lines += drift_of_packages(old.base.packages, new.base.packages)
    return lines


def drift_of_packages(old: Iterable[OsPackage], new: Iterable[OsPackage]) -> list[str]:
    """What differs between two OS package lists, one line each."""
    return _drift_of("OS package ", {p.name: (p.version, p) for p in old}, {p.name: (p.version, p) for p in new})


def _drift_of(
    kind: str, old: Mapping[str, tuple[str, object]], new: Mapping[str, tuple[str, object]]
) -> list[str]:
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"{kind}{name} {old[name][0]} is gone")
        elif name not in old:
            lines.append(f"{kind}{name} {new[name][0]} is new")
        elif old[name][0] != new[name][0]:
            lines.append(f"{kind}{name} {old[name][0]} → {new[name][0]}")
        elif isinstance(before := old[name][1], Artefact) and isinstance(after := new[name][1], Artefact):
            fields = [f for f in Artefact.model_fields if getattr(before, f) != getattr(after, f)]
            lines += [f"{name} {before.version}: {f} {getattr(before, f)} → {getattr(after, f)}" for f in fields]
    return lines


def check_current(lock: Lock, matrix: Matrix, path: Path) -> None:
    """Raise `LockError` if the matrix was changed after it was locked."""
    if lock.inputs != inputs_digest(matrix):
        raise LockError(
            "the lock does not belong to this matrix",
            where=str(path),
            because="the matrix was changed after it was locked",
            hint=f"see what changes: `builder lock {matrix.name} --check`; take it: `builder lock {matrix.name}`",
        )
