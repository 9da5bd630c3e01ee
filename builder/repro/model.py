"""What a reconstruction is made of: the pins of a report, the matrix, and the package index that is asked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Protocol

from packaging.requirements import Requirement

from builder.driver import RUNTIME
from builder.errors import UsageError
from builder.facts import ExtraFact, load_facts
from builder.ledger import locked
from builder.origins import DirectFile
from builder.repro import clashes

STACK = ("torch", "sgl-kernel", "sglang-kernel", "flashinfer-python", "flashinfer-cubin", "sglang")
"""Packages with a key of their own in a matrix."""


class Index(clashes.Index, Protocol):
    """What is asked of a package index: builder.repro.releases has the real one."""

    def exists(self, name: str, version: str) -> bool:
        """Whether the release is there and has a wheel for the target."""

    def near(self, name: str, version: str) -> str | None:
        """The release nearest to one that is not there; None where the package is not there at all."""

    def uploaded(self, name: str, version: str) -> date | None:
        """The day on which the last file of a release came; None where the index does not tell."""

    def appeared(self, name: str, version: str) -> date | None:
        """The day on which the first file of a release came; None where the index does not tell."""

    def yanked(self, name: str, version: str) -> bool:
        """Whether its publisher took the release back."""


@dataclass(frozen=True)
class Pin:
    """A package of the stack: ``wanted`` is what the report says, ``version`` what the matrix can name."""

    name: str
    version: str
    wanted: str
    line: int
    instead: str = ""
    """Why another version stands in its place; empty where none does."""
    file: DirectFile | None = None


@dataclass
class Reconstruction:
    """The matrix of a report, as text, and what it had to leave open."""

    name: str
    text: str = ""
    pins: dict[str, Pin] = field(default_factory=dict)
    as_of: date = date.min
    as_of_because: str = ""
    python: str = ""
    gpus: tuple[str, ...] = ()
    cuda: str = ""
    """CUDA's release, as in 13.0.2."""
    open: list[str] = field(default_factory=list)
    """What the report does not say and the matrix has to."""
    instead: list[str] = field(default_factory=list)
    """What cannot be had, with what stands in its place."""
    left_out: list[str] = field(default_factory=list)
    """What cannot be had and has nothing in its place."""
    builds_here: bool = True
    prereleases: frozenset[str] = frozenset()
    """Packages of which a pre-release may be taken, besides those that are found from the report's own."""


def minor_of(version: str) -> str:
    """`13.0` of `13.0.2`."""
    return ".".join(version.split(".")[:2])


def requirements_of(pin: Pin, index: Index) -> Sequence[Requirement]:
    """What a pinned package requires; nothing where that is not known."""
    if pin.file is not None:
        return [Requirement(line) for line in pin.file.requires]
    try:
        return index.requires(pin.name, pin.version)
    except UsageError:
        return ()


def installed_extras(name: str, version: str) -> tuple[str, ...]:
    """The extras that a release is installed with, where it is little without them."""
    release = {name: version}
    return next((fact.extras for fact in load_facts(ExtraFact) if locked(fact.package, fact.versions, release)), ())


def pinned_cuda(requirements: Sequence[Requirement]) -> str:
    """The CUDA release that a torch requires; empty where it requires none."""
    for requirement in requirements:
        if RUNTIME.fullmatch(requirement.name):
            pinned = next((each.version for each in requirement.specifier if each.operator == "=="), "")
            if found := re.match(r"(\d+\.\d+)\.(\d+)", pinned):
                # The runtime's third number is its own; the toolkit's is the release's.
                return f"{found[1]}.{found[2] if requirement.name == 'cuda-toolkit' else 0}"
    return ""
