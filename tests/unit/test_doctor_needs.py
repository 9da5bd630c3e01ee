"""What stacks and images need, and what of it stands in an image for NVIDIA's container toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.doctor.needs import Needs, of_image, of_matrix
from builder.doctor.requirement import holds, require_cuda, same_major, stack_driver
from builder.driver import DriverNeeds
from builder.facts import TransferFact, UnpackedFact, load_facts
from builder.lock import lock_path, read_lock
from builder.matrix import load
from builder.render import render
from tests.made import ROOT, artefact, lock_of, tiny

UV = Path("/usr/bin/env")


def needs(name: str) -> Needs:
    path = ROOT / "matrices" / f"{name}.yaml"
    return of_matrix(load(path).matrix, read_lock(lock_path(path)))


# --- a stack ----------------------------------------------------------------------------------------------------------


def test_the_needs_of_a_stack_on_cuda_13() -> None:
    found = needs("cu130-next")
    assert found.driver is not None
    assert (found.driver.minimum_driver, found.require, found.platform) == ("580", "cuda>=13.0", "linux/amd64")
    assert (found.gpus, found.jit, found.p2p) == (("12.0", "9.0"), "nvcc", ("symm_mem", "allreduce_fusion"))


def test_each_gpu_of_a_stack_asks_for_its_own_driver() -> None:
    """An H200 runs CUDA 12.8 by minor-version compatibility on drivers that do not know an RTX PRO 6000."""
    found = needs("cu128")
    assert found.driver is not None
    assert (found.driver.minimum_driver, found.require) == ("525.60.13", "cuda>=12.0")
    assert {gpu: driver.minimum_driver for gpu, driver in found.gpu_drivers.items()} == {
        "12.0": "570.26",
        "9.0": "525.60.13",
    }
    assert found.driver_for([]) == found.driver
    assert found.driver_for(["9.0", "12.0", "7.5"]) == found.gpu_drivers["12.0"]


def test_the_kernels_code_for_gpus_that_are_no_target() -> None:
    found = needs("cu130-next")
    assert found.lacking["12.0"] == found.lacking["9.0"] == ()
    # sm_120a runs on 12.0 alone.
    assert found.lacking["12.1"] == ("sgl_kernel/sm100/common_ops.abi3.so",)
    assert not found.not_looked_at


def test_wheels_whose_code_was_not_looked_at_are_told() -> None:
    found = needs("cu130")
    assert found.not_looked_at == ("sgl-kernel 0.3.21+cu130", "torch 2.9.1+cu130")
    assert found.lacking == {}


def test_the_bytes_of_a_pull_are_worked_out_from_the_wheels() -> None:
    fact, found = load_facts(UnpackedFact)[0], needs("cu130-next")
    wheels = sum(a.size or 0 for a in read_lock(ROOT / "matrices" / "cu130-next.lock.json").artefacts)
    assert found.unpacked is not None and found.compressed is not None
    # The image that was built has 11.3 GB (README).
    assert 11.0e9 < found.unpacked < 11.8e9
    assert wheels < found.compressed < wheels * 1.1
    # The OS layer of that very image, as it was pushed.
    assert found.compressed - wheels == next(f.compressed for f in load_facts(TransferFact) if f.layer == "os")
    assert list(found.lacking) == [
        "7.0",
        "7.5",
        "8.0",
        "8.6",
        "8.7",
        "8.9",
        "9.0",
        "10.0",
        "10.3",
        "11.0",
        "12.0",
        "12.1",
    ]
    assert abs(found.unpacked / wheels - fact.disk / fact.wheels) < 0.15


def test_where_sizes_are_not_known_the_budget_counts() -> None:
    assert needs("cu130").unpacked == 13_000_000_000


def test_a_stack_without_cuda_asks_for_nothing() -> None:
    found = of_matrix(tiny().matrix, lock_of(tiny().matrix, artefact("idna", "3.7")))
    assert (found.driver, found.require, found.gpu_drivers) == (None, "", {})


# --- an image ---------------------------------------------------------------------------------------------------------


def test_an_image_of_ours_by_its_labels() -> None:
    rendered = render(
        load(ROOT / "matrices" / "cu128.yaml").matrix, read_lock(ROOT / "matrices" / "cu128.lock.json"), UV
    )
    lines = [line.removeprefix("LABEL ") for line in rendered.dockerfile.splitlines() if line.startswith("LABEL ")]
    labels = {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}
    found = of_image("image", labels, {}, platform="linux/amd64", compressed=5_000_000_000)
    assert found.driver is not None
    assert (found.driver.minimum_driver, found.require, found.gpus) == ("525.60.13", "cuda>=12.0", ("12.0", "9.0"))
    assert found.lock == rendered.plan.lock.digest
    assert found.estimated and found.unpacked is not None and 11e9 < found.unpacked < 13e9


def test_an_image_of_somebody_else_by_what_it_asks_of_the_toolkit() -> None:
    found = of_image("image", {}, {"NVIDIA_REQUIRE_CUDA": "cuda>=12.8 brand=tesla,driver>=470,driver<471"}, unpacked=7)
    assert (found.driver, found.gpus, found.unpacked, found.estimated) == (None, (), 7, False)
    assert found.require == "cuda>=12.8 brand=tesla,driver>=470,driver<471"


# --- what stands in the image -----------------------------------------------------------------------------------------


def environment(dockerfile: str) -> list[str]:
    """The lines of the image's own stage."""
    return dockerfile[dockerfile.index("FROM sglang AS image") :].splitlines()


@pytest.mark.parametrize(
    ("name", "require", "driver"), [("cu130-next", "cuda>=13.0", "580"), ("cu128", "cuda>=12.0", "525.60.13")]
)
def test_the_image_says_what_it_asks_of_the_driver(name: str, require: str, driver: str) -> None:
    path = ROOT / "matrices" / f"{name}.yaml"
    lines = environment(render(load(path).matrix, read_lock(lock_path(path)), UV).dockerfile)
    assert f'ENV NVIDIA_REQUIRE_CUDA="{require}"' in lines
    assert 'ENV NVIDIA_DRIVER_CAPABILITIES="compute,utility"' in lines
    assert f'LABEL sglang-stack.requires="{require}"' in lines
    assert f'LABEL sglang-stack.driver="{driver}"' in lines
    assert not [line for line in lines if "NVIDIA_VISIBLE_DEVICES" in line]


def test_an_image_without_cuda_asks_for_nothing() -> None:
    dockerfile = render(tiny().matrix, lock_of(tiny().matrix, artefact("idna", "3.7")), UV).dockerfile
    assert "NVIDIA_" not in dockerfile and "sglang-stack.driver" not in dockerfile


def test_a_matrix_has_the_last_word_on_its_environment() -> None:
    loaded = tiny("environment: {NVIDIA_REQUIRE_CUDA: cuda>=13.1}\n", stack="{torch: 2.11.0}")
    lock = lock_of(loaded.matrix, artefact("torch", "2.11.0", layer="torch", size=5))
    lines = environment(render(loaded.matrix, lock, UV).dockerfile)
    values = [line for line in lines if line.startswith("ENV NVIDIA_REQUIRE_CUDA=")]
    assert values == ['ENV NVIDIA_REQUIRE_CUDA="cuda>=13.0"', 'ENV NVIDIA_REQUIRE_CUDA="cuda>=13.1"']


def test_the_requirement_is_the_oldest_release_of_the_major_and_not_the_one_built_with() -> None:
    """Else the toolkit would refuse what minor-version compatibility runs (case 071)."""
    assert require_cuda(DriverNeeds("12.8", "570.26", "x", "made")) == "cuda>=12.0"
    assert require_cuda(DriverNeeds("13.2.1", "595", "x", "made")) == "cuda>=13.0"
    assert require_cuda(DriverNeeds("99.0", "999", "x", "made")) == ""
    assert require_cuda(None) == ""


def test_what_the_image_asks_holds_on_every_driver_that_its_wheels_run_on() -> None:
    path = ROOT / "matrices" / "cu128.yaml"
    driver = stack_driver(load(path).matrix, read_lock(lock_path(path)))
    # 525.60.13 reports CUDA 12.0.
    assert holds(require_cuda(driver), {"cuda": "12.0"}) is True
    assert holds(require_cuda(driver), {"cuda": "11.8"}) is False


# --- the toolkit's expressions ----------------------------------------------------------------------------------------

KNOWN = {"cuda": "12.4", "driver": "550.144.03", "arch": "9.0", "brand": "Tesla"}


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        ("", True),
        ("cuda>=12.4", True),
        ("cuda>=12.8", False),
        ("cuda>=12.8 brand=tesla,driver>=550,driver<551", True),
        ("cuda>=12.8 brand=geforce,driver>=550,driver<551", False),
        ("cuda>=12.8 brand=tesla,driver>=535,driver<536", False),
        ("driver>=550.144.3", True),
        ("driver>550.144.03", False),
        ("driver!=550.144", True),
        ("cuda>=12.4.0", True),
        ("cuda=12.4.0", True),
        ("driver=550", False),
        ("driver>=550", True),
        ("driver=550.144.03", True),
        ("driver<=550.144.03,arch>=9.0", True),
        ("arch<9.0", False),
        ("brand!=geforce", True),
        ("brand>tesla", None),
        ("jetpack>=5.0", None),
        ("cuda>=12.4 jetpack>=5.0", True),
        ("cuda>=twelve", None),
        ("nonsense", None),
    ],
)
def test_whether_an_expression_holds(expression: str, answer: bool | None) -> None:
    assert holds(expression, KNOWN) is answer


def test_zeros_at_the_end_are_none() -> None:
    assert holds("driver=550.144", {"driver": "550.144.00"}) is True


def test_what_is_not_known_leaves_it_open() -> None:
    assert holds("cuda>=12.8 brand=tesla,driver>=470", {"cuda": "12.4", "driver": "550.1"}) is None
    assert holds("cuda>=12.8,brand=tesla", {"cuda": "12.4"}) is False


@given(st.text(), st.dictionaries(st.sampled_from(sorted(KNOWN)), st.text() | st.none()))
def test_any_expression_gives_an_answer(expression: str, known: dict[str, str | None]) -> None:
    assert holds(expression, known) in (True, False, None)


def test_a_newer_minor_release_of_the_same_major() -> None:
    assert same_major("cuda>=12.8", "12.4")
    assert not same_major("cuda>=13.0", "12.4")
    assert not same_major("cuda>=12.8", None)
    assert not same_major("driver>=570", "12.4")
