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
from builder.smoke.post_base import FUSION

VENV = PurePosixPath("/opt/venv")
CUDA_HOME = "/usr/local/cuda"

ORDER = ("torch", "kernels", "flashinfer", "rest", "sglang")
"""The layers of wheels from the bottom, each a stage of the Dockerfile; what is below them has no wheels."""

COMPILED = "compiled"
"""The layer, below sglang's, of what the build compiles itself: there where the fused all-reduce is asked for."""


@dataclass(frozen=True)
class RequirementsList:
    """A requirements file of exactly these files, each with its hash, from one index (or `files`: beside the list)."""

    origin: str
    name: str
    text: str


@dataclass(frozen=True)
class Layer:
    """One layer of wheels. ``parent`` is the stage below it.

    ``targets`` are those that the layer of compiled modules is compiled for, as flashinfer calls them; it has no wheels.
    """

    name: str
    title: str
    parent: str
    artefacts: tuple[Artefact, ...]
    bytecode: tuple[str, ...]
    cuda_home: bool
    targets: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Wheels in it."""
        return len(self.artefacts)

    @property
    def described(self) -> str:
        """`29 wheels, 2.83 GB compressed`, as far as sizes are known; of what is compiled, what for."""
        if self.targets:
            return f"for {', '.join(self.targets)}"
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
    def below_sglang(self) -> str:
        """The stage that has everything but sglang."""
        return COMPILED if self.layer(COMPILED) else stage_below(ORDER.index("sglang"))

    @property
    def compiled(self) -> tuple[str, ...]:
        """What of flashinfer the build compiles: names of functions in flashinfer/jit/comm.py."""
        return (FUSION,) if self.layer(COMPILED) else ()

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
    layers: list[Layer] = []
    for position, name in enumerate(ORDER):
        if name == "sglang" and _compiles(matrix, lock, layers):
            layers.append(_compiled(matrix, stage_below(position)))
        locked = (artefact for artefact in lock.artefacts if artefact.layer == name)
        artefacts = tuple((installed or {}).get(artefact.name, artefact) for artefact in locked)
        if artefacts:
            layers.append(
                Layer(
                    name=name,
                    title=described[name].title,
                    parent=layers[-1].name if layers and layers[-1].targets else stage_below(position),
                    artefacts=artefacts,
                    bytecode=_bytecode(artefacts),
                    cuda_home=matrix.cuda.jit != "none" and _has_compiler(matrix, artefacts),
                )
            )
    return LayerPlan(matrix, lock, tuple(layers))


def _compiles(matrix: Matrix, lock: Lock, layers: Sequence[Layer]) -> bool:
    """Whether the build compiles flashinfer's fused all-reduce: it is asked for, patched to know SM120, and nvcc is there."""
    sm120 = matrix.patches.sm120
    asked = sm120 is not None and sm120.allreduce_fusion == "opt-in"
    return asked and "flashinfer-python" in lock.by_name and any(layer.cuda_home for layer in layers)


def _compiled(matrix: Matrix, parent: str) -> Layer:
    known = {fact.capability: fact.flashinfer_arch for fact in facts.load_facts(facts.GpuFact)}
    return Layer(
        name=COMPILED,
        title="flashinfer's fused all-reduce, compiled",
        parent=parent,
        artefacts=(),
        bytecode=(),
        cuda_home=False,
        targets=tuple(known[capability] for capability in matrix.gpus),
    )


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
