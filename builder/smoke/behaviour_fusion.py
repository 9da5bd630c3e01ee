"""Cases of the fused all-reduce on SM120: S5, S7, S8, S8b and S9 of `sm120-fusion`. Standard library only.

The installed modules run on made-up devices, with made-up answers of the other ranks; no kernel is launched.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from builder.smoke.behaviour_case import Case, Comparison, Installed, dotted, outcome
from builder.smoke.post_fusion import ENSURE, GATES, NORM, RESOLVE

ASKED = "SGLANG_STACK_SM120_FUSION"
MAX_TOKENS = "SGLANG_STACK_SM120_FUSION_MAX_TOKENS"
PDL = "SGLANG_STACK_SM120_FUSION_PDL"
FUSION_FILE = "sglang/srt/layers/flashinfer_comm_fusion.py"
NORM_FILE = "sglang/srt/layers/layernorm.py"
_GROUPS = ("get_tp_group", "get_attn_tp_group", "get_moe_tp_group")
_REDUCES = (
    "tensor_model_parallel_all_reduce",
    "attention_tensor_model_parallel_all_reduce",
    "moe_tensor_model_parallel_all_reduce",
)


def environment(**values: str) -> None:
    """The three variables, as a user sets them: those that are not given are not set."""
    for name in (ASKED, MAX_TOKENS, PDL):
        os.environ.pop(name, None)
    os.environ.update(values)


def devices(capability: int, size: int, *, here: bool = True, there: str = "") -> None:
    """What one rank of ``size`` finds: whether it reaches the others' GPUs, and what the last of them has against it."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt import distributed  # type: ignore[import-not-found,unused-ignore]

    def gather(items: list[Any], item: Any, group: object = None) -> None:
        items[:] = [(item[0], rank) for rank in range(size)] if isinstance(item, tuple) else [item] * size
        if there and not isinstance(item, tuple):
            items[-1] = there

    group = SimpleNamespace(world_size=size, rank_in_group=0, cpu_group=None, device_group=None)
    for name in _GROUPS:
        setattr(distributed, name, lambda: group)
    torch.cuda.device_count = lambda: size
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device=None: (capability, 0)
    torch.cuda.can_device_access_peer = lambda device, peer: here
    torch.distributed.get_world_size = lambda group=None: size
    torch.distributed.all_gather_object = gather


def _gate(installed: Installed) -> Iterator[Comparison]:
    file = installed.file_of["S5"]
    fusion = installed.module(FUSION_FILE)

    def gate(capability: int, tokens: int, asked: bool, *, flag: bool = True) -> str:
        environment(**({ASKED: "1"} if asked else {}))
        devices(capability, 2)
        # Once more: the variable is read when a server's process imports the module.
        module: Any = installed.again(file)
        (name,) = (name for name in GATES if hasattr(module, name))
        fusion.sm120_open = lambda: True  # type: ignore[attr-defined]
        arguments = SimpleNamespace(
            enable_flashinfer_allreduce_fusion=flag, flashinfer_allreduce_fusion_backend="auto" if flag else None
        )
        module._is_flashinfer_available = True
        module._is_sm90_supported, module._is_sm100_supported = capability == 9, capability == 10
        module.is_dp_attention_enabled = lambda: False
        for asking in ("get_global_server_args", "get_server_args"):
            setattr(module, asking, lambda: arguments)
        return outcome(getattr(module, name), tokens)

    for capability, tokens, asked, flag, expected in (
        (12, 1, False, True, "False"),
        (12, 1, True, True, "True"),
        (12, 16, True, True, "True"),
        (12, 17, True, True, "False"),
        (12, 1, True, False, "False"),
        (9, 17, False, True, "True"),
        (9, 17, True, True, "True"),
        (10, 17, True, True, "True"),
    ):
        what = f"the gate on {capability}.0 for {tokens} tokens, {'' if asked else 'not '}asked for"
        got = gate(capability, tokens, asked, flag=flag)
        yield Comparison(what if flag else f"{what} without sglang's flag", expected, got)


def _fallback(installed: Installed) -> Iterator[Comparison]:
    import torch  # type: ignore[import-not-found,unused-ignore]
    from sglang.srt import distributed  # type: ignore[import-not-found,unused-ignore]

    fusion: Any = installed.module(FUSION_FILE)
    fusion.flashinfer_allreduce_residual_rmsnorm = lambda **_: (None, None)
    for name in _REDUCES:
        setattr(distributed, name, lambda x: x * 10)
    # A group of one, as in most stacks.
    distributed.moe_expert_parallel_all_reduce = lambda x: x
    distributed.get_tensor_model_parallel_world_size = lambda: 2

    def norm(module: Any, **more: object) -> str:
        owner = module.RMSNorm
        made = owner.__new__(owner)
        torch.nn.Module.__init__(made)
        made.weight, made.variance_epsilon = None, 1e-6
        normed: list[float] = []
        made.forward = lambda x, residual=None, addition=None: normed.append(float(x[0][0]))
        if hasattr(module, "get_parallel"):
            module.get_parallel = lambda: SimpleNamespace(attn_tp_size=2, moe_ep_size=1, moe_tp_size=2)
        said = outcome(lambda: getattr(made, NORM)(torch.ones(2, 8), torch.ones(2, 8), **more))
        if normed in ([10.0], [1.0]):
            return "of the sum over all ranks" if normed == [10.0] else "of partial sums"
        return f"of {normed}: {said}"

    ours = installed.module(NORM_FILE)
    kinds: list[dict[str, object]] = [{}]
    if "use_attn_tp_group" in getattr(ours.RMSNorm, NORM).__code__.co_varnames:
        kinds.append({"use_attn_tp_group": False})
    for kind in kinds:
        what = "the norm where the fused all-reduce did not run" + (", of experts" if kind else "")
        yield Comparison(what, "of the sum over all ranks", norm(ours, **kind))
        if "S7" in installed.patched:
            upstream = norm(installed.upstream(NORM_FILE), **kind)
            yield Comparison(f"{what}, in upstream's file", "of partial sums", upstream)


def _vote(installed: Installed) -> Iterator[Comparison]:
    def open_(size: int, *, here: bool = True, there: str = "", tokens: str = "16") -> str:
        environment(**{ASKED: "1", MAX_TOKENS: tokens})
        devices(12, size, here=here, there=there)
        return outcome(installed.again(FUSION_FILE).sm120_open)

    for size in (2, 4, 8):
        yield Comparison(f"whether {size} ranks open it", "True", open_(size))
    yield Comparison("whether 6 ranks open it", "False", open_(6))
    yield Comparison("whether a rank without P2P opens it", "False", open_(4, here=False))
    yield Comparison("whether a rank opens it while another has no P2P", "False", open_(4, there="no P2P"))
    yield Comparison("whether a limit that is no number opens it", "False", open_(4, tokens="many"))
    if hasattr(installed.module(FUSION_FILE), RESOLVE):
        for capability, asked, expected in ((12, True, "trtllm"), (12, False, "ValueError"), (9, False, "trtllm")):
            got = _backend(installed.again(FUSION_FILE), capability, asked)
            yield Comparison(
                f"the backend on {capability}.0, {'' if asked else 'not '}asked for", expected, got.split(":")[0]
            )
    elif "S8" in installed.patched:
        yield from _workspace(installed)


def _backend(module: Any, capability: int, asked: bool) -> str:
    environment(**({ASKED: "1"} if asked else {}))
    devices(capability, 2)
    module.is_sm90_supported, module.is_sm100_supported = (lambda: capability == 9), (lambda: capability == 10)
    return outcome(getattr(module, RESOLVE), "auto")


def _workspace(installed: Installed) -> Iterator[Comparison]:
    """Releases in which nothing guarded it: one rank that fails must neither end the server nor leave the others waiting."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    compiled = installed.module("flashinfer/comm/trtllm_ar.py")
    compiled.get_trtllm_comm_module = lambda: None  # type: ignore[attr-defined]
    torch.distributed.new_group = lambda **_: None
    torch.distributed.get_rank = lambda group=None: 0
    torch.cuda.synchronize = lambda device=None: None

    def ensure(module: Any, *, fails: bool = False, there: str = "") -> str:
        environment(**{ASKED: "1"})
        devices(12, 2)

        def initialize(**_: object) -> None:
            devices(12, 2, there=there)
            if fails:
                raise RuntimeError("out of memory")
            module._workspace_manager.initialized, module._workspace_manager.world_size = True, 2

        module._flashinfer_comm = SimpleNamespace()
        module.is_flashinfer_available = lambda: True
        module.get_tensor_model_parallel_world_size = lambda: 2
        module._workspace_manager.initialize = initialize
        first = outcome(getattr(module, ENSURE), 16, 7168)
        return f"{first}, then {outcome(getattr(module, ENSURE), 16, 7168)}"

    def again() -> ModuleType:
        return installed.again(FUSION_FILE)

    yield Comparison("a workspace that every rank can make", "True, then True", ensure(again()))
    yield Comparison("a workspace that this rank cannot make", "False, then False", ensure(again(), fails=True))
    yield Comparison(
        "a workspace that another rank cannot make", "False, then False", ensure(again(), there="out of memory")
    )
    upstream = ensure(installed.upstream(FUSION_FILE), fails=True)
    yield Comparison(
        "a workspace that cannot be made, in upstream's file",
        "RuntimeError: out of memory, then RuntimeError: out of memory",
        upstream,
    )


def _early_start(installed: Installed) -> Iterator[Comparison]:
    module: Any = installed.module(FUSION_FILE)
    for capability, asked, expected in (
        (9, False, "True"),
        (10, False, "True"),
        (12, False, "False"),
        (12, True, "True"),
    ):
        environment(**({PDL: "1"} if asked else {}))
        devices(capability, 2)
        what = f"programmatic dependent launch on {capability}.0" + (", asked for" if asked else "")
        yield Comparison(what, expected, outcome(module._launch_with_pdl))


_IMPORTS = (dotted(FUSION_FILE), dotted(NORM_FILE), "sglang.srt.layers.communicator")
CASES = (
    Case("gate of the fused all-reduce", ("S5",), _gate, _IMPORTS),
    Case("norm behind a fused all-reduce that did not run", ("S7",), _fallback, _IMPORTS),
    Case("ranks that agree on the fused all-reduce", ("S8", "S8b"), _vote, _IMPORTS),
    Case("early start of the fused all-reduce", ("S9",), _early_start, _IMPORTS),
)
