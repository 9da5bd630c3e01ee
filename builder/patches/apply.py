"""The patch sets and a user's own diffs, on a whole wheel."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.version import Version

from builder import facts
from builder.errors import IntegrityError, UsageError
from builder.files import sha256_hex
from builder.matrix import Patches, UserDiff
from builder.patches import capture, diffs, eagle3, fusion, multimodal, sm120, symm
from builder.patches.engine import Site, State, UnknownShapeError, decode, unified, unknown
from builder.patches.source import Source
from builder.wheel import Wheel, read_wheel, repack

SCHEMA = 1
SETS: Mapping[str, tuple[Site, ...]] = {
    "sm120": sm120.SITES,
    "sm120-symm": symm.SITES,
    # Capture of the draft's layers goes wrong where the all-reduce is put off: fusion cannot be without that site.
    "sm120-fusion": (*fusion.SITES, *capture.SITES),
    "eagle3": eagle3.SITES,
    "eagle3-multimodal": multimodal.SITES,
}
"""The patch sets by name, in the order in which they are applied and stand in a local version.

A name with a hyphen is a set that is opted into; it comes with the one before the hyphen, and its last part stands in a
local version.
"""


@dataclass(frozen=True)
class SiteState:
    """A site in one file of a release; ``looked_for`` says what an unknown one lacks."""

    site: Site
    file: str
    before: State
    after: State
    looked_for: str = ""


@dataclass(frozen=True)
class FileChange:
    """A file that a site or diff is about; ``listed`` is whether facts/patched.yaml knows the input."""

    file: str
    before: bytes
    after: bytes
    listed: bool

    @property
    def diff(self) -> str:
        """The unified diff; nothing where the file stays as it is."""
        return unified(self.file, self.before, self.after) if self.before != self.after else ""


@dataclass(frozen=True)
class PatchResult:
    """What patching makes of a wheel; nothing is written yet. ``sets`` are those that change it."""

    wheel: Source
    sites: tuple[SiteState, ...]
    files: tuple[FileChange, ...]
    sets: tuple[str, ...]
    diffs: Mapping[int, UserDiff]
    """by their place in the matrix, from 1"""

    @property
    def local(self) -> str:
        """The local version part: the sets, then the diffs by their place in the matrix; nothing if all stays as it is."""
        return ".".join([*(name.rpartition("-")[2] for name in self.sets), *(f"diff{n}" for n in self.diffs)])

    @property
    def listed(self) -> bool:
        """Whether every file that a site is about is known, so that its outcome is pinned as well."""
        return all(change.listed for change in self.files if change.file in {item.file for item in self.sites})

    @cached_property
    def diff(self) -> str:
        """What changes, as one unified diff."""
        return "".join(change.diff for change in self.files)

    def as_json(self, patched_version: str = "") -> dict[str, Any]:
        """The report, as it goes into the image; `verify_installed` reads it."""
        known = site_facts()
        return {
            "schema": SCHEMA,
            "package": self.wheel.name,
            "version": self.wheel.version,
            "patched_version": patched_version or self.wheel.version,
            "listed": self.listed,
            "sets": list(self.sets),
            "sites": [
                {
                    "id": item.site.id,
                    "set": item.site.set,
                    "file": item.file,
                    "before": item.before.value,
                    "after": item.after.value,
                    "what": item.site.what,
                    "consequence": item.site.consequence,
                    **fact_json(known[item.site.id]),
                }
                for item in self.sites
            ],
            "files": [
                {
                    "file": change.file,
                    "before": sha256_hex(change.before),
                    "after": sha256_hex(change.after),
                    "listed": change.listed,
                    "diff": change.diff,
                }
                for change in self.files
            ],
            "diffs": [{"file": item.file, "sha256": item.sha256} for item in self.diffs.values()],
        }


@dataclass(frozen=True)
class Patched:
    """A patched wheel on disk. ``size`` in bytes; ``report`` is `PatchResult.as_json`."""

    path: Path
    version: str
    sha256: str
    size: int
    report: dict[str, Any]

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return self.path.name


def asked(patches: Patches) -> tuple[str, ...]:
    """The patch sets that a matrix asks for, in their order."""
    sm120_set, eagle3_set = patches.sm120, patches.eagle3
    wanted = {
        "sm120": sm120_set is not None,
        "sm120-symm": sm120_set is not None and sm120_set.symm_mem == "opt-in",
        "sm120-fusion": sm120_set is not None and sm120_set.allreduce_fusion == "opt-in",
        "eagle3": eagle3_set is not None,
        "eagle3-multimodal": eagle3_set is not None and eagle3_set.multimodal == "opt-in",
    }
    return tuple(name for name in SETS if wanted[name])


def concerned(patches: Patches, locked: Collection[str]) -> list[str]:
    """The packages among ``locked`` that a matrix's patches are about, sorted.

    Raises `UsageError` for a set or a diff that has nothing to patch there.
    """
    found = set()
    for name in asked(patches):
        packages = {site.package for site in SETS[name]}
        if packages and not packages & set(locked):
            raise UsageError(
                f"the patch set `{name}` has nothing to patch",
                because=f"the lock has none of {', '.join(f'`{item}`' for item in sorted(packages))}",
                hint=f"leave out `patches.{name}`",
            )
        found |= packages & set(locked)
    for i, item in enumerate(patches.diffs):
        if item.package not in locked:
            raise UsageError(
                f"`patches.diffs[{i}]` has nothing to patch",
                because=f"the lock has no `{item.package}`",
                hint="the package is named as the lock names it",
            )
        found.add(item.package)
    return sorted(found)


def look(wheel: Source, sets: Iterable[str] = tuple(SETS)) -> list[SiteState]:
    """The state of every site of ``sets`` in a wheel, as it is; an unknown one is a state here, not an error."""
    found: list[SiteState] = []
    for site in (site for name in sets for site in SETS[name] if site.package == wheel.name):
        files, state, looked_for = _files(site, wheel)
        if not files:
            found.append(SiteState(site, site.file, state, state, looked_for))
        for file, data in files.items():
            state, looked_for = _look(site, wheel, data)
            found.append(SiteState(site, file, state, state, looked_for))
    return found


def inspect_wheel(source: Path | Source, patches: Patches, matrix_folder: Path) -> PatchResult:
    """What the sets and diffs of a matrix make of a wheel, in memory.

    Raises `BuildError` for a site of no known shape; `IntegrityError` for a damaged wheel, for a diff whose sha256 is
    another, and for a known file whose outcome is another; `UsageError` for a diff that does not apply.
    """
    wheel = read_wheel(source) if isinstance(source, Path) else source
    sets = asked(patches)
    states = look(wheel, sets)
    for item in states:
        if item.before is State.UNKNOWN:
            raise unknown(item.site, f"{item.file} in {wheel.path.name}", item.looked_for)
    originals = wheel.read_all(list(dict.fromkeys(item.file for item in states if item.before is not State.ABSENT)))
    contents = dict(originals)
    for item in states:
        if item.before is State.NEEDED:
            mark, text = decode(contents[item.file])
            contents[item.file] = (mark + item.site.apply(text)).encode()
    listed = {file: _known(wheel, file, _edited(states, file), originals[file], contents[file]) for file in originals}
    changing = {item.site.set for item in states if item.before is State.NEEDED}
    mine = {number: item for number, item in enumerate(patches.diffs, 1) if item.package == wheel.name}
    for diff in mine.values():
        changed = diffs.apply(diff, matrix_folder, wheel, contents)
        originals |= {file: wheel.read(file) for file in changed if file not in originals}
        contents |= changed
    after = tuple(_after(item, contents) for item in states)
    changes = tuple(
        FileChange(file, originals[file], contents[file], listed.get(file, False)) for file in sorted(originals)
    )
    return PatchResult(wheel, after, changes, tuple(name for name in sets if name in changing), mine)


def patch_wheel(source: Path, patches: Patches, folder: Path, *, matrix_folder: Path) -> Patched | None:
    """Write the patched wheel into ``folder``; None where nothing changes and the wheel stays as it is.

    ``matrix_folder`` is what a diff's path is relative to. Raises as `inspect_wheel`, and `OSError` for a full disk.
    """
    return write_patched(inspect_wheel(source, patches, matrix_folder), folder)


def write_patched(result: PatchResult, folder: Path) -> Patched | None:
    """Write what `inspect_wheel` found into ``folder``; None where nothing changes."""
    if not result.local:
        return None
    changed = {change.file: change.after for change in result.files if change.before != change.after}
    assert isinstance(result.wheel, Wheel), "a wheel of which a part is here cannot be packed again"
    made = repack(result.wheel, folder, changed, {}, result.local)
    return Patched(made.path, made.version, made.sha256, made.size, result.as_json(made.version))


def states(wheels: Iterable[Path | Source], patches: Patches | None = None) -> list[dict[str, str]]:
    """The rows of `builder patches`: every site of the sets that are asked for, of all sets if none is given."""
    rows = []
    for source in wheels:
        wheel = read_wheel(source) if isinstance(source, Path) else source
        for item in look(wheel, SETS if patches is None else asked(patches)):
            rows.append(
                {
                    "id": item.site.id,
                    "set": item.site.set,
                    "package": wheel.name,
                    "version": wheel.version,
                    "file": item.file,
                    "state": item.before.value,
                    "looked_for": item.looked_for,
                }
            )
    return rows


def _files(site: Site, wheel: Source) -> tuple[dict[str, bytes], State, str]:
    """The files that a site is about; where there are none, whether that is by design, or what is missing."""
    if site.file.endswith("/"):
        below = [n for n in wheel.entries if n.startswith(site.file) and n.endswith(".py")]
        found = _marked(wheel, [name for name in below if not name.startswith(site.outside)], site.marker)
    else:
        found = wheel.read_all([site.file])
    if found:
        return found, State.NATIVE, ""
    # By design only if the thing itself is not there: it may as well have moved, or have another name.
    named = f"def {site.marker.strip('.(')}" if site.file.endswith("/") else site.marker
    marker = site.trace or named
    elsewhere = _marked(wheel, [name for name in wheel.entries if name.endswith(".py")], marker)
    if elsewhere:
        return {}, State.UNKNOWN, f"`{site.marker}` in `{site.file}`; `{marker}` is in `{min(elsewhere)}`"
    return {}, State.ABSENT, ""


def _marked(wheel: Source, names: Sequence[str], marker: str) -> dict[str, bytes]:
    contents = wheel.read_all(sorted(names))
    return {name: data for name, data in contents.items() if marker.encode() in data}


def _look(site: Site, wheel: Source, data: bytes) -> tuple[State, str]:
    def read(file: str) -> str | None:
        return decode(wheel.read(file))[1] if file in wheel.entries else None

    try:
        state, looked_for = site.look(decode(data)[1])
        if state is State.NEEDED and (missing := site.context(read)):
            return State.UNKNOWN, missing
    except UnknownShapeError as error:
        return State.UNKNOWN, str(error)
    if state is State.NATIVE and (trouble := site.verify(decode(data)[1])):
        # The shape is one that is known and the post-condition says otherwise: one of the two is wrong.
        return State.UNKNOWN, f"what has to hold: {trouble}"
    return state, looked_for


def _after(item: SiteState, contents: Mapping[str, bytes]) -> SiteState:
    """The site after the sets and the diffs. Raises `UsageError` where a diff has undone it."""
    if item.before is State.ABSENT:
        return item
    try:
        trouble = item.site.verify(decode(contents[item.file])[1])
    except UnknownShapeError as error:
        trouble = f"it is not {error}"
    if trouble:
        raise UsageError(
            f"a diff undoes site {item.site.id}", where=item.file, because=trouble, hint="diffs come after the sets"
        )
    return SiteState(item.site, item.file, item.before, State.NATIVE)


def _edited(states: Iterable[SiteState], file: str) -> tuple[str, ...]:
    """The sites that change a file, in order."""
    return tuple(item.site.id for item in states if item.file == file and item.before is State.NEEDED)


def _known(wheel: Source, file: str, sites: tuple[str, ...], before: bytes, after: bytes) -> bool:
    """Whether facts/patched.yaml has that of the file. Raises `IntegrityError` if it does, and the outcome is another."""
    fact = patched_facts().get((wheel.name, file, sha256_hex(before), sites))
    if fact is None:
        return False
    wanted = fact.after or fact.before
    if sha256_hex(after) != wanted:
        raise IntegrityError(
            f"`{file}` of {wheel.name} {wheel.version} came out of the patches as another file than the known one",
            because=f"wanted sha256 {wanted}\ngot    sha256 {sha256_hex(after)}",
            hint="where the patch set was changed on purpose, measure again: `python -m builder.patches WHEEL…`",
        )
    return True


def patched_facts() -> dict[tuple[str, str, str, tuple[str, ...]], facts.PatchedFact]:
    """facts/patched.yaml by package, file, the input's sha256 and the sites that change it."""
    return {(fact.package, fact.path, fact.before, fact.sites): fact for fact in facts.load_facts(facts.PatchedFact)}


def site_facts() -> dict[str, facts.SiteFact]:
    """facts/sites.yaml by site."""
    return {site: fact for fact in facts.load_facts(facts.SiteFact) for site in fact.sites}


def fact_json(fact: facts.SiteFact) -> dict[str, Any]:
    """What is known of a site, apart from the site itself: what breaks without it, the risk, upstream's state, sources."""
    said = {
        "without": fact.without,
        "risk": fact.risk,
        "upstream": fact.upstream,
        "alone": fact.alone,
        "waits_for": fact.waits_for,
        "advice": fact.advice,
        "source": fact.source,
    }
    return {key: value for key, value in said.items() if value is not None or key == "waits_for"}


def measured(wheel: Source) -> list[dict[str, Any]]:
    """What facts/patched.yaml has to say of a wheel: every file with a site, before and after each choice of sets."""
    found = [item for item in look(wheel) if item.before not in (State.ABSENT, State.UNKNOWN)]
    rows: list[dict[str, Any]] = []
    for file in dict.fromkeys(item.file for item in found):
        here = [item for item in found if item.file == file]
        before = wheel.read(file)
        seen: set[tuple[str, ...]] = set()
        for sets in choices(dict.fromkeys(item.site.set for item in here)):
            content = before
            chosen = [item for item in here if item.site.set in sets]
            for item in chosen:
                if item.before is State.NEEDED:
                    mark, text = decode(content)
                    content = (mark + item.site.apply(text)).encode()
            sites = _edited(chosen, file)
            if not chosen or sites in seen:
                continue
            seen.add(sites)
            row = {"package": wheel.name, "version": Version(wheel.version).public, "path": file, "sites": list(sites)}
            rows.append({**row, "before": sha256_hex(before)})
            if sites:
                rows[-1]["after"] = sha256_hex(content)
    return rows


def choices(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Every choice among sets that a matrix can make, in their order: one that is opted into comes with its base."""
    found: list[tuple[str, ...]] = [()]
    for name in (name for name in SETS if name in set(names)):
        found += [(*chosen, name) for chosen in found]
    base = set(names)
    return [
        chosen
        for chosen in found
        if all(name.partition("-")[0] in chosen or name.partition("-")[0] not in base for name in chosen)
    ]
