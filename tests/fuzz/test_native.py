"""Ten thousand damaged native members: every one ends in facts or in words, and soon.

Not a part of `make unit`: `.venv/bin/pytest -q tests/fuzz`, three to six minutes. `FUZZ_CASES` and `FUZZ_SEED` are for more.
"""

from __future__ import annotations

import io
import os
import random
import struct
import time
import zlib

import pytest

from builder import parts
from builder.deflate import recover_tail
from builder.errors import IntegrityError
from builder.members import Members, Native
from tests.unit.native_made import as_patchelf, library, wheel

CASES, SEED = int(os.environ.get("FUZZ_CASES", "10000")), int(os.environ.get("FUZZ_SEED", "1"))
LONGEST = 10.0
"""Seconds for one case."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Files in every layout, each with noise where it makes parts of it unreachable."""
    folder = tmp_path_factory.mktemp("fuzz")
    near = library(folder / "near", exports=60)
    far = library(folder / "far", exports=60, noise=30_000, noise_in=(".rodata", ".data"))
    return [near, far, as_patchelf(near), as_patchelf(far)]


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that members of some kilobytes are read in parts, and not always as a whole in the end."""
    sizes = {
        "SMALL": 0,
        "HEAD": 1024,
        "TAIL": 2048,
        "STEP": 2048,
        "UNCLEAR": 8192,
        "MOST_DYNAMIC": 4096,
        "WHOLE": 20_000,
    }
    for name, value in sizes.items():
        monkeypatch.setattr(parts, name, value)


def damaged(data: bytes, random_: random.Random, where: range) -> bytes:
    """Some bytes exchanged: single ones, runs, whole words that look like sizes."""
    out = bytearray(data)
    for _ in range(random_.choice((1, 1, 2, 5, 20))):
        at = random_.choice(where)
        kind = random_.randrange(4)
        if kind == 0:
            out[at] = random_.randrange(256)
        elif kind == 1:
            out[at : at + 8] = random_.randbytes(len(out[at : at + 8]))
        elif kind == 2:
            word = struct.pack("<Q", random_.choice((0, 1, 255, 1 << 16, 1 << 31, (1 << 32) - 1, (1 << 64) - 1)))
            out[at : at + 8] = word[: len(out[at : at + 8])]
        else:
            length = random_.randrange(1, 200)
            out[at : at + length] = bytes(len(out[at : at + length]))
    return bytes(out)


def places(data: bytes) -> list[range]:
    """Where damage counts: headers, tables at the beginning, tables at the end, anywhere."""
    return [range(0x40, 0x240), range(0x200, 9000), range(len(data) - 12_000, len(data)), range(len(data))]


def read(data: bytes) -> Native | None:
    """Read the one member of a wheel; None for a wheel that is refused as damaged."""
    started = time.monotonic()
    try:
        (found,) = (
            Members("made-1.0-py3-none-any.whl", "a" * 64, io.BytesIO(data), lambda _: None, None).read().values()
        )
    except IntegrityError as error:
        assert str(error)
        return None
    finally:
        assert time.monotonic() - started < LONGEST
    assert (found.facts is None) == bool(found.trouble)
    return found


def test_damaged_files(sound: list[bytes]) -> None:
    random_ = random.Random(SEED)
    outcomes = {"facts": 0, "trouble": 0}
    for case in range(CASES // 2):
        data = sound[case % len(sound)]
        found = read(
            wheel({"part/a.so": damaged(data, random_, random_.choice(places(data)))}, level=random_.choice((1, 6)))[1]
        )
        assert found is not None
        outcomes["facts" if found.facts else "trouble"] += 1
    assert min(outcomes.values()) > CASES // 100


def test_damaged_streams(sound: list[bytes]) -> None:
    random_ = random.Random(SEED + 1)
    wheels = [wheel({"part/a.so": data})[1] for data in sound]
    for case in range(CASES * 3 // 10):
        data = wheels[case % len(wheels)]
        read(damaged(data, random_, range(data.index(b"PK\1\2"))))


def test_damaged_directories(sound: list[bytes]) -> None:
    random_ = random.Random(SEED + 2)
    data = wheel({"part/a.so": sound[0]})[1]
    start = data.index(b"PK\1\2")
    for _ in range(CASES // 10):
        try:
            read(damaged(data, random_, range(start, len(data))))
        except ValueError as error:
            # The member is called otherwise now, and is no native one.
            assert "values to unpack" in str(error)


def test_tails_of_damaged_streams(sound: list[bytes]) -> None:
    random_ = random.Random(SEED + 3)
    for case in range(CASES // 10):
        data = sound[case % len(sound)]
        stream = zlib.compress(data, 6)[2:-4]
        packed = damaged(stream, random_, range(len(stream) // 2))
        started = time.monotonic()
        tail = recover_tail(packed[random_.randrange(4000) :])
        assert time.monotonic() - started < LONGEST
        if tail is not None:
            assert len(tail.data) == len(tail.unknown)
