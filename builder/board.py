"""Several things at once, a line for each: a table that is redrawn on a terminal, one line a change elsewhere.

Colour never carries meaning. Several threads may report.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

WAITING = "waiting"


@dataclass
class Row:
    """One of them: what it is at (`pull`), the rest of the line, and when it began and ended."""

    name: str
    state: str = WAITING
    text: str = ""
    started: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """How long it has run so far, or ran."""
        return (self.ended or time.monotonic()) - self.started if self.started else 0.0


class LiveTable:
    """A table on standard error that is redrawn while there is a terminal. A context manager.

    It is drawn once while it is made: what ``table`` reads is set before `__init__` is called.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.terminal = self.console.is_terminal
        self._live = Live(console=self.console, auto_refresh=True, refresh_per_second=4, get_renderable=self.table)
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if self.terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.terminal:
            self._live.stop()

    def print(self, line: str) -> None:
        """A line that stays, above the table."""
        self.console.print(Text(line), soft_wrap=True)

    def print_change(self, line: str) -> None:
        """A line of its own for a change, with the seconds since the beginning: what there is without a terminal."""
        self.print(f"[{time.monotonic() - self._began:4.0f} s] {line}")

    def table(self) -> Table:
        """The table as it is now."""
        raise NotImplementedError


def empty_table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """A table without rows: columns with these headings, then `time` and `now`."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="")
    for heading in left:
        table.add_column(heading, no_wrap=True)
    for heading in (*right, "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("now", overflow="ellipsis", no_wrap=True)
    return table


class Board(LiveTable):
    """Shows rows; elsewhere than on a terminal one line a change."""

    def __init__(self, title: str, names: Iterable[str], console: Console | None = None) -> None:
        self.title = title
        self.rows = {name: Row(name) for name in names}
        super().__init__(console)
        self._wide = max((len(name) for name in self.rows), default=0)
        self._lock = threading.Lock()

    def at(self, name: str, state: str, text: str = "") -> None:
        """``name`` is at something now. Elsewhere than on a terminal a line is printed if ``state`` is another one."""
        with self._lock:
            row = self.rows[name]
            changed = row.state != state
            row.state, row.text = state, text
            if not row.started:
                row.started = time.monotonic()
        if changed and not self.terminal:
            self._line(row)

    def end(self, name: str, state: str, text: str = "") -> None:
        """``name`` has ended so."""
        self.at(name, state, text)
        self.rows[name].ended = time.monotonic()

    def _line(self, row: Row) -> None:
        self.print_change(f"{row.name:<{self._wide}}  {row.state}  {row.text}".rstrip())

    def table(self) -> Table:
        """The table as it is now."""
        table = empty_table((self.title, "state"))
        for row in self.rows.values():
            seconds = f"{row.seconds:.0f} s" if row.started else ""
            table.add_row(Text(row.name), row.state, seconds, Text(row.text))
        return table
