"""zstd in pieces: what comes out is what went in, and the same bytes however many work on it."""

from __future__ import annotations

import io

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.trust import squeeze
from builder.trust.proof import plain_reader
from builder.trust.squeeze import squeezed


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 4))
def test_what_comes_out(chunks: list[bytes], workers: int) -> None:
    before, squeeze.PIECE = squeeze.PIECE, 37  # type: ignore[misc]
    try:
        packed = b"".join(squeezed(chunks, workers))
        assert plain_reader(io.BufferedReader(io.BytesIO(packed))).read() == b"".join(chunks)
        # How the bytes come does not count.
        assert packed == b"".join(squeezed([b"".join(chunks)], 1))
    finally:
        squeeze.PIECE = before  # type: ignore[misc]
