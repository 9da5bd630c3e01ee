"""Unit tests wait for nothing: what a session waits between two attempts is left out."""

from __future__ import annotations

import pytest
from urllib3.util import Retry


@pytest.fixture(autouse=True)
def _attempts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Retry, "sleep", lambda self, response=None: None)
