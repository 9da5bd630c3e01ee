"""Lock → layer plan: which files go into which layer, from which index, and what each costs.

Layers are ordered by rate of change (facts/layers.yaml); a layer's content depends on its own files alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from builder import facts
from builder.base import EPOCH
from builder.errors import UsageError
from builder.files import pretty_size
from builder.ledger import winners
from builder.lock import Artefact, Lock
from builder.matrix import Matrix

VENV = PurePosixPath("/opt/venv")
CUDA_HOME = "/usr/local/cuda"

ORDER = ("torch", "kernels", "flashinfer", "rest", "sglang")
"""The layers of wheels from the bottom, each a stage of the Dockerfile; what is below them has no wheels."""


@dataclass(frozen=True)
class RequirementsList:
    """A requirements file of exactly these files, each with its hash, from one index (or `files`: beside the list)."""

    origin: str
    name: str
    text: str


@dataclass(frozen=True)
class Layer:
    """One layer of wheels. ``parent`` is the stage below it."""

    name: str
    title: str
    parent: str
    artefacts: tuple[Artefact, ...]
    bytecode: tuple[str, ...]
    cuda_home: bool

    @property
    def count(self) -> int:
        """Wheels in it."""
        return len(self.artefacts)

    @property
    def described(self) -> str:
        """`29 wheels, 2.83 GB compressed`, as far as sizes are known."""
        wheels = f"{self.count} wheel" + ("s" if self.count != 1 else "")
        return f"{wheels}, {pretty_size(self.bytes)} compressed" if self.bytes else wheels

    @property
    def bytes(self) -> int:
        """Compressed bytes of its wheels, as far as their sources state sizes."""
        return sum(artefact.size or 0 for artefact in self.artefacts)

    @property
    def indexes(self) -> tuple[str, ...]:
        """Where its files come from: index names, `files` for direct ones; the default index first."""
        names = {_origin(artefact) for artefact in self.artefacts}
        return tuple(sorted(names, key=lambda name: (name != "default", name)))

    @property
    def lists(self) -> tuple[RequirementsList, ...]:
        """The requirements files to install, in order.

        An installer unpacks the wheels of one list at once and in any order: where two of them bring the same file, the
        one that has to win (facts/smoke.yaml) comes in a list of its own, after the others.
        """
        late = winners(frozenset(artefact.name for artefact in self.artefacts))
        found = []
        for suffix, chosen in (("", False), (".over", True)):
            for origin in self.indexes:
                lines = [
                    _requirement(artefact)
                    for artefact in self.artefacts
                    if _origin(artefact) == origin and (artefact.name in late) is chosen
                ]
                if lines:
                    found.append(RequirementsList(origin, f"{origin}{suffix}.txt", "".join(lines)))
        return tuple(found)


def _origin(artefact: Artefact) -> str:
    return artefact.index or "files"


def _requirement(artefact: Artefact) -> str:
    asked = f"./wheels/{artefact.file}" if artefact.index is None else f"{artefact.name}=={artefact.version}"
    return f"{asked} --hash=sha256:{artefact.sha256}\n"


@dataclass(frozen=True)
class LayerPlan:
    """Every layer of an image, and what the templates need beside them."""

    matrix: Matrix
    lock: Lock
    layers: tuple[Layer, ...]

    @property
    def artefacts(self) -> tuple[Artefact, ...]:
        """Every wheel that is installed, patched ones in place of the lock's, sorted by name."""
        found = (artefact for layer in self.layers for artefact in layer.artefacts)
        return tuple(sorted(found, key=lambda artefact: artefact.name))

    def layer(self, name: str) -> Layer | None:
        """The layer `name`; None if this stack has nothing in it."""
        return next((layer for layer in self.layers if layer.name == name), None)

    @property
    def site_packages(self) -> str:
        return str(VENV / "lib" / f"python{self.lock.python}" / "site-packages")

    @property
    def cuda_home(self) -> str:
        """`CUDA_HOME` of the image; empty where the image has no compiler."""
        return CUDA_HOME if any(layer.cuda_home for layer in self.layers) else ""

    @property
    def epoch(self) -> int:
        return EPOCH

    @property
    def bytes(self) -> int:
        """Compressed bytes of all wheels."""
        return sum(layer.bytes for layer in self.layers)


def plan_layers(matrix: Matrix, lock: Lock, installed: Mapping[str, Artefact] | None = None) -> LayerPlan:
    """The layer plan of a lock, with `installed` in place of the entries of those packages. Empty layers are left out.

    Raises `UsageError` for a wheel of a layer that no stage installs: it would be missing from the image.
    """
    if lost := [artefact for artefact in lock.artefacts if artefact.layer not in ORDER]:
        raise UsageError(
            f"`{lost[0].name}` is in a layer that there is not: `{lost[0].layer}`",
            because=f"the layers are {', '.join(ORDER)}",
            hint=f"write the lock again: `builder lock {matrix.name}`",
        )
    described = {fact.layer: fact for fact in facts.load_facts(facts.LayerFact)}
    layers = []
    for position, name in enumerate(ORDER):
        locked = (artefact for artefact in lock.artefacts if artefact.layer == name)
        artefacts = tuple((installed or {}).get(artefact.name, artefact) for artefact in locked)
        if artefacts:
            layers.append(
                Layer(
                    name=name,
                    title=described[name].title,
                    parent=stage_below(position),
                    artefacts=artefacts,
                    bytecode=_bytecode(artefacts),
                    cuda_home=matrix.cuda.jit != "none" and _has_compiler(matrix, artefacts),
                )
            )
    return LayerPlan(matrix, lock, tuple(layers))


def stage_below(position: int) -> str:
    """The stage that the layer at `position` of `ORDER` stands on."""
    return ORDER[position - 1] if position else "python"


def _has_compiler(matrix: Matrix, artefacts: Sequence[Artefact]) -> bool:
    names = {artefact.name for artefact in artefacts}
    return bool(names & set(matrix.cuda.compiler))


def _bytecode(artefacts: Sequence[Artefact]) -> tuple[str, ...]:
    names = {artefact.name for artefact in artefacts}
    wanted = (fact for fact in facts.load_facts(facts.BytecodeFact) if fact.distribution in names)
    return tuple(sorted({package for fact in wanted for package in fact.packages}))
