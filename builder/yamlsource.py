"""YAML that a person wrote, with the place of every value, and how its problems read.

A file becomes a tree of `Node`s (never a plain dictionary), so that whatever is found wrong later can be shown with
file, line, column and the line itself. The YAML is a small, safe part of 1.2: one document, UTF-8, no tags, no anchors
or aliases, no duplicate keys, no empty values; `true` and `false` are the only booleans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ruamel.yaml import YAML
from ruamel.yaml import events as yaml_events
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from builder.errors import UsageError

MAX_BYTES = 1024 * 1024
MAX_DEPTH = 32
MAX_NODES = 20_000
MAX_SHOWN = 100

PathElement = str | int
FieldPath = tuple[PathElement, ...]

# YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#1032-tag-resolution); everything else that is plain is a string.
_NULL = re.compile(r"|~|null|Null|NULL")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", re.ASCII)
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", re.ASCII
)

SECRET_NAME = re.compile(r"(?:.*_)?(?:TOKEN|PASSWORD|PASSWD|SECRET|KEY|CREDENTIALS?)", re.ASCII)
_SECRET_LINE = re.compile(r"(?i)(\b[A-Z0-9_]*(?:TOKEN|PASSWORD|PASSWD|SECRET|KEY|CREDENTIALS?)[\"']?\s*:\s*)\S.*")
_USERINFO = re.compile(r"(?<=://)[^/\s@\"']*@")


def redact(text: str) -> str:
    """``text`` without what looks like a secret: credentials in a URL, the value of a key named like a secret."""
    return _SECRET_LINE.sub(r"\1***", _USERINFO.sub("***@", text))


def escape(text: str, limit: int = 60) -> str:
    """``text`` on one line: no secrets, non-printing characters escaped, cut at ``limit``."""
    clean = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in redact(text)
    )
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


def shown(value: object, limit: int = 60) -> str:
    """``value`` for a message: escaped, in backticks, cut at ``limit``."""
    return f"`{escape(str(value), limit)}`"


def field_name(path: Sequence[PathElement]) -> str:
    """A path as a person would write it: `files[0].url`; the whole file is the empty string."""
    return "".join(f"[{e}]" if isinstance(e, int) else f".{escape(e)}" for e in path).removeprefix(".")


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a file: line and column from 1, and how many columns of that line it takes."""

    line: int = 1
    column: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it stands. ``keys`` has the mark of each key when ``value`` is a mapping."""

    mark: Mark
    value: str | int | float | bool | tuple[Node, ...] | dict[str, Node] | None
    text: str = ""
    keys: dict[str, Mark] = field(default_factory=dict)

    def data(self) -> object:
        """Plain values for a validator: `dict`, `tuple` (sequences are frozen) and scalars."""
        if isinstance(self.value, dict):
            return {key: node.data() for key, node in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(node.data() for node in self.value)
        return self.value

    def child(self, element: PathElement) -> Node | None:
        """The value under a key or index, or `None`."""
        if isinstance(self.value, dict) and isinstance(element, str):
            return self.value.get(element)
        if isinstance(self.value, tuple) and isinstance(element, int) and 0 <= element < len(self.value):
            return self.value[element]
        return None


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a file: where, what, what would be right, and what to do."""

    mark: Mark
    message: str
    field: str = ""
    allowed: str = ""
    because: str = ""
    hint: str = ""


class SourceError(UsageError):
    """A file that cannot be used, with every problem found in it, in the order of its lines."""

    def __init__(self, path: str, text: str, problems: Sequence[Problem]) -> None:
        self.path, self.text = path, text
        self.problems = tuple(sorted(set(problems), key=lambda p: (p.mark.line, p.mark.column, p.message)))
        first = self.problems[0]
        what = first.message if len(self.problems) == 1 else f"{len(self.problems)} problems in `{path}`"
        super().__init__(what, where=f"{path}:{first.mark.line}:{first.mark.column}", hint=first.hint)

    def __str__(self) -> str:
        """One block a problem (what, at, the line itself, allowed, because, hint); a count at the end if several."""
        lines = self.text.splitlines()
        blocks = [_block(problem, self.path, lines) for problem in self.problems[:MAX_SHOWN]]
        if len(blocks) > 1:
            more = f", of which the first {MAX_SHOWN} are shown" if len(self.problems) > MAX_SHOWN else ""
            blocks.append(f"error: {self.what}{more}")
        return "\n\n".join(blocks)


def _block(problem: Problem, path: str, lines: Sequence[str]) -> str:
    mark = problem.mark
    out = [f"error: {problem.message}", f"  at: {path}:{mark.line}:{mark.column}"]
    line = lines[mark.line - 1] if mark.line <= len(lines) else ""
    clean = "".join(c if c.isprintable() else " " if c == "\t" else "\N{REPLACEMENT CHARACTER}" for c in line)
    visible = redact(clean)
    if visible.strip() and visible == clean and mark.column <= 100:
        number, caret = str(mark.line), "^" * max(1, min(mark.width, 100 - mark.column + 1))
        cut = visible if len(visible) <= 100 else visible[:99] + "…"
        out += [f"  {number} | {cut}".rstrip(), f"  {' ' * len(number)} | {' ' * (mark.column - 1)}{caret}"]
    elif visible != clean:
        out.append(f"  {mark.line} | {visible if len(visible) <= 100 else visible[:99] + '…'}".rstrip())
    for label, text in (("allowed", problem.allowed), ("because", problem.because), ("hint", problem.hint)):
        if text:
            out.append(f"  {label}: {text}")
    return "\n".join(out)


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed file: its path as it is shown, its text, its tree, and problems that did not stop the parsing."""

    path: str
    text: str
    root: Node
    problems: tuple[Problem, ...] = ()

    def locate(self, path: Sequence[PathElement], *, key: bool = False) -> tuple[FieldPath, Node, Mark]:
        """The deepest value that exists along ``path``, its own path, and its mark (of its key with ``key``).

        Elements that are not in the file (a validator's union tags, a missing key at the end) are skipped.
        """
        node, found, mark = self.root, [], Mark()
        for element in path:
            child = node.child(element)
            if child is None:
                continue
            mark = node.keys.get(element, child.mark) if key and isinstance(element, str) else child.mark
            node = child
            found.append(element)
        return tuple(found), node, mark

    def line_of(self, *path: PathElement) -> int:
        """The line (from 1) of the key or item at ``path``, or of the nearest thing above it that exists."""
        return self.locate(path, key=True)[2].line


def read_text(path: Path) -> str:
    """The text of a file a person wrote. Raises `UsageError` if there is none, it is too large or not UTF-8."""
    try:
        if not path.is_file():
            raise UsageError(
                f"`{path}` is not a file" if path.exists() else f"`{path}` does not exist",
                hint="`builder list` shows the matrices that are there" if path.suffix in {".yaml", ".yml"} else "",
            )
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise UsageError(f"{shown(path)} cannot be read", because=reason) from error
    if len(raw) > MAX_BYTES:
        raise UsageError(f"`{path}` is too large", because=f"it has more than {MAX_BYTES} bytes (1 MiB)")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode("utf-8-sig", "replace")
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        message = f"byte 0x{error.object[error.start]:02x} is not UTF-8"
        raise SourceError(str(path), "", [Problem(mark, message, hint="save the file as UTF-8")]) from error


def read_source(path: Path) -> Source:
    """The tree of the YAML file at ``path``. Raises `UsageError`."""
    return parse_source(str(path), read_text(path))


def parse_source(path: str, text: str) -> Source:
    """The tree of ``text``; ``path`` is only for messages. Raises `SourceError` where YAML itself is not respected."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise UsageError(f"`{path}` is too large", because=f"it has more than {MAX_BYTES} bytes (1 MiB)")
    builder = _Builder()
    try:
        root = builder.document(YAML(typ="safe", pure=True).parse(text))
    except _Refused as refused:
        raise SourceError(path, text, [*builder.problems, refused.problem]) from None
    except ReaderError as error:
        before = text[: error.position]
        mark = Mark(before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        code = error.character if isinstance(error.character, int) else ord(str(error.character)[:1] or "\0")
        message = f"character U+{code:04X} is not allowed in YAML"
        raise SourceError(path, text, [Problem(mark, message, hint="remove it")]) from error
    except MarkedYAMLError as error:
        raise SourceError(path, text, [*builder.problems, _syntax_problem(error)]) from error
    except (YAMLError, ValueError, IndexError, AssertionError, AttributeError, TypeError, RecursionError) as error:
        # ruamel.yaml lets a few of these out on malformed escapes and directives.
        message = f"not valid YAML ({type(error).__name__})"
        raise SourceError(path, text, [Problem(Mark(), message)]) from error
    return Source(path, text, root, tuple(builder.problems))


def _syntax_problem(error: MarkedYAMLError) -> Problem:
    place = error.problem_mark or error.context_mark
    mark = Mark(place.line + 1, place.column + 1) if place is not None else Mark()
    reason = " ".join(str(error.problem or error.context or "syntax error").split())
    if "'\\t'" in reason or "tab" in reason.lower():
        return Problem(mark, "a tab where YAML wants spaces", hint="indent with spaces")
    hint = "quote a value that has `: ` or ` #` in it" if "mapping values are not allowed" in reason else ""
    return Problem(mark, f"not valid YAML: {reason}", hint=hint)


class _Refused(Exception):
    """A part of YAML that is not read here; nothing after it is looked at."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


class _Builder:
    """Events to nodes, with limits; problems that leave a usable tree are collected in ``problems``."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self._nodes = 0

    def document(self, events: Iterator[yaml_events.Event]) -> Node:
        root: Node | None = None
        for event in events:
            if isinstance(event, yaml_events.DocumentStartEvent):
                if event.version is not None and tuple(event.version) != (1, 2):
                    raise _Refused(Problem(_mark(event), "only YAML 1.2 is read", hint="remove the `%YAML` line"))
                if root is not None:
                    hint = "one matrix is one file: remove the `---` line"
                    raise _Refused(Problem(_mark(event), "a second YAML document", hint=hint))
            elif isinstance(event, yaml_events.NodeEvent):
                root = self._node(event, events, 0, ())
        if root is None or root.value is None:
            raise _Refused(Problem(Mark(), "the file is empty"))
        return root

    def _node(self, event: yaml_events.Event, events: Iterator[yaml_events.Event], depth: int, path: FieldPath) -> Node:
        mark = _mark(event)
        self._nodes += 1
        if depth > MAX_DEPTH:
            raise _Refused(Problem(mark, f"nested more than {MAX_DEPTH} deep"))
        if self._nodes > MAX_NODES:
            raise _Refused(Problem(mark, f"more than {MAX_NODES} values"))
        if isinstance(event, yaml_events.AliasEvent) or getattr(event, "anchor", None) is not None:
            hint = "write the value out where it is needed"
            raise _Refused(Problem(mark, "anchors and aliases (`&`, `*`) are not read", hint=hint))
        if _tagged(event):
            raise _Refused(Problem(mark, "tags (`!`) are not read", hint="remove the tag; quote what must be a string"))
        if isinstance(event, yaml_events.MappingStartEvent):
            return self._mapping(mark, events, depth, path)
        if isinstance(event, yaml_events.SequenceStartEvent):
            return self._sequence(mark, events, depth, path)
        assert isinstance(event, yaml_events.ScalarEvent)
        text = str(event.value)
        return Node(mark, _resolve(text) if event.style in (None, "") else text, text)

    def _sequence(self, mark: Mark, events: Iterator[yaml_events.Event], depth: int, path: FieldPath) -> Node:
        items: list[Node] = []
        while not isinstance(event := next(events), yaml_events.SequenceEndEvent):
            item = self._node(event, events, depth + 1, (*path, len(items)))
            if item.value is None:
                self._empty(item.mark, (*path, len(items)))
            items.append(item)
        return Node(mark, tuple(items))

    def _mapping(self, mark: Mark, events: Iterator[yaml_events.Event], depth: int, path: FieldPath) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Mark] = {}
        while not isinstance(event := next(events), yaml_events.MappingEndEvent):
            if not isinstance(event, yaml_events.ScalarEvent):
                raise _Refused(
                    Problem(_mark(event), "a key has to be a word", hint="quote it if it holds `[`, `{` or `?`")
                )
            key = self._node(event, events, depth + 1, path)
            value = self._node(next(events), events, depth + 1, (*path, key.text))
            if key.text in values:
                name = field_name((*path, key.text))
                hint = f"it is first set on line {keys[key.text].line}: keep one of the two"
                self.problems.append(Problem(key.mark, f"{shown(name)} is set twice", name, hint=hint))
                continue
            if value.value is None:
                self._empty(key.mark, (*path, key.text))
            values[key.text], keys[key.text] = value, key.mark
        return Node(mark, values, keys=keys)

    def _empty(self, mark: Mark, path: FieldPath) -> None:
        name = field_name(path)
        hint = "give it a value (`{}` for an empty mapping), or remove it"
        self.problems.append(Problem(mark, f"{shown(name)} has no value", name, hint=hint))


def _mark(event: yaml_events.Event) -> Mark:
    start, end = event.start_mark, event.end_mark
    if start is None:
        return Mark()
    width = end.column - start.column if end is not None and end.line == start.line else 1
    return Mark(start.line + 1, start.column + 1, max(1, width))


def _tagged(event: yaml_events.Event) -> bool:
    """Whether the writer gave a tag (ruamel.yaml sets none on implicit ones in parse events)."""
    return getattr(event, "tag", None) is not None


def _resolve(text: str) -> str | int | float | bool | None:
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text) and len(text) <= 18:
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
