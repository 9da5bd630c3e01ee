"""A model of glibc's dynamic loader: where it finds a needed library, and which objects it then searches for a symbol.

Modelled on ld.so(8) and glibc's elf/dl-load.c and dl-lookup.c:

* a needed name that equals the soname (or name) of an object already loaded is that object;
* otherwise DT_RPATH of the object that needs it and of those that led to it (unless it has DT_RUNPATH),
  LD_LIBRARY_PATH, its DT_RUNPATH, `/etc/ld.so.cache`, then the default folders;
* a symbol is looked up in the global scope (program and closure, and what was opened RTLD_GLOBAL), then breadth first
  in the opened file's own closure.
"""

from __future__ import annotations

import copy
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from builder.elf import Elf, read_file
from builder.elf_image import ElfError

_CACHE = Path("/etc/ld.so.cache")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
# After the magic: number of entries, length of strings, flags, unused; then 24 bytes an entry (glibc, dl-cache.h).
_CACHE_HEADER, _CACHE_ENTRY = struct.Struct("<20sII20x"), struct.Struct("<iIIIQ")
_HWCAP_EXTENSION = 1 << 62
_MULTIARCH = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
_PLATFORM_LIB = "lib64"


class Object:
    """One ELF file as the model knows it. ``path`` is absolute, as the loader would open it."""

    def __init__(self, path: str, elf: Elf) -> None:
        self.path, self._elf = path, elf

    @property
    def elf(self) -> Elf:
        """What the loader reads of the file."""
        return self._elf

    @property
    def machine(self) -> str:
        """The machine that it is for."""
        return self.elf.machine

    @property
    def name(self) -> str:
        """Its soname, or the name of its file."""
        return self.elf.soname or os.path.basename(self.path)

    @cached_property
    def exports(self) -> dict[str, set[str | None]]:
        """Exported names with the versions they are exported under (None: unversioned)."""
        exports: dict[str, set[str | None]] = {}
        for symbol in self.elf.exported:
            exports.setdefault(symbol.name, set()).add(symbol.version)
        return exports

    def has(self, name: str, version: str | None) -> bool:
        """Whether a reference to ``name`` under ``version`` binds here.

        An object without version definitions satisfies any version; an unversioned reference takes any definition.
        """
        versions = self.exports.get(name)
        if versions is None:
            return False
        return version is None or version in versions or not self.elf.verdef


@dataclass
class Closure:
    """What opening one file brings, breadth first, itself first. ``missing`` pairs a needed name with who needs it."""

    objects: list[Object] = field(default_factory=list)
    missing: list[tuple[str, Object]] = field(default_factory=list)


class Library:
    """Reads each ELF file once, whatever name it is found under."""

    def __init__(self) -> None:
        self._objects: dict[str, Object | ElfError | OSError] = {}

    def get(self, path: str | os.PathLike[str]) -> Object:
        """The object at ``path``. Raises OSError, or ElfError for what is not ELF or is malformed."""
        name = os.path.normpath(os.fspath(path))
        if name not in self._objects:
            try:
                self._objects[name] = Object(name, read_file(name))
            except (OSError, ElfError) as error:
                self._objects[name] = error
        found = self._objects[name]
        if isinstance(found, Object):
            return found
        raise found


class Loader:
    """The state of a process after `import torch` (or of a bare python): what is loaded, and the global scope.

    ``library_path`` are the folders of LD_LIBRARY_PATH; ``provided`` are sonames that the host's driver brings.
    """

    def __init__(
        self,
        library: Library,
        *,
        program: str,
        loaded: Iterable[str] = (),
        opened_global: Iterable[str] = (),
        library_path: Sequence[str] = (),
        provided: Iterable[str] = (),
        cache: Path = _CACHE,
    ) -> None:
        self.library = library
        self._library_path = [folder for folder in library_path if folder]
        self._provided = frozenset(provided)
        self._cache = read_cache(cache)
        self.loaded: dict[str, Object] = {}
        self._found: dict[tuple[str, str], str | None] = {}
        self.program = self.library.get(os.path.realpath(program))
        self._machine = self.program.machine
        for path in loaded:
            try:
                item = self.library.get(path)
            except (OSError, ElfError):
                continue
            self.loaded.setdefault(item.name, item)
            self.loaded.setdefault(os.path.basename(path), item)
        self.global_scope: list[Object] = []
        for root in [self.program.path, *opened_global]:
            for item in self.closure(root).objects:
                if item not in self.global_scope:
                    self.global_scope.append(item)

    def after(self, opened: Iterable[tuple[str, bool]]) -> Loader:
        """The state after opening some more files, each with whether it is opened RTLD_GLOBAL."""
        state = copy.copy(self)
        state.loaded, state.global_scope = dict(self.loaded), list(self.global_scope)
        for path, is_global in opened:
            try:
                closure = state.closure(path)
            except (OSError, ElfError):
                continue  # `needed` and `record` report that file itself
            if any(name not in self._provided for name, _ in closure.missing):
                continue  # it cannot be opened, so it will not be there
            for item in closure.objects:
                state.loaded.setdefault(item.name, item)
                if is_global and item not in state.global_scope:
                    state.global_scope.append(item)
        return state

    def scope(self, closure: Closure) -> list[Object]:
        """Where symbols of the closure's first object are looked up, in order.

        An object that is already loaded was bound when it was: in the scope of whatever opened it, which is among what
        is loaded.
        """
        root = closure.objects[0]
        others = list(self.loaded.values()) if any(item.path == root.path for item in self.loaded.values()) else []
        return [*self.global_scope, *closure.objects, *others]

    @property
    def default_folders(self) -> list[str]:
        """glibc's trusted folders, with Debian's multiarch ones before them."""
        multiarch = _MULTIARCH.get(self._machine)
        folders = [f"/lib/{multiarch}", f"/usr/lib/{multiarch}"] if multiarch else []
        return [*folders, f"/{_PLATFORM_LIB}", f"/usr/{_PLATFORM_LIB}", "/lib", "/usr/lib"]

    def closure(self, path: str | os.PathLike[str]) -> Closure:
        """Open the file at ``path`` in the model. Raises OSError or ElfError if that file itself cannot be read."""
        closure = Closure()
        closure.objects.extend(self.walk(path, closure.missing))
        return closure

    def walk(
        self,
        path: str | os.PathLike[str],
        missing: list[tuple[str, Object]],
        into: Callable[[Object], bool] = lambda _: True,
    ) -> Iterator[Object]:
        """The objects of `closure`, one after the other: what an object needs is looked at when its turn comes.

        ``missing`` is filled as the walk goes on; what an object needs that is not to be gone ``into`` is left out.
        """
        root = self.library.get(path)
        names = {root.name: root, os.path.basename(root.path): root}
        # The chain of objects that led to each, nearest first: DT_RPATH is inherited along it.
        chains: dict[str, tuple[Object, ...]] = {root.path: (root,)}
        queue = [root]
        yield root
        for item in queue:
            for needed in item.elf.needed if into(item) else ():
                found = names.get(needed) or self.already(needed)
                if found is None and (place := self.search(needed, chains[item.path])):
                    found = self.library.get(place)
                if found is None:
                    missing.append((needed, item))
                    continue
                names.setdefault(needed, found)
                names.setdefault(found.name, found)
                if found.path not in chains:
                    chains[found.path] = (found, *chains[item.path])
                    queue.append(found)
                    yield found

    def already(self, needed: str) -> Object | None:
        """The loaded object that answers to this name."""
        return self.loaded.get(needed)

    def search(self, needed: str, chain: tuple[Object, ...]) -> str | None:
        """Where a library lies that the first of ``chain`` needs; the others led to it, nearest first."""
        item = chain[0]
        if "/" in needed:
            return self._usable(needed)
        folders: list[str] = []
        if not item.elf.runpath:
            for link in (*chain, self.program):
                if not link.elf.runpath:
                    folders += _expand(link.elf.rpath, link)
        folders += self._library_path
        folders += _expand(item.elf.runpath, item)
        for folder in folders:
            if place := self._usable(f"{folder}/{needed}"):
                return place
        for place in self._cache.get(needed, ()):
            if usable := self._usable(place):
                return usable
        for folder in self.default_folders:
            if place := self._usable(f"{folder}/{needed}"):
                return place
        return None

    def _usable(self, path: str) -> str | None:
        """The loader passes over files of another machine or class and goes on searching."""
        try:
            item = self.library.get(path)
        except (OSError, ElfError):
            return None
        return path if item.machine == self._machine else None


def _expand(folders: Sequence[str], item: Object) -> list[str]:
    origin = os.path.dirname(item.path)
    machine = {"x86_64": "x86_64", "aarch64": "aarch64"}.get(item.elf.machine, item.elf.machine)
    expanded = []
    for folder in folders:
        for name, value in (("ORIGIN", origin), ("LIB", _PLATFORM_LIB), ("PLATFORM", machine)):
            folder = folder.replace(f"${{{name}}}", value).replace(f"${name}", value)
        # An empty element means the working folder, which in a child of ours holds nothing.
        if folder:
            expanded.append(os.path.normpath(folder))
    return expanded


def read_cache(path: Path) -> dict[str, list[str]]:
    """`/etc/ld.so.cache`: libraries by soname, in the loader's order. Empty when absent or of another format."""
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + _CACHE_HEADER.size:
        return {}
    _, entries, _ = _CACHE_HEADER.unpack_from(data, start)
    found: dict[str, list[str]] = {}
    for number in range(entries):
        at = start + _CACHE_HEADER.size + number * _CACHE_ENTRY.size
        if at + _CACHE_ENTRY.size > len(data):
            break
        _, key, value, _, hwcap = _CACHE_ENTRY.unpack_from(data, at)
        if not hwcap & _HWCAP_EXTENSION:
            found.setdefault(_string(data, start + key), []).append(_string(data, start + value))
    return found


def _string(data: bytes, at: int) -> str:
    end = data.find(b"\0", at)
    return os.fsdecode(data[at : end if end >= 0 else len(data)])
