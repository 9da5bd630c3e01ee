"""What is nearest to what was written: the known word, for "did you mean" hints, and the releases that an index has."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from packaging.version import Version

from builder.errors import BuilderError, UsageError

RELEASES = 4
"""How many releases are named beside one that does not exist."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The most similar of ``known``, or `None` when none is near; case and `-`/`_` do not count."""
    by_form = {name.lower().replace("_", "-"): name for name in sorted(known, reverse=True)}
    found = difflib.get_close_matches(word[:100].lower().replace("_", "-"), sorted(by_form), n=1, cutoff=0.6)
    return by_form[found[0]] if found else None


def no_matrix(error: BuilderError, word: str, known: Iterable[str]) -> BuilderError:
    """The error of an engine that was asked for ``word`` because no matrix has that name, with that said, too."""
    near = nearest(word, known)
    said = f"no matrix is called `{word[:100]}`" + (f" (did you mean `{near}`?)" if near else "")
    because = f"{said}, and {error.because}" if error.because else said
    return type(error)(error.what, where=error.where, because=because, hint=error.hint)


def no_release(name: str, version: Version, known: Iterable[Version]) -> UsageError:
    """The error about a release that an index does not have; ``known`` are the package's releases there, in any order."""
    there = sorted(set(known))
    at = sum(found < version for found in there)
    near = there[max(0, min(at - RELEASES // 2, len(there) - RELEASES)) :][:RELEASES]
    return UsageError(
        f"{name} has no release {version}",
        because=f"the index has {len(there)}" + (f", from {there[0]} to {there[-1]}" if there else ""),
        hint=f"near it are {', '.join(f'`{found}`' for found in near)}" if near else "",
    )
