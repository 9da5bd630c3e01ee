"""Static verdicts that are kept: the same lock gives the same one until this builder changes, so a second look reads nothing.

Kept is what was found, and not what could not be looked at: that is tried again each time.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder.abi.answers import code_state
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.findings import Finding
from builder.lock import Lock
from builder.rulebook import Context
from builder.settings import Settings


@dataclass
class Looked:
    """What was found in the wheels of a lock, and how much was looked at. Sizes are in bytes."""

    findings: list[Finding] = field(default_factory=list)
    looked_at: dict[str, Any] = field(default_factory=dict)
    bytes_read: int = 0
    bytes_total: int = 0
    index_unread: bool = False
    """Whether something was not looked at because an index does not answer."""


def _place(context: Context, lock: Lock, unread: Sequence[str], settings: Settings) -> Path:
    asked = {
        "lock": lock.digest,
        # Findings name lines of the matrix.
        "matrix": [
            str(context.loaded.source.path),
            context.loaded.matrix.model_dump(mode="json"),
            context.loaded.source.text,
        ],
        "unread": sorted(unread),
        "code": list(code_state()),
    }
    return settings.cache / "static" / f"{sha256_hex(canonical_json(asked))}.json"


def recall(context: Context, lock: Lock, unread: Sequence[str], settings: Settings) -> Looked | None:
    """What was found for a lock of which these wheels cannot be read; None where nothing was kept."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        said: dict[str, Any] = json.loads(_place(context, lock, unread, settings).read_bytes())
        findings = [Finding.model_validate_json(json.dumps(item)) for item in said["findings"]]
        return Looked(findings, dict(said["looked_at"]), 0, int(said["bytes_total"]))
    return None


def remember(found: Looked, context: Context, lock: Lock, unread: Sequence[str], settings: Settings) -> None:
    """Keep what was found, where the cache can be written."""
    said = {
        "findings": [finding.model_dump(mode="json") for finding in found.findings],
        "looked_at": found.looked_at,
        "bytes_total": found.bytes_total,
    }
    # Where it cannot be kept, the next one costs what this one cost.
    with contextlib.suppress(OSError):
        write_atomic(_place(context, lock, unread, settings), canonical_json(said))
