"""Lock → layer plan: what goes where, from which index, and the requirements files that pin it."""

from __future__ import annotations

import re

import pytest

from builder.errors import UsageError
from builder.layers import ORDER, plan_layers, stage_below
from builder.lock import Artefact, read_lock
from builder.matrix import load_matrix
from tests.made import ROOT, artefact, direct, lock_of, sha, tiny

JIT = (
    "{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
    "nvidia-cuda-cccl: 13.0.85}}"
)
MIXED = (
    artefact("idna", "3.7"),
    artefact("part", "1.0", index="site"),
    artefact("torch", "2.11.0", layer="torch", size=500_000_000),
    artefact("nvidia-cuda-nvcc", "13.0.88", layer="torch", size=None),
    direct("sgl-kernel", "0.3.21+cu130"),
    artefact("sglang", "0.5.9", layer="sglang"),
)


def test_layers_stand_on_the_stage_below_and_empty_ones_are_left_out() -> None:
    plan = plan_layers(tiny().matrix, lock_of(tiny().matrix, *MIXED))
    assert [(layer.name, layer.parent, layer.count, layer.bytes) for layer in plan.layers] == [
        ("torch", "python", 2, 500_000_000),
        ("kernels", "torch", 1, 0),
        ("rest", "flashinfer", 2, 2000),
        ("sglang", "rest", 1, 1000),
    ]
    assert plan.bytes == 500_003_000
    assert plan.layer("flashinfer") is None


def test_the_stages_in_order() -> None:
    assert [stage_below(position) for position in range(len(ORDER))] == [
        "python",
        "torch",
        "kernels",
        "flashinfer",
        "rest",
    ]


def test_a_requirements_file_for_each_index_the_default_one_first() -> None:
    plan = plan_layers(tiny().matrix, lock_of(tiny().matrix, *MIXED))
    layer = plan.layer("rest")
    assert layer is not None
    assert layer.indexes == ("default", "site")
    assert [(lines.origin, lines.name, lines.text) for lines in layer.lists] == [
        ("default", "default.txt", f"idna==3.7 --hash=sha256:{sha('idna 3.7')}\n"),
        ("site", "site.txt", f"part==1.0 --hash=sha256:{sha('part 1.0')}\n"),
    ]


def test_a_direct_file_is_asked_for_by_path_and_hash() -> None:
    layer = plan_layers(tiny().matrix, lock_of(tiny().matrix, *MIXED)).layer("kernels")
    assert layer is not None
    assert [(lines.name, lines.text) for lines in layer.lists] == [
        (
            "files.txt",
            f"./wheels/sgl_kernel-0.3.21+cu130-py3-none-any.whl --hash=sha256:{sha('sgl-kernel 0.3.21+cu130')}\n",
        )
    ]


def test_every_wheel_of_the_stack_is_in_one_list_with_its_hash() -> None:
    matrix = load_matrix(ROOT / "matrices" / "cu130-next.yaml")
    lock = read_lock(ROOT / "matrices" / "cu130-next.lock.json")
    texts = [lines.text for layer in plan_layers(matrix, lock).layers for lines in layer.lists]
    lines = "".join(texts).splitlines()
    assert len(lines) == len(lock.artefacts)
    assert sorted(lines) == sorted(f"{a.name}=={a.version} --hash=sha256:{a.sha256}" for a in lock.artefacts)
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.+]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)


def test_cuda_home_is_in_the_layer_of_the_compiler() -> None:
    plan = plan_layers(tiny(cuda=JIT).matrix, lock_of(tiny(cuda=JIT).matrix, *MIXED))
    assert [layer.name for layer in plan.layers if layer.cuda_home] == ["torch"]
    assert plan.cuda_home == "/usr/local/cuda"


def test_without_a_compiler_there_is_no_cuda_home() -> None:
    plan = plan_layers(tiny().matrix, lock_of(tiny().matrix, *MIXED))
    assert plan.cuda_home == ""


def test_bytecode_is_made_for_what_the_facts_name() -> None:
    plan = plan_layers(tiny().matrix, lock_of(tiny().matrix, *MIXED))
    assert {layer.name: layer.bytecode for layer in plan.layers} == {
        "torch": ("torch", "torchgen"),
        "kernels": (),
        "rest": (),
        "sglang": ("sglang",),
    }


def test_site_packages_and_time_are_those_of_the_matrix() -> None:
    matrix = tiny(python='"3.12"').matrix
    plan = plan_layers(matrix, lock_of(matrix))
    assert plan.site_packages == "/opt/venv/lib/python3.12/site-packages"


FUSED = (
    artefact("nvidia-cuda-nvcc", "13.0.88", layer="torch"),
    artefact("flashinfer-python", "0.6.12", layer="flashinfer"),
    artefact("idna", "3.7"),
    artefact("sglang", "0.5.9", layer="sglang"),
)
OPTED = "patches: {sm120: {allreduce_fusion: opt-in}}\n"


def test_the_fused_all_reduce_is_compiled_where_it_is_asked_for() -> None:
    matrix = tiny(OPTED, cuda=JIT, gpus='["12.0", "9.0"]').matrix
    plan = plan_layers(matrix, lock_of(matrix, *FUSED))
    assert [(layer.name, layer.parent, layer.described) for layer in plan.layers[2:]] == [
        ("rest", "flashinfer", "1 wheel, 1 kB compressed"),
        ("compiled", "rest", "for 12.0a, 9.0a"),
        ("sglang", "compiled", "1 wheel, 1 kB compressed"),
    ]
    assert (plan.compiled, plan.below_sglang) == (("gen_trtllm_comm_module",), "compiled")


def test_it_is_compiled_without_sglang_as_well() -> None:
    matrix = tiny(OPTED, cuda=JIT).matrix
    plan = plan_layers(matrix, lock_of(matrix, *FUSED[:3]))
    assert [layer.name for layer in plan.layers] == ["torch", "flashinfer", "rest", "compiled"]


@pytest.mark.parametrize(
    ("extra", "cuda", "artefacts"),
    [
        ("patches: {sm120: {}}\n", JIT, FUSED),
        ("", JIT, FUSED),
        (OPTED, "{version: 13.0.2, jit: none}", FUSED),
        (OPTED, JIT, FUSED[:1] + FUSED[2:]),
    ],
    ids=["not asked for", "no patches", "no compiler", "no flashinfer"],
)
def test_otherwise_nothing_is_compiled(extra: str, cuda: str, artefacts: tuple[Artefact, ...]) -> None:
    matrix = tiny(extra, cuda=cuda).matrix
    plan = plan_layers(matrix, lock_of(matrix, *artefacts))
    assert (plan.layer("compiled"), plan.compiled, plan.below_sglang) == (None, (), "rest")
    assert plan.layers[-1].parent == "rest"


def test_a_wheel_of_a_layer_that_nothing_installs_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        plan_layers(tiny().matrix, lock_of(tiny().matrix, artefact("idna", layer="lost")))
    assert str(caught.value) == (
        "error: `idna` is in a layer that there is not: `lost`\n"
        "  because: the layers are torch, kernels, flashinfer, rest, sglang\n"
        "  hint: write the lock again: `builder lock tiny`"
    )
