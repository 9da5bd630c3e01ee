"""Asking a host: one script through one shell, and the engine's API where there is one. What comes back is `HostFacts`.

A transport takes the script and gives what a POSIX shell on the host printed, or None where there is no shell to be had
(`builder.hosts.host.Host.run_shell` is one). Nothing else is needed on the host, and nothing is changed there.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any

from builder.doctor import engines, readings
from builder.doctor.facts import Disk, Engine, HostFacts, Present, PresentImage, Shm
from builder.errors import BuilderError, UnreachableError
from builder.labels import LABEL

if TYPE_CHECKING:
    from builder.engine import Engine as Connection

PATIENCE = 45.0
"""Seconds for the whole script: its own two rounds take 23 at most, a slow connection comes on top."""

Transport = Callable[[str], str | None]

NO_SHELL = "only the engine of this host is reached, not its shell"


def script() -> str:
    """What is sent: `collect.sh`."""
    return (resources.files(__package__) / "collect.sh").read_text(encoding="utf-8")


def local_shell(text: str) -> str | None:
    """The transport of this machine: with the engine and the client that the builder uses. Raises `UnreachableError`."""
    from builder.hosts.host import Address, shell_environment

    try:
        done = subprocess.run(
            ["sh", "-s"],
            input=text.encode(),
            capture_output=True,
            env=shell_environment(Address("local")),
            timeout=PATIENCE,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        because = f"waited {PATIENCE:.0f} s for its shell"
        raise UnreachableError("this machine did not finish in time", because=because) from None
    return done.stdout.decode(errors="replace")


def collect(
    transport: Transport, engine: Callable[[], Connection] | None = None, collected: str | None = None
) -> HostFacts:
    """The facts of a host. ``engine`` connects to its engine by the API: asked where the shell could not tell.

    Raises what the transport raises. ``collected`` is the date, today's unless it is given.
    """
    date = collected or datetime.now(UTC).date().isoformat()
    text = transport(script())
    facts = HostFacts(collected=date, unknown={"*": NO_SHELL}) if text is None else readings.facts_of(text, date)
    if facts.engine is not None or engine is None:
        return facts
    try:
        return with_engine(facts, *_ask(engine()))
    except BuilderError as error:
        if "engine" in facts.unknown:
            return facts
        return facts.model_copy(update={"unknown": {**facts.unknown, "engine": error.because or error.what}})


def _ask(connection: Connection) -> tuple[Engine | None, tuple[PresentImage, ...]]:
    """What the API says: the engine, and the images of ours that it has. Raises `BuildError`."""
    import docker.errors
    import requests

    from builder.errors import BuildError
    from builder.registry.transport import api

    try:
        client = api(connection)
        info: Mapping[str, Any] = client.info()
        version: Mapping[str, Any] = client.version()
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise BuildError("the Docker Engine does not answer", because=str(error)[:200]) from error
    images = [
        PresentImage(id=image.id, lock=image.labels.get(f"{LABEL}.lock"), layers=image.diff_ids)
        for image in connection.ours(f"{LABEL}=image")
    ]
    return engines.of_docker(info, version), tuple(images)


def with_engine(facts: HostFacts, engine: Engine | None, images: tuple[PresentImage, ...]) -> HostFacts:
    """The same facts with what the engine's API said."""
    if engine is None:
        return facts
    unknown = {path: why for path, why in facts.unknown.items() if path not in ("engine", "shm.container_default")}
    # The shell did not know whose folder to look at.
    disk = facts.disk if facts.engine is not None else Disk(tmp_free=facts.disk.tmp_free)
    if facts.disk.data_root_free is not None and facts.engine is None:
        unknown["disk.data_root_free"] = "the engine was asked over its API, which does not tell"
    shm = Shm(host=facts.shm.host, container_default=facts.shm.container_default or engines.SHM)
    update = {"engine": engine, "present": Present(images=images), "disk": disk, "shm": shm}
    return facts.model_copy(update={**update, "unknown": dict(sorted(unknown.items()))})
