"""Would the loader accept the native files of a lock: the link verdict of `builder.abi` over all of its wheels at once.

The lock is the whole set: a library that none of its wheels has is in no wheel. Of torch and the CUDA wheels that it pins
nothing is read where they are the ones that torch was released with (`builder.abi.tables`); where the lock has others in
their place, torch's own files are judged as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from packaging.version import Version

from builder.abi import tables
from builder.abi.judge import Judge
from builder.abi.model import Extension, Wheel
from builder.abi.verb import Question
from builder.errors import BuilderError, IntegrityError, UnreachableError
from builder.lock import Artefact, Lock
from builder.static.locked import Unread, unread
from builder.tags import is_native

WORKERS = 8
"""Wheels that are read at a time: what one costs is latency, as a rule."""

PROVIDER = "torch"
"""The distribution of which tables are shipped."""


@dataclass(frozen=True)
class Links:
    """The link verdict of a lock. ``wheels`` are those of the set, ``given`` those of them that were taken from the tables."""

    wheels: tuple[Wheel, ...]
    extensions: Mapping[str, tuple[Extension, ...]]
    given: tuple[str, ...]
    unread: tuple[Unread, ...]
    replaced: tuple[str, ...] = ()
    """Distributions that torch pins, of which the lock has another release or none."""
    unopened: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Files for another CUDA that their package never opens, by distribution; they may load all the same."""

    @property
    def files(self) -> int:
        """Native files that were judged."""
        return sum(map(len, self.extensions.values()))

    @property
    def symbols(self) -> int:
        """Strong undefined symbols that were looked at."""
        return sum(item.symbols for found in self.extensions.values() for item in found)

    @property
    def lost(self) -> Mapping[str, frozenset[str]]:
        """Files that are not loaded, by distribution, whether by design or not."""
        return {
            name: frozenset(item.file for item in found if item.verdict == "broken" or item.by_design)
            | self.unopened.get(name, frozenset())
            for name, found in self.extensions.items()
        }

    @property
    def by_design(self) -> int:
        """Files that cannot load here and need not (facts/exceptions.yaml)."""
        return sum(bool(item.by_design) for found in self.extensions.values() for item in found)


Progress = Callable[[int, int], None]
"""Is told how many wheels were read, of how many."""


def from_tables(lock: Lock, question: Question) -> tuple[list[Wheel], tuple[str, ...]]:
    """The wheels of the lock that the tables have, and the distributions that torch pins and the lock replaces."""
    torch = lock.by_name.get(PROVIDER)
    if torch is None:
        return [], ()
    known: list[Wheel] = []
    replaced: list[str] = []
    for wheel, file, size in tables.wheels(torch.sha256, question.from_index):
        artefact = lock.by_name.get(wheel.name)
        if artefact is not None and artefact.file == file:
            known.append(wheel)
            question.index.count(file, size)
        elif wheel.name != PROVIDER:
            replaced += [wheel.name] * any(map(_is_library, wheel.natives))
        elif artefact is not None:
            # The table is of the wheel for another Python: its libraries export the same.
            known.append(Wheel(wheel.name, artefact.version, wheel.natives, wheel.read, wheel.promised))
    return known, tuple(replaced)


def _is_library(file: str) -> bool:
    """Whether other files can need a file: `libcudart.so.13`, and no extension of Python's."""
    name = file.rpartition("/")[2]
    return name.startswith("lib") and ".so." in name


def judge(
    lock: Lock, question: Question, progress: Progress = lambda *_: None, unreachable: Sequence[Unread] = ()
) -> Links:
    """Judge every native file of a lock, as far as its wheels can be read; ``unreachable`` are not tried."""
    known, replaced = from_tables(lock, question)
    if replaced:
        # The tables have what torch exports and not what it needs.
        known = [wheel for wheel in known if wheel.name != PROVIDER]
    given = {wheel.name for wheel in known}
    known_lost = {each.artefact.name for each in unreachable}
    wanted = [a for a in lock.artefacts if is_native(a.file) and a.name not in given and a.name not in known_lost]
    read: list[Wheel] = []
    lost = [each for each in unreachable if each.artefact.name not in given]
    with ThreadPoolExecutor(WORKERS) as pool:
        for done, (artefact, got) in enumerate(pool.map(lambda item: _read(item, question), wanted), 1):
            if isinstance(got, Wheel):
                read.append(got)
            else:
                lost.append(unread(artefact, got))
            progress(done, len(wanted))
    wheels = (*read, *known)
    found = Judge(wheels, question.known(wheels, whole=not lost))
    return Links(
        wheels,
        {wheel.name: tuple(found.judge(wheel)) for wheel in read},
        tuple(sorted(given)),
        tuple(lost),
        replaced,
        {wheel.name: files for wheel in read if (files := found.unopened(wheel))},
    )


def _read(artefact: Artefact, question: Question) -> tuple[Artefact, Wheel | BuilderError]:
    try:
        release = question.index.release(artefact.name, Version(artefact.version))
        return artefact, question.wheel(release, whole=True)
    except (UnreachableError, IntegrityError) as error:
        return artefact, error
