"""`builder bake`: from the words of the command line to what is printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder.bake import bake, print_text
from builder.bakefile import INLINE, Cache
from builder.builders import inspected, place_of
from builder.errors import UsageError
from builder.matrix import find_matrix, list_matrices, load
from builder.settings import Settings


def bake_verb(arguments: argparse.Namespace, settings: Settings, matrices: Path) -> int:
    """Run it and print. The exit status is 0 if all are fine, else that of the failed if they agree, else the smallest."""
    paths = _found(arguments.matrices, matrices) or list_matrices(matrices)
    if not paths:
        raise UsageError("there is no matrix to bake", where=str(matrices))
    cache = Cache(arguments.cache_to, tuple(arguments.cache_from))
    if cache.to == INLINE and not arguments.push:
        hint = "add `--push REGISTRY/NAME`, or keep it in a registry: `--cache-to REGISTRY/NAME`"
        raise UsageError("`--cache-to inline` without `--push`", because="it goes where its image is pushed", hint=hint)
    if arguments.show:
        layouts = arguments.builder is not None and inspected(arguments.builder)[0] != "docker"
        text, baked = print_text(paths, settings, cache, layouts=layouts)
        print("\n".join(baked.reasons()), end="", file=sys.stderr)
        print(text, end="")
        return baked.exit_code
    _require_readable(paths)
    push = _push(arguments)
    with place_of(arguments.builder) as place:
        baked = bake(paths, settings, place, cache, push=push)
    print(json.dumps(baked.as_json(), indent=2, ensure_ascii=False) if arguments.json else baked.as_text())
    return baked.exit_code


def _found(names: Sequence[str], matrices: Path) -> list[Path]:
    """The matrices of these names. Raises `UsageError` that says all that are none."""
    found: list[Path] = []
    errors: list[UsageError] = []
    for name in names:
        try:
            found.append(find_matrix(name, matrices))
        except UsageError as error:
            errors.append(error)
    if len(errors) > 1:
        lines = [f"{error.what}{f' ({error.hint})' if error.hint else ''}" for error in errors]
        raise UsageError(f"{len(errors)} of the matrices are not there", because="\n".join(lines))
    if errors:
        raise errors[0]
    return found


def _require_readable(paths: Sequence[Path]) -> None:
    """Raise `UsageError` where none of the files is a matrix: that takes no builder to say. One that is none loses no other."""
    errors: list[UsageError] = []
    for path in paths:
        try:
            load(path)
        except UsageError as error:
            errors.append(error)
        else:
            return
    if len(errors) > 1:
        lines = [f"{error.what}{f' ({error.where})' if error.where else ''}" for error in errors]
        raise UsageError(f"none of the {len(errors)} files is a matrix", because="\n".join(lines))
    raise errors[0]


def _push(arguments: argparse.Namespace) -> dict[str, Any] | None:
    if not arguments.push:
        return None
    from builder.registry.reference import Reference

    Reference.parse(arguments.push)
    return {"target": arguments.push, "key": arguments.key, "plain_http": arguments.plain_http, "moving_tag": True}
