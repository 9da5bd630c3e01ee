"""What Docker and Podman say of themselves → `Engine`. Pure; both the API's answer and `docker info` have this shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from builder.doctor.facts import Engine

SHM = 64 << 20
"""/dev/shm of a container where nobody says otherwise: the default of Docker and Podman (case 101)."""

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size(value: object) -> int | None:
    """Bytes of `64m`, `1G` or a number; None for anything else."""
    match = re.fullmatch(r"([0-9]{1,12})([bkmgt]?)b?", str(value).strip().lower())
    return int(match[1]) * _UNITS[match[2]] if match else None


def _word(value: object, most: int = 120) -> str | None:
    if not isinstance(value, str) or not value or not value.isprintable():
        return None
    return re.sub(r"(?<=/home/)[^/\s]+", "…", value)[:most]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def of_docker(
    info: Mapping[str, Any], version: Mapping[str, Any] | None = None, daemon: Mapping[str, Any] | None = None
) -> Engine | None:
    """From `docker info`, `docker version` (its server) and daemon.json; None where no server answered.

    The client answers too where there is no server: `ServerErrors` stands there then.
    """
    number = _word(info.get("ServerVersion"))
    if number is None:
        return None
    status = info.get("DriverStatus")
    pairs = [pair for pair in status if isinstance(pair, list) and len(pair) == 2] if isinstance(status, list) else []
    containerd = any(pair[0] == "driver-type" and "io.containerd.snapshotter" in str(pair[1]) for pair in pairs)
    runtimes = {*map(str, _mapping(info.get("Runtimes"))), *map(str, _mapping(_mapping(daemon).get("runtimes")))}
    security = info.get("SecurityOptions")
    options = " ".join(map(str, security)) if isinstance(security, list) else ""
    devices = info.get("DiscoveredDevices")
    names = [str(_mapping(device).get("ID", "")) for device in devices] if isinstance(devices, list) else []
    return Engine(
        kind="docker",
        version=number,
        api=_word(_mapping(version).get("ApiVersion")) or _word(info.get("ApiVersion")),
        store="containerd" if containerd else "classic",
        data_root=_word(info.get("DockerRootDir")),
        rootless="name=rootless" in options,
        runtimes=tuple(sorted(name[:60] for name in runtimes)),
        default_runtime=_word(info.get("DefaultRuntime")),
        cdi=tuple(
            sorted(name[:80] for name in names if "nvidia" in name and "UUID" not in name and "GPU-" not in name)
        ),
        cgroup=_cgroup(info.get("CgroupVersion")),
    )


def of_podman(info: Mapping[str, Any]) -> Engine | None:
    """From `podman info --format json`; None for what is none."""
    host, store, version = _mapping(info.get("host")), _mapping(info.get("store")), _mapping(info.get("version"))
    number = _word(version.get("Version"))
    if number is None:
        return None
    runtime = _mapping(host.get("ociRuntime"))
    rootless = _mapping(host.get("security")).get("rootless")
    return Engine(
        kind="podman",
        version=number,
        api=_word(version.get("APIVersion")),
        store="classic",
        data_root=_word(store.get("graphRoot")),
        rootless=rootless if isinstance(rootless, bool) else None,
        runtimes=tuple(name for name in [_word(runtime.get("name"))] if name),
        default_runtime=_word(runtime.get("name")),
        cgroup=_cgroup(host.get("cgroupVersion")),
    )


def _cgroup(value: object) -> Literal["v1", "v2"] | None:
    return {"1": "v1", "v1": "v1", "2": "v2", "v2": "v2"}.get(str(value))  # type: ignore[return-value]
