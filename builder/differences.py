"""`builder diff A B`: what differs between two stacks, most suspicious first, with what is known of each change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from builder import facts
from builder.agree import KERNELS
from builder.errors import BuilderError, BuildError, LockError, UsageError
from builder.findings import Finding, Severity
from builder.lock import Lock, lock_path, parse_lock, read_lock
from builder.matrix import LoadedMatrix, find_matrix, list_matrices, load
from builder.nearest import no_matrix
from builder.repro.live import NothingThere
from builder.rules import Context, evaluate_rules
from builder.settings import Settings

LIVE = "live"
"""The name of this machine as a side."""

# How far a change reaches: what everything is linked to first, pure Python and the OS last.
_GROUPS = ("platform", "torch", "kernels", "flashinfer", "sglang", "rest", "os", "settings")
_TITLES = {
    "platform": "platform",
    "torch": "torch and CUDA libraries",
    "kernels": "GPU kernels",
    "flashinfer": "flashinfer",
    "sglang": "sglang",
    "rest": "other packages",
    "os": "OS packages",
    "settings": "settings",
}


@dataclass(frozen=True)
class Side:
    """One of the two: a name for people, its packages, and the lock and matrix behind it where there are any."""

    name: str
    packages: Mapping[str, str]
    platform: Mapping[str, str]
    os_packages: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    lock: Lock | None = None
    loaded: LoadedMatrix | None = None
    digests: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """One thing that differs. ``notes`` is what the facts know of it; ``weight`` says how suspicious it is, more is more."""

    group: str
    name: str
    before: str
    after: str
    weight: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Differences:
    """Everything that differs, by group; and findings that only one of the two has."""

    a: str
    b: str
    changes: tuple[Change, ...]
    only_a: tuple[Finding, ...] = ()
    only_b: tuple[Finding, ...] = ()
    unasked: tuple[str, ...] = ()


def side(name: str, matrices: Path) -> Side:
    """A matrix by name or path, a lock file, an image, a container, or this machine. Raises `UsageError`."""
    if name == LIVE:
        return _live(None)
    path = Path(name)
    if name.endswith(".lock.json"):
        if not path.is_file():
            raise UsageError(f"there is no file `{name}`")
        return _of_lock(name, parse_lock(path.read_text(encoding="utf-8"), name), None)
    try:
        found = find_matrix(name, matrices)
    except UsageError as missing:
        if name.endswith((".yaml", ".yml")):
            raise
        try:
            return _live(name)
        except NothingThere:
            what = f"there is no matrix, no image and no container `{name}`"
            raise UsageError(what, hint=missing.hint) from None
        except BuildError as error:
            raise no_matrix(error, name, [path.stem for path in list_matrices(matrices)]) from error
    loaded = load(found)
    try:
        lock = read_lock(lock_path(found))
    except LockError as error:
        raise LockError(error.what, where=error.where, hint=f"`builder lock {name}` makes it") from None
    return _of_lock(name, lock, loaded)


def _of_lock(name: str, lock: Lock, loaded: LoadedMatrix | None) -> Side:
    settings: dict[str, str] = {}
    if loaded is not None:
        matrix = loaded.matrix
        settings |= {f"environment.{key}": value for key, value in matrix.environment.items()}
        settings["gpus"] = ", ".join(matrix.gpus)
        settings["cuda"] = f"{matrix.cuda.version}, jit {matrix.cuda.jit}"
        for key, value in matrix.patches.model_dump(mode="json", exclude_none=True, exclude_defaults=False).items():
            if key != "diffs":
                settings |= {f"patches.{key}.{option}": str(state) for option, state in value.items()} or {
                    f"patches.{key}": "base"
                }
        settings |= {f"patches.diffs.{diff.package}": diff.sha256[:12] for diff in matrix.patches.diffs}
        settings |= {f"override.{each.package}": f"{each.pin} → {each.ours}" for each in matrix.overrides}
    return Side(
        name,
        {artefact.name: artefact.version for artefact in lock.artefacts},
        {"python": lock.python, "platform": lock.platform, "base": f"{lock.base.distribution} {lock.base.release}"},
        {package.name: package.version for package in lock.base.packages},
        settings,
        lock,
        loaded,
        {artefact.name: artefact.sha256 for artefact in lock.artefacts},
    )


def _live(target: str | None) -> Side:
    from builder.reports.parse import parse
    from builder.repro.live import as_locked, look
    from builder.repro.matrixtext import variables

    live = look(target)
    report = parse(live.text)
    names = ("python", "os", "libc", "arch", "driver")
    platform = {name: value for name in names if (value := report.value(name)) is not None}
    packages = {str(canonicalize_name(name)): version for name, version in live.packages.items()}
    settings = {f"environment.{name}": value for name, value in variables(report).items()}
    if live.lock is None:
        return Side(target or "this machine", packages, platform, {}, settings)
    of = _of_lock("", live.lock, None)
    # A patched wheel says so in its version; the lock has upstream's.
    for artefact in live.lock.artefacts:
        if as_locked(packages.get(artefact.name, ""), artefact.metadata_version):
            packages[artefact.name] = artefact.version
    return Side(target or "this machine", packages, of.platform, of.os_packages, settings, live.lock)


def compare(a: Side, b: Side, settings: Settings, *, wheels: bool) -> Differences:
    """What differs; with ``wheels`` the patch sites and the symbols of both sides are looked at as well."""
    notes: dict[str, list[str]] = {}
    unasked: list[str] = []
    if wheels:
        for ask in (_sites, _links):
            try:
                for name, text in ask(a, b, settings):
                    notes.setdefault(name, []).append(text)
            except BuilderError as error:
                unasked.append(f"{ask.__name__.strip('_')}: {error.what}")
    for name, text in _gpu_code(a, b):
        notes.setdefault(name, []).append(text)
    only_a, only_b = _findings(a, b)
    for finding in only_b:
        notes.setdefault(finding.subject, []).append(f"only in {b.name}: {finding.message}")
    for finding in only_a:
        notes.setdefault(finding.subject, []).append(f"only in {a.name}: {finding.message}")
    rows = [*_packages(a, b, notes), *_platform(a, b)]
    rows += _plain("os", a.os_packages, b.os_packages, 0)
    if (a.loaded is None) == (b.loaded is None):
        rows += _plain("settings", a.settings, b.settings, 50)
    rows.sort(key=lambda change: (-change.weight, change.name))
    return Differences(a.name, b.name, tuple(rows), tuple(only_a), tuple(only_b), tuple(unasked))


def _packages(a: Side, b: Side, notes: Mapping[str, Sequence[str]]) -> Iterator[Change]:
    for name in sorted(a.packages.keys() | b.packages.keys()):
        before, after = a.packages.get(name, ""), b.packages.get(name, "")
        said = tuple(notes.get(name, ()))
        if before == after:
            if a.digests and b.digests and a.digests.get(name) != b.digests.get(name):
                yield Change(_group(name), name, before, after, 80, (*said, "the same version, another file"))
            continue
        yield Change(_group(name), name, before, after, _weight(name, before, after, len(said)), said)


def _group(name: str) -> str:
    layer = facts.layer_of(name)
    return layer if layer in _GROUPS else "rest"


def _weight(name: str, before: str, after: str, known: int) -> int:
    """How suspicious: what the facts have something to say of, then what much is linked to, then how far it moved."""
    reach = {"torch": 30, "kernels": 40, "flashinfer": 35, "sglang": 30, "rest": 10}[_group(name)]
    if name in ("torch", "sglang"):
        reach += 20
    return reach + _distance(before, after) + 100 * bool(known)


def _distance(before: str, after: str) -> int:
    """0 to 9: a major version further than a minor one, there and gone as far as a major one."""
    try:
        old, new = Version(before), Version(after)
    except InvalidVersion:
        return 9
    pairs = zip((*old.release, 0, 0, 0), (*new.release, 0, 0, 0), strict=False)
    at = next((number for number, (x, y) in enumerate(pairs) if x != y), 3)
    return max(0, 9 - 3 * at)


def _plain(group: str, a: Mapping[str, str], b: Mapping[str, str], weight: int) -> Iterator[Change]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name) and (group != "os" or (a and b)):
            yield Change(group, name, a.get(name, ""), b.get(name, ""), weight)


def _platform(a: Side, b: Side) -> Iterator[Change]:
    """What both tell: a lock has Python's 3.11 where a machine has 3.11.2."""
    for name in sorted(a.platform.keys() & b.platform.keys()):
        before, after = a.platform[name], b.platform[name]
        if before != after and not f"{after}.".startswith(f"{before}.") and not f"{before}.".startswith(f"{after}."):
            yield Change("platform", name, before, after, 60)


def _findings(a: Side, b: Side) -> tuple[list[Finding], list[Finding]]:
    """Warnings and errors that the rules have for one of the two only."""
    found = []
    for each in (a, b):
        if each.loaded is None or each.lock is None:
            return [], []
        context = Context(each.loaded, datetime.now(UTC).date(), each.lock)
        found.append([f for f in evaluate_rules(context) if f.severity is not Severity.NOTE])
    known = [{(f.rule, f.subject) for f in findings} for findings in found]
    return (
        [f for f in found[0] if (f.rule, f.subject) not in known[1]],
        [f for f in found[1] if (f.rule, f.subject) not in known[0]],
    )


def _gpu_code(a: Side, b: Side) -> Iterator[tuple[str, str]]:
    """GPU images that a release has and the other has not, where the shipped table has both."""
    from builder import arch
    from builder.static.gpucode import releases_with_code

    for name in sorted(a.packages.keys() & b.packages.keys()):
        if a.packages[name] == b.packages[name] or not (known := dict(releases_with_code(name))):
            continue
        codes = [known.get(each.packages[name]) for each in (a, b)]
        if codes[0] is None or codes[1] is None:
            continue
        images = []
        for code in codes:
            containers = [each for several in (code.members.values() if code else ()) for each in several]
            images.append([*arch.names(containers, "cubin"), *arch.names(containers, "ptx")])
        gained = [each for each in images[1] if each not in images[0]]
        lost = [each for each in images[0] if each not in images[1]]
        said = [f"{word} {', '.join(names)}" for word, names in (("gained", gained), ("lost", lost)) if names]
        if said:
            yield name, f"GPU images {'; '.join(said)}"


def _sites(a: Side, b: Side, settings: Settings) -> Iterator[tuple[str, str]]:
    """Patch sites whose state differs: what became native, what is lacking."""
    from builder.patches.listing import as_json, named_releases, release_listing
    from builder.patches.releases import Releases

    states: list[dict[tuple[str, str], str]] = []
    for each in (a, b):
        sglang, flashinfer = (_public(each.packages.get(name)) for name in ("sglang", "flashinfer-python"))
        if sglang is None and flashinfer is None:
            return
        listing = release_listing(named_releases(None, sglang, flashinfer, diff=False), Releases(settings))
        states.append({(site["package"], site["id"]): site["state"] for site in as_json(listing)["sites"]})
    moves: dict[tuple[str, str, str], list[str]] = {}
    for key in states[0].keys() & states[1].keys():
        before, after = states[0][key], states[1][key]
        if before != after:
            moves.setdefault((key[0], before, after), []).append(key[1])
    for (package, before, after), sites in sorted(moves.items()):
        yield package, f"patch sites {', '.join(sorted(sites))}: {before} → {after}"


def _public(version: str | None) -> str | None:
    return version.partition("+")[0] if version else None


def _links(a: Side, b: Side, settings: Settings) -> Iterator[tuple[str, str]]:
    """Whether kernels of one side fit the torch of the other: names that one of them needs and the other torch has not."""
    from builder.abi.report import as_json
    from builder.abi.verb import ask

    if a.packages.get("torch") == b.packages.get("torch"):
        return
    for kernels, torch in ((a, b), (b, a)):
        release = _released(torch.packages.get("torch"))
        for name in KERNELS:
            version = _released(kernels.packages.get(name))
            if release is None or version is None:
                continue
            python = ".".join(kernels.platform.get("python", "3.11").split(".")[:2])
            lines = [f"{name}=={version}", f"torch=={release}"]
            said = as_json(ask(lines, settings, python=python, base="bookworm", find=None))
            missing = {m["demangled"] for e in said["extensions"] for m in e["missing_symbols"]}
            if missing:
                first = min(missing)
                more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                yield "torch", f"{release} lacks `{first}`{more}, which {name} {version} of {kernels.name} needs"


def _released(version: str | None) -> str | None:
    return version if version and "+" not in version else None


def as_json(found: Differences) -> dict[str, Any]:
    """The differences as data."""
    return {
        "a": found.a,
        "b": found.b,
        "changes": [
            {
                "group": change.group,
                "name": change.name,
                "before": change.before or None,
                "after": change.after or None,
                "weight": change.weight,
                "notes": list(change.notes),
            }
            for change in found.changes
        ],
        "only_a": [finding.model_dump(mode="json") for finding in found.only_a],
        "only_b": [finding.model_dump(mode="json") for finding in found.only_b],
        "not_asked": list(found.unasked),
    }


def as_text(found: Differences) -> str:
    """The differences for people: groups in the order of their most suspicious change."""
    if not found.changes and not found.only_a and not found.only_b:
        return f"{found.a} and {found.b} are the same"
    best = {group: max((c.weight for c in found.changes if c.group == group), default=-1) for group in _GROUPS}
    count = f"{len(found.changes)} {'change' if len(found.changes) == 1 else 'changes'}"
    lines = [f"{found.a} → {found.b}: {count}, most suspicious first"]
    shown = {change.name for change in found.changes}
    for name, only in ((found.a, found.only_a), (found.b, found.only_b)):
        # What is about nothing that changed itself: a package that no longer fits, two CUDAs.
        lines += [f"  only in {name}: {finding.message}" for finding in only if finding.subject not in shown]
    for group in sorted(_GROUPS, key=lambda name: -best[name]):
        rows = [change for change in found.changes if change.group == group]
        if not rows:
            continue
        lines += ["", _TITLES[group]]
        width = max(len(change.name) for change in rows)
        for change in rows:
            lines.append(f"  {change.name:<{width}}  {change.before or 'none'} → {change.after or 'none'}")
            lines += [f"    {note}" for note in change.notes]
    lines += [f"not asked: {text}" for text in found.unasked]
    return "\n".join(lines)
