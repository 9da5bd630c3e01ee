"""The opt-in set for the fused all-reduce on SM120: S5, S7, S8 and S9 in sglang, F5 in flashinfer."""

from __future__ import annotations

from builder.patches.engine import Site

SITES: tuple[Site, ...] = ()
