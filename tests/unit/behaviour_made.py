"""A patched stack with stand-ins for torch, sglang and flashinfer, in which cases of `behaviour` run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from builder.matrix import Eagle3, Patches, Sm120
from builder.patches import inspect_wheel
from builder.smoke.behaviour import check_behaviour
from builder.smoke.report import Result
from tests import patch_made as made
from tests.patch_made import make_wheel
from tests.unit.smoke_made import Site

BOTH = Patches(sm120=Sm120(), eagle3=Eagle3())

TORCH = {
    "torch/__init__.py": """\
from types import SimpleNamespace


class Tensor:
    # Its elements are all the same.
    shape, device = (8,), "cpu"

    def __init__(self, value=0):
        self.value = value

    def numel(self):
        return 8

    def view(self, *_):
        return self

    def copy_(self, _):
        return self

    def fill_(self, value):
        self.value = value
        return self

    def __getitem__(self, _):
        return self

    def __mul__(self, factor):
        return Tensor(self.value * factor)

    def __add__(self, other):
        return Tensor(self.value + other.value)

    def mul_(self, factor):
        self.value *= factor
        return self

    def clone(self):
        return Tensor(self.value)

    def __float__(self):
        return float(self.value)

    def __ne__(self, other):
        return SimpleNamespace(any=lambda: self.value != other)


bfloat16 = SimpleNamespace(itemsize=2)
cuda, ops = SimpleNamespace(), SimpleNamespace()
compiler = SimpleNamespace(is_compiling=lambda: False)


def zeros(*shape, dtype=None):
    return Tensor()


def ones(*shape, dtype=None):
    return Tensor(1)


def full(shape, value):
    return Tensor(value)


def empty_like(tensor):
    return Tensor()


class Module:
    pass


nn = SimpleNamespace(Module=Module)
""",
    "torch/distributed/__init__.py": "",
    "torch/distributed/_symmetric_memory.py": "",
}

SGLANG = {
    "sglang/srt/utils/__init__.py": """\
def get_device_sm():
    return 0


def is_cuda():
    return True


is_flashinfer_available = is_cuda
is_blackwell_supported = is_sm90_supported = is_sm100_supported = get_device_sm
""",
    "sglang/srt/utils/custom_op.py": "def register_custom_op(**_):\n    return lambda function: function\n",
    "sglang/srt/server_args.py": "def get_global_server_args():\n    raise AssertionError('there is no server')\n",
    "sglang/srt/layers/dp_attention.py": "def is_dp_attention_enabled():\n    raise AssertionError('there is no server')\n",
    "sglang/srt/distributed/__init__.py": "".join(
        f"def {name}(*_):\n    raise AssertionError('there is no group')\n\n\n"
        for name in (
            "get_tp_group",
            "get_attn_tp_group",
            "get_moe_tp_group",
            "get_pp_group",
            "get_tensor_model_parallel_world_size",
            "tensor_model_parallel_all_gather",
            "tensor_model_parallel_all_reduce",
            "attention_tensor_model_parallel_all_reduce",
            "moe_expert_parallel_all_reduce",
            "moe_tensor_model_parallel_all_reduce",
        )
    ),
    "sglang/srt/environ.py": """\
import os
from types import SimpleNamespace

envs = SimpleNamespace(SGLANG_ENABLE_JIT_DEEPGEMM=SimpleNamespace(get=lambda: os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] == "1"))
""",
    # Imported before the case says otherwise; upstream's own value is on.
    made.DEEP_GEMM: "import os\n\nos.environ.setdefault('SGLANG_ENABLE_JIT_DEEPGEMM', '1')\n"
    + made.OLD[made.DEEP_GEMM],
}

FLASHINFER = {
    "flashinfer/__init__.py": "",
    "flashinfer/jit/__init__.py": "",
    "flashinfer/jit/core.py": """\
import os
from types import SimpleNamespace


class Context:
    def get_nvcc_flags_list(self, supported_major_versions):
        major, minor = os.environ["FLASHINFER_CUDA_ARCH_LIST"].split(".")
        if int(major) not in supported_major_versions:
            raise RuntimeError(f"No supported CUDA architectures found for major versions {supported_major_versions}.")
        return [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}", "-O3"]


current_compilation_context = Context()


def gen_jit_spec(name, extra_cuda_cflags):
    return SimpleNamespace(extra_cflags=["-fPIC"], extra_cuda_cflags=extra_cuda_cflags, extra_ldflags=None)
""",
}


def stack(
    folder: Path,
    *,
    patches: Patches = BOTH,
    sglang: Mapping[str, str] | None = None,
    flashinfer: Mapping[str, str] | None = None,
) -> Site:
    """An environment in which both packages are installed as ``patches`` make them, and whose spec has the reports."""
    site = Site(folder)
    site.wheel("torch", "2.9.1", TORCH)
    site.spec_data["patches"] = []
    for name, version, files in (
        ("sglang", "0.5.9", {**made.SGLANG, **SGLANG, **(sglang or {})}),
        ("flashinfer-python", "0.6.4", {**made.FLASHINFER, **FLASHINFER, **(flashinfer or {})}),
    ):
        found = inspect_wheel(make_wheel(folder, name, version, files), patches, folder)
        after = {change.file: change.after for change in found.files}
        site.wheel(name, version, {**files, **after}, layer="sglang" if name == "sglang" else "flashinfer")
        site.spec_data["patches"].append(found.as_json())
    return site


def behaviour(site: Site) -> Result:
    with site.native() as (native, _):
        return check_behaviour(native)


def edited(site: Site, file: str, old: str, new: str) -> list[str]:
    """What is said where the installed file is another; its report is made to fit, so that its diff still leads back."""
    place = site.packages / file
    text = place.read_text()
    assert text.count(old) == 1
    place.write_text(text.replace(old, new))
    for report in site.spec_data["patches"]:
        for item in report["files"]:
            if item["file"] == file:
                assert f"+{old}" in item["diff"]
                item["diff"] = item["diff"].replace(f"+{old}", f"+{new}")
    return [finding.message for finding in behaviour(site).findings]
