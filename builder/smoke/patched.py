"""Are the patches in what is installed: `patches`. Standard library only; the host checks what it patched by the same code.

What a site has to be (its post-condition) is said here once more, apart from the code that finds and edits it in
`builder/patches`: that code can be wrong about a release, and then this says so.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from builder.smoke.report import Result, count
from builder.smoke.spec import Spec

SIZES = "TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES"
MULTIMEM = "_WORLD_SIZES_MULTIMEM"
COMMUNICATOR = "TorchSymmMemCommunicator"
DEEP_GEMM = "_compute_enable_deep_gemm"
FUSION = "gen_trtllm_comm_module"
KIMI = "KimiK25ForConditionalGeneration"
LAYERS = "set_eagle3_layers_to_capture"
WORLD_SIZES = (2, 4, 8)
"""Those that torch's two-shot kernel is specialised for (shared/facts/patches.md, A1)."""


def verify_installed(site_packages: Path, report: Mapping[str, Any]) -> list[str]:
    """What is wrong with the files of one package's report, one line each: nothing where all is as it was patched.

    Every file has the sha256 that it had when it was patched, with its diff taken back it has upstream's, and every site
    that the release has meets its post-condition.
    """
    wrong: list[str] = []
    for item in report["files"]:
        try:
            data = (site_packages / item["file"]).read_bytes()
        except OSError as error:
            wrong.append(f"`{item['file']}` cannot be read: {error.strerror}")
            continue
        if hashlib.sha256(data).hexdigest() != item["after"]:
            wrong.append(f"`{item['file']}` is not as it was patched: its sha256 is not {item['after'][:12]}…")
            continue
        if item["diff"]:
            try:
                before = hashlib.sha256(reverse(item["diff"], data)).hexdigest()
            except ValueError as error:
                wrong.append(f"the diff of `{item['file']}` does not fit: {error}")
                continue
            if before != item["before"]:
                wrong.append(f"the diff of `{item['file']}` does not lead back to upstream's file")
    for site in report["sites"]:
        if site["after"] != "native":
            continue
        try:
            trouble = check_site(site["id"], (site_packages / site["file"]).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError) as error:
            trouble = f"it cannot be read ({type(error).__name__})"
        if trouble:
            wrong.append(f"{site['id']} does not hold in `{site['file']}`: {trouble}")
    return wrong


def check_patches(spec: Spec) -> Result:
    """Every report of the spec, against what is installed."""
    sites = [site for report in spec.patches for site in report["sites"]]
    result = Result(sum(len(report["files"]) for report in spec.patches) + len(sites), None, "files and sites")
    for report in spec.patches:
        for line in verify_installed(spec.site_packages, report):
            result.add("error", report["package"], line, hint="build again from the lock")
    changed = [
        f"{report['package']} {report['patched_version']}"
        for report in spec.patches
        if any(item["diff"] for item in report["files"])
    ]
    native = sum(1 for site in sites if site["before"] == "native")
    result.detail = f"{', '.join(changed) or 'nothing'} patched, {count(native, 'site')} native"
    return result


def reverse(diff: str, after: bytes) -> bytes:
    """The file from which the unified ``diff`` led to ``after``. Raises ValueError where it does not lead there."""
    lines = _with_ends(after)
    old: list[bytes] = []
    at = 0
    # Without the two lines that name the file.
    rows = _with_ends(diff.encode())[2:]
    for i, row in enumerate(rows):
        kind, text = row[:1], row[1:]
        if i + 1 < len(rows) and rows[i + 1][:1] == b"\\":
            text = text[:-1]  # the file ends there, without the end of a line
        if kind == b"@":
            start, _, length = row.split(b"+", 1)[1].split(b" ", 1)[0].partition(b",")
            to = int(start) - (length != b"0")
            old += lines[at:to]
            at = to
        elif kind in (b" ", b"+"):
            if at >= len(lines) or lines[at] != text:
                raise ValueError(f"line {at + 1} of the file is not the diff's")
            old += [text] if kind == b" " else []
            at += 1
        elif kind == b"-":
            old.append(text)
    return b"".join([*old, *lines[at:]])


def _with_ends(data: bytes) -> list[bytes]:
    """Lines with their ends; the last one has none where the data ends without."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def check_site(site: str, text: str) -> str:
    """What is wrong with the site in a file's text, or nothing."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return f"the file does not parse: {error.msg}, line {error.lineno}"
    try:
        POSTCONDITIONS[site](tree)
    except _WrongError as error:
        return str(error)
    return ""


class _WrongError(Exception):
    """A post-condition that does not hold; the message says which."""


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


def _one(found: list[Any], what: str) -> Any:
    _need(len(found) == 1, f"{what} is there {len(found)} times, not once")
    return found[0]


def _function(body: list[ast.stmt], name: str) -> ast.FunctionDef:
    node = _one([item for item in body if getattr(item, "name", None) == name], f"`{name}`")
    _need(isinstance(node, ast.FunctionDef), f"`{name}` is not a function")
    assert isinstance(node, ast.FunctionDef)
    return node


def _class(tree: ast.Module, name: str) -> ast.ClassDef:
    node = _one([item for item in tree.body if getattr(item, "name", None) == name], f"`{name}`")
    _need(isinstance(node, ast.ClassDef), f"`{name}` is not a class")
    assert isinstance(node, ast.ClassDef)
    return node


def _value(body: list[ast.stmt], name: str) -> ast.expr:
    """What ``name`` is assigned, once."""
    found = [
        item.value
        for item in body
        if isinstance(item, ast.Assign) and [getattr(target, "id", None) for target in item.targets] == [name]
    ]
    value = _one(found, f"`{name} =`")
    assert isinstance(value, ast.expr)
    return value


def _table(value: ast.expr, name: str) -> dict[object, ast.expr]:
    _need(isinstance(value, ast.Dict), f"`{name}` is not a dictionary")
    assert isinstance(value, ast.Dict)
    keys = [getattr(key, "value", None) for key in value.keys]
    _need(len(keys) == len(set(keys)), f"`{name}` has a key twice")
    _need({9, 10, 12} <= set(keys), f"`{name}` does not list 9, 10 and 12")
    return dict(zip(keys, value.values))  # noqa: B905 - strict is Python 3.10's, and they are of one length


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
            yield node


def _sizes(tree: ast.Module) -> None:
    value = _table(_value(tree.body, SIZES), SIZES)[12]
    _need(isinstance(value, ast.Dict), "12 has no dictionary of sizes")
    assert isinstance(value, ast.Dict)
    keys = sorted(getattr(key, "value", 0) for key in value.keys)
    _need(tuple(keys) == WORLD_SIZES, f"12 lists world sizes {keys}, not {list(WORLD_SIZES)}")
    # One name for all of them, whose value the environment sets.
    name = _one(sorted({ast.unparse(item) for item in value.values}), "the size of 12")
    limit = _value(tree.body, name)
    _need(any(_calls(limit, "get")) and "environ" in ast.unparse(limit), f"`{name}` is not read from the environment")


def _subscripts(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Subscript) and ast.unparse(node.value) == name for node in ast.walk(tree))


def _lookup(tree: ast.Module) -> None:
    init = _function(_class(tree, COMMUNICATOR).body, "__init__")
    _need(not _subscripts(init, SIZES), f"`{SIZES}[…]` fails for a device that is not listed")
    lookups = [
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == f"{SIZES}.get(self.device_capability)"
    ]
    name = ast.unparse(_one(lookups, f"`{SIZES}.get(self.device_capability)`").targets[0])
    refusals = [
        node for node in ast.walk(init) if isinstance(node, ast.If) and ast.unparse(node.test) == f"{name} is None"
    ]
    refusal = _one(refusals, f"`if {name} is None`")
    _need(isinstance(refusal.body[-1], ast.Return), "a device that is not listed does not return")
    _need(any(_calls(refusal, "warning")), "a device that is not listed gets no warning")


def _multimem(tree: ast.Module) -> None:
    owner = _class(tree, COMMUNICATOR)
    value = _table(_value(owner.body, MULTIMEM), MULTIMEM)[12]
    _need(isinstance(value, ast.List) and not value.elts, "12 has world sizes for multimem, which needs NVLink")
    reduce = _function(owner.body, "all_reduce")
    _need(not _subscripts(reduce, f"self.{MULTIMEM}"), f"`{MULTIMEM}[…]` fails for a device that is not listed")
    gets = [call for call in _calls(reduce, "get") if ast.unparse(call.func) == f"self.{MULTIMEM}.get"]
    _need(len(_one(gets, f"`{MULTIMEM}.get`").args) == 2, f"`{MULTIMEM}.get` has no default")


def _majors(call: ast.Call) -> list[object]:
    found = [keyword.value for keyword in call.keywords if keyword.arg == "supported_major_versions"]
    value = _one(found, "`supported_major_versions`")
    _need(isinstance(value, ast.List), "`supported_major_versions` is not a list")
    return [getattr(item, "value", None) for item in value.elts]


def _fusion(tree: ast.Module) -> None:
    call = _one(list(_calls(_function(tree.body, FUSION), "get_nvcc_flags_list")), "`get_nvcc_flags_list`")
    _need({9, 10, 12} <= set(_majors(call)), f"`{FUSION}` is compiled for {_majors(call)}")
    for node in tree.body:
        # Its comment upstream says that SM12x is left out on purpose.
        if getattr(node, "name", None) == "gen_trtllm_mnnvl_comm_module":
            for other in _calls(node, "get_nvcc_flags_list"):
                _need(12 not in _majors(other), "`gen_trtllm_mnnvl_comm_module` is compiled for 12")


def _deep_gemm(tree: ast.Module) -> None:
    function = _function(tree.body, DEEP_GEMM)
    guards = [node for node in function.body if isinstance(node, ast.If) and any(_refuses(node))]
    for architecture in (120, 121):
        _need(any(_holds(node.test, architecture) for node in guards), f"sm_{architecture} is not turned off")
    for architecture in (90, 100, 103):
        _need(not any(_holds(node.test, architecture) for node in guards), f"sm_{architecture} is turned off")


def _refuses(node: ast.If) -> Iterator[ast.Return]:
    for item in ast.walk(node):
        if isinstance(item, ast.Return) and isinstance(item.value, ast.Constant) and item.value.value is False:
            yield item


def _holds(test: ast.expr, architecture: int) -> bool:
    """Whether a comparison of ``sm_version`` in ``test`` singles out the architecture (`x < 90` does not)."""
    for node in ast.walk(test):
        if (
            isinstance(node, ast.Compare)
            and isinstance(node.ops[0], (ast.Eq, ast.In))
            and {item.id for item in ast.walk(node) if isinstance(item, ast.Name)} == {"sm_version"}
            and not any(isinstance(item, (ast.Call, ast.Attribute)) for item in ast.walk(node))
        ):
            code = compile(ast.fix_missing_locations(ast.Expression(node)), "<comparison>", "eval")
            if eval(code, {"__builtins__": {}}, {"sm_version": architecture}):
                return True
    return False


def _hook(name: str) -> Callable[[ast.Module], None]:
    def check(tree: ast.Module) -> None:
        method = _function(_class(tree, KIMI).body, name)
        inner = f"self.language_model.{name}"
        call = _one([node for node in _calls(method, name) if ast.unparse(node.func) == inner], f"`{inner}(…)`")
        parameters = [item.arg for item in method.args.args[1:]]
        passed = [ast.unparse(item) for item in call.args]
        _need(passed == parameters and not call.keywords, f"`{name}` passes {passed}, not {parameters}")
        if name == "get_embed_and_head":
            returns = [
                ast.unparse(node.value) for node in ast.walk(method) if isinstance(node, ast.Return) and node.value
            ]
            _need(returns == [f"{inner}()"], f"`{name}` does not return what the language model does")
        if name == LAYERS:
            defaults = [ast.unparse(item) for item in method.args.defaults]
            _need(defaults == ["None"], f"`{name}` has no default")

    return check


def _capture(tree: ast.Module) -> None:
    calls = list(_calls(tree, LAYERS))
    _need(bool(calls), f"`{LAYERS}` is not called")
    for call in calls:
        _need(
            len(call.args) == 1 and not call.keywords, f"line {call.lineno} calls `{LAYERS}` without the draft's layers"
        )
        _need(
            ast.unparse(call.args[0]).endswith("eagle_aux_hidden_state_layer_ids"), f"line {call.lineno}: other layers"
        )


POSTCONDITIONS: Mapping[str, Callable[[ast.Module], None]] = {
    "S1": _sizes,
    "S2": _lookup,
    "S3": _multimem,
    "F1": _fusion,
    "D1": _deep_gemm,
    "E1": _hook("get_embed_and_head"),
    "E2": _hook("set_embed_and_head"),
    "E3": _hook(LAYERS),
    "E4": _capture,
}
