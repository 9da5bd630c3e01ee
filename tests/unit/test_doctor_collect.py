"""collect.sh in real shells, on made hosts: other roots, tools that hang, tools that lack."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from builder.doctor import collect as module
from builder.doctor.collect import collect, local_shell, script
from builder.doctor.facts import Engine, HostFacts
from builder.doctor.readings import facts_of
from builder.doctor.transcript import parts

pytestmark = pytest.mark.processes

SHELLS = [shell for shell in (["dash"], ["bash", "--posix"], ["busybox", "sh"], ["sh"]) if shutil.which(shell[0])]

OUR_TOOLS = ("sh", "cat", "sleep", "mkdir", "rm", "id", "uname", "df", "grep", "sort")


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A folder that is the whole PATH: a few tools of this machine, and what a test puts in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in OUR_TOOLS:
        hand_on(folder, name)
    return folder


def hand_on(folder: Path, name: str) -> None:
    """A tool of this machine, by a script and not by a link: nothing that is written to the folder can reach it."""
    tool(folder, name, f'exec {shutil.which(name)} "$@"')


def tool(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def ask(shell: list[str], tools: Path, root: Path, limit: int = 20, **more: str) -> HostFacts:
    return facts_of(transcript(shell, tools, root, limit, **more))


def transcript(shell: list[str], tools: Path, root: Path, limit: int = 20, **more: str) -> str:
    # The script adds the usual folders; here they would bring this machine's tools.
    text = script().replace('PATH="$PATH:', f'PATH="{tools}" #')
    found = shutil.which(shell[0])
    assert found is not None
    env = {"BUILDER_DOCTOR_ROOT": str(root), "BUILDER_DOCTOR_LIMIT": str(limit), "TMPDIR": str(tools.parent), **more}
    done = subprocess.run(
        [found, *shell[1:], "-s"], input=text, capture_output=True, text=True, env=env, timeout=60, check=False
    )
    assert done.stderr == ""
    return done.stdout


def host(root: Path) -> Path:
    """A machine with two GPUs below bridges, an IOMMU, NVSwitch and a stale CDI file."""
    devices = root / "sys" / "devices" / "pci0000:00"
    bus = root / "sys" / "bus" / "pci" / "devices"
    bus.mkdir(parents=True)
    (root / "sys" / "drivers" / "nvidia").mkdir(parents=True)
    for bridge, address, kind in (
        ("0000:00:01.0", "0000:01:00.0", "0x030000"),
        ("0000:00:02.0", "0000:02:00.0", "0x030200"),
        ("0000:00:03.0", "0000:03:00.0", "0x068000"),
    ):
        device = devices / bridge / address
        group = root / "sys" / "groups" / address
        device.mkdir(parents=True)
        group.mkdir(parents=True)
        for name, text in (("vendor", "0x10de\n"), ("class", kind + "\n")):
            (device / name).write_text(text, encoding="utf-8")
        (group / "type").write_text("DMA-FQ\n", encoding="utf-8")
        (device / "iommu_group").symlink_to(group)
        (device / "driver").symlink_to(root / "sys" / "drivers" / "nvidia")
        (bus / address).symlink_to(device)
    for name, text in {
        "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue\nGCC version: gcc\n",
        "proc/modules": "nvidia_uvm 1 0 - Live 0x0\nnvidia 2 1 nvidia_uvm, Live 0x0\next4 3 0 - Live 0x0\n",
        "proc/cmdline": "root=UUID=1234-5678 iommu=on quiet pci=noaer\n",
        "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\n",
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         8388608              8388608              bytes\n",
        "proc/42/comm": "nv-fabricmanag\n",
        "dev/nvidia0": "",
        "dev/nvidiactl": "",
        "etc/os-release": 'ID=fedora\nVERSION_ID="43"\n',
        "etc/cdi/nvidia.yaml": 'cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: "0"\n  containerEdits:\n    deviceNodes:\n'
        "    - path: /dev/nvidia0\n    - path: /dev/dri/renderD129\ncontainerEdits:\n  mounts:\n"
        "  - hostPath: /usr/lib/libcuda.so.575.64.05\n    containerPath: /usr/lib/libcuda.so.575.64.05\n",
        "etc/ld.so.conf.d/compat.conf": "# a comment\n/usr/local/cuda-12.9/compat\n",
        "usr/local/cuda-12.9/compat/libcuda.so.575.57.08": "",
        "etc/nvidia-container-runtime/config.toml": '[nvidia-container-runtime]\nmode = "cdi"\n',
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_a_host_without_any_of_the_tools(shell: list[str], tools: Path, tmp_path: Path) -> None:
    facts = ask(shell, tools, host(tmp_path / "root"))
    assert (facts.driver.version, facts.driver.open, facts.driver.uvm) == ("580.95.05", False, True)
    assert facts.driver.nodes == ("/dev/nvidia0", "/dev/nvidiactl")
    assert (facts.pcie.devices, facts.pcie.bound, facts.pcie.iommu) == (2, ("nvidia",), "on")
    assert (facts.fabric.nvswitch, facts.fabric.fabricmanager) == (True, "running")
    assert (facts.os.id, facts.os.version, facts.os.selinux) == ("fedora", "43", "off")
    assert (facts.memory.total, facts.memory.available, facts.ulimits.memlock) == (1 << 20, 512 << 10, 8 << 20)
    (spec,) = facts.toolkit.cdi_specs or ()
    assert (spec.driver, spec.missing) == ("575.64.05", ("/dev/dri/renderD129", "/usr/lib/libcuda.so.575.64.05"))
    assert (facts.toolkit.mode, facts.toolkit.installed) == ("cdi", False)
    assert [library.version for library in facts.compat.libraries or ()] == ["575.57.08"]
    assert facts.compat.on_loader_path
    assert facts.unknown["gpus"] == "`nvidia-smi` is not installed"
    assert facts.unknown["engine"] == "neither `docker` nor `podman` is installed"


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_what_identifies_a_host_is_not_asked_for(shell: list[str], tools: Path, tmp_path: Path) -> None:
    assert "1234-5678" not in transcript(shell, tools, host(tmp_path / "root"))


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_a_tool_that_hangs_costs_its_own_answer_alone(shell: list[str], tools: Path, tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    tool(tools, "nvidia-smi", f"trap '' TERM\necho partly\nexec {sleep} 300")
    tool(tools, "nvidia-ctk", "echo 'NVIDIA Container Toolkit CLI version 1.18.0'")
    facts = ask(shell, tools, tmp_path, limit=4)
    assert facts.unknown["gpus"] == "`nvidia-smi` did not answer in time"
    assert facts.toolkit.version == "1.18.0"
    assert "*" not in facts.unknown
    # None of them is left running, where a signal ends it.
    for _ in range(50):
        left = [
            process
            for process in Path("/proc").glob("[0-9]*/cmdline")
            if (words := _words(process)) and words[-1] == "300" and str(tmp_path) in _environment(process)
        ]
        if not left:
            break
        time.sleep(0.1)
    assert left == []


def _words(process: Path) -> list[str]:
    try:
        return process.read_text(encoding="utf-8", errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _environment(process: Path) -> str:
    try:
        return (process.parent / "environ").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def test_nothing_is_left_in_the_temporary_folder(tools: Path, tmp_path: Path) -> None:
    ask(["sh"], tools, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_a_host_with_no_folder_to_write_to_and_no_timeout(tools: Path, tmp_path: Path) -> None:
    tool(tools, "mkdir", "exit 1")
    tool(tools, "nvidia-smi", "echo never run")
    facts = ask(["sh"], tools, tmp_path)
    said = "`nvidia-smi` was not run: there is no folder for its output and no `timeout` to end it"
    assert facts.unknown["gpus"] == said


def test_a_host_with_no_folder_to_write_to_has_timeout_end_a_tool(tools: Path, tmp_path: Path) -> None:
    tool(tools, "mkdir", "exit 1")
    hand_on(tools, "timeout")
    tool(tools, "nvidia-ctk", "echo 'NVIDIA Container Toolkit CLI version 1.18.0'")
    assert ask(["sh"], tools, tmp_path).toolkit.version == "1.18.0"


def test_the_folder_of_the_engine_is_looked_at(tools: Path, tmp_path: Path) -> None:
    tool(tools, "docker", f'echo \'{{"ServerVersion":"28.5.2","DockerRootDir":"{tmp_path}/none/there"}}\'')
    tool(tools, "df", 'echo "Filesystem 1024-blocks Used Available Capacity Mounted on"; echo "$2 100 50 50 50% /"')
    found = parts(transcript(["sh"], tools, tmp_path))
    # The nearest folder that there is.
    assert found["df_data"].lines[1].split()[0] == str(tmp_path)


def test_tools_do_not_read_the_script(tools: Path, tmp_path: Path) -> None:
    """They share the shell's standard input, which is the script itself."""
    tool(tools, "nvidia-ctk", "cat; echo 'version 1.18.0'")
    tool(tools, "id", "cat; echo 0")
    assert "end" in parts(transcript(["sh"], tools, tmp_path))


def test_the_script_names_no_other_shell() -> None:
    text = script()
    assert "[[" not in text and "function " not in text and "local " not in text


def test_this_machine() -> None:
    facts = collect(local_shell, None, "2026-11-30")
    assert (facts.os.arch, facts.collected, facts.hostname) == (os.uname().machine, "2026-11-30", None)
    assert "*" not in facts.unknown


# --- the engine's API -------------------------------------------------------------------------------------------------


class Connection:
    """A stand-in for an engine's connection; `_ask` is put in place of what asks it."""


ENGINE = Engine(kind="docker", version="28.5.2", store="classic", data_root="/var/lib/docker")


def test_without_a_shell_the_engine_alone_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ask", lambda connection: (ENGINE, ()))
    facts = collect(lambda text: None, Connection, "2026-11-30")  # type: ignore[arg-type]
    assert facts.engine == ENGINE
    assert facts.shm.container_default == 64 << 20
    assert facts.why_unknown("gpus") == "only the engine of this host is reached, not its shell"


def test_the_shell_comes_first(monkeypatch: pytest.MonkeyPatch, tools: Path, tmp_path: Path) -> None:
    tool(tools, "docker", 'echo \'{"ServerVersion":"20.10"}\'')
    monkeypatch.setattr(module, "_ask", lambda connection: pytest.fail("asked"))
    facts = collect(lambda text: transcript(["sh"], tools, tmp_path), Connection)  # type: ignore[arg-type]
    assert facts.engine is not None and facts.engine.version == "20.10"


def test_an_engine_that_does_not_answer_leaves_the_shells_reason() -> None:
    from builder.errors import BuildError

    def refuses() -> Connection:
        raise BuildError("no Docker Engine answers", because="nothing listens")

    assert collect(lambda text: None, refuses).why_unknown("engine") == "nothing listens"  # type: ignore[arg-type]
