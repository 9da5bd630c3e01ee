"""Package indexes: METADATA of wheels, fetched without the wheels, cached by the wheel's sha256.

METADATA is read from beside the wheel (PEP 658), else out of the wheel by byte ranges: some mirrors serve the former
for a part of their files only. Requests are pypi-simple's, which also carries the default index's address.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests
from pypi_simple import DistributionPackage, NoMetadataError, PyPISimple
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from builder.errors import UnreachableError
from builder.files import write_atomic
from builder.settings import Settings, redact

TIMEOUT = (10.0, 60.0)
"""Seconds to connect and between two reads."""

WORKERS = 16
"""Requests at a time; METADATA is small and its cost is latency."""


@dataclass(frozen=True)
class RemoteWheel:
    """A wheel on an index: where it is and what it must be."""

    name: str
    version: str
    file: str
    url: str
    sha256: str


def session(settings: Settings) -> requests.Session:
    """A requests session with the site's certificate authority and proxies, and retries for what passes."""
    made = requests.Session()
    if settings.ca is not None:
        made.verify = str(settings.ca)
    retry = Retry(total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=("GET",))
    adapter = HTTPAdapter(max_retries=retry, pool_maxsize=WORKERS)
    made.mount("https://", adapter)
    made.mount("http://", adapter)
    return made


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read by byte ranges: seekable, so that `zipfile` finds a member without the rest.

    Raises `OSError` from `readinto` where the server does not answer a range with one; `bytes_read` counts what came.
    """

    def __init__(self, client: requests.Session, url: str) -> None:
        self._client, self._url, self._position = client, url, 0
        self.bytes_read = 0
        # The end of a wheel holds its directory and, as the last member or nearly, METADATA (PEP 427 recommends it).
        self._tail_at, self._tail, self.size = self._fetch_tail(256 * 1024)

    def _fetch_tail(self, count: int) -> tuple[int, bytes, int]:
        body, content_range = self._get(f"bytes=-{count}")
        span, _, total = content_range.removeprefix("bytes ").partition("/")
        return int(span.partition("-")[0]), body, int(total)

    def _get(self, value: str) -> tuple[bytes, str]:
        # No compression on the way: a range of an encoded body is not a range of the file.
        headers = {"Range": value, "Accept-Encoding": "identity"}
        answer = self._client.get(self._url, headers=headers, timeout=TIMEOUT)
        answer.raise_for_status()
        if answer.status_code != 206:
            raise OSError("the server does not answer byte ranges")
        self.bytes_read += len(answer.content)
        return answer.content, answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        end = min(self._position + len(view), self.size)
        if end <= self._position:
            return 0
        if self._position >= self._tail_at:
            data = self._tail[self._position - self._tail_at : end - self._tail_at]
        else:
            data = self._get(f"bytes={self._position}-{end - 1}")[0]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


def _from_wheel(wheel: RemoteWheel, client: requests.Session) -> bytes:
    """METADATA out of the remote wheel, by byte ranges."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(client, wheel.url), 64 * 1024)) as archive:
        wanted = [n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
        if len(wanted) != 1:
            raise OSError(f"the wheel has {len(wanted)} METADATA files")
        return archive.read(wanted[0])


def fetch_metadata(wheels: Sequence[RemoteWheel], settings: Settings) -> list[str]:
    """The METADATA text of each wheel, in order, from the cache or from beside the wheel on its index.

    Raises `UnreachableError` for an index that does not answer or does not serve METADATA beside its wheels.
    """
    folder = settings.cache / "metadata"
    with PyPISimple(session=session(settings)) as client, ThreadPoolExecutor(WORKERS) as pool:
        return list(pool.map(lambda wheel: _metadata(wheel, folder, client), wheels))


def _metadata(wheel: RemoteWheel, folder: Path, client: PyPISimple) -> str:
    cached = folder / wheel.sha256
    try:
        return cached.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    package = DistributionPackage(
        filename=wheel.file,
        url=wheel.url,
        project=wheel.name,
        version=wheel.version,
        package_type="wheel",
        digests={"sha256": wheel.sha256},
        requires_python=None,
        has_sig=None,
        has_metadata=True,
    )
    try:
        try:
            # No digest is at hand for it: nothing is trusted for it either, the smoke test looks at what is installed.
            raw = client.get_package_metadata_bytes(package, verify=False, timeout=TIMEOUT)
        except NoMetadataError:
            raw = _from_wheel(wheel, client.s)
    except (requests.RequestException, OSError, zipfile.BadZipFile) as error:
        raise UnreachableError(
            f"the METADATA of `{wheel.file}` could not be read",
            because=redact(str(error)),
            hint="see that the index answers; a site's certificate authority is set with `BUILDER_CA`",
        ) from error
    text = raw.decode("utf-8", errors="replace")
    write_atomic(cached, text)
    return text
