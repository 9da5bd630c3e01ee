"""What `collect.sh` printed → `HostFacts`. Pure, and total: any text gives facts, what is not understood is unknown."""

from __future__ import annotations

import re
from typing import Literal

from builder.doctor import containers, engines, gpus, links
from builder.doctor.facts import Disk, Engine, HostFacts, Memory, Os, Shm, Ulimits
from builder.doctor.transcript import Reader, json_of, parts


def facts_of(text: str, collected: str | None = None) -> HostFacts:
    """The facts in a transcript; ``collected`` is its date."""
    reader = Reader(parts(text))
    if "end" not in reader.found:
        reader.unknown["*"] = "the host's answer is cut off" if reader.found else "the host's shell answered nothing"
    found, engine = gpus.gpus(reader), containers.engine(reader)
    return HostFacts(
        collected=collected,
        os=_os(reader),
        driver=gpus.driver(reader, found),
        gpus=found,
        engine=engine,
        toolkit=containers.toolkit(reader),
        disk=_disk(reader, engine),
        memory=_memory(reader),
        shm=_shm(reader, engine),
        ulimits=_ulimits(reader),
        compat=links.compat(reader),
        fabric=links.fabric(reader),
        pcie=links.pcie(reader),
        present=containers.present(reader),
        unknown=dict(sorted(reader.unknown.items())),
    )


def _os(reader: Reader) -> Os:
    release: dict[str, str] = {}
    for line in reader.lines("os_release"):
        key, _, value = line.partition("=")
        release[key.strip()] = value.strip().strip("\"'")[:100]
    kernel = next(iter(reader.about("kernel")), None) or None
    arch = next(iter(reader.about("machine")), None) or None
    marks = reader.lines("container")
    has_shell = "about" in reader.found
    selinux: Literal["enforcing", "permissive", "off"] | None = None
    if lines := reader.lines("selinux"):
        selinux = {"1": "enforcing", "0": "permissive"}.get(lines[0].strip(), "off")  # type: ignore[assignment]
    return Os(
        id=reader.or_unknown("os.id", release.get("ID") or None, "there is no /etc/os-release"),
        version=release.get("VERSION_ID") or None,
        like=tuple(release.get("ID_LIKE", "").split()),
        kernel=reader.or_unknown("os.kernel", kernel, "`uname` said nothing"),
        arch=reader.or_unknown("os.arch", arch, "`uname` said nothing"),
        wsl=("dxg" in marks or "microsoft" in (kernel or "").lower()) if has_shell else None,
        container=any(mark != "dxg" for mark in marks) if has_shell else None,
        selinux=selinux,
    )


def _memory(reader: Reader) -> Memory:
    found: dict[str, int] = {}
    for line in reader.lines("meminfo"):
        if match := re.fullmatch(r"(MemTotal|MemAvailable):\s+([0-9]{1,15}) kB", line.strip()):
            found[match[1]] = int(match[2]) << 10
    why = "/proc/meminfo does not say"
    return Memory(
        total=reader.or_unknown("memory.total", found.get("MemTotal"), why),
        available=reader.or_unknown("memory.available", found.get("MemAvailable"), why),
    )


def _ulimits(reader: Reader) -> Ulimits:
    names = {"Max locked memory": "memlock", "Max open files": "nofile", "Max stack size": "stack"}
    found: dict[str, int | Literal["unlimited"]] = {}
    for line in reader.lines("limits"):
        match = re.match(r"(Max [a-z ]+?)\s{2,}(unlimited|[0-9]{1,20})\s", line)
        if match and match[1] in names:
            found[names[match[1]]] = "unlimited" if match[2] == "unlimited" else int(match[2])
    for name in names.values():
        reader.or_unknown(f"ulimits.{name}", found.get(name), "/proc/self/limits does not say")
    return Ulimits(memlock=found.get("memlock"), nofile=found.get("nofile"), stack=found.get("stack"))


def _df(reader: Reader, name: str) -> tuple[int, int] | None:
    """Bytes in all and free, of `df -Pk`."""
    for line in reader.lines(name)[1:]:
        if match := re.search(r"\s([0-9]{1,15})\s+-?[0-9]{1,15}\s+(-?[0-9]{1,15})\s+(-|[0-9]{1,3}%)\s", line):
            return int(match[1]) << 10, max(0, int(match[2])) << 10
    return None


def _disk(reader: Reader, engine: Engine | None) -> Disk:
    data, tmp = _df(reader, "df_data"), _df(reader, "df_tmp")
    other = _df(reader, "df_containerd")
    # The containerd store may lie outside of the engine's own folder: what is scarcer counts.
    if engine is not None and engine.store == "containerd" and other and data and other[1] < data[1]:
        data = other
    why = reader.part("df_data").why("df")
    return Disk(
        data_root_free=reader.or_unknown("disk.data_root_free", data[1] if data else None, why),
        data_root_total=data[0] if data else None,
        tmp_free=reader.or_unknown("disk.tmp_free", tmp[1] if tmp else None, reader.part("df_tmp").why("df")),
    )


def _shm(reader: Reader, engine: Engine | None) -> Shm:
    host = _df(reader, "df_shm")
    default: int | None = None
    if engine is not None:
        stated = json_of(reader.part("daemon").text).get("default-shm-size") if engine.kind == "docker" else None
        default = engines.size(stated) if stated is not None else engines.SHM
    return Shm(
        host=reader.or_unknown("shm.host", host[0] if host else None, reader.part("df_shm").why("df")),
        container_default=reader.or_unknown("shm.container_default", default, "it is not known which engine there is"),
    )
