"""The spec of the smoke test: what each part knows, and that the native part does not know sglang."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.layers import plan_layers
from builder.lock import lock_path, read_lock
from builder.matrix import load_matrix
from builder.smoke.spec import parse_spec
from builder.smokespec import gpu_targets, smoke_spec
from tests.made import ROOT, artefact, lock_of, sha, tiny


def spec(*stack: Any, native: bool) -> dict[str, Any]:
    matrix = tiny().matrix
    return smoke_spec(plan_layers(matrix, lock_of(matrix, *stack)), native=native)


SGLANG = artefact("sglang", "0.5.9", layer="sglang")
OTHER = artefact("sglang", "0.5.9.post1", layer="sglang")
IDNA = artefact("idna", "3.7")


def test_the_native_part_does_not_change_with_sglang() -> None:
    assert spec(IDNA, SGLANG, native=True) == spec(IDNA, OTHER, native=True)


def test_the_native_part_changes_with_anything_below() -> None:
    assert spec(IDNA, SGLANG, native=True) != spec(artefact("idna", "3.7", sha256=sha("x")), SGLANG, native=True)


def test_the_whole_changes_with_sglang_and_names_the_same_native_part() -> None:
    one, two = (spec(IDNA, version, native=False) for version in (SGLANG, OTHER))
    assert one["lock"] != two["lock"]
    assert one["native_lock"] == two["native_lock"] == spec(IDNA, SGLANG, native=True)["lock"]


def test_packages_that_go_beside_either_cuda_are_named() -> None:
    both = artefact("nvidia-cutlass-dsl-libs-cu12", "4.8.0")
    assert spec(both, native=True)["facts"]["cuda_packages"]["both"] == ["nvidia-cutlass-dsl-libs-cu12"]
    assert spec(artefact(both.name, "4.5.2"), native=True)["facts"]["cuda_packages"]["both"] == []


@pytest.mark.parametrize(("version", "shared"), [("4.5.2", True), ("4.6.0", False)])
def test_files_that_two_releases_share_are_told_of_those_releases_alone(version: str, shared: bool) -> None:
    names = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13")
    told = spec(*(artefact(name, version) for name in names), native=True)["shared_files"]
    assert ("cutlass-dsl-cu13-over-base" in [entry["id"] for entry in told]) is shared


def test_a_package_with_a_file_for_each_cuda_is_told_as_one() -> None:
    (told,) = spec(artefact("bitsandbytes", "0.49.2"), native=True)["variants"]
    assert (told["distribution"], told["required"]) == ("bitsandbytes", True)
    assert parse_spec(spec(artefact("bitsandbytes", "0.49.2"), native=True)).variants[0].by == "cuda"
    assert "variants" not in spec(IDNA, native=True)


def test_without_sglang_there_is_nothing_of_it_to_import() -> None:
    assert spec(IDNA, native=False)["imports"] == []
    assert spec(IDNA, SGLANG, native=True)["imports"] == []
    assert spec(IDNA, SGLANG, native=False)["imports"]


@pytest.mark.parametrize(("version", "there"), [("0.5.2", False), ("0.5.8.post1", False), ("0.5.9", True)])
def test_a_module_is_imported_of_the_releases_that_have_it(version: str, there: bool) -> None:
    imports = spec(artefact("sglang", version, layer="sglang"), native=False)["imports"]
    assert ("sglang.srt.models.kimi_k25" in imports) is there
    assert "sglang.launch_server" in imports


def test_the_targets_are_called_as_each_tool_calls_them() -> None:
    assert gpu_targets(("12.0", "9.0")) == [
        {"capability": "12.0", "nvcc": "120a", "flashinfer": "12.0a"},
        {"capability": "9.0", "nvcc": "90a", "flashinfer": "9.0a"},
    ]


def test_both_parts_know_what_the_build_compiles() -> None:
    jit = (
        "{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
        "nvidia-cuda-cccl: 13.0.85}}"
    )
    matrix = tiny("patches: {sm120: {allreduce_fusion: opt-in}}\n", cuda=jit).matrix
    nvcc = artefact("nvidia-cuda-nvcc", "13.0.88", layer="torch")
    flashinfer = artefact("flashinfer-python", "0.6.12", layer="flashinfer")
    plan = plan_layers(matrix, lock_of(matrix, nvcc, flashinfer, SGLANG))
    for native in (True, False):
        made = smoke_spec(plan, native=native)
        assert made["compiled"] == ["gen_trtllm_comm_module"]
        assert parse_spec(made).compiled == ("gen_trtllm_comm_module",)
        assert spec(IDNA, SGLANG, native=native)["compiled"] == []


def test_exceptions_are_those_of_distributions_in_the_lock() -> None:
    matrix = load_matrix(ROOT / "matrices" / "cu130-next.yaml")
    lock = read_lock(lock_path(ROOT / "matrices" / "cu130-next.yaml"))
    found = smoke_spec(plan_layers(matrix, lock), native=False)
    assert {entry["distribution"] for entry in found["exceptions"]} <= set(lock.by_name)
    assert spec(IDNA, native=False)["exceptions"] == []


def test_a_spec_is_plain_json() -> None:
    found = spec(IDNA, SGLANG, native=False)
    assert json.loads(json.dumps(found)) == found
