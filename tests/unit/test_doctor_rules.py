"""The rules, one by one: on the made host on which nothing is wrong, with one thing changed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.doctor.evaluate import RULES, Diagnosis, evaluate
from builder.doctor.facts import HostFacts, read_facts
from builder.doctor.needs import Needs
from builder.driver import DriverNeeds
from builder.findings import Finding, Severity
from tests.host_cases import HOSTS

GOOD = read_facts(HOSTS / "made-good.json")

DRIVER = DriverNeeds(
    "13.0",
    "580",
    "the wheels are CUDA 13.0's",
    "made",
    full_driver="580.65.06",
    full_source="made",
    limits="it is slower",
)

NEEDS = Needs(
    subject="stack",
    lock="a" * 64,
    platform="linux/amd64",
    gpus=("12.0", "9.0"),
    driver=DRIVER,
    require="cuda>=13.0",
    compressed=5_000_000_000,
    unpacked=12_000_000_000,
    lacking={"12.1": ("kernels.so",), "8.0": ()},
    looked_at=("kernels 1.0",),
)


def host(**change: Any) -> HostFacts:
    """The good host with some fields of its parts changed; a part that is no mapping is put in whole."""
    data = GOOD.as_json()
    for name, part in change.items():
        data[name] = {**(data[name] or {}), **part} if isinstance(part, dict) and name != "unknown" else part
    return HostFacts.model_validate_json(json.dumps(data))


def gpu(**change: Any) -> dict[str, Any]:
    assert GOOD.gpus is not None
    return {**GOOD.gpus[0].model_dump(), **change}


def found(facts: HostFacts, rule: str, needs: Needs | None = NEEDS) -> list[Finding]:
    return [finding for finding in evaluate(facts, needs).findings if finding.rule == rule]


def one(facts: HostFacts, rule: str, needs: Needs | None = NEEDS) -> Finding:
    (finding,) = found(facts, rule, needs)
    return finding


def verdict(facts: HostFacts, needs: Needs | None = NEEDS) -> str:
    return evaluate(facts, needs).verdict


def test_nothing_is_wrong() -> None:
    diagnosis = evaluate(GOOD, NEEDS)
    assert (diagnosis.verdict, [finding.rule for finding in diagnosis.findings]) == ("ok", ["shm"])


def test_every_finding_has_a_reason_a_way_out_and_a_source() -> None:
    assert not [finding for finding in ALL if not (finding.because and finding.hint)]
    assert {finding.rule for finding in ALL if not finding.source} == {"not-known"}


def test_no_message_ends_with_a_full_stop() -> None:
    assert not [line for finding in ALL for line in str(finding).splitlines() if line.endswith(".")]


# --- GPUs and driver --------------------------------------------------------------------------------------------------


def test_no_gpu() -> None:
    facts = host(gpus=[], pcie={"devices": 0}, driver={"loaded": False, "version": None, "cuda": None})
    assert one(facts, "gpu-absent").message == "this host has no GPU of NVIDIA"
    assert [finding.rule for finding in evaluate(facts, NEEDS).findings] == ["gpu-absent"]


@pytest.mark.parametrize(
    ("change", "message", "because"),
    [
        (
            {
                "gpus": None,
                "pcie": {"devices": 2, "bound": ["nouveau"]},
                "driver": {"loaded": False, "version": None, "cuda": None},
            },
            "there are 2 GPUs of NVIDIA, and no driver of NVIDIA's is loaded",
            "the kernel's driver for it is `nouveau`",
        ),
        (
            {
                "gpus": None,
                "pcie": {"devices": 1, "bound": ["vfio-pci"]},
                "driver": {"loaded": False, "version": None, "cuda": None},
            },
            "there is 1 GPU of NVIDIA, and no driver of NVIDIA's is loaded",
            "the kernel's driver for it is `vfio-pci`, which hands it to a virtual machine",
        ),
        (
            {"gpus": [], "pcie": {"devices": 1}, "driver": {"open": False}},
            "the driver is loaded and shows no GPU",
            "`nvidia-smi` lists none, and there are 1 on the PCI bus",
        ),
        (
            {"gpus": None, "pcie": {"devices": None}, "driver": {"loaded": False, "version": None, "cuda": None}},
            "no driver of NVIDIA's is loaded",
            "/proc/driver/nvidia is not there; whether there is a GPU is not known",
        ),
    ],
)
def test_no_driver(change: dict[str, Any], message: str, because: str) -> None:
    finding = one(host(**change), "gpu-absent")
    assert (finding.message, finding.because, verdict(host(**change))) == (message, because, "broken")


def test_a_driver_whose_libraries_are_others() -> None:
    facts = host(driver={"library": "580.126", "said": "Failed to initialize NVML"}, gpus=None)
    assert one(facts, "driver-mismatch").message == "the driver's libraries are 580.126, its kernel module is 580.95.05"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("`nvidia-smi` did not answer in time", "`nvidia-smi` does not answer"),
        ("Unable to determine the device handle for GPU0: Unknown Error", "`nvidia-smi` fails"),
    ],
)
def test_a_sick_driver(said: str, message: str) -> None:
    facts = host(driver={"said": said}, gpus=None)
    assert (one(facts, "driver-sick").message, verdict(facts)) == (message, "broken")


@pytest.mark.parametrize(
    ("version", "severity"),
    [
        ("575.64.05", Severity.ERROR),
        ("579.99", Severity.ERROR),
        ("580.10", Severity.NOTE),
        ("580.65.06", None),
        ("580", None),
    ],
)
def test_the_oldest_driver(version: str, severity: Severity | None) -> None:
    facts = host(driver={"version": version, "cuda": None})
    assert [finding.severity for finding in found(facts, "driver")] == ([severity] if severity else [])


def test_a_driver_by_its_cuda_release_alone() -> None:
    facts = host(driver={"version": None, "cuda": "12.9"})
    assert one(facts, "driver").message == "the driver gives CUDA 12.9, and CUDA 13.0 is needed"
    assert not found(host(driver={"version": None, "cuda": "13.0"}), "driver")


def test_on_wsl_the_cuda_release_counts_and_not_windows_number() -> None:
    old, new = {"version": "577.00", "cuda": "12.9"}, {"version": "579.10", "cuda": "13.0"}
    hint = one(host(os={"wsl": True}, driver=old), "driver").hint
    assert hint == "install driver 580 or later in Windows: WSL uses that one"
    assert not found(host(os={"wsl": True}, driver=new), "driver")


@pytest.mark.parametrize(
    ("system", "hint"),
    [
        ({"id": "ubuntu"}, "install driver 580 or later (`apt-get install nvidia-driver-580-server-open`), then restart the machine"),
        ({"id": "debian", "like": []}, "install driver 580 or later from NVIDIA's package repository (`apt-get install nvidia-open`), then restart the machine"),
        ({"id": "rocky", "like": ["rhel"]}, "install driver 580 or later from NVIDIA's package repository (`dnf install nvidia-open`), then restart the machine"),
        ({"id": "opensuse-leap", "like": ["suse"]}, "install driver 580 or later from NVIDIA's package repository (`zypper install nvidia-open`), then restart the machine"),
        ({"id": "nixos", "like": []}, "install driver 580 or later from NVIDIA's package repository, then restart the machine"),
    ],
)  # fmt: skip
def test_the_hint_is_in_the_distributions_words(system: dict[str, Any], hint: str) -> None:
    facts = host(os=system, driver={"version": "575.64.05", "cuda": "12.9"})
    assert one(facts, "driver").hint == f"{hint}; or take a stack for CUDA 12"


def test_a_gpu_of_the_host_may_ask_for_a_newer_driver_and_no_other() -> None:
    newer = DriverNeeds("12.8", "570.26", "GPU 12.0 is known from there on", "made")
    older = DriverNeeds("12.8", "525.60.13", "the wheels are CUDA 12.8's", "made")
    needs = NEEDS.model_copy(
        update={"driver": older, "gpu_drivers": {"12.0": newer, "9.0": older}, "require": "cuda>=12.0"}
    )
    driver = {"version": "550.144.03", "cuda": "12.4"}
    assert one(host(driver=driver), "driver", needs).because == "GPU 12.0 is known from there on"
    assert not found(host(driver=driver, gpus=[gpu(capability="9.0")]), "driver", needs)


def test_the_toolkit_refuses_an_image_whose_requirement_does_not_hold() -> None:
    foreign = Needs(subject="image", require="cuda>=12.8 brand=tesla,driver>=470,driver<471")
    facts = host(driver={"version": "550.144.03", "cuda": "12.4"})
    finding = one(facts, "requirement", foreign)
    assert (
        finding.message
        == "the toolkit will not start it here: the image asks for `cuda>=12.8`, the driver gives CUDA 12.4"
    )
    assert finding.hint.endswith("`NVIDIA_DISABLE_REQUIRE` would only move the failure into the container")
    # What is not known may be met: the alternative asks for a brand.
    assert not found(host(driver={"version": "470.57.02", "cuda": "11.4"}), "requirement", foreign)


def test_disabling_the_check_is_safe_within_a_major() -> None:
    needs = NEEDS.model_copy(update={"driver": DriverNeeds("12.8", "525.60.13", "x", "made"), "require": "cuda>=12.8"})
    facts = host(driver={"version": "550.144.03", "cuda": "12.4"})
    assert "`--env NVIDIA_DISABLE_REQUIRE=1`" in one(facts, "requirement", needs).hint


def test_a_requirement_that_fails_with_the_driver_is_said_once() -> None:
    facts = host(driver={"version": "575.64.05", "cuda": "12.9"})
    assert not found(facts, "requirement")
    assert "the container toolkit refuses to start it as well (`cuda>=13.0`)" in one(facts, "driver").because


# --- forward compatibility --------------------------------------------------------------------------------------------

OLDER = {"libraries": [{"path": "/usr/local/cuda-12.9/compat/libcuda.so.575.57.08", "version": "575.57.08"}]}


def test_compatibility_libraries_before_a_driver_that_is_not_older() -> None:
    facts = host(compat={**OLDER, "on_loader_path": True, "error": 803})
    # With a stack that asks for a driver, that rule says it: once.
    assert [finding.rule for finding in evaluate(facts, NEEDS).findings if finding.severity is Severity.ERROR] == [
        "driver"
    ]
    # A driver that is new enough already is no way out of it.
    assert (
        one(facts, "driver").hint
        == "take the `compat` folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d of the image"
    )
    assert one(facts, "compat", None).because.startswith("libcuda and the kernel's driver disagree then: error 803")
    assert not found(host(compat=OLDER), "compat", None)


def test_compatibility_libraries_on_geforce() -> None:
    newer = {
        "libraries": [{"path": "/usr/local/cuda/compat/libcuda.so.590.44.01", "version": "590.44.01"}],
        "on_loader_path": True,
    }
    assert "error 804" in one(host(compat=newer, driver={"kind": "geforce"}), "compat", None).because
    assert not found(host(compat=newer, driver={"kind": "datacenter"}), "compat", None)


def test_compatibility_libraries_make_up_for_an_old_driver_on_data_centre_gpus_only() -> None:
    newer = {"libraries": [{"path": "/x/libcuda.so.580.65.06", "version": "580.65.06"}], "on_loader_path": True}
    old = {"version": "575.57.08", "cuda": "13.0"}
    usable = host(compat=newer, driver={**old, "kind": "datacenter"})
    assert one(usable, "driver").severity is Severity.WARNING
    assert one(host(compat=newer, driver={**old, "kind": "geforce"}), "driver").severity is Severity.ERROR


@pytest.mark.parametrize("code", [100, 802, 803, 804, 999])
def test_what_cuinit_said(code: int) -> None:
    finding = one(host(compat={"error": code}), "compat", None)
    assert finding.message == f"CUDA does not start on this host: cuInit gives error {code}"


def test_802_where_the_fabric_manager_is_seen_to_lack_is_said_once() -> None:
    facts = host(compat={"error": 802}, fabric={"nvswitch": True, "fabricmanager": "failed"})
    assert [f.rule for f in evaluate(facts).findings if f.severity is Severity.ERROR] == ["fabric-manager"]
    assert one(facts, "fabric-manager").message == "the host has NVSwitch, and the fabric manager has failed"


@pytest.mark.parametrize(
    ("version", "cuda", "said"),
    [("535", "12.8", True), ("535.129.03", "12.2", False), ("610.10", "13.5", False), ("580", "13.0", False)],
)
def test_a_driver_and_a_cuda_release_that_do_not_go_together(version: str, cuda: str, said: bool) -> None:
    assert bool(found(host(driver={"version": version, "cuda": cuda}), "driver-contradiction", None)) is said


# --- what runs on which GPU -------------------------------------------------------------------------------------------


def test_a_gpu_without_code() -> None:
    facts = host(gpus=[gpu(name="NVIDIA GB10", capability="12.1")])
    assert one(facts, "gpu-code").message == "stack has no code for GPU 0 (NVIDIA GB10, 12.1)"
    assert verdict(facts) == "broken"


def test_a_gpu_without_code_beside_one_with() -> None:
    facts = host(gpus=[gpu(), gpu(index=1, name="NVIDIA GB10", capability="12.1")])
    finding = one(facts, "gpu-code")
    assert (finding.severity, finding.hint, verdict(facts)) == (
        Severity.WARNING,
        "leave it out: `--gpus device=0`",
        "ok",
    )


def test_a_gpu_that_the_stack_was_not_made_for_is_uncertain() -> None:
    facts = host(gpus=[gpu(name="NVIDIA A100", capability="8.0")])
    assert one(facts, "gpu-target").hint == "add 8.0 to `gpus` of a matrix of your own, and build it"
    assert verdict(facts) == "uncertain"


def test_a_target_that_the_kernels_lack_code_for() -> None:
    needs = NEEDS.model_copy(update={"lacking": {"12.0": ("kernels.so",)}})
    assert one(host(), "gpu-code", needs).severity is Severity.ERROR


def test_mixed_gpus() -> None:
    facts = host(gpus=[gpu(name="Quadro RTX 6000", capability="7.5"), gpu(index=1)])
    assert one(facts, "mixed-gpus").hint == "name those of one kind: `--gpus device=1`"


def test_mig() -> None:
    assert one(host(gpus=[gpu(mig="on"), gpu(index=1)]), "mig").message == "MIG is on for GPU 0"


def test_gpu_memory_in_use() -> None:
    facts = host(gpus=[gpu(used=40 << 30), gpu(index=1, used=100 << 20)])
    assert one(facts, "gpu-in-use").message == "GPU memory is in use (GPU 0: 42.9 GB of 103 GB)"


def test_persistence_mode() -> None:
    assert one(host(gpus=[gpu(persistence=False)]), "persistence").severity is Severity.NOTE


# --- containers -------------------------------------------------------------------------------------------------------


def test_another_processor() -> None:
    facts = host(os={"arch": "aarch64"})
    assert one(facts, "platform").message == "the host is aarch64, stack is for linux/amd64"


def test_no_engine() -> None:
    facts = host(engine=None, unknown={"engine": "neither `docker` nor `podman` is installed"})
    assert (one(facts, "engine-absent").hint, verdict(facts)) == ("`apt-get install docker.io`", "broken")


def test_an_engine_that_does_not_let_in() -> None:
    facts = host(engine=None, unknown={"engine": "`docker info` said: permission denied while trying to connect"})
    assert (one(facts, "engine-refuses").severity, verdict(facts)) == (Severity.WARNING, "uncertain")


def test_a_toolkit_that_the_engine_does_not_know() -> None:
    runtimes = {"runtimes": ["runc"]}
    assert one(host(engine=runtimes), "toolkit-not-configured").severity is Severity.WARNING
    assert not found(host(engine={**runtimes, "cdi": ["nvidia.com/gpu=all"]}), "toolkit-not-configured")
    # A runtime without the tool that reports its version is a toolkit all the same.
    assert not found(host(toolkit={"installed": False}), "toolkit-absent")


def test_podman_without_a_cdi_file() -> None:
    facts = host(engine={"kind": "podman", "runtimes": ["crun"]})
    assert one(facts, "cdi-absent").hint == "`nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`"


SPEC = {"file": "/etc/cdi/nvidia.yaml", "devices": ["nvidia.com/gpu=all"], "driver": "575.64.05"}


def test_a_cdi_file_of_another_driver() -> None:
    stale = {"cdi_specs": [SPEC]}
    finding = one(host(toolkit=stale, engine={"kind": "podman", "runtimes": ["crun"]}), "cdi-stale")
    assert (finding.severity, finding.because) == (Severity.ERROR, "it is of driver 575.64.05, loaded is 580.95.05")
    # Docker uses it only where it is asked to.
    assert one(host(toolkit=stale), "cdi-stale").severity is Severity.WARNING
    assert not found(host(toolkit={"cdi_specs": [{**SPEC, "driver": "580.95.05"}]}), "cdi-stale")


def test_an_engine_without_root() -> None:
    facts = host(engine={"rootless": True})
    assert one(facts, "rootless").severity is Severity.WARNING
    assert one(facts, "memlock").message == "locked memory is limited to 8.39 MB"
    assert one(facts, "memlock").because.startswith("an engine without root cannot raise it")


def test_locked_memory_where_the_host_is_itself_a_container() -> None:
    finding = one(host(os={"container": True}), "memlock")
    assert (finding.severity, finding.message) == (Severity.NOTE, "locked memory is limited to 8.39 MB")
    assert "whose engine can raise it only with the capability SYS_RESOURCE" in finding.because
    assert finding.hint.startswith("start the outer container with `--ulimit memlock=-1:-1`")
    # An engine with root raises it, and where it is not limited there is nothing to raise.
    assert not found(host(), "memlock")
    assert not found(host(os={"container": True}, ulimits={"memlock": "unlimited"}), "memlock")
    assert not found(host(os={"container": True}, gpus=[]), "memlock")


def test_selinux_and_podman() -> None:
    facts = host(os={"selinux": "enforcing"}, engine={"kind": "podman"}, toolkit={"cdi_specs": [SPEC]})
    assert found(facts, "selinux") and not found(host(os={"selinux": "enforcing"}), "selinux")


def test_device_files() -> None:
    assert (
        one(host(driver={"nodes": ["/dev/nvidia0", "/dev/nvidiactl"]}), "devices").message
        == "`/dev/nvidia-uvm` is not there"
    )
    assert one(host(driver={"uvm": False}), "devices").message == "the module nvidia-uvm is not loaded"


@pytest.mark.parametrize(
    ("free", "store", "severity", "says"),
    [
        (17_000_000_000, "classic", None, "ok"),
        (16_900_000_000, "classic", Severity.WARNING, "uncertain"),
        (11_900_000_000, "classic", Severity.ERROR, "broken"),
        (16_900_000_000, "containerd", Severity.ERROR, "broken"),
    ],
)
def test_disk(free: int, store: str, severity: Severity | None, says: str) -> None:
    facts = host(disk={"data_root_free": free}, engine={"store": store})
    assert [finding.severity for finding in found(facts, "disk")] == ([severity] if severity else [])
    assert verdict(facts) == says


def test_an_image_that_is_there_needs_no_disk() -> None:
    present = {"images": [{"id": "sha256:1", "lock": "a" * 64}]}
    assert not found(host(disk={"data_root_free": 0}, present=present), "disk")


def test_shared_memory() -> None:
    assert one(host(), "shm").severity is Severity.NOTE
    assert [f.severity for f in found(host(shm={"host": 64 << 20}), "shm")] == [Severity.WARNING, Severity.NOTE]
    assert not found(host(gpus=[gpu()]), "shm")


# --- how GPUs reach each other ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pcie", "said"),
    [
        ({"iommu": "on"}, True),
        ({"acs": True}, True),
        ({"iommu": "on", "topology": "nvlink"}, False),
        ({"iommu": "passthrough"}, False),
        ({"iommu": "off"}, False),
    ],
)
def test_what_redirects_peer_traffic(pcie: dict[str, Any], said: bool) -> None:
    assert bool(found(host(pcie=pcie), "p2p-redirected")) is said


def test_no_peer_access() -> None:
    facts = host(pcie={"p2p": [["X", "NS"], ["NS", "X"]], "iommu": "on"})
    assert "the driver says so of GPUs 0-1" in one(facts, "no-peer-access").because
    assert not found(facts, "p2p-redirected")


def test_geforce_where_nothing_tells_of_peer_access() -> None:
    cards = [gpu(index=i, name="NVIDIA GeForce RTX 4090", capability="8.9") for i in range(2)]
    assert found(host(gpus=cards, pcie={"p2p": None}), "no-peer-access")
    older = [{**card, "name": "NVIDIA GeForce RTX 3090"} for card in cards]
    assert not found(host(gpus=older, pcie={"p2p": None}), "no-peer-access")


# --- what is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"driver": {"version": None, "cuda": None}}, "the driver is not known"),
        ({"gpus": None}, "the GPUs are not known"),
        ({"gpus": [gpu(capability=None)]}, "the compute capability of a GPU is not known"),
        ({"engine": None}, "the engine is not known"),
        ({"engine": {"runtimes": []}, "toolkit": {"installed": None}}, "the container toolkit is not known"),
        ({"disk": {"data_root_free": None}}, "the free disk is not known"),
    ],
)
def test_what_decides_and_is_not_known(change: dict[str, Any], message: str) -> None:
    facts = host(**change)
    # `are` for one thing that is several would need a grammar.
    assert one(facts, "not-known").message.replace(" are ", " is ") == message.replace(" are ", " is ")
    assert verdict(facts) == "uncertain"


def test_an_empty_host_is_uncertain_and_never_ok() -> None:
    assert verdict(HostFacts()) == verdict(HostFacts(), None) == "uncertain"


VALUES: dict[str, list[Any]] = {
    "gpus": [None, [], [gpu()], [gpu(), gpu(index=1, capability="8.6", name=None, mig="on", used=9 << 30, persistence=False)],
             [gpu(name="NVIDIA GB10", capability="12.1")]],
    "os": [{}, {"wsl": True}, {"arch": "aarch64", "selinux": "enforcing"}, {"container": True}],
    "driver": [{}, {"version": None, "cuda": None, "loaded": False}, {"version": "550", "cuda": "12.8"}, {"version": None, "cuda": "12.2"},
               {"kind": "geforce", "uvm": False, "nodes": []}, {"library": "1", "said": "x"}],
    "engine": [None, {"rootless": True}, {"kind": "podman", "runtimes": []}, {"runtimes": [], "store": "containerd"}],
    "toolkit": [{}, {"installed": False, "version": None}, {"installed": None}, {"cdi_specs": [{**SPEC, "missing": ["/dev/x"]}]}],
    "disk": [{}, {"data_root_free": 0}, {"data_root_free": None}, {"data_root_free": 13_000_000_000}],
    "shm": [{}, {"host": 0}, {"container_default": None}],
    "compat": [{}, {"error": 802}, {"error": 999}, {**OLDER, "on_loader_path": True}],
    "fabric": [{}, {"nvswitch": True, "fabricmanager": "absent"}],
    "pcie": [{}, {"iommu": "on", "acs": True}, {"p2p": None, "iommu": None, "acs": None}, {"p2p": [["X", "NS"], ["NS", "X"]]},
             {"devices": 2, "bound": ["vfio-pci"]}],
}  # fmt: skip

ALL = tuple(
    finding
    for name, values in VALUES.items()
    for value in values
    for needs in (NEEDS, None)
    for finding in evaluate(host(**{name: value}), needs).findings
)


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries({name: st.sampled_from(values) for name, values in VALUES.items()}), st.booleans())
def test_on_any_host_a_verdict_follows_from_the_findings(change: dict[str, Any], alone: bool) -> None:
    diagnosis: Diagnosis = evaluate(host(**change), None if alone else NEEDS)
    errors = any(finding.severity is Severity.ERROR for finding in diagnosis.findings)
    open_ = any(finding.evidence.get("decides") for finding in diagnosis.findings)
    assert diagnosis.verdict == ("broken" if errors else "uncertain" if open_ else "ok")
    keys = [(finding.rule, finding.subject, finding.message) for finding in diagnosis.findings]
    assert len(keys) == len(set(keys))


def test_every_rule_was_seen_to_say_something() -> None:
    silent = []
    for rule in RULES:
        hosts = [host(**{name: value}) for name, values in VALUES.items() for value in values]
        hosts.append(host(os={"selinux": "enforcing"}, engine={"kind": "podman"}))
        hosts.append(host(engine=None, unknown={"engine": "neither `docker` nor `podman` is installed"}))
        foreign = Needs(subject="image", require="cuda>=13.5")
        if not any(list(rule(facts, needs)) for facts in hosts for needs in (NEEDS, None, foreign)):
            silent.append(rule.__name__)
    assert silent == []
