"""Resolution against the real package index: what uv and the index really do, on a few small packages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import settings
from builder.errors import LockError
from builder.lock import Artefact, Lock
from builder.resolve import resolve
from builder.settings import Settings
from tests.made import lock_of, tiny

pytestmark = pytest.mark.index


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Settings]:
    """The site's settings, with a cache of our own."""
    found = settings.load()
    yield Settings(ca=found.ca, index=found.index, netrc=found.netrc, proxies=found.proxies, cache=tmp_path / "cache")


def run(site: Settings, extra: str, **changes: str) -> dict[str, Artefact]:
    return {artefact.name: artefact for artefact in resolve(tiny(extra, **changes).matrix, site)[0]}


def test_a_pure_wheel_is_pinned_with_its_hash_size_and_metadata(site: Settings) -> None:
    assert run(site, "extras: [packaging==24.2]\n") == {
        "packaging": Artefact(
            name="packaging",
            version="24.2",
            metadata_version="24.2",
            file="packaging-24.2-py3-none-any.whl",
            sha256="09abb1bccd265c01f4a3aa3f7a7db064b36514d2cba19a2f694fe6150451a759",
            size=65451,
            index="default",
            url=None,
            requires=(),
            layer="rest",
        )
    }


def test_a_native_wheel_is_the_one_for_the_target(site: Settings) -> None:
    found = run(site, "extras: [numpy==2.2.6]\n")["numpy"]
    assert (found.file, found.size) == (
        "numpy-2.2.6-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        16821570,
    )


def test_another_python_is_another_wheel(site: Settings) -> None:
    found = run(site, "extras: [numpy==2.2.6]\n", python='"3.12"')["numpy"]
    assert found.file == "numpy-2.2.6-cp312-cp312-manylinux_2_17_x86_64.manylinux2014_x86_64.whl"


def test_a_release_after_the_date_is_not_taken(site: Settings) -> None:
    # requests 2.32.3 wants certifi>=2017.4.17, urllib3<3, idna<4, charset-normalizer<4: open ranges.
    extra = "extras: [requests==2.32.3]\n"
    old, new = (run(site, extra, as_of=day) for day in ("2024-07-01", "2025-07-01"))
    assert {name: artefact.version for name, artefact in old.items()} == {
        "certifi": "2024.6.2",
        "charset-normalizer": "3.3.2",
        "idna": "3.7",
        "requests": "2.32.3",
        "urllib3": "2.2.2",
    }
    assert new["certifi"].version == "2025.6.15"


def test_the_layer_is_that_of_the_facts(site: Settings) -> None:
    found = run(site, "extras: [nvidia-cuda-runtime==13.0.96, nvidia-ml-py==13.580.82]\n")
    assert {name: artefact.layer for name, artefact in found.items()} == {
        "nvidia-cuda-runtime": "torch",
        "nvidia-ml-py": "rest",
    }


def test_requirements_are_those_of_the_target(site: Settings) -> None:
    found = run(site, "extras: [tqdm==4.67.1]\n")
    assert found["tqdm"].requires == ()


def test_two_runs_give_equal_bytes_with_and_without_a_cache(site: Settings, tmp_path: Path) -> None:
    loaded = tiny("extras: [requests==2.32.3, numpy==2.2.6]\n")

    def text(cache: str) -> str:
        ours = Settings(ca=site.ca, index=site.index, netrc=site.netrc, proxies=site.proxies, cache=tmp_path / cache)
        return lock_of(loaded.matrix, *resolve(loaded.matrix, ours)[0]).text()

    first = text("one")
    assert first == text("one") == text("two")
    assert Lock.model_validate_json(json.dumps(json.loads(first))).text() == first


def test_pre_releases_are_taken_of_named_packages_only(site: Settings) -> None:
    # opentelemetry-sdk 1.25.0 requires opentelemetry-semantic-conventions==0.46b0, and has no release without one.
    extra, day = "extras: [opentelemetry-sdk==1.25.0]\n", "2024-07-01"
    with pytest.raises(LockError) as caught:
        run(site, extra, as_of=day)
    assert (
        caught.value.hint
        == "a package of which a pre-release may be taken is named under `prereleases`: opentelemetry-semantic-conventions"
    )
    found = run(site, f"{extra}prereleases: [opentelemetry-semantic-conventions]\n", as_of=day)
    assert found["opentelemetry-semantic-conventions"].version == "0.46b0"
    assert not [
        a.version for a in found.values() if "b" in a.version and a.name != "opentelemetry-semantic-conventions"
    ]


def test_a_package_of_sources_only(site: Settings) -> None:
    with pytest.raises(LockError) as caught:
        run(site, "extras: [docopt==0.6.2]\n")
    assert str(caught.value) == (
        "error: `tiny` has no resolution as of 2026-03-01\n"
        "  because: error: No solution found when resolving dependencies\n"
        "      cause: Because docopt==0.6.2 has no usable wheels and you require docopt==0.6.2, we can conclude that your "
        "requirements are unsatisfiable.\n"
        "  hint: a build installs wheels only, it compiles nothing: pin a release that has a wheel under `extras`"
    )
