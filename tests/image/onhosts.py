"""Two small stacks, baked, signed and pushed, and hosts that they can be brought to: what `test_hosts*` and `test_bake` share."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from builder.engine import Engine
from tests.image.connectproxy import ConnectProxy
from tests.image.engines import Registry, SecondEngine, Throttle
from tests.image.stacks import ROOT, SMALL

FIRST = SMALL
SECOND = SMALL.replace("packaging==26.2", "packaging==26.1, idna==3.10")
"""One more wheel and another one: the OS, Python and CUDA below are the same."""


@dataclass(frozen=True)
class Pushed:
    """Where the stacks `first` and `second` are, by matrix file, and what is needed to get them."""

    paths: Mapping[str, Path]
    registry: Registry
    throttle: Throttle
    """In front of the registry; images are pushed and signed under its address."""
    key: Path
    state: Path

    @property
    def source(self) -> str:
        return f"{self.throttle.address}/stack"

    def argv(self, name: str, *hosts: str, options: tuple[str, ...] = ("--anyway",)) -> list[str]:
        """`builder pull`. No machine here has a GPU, so doctor would refuse each."""
        argv = [sys.executable, "-m", "builder", "pull", str(self.paths[name]), "--json"]
        argv += ["--from", self.source, "--pub", str(self.key.with_name("cosign.pub"))]
        return [*argv, *(part for host in hosts for part in ("--host", host)), *options]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "XDG_STATE_HOME": str(self.state)}

    def pull(
        self, name: str, *hosts: str, options: tuple[str, ...] = ("--anyway",)
    ) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        argv = self.argv(name, *hosts, options=options)
        return subprocess.run(
            argv, env=self.environment(), cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
        )


def make_key(cosign: str, folder: Path) -> Path:
    """A key pair as a user makes one; the private half."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "COSIGN_PASSWORD": ""}
    subprocess.run([cosign, "generate-key-pair"], cwd=folder, env=environment, check=True, capture_output=True)
    return folder / "cosign.key"


def builder(*words: str, environment: Mapping[str, str], timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the builder as a user does."""
    argv = [sys.executable, "-m", "builder", *words]
    whole = {**os.environ, **environment}
    return subprocess.run(argv, env=whole, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False)


@dataclass(frozen=True)
class Baked:
    """What `builder bake` told of `first` and `second` on the engine of the tests."""

    paths: Mapping[str, Path]
    exit: int
    told: dict[str, Any]
    progress: str


@pytest.fixture(scope="session")
def baked(make_small: Callable[..., Path], engine: Engine) -> Baked:
    paths = {name: make_small(name, text) for name, text in (("first", FIRST), ("second", SECOND))}
    done = builder("bake", *map(str, paths.values()), "--json", environment={"DOCKER_HOST": engine.host})
    assert done.stdout, done.stderr
    return Baked(paths, done.returncode, json.loads(done.stdout), done.stderr)


@pytest.fixture(scope="session")
def pushed(baked: Baked, engine: Engine, cosign: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    folder = tmp_path_factory.mktemp("pushed")
    key = make_key(cosign, folder / "key")
    with Registry(folder / "registry") as registry, Throttle(registry.port, 200_000_000) as throttle:
        found = Pushed(baked.paths, registry, throttle, key, folder / "state")
        environment = {"DOCKER_HOST": engine.host, "COSIGN_PASSWORD": ""}
        for path in baked.paths.values():
            words = ["push", str(path), "--to", found.source, "--key", str(key)]
            done = builder(*words, environment=environment)
            assert done.returncode == 0, done.stderr
        yield found


@contextlib.contextmanager
def way_out(engine: SecondEngine) -> Iterator[str]:
    """A proxy that the build steps of an engine without NAT reach: on the address of its bridge."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        said = fcntl.ioctl(control.fileno(), 0x8915, struct.pack("256s", engine._bridge.encode()))  # SIOCGIFADDR
    with ConnectProxy(socket.inet_ntoa(said[20:24])) as proxy:
        yield proxy.url
