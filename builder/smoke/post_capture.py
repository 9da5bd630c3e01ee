"""What the sites of `builder/patches/capture.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

from builder.smoke.syntax import WrongError, calls, function, klass, need, one

FLAG = "_sglang_needs_allreduce_fusion"
LAYERS = "layers_to_capture"
REDUCE = "tensor_model_parallel_all_reduce"
HELPER = "_prepare_aux_hidden_state"
MODELS = {
    "E5": "DeepseekV2Model",
    "E5b": "Glm4MoeModel",
    "E5c": "Glm4MoeLiteModel",
    "E5d": "GptOssModel",
    "E5e": "LagunaModel",
    "E5f": "BailingMoEModel",
    "E5g": "Glm5NextModel",
    "E5h": "BailingMoELinearModel",
    "E5i": "Qwen3MoeLLMModel",
}
"""The model whose `forward` captures, by site."""
REDUCES = {"E5h": ("moe_expert_parallel_all_reduce", "moe_tensor_model_parallel_all_reduce")}
"""What completes a sum, in order, where a layer that does not put it off takes something else than `REDUCE`.

Either is over a group of one wherever the all-reduce is put off (sglang 0.5.20), and the other over the group of `REDUCE`
unless the experts are in data parallel groups, of which `REDUCE` would add up several.
"""


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What a function does itself: not what functions and classes inside of it do."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _own(child)


def _names(node: ast.AST, name: str) -> list[ast.Name]:
    return [item for item in ast.walk(node) if isinstance(item, ast.Name) and item.id == name]


def _bindings(tree: ast.Module, name: str) -> list[str]:
    """Where the whole file gives ``name`` a meaning: by an import, an assignment or a definition."""
    found = [
        f"from {n.module}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom)
        for a in n.names
        if (a.asname or a.name) == name
    ]
    found += ["an assignment" for item in _names(tree, name) if not isinstance(item.ctx, ast.Load)]
    return found + [
        "a definition" for n in ast.walk(tree) if getattr(n, "name", None) == name and not isinstance(n, ast.alias)
    ]


def _reduced(body: list[ast.stmt], line: str, reduces: tuple[str, ...]) -> None:
    """It copies the stream, reduces a clone of it where it is marked, and hands out nothing else."""
    need(len(body) > 2, f"{line} captures what may be one rank's partial sums")
    first, guard = body[:2]
    copied = isinstance(first, ast.Assign) and len(first.targets) == 1 and ast.unparse(first.value) == "hidden_states"
    need(copied and isinstance(guard, ast.If), f"{line} captures what may be one rank's partial sums")
    assert isinstance(first, ast.Assign) and isinstance(guard, ast.If)
    name = ast.unparse(first.targets[0])
    need(
        ast.unparse(guard.test) == f"getattr(hidden_states, '{FLAG}', False)" and not guard.orelse,
        f"{line} does not ask for `{FLAG}`",
    )
    steps = [f"{name} = {reduce}({name if i else 'hidden_states.clone()'})" for i, reduce in enumerate(reduces)]
    need([ast.unparse(node) for node in guard.body] == steps, f"{line} does not reduce a clone, once")
    for statement in body[2:]:
        need(not _names(statement, "hidden_states"), f"{line} captures the stream itself")
        stored = [
            item.id for item in ast.walk(statement) if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load)
        ]
        need(not {name, "residual"} & set(stored), f"{line} captures something else")
        need(not any(any(calls(statement, reduce)) for reduce in reduces), f"{line} reduces twice")
    need(any(_names(statement, name) for statement in body[2:]), f"{line} captures nothing")


def _helped(body: list[ast.stmt], owner: ast.ClassDef, line: str) -> None:
    """A method of the model makes what is captured; nothing else of the stream is."""
    helper = function(owner.body, HELPER)
    parameters = [item.arg for item in helper.args.args]
    need(parameters == ["self", "hidden_states", "residual"], f"`{HELPER}` takes {parameters}")
    statements = [node for node in helper.body if not isinstance(node, ast.Expr)]
    _reduced(statements, f"line {helper.lineno}", (REDUCE,))
    returns = [node for node in _own(helper) if isinstance(node, ast.Return)]
    need(returns == helper.body[-1:], f"line {helper.lineno} does not end with the one value that it returns")
    first = ast.unparse(body[0])
    need(
        first == f"aux_hidden_state = self.{HELPER}(hidden_states, residual)"
        and not any(_names(node, "hidden_states") for node in body[1:]),
        f"{line} captures the stream itself",
    )


def _handed_on(forward: ast.FunctionDef, tree: ast.Module) -> bool:
    """Whether the layers capture themselves, behind the norm that reduces."""
    keywords = {node.arg for node in _own(forward) if isinstance(node, ast.keyword) and any(_mentions(node.value))}
    behind = "prepare_attn_and_capture_last_layer_outputs"
    return keywords == {"capture_output"} or (keywords == {"captured_last_layer_outputs"} and any(calls(tree, behind)))


def _mentions(node: ast.AST) -> Iterator[ast.Attribute]:
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and item.attr == LAYERS:
            yield item


def _capture(site: str) -> Callable[[ast.Module], None]:
    model, reduces = MODELS[site], REDUCES.get(site, (REDUCE,))

    def check(tree: ast.Module) -> None:
        owner = klass(tree, model)
        if [ast.unparse(base) for base in owner.bases] == [MODELS["E5"]]:
            need(
                not any(
                    "forward" in (getattr(node, "name", None), getattr(node, "id", None)) for node in ast.walk(owner)
                ),
                f"`{model}` has a `forward` of its own",
            )
            return
        forward = function(owner.body, "forward")
        marks = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == FLAG]
        if not marks and site != "E5i":  # whose layers are another file's
            return  # no layer of this file puts its all-reduce off by the mark
        need(not any(node in marks for node in ast.walk(forward)), f"`{model}.forward` changes `{FLAG}`")
        blocks = [node for node in _own(forward) if isinstance(node, ast.If) and any(_mentions(node.test))]
        for block in blocks:
            line = f"line {block.lineno}"
            need(_only_asks(block.test) and not block.orelse, f"{line} asks for more than whether a layer is captured")
            if any(calls(block, HELPER)):
                _helped(block.body, owner, line)
            else:
                _reduced(block.body, line, reduces)
            need(any(calls(block, "append")), f"{line} captures nothing")
        inside = {id(node) for block in blocks for node in ast.walk(block)}
        for node in _own(forward):
            if isinstance(node, ast.BinOp):
                operands = [ast.unparse(node.left), ast.unparse(node.right)]
                need("hidden_states" not in operands, f"line {node.lineno} adds up one rank's partial sums")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("hidden_states.append"):
                need(id(node) in inside, f"line {node.lineno} captures outside of `if … in self.{LAYERS}`")
            if isinstance(node, ast.Call) and re.fullmatch(r"hidden_states\.\w+_", ast.unparse(node.func)):
                raise WrongError(f"line {node.lineno} changes what may be one rank's partial sums")
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                need("aux" not in ast.unparse(node.value), f"line {node.lineno} changes what was captured")
        if blocks:
            for reduce in reduces:
                origin = one(_bindings(tree, reduce), f"`{reduce}`")
                need(origin == "from sglang.srt.distributed", f"`{reduce}` is not sglang's")
            need(not _bindings(tree, "getattr"), "`getattr` is not Python's")
        elif any(_mentions(forward)):
            need(_handed_on(forward, tree), "the layers do not capture behind the norm that reduces")

    return check


def _only_asks(test: ast.expr) -> bool:
    """Whether a layer is captured; DSpark asks whether anything is, too."""
    if isinstance(test, ast.BoolOp):
        asked = [ast.unparse(item) for item in test.values]
        wanted = ["capture_aux", f"i in self.{LAYERS}", "hidden_states.shape[0] != 0"]
        return isinstance(test.op, ast.And) and asked == wanted
    return bool(re.fullmatch(rf"[\w. +]+ in self\.{LAYERS}", ast.unparse(test)))


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {site: _capture(site) for site in MODELS}
