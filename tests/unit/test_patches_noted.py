"""Places that are only noted: what is told of the shapes that releases have had, made up here in a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.patches.engine import State
from builder.patches.noted import NOTED, NotedState, look
from builder.remote import open_local
from tests.patch_made import make_wheel

COMM = "flashinfer/data/include/flashinfer/comm/"
ALL_REDUCE, FUSED = f"{COMM}trtllm_allreduce.cuh", f"{COMM}trtllm_allreduce_fusion.cuh"
MNNVL, CUDA_IPC = "flashinfer/comm/mnnvl.py", "flashinfer/comm/cuda_ipc.py"
FP8, ARGS = "sglang/srt/layers/quantization/fp8_utils.py", "sglang/srt/server_args.py"
OVERRIDES = "sglang/srt/arg_groups/overrides.py"
DEEPSEEK, KIMI = "sglang/srt/models/deepseek_v2.py", "sglang/srt/models/kimi_k25.py"

GUARD = "#if (defined(__CUDA_ARCH__) && (__CUDA_ARCH__ >= 900){})\ncudaError_t customAllReduce(int n) {{}}\n"
SUM = "float blockReduceSumV2() {}\n"
LAUNCHER = "int allreduce_fusion_kernel_launcher() {}\n"
DEVICE = """\
class SymmDeviceMemory:
    def __init__(self, device_idx, enable_multicast=True):
        self._enable_multicast = enable_multicast
        if {}:
            raise RuntimeError("Device does not support multicasting.")
"""
LIBRARY = """\
class CudaRTLibrary:
    pass


class _LazyCudaRTLibrary:
    pass


def find_loaded_library(lib_name):
    for line in open("/proc/self/maps"):
        if {}:
            return line


cudart = {}()
"""
BLOCK_FP8 = """\
def _dispatch_auto_backend():
    if deep_gemm_wrapper.ENABLE_JIT_DEEPGEMM:
        return 1
    elif {}:
        return 2


def initialize_fp8_gemm_config(server_args):
    backend = server_args.fp8_gemm_runner_backend
    {}
"""
MLA = """\
def check(self):
    if self.attention_backend == "trtllm_mla":
        if {}:
            raise ValueError("TRTLLM MLA backend is only supported on Blackwell GPUs")
"""
HOOKS = "".join(f"    def {name}(self): pass\n" for name in ("get_embed_and_head", "set_embed_and_head"))
TARGET = f"class DeepseekV2ForCausalLM:\n{HOOKS}"
LAST = "    def set_eagle3_layers_to_capture(self, ids=None): pass\n"
WRAPPER = "class KimiK25ForConditionalGeneration:\n    def forward(self{}): pass\n"
EXTRAS = "".join(
    f"    def {name}(self): pass\n" for name in ("start_layer", "end_layer", "get_model_config_for_expert_location")
)

SHAPES = [
    ("F2", ALL_REDUCE, GUARD.format(" && (__CUDA_ARCH__ < 1200)"), State.NEEDED),
    ("F2", ALL_REDUCE, GUARD.format(")"), State.NATIVE),
    ("F2", ALL_REDUCE, GUARD.format(" && (__CUDA_ARCH__ < 1300)"), State.UNKNOWN),
    ("F3", FUSED, SUM + "val += __shfl_xor_sync(FINAL_MASK, val, mask, 32);", State.NEEDED),
    ("F3", FUSED, SUM + "bool is_partial_warp = true;", State.NATIVE),
    ("F3", FUSED, SUM + "bool is_partial_warp = true; __shfl_xor_sync(FINAL_MASK, val);", State.UNKNOWN),
    ("F4", FUSED, LAUNCHER + "if (SM >= 90) {\n    cluster_size = 8;\n}", State.NEEDED),
    ("F4", FUSED, LAUNCHER + "int cluster_size = std::min(8, max_cluster_size);", State.NATIVE),
    ("F4", FUSED, LAUNCHER, State.UNKNOWN),
    ("F6", MNNVL, DEVICE.format("multicast_supported == 0"), State.NEEDED),
    ("F6", MNNVL, DEVICE.format("self._enable_multicast and not is_multicast_supported(device_idx)"), State.NATIVE),
    ("F6", MNNVL, DEVICE.format("not is_multicast_supported(device_idx)"), State.UNKNOWN),
    (
        "F6",
        MNNVL,
        DEVICE.format("multicast_supported == 0")
        + "        if self._enable_multicast and not is_multicast_supported(device_idx):\n            raise RuntimeError\n",
        State.UNKNOWN,
    ),
    ("F7", CUDA_IPC, LIBRARY.format("lib_name in line", "CudaRTLibrary"), State.NEEDED),
    ("F7", CUDA_IPC, LIBRARY.format("lib_name in line", "_LazyCudaRTLibrary"), State.NEEDED),
    (
        "F7",
        CUDA_IPC,
        LIBRARY.format("lib_name in line and _is_library_filename(line, lib_name)", "_LazyCudaRTLibrary"),
        State.NATIVE,
    ),
    ("F7", CUDA_IPC, LIBRARY.format("lib_name == line", "CudaRTLibrary"), State.UNKNOWN),
    ("D2", FP8, BLOCK_FP8.format("is_blackwell_supported()", "return backend"), State.NEEDED),
    *(
        ("D2", FP8, BLOCK_FP8.format(blackwell, f'if backend == "auto" and {sm120}: backend = "x"'), State.NATIVE)
        for blackwell, sm120 in (
            ("is_blackwell_supported()", "is_sm120_supported()"),
            ("get_platform().is_blackwell", "get_platform().is_sm120"),
        )
    ),
    ("D2", FP8, BLOCK_FP8.format("is_blackwell_supported()", "if is_sm120_supported(): backend = 1"), State.UNKNOWN),
    ("D2", FP8, BLOCK_FP8.format("is_sm100_supported()", "return backend"), State.UNKNOWN),
    ("D3", ARGS, MLA.format("not is_blackwell_supported()"), State.NEEDED),
    ("D3", OVERRIDES, MLA.format("not is_blackwell_supported()"), State.NEEDED),
    ("D3", ARGS, MLA.format("not is_sm100_supported()"), State.NATIVE),
    ("D3", ARGS, MLA.format("not is_hopper()"), State.UNKNOWN),
    ("E0", DEEPSEEK, TARGET + LAST, State.NATIVE),
    ("E0", DEEPSEEK, TARGET, State.NEEDED),
    ("E0", DEEPSEEK, TARGET + "    def broken(:\n", State.UNKNOWN),
    ("E8", KIMI, WRAPPER.format(""), State.NEEDED),
    ("E8", KIMI, WRAPPER.format(", pp_proxy_tensors=None") + EXTRAS, State.NATIVE),
    ("E8", KIMI, WRAPPER.format("") + EXTRAS, State.UNKNOWN),
]


def found(folder: Path, id: str, files: dict[str, str]) -> NotedState:
    (place,) = [place for place in NOTED if place.id == id]
    wheel = make_wheel(folder, place.package, "1.0", files)
    (state,) = [state for state in look(open_local(wheel)) if state.noted is place]
    return state


@pytest.mark.parametrize(("id", "file", "text", "state"), SHAPES)
def test_a_shape(tmp_path: Path, id: str, file: str, text: str, state: State) -> None:
    seen = found(tmp_path, id, {file: text})
    assert (seen.state, seen.file, bool(seen.looked_for)) == (state, file, state is State.UNKNOWN)


def test_every_place_has_its_shapes_here() -> None:
    for place in NOTED:
        states = {state for id, _, _, state in SHAPES if id == place.id}
        assert states == {State.NEEDED, State.NATIVE, State.UNKNOWN}


def test_a_place_that_is_nowhere_is_absent_and_one_that_moved_is_unknown(tmp_path: Path) -> None:
    assert found(tmp_path / "a", "E8", {DEEPSEEK: TARGET}).state is State.ABSENT
    moved = found(tmp_path / "b", "E8", {"sglang/srt/models/kimi.py": WRAPPER.format("")})
    assert (moved.state, moved.looked_for) == (
        State.UNKNOWN,
        "`class KimiK25ForConditionalGeneration` in `sglang/srt/models/kimi_k25.py`; it is in `sglang/srt/models/kimi.py`",
    )
    header = found(tmp_path / "c", "F2", {f"{COMM}all_reduce.cuh": GUARD.format(")"), "flashinfer/x.py": GUARD})
    assert header.looked_for == f"`cudaError_t customAllReduce(` in `{ALL_REDUCE}`; it is in `{COMM}all_reduce.cuh`"


def test_what_was_looked_for_is_said(tmp_path: Path) -> None:
    assert found(tmp_path, "E8", {KIMI: WRAPPER.format("") + EXTRAS}).looked_for == (
        "all of start_layer, end_layer, get_model_config_for_expert_location and `forward(…, pp_proxy_tensors)` in "
        "`KimiK25ForConditionalGeneration`, or none"
    )
