"""The opt-in set for symmetric memory on SM120 without multicast: S4 and S4b in sglang."""

from __future__ import annotations

from builder.patches.engine import Site

SITES: tuple[Site, ...] = ()
