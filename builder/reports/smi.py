"""What nvidia-smi prints: its header, `-L`, `--query-gpu` as CSV, and the topology tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from builder.reports import forms
from builder.reports.lines import Line
from builder.reports.model import Fact

SOURCE = "nvidia-smi"

_HEADER = re.compile(r"NVIDIA-SMI\s+(\S{1,20}).{0,60}?Driver Version:\s*(\S{1,20}).{0,60}?CUDA Version:\s*(\S{1,12})")
_LISTED = re.compile(r"^\s*GPU (\d{1,3}): (.{3,80}?) \(UUID: ")
_ROW = re.compile(r"^\|\s{1,4}(\d{1,3})\s{1,4}(.{3,60}?)\s{2,}(?:On|Off|N/A|\S{1,12})\s*\|")
_TOPOLOGY = re.compile(r"^\s*(GPU\d{1,2})\s+((?:(?:X|SYS|NODE|PHB|PXB|PIX|NV\d{1,3}|OK|NS|CNS|GNS|TNS|U)\s*){1,64})")
_QUERY = re.compile(r"^\s*([^,]{3,80}?)\s*,\s*(\d{1,2}\.\d)\s*(?:,\s*(\d{3}\.\d{1,3}(?:\.\d{1,3})?))?\s*(?:,|$)")


def smi(lines: Sequence[Line]) -> Iterator[Fact]:
    """Driver, the CUDA that it knows, GPUs, and how these are joined (`topology`: `nvlink` or `pcie`; `gpu_count`)."""
    links: set[str] = set()
    joined: set[str] = set()
    first, row = 0, 0
    for line in lines:
        text = line.text
        if found := _HEADER.search(text):
            if driver := forms.driver(found[2]):
                yield Fact("driver", driver, line=line.number, source=SOURCE)
            if cuda := forms.cuda(found[3]):
                yield Fact("driver_cuda", cuda, line=line.number, source=SOURCE)
        elif found := _LISTED.match(text):
            if name := forms.gpu(found[2]):
                yield Fact(f"gpu.{int(found[1])}", name, line=line.number, source=SOURCE)
        elif found := _QUERY.match(text):
            name, capability = forms.gpu(found[1]), forms.capability(found[2])
            if name and capability:
                yield Fact(f"gpu.{row}", name, line=line.number, source=SOURCE)
                yield Fact(f"capability.{row}", capability, line=line.number, source=SOURCE)
                row += 1
                if found[3]:
                    yield Fact("driver", found[3], line=line.number, source=SOURCE)
        elif found := _ROW.match(text):
            # The table cuts long names: one that it cut decides nothing, and is left out.
            name = None if forms.gpu_cut(found[2]) else forms.gpu(found[2])
            if name:
                yield Fact(f"gpu.{int(found[1])}", name, line=line.number, source=SOURCE)
        elif found := _TOPOLOGY.match(text):
            first = first or line.number
            joined.add(found[1])
            links |= set(re.findall(r"SYS|NODE|PHB|PXB|PIX|NV\d+", found[2]))
    if links:
        nvlink = any(link.startswith("NV") for link in links)
        yield Fact("topology", "nvlink" if nvlink else "pcie", line=first, source=SOURCE)
        yield Fact("gpu_count", str(len(joined)), line=first, source=SOURCE)
