"""Rules on how GPUs reach each other: NVSwitch's service, peer access, what redirects it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from builder.doctor import hints
from builder.doctor.facts import HostFacts
from builder.doctor.hints import listed
from builder.doctor.needs import Needs
from builder.findings import Finding, Severity

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

_NO_PEERS = re.compile(r"GeForce RTX [45]0[0-9]0", re.ASCII)
"""Cards without peer access over PCIe, and without NVLink (case 112)."""

OFF = "`builder run --nccl-p2p off`, and `--disable-custom-all-reduce` for the server"


def fabric_manager(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """NVSwitch without its service: CUDA does not start at all."""
    if facts.fabric.nvswitch and facts.fabric.fabricmanager in ("absent", "failed"):
        state = "has failed" if facts.fabric.fabricmanager == "failed" else "does not run"
        yield Finding(
            rule="fabric-manager",
            severity=ERROR,
            subject="fabric",
            message=f"the host has NVSwitch, and the fabric manager {state}",
            because="CUDA fails then with error 802, `system not yet initialized`",
            hint=hints.fabric(facts.os, facts.driver.version),
            source="NVIDIA, Fabric Manager User Guide; case 068",
        )


def _pairs(facts: HostFacts) -> list[str]:
    """Pairs of GPUs without peer access, as nvidia-smi or the driver tells."""
    table = facts.pcie.p2p or ()
    return [
        f"{i}-{j}" for i, row in enumerate(table) for j, cell in enumerate(row) if i < j and cell not in ("OK", "X")
    ]


def _without(facts: HostFacts) -> str:
    """Why there is no peer access, where that is known."""
    if pairs := _pairs(facts):
        return f"the driver says so of GPUs {listed(pairs)}"
    if facts.pcie.p2p is None and facts.os.wsl:
        return "WSL has none"
    names = [gpu.name or "" for gpu in facts.gpus or ()]
    if facts.pcie.p2p is None and all(_NO_PEERS.search(name) for name in names):
        return "NVIDIA's driver gives GeForce cards of the 40 and 50 series none"
    return ""


def no_peer_access(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """Several GPUs that do not reach each other."""
    if len(facts.gpus or ()) < 2:
        return
    because = _without(facts)
    if not because:
        return
    options = ", ".join(f"`{option}`" for option in (needs.p2p if needs else ()))
    more = f"; what the stack has for it ({options}) stays off" if options else ""
    yield Finding(
        rule="no-peer-access",
        severity=WARNING,
        subject="pcie",
        message="the GPUs have no peer access to each other",
        because=f"{because}: custom all-reduce and symmetric memory fail or crash, NCCL goes through host memory{more}",
        hint=OFF,
        source="nvidia-smi topo -p2p r; cases 112 and 115",
    )


def redirected(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """Peer access over PCIe where the IOMMU or ACS redirects it: seen to hang."""
    if len(facts.gpus or ()) < 2 or facts.pcie.topology == "nvlink" or _without(facts):
        return
    causes = []
    if facts.pcie.iommu == "on":
        causes.append("the IOMMU translates what GPUs send each other")
    if facts.pcie.acs:
        causes.append("ACS of a bridge above a GPU redirects it to the root (`ReqRedir+` or `CmpltRedir+`)")
    if causes:
        yield Finding(
            rule="p2p-redirected",
            severity=WARNING,
            subject="pcie",
            message="peer access over PCIe may hang: the first all-reduce was seen to on such hosts",
            because=" and ".join(causes),
            hint=f"{OFF}; on the host `iommu=pt` on the kernel's command line, ACS off in the BIOS or with `setpci`",
            source="case 110 (NVIDIA/nccl#1999, #2079); docs/launch.md",
            evidence={"iommu": facts.pcie.iommu, "acs": facts.pcie.acs},
        )
    elif facts.pcie.iommu is None and facts.pcie.acs is None and facts.pcie.topology != "mixed":
        why = facts.why_unknown("pcie.iommu") or facts.why_unknown("pcie.acs")
        yield Finding(
            rule="p2p-not-known",
            severity=NOTE,
            subject="pcie",
            message=f"whether {len(facts.gpus or ())} GPUs reach each other is not known",
            because=f"IOMMU and ACS: {why or 'the facts do not say'}; where they redirect peer traffic the first all-reduce hangs",
            hint=f"if it hangs: {OFF}",
            source="cases 110 and 117",
        )


RULES = (fabric_manager, no_peer_access, redirected)
