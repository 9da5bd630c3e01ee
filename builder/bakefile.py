"""The bake file: every matrix a target, as data that `docker buildx bake` reads. The same matrices give the same bytes.

What differs between machines is in three variables, which the environment sets: where the contexts, the secrets and the
layouts of base images lie. Nothing of a site is in it but the names of its secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from builder.errors import UsageError
from builder.labels import INPUTS_LABEL, LABEL
from builder.registry.reference import Reference

CONTEXTS: Final = "BUILDER_CONTEXTS"
SECRETS: Final = "BUILDER_SECRETS"
LAYOUTS: Final = "BUILDER_LAYOUTS"

INLINE: Final = "inline"
"""The cache that is part of an image and goes where it is pushed: only of the last stage, and any engine can write it."""


@dataclass(frozen=True)
class Target:
    """One matrix. ``inputs`` is the digest of what decides its image, ``secrets`` are the ids of those that its build gets.

    ``layout`` is the name of its base image where the builder cannot see the engine's images.
    """

    matrix: str
    inputs: str
    secrets: tuple[str, ...] = ()
    layout: str = ""

    @property
    def name(self) -> str:
        """A name that bake takes: no dots."""
        return self.matrix.replace(".", "_")


@dataclass(frozen=True)
class Cache:
    """Where build cache is kept: REGISTRY/NAME, in which each matrix has a tag of its own, or `inline`."""

    to: str = ""
    sources: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        for text in (*self.sources, *([self.to] if self.to not in ("", INLINE) else [])):
            if (reference := Reference.parse(text)).tag or reference.digest:
                raise UsageError(
                    f"`{text}` names one image",
                    because="each matrix has a cache of its own, at the tag `MATRIX-cache`",
                    hint=f"write `{reference.name}`",
                )

    def outputs(self, matrix: str) -> list[str]:
        """`cache-to` of a target."""
        if self.to == INLINE:
            return ["type=inline"]
        return [f"type=registry,ref={self.to}:{matrix}-cache,mode=max"] if self.to else []

    def inputs(self, matrices: Sequence[str]) -> list[str]:
        """`cache-from` of every target: the caches of all of them, since they share stages.

        An inline cache lies in the image itself: its moving tag is asked, too. What is not there is passed over.
        """
        tags = [tag for matrix in matrices for tag in (f"{matrix}-cache", matrix)]
        return [f"type=registry,ref={source}:{tag}" for source in self.sources for tag in tags]


def bake_file(targets: Sequence[Target], cache: Cache) -> dict[str, Any]:
    """The file as data. Raises `UsageError` where two matrices would have one name in it."""
    names = [target.name for target in targets]
    if len(set(names)) != len(names):
        raise UsageError("two matrices have one name in the bake file", because=", ".join(sorted(names)))
    matrices = [target.matrix for target in targets]
    variables = [CONTEXTS, SECRETS, *([LAYOUTS] if any(target.layout for target in targets) else [])]
    return {
        "variable": {name: {"default": name.removeprefix("BUILDER_").lower()} for name in variables},
        "group": {"default": {"targets": names}},
        "target": {target.name: _target(target, cache, matrices) for target in targets},
    }


def _target(target: Target, cache: Cache, matrices: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "context": f"${{{CONTEXTS}}}/{target.matrix}",
        "dockerfile": "Dockerfile",
        "target": "image",
        "labels": {INPUTS_LABEL: target.inputs, LABEL: "image"},
        "secret": [f"id={name},src=${{{SECRETS}}}/{target.matrix}/{name}" for name in sorted(target.secrets)],
        "output": ["type=docker"],
    }
    if target.layout:
        folder, _, tag = target.layout.rpartition(":")
        made["contexts"] = {target.layout: f"oci-layout://${{{LAYOUTS}}}/{folder}-{tag}:{tag}"}
    if outputs := cache.outputs(target.matrix):
        made["cache-to"] = outputs
    if inputs := cache.inputs(matrices):
        made["cache-from"] = inputs
    return made


def bake_text(targets: Sequence[Target], cache: Cache) -> str:
    """The file's text."""
    return json.dumps(bake_file(targets, cache), indent=2, ensure_ascii=False) + "\n"


def owner_pattern() -> re.Pattern[str]:
    """Finds the target in the name of a step (`[cu128 torch 1/1] RUN …`, `[cu128] exporting to image`)."""
    return re.compile(r"\[(?P<target>[A-Za-z0-9_-]+)[ \]]")
