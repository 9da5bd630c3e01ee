"""`builder run MATRIX|IMAGE -- COMMAND`: a container with the flags that GPU work needs; its exit status is COMMAND's.

It is docker's own `run`, so that what `--dry-run` prints can be copied and changed. Why each flag: docs/launch.md.
"""

from __future__ import annotations

import argparse
import csv
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import Literal

from builder import bootstrap
from builder.engine import Engine, Image, connect
from builder.errors import BuildError, UsageError
from builder.labels import LABEL, image_names
from builder.lock import check_current, lock_path, read_lock
from builder.matrix import find_matrix, list_matrices, load
from builder.nearest import nearest
from builder.recording import OUTPUT, Recording, Tee, begin, told

MODELS = PurePosixPath("/models")
"""Where model folders are mounted, each under its own name."""

CACHE = PurePosixPath("/var/cache/sglang-stack")
"""The image's cache folder (templates/parts/environment.j2), world-writable and sticky."""

HUB = PurePosixPath("/mnt/huggingface")
"""Where the model hub's cache is mounted: outside `CACHE`, where docker would leave a folder of root's behind."""

HERE = PurePosixPath("/mnt/here")
"""Where a container has the current folder, with `--here`."""

IMAGE_USER = (10001, 0)
"""uid and gid that the image runs as (Dockerfile.base)."""

STACK_BYTES = 64 << 20
"""Limit of a thread's stack; docs/launch.md, limits."""

SHM = "32g"
"""/dev/shm where the host's is not used: docker's own 64 MB are too small for NCCL (case 101)."""

NOT_STARTED = 125
"""docker's exit status where the container was not started."""

_ENVIRONMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(=(?P<value>[^\0]*))?", re.DOTALL)
_PORT = r"[1-9][0-9]{0,4}"
_ADDRESS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}|\[[0-9a-fA-F:]+\]"
_PUBLISH = re.compile(rf"((?P<address>{_ADDRESS}):)?((?P<host>{_PORT}):)?(?P<container>{_PORT})")
_DEVICES = re.compile(r"[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*")
_FORMS = {
    "shm-size": (r"[1-9][0-9]{0,11}[bkmgBKMG]?", "a size, as in 32g"),
    "network": (r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}", "host, none, or a network's name"),
    "name": (r"[A-Za-z0-9][A-Za-z0-9_.-]{1,127}", "A-Z a-z 0-9 _ . -"),
    "cache": (r"[A-Za-z0-9][A-Za-z0-9_.-]{1,127}", "none, or a volume's name: A-Z a-z 0-9 _ . -"),
}


@dataclass(frozen=True)
class Mount:
    """A folder of the host, or a named volume, in the container."""

    kind: Literal["bind", "volume"]
    source: str
    target: str
    readonly: bool = False

    @property
    def option(self) -> str:
        """The value of docker's `--mount`: a line of comma-separated values."""
        fields = [f"type={self.kind}", f"source={self.source}", f"target={self.target}"]
        fields += ["readonly"] if self.readonly else []
        # A label by which the volumes that we made are found again.
        fields += [f"volume-label={LABEL}=cache"] if self.kind == "volume" else []
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(fields)
        return line.getvalue()


@dataclass(frozen=True)
class RunOptions:
    """One `docker run`. ``gpus`` is `all`, `none`, a count, or `device=0,1`; ``environment`` holds `K=V` or `K`."""

    image: str
    command: tuple[str, ...] = ()
    gpus: str = "all"
    ipc: str = "host"
    shm_size: str = ""
    network: str = ""
    publish: tuple[str, ...] = ()
    user: str = ""
    name: str = ""
    mounts: tuple[Mount, ...] = ()
    environment: tuple[str, ...] = ()
    nccl_p2p: bool = True
    interactive: bool = False
    terminal: bool = False
    workdir: str = ""
    lock: str = ""
    """The digest of the image's lock; empty where the image does not tell."""


def run_argv(options: RunOptions, client: str = "docker") -> list[str]:
    """The command line. Nothing is pulled: an image that is not there is an error, never another registry's."""
    argv = [client, "run", "--rm", "--pull", "never"]
    argv += ["--interactive"] if options.interactive or options.terminal else []
    argv += ["--tty"] if options.terminal else []
    argv += ["--name", options.name] if options.name else []
    # docker reads this value as comma-separated too: several devices are one quoted value.
    gpus = f'"{options.gpus}"' if "," in options.gpus else options.gpus
    argv += ["--gpus", gpus] if options.gpus != "none" else []
    argv += ["--ipc", options.ipc]
    argv += ["--shm-size", options.shm_size or SHM] if options.ipc != "host" else []
    # An engine that may not raise limits itself (in a container) refuses them: they are asked for where a GPU needs them.
    argv += ["--ulimit", "memlock=-1", "--ulimit", f"stack={STACK_BYTES}"] if options.gpus != "none" else []
    argv += ["--network", options.network] if options.network else []
    argv += [part for port in options.publish for part in ("--publish", port)]
    argv += ["--user", options.user] if options.user else []
    argv += ["--workdir", options.workdir] if options.workdir else []
    argv += [part for mount in options.mounts for part in ("--mount", mount.option)]
    environment = [] if options.nccl_p2p else ["NCCL_P2P_DISABLE=1"]
    argv += [part for item in (*environment, *options.environment) for part in ("--env", item)]
    return [*argv, options.image, *options.command]


def find_image(engine: Engine, target: str, matrices: Path) -> tuple[str, Image]:
    """The image that MATRIX or IMAGE names, and the name it is run by.

    A matrix is its lock's image, `sglang-stack:MATRIX-DIGEST`: the one of these very wheels. Raises `UsageError` where
    there is none, or where it is not an image of this builder; `LockError` for a lock that is out of date.
    """
    names = [path.stem for path in list_matrices(matrices)]
    if target in names or target.endswith((".yaml", ".yml")):
        path = find_matrix(target, matrices)
        matrix, lock = load(path).matrix, read_lock(lock_path(path))
        check_current(lock, matrix, lock_path(path))
        name, _ = image_names(matrix.name, lock.digest)
        if (image := engine.find(name)) is None:
            raise UsageError(
                f"the image of `{matrix.name}` is not built",
                where=engine.host,
                because=f"there is no `{name}`, which its lock names",
                hint=f"build it: `make image MATRIX={target}`",
            )
    else:
        name = target
        if (image := engine.find(name)) is None:
            near = nearest(target, names)
            raise UsageError(
                f"there is no matrix and no image `{target}`",
                where=engine.host,
                hint=f"did you mean `{near}`" if near else "see `builder list`",
            )
    if image.labels.get(LABEL) != "image":
        raise UsageError(
            f"`{target}` is not an image of this builder",
            because=f"it has no label `{LABEL}=image`",
            hint="run it with `docker run`: the folders that are mounted here would not be where it looks",
        )
    return name, image


def model_mounts(folders: Sequence[Path], user: str) -> tuple[Mount, ...]:
    """Model folders, read-only, each as /models/NAME. Raises `UsageError` for one that would be of no use there."""
    mounts: dict[str, Mount] = {}
    for folder in folders:
        source = _folder(folder, "--model")
        name = source.name
        if name in mounts:
            raise UsageError(
                f"two model folders are called `{name}`",
                where=f"{mounts[name].source}, {source}",
                because=f"both would be {MODELS / name}",
                hint="rename one of them",
            )
        _require(source, user, 0o5, f"read the model folder `{name}`")
        for entry in sorted(source.iterdir()):
            # The model hub's snapshots are folders of links to files beside them, which the container would not have.
            if entry.is_symlink() and not entry.resolve().is_relative_to(source):
                raise UsageError(
                    f"`{entry.name}` in the model folder is a link to outside of it",
                    where=str(source),
                    because=f"the container has the folder alone, not {entry.resolve()}",
                    hint="for a folder of the model hub's cache mount the cache, `--hf-cache DIR`, and give the server the "
                    "model's name",
                )
            _require(entry, user, 0o4, f"read `{entry.name}` of the model folder `{name}`")
        mounts[name] = Mount("bind", str(source), str(MODELS / name), readonly=True)
    return tuple(mounts.values())


def hub_mount(folder: Path, user: str) -> Mount:
    """The model hub's cache. Raises `UsageError` for a folder that the container's user could not write to."""
    source = _folder(folder, "--hf-cache")
    _require(source, user, 0o7, "write to the model hub's cache")
    return Mount("bind", str(source), str(HUB))


def here_mount(user: str) -> Mount:
    """The current folder, read-only. Raises `UsageError` for one that the container's user could not read."""
    source = _folder(Path(), "--here")
    _require(source, user, 0o5, "read the current folder")
    return Mount("bind", str(source), str(HERE), readonly=True)


def _require(path: Path, user: str, bits: int, what: str) -> None:
    """Raise `UsageError` if the container's user lacks these permissions (a digit of the mode) on ``path``."""
    uid, gid = (int(part) for part in f"{user}:0".split(":")[:2]) if user else IMAGE_USER
    status = path.stat()
    shift = 6 if status.st_uid == uid else 3 if status.st_gid == gid else 0
    if uid and status.st_mode >> shift & bits != bits:
        raise UsageError(
            f"the container's user (uid {uid}, gid {gid}) may not {what}",
            where=str(path),
            because=f"it is of uid {status.st_uid}, gid {status.st_gid}, mode {status.st_mode & 0o7777:04o}",
            hint=f"run as its owner: `--user {status.st_uid}:{status.st_gid}`"
            if status.st_uid
            else f"let others: `chmod -R a+{'rw' if bits & 0o2 else 'r'}X {shlex.quote(str(path))}`",
        )


def _folder(folder: Path, option: str) -> Path:
    source = folder.expanduser().resolve()
    if not source.is_dir():
        raise UsageError(f"`{option}` names a folder that does not exist", where=str(source))
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in str(source)):
        raise UsageError(f"`{option}` names a folder with a control character in its name", where=repr(str(source)))
    if source.name == "":
        raise UsageError(f"`{option}` names the whole disk", where=str(source))
    return source


def cache_mount(image: Image, user: str, name: str = "") -> Mount:
    """The volume for what is compiled at run time: one an image and user, unless ``name`` names another.

    What one image compiled must not be loaded by another, and flashinfer refuses a cache that it does not own
    (facts/stacks.md, section 3.13).
    """
    owner = f"-u{user.partition(':')[0]}" if user else ""
    ours = f"{LABEL}-cache-{image.id.removeprefix('sha256:')[:12]}{owner}"
    return Mount("volume", name or ours, str(CACHE))


def check_environment(items: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """`K=V`, or `K` for the value that it has here. Raises `UsageError` for what is neither."""
    for item in items:
        match = _ENVIRONMENT.fullmatch(item)
        if match is None:
            name = item.partition("=")[0]
            raise UsageError(f"`{name}` is not an environment variable's name", because="`--env` takes K=V or K")
        if match["value"] is None and match["name"] not in environment:
            raise UsageError(
                f"`{item}` is not set here",
                because=f"`--env {item}` hands on the value that it has",
                hint=f"set it, or write `--env {item}=VALUE`",
            )
    return tuple(items)


def check_gpus(value: str) -> str:
    """`all`, `none`, a count, or `device=LIST`. Raises `UsageError`."""
    devices = value.removeprefix("device=")
    if value in ("all", "none") or re.fullmatch(r"[1-9][0-9]?", value):
        return value
    if devices != value and _DEVICES.fullmatch(devices):
        return value
    hint = f"these GPUs: `--gpus device={value}`" if re.fullmatch(r"[0-9]+(,[0-9]+)*", value) else ""
    raise UsageError(
        f"`--gpus {value}` is not known",
        because="it takes all, none, a count, or device=0,1 (indexes or UUIDs)",
        hint=hint,
    )


def check_publish(items: Sequence[str]) -> tuple[str, ...]:
    """Ports as docker takes them; without an address on this machine's loopback alone. Raises `UsageError`."""
    ports = []
    for item in items:
        match = _PUBLISH.fullmatch(item)
        if match is None or any(int(port) > 65535 for port in match.group("host", "container") if port):
            raise UsageError(
                f"`--publish {item}` is not known", because="it takes PORT, HOST-PORT:PORT or ADDRESS:HOST-PORT:PORT"
            )
        host = match["host"] or match["container"]
        ports.append(f"{match['address'] or '127.0.0.1'}:{host}:{match['container']}")
    return tuple(ports)


def check_forms(arguments: argparse.Namespace) -> None:
    """Raise `UsageError` for a value of the wrong form, and for two options of which one has no effect."""
    for option, (pattern, allowed) in _FORMS.items():
        value = getattr(arguments, option.replace("-", "_"))
        if value and not re.fullmatch(pattern, value):
            raise UsageError(f"`--{option} {value}` is not known", because=f"it takes {allowed}")
    if arguments.ipc == "host" and arguments.shm_size:
        raise UsageError(
            "`--shm-size` has no effect with `--ipc host`",
            because="the container uses the host's /dev/shm",
            hint="leave it out, or add `--ipc private`",
        )
    if arguments.network in ("host", "none") and arguments.publish:
        raise UsageError(
            f"`--publish` has no effect with `--network {arguments.network}`",
            because="its ports are the host's" if arguments.network == "host" else "the container has no network",
            hint="leave one of the two out",
        )
    if arguments.record is not None and arguments.dry_run:
        raise UsageError("`--record` has no effect with `--dry-run`", hint="leave one of the two out")
    if arguments.json and not arguments.dry_run:
        raise UsageError("`--json` goes with `--dry-run`", because="what COMMAND prints is not ours")


def prepare(arguments: argparse.Namespace, matrices: Path) -> tuple[RunOptions, Engine]:
    """The options of a command line, checked, and the engine that has the image. Raises `UsageError`, `BuildError`."""
    check_forms(arguments)
    user = arguments.user or ""
    gpus, publish = check_gpus(arguments.gpus), check_publish(arguments.publish)
    given = check_environment(arguments.env, os.environ)
    mounts = [*model_mounts(arguments.model, user)]
    environment: list[str] = []
    if arguments.hf_cache is not None:
        mounts.append(hub_mount(arguments.hf_cache, user))
        environment.append(f"HF_HOME={HUB}")
    if arguments.here:
        mounts.append(here_mount(user))
    engine = connect()
    name, image = find_image(engine, arguments.target, matrices)
    if arguments.cache != "none":
        mounts.append(cache_mount(image, user, arguments.cache))
    options = RunOptions(
        image=name,
        command=tuple(arguments.command),
        gpus=gpus,
        ipc=arguments.ipc,
        shm_size=arguments.shm_size,
        network=arguments.network,
        publish=publish,
        user=user,
        name=arguments.name,
        mounts=tuple(mounts),
        environment=(*environment, *given),
        nccl_p2p=arguments.nccl_p2p == "on",
        interactive=arguments.interactive,
        # What goes through us into a log is no terminal's any more.
        terminal=arguments.record is None and sys.stdin.isatty() and sys.stdout.isatty(),
        workdir=str(HERE) if arguments.here else "",
        lock=image.labels.get(f"{LABEL}.lock", ""),
    )
    return options, engine


def record(options: RunOptions, place: Path, now: datetime) -> Recording:
    """Begin the folder of a run under ``place``. Raises `UsageError`."""
    models = [mount.target for mount in options.mounts if mount.target.startswith(f"{MODELS}/")]
    said = {
        "schema": 1,
        "started": f"{now.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "image": options.image,
        "lock": options.lock or None,
        "command": list(options.command),
        "gpus": options.gpus,
        "ipc": options.ipc,
        "nccl_p2p": options.nccl_p2p,
        "environment": told(options.environment),
        "models": models,
    }
    return begin(place, said, options.lock, now)


def find_client() -> str:
    """The docker client: the system's, else the one in ``.tools``. Raises `BuildError`."""
    if (client := bootstrap.find_program("docker")) is None:
        raise BuildError(
            "the docker client was not found",
            because="containers are run by `docker run`",
            hint="install your distribution's docker client, or run `make engine`, which unpacks one",
        )
    return client


def as_shell(argv: Sequence[str], host: str) -> str:
    """The command as one line for a shell; with `DOCKER_HOST` where docker itself would look elsewhere."""
    elsewhere = host != f"unix://{bootstrap.DEFAULT_SOCKET}" and os.environ.get("DOCKER_HOST") != host
    return (f"DOCKER_HOST={shlex.quote(host)} " if elsewhere else "") + shlex.join(argv)


def execute(argv: Sequence[str], engine: Engine, *, gpus: bool, recording: Recording | None = None) -> int:
    """Run the command in the foreground, hand signals on, and return its exit status (128 + N for a signal N).

    With ``recording`` what it prints is kept as well, and its exit status. Raises `BuildError` where the container did not
    start for want of a GPU runtime; docker has then said so in its words.
    """
    piped = subprocess.PIPE if recording is not None else None
    process = subprocess.Popen(argv, env={**os.environ, "DOCKER_HOST": engine.host}, stdout=piped, stderr=piped)
    tee = Tee(process, recording.folder / OUTPUT) if recording is not None else None

    def hand_on(number: int, _frame: FrameType | None) -> None:
        # What a terminal sends reaches the whole foreground group, docker among it: it must not get it twice.
        if number not in (signal.SIGINT, signal.SIGQUIT) or not sys.stdin.isatty():
            process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    previous = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        status = process.wait()
        if tee is not None:
            tee.join()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if recording is not None:
        recording.finish(status if status >= 0 else 128 - status)
    if status == NOT_STARTED and gpus and not engine.gpu_runtimes():
        raise BuildError(
            "the container did not start, and the engine has no GPU runtime",
            where=engine.host,
            because="it lists no runtime and no device of NVIDIA",
            hint="install NVIDIA's container toolkit, then `nvidia-ctk runtime configure --runtime=docker` and restart the "
            "engine; without a GPU: `--gpus none`",
        )
    return status if status >= 0 else 128 - status
