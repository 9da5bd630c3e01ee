"""The parts of what `collect.sh` printed. Pure, and total: any text has parts, if only none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

_HEAD = re.compile(r"@@ ([a-z_0-9]{1,40}) ([a-z0-9]{1,12})")

HARMLESS = 2_000_000
"""Characters of a transcript that are read; a host's has some ten thousand."""

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """One part: its status (`0`, another exit status, `missing`, `timeout`, `unbounded`, `cut` where it has no end)."""

    status: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def why(self, tool: str) -> str:
        """Why there is no answer in it, in words."""
        return {
            "missing": f"`{tool}` is not installed",
            "timeout": f"`{tool}` did not answer in time",
            "unbounded": f"`{tool}` was not run: there is no folder for its output and no `timeout` to end it",
            "absent": "the transcript does not have it",
        }.get(self.status, f"`{tool}` said: {first(self.lines) or 'nothing'}")


def first(lines: Sequence[str]) -> str:
    text = next((line.strip() for line in lines if line.strip()), "")
    # A message may name a user's folder.
    return private("".join(char if char.isprintable() else "?" for char in text))[:160]


def private(text: str) -> str:
    return re.sub(r"(?<=/home/)[^/\s]+", "…", text)


def parts(text: str) -> Mapping[str, Part]:
    """The parts of a transcript, by name. The last one of a name counts; text outside of parts is left out."""
    found: dict[str, tuple[str, list[str]]] = {}
    into: list[str] | None = None
    for line in re.split(r"\r?\n", text[:HARMLESS]):
        if head := _HEAD.fullmatch(line):
            into = []
            found[head[1]] = (head[2], into)
        elif line.startswith("|") and into is not None:
            into.append(line[1:])
    return {name: Part(status, tuple(lines)) for name, (status, lines) in found.items()}


NOTHING = Part("absent", ())


class Reader:
    """Puts facts together, and the reasons why some are missing."""

    def __init__(self, found: Mapping[str, Part]) -> None:
        self.found = found
        self.unknown: dict[str, str] = {}

    def part(self, name: str) -> Part:
        return self.found.get(name, NOTHING)

    def lines(self, name: str) -> tuple[str, ...]:
        return self.part(name).lines

    def about(self, word: str) -> list[str]:
        return [line.partition(" ")[2].strip() for line in self.lines("about") if line.split(" ")[0] == word]

    def or_unknown(self, path: str, value: T | None, why: str) -> T | None:
        if value is None:
            self.unknown[path] = why
        return value


def json_of(text: str) -> dict[str, Any]:
    """The first object in a text that may have warnings before it; nothing where there is none."""
    at = text.find("{")
    while 0 <= at < 100_000:
        try:
            found, _ = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at = text.find("\n{", at)
            at = at + 1 if at >= 0 else -1
            continue
        return found if isinstance(found, dict) else {}
    return {}
