"""Wheels onto this machine: from the cache, a folder of wheels, a mirror or index, or a direct file's own URL.

Wherever a file comes from, its sha256 decides. A direct file is fetched here and not in the build, so that a build that
lacks one never starts, and nothing of the site (authority, credentials, mirror) is needed inside.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote, urlsplit

import requests
from pypi_simple import DistributionPackage, NoSuchProjectError, PyPISimple, UnsupportedContentTypeError
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from builder.cache import file_sha256, find_wheel, incoming, not_writable, wheel_path
from builder.contents import difference
from builder.display import note
from builder.download import Transfer, TransferError, WrongSizeError, client, explain, without_credentials
from builder.errors import BuilderError, IntegrityError, UnreachableError, UsageError
from builder.files import pretty_size
from builder.index import TIMEOUT, session
from builder.lock import Artefact, Lock
from builder.matrix import Matrix
from builder.settings import Settings, redact

WORKERS = 4
"""Files fetched at a time: a site's line is full with fewer, and a dead host is waited for once."""

THE_URL = "its URL"
PINNED = "has the content that the lock pins"


@dataclass(frozen=True)
class Try:
    """A place where a file was looked for in vain. ``other`` says that it has another file under this name."""

    place: str
    why: str
    other: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class Missing(Exception):
    """A file that could not be had, with every place that was tried."""

    def __init__(self, artefact: Artefact, tries: list[Try]) -> None:
        super().__init__(artefact.file)
        self.artefact, self.tries = artefact, tries

    @property
    def other(self) -> bool:
        """Whether some place has another file under its name."""
        return any(tried.other for tried in self.tries)

    def error(self) -> BuilderError:
        """The error for this file alone: `IntegrityError` if some place has another file, else `UnreachableError`."""
        artefact = self.artefact
        where = redact(artefact.url or "")
        because = "\n".join([*map(str, self.tries), f"the lock pins sha256 {artefact.sha256}"])
        if self.other:
            what, hint = f"`{artefact.file}` is not the file that the lock pins", _repin("MATRIX", artefact)
            return IntegrityError(what, where=where, because=because, hint=hint)
        hint = "see that the index answers; a mirror is named with `--index NAME=URL`" if artefact.index else _WAYS
        return UnreachableError(f"`{artefact.file}` could not be had", where=where, because=because, hint=hint)


def fetch_artefact(artefact: Artefact, settings: Settings, *, indexes: Mapping[str, str] | None = None) -> Path:
    """The wheel of a lock entry on this machine, its sha256 checked. `indexes` are the matrix's own: name → URL.

    Raises `UnreachableError` if it cannot be had, `IntegrityError` if another file has its name, `BuildError` for a full
    disk, `UsageError` for a cache that cannot be used.
    """
    with Bars() as bars:
        try:
            return Fetcher(settings, indexes or {}, bars).obtain(artefact)
        except Missing as missing:
            raise missing.error() from None


def fetch_all(lock: Lock, settings: Settings) -> dict[str, Path]:
    """Every direct file of a lock on this machine: file name → path. Several at a time; what came stays.

    Raises one error for all that cannot be had: `IntegrityError` if another file has the name of one of them, else
    `UnreachableError`. And `BuildError` for a full disk, `UsageError` for a cache that cannot be used.
    """
    direct = [artefact for artefact in lock.artefacts if artefact.index is None]
    missing: list[Missing] = []
    found: dict[str, Path] = {}
    with Bars() as bars, ThreadPoolExecutor(WORKERS) as pool:
        fetcher = Fetcher(settings, {}, bars)
        futures = [pool.submit(fetcher.obtain, artefact) for artefact in direct]
        try:
            for artefact, future in zip(direct, futures, strict=True):
                try:
                    found[artefact.file] = future.result()
                except Missing as error:
                    missing.append(error)
        except BaseException:
            fetcher.stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    if missing:
        raise _several(missing, len(direct), lock.matrix)
    return found


class Fetcher:
    """What the fetches of one command share. Its methods may be called from several threads; `stop` calls them off."""

    def __init__(self, settings: Settings, indexes: Mapping[str, str], bars: Bars) -> None:
        self._settings, self._indexes, self._bars = settings, {**indexes, **settings.indexes}, bars
        self._client = client(settings)
        self.stop = threading.Event()

    def obtain(self, artefact: Artefact) -> Path:
        """The wheel with the entry's sha256. Raises `Missing`, or `BuilderError` if the cache cannot be used."""
        if found := find_wheel(self._settings, artefact.sha256, artefact.file):
            return found
        tries: list[Try] = []
        found = self._obtain(artefact, tries)
        if found is None:
            raise Missing(artefact, tries)
        for tried in tries:
            if tried.other:
                note(f"{artefact.file}: not taken from {tried}")
        return found

    def _obtain(self, artefact: Artefact, tries: list[Try]) -> Path | None:
        for place, path, sha256 in self.in_folders(artefact, tries):
            if sha256 == artefact.sha256:
                return path
            tries.append(Try(place, other_words(artefact, sha256), other=True))
        for place, url in self.places(artefact, tries, artefact.sha256):
            if taken := self.download(artefact, place, url, tries, artefact.sha256):
                return taken[0]
        return None

    def in_folders(self, artefact: Artefact, tries: list[Try]) -> Iterator[tuple[str, Path, str]]:
        """Files of this name in the wheel folders: place, path, sha256."""
        # `curl -O` and `wget` keep a URL's `%2B`.
        names = dict.fromkeys([artefact.file, quote(artefact.file), (artefact.url or artefact.file).rsplit("/", 1)[-1]])
        for folder in self._settings.wheels:
            place = f"folder {folder}"
            paths = [folder / name for name in names if (folder / name).is_file()]
            if not paths:
                tries.append(Try(place, "has no file of this name"))
            for path in paths:
                try:
                    yield place, path, file_sha256(path)
                except OSError as error:
                    tries.append(Try(place, f"cannot be read: {error.strerror}"))

    def places(self, artefact: Artefact, tries: list[Try], wanted: str | None) -> Iterator[tuple[str, str]]:
        """Where to download it from, best first: a name for the place, and the file's URL there.

        For a direct file the mirrors that the site has, the default index among them if it is the site's; for any other
        its index. An index that states another sha256 than `wanted` is passed over.
        """
        if artefact.index is not None:
            url = self.index_url(artefact)
            if target := self._listed(artefact, artefact.index, url, tries, wanted):
                yield _index_words(artefact.index, url), target
            return
        mirrors: dict[str, str] = dict(self._settings.indexes)
        if self._settings.index is not None:
            mirrors["default"] = self._settings.index
        for name, mirror in mirrors.items():
            if target := self._listed(artefact, name, mirror, tries, wanted):
                yield _index_words(name, mirror), target
        yield THE_URL, artefact.url or ""

    def _listed(
        self, artefact: Artefact, name: str, url: str | None, tries: list[Try], wanted: str | None
    ) -> str | None:
        """The URL of the file on an index. Raises nothing: what is wrong with the index is one of the `tries`."""
        place = _index_words(name, url)
        try:
            offered = self.offered(artefact, url)
        except NoSuchProjectError:
            if url is None or artefact.index is not None:
                tries.append(Try(place, f"has no page of `{artefact.name}`"))
                return None
            # A folder on a web server is a mirror as well.
            return f"{without_credentials(url).rstrip('/')}/{quote(artefact.file)}"
        except TransferError as error:
            tries.append(Try(place, error.why))
            return None
        for package in offered:
            stated = package.digests.get("sha256")
            if wanted is None and stated == artefact.sha256:
                tries.append(Try(place, PINNED))
            elif wanted is None or stated in (wanted, None):
                return package.url
            else:
                tries.append(Try(place, other_words(artefact, stated), other=True))
        if not offered:
            tries.append(Try(place, "has no file of this name"))
        return None

    def offered(self, artefact: Artefact, url: str | None) -> list[DistributionPackage]:
        """The files of the entry's name on an index (None: the default one). Raises `TransferError`, `NoSuchProjectError`."""
        named = {"endpoint": without_credentials(url)} if url else {}
        try:
            with PyPISimple(session=session(self._settings), **named) as site:
                page = site.get_project_page(artefact.name, timeout=TIMEOUT)
        except (UnsupportedContentTypeError, requests.exceptions.JSONDecodeError) as error:
            raise TransferError(f"what it answers is no page of `{artefact.name}`") from error
        except (requests.RequestException, ValueError) as error:
            raise TransferError(explain(error, urlsplit(without_credentials(url or "")).netloc)) from error
        return [package for package in page.packages if package.filename == artefact.file]

    def index_url(self, artefact: Artefact) -> str | None:
        """The index of an entry that is on one; None for the default index where the site has no other."""
        url = self._settings.index if artefact.index == "default" else self._indexes.get(artefact.index or "")
        if url is None and artefact.index != "default":
            raise UsageError(f"the address of the index `{artefact.index}` is not known")
        return url

    def current(self, artefact: Artefact) -> tuple[str, Path, str]:
        """What a direct file is now, whatever the lock pins: place, path, sha256. Raises `Missing`.

        A folder or mirror that has the content which is pinned already is passed over: it says nothing of a new one.
        """
        tries: list[Try] = []
        for place, path, sha256 in self.in_folders(artefact, tries):
            if sha256 != artefact.sha256:
                return place, path, sha256
            tries.append(Try(place, PINNED))
        for place, url in self.places(artefact, tries, None):
            if taken := self.download(artefact, place, url, tries, None):
                return place, *taken
        raise Missing(artefact, tries)

    def download(
        self, artefact: Artefact, place: str, url: str, tries: list[Try], wanted: str | None
    ) -> tuple[Path, str] | None:
        """The file behind a URL, now in the cache, and its sha256; None, and one of the `tries`, if it is not `wanted`.

        Without `wanted` any content is taken: it is for the caller to look at it.
        """
        with incoming(self._settings, wanted or url, artefact.file, self.stop) as part:
            if wanted and (found := find_wheel(self._settings, wanted, artefact.file)):
                return found, wanted
            try:
                while True:
                    with self._bars.bar(artefact.file, url, artefact.size) as bar:
                        transfer = Transfer(
                            self._client,
                            url,
                            part.file,
                            size=artefact.size if wanted else None,
                            stop=self.stop,
                            report=bar.report,
                        )
                        sha256 = transfer.run()
                    if wanted in (sha256, None):
                        target = wheel_path(self._settings, sha256, artefact.file)
                        return part.accept(target), sha256
                    if not transfer.resumed:
                        break
                    # Two answers were put together, and the file may have been replaced between them.
                    part.file.truncate(0)
            except TransferError as error:
                if not error.partial:
                    part.drop()
                tries.append(Try(place, error.why, other=isinstance(error, WrongSizeError)))
                return None
            except OSError as error:
                part.drop()
                raise not_writable(part.path, error) from error
            part.drop()
        tries.append(Try(place, other_words(artefact, sha256), other=True))
        return None


def _index_words(name: str, url: str | None) -> str:
    return f"index `{name}`" + (f" ({redact(url)})" if url else "")


def other_words(artefact: Artefact, sha256: str) -> str:
    """What is known of a file that has the name of the entry's, and this sha256."""
    return f"{difference(artefact.file, sha256, artefact.sha256)}; got sha256 {sha256}"


def require_used(settings: Settings, named: list[str], matrix: Matrix) -> None:
    """Raise `UsageError` for an `--index NAME=…` that this matrix has no use for: a slip of the keyboard."""
    for option in named:
        name = option.partition("=")[0]
        if name in settings.indexes and name not in matrix.indexes and not matrix.files:
            known = ", ".join(f"`{index}`" for index in ("default", *matrix.indexes))
            raise UsageError(
                f"`{matrix.name}` has no index `{name}`",
                where="--index",
                because=f"its indexes are {known}, and it has no direct files that a mirror could have",
            )


_WAYS = """\
each of these provides a file; it is checked wherever it comes from, and what is here already stays:
a folder that has it: `--wheels DIR`, BUILDER_WHEELS=DIR, or `wheels` in the configuration
a mirror (an index, or a folder on a web server): `--index NAME=URL`, BUILDER_INDEX_NAME=URL, or `indexes.NAME`
a way to its URL: https_proxy, the site's authority BUILDER_CA, credentials BUILDER_NETRC"""


def _repin(matrix: str, artefact: Artefact) -> str:
    return f"take the content that is there now, if it was replaced on purpose: `builder lock {matrix} --repin {artefact.name}`"


def _several(missing: list[Missing], count: int, matrix: str) -> BuilderError:
    blocks = []
    for each in missing:
        artefact = each.artefact
        first, *rest = map(str, each.tries)
        blocks += [
            f"{artefact.name} {artefact.version}",
            f"  file    {artefact.file}",
            f"  url     {redact(artefact.url or '')}",
            f"  sha256  {artefact.sha256}",
            f"  why     {first}",
            *(f"          {line}" for line in rest),
        ]
    what = f"{len(missing)} of {count} files that are on no index could not be had: nothing was started"
    hints = [_WAYS, *(_repin(matrix, each.artefact) for each in missing if each.other)]
    kind = IntegrityError if any(each.other for each in missing) else UnreachableError
    return kind(what, because="\n".join(blocks), hint="\n".join(hints))


class Bar:
    """The progress of one file. A context manager; says a line at its ends where stderr is no terminal."""

    def __init__(self, progress: Progress | None, file: str, url: str, size: int | None) -> None:
        self._progress, self._file, self._url, self._size = progress, file, url, size
        self._task: TaskID | None = None
        self._began = time.monotonic()
        self._have = 0

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._task = self._progress.add_task(self._file, total=self._size)
        else:
            note(f"fetching {redact(self._url).partition('?')[0]} …")
        return self

    def report(self, have: int, total: int | None) -> None:
        """Bytes that are there, and of the whole."""
        self._have = have
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=have, total=total)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.remove_task(self._task)
        if kind is None:
            note(f"fetched {self._file}: {pretty_size(self._have)} in {time.monotonic() - self._began:.0f} s")


class Bars:
    """Progress bars of the files that are being fetched, where stderr is a terminal. A context manager."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def bar(self, file: str, url: str, size: int | None) -> Bar:
        """A bar for one file."""
        return Bar(self._progress, file, url, size)
