"""Rules on the GPUs: whether there are any, what runs on them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from builder.doctor import hints
from builder.doctor.driver_rules import minimum
from builder.doctor.facts import Gpu, HostFacts
from builder.doctor.hints import listed
from builder.doctor.needs import Needs
from builder.facts import GpuFact, load_facts
from builder.files import pretty_size
from builder.findings import Finding, Severity

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

IN_USE = 1 << 30
"""Bytes of GPU memory in use from which on it is mentioned: a driver and a desktop need less."""


def gpu_absent(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """A host without a GPU, or with one that no driver has."""
    if facts.gpus:
        return
    bus = facts.pcie.devices
    if facts.driver.loaded and facts.gpus == ():
        message = "the driver is loaded and shows no GPU"
        because = "`nvidia-smi` lists none" + (f", and there are {bus} on the PCI bus" if bus else "")
        hint = "see `dmesg | grep -i nvrm`; GPUs from Blackwell on need the driver's open kernel modules"
        if facts.driver.open is False:
            hint = f"take the open kernel modules, which GPUs from Blackwell on need: {hints.install(facts.os, 'nvidia-open', 'them')}"
        source = "NVIDIA's driver, README: open kernel modules"
    elif bus and not facts.driver.loaded:
        message = (
            f"there {'are' if bus > 1 else 'is'} {_count(bus, 'GPU')} of NVIDIA, and no driver of NVIDIA's is loaded"
        )
        because, source = "/proc/driver/nvidia is not there", "/sys/bus/pci of the host"
        hint = hints.driver(facts.os, minimum(facts, needs))
        if facts.pcie.bound:
            because = f"the kernel's driver for it is `{facts.pcie.bound[0]}`"
        if "vfio-pci" in facts.pcie.bound:
            because += ", which hands it to a virtual machine"
    elif facts.gpus == ():
        message, source = "this host has no GPU of NVIDIA", "/sys/bus/pci and /dev of the host"
        because = "there is none on the PCI bus and no /dev/nvidia*"
        if facts.os.container:
            because += "; the host is itself a container, which sees GPUs only if they are given to it"
        hint = "run it where there is one: `builder doctor --host ssh://HOST`, or `--facts FILE` of one"
    elif facts.driver.loaded is False:
        message, source = "no driver of NVIDIA's is loaded", "/proc/driver/nvidia of the host"
        because = "/proc/driver/nvidia is not there; whether there is a GPU is not known"
        hint = hints.driver(facts.os, minimum(facts, needs))
    else:
        return
    yield Finding(
        rule="gpu-absent", severity=ERROR, subject="gpus", message=message, because=because, hint=hint, source=source
    )


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def gpu_code(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """GPUs that the stack has no code for, or was not made for."""
    if needs is None or not facts.gpus or not needs.gpus:
        return
    kinds: dict[str, list[Gpu]] = {}
    for gpu in facts.gpus:
        if gpu.capability is not None:
            kinds.setdefault(gpu.capability, []).append(gpu)
    known = {fact.capability for fact in load_facts(GpuFact)}
    good = [gpu for capability, gpus in kinds.items() if _runs(capability, needs) for gpu in gpus]
    for capability, gpus in kinds.items():
        if _runs(capability, needs):
            continue
        which = f"GPU {listed([str(gpu.index) for gpu in gpus], 8)} ({gpus[0].name or 'unnamed'}, {capability})"
        rest = "take a stack that is made for it: `builder doctor` lists those that this host runs"
        if good:
            rest = f"leave it out: `--gpus device={','.join(str(gpu.index) for gpu in good)}`"
        made = f"{needs.subject} is made for {listed(list(needs.gpus))}"
        if files := needs.lacking.get(capability):
            yield Finding(
                rule="gpu-code",
                severity=WARNING if good else ERROR,
                subject=capability,
                message=f"{needs.subject} has no code for {which}",
                because=f"{listed([f'`{file}`' for file in files], 2)} {'have' if len(files) > 1 else 'has'} none; {made}",
                hint=rest,
                source=f"the GPU images in {listed(list(needs.looked_at))}, by the rules of docs/arch.md",
                evidence={"files": list(files), "gpus": [gpu.index for gpu in gpus]},
            )
            continue
        clean = capability in needs.lacking and not needs.not_looked_at
        because = f"{made}, and proven for nothing else"
        if clean:
            because += f"; {listed(list(needs.looked_at))} have code for it, of everything else that is not known"
        elif needs.not_looked_at:
            because += f"; what code {listed(list(needs.not_looked_at))} have was not looked at"
        yield Finding(
            rule="gpu-target",
            severity=WARNING,
            subject=capability,
            message=f"{which} is none of the GPUs that {needs.subject} is made for",
            because=because,
            hint=rest
            if good or capability not in known
            else f"add {capability} to `gpus` of a matrix of your own, and build it",
            source="`gpus` of the matrix",
            evidence={"decides": not good, "gpus": [gpu.index for gpu in gpus]},
        )


def _runs(capability: str, needs: Needs) -> bool:
    return capability in needs.gpus and not needs.lacking.get(capability)


def mixed(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """GPUs of several kinds: one server over all of them is only as large as the smallest."""
    gpus = facts.gpus or ()
    kinds = list(dict.fromkeys((gpu.name, gpu.capability) for gpu in gpus))
    if len(kinds) < 2:
        return
    shown = [f"{name or 'unnamed'} ({capability or 'capability unknown'})" for name, capability in kinds]
    yield Finding(
        rule="mixed-gpus",
        severity=WARNING,
        subject="gpus",
        message=f"the host has GPUs of {len(kinds)} kinds: {listed(shown)}",
        because="tensor parallelism wants GPUs of one kind: each rank gets the same share, and kernels are chosen by one of them",
        hint=f"name those of one kind: `--gpus device={','.join(str(gpu.index) for gpu in _of_kind(gpus, kinds, needs))}`",
        source="sglang reads the capability of one device; `--gpus` of docker",
    )


def _of_kind(gpus: Sequence[Gpu], kinds: Sequence[tuple[str | None, str | None]], needs: Needs | None) -> list[Gpu]:
    fits = [kind for kind in kinds if needs is None or kind[1] in needs.gpus] or list(kinds)
    return [gpu for gpu in gpus if (gpu.name, gpu.capability) == fits[0]]


def mig(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """MIG: a GPU in parts, each of which is alone."""
    on = [gpu for gpu in facts.gpus or () if gpu.mig == "on"]
    if not on:
        return
    indexes = ",".join(str(gpu.index) for gpu in on)
    yield Finding(
        rule="mig",
        severity=WARNING,
        subject="gpus",
        message=f"MIG is on for GPU {listed([str(gpu.index) for gpu in on], 8)}",
        because="a process sees one part, with that part's memory, and parts have no peer access: tensor parallelism over them does "
        "not work",
        hint=f"give one part: `--gpus device=MIG-UUID` (`nvidia-smi -L`); or, with the GPU idle, `nvidia-smi -i {indexes} -mig 0`",
        source="NVIDIA, MIG User Guide: no GPU-to-GPU P2P, one instance a process",
    )


def in_use(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """Memory of GPUs that somebody else has."""
    busy = [gpu for gpu in facts.gpus or () if (gpu.used or 0) >= IN_USE]
    if not busy:
        return
    shown = [
        f"GPU {gpu.index}: {pretty_size(gpu.used or 0)}" + (f" of {pretty_size(gpu.memory)}" if gpu.memory else "")
        for gpu in busy
    ]
    yield Finding(
        rule="gpu-in-use",
        severity=NOTE,
        subject="gpus",
        message=f"GPU memory is in use ({listed(shown)})",
        because="a server takes its share of what is free when it starts (`--mem-fraction-static`)",
        hint="`nvidia-smi` shows whose it is; other GPUs: `--gpus device=…`",
        source="nvidia-smi of the host",
    )


def persistence(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """Persistence mode that is off: the driver is set up anew for the first user."""
    off = [gpu for gpu in facts.gpus or () if gpu.persistence is False]
    if not off or facts.os.wsl:
        return
    yield Finding(
        rule="persistence",
        severity=NOTE,
        subject="gpus",
        message="persistence mode is off",
        because="with nothing running the driver leaves the GPUs, and the next start waits for it",
        hint="`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1` until the next restart",
        source="NVIDIA, Driver Persistence",
    )


def wsl(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """WSL: what is another machine there."""
    if facts.os.wsl and facts.gpus != ():
        yield Finding(
            rule="wsl",
            severity=NOTE,
            subject="os",
            message="the host is WSL",
            because="the driver and its number are Windows'; there is no peer access between GPUs, and pinned memory is limited",
            hint="never install a Linux driver in it; for several GPUs, `--nccl-p2p off` and `--disable-custom-all-reduce`",
            source="NVIDIA, CUDA on WSL User Guide; case 115",
        )


RULES = (
    gpu_absent,
    gpu_code,
    mixed,
    mig,
    in_use,
    persistence,
    wsl,
)
