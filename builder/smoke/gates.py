"""Which module-level imports of a file only a CUDA machine runs, found by AST.

Without a GPU, `is_cuda()` and its kin are false, so a plain import never sees these lines. A line counts as gated when
it is in a branch that a test about the platform selects on a CUDA machine: other platforms are false there, CUDA true,
and what depends on the model of GPU may be either.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class GatedImport:
    """`from module import name` (empty for `import module`) at file:line; ``guarded``: in a try that catches it."""

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
