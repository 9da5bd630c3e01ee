"""The beginning of a deflate stream without its end, and its end without the beginning. Standard library only.

Deflate (RFC 1951) is a row of blocks that begin at any bit. A block with Huffman codes of its own (type 2) starts with
a description of them that hardly any other bits pass for: 2 in 10^10 do. So the end of a stream is read by trying bit
after bit for such a start, with zlib as the judge: it has to decode from there to the end of the stream, and exactly to
it. Where nothing can be compressed, stored blocks follow each other, and two of them are a start as well.

A block refers back to the 32 KiB before it, which are not known here. Decoded twice, once with zeros for them and once
with 0xFF, a byte that comes out alike is what it is whatever they were; one that differs was copied from them.
"""

from __future__ import annotations

import itertools
import re
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

MAX_INFLATED = 64 << 20
"""Bytes that the end of a stream may inflate to: deflate can make a thousand of one."""

MAX_STARTS = 16
"""Block starts that lead nowhere, or to too much, before the search is given up: bits that pass for one are that rare."""

_WINDOW, _TRIAL = 32768, 65536
_ZEROS, _ONES = bytes(_WINDOW), b"\xff" * _WINDOW
_LOW, _HIGH = bytes(range(256)) * (_WINDOW // 256), b"".join(bytes([place]) * 256 for place in range(_WINDOW // 256))
# Bytes looked at together, and what a block's description has at most: 14 bits, 19 lengths, 316 codes of 7 + 7 bits.
_CHUNK, _DESCRIPTION = 8192, 600
# Shorter ones are not worth it, and zeros before 0xFF look like an empty one.
_LEAST_STORED = 256
# After the first bit (last block), bits are 01 for type 2; then HLIT and HDIST, five bits each, at most 29 both, and HCLEN,
# four bits, of which the last is in a third byte. It is at least 8 in what a compressor writes: the end of a block comes once
# in it, so that its code is long, and lengths of codes from 11 on stand far back. Without it twice as many would be looked at.
_STARTS = tuple(
    re.compile(
        b"["
        + b"".join(re.escape(bytes([lengths << 3 | 4 | last])) for lengths in range(30))
        + b"](?=["
        + b"".join(re.escape(bytes([rest << 5 | distances])) for distances in range(30) for rest in range(8))
        + b"]["
        + b"".join(re.escape(bytes([odd])) for odd in range(1, 256, 2))
        + b"])",
        re.DOTALL,
    )
    for last in (0, 1)
)
# The share of the code space, in 128ths, that four lengths of three bits take; the whole has to be 128.
_SHARE = tuple(
    sum(128 >> length for length in _four if length)
    for _four in ((bits & 7, bits >> 3 & 7, bits >> 6 & 7, bits >> 9) for bits in range(4096))
)
# By HCLEN: the bits of that many lengths, of which there are four more.
_LENGTHS = tuple((1 << 3 * (count + 4)) - 1 for count in range(16))


class DeflateError(ValueError):
    """Bytes that are no deflate stream, or one that inflates to more than it may."""


class Prefix:
    """The beginning of a stream: `feed` it with compressed bytes in order, `data` is what they are."""

    def __init__(self, limit: int) -> None:
        """``limit`` is the size of the whole, in bytes. `feed` raises `DeflateError` for a stream that is longer."""
        self._inflate = zlib.decompressobj(-15)
        self._limit = limit
        self.data = bytearray()
        self.fed = 0

    @property
    def ended(self) -> bool:
        """Whether the stream has ended."""
        return self._inflate.eof

    def feed(self, data: bytes) -> None:
        """Inflate what comes next. Raises `DeflateError` for what is no deflate stream."""
        self.fed += len(data)
        if self._inflate.eof:
            return
        try:
            # Not max_length 0, which stands for no limit.
            self.data += self._inflate.decompress(data, self._limit - len(self.data) + 1)
        except zlib.error as error:
            raise DeflateError(f"not a deflate stream: {error}") from error
        if len(self.data) > self._limit:
            raise DeflateError(f"the stream inflates to more than the {self._limit} bytes that are stated")


@dataclass(frozen=True)
class Tail:
    """The end of what a stream inflates to. ``unknown`` has a byte for each of ``data``, not zero where it is not known.

    ``start`` is the bit of the compressed bytes from which on it was decoded, ``packed`` the stream that it was.
    """

    data: bytes
    unknown: bytes
    start: int
    packed: bytes = field(repr=False, compare=False)

    def known(self, start: int, end: int) -> bool:
        """Whether the bytes from ``start`` to ``end`` are certain."""
        return not self.unknown[start:end].strip(b"\0")

    def origins(self, start: int, end: int) -> list[int | None]:
        """For each byte from ``start`` to ``end`` None if it is certain, else the place that it was copied from.

        That is one of the 32 KiB before `start`, from 0 on; bytes that were copied from one place are alike.
        """
        low, high = self._traces
        parts = zip(self.unknown[start:end], low[start:end], high[start:end], strict=True)
        return [low_ | high_ << 8 if unknown else None for unknown, low_, high_ in parts]

    @cached_property
    def _traces(self) -> tuple[bytes, bytes]:
        """What comes out where each of the bytes before it is its own place: the lower and the higher half of it."""
        low, high = (_inflate(self.packed, window, len(self.data)) for window in (_LOW, _HIGH))
        assert low is not None and high is not None
        return low, high


def recover_tail(stream: bytes, stop: int | None = None, limit: int = MAX_INFLATED) -> Tail | None:
    """The end of a deflate stream, from the first block start in ``stream`` that is found; None where there is none.

    ``stream`` are the last bytes of a stream; block starts are looked for in the first ``stop`` of them. A start from
    which on there are more than ``limit`` bytes is passed over, with half of what follows it. Time is proportional to
    the bytes looked at, and at most `MAX_STARTS` starts are followed.
    """
    stop = len(stream) if stop is None else min(stop, len(stream))
    chances = MAX_STARTS
    # A last block is a start as well, but looking for both at once takes twice the time, and one that is longer than
    # what follows ``stop`` is no more likely than anything else.
    for last in (0, 1) if stop == len(stream) else (0,):
        skip = 0
        for bit, stored in _starts(stream, stop, last):
            if bit < skip:
                continue
            # Of a stored block this is where its length is, on a whole byte: what is before it says no more than that.
            rest = b"\0" + stream[bit // 8 :] if stored else _from_bit(stream, bit)
            try:
                first = _inflate(rest, _ZEROS, limit)
            except OverflowError:
                first, skip = None, (bit + 8 * len(stream)) // 2
            if first is not None:
                second = _inflate(rest, _ONES, limit)
                assert second is not None and len(second) == len(first)
                return Tail(first, _differences(first, second), bit, rest)
            chances -= 1
            if not chances:
                return None
    return None


def _primer(odd: int) -> tuple[int, int]:
    """An empty block, as its bits and their number: an odd number of them, or ten.

    The odd one has codes of its own. Their description: 257 and 1 codes, lengths for 18 of the 19 symbols of the
    description, of which 16 and 0 have three bits, 1 has two and 18 one; two runs of zeros, 138 and 118, a length of 1
    for the end of the block, and none for distances.
    """
    if not odd:
        return 0b010, 10
    order = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1)
    fields = [(0b100, 3), (0, 5), (0, 5), (len(order) - 4, 4)]
    fields += [({16: 3, 0: 3, 1: 2, 18: 1}.get(symbol, 0), 3) for symbol in order]
    # Huffman codes go in from their first bit on: 18 is 0, 1 is 10, 0 is 110.
    fields += [(0, 1), (138 - 11, 7), (0, 1), (118 - 11, 7), (0b01, 2), (0b011, 3), (0, 1)]
    bits = count = 0
    for value, width in fields:
        bits, count = bits | value << count, count + width
    return bits, count


def _primers() -> tuple[tuple[bytes, int], ...]:
    """For each place of a bit in its byte: whole bytes of empty blocks, and what else of them is before that bit."""
    found = []
    for place in range(8):
        bits, count = _primer(1) if place % 2 else (0, 0)
        empty, width = _primer(0)
        while count % 8 != place:
            bits, count = bits | empty << count, count + width
        data = bits.to_bytes(count // 8 + 1, "little")
        found.append((data[:-1], data[-1]))
    return tuple(found)


_PRIMERS = _primers()


def _from_bit(stream: bytes, bit: int) -> bytes:
    """A stream that goes on from this bit, which stays where it is in its byte: a stored block begins at a whole one."""
    at, place = divmod(bit, 8)
    head, begun = _PRIMERS[place]
    return head + bytes([stream[at] >> place << place | begun]) + stream[at + 1 :]


def _starts(stream: bytes, stop: int, last: int) -> Iterator[tuple[int, bool]]:
    """Bits at which a block with codes of its own seems to start, in order, and where the length of a stored one is.

    ``last`` is the first bit of the former.
    """
    share, lengths, pattern = _SHARE, _LENGTHS, _STARTS[last]
    for at in range(0, stop, _CHUNK):
        end = min(_CHUNK, stop - at)
        part = stream[at : at + end + _DESCRIPTION]
        number = int.from_bytes(part, "little")
        found = [] if last else [(8 * place, True) for place in _stored(stream, at, end)]
        for shift in range(8):
            shifted = (number >> shift).to_bytes(len(part), "little")
            for match in pattern.finditer(shifted, 0, end + 2):
                place = match.start()
                if place >= end:
                    break
                bits = int.from_bytes(shifted[place + 1 : place + 10], "little") >> 5
                bits = bits >> 4 & lengths[bits & 15]
                taken = (
                    share[bits & 4095]
                    + share[bits >> 12 & 4095]
                    + share[bits >> 24 & 4095]
                    + share[bits >> 36 & 4095]
                    + share[bits >> 48]
                )
                if taken == 128 and _begins(shifted[place : place + _DESCRIPTION]):
                    found.append((8 * (at + place) + shift, False))
        yield from sorted(found)


def _stored(stream: bytes, start: int, count: int) -> Iterator[int]:
    """Where the length of a stored block is that another stored one follows.

    Two bytes of length and their complement: one in 65,536 places looks like that, two in a row do once in 2**37.
    """
    end = start + count
    for at in (start, start + 1):
        # Four bytes that begin before the end.
        part = stream[at : end + 3]
        words = array("H", part[: len(part) // 2 * 2])
        if sys.byteorder == "big":
            words.byteswap()
        for index, (length, complement) in enumerate(itertools.pairwise(words)):
            if length ^ complement == 0xFFFF and length >= _LEAST_STORED:
                place = at + 2 * index
                after = stream[place + 4 + length : place + 9 + length]
                if len(after) == 5 and after[0] < 2 and (after[1] ^ after[3], after[2] ^ after[4]) == (0xFF, 0xFF):
                    yield place


def _begins(data: bytes) -> bool:
    """Whether zlib takes this for the beginning of a block."""
    try:
        zlib.decompressobj(-15, _ZEROS).decompress(data, 1)
    except zlib.error:
        return False
    return True


def _inflate(data: bytes, window: bytes, limit: int) -> bytes | None:
    """What ``data`` inflates to if it is a stream that ends exactly where ``data`` does.

    Raises `OverflowError` for more than ``limit`` bytes.
    """
    inflate = zlib.decompressobj(-15, window)
    try:
        # A start that is none goes wrong within some thousand bytes.
        out = inflate.decompress(data[:_TRIAL], limit + 1)
        if not inflate.eof and len(out) <= limit:
            left = inflate.unconsumed_tail + data[_TRIAL:]
            out += inflate.decompress(left, limit + 1 - len(out))
    except zlib.error:
        return None
    if len(out) > limit:
        raise OverflowError
    return out if inflate.eof and not inflate.unused_data else None


def _differences(one: bytes, other: bytes) -> bytes:
    """Zero where both are alike."""
    if one == other:
        return bytes(len(one))
    return (int.from_bytes(one, "little") ^ int.from_bytes(other, "little")).to_bytes(len(one), "little")
