"""Places that are known to matter and are not patched: what a release has there. Advice for each is in facts/sites.yaml.

Looked at as patch sites are, by shapes that are known; `unknown` fails nothing here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from builder.patches.engine import Module, State, UnknownShapeError, decode
from builder.patches.models import HOOKS
from builder.patches.sm120 import find, function, klass
from builder.patches.source import Source
from builder.smoke.post_base import KIMI

_COMM = "flashinfer/data/include/flashinfer/comm/"
_DEEPSEEK = "DeepseekV2ForCausalLM"

Look = Callable[[str], State]
"""The state of a file's text. Raises `UnknownShapeError`, whose message says what was looked for."""


@dataclass(frozen=True)
class Noted:
    """A place that is only noted. It is in the first of ``files`` that has ``marker``; in a release that has none of
    these, no other file of that kind may have it, else it has moved."""

    id: str
    package: str
    files: tuple[str, ...]
    marker: str
    what: str
    look: Look


@dataclass(frozen=True)
class NotedState:
    """What a release has at a noted place; ``looked_for`` says what an unknown one lacks."""

    noted: Noted
    file: str
    state: State
    looked_for: str = ""


def look(source: Source) -> list[NotedState]:
    """The state of every noted place in a wheel."""
    return [_look(noted, source) for noted in NOTED if noted.package == source.name]


def _look(noted: Noted, source: Source) -> NotedState:
    for file, data in source.read_all(list(noted.files)).items():
        if noted.marker.encode() in data:
            try:
                return NotedState(noted, file, noted.look(decode(data)[1]))
            except UnknownShapeError as error:
                return NotedState(noted, file, State.UNKNOWN, str(error))
    for file, data in source.read_all(same_kind(noted.files[0], source)).items():
        if noted.marker.encode() in data:
            looked_for = f"`{noted.marker}` in `{noted.files[0]}`; it is in `{file}`"
            return NotedState(noted, noted.files[0], State.UNKNOWN, looked_for)
    return NotedState(noted, noted.files[0], State.ABSENT)


def same_kind(file: str, source: Source) -> list[str]:
    """The wheel's files that end as ``file`` does, sorted."""
    ending = file[file.rindex(".") :]
    return sorted(name for name in source.entries if name.endswith(ending))


def _text(needed: str, native: str) -> Look:
    """By two patterns, exactly one of which is there."""

    def state(text: str) -> State:
        found = [bool(re.search(pattern, text)) for pattern in (needed, native)]
        if found == [True, False]:
            return State.NEEDED
        if found == [False, True]:
            return State.NATIVE
        raise UnknownShapeError(f"either `{needed}` or `{native}`")

    return state


def _multicast(text: str) -> State:
    init = function(klass(Module(text), "SymmDeviceMemory").body, "__init__")
    tests = [ast.unparse(n.test) for n in ast.walk(init) if isinstance(n, ast.If) and isinstance(n.body[-1], ast.Raise)]
    known = {
        "multicast_supported == 0": State.NEEDED,
        "self._enable_multicast and (not is_multicast_supported(device_idx))": State.NATIVE,
    }
    found = [known[test] for test in tests if test in known]
    if len(found) != 1:
        raise UnknownShapeError("one check of multicast that raises, of every device or where multicast is asked for")
    return found[0]


def _library(text: str) -> State:
    body = Module(text).tree.body
    finder = function(body, "find_loaded_library")
    tests = [ast.unparse(n.test) for n in ast.walk(finder) if isinstance(n, ast.If)]
    made = ast.unparse(find(body, ast.Assign, "cudart"))
    if "lib_name in line" in tests and made in ("cudart = CudaRTLibrary()", "cudart = _LazyCudaRTLibrary()"):
        return State.NEEDED
    if "lib_name in line and _is_library_filename(line, lib_name)" in tests and made == "cudart = _LazyCudaRTLibrary()":
        return State.NATIVE
    raise UnknownShapeError("`lib_name in line`, alone or with a check of the whole name")


def _block_fp8(text: str) -> State:
    body = Module(text).tree.body
    dispatch = ast.unparse(function(body, "_dispatch_auto_backend"))
    if "is_blackwell" not in dispatch:
        raise UnknownShapeError("`is_blackwell_supported()` in `_dispatch_auto_backend`")
    tests = [
        ast.unparse(n.test) for n in ast.walk(function(body, "initialize_fp8_gemm_config")) if isinstance(n, ast.If)
    ]
    ours = [test for test in tests if "sm120" in test]
    if not ours:
        return State.NEEDED
    if ours in (
        ["backend == 'auto' and is_sm120_supported()"],
        ["backend == 'auto' and get_platform().is_sm120"],
    ):
        return State.NATIVE
    raise UnknownShapeError("`backend == 'auto'` and SM120 in `initialize_fp8_gemm_config`")


_MLA = "TRTLLM MLA backend is only supported on"


def _mla(text: str) -> State:
    guards = [
        ast.unparse(n.test)
        for n in ast.walk(Module(text).tree)
        if isinstance(n, ast.If) and len(n.body) == 1 and isinstance(n.body[0], ast.Raise) and _MLA in ast.unparse(n)
    ]
    if guards in (["not is_blackwell_supported()"], ["not get_platform().is_blackwell"]):
        return State.NEEDED
    if guards in (["not is_sm100_supported()"], ["not get_platform().is_sm100"]):
        return State.NATIVE
    raise UnknownShapeError("one refusal of `trtllm_mla`, off Blackwell or off SM100")


def _methods(text: str, owner: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in klass(Module(text), owner).body if isinstance(node, ast.FunctionDef)}


def _three(text: str) -> State:
    return State.NATIVE if set(HOOKS) <= _methods(text, _DEEPSEEK).keys() else State.NEEDED


_EXTRAS = ("start_layer", "end_layer", "get_model_config_for_expert_location")


def _extras(text: str) -> State:
    methods = _methods(text, KIMI)
    forward = methods.get("forward")
    has = [name in methods for name in _EXTRAS]
    has.append(forward is not None and "pp_proxy_tensors" in [item.arg for item in forward.args.args])
    if len(set(has)) != 1:
        raise UnknownShapeError(f"all of {', '.join(_EXTRAS)} and `forward(…, pp_proxy_tensors)` in `{KIMI}`, or none")
    return State.NATIVE if has[0] else State.NEEDED


def _flashinfer(id: str, file: str, marker: str, what: str, look: Look) -> Noted:
    return Noted(id, "flashinfer-python", (file,), marker, what, look)


def _sglang(id: str, files: Sequence[str], marker: str, what: str, look: Look) -> Noted:
    return Noted(id, "sglang", tuple(f"sglang/srt/{file}" for file in files), marker, what, look)


NOTED = (
    _flashinfer(
        "F2",
        f"{_COMM}trtllm_allreduce.cuh",
        "cudaError_t customAllReduce(",
        "code of `trtllm_custom_all_reduce` that is compiled out on 12.x",
        _text(r"\(__CUDA_ARCH__ < 1200\)", r"\(__CUDA_ARCH__ >= 900\)\)"),
    ),
    _flashinfer(
        "F3",
        f"{_COMM}trtllm_allreduce_fusion.cuh",
        "blockReduceSumV2",
        "the fused kernel's sum over a block whose last warp is not full",
        _text(r"__shfl_xor_sync\(FINAL_MASK,", r"bool is_partial_warp ="),
    ),
    _flashinfer(
        "F4",
        f"{_COMM}trtllm_allreduce_fusion.cuh",
        "allreduce_fusion_kernel_launcher",
        "how many blocks the fused kernel's clusters have",
        _text(r"if \(SM >= 90\) \{\s*cluster_size = 8;", r"int cluster_size = std::min\(8, max_cluster_size\);"),
    ),
    _flashinfer(
        "F6",
        "flashinfer/comm/mnnvl.py",
        "class SymmDeviceMemory",
        "whether memory can be shared on a device without multicast",
        _multicast,
    ),
    _flashinfer(
        "F7",
        "flashinfer/comm/cuda_ipc.py",
        "class CudaRTLibrary",
        "which libcudart the peers' memory is opened by",
        _library,
    ),
    _sglang(
        "D2",
        ["layers/quantization/fp8_utils.py"],
        "def _dispatch_auto_backend",
        "what multiplies block-FP8 matrices where DeepGEMM is off",
        _block_fp8,
    ),
    _sglang(
        "D3",
        ["server_args.py", "arg_groups/overrides.py"],
        _MLA,
        "which devices `--attention-backend trtllm_mla` is accepted on",
        _mla,
    ),
    _sglang(
        "E0",
        ["models/deepseek_v2.py"],
        f"class {_DEEPSEEK}",
        "EAGLE-3's three methods in the language model of Kimi-K2.5",
        _three,
    ),
    _sglang(
        "E8",
        ["models/kimi_k25.py"],
        f"class {KIMI}",
        "pipeline parallelism and expert location of Kimi-K2.5",
        _extras,
    ),
)
