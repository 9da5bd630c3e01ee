"""What a reconstruction asks of the package index, with made pages."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pypi_simple import DistributionPackage

from builder.abi.verb import base_named
from builder.abi.wheels import Release, Target
from builder.repro import releases
from builder.repro.releases import Releases
from tests.made import settings_at


def _file(version: str, day: date, *, yanked: bool = False) -> DistributionPackage:
    return DistributionPackage(
        filename=f"torch-{version}-py3-none-any.whl",
        url="https://wheels.example/torch.whl",
        project="torch",
        version=version,
        package_type="wheel",
        digests={},
        requires_python=None,
        has_sig=None,
        is_yanked=yanked,
        upload_time=datetime(day.year, day.month, day.day, tzinfo=UTC),
    )


PAGE = [
    _file("2.9.1", date(2025, 11, 12)),
    _file("2.9.1", date(2026, 3, 1)),
    _file("2.11.0", date(2026, 5, 2), yanked=True),
    _file("2.15.0", date(2026, 11, 1)),
    _file("not-a-version", date(2026, 1, 1)),
]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Releases:
    monkeypatch.setattr(releases, "project_page", lambda *_: PAGE)
    made = Releases(settings_at(tmp_path), Target("3.11", base_named("bookworm")))

    def versions(name: str, specifier: SpecifierSet) -> list[Version]:
        return [each for each in map(Version, ("2.9.1", "2.11.0", "2.15.0")) if each in specifier]

    monkeypatch.setattr(made._wheels, "versions", versions)
    return made


def test_the_days_of_a_release(index: Releases) -> None:
    assert index.appeared("torch", "2.9.1") == date(2025, 11, 12)
    assert index.uploaded("torch", "2.9.1") == date(2026, 3, 1)
    assert index.appeared("torch", "2.10.0") is None


def test_what_was_taken_back(index: Releases) -> None:
    assert [index.yanked("torch", version) for version in ("2.9.1", "2.11.0", "2.10.0")] == [False, True, False]


@pytest.mark.parametrize(
    ("before", "newest"),
    [(None, "2.15.0"), (date(2026, 11, 1), "2.11.0"), (date(2026, 5, 2), "2.9.1"), (date(2025, 11, 12), None)],
)
def test_the_newest_release_of_a_time(index: Releases, before: date | None, newest: str | None) -> None:
    assert index.newest_of("torch", "", before) == newest


@pytest.mark.parametrize(
    ("specifier", "before", "oldest"),
    [(">2.9.1", None, "2.11.0"), ("", date(2026, 5, 2), "2.9.1"), (">2.9.1", date(2026, 5, 2), None)],
)
def test_the_oldest_release_of_a_time(index: Releases, specifier: str, before: date | None, oldest: str | None) -> None:
    assert index.oldest_of("torch", specifier, before) == oldest


def test_what_a_release_requires_with_the_extras_it_is_installed_with(
    index: Releases, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = {
        "": ["tqdm"],
        "srt": ["torch==2.7.1", "sglang[runtime_common]"],
        "runtime_common": ["torchao==0.9.0", "sglang[more]"],
        "more": ["numpy"],
        "all": ["openai"],
    }

    def requires(release: Release, extras: Iterable[str] = ()) -> list[Requirement]:
        return [Requirement(line) for extra in ("", *sorted(extras)) for line in stated[extra]]

    monkeypatch.setattr(
        index._wheels, "release", lambda name, version: Release(name, str(version), f"{name}.whl", "", None)
    )
    monkeypatch.setattr(index._wheels, "requires", requires)
    asked = [str(each) for each in index.requires("sglang", "0.5.2")]
    assert sorted(asked) == ["numpy", "torch==2.7.1", "torchao==0.9.0", "tqdm"]
    # From 0.5.3 on they are its own requirements.
    assert [str(each) for each in index.requires("sglang", "0.5.3")] == ["tqdm"]
    assert [str(each) for each in index.requires("torch", "0.5.2")] == ["tqdm"]
