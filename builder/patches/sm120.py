"""The base set for SM120 (compute capability 12.x): S1, S2, S3, S6 and D1 in sglang, F1 in flashinfer.

Without a flag it changes nothing but error messages, and what fails there anyway: symmetric memory is asked for by
`--enable-torch-symm-mem`, and no gate to the fused all-reduce is opened here; the releases that open one by themselves
(S6) no longer do. What is known of each site is in shared/facts/patches.md, section A1.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from builder.patches.engine import Edit, Module, Site, UnknownShapeError
from builder.smoke.post_base import (
    COMMUNICATOR,
    DEEP_GEMM,
    FUSION,
    FUSION_SWITCHES,
    MULTIMEM,
    SIZES,
    WORLD_SIZES,
)

_ALL_REDUCE = "sglang/srt/distributed/device_communicators/"
_NOTES = "shared/facts/patches.md section A1"

LIMIT = "SGLANG_STACK_SM120_SYMM_MEM_MAX_MIB"
"""The environment variable for the largest message, in MiB, that symmetric memory takes on SM120."""

_LIMIT_NAME = "_SM120_MAX_SIZE"
# No public number for SM120 exists; two-shot reads all peers' slices over PCIe, so large messages stay with NCCL's ring.
_LIMIT_LINES = f"""\
# sglang-stack S1: two-shot over PCIe is for small messages, the rest stays with NCCL. In MiB, a whole number above 0.
{_LIMIT_NAME} = int(os.environ.get("{LIMIT}", "1")) * MiB
"""


def find(body: Sequence[ast.stmt], kind: type[ast.stmt], name: str) -> ast.stmt:
    """The one definition of that name. Raises `UnknownShapeError`."""
    found = [node for node in body if isinstance(node, kind) and name in _names(node)]
    if len(found) != 1:
        raise UnknownShapeError(f"one `{name}` ({len(found)} found)")
    return found[0]


def _names(node: ast.stmt) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [str(getattr(node, "name", "")), *(target.id for target in targets if isinstance(target, ast.Name))]


def function(body: Sequence[ast.stmt], name: str) -> ast.FunctionDef:
    """The one function of that name. Raises `UnknownShapeError`."""
    node = find(body, ast.FunctionDef, name)
    assert isinstance(node, ast.FunctionDef)
    return node


def klass(module: Module, name: str) -> ast.ClassDef:
    """The one class of that name. Raises `UnknownShapeError`."""
    node = find(module.tree.body, ast.ClassDef, name)
    assert isinstance(node, ast.ClassDef)
    return node


def _table(body: Sequence[ast.stmt], name: str) -> ast.Dict:
    """A dictionary that lists 9 and 10 and, at most, 12."""
    node = find(body, ast.Assign, name)
    value = node.value if isinstance(node, ast.Assign) else None
    if isinstance(value, ast.Dict) and [getattr(key, "value", None) for key in value.keys] in ([9, 10], [9, 10, 12]):
        return value
    raise UnknownShapeError(f"`{name}`, a dictionary with the keys 9 and 10, and 12 at most")


def _sizes(module: Module) -> list[Edit]:
    table = _table(module.tree.body, SIZES)
    body = module.tree.body
    if len(table.keys) == 3:
        ours = "{" + ", ".join(f"{size}: {_LIMIT_NAME}" for size in WORLD_SIZES) + "}"
        if ast.unparse(table.values[2]) != ours:
            raise UnknownShapeError(f"12 with {ours}")
        find(body, ast.Assign, _LIMIT_NAME)
        return []
    find(body, ast.Assign, "MiB")
    rows = "".join(f"        {size}: {_LIMIT_NAME},\n" for size in WORLD_SIZES)
    owner = find(body, ast.Assign, SIZES)
    edits = [_add_item(module, table, f"    12: {{\n{rows}    }},"), module.before(owner, _LIMIT_LINES)]
    if not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in body):
        edits.append(module.before(_first(body), "import os\n"))
    return edits


def _first(body: Sequence[ast.stmt]) -> ast.stmt:
    """The first statement that an import may stand in front of."""
    for node in body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not docstring and getattr(node, "module", None) != "__future__":
            return node
    raise UnknownShapeError("a statement")


def _add_item(module: Module, table: ast.Dict, lines: str) -> Edit:
    """A further item of a dictionary that is written with a line and a comma for each."""
    assert table.end_lineno is not None and table.end_col_offset is not None
    last = table.values[-1]
    assert last.end_lineno is not None and last.end_col_offset is not None
    end = module.at(table.end_lineno, table.end_col_offset) - 1
    between = module.text[module.at(last.end_lineno, last.end_col_offset) : end]
    if not between.startswith(",") or last.end_lineno == table.end_lineno:
        raise UnknownShapeError("a dictionary with a line and a comma for each item")
    start = module.at(table.end_lineno, 0)
    return Edit(start, start, lines.replace("\n", module.newline) + module.newline)


def _lookups(node: ast.AST, name: str) -> tuple[list[ast.Subscript], list[ast.Call]]:
    """Where a table is looked up: `TABLE[…]`, and `TABLE.get(…)`."""
    subscripts = [n for n in ast.walk(node) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == name]
    gets = [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == f"{name}.get"]
    return subscripts, gets


def _lookup(module: Module) -> list[Edit]:
    init = function(klass(module, COMMUNICATOR).body, "__init__")
    subscripts, gets = _lookups(init, SIZES)
    capability, name = "self.device_capability", "supported_max_sizes"
    tests = {ast.unparse(node.test): node for node in init.body if isinstance(node, ast.If)}
    if len(gets) == 1 and not subscripts:
        if ast.unparse(gets[0]) != f"{SIZES}.get({capability})" or f"{name} is None" not in tests:
            raise UnknownShapeError(f"`{name} = {SIZES}.get({capability})` and `if {name} is None`")
        return []
    refusal = tests.get(f"{capability} < 9")
    if gets or len(subscripts) != 2 or {ast.unparse(node.slice) for node in subscripts} != {capability} or not refusal:
        raise UnknownShapeError(f"`if {capability} < 9`, then `{SIZES}[{capability}]` twice")
    if not isinstance(refusal.body[-1], ast.Return) or any(node.lineno <= refusal.lineno for node in subscripts):
        raise UnknownShapeError(f"`if {capability} < 9` that warns and returns before the table is read")
    comment = "# sglang-stack S2: a device that is not listed is not supported, instead of a KeyError."
    return [
        module.before(refusal, f"{comment}\n{name} = {SIZES}.get({capability})"),
        module.replace(refusal.test, f"{name} is None"),
        *(module.replace(node, name) for node in subscripts),
    ]


def _multimem(module: Module) -> list[Edit]:
    owner = klass(module, COMMUNICATOR)
    table, name = _table(owner.body, MULTIMEM), f"self.{MULTIMEM}"
    subscripts, gets = _lookups(function(owner.body, "all_reduce"), name)
    slices = [ast.unparse(node.slice) for node in subscripts] + [
        ast.unparse(node.args[0]) for node in gets if node.args
    ]
    if slices != ["self.device_capability"] or any(len(node.args) != 2 for node in gets):
        raise UnknownShapeError(f"`{name}` looked up once by `self.device_capability`")
    edits: list[Edit] = [module.replace(node, f"{name}.get(self.device_capability, [])") for node in subscripts]
    if len(table.keys) == 3:
        if ast.unparse(table.values[2]) != "[]":
            raise UnknownShapeError("12 with an empty list")
        return edits
    comment = "# sglang-stack S3: multimem needs NVLink-SHARP multicast, and SM120 goes over PCIe."
    return [*edits, _add_item(module, table, f"        {comment}\n        12: [],")]


def _fusion(module: Module) -> list[Edit]:
    owner = function(module.tree.body, FUSION)
    calls = [
        n for n in ast.walk(owner) if isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "get_nvcc_flags_list"
    ]
    majors = [word.value for call in calls for word in call.keywords if word.arg == "supported_major_versions"]
    written = [ast.unparse(value) for value in majors]
    if len(calls) == 1 and written == ["[9, 10, 12]"]:
        return []
    if len(calls) == 1 and written == ["[9, 10]"]:
        return [module.replace(majors[0], "[9, 10, 12]")]
    raise UnknownShapeError(f"one `get_nvcc_flags_list(supported_major_versions=[9, 10])` in `{FUSION}`")


def _deep_gemm(module: Module) -> list[Edit]:
    owner = function(module.tree.body, DEEP_GEMM)
    guards = [node for node in owner.body if isinstance(node, ast.If)]
    compared = [(node, ast.unparse(node)) for guard in guards for node in _comparisons(guard.test)]
    of_12 = [(node, text) for node, text in compared if "12" in text]
    if of_12:
        if [text for _, text in of_12] in (["sm_version // 10 == 12"], ["sm_version in (120, 121)"]):
            return []
        if [text for _, text in of_12] == ["sm_version == 120"]:
            # Upstream's own guard, made to hold for 12.1 as well, as upstream has it from 0.5.23 on.
            return [module.replace(of_12[0][0], "sm_version // 10 == 12")]
        raise UnknownShapeError(f"one guard for 12.x in `{DEEP_GEMM}`")
    too_old = [
        guard
        for guard in guards
        if any(text == "sm_version < 90" for text in map(ast.unparse, _comparisons(guard.test)))
    ]
    if len(too_old) != 1 or [ast.unparse(node) for node in too_old[0].body] != ["return False"] or too_old[0].orelse:
        raise UnknownShapeError("`if sm_version < 90: return False`")
    comment = "# sglang-stack D1: DeepGEMM needs TMEM and tcgen05, which SM12x does not have."
    return [module.after(too_old[0], f"{comment}\nif sm_version // 10 == 12:\n    return False")]


def _comparisons(node: ast.expr) -> Iterator[ast.Compare]:
    for item in ast.walk(node):
        if isinstance(item, ast.Compare) and "sm_version" in {
            n.id for n in ast.walk(item.left) if isinstance(n, ast.Name)
        }:
            yield item


_GATES = (
    "is_sm100_supported()",
    "is_sm90_supported() or is_sm100_supported()",
    "get_platform().is_sm90 or get_platform().is_sm100",
)
"""Upstream's conditions for turning fusion on, which leave SM120 out: in 0.5.6.post2, from 0.5.8.post1 and from 0.5.20 on."""
_GATES_WITH_12 = ("is_blackwell_supported()", "is_sm90_supported() or is_blackwell_supported()")
"""In 0.5.6.post2 and 0.5.7, where 10 and 12 are Blackwell."""


def _auto_enable(module: Module) -> list[Edit]:
    edits: list[Edit] = []
    for guards in _turned_on(module.tree, ()):
        terms = [(guard, term) for guard in guards for term in _terms(guard.test)]
        written = {ast.unparse(term) for _, term in terms}
        # On because the user says so: not this site's business.
        if written & set(_GATES) or f"self.{FUSION_SWITCHES[0]}" in written:
            continue
        found = [(guard, term) for guard, term in terms if ast.unparse(term) in _GATES_WITH_12]
        if len(found) != 1 or "is_sm100_supported" not in _imported(module.tree):
            raise UnknownShapeError(f"one condition for fusion: {', '.join(f'`{gate}`' for gate in _GATES)}")
        ((guard, term),) = found
        (call,) = [
            node
            for node in ast.walk(term)
            if isinstance(node, ast.Call) and ast.unparse(node) == "is_blackwell_supported()"
        ]
        comment = "# sglang-stack S6: not by itself on SM120, where the fused all-reduce has to be asked for."
        edits += [module.before(guard, comment), module.replace(call, "is_sm100_supported()")]
    return edits


def _turned_on(node: ast.AST, guards: tuple[ast.If, ...]) -> Iterator[tuple[ast.If, ...]]:
    """Where fusion is turned on, in any way that sglang has: the conditions around each."""
    for child in ast.iter_child_nodes(node):
        inside = (*guards, node) if isinstance(node, ast.If) and child in node.body else guards
        values = [value for name, value in _settings(child) if name in FUSION_SWITCHES]
        if any(not isinstance(value, ast.Constant) or value.value for value in values):
            yield inside
        yield from _turned_on(child, inside)


def _settings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names that a node sets, and to what: an assignment, an item of a dictionary, or an argument."""
    if isinstance(node, ast.Assign):
        yield from ((target.attr, node.value) for target in node.targets if isinstance(target, ast.Attribute))
    elif isinstance(node, ast.Dict):
        yield from ((str(getattr(key, "value", "")), value) for key, value in zip(node.keys, node.values, strict=True))
    elif isinstance(node, ast.keyword):
        yield node.arg or "", node.value


def _terms(test: ast.expr) -> list[ast.expr]:
    """What all has to hold."""
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _imported(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


SITES = (
    Site(
        id="S1",
        set="sm120",
        package="sglang",
        file=f"{_ALL_REDUCE}all_reduce_utils.py",
        marker=f"{SIZES} =",
        what="the largest messages that torch's symmetric memory takes, by compute capability",
        consequence=f"12 is listed for 2, 4 and 8 GPUs, with 1 MiB unless `{LIMIT}` says otherwise; "
        "read under `--enable-torch-symm-mem` only",
        source=f"{_NOTES}, S1",
        places=("import", _LIMIT_NAME, SIZES),
        plan=_sizes,
    ),
    Site(
        id="S2",
        set="sm120",
        package="sglang",
        file=f"{_ALL_REDUCE}torch_symm_mem.py",
        marker=f"class {COMMUNICATOR}",
        what="a device that the table does not list",
        consequence="a warning and no symmetric memory, instead of `KeyError: 12`",
        source=f"{_NOTES}, S2",
        places=(f"{COMMUNICATOR}.__init__",),
        plan=_lookup,
    ),
    Site(
        id="S3",
        set="sm120",
        package="sglang",
        file=f"{_ALL_REDUCE}torch_symm_mem.py",
        marker=f"class {COMMUNICATOR}",
        what="the world sizes for multimem, which needs multicast over NVLink",
        consequence="12 never takes multimem, and a device that is not listed does not fail",
        source=f"{_NOTES}, S3",
        places=(f"{COMMUNICATOR}.{MULTIMEM}", f"{COMMUNICATOR}.all_reduce"),
        plan=_multimem,
    ),
    Site(
        id="F1",
        set="sm120",
        package="flashinfer-python",
        file="flashinfer/jit/comm.py",
        marker=f"def {FUSION}",
        what="the architectures that the fused all-reduce is compiled for",
        consequence="it compiles for 12.0a as well; nothing calls it on SM120 unless sglang's gate is opened",
        source=f"{_NOTES}, F1",
        places=(FUSION,),
        plan=_fusion,
    ),
    Site(
        id="D1",
        set="sm120",
        package="sglang",
        file="sglang/srt/layers/deep_gemm_wrapper/configurer.py",
        marker=f"def {DEEP_GEMM}",
        what="whether DeepGEMM is used",
        consequence="off on 12.x, where block-FP8 would die with `Unknown recipe`; as before everywhere else",
        source=f"{_NOTES}, D1",
        places=(DEEP_GEMM,),
        plan=_deep_gemm,
    ),
    Site(
        id="S6",
        set="sm120",
        package="sglang",
        file="sglang/srt/",
        outside=("sglang/srt/layers/", "sglang/srt/arg_groups/fields/"),
        # In the comment or the log of every rule: the rule's file and the rule itself have changed their names.
        marker="AllReduce Fusion",
        what="whether the fused all-reduce is turned on without being asked for",
        consequence="not on 12.x; as before elsewhere",
        source=f"{_NOTES}, S6",
        places=(),
        plan=_auto_enable,
    ),
)
