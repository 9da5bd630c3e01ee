"""A stand-in for a library that the build machine lacks: a tiny shared object, written without a compiler.

Standard library only, Python 3.10 or newer: this file is copied into images and runs there.

The CUDA driver, libcuda.so.1, comes with the host's kernel driver and is in no wheel, yet every CUDA extension names it
as needed and binds its functions. With this stub on the loader's path such an extension loads without a GPU. Each
function returns 100, CUDA_ERROR_NO_DEVICE in cuda.h, whatever its arguments: what the driver says on a host that has
none.

The file layout is the System V gABI's (chapters 4, 5); .gnu.hash is as glibc's elf/dl-lookup.c reads it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

# What every function returns: CUDA_ERROR_NO_DEVICE.
RETURN_VALUE = 100


class _Machine(NamedTuple):
    number: int  # e_machine
    page: int  # largest page size in use, bytes
    code: bytes
    slot: int  # bytes from one function to the next
    pad: bytes


_MACHINES = {
    # mov eax, 100; ret. The padding is int3: nothing runs on into the next function.
    "x86_64": _Machine(62, 0x1000, b"\xb8" + struct.pack("<I", RETURN_VALUE) + b"\xc3", 8, b"\xcc"),
    # movz w0, #100; ret
    "aarch64": _Machine(183, 0x10000, struct.pack("<II", 0x52800000 | RETURN_VALUE << 5, 0xD65F03C0), 8, b""),
}

_SYMBOL_NAME = re.compile(r"[A-Za-z_.$][A-Za-z0-9_.$]*", re.ASCII)
_SONAME = re.compile(r"[A-Za-z0-9_.+-]+", re.ASCII)

_PF_X, _PF_W, _PF_R = 1, 2, 4
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_SHF_WRITE, _SHF_ALLOC, _SHF_EXECINSTR = 1, 2, 4
_SHT_PROGBITS, _SHT_STRTAB, _SHT_HASH, _SHT_DYNAMIC, _SHT_DYNSYM, _SHT_GNU_HASH = 1, 3, 5, 6, 11, 0x6FFFFFF6
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_STRSZ, _DT_SYMENT, _DT_SONAME, _DT_GNU_HASH = 4, 5, 6, 10, 11, 14, 0x6FFFFEF5
_STB_GLOBAL_STT_FUNC = 1 << 4 | 2
# Bits of a bloom filter word, and the shift that makes the second of a symbol's two bits.
_BLOOM_BITS, _BLOOM_SHIFT = 64, 6


def write_stub(path: str | os.PathLike[str], soname: str, symbols: Iterable[str], machine: str = "x86_64") -> None:
    """Write `stub_bytes` to ``path``. Raises what that raises, and OSError."""
    Path(path).write_bytes(stub_bytes(soname, symbols, machine))


def stub_bytes(soname: str, symbols: Iterable[str], machine: str = "x86_64") -> bytes:
    """An ELF64 shared object that exports each of ``symbols`` as an unversioned function returning `RETURN_VALUE`.

    ``machine`` is `x86_64` or `aarch64`. The same soname and set of names gives the same bytes; order and repetition of
    the names do not matter. Raises ValueError for an unknown machine, or a soname or name that is empty or has
    characters other than those of C identifiers (and `.` `$`; in a soname `+` and `-`): NUL, `@`, a slash, anything
    that is not ASCII.
    """
    if machine not in _MACHINES:
        raise ValueError(f"no stub for machine `{machine}`, only for {', '.join(f'`{m}`' for m in _MACHINES)}")
    if isinstance(symbols, str):
        raise TypeError("symbols has to be several names, not one string")
    if not _SONAME.fullmatch(soname):
        raise ValueError(f"not a soname: {soname!r}")
    names = sorted(set(symbols))
    for name in names:
        if not _SYMBOL_NAME.fullmatch(name):
            raise ValueError(f"not a symbol name: {name!r}")
    return _link(soname.encode("ascii"), [name.encode("ascii") for name in names], _MACHINES[machine])


class _Section(NamedTuple):
    name: bytes
    kind: int
    flags: int
    link: int
    info: int  # of a symbol table: the first entry that is not local
    align: int
    entry: int
    data: bytes


def _link(soname: bytes, names: list[bytes], machine: _Machine) -> bytes:
    """Put the file together: headers and symbol tables (R), code (R X), dynamic table (R W), then what is not loaded.

    The three segments follow each other without gaps in the file; each starts one more page further on in memory, so
    that address and offset agree modulo the page size and no two of them share a page there.
    """
    buckets = max(1, len(names) // 4)
    # .gnu.hash wants the symbols of a bucket side by side.
    names = sorted(names, key=lambda name: (_gnu_hash(name) % buckets, name))
    strings, at = _strings([soname, *names])
    dynsym_index, dynstr_index, text_index = 3, 4, 5

    headers = 64 + 5 * 56
    offset = headers
    places: list[int] = []

    def place(size: int, align: int) -> int:
        nonlocal offset
        offset += -offset % align
        places.append(offset)
        offset += size
        return places[-1]

    sysv, gnu = _sysv_hash_table(names, buckets), _gnu_hash_table(names, buckets)
    sysv_at, gnu_at = place(len(sysv), 8), place(len(gnu), 8)
    symbols_at, strings_at = place(24 * (len(names) + 1), 8), place(len(strings), 1)
    readonly_end = offset
    code = b"".join(machine.code.ljust(machine.slot, machine.pad or b"\0") for _ in names)
    code_at = place(len(code), 16)
    code_end = offset
    code_address = code_at + machine.page
    dynamic = _pairs(
        (_DT_SONAME, at[soname]),
        (_DT_HASH, sysv_at),
        (_DT_GNU_HASH, gnu_at),
        (_DT_STRTAB, strings_at),
        (_DT_SYMTAB, symbols_at),
        (_DT_STRSZ, len(strings)),
        (_DT_SYMENT, 24),
        (0, 0),
    )
    dynamic_at = place(len(dynamic), 8)
    dynamic_address = dynamic_at + 2 * machine.page
    symbols = bytes(24) + b"".join(
        struct.pack(
            "<IBBHQQ", at[name], _STB_GLOBAL_STT_FUNC, 0, text_index, code_address + i * machine.slot, len(machine.code)
        )
        for i, name in enumerate(names)
    )

    alloc = _SHF_ALLOC
    sections = [
        _Section(b".hash", _SHT_HASH, alloc, dynsym_index, 0, 8, 4, sysv),
        _Section(b".gnu.hash", _SHT_GNU_HASH, alloc, dynsym_index, 0, 8, 0, gnu),
        _Section(b".dynsym", _SHT_DYNSYM, alloc, dynstr_index, 1, 8, 24, symbols),
        _Section(b".dynstr", _SHT_STRTAB, alloc, 0, 0, 1, 0, strings),
        _Section(b".text", _SHT_PROGBITS, alloc | _SHF_EXECINSTR, 0, 0, 16, 0, code),
        _Section(b".dynamic", _SHT_DYNAMIC, alloc | _SHF_WRITE, dynstr_index, 0, 8, 16, dynamic),
    ]
    addresses = [sysv_at, gnu_at, symbols_at, strings_at, code_address, dynamic_address]
    section_names, name_at = _strings([*(s.name for s in sections), b".shstrtab"])
    sections.append(_Section(b".shstrtab", _SHT_STRTAB, 0, 0, 0, 1, 0, section_names))
    addresses.append(0)
    place(len(section_names), 1)
    section_headers_at = offset + -offset % 8

    program_headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, start, address, address, size, size, align)
        for kind, flags, start, address, size, align in (
            (_PT_LOAD, _PF_R, 0, 0, readonly_end, machine.page),
            (_PT_LOAD, _PF_R | _PF_X, code_at, code_address, code_end - code_at, machine.page),
            (_PT_LOAD, _PF_R | _PF_W, dynamic_at, dynamic_address, len(dynamic), machine.page),
            (_PT_DYNAMIC, _PF_R | _PF_W, dynamic_at, dynamic_address, len(dynamic), 8),
            (_PT_GNU_STACK, _PF_R | _PF_W, 0, 0, 0, 16),
        )
    )
    # Class 64, little-endian, version 1, System V ABI; a shared object; entry point 0.
    file_header = struct.pack(
        "<4s5B7xHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 0, 3, machine.number, 1, 0, 64, section_headers_at),
        *(0, 64, 56, 5, 64, len(sections) + 1, len(sections)),
    )
    output = bytearray(file_header + program_headers)
    for section, start in zip(sections, places, strict=True):
        output += bytes(start - len(output)) + section.data
    output += bytes(section_headers_at - len(output)) + bytes(64)
    for s, start, address in zip(sections, places, addresses, strict=True):
        output += struct.pack(
            "<IIQQQQIIQQ",
            name_at[s.name],
            s.kind,
            s.flags,
            address,
            start,
            len(s.data),
            s.link,
            s.info,
            s.align,
            s.entry,
        )
    return bytes(output)


def _strings(items: list[bytes]) -> tuple[bytes, dict[bytes, int]]:
    """A string table, and where in it each string starts."""
    table, at = bytearray(1), {}
    for item in items:
        at[item] = len(table)
        table += item + b"\0"
    return bytes(table), at


def _pairs(*entries: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *entry) for entry in entries)


def _sysv_hash(name: bytes) -> int:
    """The hash of .hash (gABI, chapter 5)."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        value = (value ^ (value >> 24 & 0xF0)) & 0x0FFFFFFF
    return value


def _gnu_hash(name: bytes) -> int:
    """The hash of .gnu.hash."""
    value = 5381
    for byte in name:
        value = value * 33 + byte & 0xFFFFFFFF
    return value


def _sysv_hash_table(names: list[bytes], buckets: int) -> bytes:
    """`.hash` of symbols 1, 2, …: both counts, first symbol of each bucket, next symbol of each symbol."""
    heads, nexts = [0] * buckets, [0] * (len(names) + 1)
    for index in range(len(names), 0, -1):
        bucket = _sysv_hash(names[index - 1]) % buckets
        nexts[index], heads[bucket] = heads[bucket], index
    return struct.pack(f"<{2 + len(heads) + len(nexts)}I", len(heads), len(nexts), *heads, *nexts)


def _gnu_hash_table(names: list[bytes], buckets: int) -> bytes:
    """`.gnu.hash` of symbols 1, 2, …, which are in the order of their buckets."""
    hashes = [_gnu_hash(name) for name in names]
    # A power of two, with a dozen bits or more a symbol, so that most names that are not here stop at the filter.
    words = 1 << (len(names) * 12 // _BLOOM_BITS).bit_length()
    bloom, heads, chain = [0] * words, [0] * buckets, []
    for index, value in enumerate(hashes, 1):
        bloom[value // _BLOOM_BITS % words] |= 1 << value % _BLOOM_BITS | 1 << (value >> _BLOOM_SHIFT) % _BLOOM_BITS
        bucket = value % buckets
        heads[bucket] = heads[bucket] or index
        last = index == len(hashes) or hashes[index] % buckets != bucket
        chain.append(value & ~1 | last)
    return struct.pack(f"<4I{words}Q{buckets + len(chain)}I", buckets, 1, words, _BLOOM_SHIFT, *bloom, *heads, *chain)
