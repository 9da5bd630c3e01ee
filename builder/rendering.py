"""`builder render`: the Dockerfile, or what differs from the one of the last build."""

from __future__ import annotations

import difflib
from pathlib import Path

from uv import find_uv_bin

from builder.errors import UsageError
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import load
from builder.render import less_secrets, render
from builder.settings import load as settings


def render_verb(path: Path, *, diff: bool) -> str:
    """The text to print: empty where a diff has nothing to show."""
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    rendered = render(loaded.matrix, lock, Path(find_uv_bin()))
    if not diff:
        return rendered.dockerfile
    last = settings().cache / "contexts" / loaded.matrix.name / "Dockerfile"
    try:
        before = last.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"`{loaded.matrix.name}` was not built here yet",
            where=str(last),
            hint=f"without `--diff` the whole Dockerfile is printed: `builder render {loaded.matrix.name}`",
        ) from None
    # Which secrets a site has is no difference: a build mounts those alone.
    then, now = (less_secrets(text).splitlines(keepends=True) for text in (before, rendered.dockerfile))
    lines = difflib.unified_diff(then, now, "last build", "now")
    return "".join(lines)
