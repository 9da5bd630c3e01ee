"""The base image: the OS of every image, built by Dockerfile.base from a bootstrapped root file system or an image."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from builder import base
from builder.display import Stage, note
from builder.engine import BuildRequest, Buildx, Engine, connect, find_buildx
from builder.errors import LockError
from builder.files import write_private
from builder.labels import INPUTS_LABEL, LABEL
from builder.lock import Base, Lock, OsPackage, drift_of_packages
from builder.matrix import Matrix
from builder.render import DOCKERFILE_BASE, base_digest, base_image
from builder.settings import Settings
from builder.solve import solve

STATUS = "/var/lib/dpkg/status"
"""dpkg's database: what is installed."""


def ensure_base(engine: Engine, buildx: Buildx, matrix: Matrix, lock: Lock, settings: Settings) -> str:
    """The base image's name; bootstraps and builds it where the engine does not have it."""
    name, digest = base_image(matrix, lock), base_digest(matrix, lock)
    found = engine.find(name)
    if found is not None and found.labels.get(INPUTS_LABEL) == digest:
        return name
    with _request(matrix, lock.base.reference, settings, digest) as request:
        if lock.base.kind == "archive":
            _materialise(locked_rootfs(matrix, lock, settings), request.context / "rootfs.tar")
        image = solve(engine, buildx, request, _stages(lock.base.kind))
    if lock.base.kind == "image":
        _say_moved(matrix.name, lock.base.packages, base.parse_status(engine.read_file(image.id, STATUS).decode()))
    engine.tag(image.id, [name])
    return name


def lock_base(matrix: Matrix, settings: Settings) -> Base:
    """The base of a new lock: makes the OS and lists every package in it. An OS from an image needs an engine."""
    if matrix.base.kind == "archive":
        return base.lock_base(matrix, settings)
    engine = connect()
    engine.require()
    with _request(matrix, matrix.base.reference, settings, "") as request:
        image = solve(engine, find_buildx(), request, _stages("image"))
    packages = base.parse_status(engine.read_file(image.id, STATUS).decode())
    os_base = matrix.base
    return Base(
        kind="image",
        distribution=os_base.distribution,
        release=os_base.release,
        reference=os_base.reference,
        packages=packages,
    )


@contextlib.contextmanager
def _request(matrix: Matrix, reference: str | None, settings: Settings, digest: str) -> Iterator[BuildRequest]:
    with tempfile.TemporaryDirectory(prefix="builder-base-") as temporary:
        # One folder for all: the engine keeps a copy of each context, by its path, and the root file system is large.
        context = settings.cache / "contexts" / "os-base"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        shutil.copy(Path(base.__file__).parent / "smoke" / "finish.py", context / "finish.py")
        arguments = {"KIND": matrix.base.kind, "EPOCH": str(base.EPOCH)}
        secrets = {"ca": settings.ca} if settings.ca else {}
        if matrix.base.kind == "image":
            if settings.proxies:
                secrets["proxies"] = write_private(Path(temporary) / "proxies", settings.proxy_script)
            arguments |= {"REFERENCE": reference or "", "PACKAGES": " ".join(base.os_packages(matrix))}
            if (sources := base.site_sources(matrix, settings)) is not None:
                secrets["apt-sources"] = write_private(Path(temporary) / "site.list", sources)
        yield BuildRequest(
            dockerfile=DOCKERFILE_BASE,
            context=context,
            target="base",
            labels={INPUTS_LABEL: digest, LABEL: "base"},
            arguments=arguments,
            secrets=secrets,
        )


def _stages(kind: str) -> list[Stage]:
    titles = {"archive": "OS, from the archive", "image": "OS, from an image"}
    return [Stage(kind, titles[kind]), Stage("base", "OS, user and folders"), Stage("export", "export")]


def _materialise(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def locked_rootfs(matrix: Matrix, lock: Lock, settings: Settings) -> Path:
    """The root file system of the lock's package list, from the cache or bootstrapped now.

    Where the archive has moved on, newer versions of the same packages are taken and said, since a distribution serves
    no others; another set of packages is a `LockError`.
    """
    target = base.rootfs_path(lock.base, settings)
    if target.is_file():
        return target
    note(f"bootstrapping {lock.base.distribution} {lock.base.release} from its archive …")
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        packages = base.bootstrap_rootfs(matrix, fresh, settings)
        _say_moved(matrix.name, lock.base.packages, packages)
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return target


def _say_moved(name: str, locked: tuple[OsPackage, ...], packages: tuple[OsPackage, ...]) -> None:
    """Say which versions are newer than locked; raise `LockError` for another set of packages."""
    if {package.name for package in packages} != {package.name for package in locked}:
        raise LockError(
            "the archive gives another set of OS packages than the lock",
            because="; ".join(drift_of_packages(locked, packages)),
            hint=f"take it: `builder lock {name}`",
        )
    if changes := drift_of_packages(locked, packages):
        note("warning: the archive has moved since the lock was made [os-packages-moved]")
        note(f"  because: {'; '.join(changes)}")
        note(f"  hint: the image gets these versions; to lock them: `builder lock {name}`")
