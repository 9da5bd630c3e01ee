"""What is known from a report: facts with the line that says them, and symptoms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Origin(StrEnum):
    """`stated` is in the text, `inferred` follows from what is, `unknown` was asked for and is not there."""

    STATED = "stated"
    INFERRED = "inferred"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Fact:
    """One value of one field. ``line`` counts from 1 in the text as given, 0 where no line says it.

    ``source`` is the kind of report that it stands in (`check_env`, `collect_env`, `nvidia-smi`, `packages`, `table`,
    `error`). ``absent`` is a value of its own: the report says that the package is not installed.
    """

    name: str
    value: str
    origin: Origin = Origin.STATED
    line: int = 0
    source: str = ""
    because: str = ""
    absent: bool = False

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "name": self.name,
            "value": None if self.origin is Origin.UNKNOWN or self.absent else self.value,
            "origin": str(self.origin),
            "line": self.line or None,
        }
        if self.absent:
            said["absent"] = True
        if self.because:
            said["because"] = self.because
        return said


@dataclass(frozen=True)
class Symptom:
    """What went wrong, in the words of its kind. ``kind`` is stable; ``parts`` are the names that it is about."""

    kind: str
    text: str
    line: int
    parts: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "line": self.line, **dict(self.parts)}


@dataclass(frozen=True)
class Conflict:
    """One field with several values, all kept; ``chosen`` is the one that is gone by, and ``because`` says why."""

    name: str
    values: tuple[Fact, ...]
    chosen: Fact
    because: str

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "values": [{"value": fact.value, "line": fact.line or None, "source": fact.source} for fact in self.values],
            "chosen": self.chosen.value,
            "because": self.because,
        }


@dataclass(frozen=True)
class Report:
    """All that was read. ``facts`` has one fact a name; what else was said of it is in ``conflicts``."""

    facts: Mapping[str, Fact]
    symptoms: tuple[Symptom, ...] = ()
    conflicts: tuple[Conflict, ...] = ()
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> str | None:
        """The value of a field; None where it is unknown or said to be absent."""
        fact = self.facts.get(name)
        return None if fact is None or fact.absent or fact.origin is Origin.UNKNOWN else fact.value

    def packages(self) -> Iterator[tuple[str, Fact]]:
        """The packages by their normalised names."""
        for name, fact in self.facts.items():
            if name.startswith("package."):
                yield name.removeprefix("package."), fact

    def package(self, name: str) -> str | None:
        """The version of a package; None where it is unknown or absent."""
        return self.value(f"package.{name}")
