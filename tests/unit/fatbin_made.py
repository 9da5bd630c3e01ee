"""Made-up fat binaries: ELF files with `.nv_fatbin`, containers in it, cubins with kernels of given sizes in those."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

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
