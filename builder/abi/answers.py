"""Answers of `builder abi` that are kept: the same pins give the same answer until this builder changes.

Only what nothing on an index can change is kept: exact pins, of which nothing was looked up by a range. So the same
question again costs an interpreter's start; this module imports nothing that is slow to import.
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


@dataclass(frozen=True)
class Answer:
    """What is printed: the JSON of `builder.abi.report.as_json`, and the text without its last line."""

    said: Mapping[str, Any]
    text: str

    def as_text(self) -> str:
        """The report for people, with what it cost."""
        read, total = pretty_size(self.said["bytes_read"]), pretty_size(self.said["bytes_total"])
        return f"{self.text}\n\nread {read} of {total} in {self.said['seconds']:.1f} s"


def _code() -> Iterator[str]:
    """What an answer depends on besides the question: this builder's files."""
    for folder, folders, files in os.walk(_BUILDER):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(files):
            at = (Path(folder) / name).stat()
            yield f"{folder}/{name} {at.st_size} {at.st_mtime_ns}"


def _place(lines: Sequence[str], python: str, base: str, site: Settings) -> Path:
    asked = {"lines": sorted(lines), "python": python, "base": base, "index": site.index, "code": list(_code())}
    return site.cache / "abi" / f"{sha256_hex(canonical_json(asked))}.json"


def recall(lines: Sequence[str], python: str, base: str, site: Settings) -> Answer | None:
    """The answer that was kept; None where there is none. Folders of wheels may change: they are looked into each time."""
    if site.wheels:
        return None
    try:
        said = json.loads(_place(lines, python, base, site).read_bytes())
        return Answer({**said["said"], "bytes_read": 0}, str(said["text"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(answer: Answer, lines: Sequence[str], python: str, base: str, site: Settings) -> None:
    """Keep an answer, where the cache can be written."""
    if site.wheels:
        return
    # Where it cannot be kept, the next one costs what this one cost.
    with contextlib.suppress(OSError):
        write_atomic(_place(lines, python, base, site), canonical_json({"said": answer.said, "text": answer.text}))
