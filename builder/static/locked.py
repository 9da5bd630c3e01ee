"""The wheels of a lock, opened where they lie: by byte ranges from their index or URL, or whole where they are here already.

What cannot be had is told, and never guessed: a lock may name a file whose server does not answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from packaging.version import Version

from builder.abi.wheels import Index, Release, Target, shallow
from builder.cache import find_wheel, wheel_path
from builder.download import client
from builder.errors import BuilderError, IntegrityError, UnreachableError
from builder.fetch import Bars, Fetcher, Missing, Try, fetch_artefact
from builder.files import sha256_hex
from builder.index import NoRangesError
from builder.lock import Artefact, Lock
from builder.members import Opened
from builder.settings import Settings

GIVEN_UP = 2
"""Wheels that an index did not give for which it is not asked for any more."""


@dataclass(frozen=True)
class Unread:
    """A wheel that could not be looked at. ``other`` says that its place has another file than the lock pins."""

    artefact: Artefact
    because: str
    other: bool

    @property
    def index(self) -> bool:
        """Whether it is an index that did not answer, and not the place of a single file."""
        return self.artefact.index is not None and not self.other


class LockedWheels(Index):
    """As `Index`, with the lock in place of the index's pages: which file a release is, is settled."""

    def __init__(self, settings: Settings, target: Target, lock: Lock, indexes: Mapping[str, str]) -> None:
        super().__init__(settings, target)
        self._locked = {artefact.file: artefact for artefact in lock.artefacts}
        self._by_name, self._indexes = lock.by_name, indexes
        self._failed: Counter[str] = Counter()
        self.unproven: set[str] = set()
        """Files that were read in parts from where nobody states their sha256."""

    def release(self, name: str, version: Version) -> Release:
        """The locked wheel of a distribution; for any other version, what the index says."""
        artefact = self._by_name.get(name)
        if artefact is None or Version(artefact.version) != version:
            return super().release(name, version)
        return self._release_of(artefact)

    def _release_of(self, artefact: Artefact) -> Release:
        """An entry of the lock as a release.

        Parts of a direct file cannot be compared with its sha256, and no index states that: what is read of one is kept
        under another name than what is known of the pinned content.
        """
        key = artefact.sha256
        if artefact.index is None and not self._is_here(artefact):
            key = sha256_hex(f"{artefact.url} {artefact.sha256}".encode())
        return Release(artefact.name, artefact.version, artefact.file, key, artefact.size)

    def _is_here(self, artefact: Artefact) -> bool:
        folders = self._settings.wheels
        return wheel_path(self._settings, artefact.sha256, artefact.file).is_file() or any(
            (folder / name).is_file() for folder in folders for name in (artefact.file, quote(artefact.file))
        )

    def open(self, release: Release) -> Opened:
        """A wheel of the lock; one that is open already is not asked for again. Raises `UnreachableError`, `IntegrityError`."""
        return self._open(release)

    def _open(self, release: Release) -> Opened:
        if (opened := self._opened.get(release.file)) is not None:
            return opened, opened.fetch
        artefact = self._locked.get(release.file)
        if artefact is None:
            return super()._open(release)
        if path := find_wheel(self._settings, artefact.sha256, artefact.file):
            return path.open("rb"), lambda _: None
        tries: list[Try] = []
        if self._failed[artefact.index or ""] >= GIVEN_UP:
            tries.append(Try(f"index `{artefact.index}`", "did not answer before"))
            raise Missing(artefact, tries).error()
        with Bars() as bars:
            fetcher = Fetcher(self._settings, self._indexes, bars)
            for place, path, sha256 in fetcher.in_folders(artefact, tries):
                if sha256 == artefact.sha256:
                    return path.open("rb"), lambda _: None
                tries.append(Try(place, "has another file of this name", other=True))
            folder = self._settings.cache / "ranges" / release.sha256[:2] / release.sha256
            # Trying again takes half a minute, and a place of a single file is asked each time.
            made = self._client if artefact.index is not None else client(self._settings)
            for place, url in fetcher.places(artefact, tries, artefact.sha256):
                try:
                    ranged = shallow(folder, artefact.file, artefact.sha256, made, partial(str, url), artefact.size)
                except NoRangesError:
                    path = fetch_artefact(artefact, self._settings, indexes=self._indexes)
                    return path.open("rb"), lambda _: None
                except IntegrityError as error:
                    tries.append(Try(place, error.because or error.what, other=True))
                except UnreachableError as error:
                    tries.append(Try(place, error.because or error.what))
                else:
                    if artefact.index is None:
                        self.unproven.add(artefact.name)
                    self._sizes[release.file] = ranged.size
                    self._opened[release.file] = ranged
                    return ranged, ranged.fetch
        if artefact.index is not None and not any(tried.other or tried.why.startswith("has no") for tried in tries):
            self._failed[artefact.index] += 1
        raise Missing(artefact, tries).error()


def unread(artefact: Artefact, error: BuilderError) -> Unread:
    """A wheel that could not be looked at, for this reason."""
    places = [line for line in error.because.split("\n") if line and not line.startswith("the lock pins")]
    # Of a direct file the last place is its own.
    return Unread(artefact, places[-1] if places else error.what, isinstance(error, IntegrityError))
