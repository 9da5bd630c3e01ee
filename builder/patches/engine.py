"""Patch sites: find, edit, prove.

A site knows the shapes that a place in a package's source has had: upstream's old one (`needed`), upstream's own remedy
and ours (`native`). Everything else is `unknown`, and fails. The place is found in the syntax tree; the edit replaces
spans of text, so that the rest of the file stays as it is, byte for byte. Afterwards three things are compared that do
not rest on each other: the site's shape again, its post-condition (`builder.smoke.patched`), and the whole file, of
which nothing but the named definitions may differ.
"""

from __future__ import annotations

import ast
import codecs
import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest

from builder.errors import BuildError, IntegrityError
from builder.smoke.patched import check_site

Reader = Callable[[str], str | None]
"""The text of a file of the package, None where it has no such file."""


class State(StrEnum):
    """What a release has at a site."""

    NATIVE = "native"
    """nothing to do: upstream's own remedy, or ours"""
    NEEDED = "needed"
    ABSENT = "absent"
    """the release does not have what the site is about"""
    UNKNOWN = "unknown"


class UnknownShapeError(Exception):
    """A place that is none of the known shapes; the message says what was looked for."""


@dataclass(frozen=True)
class Edit:
    """``text`` in place of the characters from ``start`` to ``end``."""

    start: int
    end: int
    text: str


class Module:
    """A Python source and its syntax tree. Raises `UnknownShapeError` for a text that does not parse."""

    def __init__(self, text: str) -> None:
        self.text = text
        if "\r" in text.replace("\r\n", ""):
            raise UnknownShapeError("lines that end with LF or CRLF")
        try:
            self.tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise UnknownShapeError(f"a Python source (it does not parse: {error})") from error

    @property
    def newline(self) -> str:
        """How the file ends its lines."""
        return "\r\n" if "\r\n" in self.text else "\n"

    @cached_property
    def _starts(self) -> list[int]:
        """Where each line starts: lines as the parser counts them, which a form feed does not end."""
        return [0, *(found.end() for found in re.finditer("\n", self.text))]

    def at(self, line: int, column: int) -> int:
        """The character at a line (from 1) and a column, which the parser counts in bytes of UTF-8."""
        start = self._starts[line - 1]
        end = self._starts[line] if line < len(self._starts) else len(self.text)
        return start + len(self.text[start:end].encode()[:column].decode())

    def replace(self, node: ast.expr, text: str) -> Edit:
        """Put ``text``, which has no line break, in place of an expression."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return Edit(
            self.at(node.lineno, node.col_offset),
            self.at(node.end_lineno, node.end_col_offset),
            text,
        )

    def before(self, node: ast.stmt, text: str) -> Edit:
        """Put the lines of ``text``, indented as the statement is, in front of it."""
        first = min([node.lineno, *(item.lineno for item in getattr(node, "decorator_list", []))])
        start = self._starts[first - 1]
        return Edit(start, start, self._indented(node, text))

    def after(self, node: ast.stmt, text: str) -> Edit:
        """Put the lines of ``text``, indented as the statement is, behind it."""
        assert node.end_lineno is not None
        end = self._starts[node.end_lineno] if node.end_lineno < len(self._starts) else len(self.text)
        lead = "" if self.text[:end].endswith("\n") else self.newline
        return Edit(end, end, lead + self._indented(node, text))

    def _indented(self, node: ast.stmt, text: str) -> str:
        pad = " " * node.col_offset
        return "".join(f"{pad}{line}".rstrip() + self.newline for line in text.split("\n"))

    def enclosing(self, edits: Sequence[Edit]) -> tuple[str, ...]:
        """The functions and methods that edits are in, outermost first; `?` for one that is in none."""
        lines = [self.text.count("\n", 0, edit.start) + 1 for edit in edits]
        found = [
            next((name for name, node in definitions(self.tree) if node.lineno <= line <= (node.end_lineno or 0)), "?")
            for line in lines
        ]
        return tuple(dict.fromkeys(found))

    def apply(self, edits: Sequence[Edit]) -> str:
        """The text with the edits made; two that overlap are a fault of the site (`ValueError`)."""
        text, last = self.text, len(self.text)
        for edit in sorted(edits, key=lambda item: item.start, reverse=True):
            if edit.end > last:
                raise ValueError("two edits overlap")
            text = text[: edit.start] + edit.text + text[edit.end :]
            last = edit.start
        return text


Plan = Callable[[Module], Sequence[Edit]]
"""The edits that a site needs, none where it is native. Raises `UnknownShapeError`."""


@dataclass(frozen=True)
class Site:
    """A place in a package's source, what has to hold there, and how it comes to hold.

    ``file`` is relative to site-packages; a folder (it ends with `/`) means every file below it that has ``marker``,
    less those below ``outside``. ``marker`` is in the file wherever there is something to patch: a release without the
    file has nothing of the kind only if no other file has it. ``places`` are the definitions that may change, as
    `Class.method`, `NAME` or `import`; where none are named, those that the edits are in. ``context`` says what else in
    the package has to be as known for an edit to make sense, nothing where it is. ``trace`` is a text without which a
    release has nothing of the kind, where that is another one than the marker's own.
    """

    id: str
    set: str
    package: str
    file: str
    marker: str
    what: str
    consequence: str
    source: str
    places: tuple[str, ...]
    plan: Plan
    outside: tuple[str, ...] = ()
    context: Callable[[Reader], str] = lambda read: ""
    trace: str = ""

    def probe(self, text: str) -> State:
        """The state of a file's text."""
        return self.look(text)[0]

    def look(self, text: str) -> tuple[State, str]:
        """The state, and where it is unknown what was looked for."""
        try:
            return (State.NEEDED if self.plan(Module(text)) else State.NATIVE), ""
        except UnknownShapeError as error:
            return State.UNKNOWN, str(error)

    def apply(self, text: str) -> str:
        """The text with this site patched, and proven; the same text where it is native.

        Raises `BuildError` for an unknown shape, `IntegrityError` where the outcome is not what it has to be.
        """
        try:
            module = Module(text)
            edits = self.plan(module)
        except UnknownShapeError as error:
            raise unknown(self, self.file, str(error)) from None
        if not edits:
            return text
        after = module.apply(edits)
        state, looked_for = self.look(after)
        if state is not State.NATIVE:
            raise self._failed(f"afterwards the site is {state}: {looked_for or 'the edit changed nothing'}")
        if trouble := self.verify(after):
            raise self._failed(f"afterwards it does not hold: {trouble}")
        if trouble := outside_of(self.places or module.enclosing(edits), text, after):
            raise self._failed(trouble)
        return after

    def verify(self, text: str) -> str:
        """What is wrong with the site's post-condition in a file's text, or nothing."""
        return check_site(self.id, text)

    def _failed(self, because: str) -> IntegrityError:
        return IntegrityError(
            f"the patch at site {self.id} went wrong",
            where=self.file,
            because=because,
            hint="this is a fault of the builder",
        )


def unknown(site: Site, file: str, looked_for: str) -> BuildError:
    """The error for a site that has none of the known shapes."""
    return BuildError(
        f"site {site.id} of {site.package} is of no known shape",
        where=file,
        because=f"looked for: {looked_for}\nit is there for: {site.what}",
        hint=f"`builder patches MATRIX` shows every site; take a release that is known, or leave out the set `{site.set}`",
    )


def outside_of(places: Sequence[str], before: str, after: str) -> str:
    """What differs between two sources outside of ``places``, or which of those is there twice; nothing if all is well.

    A definition is a function, method or assignment; statements of other kinds count as a whole, and order counts.
    """
    sides = []
    for text in (before, after):
        found = [(name, ast.dump(node)) for name, node in definitions(ast.parse(text))]
        names = [name for name, _ in found]
        for place in places:
            if place != "import" and names.count(place) > 1:
                return f"`{place}` is there {names.count(place)} times"
        sides.append([item for item in found if item[0] not in places])
    old, new = sides
    changed = next((a or b for a, b in zip_longest(old, new) if a != b), None)
    return f"`{changed[0]}` differs, which the site does not change" if changed else ""


def definitions(tree: ast.Module) -> list[tuple[str, ast.stmt]]:
    """Every definition and its name, in order. Of a class there is a head without its body, and the body's definitions."""
    found: list[tuple[str, ast.stmt]] = []

    def walk(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            name = f"{prefix}{getattr(node, 'name', '')}"
            if isinstance(node, ast.ClassDef):
                head = ast.ClassDef(node.name, node.bases, node.keywords, [], node.decorator_list)
                found.append((f"class {name}", ast.copy_location(head, node)))
                head.end_lineno = node.lineno
                walk(node.body, f"{name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((name, node))
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.append((f"{prefix}{node.targets[0].id}", node))
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found.append(("import", node))
            else:
                found.append(("statement", node))

    walk(tree.body, "")
    return found


def decode(data: bytes) -> tuple[str, str]:
    """A source's byte order mark (or nothing) and its text. Raises `UnknownShapeError` for one that is not UTF-8."""
    mark = "\ufeff" if data.startswith(codecs.BOM_UTF8) else ""
    try:
        return mark, data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnknownShapeError(f"a source in UTF-8 ({error.reason} at byte {error.start})") from None


def unified(file: str, before: bytes, after: bytes) -> str:
    """The unified diff of two versions of a UTF-8 file, with three lines of context and nothing of this machine in it."""
    old, new = (data.decode().split("\n") for data in (before, after))
    lines: list[str] = []
    for line in difflib.unified_diff(_ended(old), _ended(new), f"a/{file}", f"b/{file}"):
        lines.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(lines)


def _ended(lines: list[str]) -> list[str]:
    """Lines with their ends; the last one has none where the file ends without."""
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
