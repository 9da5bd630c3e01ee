"""Layer plan → Dockerfile and build context: deterministic bytes, from validated values only.

Templates hold include, for and if over validated values. As a second lock on the same door, every value they print goes
through `finalize`, which refuses a line break or control character whatever a model let through.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from builder.base import EPOCH, RECIPE, os_packages
from builder.doctor.requirement import CAPABILITIES, VARIABLE, require_cuda, stack_driver
from builder.errors import UsageError
from builder.facts import CacheFact, load_facts
from builder.files import canonical_json, pretty_size, sha256_hex, write_atomic
from builder.labels import DRIVER_LABEL, LABEL, REQUIRES_LABEL, STAND_IN_LABEL
from builder.layers import ORDER, LayerPlan, plan_layers, stage_below
from builder.lock import Lock
from builder.matrix import Matrix
from builder.smokespec import smoke_spec
from builder.supply import Supplies, patch_inputs, patch_words, stand_ins

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / "templates"
DOCKERFILE_BASE = ROOT / "Dockerfile.base"

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# A line of its own in templates/parts/install.j2 and nowhere else; a value cannot look like one, it has no line break.
_SECRET_MOUNT = re.compile(r"    --mount=type=secret,id=([a-z0-9._-]+),target=\S+ \\\n")


def quoted(value: str) -> str:
    """`value` as a double-quoted Dockerfile word: nothing in it expands or ends the word."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'


def _finalize(value: object) -> object:
    text = str(value)
    # Whole instructions come out of included templates only, never out of an expression: no value has a line break.
    if _CONTROL.search(text):
        raise UsageError(
            "a value may not reach a Dockerfile",
            because=f"it holds a line break or a control character: {text[:80]!r}",
            hint="this is a fault of the builder: a model let it through",
        )
    return value


def less_secrets(dockerfile: str, kept: Collection[str] = ()) -> str:
    """A rendered Dockerfile without the mounts of secrets other than `kept`."""
    lines = dockerfile.splitlines(keepends=True)
    return "".join(line for line in lines if (mount := _SECRET_MOUNT.match(line)) is None or mount[1] in kept)


@dataclass(frozen=True)
class View:
    """What the templates see: a flat view of the plan, every value of it validated."""

    plan: LayerPlan
    base_image: str

    def __getattr__(self, name: str) -> object:
        return getattr(self.plan, name)

    @property
    def matrix(self) -> str:
        return self.plan.matrix.name

    @property
    def summary(self) -> str:
        return self.plan.matrix.summary

    @property
    def digest(self) -> str:
        return self.plan.lock.digest

    @property
    def python(self) -> str:
        return self.plan.lock.python

    @property
    def base_title(self) -> str:
        return f"{self.plan.lock.base.distribution} {self.plan.lock.base.release}"

    @property
    def base_packages(self) -> int:
        return len(self.plan.lock.base.packages)

    @property
    def environment(self) -> list[tuple[str, str]]:
        return sorted(self.plan.matrix.environment.items())

    @property
    def toolkit(self) -> list[tuple[str, str]]:
        """What NVIDIA's container toolkit reads, where there is anything to ask for; a matrix's `environment` wins.

        Not NVIDIA_VISIBLE_DEVICES: `--gpus` and Kubernetes set it, and with an engine whose default runtime is NVIDIA's a
        value in the image would put every GPU, and this requirement, into containers that want none (the smoke test's).
        """
        require = require_cuda(stack_driver(self.plan.matrix, self.plan.lock))
        return [CAPABILITIES, (VARIABLE, require)] if require else []

    @property
    def labels(self) -> list[tuple[str, str]]:
        return sorted({**self.plan.matrix.labels, **image_labels(self.plan)}.items())

    @property
    def caches(self) -> tuple[CacheFact, ...]:
        """Caches that would lie in the home folder, which goes away with a container."""
        return load_facts(CacheFact)

    def parent_of(self, name: str) -> str:
        return self.plan.below_sglang if name == "sglang" else stage_below(ORDER.index(name))


def image_labels(plan: LayerPlan) -> dict[str, str]:
    """The labels that say what an image is; no time, host or path."""
    matrix, lock = plan.matrix, plan.lock
    labels = {
        f"{LABEL}.matrix": matrix.name,
        f"{LABEL}.lock": lock.digest,
        f"{LABEL}.gpus": ",".join(matrix.gpus),
        f"{LABEL}.cuda": matrix.cuda.version,
        "org.opencontainers.image.title": f"sglang-stack {matrix.name}",
        "org.opencontainers.image.description": matrix.summary,
        "org.opencontainers.image.version": lock.digest[:12],
    }
    for name in matrix.stack.pins():
        if version := lock.version_of(name):
            labels[f"{LABEL}.stack.{name}"] = version
    if (driver := stack_driver(matrix, lock)) is not None:
        labels[DRIVER_LABEL] = driver.minimum_driver
        if require := require_cuda(driver):
            labels[REQUIRES_LABEL] = require
    if matrix.stand_in is not None:
        labels[STAND_IN_LABEL] = ",".join(matrix.stand_in.packages)
    sets = [name for name in ("sm120", "eagle3") if getattr(matrix.patches, name) is not None]
    if sets or matrix.patches.diffs:
        # Which sites were patched and which a release has itself stands in /opt/sglang-stack/patches.json.
        labels[f"{LABEL}.patches"] = ",".join([*sets, *(f"diff{i + 1}" for i in range(len(matrix.patches.diffs)))])
    return labels


def base_digest(matrix: Matrix, lock: Lock) -> str:
    """What decides the base image: the package list, how it is made, and the layer's recipe."""
    recipe = DOCKERFILE_BASE.read_bytes() + (Path(__file__).parent / "smoke" / "finish.py").read_bytes()
    base = lock.base.model_dump(mode="json")
    return sha256_hex(canonical_json([base, os_packages(matrix), RECIPE, EPOCH, sha256_hex(recipe)]))


def base_image(matrix: Matrix, lock: Lock) -> str:
    """The name of the base image: by content, as every image of ours."""
    return f"{LABEL}-base:{lock.base.distribution}-{lock.base.release}-{base_digest(matrix, lock)[:12]}"


@dataclass(frozen=True)
class Rendered:
    """A Dockerfile and the files of its build context, in memory: relative path → bytes."""

    plan: LayerPlan
    dockerfile: str
    context: Mapping[str, bytes]
    links: Mapping[str, Path]
    """Files of the context that are large and already on disk: relative path → file."""

    inputs: str = ""
    """The digest that these were rendered for, where files of this machine were put in since."""

    @cached_property
    def digest(self) -> str:
        """The sha256 of everything that decides the image; of large files their hashes, which the lock pins."""
        if self.inputs:
            return self.inputs
        contents = {name: sha256_hex(data) for name, data in self.context.items()}
        return sha256_hex(canonical_json([self.dockerfile, contents, version("uv"), patch_inputs(self.plan.matrix)]))

    def for_site(self, secrets: Collection[str]) -> Rendered:
        """The same without the mounts of secrets that the site does not give.

        To mount one is not free: BuildKit 0.13 to 0.15 reads the whole file system again before a step that does
        (moby/buildkit #5251; measured in docs/measurements.md).
        """
        return replace(self, dockerfile=less_secrets(self.dockerfile, secrets))

    def write(self, folder: Path) -> None:
        """Write the context to `folder`. What no longer belongs is removed; a file that is right already keeps its time.

        BuildKit's client sends a file again only if its size or time changed, so times are never set here.
        """
        wanted = {folder / name for name in (*self.context, *self.links, "Dockerfile")}
        for name, data in {**self.context, "Dockerfile": self.dockerfile.encode()}.items():
            path = folder / name
            if not path.is_file() or path.read_bytes() != data:
                write_atomic(path, data)
        for name, source in self.links.items():
            _link(source, folder / name)
        for path in sorted(folder.rglob("*"), reverse=True):
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
            elif path.is_file() and path not in wanted:
                path.unlink()


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.stat().st_size == source.stat().st_size and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
        autoescape=False,
        finalize=_finalize,
    )
    environment.filters["size"] = pretty_size
    environment.filters["quoted"] = quoted
    return environment


def render(matrix: Matrix, lock: Lock, uv: Path, supplies: Supplies | None = None) -> Rendered:
    """The Dockerfile and context of a locked matrix.

    Without `supplies` the context lacks direct files and nothing is patched: there is only something to read.
    """
    given = supplies or Supplies(installed=stand_ins(matrix, lock))
    plan = plan_layers(matrix, lock, given.installed)
    view = View(plan, base_image(matrix, lock))
    text = _environment().get_template("Dockerfile.j2").render(plan=view)
    # One blank line between parts, whatever white space the templates leave.
    dockerfile = re.sub(r"\n+(?=# templates/)", "\n\n", re.sub(r"\n{2,}", "\n", text).strip()) + "\n"
    context: dict[str, bytes] = {}
    for layer in plan.layers:
        for requirements in layer.lists:
            context[f"layers/{layer.name}/{requirements.name}"] = requirements.text.encode()
    for name in ("finish.py",):
        context[f"tools/{name}"] = _smoke_file(name)
    context["tools/site.sh"] = (TEMPLATES / "tools" / "site.sh").read_bytes()
    if plan.cuda_home:
        for name in ("cuda_home.py", "stub.py"):
            context[f"cuda/{name}"] = _smoke_file(name)
    if plan.compiled:
        context["compile/precompile.py"] = _smoke_file("precompile.py")
    for name, data in _smoke_files().items():
        context[f"smoke/builder/{name}"] = data
    context["native.json"] = _json(smoke_spec(plan, native=True))
    context["proof/spec.json"] = _json(smoke_spec(plan, native=False, patches=given.reports))
    context["proof/lock.json"] = lock.text().encode()
    context["proof/about.json"] = _json(about(plan, given.reports))
    if given.reports:
        context["proof/patches.json"] = _json(given.reports)
        context["proof/patches.diff"] = given.diff.encode(errors="surrogateescape")
    links = {"tools/uv": uv}
    for layer in plan.layers:
        for artefact in layer.artefacts:
            if artefact.file in given.wheels:
                links[f"layers/{layer.name}/wheels/{artefact.file}"] = given.wheels[artefact.file]
    return Rendered(plan, dockerfile, context, links)


def about(plan: LayerPlan, reports: Sequence[Mapping[str, Any]] = ()) -> dict[str, object]:
    """What `docker run IMAGE` prints, as far as it is known before the build."""
    matrix, lock = plan.matrix, plan.lock
    names = [*matrix.stack.pins()]
    return {
        "matrix": matrix.name,
        "summary": matrix.summary,
        "stand_in": stand_in_words(matrix),
        "lock": lock.digest,
        "as_of": lock.as_of,
        "system": f"{lock.base.distribution} {lock.base.release}, {len(lock.base.packages)} packages",
        "python": lock.python,
        "cuda": f"{matrix.cuda.version}, {'nvcc in the image' if plan.cuda_home else 'no compiler (jit: none)'}"
        if "torch" in names
        else "",
        "gpus": list(matrix.gpus),
        "patches": patch_words(reports),
        "stack": [[name, lock.version_of(name) or "-"] for name in names],
        "sglang": "sglang" in names,
    }


def stand_in_words(matrix: Matrix) -> str:
    """What an image says of itself whose wheels are not what they are called; nothing for any other."""
    if matrix.stand_in is None:
        return ""
    packages = ", ".join(matrix.stand_in.packages)
    return f"STAND-IN, for tests only: {packages} are not what they are called ({matrix.stand_in.because})"


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _smoke_file(name: str) -> bytes:
    return (resources.files("builder.smoke") / name).read_bytes()


# Used by build steps of their own: a change in one of these must not run the smoke test again.
_NOT_THE_TEST = frozenset({"finish.py", "cuda_home.py", "precompile.py"})

# What the smoke test imports of the package besides itself.
_BESIDE_THE_TEST = ("arch.py", "elf.py", "elf_hash.py", "elf_image.py", "fatbin.py")


def _smoke_files() -> dict[str, bytes]:
    package = resources.files("builder.smoke")
    names = sorted(entry.name for entry in package.iterdir() if entry.name.endswith(".py"))
    files = {f"smoke/{name}": (package / name).read_bytes() for name in names if name not in _NOT_THE_TEST}
    files |= {name: (resources.files("builder") / name).read_bytes() for name in _BESIDE_THE_TEST}
    files["__init__.py"] = b'"""The part of the builder that runs inside images."""\n'
    return files
