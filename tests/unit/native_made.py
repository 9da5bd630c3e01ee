"""Made-up shared objects in both layouts in which wheels have them, and wheels that are compressed as real ones are."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

from tests.loopback import metadata
from tests.unit.smoke_made import compile_library

_HEADER, _SECTION, _PROGRAM = struct.Struct("<IIQQQQIIQQ"), 64, struct.Struct("<IIQQQQQQ")
_NOTE, _LOAD, _DYNAMIC = 4, 1, 2
_GNU_HASH, _DYNSYM = 0x6FFFFFF6, 11
_DT_GNU_HASH, _DT_STRTAB = 0x6FFFFEF5, 5


def names(count: int, seed: int = 0) -> list[str]:
    """Mangled names that are as alike as real ones."""
    random_ = random.Random(seed)
    words = ["native", "SymInt", "TensorBase", "structured", "cuda", "impl", "batch_norm", "conv", "quantized"]
    found: dict[str, None] = {}
    while len(found) < count:
        parts = [random_.choice(words) for _ in range(random_.randrange(1, 4))] + [f"op{random_.randrange(count * 4)}"]
        found[f"_ZN2at{''.join(f'{len(part)}{part}' for part in parts)}E{random_.choice('vijlRKS')}"] = None
    return list(found)


def library(
    folder: Path,
    *,
    exports: int = 300,
    noise: int = 0,
    noise_in: tuple[str, ...] = (".rodata",),
    soname: str = "libmade.so.1",
) -> bytes:
    """A shared object with versions, weak and versioned references, and noise (bytes) in ``noise_in``.

    `.rodata` is before the dynamic table, `.data` behind it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "noise").write_bytes(random.Random(noise).randbytes(noise))
    (folder / "map").write_text("MADE_1 { global: old*; }; MADE_2 { global: new*; } MADE_1;")
    source = "#include <stdio.h>\n#include <math.h>\nextern int maybe(void) __attribute__((weak));\n"
    source += (
        "int old_one(void) { return puts(0); }\nint new_one(double x) { return maybe ? maybe() : (int)pow(x, 3); }\n"
    )
    source += "".join(f"int {name}(void) {{ return {i}; }}\n" for i, name in enumerate(names(exports)))
    for section in noise_in:
        source += f'__asm__(".section {section}\\n.incbin \\"{folder / "noise"}\\"\\n.text");\n'
    flags = [f"-Wl,-soname,{soname}", "-Wl,-rpath,$ORIGIN/../lib:$ORIGIN", "-Wl,--hash-style=gnu", "-lm", "-w"]
    return compile_library(source, f"-Wl,--version-script={folder / 'map'}", *flags, folder=folder)


def as_patchelf(data: bytes) -> bytes:
    """The same file as patchelf leaves it: section table, .gnu.hash and .dynstr at the end, X where the names were."""
    out = bytearray(data)
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    (count,) = struct.unpack_from("<H", data, 60)
    headers = [list(_HEADER.unpack_from(data, sections_at + i * _SECTION)) for i in range(count)]
    symbols = next(h for h in headers if h[1] == _DYNSYM)
    table, strings = next(h for h in headers if h[1] == _GNU_HASH), headers[symbols[6]]
    (programs_at,) = struct.unpack_from("<Q", data, 32)
    (programs,) = struct.unpack_from("<H", data, 56)
    places = [programs_at + i * _PROGRAM.size for i in range(programs)]
    segments = [_PROGRAM.unpack_from(data, place) for place in places]
    top = max(s[3] + s[6] for s in segments if s[0] == _LOAD)
    address = top + -top % 4096 + 4096

    new_sections = len(out) + -len(out) % 8
    start = new_sections + count * _SECTION
    start += -start % 4096
    content = data[table[4] : table[4] + table[5]]
    content += bytes(-len(content) % 8)
    moved = {_DT_GNU_HASH: address, _DT_STRTAB: address + len(content)}
    for header in (table, strings):
        out[header[4] : header[4] + header[5]] = b"X" * header[5]
    content += data[strings[4] : strings[4] + strings[5]]
    table[3], table[4] = moved[_DT_GNU_HASH], start
    strings[3], strings[4] = moved[_DT_STRTAB], start + len(content) - strings[5]
    place = next(place for place, s in zip(places, segments, strict=True) if s[0] == _NOTE)
    _PROGRAM.pack_into(out, place, _LOAD, 6, start, address, address, len(content), len(content), 4096)
    dynamic = next(s for s in segments if s[0] == _DYNAMIC)
    for at in range(dynamic[2], dynamic[2] + dynamic[5], 16):
        tag = struct.unpack_from("<Q", data, at)[0]
        if tag in moved:
            struct.pack_into("<Q", out, at + 8, moved[tag])
    struct.pack_into("<Q", out, 40, new_sections)
    out += bytes(new_sections - len(out)) + b"".join(_HEADER.pack(*header) for header in headers)
    return bytes(out) + bytes(start - len(out)) + content


def wheel(files: Mapping[str, bytes], *, stored: tuple[str, ...] = (), level: int = 6) -> tuple[str, bytes]:
    """File name and bytes of a wheel whose members are compressed, but for those in ``stored``."""
    info = "made-1.0.dist-info"
    members = {**files, f"{info}/METADATA": metadata("made", "1.0"), f"{info}/WHEEL": b"Wheel-Version: 1.0\n"}
    rows = []
    for member, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{member},sha256={digest},{len(data)}\n")
    members[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        for member, data in members.items():
            how = zipfile.ZIP_STORED if member in stored else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), data, how, level)
    return "made-1.0-py3-none-any.whl", buffer.getvalue()
