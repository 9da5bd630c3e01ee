"""E5 in sglang: what EAGLE-3 captures where the all-reduce is put off. The fused all-reduce cannot be without it.

A layer may leave its all-reduce to the next layer's norm: it marks its outcome with an attribute, and until then each rank
has its own partial sums. Models that add up outcome and residual themselves, between two layers, hand those sums to the
draft. What is known of the site is in shared/facts/patches.md, section A2 and section 0, 5; E5g, E5h and E5i were found in
the sources of 0.5.6.post2 to 0.5.23, 2026-11-30.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence

from builder.patches.engine import Edit, Module, Reader, Site, UnknownShapeError
from builder.patches.sm120 import function, klass
from builder.smoke.post_capture import FLAG, HELPER, LAYERS, MODELS, REDUCE, REDUCES

_NOTES = "shared/facts/patches.md section A2"
_BASE = MODELS["E5"]
_STREAM, _COPY = "hidden_states", "reduced"

_COMMENT = """\
# sglang-stack E5: a layer whose all-reduce is put off leaves one rank's partial
# sums. A clone is reduced: NCCL does it in place, and the stream's turn comes later."""
_IMPORT = f"""\
# sglang-stack E5: completes what the draft gets of a layer whose all-reduce is put off.
from sglang.srt.distributed import {REDUCE}"""
_MARK = f"{_STREAM}.{FLAG} = True"
_QWEN3 = "sglang/srt/models/qwen3_moe.py"
_ADDS_IMPORT = ("E5g", "E5i")
"""The sites whose files import nothing that reduces: their layers are made of another model's."""


def _lines(site: str) -> str:
    """A clone of the stream, reduced as a layer does that does not put it off; a group of one reduces nothing."""
    first, *others = REDUCES.get(site, (REDUCE,))
    steps = [f"{_COPY} = {first}({_STREAM}.clone())", *(f"{_COPY} = {reduce}({_COPY})" for reduce in others)]
    return f'{_COPY} = {_STREAM}\nif getattr({_STREAM}, "{FLAG}", False):' + "".join(f"\n    {step}" for step in steps)


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
    # DSpark captures behind a layer, not in front of the next one.
    """\
if residual is None:
    dspark_aux_hidden_states.append(hidden_states)
else:
    dspark_aux_hidden_states.append(hidden_states + residual)""",
)
_HELPED = f"""\
aux_hidden_state = self.{HELPER}(hidden_states, residual)
if self.enable_a2a_moe and i > self.first_k_dense_replace:
    aux_hidden_state = get_parallel().attn_tp_group.all_gather(aux_hidden_state, dim=0)
aux_hidden_states.append(aux_hidden_state)"""
# What the helper does, in sglang 0.5.20. With mHC nothing is put off.
_OLD_HELPER = """\
aux_hidden_state = hidden_states if residual is None else hidden_states + residual
if self.dflash_capture and self.config.mhc:
    aux_hidden_state = hc_contract(aux_hidden_state, self.config.hc_mult)
return aux_hidden_state"""
_TESTS = (
    *(f"{which} in self.{LAYERS}" for which in ("i", "i + 1", "layer_idx", "self.start_layer", "self.end_layer")),
    ast.unparse(ast.parse(f"capture_aux and i in self.{LAYERS} and hidden_states.shape[0] != 0")),
)
# What upstream does instead: the layer captures behind its reducing norm, or (from 0.5.23 on) asks whoever puts it off.
_NATIVE = ("aux_hidden_states.append(residual_batch.snapshot(hidden_states, forward_batch))",)
_NATIVE_KEYWORDS = (
    f"captured_last_layer_outputs=aux_hidden_states if i in self.{LAYERS} else None",
    f"capture_output=aux_hidden_states.capture if i in self.{LAYERS} else None",
    f"capture=aux_hidden_states.capture if self.end_layer in self.{LAYERS} else None",
    f"capture=aux_hidden_states.append if self.end_layer in self.{LAYERS} else None",
    f"capture_output=aux_hidden_states.capture if layer_idx in self.{LAYERS} else None",
    f"capture_output=capture_output if i in self.{LAYERS} else None",
    f"capture_output=capture_output if capture_aux and i > self.start_layer and (i - 1 in self.{LAYERS}) else None",
    f"capture=capture_output if capture_aux and self.end_layer - 1 in self.{LAYERS} else None",
)
# Of what is packed; whether anything is captured.
_ASKED = (f"len(self.{LAYERS})", f"self.{LAYERS} is not None")


def _source(body: Sequence[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, body))


def _ours(old: str, site: str) -> str:
    return _source(ast.parse(f"{_lines(site)}\n" + re.sub(rf"\b{_STREAM}\b", _COPY, old)).body)


def _mentions(node: ast.AST, name: str) -> Iterator[ast.expr]:
    for item in ast.walk(node):
        if name in (getattr(item, "attr", None), getattr(item, "id", None)):
            assert isinstance(item, ast.expr)
            yield item


def _capture(site: str) -> Callable[[Module], Sequence[Edit]]:
    model = MODELS[site]

    def plan(module: Module) -> Sequence[Edit]:
        owner = klass(module, model)
        if [ast.unparse(base) for base in owner.bases] == [_BASE] and "forward" not in ast.dump(owner):
            return []  # it captures where its base does
        forward = function(owner.body, "forward")
        blocks = [node for node in ast.walk(forward) if isinstance(node, ast.If) and any(_mentions(node.test, LAYERS))]
        others = [
            f"{node.arg}={ast.unparse(node.value)}" for node in ast.walk(forward) if isinstance(node, ast.keyword)
        ]
        asked = [node for node in ast.walk(forward) if ast.unparse(node) in _ASKED]
        known = len(blocks) + sum(other in _NATIVE_KEYWORDS for other in others) + len(asked)
        if len(list(_mentions(forward, LAYERS))) != known:
            raise UnknownShapeError(f"`self.{LAYERS}` in `{model}.forward` as releases up to 0.5.23 use it")
        bodies = _bodies(site, owner, blocks)
        kinds = {_kind(site, body) for body in bodies}
        if kinds - {"native"} and any(ast.unparse(node) == f"{_STREAM}.add_" for node in ast.walk(forward)):
            raise UnknownShapeError(
                f"no `{_STREAM}.add_(…)` in `{model}.forward`: where the all-reduce is put off each rank adds it to its partial "
                "sums, and the model itself comes out wrong"
            )
        if "old" not in kinds:
            return []
        if kinds != {"old"}:
            raise UnknownShapeError(f"captures of one kind in `{model}.forward`")
        if any(any(_mentions(node, _COPY)) for node in (forward, *(node for body in bodies for node in body))):
            raise UnknownShapeError(f"no `{_COPY}` in `{model}.forward`")
        if site != "E5i" and _MARK not in map(ast.unparse, ast.walk(module.tree)):
            raise UnknownShapeError(f"`{_MARK}`")
        return [*_imports(site, module), *(edit for body in bodies for edit in _edits(site, module, body))]

    return plan


def _bodies(site: str, owner: ast.ClassDef, blocks: Sequence[ast.If]) -> list[Sequence[ast.stmt]]:
    """What captures: what is done under each `if`, or the method that makes it there."""
    for block in blocks:
        if ast.unparse(block.test) not in _TESTS or block.orelse or block.body[0].lineno == block.test.end_lineno:
            raise _unknown()
    if not blocks or site != "E5g":
        return [block.body for block in blocks]
    helper = function(owner.body, HELPER)
    if [_source(block.body) for block in blocks] != [_HELPED]:
        raise UnknownShapeError(f"one `self.{HELPER}({_STREAM}, residual)` under `if i in self.{LAYERS}`")
    return [helper.body]


def _kind(site: str, body: Sequence[ast.stmt]) -> str:
    source = _source(body)
    old = (_OLD_HELPER,) if site == "E5g" else _OLD
    for kind, known in (("old", old), ("ours", [_ours(item, site) for item in old]), ("native", _NATIVE)):
        if source in known:
            return kind
    raise _unknown() if site != "E5g" else UnknownShapeError(f"`{HELPER}` as in 0.5.20")


def _unknown() -> UnknownShapeError:
    return UnknownShapeError(f"`{_OLD[0]}`, or as it is elsewhere, under `if i in self.{LAYERS}`")


def _imports(site: str, module: Module) -> list[Edit]:
    """The import of what reduces, in front of sglang's others, where the file needs none itself."""
    imported = _imported(module.tree)
    missing = [reduce for reduce in REDUCES.get(site, (REDUCE,)) if reduce not in imported]
    if not missing:
        return []
    others = [node for node in module.tree.body if (getattr(node, "module", None) or "").startswith("sglang.srt.")]
    if site not in _ADDS_IMPORT or not others:
        raise UnknownShapeError(f"`from sglang.srt.distributed import {missing[0]}`")
    return [module.before(others[0], _IMPORT)]


def _imported(tree: ast.Module) -> list[str]:
    return [
        item.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "sglang.srt.distributed"
        for item in node.names
        if item.asname is None
    ]


def _edits(site: str, module: Module, body: Sequence[ast.stmt]) -> Iterator[Edit]:
    yield module.before(body[0], f"{_COMMENT}\n{_lines(site)}")
    for statement in body:
        for node in _mentions(statement, _STREAM):
            yield module.replace(node, _COPY)


def _marked(read: Reader) -> str:
    """The layers of Qwen3-VL's mixture of experts are Qwen3's, in a file of their own."""
    text = read(_QWEN3)
    return "" if text is not None and _MARK in text else f"`{_MARK}` in {_QWEN3}"


_WHERE = {
    # By file, and what is in it wherever the model is (another file has a `BailingMoELinearModel` that captures nothing).
    "E5": ("deepseek_v2", ""),
    "E5b": ("glm4_moe", ""),
    "E5c": ("glm4_moe_lite", ""),
    "E5d": ("gpt_oss", ""),
    "E5e": ("laguna", ""),
    "E5f": ("bailing_moe", ""),
    "E5g": ("glm5_next", ""),
    "E5h": ("bailing_moe_v3", "class BailingMoeV3ForCausalLM"),
    "E5i": ("qwen3_vl_moe", ""),
}
SITES = tuple(
    Site(
        id=site,
        set="sm120-fusion",
        package="sglang",
        file=f"sglang/srt/models/{_WHERE[site][0]}.py",
        marker=_WHERE[site][1] or f"class {model}",
        what=f"what `{model}` hands to the draft between two layers",
        consequence="where the all-reduce is put off the draft gets the reduced activations, of a clone: one more all-reduce "
        "for each captured layer; the target's own stream is as before",
        source=f"{_NOTES}, E5",
        places=(
            f"{model}.{HELPER if site == 'E5g' else 'forward'}",
            *(["import"] if site in _ADDS_IMPORT else []),
        ),
        plan=_capture(site),
        context=_marked if site == "E5i" else lambda read: "",
    )
    for site, model in MODELS.items()
)
