"""The live display of a build: stage, package, bytes, time; plain lines where stderr is no terminal.

Fed with BuildKit's progress events (`docker buildx build --progress=rawjson`). Colour never carries meaning.
"""

from __future__ import annotations

import base64
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from builder.board import LiveTable, empty_table
from builder.files import pretty_size

_STAGE = re.compile(r"^\[(?:[^\]]*\s)?(?P<stage>[a-z_]+)\s+\d+/\d+\]")
# uv says this of every larger wheel, with its own spelling of sizes; bytes are counted from the lock instead.
_DOWNLOADED = re.compile(r"^\s*(?:Downloaded|Downloading|Building)\s+([A-Za-z0-9._-]+)")
_INSTALLED = re.compile(r"^\s*\+ ([A-Za-z0-9._-]+)==")

LOG_LINES = 200
"""Lines of each step that are kept for the message of a failure."""


@dataclass
class Stage:
    """A row of the display."""

    name: str
    title: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Wheel name → compressed bytes."""
    state: str = ""
    started: float = 0.0
    ended: float = 0.0
    done: set[str] = field(default_factory=set)
    now: str = ""

    @property
    def seconds(self) -> float:
        if not self.started:
            return 0.0
        return (self.ended or time.monotonic()) - self.started

    @property
    def bytes(self) -> int:
        return sum(self.sizes.get(name, 0) for name in self.done)


class Progress:
    """Collects events into stages; keeps what a failed step said."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.vertexes: dict[str, str] = {}
        self.logs: dict[str, list[str]] = {}
        self.failed: tuple[str, str] | None = None
        """Stage and BuildKit's words of the step that failed."""
        self.failed_log: list[str] = []
        self._partial: dict[str, str] = {}

    def feed(self, event: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Take one event; return the new whole log lines as (stage, line)."""
        for vertex in event.get("vertexes") or ():
            self._vertex(vertex)
        for status in event.get("statuses") or ():
            stage = self.stages.get("export")
            if stage and str(status.get("id", "")).startswith(("exporting", "unpacking", "naming", "writing")):
                self._start(stage)
                stage.now = status["id"]
        lines = []
        for entry in event.get("logs") or ():
            for line in self._lines(entry):
                name = self.vertexes.get(entry.get("vertex", ""), "")
                lines.append((name, line))
                kept = self.logs.setdefault(entry.get("vertex", ""), [])
                kept.append(line)
                del kept[:-LOG_LINES]
                if stage := self.stages.get(name):
                    self._line(stage, line)
        return lines

    def _vertex(self, vertex: Mapping[str, Any]) -> None:
        digest, name = vertex.get("digest", ""), vertex.get("name", "")
        match = _STAGE.match(name)
        key = match["stage"] if match else "export" if name.startswith("exporting") else ""
        self.vertexes[digest] = key
        stage = self.stages.get(key)
        if vertex.get("error") and "context canceled" not in vertex["error"] and self.failed is None:
            self.failed = (key or name, vertex["error"])
            # The last words of a program that ends with an error often lack a line break.
            kept = self.logs.setdefault(digest, [])
            kept += [line for line in (self._partial.pop(key, "") for key in self._streams(digest)) if line]
            self.failed_log = kept
        if stage is None:
            return
        if vertex.get("error"):
            stage.state = "FAILED"
            stage.ended = time.monotonic()
        elif vertex.get("cached"):
            stage.state = stage.state or "kept"
        elif vertex.get("completed"):
            # A stage has several steps; the last one to end ends the row.
            self._start(stage)
            stage.state, stage.ended = "done", time.monotonic()
            stage.done = set(stage.sizes)
            stage.now = ""
        elif vertex.get("started"):
            self._start(stage)
            stage.state, stage.ended = "running", 0.0

    def _streams(self, digest: str) -> list[str]:
        return [key for key in self._partial if key.startswith(digest)]

    @staticmethod
    def _start(stage: Stage) -> None:
        if not stage.started:
            stage.started = time.monotonic()
            stage.state = "running"

    def _lines(self, entry: Mapping[str, Any]) -> list[str]:
        key = entry.get("vertex", "") + str(entry.get("stream", ""))
        text = self._partial.get(key, "") + base64.b64decode(entry.get("data") or "").decode(errors="replace")
        *lines, self._partial[key] = text.split("\n")
        return [line.rstrip("\r") for line in lines]

    @staticmethod
    def _line(stage: Stage, line: str) -> None:
        if match := _DOWNLOADED.match(line):
            stage.now = match[1]
            if "Downloaded" in line:
                stage.done.add(match[1].lower().replace("_", "-").replace(".", "-"))
        elif match := _INSTALLED.match(line):
            stage.done.add(match[1].lower().replace("_", "-").replace(".", "-"))
        elif line.startswith(("ok ", "FAILED ", "not applicable")):
            stage.now = line[:60]


class Display(LiveTable):
    """Shows a `Progress`; elsewhere than on a terminal one line a change."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self.progress = progress
        super().__init__(console)
        self._shown: dict[str, str] = {}

    def feed(self, event: Mapping[str, Any]) -> None:
        """Take one event and show what changed."""
        lines = self.progress.feed(event)
        for stage, line in lines:
            if stage.startswith("proof") and line.strip():
                self.print(f"    {line}")
        if not self.terminal:
            for stage_ in self.progress.stages.values():
                if stage_.state and self._shown.get(stage_.name) != stage_.state:
                    self._shown[stage_.name] = stage_.state
                    self.print_change(" ".join(filter(None, row(stage_))))

    def table(self) -> Table:
        """The table as it is now."""
        table = empty_table(("stage", "state"), ("packages", "bytes"))
        for stage in self.progress.stages.values():
            table.add_row(*row(stage))
        return table


def row(stage: Stage) -> tuple[str, str, str, str, str, str]:
    """Title, state, packages, bytes, time, what it is at; empty where there is nothing to say."""
    packages = size = ""
    if stage.sizes:
        packages = f"{len(stage.done & set(stage.sizes))}/{len(stage.sizes)}"
        size = f"{pretty_size(stage.bytes)}/{pretty_size(sum(stage.sizes.values()))}"
    if stage.state == "kept":
        packages = size = ""
    seconds = f"{stage.seconds:.0f} s" if stage.started else ""
    return stage.title, stage.state or "waiting", packages, size, seconds, stage.now if stage.state == "running" else ""


def note(message: str) -> None:
    """A line of progress on stderr."""
    # In one piece: several threads may have something to say.
    print(f"{message}\n", end="", file=sys.stderr, flush=True)
