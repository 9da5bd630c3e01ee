"""A stand-in for NVIDIA's container runtime: what `--gpus` asks for, put into a container's OCI configuration.

It goes before runc, as NVIDIA's does, and gives the containers that ask (`NVIDIA_VISIBLE_DEVICES`) the device nodes, the driver's
libraries and `nvidia-smi`. It is no part of the product, and less than the real one: it does not look at `NVIDIA_REQUIRE_CUDA`,
knows GPUs by number alone, and always gives compute and utility. It also lowers the limits that a container asks for to those that
this machine may give: a machine that is itself a container may not raise them. Standard library only: the engine starts it by path.

Settings by environment: `STAND_IN_RUNC` (the program to go on with), `STAND_IN_DRIVER` (the folder that holds the driver's `lib64`
and `bin`), `STAND_IN_CACHE` (the loader's cache for a container with the driver's libraries: NVIDIA's makes it by `ldconfig`).
"""

from __future__ import annotations

import json
import os
import resource
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HOOK = "nvidia-container-runtime-hook"
"""What the engine looks for before it takes `--gpus`, and adds to such a container."""
LIBRARIES = "/usr/lib/x86_64-linux-gnu"
SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
"""The device nodes that every GPU needs."""


class NoGpuError(Exception):
    """A GPU was asked for that is not there."""


def asked_for(environment: Sequence[str], there: Sequence[str]) -> list[str]:
    """The numbers of the GPUs that a container asks for. Raises `NoGpuError`."""
    values = dict(item.partition("=")[::2] for item in environment)
    asked = values.get("NVIDIA_VISIBLE_DEVICES", "")
    if asked in ("", "void", "none"):
        return []
    if asked == "all":
        return list(there)
    numbers = asked.split(",")
    if unknown := [number for number in numbers if number not in there]:
        raise NoGpuError(f"unknown device: {', '.join(unknown)}; this host has {', '.join(there) or 'none'}")
    return numbers


def with_gpus(
    config: Mapping[str, Any], numbers: Sequence[str], files: Sequence[tuple[Path, str]], dev: Path = Path("/dev")
) -> dict[str, Any]:
    """The configuration with these GPUs and files in it, or without the hook alone where there are no GPUs."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    hooks = changed.get("hooks") or {}
    for when in list(hooks):
        hooks[when] = [hook for hook in hooks[when] if Path(hook["path"]).name != HOOK]
    if not numbers:
        return changed
    linux = changed.setdefault("linux", {})
    devices = linux.setdefault("devices", [])
    allowed = linux.setdefault("resources", {}).setdefault("devices", [])
    for name in [*(f"nvidia{number}" for number in numbers), *SHARED]:
        node = dev / name
        if not node.exists():
            continue
        number = node.stat().st_rdev
        major, minor = os.major(number), os.minor(number)
        devices.append(
            {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor, "fileMode": 0o666, "uid": 0, "gid": 0}
        )
        allowed.append({"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"})
    mounts = changed.setdefault("mounts", [])
    for source, target in files:
        mounts.append(
            {
                "source": str(source),
                "destination": target,
                "type": "bind",
                "options": ["rbind", "ro", "nosuid", "nodev"],
            }
        )
    return changed


def within_limits(config: Mapping[str, Any], hard: Callable[[str], int]) -> dict[str, Any]:
    """The configuration with no limit above ``hard``: a limit's name as OCI writes it -> what may be given, -1 for everything."""
    changed: dict[str, Any] = json.loads(json.dumps(config))
    for limit in changed["process"].get("rlimits") or []:
        most = hard(limit["type"])
        if most != resource.RLIM_INFINITY:
            for which in ("hard", "soft"):
                limit[which] = min(limit[which], most)
    return changed


def hard_limit(name: str) -> int:
    """This process's own; -1 for no limit."""
    return resource.getrlimit(getattr(resource, name))[1]


def driver_files(driver: Path) -> list[tuple[Path, str]]:
    """The driver's libraries and nvidia-smi, and where a container has them."""
    libraries = [
        path
        for path in sorted((driver / "lib64").glob("lib*.so*"))
        if path.name.startswith(("libcuda.", "libnvidia-", "libcudadebugger."))
    ]
    found = [(path.resolve(), f"{LIBRARIES}/{path.name}") for path in libraries]
    program = driver / "bin/nvidia-smi"
    return [*found, *([(program.resolve(), "/usr/bin/nvidia-smi")] if program.exists() else [])]


def main(arguments: Sequence[str]) -> None:
    """Change the bundle of a `create`, and become runc."""
    if "create" in arguments and "--bundle" in arguments:
        place = Path(arguments[arguments.index("--bundle") + 1]) / "config.json"
        config = json.loads(place.read_text(encoding="utf-8"))
        there = sorted(
            path.name.removeprefix("nvidia")
            for path in Path("/dev").glob("nvidia[0-9]*")
            if stat.S_ISCHR(path.stat().st_mode)
        )
        try:
            numbers = asked_for(config["process"].get("env") or [], there)
        except NoGpuError as error:
            # Where runc writes what the engine then shows.
            if "--log" in arguments:
                log = Path(arguments[arguments.index("--log") + 1])
                log.write_text(json.dumps({"level": "error", "msg": f"stand-in for NVIDIA's runtime: {error}"}) + "\n")
            raise SystemExit(1) from None
        driver = Path(os.environ.get("STAND_IN_DRIVER", "/usr/local/nvidia"))
        files = driver_files(driver)
        if (cache := Path(os.environ.get("STAND_IN_CACHE", ""))).is_file():
            files.append((cache, "/etc/ld.so.cache"))
        config = within_limits(with_gpus(config, numbers, files), hard_limit)
        place.write_text(json.dumps(config), encoding="utf-8")
    runc = os.environ.get("STAND_IN_RUNC", "runc")
    os.execvp(runc, [runc, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
