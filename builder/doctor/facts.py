"""What is known of a GPU host: `HostFacts`, as collected, as kept in a file, and as `doctor --json` prints it.

The JSON shape is a contract (docs/distribution.md): fields are added, never renamed. A value that could not be had is null
and stands in ``unknown`` with the reason. Bytes are bytes, versions are the tool's own words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder.errors import UsageError

SCHEMA: Final = 1

Bytes = Annotated[int, Field(ge=0)]
CudaNumber = Annotated[str, Field(pattern=r"^[1-9][0-9]?\.[0-9]{1,2}\z")]
Capability = Annotated[str, Field(pattern=r"^[1-9][0-9]?\.[0-9]\z")]
DriverNumber = Annotated[str, Field(pattern=r"^[1-9][0-9]{2}(\.[0-9]{1,4}){0,2}\z")]
"""`580.95.05`; a report may state the branch alone, `580`."""


class _Part(BaseModel):
    # A file of a newer builder may say more.
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class Os(_Part):
    """The system. ``id`` is that of os-release (`debian`), ``like`` its relatives; ``container``: the host is itself one."""

    id: str | None = None
    version: str | None = None
    like: tuple[str, ...] = ()
    kernel: str | None = None
    arch: str | None = None
    wsl: bool | None = None
    container: bool | None = None
    selinux: Literal["enforcing", "permissive", "off"] | None = None


class Driver(_Part):
    """NVIDIA's driver. ``version`` is the kernel module's, ``cuda`` the newest CUDA that the libcuda found first knows.

    ``loaded`` says whether there is a kernel module at all (on WSL Windows has it), ``library`` is NVML's version where
    it is another one, ``said`` the first line of nvidia-smi where it failed. ``uvm``: the module nvidia-uvm is loaded.
    ``nodes``: the device files that containers need and that are there.
    """

    loaded: bool | None = None
    version: DriverNumber | None = None
    cuda: CudaNumber | None = None
    kind: Literal["datacenter", "geforce"] | None = None
    open: bool | None = None
    library: str | None = None
    said: str | None = None
    uvm: bool | None = None
    nodes: tuple[str, ...] | None = None


class Gpu(_Part):
    """One GPU as nvidia-smi lists it. ``memory`` and ``used`` in bytes."""

    index: Annotated[int, Field(ge=0)]
    name: str | None = None
    capability: Capability | None = None
    memory: Bytes | None = None
    mig: Literal["on", "off"] | None = None
    bus: str | None = None
    persistence: bool | None = None
    used: Bytes | None = None


class Engine(_Part):
    """What runs containers. ``cdi`` are the devices of NVIDIA that it lists; ``cgroup`` is `v1` or `v2`."""

    kind: Literal["docker", "podman"]
    version: str | None = None
    api: str | None = None
    store: Literal["classic", "containerd"] | None = None
    data_root: str | None = None
    rootless: bool | None = None
    runtimes: tuple[str, ...] | None = None
    default_runtime: str | None = None
    cdi: tuple[str, ...] | None = None
    cgroup: Literal["v1", "v2"] | None = None
    host: str | None = None


class CdiSpec(_Part):
    """A CDI file: its devices, the driver whose libraries it names, and the files it names that are not there."""

    file: str
    devices: tuple[str, ...] = ()
    driver: str | None = None
    missing: tuple[str, ...] = ()


class Toolkit(_Part):
    """NVIDIA's container toolkit. ``installed`` is false where it was looked for and is not there."""

    installed: bool | None = None
    version: str | None = None
    cdi_specs: tuple[CdiSpec, ...] | None = None
    mode: str | None = None


class Disk(_Part):
    """Where images are put, in bytes."""

    data_root_free: Bytes | None = None
    data_root_total: Bytes | None = None
    tmp_free: Bytes | None = None
    quota: Bytes | None = None


class Memory(_Part):
    """Of the host, in bytes."""

    total: Bytes | None = None
    available: Bytes | None = None


class Shm(_Part):
    """/dev/shm of the host, and what a container gets by default, in bytes."""

    host: Bytes | None = None
    container_default: Bytes | None = None


Limit = Annotated[int, Field(ge=0)] | Literal["unlimited"] | None


class Ulimits(_Part):
    """Soft limits of the shell: bytes of locked memory and stack, open files."""

    memlock: Limit = None
    nofile: Limit = None
    stack: Limit = None


class CompatLibrary(_Part):
    """A libcuda of the forward-compatibility packages, with the driver it belongs to."""

    path: str
    version: DriverNumber | None = None


class Compat(_Part):
    """Forward compatibility. ``error`` is what cuInit returned, where it failed; ``cuda_driver_loaded`` the CUDA of the
    libcuda that answered."""

    libraries: tuple[CompatLibrary, ...] | None = None
    on_loader_path: bool | None = None
    cuda_driver_loaded: CudaNumber | None = None
    error: Annotated[int, Field(ge=1, le=9999)] | None = None


class Fabric(_Part):
    """NVSwitch, and the service that has to run where there is one."""

    nvswitch: bool | None = None
    fabricmanager: Literal["running", "absent", "failed"] | None = None


class Pcie(_Part):
    """How GPUs reach each other. ``iommu`` is that of the GPUs' own groups, ``acs`` whether a bridge above one redirects
    peer traffic, ``p2p`` nvidia-smi's table for reads (`OK`, `NS` …, `X` on the diagonal). ``devices`` counts NVIDIA's
    GPUs on the bus, driver or not, ``bound`` names the kernel drivers that have them.
    """

    iommu: Literal["on", "off", "passthrough"] | None = None
    acs: bool | None = None
    p2p: tuple[tuple[str, ...], ...] | None = None
    topology: Literal["nvlink", "pcie", "mixed"] | None = None
    devices: Annotated[int, Field(ge=0)] | None = None
    bound: tuple[str, ...] = ()


class Registry(_Part):
    """Whether the host reaches the registry."""

    reachable: bool | None = None


class Network(_Part):
    """What the host reaches."""

    registry: Registry = Registry()


class PresentImage(_Part):
    """An image of ours that the host has."""

    id: str
    lock: str | None = None
    layers: tuple[str, ...] = ()


class Present(_Part):
    """What of ours is on the host; null where the engine was not asked."""

    images: tuple[PresentImage, ...] | None = None


class HostFacts(_Part):
    """All that is known of one host. ``hostname`` is always null: facts are shown to others."""

    schema_: Literal[1] = Field(SCHEMA, alias="schema")
    collected: str | None = None
    hostname: None = None
    os: Os = Os()
    driver: Driver = Driver()
    gpus: tuple[Gpu, ...] | None = None
    engine: Engine | None = None
    toolkit: Toolkit = Toolkit()
    disk: Disk = Disk()
    memory: Memory = Memory()
    shm: Shm = Shm()
    ulimits: Ulimits = Ulimits()
    compat: Compat = Compat()
    fabric: Fabric = Fabric()
    pcie: Pcie = Pcie()
    network: Network = Network()
    present: Present = Present()
    unknown: dict[str, str] = Field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The shape of docs/distribution.md."""
        return self.model_dump(mode="json", by_alias=True)

    def why_unknown(self, path: str) -> str:
        """The reason why `driver.version` is not known, that of the part it belongs to, or nothing."""
        while path:
            if path in self.unknown:
                return self.unknown[path]
            path = path.rpartition(".")[0]
        return self.unknown.get("*", "")


def parse_facts(text: str, where: str) -> HostFacts:
    """Facts from a file's text. Raises `UsageError` for what is no such file, or of another schema."""
    hint = "`builder doctor --collect > FILE` writes one, on the host or with `--host`"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "the facts of a host are not JSON", where=where, because=str(error)[:200], hint=hint
        ) from error
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        because = f"it is of schema {data.get('schema')!r}, this builder reads {SCHEMA}"
        raise UsageError("the facts of a host cannot be read", where=where, because=because, hint=hint)
    try:
        return HostFacts.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        because = f"{place}: {first['msg']}" if place else first["msg"]
        raise UsageError("the facts of a host cannot be read", where=where, because=because, hint=hint) from error


def read_facts(path: Path) -> HostFacts:
    """Facts from a file. Raises `UsageError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the facts of a host cannot be read", where=str(path), because=str(error)) from error
    return parse_facts(text, str(path))
