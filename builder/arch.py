"""Which GPU an image of a fat binary runs on, and what of a file is covered on a device. Pure; standard library only.

The rules are NVIDIA's (CUDA programming guide, "Binary Compatibility" and "PTX Compatibility"; for the suffixes "Family- and
Architecture-Specific"; PTX ISA, "Release History"). For compute capability 9.0 they were run on a real GPU, each case of
tests/gpu_grid; what concerns any other capability is documented and was not run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from builder.fatbin import Container, Image

Pair = tuple[int, int]
"""A compute capability or a version of PTX: major and minor."""

TEGRA = frozenset([(5, 3), (6, 2), (7, 2), (8, 7)])
"""Capabilities of integrated GPUs: between these and the others there is no binary compatibility (CUDA programming guide,
"Binary Compatibility"), only PTX."""

_TARGET = re.compile(r"([1-9][0-9]{1,2})([af]?)")


class Answer(Enum):
    """What a driver makes of an image."""

    RUNS = "runs"
    OTHER_DEVICE = "for another device"
    NEWER_PTX = "PTX newer than the driver"


def pair(text: str) -> Pair:
    """`12.0` as (12, 0). Raises ValueError."""
    if not re.fullmatch(r"[1-9][0-9]?\.[0-9]{1,2}", text):
        raise ValueError(text)
    major, minor = text.split(".")
    return int(major), int(minor)


def dotted(version: Pair) -> str:
    """(12, 0) as `12.0`."""
    return f"{version[0]}.{version[1]}"


def target_of(image: Image) -> tuple[Pair, str] | None:
    """The capability and the suffix that an image was compiled for; None for a target of another form."""
    found = _TARGET.fullmatch(image.target)
    return None if found is None else (divmod(int(found[1]), 10), found[2])


def answer(image: Image, device: Pair, isa: Pair | None = None) -> Answer:
    """What the driver of a device makes of an image. ``isa`` is the newest PTX that it knows; None where that is not known.

    A cubin for X.Y runs on X.Z with Z >= Y; PTX on every device that is as new. With the suffix `a` both are for X.Y
    alone, with `f` for the family: X.Z with Z >= Y.
    """
    target = target_of(image)
    if target is None or image.kind not in ("cubin", "ptx"):
        return Answer.OTHER_DEVICE
    made_for, suffix = target
    if suffix == "a":
        fits = device == made_for
    elif suffix == "f" or image.kind == "cubin":
        fits = device[0] == made_for[0] and device[1] >= made_for[1]
    else:
        fits = device >= made_for
    if image.kind == "cubin" and device != made_for and (device in TEGRA or made_for in TEGRA):
        fits = False
    if not fits:
        return Answer.OTHER_DEVICE
    if image.kind == "ptx" and isa is not None and image.isa is not None and image.isa > isa:
        return Answer.NEWER_PTX
    return Answer.RUNS


def choose(images: Iterable[Image], device: Pair, isa: Pair | None = None) -> tuple[Answer, Image | None]:
    """What a driver makes of a container, and the image that it is: where it runs the one for the nearest target.

    A cubin goes before PTX, which has to be compiled first.
    """
    found: dict[Answer, list[Image]] = {}
    for image in images:
        found.setdefault(answer(image, device, isa), []).append(image)
    for verdict in (Answer.RUNS, Answer.NEWER_PTX):
        if verdict in found:
            return verdict, max(found[verdict], key=_nearness)
    return Answer.OTHER_DEVICE, None


def _nearness(image: Image) -> tuple[bool, Pair, int, Pair]:
    target = target_of(image)
    assert target is not None
    return image.kind == "cubin", target[0], "fa".find(target[1]) if target[1] else -1, image.isa or (0, 0)


Counts = tuple[tuple[str, int], ...]
"""Containers by the name of an image, the most first."""


@dataclass(frozen=True)
class Coverage:
    """Containers of a file that have an image for a device, of how many, and by which image (`sm_90a`, containers).

    ``newer`` are those whose only image for it is PTX that the driver does not know; ``isa`` is the newest PTX that the
    covered ones need. PTX is compiled by the driver when a kernel is first used.
    """

    covered: int
    of: int
    by: Counts = ()
    newer: Counts = ()
    isa: Pair | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing is lacking; so it is of a file without device code."""
        return self.covered == self.of


def cover(containers: Sequence[Container], device: Pair, isa: Pair | None = None) -> Coverage:
    """How much of a file is covered on a device: per container, never by the union of the names.

    ``isa`` as for `answer`.
    """
    by: Counter[str] = Counter()
    newer: Counter[str] = Counter()
    needed: Pair | None = None
    # A file has few kinds of containers; a kind's images are alike in all that counts here.
    kinds: Counter[tuple[tuple[str, str, Pair | None], ...]] = Counter()
    examples: dict[tuple[tuple[str, str, Pair | None], ...], Container] = {}
    for container in containers:
        kind = tuple((image.kind, image.target, image.isa) for image in container.images)
        kinds[kind] += 1
        examples.setdefault(kind, container)
    for kind, count in kinds.items():
        verdict, image = choose(examples[kind].images, device, isa)
        if image is not None and verdict is Answer.RUNS:
            by[image.name] += count
            if image.isa is not None:
                needed = max(needed or image.isa, image.isa)
        elif image is not None:
            newer[image.name] += count
    return Coverage(sum(by.values()), len(containers), _sorted(by), _sorted(newer), needed)


def names(containers: Iterable[Container], kind: str) -> list[str]:
    """The names of all images of a kind (`cubin`, `ptx`), by target."""
    found = {
        (int(re.sub(r"\D", "", image.target) or 0), image.name)
        for container in containers
        for image in container.images
        if image.kind == kind
    }
    return [name for _, name in sorted(found)]


def _sorted(counts: Counter[str]) -> Counts:
    return tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True)
class Loading:
    """What a package does with one of its files: it is loaded on ``devices`` (`9.0`, or `9` for every 9.x; None: on all), and
    not on ``except_devices``. ``only_for`` is what asks for it, where a server does without as a rule; ``otherwise`` what it
    means where the file is not loaded or has no code for the device."""

    file: str
    devices: tuple[str, ...] | None = None
    except_devices: tuple[str, ...] = ()
    only_for: str = ""
    otherwise: str = ""
    source: str = ""

    def on(self, device: Pair) -> bool:
        """Whether the package loads the file on a device."""
        words = {dotted(device), str(device[0])}
        return (self.devices is None or bool(words & set(self.devices))) and not words & set(self.except_devices)


EVERYWHERE = Loading("")
"""What is assumed of a file of which nothing is known."""
