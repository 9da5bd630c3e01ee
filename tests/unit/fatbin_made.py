"""Made-up fat binaries: ELF files with `.nv_fatbin`, containers in it, cubins with kernels of given sizes in those."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from builder import fatbin, fatbin_stream

A, F, ZSTD, LZ4 = 0x100000, 0x200000, 0x8000, 0x2000


def elf(sections: Mapping[str, bytes]) -> bytes:
    """An ELF64 file that has sections and nothing else."""
    names = b"\0"
    rows, body = [b"\0" * 64], b""
    for name, data in {**sections, ".shstrtab": b""}.items():
        at = len(names)
        names += name.encode() + b"\0"
        if name == ".shstrtab":
            data = names
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, 0, 0, 64 + len(body), len(data), 0, 0, 1, 0))
        body += data
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), len(rows) - 1)
    return head + body + b"".join(rows)


def cubin(*kernels: int) -> bytes:
    """A cubin with kernels of these many bytes of code."""
    return elf({".nv.info": b"x", **{f".text.k{i}": bytes(size) for i, size in enumerate(kernels)}})


def zstd(data: bytes) -> bytes:
    """A frame that stores its one block as it is (RFC 8878)."""
    assert len(data) < 1 << 17
    return struct.pack("<IBI", 0xFD2FB528, 0xA0, len(data)) + (1 | len(data) << 3).to_bytes(3, "little") + data


def entry(payload: bytes, arch: int, flags: int = A, *, kind: int = 2, size: int | None = None) -> bytes:
    """One image; ``size`` is what a compressed one says that it unpacks to."""
    packed = len(payload) if size is not None else 0
    padded = payload + bytes(-len(payload) % 8)
    fields = (kind, 0x0101, 64, len(padded), packed, 0, 8, 1, arch, 0, 0, flags | 0x11, 0, size or 0)
    return struct.pack("<HHIQIIHHIIIQQQ", *fields) + padded


def compressed(code: bytes, arch: int, flags: int = A) -> bytes:
    """An image that zstd has packed."""
    return entry(zstd(code), arch, flags | ZSTD, size=len(code))


def container(*entries: bytes) -> bytes:
    """The images of one source."""
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def module(containers: Sequence[bytes]) -> bytes:
    """A shared object with these containers."""
    return elf({".text": b"\x90", ".nv_fatbin": b"".join(containers)})


def fuzz(most: int, seconds: float, seed: int) -> tuple[int, float, float]:
    """Damage files until there were ``most`` or the time is up, and read each in three ways.

    How many there were, the slowest in seconds, all in seconds. Raises whatever is no `FatbinError`, and `AssertionError`
    where two ways find two answers.
    """
    rng = random.Random(seed)
    packed = compressed(cubin(64, 4096), 120)
    parts = [
        container(entry(cubin(300), 90), entry(b".version 9.0\n", 120, F, kind=1)),
        container(packed, entry(b"x" * 9, 80, LZ4, size=99)),
    ]
    kinds = [
        elf({".text": b"\x90" * 40, ".nv_fatbin": b"".join(parts), ".data": bytes(64)}),
        elf({".nv_fatbin": parts[0] + bytes(8) + parts[1], "__nv_relfatbin": parts[1]}),
        parts[0] + parts[1],
    ]
    values = [bytes(1), b"\xff", bytes(8), b"\xff" * 8, b"\0\0\0\x80", struct.pack("<IHH", 0xBA55ED50, 1, 16)]
    began = time.monotonic()
    slowest, count = 0.0, 0
    while count < most and time.monotonic() - began < seconds:
        hostile = bytearray(rng.choice(kinds))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(hostile))
            value = rng.choice([*values, rng.randbytes(rng.randint(1, 8))])
            if rng.random() < 0.8:
                hostile[at : at + len(value)] = value
            else:
                hostile[at:at] = value
        data = bytes(hostile[: rng.randrange(len(hostile) + 1)] if rng.random() < 0.2 else hostile)
        start = time.monotonic()
        answers = _answers(data)
        slowest = max(slowest, time.monotonic() - start)
        names = [[[image.name for image in one.images] for one in answer] for answer in answers if answer is not None]
        assert all(name == names[0] for name in names), data.hex()
        count += 1
    return count, slowest, time.monotonic() - began


def _answers(data: bytes) -> list[tuple[fatbin.Container, ...] | None]:
    def pieces() -> Iterator[bytes]:
        for start in range(0, len(data), 100):
            yield data[start : start + 100]

    return [
        _outcome(lambda: fatbin.scan(lambda start, size: data[start : start + size], len(data))),
        _outcome(lambda: fatbin_stream.scan_stream(pieces())),
        _outcome(lambda: fatbin.read(data)),
    ]


def _outcome(call: Callable[[], tuple[fatbin.Container, ...]]) -> tuple[fatbin.Container, ...] | None:
    try:
        return call()
    except fatbin.FatbinError:
        return None
