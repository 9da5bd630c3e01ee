"""What the checks of native code share: the files, the stub driver, and the state of a process after `import torch`."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from builder.elf import Elf
from builder.elf_image import ElfError
from builder.smoke.child import Workspace
from builder.smoke.loader import Library, Loader, Object
from builder.smoke.spec import Spec, normalise
from builder.smoke.stub import write_stub
from builder.smoke.tree import Distribution, Tree

# Seconds. Importing torch takes 2 to 4 on an idle machine; builds share theirs.
_IMPORT_TIMEOUT = 300.0


# Where auditwheel and delocate put what a wheel brings along.
_BUNDLE = re.compile(r"[^/]+\.libs/")


@dataclass(frozen=True)
class Observed:
    """A process after `import torch`: files mapped, files opened RTLD_GLOBAL; ``error`` if the import failed."""

    loaded: tuple[str, ...]
    opened_global: tuple[str, ...]
    error: str
    version: str


@dataclass(frozen=True)
class NativeFile:
    """One ELF file of a wheel; ``elf`` is None where it cannot be read, and ``trouble`` says why."""

    path: str
    owner: Distribution
    elf: Elf | None
    trouble: str = ""


class Native:
    """Read lazily, once, and shared by the checks of one part."""

    def __init__(self, spec: Spec, tree: Tree, workspace: Workspace, scope: frozenset[str]) -> None:
        self.spec, self.tree, self.workspace, self.scope = spec, tree, workspace, scope
        self.library = Library()
        self._with_companions: dict[tuple[tuple[str, bool], ...], Loader] = {}

    def _read(self, paths: list[tuple[str, Distribution]]) -> list[NativeFile]:
        files = []
        for path, owner in paths:
            try:
                files.append(NativeFile(path, owner, self.library.get(self.tree.path(path)).elf))
            except FileNotFoundError:
                files.append(NativeFile(path, owner, None, "is missing"))
            except OSError as error:
                files.append(NativeFile(path, owner, None, f"cannot be read: {error.strerror}"))
            except ElfError as error:
                files.append(NativeFile(path, owner, None, f"is not a sound ELF file: {error}"))
        return files

    @cached_property
    def shared_objects(self) -> list[NativeFile]:
        """Every `*.so*` that the RECORDs in scope name."""
        return self._read(self.tree.shared_objects(self.scope))

    @cached_property
    def programs(self) -> list[NativeFile]:
        """Native programs that the wheels in scope bring: nvcc, ptxas, ninja, …"""
        return self._read(self.tree.programs(self.scope))

    @cached_property
    def drivers(self) -> frozenset[str]:
        """Sonames that come with the host's driver."""
        return frozenset(self.spec.fact("driver_libraries"))

    @cached_property
    def stubs(self) -> dict[str, int]:
        """Write the stub driver libraries; how many functions each has.

        A stub has the names that files in the whole environment leave undefined while they need that library, and those
        that the wheels' own driver header declares: modules that Triton and others build use more than the wheels do.
        """
        made: dict[str, int] = {}
        everyone = self._read(self.tree.shared_objects(d.name for d in self.tree.distributions))
        for soname, fact in sorted(self.spec.fact("driver_libraries").items()):
            pattern = re.compile(str(fact["symbols"]))
            users = [file.elf for file in everyone if file.elf and soname in file.elf.needed]
            names = {s.name for elf in users for s in elf.symbols if not s.defined and pattern.search(s.name)}
            if users:
                headers = [p for p in self.tree.owners if any(fnmatchcase(p, g) for g in fact.get("headers", ()))]
                for header in headers:
                    try:
                        text = self.tree.path(header).read_text(encoding="utf-8", errors="replace")
                    except OSError:
                        continue
                    names.update(word for word in re.findall(r"\b[A-Za-z]\w+", text) if pattern.search(word))
                write_stub(self.workspace.stubs / soname, soname, names, os.uname().machine)
                # NVIDIA's container toolkit puts the unversioned name beside it, and Triton up to 3.5 links with `-lcuda`.
                plain = self.workspace.stubs / f"{soname.partition('.so')[0]}.so"
                if not plain.exists():
                    plain.symlink_to(soname)
                made[soname] = len(names)
        return made

    @property
    def torch(self) -> Distribution | None:
        """torch as installed and locked."""
        return self.tree.by_name.get("torch") if self.spec.locked("torch") else None

    @cached_property
    def observed(self) -> Observed:
        """Run `import torch` (or a bare python, where the stack has none) with the stub, and look at the process."""
        assert self.stubs is not None  # the stubs have to be there before
        command = self.workspace.python_command(
            "observe_child.py", str(self.tree.site_packages), "torch" if self.torch else ""
        )
        outcome = self.workspace.run(command, timeout=_IMPORT_TIMEOUT)
        line = outcome.out.strip().splitlines()[-1] if outcome.out.strip() else ""
        try:
            answer = json.loads(line)
        except ValueError:
            return Observed((), (), f"`import torch` {outcome.ended}\n{outcome.tail()}", "")
        # The scrubbed text has our folder as TMP: those are the stubs, which the model finds by itself.
        loaded = [path for path in answer["loaded"] if not path.startswith("TMP")]
        opened = [path for path in answer["opened_global"] if not path.startswith("TMP")]
        return Observed(tuple(loaded), tuple(opened), answer["error"], answer["version"])

    def _loader(self, observed: Observed | None) -> Loader:
        folders = self.workspace.environment()["LD_LIBRARY_PATH"].split(":")
        return Loader(
            self.library,
            program=self.workspace.python,
            loaded=observed.loaded if observed else (),
            opened_global=observed.opened_global if observed else (),
            library_path=folders,
            provided=self.drivers,
        )

    @cached_property
    def loader(self) -> Loader:
        """The model of a process after `import torch`.

        Where that fails, of one in which torch's own libraries were loaded all the same: what is found about other files
        is then about those files, and not torch's fault told once more.
        """
        loader = self._loader(self.observed)
        if not (self.torch and self.observed.error):
            return loader
        own = [path for path, _ in self.tree.shared_objects(frozenset({self.torch.name})) if "/lib/" in path]
        return loader.after([(str(self.tree.path(path)), False) for path in own])

    def companions(self, file: NativeFile) -> tuple[tuple[str, bool], ...]:
        """What its own package opens before this file, with whether it does so RTLD_GLOBAL.

        Such a file cannot be opened by itself and is not meant to be (facts: `loaded_first`). Nor are the libraries that
        a repaired wheel bundles in `NAME.libs`, where they have no path to each other: they come with the file that has
        one (an inherited DT_RPATH, as of pillow and decord2).
        """
        found: list[tuple[str, bool]] = []
        for fact in self.spec.facts.get("loaded_first", ()):
            if file.owner.name == normalise(fact["distribution"]) and any(
                fnmatchcase(file.path, glob) for glob in fact["files"]
            ):
                for glob in fact["libraries"]:
                    paths = sorted(path for path in self.tree.owners if fnmatchcase(path, glob))
                    found += [(str(self.tree.path(path)), bool(fact.get("global"))) for path in paths]
        if not found and (opener := self._openers.get(file.path)):
            found.append((opener, False))
        return tuple(found)

    @cached_property
    def _openers(self) -> dict[str, str]:
        """For each bundled library that does not find its own: the first file of its distribution that brings it."""
        bundled: dict[str, str] = {}
        wanted: dict[str, list[NativeFile]] = {}
        for file in self.shared_objects:
            if _BUNDLE.match(file.path) and file.elf and self.loader.closure(self.tree.path(file.path)).missing:
                wanted.setdefault(file.owner.name, []).append(file)
        for file in self.shared_objects:
            if file.owner.name not in wanted or _BUNDLE.match(file.path) or not file.elf:
                continue
            path = str(self.tree.path(file.path))
            brought = {os.path.realpath(item.path) for item in self.loader.closure(path).objects}
            for library in wanted[file.owner.name]:
                if os.path.realpath(self.tree.path(library.path)) in brought:
                    bundled.setdefault(library.path, path)
        return bundled

    def loader_for(self, file: NativeFile) -> Loader:
        """The state in which this shared object is opened: after `import torch`, and after its companions."""
        companions = self.companions(file)
        if companions and companions not in self._with_companions:
            self._with_companions[companions] = self.loader.after(companions)
        return self._with_companions[companions] if companions else self.loader

    @cached_property
    def bare_loader(self) -> Loader:
        """The model of a process in which nothing is loaded yet: for programs."""
        assert self.stubs is not None
        return self._loader(None)

    def describe(self, item: Object | str) -> str:
        """`nvidia/cu13/lib/libcudart.so.13 of nvidia-cuda-runtime 13.0.96`, or a path of the system."""
        path = item if isinstance(item, str) else item.path
        owner = self.tree.owner(path)
        relative = self.tree.relative(path)
        return f"`{relative}` of {owner}" if owner else f"`{path}`"
