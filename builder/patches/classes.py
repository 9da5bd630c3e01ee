"""What classes in a folder of Python modules are, read from their source alone: bases, members, what attributes hold.

Names are followed through imports within the folder; what lies outside of it, or is decided by something that is not
written there (a registry, a configuration), stays unresolved.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from builder.patches.engine import Module, Reader, UnknownShapeError

_DEPTH = 8
"""How many names, calls and values in a row are followed."""

Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True, eq=False)
class Class:
    """A class statement at the top of a module."""

    file: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The class's name."""
        return self.node.name


@dataclass(frozen=True)
class At:
    """Where code stands: in ``file``; in a method, that of ``within`` (a base or the class itself), for an ``owner``."""

    file: str
    owner: Class | None = None
    within: Class | None = None
    function: ast.FunctionDef | None = None


@dataclass(frozen=True)
class Imported:
    """A name that stands for something in another module: the module's dotted name, and the name there or the module."""

    module: str
    name: str | None


Bound = Definition | ast.expr | Imported


class Classes:
    """The classes of the modules below ``folder`` (it ends with `/`). ``unread`` are modules that do not parse."""

    def __init__(self, read: Reader, names: Sequence[str], folder: str) -> None:
        self.folder = folder
        self.files = sorted(name for name in names if name.startswith(folder) and name.endswith(".py"))
        self.unread: set[str] = set()
        self._read = read
        self._package = folder.rstrip("/").replace("/", ".")
        self._known = set(self.files)
        self._scopes: dict[str, dict[str, Bound]] = {}
        self._classes: dict[tuple[str, ast.ClassDef], Class] = {}
        self._orders: dict[Class, list[Class]] = {}
        self._members: dict[Class, dict[str, Bound]] = {}
        self._locals: dict[ast.FunctionDef, dict[str, list[Bound]]] = {}

    def text(self, file: str) -> str:
        """A module's text."""
        return self._read(file) or ""

    def scope(self, file: str) -> dict[str, Bound]:
        """What the names at the top of a module are bound to."""
        if file not in self._scopes:
            self._scopes[file] = {}
            try:
                self._scopes[file] = self._bindings(Module(self.text(file)).tree.body, file)
            except UnknownShapeError:
                self.unread.add(file)
        return self._scopes[file]

    def order(self, klass: Class) -> list[Class]:
        """The class and its bases, in the order in which attributes are looked up."""
        if klass not in self._orders:
            self._orders[klass] = [klass]
            bases = [base for node in klass.node.bases for base in self.denoted(node, At(klass.file))]
            self._orders[klass] = [klass, *_merged([*(list(self.order(base)) for base in bases), bases])]
        return self._orders[klass]

    def members(self, klass: Class) -> dict[str, Bound]:
        """What the body of a class binds."""
        if klass not in self._members:
            self._members[klass] = self._bindings(klass.node.body, klass.file)
        return self._members[klass]

    def member(self, klass: Class, name: str, after: Class | None = None) -> tuple[At, Bound] | None:
        """What an attribute of a class is, and where that stands; with ``after``, what `super()` there finds."""
        order = self.order(klass)
        for base in order[order.index(after) + 1 if after in order else 0 :]:
            found = self.members(base).get(name)
            if found is not None:
                return At(base.file, klass, base, found if isinstance(found, ast.FunctionDef) else None), found
        return None

    def holds(self, klass: Class) -> dict[str, list[Class]]:
        """What an instance calls for when it is made: attribute → the classes it may be of, none where that is not written."""
        found: dict[str, list[Class]] = {}
        made = self.member(klass, "__init__")
        while made is not None and (function := made[0].function) is not None:
            for node in ast.walk(function):
                for name, value in _set_on_self(node):
                    classes = self.made(value, made[0])
                    if classes or isinstance(value, ast.Call):
                        found.setdefault(name, []).extend(classes)
            on = any(isinstance(node, ast.Call) and _is_super(node.func) == "__init__" for node in ast.walk(function))
            made = self.member(klass, "__init__", made[0].within) if on else None
        return {name: list(dict.fromkeys(classes)) for name, classes in found.items()}

    def made(self, value: ast.expr, at: At, depth: int = _DEPTH) -> list[Class]:
        """The classes that the value of an expression may be an instance of."""
        if depth == 0:
            return []
        if isinstance(value, ast.IfExp | ast.BoolOp):
            return [klass for part in _branches(value) for klass in self.made(part, at, depth - 1)]
        if isinstance(value, ast.Name) and at.function is not None:
            bound = self._local(at.function, at.file).get(value.id, [])
            return [klass for item in bound if isinstance(item, ast.expr) for klass in self.made(item, at, depth - 1)]
        if not isinstance(value, ast.Call):
            return []
        if classes := self.denoted(value.func, at, depth - 1):
            return classes
        called = self.called(value.func, at)
        if called is None or called.function is None:
            return []
        results = [node.value for node in ast.walk(called.function) if isinstance(node, ast.Return) and node.value]
        return [klass for result in results for klass in self.made(result, called, depth - 1)]

    def called(self, func: ast.expr, at: At) -> At | None:
        """The function or method of the folder that a call runs."""
        for there, bound in self._bound(func, at):
            if isinstance(bound, ast.FunctionDef):
                return there if there.function is bound else At(there.file, function=bound)
        return None

    def denoted(self, name: ast.expr, at: At, depth: int = _DEPTH) -> list[Class]:
        """The classes that an expression stands for: one, several to choose from, or none that is written here."""
        if depth == 0:
            return []
        if isinstance(name, ast.List | ast.Tuple):
            parts: Sequence[ast.expr] = name.elts
        elif isinstance(name, ast.Dict):
            parts = name.values
        elif isinstance(name, ast.IfExp | ast.BoolOp):
            parts = _branches(name)
        elif isinstance(name, ast.Subscript):
            parts = [name.value]
        elif isinstance(name, ast.Call):
            parts = [name.func.value] if isinstance(name.func, ast.Attribute) and name.func.attr == "get" else []
        else:
            return [klass for there, bound in self._bound(name, at) for klass in self._classes_of(bound, there, depth)]
        return [klass for part in parts for klass in self.denoted(part, at, depth - 1)]

    def _classes_of(self, bound: Bound, at: At, depth: int) -> list[Class]:
        if isinstance(bound, ast.ClassDef):
            return [self._classes.setdefault((at.file, bound), Class(at.file, bound))]
        return self.denoted(bound, at, depth - 1) if isinstance(bound, ast.expr) else []

    def _bound(self, name: ast.expr, at: At) -> list[tuple[At, Bound]]:
        """What a name, or an attribute of `self` or of a module, is bound to."""
        if isinstance(name, ast.Name):
            if at.function is not None and name.id in (local := self._local(at.function, at.file)):
                return [found for item in local[name.id] for found in self._followed(item, at)]
            bound = self.scope(at.file).get(name.id)
            return [] if bound is None else self._followed(bound, At(at.file))
        if not isinstance(name, ast.Attribute):
            return []
        on_self = isinstance(name.value, ast.Name) and name.value.id in ("self", "cls")
        if at.owner is not None and (on_self or _is_super(name)):
            member = self.member(at.owner, name.attr, None if on_self else at.within)
            return [] if member is None else self._followed(member[1], member[0])
        modules = [bound.module for _, bound in self._bound(name.value, at) if isinstance(bound, Imported)]
        return [found for module in modules for found in self._followed(Imported(module, name.attr), at)]

    def _followed(self, bound: Bound, at: At) -> list[tuple[At, Bound]]:
        """What an import leads to, wherever in the folder that is; anything else as it is."""
        seen: set[tuple[str, str | None]] = set()
        while isinstance(bound, Imported) and bound.name is not None:
            file = self._file(bound.module)
            found = None if file is None else self.scope(file).get(bound.name)
            if found is None:
                inner = f"{bound.module}.{bound.name}"
                return [] if self._file(inner) is None else [(at, Imported(inner, None))]
            if (bound.module, bound.name) in seen or file is None:
                return []
            seen.add((bound.module, bound.name))
            bound, at = found, At(file)
        return [(at, bound)]

    def _file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self._known), None)

    def _local(self, function: ast.FunctionDef, file: str) -> dict[str, list[Bound]]:
        """What the names of a function may be bound to: defaults of parameters, imports, each assignment."""
        if function not in self._locals:
            arguments = function.args
            positional = [*arguments.posonlyargs, *arguments.args]
            found: dict[str, list[Bound]] = {each.arg: [] for each in [*positional, *arguments.kwonlyargs]}
            pairs = [
                *zip(reversed(positional), reversed(arguments.defaults), strict=False),
                *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if default is not None:
                    found[argument.arg].append(default)
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and not isinstance(node, Definition):
                    for name, bound in self._names(node, file):
                        found.setdefault(name, []).append(bound)
            self._locals[function] = found
        return self._locals[function]

    def _bindings(self, body: list[ast.stmt], file: str) -> dict[str, Bound]:
        """What statements bind; those in branches too, and a definition or import rather than a value beside it."""
        found: dict[str, Bound] = {}
        for node in _statements(body):
            for name, bound in self._names(node, file):
                if not isinstance(bound, ast.expr) or isinstance(found.get(name), ast.expr | None):
                    found[name] = bound
        return found

    def _names(self, node: ast.stmt, file: str) -> Iterator[tuple[str, Bound]]:
        if isinstance(node, Definition):
            yield node.name, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, Imported(alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                parts = file.removesuffix(".py").split("/")[: -node.level]
                module = ".".join([*parts, *filter(None, [module])])
            if f"{module}.".startswith(f"{self._package}.") or f"{self._package}.".startswith(f"{module}."):
                for alias in node.names:
                    yield alias.asname or alias.name, Imported(module, alias.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "handlers", "orelse", "finalbody"):
                for inner in getattr(node, part, []):
                    yield from _statements(inner.body if isinstance(inner, ast.ExceptHandler) else [inner])


def _merged(orders: list[list[Class]]) -> list[Class]:
    """The C3 merge; where there is none (the source would not import), depth first."""
    orders = [order for order in orders if order]
    if not orders:
        return []
    heads = (order[0] for order in orders)
    head = next((each for each in heads if not any(each in order[1:] for order in orders)), orders[0][0])
    return [head, *_merged([[klass for klass in order if klass is not head] for order in orders])]


def _set_on_self(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr, node.value


def _branches(value: ast.IfExp | ast.BoolOp) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else value.values


def _is_super(func: ast.expr) -> str | None:
    """The method that `super().METHOD` names."""
    if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call):
        named = func.value.func
        return func.attr if isinstance(named, ast.Name) and named.id == "super" else None
    return None
