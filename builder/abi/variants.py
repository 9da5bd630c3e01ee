"""Packages that bring a file for each CUDA or torch and open one (facts/variants.yaml): that has to load, and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from builder.abi.model import Extension, Wheel
from builder.ledger import variants
from builder.smoke.variants import Variants


def _of(wheel: Wheel, releases: Mapping[str, str]) -> list[tuple[Variants, str]]:
    """What is known of a wheel, with the release that it goes by: of what is not there, nothing can be said."""
    known = variants({wheel.name: wheel.version})
    return [(each, releases[each.by]) for each in known if releases.get(each.by)]


def unopened(wheel: Wheel, releases: Mapping[str, str]) -> frozenset[str]:
    """The files of a wheel that its package never opens beside these releases of `cuda` and `torch` (`13.0`, `2.11`)."""
    return frozenset().union(*(each.others(wheel.natives, release) for each, release in _of(wheel, releases)))


def settle(wheel: Wheel, found: Sequence[Extension], releases: Mapping[str, str]) -> list[Extension]:
    """The files of a wheel as they were judged, less what its package never opens beside these releases.

    Where the file that it would open is not there and is required, that file is added, as a broken one.
    """
    judged = list(found)
    for each, release in _of(wheel, releases):
        judged = _settled(each, wheel, judged, release)
    return judged


def _settled(known: Variants, wheel: Wheel, found: Sequence[Extension], release: str) -> list[Extension]:
    group = known.group(wheel.natives)
    wanted = known.opened(group, release)
    others = known.others(wheel.natives, release)
    named = f"torch's CUDA {release}" if known.by == "cuda" else f"torch {release}"
    never = f"none; {wheel.name} opens `{wanted}` alone, by {named}"
    if wanted not in wheel.natives and not known.required:
        never = f"none; {wheel.name} has no file for {named}: {known.without}"
    judged = [
        replace(item, verdict="ok", by_design=never, sought=(), because=(), reasons=())
        if item.file in others and item.verdict != "ok"
        else item
        for item in found
    ]
    if wanted not in wheel.natives and known.required:
        because = f"{wheel} has no file for {named}, but for {', '.join(sorted(group))}: {known.without}"
        library = wanted.rpartition("/")[2]
        judged.append(Extension(wanted, str(wheel), "broken", 0, missing_libraries=(library,), because=(because,)))
    return judged
