"""What a stack needs of a host: of a matrix and its lock, or of an image by its labels alone. Pure.

Bytes of disk are those of a pull into an empty engine: what comes over the network, and what it becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from packaging.requirements import Requirement
from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from builder import arch
from builder.doctor.requirement import VARIABLE, require_cuda, stack_driver
from builder.driver import DriverNeeds, number
from builder.facts import GpuFact, GpuNameFact, LoaderFact, TransferFact, UnpackedFact, load_facts
from builder.labels import DRIVER_LABEL, LABEL, REQUIRES_LABEL
from builder.lock import Artefact, Lock
from builder.matrix import Matrix
from builder.static import gpucode


class Needs(BaseModel):
    """What a host has to have. ``subject`` is what it is called in messages, ``lock`` the digest of its lock.

    ``gpus`` are the compute capabilities that the stack is made and proven for; ``driver`` is what its wheels ask of a driver,
    ``gpu_drivers`` the same on each of these GPUs. ``lacking`` has, for each capability that
    was looked at, the files of torch and the kernels that a server loads there and that have no code for it; ``looked_at``
    are the wheels of which that is known, ``not_looked_at`` those of which it is not. ``require`` is the image's
    `NVIDIA_REQUIRE_CUDA`. ``compressed`` and ``unpacked`` are bytes, ``estimated`` says that they were worked out from the
    wheels. ``p2p`` are the options that need peer access between GPUs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: str
    lock: str | None = None
    platform: str | None = None
    gpus: tuple[str, ...] = ()
    driver: DriverNeeds | None = None
    gpu_drivers: Mapping[str, DriverNeeds] = Field(default_factory=dict)
    require: str = ""
    compressed: Annotated[int, Field(ge=0)] | None = None
    unpacked: Annotated[int, Field(ge=0)] | None = None
    estimated: bool = False
    lacking: Mapping[str, tuple[str, ...]] = Field(default_factory=dict)
    looked_at: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()
    jit: Literal["nvcc", "none"] | None = None
    p2p: tuple[str, ...] = ()

    def driver_for(self, gpus: Iterable[str]) -> DriverNeeds | None:
        """What is asked of the driver of a host with these GPUs."""
        found = [needs for gpu in gpus if (needs := self.gpu_drivers.get(gpu)) is not None]
        return max(found, key=lambda needs: number(needs.minimum_driver), default=self.driver)


def of_matrix(matrix: Matrix, lock: Lock) -> Needs:
    """The needs of a locked matrix."""
    driver = stack_driver(matrix, lock)
    drivers = {gpu: found for gpu in matrix.gpus if (found := stack_driver(matrix, lock, (gpu,))) is not None}
    code = _code(lock)
    compressed, unpacked = _bytes(matrix, lock)
    sm120 = matrix.patches.sm120
    options = [name for name in ("symm_mem", "allreduce_fusion") if sm120 and getattr(sm120, name, "off") != "off"]
    return Needs(
        subject=matrix.name,
        lock=lock.digest,
        platform=matrix.platform,
        gpus=tuple(matrix.gpus),
        driver=driver,
        gpu_drivers=drivers,
        require=require_cuda(driver),
        compressed=compressed,
        unpacked=unpacked,
        estimated=True,
        lacking=code.lacking,
        looked_at=code.looked_at,
        not_looked_at=code.not_looked_at,
        jit=matrix.cuda.jit,
        p2p=tuple(options),
    )


def of_image(
    subject: str,
    labels: Mapping[str, str],
    environment: Mapping[str, str],
    *,
    platform: str | None = None,
    compressed: int | None = None,
    unpacked: int | None = None,
) -> Needs:
    """The needs of an image: by the labels of ours, else by what it asks of the toolkit. No matrix is looked at.

    Where only its compressed bytes are known (a registry tells no others) the unpacked ones are worked out from them.
    """
    estimated = unpacked is None and compressed is not None
    if unpacked is None and compressed is not None:
        fact = load_facts(UnpackedFact)[0]
        unpacked = compressed * fact.disk // fact.wheels
    gpus = tuple(gpu for gpu in labels.get(f"{LABEL}.gpus", "").split(",") if gpu)
    driver = None
    if (minimum := labels.get(DRIVER_LABEL)) and (cuda := labels.get(f"{LABEL}.cuda")):
        driver = DriverNeeds(cuda, minimum, f"the image is CUDA {cuda}'s, as its labels say", f"label {DRIVER_LABEL}")
    return Needs(
        subject=subject,
        lock=labels.get(f"{LABEL}.lock"),
        platform=platform,
        gpus=gpus,
        driver=driver,
        require=environment.get(VARIABLE) or labels.get(REQUIRES_LABEL, ""),
        compressed=compressed,
        unpacked=unpacked,
        estimated=estimated,
    )


# --- disk -------------------------------------------------------------------------------------------------------------


def _bytes(matrix: Matrix, lock: Lock) -> tuple[int, int]:
    """What is pulled, and what it becomes: by the wheels' sizes; where some are not known, by the matrix's budget."""
    fact = load_facts(UnpackedFact)[0]
    system = next(each for each in load_facts(TransferFact) if each.layer == "os")
    size = system.size or 0
    wheels = sum(artefact.size or 0 for artefact in lock.artefacts)
    unpacked = wheels * fact.disk // fact.wheels + size
    if any(artefact.size is None for artefact in lock.artefacts) and matrix.budget is not None:
        unpacked = max(unpacked, matrix.budget.image)
        wheels = max(wheels, (unpacked - size) * fact.wheels // fact.disk)
    return wheels + system.compressed, unpacked


# --- GPU code ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Code:
    lacking: Mapping[str, tuple[str, ...]]
    looked_at: tuple[str, ...]
    not_looked_at: tuple[str, ...]


def _code(lock: Lock) -> _Code:
    """Which files have no code for which GPU, as far as the wheels' GPU code is shipped with the builder."""
    wheels = [artefact for artefact in lock.artefacts if artefact.name in gpucode.LARGE]
    known = [(wheel, found) for wheel in wheels if (found := gpucode.shipped(wheel.sha256)) is not None]
    read = {wheel.name for wheel, _ in known}
    lacking: dict[str, tuple[str, ...]] = {}
    for capability in _capabilities() if known else ():
        device = arch.pair(capability)
        files: list[str] = []
        for wheel, code in known:
            loadings = _loadings(wheel)
            for member, containers in sorted(code.members.items()):
                fact = loadings.get(member)
                if fact is None or (fact.only_for is None and _on(fact, device)):
                    files += [member] if not arch.cover(containers, device).whole else []
        lacking[capability] = tuple(files)
    return _Code(
        lacking,
        tuple(f"{wheel.name} {wheel.version}" for wheel in wheels if wheel.name in read),
        tuple(f"{wheel.name} {wheel.version}" for wheel in wheels if wheel.name not in read),
    )


def _capabilities() -> Iterable[str]:
    # Beside our targets what people have, older ones among them.
    named = {fact.capability for fact in load_facts(GpuNameFact)}
    return sorted(named | {fact.capability for fact in load_facts(GpuFact)}, key=arch.pair)


def _loadings(wheel: Artefact) -> Mapping[str, LoaderFact]:
    found = {}
    for fact in load_facts(LoaderFact):
        for requirement in map(Requirement, fact.releases):
            if requirement.name == wheel.name and requirement.specifier.contains(
                Version(wheel.version), prereleases=True
            ):
                found[fact.path] = fact
    return found


def _on(fact: LoaderFact, device: arch.Pair) -> bool:
    return arch.Loading(fact.path, fact.devices, fact.except_devices).on(device)
