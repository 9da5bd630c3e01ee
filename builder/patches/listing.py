"""`builder patches`: the state of every site in a matrix's releases or in any other, and what patching would change."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from packaging.version import Version

from builder.errors import UsageError
from builder.facts import SiteFact
from builder.files import pretty_size
from builder.lock import Artefact, check_current, lock_path, read_lock
from builder.matrix import load
from builder.patches import noted
from builder.patches.apply import SETS, SiteState, asked, concerned, fact_json, inspect_wheel, look, site_facts
from builder.patches.engine import State
from builder.patches.noted import NotedState
from builder.patches.releases import Traffic
from builder.patches.source import Source

WIDTH = 100
"""Columns of the text; a path or a shape that is longer stays in one piece."""


class Opener(Protocol):
    """Where wheels come from: `builder.patches.releases.Releases`."""

    @property
    def traffic(self) -> Traffic:
        """What has been read by now."""

    def release(self, name: str, version: str) -> Source:
        """The wheel of a release."""

    def artefact(self, wanted: Artefact, indexes: Mapping[str, str]) -> Source:
        """A wheel of a lock."""


@dataclass(frozen=True)
class Package:
    """A package with sites or diffs. ``diff`` is what patching changes, nothing where a site is unknown."""

    name: str
    version: str
    sites: tuple[SiteState, ...]
    noted: tuple[NotedState, ...]
    diff: str = ""
    listed: bool = False


@dataclass(frozen=True)
class Listing:
    """Every package that a site or a diff is about.

    ``sets`` are those that the matrix asks for, None where there is no matrix. ``seconds`` is how long it took.
    """

    sets: tuple[str, ...] | None
    packages: tuple[Package, ...]
    traffic: Traffic
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every site has a known shape, of those that the matrix asks for where there is one."""
        counted = SETS if self.sets is None else self.sets
        return not any(
            item.before is State.UNKNOWN and item.site.set in counted for pack in self.packages for item in pack.sites
        )

    @property
    def diff(self) -> str:
        """What the matrix's sets and diffs change, as one unified diff."""
        return "".join(package.diff for package in self.packages)


def named_releases(
    matrix: str | None, sglang: str | None, flashinfer: str | None, *, diff: bool = False
) -> dict[str, str]:
    """The releases that a command line names, by package; none where it names a matrix. Raises `UsageError`."""
    named = {"sglang": sglang, "flashinfer-python": flashinfer}
    releases = {name: version for name, version in named.items() if version is not None}
    if (matrix is None) == (not releases):
        what = "MATRIX and releases at once" if releases else "neither MATRIX nor a release is named"
        raise UsageError(what, hint="`builder patches MATRIX`, or `builder patches --sglang V --flashinfer V`")
    if releases and diff:
        raise UsageError("`--diff` without MATRIX", because="a matrix says which sets are applied")
    return releases


def listing(path: Path, opener: Opener) -> Listing:
    """The listing of the matrix at ``path``: all sets are looked at, those that it asks for (and its diffs) applied.

    Raises `UsageError`, `LockError`, `IntegrityError`, and what ``opener`` raises.
    """
    began = time.monotonic()
    loaded = load(path)
    patches = loaded.matrix.patches
    lock = read_lock(lock_path(path))
    check_current(lock, loaded.matrix, lock_path(path))
    sets = asked(patches)
    indexes = {name: index.url for name, index in loaded.matrix.indexes.items()}
    names = {site.package for sites in SETS.values() for site in sites} & lock.by_name.keys()
    found = []
    for artefact in (lock.by_name[name] for name in sorted({*names, *concerned(patches, lock.by_name)})):
        wheel = opener.artefact(artefact, indexes)
        package = package_of(wheel)
        if not any(item.before is State.UNKNOWN and item.site.set in sets for item in package.sites):
            result = inspect_wheel(wheel, patches, path.parent)
            package = replace(package, diff=result.diff, listed=result.listed)
        found.append(package)
    return Listing(sets, tuple(found), opener.traffic, time.monotonic() - began)


def release_listing(releases: Mapping[str, str], opener: Opener) -> Listing:
    """The listing of releases, by package: all sets are looked at, nothing is applied. Raises what ``opener`` raises."""
    began = time.monotonic()
    packages = tuple(package_of(opener.release(name, version)) for name, version in sorted(releases.items()))
    return Listing(None, packages, opener.traffic, time.monotonic() - began)


def package_of(wheel: Source) -> Package:
    """The state of every site in a wheel."""
    # Together, in few requests; one by one they would be asked for as the sites come.
    wheel.read_all(sorted(set(_ahead(wheel))))
    return Package(wheel.name, wheel.version, tuple(look(wheel)), tuple(noted.look(wheel)))


def _ahead(wheel: Source) -> Iterator[str]:
    """The files that the sites will be looked for in."""
    for site in (site for sites in SETS.values() for site in sites if site.package == wheel.name):
        if site.file.endswith("/"):
            yield from (name for name in wheel.entries if name.startswith(site.file) and name.endswith(".py"))
        elif site.file in wheel.entries:
            yield site.file
        else:
            # That it is nowhere is only known once every file was looked at.
            yield from noted.same_kind(site.file, wheel)
    for place in (place for place in noted.NOTED if place.package == wheel.name):
        here = [file for file in place.files if file in wheel.entries]
        yield from here or noted.same_kind(place.files[0], wheel)


def as_json(found: Listing) -> dict[str, Any]:
    """The listing as data. Of `noted` none is patched, and none counts for `ok`."""
    known = site_facts()
    return {
        "ok": found.ok,
        "sets": list(found.sets or ()),
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
                "what": item.site.what,
                "patch": item.site.consequence,
                **fact_json(known[item.site.id]),
            }
            for package in found.packages
            for item in package.sites
        ],
        "noted": [
            {
                "id": item.noted.id,
                "package": package.name,
                "version": package.version,
                "file": item.file,
                "state": item.state.value,
                "looked_for": item.looked_for,
                "what": item.noted.what,
                **fact_json(known[item.noted.id]),
            }
            for package in found.packages
            for item in package.noted
        ],
        **cost_json(found.traffic, found.seconds),
    }


def as_text(found: Listing) -> str:
    """The listing for people."""
    if found.sets is None:
        lines = ["every patch set, as these releases are; nothing is asked for"]
    else:
        lines = [f"sets that the matrix asks for: {', '.join(found.sets) or 'none'}"]
    known = site_facts()
    for package in found.packages:
        sets = {item.site.set for item in package.sites} & set(found.sets or ())
        note = "" if package.listed or not sets else " (unlisted: its outcome is in no facts yet)"
        lines += ["", f"{package.name} {package.version}{note}"]
        lines += [*_summary(package), *_sites(package.sites, known)]
        if package.diff:
            added, removed = (
                sum(line.startswith(sign) and not line.startswith(sign * 3) for line in package.diff.split("\n"))
                for sign in "+-"
            )
            files = package.diff.count("\n+++ b/")
            lines.append(f"  the patches change {files} {'file' if files == 1 else 'files'}: +{added} -{removed} lines")
        if package.noted:
            lines += ["", f"{package.name} {package.version}, noted, not patched"]
            for item in package.noted:
                fact = known[item.noted.id]
                lines += _state(item.noted.id, item.state, item.file, item.looked_for)
                lines += _said(
                    [
                        ("what", item.noted.what),
                        ("without", fact.without),
                        ("upstream", fact.upstream),
                        ("advice", fact.advice or ""),
                    ]
                )
    return "\n".join([*lines, "", cost(found.traffic, found.seconds)])


def cost_json(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """What a look cost, as data."""
    return {
        "bytes_read": traffic.bytes_read,
        "bytes_total": traffic.bytes_total,
        "requests": traffic.requests,
        "seconds": round(seconds, 3),
    }


def cost(traffic: Traffic, seconds: float) -> str:
    """What a look cost, in one line."""
    read = f"{pretty_size(traffic.bytes_read)} of {pretty_size(traffic.bytes_total)} of wheels"
    if not traffic.requests:
        return f"nothing fetched of {pretty_size(traffic.bytes_total)} of wheels, {seconds:.1f} s"
    return f"{read} fetched in {traffic.requests} {'request' if traffic.requests == 1 else 'requests'}, {seconds:.1f} s"


def _summary(package: Package) -> Iterator[str]:
    """Which sites are in which state, a line each."""
    for state in State:
        sites = dict.fromkeys(item.site.id for item in package.sites if item.before is state)
        if sites:
            yield from textwrap.wrap(
                " ".join(sites), WIDTH, initial_indent=f"  {state:<8} ", subsequent_indent=" " * 11
            )


def _sites(items: Iterable[SiteState], known: Mapping[str, SiteFact]) -> Iterator[str]:
    """The lines of sites, those that are one matter together, so that each wording stands once."""
    matters: dict[tuple[str, ...], list[SiteState]] = {}
    for item in items:
        matters.setdefault(known[item.site.id].sites, []).append(item)
    for together in matters.values():
        by_site: dict[str, list[SiteState]] = {}
        for item in together:
            by_site.setdefault(item.site.id, []).append(item)
        for places in by_site.values():
            for item in places:
                yield from _state(item.site.id, item.before, item.file, item.looked_for)
            yield from _said([("what", places[0].site.what), ("patch", places[0].site.consequence)])
        fact = known[together[0].site.id]
        waits = f", waits for {fact.waits_for}=1" if fact.waits_for else ""
        yield from _said(
            [
                ("without", fact.without),
                ("risk", fact.risk or ""),
                ("upstream", fact.upstream),
                ("set", f"{together[0].site.set}{waits}"),
                ("alone", fact.alone or ""),
            ]
        )


def _state(site: str, state: State, file: str, looked_for: str) -> Iterator[str]:
    yield f"  {site:<4} {state:<8} {file}"
    if looked_for:
        yield from _said([("looked", f"for {looked_for}")])


def _said(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, text in rows:
        yield from textwrap.wrap(
            text,
            WIDTH,
            initial_indent=f"       {label:<8} ",
            subsequent_indent=" " * 16,
            break_long_words=False,
            break_on_hyphens=False,
        )


TABLE = {State.ABSENT: "–", State.NATIVE: "n", State.NEEDED: "**N**", State.UNKNOWN: "?"}
"""A state in the tables of docs/patches.md, the one that least has to be done to first."""


def as_table(packages: Iterable[Package]) -> str:
    """The tables of docs/patches.md, one a package: its sites in the order of the sets, then those noted, by release.

    Sites that are one matter and alike everywhere share a row; of a site's files the one that most has to be done to counts.
    """
    known = site_facts()
    tables = []
    order = dict.fromkeys(site.package for sites in SETS.values() for site in sites)
    by_name: dict[str, list[Package]] = {name: [] for name in order}
    for package in packages:
        by_name.get(package.name, []).append(package)
    for name, releases in by_name.items():
        if not releases:
            continue
        releases.sort(key=lambda package: Version(package.version))
        rows: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for patched in (True, False):
            columns = [_worst(package, patched) for package in releases]
            for site in columns[0]:
                cells = " | ".join(TABLE[column[site]] for column in columns)
                rows.setdefault((known[site].sites, cells), []).append(site)
        lines = [
            f"| {name} | {' | '.join(package.version for package in releases)} |",
            f"|{'---|' * (len(releases) + 1)}",
        ]
        lines += [f"| {', '.join(sites)} | {cells} |" for (_, cells), sites in rows.items()]
        tables.append("\n".join(lines))
    return "\n\n".join(tables)


def _worst(package: Package, patched: bool) -> dict[str, State]:
    """The state of each site, patched or noted, of all its files in one."""
    order = list(TABLE)
    found: dict[str, State] = {}
    states = (
        [(item.site.id, item.before) for item in package.sites]
        if patched
        else [(item.noted.id, item.state) for item in package.noted]
    )
    for site, state in states:
        found[site] = max(found.get(site, state), state, key=order.index)
    return found
