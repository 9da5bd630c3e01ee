"""`builder check` on copies of the real matrices, each broken in one way (`python -m tests.index.broken`): about 300 MB."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from builder import settings
from tests.index.broken import COPIES, EXPECTED, Copy, beyond, whole_of

pytestmark = pytest.mark.index

FEW = ("kernel-of-another-torch", "torch-exchanged", "nccl-too-old", "gpu-12.1", "another-python")
"""Those that are asked here; the others are by `python -m tests.index.broken`."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, Any]]]:
    """What is said of the whole matrices, from an empty cache that all of these tests share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BUILDER_CACHE", str(tmp_path_factory.mktemp("cache")))
        settings.load.cache_clear()
        yield partial(whole_of, {})
    settings.load.cache_clear()


@pytest.mark.parametrize("copy", [copy for copy in COPIES if copy.name in FEW], ids=lambda copy: copy.name)
def test_what_is_said_of_a_broken_copy(tmp_path: Path, whole: Callable[[str], dict[str, Any]], copy: Copy) -> None:
    said = beyond(copy, tmp_path, whole)
    assert said == (EXPECTED / f"{copy.name}.txt").read_text(encoding="utf-8")


def test_the_whole_matrices_have_no_error(whole: Callable[[str], dict[str, Any]]) -> None:
    for name in ("cu130-next", "cu128"):
        assert [each["message"] for each in whole(name)["findings"] if each["severity"] == "error"] == []
        assert whole(name)["looked_at"]["verdicts"]["broken"] <= 1  # torchao 0.9.0, which notices it
    assert whole("cu130-next")["looked_at"]["native_files"] == 534


def test_every_copy_has_its_text() -> None:
    assert {path.stem for path in EXPECTED.glob("*.txt")} == {copy.name for copy in COPIES}
