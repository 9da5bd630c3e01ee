"""`builder bake`: the images of several matrices in one run, on any buildx builder; stages that they share are built once.

Each is built, proven and named as by `builder build`; one that fails does not keep the others from theirs.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builder import build
from builder.bakefile import CONTEXTS, INLINE, LAYOUTS, SECRETS, Cache, Target, bake_text, owner_pattern
from builder.board import Board
from builder.build import Prepared, check_disk, current_image, prepare, secret_files, stages_of, supplied
from builder.builders import Place
from builder.display import Progress, note, row
from builder.engine import Buildx, Image, find_buildx, run_progress
from builder.errors import BuilderError, BuildError, ExitCode, UsageError
from builder.files import write_atomic
from builder.interrupts import held_back
from builder.labels import INPUTS_LABEL
from builder.osimage import ensure_base
from builder.render import base_image
from builder.settings import Settings
from builder.solve import failure

_OWNER = owner_pattern()


@dataclass
class Outcome:
    """What became of one matrix. ``cached``: there was nothing to do. ``digest`` is its manifest's where it was pushed."""

    matrix: str
    image: str = ""
    digest: str | None = None
    cached: bool = False
    seconds: float = 0.0
    error: BuilderError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.image)

    def as_json(self) -> dict[str, Any]:
        return {
            "matrix": self.matrix,
            "ok": self.ok,
            "image": {"id": self.image} if self.image else None,
            "digest": self.digest,
            "cached": self.cached,
            "seconds": round(self.seconds, 1),
            "message": str(self.error) if self.error else "",
        }


@dataclass
class Baked:
    """What became of all of them."""

    builder: str
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all are fine, else that of the failed if they agree, else the smallest of them."""
        return min((int(each.error.exit_code) for each in self.outcomes if each.error), default=int(ExitCode.OK))

    def as_json(self) -> dict[str, Any]:
        """The shape `bake` of docs/distribution.md."""
        targets = [outcome.as_json() for outcome in self.outcomes]
        return {"ok": all(each.ok for each in self.outcomes), "builder": self.builder, "targets": targets}

    def reasons(self) -> list[str]:
        """The lines that say why what failed did."""
        return [text for each in self.outcomes if each.error for text in (f"{each.matrix}:", str(each.error), "")]

    def as_text(self) -> str:
        """What failed, with its reasons; then a line for each."""
        wide = max((len(each.matrix) for each in self.outcomes), default=0)
        lines = self.reasons()
        for each in self.outcomes:
            state = "FAILED" if not each.ok else "nothing changed" if each.cached else "built and proven"
            image = each.digest or each.image
            seconds = f"{each.seconds:.0f} s" if each.ok and not each.cached else ""
            lines.append(f"{each.matrix:<{wide}}  {state:<16}  {image[:19]:<19}  {seconds}".rstrip())
        return "\n".join(lines)


class Watch:
    """Sorts BuildKit's events by target: one `Progress` each. A step that several share is told under each name it has."""

    def __init__(self, targets: Mapping[str, Prepared]) -> None:
        self.progress = {name: Progress(stages_of(prepared)) for name, prepared in targets.items()}
        self.ended: dict[str, float] = {}
        self.began = time.monotonic()
        self._owners: dict[str, set[str]] = {}

    def feed(self, event: Mapping[str, Any]) -> set[str]:
        """Take one event; the targets that it is about."""
        parts: dict[str, dict[str, list[Any]]] = {}
        for vertex in event.get("vertexes") or ():
            owner = self._owner(str(vertex.get("name", "")))
            # A cache that is not there yet is an error of its step, and none of the build.
            if owner and "importing cache manifest" not in vertex["name"]:
                self._owners.setdefault(vertex.get("digest", ""), set()).add(owner)
                parts.setdefault(owner, {}).setdefault("vertexes", []).append(vertex)
                if "exporting to" in vertex["name"] and vertex.get("completed") and not vertex.get("error"):
                    self.ended[owner] = time.monotonic()
        for kind in ("statuses", "logs"):
            for entry in event.get(kind) or ():
                for owner in self._owners.get(entry.get("vertex", ""), ()):
                    parts.setdefault(owner, {}).setdefault(kind, []).append(entry)
        for owner, part in parts.items():
            self.progress[owner].feed(part)
        return set(parts)

    def _owner(self, name: str) -> str:
        match = _OWNER.match(name)
        if match and match["target"] in self.progress:
            return match["target"]
        # With one target alone its name is left out.
        return next(iter(self.progress)) if len(self.progress) == 1 and "bake definitions" not in name else ""

    def at(self, target: str) -> tuple[str, str]:
        """What a target is at: the titles of its running stages, and more about them."""
        running = [stage for stage in self.progress[target].stages.values() if stage.state == "running"]
        more = "; ".join(" ".join(filter(None, row(stage)[2:])) for stage in running)
        return ", ".join(stage.title for stage in running), more

    def failed(self) -> dict[str, Progress]:
        """The targets of which a step failed by itself, and was not only ended with the others."""
        return {name: progress for name, progress in self.progress.items() if progress.failed is not None}


def bake(
    paths: Sequence[Path], settings: Settings, place: Place, cache: Cache, *, push: Mapping[str, Any] | None = None
) -> Baked:
    """Build the matrices at ``paths`` at ``place``. What is wrong with one of them is in its outcome and raises nothing.

    ``push`` are the arguments for `builder.registry.push.push`, with the registry as `target`. Raises `BuildError` and
    `UsageError` for what concerns all of them.
    """
    if cache.to not in ("", INLINE):
        place.require_cache_export()
    buildx = find_buildx()
    outcomes = {path: Outcome(path.stem) for path in paths}
    ready: dict[str, tuple[Outcome, Prepared]] = {}
    # All that can be known of all of them is told before anything is fetched for one.
    every = _prepared(outcomes)
    for path, prepared in every.items():
        try:
            _make_ready(prepared, outcomes[path], settings, place, buildx, ready)
        except BuilderError as error:
            _end(outcomes[path], error)
    images = _build(ready, settings, place, buildx, cache)
    with held_back():
        for name, image in images.items():
            outcome, prepared = ready[name]
            place.engine.tag(image.id, prepared.names)
            outcome.image = image.id
    if push is not None:
        _push(outcomes, place, settings, push)
    return Baked(place.name, list(outcomes.values()))


def print_text(paths: Sequence[Path], settings: Settings, cache: Cache, *, layouts: bool) -> tuple[str, Baked]:
    """What `--print` shows: the bake file, without an engine and without a fetch.

    There is none, and the text is empty, where a matrix cannot be built: a file without it would be of another run. Its
    outcome says why.
    """
    outcomes = {path: Outcome(path.stem) for path in paths}
    every = _prepared(outcomes, say=lambda text: None)
    baked = Baked("", list(outcomes.values()))
    if baked.exit_code != ExitCode.OK:
        return "", baked
    targets = []
    for prepared in every.values():
        with secret_files(prepared, settings) as secrets:
            targets.append(_target(prepared, secrets, layouts=layouts))
    return bake_text(targets, cache), baked


def _prepared(outcomes: Mapping[Path, Outcome], say: Callable[[str], None] = note) -> dict[Path, Prepared]:
    """Those that can be built as far as can be known without an engine and a fetch; of the others the outcome has the error."""
    found: dict[Path, Prepared] = {}
    names: set[str] = set()
    for path, outcome in outcomes.items():
        try:
            prepared = prepare(path)
            outcome.matrix = prepared.loaded.matrix.name
            if (name := Target(outcome.matrix, "").name) in names:
                raise UsageError(f"`{outcome.matrix}` is named twice", where=str(path))
        except BuilderError as error:
            _end(outcome, error, say)
            continue
        names.add(name)
        found[path] = prepared
    return found


def _end(outcome: Outcome, error: BuilderError, say: Callable[[str], None] = note) -> None:
    outcome.error = error
    say(f"{outcome.matrix}: {error.what}")


def _make_ready(
    prepared: Prepared,
    outcome: Outcome,
    settings: Settings,
    place: Place,
    buildx: Buildx,
    ready: dict[str, tuple[Outcome, Prepared]],
) -> None:
    if (image := current_image(place.engine, prepared)) is not None:
        outcome.image, outcome.cached = image.id, True
        return
    for finding in prepared.findings:
        note(str(finding))
    prepared = supplied(prepared, settings)
    if place.direct:
        check_disk(place.engine, prepared)
    ensure_base(place.engine, buildx, prepared.loaded.matrix, prepared.lock, settings)
    ready[Target(outcome.matrix, "").name] = (outcome, prepared)


def _target(prepared: Prepared, secrets: Mapping[str, Path], *, layouts: bool) -> Target:
    matrix = prepared.loaded.matrix
    layout = base_image(matrix, prepared.lock) if layouts else ""
    return Target(matrix.name, prepared.rendered.digest, tuple(secrets), layout)


def _build(
    ready: Mapping[str, tuple[Outcome, Prepared]], settings: Settings, place: Place, buildx: Buildx, cache: Cache
) -> dict[str, Image]:
    """The images by target, not named yet. Of one that fails its outcome has the error."""
    if not ready:
        return {}
    with contextlib.ExitStack() as held:
        # Bake reads the file, the secrets and the layouts from one folder that only we can read.
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="builder-bake-")))
        contexts = settings.cache / "contexts"
        targets: dict[str, Target] = {}
        for name, (_, prepared) in sorted(ready.items()):
            context = contexts / prepared.loaded.matrix.name
            held.enter_context(build.locked(context.with_name(context.name + ".lock")))
            secrets = held.enter_context(secret_files(prepared, settings))
            _link_secrets(secrets, folder / "secrets" / prepared.loaded.matrix.name)
            prepared.rendered.for_site(secrets).write(context)
            targets[name] = _target(prepared, secrets, layouts=place.layouts)
        if place.layouts:
            for base in sorted({target.layout for target in targets.values()}):
                place.save_layout(base, folder / "layouts" / base.replace(":", "-"))
        file = folder / "docker-bake.json"
        write_atomic(file, bake_text(list(targets.values()), cache), mode=0o600)
        variables = {CONTEXTS: str(contexts), SECRETS: str(folder / "secrets"), LAYOUTS: str(folder / "layouts")}
        return _rounds(ready, place, buildx, file, variables)


def _link_secrets(secrets: Mapping[str, Path], folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    for name, path in secrets.items():
        (folder / name).symlink_to(path)


def _rounds(
    ready: Mapping[str, tuple[Outcome, Prepared]],
    place: Place,
    buildx: Buildx,
    file: Path,
    variables: Mapping[str, str],
) -> dict[str, Image]:
    """Bake until no target is left: bake ends all of them when one fails, so the others are asked for again without it.

    What they had built by then is in the build cache.
    """
    left = sorted(ready)
    with Board("matrix", [ready[name][1].loaded.matrix.name for name in left]) as board:
        while left:
            watch = Watch({name: ready[name][1] for name in left})
            argv = [*buildx.argv, "bake", "--file", str(file), "--progress=rawjson", "--provenance=false"]
            argv += ["--metadata-file", str(file.with_name("metadata.json")), *left]
            status, words = 1, ""
            events = run_bake(argv, {**place.environment, **variables})
            with contextlib.closing(events):
                for event in events:
                    if "exit" in event:
                        status, words = event["exit"], event["stderr"]
                    for name in watch.feed(event):
                        title, more = watch.at(name)
                        if title:
                            board.at(ready[name][1].loaded.matrix.name, title, more)
            for name in left:
                outcome = ready[name][0]
                outcome.seconds += watch.ended.get(name, time.monotonic()) - watch.began
            if not status:
                return _made(ready, left, place, board, file.with_name("metadata.json"))
            failed = {name: failure(progress, words) for name, progress in watch.failed().items()}
            # What no step said concerns all of them.
            for name, error in (failed or {name: _whole(words, place) for name in left}).items():
                ready[name][0].error = error
                board.end(ready[name][1].loaded.matrix.name, "FAILED", error.what)
                left.remove(name)
    return {}


def _whole(words: str, place: Place) -> BuildError:
    because = words[-1500:] or "buildx gave no reason"
    return BuildError("the build failed", where=place.name, because=because)


def _made(
    ready: Mapping[str, tuple[Outcome, Prepared]], left: Sequence[str], place: Place, board: Board, metadata: Path
) -> dict[str, Image]:
    said = json.loads(metadata.read_text(encoding="utf-8"))
    images = {}
    for name in left:
        outcome, prepared = ready[name]
        made = said.get(name, {})
        # The classic store names an image by its config, the containerd store by its manifest.
        digests = (made.get(key) for key in ("containerimage.digest", "containerimage.config.digest"))
        image = next((found for digest in digests if digest and (found := place.engine.find(digest))), None)
        if image is None or image.labels.get(INPUTS_LABEL) != prepared.rendered.digest:
            outcome.error = BuildError("the build ended without its image", where=place.name)
            board.end(prepared.loaded.matrix.name, "FAILED")
            continue
        images[name] = image
        board.end(prepared.loaded.matrix.name, "proven")
    return images


def run_bake(argv: Sequence[str], environment: Mapping[str, str]) -> Generator[dict[str, Any]]:
    """Run bake and yield events as `builder.engine.run_buildx` does; closing the generator ends the build."""
    # Newer ones ask whether a file may read what lies outside its folder; this one is our own.
    yield from run_progress(argv, {**environment, "BUILDX_BAKE_ENTITLEMENTS_FS": "0"})


def _push(outcomes: Mapping[Path, Outcome], place: Place, settings: Settings, arguments: Mapping[str, Any]) -> None:
    """Push what is fine, as `builder push` does: signature, SBOM and provenance before the moving tag."""
    from builder.registry.push import push

    for path, outcome in outcomes.items():
        if outcome.ok:
            try:
                outcome.digest = push(path, settings=settings, engine=place.engine, **arguments)["digest"]
            except BuilderError as error:
                outcome.error = error
