"""What patch sites are looked for in: a wheel on this machine, or one of which no more than the members needed is here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from builder.wheel import Entry


class Source(Protocol):
    """As much of a wheel as `builder.patches` reads: `builder.wheel.Wheel`, or `builder.remote.RemoteSource`."""

    @property
    def path(self) -> Path:
        """The wheel; of one that is not on this machine its file name alone, for messages."""

    @property
    def name(self) -> str:
        """The package's name, normalised."""

    @property
    def version(self) -> str:
        """The file name's version."""

    @property
    def info(self) -> str:
        """The name of the dist-info folder."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The members that RECORD has a hash for."""

    def read(self, member: str) -> bytes:
        """The content of a member. Raises `KeyError` for one that RECORD does not have."""

    def read_all(self, members: list[str]) -> dict[str, bytes]:
        """The contents of those of ``members`` that there are, in that order."""
