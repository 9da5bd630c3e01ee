"""`builder push` of a small real image into a real registry: what it sends, what it says, what it refuses."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder import bootstrap
from builder.build import prepare
from builder.cli import main
from builder.engine import Engine, Image
from builder.labels import STAND_IN_LABEL
from builder.planning import plan
from builder.registry.client import RegistryClient
from builder.registry.predict import Sizes
from builder.registry.pull import pull_image
from builder.registry.reference import Reference
from builder.settings import Settings
from tests.image.engines import Registry, SecondEngine
from tests.image.onhosts import make_key

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]
Push = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def key(cosign: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private key, as a user makes one."""
    return make_key(cosign, tmp_path_factory.mktemp("key"))


@pytest.fixture
def push(
    registry: Registry, key: Path, small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Push:
    """Run the verb: its exit status and what it says."""

    def run(*options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("COSIGN_PASSWORD", "")
        capsys.readouterr()
        status = main(
            ["push", str(small), "--to", f"{registry.address}/team/stack", "--key", str(key), "--json", *options]
        )
        told = capsys.readouterr()
        return status, json.loads(told.out) if told.out else {"stderr": told.err}

    return run


@pytest.fixture(scope="module", autouse=True)
def names(registry: Registry, engine: Engine) -> Iterator[None]:
    """The engine keeps the names of what was pushed: they go at the end."""
    yield
    for image in engine.ours("sglang-stack=image"):
        for tag in image.tags:
            if tag.startswith(f"{registry.address}/"):
                engine.remove(tag)


def test_push(
    push: Push,
    registry: Registry,
    built_small: Image,
    small: Path,
    settings: Settings,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    foreseen = sum(row.predicted_bytes for row in plan(small, None))
    status, first = push()
    assert (status, first["ok"], first["matrix"], first["image"]["id"]) == (0, True, "small", built_small.id)
    tag = f"small-{first['image']['lock'][:12]}"
    assert first["reference"] == f"{registry.address}/team/stack:{tag}"
    assert first["tags"] == [tag]
    assert [row["diff_id"] for row in first["layers"]] == list(built_small.diff_ids)
    assert all(row["sent"] for row in first["layers"])
    assert first["bytes_there"] == 0
    # By the registry's own storage.
    assert first["bytes_sent"] == sum(
        {row["digest"]: registry.blob_path(row["digest"]).stat().st_size for row in first["layers"]}.values()
    )
    client = RegistryClient(f"{registry.address}/team/stack", settings)
    assert client.image(tag)[0] == first["digest"]
    # The moving tag was not asked for.
    assert client.manifest("small") is None
    print(f"predicted from facts alone {foreseen:,}, sent {first['bytes_sent']:,}")
    # What was pushed is known to the byte.
    rows = plan(small, None, Sizes.of(settings.cache))
    assert all(row.known for row in rows)
    assert sum(row.predicted_bytes for row in rows) == first["bytes_sent"]

    status, again = push("--moving-tag")
    assert (status, again["digest"], again["tags"]) == (0, first["digest"], [tag, "small"])
    assert (again["bytes_sent"], again["predicted_bytes"], again["bytes_there"]) == (0, 0, first["bytes_sent"])
    assert client.image("small")[0] == first["digest"]
    assert first["sbom"]["components"] > 0
    assert first["signature"]["key"] == again["signature"]["key"]

    with SecondEngine(tmp_path_factory.mktemp("host")) as host:
        reference = Reference.parse(client.name)
        pulled = pull_image(host.engine(), reference, first["digest"], print)
        assert (pulled.bytes_pulled, pulled.config) == (first["bytes_sent"], built_small.id)
        said = host.docker("run", "--rm", "--network", "none", pulled.id).stdout
        assert said.startswith("small: A small stack for tests\n")


def test_nothing_is_sent_with_a_key_that_cannot_be_opened(
    push: Push, registry: Registry, built_small: Image, tmp_path: Path
) -> None:
    (tmp_path / "cosign.key").write_text("no key", encoding="utf-8")
    since = len(registry.requests())
    status, said = push("--key", str(tmp_path / "cosign.key"))
    assert status == 2, said
    assert [request for request in registry.requests()[since:] if request.method != "GET"] == []


def test_the_image_of_another_state_is_not_pushed(push: Push, built_small: Image, small: Path) -> None:
    text = small.read_text(encoding="utf-8")
    small.write_text(text.replace("A small stack for tests", "Another small stack"), encoding="utf-8")
    try:
        status, said = push()
    finally:
        small.write_text(text, encoding="utf-8")
    assert status == 2
    assert "error: there is no image of this matrix as it is now\n" in said["stderr"]


def test_a_stand_in_is_not_pushed(
    push: Push, registry: Registry, built_small: Image, docker: Docker, engine: Engine, small: Path, tmp_path: Path
) -> None:
    content = prepare(small).names[0]
    (tmp_path / "Dockerfile").write_text(f"FROM {content}\nLABEL {STAND_IN_LABEL}=torch\n", encoding="utf-8")
    environment = {**bootstrap.tool_environment(), "DOCKER_HOST": engine.host, "DOCKER_BUILDKIT": "0"}
    program = bootstrap.find_program("docker")
    assert program is not None
    subprocess.run(
        [program, "build", "--tag", content, str(tmp_path)], env=environment, check=True, capture_output=True
    )
    since = len(registry.requests())
    try:
        status, said = push()
    finally:
        engine.tag(built_small.id, [content])
    assert status == 3
    assert said["stderr"].startswith(
        f"error: `{content}` is not what it is called, and nothing may push or bundle it\n"
    )
    assert registry.requests()[since:] == []
