"""`builder patches`: the state of every site in a matrix's releases, and what patching would change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.lock import Artefact, check_current, lock_path, read_lock
from builder.matrix import load
from builder.patches.apply import SETS, SiteState, asked, concerned, inspect_wheel, look
from builder.patches.engine import State
from builder.wheel import read_wheel

Fetch = Callable[[Artefact, dict[str, str]], Path]
"""The wheel of a lock's artefact on this machine; the mapping holds the matrix's own indexes, name → URL."""


@dataclass(frozen=True)
class Package:
    """A package with sites or diffs. ``diff`` is what patching changes, nothing where a site is unknown."""

    name: str
    version: str
    sites: tuple[SiteState, ...]
    diff: str
    listed: bool


@dataclass(frozen=True)
class Listing:
    """Every package of a matrix that a site or a diff is about. ``sets`` are those that the matrix asks for."""

    sets: tuple[str, ...]
    packages: tuple[Package, ...]

    @property
    def ok(self) -> bool:
        """Whether every site that the matrix asks for has a known shape."""
        return not any(
            item.before is State.UNKNOWN and item.site.set in self.sets for pack in self.packages for item in pack.sites
        )

    @property
    def diff(self) -> str:
        """What the matrix's sets and diffs change, as one unified diff."""
        return "".join(package.diff for package in self.packages)


def listing(path: Path, fetch: Fetch) -> Listing:
    """The listing of the matrix at ``path``: all sets are looked at, those that it asks for (and its diffs) applied.

    Raises `UsageError`, `LockError`, `IntegrityError`, and what ``fetch`` raises.
    """
    loaded = load(path)
    patches = loaded.matrix.patches
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    sets = asked(patches)
    indexes = {name: index.url for name, index in loaded.matrix.indexes.items()}
    names = {site.package for sites in SETS.values() for site in sites} & lock.by_name.keys()
    found = []
    for artefact in (lock.by_name[name] for name in sorted({*names, *concerned(patches, lock.by_name)})):
        wheel = read_wheel(fetch(artefact, indexes))
        sites = tuple(look(wheel))
        if any(item.before is State.UNKNOWN and item.site.set in sets for item in sites):
            found.append(Package(wheel.name, wheel.version, sites, "", False))
            continue
        result = inspect_wheel(wheel, patches, path.parent)
        found.append(Package(wheel.name, wheel.version, sites, result.diff, result.listed))
    return Listing(sets, tuple(found))


def as_json(found: Listing) -> dict[str, Any]:
    """The listing as data."""
    return {
        "ok": found.ok,
        "sets": list(found.sets),
        "sites": [
            {
                "id": item.site.id,
                "set": item.site.set,
                "package": package.name,
                "version": package.version,
                "file": item.file,
                "state": item.before.value,
                "looked_for": item.looked_for,
                "listed": package.listed,
            }
            for package in found.packages
            for item in package.sites
        ],
    }


def as_text(found: Listing) -> str:
    """The listing for people."""
    lines = [f"sets that the matrix asks for: {', '.join(found.sets) or 'none'}"]
    for package in found.packages:
        sets = {item.site.set for item in package.sites} & set(found.sets)
        note = "" if package.listed or not sets else " (unlisted: its outcome is in no facts yet)"
        lines += ["", f"{package.name} {package.version}{note}"]
        for item in package.sites:
            lines.append(f"  {item.site.id:<3} {item.before:<8} {item.site.set:<7} {item.file}")
            lines.append(f"               {item.site.what}")
            if item.looked_for:
                lines.append(f"               looked for: {item.looked_for}")
        if package.diff:
            added, removed = (
                sum(line.startswith(sign) and not line.startswith(sign * 3) for line in package.diff.split("\n"))
                for sign in "+-"
            )
            files = package.diff.count("\n+++ b/")
            lines.append(f"  the patches change {files} {'file' if files == 1 else 'files'}: +{added} -{removed} lines")
    return "\n".join(lines)
