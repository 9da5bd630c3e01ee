"""`builder patches` on releases of the package index: read by byte ranges, the same as of the whole wheel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from builder import settings
from builder.errors import UsageError
from builder.fetch import fetch_artefact
from builder.patches import look
from builder.patches.engine import State
from builder.patches.listing import release_listing
from builder.patches.releases import Releases
from builder.patches.targets import targets
from builder.settings import Settings
from builder.wheel import read_wheel
from tests.made import artefact

pytestmark = pytest.mark.index

RELEASES = {"sglang": "0.5.10.post1", "flashinfer-python": "0.6.7.post3"}
# The base sets, and what is only noted (shared/facts/patches.md, section B; D2 read in the wheel).
STATES = {
    **dict.fromkeys(("S1", "S2", "S3", "D1", "F1", "E4", "D3", "F2", "F3", "F4", "F6", "F7"), State.NEEDED),
    **dict.fromkeys(("S6", "E1", "E2", "E3", "D2", "E0", "E8"), State.NATIVE),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    yield replace(settings.load(), cache=tmp_path_factory.mktemp("cache"), wheels=())


def test_the_states_of_releases_cold_and_warm(site: Settings) -> None:
    found = release_listing(RELEASES, Releases(site))
    states = {item.site.id: item.before for package in found.packages for item in package.sites}
    states |= {item.noted.id: item.state for package in found.packages for item in package.noted}
    assert {site: states[site] for site in STATES} == STATES
    assert 0 < found.traffic.bytes_read < found.traffic.bytes_total
    assert found.traffic.requests < 12
    again = release_listing(RELEASES, Releases(site))
    assert (again.traffic.bytes_read, again.traffic.requests) == (0, 0)
    assert again.packages == found.packages


def test_what_is_read_by_ranges_is_what_the_whole_wheel_says(site: Settings, tmp_path: Path) -> None:
    """The whole wheel is fetched by the sha256 that the index states, checked member by member, and looked at."""
    version = RELEASES["flashinfer-python"]
    part = Releases(site).release("flashinfer-python", version)
    said = json.loads((site.cache / "releases" / f"flashinfer-python-{version}.json").read_bytes())
    assert said["file"] == part.path.name
    whole = artefact("flashinfer-python", version, sha256=said["sha256"], size=said["size"])
    wheel = read_wheel(fetch_artefact(whole, replace(site, cache=tmp_path)))
    assert wheel.entries == part.entries
    assert look(wheel) == look(part)


def test_the_models_of_a_release(site: Settings) -> None:
    found = targets(RELEASES, Releases(site)).as_json()
    models = {item["class"]: item["state"] for item in found["models"]}
    assert models["KimiK25ForConditionalGeneration"] == "capable"
    assert found["version"] == RELEASES["sglang"]


def test_a_release_that_does_not_exist(site: Settings) -> None:
    with pytest.raises(UsageError) as caught:
        Releases(site).release("sglang", "0.5.10.post2")
    assert caught.value.hint == "near it are `0.5.10`, `0.5.10.post1`, `0.5.11`, `0.5.12`"
