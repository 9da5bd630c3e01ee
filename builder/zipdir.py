"""The directory of a zip file, of which a few members are wanted: torch's wheel has 12,000, and 14 with native code.

`zipfile` makes an object of each, 0.1 s for torch's. Here the others are stepped over. What is not as a plain wheel has it
(zip64, bytes before the first member) is left to `zipfile`, and so is the judgement of what is damaged.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO

_END = struct.Struct("<4s4H2LH")
_ENTRY = struct.Struct("<4s4B4H3L5H2L")
_UTF8 = 0x800
_BIG, _MANY = 0xFFFFFFFF, 0xFFFF


def sound(archive: zipfile.ZipFile) -> zipfile.ZipFile:
    """The archive, if all of its members lie within the file. Raises `zipfile.BadZipFile`.

    A wrong place of the directory makes `zipfile` count from before the file's beginning, and to seek there is an `OSError`.
    """
    if any(info.header_offset < 0 for info in archive.infolist()):
        raise zipfile.BadZipFile("its directory names a member before the file's beginning")
    return archive


def members(file: IO[bytes] | io.RawIOBase, mark: bytes) -> tuple[int, list[zipfile.ZipInfo]]:
    """Where the directory starts, and the members with ``mark`` in their names, in its order; ``file`` is seekable.

    Raises what `zipfile.ZipFile` raises on a file that is no zip file.
    """
    found = _plain(file, mark)
    if found is not None:
        return found
    with zipfile.ZipFile(file) as archive:
        return archive.start_dir, [info for info in archive.infolist() if mark in info.filename.encode()]


def _plain(file: IO[bytes] | io.RawIOBase, mark: bytes) -> tuple[int, list[zipfile.ZipInfo]] | None:
    size = file.seek(0, io.SEEK_END)
    if size < _END.size:
        return None
    end = _read(file, size - _END.size, _END.size)
    magic, *disks, here, count, length, start, comment = _END.unpack(end)
    usual = magic == b"PK\x05\x06" and disks == [0, 0] and not comment and here == count < _MANY
    if not usual or start == _BIG or start + length != size - _END.size:
        return None
    data = _read(file, start, length)
    found = []
    at = 0
    while at < len(data):
        if data[at : at + 4] != b"PK\x01\x02" or at + _ENTRY.size > len(data):
            return None
        name_size, extra_size, comment_size = struct.unpack_from("<3H", data, at + 28)
        name = data[at + _ENTRY.size : at + _ENTRY.size + name_size]
        if mark in name:
            info = _info(_ENTRY.unpack_from(data, at), name)
            if info is None:
                return None
            info.extra = data[at + _ENTRY.size + name_size : at + _ENTRY.size + name_size + extra_size]
            found.append(info)
        at += _ENTRY.size + name_size + extra_size + comment_size
        count -= 1
    return (start, found) if not count and at == len(data) else None


def _info(fields: tuple[int, ...], name: bytes) -> zipfile.ZipInfo | None:
    flags, method = fields[5], fields[6]
    crc, packed, size, attributes, offset = fields[9], fields[10], fields[11], fields[17], fields[18]
    if _BIG in (packed, size, offset) or b"\0" in name:
        return None
    info = zipfile.ZipInfo(name.decode("utf-8" if flags & _UTF8 else "cp437"))
    info.flag_bits, info.compress_type = flags, method
    info.CRC, info.compress_size, info.file_size = crc, packed, size
    info.external_attr, info.header_offset = attributes, offset
    return info


def _read(file: IO[bytes] | io.RawIOBase, start: int, length: int) -> bytes:
    file.seek(start)
    data = file.read(length)
    return data or b""
