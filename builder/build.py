"""Matrix → image: validate, check, render, build with the smoke test inside, tag.

The image is tagged only after the whole build passed; a build that fails or is interrupted leaves no name behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from uv import find_uv_bin

from builder import base
from builder.display import Display, Progress, Stage, note
from builder.engine import Buildx, BuildRequest, Engine, Image, connect, find_buildx, run_buildx
from builder.errors import BuilderError, BuildError, IntegrityError, LockError
from builder.facts import UnpackedFact, load_facts
from builder.files import pretty_size
from builder.findings import Finding, Severity
from builder.lock import Lock, check_current, drift_of_packages, lock_path, read_lock
from builder.matrix import LoadedMatrix, load
from builder.render import DOCKERFILE_BASE, LABEL, Rendered, base_digest, base_image, render
from builder.rules import RULES, Context, Rule, evaluate_rules
from builder.settings import Settings

INPUTS_LABEL = f"{LABEL}.inputs"
"""Label with the sha256 of everything that went into an image: equal means that there is nothing to do."""

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
        name = self.loaded.matrix.name
        return f"sglang-stack:{name}-{self.lock.digest[:12]}", f"sglang-stack:{name}"


class FindingsError(BuilderError):
    """Rules that found an error; carries the findings."""

    def __init__(self, findings: list[Finding]) -> None:
        errors = [finding for finding in findings if finding.severity is Severity.ERROR]
        super().__init__(f"{len(errors)} findings forbid to build this")
        self.findings = findings

    from builder.errors import ExitCode as _ExitCode

    exit_code = _ExitCode.FINDINGS

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
    wheels = prepared.rendered.plan.bytes
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


def ensure_base(engine: Engine, buildx: Buildx, prepared: Prepared, settings: Settings) -> str:
    """The base image's name; bootstraps and builds it where the engine does not have it."""
    matrix, lock = prepared.loaded.matrix, prepared.lock
    name, digest = base_image(matrix, lock), base_digest(matrix, lock)
    found = engine.find(name)
    if found is not None and found.labels.get(INPUTS_LABEL) == digest:
        return name
    secrets = {"ca": settings.ca} if settings.ca else {}
    with tempfile.TemporaryDirectory(prefix="builder-base-") as temporary:
        context = Path(temporary)
        shutil.copy(Path(base.__file__).parent / "smoke" / "finish.py", context / "finish.py")
        arguments = {"KIND": lock.base.kind, "EPOCH": str(base.epoch(matrix))}
        if lock.base.kind == "archive":
            rootfs = locked_rootfs(prepared, settings)
            (context / "rootfs.tar").symlink_to(rootfs)
            _materialise(rootfs, context / "rootfs.tar")
        else:
            arguments |= {"REFERENCE": lock.base.reference or "", "PACKAGES": " ".join(base.os_packages(matrix))}
        request = BuildRequest(
            dockerfile=DOCKERFILE_BASE,
            context=context,
            target="base",
            labels={INPUTS_LABEL: digest, LABEL: "base"},
            arguments=arguments,
            secrets=secrets,
            proxies=settings.proxies,
        )
        titles = [("archive", "OS, from the archive"), ("image", "OS, from an image"), ("base", "OS, user and folders")]
        stages = [Stage(key, title) for key, title in titles if key in ("base", lock.base.kind)]
        image = _build(engine, buildx, request, [*stages, Stage("export", "export")])
    engine.tag(image.id, [name])
    return name


def _materialise(source: Path, target: Path) -> None:
    target.unlink()
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def locked_rootfs(prepared: Prepared, settings: Settings) -> Path:
    """The root file system of the lock's package list, from the cache or bootstrapped now.

    Where the archive has moved on, newer versions of the same packages are taken and said, since a distribution serves
    no others; another set of packages is a `LockError`.
    """
    target = base.rootfs_path(prepared.lock.base, settings)
    if target.is_file():
        return target
    note(f"bootstrapping {prepared.lock.base.distribution} {prepared.lock.base.release} from its archive …")
    locked = prepared.lock.base.packages
    fresh = target.with_name(f".{target.name}.new")
    try:
        packages = base.bootstrap_rootfs(prepared.loaded.matrix, fresh, settings)
        name = prepared.loaded.matrix.name
        if {package.name for package in packages} != {package.name for package in locked}:
            raise LockError(
                "the archive gives another set of OS packages than the lock",
                because="; ".join(drift_of_packages(locked, packages)),
                hint=f"take it: `builder lock {name}`",
            )
        if changes := drift_of_packages(locked, packages):
            note(f"warning: the archive has moved since the lock was made [os-packages-moved]\n  because: {'; '.join(changes)}")
            note(f"  hint: the image gets these versions; to lock them: `builder lock {name}`")
        fresh.replace(target)
    finally:
        fresh.unlink(missing_ok=True)
    return target


def build_image(prepared: Prepared, engine: Engine, buildx: Buildx, settings: Settings, *, no_cache: bool = False) -> Image:
    """Build, prove and tag the image. Raises `BuildError`, `IntegrityError`, `UnreachableError`."""
    ensure_base(engine, buildx, prepared, settings)
    context = settings.cache / "contexts" / prepared.loaded.matrix.name
    with _locked(context.with_name(context.name + ".lock")), secret_files(prepared, settings) as secrets:
        prepared.rendered.write(context)
        request = BuildRequest(
            dockerfile=context / "Dockerfile",
            context=context,
            target="image",
            labels={INPUTS_LABEL: prepared.rendered.digest, LABEL: "image"},
            secrets=secrets,
            proxies=settings.proxies,
            no_cache=no_cache,
        )
        image = _build(engine, buildx, request, stages_of(prepared))
    engine.tag(image.id, prepared.names)
    return image


def stages_of(prepared: Prepared) -> list[Stage]:
    """The rows of the display."""
    stages = [Stage("python", "Python environment")]
    for layer in prepared.rendered.plan.layers:
        sizes = {artefact.name: artefact.size or 0 for artefact in layer.artefacts}
        if layer.name == "sglang":
            stages.append(Stage("proof_native", "smoke test, native part"))
        stages.append(Stage(layer.name, layer.title, sizes))
    if all(stage.name != "proof_native" for stage in stages):
        stages.append(Stage("proof_native", "smoke test, native part"))
    return [*stages, Stage("proof_sglang", "smoke test, sglang part"), Stage("image", "proof"), Stage("export", "export")]


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
        for key, url in urls.items():
            path = folder / key
            path.touch(mode=0o600)
            path.write_text(url, encoding="utf-8")
            secrets[key] = path
        yield secrets


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
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


def _build(engine: Engine, buildx: Buildx, request: BuildRequest, stages: list[Stage]) -> Image:
    progress = Progress(stages)
    with tempfile.TemporaryDirectory(prefix="builder-") as temporary:
        metadata = Path(temporary) / "metadata.json"
        events = run_buildx(engine, buildx, request, metadata)
        status, words = 1, ""
        with Display(progress) as display, contextlib.closing(events):
            for event in events:
                if "exit" in event:
                    status, words = event["exit"], event["stderr"]
                else:
                    display.feed(event)
        if status:
            raise failure(progress, words)
        made = json.loads(metadata.read_text(encoding="utf-8"))
    # The classic store names an image by its config, the containerd store by its manifest.
    for key in ("containerimage.digest", "containerimage.config.digest"):
        if (digest := made.get(key)) and (image := engine.find(digest)) is not None:
            return image
    raise BuildError("the build ended without an image", because=words[-500:])


def failure(progress: Progress, words: str) -> BuilderError:
    """The error of a failed build: which stage, the words that name the cause, what to do."""
    if progress.failed is None:
        return BuildError("the build failed", because=words[-1500:] or "buildx gave no reason")
    stage, error = progress.failed
    log = [line for line in progress.failed_log if line.strip()]
    text = "\n".join(log)
    if "no space left on device" in (text + error).lower():
        return BuildError("the disk is full", because=_tail(log) or error, hint="free space: `builder prune --yes`")
    if "Hash mismatch" in text:
        return IntegrityError(
            f"a file is not the one that the lock pins (stage `{stage}`)",
            because=_from(log, "Hash mismatch"),
            hint="the index, or something between it and here, serves other bytes under this name; nothing was installed",
        )
    if stage.startswith("proof"):
        return BuildError(
            "the smoke test failed: there is no image",
            because="\n".join(finding_lines(log)) or _tail(log),
            hint="each error above names its cause; the layers stay in the build cache",
        )
    return BuildError(f"stage `{stage}` failed", because=_tail(log) or error, hint=_hint(text))


def _hint(text: str) -> str:
    if re.search(r"certificate|UnknownIssuer", text):
        return "name the site's certificate authority: BUILDER_CA=/path/to/ca.pem"
    if re.search(r"dns error|error sending request|timed out|Connect", text):
        return "the build cannot reach the package index; mirrors and proxies: README, \"Mirrors and authorities\""
    return ""


def _tail(lines: list[str], count: int = 15) -> str:
    return "\n".join(lines[-count:])


def finding_lines(lines: list[str]) -> list[str]:
    """The findings among a smoke test's lines: `error:` with its `because:` and `hint:`, less the checks between them."""
    kept = []
    inside = False
    for line in lines:
        words = line.split()
        if words and words[0] in ("error:", "because:", "hint:", "at:", "source:"):
            inside = True
        elif len(words) > 1 and (words[1] in ("ok", "FAILED", "-") or words[:2] == ["smoke", "test"]):
            inside = False
        if inside:
            kept.append(line.strip() if words[0] == "error:" else f"  {line.strip()}")
    return kept


def _from(lines: list[str], mark: str) -> str:
    start = next((number for number, line in enumerate(lines) if mark in line), None)
    return "" if start is None else "\n".join(lines[start : start + 60])


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
    check_disk(engine, prepared)
    image = build_image(prepared, engine, buildx, settings, no_cache=no_cache)
    return prepared, engine, image, True
