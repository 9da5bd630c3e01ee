"""What the image must be: the spec that the host writes from the lock and the facts, read and validated.

Every fact about a version is data in the spec; this module only knows the shape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.smoke.variants import Variants

SCHEMA = 1
# The layer that the native part ignores: it is built, and checked, later.
SGLANG_LAYER = "sglang"


class SpecError(ValueError):
    """The spec is not JSON, or not of the shape this version reads; the message says where and what."""


@dataclass(frozen=True)
class Artefact:
    """One wheel of the lock. ``metadata_version`` is what an installer reports."""

    name: str
    version: str
    metadata_version: str
    file: str
    sha256: str
    layer: str

    @property
    def normalised(self) -> str:
        """The name as indexes compare it."""
        return normalise(self.name)


@dataclass(frozen=True)
class Gpu:
    """A target: compute capability, and what nvcc (`120a`) and flashinfer (`12.0a`) call it."""

    capability: str
    nvcc: str
    flashinfer: str

    @property
    def pair(self) -> tuple[int, int]:
        """`12.0` as (12, 0)."""
        major, minor = self.capability.split(".")
        return int(major), int(minor)


@dataclass(frozen=True)
class ExceptionEntry:
    """One entry of the ledger: these files of this distribution fail these checks, in these words, by design.

    ``file`` is a glob over paths relative to site-packages, ``words`` a substring of what the check says, ``gpu`` the
    one target that the entry is for (None: all). The host leaves out entries whose versions do not apply.
    """

    id: str
    distribution: str
    file: str
    checks: tuple[str, ...]
    words: str
    consequence: str
    source: str
    gpu: str | None = None


@dataclass(frozen=True)
class SharedFiles:
    """Files that several distributions bring in different versions, and whose content has to be there in the end."""

    id: str
    files: tuple[str, ...]
    distributions: tuple[str, ...]
    wins: str
    source: str


@dataclass(frozen=True)
class Spec:
    """The whole spec.

    ``native_lock`` is the ``lock`` that the spec of the native part alone has; ``facts`` is `smoke.yaml` as it stands,
    less what has a field of its own here; ``patches`` are the reports of packages that patch sets look at. ``compiled`` are
    the functions of flashinfer/jit/comm.py whose modules the build has compiled.
    """

    matrix: str
    lock: str
    native_lock: str
    site_packages: Path
    cuda_version: str
    cuda_major: int
    cuda_home: str
    cuda_jit: str
    gpus: tuple[Gpu, ...]
    artefacts: tuple[Artefact, ...]
    exceptions: tuple[ExceptionEntry, ...]
    variants: tuple[Variants, ...]
    shared_files: tuple[SharedFiles, ...]
    imports: tuple[str, ...]
    facts: Mapping[str, Any]
    patches: tuple[Mapping[str, Any], ...] = ()
    compiled: tuple[str, ...] = ()

    def fact(self, name: str) -> Mapping[str, Any]:
        """A mapping of the facts, empty where the spec has none of that name."""
        value = self.facts.get(name)
        return value if isinstance(value, Mapping) else {}

    def locked(self, distribution: str) -> Artefact | None:
        """The lock's artefact of that name, if there is one."""
        return self.by_name.get(normalise(distribution))

    @property
    def by_name(self) -> dict[str, Artefact]:
        """Artefacts by normalised name."""
        return {artefact.normalised: artefact for artefact in self.artefacts}

    def names(self, *, sglang: bool | None = None) -> frozenset[str]:
        """Normalised names: of all layers, of the sglang layer only, or of all but that."""
        return frozenset(
            artefact.normalised
            for artefact in self.artefacts
            if sglang is None or (artefact.layer == SGLANG_LAYER) is sglang
        )


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_spec(path: Path) -> Spec:
    """Read a spec file. Raises SpecError, also for a file that cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"cannot read the spec: {error.strerror}: {path}") from error
    except ValueError as error:
        raise SpecError(f"the spec is not JSON: {error}") from error
    return parse_spec(data)


def parse_spec(data: Any) -> Spec:
    """Make a `Spec` of JSON data. Raises SpecError."""
    top = _Reader(data, "spec")
    if (schema := top.number("schema")) != SCHEMA:
        raise SpecError(f"spec.schema is {schema}, this version reads {SCHEMA}")
    cuda = top.child("cuda")
    gpus = tuple(_gpu(item) for item in top.children("gpus"))
    if (jit := cuda.text("jit")) not in ("nvcc", "none"):
        raise SpecError(f"spec.cuda.jit is `{jit}`, allowed are `nvcc` and `none`")
    return Spec(
        matrix=top.text("matrix"),
        lock=top.text("lock"),
        native_lock=top.text("native_lock"),
        site_packages=Path(top.text("site_packages")),
        cuda_version=cuda.text("version"),
        cuda_major=cuda.number("major"),
        cuda_home=cuda.text("home"),
        cuda_jit=jit,
        gpus=gpus,
        artefacts=tuple(
            Artefact(**{name: item.text(name) for name in Artefact.__dataclass_fields__})
            for item in top.children("artefacts")
        ),
        exceptions=tuple(
            _exception(item) for item in top.children("exceptions") if _applies(item, cuda.number("major"))
        ),
        variants=tuple(_variants(item) for item in top.children("variants")) if "variants" in top.data else (),
        shared_files=tuple(
            SharedFiles(
                item.text("id"),
                item.texts("files"),
                tuple(map(normalise, item.texts("distributions"))),
                normalise(item.text("wins")),
                item.text("source"),
            )
            for item in top.children("shared_files")
        ),
        imports=top.texts("imports"),
        facts=top.child("facts").data if "facts" in top.data else {},
        patches=tuple(_report(item) for item in top.children("patches")) if "patches" in top.data else (),
        compiled=top.texts("compiled") if "compiled" in top.data else (),
    )


def _gpu(item: _Reader) -> Gpu:
    gpu = Gpu(item.text("capability"), item.text("nvcc"), item.text("flashinfer"))
    if not re.fullmatch(r"[0-9]+\.[0-9]", gpu.capability):
        raise SpecError(f"{item.where}.capability is `{gpu.capability}`, not like `12.0`")
    return gpu


def _report(item: _Reader) -> Mapping[str, Any]:
    """A package's report, as `builder.patches` writes it: of the shape that the check relies on."""
    item.text("package"), item.text("patched_version")
    for file in item.children("files"):
        file.text("file"), file.text("before"), file.text("after"), file.text("diff")
    for site in item.children("sites"):
        site.text("id"), site.text("file"), site.text("before"), site.text("after")
    return item.data


def _applies(item: _Reader, cuda_major: int) -> bool:
    """Whether an entry's `when` is true of this stack; `gpu` is for the checks that have targets to decide."""
    when = item.data.get("when") or {}
    if not isinstance(when, dict) or set(when) - {"gpu", "cuda"}:
        raise SpecError(f"{item.where}.when may hold `gpu` and `cuda` only, such as {{'gpu': '9.0', 'cuda': 13}}")
    return str(when.get("cuda", cuda_major)) == str(cuda_major)


def _exception(item: _Reader) -> ExceptionEntry:
    when = item.data.get("when") or {}
    checks = item.texts("checks")
    if not checks:
        raise SpecError(f"{item.where}.checks is empty: an exception that excuses nothing")
    if not item.text("words"):
        raise SpecError(f"{item.where}.words is empty: it would excuse every failure")
    return ExceptionEntry(
        item.text("id"),
        normalise(item.text("distribution")),
        item.text("file"),
        checks,
        item.text("words"),
        item.text("consequence"),
        item.text("source"),
        str(when["gpu"]) if "gpu" in when else None,
    )


def _variants(item: _Reader) -> Variants:
    path = item.text("path")
    if path.count("{cuda}") + path.count("{torch}") != 1:
        raise SpecError(f"{item.where}.path is `{path}`, which has to have `{{cuda}}` or `{{torch}}` once")
    return Variants(
        normalise(item.text("distribution")),
        path,
        item.flag("near"),
        item.flag("required"),
        item.texts("elsewhere"),
        item.text("without"),
    )


class _Reader:
    """Typed access to JSON data; errors name the place (`spec.cuda.home`)."""

    def __init__(self, data: Any, where: str) -> None:
        if not isinstance(data, dict):
            raise SpecError(f"{where} is {type(data).__name__}, not an object")
        self.data: dict[str, Any] = data
        self.where = where

    def _get(self, name: str, kind: type) -> Any:
        if name not in self.data:
            raise SpecError(f"{self.where}.{name} is missing")
        value = self.data[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise SpecError(f"{self.where}.{name} is {type(value).__name__}, not {kind.__name__}")
        return value

    def text(self, name: str) -> str:
        return str(self._get(name, str))

    def number(self, name: str) -> int:
        return int(self._get(name, int))

    def flag(self, name: str) -> bool:
        return bool(self._get(name, bool))

    def child(self, name: str) -> _Reader:
        return _Reader(self._get(name, dict), f"{self.where}.{name}")

    def children(self, name: str) -> list[_Reader]:
        return [_Reader(item, f"{self.where}.{name}[{i}]") for i, item in enumerate(self._get(name, list))]

    def texts(self, name: str) -> tuple[str, ...]:
        items = self._get(name, list)
        for i, item in enumerate(items):
            if not isinstance(item, str):
                raise SpecError(f"{self.where}.{name}[{i}] is {type(item).__name__}, not str")
        return tuple(items)
