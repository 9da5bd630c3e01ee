"""Which of a release's model classes can be the target of EAGLE-3, and why the others cannot.

Everything is read in the source: the classes that `EntryClass` of a module in `sglang/srt/models` names, their bases as
far as these are in that folder, and the methods that EAGLE-3's workers call on the target. That a class has them is necessary; it
does not prove that a draft works with it.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from builder.patches.classes import At, Class, Classes
from builder.patches.engine import Reader
from builder.smoke.post_base import KIMI, LAYERS

HOOKS = ("get_embed_and_head", "set_embed_and_head", LAYERS)
"""The interface that upstream gives a target: shared/facts/patches.md section A2, E1 to E3."""
CALLED = ("get_embed_and_head", LAYERS)
"""What the workers call on a target; the third they call on the draft alone (0.5.6.post2 to 0.5.23, read 2026-11-30)."""

FOLDER = "sglang/srt/models/"

_DRAFTS = ("eagle", "mtp", "nextn", "dflash")
"""In the names of draft classes."""
_PADS = "pad_input_ids"
"""What every multimodal class has: it makes room for the placeholders in a prompt."""
_ROUTINE = "general_mm_embed_routine"
"""Returns what ``language_model`` returns, in every release from 0.5.6.post2 to 0.5.23 (managers/mm_utils.py)."""
_AUX = "aux_hidden_states"
"""What a `forward` calls the hidden states that a draft takes."""


class Kind(StrEnum):
    """What a model class is to EAGLE-3."""

    WRAPS = "wraps"
    """lacks a method that is called on it, and holds a language model that has them"""
    CAPABLE = "capable"
    """has what is called on it"""
    LACKS = "lacks"
    DRAFT = "draft"


class Passes(StrEnum):
    """Whether what a class returns comes out of its language model's `forward`, which hands out the hidden states."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Inner:
    """The language model in a class: its attribute, and the classes it may be of; none where that is decided later."""

    attribute: str
    classes: tuple[str, ...]
    capable: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """A registered class. ``passes`` is given for wrappers, ``edit`` where a patch set gives it the methods."""

    name: str
    file: str
    kind: Kind
    multimodal: bool
    missing: tuple[str, ...]
    inner: Inner | None = None
    passes: Passes | None = None
    edit: str | None = None


_MEANING = {
    Kind.WRAPS: "lack a method, and hold a language model that has it: methods that hand on to it are enough "
    "where `forward` passes through it",
    Kind.CAPABLE: "have the methods; that a draft works with them is not shown by that",
    Kind.LACKS: "lack a method, and no language model that has it was found in them",
    Kind.DRAFT: "models that draft, by their names",
}
_PASSING = {
    Passes.YES: "`forward` passes through it",
    Passes.NO: "`forward` does not pass through it: handing on is not enough",
    Passes.UNKNOWN: "whether `forward` passes through it is not known",
}


def _lines(row: Row) -> Iterator[str]:
    missing = "all three" if len(row.missing) == len(HOOKS) else ", ".join(row.missing)
    told = f"  lacks {missing}" if missing and row.kind is not Kind.DRAFT else ""
    yield f"  {row.name}  {row.file.removeprefix(FOLDER)}{told}"
    if row.inner is not None:
        able, unable = row.inner.capable, [name for name in row.inner.classes if name not in row.inner.capable]
        what = [" or ".join(able)] if able else []
        what += [f"{' or '.join(unable)}, which cannot{' either' if not able else ''}"] if unable else []
        yield (
            f"      `{row.inner.attribute}` is {', or '.join(what) or 'of a class that is chosen when it runs'}"
            + (f"; {_PASSING[row.passes]}" if row.passes is not None else "")
        )
    if row.edit is not None:
        yield f"      the patch set `{row.edit}` adds them"


@dataclass(frozen=True)
class ModelTable:
    """The registered classes of a release, wrappers first. ``unread`` are modules that do not parse."""

    rows: tuple[Row, ...]
    unread: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each; of drafts only the first number tells."""
        rest = [row for row in self.rows if row.kind is not Kind.DRAFT]
        lacking = [row for row in rest if row.kind is not Kind.CAPABLE]
        return {
            "registered": len(self.rows),
            "non_draft": len(rest),
            **{f"lack_{name}": sum(name in row.missing for row in rest) for name in HOOKS},
            "have_all": sum(not row.missing for row in rest),
            "capable": len(rest) - len(lacking),
            "lacking": len(lacking),
            "multimodal": sum(row.multimodal for row in rest),
            "multimodal_lacking": sum(row.multimodal for row in lacking),
            "multimodal_wraps": sum(row.multimodal for row in rest if row.kind is Kind.WRAPS),
        }

    def as_json(self) -> dict[str, Any]:
        """The table as data."""
        return {
            "counts": self.counts,
            "models": [
                {
                    "class": row.name,
                    "file": row.file,
                    "state": row.kind.value,
                    "multimodal": row.multimodal,
                    "missing": list(row.missing),
                    "inner": None
                    if row.inner is None
                    else {
                        "attribute": row.inner.attribute,
                        "classes": list(row.inner.classes),
                        "capable": list(row.inner.capable),
                    },
                    "passes_through": row.passes and row.passes.value,
                    "edit": row.edit,
                }
                for row in self.rows
            ],
            "unread": list(self.unread),
        }

    def as_text(self) -> str:
        """The table for people: the numbers, then each kind with its classes."""
        counts = self.counts
        drafts = counts["registered"] - counts["non_draft"]
        lacks = ", ".join(f"`{name}` {counts[f'lack_{name}']}" for name in HOOKS)
        lines = [
            f"{counts['registered']} model classes, {drafts} of them drafts; of the other {counts['non_draft']}, "
            + f"{counts['capable']} have the methods that EAGLE-3 calls on its target, {counts['lacking']} lack one",
            f"  by method: {lacks} lack it; {counts['have_all']} have all three",
            f"  multimodal: {counts['multimodal']}; {counts['multimodal_lacking']} lack one, "
            + f"{counts['multimodal_wraps']} of these hold a language model that has them",
        ]
        for kind in Kind:
            rows = [row for row in self.rows if row.kind is kind]
            lines += ["", f"{kind}, {len(rows)}: {_MEANING[kind]}"] if rows else []
            lines += [line for row in rows for line in _lines(row)]
        if self.unread:
            lines += ["", "not read, they do not parse:", *(f"  {file}" for file in self.unread)]
        return "\n".join(lines)


def model_table(read: Reader, names: Sequence[str]) -> ModelTable:
    """The registered classes of the sglang whose files are ``names`` (relative to site-packages)."""
    models = Classes(read, names, FOLDER)
    order = list(Kind)
    # 250 syntax trees are millions of objects: with the collector on, it takes three times as long (0.5.23: 3.1 s for 1.0 s).
    collecting = gc.isenabled()
    gc.disable()
    try:
        rows = [_row(models, klass) for klass in _registered(models)]
    finally:
        if collecting:
            gc.enable()
    rows.sort(key=lambda row: (order.index(row.kind), row.name))
    return ModelTable(tuple(rows), tuple(sorted(models.unread)))


def _registered(models: Classes) -> Iterator[Class]:
    """What sglang's registry takes: `EntryClass` of the modules that lie in the folder itself."""
    for file in models.files:
        if "/" not in file.removeprefix(FOLDER) and "EntryClass" in models.text(file):
            yield from models.denoted(ast.Name("EntryClass"), At(file))


def _row(models: Classes, klass: Class) -> Row:
    name = klass.name
    missing = tuple(hook for hook in HOOKS if not _has(models, klass, hook))
    found = Row(name, klass.file, Kind.CAPABLE, _has(models, klass, _PADS), missing)
    if any(word in name.lower() for word in _DRAFTS):
        return replace(found, kind=Kind.DRAFT)
    if not set(CALLED) & set(missing):
        return found
    inner, passes = _inner(models, klass)
    if passes is None:
        return replace(found, kind=Kind.LACKS, inner=inner)
    edit = "eagle3" if name == KIMI and passes is Passes.YES else None
    return replace(found, kind=Kind.WRAPS, inner=inner, passes=passes, edit=edit)


def _has(models: Classes, klass: Class, name: str) -> bool:
    if models.member(klass, name) is not None:
        return True
    _, behind = _stands_for(models, klass)
    return bool(behind) and all(_has(models, each, name) for each in behind)


def _capable(models: Classes, klass: Class) -> bool:
    return all(_has(models, klass, hook) for hook in CALLED)


def _stands_for(models: Classes, klass: Class) -> tuple[str, list[Class]]:
    """The attribute that a class hands everything on to by `__getattr__`, and of which classes that is."""
    found = models.member(klass, "__getattr__")
    for node in ast.walk(found[1]) if found is not None and isinstance(found[1], ast.FunctionDef) else ():
        # `getattr(self.ATTRIBUTE, name)`
        match node:
            case ast.Return(ast.Call(ast.Name("getattr"), [ast.Attribute(ast.Name("self"), attribute), ast.Name()])):
                return attribute, models.holds(klass).get(attribute, [])
    return "", []


def _inner(models: Classes, klass: Class) -> tuple[Inner | None, Passes | None]:
    """The language model in a class; whether `forward` passes through it, where it may be of a capable class."""
    attribute, behind = _stands_for(models, klass)
    owners = behind or [klass]
    held: dict[str, list[Class]] = {}
    for owner in owners:
        for name, classes in models.holds(owner).items():
            known = held.setdefault(name, [])
            known.extend(each for each in classes if each not in known)
    able = {name: [each for each in classes if _capable(models, each)] for name, classes in held.items()}
    # Under these names a class holds its language model also where that has not got the methods, or is not known.
    named = next((name for name in ("language_model", "llm") if name in held), None)
    found = next((name for name, classes in able.items() if classes), named)
    if found is None:
        return None, None
    path = f"{attribute}.{found}" if behind else found
    inner = Inner(path, tuple(each.name for each in held[found]), tuple(each.name for each in able[found]))
    if not able[found]:
        return inner, None
    passing = [_passes(models, owner, found) for owner in owners]
    return inner, _all([*passing, *(_hands_out(models, each) for each in able[found])])


def _all(found: Iterable[Passes]) -> Passes:
    """Yes if there are some and all are; no if one is."""
    every = set(found)
    if Passes.NO in every:
        return Passes.NO
    return Passes.YES if every == {Passes.YES} else Passes.UNKNOWN


def _hands_out(models: Classes, klass: Class) -> Passes:
    """Whether the `forward` of a language model has a name for the hidden states that it hands out."""
    found = models.member(klass, "forward")
    function = None if found is None else found[0].function
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} if function is not None else set()
    return Passes.YES if _AUX in names else Passes.UNKNOWN


def _passes(models: Classes, klass: Class, attribute: str) -> Passes:
    """Whether `forward` returns nothing but what `forward` of ``attribute`` returned."""
    found = models.member(klass, "forward")
    return Passes.UNKNOWN if found is None else _returned(models, found[0], f"self.{attribute}", 4)


def _returned(models: Classes, at: At, inner: str, depth: int) -> Passes:
    if at.function is None or depth == 0:
        return Passes.UNKNOWN
    returns = [node.value for node in ast.walk(at.function) if isinstance(node, ast.Return) and node.value is not None]
    return _all(_comes_from(models, at, at.function, value, inner, depth) for value in returns)


def _comes_from(models: Classes, at: At, function: ast.FunctionDef, value: ast.expr, inner: str, depth: int) -> Passes:
    """Whether a value in a function is what ``inner`` returned when it was called."""
    if isinstance(value, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [value.id]
        ]
        stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        if len(assigned) != sum(node.id == value.id for node in stored):
            return Passes.UNKNOWN
        return _all(_comes_from(models, at, function, each, inner, depth) for each in assigned)
    if not isinstance(value, ast.Call):
        return Passes.UNKNOWN
    func = ast.unparse(value.func)
    if func.split(".")[-1] == _ROUTINE:
        given = [ast.unparse(item.value) for item in value.keywords if item.arg == "language_model"]
        return Passes.YES if given == [inner] else Passes.NO
    if func in (inner, f"{inner}.forward"):
        return Passes.YES
    called = models.called(value.func, at)
    if called is not None:
        return _returned(models, called, inner, depth - 1)
    return Passes.NO if func.startswith("self.") else Passes.UNKNOWN
