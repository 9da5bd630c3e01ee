"""Is what is installed what the lock says: `installed`, `record`, `ownership`."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import os
import posixpath
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from builder.smoke.report import Result, count, some
from builder.smoke.spec import SharedFiles, Spec
from builder.smoke.tree import Distribution, Entry, Tree

_CHUNK = 1 << 20
_REBUILD = "build again from the lock; nothing else may install into the environment"
# What `python -m venv` and virtualenv make, which no RECORD owns.
_VENV_BIN = (
    "python",
    "python3",
    "python3.*",
    "activate",
    "activate.*",
    "Activate.ps1",
    "activate_this.py",
    "deactivate.*",
)
_VENV_SITE = ("_virtualenv.py", "_virtualenv.pth")


def check_installed(spec: Spec, tree: Tree, *, native: bool) -> Result:
    """Installed = locked, by normalised name and the version that METADATA states.

    The native part leaves out the sglang layer, whether or not it is there.
    """
    ignored = spec.names(sglang=True) if native else frozenset()
    wanted = {name: artefact for name, artefact in spec.by_name.items() if name not in ignored}
    found: dict[str, list[Distribution]] = {}
    for distribution in tree.distributions:
        if distribution.name not in ignored:
            found.setdefault(distribution.name, []).append(distribution)
    result = Result(len(found), len(wanted), "distributions", f"{count(len(wanted), 'artefact')} in the lock")
    missing = sorted(wanted.keys() - found.keys())
    extra = sorted(found.keys() - wanted.keys())
    if missing or extra:
        # The two messages say it better than the bare numbers would.
        result.expected = None
    if missing:
        names = some((f"{wanted[name].name} {wanted[name].version}" for name in missing), 8)
        result.add(
            "error",
            missing[0],
            f"{count(len(missing), 'distribution')} of the lock {_are(missing)} not installed: {names}",
            hint=_REBUILD,
        )
    if extra:
        names = some((str(found[name][0]) for name in extra), 8)
        result.add(
            "error",
            extra[0],
            f"{count(len(extra), 'distribution')} {_are(extra)} installed but not in the lock: {names}",
            because="the lock is all that may be installed; a resolver or an installer ran beside it",
            hint=_REBUILD,
        )
    for name in sorted(wanted.keys() & found.keys()):
        artefact, versions = wanted[name], sorted({item.version for item in found[name]})
        if len(found[name]) > 1:
            folders = some((item.info for item in found[name]), 4)
            result.add(
                "error", name, f"{artefact.name} is installed {len(found[name])} times: {folders}", hint=_REBUILD
            )
        elif versions != [artefact.metadata_version]:
            result.add(
                "error",
                name,
                f"{artefact.name} {versions[0]} is installed, the lock has {artefact.metadata_version}",
                because=f"the lock's file is {artefact.file}",
                hint=_REBUILD,
            )
    return result


def _are(items: list[str]) -> str:
    return "is" if len(items) == 1 else "are"


@dataclass
class _Differences:
    """What is wrong with one distribution's files, by kind."""

    missing: list[str] = field(default_factory=list)
    size: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    unhashed: list[str] = field(default_factory=list)


def check_record(spec: Spec, tree: Tree, *, native: bool) -> Result:
    """Every RECORD entry is there with its sha256 and size, and nothing is there that no RECORD owns.

    Hashes in as many threads as there are cores, two at least (hashlib lets others run meanwhile).
    """
    scope = spec.names(sglang=False) if native else spec.names(sglang=True)
    jobs = [
        (owner, entry)
        for owner in tree.distributions
        for entry in owner.entries
        if owner.name in scope and not _loses(spec, tree, owner.name, entry.path)
    ]
    skipped = sum(len(owner.entries) for owner in tree.distributions if owner.name in scope) - len(jobs)
    result = Result(0, sum(len(d.entries) for d in tree.distributions if d.name in scope) - skipped, "files")
    for distribution in tree.distributions:
        if distribution.name in scope and distribution.trouble:
            result.add("error", distribution.name, f"{distribution}: {distribution.trouble}", hint=_REBUILD)
    differences: dict[str, _Differences] = {}
    read = 0
    with ThreadPoolExecutor(max(2, os.cpu_count() or 2)) as pool:
        verdicts = pool.map(lambda job: _compare(tree.path(job[1].path), job[1]), jobs, chunksize=64)
        for (owner, entry), (verdict, size) in zip(jobs, verdicts, strict=True):
            result.looked_at += 1
            read += size
            if verdict and not (verdict == "unhashed" and _may_lack_hash(owner, entry)):
                getattr(differences.setdefault(owner.name, _Differences()), verdict).append(entry.path)
    for name, difference in sorted(differences.items()):
        _report_differences(result, tree.by_name[name], difference)
    result.detail = f"{read / 1e9:.2f} GB hashed"
    if skipped:
        result.detail += f", {skipped} left to the distribution that wins a shared file"
    if native:
        _report_unowned(result, tree, spec.names(sglang=True))
    else:
        _report_unowned(result, tree, frozenset())
    return result


def _compare(path: Path, entry: Entry) -> tuple[str, int]:
    """What differs (`missing`, `size`, `content`, `unhashed`, or nothing), and how many bytes were hashed."""
    try:
        with path.open("rb", buffering=0) as file:
            if entry.sha256 is None:
                return "unhashed", 0
            size = os.fstat(file.fileno()).st_size
            if entry.size is not None and size != entry.size:
                return "size", 0
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return "missing", 0
    value = base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    return ("" if value == entry.sha256 else "content"), size


def _may_lack_hash(owner: Distribution, entry: Entry) -> bool:
    """RECORD cannot hold its own hash, nor its signatures', and bytecode has none (binary distribution format)."""
    return entry.path in (
        f"{owner.info}/{name}" for name in ("RECORD", "RECORD.jws", "RECORD.p7s")
    ) or entry.path.endswith(".pyc")


def _report_differences(result: Result, owner: Distribution, difference: _Differences) -> None:
    for kind, text, because in (
        ("missing", "missing", "RECORD names what the wheel installed"),
        ("content", "not as installed: other content", "its sha256 is not the one in RECORD"),
        ("size", "not as installed: other size", "its size is not the one in RECORD"),
        ("unhashed", "without a hash in RECORD", "nothing says what it should hold"),
    ):
        files: list[str] = getattr(difference, kind)
        if files:
            one = len(files) == 1
            what = (
                f"`{files[0]}` of {owner} is {text}"
                if one
                else f"{len(files)} files of {owner} are {text}: {some(files)}"
            )
            result.add("error", owner.name, what, because=because if one or kind == "missing" else "", hint=_REBUILD)


def _report_unowned(result: Result, tree: Tree, ignored: frozenset[str]) -> None:
    """Files of site-packages and `bin` that no RECORD owns, bytecode that does not belong to its source."""
    owned = set(tree.owners)
    # Folders of the sglang layer, of which the native part says nothing.
    tops = {path.split("/")[0] for path, owners in tree.owners.items() if any(o.name in ignored for o, _ in owners)}
    unowned: list[str] = []
    stale: list[tuple[str, str, str]] = []
    bytecode = 0
    for path in _files(tree):
        if path in owned:
            continue
        name, parent = posixpath.basename(path), posixpath.basename(posixpath.dirname(path))
        if name.endswith(".pyc") and parent == "__pycache__":
            if path.split("/")[0] in tops:
                continue
            bytecode += 1
            severity, trouble = _bytecode_trouble(tree.path(path))
            if trouble:
                stale.append((severity, path, trouble))
        elif not _of_the_environment(path):
            unowned.append(path)
    if bytecode:
        result.detail += f", {count(bytecode, 'bytecode file')}"
    if unowned:
        result.add(
            "error",
            unowned[0],
            f"{count(len(unowned), 'file')} in the environment that no RECORD owns: {some(unowned)}",
            because="something wrote them after, or beside, the installation of the lock's wheels",
            hint="remove them in the step that makes them",
        )
    for severity in ("error", "warning"):
        for trouble in sorted({t for s, _, t in stale if s == severity}):
            paths = [path for _, path, t in stale if t == trouble]
            result.add(
                severity,
                paths[0],
                f"{count(len(paths), 'bytecode file')} {trouble}: {some(paths)}",
                because="bytecode that is not of its source hides what a user edits in a container",
                hint="compile with `python -m compileall --invalidation-mode checked-hash`",
            )


def _files(tree: Tree) -> Iterator[str]:
    """Every file of site-packages and the environment's `bin`, as RECORD would write its path, in order."""
    roots = [tree.site_packages]
    if (tree.prefix / "bin").is_dir() and tree.prefix != tree.site_packages:
        roots.append(tree.prefix / "bin")
    for root in roots:
        for folder, folders, files in os.walk(root):
            folders.sort()
            relative = os.path.relpath(folder, tree.site_packages)
            for name in sorted(files):
                yield name if relative == "." else f"{relative}/{name}"


def _of_the_environment(path: str) -> bool:
    folder, name = posixpath.split(path)
    if not folder:
        return name in _VENV_SITE
    return (
        folder.split("/")[0] == ".."
        and posixpath.basename(folder) == "bin"
        and any(fnmatchcase(name, pattern) for pattern in _VENV_BIN)
    )


def _bytecode_trouble(path: Path) -> tuple[str, str]:
    """Severity and what is wrong with a `__pycache__/*.pyc`: (``""``, ``""``) when it is of its source (PEP 552)."""
    source = path.parent.parent / (path.name.split(".")[0] + ".py")
    try:
        head, text = path.read_bytes()[:16], source.read_bytes()
    except FileNotFoundError:
        return "error", "without a source"
    except OSError:
        return "error", "that cannot be read"
    if len(head) < 16:
        return "error", "cut short"
    (flags,) = struct.unpack_from("<I", head, 4)
    if flags & 1:
        if head[8:16] != importlib.util.source_hash(text):
            return "error", "stale, its source has other content"
        return ("", "") if flags & 2 else ("warning", "never compared with its source (`unchecked-hash`)")
    stamp, size = struct.unpack_from("<II", head, 8)
    if size != len(text) & 0xFFFFFFFF or stamp != int(source.stat().st_mtime) & 0xFFFFFFFF:
        return "error", "stale, its source has another time or size"
    return "warning", "going by time, not by content"


def check_ownership(spec: Spec, tree: Tree, *, native: bool) -> Result:
    """One owner per file, one owner per import package."""
    ignored = spec.names(sglang=True) if native else frozenset()
    distributions = [item for item in tree.distributions if item.name not in ignored]
    paths = {
        path: [(owner, entry) for owner, entry in owners if owner.name not in ignored]
        for path, owners in tree.owners.items()
    }
    paths = {path: owners for path, owners in paths.items() if owners}
    expected = len({entry.path for item in distributions for entry in item.entries})
    result = Result(len(paths), expected, "files", f"of {count(len(distributions), 'distribution')}")
    same: dict[tuple[str, ...], list[str]] = {}
    differ: dict[tuple[str, ...], list[str]] = {}
    used: dict[str, list[str]] = {}
    for path, owners in sorted(paths.items()):
        if len(owners) < 2:
            continue
        names = tuple(sorted({str(owner) for owner, _ in owners}))
        if len({entry.sha256 for _, entry in owners}) == 1:
            same.setdefault(names, []).append(path)
        elif entry := _shared(spec.shared_files, [owner.name for owner, _ in owners], path):
            used.setdefault(entry.id, []).append(path)
        else:
            differ.setdefault(names, []).append(path)
    for names, files in sorted(same.items()):
        result.add(
            "note", files[0], f"{count(len(files), 'file')} with one content from {' and '.join(names)}: {some(files)}"
        )
    for names, files in sorted(differ.items()):
        result.add(
            "error",
            files[0],
            f"{' and '.join(names)} bring different versions of {count(len(files), 'file')}: {some(files)}",
            because="which of them is on disk depends on the order of installation",
            hint="drop one of the two, or say in `shared_files` of builder/facts/smoke.yaml whose has to win, and why",
        )
    for shared in spec.shared_files:
        present = [name for name in shared.distributions if name in {item.name for item in distributions}]
        if shared.id in used:
            result.exceptions.add(shared.id)
            result.add(
                "note",
                shared.wins,
                f"{count(len(used[shared.id]), 'file')} of {' and '.join(present)} differ, and {shared.wins}'s "
                f"are installed: {some(used[shared.id])}",
                source=shared.source,
            )
        elif len(present) == len(shared.distributions):
            result.add(
                "error",
                shared.id,
                f"`shared_files` entry `{shared.id}` is of no use: {' and '.join(present)} share no file that differs: "
                "remove it",
                rule="exception",
                hint="the entry is in builder/facts/smoke.yaml",
            )
    _report_import_packages(result, distributions)
    return result


def _report_import_packages(result: Result, distributions: Iterable[Distribution]) -> None:
    """Two distributions with a regular `__init__` for one top-level package overwrite each other, file by file.

    Not where it is empty: NVIDIA's wheels of CUDA 12 each bring an empty `nvidia/__init__.py`, as namespaces once needed.
    """
    brings: dict[str, list[Distribution]] = {}
    for distribution in distributions:
        tops = {
            entry.path.split("/")[0]
            for entry in distribution.entries
            if entry.path.count("/") == 1 and posixpath.basename(entry.path).startswith("__init__.") and entry.size != 0
        }
        for top in tops:
            brings.setdefault(top, []).append(distribution)
    for top, owners in sorted(brings.items()):
        if len(owners) > 1:
            names = " and ".join(sorted(str(owner) for owner in owners))
            result.add(
                "error",
                top,
                f"{names} both are the import package `{top}`",
                because="the one that was installed last has overwritten the other's files",
                hint="keep one of them in the matrix (`exclude` the other, if something requires it)",
            )


def _loses(spec: Spec, tree: Tree, distribution: str, path: str) -> bool:
    """Whether the facts give this file to another distribution that has it too: that one's RECORD must be right."""
    owners = [owner.name for owner, _ in tree.owners[path]]
    if len(owners) < 2:
        return False
    shared = _shared(spec.shared_files, owners, path)
    return shared is not None and distribution != shared.wins


def _shared(entries: Iterable[SharedFiles], owners: list[str], path: str) -> SharedFiles | None:
    for entry in entries:
        if (
            set(owners) <= set(entry.distributions)
            and entry.wins in owners
            and any(fnmatchcase(path, pattern) for pattern in entry.files)
        ):
            return entry
    return None
