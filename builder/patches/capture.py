"""E5 in sglang: what EAGLE-3 captures where the all-reduce is put off. The fused all-reduce cannot be without it.

A layer may leave its all-reduce to the next layer's norm: it marks its outcome with an attribute, and until then each rank
has its own partial sums. Models that add up outcome and residual themselves, between two layers, hand those sums to the
draft. What is known of the site is in shared/facts/patches.md, section A2 and section 0, 5.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from builder.patches.engine import Edit, Module, Site, UnknownShapeError
from builder.patches.sm120 import function, klass
from builder.smoke.post_capture import FLAG, LAYERS, MODELS, REDUCE

_NOTES = "shared/facts/patches.md section A2"
_BASE = MODELS["E5"]
_STREAM, _COPY = "hidden_states", "reduced"

_COMMENT = """\
# sglang-stack E5: a layer whose all-reduce is put off leaves one rank's partial
# sums. A clone is reduced: NCCL does it in place, and the stream's turn comes later."""
_LINES = f"""\
{_COPY} = {_STREAM}
if getattr({_STREAM}, "{FLAG}", False):
    {_COPY} = {REDUCE}({_STREAM}.clone())"""

_GATHERED = """\
if self.enable_a2a_moe and i > self.first_k_dense_replace:
    aux_hidden_state = {gather}(hidden_states + residual, dim=0)
    aux_hidden_states.append(aux_hidden_state)
else:
    aux_hidden_states.append(hidden_states + residual)"""
# What is done under `if … in self.layers_to_capture`, as releases up to 0.5.20 have it.
_OLD = (
    "aux_hidden_states.append(hidden_states + residual)",
    "aux_hidden_states.append(hidden_states if residual is None else hidden_states + residual)",
    "aux_hidden_states.append(hidden_states + residual if residual is not None else hidden_states)",
    _GATHERED.format(gather="tensor_model_parallel_all_gather"),
    _GATHERED.format(gather="get_attention_tp_group().all_gather"),
)
_TESTS = tuple(f"{which} in self.{LAYERS}" for which in ("i", "i + 1", "self.start_layer", "self.end_layer"))
# What upstream does instead: the layer captures behind its reducing norm, or (from 0.5.23 on) asks whoever puts it off.
_NATIVE = ("aux_hidden_states.append(residual_batch.snapshot(hidden_states, forward_batch))",)
_NATIVE_KEYWORDS = (
    f"captured_last_layer_outputs=aux_hidden_states if i in self.{LAYERS} else None",
    f"capture_output=aux_hidden_states.capture if i in self.{LAYERS} else None",
    f"capture=aux_hidden_states.capture if self.end_layer in self.{LAYERS} else None",
    f"capture=aux_hidden_states.append if self.end_layer in self.{LAYERS} else None",
)


def _source(body: Sequence[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))


def _ours(old: str) -> str:
    return _source(ast.parse(f"{_LINES}\n" + re.sub(rf"\b{_STREAM}\b", _COPY, old)).body)


_OURS = tuple(map(_ours, _OLD))


def _mentions(node: ast.AST, name: str) -> Iterator[ast.expr]:
    for item in ast.walk(node):
        if name in (getattr(item, "attr", None), getattr(item, "id", None)):
            assert isinstance(item, ast.expr)
            yield item


def _capture(model: str) -> Callable[[Module], Sequence[Edit]]:
    def plan(module: Module) -> Sequence[Edit]:
        owner = klass(module, model)
        if [ast.unparse(base) for base in owner.bases] == [_BASE] and "forward" not in ast.dump(owner):
            return []  # it captures where its base does
        forward = function(owner.body, "forward")
        blocks = [node for node in ast.walk(forward) if isinstance(node, ast.If) and any(_mentions(node.test, LAYERS))]
        kinds = [_kind(block) for block in blocks]
        others = [
            f"{node.arg}={ast.unparse(node.value)}" for node in ast.walk(forward) if isinstance(node, ast.keyword)
        ]
        lengths = [
            node for node in ast.walk(forward) if ast.unparse(node) == f"len(self.{LAYERS})"
        ]  # of what is packed
        known = len(blocks) + sum(other in _NATIVE_KEYWORDS for other in others) + len(lengths)
        if len(list(_mentions(forward, LAYERS))) != known:
            raise UnknownShapeError(f"`self.{LAYERS}` in `{model}.forward` as releases up to 0.5.23 use it")
        if "old" not in kinds:
            return []
        if set(kinds) != {"old"}:
            raise UnknownShapeError(f"captures of one kind in `{model}.forward`")
        if any(_mentions(forward, _COPY)):
            raise UnknownShapeError(f"no `{_COPY}` in `{model}.forward`")
        if f"{_STREAM}.{FLAG} = True" not in map(ast.unparse, ast.walk(module.tree)):
            raise UnknownShapeError(f"`{_STREAM}.{FLAG} = True`")
        if REDUCE not in _imported(module.tree):
            raise UnknownShapeError(f"`from sglang.srt.distributed import {REDUCE}`")
        return [edit for block in blocks for edit in _edits(module, block)]

    return plan


def _kind(block: ast.If) -> str:
    body = _source(block.body)
    own_lines = block.body[0].lineno > (block.test.end_lineno or 0)
    if ast.unparse(block.test) in _TESTS and not block.orelse and own_lines:
        for kind, bodies in (("old", _OLD), ("ours", _OURS), ("native", _NATIVE)):
            if body in bodies:
                return kind
    raise UnknownShapeError(f"`{_OLD[0]}`, or as it is elsewhere, under `if i in self.{LAYERS}`")


def _imported(tree: ast.Module) -> list[str]:
    return [
        item.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "sglang.srt.distributed"
        for item in node.names
        if item.asname is None
    ]


def _edits(module: Module, block: ast.If) -> Iterator[Edit]:
    yield module.before(block.body[0], f"{_COMMENT}\n{_LINES}")
    for statement in block.body:
        for node in _mentions(statement, _STREAM):
            yield module.replace(node, _COPY)


SITES = tuple(
    Site(
        id=site,
        set="sm120-fusion",
        package="sglang",
        file=f"sglang/srt/models/{file}.py",
        marker=f"class {model}",
        what=f"what `{model}` hands to the draft between two layers",
        consequence="where the all-reduce is put off the draft gets the reduced activations, of a clone: one more all-reduce "
        "for each captured layer; the target's own stream is as before",
        source=f"{_NOTES}, E5",
        places=(f"{model}.forward",),
        plan=_capture(model),
    )
    for (site, model), file in zip(
        MODELS.items(),
        ("deepseek_v2", "glm4_moe", "glm4_moe_lite", "gpt_oss", "laguna", "bailing_moe"),
        strict=True,
    )
)
