"""What is known of files in wheels: `facts/smoke.yaml` and the exceptions of `facts/exceptions.yaml`.

Data for the smoke test and for the order of installation; the smoke test's own code reads them as JSON, in its spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from packaging.specifiers import SpecifierSet
from ruamel.yaml import YAML


@cache
def smoke_facts() -> Mapping[str, Any]:
    """`facts/smoke.yaml`: names that the smoke test has to know."""
    return _yaml("smoke.yaml")


@cache
def exceptions() -> tuple[Mapping[str, Any], ...]:
    """`facts/exceptions.yaml`: files that fail a check by design."""
    return tuple(_yaml("exceptions.yaml").get("exceptions") or ())


def _yaml(name: str) -> Mapping[str, Any]:
    text = (resources.files("builder.facts") / name).read_text(encoding="utf-8")
    loaded: Mapping[str, Any] = YAML(typ="safe", pure=True).load(text)
    return loaded


def applying(entry: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Whether a ledger entry is about a distribution in the lock, at a version that it names."""
    version = versions.get(entry["distribution"])
    return version is not None and SpecifierSet(entry.get("versions") or "").contains(version, prereleases=True)


def winners(names: frozenset[str]) -> frozenset[str]:
    """Distributions among `names` whose files have to be laid over those of another of them: installed after it."""
    found = set()
    for entry in smoke_facts().get("shared_files", ()):
        others = set(entry["distributions"]) - {entry["wins"]}
        if entry["wins"] in names and others & names:
            found.add(entry["wins"])
    return frozenset(found)
