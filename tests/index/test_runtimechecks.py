"""What sglang's wheels assert when they start is what facts/runtime-checks.yaml says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from builder.facts import RuntimeCheckFact, load_facts
from builder.patches.releases import Releases
from builder.runtimechecks import FIRST, MEMBER, PACKAGE, Check, checks, releases
from builder.settings import load
from tests.made import settings_at

pytestmark = pytest.mark.index


@pytest.mark.parametrize("release", ["0.4.6", "0.4.9.post4", "0.5.0rc1", "0.5.9", "0.5.15.post1", "0.5.23"])
def test_a_release_is_as_the_facts_have_it(release: str, tmp_path: Path) -> None:
    site = settings_at(tmp_path, index=load().index, ca=load().ca)
    found = checks(Releases(site).release(PACKAGE, release).read(MEMBER).decode())
    facts = [
        Check(fact.requires, fact.minimum, fact.when, fact.skip)
        for fact in load_facts(RuntimeCheckFact)
        if SpecifierSet(fact.versions).contains(release, prereleases=True)
    ]
    assert found == facts and found


def test_the_releases_are_found_with_their_pre_releases() -> None:
    known = releases(FIRST, load())
    assert known[:2] == [FIRST, "0.4.6.post1"]
    assert "0.5.0rc1" in known and known.index("0.5.9") < known.index("0.5.10rc0") < known.index("0.5.10")
