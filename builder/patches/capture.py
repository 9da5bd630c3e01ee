"""E5 in sglang: what EAGLE-3 captures where the all-reduce is put off. The fused all-reduce cannot be without it."""

from __future__ import annotations

from builder.patches.engine import Site

SITES: tuple[Site, ...] = ()
