"""Wheels of which no more is read than what is asked for: by byte ranges from an index, or out of a file that is here.

Every member is compared with RECORD's sha256. RECORD itself, read by ranges, is compared with nothing: the index states
the sha256 of the whole wheel alone. It is as trustworthy as the connection (TLS) and the index that it came from.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import itertools
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from builder.cache import not_writable
from builder.download import explain, without_credentials
from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.files import sha256_hex, write_atomic
from builder.index import NoRangesError, Seekable, get_range
from builder.wheel import Entry
from builder.zipdir import sound

WORKERS = 8
"""Ranges fetched at a time."""

GAP = 128 * 1024
"""Bytes between two ranges that are rather read in vain than asked around: about what a line brings in a request's time."""

TAIL = (256 * 1024, 1024 * 1024)
"""Bytes at a wheel's end that the first request asks for, least and most: within, a sixteenth of the wheel.

The zip directory and RECORD are there: 2.4 to 6.1 % of the wheels of sglang and flashinfer (docs/measurements.md).
"""

WHOLE = 0.75
"""The part of a wheel from which on the rest comes along, so that its sha256 can be compared as well."""

ATTEMPTS = 3
"""Attempts at a range whose answer breaks off; what passes by itself (429, 5xx) the session waits for."""

# What `zipfile` raises on a file that is no wheel: damaged, cut off, encrypted, of an unknown compression.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, KeyError)

# Where a part starts, the size of the whole file, the part's sha256.
_PART = re.compile(r"(\d+)-(\d+)-([0-9a-f]{64})")

Span = tuple[int, int]
"""The first byte, and the one behind the last."""


class RangedFile(Seekable):
    """A remote file, as far as it is here: seekable, and what is read and not here yet is fetched by a byte range.

    What came stays in ``folder``, which belongs to the content with this ``sha256``. ``expected`` is its size, where that
    is stated; ``url`` is asked for only when something has to be fetched. ``tail`` are the bytes at its end that the first
    request asks for, if not what `TAIL` says. ``bytes_read`` and ``requests`` count what was fetched.

    Raises `NoRangesError` where the server has no ranges, `UnreachableError` where it does not answer or answers with
    something else, `IntegrityError` for a file of another size, or of another sha256 where all of it came.
    """

    def __init__(
        self,
        folder: Path,
        file: str,
        sha256: str,
        client: requests.Session,
        url: Callable[[], str],
        expected: int | None,
        tail: int | None = None,
    ) -> None:
        self._folder, self._file, self._sha256, self._client, self._ask = folder, file, sha256, client, url
        self._position = 0
        self.bytes_read = self.requests = 0
        try:
            self.size, self._pieces = _load(folder)
        except OSError as error:
            raise not_writable(folder, error) from error
        if not self._pieces:
            least, most = TAIL
            count = tail or (least if expected is None else min(max(least, expected // 16), most))
            start, data, self.size = self._get(f"bytes=-{count}", count)
            if expected not in (None, self.size):
                raise IntegrityError(
                    f"`{file}` is not the file that was expected",
                    because=f"it has {self.size:,} bytes, and {expected:,} are stated",
                )
            self._keep([(start, data)])

    def fetch(self, spans: Iterable[Span]) -> None:
        """Have these parts here: several requests at a time, near parts in one."""
        lacking = [part for span in spans for part in self._lacking(*span)]
        here = sum(len(data) for _, data in self._pieces)
        if lacking and here + sum(end - start for start, end in set(lacking)) > WHOLE * self.size:
            lacking = self._lacking(0, self.size)
        merged: list[list[int]] = []
        for start, end in sorted(lacking):
            if merged and start - merged[-1][1] <= GAP:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        if merged:
            # Once, before several threads want it.
            self._url  # noqa: B018
            with ThreadPoolExecutor(WORKERS) as pool:
                self._keep(pool.map(lambda span: self._part(*span), merged))
            self._compare()

    def _compare(self) -> None:
        """The whole file with its sha256, where all of it is here."""
        if len(self._pieces[0][1]) == self.size and (found := sha256_hex(self._pieces[0][1])) != self._sha256:
            shutil.rmtree(self._folder)
            raise IntegrityError(
                f"`{self._file}` is not the file that was expected",
                because=f"wanted sha256 {self._sha256}\ngot    sha256 {found}",
            )

    @cached_property
    def _url(self) -> str:
        return self._ask()

    def _part(self, start: int, end: int) -> tuple[int, bytes]:
        first, data, size = self._get(f"bytes={start}-{end - 1}", end - start)
        if (first, len(data), size) != (start, end - start, self.size):
            raise self._unreachable(f"the server sent another part than bytes {start} to {end - 1} of {self.size}")
        return start, data

    def _get(self, value: str, most: int) -> tuple[int, bytes, int]:
        failed: Exception | None = None
        for _ in range(ATTEMPTS):
            try:
                return get_range(self._client, self._url, value, most)
            except NoRangesError as error:
                if not self._pieces:
                    raise
                raise self._unreachable(str(error)) from error
            except requests.RequestException as error:
                failed = error
                if not isinstance(error, requests.exceptions.ChunkedEncodingError):
                    break
            except OSError as error:
                raise self._unreachable(str(error)) from error
        assert failed is not None
        host = urlsplit(without_credentials(self._url)).netloc
        raise self._unreachable(explain(failed, host)) from failed

    def _unreachable(self, because: str) -> UnreachableError:
        return UnreachableError(
            f"`{self._file}` could not be read by byte ranges",
            because=because,
            hint="see that the index answers; a site's certificate authority is set with `BUILDER_CA`",
        )

    def _keep(self, parts: Iterable[tuple[int, bytes]]) -> None:
        came = list(parts)
        self.requests += len(came)
        self.bytes_read += sum(len(data) for _, data in came)
        for start, data in came:
            path = self._folder / f"{start}-{self.size}-{sha256_hex(data)}"
            try:
                # Its name has its hash.
                write_atomic(path, data, durable=False)
            except OSError as error:
                raise not_writable(path, error) from error
        self._pieces = _joined([*self._pieces, *came])

    def _lacking(self, start: int, end: int) -> list[Span]:
        """What of a span is not here."""
        found, end = [], min(end, self.size)
        for first, data in self._pieces:
            if start < min(first, end):
                found.append((start, min(first, end)))
            if first < end:
                start = max(start, first + len(data))
        return [*found, (start, end)] if start < end else found

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        start, end = self._position, min(self._position + len(view), self.size)
        if end <= start:
            return 0
        self.fetch([(start, end)])
        first, data = next(piece for piece in reversed(self._pieces) if piece[0] <= start)
        view[: end - start] = data[start - first : end - first]
        self._position = end
        return end - start


def _load(folder: Path) -> tuple[int, list[tuple[int, bytes]]]:
    """The size of the file and the parts of it that an earlier run left; (0, []) where there are none.

    A part that was damaged since is not taken, and will be fetched again.
    """
    size, pieces = 0, []
    # Another builder may remove what it found damaged.
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            # One that is being written has a name of another kind.
            if found := _PART.fullmatch(path.name):
                data = path.read_bytes()
                if sha256_hex(data) == found[3]:
                    pieces.append((int(found[1]), data))
                    size = int(found[2])
    return size, _joined(pieces)


def _joined(pieces: Iterable[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    """Parts in order, those that touch or overlap as one."""
    groups: list[tuple[int, int, list[tuple[int, bytes]]]] = []
    for start, data in sorted(pieces, key=lambda piece: (piece[0], -len(piece[1]))):
        if groups and start <= groups[-1][1]:
            first, end, parts = groups[-1]
            if start + len(data) > end:
                groups[-1] = (first, start + len(data), [*parts, (start, data[end - start :])])
        else:
            groups.append((start, start + len(data), [(start, data)]))
    return [(first, b"".join(data for _, data in parts)) for first, _, parts in groups]


class PartialWheel:
    """A wheel whose members are read, and compared with RECORD, as they are asked for: a `builder.patches.source.Source`.

    ``fetch`` is told of the parts of the file that will be read next. Raises `UsageError` for a name that is no wheel's
    and `IntegrityError` for a damaged wheel, at once or from `read` and `read_all`.
    """

    def __init__(self, path: Path, file: IO[bytes] | RangedFile, fetch: Callable[[list[Span]], None]) -> None:
        self.path = path
        try:
            self.name, version = parse_wheel_filename(path.name)[:2]
        except InvalidWheelFilename:
            raise UsageError(f"`{path.name}` is not a wheel's file name", where=str(path)) from None
        self.version = str(version)
        self._fetch = fetch
        self._contents: dict[str, bytes] = {}
        try:
            self._archive = sound(zipfile.ZipFile(file))
            self._infos = {info.filename: info for info in self._archive.infolist() if not info.filename.endswith("/")}
            if any(info.header_offset >= self._archive.start_dir for info in self._infos.values()):
                raise ValueError("its directory names a member behind itself")
            starts = sorted([*(info.header_offset for info in self._infos.values()), self._archive.start_dir])
            self._ends = dict(itertools.pairwise(starts))
            self.entries: Mapping[str, Entry] = self._record()
        except _DAMAGED as error:
            raise self._damaged(str(error) or type(error).__name__) from error

    def _record(self) -> dict[str, Entry]:
        if len({info.filename for info in self._archive.infolist()}) != len(self._archive.infolist()):
            raise ValueError("it has a member twice")
        found = [name for name in self._infos if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
        if len(found) != 1 or canonicalize_name(found[0].rsplit("-", 2)[0]) != self.name:
            raise ValueError(f"it has no single RECORD of {self.name}")
        self.info = found[0].removesuffix("/RECORD")
        self._fetch([self._span(found[0])])
        entries: dict[str, Entry] = {}
        for row in csv.reader(io.StringIO(self._archive.read(found[0]).decode("utf-8"), newline="")):
            if len(row) != 3 or not row[1]:
                continue
            member, said, size = row
            info = self._infos.get(member)
            if info is None or member in entries:
                raise ValueError(f"RECORD names `{member}`, which the wheel does not have once")
            if not said.startswith("sha256=") or size not in ("", str(info.file_size)):
                raise ValueError(f"RECORD has no sha256 and size of `{member}` that could be right")
            entries[member] = Entry(said.rstrip("="), info.file_size, bool(info.external_attr >> 16 & 0o111))
        return entries

    def read(self, member: str) -> bytes:
        """The content of a member. Raises `KeyError` for one that RECORD does not have."""
        if member not in self.entries:
            raise KeyError(member)
        return self.read_all([member])[member]

    def read_all(self, members: Sequence[str]) -> dict[str, bytes]:
        """The contents of several members, in that order; what is not here yet is fetched together."""
        wanted = [member for member in members if member in self.entries]
        lacking = [member for member in wanted if member not in self._contents]
        self._fetch([self._span(member) for member in lacking])
        for member in lacking:
            self._contents[member] = self._checked(member)
        return {member: self._contents[member] for member in wanted}

    def _span(self, member: str) -> Span:
        start = self._infos[member].header_offset
        return start, self._ends[start]

    def _checked(self, member: str) -> bytes:
        try:
            data = self._archive.read(member)
        except _DAMAGED as error:
            raise self._damaged(f"`{member}`: {error or type(error).__name__}") from error
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if f"sha256={found}" != self.entries[member].digest:
            raise self._damaged(f"`{member}` is not the file that RECORD has the hash of")
        return data

    def _damaged(self, because: str) -> IntegrityError:
        return IntegrityError(f"`{self.path.name}` is a damaged wheel", because=because)


def open_local(path: Path) -> PartialWheel:
    """A wheel that is on this machine. Raises as `PartialWheel`, and `UsageError` for a file that cannot be read."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise UsageError(f"`{path.name}` cannot be read", where=str(path), because=str(error)) from error
    return PartialWheel(path, file, lambda _: None)
