"""`gated-imports`: every module-level import of sglang that only a CUDA machine runs, found by AST and resolved.

Without a GPU, `is_cuda()` and its kin are false, so a plain import never sees these lines. A line counts as gated when it is
in a branch that a test about the platform selects on a CUDA machine: other platforms are false there, CUDA true, and what
depends on the model of GPU may be either.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from builder.smoke.child import Outcome, shorten
from builder.smoke.cuda import home_environment
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Result, count, not_applicable
from builder.smoke.spec import Gpu

_TIMEOUT = 900.0


@dataclass(frozen=True)
class GatedImport:
    """`from module import name` (name empty for `import module`) at file:line; ``guarded``: inside try with a handler."""

    file: str
    line: int
    module: str
    name: str
    guarded: bool

    @property
    def where(self) -> str:
        """`sglang/srt/x.py:12`."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        """As the source has it."""
        return f"from {self.module} import {self.name}" if self.name else f"import {self.module}"


@dataclass(frozen=True)
class Words:
    """Which names in a test are about CUDA, about other platforms, or about the model of GPU (facts: `gated`)."""

    cuda: re.Pattern[str]
    other: re.Pattern[str]
    model: re.Pattern[str]


def find(source: str, file: str, words: Words) -> list[GatedImport]:
    """The gated imports of one file. Raises SyntaxError."""
    finder = _Finder(file, words)
    finder.block(ast.parse(source).body, gated=False, guarded=False)
    return finder.found


class _Finder:
    def __init__(self, file: str, words: Words) -> None:
        self.file, self.words = file, words
        self.found: list[GatedImport] = []
        # Module-level variables that hold the outcome of a test about the platform.
        self.variables: dict[str, bool | None] = {}

    def block(self, body: Iterable[ast.stmt], *, gated: bool, guarded: bool) -> None:
        for statement in body:
            self.statement(statement, gated=gated, guarded=guarded)

    def statement(self, node: ast.stmt, *, gated: bool, guarded: bool) -> None:
        if isinstance(node, ast.If):
            value, about = self.test(node.test)
            if value is not False:
                self.block(node.body, gated=gated or about, guarded=guarded)
            if value is not True:
                self.block(node.orelse, gated=gated or about, guarded=guarded)
        elif isinstance(node, ast.Try):
            caught = any(_catches_import_error(handler) for handler in node.handlers)
            self.block(node.body, gated=gated, guarded=guarded or caught)
            self.block([*node.orelse, *node.finalbody], gated=gated, guarded=guarded)
        elif isinstance(node, ast.With):
            self.block(node.body, gated=gated, guarded=guarded)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            value, about = self.test(node.value)
            if about:
                self.variables[node.targets[0].id] = value
        elif gated and isinstance(node, (ast.Import, ast.ImportFrom)):
            self.found += self.imports(node, guarded)

    def imports(self, node: ast.Import | ast.ImportFrom, guarded: bool) -> Iterator[GatedImport]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield GatedImport(self.file, node.lineno, alias.name, "", guarded)
            return
        module = node.module or ""
        if node.level:
            package = Path(self.file).with_suffix("").parts
            package = package[: len(package) - node.level]
            module = ".".join([*package, *([module] if module else [])])
        for alias in node.names:
            yield GatedImport(self.file, node.lineno, module, "" if alias.name == "*" else alias.name, guarded)

    def test(self, node: ast.expr) -> tuple[bool | None, bool]:
        """What a test is on a CUDA machine (None: it depends), and whether it is about the platform at all."""
        if isinstance(node, ast.BoolOp):
            parts = [self.test(value) for value in node.values]
            values, about = [value for value, _ in parts], any(part for _, part in parts)
            decisive = isinstance(node.op, ast.Or)
            if decisive in values:
                return decisive, about
            return (None if None in values else not decisive), about
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value, about = self.test(node.operand)
            return (None if value is None else not value), about
        if isinstance(node, ast.Constant) and isinstance(node.value, bool):
            return node.value, False
        name = _dotted(node.func if isinstance(node, ast.Call) else node)
        if not name:
            return None, self._mentions(node)
        if name in self.variables:
            return self.variables[name], True
        last = name.rpartition(".")[2]
        if last == "TYPE_CHECKING":
            return False, False
        for value, pattern in ((None, self.words.model), (True, self.words.cuda), (False, self.words.other)):
            if pattern.search(name) or pattern.search(last):
                return value, True
        return None, False

    def _mentions(self, node: ast.expr) -> bool:
        """Whether a comparison or the like has a name of the platform in it."""
        names = {_dotted(item) for item in ast.walk(node) if isinstance(item, (ast.Name, ast.Attribute))}
        return any(pattern.search(name) for name in names for pattern in (self.words.model, self.words.cuda))


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(_dotted(item) in ("ImportError", "ModuleNotFoundError", "Exception", "BaseException") for item in types)


def words_of(facts: Any) -> Words:
    """The patterns of the facts; what is missing there matches nothing."""
    return Words(*(re.compile(str(facts.get(name, "(?!)"))) for name in ("cuda", "other", "model")))


def check_gated_imports(native: Native, ledger: Ledger) -> Result:
    """Find them in every file of the sglang layer, and resolve each (module, name) with a GPU of each target faked."""
    spec, facts = native.spec, native.spec.fact("gated")
    if not facts or not spec.gpus:
        return not_applicable("the matrix names no GPU target" if facts else "no facts about gates", "imports")
    leave_out = [str(glob) for glob in facts.get("leave_out", ())]
    files = sorted(
        path
        for path, owners in native.tree.owners.items()
        if path.endswith(".py")
        and owners[-1][0].name in native.scope
        and not any(fnmatchcase(path, glob) for glob in leave_out)
    )
    result = Result(0, None, "imports")
    found: list[GatedImport] = []
    parsed = 0
    words = words_of(facts)
    for file in files:
        try:
            # Some files start with a byte order mark.
            found += find(native.tree.path(file).read_text(encoding="utf-8-sig"), file, words)
            parsed += 1
        except FileNotFoundError:
            result.add("error", file, f"`{file}` is missing, so its gated imports are unknown", hint="see `record`")
        except (SyntaxError, UnicodeDecodeError) as error:
            result.add("error", file, f"`{file}` cannot be parsed: {error}")
    if not found:
        return not_applicable(
            f"{count(len(files), 'file')} of the sglang layer have no import behind a CUDA gate", "imports"
        )
    assert native.stubs is not None
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda gpu: _resolve(native, found, gpu), spec.gpus))
    for gpu, resolved in zip(spec.gpus, outcomes, strict=True):
        outcome = resolved.outcome
        if outcome.code != 0:
            result.add(
                "error", gpu.capability, f"the process that resolves them {outcome.ended}", because=outcome.tail()
            )
            continue
        result.looked_at = len(found)
        for item in found:
            if said := resolved.failures.get((item.module, item.name)):
                _report(native, ledger, result, item, said, gpu)
        for module in resolved.alone:
            result.add(
                "note",
                module,
                f"`import {module}` as on GPU {gpu.capability} fails after other imports, and works alone",
                because="what it finds depends on what was imported before",
            )
    where = {item.file for item in found}
    targets = ", ".join(gpu.capability for gpu in spec.gpus)
    result.detail = f"in {count(len(where), 'file')} (of {parsed:,} parsed), resolved as on {targets}"
    ledger.settle("gated-imports", result, native.scope, [gpu.capability for gpu in spec.gpus])
    return result


@dataclass(frozen=True)
class _Resolved:
    outcome: Outcome
    failures: dict[tuple[str, str], str]
    alone: tuple[str, ...]


def _resolve(native: Native, found: list[GatedImport], gpu: Gpu) -> _Resolved:
    """Resolve each (module, name) once, in a process that has the target faked."""
    warm = [str(module) for module in native.spec.facts.get("warm_imports", ())]
    command = native.workspace.python_command("gates_child.py", str(native.tree.site_packages), gpu.capability, *warm)
    wanted = sorted({(item.module, item.name) for item in found})
    outcome = native.workspace.run(
        command, timeout=_TIMEOUT, stdin=json.dumps(wanted), extra=home_environment(native.spec)
    )
    for line in outcome.out.splitlines():
        if line.startswith('{"failures"'):
            answer = json.loads(line)
            failures = {(module, name): error for module, name, error in answer["failures"]}
            return _Resolved(outcome, failures, tuple(answer["alone"]))
    return _Resolved(outcome if outcome.code != 0 else Outcome(1, outcome.out, outcome.err), {}, ())


def _report(native: Native, ledger: Ledger, result: Result, item: GatedImport, error: str, gpu: Gpu) -> None:
    owner = native.tree.owners[item.file][-1][0]
    message = f"`{item}` at {item.where} fails as on GPU {gpu.capability}: {shorten(error.splitlines()[-1], 300)}"
    if ledger.excuses("gated-imports", owner.name, item.file, f"{message}\n{error}", gpu.capability):
        return
    top = item.module.split(".")[0]
    absent = f"No module named '{top}" in error and not any(
        p.startswith(f"{top}/") or p == f"{top}.py" for p in native.tree.owners
    )
    result.add(
        "note" if item.guarded and absent else "error",
        item.where,
        message,
        because="\n".join(line.replace(f"{native.tree.site_packages}/", "") for line in error.splitlines()[-5:-1]),
        hint=f"{top} is not in the lock, and the import is optional" if item.guarded and absent else "",
    )
