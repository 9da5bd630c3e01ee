"""A user's own unified diff: without fuzz, without offset, and only on files that the wheel has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from builder.errors import IntegrityError, UsageError
from builder.files import sha256_hex
from builder.matrix import UserDiff
from builder.patches.source import Source

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
# What git says of a file besides its lines; each would change more than the text of a file that is there.
_REFUSED = {
    b"rename from ": "renames a file",
    b"copy from ": "copies a file",
    b"new file mode": "makes a file",
    b"deleted file mode": "removes a file",
    b"old mode": "changes a file's mode",
    b"GIT binary patch": "is binary",
    b"Binary files ": "is binary",
}


@dataclass
class _Hunk:
    """A hunk: where it starts in the old file (line, from 1), and its lines: place in the diff, kind, text with its end."""

    number: int
    start: int
    old: int
    new: int
    lines: list[tuple[int, bytes, bytes]] = field(default_factory=list)


@dataclass
class _FileDiff:
    """The hunks of one file."""

    file: str
    hunks: list[_Hunk] = field(default_factory=list)


def apply(diff: UserDiff, folder: Path, wheel: Source, contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that ``diff`` changes, and what they become. ``contents`` are those that are changed already.

    Raises `IntegrityError` for a diff with another sha256, `UsageError` for one that does not apply.
    """
    path = folder / diff.file
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError("the diff cannot be read", where=str(path), because=str(error.strerror)) from error
    if (found := sha256_hex(data)) != diff.sha256:
        raise IntegrityError(
            "the diff is not the one that the matrix pins",
            where=str(path),
            because=f"wanted sha256 {diff.sha256}\ngot    sha256 {found}",
            hint="where the change is yours, write the new sha256 into the matrix",
        )
    changed: dict[str, bytes] = {}
    for item in _parse(data, path):
        if item.file not in wheel.entries or item.file.startswith(f"{wheel.info}/"):
            raise UsageError(f"`{wheel.path.name}` has no file `{item.file}`", where=str(path), hint=_PATHS)
        before = changed.get(item.file, contents.get(item.file))
        changed[item.file] = _apply(item, wheel.read(item.file) if before is None else before, path)
        _check_text(item.file, changed[item.file], path)
    return changed


_PATHS = "paths are as in the wheel, with `a/` and `b/` in front"


def _check_text(file: str, data: bytes, path: Path) -> None:
    """Reports and diffs are UTF-8, and Python has to parse."""
    try:
        data.decode()
        if file.endswith(".py"):
            ast.parse(data)
    except UnicodeDecodeError as error:
        raise UsageError(f"with the diff `{file}` is not UTF-8", where=str(path), because=str(error)) from None
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"with the diff `{file}` does not parse", where=str(path), because=str(error)) from None


def _parse(data: bytes, path: Path) -> list[_FileDiff]:
    """The files and hunks of a unified diff. Raises `UsageError` for anything else than changed lines."""
    found: list[_FileDiff] = []
    lines = iter(enumerate(data.removesuffix(b"\n").split(b"\n"), 1))
    old = b""
    for number, line in lines:
        where = f"{path}:{number}"
        for start, what in _REFUSED.items():
            if line.startswith(start):
                raise UsageError(
                    f"the diff {what}", where=where, because="a diff may change lines of files that are there"
                )
        if line.startswith(b"--- "):
            old = line
        elif line.startswith(b"+++ "):
            found.append(_FileDiff(_name(old, line, where)))
        elif line.startswith(b"@@"):
            if not found:
                raise UsageError("the diff has a hunk of no file", where=where, hint="it has to be a unified diff")
            found[-1].hunks.append(_hunk(line, number, lines, path))
        elif line.startswith(b"\\") and found and found[-1].hunks:
            _without_end(found[-1].hunks[-1])
    if not found or not all(item.hunks for item in found):
        raise UsageError("the diff changes nothing", where=str(path), hint="it has to be a unified diff")
    return found


def _name(old: bytes, new: bytes, where: str) -> str:
    names = []
    for line, prefix in ((old, b"a/"), (new, b"b/")):
        name = line[4:].split(b"\t")[0].rstrip(b"\r ").decode("utf-8", errors="replace")
        if name == "/dev/null":
            raise UsageError(
                "the diff makes or removes a file",
                where=where,
                because="a diff may change lines of files that are there",
            )
        names.append(name.removeprefix(prefix.decode()))
    if names[0] != names[1]:
        raise UsageError(f"the diff is of two files, `{names[0]}` and `{names[1]}`", where=where, hint=_PATHS)
    return names[1]


def _hunk(head: bytes, number: int, lines: Iterator[tuple[int, bytes]], path: Path) -> _Hunk:
    parsed = _HUNK.match(head)
    if parsed is None:
        raise UsageError(
            "the diff has a hunk without its place", where=f"{path}:{number}", hint="as in `@@ -3,4 +3,5 @@`"
        )
    old, new = (1 if parsed[i] is None else int(parsed[i]) for i in (2, 4))
    # A hunk without old lines names the line that it comes behind.
    hunk = _Hunk(number, int(parsed[1]) + (old == 0), old, new)
    while old > 0 or new > 0:
        number, line = next(lines, (number, None))
        kind, text = (b" ", b"") if line == b"" else (line[:1], line[1:]) if line is not None else (b"", b"")
        if line is None or kind not in (b" ", b"-", b"+", b"\\"):
            raise UsageError("the diff's hunk is cut short", where=f"{path}:{number}")
        if kind == b"\\":
            _without_end(hunk)
            continue
        old -= kind in (b" ", b"-")
        new -= kind in (b" ", b"+")
        hunk.lines.append((number, kind, text + b"\n"))
    if old or new:
        raise UsageError("the diff's hunk has more lines than it says", where=f"{path}:{hunk.number}")
    return hunk


def _without_end(hunk: _Hunk) -> None:
    """`\\ No newline at end of file` is about the line before it."""
    if hunk.lines:
        number, kind, text = hunk.lines[-1]
        hunk.lines[-1] = (number, kind, text.removesuffix(b"\n"))


def _apply(item: _FileDiff, before: bytes, path: Path) -> bytes:
    lines = _lines(before)
    after: list[bytes] = []
    at = 0
    for hunk in item.hunks:
        start = hunk.start - 1
        if start < at:
            raise UsageError("the diff's hunks are not in order", where=f"{path}:{hunk.number}")
        after += lines[at:start]
        at = start
        for number, kind, text in hunk.lines:
            if kind == b"+":
                after.append(text)
                continue
            if at >= len(lines) or lines[at] != text:
                raise _differs(item.file, path, number, at, text, lines)
            if kind == b" ":
                after.append(text)
            at += 1
    return b"".join([*after, *lines[at:]])


def _lines(data: bytes) -> list[bytes]:
    """Lines with their ends; the last one has none where the file ends without."""
    *whole, rest = data.split(b"\n")
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def _differs(file: str, path: Path, number: int, at: int, text: bytes, lines: list[bytes]) -> UsageError:
    got = repr(lines[at].decode("utf-8", errors="replace")) if at < len(lines) else f"the end of its {len(lines)} lines"
    return UsageError(
        f"the diff does not apply to `{file}`",
        where=f"{path}:{number}",
        because=f"line {at + 1} has to be {text.decode('utf-8', errors='replace')!r}\nbut it is {got}",
        hint="it is applied without fuzz or offset, after the patch sets: make it again from the file as it is",
    )
