"""The ends of deflate streams, without what is before them: against what zlib makes of the whole."""

from __future__ import annotations

import random
import time
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder import deflate
from builder.deflate import DeflateError, Prefix, Tail, recover_tail

# A window that starts in the middle of text: words from it make up most of what follows, as in a string table.
WORDS = [f"_ZN2at6native{i}{name}E" for i, name in enumerate(("add", "mul", "SymInt", "TensorBase", "matmul_out") * 40)]


def text(seed: int, size: int) -> bytes:
    """Mangled names, as in a string table."""
    random_ = random.Random(seed)
    out = bytearray()
    while len(out) < size:
        out += random_.choice(WORDS).encode() + bytes([random_.choice(b"vijlRKS")]) + b"\0"
    return bytes(out[:size])


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def table(seed: int, size: int) -> bytes:
    """Records with small numbers, as in a symbol table."""
    random_, out = random.Random(seed), bytearray()
    while len(out) < size:
        out += random_.randrange(1 << 20).to_bytes(4, "little") + b"\x12\x00\x0c\x00"
        out += random_.randrange(1 << 28).to_bytes(8, "little") + random_.randrange(300).to_bytes(8, "little")
    return bytes(out[:size])


def compress(data: bytes, level: int = 6, window: int = 15, memory: int = 8, strategy: int = 0) -> bytes:
    made = zlib.compressobj(level, zlib.DEFLATED, -window, memory, strategy)
    return made.compress(data) + made.flush()


LARGE = text(1, 600_000) + table(2, 300_000) + noise(3, 200_000) + text(4, 400_000)
PACKED = compress(LARGE)


def check(tail: Tail, whole: bytes) -> int:
    """Every byte that is called known is right; the number of those."""
    assert len(tail.data) == len(tail.unknown) <= len(whole)
    truth = whole[len(whole) - len(tail.data) :]
    for said, unknown, true in zip(tail.data, tail.unknown, truth, strict=True):
        assert unknown in (0, 255)
        assert unknown or said == true
    return tail.unknown.count(0)


# What is recovered


@pytest.mark.parametrize("size", [60_000, 150_000, 300_000])
def test_the_end_is_recovered_and_nothing_that_is_wrong(size: int) -> None:
    tail = recover_tail(PACKED[-size:])
    assert tail is not None
    assert len(tail.data) > size
    assert check(tail, LARGE) > size // 4


def test_noise_before_the_end_makes_all_of_it_known() -> None:
    at = len(compress(text(1, 600_000) + table(2, 300_000)))
    tail = recover_tail(PACKED[at + 10_000 :])
    assert tail is not None
    assert check(tail, LARGE) == len(tail.data)
    assert len(tail.data) > 400_000


def test_stored_blocks_are_a_start_too() -> None:
    whole = noise(5, 400_000) + text(6, 1000)
    tail = recover_tail(compress(whole)[-300_000:])
    assert tail is not None
    assert len(tail.data) > 200_000
    assert check(tail, whole) == len(tail.data)


def test_a_stored_block_within_stays_on_its_byte() -> None:
    # After a block with codes of its own that starts at an odd bit: 7 of 8 such starts used to lead nowhere.
    whole = text(7, 500_000) + noise(8, 40_000) + text(9, 50_000)
    packed = compress(whole, memory=4)
    tails = [recover_tail(packed[cut:]) for cut in range(0, 60_000, 5_000)]
    starts = [tail.start for tail in tails if tail is not None]
    assert len(starts) == 12 and max(starts) // 8 < 5_000
    assert len({start % 8 for start in starts}) > 3
    check(tails[-1], whole)  # type: ignore[arg-type]


def test_what_comes_from_before_the_start_is_unknown() -> None:
    block = noise(10, 1000)
    made = zlib.compressobj(6, zlib.DEFLATED, -15)
    first = made.compress(block + text(11, 5000)) + made.flush(zlib.Z_FULL_FLUSH)
    del first
    made = zlib.compressobj(6, zlib.DEFLATED, -15, 8, 0, block)
    rest = made.compress(text(12, 4000) + block + text(13, 4000)) + made.flush()
    tail = recover_tail(rest)
    assert tail is not None
    assert tail.data[:4000] == text(12, 4000)
    assert tail.known(0, 4000) and not tail.known(4100, 4900) and tail.known(5000, 9000)
    assert not tail.known(3000, 6000)


def test_unknown_bytes_of_one_place_are_alike() -> None:
    whole = table(31, 600_000)
    tail = recover_tail(compress(whole)[-60_000:])
    assert tail is not None
    truth = whole[len(whole) - len(tail.data) :]
    before = whole[: len(whole) - len(tail.data)][-32768:]
    origins = tail.origins(0, len(truth))
    assert [origin is None for origin in origins] == [not unknown for unknown in tail.unknown]
    copied = [(origin, byte) for origin, byte in zip(origins, truth, strict=True) if origin is not None]
    assert len(copied) > 1000
    assert all(before[origin] == byte for origin, byte in copied)
    assert tail.origins(5000, 5100) == origins[5000:5100]


def test_the_last_block_alone() -> None:
    whole = text(14, 9000)
    tail = recover_tail(compress(whole))
    assert tail is not None
    assert (tail.data, tail.start, check(tail, whole)) == (whole, 0, 9000)


def test_only_fixed_codes_have_no_start_that_is_found() -> None:
    assert recover_tail(compress(text(15, 50_000), strategy=zlib.Z_FIXED)[-4000:]) is None


def test_stop_bounds_where_a_start_may_be() -> None:
    whole = recover_tail(PACKED[-150_000:])
    assert whole is not None
    start = whole.start // 8
    assert recover_tail(PACKED[-150_000:], start) is None
    assert recover_tail(PACKED[-150_000:], start + 1) == whole


def test_starts_before_too_much_are_passed_over() -> None:
    whole = bytes(10 << 20) + text(16, 300_000) + noise(17, 100_000) + text(18, 100_000)
    packed = compress(whole, 9)
    tail = recover_tail(packed, limit=1 << 20)
    assert tail is not None
    assert len(tail.data) <= 1 << 20
    check(tail, whole)


@pytest.mark.parametrize("place", range(8))
def test_empty_blocks_lead_to_every_bit(place: int) -> None:
    head, begun = deflate._PRIMERS[place]
    # An empty last block with fixed codes: 1, 01, seven zeros.
    number = int.from_bytes(head + bytes([begun]), "little") | 0b011 << 8 * len(head) + place
    inflate = zlib.decompressobj(-15)
    assert inflate.decompress(number.to_bytes(len(head) + 4, "little")) == b""
    assert inflate.eof


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    parts=st.lists(
        st.tuples(st.sampled_from([text, table, noise]), st.integers(0, 1000), st.integers(1, 60_000)),
        min_size=1,
        max_size=6,
    ),
    level=st.integers(0, 9),
    window=st.integers(9, 15),
    memory=st.integers(1, 9),
    strategy=st.sampled_from([zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED]),
    cut=st.floats(0, 1),
)
def test_no_byte_that_is_called_known_is_wrong(
    parts: list[tuple[object, int, int]], level: int, window: int, memory: int, strategy: int, cut: float
) -> None:
    whole = b"".join(make(seed, size) for make, seed, size in parts)  # type: ignore[operator]
    packed = compress(whole, level, window, memory, strategy)
    tail = recover_tail(packed[int(len(packed) * cut) :])
    if tail is not None:
        check(tail, whole)


# Hostile bytes


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000))
def test_bytes_that_are_no_stream(data: bytes) -> None:
    tail = recover_tail(data)
    if tail is not None:
        assert zlib.decompressobj(-15).decompress(b"") == b""
        assert len(tail.data) == len(tail.unknown)


def test_noise_takes_time_that_is_proportional() -> None:
    started = time.process_time()
    assert recover_tail(noise(19, 200_000)) is None
    # 0.3 s on the machine this was written on, for both passes.
    assert time.process_time() - started < 10


def test_a_bomb_stops_at_the_limit() -> None:
    assert recover_tail(compress(bytes(40 << 20), 9), limit=1 << 20) is None


# The beginning


def test_the_beginning_in_pieces() -> None:
    prefix = Prefix(len(LARGE))
    for at in range(0, 100_000, 777):
        prefix.feed(PACKED[at : at + 777])
        assert LARGE.startswith(bytes(prefix.data))
    assert len(prefix.data) > 100_000
    assert not prefix.ended
    prefix.feed(PACKED[prefix.fed :])
    assert (bytes(prefix.data), prefix.ended, prefix.fed) == (LARGE, True, len(PACKED))


def test_a_beginning_that_is_no_stream() -> None:
    with pytest.raises(DeflateError) as caught:
        Prefix(1000).feed(b"\xff" * 100)
    assert str(caught.value) == "not a deflate stream: Error -3 while decompressing data: invalid block type"


def test_a_beginning_that_is_longer_than_the_whole() -> None:
    prefix = Prefix(1000)
    with pytest.raises(DeflateError) as caught:
        prefix.feed(compress(bytes(1 << 20)))
    assert str(caught.value) == "the stream inflates to more than the 1000 bytes that are stated"
    assert len(prefix.data) == 1001
