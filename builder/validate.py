"""A YAML tree against a pydantic model: the one place where pydantic's errors become plain words with a place."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from builder.fields import Complaint
from builder.nearest import nearest
from builder.yamlsource import FieldPath, Node, PathElement, Problem, Source, SourceError, field_name, shown

ModelT = TypeVar("ModelT", bound=BaseModel)

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def validate(model: type[ModelT], source: Source, given: Mapping[str, object] | None = None) -> ModelT:
    """``source`` as a ``model``, with values ``given`` from outside the file. Raises `SourceError` with all problems."""
    problems = list(source.problems)
    data = source.root.data()
    if not isinstance(data, dict):
        problems.append(Problem(source.root.mark, f"the file has to be a mapping, not {_kind(source.root)}"))
        raise SourceError(source.path, source.text, problems)
    for key in given or {}:
        if key in data:
            mark = source.locate((key,), key=True)[2]
            problems.append(
                Problem(mark, f"`{key}` is not written in the file", key, hint="it is taken from the file's name")
            )
    try:
        value = model.model_validate({**data, **(given or {})})
    except ValidationError as error:
        details = error.errors(include_url=False)
        problems += [problem for detail in details for problem in _problems(detail, source, model)]
        raise SourceError(source.path, source.text, problems) from None  # pydantic's own text shows inputs
    if problems:
        raise SourceError(source.path, source.text, problems)
    return value


def _kind(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, tuple):
        return "a list"
    if isinstance(node.value, bool):
        return "true or false"
    return "a number" if isinstance(node.value, int | float) else "text"


def _problems(detail: ErrorDetails, source: Source, model: type[BaseModel]) -> Iterator[Problem]:
    """The problems one pydantic error stands for; none where the YAML reader has said it already (an empty value)."""
    loc = detail["loc"]
    about_key = bool(loc) and loc[-1] == "[key]"
    path, node, _ = source.locate(loc[:-1] if about_key else loc)
    if node.value is None:
        return
    kind = detail["type"]
    if kind == "builder":
        for complaint in detail.get("ctx", {}).get("complaints", ()):
            yield _complaint(complaint, path, source, about_key)
        return
    name = field_name(path)
    mark = source.locate(path, key=about_key or kind == "extra_forbidden")[2]
    if kind == "extra_forbidden":
        known = _keys_at(model, loc)
        near = nearest(str(loc[-1]), known)
        hint = f"did you mean `{near}`" if near else ""
        yield Problem(mark, f"{shown(name)} is not a known key", name, ", ".join(known), hint=hint)
    elif kind == "missing":
        key_mark = source.locate(path, key=True)[2]
        missing = field_name((*path, str(loc[-1])))
        description = _description(model, loc)
        yield Problem(
            key_mark, f"`{missing}` is missing", missing, hint=f"add it: {description}" if description else ""
        )
    elif kind == "union_tag_not_found":
        tag = str(detail.get("ctx", {}).get("discriminator", "")).strip("'")
        text = (
            f"`{field_name((*path, tag))}` is missing"
            if isinstance(node.value, dict)
            else _wrong_kind(name, node, "a mapping")
        )
        allowed = ", ".join(_tags(model, loc, tag)) if isinstance(node.value, dict) else ""
        yield Problem(source.locate(path, key=True)[2], text, name, allowed)
    elif kind == "union_tag_invalid":
        context = detail.get("ctx", {})
        tag = str(context.get("discriminator", "")).strip("'")
        found, child, tag_mark = source.locate((*path, tag))
        yield _not_allowed(tag_mark, field_name(found), child, str(context.get("expected_tags", "")))
    elif kind == "literal_error":
        yield _not_allowed(mark, name, node, str(detail.get("ctx", {}).get("expected", "")).replace(" or ", ", "))
    elif kind in _WANTED:
        yield Problem(mark, _wrong_kind(name, node, _WANTED[kind]), name, hint=_quote_hint(node, _WANTED[kind]))
    else:
        text = detail["msg"][:1].lower() + detail["msg"][1:]
        yield Problem(mark, f"{shown(name)}: {text}", name, "", f"the value is {shown(node.text)}" if node.text else "")


def _complaint(complaint: Complaint, path: FieldPath, source: Source, about_key: bool) -> Problem:
    at = (*path, *complaint.at)
    mark = source.locate(at, key=about_key)[2]
    name = field_name(at)
    prefix = "" if not name or f"`{name}`" in complaint.message else f"`{name}`: "
    return Problem(mark, prefix + complaint.message, name, complaint.allowed, complaint.because, complaint.hint)


def _not_allowed(mark: Any, name: str, node: Node, expected: str) -> Problem:
    allowed = [part.strip(" '") for part in expected.split(",")]
    value = node.text or (node.value if not isinstance(node.value, dict | tuple) else _kind(node))
    if not isinstance(node.value, str) and node.text and node.text in allowed:
        return Problem(mark, _wrong_kind(name, node, "text"), name, ", ".join(allowed), hint=_quote_hint(node, "text"))
    near = nearest(str(value), allowed)
    hint = f"did you mean `{near}`" if near else ""
    return Problem(mark, f"{shown(name)}: {shown(value)} is not allowed", name, ", ".join(allowed), hint=hint)


def _wrong_kind(name: str, node: Node, wanted: str) -> str:
    if node.text and not isinstance(node.value, str):
        return f"{shown(name)}: {shown(node.text)} is read as {_kind(node)}, and has to be {wanted}"
    return f"{shown(name)} has to be {wanted}, not {_kind(node)}"


def _quote_hint(node: Node, wanted: str) -> str:
    return f'quote it: "{node.text}"' if wanted == "text" and node.text and not isinstance(node.value, str) else ""


def _models_in(annotation: object) -> list[type[BaseModel]]:
    """Every model inside an annotation: optional, union, container or annotated."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in typing.get_args(annotation) for found in _models_in(part)]


def _walk(model: type[BaseModel], path: Sequence[PathElement]) -> list[type[BaseModel]]:
    """The models that may stand at ``path``; union tags in it choose, indexes and mapping keys change nothing."""
    current = [model]
    for element in path:
        inner = [found for m in current for found in _models_in(_field(m, element))]
        tagged = [m for m in current if any(element in typing.get_args(f.annotation) for f in m.model_fields.values())]
        current = inner or tagged or current
    return current


def _field(model: type[BaseModel], key: PathElement) -> object:
    return next((f.annotation for n, f in model.model_fields.items() if (f.alias or n) == key), None)


def _keys_at(model: type[BaseModel], loc: Sequence[PathElement]) -> list[str]:
    hidden = {"name"} if len(loc) == 1 else set()
    return sorted({f.alias or n for m in _walk(model, loc[:-1]) for n, f in m.model_fields.items()} - hidden)


def _tags(model: type[BaseModel], loc: Sequence[PathElement], tag: str) -> list[str]:
    return sorted({str(v) for m in _walk(model, loc) for v in typing.get_args(_field(m, tag))})


def _description(model: type[BaseModel], loc: Sequence[PathElement]) -> str:
    """The description of the field at ``loc``, for a key that is missing."""
    for owner in _walk(model, loc[:-1]):
        for name, info in owner.model_fields.items():
            if (info.alias or name) == loc[-1] and info.description:
                return info.description
    return ""
