"""Stand-ins for what the carried sources import and this machine has not; each is named in the report."""

from __future__ import annotations
import __future__

import ast
import importlib
import importlib.util
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.gpu.rank import Context, World

UPSTREAM, PATCHED = "upstream", "patched"


class _Standin(ModuleType):
    """A module that has every name: a class that does nothing, so that it may be a base and an annotation."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        self.__dict__.update(members, __path__=[])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


def standin(context: Context, name: str, why: str = "", **members: Any) -> ModuleType:
    """Put a stand-in in the place of a module, and of the packages that it is in."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        standin(context, parent)
    module = _Standin(name, **members)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], last, module)
    context.standin(f"{name}{f': {why}' if why else ''}")
    return module


def source(context: Context, kind: str, file: str) -> Path:
    """A carried source of the scenario's sglang."""
    return context.carry / f"sglang-{context.release}" / kind / "sglang" / "srt" / file


def load(context: Context, kind: str, file: str, name: str = "") -> ModuleType:
    """Run a carried source as the module that it is in sglang, or as ``name``."""
    path = source(context, kind, file)
    wanted = name or "sglang.srt." + file.removesuffix(".py").replace("/", ".")
    spec = importlib.util.spec_from_file_location(wanted, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[wanted] = module
    spec.loader.exec_module(module)
    parent, _, last = wanted.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def taken_out(path: Path, place: str, scope: dict[str, Any]) -> Callable[..., Any]:
    """A function or method of a source, run by itself: the module around it needs more than is here."""
    text = path.read_text(encoding="utf-8")
    body: list[ast.stmt] = ast.parse(text).body
    *owners, name = place.split(".")
    for owner in owners:
        (found,) = [node for node in body if isinstance(node, ast.ClassDef) and node.name == owner]
        body = found.body
    (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    segment = ast.get_source_segment(text, function, padded=True)
    assert segment is not None
    flags = __future__.annotations.compiler_flag
    exec(compile(textwrap.dedent(segment), str(path), "exec", flags=flags), scope)  # noqa: S102 - it is what is tested
    result: Callable[..., Any] = scope[name]
    return result


def install_utils(context: Context) -> None:
    """`sglang.srt.utils` as on a CUDA machine that is neither SM90 nor SM10x."""

    def no(*_: object, **__: object) -> bool:
        return False

    names = ("hip", "npu", "cpu", "xpu", "musa", "hpu")
    members: dict[str, Any] = {f"is_{name}": no for name in names}
    members |= {"is_cuda": lambda: True, "is_flashinfer_available": lambda: True}
    members |= dict.fromkeys(
        ("is_sm90_supported", "is_sm100_supported", "is_gfx95_supported", "cpu_has_amx_support", "get_bool_env_var"), no
    )
    standin(context, "sglang.srt.utils", "a CUDA machine that is neither SM90 nor SM10x", **members)


def install_fusion(context: Context, world: World, *, flag: bool = True) -> SimpleNamespace:
    """Everything that the fusion's sources import of sglang. Returns sglang's own arguments."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    install_utils(context)
    common = source(context, PATCHED, "utils/common.py")
    scope: dict[str, Any] = {"torch": torch, "sglang_lib": torch.library.Library("sglang", "FRAGMENT")}
    scope |= {"is_npu": lambda: False, "is_xpu": lambda: False}
    standin(
        context,
        "sglang.srt.utils.common",
        "only its own direct_register_custom_op",
        direct_register_custom_op=taken_out(common, "direct_register_custom_op", scope),
    )
    load(context, PATCHED, "utils/custom_op.py")

    def reduce(tensor: Any) -> Any:
        dist.all_reduce(tensor, group=world.device_group)
        return tensor

    coordinator = SimpleNamespace(
        world_size=context.ranks,
        rank_in_group=context.rank,
        cpu_group=world.cpu_group,
        device_group=world.device_group,
    )
    standin(
        context,
        "sglang.srt.distributed",
        "one group, whose all-reduce is NCCL's, in place",
        get_tp_group=lambda: coordinator,
        get_tensor_model_parallel_world_size=lambda: context.ranks,
        get_tensor_model_parallel_rank=lambda: context.rank,
        tensor_model_parallel_all_reduce=reduce,
    )
    standin(context, "sglang.srt.distributed.device_communicators.pynccl_allocator")
    arguments = SimpleNamespace(
        enable_flashinfer_allreduce_fusion=flag, rl_on_policy_target=None, enable_piecewise_cuda_graph=True
    )
    standin(context, "sglang.srt.server_args", "the fusion's flag given", get_global_server_args=lambda: arguments)
    standin(context, "sglang.srt.batch_invariant_ops", "its mode off", is_batch_invariant_mode_enabled=lambda: False)
    standin(context, "sglang.srt.environ")
    standin(context, "sglang.srt.layers")
    standin(
        context, "sglang.srt.layers.dp_attention", "data parallel attention off", is_dp_attention_enabled=lambda: False
    )
    for name in (
        "layers.attention.nsa.utils",
        "layers.moe",
        "model_executor.forward_batch_info",
        "speculative.spec_info",
    ):
        standin(context, f"sglang.srt.{name}")
    standin(context, "sglang.srt.layers.utils")
    operator = load(context, PATCHED, "layers/utils/multi_platform.py")
    sys.modules["sglang.srt.layers.utils"].__dict__["MultiPlatformOp"] = operator.MultiPlatformOp
    standin(
        context,
        "sgl_kernel",
        "fused_add_rmsnorm and rmsnorm, in torch's operators",
        fused_add_rmsnorm=_add_norm,
        rmsnorm=_norm,
    )
    return arguments


def _norm(x: Any, weight: Any, eps: float) -> Any:
    import torch

    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _add_norm(x: Any, residual: Any, weight: Any, eps: float) -> None:
    import torch

    wide = x.float() + residual.float()
    residual.copy_(wide)
    x.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float())


def install_flashinfer(context: Context) -> ModuleType:
    """flashinfer itself, patched, from what is carried; its parent package bare where that does not import here."""
    sys.path.insert(0, str(context.scratch / "site"))
    try:
        importlib.import_module("flashinfer.comm")
    except Exception as error:  # noqa: BLE001 - whatever it is, the package below may do without
        for name in [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]:
            del sys.modules[name]
        bare = ModuleType("flashinfer")
        bare.__path__ = [str(context.scratch / "site" / "flashinfer")]
        sys.modules["flashinfer"] = bare
        context.standin(f"flashinfer/__init__.py, which does not import here: {type(error).__name__}: {error}")
        importlib.import_module("flashinfer.comm")
    operators = importlib.import_module("flashinfer.comm.trtllm_ar")

    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("memory with multicast is not to be made on this machine")

    operators.__dict__["SymmDeviceMemory"] = refused
    return operators
