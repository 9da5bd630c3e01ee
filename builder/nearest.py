"""The known word nearest to what was written, for "did you mean" hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar of ``known``, or `None` when none is near; case and `-`/`_` do not count."""
    by_form = {name.lower().replace("_", "-"): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(word[:100].lower().replace("_", "-"), sorted(by_form), n=1, cutoff=0.6)
    return by_form[found[0]] if found else None
