"""What is installed: distributions, their RECORDs, and which of their files are native code.

RECORD is read as the binary distribution format has it: CSV of path, `sha256=` and unpadded URL-safe base64, size in
bytes; paths are relative to site-packages and may climb out of it (`../../../bin/ninja`).
"""

from __future__ import annotations

import csv
import os
import posixpath
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from builder.smoke.spec import normalise

# e_machine by os.uname().machine, to leave out ELF files for other machines (a cubin is one: 190, EM_CUDA).
_E_MACHINE = {"x86_64": 62, "aarch64": 183}
_ET_EXEC, _ET_DYN = 2, 3
# Numbers as they are given: `.12`, `.1.1.1k` (OpenSSL), `.0unstable` (AWS), `.1.17.0-beta.1` (Azure).
_SHARED_OBJECT = re.compile(r".\.so(\.[0-9]+[a-z]*(-[a-z]+)?)*$")
_EXTENSION = re.compile(r"\.(cpython-[^/]*|abi3)\.so$")


@dataclass(frozen=True)
class Entry:
    """One line of a RECORD. ``sha256`` is base64 as written, None where RECORD states none; ``size`` in bytes."""

    path: str
    sha256: str | None
    size: int | None


@dataclass(frozen=True)
class Distribution:
    """One `*.dist-info` folder. ``entries`` is None where there is no readable RECORD (``trouble`` says why)."""

    name: str
    shown: str
    version: str
    info: str
    entries: tuple[Entry, ...] = ()
    trouble: str = ""

    def __str__(self) -> str:
        """Name and version, as a user would write them."""
        return f"{self.shown} {self.version}"


@dataclass
class Tree:
    """A site-packages folder and the environment around it. Raises nothing: what is wrong is in ``trouble``."""

    site_packages: Path
    distributions: list[Distribution] = field(default_factory=list)

    @classmethod
    def read(cls, site_packages: Path) -> Tree:
        """Read every distribution's name, version and RECORD."""
        tree = cls(site_packages)
        for info in sorted(site_packages.glob("*.dist-info")):
            tree.distributions.append(_read_distribution(info))
        return tree

    @property
    def prefix(self) -> Path:
        """The environment: `/opt/venv` for `/opt/venv/lib/python3.11/site-packages`."""
        return self.site_packages.parents[2] if len(self.site_packages.parents) > 2 else self.site_packages

    @cached_property
    def by_name(self) -> dict[str, Distribution]:
        """Distributions by normalised name (of two with one name, the later in order)."""
        return {distribution.name: distribution for distribution in self.distributions}

    @cached_property
    def owners(self) -> dict[str, list[tuple[Distribution, Entry]]]:
        """Who brings each path; paths as in RECORD, normalised."""
        owners: dict[str, list[tuple[Distribution, Entry]]] = {}
        for distribution in self.distributions:
            for entry in distribution.entries:
                owners.setdefault(entry.path, []).append((distribution, entry))
        return owners

    def path(self, relative: str) -> Path:
        """Where a RECORD path lies."""
        return Path(os.path.normpath(self.site_packages / relative))

    def owner(self, path: str | os.PathLike[str]) -> Distribution | None:
        """The distribution that brings a file on disk, if a RECORD names it."""
        relative = self.relative(path)
        found = self.owners.get(relative)
        return self._likely(relative, found) if found else None

    def relative(self, path: str | os.PathLike[str]) -> str:
        """A path on disk as RECORD would write it; a path outside of the environment stays as it is."""
        text = os.path.normpath(os.fspath(path))
        if not os.path.isabs(text):
            return posixpath.normpath(text)
        if text.startswith(str(self.prefix) + os.sep):
            return os.path.relpath(text, self.site_packages)
        return text

    def shared_objects(self, scope: Iterable[str]) -> list[tuple[str, Distribution]]:
        """Paths that RECORDs of the distributions in ``scope`` call `*.so` or `*.so.N`, each once, in order.

        Without those for another machine where their distribution has others for this one: nothing opens them here.
        """
        found = self._select(scope, is_shared_object)
        foreign = {path for path, _ in found if not is_extension(path) and _is_foreign(self.path(path))}
        at_home = {distribution.name for path, distribution in found if path not in foreign}
        return [(path, owner) for path, owner in found if path not in foreign or owner.name not in at_home]

    def programs(self, scope: Iterable[str]) -> list[tuple[str, Distribution]]:
        """Native programs and libraries for this machine that are not called `*.so`: found by their first bytes."""
        return self._select(scope, lambda path: not is_shared_object(path) and _is_native(self.path(path)))

    def _likely(self, path: str, owners: list[tuple[Distribution, Entry]]) -> Distribution:
        """Whose file this is: of several owners, the one that states the size that it has."""
        if len(owners) > 1:
            try:
                size = self.path(path).stat().st_size
            except OSError:
                size = None
            owners = [item for item in owners if item[1].size == size] or owners
        return owners[-1][0]

    def _select(self, scope: Iterable[str], wanted: Callable[[str], bool]) -> list[tuple[str, Distribution]]:
        names = frozenset(scope)
        found = {
            path: self._likely(path, owners)
            for path, owners in self.owners.items()
            if any(owner.name in names for owner, _ in owners) and wanted(path)
        }
        return sorted(found.items())


def is_shared_object(path: str) -> bool:
    """Whether a name is a shared object's: `x.so`, `x.so.12`, `x.so.1.1.1k`."""
    return _SHARED_OBJECT.search(posixpath.basename(path)) is not None


def is_extension(path: str) -> bool:
    """Whether a name is one that Python imports: it says itself what it is for, and has to be it."""
    return _EXTENSION.search(path) is not None


def _is_native(path: Path) -> bool:
    kind, number = _head(path)
    return kind in (_ET_EXEC, _ET_DYN) and number == _E_MACHINE.get(os.uname().machine, number)


def _is_foreign(path: Path) -> bool:
    """Whether it is an ELF file for another machine."""
    kind, number = _head(path)
    return bool(kind) and number != _E_MACHINE.get(os.uname().machine, number)


def _head(path: Path) -> tuple[int, int]:
    """e_type and e_machine of an ELF file; two zeros for any other."""
    try:
        with path.open("rb", buffering=0) as file:
            head = file.read(20)
    except OSError:
        return 0, 0
    if len(head) < 20 or not head.startswith(b"\x7fELF"):
        return 0, 0
    kind, number = struct.unpack_from("<HH", head, 16)
    return kind, number


def _read_distribution(info: Path) -> Distribution:
    stem_name, _, stem_version = info.name.removesuffix(".dist-info").partition("-")
    shown, version = stem_name, stem_version
    trouble = ""
    try:
        for line in _headers(info / "METADATA"):
            key, _, value = line.partition(":")
            if key.lower() == "name":
                shown = value.strip()
            elif key.lower() == "version":
                version = value.strip()
    except OSError as error:
        trouble = f"METADATA cannot be read: {error.strerror}"
    entries: list[Entry] = []
    try:
        with (info / "RECORD").open(encoding="utf-8", newline="") as file:
            for row in csv.reader(file):
                if row:
                    entries.append(_entry(row))
    except OSError as error:
        trouble = f"RECORD cannot be read: {error.strerror}"
    except (ValueError, csv.Error) as error:
        trouble = f"RECORD is malformed: {error}"
    return Distribution(normalise(shown), shown, version, info.name, tuple(entries), trouble)


def _headers(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                return
            yield line.rstrip("\n")


def _entry(row: list[str]) -> Entry:
    if len(row) != 3:
        raise ValueError(f"line with {len(row)} fields: {','.join(row)[:80]}")
    path, digest, size = row
    algorithm, _, value = digest.partition("=")
    if digest and algorithm != "sha256":
        raise ValueError(f"`{path}` has a {algorithm} digest, not sha256")
    return Entry(posixpath.normpath(path), value.rstrip("=") or None, int(size) if size else None)
