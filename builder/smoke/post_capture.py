"""What the sites of `builder/patches/capture.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping

from builder.smoke.syntax import calls, function, klass, need, one

FLAG = "_sglang_needs_allreduce_fusion"
LAYERS = "layers_to_capture"
REDUCE = "tensor_model_parallel_all_reduce"
MODELS = {
    "E5": "DeepseekV2Model",
    "E5b": "Glm4MoeModel",
    "E5c": "Glm4MoeLiteModel",
    "E5d": "GptOssModel",
    "E5e": "LagunaModel",
    "E5f": "BailingMoEModel",
}
"""The model whose `forward` captures, by site."""


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


def _reduced(block: ast.If) -> None:
    """The block copies the stream, reduces a clone of it where it is marked, and hands out nothing else."""
    line = f"line {block.lineno}"
    need(len(block.body) > 2, f"{line} captures what may be one rank's partial sums")
    first, guard = block.body[:2]
    copied = isinstance(first, ast.Assign) and len(first.targets) == 1 and ast.unparse(first.value) == "hidden_states"
    need(copied and isinstance(guard, ast.If), f"{line} captures what may be one rank's partial sums")
    assert isinstance(first, ast.Assign) and isinstance(guard, ast.If)
    name = ast.unparse(first.targets[0])
    need(
        ast.unparse(guard.test) == f"getattr(hidden_states, '{FLAG}', False)" and not guard.orelse,
        f"{line} does not ask for `{FLAG}`",
    )
    need(
        [ast.unparse(node) for node in guard.body] == [f"{name} = {REDUCE}(hidden_states.clone())"],
        f"{line} does not reduce a clone, once",
    )
    captures = 0
    for statement in block.body[2:]:
        need(not _names(statement, "hidden_states"), f"{line} captures the stream itself")
        stored = [
            item.id for item in ast.walk(statement) if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Load)
        ]
        need(not {name, "residual"} & set(stored), f"{line} captures something else")
        captures += len(list(calls(statement, "append")))
        need(not any(calls(statement, REDUCE)), f"{line} reduces twice")
    need(captures > 0 and any(_names(statement, name) for statement in block.body[2:]), f"{line} captures nothing")


def _handed_on(forward: ast.FunctionDef, tree: ast.Module) -> bool:
    """Whether the layers capture themselves, behind the norm that reduces."""
    keywords = {node.arg for node in _own(forward) if isinstance(node, ast.keyword) and any(_mentions(node.value))}
    behind = "prepare_attn_and_capture_last_layer_outputs"
    return keywords == {"captured_last_layer_outputs"} and any(calls(tree, behind))


def _mentions(node: ast.AST) -> Iterator[ast.Attribute]:
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and item.attr == LAYERS:
            yield item


def _capture(model: str) -> Callable[[ast.Module], None]:
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
        if not marks:
            return  # no layer of this file puts its all-reduce off by the mark
        need(not any(node in marks for node in ast.walk(forward)), f"`{model}.forward` changes `{FLAG}`")
        blocks = [node for node in _own(forward) if isinstance(node, ast.If) and any(_mentions(node.test))]
        for block in blocks:
            test = block.test
            need(
                isinstance(test, ast.Compare)
                and isinstance(test.ops[0], ast.In)
                and ast.unparse(test.comparators[-1]) == f"self.{LAYERS}"
                and not block.orelse,
                f"line {block.lineno} asks for more than whether a layer is captured",
            )
            _reduced(block)
        inside = {id(node) for block in blocks for node in ast.walk(block)}
        for node in _own(forward):
            if isinstance(node, ast.BinOp):
                operands = [ast.unparse(node.left), ast.unparse(node.right)]
                need("hidden_states" not in operands, f"line {node.lineno} adds up one rank's partial sums")
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("hidden_states.append"):
                need(id(node) in inside, f"line {node.lineno} captures outside of `if … in self.{LAYERS}`")
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
                need("aux" not in ast.unparse(node.value), f"line {node.lineno} changes what was captured")
        if blocks:
            origin = one(_bindings(tree, REDUCE), f"`{REDUCE}`")
            need(origin == "from sglang.srt.distributed", f"`{REDUCE}` is not sglang's")
            need(not _bindings(tree, "getattr"), "`getattr` is not Python's")
        elif any(_mentions(forward)):
            need(_handed_on(forward, tree), "the layers do not capture behind the norm that reduces")

    return check


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {site: _capture(model) for site, model in MODELS.items()}
