"""E5 on real GPUs: what EAGLE-3 captures between two layers of which the first has put its all-reduce off."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from tests.gpu.fusion import EPS, HIDDEN, Stack, stack
from tests.gpu.rank import Context
from tests.gpu.standins import PATCHED, UPSTREAM, source, taken_out

FLAG = "_sglang_needs_allreduce_fusion"
LAYERS, CAPTURED, TOKENS = 5, [1, 2, 4], 4
NEAR, FAR = 0.02, 0.2
"""Of the largest value: what a few roundings make of it, and what a missing half does."""


def captured(context: Context) -> None:
    """`DeepseekV2Model.forward`, patched and upstream's, over layers that do as its own with the patched gate and norm."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    made = stack(context)
    context.standin("DeepseekV2Model: its own forward, over made-up layers (norm, matrix product, all-reduce put off)")
    context.check("the gate is open", made.gate(TOKENS), context.warnings)
    found: dict[str, tuple[Any, list[Any], list[Any]]] = {}
    with torch.no_grad():
        for name, kind, fused in (("plain", UPSTREAM, False), (UPSTREAM, UPSTREAM, True), (PATCHED, PATCHED, True)):
            made.launches.clear()
            made.arguments.enable_flashinfer_allreduce_fusion = fused
            found[name] = _forward(context, made, kind)
            launches = LAYERS - 1 if fused else 0
            context.check(f"{name}: launches of the fused kernel", len(made.launches) == launches, len(made.launches))
    plain, upstream, patched = (found[name] for name in ("plain", UPSTREAM, PATCHED))
    for i, layer in enumerate(CAPTURED):
        right, wrong, ours = (item[1][i] for item in (plain, upstream, patched))
        own = upstream[2][i]
        context.check(
            f"in front of layer {layer}, upstream's: this rank's part",
            torch.equal(wrong, own) and _far(wrong, right) > FAR,
            f"{_far(wrong, right):.1e} of the largest value away from the reduced activation",
        )
        context.check(
            f"in front of layer {layer}, ours: the reduced activation",
            _far(ours, right) <= NEAR,
            f"{_far(ours, right):.1e} of the largest value away from it",
        )
    same = torch.equal(patched[0], upstream[0])
    context.check("the target's own outcome is as without the patch, bit for bit", same, _far(patched[0], upstream[0]))
    context.check("and as without the fusion", _far(patched[0], plain[0]) <= NEAR, _far(patched[0], plain[0]))


def _far(found: Any, known: Any) -> float:
    return float((found.float() - known.float()).abs().max() / known.float().abs().max())


def _forward(context: Context, made: Stack, kind: str) -> tuple[Any, list[Any], list[Any]]:
    """The outcome, what was captured, and what this rank had itself where it was."""
    import torch

    device, reduce = made.world.device, _reduce(made)
    generator = torch.Generator(device=device).manual_seed(1)
    embedded = torch.randn(TOKENS, HIDDEN, device=device, generator=generator).to(torch.bfloat16)
    generator.manual_seed(10 + context.rank)
    matrices = [
        (torch.randn(HIDDEN, HIDDEN, device=device, generator=generator) / (context.ranks * HIDDEN) ** 0.5).bfloat16()
        for _ in range(LAYERS)
    ]
    own: list[Any] = []

    def norm() -> Any:
        return made.layernorm.RMSNorm(HIDDEN, eps=EPS).to(device, torch.bfloat16)

    def layer(number: int) -> Any:
        def run(positions: Any, hidden: Any, batch: Any, residual: Any, *_: Any) -> tuple[Any, Any]:
            if number in CAPTURED:
                own.append(hidden + residual)
            if residual is None:
                residual, hidden = hidden, norm().forward(hidden)
            elif getattr(hidden, FLAG, False):
                hidden, residual = norm().forward_with_allreduce_fusion(hidden, residual)
            else:
                hidden, residual = norm().forward(hidden, residual)
            share = hidden @ matrices[number]
            # The last layer never puts it off.
            if number < LAYERS - 1 and made.gate(share.shape[0]):
                setattr(share, FLAG, True)
                return share, residual
            return reduce(share), residual

        return run

    scope: dict[str, Any] = {
        "torch": torch,
        "nullcontext": nullcontext,
        "BumpAllocator": lambda **_: None,
        "nsa_use_prefill_cp": lambda batch: False,
        "get_global_server_args": lambda: made.arguments,
        "tensor_model_parallel_all_reduce": reduce,
    }
    forward = taken_out(source(context, kind, "models/deepseek_v2.py"), "DeepseekV2Model.forward", scope)
    model = SimpleNamespace(
        pp_group=SimpleNamespace(is_first_rank=True, is_last_rank=True),
        start_layer=0,
        end_layer=LAYERS,
        first_k_dense_replace=1,
        enable_a2a_moe=False,
        llama_4_scaling_config=None,
        layers=[layer(number) for number in range(LAYERS)],
        layers_to_capture=CAPTURED,
        norm=norm(),
    )
    batch = SimpleNamespace(can_run_tbo=False, forward_mode=SimpleNamespace(is_idle=lambda: False))
    hidden, taken = forward(model, None, None, batch, input_embeds=embedded.clone())
    torch.cuda.synchronize()
    return hidden, taken, own


def _reduce(made: Stack) -> Any:
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    def reduce(tensor: Any) -> Any:
        # As NCCL in sglang: in place. What is not reduced on a clone would be added up twice.
        dist.all_reduce(tensor, group=made.world.device_group)
        return tensor

    return reduce
