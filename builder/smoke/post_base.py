"""What the sites of the base sets have to be, said apart from the code that finds and edits them. Standard library only."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping

from builder.smoke.syntax import calls, function, klass, need, one, subscripts, value_of

SIZES = "TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES"
MULTIMEM = "_WORLD_SIZES_MULTIMEM"
COMMUNICATOR = "TorchSymmMemCommunicator"
DEEP_GEMM = "_compute_enable_deep_gemm"
FUSION = "gen_trtllm_comm_module"
FUSION_SWITCHES = ("enable_flashinfer_allreduce_fusion", "flashinfer_allreduce_fusion_backend")
KIMI = "KimiK25ForConditionalGeneration"
LAYERS = "set_eagle3_layers_to_capture"
WORLD_SIZES = (2, 4, 8)
"""Those that torch's two-shot kernel is specialised for (shared/facts/patches.md, A1)."""


def _stored(tree: ast.AST, name: str) -> int:
    """How often ``name`` gets a value, or is deleted."""
    named = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    return sum(not isinstance(node.ctx, ast.Load) for node in named)


def _once(tree: ast.AST, name: str) -> None:
    found = _stored(tree, name)
    need(found == 1, f"`{name}` gets a value {found} times, not once")


def _mentions(tree: ast.AST, name: str) -> int:
    return sum(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in ast.walk(tree))


def _table(value: ast.expr, name: str) -> dict[object, ast.expr]:
    need(isinstance(value, ast.Dict), f"`{name}` is not a dictionary")
    assert isinstance(value, ast.Dict)
    keys = [getattr(key, "value", None) for key in value.keys]
    need(len(keys) == len(set(keys)), f"`{name}` has a key twice")
    need({9, 10, 12} <= set(keys), f"`{name}` does not list 9, 10 and 12")
    return dict(zip(keys, value.values))  # noqa: B905 - strict is Python 3.10's, and they are of one length


def _sizes(tree: ast.Module) -> None:
    value = _table(value_of(tree.body, SIZES), SIZES)[12]
    need(_mentions(tree, SIZES) == 1, f"`{SIZES}` is changed, or used, where it is made")
    need(isinstance(value, ast.Dict), "12 has no dictionary of sizes")
    assert isinstance(value, ast.Dict)
    keys = sorted(getattr(key, "value", 0) for key in value.keys)
    need(tuple(keys) == WORLD_SIZES, f"12 lists world sizes {keys}, not {list(WORLD_SIZES)}")
    # One name for all of them, whose value the environment sets.
    name = one(sorted({ast.unparse(item) for item in value.values}), "the size of 12")
    _once(tree, name)
    limit = value_of(tree.body, name)
    need(any(calls(limit, "get")) and "environ" in ast.unparse(limit), f"`{name}` is not read from the environment")


def _lookup(tree: ast.Module) -> None:
    init = function(klass(tree, COMMUNICATOR).body, "__init__")
    need(not subscripts(init, SIZES), f"`{SIZES}[…]` fails for a device that is not listed")
    lookups = [
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == f"{SIZES}.get(self.device_capability)"
    ]
    name = ast.unparse(one(lookups, f"`{SIZES}.get(self.device_capability)`").targets[0])
    _once(init, name)
    refusals = [
        node for node in ast.walk(init) if isinstance(node, ast.If) and ast.unparse(node.test) == f"{name} is None"
    ]
    refusal = one(refusals, f"`if {name} is None`")
    need(isinstance(refusal.body[-1], ast.Return), "a device that is not listed does not return")
    need(any(calls(refusal, "warning")), "a device that is not listed gets no warning")


def _multimem(tree: ast.Module) -> None:
    owner = klass(tree, COMMUNICATOR)
    value = _table(value_of(owner.body, MULTIMEM), MULTIMEM)[12]
    need(isinstance(value, ast.List) and not value.elts, "12 has world sizes for multimem, which needs NVLink")
    reduce = function(owner.body, "all_reduce")
    need(not subscripts(reduce, f"self.{MULTIMEM}"), f"`{MULTIMEM}[…]` fails for a device that is not listed")
    gets = [call for call in calls(reduce, "get") if ast.unparse(call.func) == f"self.{MULTIMEM}.get"]
    need(len(one(gets, f"`{MULTIMEM}.get`").args) == 2, f"`{MULTIMEM}.get` has no default")
    outside = [node for node in ast.walk(tree) if getattr(node, "attr", None) == MULTIMEM]
    outside = [node for node in outside if ast.unparse(node) == f"{COMMUNICATOR}.{MULTIMEM}"]
    need(_mentions(owner, MULTIMEM) == 2 and not outside, f"`{MULTIMEM}` is changed, or used, elsewhere")


def _not_by_itself(tree: ast.Module) -> None:
    """Where nobody asks for fusion, nothing turns it on on 12; on 10 everything can that does so by itself."""
    for conditions in _on(tree, []):
        on = {
            (asked, major): all(wanted in _possible(test, major, asked) for test, wanted in conditions)
            for asked in (False, True)
            for major in (10, 12)
        }
        need(not on[False, 12], "fusion turns itself on on 12")
        need(on[False, 10] or on[True, 12], "fusion no longer turns itself on on 10")


def _on(node: ast.AST, conditions: list[tuple[ast.expr, bool]]) -> Iterator[list[tuple[ast.expr, bool]]]:
    """The conditions, and whether they hold or not, of everything that gives one of fusion's switches a value."""
    for field, value in ast.iter_fields(node):
        inner = conditions
        if isinstance(node, ast.If) and field in ("body", "orelse"):
            inner = [*conditions, (node.test, field == "body")]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                given = _given(child)
                if given is not None and ast.unparse(given) not in ("False", "None"):
                    yield inner
                yield from _on(child, inner)


def _given(node: ast.AST) -> ast.expr | None:
    """What an assignment, a dictionary or an argument gives to one of the switches."""
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", None) in FUSION_SWITCHES:
        return node.value
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):  # noqa: B905 - strict is Python 3.10's
            if getattr(key, "value", None) in FUSION_SWITCHES:
                return value
    if isinstance(node, ast.keyword) and node.arg in FUSION_SWITCHES:
        return node.value
    return None


_MAJORS = {"sm90": (9,), "sm100": (10,), "sm120": (12,), "blackwell": (10, 12)}


def _values(test: ast.expr, leaf: Callable[[ast.expr], set[bool]]) -> set[bool]:
    """The values that a condition can have, from those of what it is made of."""
    if isinstance(test, ast.BoolOp):
        values = [_values(item, leaf) for item in test.values]
        decides = isinstance(test.op, ast.Or)  # one that is so decides, else all have to be the other way
        found = {decides} if any(decides in item for item in values) else set()
        return found | ({not decides} if all((not decides) in item for item in values) else set())
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return {not value for value in _values(test.operand, leaf)}
    return leaf(test)


def _possible(test: ast.expr, major: int, asked: bool) -> set[bool]:
    """The values that a condition can have on a device of that major; what is not about it can have both."""

    def leaf(test: ast.expr) -> set[bool]:
        text = ast.unparse(test)
        named = re.search(r"\bis_(sm90|sm100|sm120|blackwell)(_supported)?(\(\))?$", text)
        if named:
            return {major in _MAJORS[named.group(1)]}
        return {asked} if text.endswith(f".{FUSION_SWITCHES[0]}") else {True, False}

    return _values(test, leaf)


def _majors(call: ast.Call) -> list[object]:
    found = [keyword.value for keyword in call.keywords if keyword.arg == "supported_major_versions"]
    value = one(found, "`supported_major_versions`")
    need(isinstance(value, ast.List), "`supported_major_versions` is not a list")
    return [getattr(item, "value", None) for item in value.elts]


def _fusion(tree: ast.Module) -> None:
    owner = function(tree.body, FUSION)
    call = one(list(calls(owner, "get_nvcc_flags_list")), "`get_nvcc_flags_list`")
    need({9, 10, 12} <= set(_majors(call)), f"`{FUSION}` is compiled for {_majors(call)}")
    taken = [node for node in owner.body if isinstance(node, ast.Assign) and node.value is call]
    name = ast.unparse(one(taken, "the flags' name").targets[0])
    _once(owner, name)
    spec = one(list(calls(owner, "gen_jit_spec")), "`gen_jit_spec`")
    passed = [ast.unparse(word.value) for word in spec.keywords if word.arg == "extra_cuda_cflags"]
    need(passed == [name], f"`gen_jit_spec` gets {passed}, not the flags")
    for node in tree.body:
        # Its comment upstream says that SM12x is left out on purpose.
        if getattr(node, "name", None) == "gen_trtllm_mnnvl_comm_module":
            for other in calls(node, "get_nvcc_flags_list"):
                need(12 not in _majors(other), "`gen_trtllm_mnnvl_comm_module` is compiled for 12")


def _deep_gemm(tree: ast.Module) -> None:
    owner = function(tree.body, DEEP_GEMM)
    _once(owner, "sm_version")
    asked = ast.unparse(value_of(owner.body, "sm_version"))
    need(asked == "get_device_sm()", f"`sm_version` is `{asked}`")
    guards = [node for node in owner.body if isinstance(node, ast.If) and any(_refuses(node))]
    for architecture in (120, 121):
        need(any(_holds(node.test, architecture) for node in guards), f"sm_{architecture} is not turned off")
    for architecture in (90, 100, 103):
        need(not any(_holds(node.test, architecture) for node in guards), f"sm_{architecture} is turned off")


def _refuses(node: ast.If) -> Iterator[ast.stmt]:
    """Where a guard returns False, by itself or because an import fails."""
    caught = [handler.body for item in node.body if isinstance(item, ast.Try) for handler in item.handlers]
    for item in [*node.body, *(item for body in caught for item in body)]:
        if isinstance(item, ast.Return) and isinstance(item.value, ast.Constant) and item.value.value is False:
            yield item


def _holds(test: ast.expr, architecture: int) -> bool:
    """Whether a condition can hold on an architecture, and a comparison of ``sm_version`` in it says so (`x < 90` does not)."""
    singled_out: list[ast.expr] = []

    def leaf(node: ast.expr) -> set[bool]:
        names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        need(bool(names), f"`{ast.unparse(test)}` rests on a constant")
        known = names == {"sm_version"} and not any(
            isinstance(item, (ast.Call, ast.Attribute)) for item in ast.walk(node)
        )
        if not known or not isinstance(node, ast.Compare):
            return {True, False}
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<comparison>", "eval")
        holds = bool(eval(code, {"__builtins__": {}}, {"sm_version": architecture}))
        if holds and isinstance(node.ops[0], (ast.Eq, ast.In)):
            singled_out.append(node)
        return {holds}

    return True in _values(test, leaf) and bool(singled_out)


def _hook(name: str) -> Callable[[ast.Module], None]:
    def check(tree: ast.Module) -> None:
        method = function(klass(tree, KIMI).body, name)
        inner = f"self.language_model.{name}"
        call = one([node for node in calls(method, name) if ast.unparse(node.func) == inner], f"`{inner}(…)`")
        parameters = [item.arg for item in method.args.args[1:]]
        passed = [ast.unparse(item) for item in call.args]
        need(passed == parameters and not call.keywords, f"`{name}` passes {passed}, not {parameters}")
        for parameter in ["self", *parameters]:
            need(not _stored(method, parameter), f"`{name}` changes `{parameter}`")
        need(getattr(method.body[-1], "value", None) is call, f"`{name}` does not end with the language model's")
        need(all(map(_refusal, method.body[:-1])), f"`{name}` does more than to hand on")
        if name == "get_embed_and_head":
            returns = [
                ast.unparse(node.value) for node in ast.walk(method) if isinstance(node, ast.Return) and node.value
            ]
            need(returns == [f"{inner}()"], f"`{name}` does not return what the language model does")
        if name == LAYERS:
            defaults = [ast.unparse(item) for item in method.args.defaults]
            need(defaults == ["None"], f"`{name}` has no default")

    return check


def _refusal(node: ast.stmt) -> bool:
    """A docstring, or what upstream has in front: an error for a language model that lacks the hook."""
    if isinstance(node, ast.If):
        only_raises = [type(item) for item in node.body] == [ast.Raise] and not node.orelse
        return only_raises and "self.language_model" in ast.unparse(node.test)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _capture(tree: ast.Module) -> None:
    captures = list(calls(tree, LAYERS))
    need(bool(captures), f"`{LAYERS}` is not called")
    for call in captures:
        need(
            len(call.args) == 1 and not call.keywords, f"line {call.lineno} calls `{LAYERS}` without the draft's layers"
        )
        need(
            ast.unparse(call.args[0]).endswith("eagle_aux_hidden_state_layer_ids"), f"line {call.lineno}: other layers"
        )


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {
    "S1": _sizes,
    "S2": _lookup,
    "S3": _multimem,
    "S6": _not_by_itself,
    "F1": _fusion,
    "D1": _deep_gemm,
    "E1": _hook("get_embed_and_head"),
    "E2": _hook("set_embed_and_head"),
    "E3": _hook(LAYERS),
    "E4": _capture,
}
