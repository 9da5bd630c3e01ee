"""An image of a lock that no matrix resolved to: rendered and built as any, past the rules, tagged with its digest alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from uv import find_uv_bin

from builder.build import Prepared, build_image
from builder.engine import Engine, connect, find_buildx
from builder.lock import Lock
from builder.matrix import LoadedMatrix
from builder.render import render
from builder.settings import Settings


def build_lock(loaded: LoadedMatrix, lock: Lock, settings: Settings) -> tuple[Engine, str]:
    """Build the image of a lock; the engine and the image's id. Raises what a build raises."""
    engine = connect()
    engine.require()
    matrix = loaded.matrix.model_copy(update={"name": lock.matrix})
    rendered = render(matrix, lock, Path(find_uv_bin()))
    prepared = Prepared(replace(loaded, matrix=matrix), lock, rendered, [])
    return engine, build_image(prepared, engine, find_buildx(), settings).id
