"""`base.kind: image`: an OS from a registry, by digest, with the same packages put on top."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import bootstrap
from builder.build import build_image, prepare
from builder.engine import Buildx, Engine, Image
from builder.lock import lock_path, read_lock
from builder.locking import make_lock
from builder.settings import Settings
from tests.image.stacks import SMALL, entries

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real registry on loopback, stopped by its pid."""
    program = bootstrap.find_program("docker-registry")
    assert program is not None, "the registry comes with `make tools`"
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: '{address}'}}\n"
        "log: {accesslog: {disabled: true}, level: error}\n",
        encoding="utf-8",
    )
    process = subprocess.Popen([program, "serve", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            with socket.socket() as probe:
                host, port = address.split(":")
                if probe.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_an_os_from_a_registry_by_digest(
    registry: str,
    built_small: Image,
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    docker: Docker,
    tmp_path: Path,
) -> None:
    # What a distribution publishes has neither an init nor libnuma1: they have to come from the archive, in the build.
    base = next(tag for image in engine.ours("sglang-stack=base") for tag in image.tags)
    name = f"{registry}/debian:bookworm"
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nUSER 0:0\nRUN dpkg --purge tini libnuma1\n", encoding="utf-8")
    environment = {**bootstrap.tool_environment(), "DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    subprocess.run(
        [*buildx.argv, "build", "--tag", name, str(tmp_path)], env=environment, check=True, capture_output=True
    )
    docker("push", name)
    digest = docker("image", "inspect", "--format", "{{index .RepoDigests 0}}", name).stdout.strip().split("@")[1]
    docker("rmi", name)
    path = tmp_path / "from-image.yaml"
    reference = f"{registry}/debian@{digest}"
    base_line = f"base: {{kind: image, reference: '{reference}', distribution: debian, release: bookworm}}"
    path.write_text(SMALL.replace("base: {kind: archive, distribution: debian, release: bookworm}", base_line))
    lock, _ = make_lock(path, settings)
    assert {"tini", "libnuma1"} <= {package.name for package in lock.base.packages}
    assert read_lock(lock_path(path)).base.reference == reference
    image = build_image(prepare(path), engine, buildx, settings)
    said = docker("run", "--rm", "--network", "none", image.id, "cat", "/proc/1/comm").stdout
    assert said == "tini\n"
    wheels = slice(-3, -1)
    # As in test_small: the order of entries is the engine's and may be another.
    if image.diff_ids[wheels] != built_small.diff_ids[wheels]:
        mine, theirs = (entries(docker, made.id, tmp_path)[wheels] for made in (image, built_small))
        assert mine == theirs, "a layer does not depend on the OS below it"
