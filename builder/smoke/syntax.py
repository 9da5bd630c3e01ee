"""What post-conditions ask of a syntax tree. Standard library only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


class WrongError(Exception):
    """A post-condition that does not hold; the message says which."""


def need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise WrongError(otherwise)


def one(found: list[Any], what: str) -> Any:
    need(len(found) == 1, f"{what} is there {len(found)} times, not once")
    return found[0]


def function(body: list[ast.stmt], name: str) -> ast.FunctionDef:
    node = one([item for item in body if getattr(item, "name", None) == name], f"`{name}`")
    need(isinstance(node, ast.FunctionDef), f"`{name}` is not a function")
    assert isinstance(node, ast.FunctionDef)
    return node


def klass(tree: ast.Module, name: str) -> ast.ClassDef:
    node = one([item for item in tree.body if getattr(item, "name", None) == name], f"`{name}`")
    need(isinstance(node, ast.ClassDef), f"`{name}` is not a class")
    assert isinstance(node, ast.ClassDef)
    return node


def value_of(body: list[ast.stmt], name: str) -> ast.expr:
    """What ``name`` is assigned, once."""
    found = [
        item.value
        for item in body
        if isinstance(item, ast.Assign) and [getattr(target, "id", None) for target in item.targets] == [name]
    ]
    value = one(found, f"`{name} =`")
    assert isinstance(value, ast.expr)
    return value


def calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and name in (getattr(node.func, "attr", None), getattr(node.func, "id", None)):
            yield node


def subscripts(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Subscript) and ast.unparse(node.value) == name for node in ast.walk(tree))
