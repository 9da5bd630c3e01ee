"""The GPU code in the wheels of a lock: which images each container has, from a table that is shipped or from the wheels.

A member that has GPU code has to be read to its end, and the largest have half a gigabyte. What was read once is shipped,
by the sha256 of the wheel: `python -m builder.static` makes `gpucode.json.z`. Of any other wheel the end of each member,
which a link verdict reads anyway, says whether there is GPU code at all; a member that has some is read if it is small,
or told as not looked at.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import resources
from pathlib import Path
from typing import IO, Any

from packaging.version import Version

from builder.abi import tables
from builder.abi.model import Facts, Wheel
from builder.abi.verb import installed
from builder.archverb import kept_containers, member_containers
from builder.cache import not_writable
from builder.deflate import recover_tail
from builder.errors import IntegrityError
from builder.fatbin import SECTIONS, Container, Image
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.members import Opened
from builder.nativefacts import UNDEFINED
from builder.remote import RangedFile
from builder.settings import Settings
from builder.streaming import WINDOW, StreamedWheel

FORMAT = 1
TABLE = "gpucode.json.z"

LARGE = ("torch", "sgl-kernel", "sglang-kernel")
"""The distributions that the table is about: a server always launches their GPU code, in files too large for one question."""

MOST = 32 << 20
"""Compressed bytes of a member with GPU code that is read for a check; `builder arch` reads any."""

ENDING = 128 * 1024
"""Compressed bytes at a member's end in which the names of its sections are: which lie near its end."""

_CUDA = re.compile(r"lib(cuda|cudart|c10_cuda|torch_cuda)\.so")
_NAMES = b"\0.shstrtab\0"
_HEADER = struct.Struct("<4s22xHH")

Kinds = list[list[Any]]


@dataclass(frozen=True)
class Code:
    """The GPU code of a wheel: containers by member, those members that were not looked at with their compressed bytes,
    and those that cannot be read with the reason."""

    members: Mapping[str, tuple[Container, ...]]
    large: Mapping[str, int] = field(default_factory=dict)
    damaged: Mapping[str, str] = field(default_factory=dict)


def pack(containers: Iterable[Container]) -> Kinds:
    """Containers as the table has them: how many have the same images, and each image's kind, target and PTX."""
    kinds: Counter[tuple[tuple[str, str, tuple[int, int] | None], ...]] = Counter()
    for container in containers:
        kinds[tuple((image.kind, image.target, image.isa) for image in container.images)] += 1
    return [[count, [list(image) for image in kind]] for kind, count in sorted(kinds.items(), key=str)]


def unpack(kinds: Sequence[Sequence[Any]]) -> tuple[Container, ...]:
    """What `pack` packed; sizes and offsets are not in it."""
    found: list[Container] = []
    for count, images in kinds:
        made = tuple(
            Image(kind, target, 0, "", None, (isa[0], isa[1]) if isa else None, "") for kind, target, isa in images
        )
        found += [Container("", 0, made)] * count
    return tuple(found)


@cache
def _table() -> Mapping[str, Any]:
    said: Mapping[str, Any] = json.loads(zlib.decompress((resources.files(__package__) / TABLE).read_bytes()))
    return said


def shipped(sha256: str) -> Code | None:
    """The GPU code of the wheel with this sha256; None for one that the table does not have."""
    wheels = _table()["wheels"]
    said = wheels.get(sha256) or next((wheels[other] for other in _same_release(sha256) if other in wheels), None)
    if said is None:
        return None
    return Code({member: unpack(_table()["kinds"][number]) for member, number in said["members"].items()})


def releases_with_code(name: str) -> list[tuple[str, Code]]:
    """The releases of a distribution that the table has, the oldest first, with their GPU code."""
    found = {
        said["version"]: Code({member: unpack(_table()["kinds"][number]) for member, number in said["members"].items()})
        for said in _table()["wheels"].values()
        if said["name"] == name
    }
    return sorted(found.items(), key=lambda item: Version(item[0]))


def _same_release(sha256: str) -> Iterable[str]:
    """The wheels of the same torch release for other Pythons: they are built for the same GPUs."""
    for version in tables.versions("torch"):
        files = tables.files("torch", version).values()
        if sha256 in files:
            return files
    return ()


def look(
    file: str,
    sha256: str,
    opened: Callable[[], Opened],
    wheel: Wheel,
    settings: Settings,
    skipped: Collection[str] = frozenset(),
) -> Code:
    """The GPU code of a wheel but for ``skipped``: as an earlier look left it, or read now. Raises as the wheel does."""
    less = f"-{sha256_hex(canonical_json(sorted(skipped)))[:16]}" if skipped else ""
    place = settings.cache / "gpucode" / sha256[:2] / f"{sha256}{less}.json"
    said = _kept(place)
    if said is None:
        said = _read(file, opened, wheel, settings, skipped)
        try:
            write_atomic(place, canonical_json({"format": FORMAT, **said}))
        except OSError as error:
            raise not_writable(place, error) from error
    members = {member: unpack(kinds) for member, kinds in said["members"].items()}
    large = {}
    for member, (size, digest) in said["large"].items():
        # `builder arch` may have read it since.
        if (containers := kept_containers(digest, settings)) is not None:
            members[member] = containers
        else:
            large[member] = int(size)
    return Code({member: found for member, found in members.items() if found}, large, said["damaged"])


def _kept(place: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        said: dict[str, Any] = json.loads(place.read_bytes())
        if said["format"] == FORMAT and all(isinstance(said[part], dict) for part in ("members", "large", "damaged")):
            return said
    return None


def _read(
    name: str, opened: Callable[[], Opened], wheel: Wheel, settings: Settings, skipped: Collection[str]
) -> dict[str, Any]:
    said: dict[str, Any] = {"members": {}, "large": {}, "damaged": {}}
    natives = [file for file in wheel.natives if file not in skipped]
    chances = {file: chance for file in natives if (chance := _chance(wheel.read(file))) is not Chance.NONE}
    if not chances:
        return said
    file, fetch = opened()
    streamed = StreamedWheel(Path(name), file, fetch, lambda start, end: _windows(file, start, end))
    with zipfile.ZipFile(file) as archive:
        for member in streamed.entries:
            chance = chances.get(installed(member), Chance.NONE)
            if chance is Chance.NONE:
                continue
            info, digest = archive.getinfo(member), streamed.entries[member].digest
            containers = kept_containers(digest, settings)
            if containers is None:
                some = chance is Chance.CERTAIN or has_gpu_code(file, info)
                if some is False or (some is None and chance is Chance.SOME):
                    continue
                if info.compress_size > MOST:
                    said["large"][member] = [info.compress_size, digest]
                    continue
                containers, trouble = member_containers(streamed, member, settings)
                if trouble:
                    said["damaged"][member] = trouble
            if containers:
                said["members"][member] = pack(containers)
    return said


class Chance(Enum):
    """Whether a file has GPU code, by the names that it needs."""

    NONE = "none"
    SOME = "some"
    GOOD = "good"
    CERTAIN = "certain"


def _chance(facts: Facts) -> Chance:
    names = {symbol.name for symbol in facts.undefined}
    if "__cudaRegisterFatBinary" in names:
        return Chance.CERTAIN
    if any(_CUDA.match(library) for library in facts.needed):
        return Chance.GOOD
    # The runtime may be linked into it: that opens the driver by name.
    return Chance.SOME if facts.trouble or UNDEFINED in facts.uncertain or names & {"dlsym", "dlopen"} else Chance.NONE


def _windows(file: IO[bytes] | RangedFile, start: int, end: int) -> Iterator[bytes]:
    for at in range(start, end, WINDOW):
        yield _bytes(file, at, min(at + WINDOW, end))


def _bytes(file: IO[bytes] | RangedFile, start: int, end: int) -> bytes:
    file.seek(start)
    data = file.read(end - start)
    if data is None or len(data) != end - start:
        raise IntegrityError("a wheel ends before its directory says", because=f"byte {end:,} is missing")
    return data


def has_gpu_code(file: IO[bytes] | RangedFile, info: zipfile.ZipInfo) -> bool | None:
    """Whether a member has a section with GPU code, by the names of its sections at its end; None where it does not tell."""
    magic, name, extra = _HEADER.unpack(_bytes(file, info.header_offset, info.header_offset + _HEADER.size))
    if magic != b"PK\x03\x04":
        return None
    end = info.header_offset + _HEADER.size + name + extra + info.compress_size
    count = min(ENDING, info.compress_size)
    ending = _bytes(file, end - count, end)
    if info.compress_type == zipfile.ZIP_DEFLATED:
        if count == info.compress_size:
            with contextlib.suppress(zlib.error):
                ending = zlib.decompressobj(-zlib.MAX_WBITS).decompress(ending, 64 << 20)
        else:
            found = recover_tail(ending)
            if found is None:
                return None
            ending = found.data
    at = ending.rfind(_NAMES)
    # The names are in one table: what is beside that of the table itself is certain, if it is text.
    if at < 0:
        return None
    return any(b"\0" + section.encode() + b"\0" in ending[max(0, at - 4096) :] for section in SECTIONS)
