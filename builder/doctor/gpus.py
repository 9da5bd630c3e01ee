"""The driver and the GPUs, as nvidia-smi, /proc and /sys tell of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from builder.doctor.facts import Driver, Gpu
from builder.doctor.transcript import Reader, first

_VERSION = re.compile(r"(?<![\d.])([1-9]\d{2}\.\d{1,4}(?:\.\d{1,4})?)(?![\d.])", re.ASCII)
_DRIVER = re.compile(r"[1-9]\d{2}(\.\d{1,4}){1,2}", re.ASCII)
_CUDA = re.compile(r"CUDA (?:UMD )?Version: ?([1-9]\d?\.\d{1,2})(?!\d)", re.ASCII)
_CAPABILITY = re.compile(r"[1-9]\d?\.\d", re.ASCII)
_NVML = re.compile(r"NVML library version: ?([1-9]\d{2}(?:\.\d{1,4}){1,2})", re.ASCII)
_DATACENTER = re.compile(
    r"\b(Tesla|[AHB]\d{2,3}X?|[AVP]100\S*|GH?B?\d{3}|GB\d{3}|L4|L20|L40S?|T4|H20\S*|A100\S*|H100\S*|H200\S*|B[23]00\S*)\b"
)
_GEFORCE = re.compile(r"\b(GeForce|TITAN)\b")


def driver(reader: Reader, found: tuple[Gpu, ...] | None) -> Driver:
    nvrm = next((line for line in reader.lines("nvrm") if line.startswith("NVRM version:")), "")
    module = _VERSION.search(nvrm)
    smi = reader.part("smi")
    header = next((line for line in smi.lines if "Driver Version:" in line or "KMD Version" in line), "")
    stated = re.search(r"(?:Driver Version|KMD Version): ?([1-9]\d{2}(?:\.\d{1,4}){1,2})(?![\d.])", header, re.ASCII)
    queried = next((row["driver_version"] for row in _rows(reader) if _DRIVER.fullmatch(row["driver_version"])), None)
    version = module[1] if module else stated[1] if stated else queried
    cuda = _CUDA.search(header)
    modules = reader.lines("modules")
    loaded: bool | None = True if version else None
    if not version and "about" in reader.found:
        loaded = "nvidia" in modules or bool(reader.lines("nvrm"))
    failed = smi.status not in ("0", "missing", "absent", "unbounded")
    said = (smi.why("nvidia-smi") if smi.status == "timeout" else first(smi.lines)) if failed else ""
    library = _NVML.search(smi.text)
    why = "no driver is loaded" if loaded is False else smi.why("nvidia-smi")
    nodes = reader.lines("nodes")
    return Driver(
        loaded=loaded,
        version=reader.or_unknown("driver.version", version, why),
        cuda=reader.or_unknown("driver.cuda", cuda[1] if cuda else None, why),
        kind=_kind(found),
        open=("Open Kernel Module" in nvrm) if nvrm else None,
        library=library[1] if library else None,
        said=said or None,
        uvm=("nvidia_uvm" in modules) if modules else None,
        nodes=tuple(node for node in nodes if re.fullmatch(r"/dev/[\w./-]{1,60}", node)) if loaded else None,
    )


def _kind(gpus: tuple[Gpu, ...] | None) -> Literal["datacenter", "geforce"] | None:
    names = [gpu.name or "" for gpu in gpus or ()]
    if names and all(_GEFORCE.search(name) for name in names):
        return "geforce"
    # The same letters and numbers name workstation cards (RTX A6000, RTX 6000): those are neither.
    if names and all(_DATACENTER.search(name) and "RTX" not in name and "Quadro" not in name for name in names):
        return "datacenter"
    return None


def _rows(reader: Reader) -> list[dict[str, str]]:
    """The GPUs as nvidia-smi's CSV has them, by column; of the narrower question where the wider was not understood."""
    for name in ("smi_gpus", "smi_names"):
        lines = [line for line in reader.lines(name) if "," in line]
        if reader.part(name).status != "0" or not lines:
            continue
        columns = [column.split("[")[0].strip() for column in lines[0].split(",")]
        rows = []
        for line in lines[1:]:
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == len(columns) and columns[0] == "index":
                rows.append({"driver_version": "", **dict(zip(columns, cells, strict=True))})
        if rows:
            return rows
    return []


def gpus(reader: Reader) -> tuple[Gpu, ...] | None:
    found = [gpu for row in _rows(reader) if (gpu := _gpu(row)) is not None]
    if found:
        if any(gpu.capability is None for gpu in found):
            reader.unknown["gpus.capability"] = "this nvidia-smi does not tell it"
        return tuple(found)
    smi = reader.part("smi_gpus")
    if "No devices were found" in smi.text or "No devices found" in smi.text:
        return ()
    # Without a tool to ask, the bus tells that there is none.
    bus = reader.lines("pci")
    if "bus" in bus and not any(line.startswith("gpu ") for line in bus) and not reader.lines("nodes"):
        return ()
    reader.unknown["gpus"] = smi.why("nvidia-smi")
    return None


def _gpu(row: Mapping[str, str]) -> Gpu | None:
    if not re.fullmatch(r"[0-9]{1,4}", row["index"]):
        return None
    capability = row.get("compute_cap", "")
    on = {"enabled": True, "disabled": False}
    mig = {"enabled": "on", "disabled": "off"}.get(row.get("mig.mode.current", "").lower())
    bus = row.get("pci.bus_id", "")
    return Gpu(
        index=int(row["index"]),
        name=row.get("name", "")[:100] or None,
        capability=capability if _CAPABILITY.fullmatch(capability) else None,
        memory=_mebibytes(row.get("memory.total", "")),
        mig=mig,
        bus=bus if re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", bus) else None,
        persistence=on.get(row.get("persistence_mode", "").lower()),
        used=_mebibytes(row.get("memory.used", "")),
    )


def _mebibytes(text: str) -> int | None:
    match = re.fullmatch(r"([0-9]{1,9}) MiB", text)
    return int(match[1]) << 20 if match else None
