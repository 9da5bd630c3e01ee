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

from builder.facts import VariantFact, load_facts
from builder.smoke.variants import Variants


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


def locked(name: str, releases: str | None, versions: Mapping[str, str]) -> bool:
    """Whether a lock (name → version) has a distribution, in a release of a range; without one, in any."""
    version = versions.get(name)
    return version is not None and SpecifierSet(releases or "").contains(version, prereleases=True)


def applying(entry: Mapping[str, Any], versions: Mapping[str, str]) -> bool:
    """Whether a ledger entry is about a distribution in the lock, at a version that it names."""
    return locked(entry["distribution"], entry.get("versions"), versions)


def variants(versions: Mapping[str, str]) -> list[Variants]:
    """`facts/variants.yaml`: of these releases (name → version) those with a file for each CUDA or torch."""
    return [
        Variants(fact.distribution, fact.path, fact.near, fact.required, fact.elsewhere, fact.without)
        for fact in load_facts(VariantFact)
        if locked(fact.distribution, fact.versions, versions)
    ]


def winners(names: frozenset[str]) -> frozenset[str]:
    """Distributions among `names` whose files have to be laid over those of another of them: installed after it."""
    found = set()
    for entry in smoke_facts().get("shared_files", ()):
        others = set(entry["distributions"]) - {entry["wins"]}
        if entry["wins"] in names and others & names:
            found.add(entry["wins"])
    return frozenset(found)
