"""Rules on the driver: its version, its libraries, what an image asks of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from builder.doctor import hints
from builder.doctor.facts import HostFacts
from builder.doctor.needs import Needs
from builder.doctor.requirement import holds, same_major
from builder.driver import DriverNeeds, at_least, contradicts, judge_driver, number, own_driver, reported_cuda
from builder.facts import DriverMajorFact, load_facts
from builder.findings import Finding, Severity

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def asked_of(facts: HostFacts, needs: Needs | None) -> DriverNeeds | None:
    capabilities = [gpu.capability for gpu in facts.gpus or () if gpu.capability]
    return needs.driver_for(capabilities) if needs is not None else None


def minimum(facts: HostFacts, needs: Needs | None) -> str:
    """The driver to install: what the stack asks for on these GPUs; without a stack the oldest that runs the newest CUDA major."""
    wanted = asked_of(facts, needs)
    if wanted is not None:
        return wanted.minimum_driver
    return str(max(load_facts(DriverMajorFact), key=lambda fact: fact.major).driver)


def driver_sick(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """A driver that is loaded and does not answer as it should."""
    driver = facts.driver
    if driver.library and driver.version and driver.library != driver.version:
        yield Finding(
            rule="driver-mismatch",
            severity=ERROR,
            subject="driver",
            message=f"the driver's libraries are {driver.library}, its kernel module is {driver.version}",
            because="it was upgraded and the old module is still loaded: nothing that asks the driver works",
            hint="restart the machine, or unload the modules: `rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia`",
            source="nvidia-smi: Driver/library version mismatch",
        )
    elif driver.said and facts.gpus is None and (driver.loaded or driver.loaded is None):
        hangs = "did not answer in time" in driver.said
        yield Finding(
            rule="driver-sick",
            severity=ERROR,
            subject="driver",
            message="`nvidia-smi` does not answer" if hangs else "`nvidia-smi` fails",
            because=driver.said,
            hint="see `dmesg | grep -iE 'nvrm|xid'`; a GPU that fell off the bus comes back with a restart of the machine",
            source="nvidia-smi of the host",
        )


def driver_too_old(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """A driver that does not run the stack, or runs it by minor-version compatibility."""
    version, wanted = facts.driver.version, asked_of(facts, needs)
    if facts.gpus == () or wanted is None:
        return
    # On WSL the number is that of Windows' driver: the CUDA release that it names counts.
    if version is not None and not facts.os.wsl:
        compat = _compat_cuda(facts)
        for found in judge_driver(wanted, version, compat):
            # A driver that is new enough has another fault: compatibility libraries before its own, which have their own hint.
            if found.severity is NOTE or at_least(version, wanted.minimum_driver):
                yield found
                continue
            usable = found.severity is WARNING and facts.driver.kind != "geforce"
            hint = hints.driver(facts.os, wanted.minimum_driver)
            if "take a stack for" in found.hint:
                hint += "; or take a stack for" + found.hint.partition("take a stack for")[2]
            because = found.because + _refused(facts, needs)
            severity = WARNING if usable else ERROR
            yield found.model_copy(update={"hint": hint, "because": because, "severity": severity})
        return
    asked, has = reported_cuda(wanted.minimum_driver), facts.driver.cuda
    if has is None or asked is None:
        return
    if _pair(has) >= _pair(asked):
        built = ".".join(wanted.cuda.split(".")[:2])
        if _pair(has) < _pair(built):
            yield Finding(
                rule="driver",
                severity=NOTE,
                subject=version or f"CUDA {has}",
                message=f"the driver gives CUDA {has}, and runs CUDA {built} by minor-version compatibility",
                because=f"within a CUDA major an older driver will do, but {wanted.limits}",
                hint="see that no GPU is left to PTX: `builder arch --gpu CC` on the wheels with kernels",
                source=wanted.full_source or wanted.source,
            )
        return
    yield Finding(
        rule="driver",
        severity=ERROR,
        subject=version or f"CUDA {has}",
        message=f"the driver gives CUDA {has}, and CUDA {asked} is needed",
        because=wanted.because + _refused(facts, needs),
        hint=hints.driver(facts.os, wanted.minimum_driver),
        source=wanted.source,
        evidence={"cuda": has, "minimum": wanted.minimum_driver, "driver": version},
    )


def _pair(cuda: str) -> tuple[int, ...]:
    return tuple(map(int, cuda.split(".")))


def _compat_cuda(facts: HostFacts) -> str | None:
    """The CUDA release of compatibility libraries that the loader finds first."""
    if not facts.compat.on_loader_path:
        return None
    found = [lib.version for lib in facts.compat.libraries or () if lib.version]
    return reported_cuda(max(found, key=number)) if found else None


def compat(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """Forward-compatibility libraries where they break a host, and what cuInit's errors mean."""
    driver, found = facts.driver, facts.compat
    versions = [lib.version for lib in found.libraries or () if lib.version]
    first = max(versions, key=number) if versions and found.on_loader_path else None
    shadow = f"forward-compatibility libraries of driver {first} lie before the driver's own" if first else ""
    source = "NVIDIA, CUDA Compatibility, Forward Compatibility; cases 064, 066 and 068"
    remove = "take the `compat` folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d, then `ldconfig`"
    if first and driver.version and at_least(driver.version, first):
        said = needs is not None and needs.driver is not None and not facts.os.wsl
        if said and _compat_cuda(facts):
            return  # `driver` says it
        yield Finding(
            rule="compat",
            severity=ERROR,
            subject="compat",
            message=f"{shadow} ({driver.version}), which is not older",
            because="libcuda and the kernel's driver disagree then: error 803, `system has unsupported display driver / cuda "
            "driver combination`",
            hint=remove,
            source=source,
        )
        return
    if first and driver.kind == "geforce":
        yield Finding(
            rule="compat",
            severity=ERROR,
            subject="compat",
            message=f"{shadow}, and the GPUs are GeForce",
            because="forward compatibility is for data-centre GPUs: error 804, `forward compatibility was attempted on non "
            "supported HW`",
            hint=f"{remove}; {hints.driver(facts.os, minimum(facts, needs))}",
            source=source,
        )
        return
    code = found.error
    if code is None or (code == 802 and facts.fabric.nvswitch and facts.fabric.fabricmanager in ("absent", "failed")):
        return
    because, hint = {
        100: (
            "the driver has no device for it",
            "see that the GPUs are visible: `nvidia-smi -L`, CUDA_VISIBLE_DEVICES",
        ),
        802: (
            "the system is not yet initialised: on a host with NVSwitch the fabric manager has to run",
            hints.fabric(facts.os, driver.version),
        ),
        803: (
            "libcuda and the kernel's driver differ: compatibility libraries are found first, or an upgrade was not finished",
            f"{remove}; or restart the machine",
        ),
        804: (
            "forward-compatibility libraries are used on a GPU that they are not for, or the driver is too old for them",
            f"{remove}; {hints.driver(facts.os, minimum(facts, needs))}",
        ),
    }.get(code, ("see `dmesg | grep -i nvrm`", "`nvidia-modprobe -u -c 0` loads nvidia-uvm, if that is what lacks"))
    yield Finding(
        rule="compat",
        severity=ERROR,
        subject="compat",
        message=f"CUDA does not start on this host: cuInit gives error {code}",
        because=because,
        hint=hint,
        source="NVIDIA, Fabric Manager User Guide; case 068" if code == 802 else source,
    )


def driver_contradicts(facts: HostFacts, _: Needs | None) -> Iterator[Finding]:
    """A CUDA release that the driver's number does not go with."""
    version, says = facts.driver.version, facts.driver.cuda
    if version is None or says is None or facts.os.wsl or (own := contradicts(version, says)) is None:
        return
    yield Finding(
        rule="driver-contradiction",
        severity=WARNING,
        subject="driver",
        message=f"driver {version} is CUDA {own}'s, and CUDA {says} is reported",
        because="forward-compatibility libraries are in use where it was asked, or the numbers are of two machines",
        hint="`nvidia-smi --query-gpu=driver_version --format=csv` on the host, outside of any container",
        source="NVIDIA's release notes, toolkit driver versions; case 074",
    )


def _unmet(facts: HostFacts, needs: Needs | None) -> tuple[str, str | None] | None:
    """What the image asks of the toolkit that does not hold here, and the CUDA release of the driver."""
    if needs is None or not needs.require or facts.gpus == ():
        return None
    driver = facts.driver
    cuda = driver.cuda or (reported_cuda(driver.version) if driver.version and not facts.os.wsl else None)
    known = {"cuda": cuda, "driver": driver.version}
    capabilities = [gpu.capability for gpu in facts.gpus or ()] or [None]
    answers = [holds(needs.require, {**known, "arch": capability}) for capability in capabilities]
    return (needs.require.split()[0], cuda) if False in answers else None


def _refused(facts: HostFacts, needs: Needs | None) -> str:
    unmet = _unmet(facts, needs)
    return f"; the container toolkit refuses to start it as well (`{unmet[0]}`)" if unmet else ""


def requirement(facts: HostFacts, needs: Needs | None) -> Iterator[Finding]:
    """`NVIDIA_REQUIRE_CUDA` of the image: the toolkit starts no container where it does not hold."""
    unmet = _unmet(facts, needs)
    # `driver` says it in passing.
    if unmet is None or needs is None or any(found.severity is ERROR for found in driver_too_old(facts, needs)):
        return
    first, cuda = unmet
    safe = needs.driver is not None and same_major(first, cuda)
    asked = re.fullmatch(r"cuda>=([0-9]{1,2}\.[0-9]{1,2})", first)
    own = own_driver(asked[1]) if asked else None
    hint = hints.driver(facts.os, own.driver) if own else "install a newer driver"
    if safe:
        hint += "; or `--env NVIDIA_DISABLE_REQUIRE=1`: within a CUDA major an older driver runs what is compiled, not newer PTX"
    else:
        hint += "; `NVIDIA_DISABLE_REQUIRE` would only move the failure into the container"
    yield Finding(
        rule="requirement",
        severity=ERROR,
        subject=needs.subject,
        message=f"the toolkit will not start it here: the image asks for `{first}`, the driver gives CUDA {cuda or 'unknown'}",
        because="nvidia-container-cli refuses with `requirement error: unsatisfied condition`",
        hint=hint,
        source="NVIDIA_REQUIRE_CUDA of the image; case 071",
        evidence={"require": needs.require[:400], "cuda": cuda, "driver": facts.driver.version},
    )


RULES = (driver_sick, driver_too_old, compat, driver_contradicts, requirement)
