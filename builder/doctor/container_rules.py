"""Rules on what runs containers: engine, toolkit, CDI, disk, shared memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from builder.doctor import hints
from builder.doctor.facts import HostFacts
from builder.doctor.hints import listed
from builder.doctor.needs import Needs
from builder.files import pretty_size
from builder.findings import Finding, Severity

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

SMALL_SHM = 1 << 30
"""Bytes of /dev/shm below which NCCL's segments of several ranks do not fit for certain (case 101: 64 MB do not)."""

_MACHINES = {"linux/amd64": ("x86_64", "amd64"), "linux/arm64": ("aarch64", "arm64")}


def has_runtime(facts: HostFacts) -> bool:
    """Whether the engine itself lists NVIDIA: a runtime, or CDI devices."""
    engine = facts.engine
    return engine is not None and (any("nvidia" in name for name in engine.runtimes or ()) or bool(engine.cdi))


def engine_is_absent(facts: HostFacts) -> str | None:
    """The reason why there is no engine, where that is a fact and no gap."""
    reason = facts.why_unknown("engine")
    return reason if facts.engine is None and reason.endswith("nor `podman` is installed") else None


def platform(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """A host of another processor architecture."""
    if needs is None or needs.platform is None or facts.os.arch is None:
        return
    fits = _MACHINES.get(needs.platform, ())
    if fits and facts.os.arch not in fits:
        yield Finding(
            rule="platform",
            severity=ERROR,
            subject="os",
            message=f"the host is {facts.os.arch}, {needs.subject} is for {needs.platform}",
            because="its files are of another processor",
            hint=f"take a host with {fits[0]}",
            source="platform of the image",
        )


def engine(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """No engine."""
    if reason := engine_is_absent(facts):
        yield Finding(
            rule="engine-absent",
            severity=ERROR,
            subject="engine",
            message="there is no container engine",
            because=reason,
            hint=hints.engine(facts.os),
            source="the PATH of the host",
        )
    elif facts.engine is None and "permission denied" in facts.why_unknown("engine").lower():
        yield Finding(
            rule="engine-refuses",
            severity=WARNING,
            subject="engine",
            message="the engine does not let this user in",
            because=facts.why_unknown("engine"),
            hint="as root, or as a member of the group `docker`: `usermod -aG docker USER`, then log in again",
            source="docker of the host",
            evidence={"decides": True},
        )


def toolkit(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """NVIDIA's container toolkit: there, and known to the engine."""
    engine = facts.engine
    if not facts.gpus or engine is None:
        return
    specs = [spec for spec in facts.toolkit.cdi_specs or () if spec.devices or spec.driver]
    if engine.kind == "podman":
        if facts.toolkit.cdi_specs == () and not has_runtime(facts):
            lacks = facts.toolkit.installed is False
            yield Finding(
                rule="cdi-absent",
                severity=ERROR,
                subject="toolkit",
                message="Podman finds no GPU: there is no CDI file of NVIDIA's",
                because="/etc/cdi and /var/run/cdi have none: `unresolvable CDI devices nvidia.com/gpu=all`",
                hint=hints.toolkit(facts.os, engine) if lacks else hints.configure(engine),
                source="NVIDIA container toolkit, CDI; case 106",
            )
        return
    if has_runtime(facts):
        return
    if facts.toolkit.installed is False and not specs:
        yield Finding(
            rule="toolkit-absent",
            severity=ERROR,
            subject="toolkit",
            message="NVIDIA's container toolkit is not installed: no container gets a GPU",
            because="`--gpus` fails with `could not select device driver`",
            hint=hints.toolkit(facts.os, engine),
            source="the PATH of the host; runtimes and devices of the engine",
        )
    elif facts.toolkit.installed:
        yield Finding(
            rule="toolkit-not-configured",
            severity=WARNING,
            subject="toolkit",
            message="the engine lists no runtime and no device of NVIDIA's",
            because="`--gpus` works only if the engine was started after the toolkit was installed",
            hint=hints.configure(engine),
            source="runtimes and devices of the engine",
        )


def cdi_stale(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """CDI files of another driver, or with devices that are gone."""
    engine = facts.engine
    used = engine is None or engine.kind == "podman" or bool(engine.cdi) or facts.toolkit.mode == "cdi"
    for spec in facts.toolkit.cdi_specs or ():
        other = spec.driver and facts.driver.version and spec.driver != facts.driver.version
        if not other and not spec.missing:
            continue
        because = []
        if other:
            because.append(f"it is of driver {spec.driver}, loaded is {facts.driver.version}")
        if spec.missing:
            named = listed([f"`{name}`" for name in spec.missing], 3)
            because.append(f"{named} {'are' if len(spec.missing) > 1 else 'is'} not there")
        yield Finding(
            rule="cdi-stale",
            severity=ERROR if used else WARNING,
            subject=spec.file,
            message=f"`{spec.file}` is out of date",
            because="; ".join(because) + ("" if used else "; the engine uses it only if a device is asked for by CDI"),
            hint=f"`nvidia-ctk cdi generate --output={spec.file}`, after every change of the driver or the GPUs",
            source="NVIDIA container toolkit, CDI; case 106",
        )


def rootless(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """An engine without root: what it may not do."""
    engine = facts.engine
    if engine is None or not engine.rootless or not facts.gpus:
        return
    if engine.kind == "docker" and not engine.cdi:
        yield Finding(
            rule="rootless",
            severity=WARNING,
            subject="engine",
            message="the engine runs without root",
            because="the toolkit may then not set device rules of cgroups, and refuses unless it is told not to",
            hint="`nvidia-ctk config --set nvidia-container-cli.no-cgroups --in-place` as root",
            source="NVIDIA container toolkit, installation guide, rootless mode",
        )


def memlock(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """An engine that may not raise limits, and a limit that `builder run` asks it to raise."""
    engine = facts.engine
    if engine is None or not facts.gpus or facts.ulimits.memlock in (None, "unlimited"):
        return
    if engine.rootless:
        because = "an engine without root cannot raise it"
        hint = "`* - memlock unlimited` in /etc/security/limits.d/memlock.conf, then log in again"
    elif facts.os.container:
        because = "this host is itself a container, whose engine can raise it only with the capability SYS_RESOURCE"
        hint = "start the outer container with `--ulimit memlock=-1:-1`; at a provider, ask for it"
    else:
        return
    yield Finding(
        rule="memlock",
        severity=NOTE,
        subject="ulimits",
        message=f"locked memory is limited to {pretty_size(int(facts.ulimits.memlock or 0))}",
        because=f"{because}, and `builder run` asks for `--ulimit memlock=-1`",
        hint=hint,
        source="docs/launch.md, the flags of the container",
    )


def selinux(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """SELinux keeps Podman's containers from the devices."""
    engine = facts.engine
    if facts.os.selinux == "enforcing" and engine is not None and engine.kind == "podman" and facts.gpus:
        yield Finding(
            rule="selinux",
            severity=NOTE,
            subject="os",
            message="SELinux is enforcing",
            because="it denies containers the GPU's device files unless a policy allows it",
            hint="`--security-opt=label=disable`, or `setsebool -P container_use_devices true`",
            source="NVIDIA container toolkit, CDI; case 106",
        )


def devices(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """Device files that a container is given."""
    nodes = facts.driver.nodes
    if not facts.gpus or nodes is None or facts.os.wsl or facts.os.container:
        return
    lacking = [node for node in ("/dev/nvidiactl", "/dev/nvidia-uvm") if node not in nodes]
    if not lacking and facts.driver.uvm is not False:
        return
    what = f"{listed([f'`{node}`' for node in lacking])} {'are' if len(lacking) > 1 else 'is'} not there"
    yield Finding(
        rule="devices",
        severity=WARNING if facts.engine is None or facts.engine.kind == "podman" or facts.engine.cdi else NOTE,
        subject="driver",
        message=what if lacking else "the module nvidia-uvm is not loaded",
        because="CUDA needs them; the toolkit's own runtime loads what lacks, CDI does not",
        hint="`nvidia-modprobe -c 0 -u`, in a service that runs at every start",
        source="NVIDIA container toolkit, load-kmods",
    )


def disk(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """Room for the pull, and for what it becomes."""
    free = facts.disk.data_root_free
    if needs is None or needs.unpacked is None or free is None or (engine_is_absent(facts) and facts.engine is None):
        return
    if needs.lock is not None and any(image.lock == needs.lock for image in facts.present.images or ()):
        return
    containerd = facts.engine is not None and facts.engine.store == "containerd"
    peak = needs.unpacked + (needs.compressed or 0)
    if free >= peak:
        return
    place = facts.engine.data_root if facts.engine is not None and facts.engine.data_root else "the engine's folder"
    about = "about " if needs.estimated else ""
    parts = f"{about}{pretty_size(needs.unpacked)} unpacked and {about}{pretty_size(needs.compressed or 0)} compressed"
    keeps = (
        "the containerd store keeps both" if containerd else "the classic store needs both until a layer is unpacked"
    )
    yield Finding(
        rule="disk",
        severity=ERROR if containerd or free < needs.unpacked else WARNING,
        subject="disk",
        message=f"{pretty_size(free)} are free in {place}, a pull of {needs.subject} takes {about}{pretty_size(peak)}",
        because=f"it has {parts}, and {keeps}; what the host has of it already is not counted",
        hint="`docker system df`, then `docker image prune`; `builder prune` frees what is ours"
        if facts.engine is None or facts.engine.kind == "docker"
        else "`podman system df`, then `podman image prune`",
        source="df of the host; facts/engine.md; builder/facts/unpacked.yaml",
        evidence={"free": free, "needed": peak, "unpacked": needs.unpacked, "decides": free >= needs.unpacked},
    )


def shm(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """Shared memory: NCCL needs more than a container gets by default."""
    default, host = facts.shm.container_default, facts.shm.host
    if len(facts.gpus or ()) < 2:
        return
    if host is not None and host < SMALL_SHM:
        yield Finding(
            rule="shm",
            severity=WARNING,
            subject="shm",
            message=f"the host's /dev/shm has {hints.mebibytes(host)}",
            because="`--ipc host` gives a container that, and NCCL's segments of several ranks do not fit",
            hint="`mount -o remount,size=16G /dev/shm`; or `builder run --ipc private --shm-size 16g`",
            source="case 101",
        )
    if default is not None and default < SMALL_SHM:
        yield Finding(
            rule="shm",
            severity=NOTE,
            subject="shm",
            message=f"a container's /dev/shm has {hints.mebibytes(default)} unless more is asked for",
            because="from two ranks on NCCL cannot create its segments in it: `No space left on device`",
            hint="`builder run` gives `--ipc host`; with docker alone `--ipc host` or `--shm-size 16g`",
            source="case 101",
        )


RULES = (platform, engine, toolkit, cdi_stale, rootless, memlock, selinux, devices, disk, shm)
