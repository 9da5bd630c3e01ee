"""zstd on all cores, with the same bytes whatever the number of cores: pieces of a fixed size, each a frame of its own.

Frames one after the other are one zstd file (RFC 8878 §3); engines from 23 on and Python read them. zstd and not gzip, at
its default level: docs/trust.md has the measurement.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

if sys.version_info >= (3, 14):
    from compression.zstd import compress
else:
    from backports.zstd import compress

LEVEL: Final = 3
PIECE: Final = 8 << 20
"""Bytes that are compressed apart from all others."""


def squeezed(chunks: Iterable[bytes], workers: int = 0) -> Iterator[bytes]:
    """Compress a stream; holds twice as many pieces as there are workers (one a core unless it is given)."""
    count = workers or os.cpu_count() or 1
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(count) as pool:
        for piece in _pieces(chunks):
            waiting.append(pool.submit(pack, piece))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def pack(piece: bytes, level: int = LEVEL) -> bytes:
    """One frame."""
    return compress(piece, level)


def _pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    held = bytearray()
    any_yet = False
    for chunk in chunks:
        held += chunk
        while len(held) >= PIECE:
            any_yet = True
            yield bytes(held[:PIECE])
            del held[:PIECE]
    if held or not any_yet:
        yield bytes(held)
