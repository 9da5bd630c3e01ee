"""A folder tree as a few pieces of limited size, and back: one archive, compressed over its whole length, cut.

A wheel's shared objects repeat themselves over a gigabyte: deflate does not see that, zstd with a window of 2 GiB does (sglang-kernel
0.4.4: 352 instead of 615 MB). Standard library, and libzstd by ctypes where it is unpacked.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEVEL = "-9"
"""Of zstd. Level 14 takes five times as long for two per cent."""
BLOCK = 1 << 20


class CarryError(Exception):
    """A piece that is missing or damaged, or no zstd."""


def pack(folder: Path, into: Path, name: str, most: int) -> list[Path]:
    """Write ``folder`` as INTO/NAME-01, -02, … of at most ``most`` bytes each, every one a folder with its piece; these folders.

    Raises `CarryError` without the `zstd` program.
    """
    if (program := shutil.which("zstd")) is None:
        raise CarryError("the program `zstd` is not there")
    whole = into / f".{name}.tar"
    with tarfile.open(whole, "w") as archive:
        archive.add(folder, arcname=".")
    packed = whole.with_suffix(".zst")
    subprocess.run([program, LEVEL, "--long=31", "-T0", "-q", "-f", str(whole), "-o", str(packed)], check=True)
    raw = whole.stat().st_size
    whole.unlink()
    made = cut(packed, into, name, most, raw)
    packed.unlink()
    return made


def cut(path: Path, into: Path, name: str, most: int, raw: int = 0) -> list[Path]:
    """Write a file as INTO/NAME-01, -02, … of at most ``most`` bytes each, every one a folder with its piece; these folders.

    ``raw`` is what it unpacks to.
    """
    size = path.stat().st_size
    number = -(-size // most)
    share = -(-size // number)
    made = []
    with path.open("rb") as source:
        for index in range(number):
            place = into / f"{name}-{index + 1:02d}"
            place.mkdir()
            data = source.read(share)
            (place / "piece").write_bytes(data)
            about = {"index": index, "of": number, "sha256": hashlib.sha256(data).hexdigest(), "raw": raw}
            (place / "piece.json").write_text(json.dumps(about), encoding="utf-8")
            made.append(place)
    return made


def join(places: list[Path], target: Path) -> None:
    """Put the pieces of `cut` together into ``target``. Raises `CarryError`."""
    with target.open("wb") as whole:
        for data in _pieces(places):
            whole.write(data)


def _pieces(places: list[Path]) -> Iterator[bytes]:
    found: dict[int, tuple[dict[str, Any], Path]] = {}
    for place in places:
        about = json.loads((place / "piece.json").read_text(encoding="utf-8"))
        found[about["index"]] = about, place / "piece"
    number = next((about["of"] for about, _ in found.values()), 0)
    if lacking := [index + 1 for index in range(number) if index not in found] or ([] if number else [1]):
        raise CarryError(f"pieces {lacking} of {number or '?'} are missing")
    for index in range(number):
        about, path = found[index]
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != about["sha256"]:
            raise CarryError(f"{path} is damaged")
        yield data


def unpack(places: list[Path], into: Path) -> None:
    """Put the pieces together again. Raises `CarryError`."""
    packed = b"".join(_pieces(places))
    raw = json.loads((places[0] / "piece.json").read_text(encoding="utf-8"))["raw"]
    whole = into / "carried.tar"
    into.mkdir(parents=True, exist_ok=True)
    whole.write_bytes(_inflate(packed, raw))
    with tarfile.open(whole) as archive:
        archive.extractall(into, filter="data")
    whole.unlink()


def _inflate(packed: bytes, raw: int) -> bytes | ctypes.Array[ctypes.c_char]:
    """In one step: libzstd's limit on the window is one of its streaming functions alone."""
    if (name := ctypes.util.find_library("zstd") or "libzstd.so.1") is not None:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            pass
        else:
            library.ZSTD_decompress.restype = library.ZSTD_isError.restype = ctypes.c_size_t
            library.ZSTD_isError.argtypes = [ctypes.c_size_t]
            library.ZSTD_decompress.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t]
            held = ctypes.create_string_buffer(raw)
            size = library.ZSTD_decompress(held, raw, packed, len(packed))
            if library.ZSTD_isError(size) or size != raw:
                raise CarryError(f"libzstd gave {size} of {raw} bytes")
            return held
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise CarryError("neither libzstd nor pyarrow is there") from error
    data: bytes = pyarrow.Codec("zstd").decompress(packed, decompressed_size=raw, asbytes=True)
    return data
