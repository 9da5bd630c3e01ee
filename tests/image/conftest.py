"""Image tests: a real engine, real wheels. The whole stack is built once a run; small stacks show the rest.

A machine that cannot run them says so and skips; in CI that is a failure.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import bootstrap
from builder.build import build_image, prepare
from builder.engine import Buildx, Engine, Image, connect, find_buildx
from builder.lock import Lock, lock_path, read_lock, write_lock
from builder.locking import resolve_lock
from builder.matrix import load
from builder.settings import Settings
from builder.settings import load as load_settings
from tests.image.onhosts import baked, pushed  # noqa: F401 - fixtures
from tests.image.stacks import MATRIX, ROOT, SMALL


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Small stacks first: they fail in seconds."""
    items.sort(key=lambda item: item.get_closest_marker("full") is not None)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine to build with."""
    try:
        connected = connect()
        connected.require()
        find_buildx()
    except Exception as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"NO DOCKER ENGINE, the image tests did not run: {error}")
    yield connected
    connected.close()


@pytest.fixture(scope="session")
def cosign() -> str:
    """The real program; tests of signatures say nothing without it."""
    found = bootstrap.find_program("cosign")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("cosign comes with `make tools`")
        pytest.skip("NO COSIGN, the tests of signatures did not run: `make tools`")
    return found


@pytest.fixture(scope="session")
def buildx() -> Buildx:
    return find_buildx()


@pytest.fixture(scope="session")
def settings() -> Settings:
    return load_settings()


@pytest.fixture(scope="session")
def docker(engine: Engine) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the docker client as a user does."""
    environment = {**bootstrap.tool_environment(), "DOCKER_HOST": engine.host}
    program = bootstrap.find_program("docker")
    assert program is not None, "the docker client comes with `make tools`"

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"docker {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def reference_lock() -> Lock:
    """The checked-in lock of the default matrix: its base is the base of every small stack here."""
    return read_lock(lock_path(ROOT / "matrices" / f"{MATRIX}.yaml"))


@pytest.fixture(scope="session")
def make_small(
    tmp_path_factory: pytest.TempPathFactory, settings: Settings, reference_lock: Lock
) -> Callable[..., Path]:
    """Write and lock a small matrix, on the base of the checked-in lock (so that one OS serves all); its path."""

    def make(name: str, text: str = SMALL) -> Path:
        path = tmp_path_factory.mktemp(name) / f"{name}.yaml"
        path.write_text(text, encoding="utf-8")
        write_lock(resolve_lock(load(path), settings, reference_lock.base), lock_path(path))
        return path

    return make


@pytest.fixture(scope="session")
def small(make_small: Callable[..., Path]) -> Path:
    return make_small("small")


@pytest.fixture(scope="session")
def built_small(small: Path, engine: Engine, buildx: Buildx, settings: Settings) -> Image:
    return build_image(prepare(small), engine, buildx, settings)
