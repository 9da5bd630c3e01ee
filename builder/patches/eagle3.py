"""The base set for EAGLE-3 with Kimi-K2.5: E1 to E4 in sglang.

What is known of each site is in shared/facts/patches.md, section A2.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from builder.patches.engine import Edit, Module, Reader, Site, UnknownShapeError
from builder.patches.sm120 import function, klass
from builder.smoke.post_base import KIMI, LAYERS

_NOTES = "shared/facts/patches.md section A2"
_KIMI_FILE = "sglang/srt/models/kimi_k25.py"
_INNER_FILE = "sglang/srt/models/deepseek_v2.py"
_INNER, _INNER_BASE = "DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"
_RUNNER_FILE = "sglang/srt/model_executor/model_runner.py"
_IDS = "eagle_aux_hidden_state_layer_ids"

_HOOKS = {
    "get_embed_and_head": """
# sglang-stack E1: EAGLE-3 shares the language model's embedding and head with the draft.
def get_embed_and_head(self):
    return self.language_model.get_embed_and_head()""",
    "set_embed_and_head": """
# sglang-stack E2: the counterpart of E1.
def set_embed_and_head(self, embed, head):
    self.language_model.set_embed_and_head(embed, head)""",
    LAYERS: f"""
# sglang-stack E3: the layers whose hidden states the draft takes; None for the language model's default.
def {LAYERS}(self, layer_ids=None):
    self.language_model.{LAYERS}(layer_ids)""",
}


def _hook(name: str) -> Callable[[Module], Sequence[Edit]]:
    def plan(module: Module) -> Sequence[Edit]:
        owner = klass(module, KIMI)
        built = {ast.unparse(node.targets[0]): node.value for node in ast.walk(owner) if isinstance(node, ast.Assign)}
        inner = built.get("self.language_model")
        if not isinstance(inner, ast.Call) or ast.unparse(inner.func) != _INNER:
            raise UnknownShapeError(f"`self.language_model = {_INNER}(…)` in `{KIMI}`")
        if not any(getattr(node, "name", None) == name for node in owner.body):
            if name in {target for node in owner.body for target in _bound(node)} or "__getattr__" in ast.dump(owner):
                raise UnknownShapeError(f"`{name}` as a method of `{KIMI}`, or not at all")
            return [module.after(owner.body[-1], _HOOKS[name])]
        method = function(owner.body, name)
        parameters = ", ".join(item.arg for item in method.args.args[1:])
        delegated = f"self.language_model.{name}({parameters})"
        if [ast.unparse(node) for node in ast.walk(method) if _calls_inner(node, name)] != [delegated]:
            raise UnknownShapeError(f"`{name}` that delegates once, by `{delegated}`")
        return []

    return plan


def _bound(node: ast.stmt) -> list[str]:
    return [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []


def _calls_inner(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.language_model.{name}"


def _inner_has(name: str) -> Callable[[Reader], str]:
    def context(read: Reader) -> str:
        """The language model has the method itself."""
        wanted = f"`{_INNER}({_INNER_BASE})` and `{_INNER_BASE}.{name}` in {_INNER_FILE}"
        text = read(_INNER_FILE)
        if text is None:
            return wanted
        try:
            module = Module(text)
            function(klass(module, _INNER_BASE).body, name)
            bases = [ast.unparse(base) for base in klass(module, _INNER).bases]
        except UnknownShapeError:
            return wanted
        return "" if bases == [_INNER_BASE] else wanted

    return context


def _capture(module: Module) -> list[Edit]:
    edits: list[Edit] = []
    calls = [
        node
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == LAYERS
    ]
    if not calls:
        raise UnknownShapeError(f"a call of `{LAYERS}`")
    for call in calls:
        receiver = ast.unparse(call.func).removesuffix(f".{LAYERS}")
        if not call.args and not call.keywords:
            if receiver not in ("self.model", "self.model_runner.model"):
                raise UnknownShapeError(f"`self.model.{LAYERS}()` or `self.model_runner.model.{LAYERS}()`")
            edits.append(module.replace(call, f"{receiver}.{LAYERS}({receiver.removesuffix('.model')}.{_IDS})"))
        elif len(call.args) != 1 or not ast.unparse(call.args[0]).endswith(_IDS):
            raise UnknownShapeError(f"`{LAYERS}({_IDS})`")
    return edits


def _ids_known(read: Reader) -> str:
    """The runner knows the draft's layers before graphs are captured: they are an attribute, set when it is made."""
    wanted = f"`self.{_IDS}` set in `ModelRunner.__init__`, in {_RUNNER_FILE}"
    text = read(_RUNNER_FILE)
    if text is None:
        return wanted
    try:
        init = function(klass(Module(text), "ModelRunner").body, "__init__")
    except UnknownShapeError:
        return wanted
    set_there = {
        ast.unparse(target) for node in ast.walk(init) if isinstance(node, ast.Assign) for target in node.targets
    }
    return "" if f"self.{_IDS}" in set_there else wanted


SITES = (
    *(
        Site(
            id=site,
            set="eagle3",
            package="sglang",
            file=_KIMI_FILE,
            marker=f"class {KIMI}",
            what=f"`{KIMI}.{name}`, which EAGLE-3's workers call",
            consequence=consequence,
            source=f"{_NOTES}, {site}",
            places=(f"{KIMI}.{name}",),
            plan=_hook(name),
            context=_inner_has(name),
        )
        for site, name, consequence in (
            ("E1", "get_embed_and_head", "the draft shares the language model's embedding and head"),
            ("E2", "set_embed_and_head", "the counterpart of E1"),
            ("E3", LAYERS, "the language model hands out the hidden states that the draft was trained on"),
        )
    ),
    Site(
        id="E4",
        set="eagle3",
        package="sglang",
        file="sglang/srt/",
        outside=("sglang/srt/models/",),
        marker=f".{LAYERS}(",
        what="which layers' hidden states CUDA graphs capture",
        consequence="graphs are captured with the draft's layers, not with the default ones",
        source=f"{_NOTES}, E4, and section 0, 8",
        places=(),
        plan=_capture,
        context=_ids_known,
    ),
)
