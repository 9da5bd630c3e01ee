"""The committed locks against the real index: resolved again they are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import settings
from builder.lock import lock_path, read_lock
from builder.matrix import list_matrices, load
from builder.resolve import resolve
from builder.settings import Settings
from tests.made import ROOT

pytestmark = pytest.mark.index


@pytest.mark.parametrize("path", list_matrices(ROOT / "matrices"), ids=lambda path: path.stem)
def test_a_lock_is_what_its_matrix_resolves_to(tmp_path: Path, path: Path) -> None:
    found = settings.load()
    site = Settings(ca=found.ca, index=found.index, netrc=found.netrc, proxies=found.proxies, cache=tmp_path / "cache")
    artefacts, _ = resolve(load(path).matrix, site)
    assert tuple(artefacts) == read_lock(lock_path(path)).artefacts
