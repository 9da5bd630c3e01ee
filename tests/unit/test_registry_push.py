"""Which names a push leaves in the engine, however it ends. Engine and BuildKit are stand-ins; tests/image has real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import requests

from builder.engine import BuildRequest, Buildx, Engine, EngineInfo, Image
from builder.errors import BuilderError, BuildError, UnreachableError
from builder.registry import push as module
from builder.registry.push import send
from builder.registry.reference import Reference
from builder.registry.transport import push_image

REFERENCE = Reference.parse("registry.example/team/stack:cu130-0123456789ab")
NAME = str(REFERENCE)
OWN = "sglang-stack:cu130"
DIGEST = f"sha256:{'d' * 64}"

Event = dict[str, Any] | BaseException


@dataclass
class StandIn:
    """An engine with the containerd store: an image that loses its last name is gone. It is its own API, too."""

    names: dict[str, str] = field(default_factory=lambda: {OWN: "built"})
    packs: list[BaseException] = field(default_factory=list)
    """What goes wrong with packing, once it has named what it made."""
    says: list[Event] = field(default_factory=lambda: [{"aux": {"Tag": REFERENCE.tag, "Digest": DIGEST}}])
    """What it says of a push."""
    gone: bool = False
    layers: tuple[str, ...] = ("one",)
    """The diff IDs of what packing makes."""

    host = "unix:///made"
    timeout = 60.0

    @property
    def api(self) -> StandIn:
        return self

    def info(self) -> EngineInfo:
        return EngineInfo("28.5.2", "containerd", Path("/nowhere"), False)

    def find(self, name: str) -> Image | None:
        if self.gone:
            raise BuildError("the Docker Engine refused", where=self.host)
        found = self.names.get(name, name if name in self.names.values() else None)
        tags = tuple(sorted(key for key, value in self.names.items() if value == found))
        layers = self.layers if found == "packed" else ("one",)
        return Image(found, tags, {}, 0, layers) if found is not None else None

    def tag(self, image: str, names: list[str]) -> None:
        self.names |= dict.fromkeys(names, image)

    def remove_image(self, name: str, noprune: bool) -> None:
        del self.names[name]

    def push(self, *_: object, **__: object) -> Iterator[dict[str, Any]]:
        for event in self.says:
            if isinstance(event, BaseException):
                self.gone = isinstance(event, requests.RequestException)
                raise event
            yield event

    def solve(self, engine: object, buildx: Buildx, request: BuildRequest, stages: object) -> None:
        assert f"name={NAME}," in request.output
        self.names[NAME] = "packed"
        for error in self.packs:
            raise error


@pytest.fixture
def push(monkeypatch: pytest.MonkeyPatch) -> Callable[[StandIn, Any], None]:
    def run(engine: StandIn, compression: Any) -> None:
        monkeypatch.setattr(module, "solve", engine.solve)
        monkeypatch.setattr(module, "find_buildx", lambda: Buildx(("buildx",), "0.13.1"))
        image = engine.find(OWN)
        assert image is not None
        send(cast("Engine", engine), image, REFERENCE, compression, lambda text: None)

    return run


REFUSED: Event = {"errorDetail": {"message": "denied: requested access to the resource is denied"}}

ENDINGS: dict[str, tuple[dict[str, Any], type[BaseException]]] = {
    "packing fails": ({"packs": [BuildError("the build failed")]}, BuildError),
    "packing is interrupted": ({"packs": [KeyboardInterrupt()]}, KeyboardInterrupt),
    "other layers were packed": ({"layers": ("another",)}, BuildError),
    "the registry refuses": ({"says": [REFUSED]}, UnreachableError),
    "the push is interrupted": ({"says": [KeyboardInterrupt()]}, KeyboardInterrupt),
    "the answer ends in the middle": ({"says": []}, BuildError),
}


@pytest.mark.parametrize(("how", "kind"), ENDINGS.values(), ids=ENDINGS)
def test_a_push_with_zstd_that_fails_leaves_no_name(
    push: Callable[[StandIn, Any], None], how: dict[str, Any], kind: type[BaseException]
) -> None:
    engine = StandIn(**how)
    with pytest.raises(kind):
        push(engine, "zstd")
    assert engine.names == {OWN: "built"}


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_a_name_of_an_earlier_push_is_put_back(push: Callable[[StandIn, Any], None], compression: str) -> None:
    names = {OWN: "built", NAME: "earlier", f"{NAME}-other": "earlier"}
    engine = StandIn(names=dict(names), says=[REFUSED])
    with pytest.raises(UnreachableError):
        push(engine, compression)
    assert engine.names == names


def test_a_name_of_an_image_that_is_gone_is_taken_off(push: Callable[[StandIn, Any], None]) -> None:
    engine = StandIn(names={OWN: "built", NAME: "earlier"}, says=[REFUSED])
    with pytest.raises(UnreachableError):
        push(engine, "zstd")
    assert engine.names == {OWN: "built"}


def test_an_engine_that_went_away_is_what_is_told(push: Callable[[StandIn, Any], None]) -> None:
    with pytest.raises(BuilderError) as caught:
        push(StandIn(says=[requests.ConnectionError("connection refused")]), "zstd")
    assert caught.value.what == "the Docker Engine went away"


@pytest.mark.parametrize(("compression", "image"), [("gzip", "built"), ("zstd", "packed")])
def test_what_was_pushed_keeps_its_name(push: Callable[[StandIn, Any], None], compression: str, image: str) -> None:
    engine = StandIn()
    push(engine, compression)
    assert engine.names == {OWN: "built", NAME: image}


def test_an_interrupted_push_leaves_no_name() -> None:
    engine = StandIn(says=[KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        push_image(cast("Engine", engine), "built", REFERENCE, lambda text: None)
    assert engine.names == {OWN: "built"}
