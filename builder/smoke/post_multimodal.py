"""What the sites of `builder/patches/multimodal.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from builder.smoke.syntax import calls, function, klass, need, one, value_of

SWITCH = "SGLANG_STACK_EAGLE3_MULTIMODAL"
CONSTANT = "_EAGLE3_MULTIMODAL"
EMBEDS = "mm_input_embeds"
DRAFT = "LlamaModel"
DRAFT_WORKER = "EagleDraftWorker"
WORKER = "EAGLEWorkerV2"
PREFILL = "_draft_extend_for_prefill"


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What a function does itself: not what functions and classes inside of it do."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield child
            yield from _own(child)


def _stores(node: ast.AST, name: str) -> list[ast.AST]:
    """Where ``name``, a variable or an attribute as it is written, is given a value."""
    return [
        item
        for item in ast.walk(node)
        if isinstance(item, (ast.Name, ast.Attribute))
        and not isinstance(item.ctx, ast.Load)
        and ast.unparse(item) == name
    ]


def _switched(tree: ast.Module) -> bool:
    """Whether the file has our switch, which then is read once and is what the variable says."""
    if not any(isinstance(node, ast.Name) and node.id == CONSTANT for node in ast.walk(tree)):
        return False
    read = ast.unparse(value_of(tree.body, CONSTANT))
    need(read == f"os.environ.get('{SWITCH}', '') == '1'", f"`{CONSTANT}` is not what `{SWITCH}` says")
    one(_stores(tree, CONSTANT), f"a value of `{CONSTANT}`")
    imported = [a.name for node in tree.body if isinstance(node, ast.Import) for a in node.names if a.asname is None]
    need("os" in imported, "`os` is not imported")
    return True


def _embeds(tree: ast.Module) -> None:
    forward = function(klass(tree, DRAFT).body, "forward")
    tests = [n for n in forward.body if isinstance(n, ast.If) and ast.unparse(n.test) == "input_embeds is None"]
    choice = one(tests, "`if input_embeds is None`")
    need([ast.unparse(node) for node in choice.orelse] == ["embeds = input_embeds"], "given embeddings are not taken")
    inside = {id(node) for node in ast.walk(choice)}
    for node in _stores(forward, "embeds"):
        need(id(node) in inside, f"line {getattr(node, 'lineno', 0)} gives `embeds` another value")
    if not _switched(tree):
        sources = [ast.unparse(node) for node in choice.body]
        need(len(sources) == 3, f"`embeds` does not come from `{EMBEDS}`")
        need(sources[0] == f"embeds = forward_batch.{EMBEDS}", f"`embeds` does not come from `{EMBEDS}`")
        need("contains_mm_inputs()" in sources[1], "only prompts with images have embeddings")
        need(sources[2].startswith("if embeds is None:"), "prompts without images have no embeddings")
        return
    need(len(choice.body) == 3, "the draft's embeddings are not made in three steps")
    own, target, guard = choice.body
    need(ast.unparse(own) == "embeds = self.embed_tokens(input_ids)", "the draft does not embed its tokens")
    taken = f"forward_batch.{EMBEDS} if {CONSTANT} else None"
    need(
        isinstance(target, ast.Assign) and ast.unparse(target.value) == taken, f"`{EMBEDS}` is taken without the switch"
    )
    name = ast.unparse(target.targets[0])
    need(
        isinstance(guard, ast.If) and not guard.orelse and isinstance(guard.test, ast.BoolOp),
        "they are taken in any case",
    )
    need(isinstance(guard.test.op, ast.And), "they are taken in any case")
    prefill = "forward_batch.forward_mode.is_extend_without_speculative()"
    wanted = [f"{name} is not None", f"{name}.shape == embeds.shape", prefill]
    conditions = [ast.unparse(item) for item in guard.test.values]
    need(conditions == wanted, f"they are taken if {conditions}, not if {wanted}")
    _moved(guard, name)


def _moved(guard: ast.If, name: str) -> None:
    """The target's embeddings move up by one, and each request's last is the draft's own."""
    need(len(guard.body) == 4, "the target's embeddings are not moved in four steps")
    steps: list[Any] = [node for node in guard.body if isinstance(node, ast.Assign) and len(node.targets) == 1]
    need(len(steps) == 4, "the target's embeddings are not moved in four steps")
    last = ast.unparse(steps[0].targets[0])
    need(
        ast.unparse(steps[0].value) == "torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1",
        f"`{last}` is not each request's last token",
    )
    rolls = list(calls(steps[1].value, "roll"))
    need([ast.unparse(node) for node in rolls] == [f"torch.roll({name}, -1, dims=0)"], "they do not move up by one")
    need(ast.unparse(steps[1].targets[0]) == name, "what was moved is not taken")
    need(
        ast.unparse(steps[2]) == f"{name}[{last}] = embeds[{last}]", "each request's last token is not the draft's own"
    )
    need(ast.unparse(steps[3]) == f"embeds = {name}", "the target's embeddings are not taken")


def _worker(tree: ast.Module) -> None:
    method = function(klass(tree, DRAFT_WORKER).body, PREFILL)
    names = [item.arg for item in method.args.args]
    need(names[4:5] == [EMBEDS], f"`{PREFILL}` has no `{EMBEDS}`")
    defaults = dict(zip(reversed(names), map(ast.unparse, reversed(method.args.defaults))))  # noqa: B905 - strict is Python 3.10's, and there are fewer defaults
    need(defaults.get(EMBEDS) == "None", f"`{EMBEDS}` has no default, or one that is not None")
    call = one(list(calls(tree, PREFILL)), f"a call of `{PREFILL}`")
    need(any(call is node for node in ast.walk(klass(tree, WORKER))), f"`{WORKER}` does not call `{PREFILL}`")
    arguments = [ast.unparse(item) for item in call.args]
    need(arguments[3:] == [f"batch_output.logits_output.{EMBEDS}"], f"`{PREFILL}` is called without `{EMBEDS}`")
    one(_stores(tree, f"forward_batch.{EMBEDS}"), f"`forward_batch.{EMBEDS} =`")
    wanted = f"{CONSTANT} and {EMBEDS} is not None" if _switched(tree) else f"{EMBEDS} is not None"
    body = [ast.unparse(node) for node in method.body]
    guard = f"if {wanted}:\n    forward_batch.{EMBEDS} = {EMBEDS}"
    need(body.count(guard) == 1, f"`{EMBEDS}` is not handed on by `if {wanted}`")
    at = body.index(guard)
    need(any("ForwardBatch.init_new(" in text for text in body[:at]), "it is handed to a batch that is made later")
    need(not any("ForwardBatch.init_new(" in text for text in body[at:]), "the batch is made anew")
    need(any("draft_runner.forward(forward_batch" in text for text in body[at:]), "it is handed on after the draft ran")
    for node in _own(method):
        if isinstance(node, ast.Name) and node.id == EMBEDS and not isinstance(node.ctx, ast.Load):
            line = f"line {node.lineno} gives `{EMBEDS}` another value"
            # Upstream's own, from 0.5.20 on: moved here, where the draft expects them so.
            need(any(_rotates(item, node) for item in _own(method)), line)


def _rotates(node: ast.AST, target: ast.Name) -> bool:
    return isinstance(node, ast.Assign) and node.targets == [target] and ast.unparse(node.value) == "rotated_mm"


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {"E6": _embeds, "E7": _worker}
