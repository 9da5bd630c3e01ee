"""Patches that prove themselves: what sglang and flashinfer lack for SM120 and EAGLE-3, and a user's own diffs."""

from builder.patches.apply import (
    Patched,
    PatchResult,
    SiteState,
    asked,
    concerned,
    inspect_wheel,
    look,
    patch_wheel,
    states,
    write_patched,
)
from builder.patches.engine import Site, State

__all__ = [
    "PatchResult",
    "Patched",
    "Site",
    "SiteState",
    "State",
    "asked",
    "concerned",
    "inspect_wheel",
    "look",
    "patch_wheel",
    "states",
    "write_patched",
]
