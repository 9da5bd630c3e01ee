"""What a CPython on Linux takes: wheel tags, and the values of PEP 508's markers; nothing of the machine that asks."""

from __future__ import annotations

import re

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from builder.errors import UsageError

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""Platforms, as images name them, and their machines, as wheels and `uname -m` do."""

# The names that a platform had before PEP 600, by the minor version of glibc; manylinux2014 is the first with others than x86.
_LEGACY: dict[str, dict[int, str]] = {
    "x86_64": {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"},
    "aarch64": {17: "manylinux2014_aarch64"},
}
_NUMBERED = re.compile(r"manylinux_(\d+)_(\d+)_(.+)", re.ASCII)


def machine_of(platform: str) -> str:
    """The machine of a platform. Raises `UsageError`."""
    if platform not in MACHINES:
        known = " and ".join(f"`{name}`" for name in MACHINES)
        raise UsageError(f"the platform `{platform[:100]}` is not known", hint=f"known are {known}")
    return MACHINES[platform]


def wheel_tags(python: str, major: int, minor: int, machine: str = "x86_64") -> list[Tag]:
    """The wheel tags of a CPython on Linux with that glibc, best first; ``machine`` is as `uname -m` has it."""
    version = tuple(int(part) for part in python.split("."))
    platforms = []
    for number in range(minor, 4, -1):
        platforms.append(f"manylinux_{major}_{number}_{machine}")
        if number in _LEGACY[machine]:
            platforms.append(_LEGACY[machine][number])
    platforms.append(f"linux_{machine}")
    # Named, since packaging would otherwise ask the Python that runs this (debug and free-threaded builds differ).
    tags = [*cpython_tags(version, abis=[f"cp{version[0]}{version[1]}"], platforms=platforms)]
    tags += compatible_tags(version, interpreter=f"cp{version[0]}{version[1]}", platforms=platforms)
    return tags


def platforms_of(file: str) -> frozenset[str]:
    """The platform tags in a wheel's file name. Raises `packaging.utils.InvalidWheelFilename`."""
    return frozenset(tag.platform for tag in parse_wheel_filename(file)[3])


def is_native(file: str) -> bool:
    """Whether a wheel may have native code, by the platform tags in its file name. Raises as `platforms_of`."""
    return platforms_of(file) != {"any"}


def glibc_of_platform(platform: str, machine: str = "x86_64") -> tuple[int, int] | None:
    """The glibc that a platform tag promises to be enough on a machine, (0, 0) where it promises none.

    `None` for a tag with which nothing installs there: of another machine, C library or system.
    """
    if platform in ("any", f"linux_{machine}"):
        return 0, 0
    for minor, name in _LEGACY.get(machine, {}).items():
        if platform == name:
            return 2, minor
    found = _NUMBERED.fullmatch(platform)
    return (int(found[1]), int(found[2])) if found and found[3] == machine else None


def glibc_needed(file: str, machine: str = "x86_64") -> tuple[int, int] | None:
    """The glibc that the least demanding platform tag of a wheel asks for; else as `glibc_of_platform`, and raises as `platforms_of`."""
    needs = (glibc_of_platform(platform, machine) for platform in platforms_of(file))
    return min((need for need in needs if need is not None), default=None)


def markers(python: str, machine: str = "x86_64") -> dict[str, str]:
    """The values of PEP 508's markers for a CPython on Linux; ``machine`` is as `uname -m` has it."""
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
