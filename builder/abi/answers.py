"""Answers of `builder abi` that are kept: the same pins give the same answer until this builder changes.

Only what nothing on an index can change is kept: exact pins, of which nothing was looked up by a range. With `--find` that
is so but for the releases that there are: such an answer says when the index was asked, and is kept for an hour. So the
same question again costs an interpreter's start; this module imports nothing that is slow to import.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.files import canonical_json, pretty_size, sha256_hex, write_atomic
from builder.settings import Settings

_BUILDER = Path(__file__).parent.parent


RELEASES_LAST = 3600.0
"""Seconds for which the releases of a package are taken to be those that the index last told."""


@dataclass(frozen=True)
class Answer:
    """What is printed: the JSON of `builder.abi.report.as_json`, and the text without its last line."""

    said: Mapping[str, Any]
    text: str

    def as_text(self) -> str:
        """The report for people, with what it cost."""
        read, total = pretty_size(self.said["bytes_read"]), pretty_size(self.said["bytes_total"])
        releases = f"; the releases that the index had at {self.said['as_of']}" if "as_of" in self.said else ""
        return f"{self.text}\n\nread {read} of {total} in {self.said['seconds']:.1f} s{releases}"


def code_state() -> Iterator[str]:
    """What an answer depends on besides the question: this builder's files."""
    for folder, folders, files in os.walk(_BUILDER):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            at = (Path(folder) / name).stat()
            yield f"{folder}/{name} {at.st_size} {at.st_mtime_ns}"


@dataclass(frozen=True)
class Asked:
    """A question, as a command line has it."""

    lines: Sequence[str]
    python: str
    base: str
    site: Settings
    find: str | None = None
    platform: str = "linux/amd64"

    @property
    def _place(self) -> Path:
        said = {
            "lines": sorted(self.lines),
            "python": self.python,
            "base": self.base,
            "find": self.find,
            "platform": self.platform,
            "index": self.site.index,
            "code": list(code_state()),
        }
        return self.site.cache / "abi" / f"{sha256_hex(canonical_json(said))}.json"

    def recall(self, now: float) -> Answer | None:
        """The answer that was kept; None where there is none, or one that an index may have changed since: with `--find`.

        ``now`` are seconds since the epoch. Folders of wheels may change: they are looked into each time.
        """
        if self.site.wheels:
            return None
        try:
            kept = json.loads(self._place.read_bytes())
            if self.find is not None and not 0 <= now - kept["asked"] < RELEASES_LAST:
                return None
            return Answer({**kept["said"], "bytes_read": 0}, str(kept["text"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def remember(self, answer: Answer, now: float) -> None:
        """Keep an answer, where the cache can be written."""
        if self.site.wheels:
            return
        # Where it cannot be kept, the next one costs what this one cost.
        with contextlib.suppress(OSError):
            kept = {"said": answer.said, "text": answer.text, "asked": now}
            write_atomic(self._place, canonical_json(kept), durable=False)
