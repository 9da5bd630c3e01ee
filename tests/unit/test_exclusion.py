"""Dynamic tables of which some bytes are known by their place alone: what follows about them, and what does not."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.elf import BytesSource
from builder.elf_image import Image
from builder.exclusion import MOST_LINES, settle

IMAGE, SIZE = 0x3A7000, 3_840_312
NEEDED, STRTAB, SYMTAB, STRSZ, SYMENT, GNU_HASH = 1, 5, 6, 10, 11, 0x6FFFFEF5
LINES = [
    (NEEDED, 0x1864B),
    (NEEDED, 0x1865B),
    (12, 0x2F000),
    (GNU_HASH, 0x298),
    (STRTAB, 0xB078),
    (SYMTAB, 0x2720),
    (STRSZ, 0x18859),
    (SYMENT, 24),
    (9, 24),
    (0x6FFFFFF0, 0x238D2),
    (0, 0),
    (0, 0),
]


def table(lines: list[tuple[int, int]]) -> bytes:
    return b"".join(struct.pack("<QQ", *line) for line in lines)


def zeros_from(data: bytes, places: list[int]) -> list[int | None]:
    """Origins as deflate leaves them: each zero was copied from one of these places, in turn."""
    count, found = 0, []
    for byte in data:
        found.append(None if byte else places[count % len(places)])
        count += not byte
    return found


def test_zeros_of_one_place_follow() -> None:
    data = table(LINES)
    hidden = bytes(0xAA if byte == 0 else byte for byte in data)
    assert settle(hidden, zeros_from(data, [7, 9, 12]), IMAGE, SIZE) == data


def test_a_place_that_nothing_tells_of_is_not_guessed() -> None:
    data = table(LINES)
    origins: list[int | None] = [None] * len(data)
    # The second byte of a name's index: any value is one within the file.
    origins[9] = 5
    assert settle(data, origins, IMAGE, SIZE) is None
    # Its highest: only zero is.
    origins[9], origins[15] = None, 5
    assert settle(data, origins, IMAGE, SIZE) == data


def test_a_tag_whose_lowest_byte_is_not_known_is_known_only_where_it_has_to_be_there() -> None:
    data = table(LINES)
    origins: list[int | None] = [None] * len(data)
    origins[4 * 16] = 3
    assert settle(data, origins, IMAGE, SIZE) == data
    origins[4 * 16], origins[2 * 16] = None, 3
    assert settle(data, origins, IMAGE, SIZE) is None


def test_a_tag_that_may_be_a_systems_is_not_taken_for_one_of_the_gabi() -> None:
    data = table(LINES)
    origins: list[int | None] = [None] * len(data)
    for at in (1, 2, 3):
        origins[at] = at
    assert settle(data, origins, IMAGE, SIZE) is None
    # With the highest of the four known it is one of those, and these are below 39.
    origins[3] = None
    assert settle(data, origins, IMAGE, SIZE) == data


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        (4, (STRTAB + 1, 0xB078)),  # no string table
        (7, (SYMENT, 16)),  # symbols of another size
        (5, (SYMTAB, 1 << 40)),  # an address outside of the image
        (0, (0x1_0000_0001, 0x1864B)),  # a tag that there is not
    ],
)
def test_nothing_follows_from_a_table_that_is_not_sound(line: int, instead: tuple[int, int]) -> None:
    lines = [*LINES]
    lines[line] = instead
    data = table(lines)
    # One place for all zeros.
    assert settle(data, zeros_from(data, [1]), IMAGE, SIZE) is None


def test_a_place_that_would_have_two_values_is_none() -> None:
    data = table(LINES)
    origins: list[int | None] = [None] * len(data)
    # The 24 of SYMENT and the highest byte of a tag.
    origins[7 * 16 + 8] = origins[7] = 4
    assert settle(data, origins, IMAGE, SIZE) is None


def test_what_follows_the_end_is_no_part_of_it() -> None:
    sound, behind = table(LINES), bytes(range(200, 232))
    origins = [*zeros_from(sound, [1, 2]), *range(100, 132)]
    assert settle(sound + behind, origins, IMAGE, SIZE) == sound + bytes(32)


@given(st.integers(0, 1 << 30), st.floats(0, 1), st.integers(1, 40))
def test_what_is_said_is_right_whatever_is_hidden(seed: int, share: float, count: int) -> None:
    random_ = random.Random(seed)
    data = table(LINES)
    place_of: dict[int, list[int]] = {}
    origins: list[int | None] = []
    for byte in data:
        if random_.random() > share:
            origins.append(None)
            continue
        # Bytes of one place are alike.
        places = place_of.setdefault(byte, [])
        if len(places) < count:
            places.append(len(place_of) * 1000 + len(places))
        origins.append(random_.choice(places))
    hidden = bytes(
        byte if origin is None else random_.randrange(256) for byte, origin in zip(data, origins, strict=True)
    )
    assert settle(hidden, origins, IMAGE, SIZE) in (data, None)


def test_a_table_of_too_many_lines_is_left_alone() -> None:
    long = table([*LINES[:-2], *[(NEEDED, number) for number in range(MOST_LINES - len(LINES) + 1)], (0, 0)])
    origins = zeros_from(long, [*range(5000)])
    assert settle(long, origins, IMAGE, SIZE) in (long, None)
    assert settle(long + bytes(16), [*origins, *[None] * 16], IMAGE, SIZE) is None


def test_the_end_of_the_image() -> None:
    """Behind what is loaded, which may be more than the file has; what is not loaded does not count."""
    line = struct.Struct("<IIQQQQQQ").pack
    lines = line(1, 5, 0, 0, 0, 100, 100, 4096) + line(1, 6, 100, 4196, 0, 50, 900, 4096)
    lines += line(4, 4, 0, 1 << 40, 0, 8, 8, 8)
    header = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 3, 64, 0, 0
    )
    assert Image(BytesSource(header + lines)).end == 5096
