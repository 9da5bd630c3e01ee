"""Which NVIDIA driver a stack needs, and what an installed one makes of it. Pure: facts, a matrix and its lock.

Three things ask for a driver: the CUDA major of the wheels (minor-version compatibility runs every release of a major on
the major's oldest driver), the GPUs (an older driver does not know a newer one), and PTX where nothing else covers a GPU
(the driver compiles it, and knows no newer version of PTX than it came with). The strictest decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.errors import UsageError
from builder.facts import CompatFact, DriverFact, DriverMajorFact, GpuFact, PtxFact, TorchFact, load_facts
from builder.findings import Finding, Severity
from builder.lock import Artefact, Lock
from builder.lockrules import cuda_major, named
from builder.matrix import Matrix
from builder.rulebook import local_cuda

RULE = "driver"
_FORWARD = "NVIDIA, CUDA Compatibility, Forward Compatibility"
_REMOVE = "take the `compat` folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d of the image"

_DRIVER = re.compile(r"[1-9][0-9]{2}(\.[0-9]{1,4}){0,2}")
_RELEASE = re.compile(r"[1-9][0-9]\.[0-9]{1,2}")
# The runtime's own version is the CUDA release of the set: torch pins it, and everything else is linked to it.
RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu1[0-9])?|cuda-toolkit")


@dataclass(frozen=True)
class DriverNeeds:
    """What a stack asks of the host's driver.

    ``minimum_driver`` is a version or branch (`580`): an older one runs nothing of the stack on one of its GPUs, and
    ``because`` says what asks for it. ``full_driver`` is the one that came with ``cuda``, the newest CUDA release among
    the wheels (`13.0.2`); with an older one ``limits`` applies. It is empty where no fact has that release.
    ``gpu_driver`` is what the GPUs ask for: compatibility libraries bring no knowledge of a GPU to an older driver.
    ``gpus`` are the compute capabilities of these GPUs.
    """

    cuda: str
    minimum_driver: str
    because: str
    source: str
    full_driver: str = ""
    full_source: str = ""
    limits: str = ""
    gpu_driver: str = ""
    gpus: tuple[str, ...] = ()

    @property
    def major(self) -> int:
        """The CUDA major."""
        return int(self.cuda.split(".")[0])


def number(driver: str) -> tuple[int, ...]:
    """A driver's version as numbers: (580, 159, 4). Raises `UsageError`."""
    if not _DRIVER.fullmatch(driver):
        raise UsageError(
            f"`{driver[:100]}` is not a driver's version",
            hint="as in `580.159.04`; `nvidia-smi --query-gpu=driver_version --format=csv,noheader` prints it",
        )
    return tuple(int(part) for part in driver.split("."))


def at_least(driver: str, floor: str) -> bool:
    """Whether a driver is ``floor`` or later. A branch alone (`580`) counts as any driver of it."""
    has, wanted = number(driver), number(floor)
    return has >= wanted[: len(has)] if len(has) < len(wanted) else has >= wanted


def reported_cuda(driver: str) -> str | None:
    """The CUDA release that a driver reports (`13.0`); `None` where it is older than all that is known."""
    found = [fact for fact in load_facts(DriverFact) if at_least(driver, fact.driver)]
    return _minor(max((fact.cuda for fact in found), key=Version)) if found else None


def contradicts(driver: str, cuda: str) -> str | None:
    """The CUDA release that a driver gives by itself, where ``cuda``, which is reported, is another; else `None`."""
    own = reported_cuda(driver)
    newest = max((number(fact.driver)[0] for fact in load_facts(DriverFact)), default=0)
    if own is None or own == cuda or number(driver)[0] > newest:
        return None
    # A branch alone says less than its later drivers can.
    if len(number(driver)) == 1 and Version(own) > Version(cuda):
        return None
    return own


def compat_in_use(driver: str, cuda: str) -> str | None:
    """The CUDA release of the compatibility libraries that a reported one tells of: a driver gives no newer one by itself."""
    own = contradicts(driver, cuda)
    return cuda if own is not None and Version(cuda) > Version(own) else None


def _minor(cuda: str) -> str:
    return ".".join(cuda.split(".")[:2])


def own_driver(cuda: str) -> DriverFact | None:
    """The driver that came with a CUDA release; of its updates the newest that is known and not newer than it."""
    rows = [fact for fact in load_facts(DriverFact) if _minor(fact.cuda) == _minor(cuda)]
    same = [fact for fact in rows if Version(fact.cuda) <= Version(cuda)] if cuda.count(".") > 1 else rows[:1]
    return max(same or rows, key=lambda fact: Version(fact.cuda), default=None)


def _release(artefact: Artefact) -> str | None:
    """The CUDA release that a wheel states: by the runtime's version, torch's local one, or the facts about torch."""
    if RUNTIME.fullmatch(artefact.name):
        # 13.0.96 is a build of 13.0's runtime, not its 96th update; cuda-toolkit's version is the release itself.
        return artefact.version if artefact.name == "cuda-toolkit" else _minor(artefact.version)
    if artefact.name != "torch":
        return None
    if (tagged := local_cuda(artefact.version)) is not None:
        return tagged
    fits = (f for f in load_facts(TorchFact) if SpecifierSet(f.versions).contains(artefact.version, prereleases=True))
    return next((fact.cuda for fact in fits), None) if artefact.index == "default" else None


def driver_needs(
    matrix: Matrix, lock: Lock, *, gpus: Sequence[str] | None = None, ptx: str | None = None
) -> DriverNeeds | None:
    """What the driver of a host has to be for a stack; `None` where no wheel of it has to do with CUDA.

    ``gpus`` are the compute capabilities of the host, those of the matrix unless they are given: each may ask for more.
    ``ptx`` is the newest version of PTX (`9.0`) that one of the stack's GPUs has nothing better than, where that was
    looked at (`builder.arch.Coverage.isa`).
    """
    majors = {artefact.name: found[0] for artefact in lock.artefacts if (found := cuda_major(artefact)) is not None}
    releases = {artefact.name: cuda for artefact in lock.artefacts if (cuda := _release(artefact)) is not None}
    majors = {name: int(release.split(".")[0]) for name, release in releases.items()} | majors
    if not majors:
        return None
    major = max(majors.values())
    of_major = {name: release for name, release in releases.items() if int(release.split(".")[0]) == major}
    newest = max(of_major.values(), key=Version) if of_major else str(major)
    # The most telling wheel: torch, then the runtime, then whichever.
    strict = sorted(
        (name for name, it in majors.items() if it == major), key=lambda n: (n != "torch", n not in of_major, n)
    )
    wheel = named(lock.by_name[strict[0]])
    floor = next((fact for fact in load_facts(DriverMajorFact) if fact.major == major), None)
    own = own_driver(newest) if "." in newest else None
    asks: list[tuple[str, str, str]] = []
    if floor is not None:
        because = f"{wheel} is CUDA {_minor(newest)}'s, and CUDA {major}.x needs driver {floor.driver} or later"
        asks.append((floor.driver, because, floor.source))
    on = tuple(matrix.gpus if gpus is None else gpus)
    asks += (of_gpus := list(_gpus(on)))
    if ptx is not None:
        asks += _ptx(ptx)
    if not asks:
        return None
    driver, because, source = max(asks, key=lambda ask: number(ask[0]))
    return DriverNeeds(
        cuda=newest,
        minimum_driver=driver,
        because=because,
        source=source,
        full_driver=own.driver if own is not None else "",
        full_source=own.source if own is not None else "",
        limits=floor.limits if floor is not None else "",
        gpu_driver=max((ask[0] for ask in of_gpus), key=number, default=""),
        gpus=on,
    )


def _gpus(gpus: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    known = {fact.capability: fact for fact in load_facts(GpuFact)}
    for gpu in gpus:
        fact = known[gpu]
        own = own_driver(fact.minimum_cuda)
        if own is not None:
            because = f"GPU {gpu} ({fact.names[0]}) is known from CUDA {fact.minimum_cuda} on, which came with driver {own.driver}"
            yield own.driver, because, f"{fact.source}; {own.source}"


def _ptx(isa: str) -> Iterator[tuple[str, str, str]]:
    rows = [fact for fact in load_facts(PtxFact) if Version(fact.isa) >= Version(isa)]
    if rows:
        because = f"PTX {isa} is all that a GPU of the stack finds, and the driver compiles it from branch {rows[0].driver} on"
        yield str(rows[0].driver), because, rows[0].source


def judge_driver(needs: DriverNeeds, driver: str, compat: str | None = None) -> list[Finding]:
    """What a host's driver makes of a stack. ``compat`` is the CUDA release of forward compatibility libraries
    (`cuda-compat`) that the loader finds first, where there are any.

    Raises `UsageError` for what is no driver's version.
    """
    reports = reported_cuda(driver)
    gives = f", and gives CUDA {reports}" if reports else ""
    base: dict[str, Any] = {
        "rule": RULE,
        "subject": driver,
        "evidence": {
            "driver": driver,
            "reports": reports,
            "cuda": needs.cuda,
            "minimum": needs.minimum_driver,
            "full": needs.full_driver or None,
            "compat": compat,
        },
    }
    if compat is not None and (own := own_driver(compat)) is not None and at_least(driver, own.driver):
        message = f"compatibility libraries of CUDA {compat} lie before those of driver {driver}, which is not older"
        return [
            Finding(
                **base,
                severity=Severity.ERROR,
                message=message,
                because="libcuda and the kernel's driver then disagree: error 803, `system has unsupported display driver / cuda driver combination`",
                hint=_REMOVE,
                source=f"{own.source}; {_FORWARD}; cases 064 and 066",
            )
        ]
    if compat is not None and needs.gpus and not _data_centre(needs.gpus):
        devices = _devices(needs.gpus)
        return [
            Finding(
                **base,
                severity=Severity.ERROR,
                message=f"compatibility libraries of CUDA {compat} lie before those of driver {driver}, and {devices} is no data-centre GPU",
                because="forward compatibility is for data-centre GPUs: error 804, `forward compatibility was attempted on non supported HW`",
                hint=_REMOVE,
                source=f"{_FORWARD}; case 068",
            )
        ]
    made_up = _made_up(needs, driver, compat) if compat is not None else ""
    if not at_least(driver, needs.minimum_driver):
        enough = compat is not None and _enough(needs, driver, compat)
        ways = [
            f"install driver {needs.minimum_driver} or later",
            _package(needs, driver) if not enough else "",
            _older(needs, driver),
        ]
        return [
            Finding(
                **base,
                severity=Severity.WARNING if enough else Severity.ERROR,
                message=f"driver {driver} is older than {needs.minimum_driver}{gives}",
                because=needs.because + made_up,
                hint="".join(ways),
                source=needs.source,
            )
        ]
    if needs.full_driver and not at_least(driver, needs.full_driver):
        return [
            Finding(
                **base,
                severity=Severity.NOTE,
                message=f"driver {driver} runs CUDA {_minor(needs.cuda)} by minor-version compatibility{gives}",
                because=f"CUDA {needs.cuda} came with driver {needs.full_driver}; with an older one {needs.limits}{made_up}",
                hint=f"see that no GPU is left to PTX: `builder arch --gpu CC --driver {driver}` on the wheels with kernels",
                source=needs.full_source,
            )
        ]
    return []


def judge_reported(driver: str, cuda: str) -> list[Finding]:
    """What is wrong with a host of which a driver and a CUDA release (`12.8`) are told that do not go together.

    Raises `UsageError` for what is no driver's version, and for what is no CUDA release.
    """
    if not _RELEASE.fullmatch(cuda):
        raise UsageError(f"`{cuda[:100]}` is no CUDA release", hint="as nvidia-smi names it: `CUDA Version: 13.0`")
    if (own := contradicts(driver, cuda)) is None:
        return []
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject=driver,
            message=f"driver {driver} is CUDA {own}'s, and CUDA {cuda} is reported",
            because=(
                "forward-compatibility libraries are in use where it was asked, or the numbers are of two machines"
                if compat_in_use(driver, cuda)
                else "the numbers are of two machines, or compatibility libraries lie before those of a driver that is not older"
            ),
            hint="`nvidia-smi --query-gpu=driver_version --format=csv` on the host, outside of any container",
            source="NVIDIA's release notes, toolkit driver versions; case 074",
            evidence={"driver": driver, "reports": own, "reported": cuda},
        )
    ]


def _knows(gpu: str, driver: str) -> bool:
    """Whether a driver knows a compute capability: the one that came with its first CUDA release does."""
    floor = next((ask[0] for ask in _gpus((gpu,))), None)
    return floor is None or at_least(driver, floor)


def _data_centre(gpus: Sequence[str]) -> str:
    """The data-centre GPUs among those of some compute capabilities: `H100, H200`."""
    return ", ".join(name for fact in load_facts(GpuFact) if fact.capability in gpus for name in fact.data_centre)


def _devices(gpus: Sequence[str]) -> str:
    names = {fact.capability: fact.names[0] for fact in load_facts(GpuFact)}
    return " or ".join(f"GPU {gpu} ({names[gpu]})" for gpu in gpus)


def _new_enough(needs: DriverNeeds, compat: str) -> bool:
    """Whether the libraries of a CUDA release are. They are its driver's: what that does not compile they do not either."""
    brings = own_driver(compat)
    covers = brings is None or at_least(brings.driver, needs.minimum_driver)
    return covers and Version(compat) >= Version(_minor(needs.cuda))


def _enough(needs: DriverNeeds, driver: str, compat: str) -> bool:
    """Whether compatibility libraries of a CUDA release make up for a driver, on GPUs that they are for."""
    return _new_enough(needs, compat) and (not needs.gpu_driver or at_least(driver, needs.gpu_driver))


def _made_up(needs: DriverNeeds, driver: str, compat: str) -> str:
    """What compatibility libraries that are in use change, and what they do not: `; …`."""
    libraries = f"; the compatibility libraries of CUDA {compat}"
    if not _new_enough(needs, compat):
        return f"{libraries} are too old to make up for it"
    if not _enough(needs, driver, compat):
        return f"{libraries} do not make up for it: with them the driver knows no more GPUs"
    names, branch = _data_centre(needs.gpus), number(driver)[0]
    on = f" ({names})" if names else ""
    fact = next((fact for fact in load_facts(CompatFact) if fact.cuda == compat), None)
    unnamed = f", and `{fact.package}` is not meant for branch {branch}" if fact and branch not in fact.branches else ""
    return f"{libraries} make up for it on data-centre GPUs only{on}{unnamed}"


def _package(needs: DriverNeeds, driver: str) -> str:
    """The package of compatibility libraries that makes up for a driver, and on what; or why none does."""
    without = " (compatibility libraries do not help: "
    known = [gpu for gpu in needs.gpus if _knows(gpu, driver)]
    names = _data_centre(known)
    if needs.gpus and not known:
        return f"{without}with them a driver knows no more GPUs)"
    if needs.gpus and not names:
        return f"{without}{_devices(known)} is no data-centre GPU)"
    branch = number(driver)[0]
    several = [fact for fact in load_facts(CompatFact) if fact.cuda.split(".")[0] == str(needs.major)]
    fact = next((fact for fact in several if branch in fact.branches and _new_enough(needs, fact.cuda)), None)
    if fact is None:
        return f"{without}none that is known has CUDA {_minor(needs.cuda)} and is meant for drivers of branch {branch})"
    on = f" ({names})" if names else ""
    return f", or on data-centre GPUs{on} put the libraries of `{fact.package}` before the driver's: CUDA {fact.cuda}"


def _older(needs: DriverNeeds, driver: str) -> str:
    """The other way out: a stack of a major that this driver runs, where it is the major that asks for more."""
    fits = [fact.major for fact in load_facts(DriverMajorFact) if at_least(driver, fact.driver)]
    floor = next((fact for fact in load_facts(DriverMajorFact) if fact.major == needs.major), None)
    if not fits or floor is None or at_least(driver, floor.driver):
        return ""
    return f", or take a stack for CUDA {max(fits)}"
