"""Cases of what EAGLE-3 captures where the all-reduce is put off: E5 and more of `sm120-fusion`. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from builder.smoke.behaviour_case import Case, Comparison, Installed, outcome
from builder.smoke.post_capture import FLAG, LAYERS, MODELS, REDUCE

# The models whose `forward` runs on what `captured` gives it, in sglang 0.5.9 and 0.5.15.post1; others have no case.
SITES = ("E5", "E5b", "E5c", "E5d", "E5e", "E5f", "E5i")
# What one rank has of a sum, what all have, and what runs beside it.
_PART, _WHOLE, _RESIDUAL = 1.0, 10.0, 100.0


def captured(module: Any, model: str) -> str:
    """What the model hands to the draft in front of its third layer, and what that layer is given itself.

    A bare model with layers that put their all-reduce off; the all-reduce is done in place, as NCCL does it.
    """
    import torch  # type: ignore[import-not-found,unused-ignore]

    given: list[float] = []

    def layer(positions: Any, hidden_states: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
        given.append(float(hidden_states[0][0]))
        stream = torch.full((2, 8), _PART)
        setattr(stream, FLAG, True)
        return stream, torch.full((2, 8), _RESIDUAL)

    owner = getattr(module, model)
    made = owner.__new__(owner)
    torch.nn.Module.__init__(made)
    for name, value in {
        "pp_group": SimpleNamespace(is_first_rank=True, is_last_rank=True),
        "start_layer": 0,
        "end_layer": 4,
        "first_k_dense_replace": 1,
        "enable_a2a_moe": False,
        "llama_4_scaling_config": None,
        "layers": [layer] * 4,
        "norm": lambda *tensors, **_: tensors,
        LAYERS: [2],
    }.items():
        setattr(made, name, value)
    setattr(module, REDUCE, lambda tensor: tensor.mul_(_WHOLE / _PART))
    module.get_global_server_args = lambda: SimpleNamespace(enable_piecewise_cuda_graph=True)
    recorder = SimpleNamespace(with_current_layer=lambda number: nullcontext())
    module.get_global_expert_distribution_recorder = lambda: recorder
    module.nsa_use_prefill_cp = lambda *_, **__: False
    batch = SimpleNamespace(can_run_tbo=False, forward_mode=SimpleNamespace(is_idle=lambda: False))

    def run() -> str:
        _, aux = made.forward(None, None, batch, input_embeds=torch.full((2, 8), _PART))
        return " ".join(f"{float(item[0][0]):g}" for item in aux)

    said = outcome(run)
    return f"{said}, the layer is given {given[2]:g}" if len(given) == 4 else said


def _captures(site: str, model: str) -> Case:
    def run(installed: Installed) -> Iterator[Comparison]:
        file = installed.file_of[site]
        what = f"what {model} hands to the draft behind a layer that put its all-reduce off"
        rest = f", the layer is given {_PART:g}"
        yield Comparison(what, f"{_WHOLE + _RESIDUAL:g}{rest}", captured(installed.module(file), model))
        upstream = captured(installed.upstream(file), model)
        yield Comparison(f"{what}, in upstream's file", f"{_PART + _RESIDUAL:g}{rest}", upstream)

    return Case(f"activations of {model} for the draft", (site,), run, ("sglang.srt.models.deepseek_v2",), ours=True)


CASES = tuple(_captures(site, model) for site, model in MODELS.items() if site in SITES)
