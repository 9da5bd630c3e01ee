"""What a build takes from this machine: direct files that were fetched, and wheels that were patched here.

A patched wheel stands in for the one that the lock pins: another version (with a local part), file and hash, in the
same layer. The lock stays upstream's, since patching is a function of it, of the matrix and of the builder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from builder.display import note
from builder.fetch import fetch_all, fetch_artefact
from builder.files import canonical_json, sha256_hex
from builder.lock import Artefact, Lock
from builder.matrix import LoadedMatrix, Matrix
from builder.settings import Settings

BUILDER = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Supplies:
    """``wheels`` are files by name; ``installed`` the entries that stand in for those of the lock, by package.

    Every package that patches are about is among the latter, also where it stays as it is.
    ``reports`` are `PatchResult.as_json`, of packages that stay as they are too; ``diff`` is all that was patched.
    """

    wheels: Mapping[str, Path] = field(default_factory=dict)
    installed: Mapping[str, Artefact] = field(default_factory=dict)
    reports: tuple[Mapping[str, Any], ...] = ()
    diff: str = ""


def local(artefact: Artefact) -> Artefact:
    """The entry as a file of this machine: bound into the build, and asked of no index there.

    Its size stays the lock's: what is fetched, and what a plan and a Dockerfile can say before anything is.
    """
    return artefact.model_copy(update={"index": None, "url": None})


def stand_ins(matrix: Matrix, lock: Lock) -> dict[str, Artefact]:
    """The entries that patches are about, as far as they are known before anything is fetched."""
    from builder.patches import concerned

    return {name: local(lock.by_name[name]) for name in concerned(matrix.patches, lock.by_name)}


def gather(loaded: LoadedMatrix, lock: Lock, settings: Settings) -> Supplies:
    """Fetch and patch what a build needs.

    Raises one error for all direct files that cannot be had (`fetch_all`), then what patching raises.
    """
    from builder.patches import concerned, inspect_wheel, write_patched

    matrix = loaded.matrix
    names = concerned(matrix.patches, lock.by_name)
    wheels = dict(fetch_all(lock, settings))
    indexes = {name: index.url for name, index in matrix.indexes.items()}
    installed: dict[str, Artefact] = {}
    reports = []
    diffs = []
    for name in names:
        artefact = lock.by_name[name]
        source = wheels.get(artefact.file) or fetch_artefact(artefact, settings, indexes=indexes)
        result = inspect_wheel(source, matrix.patches, loaded.path.parent)
        made = write_patched(result, settings.cache / "patched" / artefact.sha256[:16])
        reports.append(result.as_json(made.version if made else ""))
        diffs.append(result.diff)
        wheels.pop(artefact.file, None)
        if made is None:
            note(f"patches: {name} {artefact.version} has all of it already")
            installed[name] = local(artefact)
            wheels[artefact.file] = source
            continue
        note(f"patches: {name} {artefact.version} → {made.version}")
        update = {"version": made.version, "metadata_version": made.version, "file": made.file, "sha256": made.sha256}
        installed[name] = local(artefact).model_copy(update=update)
        wheels[made.file] = made.path
    return Supplies(wheels, installed, tuple(reports), "".join(diffs))


@cache
def _patching() -> str:
    files = [
        *sorted((BUILDER / "patches").glob("*.py")),
        BUILDER / "wheel.py",
        BUILDER / "smoke" / "patched.py",
        BUILDER / "smoke" / "syntax.py",
    ]
    files += sorted((BUILDER / "smoke").glob("post_*.py"))
    return sha256_hex(canonical_json([sha256_hex(path.read_bytes()) for path in files]))


def patch_inputs(matrix: Matrix) -> str:
    """What decides the outcome of patching beside the lock: what the matrix asks for, and how it is done. Empty if nothing.

    A user's diff is in it by the sha256 that the matrix states.
    """
    asked = matrix.patches.model_dump(mode="json")
    if asked == type(matrix.patches)().model_dump(mode="json"):
        return ""
    return sha256_hex(canonical_json([asked, _patching()]))


def patch_words(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a package: `sglang 0.5.9+sm120.eagle3: S1 S2 patched, E4 native`; what a release has not is left out."""
    lines = []
    for report in reports:
        groups: dict[str, list[str]] = {}
        for site in report["sites"]:
            if site["before"] == "absent":
                continue
            state = {"needed": "patched"}.get(site["before"], site["before"])
            if site["id"] not in groups.setdefault(state, []):
                groups[state].append(site["id"])
        parts = [f"{' '.join(ids)} {state}" for state, ids in groups.items()]
        parts += [f"{item['file']} applied" for item in report["diffs"]]
        lines.append(f"{report['package']} {report['patched_version']}: {', '.join(parts) or 'nothing to do'}")
    return lines
