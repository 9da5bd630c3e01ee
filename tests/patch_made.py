"""Made-up wheels with the places that patch sites are about, and stand-ins that run what is patched."""

from __future__ import annotations

import ast
import logging
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from builder.smoke.post_base import KIMI, SIZES
from builder.wheel import digest

ALL_REDUCE = "sglang/srt/distributed/device_communicators/all_reduce_utils.py"
SYMM_MEM = "sglang/srt/distributed/device_communicators/torch_symm_mem.py"
DEEP_GEMM = "sglang/srt/layers/deep_gemm_wrapper/configurer.py"
KIMI_FILE = "sglang/srt/models/kimi_k25.py"
DEEPSEEK = "sglang/srt/models/deepseek_v2.py"
GRAPHS = "sglang/srt/model_executor/cuda_graph_runner.py"
RUNNER = "sglang/srt/model_executor/model_runner.py"
SERVER_ARGS = "sglang/srt/server_args.py"
COMM = "flashinfer/jit/comm.py"

# Of the shapes that sglang 0.5.9 and flashinfer 0.6.4 have, no more than the sites look at.
OLD = {
    ALL_REDUCE: """\
MiB = 1024 * 1024

TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES = {
    9: {
        2: 64 * MiB,  # 64 MB
        4: 64 * MiB,
    },
    10: {
        2: 64 * MiB,
        4: 64 * MiB,
    },
}
""",
    SYMM_MEM: """\
import logging

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm_mem

from sglang.srt.distributed.device_communicators.all_reduce_utils import TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES

logger = logging.getLogger(__name__)


class TorchSymmMemCommunicator:
    _WORLD_SIZES_MULTIMEM = {
        9: [4, 6, 8],
        10: [6, 8],
    }

    def __init__(self, group, device):
        self.disabled = True
        self.dtype = torch.bfloat16
        self.group = group
        self.world_size = dist.get_world_size(group)
        self.device_capability = torch.cuda.get_device_capability(device)[0]
        if self.device_capability < 9:
            logger.warning("Device capability %s not supported", self.device_capability)
            return
        if self.world_size not in TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES[self.device_capability]:
            logger.warning("World size %d not supported", self.world_size)
            return
        self.max_size = TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES[self.device_capability][
            self.world_size
        ]
        self.buffer = torch_symm_mem.empty(self.max_size // self.dtype.itemsize, device=device, dtype=self.dtype)
        handle = torch_symm_mem.rendezvous(self.buffer, group.group_name)
        if handle.multicast_ptr == 0:
            logger.warning("multicast operations are not supported")
            self.buffer = None
            return
        self.disabled = False

    def all_reduce(self, inp, *, out=None):
        out = torch.empty_like(inp) if out is None else out
        self.buffer[: inp.numel()].copy_(inp.view(-1))
        if self.world_size in self._WORLD_SIZES_MULTIMEM[self.device_capability]:
            torch.ops.symm_mem.multimem_all_reduce_(self.buffer[: inp.numel()], "sum", self.group.group_name)
        else:
            torch.ops.symm_mem.two_shot_all_reduce_(self.buffer[: inp.numel()], "sum", self.group.group_name)
        out.copy_(self.buffer[: inp.numel()].view(out.shape))
        return out
""",
    DEEP_GEMM: """\
from sglang.srt.environ import envs
from sglang.srt.utils import get_device_sm, is_blackwell_supported


def _compute_enable_deep_gemm():
    sm_version = get_device_sm()
    if sm_version < 90:
        return False

    try:
        import deep_gemm  # noqa: F401
    except ImportError:
        return False

    return envs.SGLANG_ENABLE_JIT_DEEPGEMM.get()


ENABLE_JIT_DEEPGEMM = _compute_enable_deep_gemm()
""",
    KIMI_FILE: """\
from torch import nn

from sglang.srt.models.deepseek_v2 import DeepseekV3ForCausalLM


class KimiK25ForConditionalGeneration(nn.Module):
    def __init__(self, config, quant_config=None) -> None:
        super().__init__()
        # Größe: what is not ASCII moves columns apart from bytes.
        self.language_model = DeepseekV3ForCausalLM(config.text_config, quant_config)

    def load_weights(self, weights):
        self.language_model.load_weights(weights)


EntryClass = [KimiK25ForConditionalGeneration]
""",
    DEEPSEEK: """\
class DeepseekV2Model:
    def forward(self):
        return None


class DeepseekV2ForCausalLM:
    def get_embed_and_head(self):
        return self.embed, self.head

    def set_embed_and_head(self, embed, head):
        self.embed, self.head = embed, head

    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.layers = layer_ids


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    pass
""",
    GRAPHS: """\
class CudaGraphRunner:
    def __init__(self, model_runner):
        self.model_runner = model_runner
        if model_runner.eagle_use_aux_hidden_state:
            self.model_runner.model.set_eagle3_layers_to_capture()
        self.capture()
""",
    RUNNER: """\
class ModelRunner:
    def __init__(self, model):
        self.model = model
        self.eagle_aux_hidden_state_layer_ids = [1, 29, 57]

    def initialize(self):
        self.model.set_eagle3_layers_to_capture(
            self.eagle_aux_hidden_state_layer_ids
        )

    def _dummy_run(self):
        self.model.set_eagle3_layers_to_capture()
""",
    COMM: """\
from .core import current_compilation_context, gen_jit_spec


def gen_trtllm_mnnvl_comm_module():
    flags = current_compilation_context.get_nvcc_flags_list(
        supported_major_versions=[9, 10]  # SM12x is left out on purpose
    )
    return gen_jit_spec("trtllm_mnnvl_comm", extra_cuda_cflags=flags)


def gen_trtllm_comm_module():
    flags = current_compilation_context.get_nvcc_flags_list(
        supported_major_versions=[9, 10]
    )
    return gen_jit_spec("trtllm_comm", extra_cuda_cflags=flags)
""",
}

# What turns fusion on by itself, of the shapes that these releases have.
FUSION_RULES = {
    "0.5.6.post2": """\
from sglang.srt.utils import is_blackwell_supported, is_cuda, is_sm100_supported


class ServerArgs:
    enable_flashinfer_allreduce_fusion: bool = False

    def _handle_model_specific_adjustments(self, model_arch):
        if model_arch in ["DeepseekV3ForCausalLM"]:
            if is_cuda() and is_sm100_supported():
                if not self.enable_dp_attention and self.nnodes == 1:
                    self.enable_flashinfer_allreduce_fusion = True
                    logger.info("Enable FlashInfer AllReduce Fusion on sm100 for DeepseekV3ForCausalLM")
        elif model_arch in ["GptOssForCausalLM"]:
            if is_blackwell_supported():
                if not self.enable_dp_attention and self.nnodes == 1:
                    self.enable_flashinfer_allreduce_fusion = True
                    logger.info("Enable FlashInfer AllReduce Fusion on sm100 for GptOssForCausalLM")
            if is_blackwell_supported():
                self.moe_runner_backend = "triton_kernel"
""",
    "0.5.7": """\
from sglang.srt.utils import is_blackwell_supported, is_sm90_supported, is_sm100_supported


class ServerArgs:
    enable_flashinfer_allreduce_fusion: bool = False

    def _handle_model_specific_adjustments(self, model_arch):
        self.moe_runner_backend = "triton_kernel" if is_blackwell_supported() else "auto"
        # TRTLLM AllReduce Fusion supports SM90/100/120, enable it by default
        if (
            not self.enable_flashinfer_allreduce_fusion
            and model_arch in ["DeepseekV3ForCausalLM", "GptOssForCausalLM"]
            and (is_sm90_supported() or is_blackwell_supported())
            and not self.enable_dp_attention
            and self.nnodes == 1
        ):
            self.enable_flashinfer_allreduce_fusion = True
""",
    "0.5.15.post1": """\
class ServerArgs:
    def _handle_deprecated_args(self):
        # When user passes --enable-flashinfer-allreduce-fusion, enable FlashInfer AllReduce Fusion with auto backend
        if self.enable_flashinfer_allreduce_fusion and self.flashinfer_allreduce_fusion_backend is None:
            self.flashinfer_allreduce_fusion_backend = "auto"
        self.enable_flashinfer_allreduce_fusion = False
""",
    "0.5.23": """\
from sglang.srt.platforms import get_platform


def _flashinfer_allreduce_fusion_auto_enable(view):
    if (
        view.flashinfer_allreduce_fusion_backend is None
        and view.model_arch in ("DeepseekV3ForCausalLM", "MiMoV2ForCausalLM")
        and (get_platform().is_sm90 or get_platform().is_sm100)
        and (view.nnodes == 1 or get_platform().is_sm100)
    ):
        backend = "cutedsl" if view.model_arch == "MiMoV2ForCausalLM" else "auto"
        logger.info("Auto-enabling FlashInfer AllReduce Fusion (%s)", backend)
        return {"flashinfer_allreduce_fusion_backend": backend}
    return {}


def _enforce_disable_allreduce_fusion(view):
    if view.enforce_disable_flashinfer_allreduce_fusion:
        return {"flashinfer_allreduce_fusion_backend": None}
    return {}
""",
}

SGLANG = {file: text for file, text in OLD.items() if file.startswith("sglang/")}
FLASHINFER = {file: text for file, text in OLD.items() if file.startswith("flashinfer/")}


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, str | bytes],
    *,
    metadata_version: str = "",
    record: str | None = None,
    executable: tuple[str, ...] = (),
    time: tuple[int, int, int, int, int, int] = (2026, 2, 23, 1, 2, 3),
    backwards: bool = False,
    compression: int = zipfile.ZIP_DEFLATED,
    more: Mapping[str, str] | None = None,
) -> Path:
    """A wheel; ``record`` replaces what RECORD would say, ``more`` are members that it does not name."""
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {metadata_version or version}\n\nVersion: of the text\n"
    members: dict[str, bytes] = {
        path: content.encode() if isinstance(content, str) else content
        for path, content in {
            **files,
            f"{info}/METADATA": metadata,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }.items()
    }
    quoted = {path: f'"{path}"' if "," in path else path for path in members}
    rows = "".join(f"{quoted[path]},{digest(data)},{len(data)}\n" for path, data in members.items())
    members[f"{info}/RECORD"] = (record if record is not None else f"{rows}{info}/RECORD,,\n").encode()
    members |= {path: text.encode() for path, text in (more or {}).items()}
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path in reversed(members) if backwards else members:
            made = zipfile.ZipInfo(path, time)
            made.compress_type = compression
            made.external_attr = (0o100755 if path in executable else 0o100664) << 16
            archive.writestr(made, members[path])
    return target


def sglang_wheel(folder: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """An sglang 0.5.9 of the old shapes, with files exchanged or (None) left out."""
    files = {file: text for file, text in {**SGLANG, **(changes or {})}.items() if text is not None}
    return make_wheel(folder, "sglang", "0.5.9", files)


def execute(source: str, file: str, scope: dict[str, Any]) -> None:
    """Run a patched source in a scope whose imports are stand-ins."""
    exec(compile(source, file, "exec"), scope)  # noqa: S102 - to see what it does is what it is for


class Tensor:
    """As much of a tensor as the communicator touches."""

    shape = (8,)

    def numel(self) -> int:
        return 8

    def view(self, *_: object) -> Tensor:
        return self

    def copy_(self, _: object) -> None:
        return None

    def __getitem__(self, _: object) -> Tensor:
        return self


class Communicator:
    """`TorchSymmMemCommunicator` of a patched source, on made-up devices. ``kernels`` are those that were launched."""

    def __init__(self, sizes: str, source: str, patch: pytest.MonkeyPatch) -> None:
        self.kernels: list[str] = []
        self.allocated: list[int] = []
        self.capability, self.world, self.multicast = 12, 2, 0
        torch, dist, symm, group = (ModuleType(name) for name in ("torch", "dist", "symm", "group"))
        torch.__dict__.update(
            device=lambda value: value,
            bfloat16=SimpleNamespace(itemsize=2),
            Tensor=Tensor,
            empty_like=lambda tensor: Tensor(),
            cuda=SimpleNamespace(set_device=lambda _: None, get_device_capability=lambda _: (self.capability, 0)),
            ops=SimpleNamespace(
                symm_mem=SimpleNamespace(
                    multimem_all_reduce_=self._launch("multimem"), two_shot_all_reduce_=self._launch("two_shot")
                )
            ),
            distributed=dist,
        )
        dist.__dict__.update(get_world_size=lambda _: self.world, ProcessGroup=object, _symmetric_memory=symm)
        symm.__dict__.update(empty=self._empty, rendezvous=lambda *_: SimpleNamespace(multicast_ptr=self.multicast))
        utils = ModuleType("utils")
        utils.__dict__.update(is_cuda=lambda: True, is_hip=lambda: False)
        execute(sizes, ALL_REDUCE, group.__dict__)
        self.sizes: dict[int, dict[int, int]] = group.__dict__[SIZES]
        modules = {
            "torch": torch,
            "torch.distributed": dist,
            "torch.distributed._symmetric_memory": symm,
            "sglang.srt.utils": utils,
            "sglang.srt.distributed.device_communicators.all_reduce_utils": group,
        }
        packages = ("sglang", "sglang.srt", "sglang.srt.distributed", "sglang.srt.distributed.device_communicators")
        for name in packages:
            patch.setitem(sys.modules, name, ModuleType(name))
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        scope: dict[str, Any] = {"__name__": "patched"}
        execute(source, SYMM_MEM, scope)
        self.kind = scope["TorchSymmMemCommunicator"]

    def make(self, capability: int, world: int, multicast: int) -> Any:
        """One for a rank on such devices."""
        self.capability, self.world, self.multicast = capability, world, multicast
        return self.kind(SimpleNamespace(group_name="g"), 0)

    def _launch(self, kernel: str) -> Callable[..., None]:
        return lambda *_: self.kernels.append(kernel)

    def _empty(self, count: int, **_: object) -> Tensor:
        self.allocated.append(count)
        return Tensor()


def deep_gemm_enabled(source: str, architecture: int, patch: pytest.MonkeyPatch) -> bool:
    """`ENABLE_JIT_DEEPGEMM` of a patched source on such a device, with DeepGEMM installed."""
    environ, utils = ModuleType("environ"), ModuleType("utils")
    environ.__dict__["envs"] = SimpleNamespace(SGLANG_ENABLE_JIT_DEEPGEMM=SimpleNamespace(get=lambda: True))
    names = ("is_blackwell_supported", "is_cuda", "is_sm100_supported")
    utils.__dict__.update(dict.fromkeys(names, lambda: True), get_device_sm=lambda: architecture, is_musa=lambda: False)
    for name, module in {
        "sglang": ModuleType("sglang"),
        "sglang.srt": ModuleType("srt"),
        "sglang.srt.environ": environ,
        "sglang.srt.utils": utils,
        "deep_gemm": ModuleType("deep_gemm"),
    }.items():
        patch.setitem(sys.modules, name, module)
    scope: dict[str, Any] = {"__name__": "patched"}
    execute(source, DEEP_GEMM, scope)
    return bool(scope["ENABLE_JIT_DEEPGEMM"])


def fuses_by_itself(source: str, model: str, architecture: int) -> bool:
    """Whether `ServerArgs` of a patched source turns fusion on for a model on such a device, though nobody asked."""
    scope: dict[str, Any] = {
        "is_cuda": lambda: True,
        "is_sm90_supported": lambda: architecture == 90,
        "is_sm100_supported": lambda: architecture == 100,
        "is_blackwell_supported": lambda: architecture in (100, 120),
        "logger": logging.getLogger(__name__),
    }
    execute("\n".join(line for line in source.splitlines() if " import " not in line), SERVER_ARGS, scope)
    found = scope["ServerArgs"]()
    found.enable_dp_attention, found.nnodes = False, 1
    found._handle_model_specific_adjustments(model)
    return bool(found.enable_flashinfer_allreduce_fusion)


class LanguageModel:
    """What EAGLE-3's hooks reach, with all that it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def get_embed_and_head(self) -> tuple[str, str]:
        self.asked.append(("get",))
        return "embed", "head"

    def set_embed_and_head(self, embed: object, head: object) -> None:
        self.asked.append(("set", embed, head))

    def set_eagle3_layers_to_capture(self, layer_ids: object = "default") -> None:
        self.asked.append(("layers", layer_ids))


def kimi(source: str) -> tuple[Any, LanguageModel]:
    """A KimiK25 of a patched source without its construction, and its language model."""
    (owner,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == KIMI]
    scope: dict[str, Any] = {
        "nn": SimpleNamespace(Module=type("Module", (), {})),
        "WeightsMapper": lambda **_: None,
    }
    execute(f"from __future__ import annotations\n{ast.unparse(owner)}", KIMI_FILE, scope)
    made = object.__new__(scope[KIMI])
    made.language_model = LanguageModel()
    return made, made.language_model


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that were logged since the last call."""
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found
