"""Matrix → image: validate, check, render, build with the smoke test inside, tag.

The image is tagged only after the whole build passed; a build that fails or is interrupted leaves no name behind.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from uv import find_uv_bin

from builder.display import Stage, note
from builder.engine import BuildRequest, Buildx, Engine, Image, connect, find_buildx
from builder.errors import BuilderError, BuildError, ExitCode
from builder.facts import UnpackedFact, load_facts
from builder.files import pretty_size, write_private
from builder.findings import Finding, Severity
from builder.labels import INPUTS_LABEL, LABEL, image_names
from builder.lock import Lock, check_current, lock_path, read_lock
from builder.matrix import LoadedMatrix, load
from builder.osimage import ensure_base
from builder.render import Rendered, render
from builder.rules import RULES, Context, Rule, evaluate_rules
from builder.settings import Settings
from builder.solve import solve
from builder.supply import gather

DISK_MARGIN = 1.1
"""For bytecode, and for what differs between the stack that was measured (facts/unpacked.yaml) and another."""

HEADROOM = 1_000_000_000
"""Bytes a build needs besides the image: the largest wheel in flight, BuildKit's records."""


@dataclass(frozen=True)
class Prepared:
    """A matrix that is ready to build: valid, locked, checked and rendered."""

    loaded: LoadedMatrix
    lock: Lock
    rendered: Rendered
    findings: list[Finding]

    @property
    def names(self) -> tuple[str, str]:
        """The image's names: by content, and by matrix."""
        return image_names(self.loaded.matrix.name, self.lock.digest)


class FindingsError(BuilderError):
    """Rules that found an error; carries the findings."""

    exit_code = ExitCode.FINDINGS

    def __init__(self, findings: list[Finding]) -> None:
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        super().__init__(f"{len(errors)} findings forbid to build this")
        self.findings = findings

    def __str__(self) -> str:
        return "\n".join([*(str(finding) for finding in self.findings), f"error: {self.what}"])


def prepare(path: Path, rules: Mapping[str, Rule] = RULES) -> Prepared:
    """Read, check (by `rules`) and render the matrix at `path`; touches neither network nor engine.

    Raises `UsageError`, `LockError` or `FindingsError`.
    """
    loaded = load(path)
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    findings = evaluate_rules(Context(loaded, datetime.now(UTC).date(), lock), rules)
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise FindingsError(findings)
    rendered = render(loaded.matrix, lock, Path(find_uv_bin()))
    return Prepared(loaded, lock, rendered, findings)


def supplied(prepared: Prepared, settings: Settings) -> Prepared:
    """`prepared` with what comes from this machine: direct files, fetched and checked, and patched wheels. Once is enough.

    Raises one error for all direct files that cannot be had, see `fetch_all`; then what patching raises.
    """
    if prepared.rendered.inputs:
        return prepared
    supplies = gather(prepared.loaded, prepared.lock, settings)
    if not supplies.wheels and not supplies.reports:
        return prepared
    rendered = render(prepared.loaded.matrix, prepared.lock, Path(find_uv_bin()), supplies)
    return replace(prepared, rendered=replace(rendered, inputs=prepared.rendered.digest))


def current_image(engine: Engine, prepared: Prepared) -> Image | None:
    """The image of exactly these inputs, under both its names; None if it has to be built."""
    content, plain = (engine.find(name) for name in prepared.names)
    if content is None or plain is None or content.id != plain.id:
        return None
    return content if content.labels.get(INPUTS_LABEL) == prepared.rendered.digest else None


def check_disk(engine: Engine, prepared: Prepared) -> None:
    """Raise `BuildError` if the engine's disk cannot hold what the build needs, computed from the lock."""
    info = engine.info()
    if not info.local:
        note(f"disk: not checked, {info.data_root} is on another machine")
        return
    # Of direct files no source states a size; they are here by now.
    unstated = {artefact.file for artefact in prepared.lock.artefacts if artefact.size is None}
    fetched = (path for name, path in prepared.rendered.links.items() if Path(name).name in unstated)
    wheels = prepared.rendered.plan.bytes + sum(path.stat().st_size for path in fetched)
    # The containerd store keeps each layer twice: as it is pushed, and unpacked.
    copies = 2 if info.store == "containerd" else 1
    unpacked = load_facts(UnpackedFact)[0]
    need = int(wheels * unpacked.disk / unpacked.wheels * DISK_MARGIN * copies) + HEADROOM
    free = shutil.disk_usage(info.data_root).free
    if free < need:
        raise BuildError(
            "there is not enough disk space for this build",
            where=str(info.data_root),
            because=f"it needs about {pretty_size(need)} ({pretty_size(wheels)} of wheels unpacked, {info.store} store), "
            f"{pretty_size(free)} are free",
            hint="see what this builder keeps: `builder prune`; free it: `builder prune --yes`",
        )


def build_image(
    prepared: Prepared, engine: Engine, buildx: Buildx, settings: Settings, *, no_cache: bool = False
) -> Image:
    """Build, prove and tag the image. Raises `BuildError`, `IntegrityError`, `UnreachableError`."""
    prepared = supplied(prepared, settings)
    ensure_base(engine, buildx, prepared.loaded.matrix, prepared.lock, settings)
    context = settings.cache / "contexts" / prepared.loaded.matrix.name
    with locked(context.with_name(context.name + ".lock")), secret_files(prepared, settings) as secrets:
        if secrets and engine.reads_all_for_secrets:
            note(
                f"Docker Engine {engine.version} reads the image again before each step that gets a secret "
                f"({', '.join(sorted(secrets))}): newer ones do not (docs/measurements.md)"
            )
        prepared.rendered.for_site(secrets).write(context)
        request = BuildRequest(
            dockerfile=context / "Dockerfile",
            context=context,
            target="image",
            labels={INPUTS_LABEL: prepared.rendered.digest, LABEL: "image"},
            secrets=secrets,
            no_cache=no_cache,
        )
        image = solve(engine, buildx, request, stages_of(prepared))
    engine.tag(image.id, prepared.names)
    return image


def stages_of(prepared: Prepared) -> list[Stage]:
    """The rows of the display."""
    stages = [Stage("python", "Python environment")]
    local = {Path(name).name: path for name, path in prepared.rendered.links.items()}
    for layer in prepared.rendered.plan.layers:
        # Of direct files no source states a size; they are here by now.
        sizes = {a.name: a.size or (local[a.file].stat().st_size if a.file in local else 0) for a in layer.artefacts}
        if layer.name == "sglang":
            stages.append(Stage("proof_native", "smoke test, native part"))
        stages.append(Stage(layer.name, layer.title, sizes))
    if all(stage.name != "proof_native" for stage in stages):
        stages.append(Stage("proof_native", "smoke test, native part"))
    return [
        *stages,
        Stage("proof_sglang", "smoke test, sglang part"),
        Stage("image", "proof"),
        Stage("export", "export"),
    ]


@contextlib.contextmanager
def secret_files(prepared: Prepared, settings: Settings) -> Iterator[dict[str, Path]]:
    """Files for the build's secrets, in a folder that only we can read, removed at the end: id → file."""
    with tempfile.TemporaryDirectory(prefix="builder-secrets-") as temporary:
        folder = Path(temporary)
        secrets: dict[str, Path] = {}
        if settings.ca is not None:
            secrets["ca"] = settings.ca
        if settings.netrc is not None:
            secrets["netrc"] = settings.netrc
        urls = {"index": settings.index} if settings.index else {}
        for name, index in prepared.loaded.matrix.indexes.items():
            urls[f"index-{name}"] = settings.indexes.get(name, index.url)
        texts = urls | ({"proxies": settings.proxy_script} if settings.proxies else {})
        for key, text in texts.items():
            secrets[key] = write_private(folder / key, text)
        yield secrets


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock: two builds of one matrix take turns, since they share a context folder."""
    import fcntl

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            note(f"waiting for another build of {path.stem} …")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(path: Path, settings: Settings, *, no_cache: bool = False) -> tuple[Prepared, Engine, Image, bool]:
    """What `builder build` does; returns the image and whether it had to be built."""
    prepared = prepare(path)
    engine = connect()
    engine.require()
    if not no_cache and (image := current_image(engine, prepared)) is not None:
        return prepared, engine, image, False
    for finding in prepared.findings:
        note(str(finding))
    buildx = find_buildx()
    prepared = supplied(prepared, settings)
    check_disk(engine, prepared)
    image = build_image(prepared, engine, buildx, settings, no_cache=no_cache)
    return prepared, engine, image, True
