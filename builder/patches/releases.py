"""Releases on an index, and wheels of a lock, opened without being downloaded.

What is asked of an index for a release (which wheel, its sha256 and size) is kept: a release's files do not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_version, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pydantic import ValidationError
from pypi_simple import DistributionPackage, NoSuchProjectError

from builder.cache import find_wheel, not_writable
from builder.display import note
from builder.download import no_releases, project_page, without_credentials
from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.facts import layer_of
from builder.fetch import Bars, Fetcher, Missing, Try, fetch_artefact
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.index import NoRangesError, session
from builder.lock import Artefact
from builder.nearest import no_release
from builder.remote import PartialWheel, RangedFile, open_local
from builder.settings import Settings
from builder.tags import glibc_of_platform

T = TypeVar("T")


@dataclass(frozen=True)
class Traffic:
    """What the wheels that were opened cost: bytes that came over the network, bytes that they have, requests.

    An index's pages are not in it.
    """

    bytes_read: int
    bytes_total: int
    requests: int


class Releases:
    """Opens wheels as the site's settings say: what is here already first, then byte ranges, then the whole wheel.

    ``machine`` is what the wheels are for, as `uname -m` has it.
    """

    def __init__(self, settings: Settings, machine: str = "x86_64") -> None:
        self._settings, self._machine = settings, machine
        self._pages: dict[str, list[DistributionPackage]] = {}
        self._opened: list[tuple[int, Callable[[], tuple[int, int]]]] = []
        self._told = False

    @property
    def traffic(self) -> Traffic:
        """What has been read by now."""
        read = [count() for _, count in self._opened]
        return Traffic(sum(one for one, _ in read), sum(size for size, _ in self._opened), sum(one for _, one in read))

    def release(self, name: str, version: str) -> PartialWheel:
        """The wheel of a release for Linux on that machine: that for the newest CPython, or the pure one.

        Raises `UsageError` for a release that does not exist or has no such wheel, `UnreachableError` for an index
        that does not answer, and as `PartialWheel`.
        """
        wanted = _asked(version)
        for folder in self._settings.wheels:
            if path := _best(
                ((path.name, path) for path in sorted(folder.glob("*.whl")) if _is(path.name, name, wanted)),
                self._machine,
            ):
                return self._local(path)
        return self.artefact(self.find(name, version), {})

    def find(self, name: str, version: str) -> Artefact:
        """The wheel of the default index that `release` opens where no folder has one; it is not opened. Raises as that."""
        wanted = _asked(version)
        return self._known(name, wanted) or self._ask(name, wanted)

    def artefact(self, wanted: Artefact, indexes: Mapping[str, str]) -> PartialWheel:
        """A wheel of a lock; ``indexes`` are the matrix's own, name → URL.

        Raises as `builder.fetch.fetch_artefact` and `PartialWheel`.
        """
        if found := find_wheel(self._settings, wanted.sha256, wanted.file):
            return self._local(found)
        with Bars() as bars:
            fetcher = Fetcher(self._settings, indexes, bars)
            for _, path, sha256 in fetcher.in_folders(wanted, []):
                if sha256 == wanted.sha256:
                    return self._local(path)
            if wanted.index is not None:
                try:
                    return self._ranged(wanted, lambda: self._url(wanted, fetcher))
                except NoRangesError:
                    if not self._told:
                        note(f"{wanted.file} is fetched whole: its server does not answer byte ranges")
                        self._told = True
        path = fetch_artefact(wanted, self._settings, indexes=indexes)
        size = path.stat().st_size
        self._opened.append((size, lambda: (size, 1)))
        return open_local(path)

    def _local(self, path: Path) -> PartialWheel:
        self._opened.append((path.stat().st_size, lambda: (0, 0)))
        return open_local(path)

    def _ranged(self, wanted: Artefact, url: Callable[[], str]) -> PartialWheel:
        folder = self._settings.cache / "ranges" / wanted.sha256[:2] / wanted.sha256
        file = RangedFile(folder, wanted.file, wanted.sha256, self._client, url, wanted.size)
        self._opened.append((file.size, lambda: (file.bytes_read, file.requests)))
        return PartialWheel(Path(wanted.file), file, file.fetch)

    @cached_property
    def _client(self) -> requests.Session:
        return session(self._settings)

    def _url(self, wanted: Artefact, fetcher: Fetcher) -> str:
        for package in self._pages.get(wanted.name, []):
            if package.filename == wanted.file and package.digests.get("sha256") == wanted.sha256:
                return without_credentials(package.url)
        tries: list[Try] = []
        for _, url in fetcher.places(wanted, tries, wanted.sha256):
            return without_credentials(url)
        raise Missing(wanted, tries).error()

    # What the index says of a release, and what is kept of it.

    def _answer(self, name: str, version: Version) -> Path:
        other = "" if self._machine == "x86_64" else f"-{self._machine}"
        return self._settings.cache / "releases" / f"{name}-{canonicalize_version(version)}{other}.json"

    @cached_property
    def _index(self) -> str:
        return sha256_hex((self._settings.index or "").encode())

    def _known(self, name: str, version: Version) -> Artefact | None:
        try:
            said = json.loads(self._answer(name, version).read_bytes())
            if said["index"] == self._index:
                return _artefact(name, version, said["file"], said["sha256"], said["size"])
        except (OSError, ValueError, KeyError, TypeError, ValidationError):
            pass
        return None

    def _ask(self, name: str, version: Version) -> Artefact:
        page = self._page(name)
        here = [package for package in page if package.version and _version(package.version) == version]
        if not here:
            known = (other for package in page if package.version and (other := _version(package.version)))
            raise no_release(name, version, known)
        named = ((package.filename, package) for package in here if _is(package.filename, name, version))
        package = _best(named, self._machine)
        if package is None:
            raise UsageError(
                f"{name} {version} has no wheel for Linux {self._machine}",
                because=f"the index has {', '.join(sorted(package.filename for package in here))}",
            )
        sha256 = package.digests.get("sha256")
        if sha256 is None:
            raise IntegrityError(
                f"the index states no sha256 of `{package.filename}`",
                hint="`--index default=URL` names an index that does",
            )
        try:
            found = _artefact(name, version, package.filename, sha256, package.size)
        except ValidationError as error:
            raise UnreachableError(
                f"what the index states of `{package.filename}` makes no sense", because=error.errors()[0]["msg"]
            ) from error
        path = self._answer(name, version)
        said = {"index": self._index, "file": found.file, "sha256": found.sha256, "size": found.size}
        try:
            write_atomic(path, canonical_json(said))
        except OSError as error:
            raise not_writable(path, error) from error
        return found

    def _page(self, name: str) -> list[DistributionPackage]:
        """The files of a package on the default index."""
        try:
            self._pages[name] = project_page(name, self._settings)
        except NoSuchProjectError:
            raise no_releases(name, f"it has no page of `{name}`") from None
        return self._pages[name]


def _artefact(name: str, version: Version, file: str, sha256: str, size: int | None) -> Artefact:
    return Artefact(
        name=name,
        version=str(version),
        metadata_version=str(version),
        file=file,
        sha256=sha256,
        size=size,
        index="default",
        url=None,
        requires=(),
        layer=layer_of(name),
    )


def _asked(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        raise UsageError(f"`{version[:100]}` is not a version", hint="as in `0.5.9` or `0.5.10.post1`") from None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _is(file: str, name: str, version: Version) -> bool:
    try:
        said_name, said_version = parse_wheel_filename(file)[:2]
    except InvalidWheelFilename:
        return False
    return said_name == name and said_version == version


def _best(files: Iterable[tuple[str, T]], machine: str) -> T | None:
    """Of wheels by their file names the one for the newest CPython on Linux there; a pure one counts as the oldest."""
    ranked = [(rank, file, item) for file, item in files if (rank := _rank(file, machine))]
    return max(ranked, key=lambda found: found[:2])[2] if ranked else None


def _rank(file: str, machine: str) -> tuple[int, tuple[int, str]] | None:
    *_, build, tags = parse_wheel_filename(file)
    newest = -1
    for tag in tags:
        python = tag.interpreter.removeprefix("cp3").removeprefix("py3")
        # A free-threaded CPython (`cp313t`) is another one.
        linux = glibc_of_platform(tag.platform, machine) is not None
        if linux and not tag.abi.endswith("t") and tag.interpreter[:3] in ("cp3", "py3"):
            newest = max(newest, int(python) if python.isdigit() else 0)
    return None if newest < 0 else (newest, build or (0, ""))
