"""What a matrix resolves to: files by hash, each with its layer, and the OS packages of the base.

Resolution is uv's, as of the matrix's date and for its platform only; a build never resolves. The lock's bytes are
deterministic: the same matrix, date and archive give the same file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from builder.errors import LockError, UsageError
from builder.fields import Codename, ImageReference, IndexName, Url
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.matrix import Matrix

SCHEMA: Final = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]
# Each of these reaches a requirements file or a Dockerfile: full-match patterns, no white space.
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*\z", max_length=100)]
PinnedVersion = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z.!+_-]{0,79}\z")]
FileName = Annotated[str, Field(pattern=r"^[0-9A-Za-z][0-9A-Za-z._+!-]{0,254}\.whl\z")]
LayerName = Annotated[str, Field(pattern=r"^[a-z]{2,20}\z")]
MatrixName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}\z")]
Text = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]{1,1000}\z")]


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
    size: Annotated[int, Field(ge=0)] | None
    index: IndexName | None
    url: Url | None
    requires: tuple[Text, ...]
    layer: LayerName

    @field_validator("index")
    @classmethod
    def _not_files(cls, value: str | None) -> str | None:
        # `layers` calls the direct files' list that.
        if value == "files":
            raise ValueError("`files` is no index's name")
        return value

    @model_validator(mode="after")
    def _one_file(self) -> Artefact:
        if (self.index is None) == (self.url is None):
            raise ValueError(f"`{self.name}` has to have either an index or a url")
        try:
            name, version = parse_wheel_filename(self.file)[:2]
            same = name == self.name and version == Version(self.version)
        except (InvalidWheelFilename, InvalidVersion):
            same = False
        if not same:
            raise ValueError(f"`{self.file}` is not a wheel of {self.name} {self.version}")
        return self


class OsPackage(_Model):
    """A package of the distribution, as its package database names it."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]+\z", max_length=100)]
    version: Annotated[str, Field(pattern=r"^[0-9A-Za-z.+:~-]+\z", max_length=100)]
    architecture: Literal["amd64", "all"]


class Base(_Model):
    """The OS: how it is made, from which release, and every package in it."""

    kind: Literal["archive", "image"]
    distribution: Literal["debian", "ubuntu"]
    release: Codename
    reference: ImageReference | None = None
    packages: tuple[OsPackage, ...]

    @model_validator(mode="after")
    def _reference_of_an_image(self) -> Base:
        if (self.kind == "image") != (self.reference is not None):
            raise ValueError("a base of kind image, and no other, has a reference")
        return self


class Resolver(_Model):
    """What resolved, so that a difference can be laid at its door."""

    name: Literal["uv"]
    version: PinnedVersion


class Lock(_Model):
    """A resolved matrix. ``inputs`` is the sha256 of everything in the matrix that decides it."""

    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    matrix: MatrixName
    inputs: Sha256
    as_of: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}\z")]
    platform: Literal["linux/amd64"]
    python: Annotated[str, Field(pattern=r"^3\.[0-9]{1,2}\z")]
    resolver: Resolver
    base: Base
    artefacts: tuple[Artefact, ...]

    @field_validator("artefacts")
    @classmethod
    def _one_of_each(cls, value: tuple[Artefact, ...]) -> tuple[Artefact, ...]:
        names = [artefact.name for artefact in value]
        if names != sorted(set(names)):
            raise ValueError("each package once, sorted by name")
        return value

    @property
    def digest(self) -> str:
        """The sha256 of the lock's canonical JSON: the name of what it pins."""
        # Not cached: `model_copy` would take the old one along (a millisecond for 200 artefacts).
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
        got = f" (got {first['input'][:80]!r})" if isinstance(first["input"], str) else ""
        raise UsageError(
            "the lock is damaged",
            where=where,
            because=f"{place}: {first['msg']}{got}" if place else f"{first['msg']}{got}",
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
    for field in ("kind", "distribution", "release", "reference"):
        before, after = getattr(old.base, field), getattr(new.base, field)
        if before != after:
            lines.append(f"base {field} {before or 'none'} → {after or 'none'}")
    lines += _drift_of("", {a.name: a for a in old.artefacts}, {a.name: a for a in new.artefacts})
    lines += drift_of_packages(old.base.packages, new.base.packages)
    return lines


def drift_of_packages(old: Iterable[OsPackage], new: Iterable[OsPackage]) -> list[str]:
    """What differs between two OS package lists, one line each."""
    return _drift_of("OS package ", {p.name: p for p in old}, {p.name: p for p in new})


def _drift_of(kind: str, old: Mapping[str, Artefact | OsPackage], new: Mapping[str, Artefact | OsPackage]) -> list[str]:
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"{kind}{name} {old[name].version} is gone")
        elif name not in old:
            lines.append(f"{kind}{name} {new[name].version} is new")
        elif (before := old[name]).version != (after := new[name]).version:
            lines.append(f"{kind}{name} {before.version} → {after.version}")
        else:
            for field in type(before).model_fields:
                was, now = getattr(before, field), getattr(after, field)
                if was != now:
                    lines.append(f"{kind}{name} {before.version}: {field} {_word(was, now)} → {_word(now, was)}")
    return lines


def _word(value: object, other: object) -> str:
    """A field's value in a line of `drift`; of a list, what the other list lacks."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return ", ".join(f"`{item}`" for item in value if item not in other) or "none"
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


def check_current(lock: Lock, matrix: Matrix, path: Path) -> None:
    """Raise `LockError` if the matrix was changed after it was locked."""
    if lock.inputs != inputs_digest(matrix):
        raise LockError(
            "the lock does not belong to this matrix",
            where=str(path),
            because="the matrix was changed after it was locked",
            hint=f"see what changes: `builder lock {matrix.name} --check`; take it: `builder lock {matrix.name}`",
        )
