"""Compressed bytes of an image's layers before it is pushed or pulled.

A layer that was pushed before is known to the byte: every push records what each layer's content became. Any other is
predicted from what layers of its kind became when they were measured (facts/transfer.yaml).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from builder.facts import TransferFact, load_facts
from builder.files import write_atomic

if TYPE_CHECKING:
    from builder.engine import LayerSize
    from builder.planning import Row

_SCHEMA = 1

KEPT = 500
"""Contents whose sizes are kept; the oldest go first."""


@dataclass(frozen=True)
class Blob:
    """A layer as a registry has it. ``bytes`` are compressed."""

    diff_id: str
    digest: str
    bytes: int


class Sizes:
    """What layers became when they were pushed, by the sha256 of what decides their content: `CACHE/layers.json`."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, tuple[Blob, ...]] = {}
        try:
            kept = json.loads(path.read_text(encoding="utf-8")) if path else {}
            if kept.get("schema") == _SCHEMA:
                self._known = {key: tuple(Blob(**row) for row in rows) for key, rows in kept["contents"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            # Only predictions become worse.
            self._known = {}

    @classmethod
    def of(cls, cache: Path) -> Sizes:
        """The record in a cache folder."""
        return cls(cache / "layers.json")

    def get(self, key: str) -> tuple[Blob, ...]:
        """The layers that a content became; none where it was never pushed from here."""
        return self._known.get(key, ())

    def remember(self, contents: Mapping[str, Sequence[Blob]]) -> None:
        """Keep what contents became, the newest last."""
        for key, blobs in contents.items():
            self._known.pop(key, None)
            self._known[key] = tuple(blobs)
        for key in list(self._known)[:-KEPT]:
            del self._known[key]
        if self._path is not None:
            rows = {key: [asdict(blob) for blob in blobs] for key, blobs in self._known.items()}
            write_atomic(self._path, json.dumps({"schema": _SCHEMA, "contents": rows}, indent=1) + "\n")


def estimate(layer: str, amount: int) -> int:
    """Compressed bytes of a layer of this kind, from what one became: by its wheels' bytes, the OS packages, the targets.

    ``amount`` is as `TransferFact.amount`. 0 for a kind that was not measured.
    """
    for fact in load_facts(TransferFact):
        if fact.layer == layer:
            return int(fact.compressed * amount // fact.amount)
    return 0


def predicted(rows: Iterable[Row], have: set[str] | None = None) -> dict[str, int]:
    """Compressed bytes to move, by layer of a plan, to where the layers with the diff IDs `have` are.

    A layer whose diff ID is not known counts as not there.
    """
    had = have or set()
    return {
        row.layer: 0 if row.diff_ids and set(row.diff_ids) <= had else row.predicted_bytes for row in rows
    }  # fmt: skip


_MARKS = (
    ("/mnt/passed", "proof"),
    ("-m venv", "python"),
    ("rootfs.tar", "os"),
    ("apt-get", "os"),
    ("/etc/passwd", "os"),
    ("WORKDIR", "os"),
)


def row_of(created_by: str) -> str:
    """The row of a plan that a layer of an image belongs to, by the instruction that made it; empty if none."""
    if "layer=" in created_by:
        return created_by.partition("layer=")[2].partition(";")[0]
    return next((row for mark, row in _MARKS if mark in created_by), "")


def contents(rows: Iterable[Row], layers: Sequence[LayerSize], blobs: Sequence[Blob]) -> dict[str, list[Blob]]:
    """What each row of a plan became, by its key: `layers` are the image's, `blobs` the same layers in the registry."""
    found: dict[str, list[Blob]] = {}
    for layer, blob in zip(layers, blobs, strict=True):
        found.setdefault(row_of(layer.created_by), []).append(blob)
    return {row.key: found[row.layer] for row in rows if row.layer in found}
