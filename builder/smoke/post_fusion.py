"""What the sites of `builder/patches/fusion.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from builder.smoke.syntax import calls, function, klass, need, one, value_of

GATES = ("apply_flashinfer_allreduce_fusion", "flashinfer_ar_fusion_applies")
"""By release: the second from sglang 0.5.23 on."""
NORM = "forward_with_allreduce_fusion"
ENSURE = "ensure_workspace_initialized"
PREPARE = "pre_initialize_workspaces"
FUSED = "flashinfer_allreduce_residual_rmsnorm"
RESOLVE = "_resolve_backend"
PREFLIGHT = "_flashinfer_trtllm_workspace_allocation_sizes"
BUFFERS = "trtllm_create_ipc_workspace_for_all_reduce_fusion"

_VARIABLE = "os.environ.get('SGLANG_STACK_SM120_FUSION') == '1'"
_ON_12 = "torch.cuda.get_device_capability()[0] == 12"


def _bound(tree: ast.AST, name: str) -> int:
    """How many times anything in the file gives ``name`` a value."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found += node.name == name
        elif isinstance(node, ast.Name):
            found += node.id == name and not isinstance(node.ctx, ast.Load)
        elif isinstance(node, ast.alias):
            found += (node.asname or node.name) == name
    return found


def _written(node: ast.AST) -> str:
    """The source again, without its parentheses: Python's releases differ in which are left out."""
    return ast.unparse(node).replace("(", "").replace(")", "")


def _says(owner: ast.FunctionDef, *wanted: str) -> None:
    """Each is a statement or expression of ``owner``, once."""
    written = [
        ast.unparse(node)
        for node in ast.walk(owner)
        if isinstance(node, (ast.stmt, ast.expr)) and not isinstance(node, ast.Expr)
    ]
    for item in wanted:
        found = written.count(ast.unparse(ast.parse(item).body[0]))
        need(found == 1, f"`{owner.name}` has `{item}` {found} times, not once")


def _returns(owner: ast.AST) -> list[str]:
    return [ast.unparse(node.value) if node.value else "" for node in ast.walk(owner) if isinstance(node, ast.Return)]


def _operands(value: ast.AST, kind: type[ast.boolop]) -> list[str]:
    need(isinstance(value, ast.BoolOp) and isinstance(value.op, kind), f"`{ast.unparse(value)}` is of another kind")
    assert isinstance(value, ast.BoolOp)
    return [ast.unparse(node) for node in value.values]


def _result(owner: ast.FunctionDef) -> ast.expr:
    """What a function returns at its end."""
    last = owner.body[-1]
    need(isinstance(last, ast.Return) and last.value is not None, f"`{owner.name}` returns nothing at its end")
    assert isinstance(last, ast.Return) and last.value is not None
    return last.value


def _guards(owner: ast.FunctionDef, test: str, body: list[str], before: str) -> None:
    """At the top level of ``owner``, `if test: body` stands in front of everything that has ``before`` in it."""
    wanted = ast.unparse(ast.parse(test).body[0])
    found = [node for node in owner.body if isinstance(node, ast.If) and ast.unparse(node.test) == wanted]
    guard = one(found, f"`if {test}` in `{owner.name}`")
    got = [ast.unparse(node) for node in guard.body]
    need(got == body and not guard.orelse, f"`if {test}` in `{owner.name}` does {got}")
    later = [node for node in owner.body if before in ast.unparse(node)]
    need(bool(later) and later[0].lineno > guard.lineno, f"`if {test}` in `{owner.name}` is not in front of `{before}`")


def _gate(tree: ast.Module) -> None:
    name = one([item for item in GATES if _bound(tree, item)], "a gate to the fused all-reduce")
    gate, fusion = function(tree.body, name), function(tree.body, "_sm120_fusion")
    for item in (name, "_sm120_fusion", "_is_sm120_asked"):
        need(_bound(tree, item) == 1, f"`{item}` is given a value {_bound(tree, item)} times, not once")
    need(_returns(gate) == [ast.unparse(_result(gate))], f"`{name}` returns in several places")
    value = _result(gate)
    operands = _operands(value, ast.And)
    assert isinstance(value, ast.BoolOp)
    devices = ["_is_sm90_supported", "_is_sm100_supported", "_sm120_fusion(batch_size)"]
    need(_operands(value.values[0], ast.Or) == devices, f"`{name}` is open by {_operands(value.values[0], ast.Or)}")
    for item in ("not is_dp_attention_enabled()", "batch_size > 0", "batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE"):
        need(item in operands, f"`{name}` does not ask `{item}`")
    need(sum("allreduce_fusion" in item for item in operands[1:]) == 1, f"`{name}` does not ask sglang's flag")
    asked = _operands(value_of(tree.body, "_is_sm120_asked"), ast.And)
    need(sorted(asked) == sorted(["_is_cuda", _VARIABLE, _ON_12]), f"`_is_sm120_asked` is {asked}")
    opened = ["fusion.sm120_open()", "batch_size <= fusion.sm120_max_tokens()"]
    need(_operands(_result(fusion), ast.And) == opened, "`_sm120_fusion` is open by something else")
    first = fusion.body[0]
    need(
        isinstance(first, ast.If)
        and _operands(first.test, ast.Or) == ["not _is_sm120_asked", "torch.compiler.is_compiling()"]
        and [ast.unparse(node) for node in first.body] == ["return False"],
        "`_sm120_fusion` does not start with what was asked",
    )
    refusals = [item for item in _returns(fusion) if item.startswith("fusion.sm120_refuse(")]
    need(len(refusals) == 2 and len(_returns(fusion)) == 4, "`_sm120_fusion` refuses other things")
    tests = [ast.unparse(node.test) for node in fusion.body if isinstance(node, ast.If)][1:]
    need("allreduce_fusion" in tests[0] and tests[0].startswith("not "), "`_sm120_fusion` does not ask sglang's flag")
    need(tests[1:] == ["is_dp_attention_enabled()"], "`_sm120_fusion` does not ask for data parallel attention")


def _reductions(node: ast.AST) -> list[str]:
    return sorted(
        ast.unparse(call.func)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and "all_reduce" in ast.unparse(call.func)
    )


def _fallback(tree: ast.Module) -> None:
    shared = [node for node in tree.body if getattr(node, "name", "") == f"_{NORM}"]
    owner = function(tree.body, f"_{NORM}") if shared else function(klass(tree, "RMSNorm").body, NORM)
    returned = "if fused_result[0] is not None:\n    return fused_result"
    behind = [
        block[i + 1 :]
        for node in ast.walk(owner)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list)
        for i, item in enumerate(block)
        if ast.unparse(item) == returned
    ]
    rest = one(behind, f"`{returned}`")
    anchor = next(node for node in ast.walk(owner) if isinstance(node, ast.If) and ast.unparse(node) == returned)
    early = [node for node in ast.walk(owner) if isinstance(node, ast.Call) and node.lineno < anchor.lineno]
    need(not any(_reductions(node) for node in early), "what is to be fused is reduced before")
    need(bool(rest) and isinstance(rest[-1], ast.Return), "the plain norm is reached without an all-reduce")
    module = ast.Module(rest, [])
    need(len(_returns(module)) == 1, "what is behind a fused all-reduce that did nothing returns in several places")
    last = rest[-1].value
    norm = "norm_module.forward" if shared else "self.forward"
    need(isinstance(last, ast.Call) and ast.unparse(last.func) == norm, f"`{norm}` is not what is returned")
    added = "residual = residual + post_residual_addition" in ast.unparse(owner)
    passed = [ast.unparse(item) for item in last.args[1:]]
    wanted = ["residual", "None"] if added else ["residual", *(item.arg for item in owner.args.args[3:])]
    need(passed == wanted and not last.keywords, f"the plain norm gets {passed}, not {wanted}")
    if not shared:
        need(
            ast.unparse(last.args[0]) == "tensor_model_parallel_all_reduce(x)"
            and _reductions(module) == ["tensor_model_parallel_all_reduce"],
            "the plain norm is not of one all-reduce",
        )
        return
    need(ast.unparse(last.args[0]) == "x", "the plain norm is of something else")
    choice = one(
        [node for node in rest if isinstance(node, ast.If) and ast.unparse(node.test) == "use_attn_tp_group"],
        "`if use_attn_tp_group`",
    )
    branches = [_reductions(ast.Module(block, [])) for block in (choice.body, choice.orelse)]
    deferred = (
        ["deferred_post_experts_all_reduce"],
        ["moe_expert_parallel_all_reduce", "moe_tensor_model_parallel_all_reduce"],
    )
    need(
        branches[0] == ["attention_tensor_model_parallel_all_reduce"]
        and branches[1] in deferred
        and len(_reductions(module)) == len(branches[0]) + len(branches[1]),
        f"what was put off is reduced by {branches}",
    )
    for block in (choice.body, choice.orelse):
        need(len(block) == 1 and ast.unparse(block[0]).startswith("x = "), "the reduced tensor is lost")


_ONCE = [
    "sm120_asked",
    "sm120_max_tokens",
    "sm120_refuse",
    "sm120_open",
    "sm120_takes",
    "_sm120_alike",
    "_place",
    "_sm120_peers",
    "_tp_group",
    "_gather",
    "_any_of",
    "_sizes",
]


_RETURNS = {
    "sm120_asked": 1,
    "sm120_max_tokens": 1,
    "sm120_open": 1,
    "sm120_takes": 3,
    "_sm120_alike": 5,
    "_sm120_peers": 4,
    "_any_of": 1,
    "_gather": 1,
}


def _workspace(tree: ast.Module) -> None:
    ensure, fused = function(tree.body, ENSURE), function(tree.body, FUSED)
    for name in (*_ONCE, ENSURE, FUSED):
        need(_bound(tree, name) == 1, f"`{name}` is given a value {_bound(tree, name)} times, not once")
    for name in ("_sm120_is_open", "_sm120_shape", "_sm120_warned"):
        need(_bound(tree, name) == 2, f"`{name}` is given a value {_bound(tree, name)} times, not twice")
    helper = {name: function(tree.body, name) for name in _ONCE}
    for name, count in _RETURNS.items():
        got = len(_returns(helper[name]))
        need(got == count, f"`{name}` returns in {got} places, not {count}")
    for name, local in (("sm120_open", "why"), ("_sm120_alike", "world"), ("_sm120_peers", "devices")):
        need(_bound(helper[name], local) == 1, f"`{local}` of `{name}` is given a value several times")
    asked = _operands(_result(helper["sm120_asked"]), ast.And)
    need(asked == [_VARIABLE, "torch.cuda.is_available()", _ON_12], f"`sm120_asked` is {asked}")
    need(_returns(helper["sm120_refuse"]) == ["False"], "`sm120_refuse` does not return False alone")
    _says(
        helper["sm120_max_tokens"],
        "os.environ.get('SGLANG_STACK_SM120_FUSION_MAX_TOKENS', '16')",
        "min(int(text), 2048)",
    )
    opened = _operands(_result(helper["sm120_open"]), ast.And)
    need(opened == ["_sm120_is_open", "not _flashinfer_allreduce_unavailable"], f"`sm120_open` is {opened}")
    _says(
        helper["sm120_open"],
        "why = _sm120_alike() or _any_of(_sm120_peers(_gather(_place())))",
        "_sm120_is_open = not why or sm120_refuse(why)",
    )
    _refuses(
        helper["_sm120_alike"],
        "world not in (2, 4, 8)",
        "size != world",
        "get_device_capability(device)[0] != 12",
        "not sm120_max_tokens()",
    )
    _says(helper["_sm120_alike"], "world = torch.distributed.get_world_size()")
    _refuses(helper["_sm120_peers"], "len(devices) < len(places)", "not torch.cuda.can_device_access_peer(mine, other)")
    _says(helper["_any_of"], "_gather(why)")
    _says(helper["_gather"], "torch.distributed.all_gather_object(items, item, group=group.cpu_group)")
    _refuses(
        helper["sm120_takes"],
        "block % 32",
        "tokens > sm120_max_tokens()",
    )
    need(
        ast.unparse(_result(helper["sm120_takes"])) == "_sm120_shape == (hidden, input_tensor.dtype)",
        "`sm120_takes` takes every shape",
    )
    limit = ["if not sm120_open():\n    return False", "max_token_num = min(max_token_num, sm120_max_tokens())"]
    _guards(ensure, "sm120_asked()", limit, "max_token_num=max_token_num")
    nothing = [ast.unparse(ast.parse("return None, None").body[0])]
    _guards(fused, "sm120_asked() and not sm120_takes(input_tensor)", nothing, f"{ENSURE}(")
    makes = [ast.unparse(node.func) for node in calls(ensure, "initialize")]
    by_all = list(calls(ensure, "_initialize_by_all"))
    if by_all:
        need(not makes and len(by_all) == 1, f"`{ENSURE}` makes the workspace without a vote")
        _legacy(tree)
    else:
        need(makes == ["workspace_manager.initialize"], f"`{ENSURE}` makes no workspace")
        one(list(calls(ensure, "_sync_allreduce_unavailable_across_tp")), "a vote of the ranks")
        _guards(function(tree.body, PREPARE), "sm120_asked() and not sm120_open()", ["return"], f"{ENSURE}(")


def _refuses(owner: ast.FunctionDef, *tests: str) -> None:
    """Each of ``tests`` is in the test of an `if` that returns at once."""
    guards = [
        (_written(node.test), node)
        for node in ast.walk(owner)
        if isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Return)
    ]
    for test in tests:
        plain = test.replace("(", "").replace(")", "")
        node = one([guard for written, guard in guards if plain in written], f"`if {test}: return …` in `{owner.name}`")
        value = node.body[0].value
        need(_says_no(value), f"`{owner.name}` goes on although `{test}`")


def _says_no(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is False or (isinstance(value.value, str) and bool(value.value))
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Call) and ast.unparse(value.func) == "sm120_refuse"
    )


def _legacy(tree: ast.Module) -> None:
    names = ("_initialize_by_all", "_attempt", "_compile", "_create")
    for name in names:
        need(_bound(tree, name) == 1, f"`{name}` is given a value {_bound(tree, name)} times, not once")
    by_all, attempt, _, create = (function(tree.body, name) for name in names)
    _says(
        by_all,
        "torch.distributed.get_world_size() != sizes['world_size']",
        "why = _any_of(_attempt(_compile)) or _any_of(_attempt(lambda: _create(sizes)))",
        "_flashinfer_allreduce_unavailable = True",
        "_workspace_manager.initialized = False",
    )
    caught = [node for node in ast.walk(attempt) if isinstance(node, ast.ExceptHandler)]
    need(
        [ast.unparse(node.type) for node in caught if node.type] == ["Exception"],
        "`_attempt` does not catch what fails",
    )
    _says(create, "_workspace_manager.initialize(group=group, **sizes)", "torch.cuda.synchronize()")
    group = one(list(calls(create, "new_group")), "`new_group`")
    need("timeout" in [word.arg for word in group.keywords], "the group that makes the workspace waits for ever")
    first = function(tree.body, ENSURE).body
    guard = next(node for node in first if isinstance(node, ast.If))
    need(
        ast.unparse(guard) == "if _flashinfer_allreduce_unavailable:\n    return False",
        f"`{ENSURE}` tries again after a failure",
    )


def _backend(tree: ast.Module) -> None:
    if not any(node for node in ast.walk(tree) if getattr(node, "name", "") == RESOLVE):
        return
    owner = function(tree.body, RESOLVE)
    first = one([node for node in owner.body if isinstance(node, ast.If)][:1], f"`if` in `{RESOLVE}`")
    need(
        isinstance(first.test, ast.UnaryOp) and isinstance(first.test.op, ast.Not), f"`{RESOLVE}` refuses other devices"
    )
    devices = _operands(first.test.operand, ast.Or)
    need(
        len(devices) == 3 and "is_sm90" in devices[0] and "is_sm100" in devices[1] and devices[2] == "sm120_asked()",
        f"`{RESOLVE}` takes {devices}",
    )
    need([type(node) for node in first.body] == [ast.Raise], f"`{RESOLVE}` does not refuse other devices")
    need(len(list(calls(owner, "sm120_asked"))) == 1, f"`{RESOLVE}` asks for SM120 in several places")


def _multicast(tree: ast.Module) -> None:
    if not any(node for node in ast.walk(tree) if getattr(node, "name", "") == PREFLIGHT):
        return
    owner = function(tree.body, PREFLIGHT)
    loop = one(
        [node for node in owner.body if isinstance(node, ast.For) and "cuMulticast" in ast.unparse(node)],
        "the loop that asks for multicast",
    )
    skip = one(
        [node for node in loop.body if isinstance(node, ast.If) and ast.unparse(node.test) == "sm120_asked()"],
        "`if sm120_asked()`",
    )
    body = [ast.unparse(node) for node in skip.body]
    need(body == ["allocation_sizes.append(allocation_size)", "continue"], f"on SM120 it does {body}")
    asks = [node.lineno for node in loop.body if "cuMulticastGetGranularity" in ast.unparse(node)]
    sized = [node.lineno for node in loop.body if ast.unparse(node).startswith("allocation_size = ")]
    need(sized[0] < skip.lineno < min(asks), "multicast is asked for first, or the size is not known yet")


def _pdl(tree: ast.Module) -> None:
    values = [
        ast.unparse(word.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "launch_with_pdl"
    ]
    need(bool(values) and set(values) == {"_launch_with_pdl()"}, f"the kernel is launched with {values}")
    need(_bound(tree, "_launch_with_pdl") == 1, "`_launch_with_pdl` is given a value several times")
    rule = [
        "import os",
        f"if {_ON_12.replace('==', '!=')}:\n    return True",
        "return os.environ.get('SGLANG_STACK_SM120_FUSION_PDL') == '1'",
    ]
    launch = [ast.unparse(node) for node in function(tree.body, "_launch_with_pdl").body]
    need(launch == rule, f"`_launch_with_pdl` is {launch}")


def _flags(tree: ast.Module) -> None:
    owner = function(tree.body, BUFFERS)
    zeroed = "cudart.cudaMemset(c_void_p(ipc_handles[1][tp_rank]), 0, flag_size)"
    found = one(
        [node for node in ast.walk(owner) if isinstance(node, ast.Expr) and ast.unparse(node) == zeroed], f"`{zeroed}`"
    )
    made = [node.lineno for node in owner.body if isinstance(node, ast.For) and "flag_size" in ast.unparse(node.iter)]
    used = [node.lineno for node in calls(owner, "trtllm_lamport_initialize")]
    shared = [node.lineno for node in calls(owner, "barrier")]
    need(bool(made and used and shared), "the buffers are not made in a loop, set up and shared")
    need(made[0] < found.lineno < min(used) <= min(shared), "the flags are zeroed before they are there, or too late")
    nested = [node for node in owner.body if node is found or (isinstance(node, ast.If) and found in node.body)]
    need(
        len(nested) == 1
        and ast.unparse(getattr(nested[0], "test", ast.Name("use_symm_dev_mem"))) == "use_symm_dev_mem",
        "the flags are zeroed sometimes",
    )


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {
    "S5": _gate,
    "S7": _fallback,
    "S8": _workspace,
    "S8b": _backend,
    "S8c": _multicast,
    "S9": _pdl,
    "F5": _flags,
}
