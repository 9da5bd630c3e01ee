"""Drivers: what a stack asks of one, and what a host's makes of the stack."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from builder.driver import (
    DriverNeeds,
    at_least,
    compat_in_use,
    contradicts,
    driver_needs,
    judge_driver,
    number,
    own_driver,
    reported_cuda,
)
from builder.errors import UsageError
from builder.facts import CompatFact, DriverFact, DriverMajorFact, GpuFact, PtxFact, TargetFact, load_facts
from builder.lock import lock_path, read_lock
from builder.matrix import load, parse_matrix
from builder.rules import Context, evaluate_rules
from tests.unit.test_lockrules import MATRICES, TEXT, TODAY, lock_of, wheel


def needs(*wheels: str, gpus: str = '["9.0"]', ptx: str | None = None) -> DriverNeeds | None:
    matrix = parse_matrix(TEXT.replace('["12.0"]', gpus), Path("matrices/x.yaml")).matrix
    return driver_needs(matrix, lock_of(map(wheel, wheels)), ptx=ptx)


def judged(wants: DriverNeeds | None, driver: str, compat: str | None = None) -> str:
    assert wants is not None
    return "\n".join(str(finding) for finding in judge_driver(wants, driver, compat))


CU13 = ("torch 2.11.0", "nvidia-cuda-runtime 13.0.96")
CU12 = ("torch 2.9.1", "nvidia-cuda-runtime-cu12 12.8.90")


def test_the_major_of_the_strictest_wheel_decides() -> None:
    assert needs(*CU13) == DriverNeeds(
        cuda="13.0.2",
        minimum_driver="580",
        because="torch 2.11.0 is CUDA 13.0's, and CUDA 13.x needs driver 580 or later",
        source="NVIDIA, CUDA Compatibility, table 1 (13.x: 580 or later)",
        full_driver="580.95.05",
        full_source="CUDA release notes, toolkit driver versions",
        limits="PTX that is newer than the driver is not compiled, and what needs a newer driver is refused",
        gpu_driver="525.60.13",
        gpus=("9.0",),
    )


@pytest.mark.parametrize(
    ("wheels", "cuda", "minimum", "full"),
    [
        (CU12, "12.8", "525.60.13", "570.26"),
        (("torch 2.9.1+cu130",), "13.0", "580", "580.65.06"),
        (("torch 2.9.1+cu126",), "12.6", "525.60.13", "560.28.03"),
        # Only the major is known of it, and it is stricter than torch's.
        ((*CU12, "nvidia-nccl-cu13 2.28.9"), "13", "580", ""),
        (("cuda-toolkit 13.0.3",), "13.0.3", "580", "580.95.05"),
        (("nvidia-cuda-runtime 13.2.51",), "13.2", "580", "595.45.04"),
        (("nvidia-cublas-cu12 12.8.4.1",), "12", "525.60.13", ""),
    ],
)
def test_what_wheels_ask_for(wheels: tuple[str, ...], cuda: str, minimum: str, full: str) -> None:
    found = needs(*wheels)
    assert found is not None
    assert (found.cuda, found.minimum_driver, found.full_driver) == (cuda, minimum, full)


def test_a_stack_without_cuda_asks_for_none() -> None:
    assert needs("numpy 2.0.0") is None
    # Of another build than the default index's nothing is known.
    assert (
        driver_needs(parse_matrix(TEXT, Path("x.yaml")).matrix, lock_of([wheel("torch 2.11.0", index="site")])) is None
    )


def test_a_gpu_may_ask_for_more_than_the_major() -> None:
    found = needs(*CU12, gpus='["9.0", "12.0"]')
    assert found is not None
    assert (found.minimum_driver, found.gpu_driver) == ("570.26", "570.26")
    assert (
        found.because == "GPU 12.0 (RTX PRO 6000 Blackwell) is known from CUDA 12.8 on, which came with driver 570.26"
    )


def test_ptx_may_ask_for_more_than_both() -> None:
    found = needs(*CU12, ptx="9.1")
    assert found is not None
    assert found.minimum_driver == "590"
    assert (
        found.because == "PTX 9.1 is all that a GPU of the stack finds, and the driver compiles it from branch 590 on"
    )
    assert needs(*CU12, ptx="8.0") == needs(*CU12)


def test_a_driver_of_an_older_major() -> None:
    assert (
        judged(needs(*CU13), "570.86.10")
        == """\
error: driver 570.86.10 is older than 580, and gives CUDA 12.8 [driver]
  because: torch 2.11.0 is CUDA 13.0's, and CUDA 13.x needs driver 580 or later
  hint: install driver 580 or later, or on data-centre GPUs (H100, H200, GH200) put the libraries of `cuda-compat-13-0` before the \
driver's: CUDA 13.0, or take a stack for CUDA 12
  source: NVIDIA, CUDA Compatibility, table 1 (13.x: 580 or later)"""
    )


def test_an_older_driver_of_the_same_major_runs_the_stack() -> None:
    assert (
        judged(needs(*CU12), "535.104.05")
        == """\
note: driver 535.104.05 runs CUDA 12.8 by minor-version compatibility, and gives CUDA 12.2 [driver]
  because: CUDA 12.8 came with driver 570.26; with an older one PTX that is newer than the driver is not compiled, and what needs \
a newer driver is refused
  hint: see that no GPU is left to PTX: `builder arch --gpu CC --driver 535.104.05` on the wheels with kernels
  source: CUDA release notes, toolkit driver versions"""
    )


def test_a_driver_that_has_all() -> None:
    assert (
        judged(needs(*CU13), "580.159.04")
        == judged(needs(*CU12), "580.159.04")
        == judged(needs(*CU13), "610.43.02")
        == ""
    )


def test_a_driver_that_does_not_know_the_gpu() -> None:
    found = needs(*CU12, gpus='["12.0"]')
    assert (
        judged(found, "550.144.03")
        == """\
error: driver 550.144.03 is older than 570.26, and gives CUDA 12.4 [driver]
  because: GPU 12.0 (RTX PRO 6000 Blackwell) is known from CUDA 12.8 on, which came with driver 570.26
  hint: install driver 570.26 or later (compatibility libraries do not help: with them a driver knows no more GPUs)
  source: https://developer.nvidia.com/cuda-gpus; clang's MinVersionForOffloadArch; nvcc 13.0.88 measured 2026-11-29; CUDA release \
notes, toolkit driver versions"""
    )
    with_libraries = judged(found, "550.144.03", "12.8")
    assert with_libraries.startswith("error: driver 550.144.03 is older than 570.26")
    assert "CUDA 12.8 do not make up for it: with them the driver knows no more GPUs" in with_libraries


def test_compatibility_libraries_make_up_for_the_major() -> None:
    (found,) = judge_driver(needs(*CU13) or pytest.fail(), "535.104.05", "13.0")
    assert (
        str(found)
        == """\
warning: driver 535.104.05 is older than 580, and gives CUDA 12.2 [driver]
  because: torch 2.11.0 is CUDA 13.0's, and CUDA 13.x needs driver 580 or later; the compatibility libraries of CUDA 13.0 make up \
for it on data-centre GPUs only (H100, H200, GH200)
  hint: install driver 580 or later, or take a stack for CUDA 12
  source: NVIDIA, CUDA Compatibility, table 1 (13.x: 580 or later)"""
    )
    older = judged(needs(*CU13), "535.104.05", "12.8")
    assert older.startswith("error: ")
    assert "the compatibility libraries of CUDA 12.8 are too old to make up for it" in older


@pytest.mark.parametrize(
    ("wheels", "gpus", "driver", "says"),
    [
        # Each branch has its packages; 570 was not there yet when CUDA 12.8's were made.
        (
            CU13,
            '["9.0"]',
            "570.86.10",
            "on data-centre GPUs (H100, H200, GH200) put the libraries of `cuda-compat-13-0`",
        ),
        (CU13, '["8.9"]', "550.54.14", "on data-centre GPUs (L4, L40, L40S) put"),
        (CU13, '["9.0"]', "545.23.06", "none that is known has CUDA 13.0 and is meant for drivers of branch 545"),
        (
            ("torch 2.9.1", "nvidia-cuda-runtime-cu12 12.9.79"),
            '["8.0"]',
            "470.82.01",
            "none that is known has CUDA 12.9",
        ),
        (
            CU12,
            '["8.0"]',
            "470.82.01",
            "(A100, A30) put the libraries of `cuda-compat-12-8` before the driver's: CUDA 12.8",
        ),
        # Of those with 12.0 one is a data-centre GPU; a driver before 570.26 knows none of them.
        (CU13, '["9.0", "12.0"]', "575.51.03", "(H100, H200, GH200, RTX PRO 6000 Blackwell Server Edition) put"),
        (CU13, '["9.0", "12.0"]', "535.104.05", "(H100, H200, GH200) put"),
        (CU13, '["12.1"]', "575.57.08", "do not help: GPU 12.1 (GB10 (DGX Spark)) is no data-centre GPU"),
        (CU13, '["12.0"]', "535.104.05", "do not help: with them a driver knows no more GPUs"),
        (("torch 2.11.0", "nvidia-cuda-runtime 13.9.1"), '["9.0"]', "535.104.05", "none that is known has CUDA 13.9"),
    ],
)
def test_what_a_package_of_compatibility_libraries_would_give(
    wheels: tuple[str, ...], gpus: str, driver: str, says: str
) -> None:
    found = judged(needs(*wheels, gpus=gpus), driver)
    assert found.startswith("error: ") and says in found


def test_libraries_that_are_not_meant_for_the_branch() -> None:
    found = judged(needs(*CU13), "545.23.06", "13.0")
    assert found.startswith("warning: ")
    assert "on data-centre GPUs only (H100, H200, GH200), and `cuda-compat-13-0` is not meant for branch 545" in found


def test_libraries_compile_no_ptx_that_their_own_driver_does_not() -> None:
    assert judged(needs(*CU12, ptx="9.1"), "570.86.10", "13.0").startswith("error: ")
    assert judged(needs(*CU12, ptx="9.0"), "570.86.10", "13.0").startswith("warning: ")


def test_libraries_beside_a_driver_of_the_same_major() -> None:
    found = judged(needs(*CU12), "535.104.05", "12.8")
    assert found.startswith("note: driver 535.104.05 runs CUDA 12.8 by minor-version compatibility")
    assert "the compatibility libraries of CUDA 12.8 make up for it on data-centre GPUs only" in found


def test_compatibility_libraries_where_no_gpu_takes_them() -> None:
    assert (
        judged(needs(*CU13, gpus='["12.1"]'), "580.95.05", "13.1")
        == """\
error: compatibility libraries of CUDA 13.1 lie before those of driver 580.95.05, and GPU 12.1 (GB10 (DGX Spark)) is no data-centre \
GPU [driver]
  because: forward compatibility is for data-centre GPUs: error 804, `forward compatibility was attempted on non supported HW`
  hint: take the `compat` folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d of the image
  source: NVIDIA, CUDA Compatibility, Forward Compatibility; case 068"""
    )
    assert judged(needs(*CU13), "580.95.05", "13.1") == ""


@pytest.mark.parametrize(
    ("driver", "cuda", "own", "compat"),
    [
        ("535", "12.8", "12.2", "12.8"),
        ("535.104.05", "12.2", None, None),
        ("580.159.04", "12.9", "13.0", None),
        # A branch alone may be a driver of it that gives more than the first did, and newer ones are not known.
        ("580", "12.9", None, None),
        ("999.10", "13.9", None, None),
    ],
)
def test_a_reported_cuda_that_is_not_the_driver_s(driver: str, cuda: str, own: str | None, compat: str | None) -> None:
    assert (contradicts(driver, cuda), compat_in_use(driver, cuda)) == (own, compat)


def test_compatibility_libraries_before_a_newer_driver() -> None:
    assert (
        judged(needs(*CU12), "580.105.08", "12.9")
        == """\
error: compatibility libraries of CUDA 12.9 lie before those of driver 580.105.08, which is not older [driver]
  because: libcuda and the kernel's driver then disagree: error 803, `system has unsupported display driver / cuda driver combination`
  hint: take the `compat` folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d of the image
  source: CUDA release notes, toolkit driver versions; NVIDIA, CUDA Compatibility, Forward Compatibility; cases 064 and 066"""
    )


@pytest.mark.parametrize("driver", ["", "x", "58", "580.", "580.1.2.3", "580 ", "580\n", "v580", "1580"])
def test_what_is_no_driver(driver: str) -> None:
    with pytest.raises(UsageError, match="is not a driver's version"):
        number(driver)


PARTS = st.lists(st.integers(0, 999), max_size=2)


@given(st.integers(100, 999), PARTS, st.integers(100, 999), PARTS)
def test_versions_are_compared_as_numbers(branch: int, parts: list[int], other: int, others: list[int]) -> None:
    one, two = ".".join(map(str, [branch, *parts])), ".".join(map(str, [other, *others]))
    if branch != other:
        assert at_least(one, two) == (branch > other)
    else:
        assert at_least(one, str(branch)) and at_least(str(branch), two)
        assert at_least(one, two) or at_least(two, one)


@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        ("450.80.02", "11.0"),
        ("535.54.03", "12.2"),
        ("550.90.07", "12.4"),
        ("565.57.01", "12.7"),
        ("570.86.10", "12.8"),
        ("580.142", "13.0"),
        ("590.48.01", "13.1"),
        ("440.33", None),
    ],
)
def test_the_cuda_that_a_driver_reports(driver: str, cuda: str | None) -> None:
    assert reported_cuda(driver) == cuda


def test_the_facts_agree_with_each_other() -> None:
    drivers = load_facts(DriverFact)
    assert [fact.cuda for fact in drivers] == sorted((fact.cuda for fact in drivers), key=Version)
    assert [number(fact.driver) for fact in drivers] == sorted(number(fact.driver) for fact in drivers)
    # The branch that PTX names is the one of the release that it came with.
    for fact in load_facts(PtxFact):
        own = own_driver(fact.cuda)
        assert own is None or fact.cuda == "11.0" or number(own.driver)[0] == fact.driver
    for major in load_facts(DriverMajorFact):
        first = own_driver(f"{major.major}.0")
        assert first is not None and number(first.driver)[0] == number(major.driver)[0]


def test_a_compatibility_package_is_for_older_drivers_than_its_own() -> None:
    for fact in load_facts(CompatFact):
        own = own_driver(fact.cuda)
        assert own is not None and max(fact.branches) < number(own.driver)[0]
        assert fact.package == f"cuda-compat-{fact.cuda.replace('.', '-')}"


def test_what_ptxas_takes_is_what_the_first_nvcc_of_a_gpu_is() -> None:
    """Two sources: clang's table and the programs themselves."""
    targets = load_facts(TargetFact)
    oldest = Version(targets[0].cuda)
    for gpu in load_facts(GpuFact):
        knowing = [Version(fact.cuda) for fact in targets if fact.knows(gpu)]
        assert min(knowing) == max(Version(gpu.minimum_cuda), oldest)
        assert knowing == sorted(knowing) and knowing == [Version(t.cuda) for t in targets][-len(knowing) :]


def test_the_rule_is_about_a_driver_that_is_named() -> None:
    path = MATRICES / "cu130-next.yaml"
    loaded, lock = load(path), read_lock(lock_path(path))

    def told(driver: str | None) -> list[str]:
        found = evaluate_rules(Context(loaded, TODAY, lock, driver=driver))
        return [finding.message for finding in found if finding.rule == "driver"]

    assert told(None) == told("580.159.04") == []
    assert told("570.86.10") == ["driver 570.86.10 is older than 580, and gives CUDA 12.8"]


def test_a_driver_that_some_of_the_gpus_are_too_new_for() -> None:
    text = TEXT.replace('["12.0"]', '["9.0", "12.0"]').replace("13.0.2", "12.8.1").replace("2.11.0", "2.9.1")
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    found = evaluate_rules(Context(loaded, TODAY, lock_of(map(wheel, CU12)), driver="550.144.03"))
    said = [(finding.severity.value, finding.message) for finding in found if finding.rule == "driver"]
    assert said == [
        ("warning", "driver 550.144.03 is older than 570.26, and gives CUDA 12.4"),
        ("note", "driver 550.144.03 runs CUDA 12.8 by minor-version compatibility, and gives CUDA 12.4"),
    ]
    alone = parse_matrix(text.replace('"9.0", ', ""), Path("matrices/x.yaml"))
    found = evaluate_rules(Context(alone, TODAY, lock_of(map(wheel, CU12)), driver="550.144.03"))
    assert [finding.severity.value for finding in found if finding.rule == "driver"] == ["error"]


def test_a_cuda_that_is_reported_beside_the_driver() -> None:
    loaded = parse_matrix(TEXT.replace('["12.0"]', '["9.0", "12.0"]'), Path("matrices/x.yaml"))

    def told(driver: str | None, cuda: str) -> list[tuple[str, str]]:
        found = evaluate_rules(Context(loaded, TODAY, lock_of(map(wheel, CU13)), driver=driver, driver_cuda=cuda))
        return [(each.severity.value, str(each).split("\n")[0]) for each in found if each.rule == "driver"]

    contradiction = ("warning", "warning: driver 535 is CUDA 12.2's, and CUDA {} is reported [driver]")
    older = "{0}: driver 535 is older than 580, and gives CUDA 12.2 [driver]"
    assert told("535", "12.2") == [("error", older.format("error"))]
    # What lies before the driver is too old as well.
    assert told("535", "12.8") == [
        ("error", older.format("error")),
        (contradiction[0], contradiction[1].format("12.8")),
    ]
    # An H200 takes it; of 12.0 the driver knows nothing, and the host may have none.
    assert told("535", "13.0") == [
        (contradiction[0], contradiction[1].format("13.0")),
        ("warning", older.format("warning")),
        ("warning", older.format("warning")),
    ]
    with pytest.raises(UsageError, match="is no CUDA release"):
        told("535", "13")
    with pytest.raises(UsageError, match="`--cuda-driver` without `--driver`"):
        told(None, "13.0")
