"""What is loaded: fat binaries of one image and of several, made of what nvcc compiled, and PTX as text."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder import arch, fatbin
from builder.arch import Pair
from builder.fatbin import Container, Image

FACTS = Path(arch.__file__).parent / "facts" / "ptx.yaml"

SOURCE = 'extern "C" __global__ void answer(int *out) { *out = TOKEN; }\n'
"""Each image is compiled with a TOKEN of its own, so that its kernel says which one the driver took."""

_HEADER = struct.Struct("<IHHQ")


@dataclass(frozen=True)
class Built:
    """A fat binary with one image, as nvcc made it. ``name`` is what it was told to make (`sm_90a`, `compute_90`)."""

    name: str
    token: int
    data: bytes


@dataclass(frozen=True)
class Case:
    """Bytes for `cuModuleLoadData`, the images in them, and which image's kernel says which token.

    ``artificial``: its header and its PTX say two things; there is no rule for that, what the driver does is only noted.
    """

    name: str
    data: bytes
    images: tuple[Image, ...]
    tokens: Mapping[int, str]
    artificial: bool = False

    def predicted(self, device: Pair, isa: Pair) -> tuple[str, str | None]:
        """What the rules say that the driver does, and which image's kernel runs."""
        verdict, image = arch.choose(self.images, device, isa)
        return verdict.value, image.name if image and verdict is arch.Answer.RUNS else None


def newest_ptx(cuda: Pair) -> Pair:
    """The newest PTX of a driver for a CUDA release, out of facts/ptx.yaml, which is read without a YAML library here."""
    rows = re.findall(r'isa: "([0-9.]+)", cuda: "([0-9.]+)"', FACTS.read_text(encoding="utf-8"))
    return next(arch.pair(isa) for isa, known in rows if arch.pair(known) == cuda)


def containers(data: bytes) -> tuple[Container, ...]:
    """What our reader makes of a fat binary."""
    return fatbin.scan(lambda at, size: data[at : at + size], len(data))


def joined(*parts: bytes) -> bytes:
    """One container with the images of several."""
    body = b"".join(part[_HEADER.size : _HEADER.size + _HEADER.unpack_from(part)[3]] for part in parts)
    return _HEADER.pack(fatbin.MAGIC, fatbin.VERSION, _HEADER.size, len(body)) + body


def with_isa(data: bytes, isa: Pair, *, header: bool = True, text: bool = True) -> bytes | None:
    """A fat binary of one PTX image that says another version of PTX, in its header and its text; None if that is packed."""
    out = bytearray(data)
    if header:
        struct.pack_into("<HH", out, _HEADER.size + 24, isa[1], isa[0])
    if text:
        found = re.search(rb"\.version [0-9]\.[0-9]", data)
        if found is None:
            return None
        out[found.start() : found.end()] = b".version %d.%d" % isa
    return bytes(out)


def grid(built: Sequence[Built], texts: Mapping[str, tuple[int, bytes]], isa: Pair) -> Iterator[Case]:
    """Every case, for a driver whose newest PTX is ``isa``. ``texts`` is PTX by its target, each with its token."""
    known = {one.name: one for one in built}
    for one in built:
        yield _case(one.name, one.data, [one])
    other = {word: version for word, version in _around(isa) if version != isa}
    for name in ("compute_80", "compute_90"):
        for word, version in other.items():
            if name in known and (data := with_isa(known[name].data, version)):
                yield _case(f"{name} as PTX {arch.dotted(version)} ({word})", data, [known[name]])
    for target, (token, text) in texts.items():
        for _, version in _around(isa):
            image = Image("ptx", target, len(text), "", None, version)
            said = re.sub(rb"\.version [0-9]\.[0-9]", b".version %d.%d" % version, text, count=1) + b"\0"
            yield Case(f"text for {target}, PTX {arch.dotted(version)}", said, (image,), {token: image.name})
    for names in _SEVERAL:
        if all(name in known for name in names):
            yield _case(" + ".join(names), joined(*(known[name].data for name in names)), [known[n] for n in names])
    for cubin, ptx in (("sm_90", "compute_90"), ("sm_80", "compute_80"), ("sm_120", "compute_90")):
        if cubin in known and ptx in known and (newer := with_isa(known[ptx].data, other["newer"])):
            data = joined(known[cubin].data, newer)
            yield _case(f"{cubin} + {ptx} as PTX {arch.dotted(other['newer'])}", data, [known[cubin], known[ptx]])
    for where in ("header", "text"):
        alone = {"header": where == "header", "text": where == "text"}
        if "compute_90" in known and (data := with_isa(known["compute_90"].data, other["newer"], **alone)):
            name = f"compute_90 as PTX {arch.dotted(other['newer'])} in its {where} alone"
            yield _case(name, data, [known["compute_90"]], artificial=True)


# On one device an image for another, one for it, a nearer one; PTX beside a cubin; suffixes beside plain targets.
_SEVERAL = (
    ("sm_80", "sm_90"),
    ("sm_90", "sm_80"),
    ("sm_90", "sm_90a"),
    ("sm_90a", "sm_90"),
    ("sm_90", "compute_90"),
    ("compute_90", "sm_90"),
    ("sm_90", "compute_90a"),
    ("sm_80", "compute_80"),
    ("sm_80", "compute_90"),
    ("compute_80", "compute_90"),
    ("compute_90", "compute_80"),
    ("compute_90", "compute_90a"),
    ("sm_75", "compute_75", "sm_120a"),
    ("sm_100f", "sm_120f"),
    ("sm_120a", "compute_120"),
    ("sm_80", "sm_86", "sm_90a"),
    ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120a"),
    ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
)


def _around(isa: Pair) -> list[tuple[str, Pair]]:
    """Versions of PTX on both sides of a driver's newest, and that one."""
    older = (isa[0], isa[1] - 1) if isa[1] else (isa[0] - 1, 8)
    return [
        ("older", older),
        ("newest", isa),
        ("newer", (isa[0], isa[1] + 1)),
        ("far newer", (isa[0], isa[1] + 3)),
    ]


def _case(name: str, data: bytes, parts: Sequence[Built], *, artificial: bool = False) -> Case:
    (found,) = containers(data)
    # What nvcc was told to make is what our reader has to find.
    if [image.name for image in found.images] != [part.name for part in parts]:
        raise AssertionError(f"{name}: the reader found {[image.name for image in found.images]}")
    return Case(name, data, found.images, {part.token: part.name for part in parts}, artificial)
