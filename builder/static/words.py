"""How sentences name wheels."""

from __future__ import annotations

from collections.abc import Sequence

from builder.lock import Artefact
from builder.lockrules import listed, named


def several(artefacts: Sequence[Artefact], most: int = 4) -> str:
    """Wheels as a sentence lists them, the first of them where there are many."""
    if len(artefacts) <= most:
        return listed([named(artefact) for artefact in artefacts])
    first = ", ".join(named(artefact) for artefact in artefacts[: most - 1])
    return f"{first} and {len(artefacts) - most + 1} more wheels"
