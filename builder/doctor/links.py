"""How GPUs reach each other, and which libcuda answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from builder.doctor.facts import Compat, CompatLibrary, Fabric, Pcie
from builder.doctor.transcript import Reader, first

_LIBCUDA = re.compile(r"libcuda\.so\.([1-9]\d{2}\.\d{1,4}(?:\.\d{1,4})?)", re.ASCII)


def pcie(reader: Reader) -> Pcie:
    gpus = [line.split() for line in reader.lines("pci") if line.startswith("gpu ")]
    fields = [dict(word.split("=", 1) for word in words[2:] if "=" in word) for words in gpus]
    bus = "bus" in reader.lines("pci")
    iommu = _iommu([field.get("group", "") for field in fields], reader.lines("cmdline"))
    if iommu is None:
        reader.unknown["pcie.iommu"] = "no GPU on the PCI bus" if bus and not gpus else "/sys does not say"
    topology = _topology(reader.lines("smi_topo"))
    p2p = _p2p(reader.lines("smi_p2p")) or _peers(reader.lines("cuinit"))
    several = len([line for line in reader.lines("smi_topo") if re.match(r"GPU\d+\s", line)]) > 1
    if several and p2p is None:
        reader.unknown["pcie.p2p"] = reader.part("smi_p2p").why("nvidia-smi topo -p2p r")
    return Pcie(
        iommu=iommu,
        acs=_acs(reader, [field.get("chain", "") for field in fields]),
        p2p=p2p,
        topology=topology,
        devices=len(gpus) if bus else None,
        bound=tuple(sorted({field.get("driver", "-") for field in fields} - {"-"})),
    )


def _iommu(groups: Sequence[str], words: Sequence[str]) -> Literal["on", "off", "passthrough"] | None:
    if not groups:
        return None
    if any(group.startswith("DMA") for group in groups):
        return "on"
    if all(group == "identity" for group in groups):
        return "passthrough"
    if all(group == "-" for group in groups):
        return "off"
    # An older kernel has no `type`.
    if "iommu=pt" in words:
        return "passthrough"
    return None


def _acs(reader: Reader, chains: Sequence[str]) -> bool | None:
    """Whether a bridge above a GPU redirects what GPUs send each other: `ReqRedir+` or `CmpltRedir+` in its ACSCtl."""
    part = reader.part("acs")
    bridges = {name for chain in chains for name in chain.split("/")[:-1] if re.fullmatch(r"[0-9a-f:.]{7,16}", name)}
    if not bridges:
        reader.unknown["pcie.acs"] = "no bridge above a GPU is known"
        return None
    if part.status in ("missing", "timeout", "unbounded", "absent") or "not found" in part.text:
        reader.unknown["pcie.acs"] = "`lspci` is not installed" if "not found" in part.text else part.why("lspci")
        return None
    current, seen, hidden = "", False, False
    for line in part.lines:
        if head := re.match(r"([0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", line):
            current = head[0] if head[1] else f"0000:{head[0]}"
        elif current in bridges and "ACSCtl:" in line:
            seen = True
            if "ReqRedir+" in line or "CmpltRedir+" in line:
                return True
        elif current in bridges and "access denied" in line:
            hidden = True
    if hidden:
        reader.unknown["pcie.acs"] = "`lspci` shows it to root alone"
    elif not seen:
        reader.unknown["pcie.acs"] = "`lspci` shows no ACSCtl of the bridges above the GPUs"
    return False if seen and not hidden else None


def _table(lines: Sequence[str]) -> list[list[str]]:
    """The rows of a table of nvidia-smi's, `GPU0 X OK`, cells of GPUs alone, without what underlines the head."""
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    heads = [re.findall(r"\bGPU\d+\b", line) for line in plain if re.match(r"\s+GPU\d", line)]
    if not heads:
        return []
    width = len(heads[0])
    rows = [line.split()[1 : 1 + width] for line in plain if re.match(r"\s?GPU\d+\s", line) and line.lstrip() == line]
    return [row for row in rows if len(row) == width]


def _topology(lines: Sequence[str]) -> Literal["nvlink", "pcie", "mixed"] | None:
    cells = {cell for row in _table(lines) for cell in row if cell != "X"}
    if not cells or not all(re.fullmatch(r"NV\d+|SYS|NODE|PHB|PXB|PIX", cell) for cell in cells):
        return None
    linked = {cell.startswith("NV") for cell in cells}
    return "mixed" if len(linked) > 1 else "nvlink" if linked == {True} else "pcie"


def _p2p(lines: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    rows = _table([re.sub(r"^ (GPU\d+\s)", r"\1", line) if "\t" in line else line for line in lines])
    if len(rows) < 2 or not all(re.fullmatch(r"X|OK|[CGT]?NS|U|DR", cell) for row in rows for cell in row):
        return None
    return tuple(tuple(row) for row in rows)


def _peers(lines: Sequence[str]) -> tuple[tuple[str, ...], ...] | None:
    """The same from the driver itself, where python3 could ask it."""
    count = next((int(m[1]) for line in lines if (m := re.fullmatch(r"devices ([0-9]{1,2})", line))), 0)
    found = {
        (int(m[1]), int(m[2])): m[3] for line in lines if (m := re.fullmatch(r"peer (\d{1,2}) (\d{1,2}) ([01])", line))
    }
    if count < 2 or len(found) != count * (count - 1):
        return None
    word = {"1": "OK", "0": "NS"}
    rows = range(count)
    return tuple(tuple("X" if i == j else word[found.get((i, j), "0")] for j in rows) for i in rows)


def fabric(reader: Reader) -> Fabric:
    nodes, bus = reader.lines("nodes"), reader.lines("pci")
    switch: bool | None = None
    if any("nvidia-nvswitch" in node for node in nodes) or any(line.startswith("switch ") for line in bus):
        switch = True
    elif "bus" in bus:
        switch = False
    service = " ".join(reader.lines("fabric_service")[:1])
    manager: Literal["running", "absent", "failed"] | None = None
    if "running" in reader.lines("fabric_process") or service == "active":
        manager = "running"
    elif service == "failed":
        manager = "failed"
    elif service in ("inactive", "unknown", "activating") or "could not be found" in service:
        manager = "absent"
    # Newer drivers tell how far a GPU got with the fabric: the only sign in a virtual machine, whose host runs the service.
    states = {line.split(",")[1].strip() for line in reader.lines("smi_fabric")[1:] if line.count(",") == 2}
    if switch and manager in (None, "absent") and states == {"Completed"}:
        manager = "running"
    if switch is None:
        reader.unknown["fabric.nvswitch"] = "/sys does not show the PCI bus"
    if switch and manager is None:
        reader.unknown["fabric.fabricmanager"] = reader.part("fabric_service").why("systemctl")
    return Fabric(nvswitch=switch, fabricmanager=manager)


def compat(reader: Reader) -> Compat:
    lines = reader.lines("compat")
    paths = [line.removeprefix("library ") for line in lines if line.startswith("library ")]
    libraries = tuple(
        CompatLibrary(path=path[:200], version=m[1] if (m := _LIBCUDA.search(path)) else None) for path in paths
    )
    listed = " ".join(reader.lines("libcuda"))
    on_path: bool | None = None
    if "about" in reader.found:
        on_path = any(line.startswith("path ") for line in lines) or "/compat/" in listed
    said = reader.part("cuinit")
    answer = next((m for line in said.lines if (m := re.fullmatch(r"cuinit ([0-9]{1,4}) ([0-9]{1,6})", line))), None)
    number = int(answer[2]) if answer else 0
    cuda = f"{number // 1000}.{number % 1000 // 10}" if 10_000 <= number < 100_000 else None
    if answer is None:
        last = next((line for line in reversed(said.lines) if line.strip()), "")
        reader.unknown["compat.error"] = f"the driver was not asked: {first([last])}" if last else said.why("python3")
    return Compat(
        libraries=libraries if "compat" in reader.found else None,
        on_loader_path=on_path,
        cuda_driver_loaded=cuda,
        error=int(answer[1]) or None if answer else None,
    )
