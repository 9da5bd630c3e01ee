"""Package lists: pip's, uv's and conda's, whole or cut, and install logs, with the Python that these name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from builder.reports import forms
from builder.reports.lines import Line
from builder.reports.model import Fact, Origin

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?"
_FREEZE = re.compile(
    rf"^\s*(?:\[(?:pip3?|conda)\]\s+)?([+~-]\s+)?({_NAME})==(\d[\w.!+-]{{0,60}})\s*(?:#.*|;.*|\\|\(.*|@\s.*)?$"
)
_DIRECT = re.compile(rf"^\s*(?:\[pip3?\]\s+)?({_NAME}) @ \w[\w+]{{0,15}}://")
_EGG = re.compile(rf"^\s*-e\s+\S{{1,300}}#egg=({_NAME})")
_INSTALLED = re.compile(r"^\s*Successfully installed\s+(\S.*)$")
_PAIR = re.compile(rf"({_NAME})-(\d[\w.!+]{{0,60}})")
_UV_PYTHON = re.compile(r"^\s*Using (?:Python|CPython) (3\.\d{1,2}(?:\.\d{1,2})?)(?=\s|$)")
_COLUMNS = re.compile(rf"^\s{{0,4}}({_NAME})\s{{1,80}}(v?\d[\w.!+-]{{0,60}})(?:\s{{1,80}}(\S.*))?$")
_CONDA = re.compile(
    rf"^\s*(?:\[conda\]\s+)?({_NAME})\s+(\d[\w.!+]{{0,60}})\s+([\w.]{{1,60}}|<pip>)(?:\s+([\w./-]{{1,80}}))?\s*$"
)
_HEADER = re.compile(
    r"^\s*(?:Package\s+Version(?:\s+Editable project location)?(?:\s+Build)?|# Name\s+Version\s+Build(?:\s+Channel)?)\s*$"
)
_RULE = re.compile(r"^\s*-{3,}\s+-{3,}(?:\s+-{3,})?\s*$")
_BUILD_STRING = re.compile(
    r"(?:py\d\.?\d{1,2}|pyh[0-9a-f]{7}|pypi_|h[0-9a-f]{7}|cuda|gpu|cpu|<pip>|\d+(?:_\w+)?(?=\s|$))"
)
_OF_PYTHON = re.compile(r"py|<pip>")
_TORCH_CUDA = re.compile(r"_cuda(\d{1,2}\.\d)_")
# What conda calls the distributions that have another name on the package index.
_CONDA_NAMES = {"pytorch": "torch"}


def packages(lines: Sequence[Line]) -> Iterator[Fact]:
    """One fact a package and list: `package.NAME`. Of an install log's `- a==1` and `+ a==2` the second counts."""
    columns = _column_lines(lines)
    for line in lines:
        if line.prompt:
            continue
        text = line.text
        if found := _UV_PYTHON.match(text):
            yield Fact("python", found[1], line=line.number, source="packages")
        elif found := _INSTALLED.match(text):
            yield from _installed(found[1], line)
        elif found := _FREEZE.match(text):
            if (found[1] or "").strip() == "-":
                continue
            yield from _fact(found[2], found[3], line)
        elif found := _DIRECT.match(text) or _EGG.match(text):
            # Where it was installed from may say who did, and no version is said.
            continue
        elif (found := _CONDA.match(text)) and (
            text.lstrip().startswith("[conda]") or (line.number in columns and _BUILD_STRING.match(found[3]))
        ):
            yield from _conda(found, line)
        elif line.number in columns and (found := _COLUMNS.match(text)):
            yield from _fact(found[1], found[2], line)


def _installed(words: str, line: Line) -> Iterator[Fact]:
    """The packages of pip's `Successfully installed a-1.0 b-2.0`, up to the first word that is none."""
    for word in words.split():
        found = _PAIR.fullmatch(word)
        if found is None:
            return
        yield from _fact(found[1], found[2], line)


def _conda(found: re.Match[str], line: Line) -> Iterator[Fact]:
    """A row of conda's: a distribution of Python's, Python itself, or a library, which no index of Python's has."""
    name, written, build = found[1], found[2], found[3]
    if not _OF_PYTHON.match(build) and name != "python" and name not in _CONDA_NAMES:
        return
    yield from _fact(_CONDA_NAMES.get(name, name), written, line, source="conda")
    if name in _CONDA_NAMES and (cuda := _TORCH_CUDA.search(build)):
        because = "its build's name in conda's list"
        yield Fact("torch_cuda", cuda[1], Origin.INFERRED, line.number, "conda", because)


def _fact(name: str, written: str, line: Line, source: str = "packages") -> Iterator[Fact]:
    package = forms.package(name)
    version = forms.release_of(package, written) if package else None
    if package == "python":
        # conda's own; no distribution is called so.
        if python := forms.python(written):
            yield Fact("python", python, line=line.number, source=source)
    elif package and version:
        yield Fact(f"package.{package}", version, line=line.number, source=source)


def _column_lines(lines: Sequence[Line]) -> set[int]:
    """The numbers of lines in two-column lists: after a header, or two and more of them in a row.

    One alone (`gcc 9.4.0`, `torch 2.9.1` in a sentence's place) says too little to be taken for a package.
    """
    found: set[int] = set()
    run: list[int] = []
    headed = False
    for line in [*lines, Line(0, "")]:
        if _HEADER.match(line.text):
            headed, run = True, []
            continue
        if headed and _RULE.match(line.text):
            continue
        if _row(line.text):
            run.append(line.number)
            continue
        if headed or len(run) >= 2:
            found |= set(run)
        run, headed = [], False
    return found


def _row(text: str) -> bool:
    """Whether a line looks like a list's: a name, a version, and at most a build, channel or an editable's place."""
    columns = _COLUMNS.match(text)
    if columns is None or forms.version(columns[2]) is None or columns[1].isdigit():
        return False
    rest = columns[3] or ""
    return (
        not rest
        or rest.startswith(("/", "~", "<", "file:"))
        or bool(_BUILD_STRING.match(rest))
        or len(rest.split()) == 1
    )
