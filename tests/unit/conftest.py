"""Unit tests wait for nothing: what a session waits between two attempts is left out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from urllib3.util import Retry

from builder.trust import cosign
from tests.trust_made import StandInCosign


@pytest.fixture(autouse=True)
def _attempts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry, "sleep", lambda self, response=None: None)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths end at 107 bytes: `tmp_path` grows with TMPDIR, the user and the test's name."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def stand_in_cosign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signatures are made and verified by `StandInCosign`, not by the program."""
    monkeypatch.setattr(cosign, "_cosign", StandInCosign())
