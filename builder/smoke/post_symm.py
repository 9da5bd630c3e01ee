"""What the sites of `builder/patches/symm.py` have to be, said apart from it. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping

from builder.smoke.post_base import COMMUNICATOR
from builder.smoke.syntax import calls, function, klass, need, one, value_of

VARIABLE = "SGLANG_STACK_SM120_SYMM_MEM"
"""The environment variable that asks for symmetric memory without multicast on SM120."""
TWO_SHOT = "_sm120_two_shot"
COORDINATOR = "GroupCoordinator"
IN_PLACE = "_all_reduce_in_place"
INKLING_SIZES = "_INKLING_AR_WORLD_SIZES"
INKLING_RESOURCES = "_get_inkling_ar_resources"

_CAPABILITY = "device_capability"


def _asked_for(tree: ast.Module) -> None:
    """On 12 alone the ranks are asked, once, when the largest message is known; from there on all is upstream's."""
    function(tree.body, TWO_SHOT)
    owner = klass(tree, COMMUNICATOR)
    init = function(owner.body, "__init__")
    call = one(list(calls(tree, TWO_SHOT)), f"a call of `{TWO_SHOT}`")
    at = one(
        [i for i, node in enumerate(init.body) if isinstance(node, ast.If) and _within(call, node.test)],
        f"`if … {TWO_SHOT}`",
    )
    branch = init.body[at]
    assert isinstance(branch, ast.If)
    need([ast.unparse(item) for item in [*call.args, *call.keywords]] == ["self"], f"`{TWO_SHOT}` is not given `self`")
    need(_only_for_12(branch.test, call), f"`{TWO_SHOT}` is called on other devices than 12")
    need(
        [ast.unparse(node) for node in branch.body] == ["return"] and not branch.orelse,
        "upstream's way goes on after it",
    )
    # What is asked for cannot be larger than the table says, and nothing is allocated yet.
    need(_assigns(init.body[at - 1 : at], "self.max_size") == 1, f"`{TWO_SHOT}` does not follow the largest message")
    need(_assigns(init.body[:at], "self.max_size", but="0") == 1, "the largest message is not the table's")
    for name in ("empty", "rendezvous"):
        need(not any(any(calls(node, name)) for node in init.body[:at]), f"`{name}` comes before `{TWO_SHOT}`")
        need(any(any(calls(node, name)) for node in init.body[at + 1 :]), f"upstream's `{name}` is gone")
    # It is off until the last line, and off for good without multicast: as upstream has it.
    on = [node for node in ast.walk(owner) if ast.unparse(node) == "self.disabled = False"]
    need(on == [init.body[-1]], "it is turned on elsewhere than at the end")
    need(_assigns(init.body[:at], "self.disabled") == 1, "it is not off from the start")
    refusal = one(
        [
            node
            for node in init.body[at + 1 :]
            if isinstance(node, ast.If) and "multicast_ptr" in ast.unparse(node.test)
        ],
        "the refusal without multicast",
    )
    need(
        ast.unparse(refusal.test) == "handle.multicast_ptr == 0", "the refusal without multicast has another condition"
    )
    need(isinstance(refusal.body[-1], ast.Return), "without multicast it does not return")


def _within(node: ast.AST, tree: ast.AST) -> bool:
    return any(item is node for item in ast.walk(tree))


def _only_for_12(test: ast.expr, call: ast.Call) -> bool:
    """`self.device_capability == 12 and CALL`, in this order: other devices do not get to the call."""
    return (
        isinstance(test, ast.BoolOp)
        and isinstance(test.op, ast.And)
        and len(test.values) == 2
        and ast.unparse(test.values[0]) == f"self.{_CAPABILITY} == 12"
        and test.values[1] is call
    )


def _assigns(nodes: Iterable[ast.stmt], target: str, but: str = "") -> int:
    """How often ``target`` is assigned, at any depth, other values than ``but``."""
    return sum(
        isinstance(node, ast.Assign)
        and target in [ast.unparse(item) for item in node.targets]
        and ast.unparse(node.value) != but
        for statement in nodes
        for node in ast.walk(statement)
    )


def _agreed(tree: ast.Module) -> None:
    """Every rank makes the same exchanges, and it is on only after all of them."""
    owner = function(tree.body, TWO_SHOT)
    need(not owner.decorator_list and len(owner.args.args) == 1, f"`{TWO_SHOT}` takes not just a communicator")
    comm = owner.args.args[0].arg
    inner = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    defined = sum(isinstance(node, ast.FunctionDef) for node in ast.walk(owner)) - 1
    need(defined == len(inner), "a function is there twice, or too deep")
    gather = one(list(calls(owner, "all_gather_object")), "`all_gather_object`")
    exchange = one([name for name, node in inner.items() if _within(gather, node)], "a function that exchanges")
    group = [ast.unparse(item.value) for item in gather.keywords if item.arg == "group"]
    need(group == [f"{comm}.group"], "ranks exchange over another group than the communicator's")
    need(not _branches(inner[exchange]), "an exchange may be left out")
    returned = ast.unparse(inner[exchange].body[-1])
    need(returned == f"return {ast.unparse(gather.args[0])}", "an exchange does not give what all ranks say")
    verdict = one([name for name, node in inner.items() if any(calls(node, "warning"))], "a function that decides")
    said = ast.unparse(inner[verdict].args)
    ends = [ast.unparse(inner[verdict].body[i]) for i in (0, -1)]
    need(
        ends == [f"if not any({said}):\n    return False", "return True"],
        "one rank with trouble does not decide for all",
    )
    loop = one([node for node in owner.body if isinstance(node, ast.For)], "a loop of steps")
    _guarded(loop, owner, inner, exchange, verdict)

    # Asked of all ranks, whatever is set on this one; then a sum that is known; on at the very end.
    top = [node for node in owner.body if not isinstance(node, ast.FunctionDef)]
    questions = [node for node in top if VARIABLE in ast.unparse(node) and any(calls(node, exchange))]
    need(bool(questions) and isinstance(questions[0], ast.Assign), "not all ranks are asked")
    question = questions[0]
    assert isinstance(question, ast.Assign)
    name = ast.unparse(question.targets[0])
    asks = f"{name} = {exchange}(os.environ.get('{VARIABLE}') == '1')"
    need(ast.unparse(question) == asks, f"`{VARIABLE}` is read in another way")
    for node in top[:-1]:
        if node is not loop and any(isinstance(item, ast.Return) for item in ast.walk(node)):
            test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
            by_all = test == f"not any({name})" or test.startswith(f"{verdict}({exchange}(") or f"in {name}]" in test
            need(by_all, "a rank can leave by itself")
    launch = one(list(calls(owner, "two_shot_all_reduce_")), "one two-shot that is looked at")
    launched = [i for i, node in enumerate(top) if _within(launch, node)]
    checked = [i for i, node in enumerate(top) if isinstance(node, ast.If) and any(calls(node.test, exchange))]
    need(
        top.index(question) < top.index(loop)
        and top.index(loop) < min(launched, default=-1) < max(checked, default=-1),
        "ranks do not agree on what two-shot gave",
    )
    on = [i for i, node in enumerate(top) if ast.unparse(node) == f"{comm}.disabled = False"]
    need(
        _assigns([owner], f"{comm}.disabled") == 1 and on == [len(top) - 2] and on[0] == checked[-1] + 1,
        "it is turned on elsewhere than at the end",
    )
    need(ast.unparse(top[-1]) == "return True", "what came of it is not said")


def _guarded(
    loop: ast.For, owner: ast.FunctionDef, inner: Mapping[str, ast.FunctionDef], exchange: str, verdict: str
) -> None:
    """What may fail on one rank is caught, in an order in which nobody waits for one that failed, and all ranks hear of it."""
    steps = [ast.unparse(node) for node in loop.iter.elts] if isinstance(loop.iter, ast.Tuple) else []
    for name in ("can_device_access_peer", "empty", "rendezvous"):
        need(len(list(calls(owner, name))) == 1, f"`{name}` is not called once")
        step = one([step for step, node in inner.items() if any(calls(node, name))], f"a step with `{name}`")
        need(steps.count(step) == 1, f"`{name}` is not a step")
        # In the rendezvous each waits for all others: whatever else can fail has to be known by then.
        need((step == steps[-1]) == (name == "rendezvous"), "the rendezvous is not a step of its own, and the last")
    guard = one([node for node in ast.walk(owner) if isinstance(node, ast.Try)], "a guarded step")
    handler = one(guard.handlers, "a handler")
    need(guard in loop.body and ast.unparse(handler.type or guard) == "Exception", "a step that fails is not caught")
    target = ast.unparse(loop.target)
    need([ast.unparse(item.func) for item in calls(guard, target)] == [target], "the step is not guarded")
    at = loop.body.index(guard) + 1
    leaving = (ast.Return, ast.Raise, ast.Break, ast.Continue)
    need(
        not any(isinstance(item, leaving) for node in loop.body[:at] for item in ast.walk(node)),
        "a rank can leave before the exchange",
    )
    need(len(loop.body) == at + 2 and any(calls(loop.body[at], exchange)), "a step is not followed by an exchange")
    end = loop.body[at + 1]
    need(
        isinstance(end, ast.If)
        and not end.orelse
        and isinstance(end.test, ast.Call)
        and ast.unparse(end.test.func) == verdict
        and ast.unparse(end.body[-1]) == "return True",
        "a step that failed does not end it",
    )


def _branches(node: ast.AST) -> bool:
    return any(
        isinstance(item, (ast.If, ast.IfExp, ast.BoolOp, ast.Try, ast.For, ast.While)) for item in ast.walk(node)
    )


def _left_to_nccl(tree: ast.Module) -> None:
    """What two-shot does not take is reduced by NCCL, and the ranks can vote over the CPU."""
    owner = klass(tree, COORDINATOR)
    made = one(list(calls(owner, COMMUNICATOR)), f"`{COMMUNICATOR}(…)`")
    group = [ast.unparse(item.value) for item in made.keywords if item.arg == "group"]
    need(group == ["self.cpu_group"], f"`{COMMUNICATOR}` is not given the CPU group")
    method = function(owner.body, IN_PLACE)
    use = one(
        [node for node in calls(method, "all_reduce") if "symm_mem" in ast.unparse(node.func)], "symmetric memory"
    )
    taken = one(
        [
            node
            for node in ast.walk(method)
            if isinstance(node, ast.If)
            and any(_within(use, item) for item in node.body)
            and "symm_mem" in ast.unparse(node.test)
        ],
        "its condition",
    )
    need(isinstance(taken.test, ast.BoolOp) and isinstance(taken.test.op, ast.And), "its condition has alternatives")
    assert isinstance(taken.test, ast.BoolOp)
    terms = [ast.unparse(item) for item in taken.test.values]
    name = ast.unparse(use.func).rpartition(".")[0]
    fits = any(f"{name}.should_torch_symm_mem_allreduce(" in term and not term.startswith("not ") for term in terms)
    in_place = any(item.arg == "out" and ast.unparse(item.value) == ast.unparse(use.args[0]) for item in use.keywords)
    need(
        (fits and in_place) or f"{name}.{_CAPABILITY} != 12" in terms,
        "what two-shot does not take stays unreduced on 12",
    )
    need(f"not {name}.disabled" in terms, "it is used although it is off")
    need(
        any(
            ast.unparse(item.func) == "torch.distributed.all_reduce"
            for node in taken.orelse
            for item in calls(node, "all_reduce")
        ),
        "there is nothing else",
    )


def _no_multimem(tree: ast.Module) -> None:
    """No kernel that needs multicast is chosen on 12; elsewhere what upstream chooses."""
    sizes = value_of(tree.body, INKLING_SIZES)
    need(isinstance(sizes, ast.IfExp), f"`{INKLING_SIZES}` is the same everywhere")
    assert isinstance(sizes, ast.IfExp)
    need(
        ast.unparse(sizes.body) == "()" and "get_device_capability()[0] == 12" in ast.unparse(sizes.test),
        "12 has world sizes for multimem",
    )
    need(
        not any(isinstance(node, (ast.Or, ast.Not)) for node in ast.walk(sizes.test)), "12 has world sizes for multimem"
    )
    need(isinstance(sizes.orelse, ast.Tuple) and len(sizes.orelse.elts) == 3, "other devices have no world sizes")
    owner = function(tree.body, INKLING_RESOURCES)
    parameter = owner.args.args[0].arg
    first = owner.body[1] if ast.get_docstring(owner) else owner.body[0]
    need(
        isinstance(first, ast.If)
        and ast.unparse(first.test) == f"{parameter}.{_CAPABILITY} == 12"
        and [ast.unparse(node) for node in first.body] == ["return None"]
        and not first.orelse,
        "kernels that need multicast are made ready on 12",
    )


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {
    "S4": _asked_for,
    "S4b": _agreed,
    "S4c": _left_to_nccl,
    "S4d": _no_multimem,
}
