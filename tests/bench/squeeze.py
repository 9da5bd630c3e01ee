"""How fast, and how small: gzip and zstd over files like those in our layers. Prints a table; docs/trust.md has one.

python tests/bench/squeeze.py FILE…        # 48 MB of each, from six places
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from builder.trust.squeeze import PIECE, pack

WAYS: dict[str, Callable[[bytes], bytes]] = {
    "gzip 1": lambda data: zlib.compress(data, 1),
    "gzip 6": lambda data: zlib.compress(data, 6),
    "zstd 1": lambda data: pack(data, 1),
    "zstd 3": lambda data: pack(data, 3),
}


def pieces(path: Path, count: int = 6) -> list[bytes]:
    """Pieces of the size that bundles are compressed in, from all over the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        found = []
        for number in range(count):
            file.seek(size * number // count)
            found.append(file.read(PIECE))
    return found


def main(paths: list[Path]) -> None:
    print(f"{'file':<28}" + "".join(f"{way:>20}" for way in WAYS))
    for path in paths:
        data = pieces(path)
        total = sum(map(len, data))
        row = f"{path.name[:27]:<28}"
        for way in WAYS.values():
            # Time of this thread: other work on the machine does not count.
            began = time.thread_time()
            packed = sum(len(way(piece)) for piece in data)
            seconds = time.thread_time() - began
            row += f"{packed / total:>9.0%} {total / 1e6 / seconds:>5.0f} MB/s"
        print(row)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
