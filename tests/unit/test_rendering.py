"""`builder render`: the Dockerfile, or what differs from the last build's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import rendering
from builder.errors import LockError, UsageError
from builder.lock import lock_path, write_lock
from builder.settings import Settings
from tests.made import TINY, artefact, lock_of, settings_at, tiny


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    write_lock(lock_of(tiny().matrix, artefact("idna", "3.7")), lock_path(path))

    def ours() -> Settings:
        return settings_at(tmp_path)

    monkeypatch.setattr(rendering, "settings", ours)
    yield path


def last(matrix: Path) -> Path:
    path = matrix.parent / "cache" / "contexts" / "tiny" / "Dockerfile"
    path.parent.mkdir(parents=True)
    return path


def test_the_whole_dockerfile(matrix: Path) -> None:
    text = rendering.render_verb(matrix, diff=False)
    assert text.startswith("# tiny: A tiny stack\n")
    assert text.endswith('"/opt/sglang-stack/builder/smoke/about.py"]\n')


def test_no_difference_is_no_output(matrix: Path) -> None:
    last(matrix).write_text(rendering.render_verb(matrix, diff=False))
    assert rendering.render_verb(matrix, diff=True) == ""


def test_a_difference(matrix: Path) -> None:
    text = rendering.render_verb(matrix, diff=False)
    last(matrix).write_text(text.replace("# tiny: A tiny stack\n", "# tiny: Before\n"))
    assert rendering.render_verb(matrix, diff=True).splitlines()[:5] == [
        "--- last build",
        "+++ now",
        "@@ -1,4 +1,4 @@",
        "-# tiny: Before",
        "+# tiny: A tiny stack",
    ]


def test_nothing_was_built_yet(matrix: Path) -> None:
    with pytest.raises(UsageError) as caught:
        rendering.render_verb(matrix, diff=True)
    assert str(caught.value) == (
        "error: `tiny` was not built here yet\n"
        f"  at: {matrix.parent}/cache/contexts/tiny/Dockerfile\n"
        "  hint: without `--diff` the whole Dockerfile is printed: `builder render tiny`"
    )


def test_a_lock_that_is_out_of_date(matrix: Path) -> None:
    matrix.write_text(f"{TINY}extras: [idna==3.7]\n")
    with pytest.raises(LockError, match="the lock does not belong to this matrix"):
        rendering.render_verb(matrix, diff=False)
