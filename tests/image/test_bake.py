"""Several images in one run, for real: on the engine of the tests, and on a second one that is named as a builder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder import bootstrap
from builder.build import prepare
from builder.engine import Engine
from builder.labels import INPUTS_LABEL
from tests.image.engines import Registry, SecondEngine
from tests.image.onhosts import Baked, builder, way_out
from tests.image.stacks import SMALL

pytestmark = pytest.mark.image

BROKEN = SMALL.replace("packaging==26.2", "packaging==26.0")


def test_both_are_built_proven_and_tagged(baked: Baked, engine: Engine) -> None:
    assert baked.exit == 0, baked.progress
    for target in baked.told["targets"]:
        prepared = prepare(baked.paths[target["matrix"]])
        for name in prepared.names:
            image = engine.find(name)
            assert image is not None and image.id == target["image"]["id"]
            assert image.labels[INPUTS_LABEL] == prepared.rendered.digest
        assert json.loads(engine.read_file(prepared.names[1], "/opt/sglang-stack/smoke.json"))["ok"] is True


def test_what_they_share_is_built_once(baked: Baked, engine: Engine) -> None:
    # OS (one layer of packages, one of users and folders), Python, CUDA: the same layers, not layers of the same content.
    first, second = (engine.find(f"sglang-stack:{name}") for name in ("first", "second"))
    assert first is not None and second is not None
    assert first.diff_ids[:-2] == second.diff_ids[:-2]
    assert first.diff_ids[-2:] != second.diff_ids[-2:]


def test_again_nothing_is_to_be_done(baked: Baked, engine: Engine) -> None:
    paths = [str(path) for path in baked.paths.values()]
    done = builder("bake", *paths, "--json", environment={"DOCKER_HOST": engine.host})
    targets = json.loads(done.stdout)["targets"]
    assert [(target["ok"], target["cached"], target["seconds"]) for target in targets] == [(True, True, 0.0)] * 2


def test_the_classic_store_cannot_export_a_cache(baked: Baked, engine: Engine) -> None:
    if engine.info().store != "classic":
        pytest.skip("the engine of the tests has the containerd store, which can")
    paths = [str(path) for path in baked.paths.values()]
    done = builder("bake", *paths, "--cache-to", "127.0.0.1:5/cache", environment={"DOCKER_HOST": engine.host})
    assert done.returncode == 2
    assert "this builder cannot write a build cache into a registry" in done.stderr


# --- a second engine as the builder -----------------------------------------------------------------------------------


class Second:
    """A second engine, known to buildx as `second`, and `builder bake` on it."""

    def __init__(self, engine: SecondEngine, proxy: str, config: Path, registry: Registry) -> None:
        self.engine, self.registry = engine, registry
        self.environment = {"DOCKER_CONFIG": str(config), "https_proxy": proxy, "DOCKER_HOST": ""}

    def bake(self, *words: str) -> tuple[int, dict[str, Any], str]:
        done = builder("bake", *words, "--json", "--builder", "second", environment=self.environment)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def second(baked: Baked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Second]:
    folder = tmp_path_factory.mktemp("second")
    client = bootstrap.find_program("docker")
    assert client is not None
    with (
        Registry(folder / "registry") as registry,
        SecondEngine(folder / "engine", "containerd") as engine,
        way_out(engine) as proxy,
    ):
        argv = [client, "context", "create", "second", "--docker", f"host={engine.address}"]
        environment = {**bootstrap.tool_environment(), "DOCKER_CONFIG": str(folder / "config")}
        subprocess.run(argv, env=environment, check=True, capture_output=True)
        yield Second(engine, proxy, folder / "config", registry)


@pytest.fixture(scope="module")
def mixed(second: Second, baked: Baked, make_small: Callable[..., Path]) -> tuple[int, dict[str, Any], str]:
    """`first` and a matrix whose build fails, with the cache kept in a registry."""
    broken = make_small("broken", BROKEN)
    # A wheel of which the index has another content than the lock says.
    lock = broken.with_name("broken.lock.json")
    pinned = re.search(r'"packaging-26\.0[^"]*", "sha256": "([0-9a-f]{64})"', lock.read_text())
    assert pinned is not None
    lock.write_text(lock.read_text().replace(pinned[1], "0" * 64))
    cache = f"{second.registry.address}/cache"
    return second.bake(str(baked.paths["first"]), str(broken), "--cache-to", cache, "--cache-from", cache)


def test_one_that_fails_does_not_lose_the_other(mixed: tuple[int, dict[str, Any], str], second: Second) -> None:
    code, told, progress = mixed
    first, broken = told["targets"]
    assert (code, told["ok"], told["builder"]) == (7, False, "second"), progress
    assert (first["matrix"], first["ok"]) == ("first", True), first
    assert (broken["matrix"], broken["ok"], broken["image"]) == ("broken", False, None)
    assert "a file is not the one that the lock pins (stage `rest`)" in broken["message"]
    names = second.engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert "sglang-stack:first" in names and "sglang-stack:broken" not in names


def test_an_image_of_another_engine_runs_there(mixed: tuple[int, dict[str, Any], str], second: Second) -> None:
    said = second.engine.docker("run", "--rm", "--network", "none", "sglang-stack:first").stdout
    assert said.startswith("first: A small stack for tests\n")


def test_a_cache_in_a_registry_serves_an_engine_that_has_none(
    mixed: tuple[int, dict[str, Any], str], second: Second, baked: Baked
) -> None:
    second.engine.docker("rmi", "--force", "sglang-stack:first", *_others(second))
    second.engine.docker("builder", "prune", "--all", "--force")
    code, told, progress = second.bake(str(baked.paths["first"]), "--cache-from", f"{second.registry.address}/cache")
    assert (code, told["targets"][0]["cached"]) == (0, False), progress
    # Not one step of the smoke test was run again.
    assert "smoke test" not in progress, progress


def _others(second: Second) -> list[str]:
    names = second.engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}", "sglang-stack").stdout.split()
    return [name for name in names if name != "sglang-stack:first"]


def test_a_builder_that_is_none(second: Second, baked: Baked) -> None:
    done = builder("bake", str(baked.paths["first"]), "--builder", "nobody", environment=second.environment)
    assert (done.returncode, os.linesep in done.stdout) == (2, False)
    assert "there is no builder `nobody`" in done.stderr
