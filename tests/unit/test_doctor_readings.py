"""What a host's shell printed → facts: real transcripts and real tools' words, and any text at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.doctor.facts import CdiSpec, HostFacts, parse_facts
from builder.doctor.readings import facts_of

HOSTS = Path(__file__).parent / "hosts"
H200 = (HOSTS / "transcripts" / "h200x2.txt").read_text(encoding="utf-8")


def transcript(**parts: str | tuple[str, str]) -> str:
    """A transcript of these parts: text, or status and text."""
    lines = []
    for name, part in {"about": "script 1\nkernel 6.8.0\nmachine x86_64\nmodules", **parts, "end": ""}.items():
        status, text = part if isinstance(part, tuple) else ("0", part)
        lines += [f"@@ {name} {status}", *(f"|{line}" for line in text.split("\n"))]
    return "\n".join(lines) + "\n"


# --- a real host ------------------------------------------------------------------------------------------------------


def test_two_h200_as_they_were_recorded() -> None:
    """Recorded with collect.sh on a machine with two H200, 2026-11-30."""
    facts = facts_of(H200, "2026-11-30")
    assert facts.os.model_dump(exclude={"kernel", "like"}) == {
        "id": "ubuntu",
        "version": "24.04",
        "arch": "x86_64",
        "wsl": False,
        "container": True,
        "selinux": "off",
    }
    driver = facts.driver
    assert (driver.version, driver.cuda, driver.kind, driver.open, driver.uvm, driver.loaded) == (
        "580.159.04",
        "13.0",
        "datacenter",
        True,
        True,
        True,
    )
    assert [(gpu.index, gpu.name, gpu.capability, gpu.memory, gpu.mig, gpu.used) for gpu in facts.gpus or ()] == [
        (0, "NVIDIA H200", "9.0", 143771 << 20, "off", 0),
        (1, "NVIDIA H200", "9.0", 143771 << 20, "off", 0),
    ]
    assert (facts.pcie.topology, facts.pcie.p2p, facts.pcie.iommu, facts.pcie.devices) == (
        "nvlink",
        (("X", "OK"), ("OK", "X")),
        "off",
        2,
    )
    assert [library.version for library in facts.compat.libraries or ()] == ["580.95.05"] * 3
    assert (facts.compat.on_loader_path, facts.compat.cuda_driver_loaded, facts.compat.error) == (False, "13.0", None)
    assert (facts.ulimits.memlock, facts.ulimits.nofile) == ("unlimited", 20000)
    assert (facts.disk.data_root_free, facts.shm.host) == (134189920 << 10, 268435456 << 10)
    assert facts.unknown == {
        "engine": "neither `docker` nor `podman` is installed",
        "pcie.acs": "no bridge above a GPU is known",
        "shm.container_default": "it is not known which engine there is",
        "toolkit.version": "NVIDIA's container toolkit is not installed",
    }


def test_facts_written_and_read_again_are_the_same() -> None:
    facts = facts_of(H200, "2026-11-30")
    assert parse_facts(json.dumps(facts.as_json()), "x") == facts


# --- nvidia-smi -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "version", "cuda"),
    [
        ("| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   CUDA Version: 12.8 |", "570.86.10", "12.8"),
        (
            "| NVIDIA-SMI 550.144.03             Driver Version: 550.144.03     CUDA Version: 12.4     |",
            "550.144.03",
            "12.4",
        ),
        ("| NVIDIA-SMI 535.171.04   Driver Version: N/A   CUDA Version: N/A |", None, None),
        ("| NVIDIA-SMI 535.171.04   Driver Version: 535.171.04   CUDA Version: ERR! |", "535.171.04", None),
        ("| NVIDIA-SMI 575.57.04    Driver Version: 577.00   CUDA Version: 12.9 |", "577.00", "12.9"),
        ("| NVIDIA-SMI 595.58.03   KMD Version: 595.58.03   CUDA UMD Version: 13.2 |", "595.58.03", "13.2"),
    ],
)
def test_the_header_of_nvidia_smi(header: str, version: str | None, cuda: str | None) -> None:
    facts = facts_of(transcript(smi=f"Mon Nov 30 22:20:06 2026\n+-----+\n{header}\n"))
    assert (facts.driver.version, facts.driver.cuda) == (version, cuda)


def test_the_kernel_module_tells_the_version_where_nvidia_smi_does_not() -> None:
    nvrm = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version: gcc 12"
    )
    facts = facts_of(transcript(nvrm=nvrm, smi=("missing", "")))
    assert (facts.driver.version, facts.driver.open, facts.driver.loaded) == ("535.129.03", False, True)
    assert facts.unknown["driver.cuda"] == "`nvidia-smi` is not installed"


def test_libraries_of_another_version() -> None:
    said = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.126"
    nvrm = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build"
    facts = facts_of(transcript(nvrm=nvrm, smi=("18", said), smi_gpus=("18", said)))
    assert (facts.driver.version, facts.driver.library, facts.driver.open) == ("580.95.05", "580.126", True)
    assert facts.driver.said == "Failed to initialize NVML: Driver/library version mismatch"
    assert facts.gpus is None
    assert facts.unknown["gpus"] == f"`nvidia-smi` said: {said.splitlines()[0]}"


def test_nvidia_smi_that_hangs() -> None:
    facts = facts_of(transcript(modules="nvidia", smi=("timeout", ""), smi_gpus=("timeout", "")))
    assert (facts.driver.said, facts.driver.loaded) == ("`nvidia-smi` did not answer in time", True)
    assert facts.unknown["gpus"] == "`nvidia-smi` did not answer in time"


def test_an_older_nvidia_smi_that_does_not_know_the_capability() -> None:
    refused = 'Field "compute_cap" is not a valid field to query.'
    names = "index, name, memory.total [MiB], pci.bus_id, driver_version\n0, Tesla T4, 15109 MiB, 00000000:00:1E.0, 450.80.02"
    facts = facts_of(transcript(smi_gpus=("2", refused), smi_names=names))
    assert [(gpu.name, gpu.capability) for gpu in facts.gpus or ()] == [("Tesla T4", None)]
    assert (facts.driver.version, facts.driver.kind) == ("450.80.02", "datacenter")
    assert facts.unknown["gpus.capability"] == "this nvidia-smi does not tell it"


def test_columns_that_a_gpu_does_not_have() -> None:
    rows = (
        "index, name, memory.total [MiB], pci.bus_id, driver_version, compute_cap, memory.used [MiB], mig.mode.current, "
        "persistence_mode\n0, NVIDIA GB10, [N/A], 0000000F:01:00.0, 580.95.05, 12.1, [N/A], [N/A], Disabled"
    )
    (gpu,) = facts_of(transcript(smi_gpus=rows)).gpus or ()
    assert (gpu.capability, gpu.memory, gpu.mig, gpu.persistence) == ("12.1", None, None, False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "datacenter"),
        ("NVIDIA A100-SXM4-80GB", "datacenter"),
        ("NVIDIA B200", "datacenter"),
        ("NVIDIA GB200", "datacenter"),
        ("NVIDIA L40S", "datacenter"),
        ("Tesla T4", "datacenter"),
        ("NVIDIA GeForce RTX 5090", "geforce"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", None),
        ("NVIDIA RTX A6000", None),
        ("Quadro RTX 6000", None),
    ],
)
def test_what_kind_of_gpu_it_is(name: str, kind: str | None) -> None:
    rows = f"index, name, memory.total [MiB], pci.bus_id, driver_version\n0, {name}, 1 MiB, 00000000:01:00.0, 580.95.05"
    assert facts_of(transcript(smi_names=rows)).driver.kind == kind


# --- how GPUs reach each other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cells", "topology"),
    [(("NV18", "NV18"), "nvlink"), (("PHB", "PHB"), "pcie"), (("SYS", "NODE"), "pcie"), (("NV4", "SYS"), "mixed")],
)
def test_the_topology(cells: tuple[str, str], topology: str) -> None:
    a, b = cells
    table = (
        f"\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \t{a}\t{b}\tPXB\t0-13\nGPU1\t{a}\t X \t{a}\tSYS\t0-13\n"
        f"GPU2\t{b}\t{a}\t X \tSYS\t0-13\nNIC0\tPXB\tSYS\tSYS\t X \n\nLegend:\n\n  X    = Self\n"
    )
    assert facts_of(transcript(smi_topo=table)).pcie.topology == topology


def test_the_topology_as_case_110_pasted_it() -> None:
    table = (
        "        GPU0    GPU1    CPU Affinity    NUMA Affinity\nGPU0     X      PHB     0-13            0\n"
        "GPU1    PHB      X      0-13            0"
    )
    assert facts_of(transcript(smi_topo=table)).pcie.topology == "pcie"


def test_peer_access_of_nvidia_smi() -> None:
    table = " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tNS\t\n GPU1\tCNS\tX\t\n\nLegend:\n\n  OK   = Status Ok\n"
    assert facts_of(transcript(smi_p2p=table)).pcie.p2p == (("X", "NS"), ("CNS", "X"))


def test_peer_access_of_the_driver_where_nvidia_smi_does_not_tell() -> None:
    said = "cuinit 0 13000\nlibrary /usr/lib/libcuda.so.580.95.05\ndevices 2\npeer 0 1 1\npeer 1 0 0"
    assert facts_of(transcript(smi_p2p=("9", "no"), cuinit=said)).pcie.p2p == (("X", "OK"), ("NS", "X"))


PCI = "bus\ngpu 0000:01:00.0 driver=nvidia group={} chain=pci0000:00/0000:00:01.1/0000:01:00.0"


@pytest.mark.parametrize(
    ("group", "words", "iommu"),
    [
        ("DMA", "", "on"),
        ("DMA-FQ", "iommu=pt", "on"),
        ("identity", "", "passthrough"),
        ("-", "", "off"),
        ("unknown", "iommu=pt", "passthrough"),
        ("unknown", "intel_iommu=on", None),
    ],
)
def test_the_iommu(group: str, words: str, iommu: str | None) -> None:
    assert facts_of(transcript(pci=PCI.format(group), cmdline=words)).pcie.iommu == iommu


LSPCI = """\
00:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01)
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir{0} CmpltRedir{0} UpstreamFwd+ EgressCtrl- DirectTrans-
00:02.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01)
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
01:00.0 VGA compatible controller: NVIDIA Corporation GB202GL
"""


@pytest.mark.parametrize(
    ("said", "acs", "why"),
    [
        (LSPCI.format("+"), True, None),
        (LSPCI.format("-"), False, None),
        (LSPCI.format("-").replace("CmpltRedir-", "CmpltRedir+", 1), True, None),
        (LSPCI.format("-").replace("ReqRedir-", "ReqRedir+", 1), True, None),
        ("00:01.1 PCI bridge: x\n\tCapabilities: <access denied>", None, "`lspci` shows it to root alone"),
        ("sh: 1: lspci: not found", None, "`lspci` is not installed"),
        ("", None, "`lspci` shows no ACSCtl of the bridges above the GPUs"),
    ],
)
def test_acs_of_the_bridges_above_the_gpus_alone(said: str, acs: bool | None, why: str | None) -> None:
    facts = facts_of(transcript(pci=PCI.format("-"), acs=said))
    assert (facts.pcie.acs, facts.unknown.get("pcie.acs")) == (acs, why)


@pytest.mark.parametrize(
    ("parts", "manager"),
    [
        ({"fabric_service": "active"}, "running"),
        ({"fabric_service": ("3", "failed")}, "failed"),
        ({"fabric_service": ("3", "inactive")}, "absent"),
        ({"fabric_service": ("4", "unknown")}, "absent"),
        ({"fabric_service": ("missing", ""), "fabric_process": "running"}, "running"),
        ({"fabric_service": ("missing", "")}, None),
        ({"fabric_service": ("missing", ""), "smi_fabric": "index, fabric.state\n0, Completed, Success"}, "running"),
    ],
)
def test_the_fabric_manager(parts: dict[str, str | tuple[str, str]], manager: str | None) -> None:
    facts = facts_of(transcript(nodes="/dev/nvidia0\n/dev/nvidia-nvswitch0", **parts))
    assert (facts.fabric.nvswitch, facts.fabric.fabricmanager) == (True, manager)


@pytest.mark.parametrize(("status", "error"), [("0", None), ("803", 803), ("802", 802), ("804", 804), ("999", 999)])
def test_what_cuinit_said(status: str, error: int | None) -> None:
    facts = facts_of(transcript(cuinit=f"cuinit {status} 12080"))
    assert (facts.compat.error, facts.compat.cuda_driver_loaded) == (error, "12.8")


def test_compatibility_libraries_on_the_loaders_path() -> None:
    said = "library /usr/local/cuda-12.9/compat/libcuda.so.575.57.08\npath /etc/ld.so.conf.d/00-compat.conf"
    compat = facts_of(transcript(compat=said)).compat
    assert compat.on_loader_path
    assert [(library.path, library.version) for library in compat.libraries or ()] == [
        ("/usr/local/cuda-12.9/compat/libcuda.so.575.57.08", "575.57.08")
    ]


# --- containers -------------------------------------------------------------------------------------------------------

INFO = {
    "ServerVersion": "28.5.2",
    "Driver": "overlay2",
    "DriverStatus": [["Backing Filesystem", "extfs"]],
    "DockerRootDir": "/var/lib/docker",
    "DefaultRuntime": "runc",
    "Runtimes": {"runc": {"path": "runc"}, "nvidia": {"path": "nvidia-container-runtime"}},
    "SecurityOptions": ["name=apparmor", "name=seccomp,profile=builtin"],
    "CgroupVersion": "2",
}


def test_docker() -> None:
    warned = f"WARNING: No swap limit support\n{json.dumps(INFO)}"
    engine = facts_of(transcript(docker=warned, docker_version='{"ApiVersion":"1.51"}')).engine
    assert engine is not None
    assert engine.model_dump() == {
        "kind": "docker",
        "version": "28.5.2",
        "api": "1.51",
        "store": "classic",
        "data_root": "/var/lib/docker",
        "rootless": False,
        "runtimes": ("nvidia", "runc"),
        "default_runtime": "runc",
        "cdi": (),
        "cgroup": "v2",
        "host": None,
    }


def test_docker_without_root_with_the_containerd_store_and_cdi() -> None:
    info = {
        **INFO,
        "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]],
        "SecurityOptions": ["name=rootless"],
        "DockerRootDir": "/home/somebody/.local/share/docker",
        "DiscoveredDevices": [
            {"Source": "cdi", "ID": "nvidia.com/gpu=all"},
            {"Source": "cdi", "ID": "nvidia.com/gpu=GPU-8d3a8f5c-aaaa-bbbb-cccc-1234567890ab"},
        ],
    }
    engine = facts_of(transcript(docker=json.dumps(info))).engine
    assert engine is not None
    assert (engine.store, engine.rootless, engine.cdi) == ("containerd", True, ("nvidia.com/gpu=all",))
    assert engine.data_root == "/home/…/.local/share/docker"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (
            {
                "docker": json.dumps(
                    {"ServerErrors": ["permission denied while trying to connect to the Docker daemon"]}
                )
            },
            "`docker info` said: permission denied while trying to connect to the Docker daemon",
        ),
        (
            {"docker": ("1", '{"ID":"","Containers":0}\nCannot connect to the Docker daemon. Is it running?')},
            "`docker info` said: Cannot connect to the Docker daemon. Is it running?",
        ),
        ({"docker": ("1", '{"ID":"","Containers":0}')}, "the engine does not answer"),
        ({"docker": ("timeout", "")}, "`docker info` did not answer in time"),
        ({"docker": ("missing", ""), "podman": ("missing", "")}, "neither `docker` nor `podman` is installed"),
        ({"docker": ("missing", ""), "podman": ("125", "Error: no space")}, "`podman info` said: Error: no space"),
    ],
)
def test_why_there_is_no_engine(parts: dict[str, str | tuple[str, str]], why: str) -> None:
    facts = facts_of(transcript(**parts))
    assert (facts.engine, facts.unknown["engine"]) == (None, why)


def test_podman() -> None:
    info = {
        "host": {"cgroupVersion": "v2", "ociRuntime": {"name": "crun"}, "security": {"rootless": True}},
        "store": {"graphRoot": "/var/lib/containers/storage"},
        "version": {"Version": "5.4.0", "APIVersion": "5.4.0"},
    }
    engine = facts_of(transcript(docker=("missing", ""), podman=json.dumps(info, indent=4))).engine
    assert engine is not None
    assert (engine.kind, engine.version, engine.rootless, engine.cgroup) == ("podman", "5.4.0", True, "v2")


@pytest.mark.parametrize(
    ("parts", "installed", "version"),
    [
        ({"toolkit": "NVIDIA Container Toolkit CLI version 1.17.8\ncommit: f202b80"}, True, "1.17.8"),
        ({"toolkit": ("missing", ""), "toolkit_cli": "cli-version: 1.17.8\nlib-version: 1.17.8"}, True, "1.17.8"),
        ({"toolkit": ("missing", ""), "toolkit_cli": ("missing", ""), "about": "script 1\nhook"}, True, None),
        ({"toolkit": ("missing", ""), "toolkit_cli": ("missing", "")}, False, None),
        ({"toolkit": ("timeout", ""), "toolkit_cli": ("missing", "")}, None, None),
    ],
)
def test_the_toolkit(parts: dict[str, str | tuple[str, str]], installed: bool | None, version: str | None) -> None:
    toolkit = facts_of(transcript(**parts)).toolkit
    assert (toolkit.installed, toolkit.version) == (installed, version)


def test_a_cdi_file() -> None:
    said = (
        'file /etc/cdi/nvidia.yaml\nline kind: nvidia.com/gpu\nline - name: "0"\nline - name: GPU-8d3a8f5c-aaaa-bbbb-cccc-123\n'
        "line - name: all\nline     - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05\nmissing /dev/dri/renderD129\n"
        "file /etc/cdi/other.yaml\nline kind: vendor.com/nic"
    )
    assert facts_of(transcript(cdi=said)).toolkit.cdi_specs == (
        CdiSpec(
            file="/etc/cdi/nvidia.yaml",
            devices=("nvidia.com/gpu=0", "nvidia.com/gpu=all"),
            driver="580.95.05",
            missing=("/dev/dri/renderD129",),
        ),
    )


def test_images_that_are_there() -> None:
    image, lock, layer = "sha256:" + "a" * 64, "b" * 64, "sha256:" + "c" * 64
    (found,) = facts_of(transcript(images=f'{image} {lock} ["{layer}"]')).present.images or ()
    assert (found.id, found.lock, found.layers) == (image, lock, (layer,))


# --- disk and memory --------------------------------------------------------------------------------------------------

DF = "Filesystem     1024-blocks     Used Available Capacity Mounted on\n{}"


@pytest.mark.parametrize(
    ("line", "free"),
    [
        ("/dev/vda         264212084 46827712  59563200      45% /", 59563200 << 10),
        ("a very long name of a volume 264212084 46827712 59563200 45% /mnt/a b", 59563200 << 10),
        ("overlay 100 100 -5 100% /", 0),
        ("df: /x: No such file or directory", None),
    ],
)
def test_free_disk(line: str, free: int | None) -> None:
    assert facts_of(transcript(df_data=DF.format(line))).disk.data_root_free == free


def test_of_two_places_for_the_containerd_store_the_scarcer_counts() -> None:
    info = json.dumps({**INFO, "DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]})
    small, large = DF.format("/dev/a 100 50 50 50% /"), DF.format("/dev/b 1000 100 900 10% /var/lib/docker")
    assert facts_of(transcript(docker=info, df_data=large, df_containerd=small)).disk.data_root_free == 50 << 10
    assert (
        facts_of(transcript(docker=json.dumps(INFO), df_data=large, df_containerd=small)).disk.data_root_free
        == 900 << 10
    )


def test_what_a_container_gets_of_shared_memory() -> None:
    assert facts_of(transcript(docker=json.dumps(INFO))).shm.container_default == 64 << 20
    daemon = '{"default-shm-size": "16G"}'
    assert facts_of(transcript(docker=json.dumps(INFO), daemon=daemon)).shm.container_default == 16 << 30


# --- any text ---------------------------------------------------------------------------------------------------------


def test_nothing() -> None:
    assert facts_of("").unknown["*"] == "the host's shell answered nothing"


def test_an_answer_that_is_cut_off() -> None:
    assert facts_of(H200[: len(H200) // 2]).unknown["*"] == "the host's answer is cut off"


def test_what_a_tool_prints_is_no_part() -> None:
    facts = facts_of(transcript(os_release="ID=debian\n@@ nvrm 0", smi=("missing", "")))
    assert (facts.os.id, facts.driver.version) == ("debian", None)


def test_no_user_and_no_uuid_gets_into_facts() -> None:
    said = transcript(
        docker=("1", "Cannot connect to unix:///home/alice/.docker/run.sock"),
        podman=("missing", ""),
        toolkit=("1", "/home/alice/x"),
    )
    assert "alice" not in json.dumps(facts_of(said).as_json())


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_gives_facts(text: str) -> None:
    assert isinstance(facts_of(text), HostFacts)


NAMES = tuple(line.split()[1] for line in H200.splitlines() if line.startswith("@@"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((*NAMES, "docker", "docker_version", "daemon")), st.text()), max_size=6))
def test_any_text_in_any_part_gives_facts_that_can_be_written_and_read(parts: list[tuple[str, str]]) -> None:
    said = H200 + "".join(f"@@ {name} 0\n" + "".join(f"|{line}\n" for line in text.split("\n")) for name, text in parts)
    facts = facts_of(said)
    assert parse_facts(json.dumps(facts.as_json()), "x") == facts


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_transcript_gives_facts(data: st.DataObject) -> None:
    lines = H200.splitlines()
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        cut = data.draw(st.integers(0, len(line)))
        lines[at] = (
            line[:cut] + data.draw(st.sampled_from(("", "|", "@@", "9" * 30, "{", "[", "\x00", "ſ", "٣"))) + line[cut:]
        )
    assert isinstance(facts_of("\n".join(lines)), HostFacts)


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from((*INFO, "host", "store", "version", "Version", "runtimes", "ID")), inner, max_size=5
            )
        ),
        max_leaves=12,
    )
)
def test_any_answer_of_an_engine_gives_facts(answer: object) -> None:
    said = json.dumps(answer)
    assert isinstance(facts_of(transcript(docker=said, podman=said, docker_version=said, daemon=said)), HostFacts)
