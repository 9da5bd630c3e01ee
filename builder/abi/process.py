"""A process that is about to open a native file, as `builder.smoke.loader` models one, over wheels that nobody installed.

Facts of a file are read when its turn comes: what `import torch` has loaded is followed only as far as it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path

from builder.abi.model import Facts, Wheel
from builder.elf import Elf
from builder.facts import ProviderFact
from builder.smoke.loader import Library, Loader, Object

SITE, SYSTEM = "/site", "/usr/lib"
PROGRAM = f"{SYSTEM}/python"


class Member(Object):
    """A native file of a wheel; its facts are read when they are asked for."""

    def __init__(self, file: str, wheel: Wheel, machine: str) -> None:
        self.file, self.wheel, self._machine = file, wheel, machine
        self.path = f"{SITE}/{file}"

    @cached_property
    def facts(self) -> Facts:
        """What its dynamic tables say."""
        return self.wheel.read(self.file)

    @property
    def elf(self) -> Elf:
        """What the loader reads, without symbols."""
        facts = self.facts
        kept = {name: getattr(facts, name) for name in ("soname", "needed", "rpath", "runpath", "verneed", "verdef")}
        return Elf(self.path, self._machine, "dyn", **kept)

    @property
    def machine(self) -> str:
        """By the wheel's platform tag: nothing has to be read for it."""
        return self._machine

    @property
    def name(self) -> str:
        """The name of its file: sonames are alike, but where a wheel would not work at all."""
        return self.file.rpartition("/")[2]

    def has(self, name: str, version: str | None) -> bool:
        """Whether a reference binds here, as for `Object`."""
        versions = self.facts.exports.versions(name)
        return bool(versions) and (version is None or version in versions or not self.facts.verdef)


class System(Object):
    """A library of the base or the driver: it is there, and its names are not looked at one by one."""

    def __init__(self, path: str, machine: str) -> None:
        super().__init__(path, Elf(path, machine, "dyn", soname=path.rpartition("/")[2]))


class Files(Library):
    """The wheels as if they were installed, over the base."""

    def __init__(self, wheels: Iterable[Wheel], system: Iterable[str], machine: str) -> None:
        self.members: dict[str, Member] = {}
        self.named: dict[str, list[Member]] = {}
        self.owners: dict[str, list[Wheel]] = {}
        for wheel in wheels:
            for file in wheel.natives:
                self.owners.setdefault(file, []).append(wheel)
                member = Member(file, wheel, machine)
                self.members[member.path] = member
                self.named.setdefault(member.name, []).append(member)
        paths = [f"{SYSTEM}/{name}" for name in (*system, "python")]
        self._system = {path: System(path, machine) for path in paths}

    def lay(self, members: Iterable[Member]) -> None:
        """Install these over what is there."""
        self.members.update((member.path, member) for member in members)

    def get(self, path: str | os.PathLike[str]) -> Object:
        """A file of a wheel, or a library of the base. Raises FileNotFoundError."""
        name = os.path.normpath(os.fspath(path))
        found = self.members.get(name) or self._system.get(name)
        if found is None:
            raise FileNotFoundError(name)
        return found


class Imported:
    """What a process has loaded once it imported what it imports first; found out as far as it is asked for."""

    def __init__(self, files: Files, providers: Sequence[ProviderFact]) -> None:
        self._files, self._providers = files, providers
        self._loader = Loader(files, program=PROGRAM, cache=Path(os.devnull))
        self._found = self._loader.loaded
        self._near, self._far = self._reach(self._own), self._reach(lambda _: True)

    def get(self, name: str, *, deep: bool) -> Object | None:
        """The loaded library of this name; without ``deep`` no more is read for it than a provider's own libraries."""
        if not any(self._own(item) or self._pinned(item) for item in self._files.named.get(name, ())):
            return None
        for steps in (self._near, self._far) if deep else (self._near,):
            while name not in self._found:
                item = next(steps, None)
                if item is None:
                    break
                self._found.setdefault(item.name, item)
        return self._found.get(name)

    @property
    def _roots(self) -> list[Member]:
        paths = [f"{SITE}/{root}" for fact in self._providers for root in fact.roots]
        return [self._files.members[path] for path in paths if path in self._files.members]

    def _reach(self, into: Callable[[Object], bool]) -> Iterator[Object]:
        yield from self._roots
        for fact in self._providers if self._roots else ():
            for pattern in fact.preloads:
                yield from (item[0] for name, item in self._files.named.items() if fnmatchcase(name, pattern))
        for root in self._roots:
            yield from self._loader.walk(root.path, [], into)

    def scope_of(self, member: Member) -> Iterator[Object]:
        """Where names of a provider's file that is loaded itself were looked up: in the scope of whatever opened it."""
        if not self._own(member):
            return
        loaded = [item for root in self._roots for item in self._loader.walk(root.path, [], self._own)]
        if any(item.path == member.path for item in loaded):
            yield from loaded

    def _own(self, item: Object) -> bool:
        return isinstance(item, Member) and any(item.wheel.name == fact.distribution for fact in self._providers)

    def _pinned(self, item: Member) -> bool:
        return any(fnmatchcase(item.wheel.name, other) for fact in self._providers for other in fact.elsewhere)

    def opened_global(self) -> list[Object]:
        """What is open RTLD_GLOBAL, and what that needs."""
        paths = [f"{SITE}/{root}" for fact in self._providers for root in fact.opened_global]
        return [
            item
            for path in paths
            if path in self._files.members
            for item in self._loader.walk(path, [], lambda item, path=path: item.path == path)  # type: ignore[misc]
        ]


class Process(Loader):
    """The state in which one file is opened: after the imports, after its companions, beside what its wheel bundles."""

    def __init__(self, files: Files, imported: Imported, first: Sequence[Member], beside: str) -> None:
        super().__init__(files, program=PROGRAM, cache=Path(os.devnull))
        self._files, self._imported, self._beside = files, imported, beside
        self.loaded = {member.name: member for member in first}

    def already(self, needed: str) -> Object | None:
        """What is loaded under this name."""
        beside = self._files.members.get(f"{self._beside}/{needed}") if self._beside else None
        return self.loaded.get(needed) or beside or self._imported.get(needed, deep=False)

    def search(self, needed: str, chain: tuple[Object, ...]) -> str | None:
        """Where it lies; else what an import loaded by way of another wheel's libraries, which costs more to find out."""
        if found := super().search(needed, chain):
            return found
        loaded = self._imported.get(needed, deep=True)
        return loaded.path if loaded is not None else None
