"""The opt-in set for EAGLE-3 with images: E6 and E7 in sglang."""

from __future__ import annotations

from builder.patches.engine import Site

SITES: tuple[Site, ...] = ()
