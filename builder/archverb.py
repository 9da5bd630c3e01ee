"""`builder arch`: which GPUs the shared objects of files, wheels and releases have code for, and what a device would load."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder import arch
from builder.arch import EVERYWHERE, Loading
from builder.archreport import Asked, Library, Report, evaluate
from builder.cache import not_writable
from builder.errors import UsageError
from builder.facts import GpuFact, load_facts
from builder.facts.devices import LoaderFact, PtxFact
from builder.fatbin import Container, FatbinError, Image, scan_file
from builder.fatbin_stream import scan_stream
from builder.fetch import Bars
from builder.files import canonical_json, write_atomic
from builder.patches.releases import Traffic
from builder.settings import Settings
from builder.smoke.tree import is_shared_object
from builder.streaming import StreamedReleases, StreamedWheel, open_file
from builder.tags import machine_of

SCHEMA = 1
"""Of what is kept of a shared object that was looked at."""

LARGE = 4_000_000
"""Bytes of a member from which on its progress is shown."""


# --- what is asked ----------------------------------------------------------------------------------------------------


def asked(gpus: Sequence[str], driver: str | None, cuda: str | None) -> Asked:
    """What a command line asks for. Raises `UsageError`."""
    try:
        devices = tuple(dict.fromkeys(arch.pair(gpu) for gpu in gpus))
    except ValueError as error:
        known = ", ".join(fact.capability for fact in load_facts(GpuFact))
        raise UsageError(
            f"`--gpu {error}` is no compute capability", hint=f"as in `--gpu 12.0`; known: {known}"
        ) from None
    if driver is None and cuda is None:
        return Asked(devices, None)
    rows = load_facts(PtxFact)
    if driver is not None:
        branch = re.fullmatch(r"([1-9][0-9]{2})(\.[0-9]{1,3}){0,2}", driver)
        found = [row for row in rows if branch and row.driver == int(branch[1])]
        hint = "`--cuda-driver 13.0` names it by the CUDA version that nvidia-smi shows"
        what, named = f"the driver {driver}", f"driver {driver}"
        known = ", ".join(str(row.driver) for row in rows)
    else:
        found = [row for row in rows if row.cuda == cuda]
        hint, what, named = "", f"a driver for CUDA {cuda}", f"driver for CUDA {cuda}"
        known = ", ".join(row.cuda for row in rows)
    if not found:
        raise UsageError(f"what PTX {what} compiles is not known", because=f"facts/ptx.yaml has {known}", hint=hint)
    return Asked(devices, arch.pair(found[-1].isa), named)


def loadings(distribution: str, version: str) -> list[Loading]:
    """What is known of the files of a release: facts/loaders.yaml."""
    found = []
    for fact in load_facts(LoaderFact):
        for requirement in map(Requirement, fact.releases):
            if requirement.name == distribution and requirement.specifier.contains(Version(version), prereleases=True):
                found.append(
                    Loading(
                        fact.path,
                        fact.devices,
                        fact.except_devices,
                        fact.only_for or "",
                        fact.otherwise,
                        fact.source,
                    )
                )
    return found


# --- looking ----------------------------------------------------------------------------------------------------------


def look(subjects: Sequence[str], question: Asked, settings: Settings, platform: str = "linux/amd64") -> Report:
    """Look at every shared object of files, wheels and releases (`name==version`; their wheels are those for ``platform``).

    Raises `UsageError` for a subject that is none of these, `UnreachableError` and `IntegrityError` as the wheels do.
    """
    began = time.monotonic()
    releases = StreamedReleases(settings, machine_of(platform))
    libraries: list[Library] = []
    local = 0
    for subject in subjects:
        path = Path(subject)
        if subject.endswith(".whl"):
            wheel = open_file(path)
            local += path.stat().st_size
        elif path.is_file():
            libraries.append(_file(path))
            continue
        else:
            wheel = releases.release(*_release(subject))
        libraries += wheel_libraries(wheel, settings)
    traffic = releases.traffic
    traffic = Traffic(traffic.bytes_read, traffic.bytes_total + local, traffic.requests)
    found = tuple(libraries)
    return Report(question, found, tuple(evaluate(found, question)), traffic, time.monotonic() - began)


def _requirement(subject: str) -> Requirement | None:
    try:
        return Requirement(subject)
    except InvalidRequirement:
        return None


def _release(subject: str) -> tuple[str, str]:
    found = _requirement(subject)
    if found is None or "/" in subject or is_shared_object(subject):
        raise UsageError(
            f"there is no file `{subject}`", hint="FILE.so, FILE.whl, or a release as in `sgl-kernel==0.3.21`"
        )
    pins = [pin for pin in found.specifier if pin.operator in ("==", "===") and not pin.version.endswith(".*")]
    if len(pins) != 1 or len(found.specifier) != 1 or found.marker or found.url:
        raise UsageError(f"`{subject}` is not one release", hint=f"`{found.name}==VERSION`")
    return canonicalize_name(found.name), pins[0].version


def _file(path: Path) -> Library:
    try:
        containers = scan_file(path)
    except OSError as error:
        raise UsageError(f"`{path}` cannot be read", because=str(error)) from error
    except FatbinError as error:
        raise UsageError(f"the GPU code of `{path}` cannot be read", because=str(error)) from error
    return Library(str(path), "", "", "", "", containers, EVERYWHERE)


def wheel_libraries(wheel: StreamedWheel, settings: Settings) -> Iterator[Library]:
    """Every shared object of a wheel, one after the other as they are read. Raises as the wheel does."""
    known = {loading.file: loading for loading in loadings(wheel.name, wheel.version)}
    for member in (name for name in wheel.entries if is_shared_object(name)):
        entry = wheel.entries[member]
        containers, error = member_containers(wheel, member, settings)
        loading = known.get(member, EVERYWHERE)
        yield Library(member, wheel.path.name, wheel.name, wheel.version, entry.digest, containers, loading, error)


def kept_containers(digest: str, settings: Settings) -> tuple[Container, ...] | None:
    """The containers of a shared object with this digest in RECORD, if it was looked at before."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        return _from_json(json.loads(_kept_path(settings, digest).read_bytes()))
    return None


def member_containers(wheel: StreamedWheel, member: str, settings: Settings) -> tuple[tuple[Container, ...], str]:
    """The containers of a member, from the cache if it was looked at before; or why it cannot be read."""
    if (found := kept_containers(wheel.entries[member].digest, settings)) is not None:
        return found, ""
    kept = _kept_path(settings, wheel.entries[member].digest)
    with _progress(wheel, member) as report:
        pieces = wheel.stream(member, report)
        try:
            containers = scan_stream(pieces)
        except FatbinError as error:
            # It is still the file that RECORD has, or else the wheel is damaged.
            for _ in pieces:
                pass
            return (), str(error)
    try:
        write_atomic(kept, canonical_json(_as_json(containers)))
    except OSError as error:
        raise not_writable(kept, error) from error
    return containers, ""


@contextlib.contextmanager
def _progress(wheel: StreamedWheel, member: str) -> Iterator[Callable[[int], None]]:
    """A progress bar for a member that comes over the network; what is told is how many bytes more there are."""
    size, used = wheel.packed_size(member), 0
    if not wheel.remote or size < LARGE:
        yield lambda _: None
        return
    with Bars() as bars, bars.bar(f"{wheel.path.name}: {member}", f"{wheel.path.name}: {member}", size) as bar:

        def report(count: int) -> None:
            nonlocal used
            used += count
            bar.report(used, size)

        yield report


def _kept_path(settings: Settings, digest: str) -> Path:
    """By the content of the shared object, which several wheels may have: RECORD's digest, spelt for a file name."""
    name = re.sub(r"[^A-Za-z0-9_-]", "", digest.removeprefix("sha256="))
    return settings.cache / "arch" / name[:2] / f"{name}.json"


def _as_json(containers: Sequence[Container]) -> dict[str, Any]:
    images = dict.fromkeys(image for container in containers for image in container.images)
    numbers = {image: number for number, image in enumerate(images)}
    return {
        "schema": SCHEMA,
        "images": [[i.kind, i.target, i.size, i.compression, list(i.isa) if i.isa else None, i.source] for i in images],
        "containers": [[c.section, c.offset, [numbers[image] for image in c.images]] for c in containers],
    }


def _from_json(data: dict[str, Any]) -> tuple[Container, ...]:
    """The same, read again. Raises ValueError, KeyError or TypeError for what was damaged, or is of another builder."""
    if data["schema"] != SCHEMA:
        raise ValueError(data["schema"])
    images = [
        Image(
            str(kind),
            str(target),
            int(size),
            str(compression),
            None,
            (int(isa[0]), int(isa[1])) if isa else None,
            str(source),
        )
        for kind, target, size, compression, isa, source in data["images"]
    ]
    return tuple(
        Container(str(section), int(offset), tuple(images[number] for number in numbers))
        for section, offset, numbers in data["containers"]
    )
