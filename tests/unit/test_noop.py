"""Nothing changed: told at once, and never where anything could have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from builder import noop
from builder.engine import Engine, Image
from builder.labels import INPUTS_LABEL

NAMES = ["sglang-stack:tiny-0123456789ab", "sglang-stack:tiny"]
DATA = {"ok": True, "built": True, "image": {"id": "sha256:1", "names": NAMES}}


class FakeEngine:
    """Images by name."""

    def __init__(self, **changed: Image | None) -> None:
        made = Image("sha256:1", tuple(NAMES), {INPUTS_LABEL: "in"}, 1, ())
        self.images: dict[str, Image | None] = {**dict.fromkeys(NAMES, made), **changed}

    def find(self, name: str) -> Image | None:
        return self.images[name]


@pytest.fixture
def matrix(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text("summary: x\n")
    (tmp_path / "tiny.lock.json").write_text("{}")
    (tmp_path / "own.diff").write_text("+1\n")
    noop.remember(path, tmp_path / "cache", "in", DATA, "the summary", ["own.diff"])
    return path


def recalled(matrix: Path, engine: FakeEngine | None = None) -> tuple[dict[str, object], str] | None:
    return noop.recall(matrix, matrix.parent / "cache", cast(Engine, engine or FakeEngine()))


def test_what_the_build_told_is_told_again(matrix: Path) -> None:
    assert recalled(matrix) == ({**DATA, "built": False}, "the summary")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text("summary: y\n"),
        lambda path: path.with_name("tiny.lock.json").write_text("{ }"),
        lambda path: path.with_name("tiny.lock.json").unlink(),
        lambda path: path.with_name("own.diff").write_text("+2\n"),
        lambda path: path.with_name("own.diff").unlink(),
        lambda path: (path.parent / "cache/contexts/tiny.built.json").write_text("{"),
        lambda path: (path.parent / "cache/contexts/tiny.built.json").write_text("[]"),
    ],
)
def test_a_change_of_any_input_is_something_to_do(matrix: Path, change: Callable[[Path], object]) -> None:
    change(matrix)
    assert recalled(matrix) is None


def test_a_change_of_the_builder_is_something_to_do(matrix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noop, "version", lambda _: "another uv")
    assert recalled(matrix) is None


@pytest.mark.parametrize(
    "image",
    [
        None,
        Image("sha256:2", tuple(NAMES), {INPUTS_LABEL: "in"}, 1, ()),
        Image("sha256:1", tuple(NAMES), {INPUTS_LABEL: "other"}, 1, ()),
        Image("sha256:1", tuple(NAMES), {}, 1, ()),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_an_image_that_is_gone_or_another_is_something_to_do(matrix: Path, name: str, image: Image | None) -> None:
    assert recalled(matrix, FakeEngine(**{name: image})) is None
