"""The places that the sites E5 to E7 are about, and stand-ins that run what is patched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from builder.smoke.post_capture import FLAG, MODELS, REDUCE
from builder.smoke.post_multimodal import SWITCH
from tests.patch_made import execute

# --- E5: models ---------------------------------------------------------------------------------------------------------

# A layer that puts its all-reduce off.
_LAYER = """\
class DecoderLayer:
    def forward(self, hidden_states, residual):
        hidden_states = self.mlp(hidden_states)
        if self.should_allreduce_fusion():
            hidden_states._sglang_needs_allreduce_fusion = True
        return hidden_states, residual

"""
_MODEL = (
    """\
from sglang.srt.distributed import (
    get_pp_group,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


"""
    + _LAYER
    + """\

class {model}:
    def forward(self, hidden_states, residual=None):
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with self.ctx:
                if i in self.layers_to_capture:
{capture}
                layer = self.layers[i]
                hidden_states, residual = layer(hidden_states, residual)
        return hidden_states, aux_hidden_states


class {model}ForCausalLM:
    def set_eagle3_layers_to_capture(self, layer_ids=None):
        self.model.layers_to_capture = [val + 1 for val in layer_ids]
"""
)

BARE = """\
                    aux_hidden_states.append(hidden_states + residual)"""
IF_ANY = """\
                    # Größe: what is not ASCII moves columns apart from bytes.
                    aux_hidden_states.append(
                        hidden_states if residual is None else hidden_states + residual
                    )"""
IF_LATER = """\
                    aux_hidden_states.append(
                        hidden_states + residual if residual is not None else hidden_states
                    )"""
GATHERED = """\
                    if self.enable_a2a_moe and i > self.first_k_dense_replace:
                        aux_hidden_state = tensor_model_parallel_all_gather(
                            hidden_states + residual, dim=0
                        )
                        aux_hidden_states.append(aux_hidden_state)
                    else:
                        aux_hidden_states.append(hidden_states + residual)"""


def model_source(site: str, capture: str) -> str:
    """A model's file that captures so, with layers that put their all-reduce off."""
    return _MODEL.format(model=MODELS[site], capture=capture)


# sglang 0.5.20: a method makes what is captured, and the file imports nothing that reduces.
HELPED = (
    """\
from sglang.srt.distributed.parallel_state import get_pp_group


"""
    + _LAYER
    + """\

class Glm5NextModel:
    def _prepare_aux_hidden_state(self, hidden_states, residual):
        # With mHC the residual is part of the stream.
        aux_hidden_state = (
            hidden_states if residual is None else hidden_states + residual
        )
        if self.dflash_capture and self.config.mhc:
            aux_hidden_state = hc_contract(aux_hidden_state, self.config.hc_mult)
        return aux_hidden_state

    def forward(self, hidden_states, residual=None):
        aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with self.ctx:
                if i in self.layers_to_capture:
                    aux_hidden_state = self._prepare_aux_hidden_state(
                        hidden_states, residual
                    )
                    if self.enable_a2a_moe and i > self.first_k_dense_replace:
                        aux_hidden_state = get_parallel().attn_tp_group.all_gather(
                            aux_hidden_state, dim=0
                        )
                    aux_hidden_states.append(aux_hidden_state)
                layer = self.layers[i]
                hidden_states, residual = layer(hidden_states, residual)
        return hidden_states, aux_hidden_states
"""
)

# sglang 0.5.20: DSpark's capture behind a layer, whose experts and whose tensors are reduced one after the other.
BEHIND = (
    """\
from sglang.srt.distributed import (
    get_pp_group,
    moe_expert_parallel_all_reduce,
    moe_tensor_model_parallel_all_reduce,
)


"""
    + _LAYER
    + """\

class BailingMoELinearModel:
    def forward(self, hidden_states, residual=None):
        capture_aux = self.capture_aux_hidden_states and self.layers_to_capture is not None
        if capture_aux:
            dspark_aux_hidden_states = []
        for i in range(self.start_layer, self.end_layer):
            with self.ctx:
                layer = self.layers[i]
                hidden_states, residual = layer(hidden_states, residual)
                if (
                    capture_aux
                    and i in self.layers_to_capture
                    and hidden_states.shape[0] != 0
                ):
                    if residual is None:
                        dspark_aux_hidden_states.append(hidden_states)
                    else:
                        dspark_aux_hidden_states.append(hidden_states + residual)
        return hidden_states, dspark_aux_hidden_states


class BailingMoeV3ForCausalLM:
    pass
"""
)

# Qwen3-VL's mixture of experts: the layers, and all that reduces, are Qwen3's, in another file.
INHERITED = """\
from typing import Iterable

from sglang.srt.models.qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeModel
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration


class Qwen3MoeLLMModel(Qwen3MoeModel):
    def forward(self, hidden_states, residual=None):
        aux_hidden_states = []
        for layer_idx, layer in enumerate(
            self.layers[self.start_layer : self.end_layer]
        ):
            layer_idx += self.start_layer
            if layer_idx in self.layers_to_capture:
                aux_hidden_states.append(
                    hidden_states + residual if residual is not None else hidden_states
                )
            hidden_states, residual = layer(hidden_states, residual)
        return hidden_states, aux_hidden_states
"""
QWEN3 = {"sglang/srt/models/qwen3_moe.py": f"def forward(hidden_states):\n    hidden_states.{FLAG} = True\n"}

MODEL_OLD = {
    "E5": model_source("E5", GATHERED),
    "E5b": model_source("E5b", BARE),
    "E5c": model_source("E5c", BARE),
    "E5d": model_source("E5d", BARE),
    "E5e": model_source("E5e", IF_LATER),
    "E5f": model_source("E5f", IF_ANY),
    "E5g": HELPED,
    "E5h": BEHIND,
    "E5i": INHERITED,
}


class Stream:
    """A tensor of one number. It may be marked as one rank's partial sum, a clone is not, and NCCL reduces it in place."""

    shape = (1,)

    def __init__(self, value: int, waits: bool = False) -> None:
        self.value = value
        if waits:
            setattr(self, FLAG, True)

    def clone(self) -> Stream:
        return Stream(self.value)

    def __add__(self, other: Stream) -> Stream:
        return Stream(self.value + other.value)


def _gather(tensor: Stream, dim: int) -> Stream:
    assert dim == 0
    return Stream(tensor.value * 100)


class Layers:
    """A model of a patched source with four layers; those in ``waiting`` put their all-reduce off, which makes ten of one."""

    def __init__(self, source: str, model: str, waiting: Sequence[int], patch: pytest.MonkeyPatch) -> None:
        self.waiting = waiting
        self.reduced: list[Stream] = []
        self.seen: list[tuple[int, bool]] = []
        distributed = ModuleType("distributed")
        distributed.__dict__.update(
            {
                REDUCE: self._reduce,
                "tensor_model_parallel_all_gather": _gather,
                # Never are both of more than one rank where the all-reduce is put off.
                "moe_expert_parallel_all_reduce": self._reduce,
                "moe_tensor_model_parallel_all_reduce": lambda tensor: tensor,
                "get_pp_group": None,
            }
        )
        state, qwen3, vision = ModuleType("parallel_state"), ModuleType("qwen3_moe"), ModuleType("qwen3_vl")
        state.__dict__["get_pp_group"] = None
        qwen3.__dict__.update(Qwen3MoeDecoderLayer=None, Qwen3MoeModel=object)
        vision.__dict__["Qwen3VLForConditionalGeneration"] = None
        for name, module in {
            "sglang": ModuleType("sglang"),
            "sglang.srt": ModuleType("srt"),
            "sglang.srt.distributed": distributed,
            "sglang.srt.distributed.parallel_state": state,
            "sglang.srt.models": ModuleType("models"),
            "sglang.srt.models.qwen3_moe": qwen3,
            "sglang.srt.models.qwen3_vl": vision,
        }.items():
            patch.setitem(sys.modules, name, module)
        group = SimpleNamespace(all_gather=_gather)
        scope: dict[str, Any] = {
            "__name__": "patched",
            "get_parallel": lambda: SimpleNamespace(attn_tp_group=group),
            "hc_contract": lambda tensor, times: Stream(tensor.value * times),
        }
        execute(source, model, scope)
        self.model = scope[model]()
        self.model.__dict__.update(
            ctx=contextlib.nullcontext(),
            start_layer=0,
            end_layer=4,
            layers=[self._layer(i) for i in range(4)],
            layers_to_capture=[],
            enable_a2a_moe=False,
            first_k_dense_replace=1,
            capture_aux_hidden_states=True,
            dflash_capture=False,
            config=SimpleNamespace(mhc=True, hc_mult=7),
        )
        self.behind = "dspark" in source

    def run(self, *captured: int) -> list[int]:
        """What is captured in front of these layers."""
        self.model.layers_to_capture = [i - 1 for i in captured] if self.behind else list(captured)
        _, aux = self.model.forward(Stream(1))
        return [tensor.value for tensor in aux]

    def _reduce(self, tensor: Stream) -> Stream:
        self.reduced.append(tensor)
        tensor.value *= 10
        return tensor

    def _layer(self, i: int) -> Any:
        def layer(hidden_states: Stream, residual: Stream | None) -> tuple[Stream, Stream]:
            waits = bool(getattr(hidden_states, FLAG, False))
            self.seen.append((hidden_states.value, waits))
            return Stream(i + 1, waits=i in self.waiting), Stream(1000)

        return layer


# --- E6 and E7: the draft and the worker --------------------------------------------------------------------------------

DRAFT_OLD = """\
\"\"\"A docstring, and an import in front of the others, as upstream has it.\"\"\"

from sglang.srt.utils import add_prefix

import copy
from typing import Optional

import torch


class LlamaDecoderLayer:
    pass


class LlamaModel:
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch,
        input_embeds: torch.Tensor = None,
    ) -> torch.Tensor:
        if input_embeds is None:
            embeds = self.embed_tokens(input_ids)
        else:
            embeds = input_embeds

        hidden_states = forward_batch.spec_info.hidden_states
        return self.midlayer(positions, embeds, hidden_states)
"""

WORKER_OLD = """\
import contextlib
from typing import Optional

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class EagleDraftWorker:
    def _draft_extend_for_prefill(
        self,
        batch: ModelWorkerBatch,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
    ):
        batch.spec_info = target_hidden_states
        forward_batch = ForwardBatch.init_new(batch, self.draft_runner)
        logits_output = self.draft_runner.forward(forward_batch).logits_output
        return logits_output


class EAGLEWorkerV2:
    def forward_batch_generation(self, model_worker_batch: ModelWorkerBatch):
        batch_output = self.target_worker.forward_batch_generation(model_worker_batch)
        batch_output.next_draft_input = (
            self.draft_worker._draft_extend_for_prefill(
                model_worker_batch,
                batch_output.logits_output.hidden_states,
                batch_output.next_token_ids,
            )
        )
        return batch_output
"""

KEPT = {
    "sglang/srt/model_executor/forward_batch_info.py": "class ForwardBatch:\n    mm_input_embeds: Optional[torch.Tensor] = None\n",
    "sglang/srt/layers/logits_processor.py": "class LogitsProcessorOutput:\n    mm_input_embeds: Optional[torch.Tensor] = None\n",
    "sglang/srt/managers/mm_utils.py": "def routine():\n    forward_batch.mm_input_embeds = input_embeds\n",
}
"""Files by which the target's embeddings are kept until the draft runs."""


class Rows:
    """A tensor whose rows have one value each; ``width`` is what its other dimension would be."""

    def __init__(self, rows: Sequence[object], width: int = 8, dtype: str = "bf16") -> None:
        self.rows, self.width, self.dtype = list(rows), width, dtype

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.width

    def to(self, dtype: str) -> Rows:
        return Rows(self.rows, self.width, dtype)

    def __sub__(self, number: int) -> Rows:
        return Rows([int(str(row)) - number for row in self.rows], 1, "int64")

    def __getitem__(self, at: Rows) -> Rows:
        return Rows([self.rows[int(str(i))] for i in at.rows], self.width, self.dtype)

    def __setitem__(self, at: Rows, values: Rows) -> None:
        assert (values.dtype, values.width) == (self.dtype, self.width)
        for i, value in zip(at.rows, values.rows, strict=True):
            self.rows[int(str(i))] = value


def _torch() -> ModuleType:
    torch = ModuleType("torch")

    def cumsum(tensor: Rows, dim: int) -> Rows:
        assert dim == 0
        return Rows([sum(int(str(row)) for row in tensor.rows[: i + 1]) for i in range(len(tensor.rows))], 1, "int64")

    def roll(tensor: Rows, shifts: int, dims: int) -> Rows:
        assert dims == 0
        return Rows([*tensor.rows[-shifts:], *tensor.rows[:-shifts]], tensor.width, tensor.dtype)

    torch.__dict__.update(Tensor=Rows, cumsum=cumsum, roll=roll)
    return torch


def _modules(patch: pytest.MonkeyPatch, switch: str | None) -> None:
    if switch is None:
        patch.delenv(SWITCH, raising=False)
    else:
        patch.setenv(SWITCH, switch)
    utils, info = ModuleType("utils"), ModuleType("info")
    utils.__dict__["add_prefix"] = None
    info.__dict__["ForwardBatch"] = SimpleNamespace(
        init_new=lambda batch, runner: SimpleNamespace(batch=batch, mm_input_embeds=None)
    )
    for name, module in {
        "torch": _torch(),
        "sglang": ModuleType("sglang"),
        "sglang.srt": ModuleType("srt"),
        "sglang.srt.utils": utils,
        "sglang.srt.model_executor": ModuleType("model_executor"),
        "sglang.srt.model_executor.forward_batch_info": info,
    }.items():
        patch.setitem(sys.modules, name, module)


class Draft:
    """`LlamaModel` of a patched source, imported with the variable set to ``switch``."""

    def __init__(self, source: str, switch: str | None, patch: pytest.MonkeyPatch) -> None:
        _modules(patch, switch)
        scope: dict[str, Any] = {"__name__": "patched"}
        execute(source, "llama_eagle3.py", scope)
        self.model = scope["LlamaModel"]()
        self.model.embed_tokens = lambda ids: Rows([f"token {i}" for i in ids])
        self.model.midlayer = lambda positions, embeds, hidden_states: embeds

    def reads(self, ids: Sequence[int], target: Rows | None, lengths: Sequence[int], *, prefill: bool = True) -> Rows:
        """The embeddings that the layers of the draft get."""
        batch = SimpleNamespace(
            mm_input_embeds=target,
            extend_seq_lens=Rows(lengths, 1, "int32") if prefill else None,
            forward_mode=SimpleNamespace(is_extend_without_speculative=lambda: prefill),
            spec_info=SimpleNamespace(hidden_states=None),
        )
        found = self.model.forward(ids, None, batch)
        assert isinstance(found, Rows)
        return found


def worker_batch(source: str, switch: str | None, target: object, patch: pytest.MonkeyPatch) -> Any:
    """The batch that the draft runs in prefill, for a target that embedded ``target``."""
    _modules(patch, switch)
    scope: dict[str, Any] = {"__name__": "patched", "ModelWorkerBatch": object}
    execute(source, "eagle_worker_v2.py", scope)
    ran: list[Any] = []
    draft, worker = scope["EagleDraftWorker"](), scope["EAGLEWorkerV2"]()

    def run(batch: Any) -> Any:
        ran.append(batch)
        return SimpleNamespace(logits_output=1)

    draft.draft_runner = SimpleNamespace(forward=run)
    output = SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states="hidden", mm_input_embeds=target), next_token_ids="next"
    )
    worker.draft_worker = draft
    worker.target_worker = SimpleNamespace(forward_batch_generation=lambda batch: output)
    worker.forward_batch_generation(SimpleNamespace())
    (batch,) = ran
    return batch
