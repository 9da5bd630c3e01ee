"""What a case of `behaviour` is, and what it works with: the installed modules, and upstream's before they were patched.

Standard library only: cases are listed by the check and run in its child, where torch and the patched packages are.
"""

from __future__ import annotations

import importlib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """What was done, what has to come of it, and what came of it; the last two are words that a finding can hold."""

    what: str
    expected: str
    got: str


@dataclass(frozen=True)
class Installed:
    """What the image has: ``sites`` hold (patched, or upstream's own), ``patched`` are those of ours.

    ``arch`` is FLASHINFER_CUDA_ARCH_LIST of the process; ``before`` has upstream's text of each file of a report, ``file_of``
    a file of each site: releases do not all have a site in the same one.
    """

    sites: frozenset[str]
    patched: frozenset[str]
    arch: str
    before: Mapping[str, str]
    file_of: Mapping[str, str]

    def module(self, file: str) -> ModuleType:
        """The installed module of a file. Raises what its import raises."""
        return importlib.import_module(dotted(file))

    def again(self, file: str) -> ModuleType:
        """The installed module of a file once more, beside the one that imports find: with nothing that it remembers."""
        return self._made(file, "again", Path(str(self.module(file).__file__)).read_text(encoding="utf-8-sig"))

    def upstream(self, file: str) -> ModuleType:
        """The module that upstream's file makes, beside the installed one and in its place in the package."""
        return self._made(file, "upstream's", self.before[file])

    def _made(self, file: str, which: str, text: str) -> ModuleType:
        name = dotted(file)
        made = ModuleType(name)
        made.__package__ = name.rpartition(".")[0]
        # Its source is known under a name of its own: Triton and dataclasses read it back.
        shown = f"<{which} {file}>"
        made.__file__ = shown
        linecache.cache[shown] = (len(text), None, text.splitlines(keepends=True), shown)
        exec(compile(text, shown, "exec"), made.__dict__)  # noqa: S102 - to see what it does is what it is for
        return made

    def stand_in(self, file: str) -> None:
        """Let later imports find upstream's module of a file instead of the installed one."""
        sys.modules[dotted(file)] = self.upstream(file)


@dataclass(frozen=True)
class Case:
    """Something that code of the image does, seen without a GPU. It runs where all of ``sites`` hold, and proves them.

    ``imports`` are imported once for all cases, before each runs in a process of its own: a case may change what it likes.
    ``ours``: it is about our own patch, and does not run where upstream has a remedy of another shape.
    """

    name: str
    sites: tuple[str, ...]
    run: Callable[[Installed], Iterator[Comparison]]
    imports: tuple[str, ...] = ()
    ours: bool = False


def outcome(call: Callable[..., Any], *arguments: object) -> str:
    """What a call returns, or the kind and words of what it raises."""
    try:
        return str(call(*arguments))
    except Exception as error:  # noqa: BLE001 - what it raises is the answer
        return f"{type(error).__name__}: {error}"


def dotted(file: str) -> str:
    """The name of a file's module."""
    return file[: -len(".py")].replace("/", ".")
