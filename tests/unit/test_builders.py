"""Which place `--builder NAME` is. Buildx and the engines are stand-ins; buildx is a process."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from builder import builders
from builder.builders import Place, place_of
from builder.engine import Buildx, Engine, EngineInfo
from builder.errors import BuildError, UsageError
from builder.hosts.host import Host
from builder.registry import transport

pytestmark = pytest.mark.processes


class StandInEngine:
    """An engine that was connected to."""

    version = "26.1.5"

    def __init__(self, host: str, store: str = "classic") -> None:
        self.host, self._store = host, store
        self.closed = False

    def require(self) -> None:
        pass

    def info(self) -> EngineInfo:
        return EngineInfo(self.version, self._store, Path("/nowhere"), False)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def buildx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], None]:
    """A stand-in that prints a text for `inspect NAME`."""

    def make(text: str, status: int = 0) -> None:
        script = tmp_path / "buildx"
        (tmp_path / "said").write_text(text)
        script.write_text(f'#!/bin/sh\n[ "$1" = inspect ] && cat {tmp_path}/said\nexit {status}\n')
        script.chmod(0o755)
        monkeypatch.setattr(builders, "find_buildx", lambda: Buildx((str(script),), "0.13.1"))

    return make


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> StandInEngine:
    engine = StandInEngine("unix:///here.sock")
    monkeypatch.setattr(builders, "connect", lambda: engine)
    return engine


INSPECTED = "Name:   {name}\nDriver: {driver}\n\nNodes:\nName:             {name}0\nEndpoint:         {endpoint}\nStatus: running\n"


def test_without_a_name_it_is_the_engine_of_this_machine(here: StandInEngine) -> None:
    with place_of(None) as place:
        assert (place.name, place.layouts, place.direct) == ("default", False, True)
        assert place.environment == {"DOCKER_HOST": here.host, "BUILDX_BUILDER": "default", "DOCKER_CONTEXT": ""}
    assert here.closed


def test_a_context_is_the_engine_that_it_leads_to(
    buildx: Callable[..., None], monkeypatch: pytest.MonkeyPatch, here: StandInEngine
) -> None:
    buildx(INSPECTED.format(name="second", driver="docker", endpoint="lab"))
    asked: list[str] = []
    there = StandInEngine("unix:///there.sock")

    def connected(host: Host) -> StandInEngine:
        asked.append(host.name)
        return there

    monkeypatch.setattr(Host, "engine", connected)
    with place_of("second") as place:
        assert (place.name, place.engine.host, place.layouts) == ("second", there.host, False)
        assert place.environment["DOCKER_HOST"] == "unix:///there.sock"
    assert asked == ["context:lab"]


def test_a_buildkit_apart_gets_layouts_and_its_images_go_here(buildx: Callable[..., None], here: StandInEngine) -> None:
    buildx(INSPECTED.format(name="apart", driver="docker-container", endpoint="unix:///var/run/docker.sock"))
    with place_of("apart") as place:
        assert (place.name, place.engine.host, place.layouts) == ("apart", here.host, True)
        assert place.environment == {"DOCKER_HOST": here.host, "BUILDX_BUILDER": "apart"}
        # Whatever the store of the engine that the images go to.
        place.require_cache_export()


def test_a_builder_that_is_none(buildx: Callable[..., None]) -> None:
    buildx('ERROR: no builder "nobody" found\n', 1)
    with pytest.raises(UsageError) as caught, place_of("nobody"):
        pass
    assert str(caught.value) == (
        "error: there is no builder `nobody`\n"
        '  because: ERROR: no builder "nobody" found\n'
        "  hint: see `docker buildx ls`; an engine elsewhere becomes one by `docker context create NAME --docker host=ssh://…`"
    )


@pytest.mark.parametrize("name", ["--help", "a b", "", "a/b", "x\n"])
def test_a_name_that_buildx_would_take_for_something_else(name: str) -> None:
    with pytest.raises(UsageError), place_of(name):
        pass


# --- base images for a BuildKit apart -----------------------------------------------------------------------------------


def saved(*names: str) -> Iterator[bytes]:
    """What an engine saves, in chunks of an odd size."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in names:
            data = name.encode() * 500
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    raw = buffer.getvalue()
    return (raw[start : start + 777] for start in range(0, len(raw), 777))


def handed_over(monkeypatch: pytest.MonkeyPatch, folder: Path, *names: str) -> None:
    client: Any = type("Client", (), {"get_image": lambda self, name: saved(*names)})()
    monkeypatch.setattr(transport, "api", lambda engine: client)
    place = Place("apart", cast("Engine", StandInEngine("unix:///here.sock")), {}, layouts=True)
    place.save_layout("sglang-stack-base:made", folder)


def test_a_layout_is_what_the_engine_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    handed_over(monkeypatch, tmp_path / "layout", "index.json", "blobs/sha256/a")
    assert (tmp_path / "layout/blobs/sha256/a").read_text() == "blobs/sha256/a" * 500


def test_an_engine_that_saves_no_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BuildError) as caught:
        handed_over(monkeypatch, tmp_path / "layout", "manifest.json")
    assert str(caught.value) == (
        "error: the base image cannot be handed to the builder\n"
        "  at: apart\n"
        "  because: Docker Engine 26.1.5 saves no OCI layout\n"
        "  hint: Docker Engine 25 or newer does"
    )
