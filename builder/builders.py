"""Where images are built: an engine's own BuildKit, or a BuildKit apart from any engine whose images are loaded into one."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from builder import bootstrap
from builder.engine import Engine, connect, find_buildx
from builder.errors import BuildError, UsageError
from builder.hosts.host import Host


@dataclass(frozen=True)
class Place:
    """``engine`` gets base images and images; ``environment`` is what buildx finds the builder by.

    ``layouts``: the builder does not see the engine's images, base images are handed to it as layouts. ``direct``: the
    engine's disk is one of this machine, or at least not behind a tunnel that makes it look so.
    """

    name: str
    engine: Engine
    environment: Mapping[str, str]
    layouts: bool = False
    direct: bool = True

    def require_cache_export(self) -> None:
        """Raise `UsageError` where the builder cannot write a cache into a registry."""
        if not self.layouts and (info := self.engine.info()).store == "classic":
            raise UsageError(
                "this builder cannot write a build cache into a registry",
                where=self.name,
                because=f"Docker Engine {info.version} does that with the containerd image store only, this one has the classic",
                hint="`--cache-to inline` with `--push`, or an engine with `features.containerd-snapshotter`",
            )

    def save_layout(self, image: str, folder: Path) -> None:
        """Unpack an image of the engine as an OCI layout. Raises `BuildError` where the engine writes none."""
        from builder.registry.transport import api

        folder.mkdir(parents=True)
        with tarfile.open(fileobj=cast("IO[bytes]", _Chunks(api(self.engine).get_image(image))), mode="r|") as archive:
            archive.extractall(folder, filter="data")
        if not (folder / "index.json").is_file():
            raise BuildError(
                "the base image cannot be handed to the builder",
                where=self.name,
                because=f"Docker Engine {self.engine.version} saves no OCI layout",
                hint="Docker Engine 25 or newer does",
            )


class _Chunks:
    """A stream of chunks as a file."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest = chunks, b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size and (more := next(self._chunks, b"")):
            self._rest += more
        data, self._rest = self._rest[:size], self._rest[size:]
        return data


@contextlib.contextmanager
def place_of(builder: str | None) -> Iterator[Place]:
    """The place that `--builder NAME` names: a builder of buildx, or a Docker context, whose engine is one.

    Raises `UsageError` for a name that is none, `UnreachableError` or `BuildError` where its engine does not answer.
    """
    if builder is None:
        engine = connect()
        with contextlib.closing(engine):
            engine.require()
            yield Place("default", engine, _of_engine(engine))
        return
    driver, endpoint = inspected(builder)
    if driver != "docker":
        # Its images are loaded into the engine of this machine, as `docker buildx build --load` does.
        engine = connect()
        with contextlib.closing(engine):
            engine.require()
            yield Place(builder, engine, {"DOCKER_HOST": engine.host, "BUILDX_BUILDER": builder}, layouts=True)
        return
    with Host.parse(f"context:{endpoint}") as host:
        engine = host.engine()
        engine.require()
        yield Place(builder, engine, _of_engine(engine), direct=not host.is_tunnelled)


def _of_engine(engine: Engine) -> dict[str, str]:
    # The engine's own BuildKit, by its address: what contexts and `buildx use` say is not asked.
    return {"DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default", "DOCKER_CONTEXT": ""}


def inspected(name: str) -> tuple[str, str]:
    """Driver and endpoint of a builder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}", name):
        raise UsageError(f"{name[:100]!r} does not name a builder", hint="see `docker buildx ls`")
    buildx = find_buildx()
    environment: dict[str, Any] = {**bootstrap.tool_environment()}
    environment.setdefault("HOME", os.path.expanduser("~"))  # noqa: PTH111
    done = subprocess.run(
        [*buildx.argv, "inspect", name], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    driver = re.search(r"^Driver:\s+(\S+)", done.stdout, re.MULTILINE)
    endpoint = re.search(r"^Endpoint:\s+(\S+)", done.stdout, re.MULTILINE)
    if done.returncode or driver is None or endpoint is None:
        because = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(
            f"there is no builder `{name}`",
            because=because[0],
            hint="see `docker buildx ls`; an engine elsewhere becomes one by `docker context create NAME --docker host=ssh://…`",
        )
    return driver[1], endpoint[1]
