"""Package indexes: METADATA of wheels, fetched without the wheels, cached by the wheel's sha256.

METADATA is read from beside the wheel (PEP 658), else out of the wheel by byte ranges: some mirrors serve the former
for a part of their files only. Requests are pypi-simple's, which also carries the default index's address.
"""

from __future__ import annotations

import contextlib
import io
import netrc
import ssl
import threading
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import requests
from packaging.utils import canonicalize_name
from pypi_simple import (
    DistributionPackage,
    NoMetadataError,
    NoSuchProjectError,
    PyPISimple,
    UnsupportedContentTypeError,
)
from requests.adapters import HTTPAdapter
from requests.auth import AuthBase, HTTPBasicAuth
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.util import Retry
from urllib3.util.ssl_ import create_urllib3_context

from builder.errors import UnreachableError, UsageError
from builder.files import write_atomic
from builder.settings import Settings, redact

TIMEOUT = (10.0, 60.0)
"""Seconds to connect and between two reads."""

WORKERS = 16
"""Requests at a time; METADATA is small and its cost is latency."""

MAX_METADATA = 16_000_000
"""Bytes of a METADATA file; larger is no METADATA (the largest seen has 0.3 MB, most of it a README)."""


@dataclass(frozen=True)
class RemoteWheel:
    """A wheel on an index: where it is and what it must be."""

    name: str
    version: str
    file: str
    url: str
    sha256: str


class _Session(requests.Session):
    """A session whose own certificate authority wins over `REQUESTS_CA_BUNDLE`, as the settings' order says."""

    def merge_environment_settings(self, *arguments: Any, **named: Any) -> Any:
        """requests' own, less the variable that would win over `verify`."""
        merged = dict(super().merge_environment_settings(*arguments, **named))
        if isinstance(self.verify, str):
            merged["verify"] = self.verify
        return merged


class _Credentials(AuthBase):
    """Credentials by host: those in the settings' URLs, else the netrc's."""

    def __init__(self, settings: Settings) -> None:
        self._known: dict[str, tuple[str, str]] = {}
        if settings.netrc is not None:
            try:
                hosts = netrc.netrc(settings.netrc).hosts
            except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
                # The parser's message quotes the token that it did not expect: that may be a password.
                line = f", line {error.lineno}" if isinstance(error, netrc.NetrcParseError) else ""
                raise UsageError("the netrc cannot be read", where=f"{settings.netrc}{line}") from None
            self._known = {host: (login, word or "") for host, (login, _, word) in hosts.items()}
        for url in filter(None, (settings.index, *settings.indexes.values())):
            parts = urlsplit(url)
            if parts.username is not None:
                self._known[_host(url)] = (unquote(parts.username), unquote(parts.password or ""))

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Add what is known for the request's host."""
        url = request.url or ""
        found = self._known.get(_host(url)) or self._known.get(urlsplit(url).hostname or "")
        return HTTPBasicAuth(*found)(request) if found else request


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2].lower()


@cache
def _trusting(authorities: str, _changed: int) -> ssl.SSLContext:
    made = create_urllib3_context()
    made.load_verify_locations(authorities)
    return made


class Adapter(HTTPAdapter):
    """An adapter whose connections share what was read of the certificate authorities.

    requests reads their file again for each connection: 36 ms, a third of a cold `builder abi`.
    """

    def build_connection_pool_key_attributes(
        self, request: requests.PreparedRequest, verify: Any, cert: Any = None
    ) -> Any:
        """requests' own, with the authorities in a context instead of in a file."""
        host, pool = cast(Any, super().build_connection_pool_key_attributes(request, verify, cert))
        authorities = DEFAULT_CA_BUNDLE_PATH if verify is True else verify
        if host["scheme"] == "https" and authorities and cert is None and Path(authorities).is_file():
            pool.pop("ca_certs", None)
            pool["ssl_context"] = _trusting(str(authorities), Path(authorities).stat().st_mtime_ns)
        return host, pool

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """requests' own, which checks that the file is there; the context has what is in it."""
        super().cert_verify(conn, url, verify, cert)  # type: ignore[no-untyped-call]
        if "ssl_context" in conn.conn_kw:
            conn.ca_certs = None


def session(settings: Settings) -> requests.Session:
    """A requests session with the site's certificate authority, credentials and proxies, and retries for what passes.

    Raises `UsageError` for a netrc that cannot be read.
    """
    made = _Session()
    made.auth = _Credentials(settings)
    if settings.ca is not None:
        made.verify = str(settings.ca)
    retry = Retry(total=4, backoff_factor=0.5, status_forcelist=(429, 500, 502, 503, 504), allowed_methods=("GET",))
    adapter = Adapter(max_retries=retry, pool_maxsize=WORKERS)
    made.mount("https://", adapter)
    made.mount("http://", adapter)
    return made


class Seekable(io.RawIOBase):
    """A file of a known size that is read from any place: what `zipfile` asks for besides `readinto`."""

    size = 0
    _position = 0

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


class RemoteFile(Seekable):
    """A file behind a URL, read by byte ranges: seekable, so that `zipfile` finds a member without the rest.

    Raises `OSError` from `readinto` where the server does not answer a range with one; `bytes_read` counts what came.
    """

    def __init__(self, client: requests.Session, url: str) -> None:
        self._client, self._url, self._position = client, url, 0
        self.bytes_read = 0
        # The end of a wheel holds its directory and, as the last member or nearly, METADATA (PEP 427 recommends it).
        self._tail_at, self._tail, self.size = self._fetch_tail(256 * 1024)

    def _fetch_tail(self, count: int) -> tuple[int, bytes, int]:
        return self._get(f"bytes=-{count}", count)

    def _get(self, value: str, most: int) -> tuple[int, bytes, int]:
        start, body, size = get_range(self._client, self._url, value, most)
        self.bytes_read += len(body)
        return start, body, size

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        end = min(self._position + len(view), self.size)
        if end <= self._position:
            return 0
        if self._position >= self._tail_at:
            data = self._tail[self._position - self._tail_at : end - self._tail_at]
        else:
            start, data, size = self._get(f"bytes={self._position}-{end - 1}", end - self._position)
            if (start, size) != (self._position, self.size):
                raise OSError(f"the server sent another part than byte {self._position} of {self.size}")
        view[: len(data)] = data
        self._position += len(data)
        return len(data)


class NoRangesError(OSError):
    """A server that answers a byte range with the whole file."""


def get_range(client: requests.Session, url: str, value: str, most: int) -> tuple[int, bytes, int]:
    """Where the answer to a byte range starts, its bytes (``most`` at most), the size of the file.

    ``value`` is as the header `Range` has it. Raises `NoRangesError` where the whole file would come, `OSError` for an
    answer that is no part of the file, and what requests raises.
    """
    # No compression on the way: a range of an encoded body is not a range of the file.
    headers = {"Range": value, "Accept-Encoding": "identity"}
    # The body is read only once the answer is known to be a range: it may be gigabytes.
    with client.get(url, headers=headers, timeout=TIMEOUT, stream=True) as answer:
        answer.raise_for_status()
        if answer.status_code != 206:
            raise NoRangesError("the server does not answer byte ranges")
        start, size = _content_range(answer.headers.get("Content-Range", ""), most)
        body = answer.content
    if not 0 < len(body) <= most or start + len(body) > size:
        raise OSError(f"the server sent {len(body)} bytes for the range `{value}` of {size}")
    return start, body, size


def _content_range(value: str, most: int) -> tuple[int, int]:
    """First byte and size of the file out of a `Content-Range` (RFC 9110, section 14.4)."""
    span, _, total = value.removeprefix("bytes ").partition("/")
    first, _, last = span.partition("-")
    if not all(part.isascii() and part.isdigit() for part in (first, last, total)) or int(last) - int(first) >= most:
        raise OSError(f"the server answers a byte range with `Content-Range: {value[:80]}`")
    return int(first), int(total)


def _from_wheel(wheel: RemoteWheel, client: requests.Session) -> bytes:
    """METADATA out of the remote wheel, by byte ranges."""
    with zipfile.ZipFile(io.BufferedReader(RemoteFile(client, wheel.url), 64 * 1024)) as archive:
        wanted = [n for n in archive.namelist() if n.count("/") == 1 and n.endswith(".dist-info/METADATA")]
        if len(wanted) != 1:
            raise OSError(f"the wheel has {len(wanted)} METADATA files")
        if archive.getinfo(wanted[0]).file_size > MAX_METADATA:
            raise OSError(f"its METADATA has {archive.getinfo(wanted[0]).file_size} bytes")
        return archive.read(wanted[0])


def fetch_metadata(
    wheels: Sequence[RemoteWheel], settings: Settings, client: requests.Session | None = None
) -> list[str]:
    """The METADATA text of each wheel, in order: from the cache, from beside the wheel, or out of the wheel by ranges.

    ``client`` is a session whose connections are open. Raises `UnreachableError` for an index that does not answer, or gives something else than that wheel's METADATA.
    """
    folder = settings.cache / "metadata"
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(WORKERS) as pool:
        asked = PyPISimple(session=client or stack.enter_context(session(settings)))
        # After a failure `map` cancels what has not begun: hundreds more would only be waited for.
        return list(pool.map(lambda wheel: _metadata(wheel, folder, asked), wheels))


def offers(url: str, name: str, sha256: str, settings: Settings) -> bool:
    """Whether the index at `url` has a file of that package with that sha256. Raises `UnreachableError`."""
    try:
        with PyPISimple(endpoint=url, session=session(settings)) as client:
            page = client.get_project_page(name, timeout=TIMEOUT)
    except NoSuchProjectError:
        return False
    except (requests.RequestException, UnsupportedContentTypeError, ValueError) as error:
        raise UnreachableError(f"the index page of `{name}` could not be read", because=redact(str(error))) from error
    return any(package.digests.get("sha256") == sha256 for package in page.packages)


def _metadata(wheel: RemoteWheel, folder: Path, client: PyPISimple) -> str:
    cached = folder / wheel.sha256
    with contextlib.suppress(FileNotFoundError):
        return cached.read_bytes().decode("utf-8", errors="replace")
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
        except requests.HTTPError as error:
            # Stores of files that may not be listed say 403 where they mean 404.
            if error.response.status_code not in (403, 405, 410):
                raise
            raw = _from_wheel(wheel, client.s)
        text = raw.decode("utf-8", errors="replace")
        said = HeaderParser().parsestr(text[:MAX_METADATA])
        # A portal's login page must not end up in the cache, nor in a lock as a package without requirements.
        if canonicalize_name(said["Name"] or "") != canonicalize_name(wheel.name) or not said["Version"]:
            raise OSError("what the server sent is not the METADATA of this package")
    except (requests.RequestException, OSError, *_DAMAGED) as error:
        raise UnreachableError(
            f"the METADATA of `{wheel.file}` could not be read",
            because=redact(str(error)),
            hint="see that the index answers; a site's certificate authority is set with `BUILDER_CA`",
        ) from error
    write_atomic(cached, raw)
    return text


# What `zipfile` raises on a file that is no wheel: damaged, cut off, encrypted, of an unknown compression.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError)


@contextlib.contextmanager
def confined(indexes: Mapping[str, tuple[str, Sequence[str]]]) -> Iterator[dict[str, str]]:
    """Indexes that have nothing but the packages named: for each name an address on loopback, for as long as it is open.

    An index that uv is given besides the default one wins for every package it has. So it is given a door on loopback
    that sends it on to the index for the packages that are to come from there, and knows no other. ``indexes`` maps a
    name to the index's URL and those packages.
    """
    doors = {
        name: {
            str(canonicalize_name(package)): f"{url.rstrip('/')}/{canonicalize_name(package)}/" for package in packages
        }
        for name, (url, packages) in indexes.items()
    }

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index, _, package = self.path.strip("/").partition("/")
            target = doors.get(index, {}).get(package)
            self.send_response(404 if target is None else 302)
            if target is not None:
                self.send_header("Location", target)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    if not doors:
        yield {}
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield {name: f"http://127.0.0.1:{server.server_address[1]}/{name}" for name in doors}
        finally:
            server.shutdown()
            thread.join()
