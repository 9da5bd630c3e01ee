"""Docker Engine and BuildKit: what is there, images by name and label, `docker buildx build` with its progress.

The Docker SDK stays inside this module. Building goes through buildx, since the SDK speaks the classic builder only.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import docker
import docker.errors
import requests
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from builder import archive, bootstrap
from builder.errors import BuildError, UsageError
from builder.interrupts import check, held_back
from builder.settings import redact

if TYPE_CHECKING:
    from builder.facts import ToolFact

_MAKES_A_LAYER = re.compile(r"(RUN|COPY|ADD|WORKDIR) ")


@dataclass(frozen=True)
class EngineInfo:
    """What answered: version, image store (`classic` or `containerd`), where it keeps its data."""

    version: str
    store: str
    data_root: Path
    local: bool


@dataclass(frozen=True)
class LayerSize:
    """One layer of an image: its size unpacked, its diff ID, the instruction that made it."""

    diff_id: str
    size: int
    created_by: str


@dataclass(frozen=True)
class Image:
    """An image of the engine."""

    id: str
    tags: tuple[str, ...]
    labels: Mapping[str, str]
    size: int
    diff_ids: tuple[str, ...]


class Engine:
    """A connection to a Docker Engine. Raises `BuildError` from every method when it does not answer."""

    def __init__(self, host: str) -> None:
        self.host = host
        try:
            self._client: Any = docker.DockerClient(base_url=host, timeout=600)
            self._version: dict[str, Any] = self._client.version()
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise BuildError(
                "the Docker Engine does not answer", where=host, because=_why(error), hint=_start_it()
            ) from error

    def close(self) -> None:
        self._client.close()

    @property
    def version(self) -> str:
        return str(self._version.get("Version", "0"))

    @property
    def api(self) -> Any:
        """The SDK's own low-level client, for what this class has no method for: pull and push with their progress, save, load."""
        return self._client.api

    def error(self, error: Exception) -> BuildError:
        """What the engine said, as an error of ours."""
        return self._error(error)

    def require(self) -> None:
        """Raise `BuildError` if the engine is too old, with the version found and the one needed."""
        needed = _needed("engine")
        if _parsed(self.version) < Version(needed.minimum):
            raise BuildError(
                f"the Docker Engine is too old: found {self.version}, needed {needed.minimum} or newer",
                where=self.host,
                because=needed.because,
                hint="upgrade it, or stop it and run `make image ENGINE=own`, which sets one up in .tools",
            )

    @property
    def reads_all_for_secrets(self) -> bool:
        """Whether a secret makes a build step read everything below it again (facts/engines.yaml)."""
        # Here, since the quick no-op needs an engine and no facts.
        from builder.facts import EngineFact, load_facts

        return any(_parsed(self.version) in SpecifierSet(fact.versions) for fact in load_facts(EngineFact))

    def info(self) -> EngineInfo:
        """What answered."""
        raw = self._guard(self._client.info)
        # The containerd store reports a snapshotter where the classic one has a graph driver.
        status = dict(pair for pair in raw.get("DriverStatus") or () if len(pair) == 2)
        store = "containerd" if "io.containerd.snapshotter" in str(status.get("driver-type", "")) else "classic"
        data_root = Path(raw.get("DockerRootDir", "/var/lib/docker"))
        local = self.host.startswith("unix://") and data_root.is_dir()
        return EngineInfo(self.version, store, data_root, local)

    def gpu_runtimes(self) -> tuple[str, ...]:
        """What the engine lists of NVIDIA: runtimes and devices. Empty also where only a hook is set up, which works."""
        raw = self._guard(self._client.info)
        found = [str(name) for name in raw.get("Runtimes") or () if "nvidia" in str(name)]
        found += [str(device.get("ID")) for device in raw.get("DiscoveredDevices") or () if "nvidia" in str(device)]
        return tuple(sorted(found))

    def find(self, reference: str) -> Image | None:
        """The image of that name or id; None if there is none."""
        try:
            raw = self._client.api.inspect_image(reference)
        except docker.errors.ImageNotFound:
            return None
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise self._error(error) from error
        return _image(raw)

    def ours(self, label: str) -> list[Image]:
        """Every image with the label, by first tag."""
        found = self._guard(lambda: self._client.api.images(filters={"label": label}))
        images = [image for raw in found if (image := self.find(raw["Id"])) is not None]
        return sorted(images, key=lambda image: (image.tags, image.id))

    def layers(self, reference: str) -> list[LayerSize]:
        """The layers of an image from the bottom, with what history says of each.

        An empty layer (WORKDIR makes one) counts: left out, it would give every layer above it its neighbour's diff ID.
        Of a base image from elsewhere history may say less than it has layers; then those are unknown, the upper ones are
        ours.
        """
        image = self.find(reference)
        if image is None:
            raise BuildError(f"there is no image `{reference}`", where=self.host)
        history = self._guard(lambda: self._client.api.history(reference))
        # History is newest first and also has steps that made no layer (ENV, LABEL …).
        made = [step for step in history if step["Size"] > 0 or _MAKES_A_LAYER.match(step["CreatedBy"])]
        padding = [{"Size": 0, "CreatedBy": ""}] * max(0, len(image.diff_ids) - len(made))
        pairs = zip(reversed(image.diff_ids), [*made, *padding], strict=False)
        return [LayerSize(diff_id, step["Size"], step["CreatedBy"]) for diff_id, step in pairs][::-1]

    def tag(self, image_id: str, names: Sequence[str]) -> None:
        """Give an image its names, all or none: an interrupt waits until the last."""
        with held_back():
            for name in names:
                repository, _, tag = name.rpartition(":")
                self._guard(lambda r=repository, t=tag: self._client.api.tag(image_id, r, t, force=True))

    def remove(self, reference: str) -> None:
        """Remove an image and its names. Raises `BuildError` where a container uses it."""
        self._guard(lambda: self._client.api.remove_image(reference, force=True))

    def volumes(self, label: str) -> list[str]:
        """The names of the volumes with the label (`name=value`), sorted."""
        found = self._guard(lambda: self._client.api.volumes(filters={"label": label}))
        return sorted(volume["Name"] for volume in found.get("Volumes") or ())

    def remove_volume(self, name: str) -> None:
        """Remove a volume. Raises `BuildError` where a container uses it."""
        self._guard(lambda: self._client.api.remove_volume(name))

    def read_file(self, reference: str, path: str) -> bytes:
        """A file out of an image, through a container that is made, never started, and removed."""
        container = self._guard(lambda: self._client.api.create_container(reference, command=["true"]))
        try:
            chunks, _ = self._client.api.get_archive(container["Id"], path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
                member = archive.extractfile(archive.getmembers()[0])
                if member is None:
                    raise BuildError(f"`{path}` in `{reference}` is not a file")
                return member.read()
        except docker.errors.NotFound as error:
            raise BuildError(
                f"`{reference}` has no {path}",
                because="it is not an image of this builder, or an older one",
            ) from error
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise self._error(error) from error
        finally:
            self._guard(lambda: self._client.api.remove_container(container["Id"], force=True, v=True))

    def run(
        self,
        reference: str,
        command: Sequence[str],
        *,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        binds: Mapping[str, str] | None = None,
        shm: int = 64 << 20,
        label: str = "",
    ) -> Iterator[str | int]:
        """Run a command in a throw-away container without network: its output lines, then its exit status.

        The container is removed whatever happens, an interrupt included. ``binds`` maps host paths to paths in the
        container, read-only.
        """
        host_config = self._client.api.create_host_config(
            binds={source: {"bind": target, "mode": "ro"} for source, target in (binds or {}).items()},
            network_mode="none",
            shm_size=shm,
        )
        container = self._guard(
            lambda: self._client.api.create_container(
                reference,
                command=list(command),
                user=user,
                environment=dict(environment or {}),
                host_config=host_config,
                labels={label: "run"} if label else {},
            )
        )["Id"]
        try:
            # Before it starts: one that has ended by then would never be let go of (seen with 26.1.5 under load).
            output = self._guard(lambda: self._client.api.attach(container, stream=True))
            self._guard(lambda: self._client.api.start(container))
            pending = b""
            for chunk in output:
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            if pending:
                yield pending.decode(errors="replace")
            yield int(self._guard(lambda: self._client.api.wait(container))["StatusCode"])
        finally:
            with contextlib.suppress(docker.errors.NotFound):
                self._client.api.remove_container(container, force=True, v=True)

    def execute(self, container: str, command: Sequence[str]) -> str | None:
        """What a command prints to stdout in a running container; None where there is no such container.

        Raises `UsageError` for one that does not run.
        """
        try:
            made = self._client.api.exec_create(container, list(command), stdout=True, stderr=False)
        except docker.errors.NotFound:
            return None
        except docker.errors.APIError as error:
            if getattr(error, "status_code", None) == 409:
                raise UsageError(
                    f"the container `{container}` does not run",
                    where=self.host,
                    hint=f"start it, `docker start {container}`, or name its image",
                ) from error
            raise self._error(error) from error
        output: bytes = self._guard(lambda: self._client.api.exec_start(made["Id"]))
        return output.decode(errors="replace")

    def _guard(self, call: Any) -> Any:
        try:
            return call()
        except (docker.errors.DockerException, requests.RequestException) as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> BuildError:
        explanation = getattr(error, "explanation", None) or str(error)
        return BuildError("the Docker Engine refused", where=self.host, because=redact(str(explanation))[:500])


def _why(error: BaseException) -> str:
    """Why there is no answer, in plain words: what the system said at the root of what the libraries wrapped around it."""
    seen: BaseException | None = error
    chain: list[BaseException] = []
    while seen is not None and seen not in chain:
        chain.append(seen)
        inner = [each for each in seen.args if isinstance(each, BaseException)]
        seen = inner[-1] if inner else seen.__cause__ or seen.__context__
    for cause in reversed(chain):
        if isinstance(cause, FileNotFoundError):
            return "there is no such socket"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        if isinstance(cause, PermissionError):
            return "this user may not use the socket: it takes root, or the group `docker`"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return redact(str(error))[:300]


def _start_it() -> str:
    hint = "see that it runs: `systemctl start docker`; where none is installed, `make engine` sets one up"
    return f"{hint}; or unset DOCKER_HOST, which names this one" if os.environ.get("DOCKER_HOST") else hint


def _image(raw: Mapping[str, Any]) -> Image:
    return Image(
        id=raw["Id"],
        tags=tuple(sorted(raw.get("RepoTags") or ())),
        labels=(raw.get("Config") or {}).get("Labels") or {},
        size=int(raw.get("Size", 0)),
        diff_ids=tuple((raw.get("RootFS") or {}).get("Layers") or ()),
    )


def _parsed(text: str) -> Version:
    # Distributions append their own: `26.1.5+dfsg1`, `0.13.1+ds1-3`.
    try:
        return Version(text.lstrip("v").split("-")[0].split("+")[0])
    except InvalidVersion:
        return Version("0")


def _needed(tool: str) -> ToolFact:
    # Here, since the quick no-op needs an engine and no facts.
    from builder.facts import ToolFact, load_facts

    facts: tuple[ToolFact, ...] = load_facts(ToolFact)
    return next(fact for fact in facts if fact.tool == tool)


def connect() -> Engine:
    """The engine to use: `DOCKER_HOST`, the default socket, or the one that `make engine` started."""
    host = bootstrap.engine_host()
    if host is None:
        raise BuildError(
            "no Docker Engine answers",
            because=f"nothing listens on {bootstrap.DEFAULT_SOCKET} and DOCKER_HOST is not set",
            hint="start it, or run `make engine`, which sets one up where none is installed",
        )
    return Engine(host)


# ------------------------------------------------------------------------------------------------------- buildx


@dataclass(frozen=True)
class Buildx:
    """The buildx to run: a plugin of the client, or its binary by itself."""

    argv: tuple[str, ...]
    version: str


def find_buildx() -> Buildx:
    """The client's buildx, else the one unpacked into ``.tools``. Raises `BuildError` if absent or too old."""
    needed = _needed("buildx")
    candidates: list[tuple[str, ...]] = []
    if (client := shutil.which("docker")) is not None:
        candidates.append((client, "buildx"))
    folders = [Path("/"), archive.UNPACKED]
    places = ["usr/libexec/docker/cli-plugins", "usr/lib/docker/cli-plugins", "usr/local/lib/docker/cli-plugins"]
    binaries = [folder / place / "docker-buildx" for folder in folders for place in places]
    candidates += [(str(binary),) for binary in binaries if binary.is_file()]
    found = []
    for argv in candidates:
        done = subprocess.run([*argv, "version"], capture_output=True, text=True, check=False)
        words = done.stdout.split()
        if done.returncode == 0 and len(words) >= 2:
            found.append(words[1])
            if _parsed(words[1]) >= Version(needed.minimum):
                return Buildx(argv, words[1])
    if found:
        raise BuildError(
            f"buildx is too old: found {found[0]}, needed {needed.minimum} or newer",
            hint="upgrade it, or run `make engine`, which unpacks one",
        )
    raise BuildError(
        "`docker buildx` was not found",
        because="images are built with BuildKit",
        hint="install your distribution's docker-buildx package, or run `make engine`, which unpacks one",
    )


@dataclass
class BuildRequest:
    """One `docker buildx build`. ``secrets`` maps an id to a file: the one way in for what is the site's."""

    dockerfile: Path
    context: Path
    target: str | None = None
    tags: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    no_cache: bool = False
    output: str = ""


def build_argv(buildx: Buildx, request: BuildRequest, metadata: Path) -> list[str]:
    """The command line of a build; secrets are named in it, their values are not."""
    argv = [*buildx.argv, "build", "--progress=rawjson", "--provenance=false", "--metadata-file", str(metadata)]
    argv += ["--file", str(request.dockerfile)]
    argv += [part for tag in request.tags for part in ("--tag", tag)]
    argv += ["--target", request.target] if request.target else []
    argv += ["--no-cache"] if request.no_cache else []
    argv += ["--output", request.output] if request.output else []
    argv += [part for key, value in sorted(request.labels.items()) for part in ("--label", f"{key}={value}")]
    argv += [part for key, value in sorted(request.arguments.items()) for part in ("--build-arg", f"{key}={value}")]
    argv += [part for key, path in sorted(request.secrets.items()) for part in ("--secret", f"id={key},src={path}")]
    return [*argv, str(request.context)]


def run_buildx(engine: Engine, buildx: Buildx, request: BuildRequest, metadata: Path) -> Generator[dict[str, Any]]:
    """Run a build and yield BuildKit's progress events; the last is ``{"exit": status, "stderr": text}``.

    Closing the generator, or an interrupt, ends the build: buildx tells the engine to cancel, which removes the
    containers of its steps; nothing is tagged.
    """
    environment = {"DOCKER_HOST": engine.host, "BUILDX_BUILDER": "default"}
    yield from run_progress(build_argv(buildx, request, metadata), environment)


def run_progress(argv: Sequence[str], environment: Mapping[str, str]) -> Generator[dict[str, Any]]:
    """Run a program that tells of its progress as BuildKit does; as `run_buildx` otherwise. ``environment`` is added to ours."""
    check()
    # A process group of its own: Ctrl-C reaches us first, and we end it in order.
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        start_new_session=True,
    )
    assert process.stderr is not None
    words: list[str] = []
    try:
        yield from progress_events((raw.decode(errors="replace") for raw in process.stderr), words)
        yield {"exit": process.wait(), "stderr": "\n".join(filter(None, words))}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        process.stderr.close()


def progress_events(lines: Iterator[str], words: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects among `lines`, on one line or (buildx 0.13) over several; other lines are put into `words`."""
    pending: list[str] = []
    for line in lines:
        stripped = line.rstrip()
        if not pending and not stripped.startswith("{"):
            words.append(stripped)
            continue
        pending.append(stripped)
        # An object ends with a brace in the first column, or on the line that it began on.
        if stripped == "}" or (len(pending) == 1 and stripped.endswith("}")):
            try:
                event = json.loads("\n".join(pending))
            except ValueError:
                words += pending
            else:
                yield event
            pending = []
    words += pending
