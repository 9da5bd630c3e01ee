"""The stand-in for NVIDIA's container runtime: what it makes of a container's configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu_container import runtime

UNLIMITED = 18446744073709551615
"""As the engine writes `-1`."""


@pytest.mark.parametrize(
    ("value", "found"), [("all", ["0", "1"]), ("1", ["1"]), ("1,0", ["1", "0"]), ("void", []), ("none", []), ("", [])]
)
def test_the_gpus_that_are_asked_for(value: str, found: list[str]) -> None:
    assert runtime.asked_for(["PATH=/bin", f"NVIDIA_VISIBLE_DEVICES={value}"], ["0", "1"]) == found


def test_a_container_that_asks_for_none_gets_none() -> None:
    assert runtime.asked_for(["PATH=/bin"], ["0"]) == []


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(runtime.NoGpuError, match="unknown device: 7; this host has 0"):
        runtime.asked_for(["NVIDIA_VISIBLE_DEVICES=7"], ["0"])


def test_devices_libraries_and_no_hook(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib64/libcuda.so.580.1").touch()
    (tmp_path / "lib64/libcuda.so.1").symlink_to("libcuda.so.580.1")
    (tmp_path / "lib64/libOther.so.1").touch()
    (tmp_path / "bin/nvidia-smi").touch()
    dev = tmp_path / "dev"
    dev.mkdir()
    # Any node will do: its numbers are handed on.
    (dev / "nvidia0").symlink_to("/dev/null")
    (dev / "nvidiactl").symlink_to("/dev/zero")
    hook = {"path": f"/usr/bin/{runtime.HOOK}", "args": []}
    config = {
        "process": {},
        "hooks": {"prestart": [hook, {"path": "/bin/other"}]},
        "mounts": [{"destination": "/proc"}],
    }
    changed = runtime.with_gpus(config, ["0"], runtime.driver_files(tmp_path), dev)
    null = Path("/dev/null").stat().st_rdev
    assert [device["path"] for device in changed["linux"]["devices"]] == ["/dev/nvidia0", "/dev/nvidiactl"]
    first = changed["linux"]["resources"]["devices"][0]
    assert (first["allow"], first["major"], first["minor"]) == (True, os.major(null), os.minor(null))
    assert [mount["destination"] for mount in changed["mounts"]] == [
        "/proc",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.580.1",
        "/usr/bin/nvidia-smi",
    ]
    assert changed["mounts"][1]["source"] == str(tmp_path / "lib64/libcuda.so.580.1")
    assert changed["hooks"] == {"prestart": [{"path": "/bin/other"}]}
    assert runtime.with_gpus(config, [], runtime.driver_files(tmp_path), dev)["mounts"] == config["mounts"]


def test_limits_are_those_that_can_be_given() -> None:
    limits = [
        {"type": "RLIMIT_MEMLOCK", "hard": UNLIMITED, "soft": UNLIMITED},
        {"type": "RLIMIT_STACK", "hard": 67108864, "soft": 67108864},
    ]
    config = {"process": {"rlimits": limits}}
    changed = runtime.within_limits(config, lambda name: 8192 if name == "RLIMIT_MEMLOCK" else -1)
    assert changed["process"]["rlimits"] == [{"type": "RLIMIT_MEMLOCK", "hard": 8192, "soft": 8192}, limits[1]]
