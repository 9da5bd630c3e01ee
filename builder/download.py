"""One URL into one file: hashed on the way, taken up again after a cut, given up after a bounded number of failures.

What goes wrong is told in words of our own: those of the libraries quote whole URLs, which may hold a signature.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import shutil
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from io import FileIO
from urllib.parse import urlsplit

import requests
from pypi_simple import DistributionPackage, PyPISimple, UnsupportedContentTypeError
from urllib3.exceptions import (
    HTTPError,
    IncompleteRead,
    NameResolutionError,
    NewConnectionError,
    ReadTimeoutError,
    ResponseError,
)

from builder.cache import CHUNK, Stopped
from builder.errors import UnreachableError
from builder.files import pretty_size
from builder.index import TIMEOUT as PAGE_TIMEOUT
from builder.index import Adapter, session
from builder.settings import Settings

TIMEOUT = (10.0, 30.0)
"""Seconds to connect, and between two reads."""

FAILURES = 4
"""Attempts in a row that brought nothing to speak of (`HEADWAY`): then it is given up."""

ATTEMPTS = 40
"""Attempts at one file in all, whatever they brought."""

HEADWAY = 1_000_000
"""Bytes by which an attempt has to get further than any before, so that it does not count as a failure."""

PAUSE = 1.0
"""Seconds before the second attempt; they double with every failure in a row."""

LEAST = 1000
"""Bytes a second, over `WINDOW`: below, a server counts as one that does not answer."""

WINDOW = 30.0
"""Seconds over which the rate is looked at."""

Report = Callable[[int, int | None], None]
"""What is told of the progress: bytes that are there, bytes of the whole where it is known."""


class TransferError(Exception):
    """A file that could not be had, and why: words for a message, without credentials.

    ``partial`` says whether what is there may be taken up by a later run; ``status`` is the HTTP status, if one came.
    """

    def __init__(self, why: str, *, status: int = 0, final: bool = False) -> None:
        super().__init__(why)
        self.why, self.status, self.final = why, status, final
        self.partial = False


class WrongSizeError(TransferError):
    """The server has another file: its size alone says so."""


def client(settings: Settings) -> requests.Session:
    """A session as the site wants it that leaves trying again to `Transfer`. Raises `UsageError`."""
    made = session(settings)
    for prefix in ("https://", "http://"):
        made.mount(prefix, Adapter(max_retries=0))
    return made


class Transfer:
    """Fetches `url` into the open file `target`, from where that ends. `size` is what the file must have, if known."""

    def __init__(
        self,
        made: requests.Session,
        url: str,
        target: FileIO,
        *,
        size: int | None,
        stop: threading.Event,
        report: Report,
    ) -> None:
        self._client, self._url, self._target, self._size = made, without_credentials(url), target, size
        self._stop, self._report = stop, report
        self._host = urlsplit(self._url).netloc
        target.seek(0)
        self._digest = hashlib.file_digest(target, "sha256")
        self._have = target.tell()
        self._best = self._have
        self._ranges = True
        self.resumed = self._have > 0
        """Whether bytes of an earlier answer are part of it: those may be of another file."""

    def run(self) -> str:
        """The sha256 of the whole file. Raises `TransferError`, or `OSError` if `target` cannot be written."""
        failures = 0
        for attempt in range(ATTEMPTS):
            if self._stop.wait(min(PAUSE * 2 ** (failures - 1), 30) if attempt and failures else 0):
                raise Stopped
            try:
                self._attempt()
                return self._digest.hexdigest()
            except TransferError as error:
                error.partial = self._ranges and self._have > 0
                failures = 0 if self._have >= self._best + HEADWAY else failures + 1
                if error.final:
                    raise
                self._best = max(self._best, self._have)
                last = error
                if failures >= FAILURES:
                    break
        last.why += f" ({attempt + 1} attempts)"
        raise last

    def _attempt(self) -> None:
        headers = {"Accept-Encoding": "identity"}
        if self._have and not self._ranges:
            self._restart()
        if self._have:
            headers["Range"] = f"bytes={self._have}-"
            self.resumed = True
        try:
            with self._client.get(self._url, headers=headers, timeout=TIMEOUT, stream=True) as answer:
                total = self._begin(answer)
                if total is None or self._have < total:
                    self._body(answer, self._size if total is None else total)
        except (requests.RequestException, HTTPError) as error:
            raise TransferError(explain(error, self._host), final=is_final(error)) from error

    def _begin(self, answer: requests.Response) -> int | None:
        """Bytes of the whole file, where the answer says so; `target` is at the place where its body belongs."""
        status = answer.status_code
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isascii() and length.isdigit() else None
        if status == 206:
            found = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""), re.ASCII)
            if found is None or int(found[1]) != self._have:
                self._ranges = False
                raise TransferError(f"{self._host} answers with another part of the file than was asked for")
            total = int(found[3])
        elif status == 416:
            # There is nothing from this byte on: either it is whole already, or what is there is of another file.
            found = re.fullmatch(r"bytes \*/(\d+)", answer.headers.get("Content-Range", ""), re.ASCII)
            if found is None or int(found[1]) != self._have:
                self._ranges = False
                raise TransferError(f"{self._host} answers that the file is shorter than what is here of it")
            total = self._have
        elif status != 200:
            raise TransferError(status_words(self._host, status), status=status, final=not _passes(status))
        elif self._have:
            self._ranges = False
            self._restart()
        if total is not None and self._size is not None and total != self._size:
            self._ranges = False
            words = f"{self._host} has {_exactly(total)} under this name, the lock wants {_exactly(self._size)}"
            raise WrongSizeError(words, final=True)
        self._room(total)
        return total

    def _body(self, answer: requests.Response, total: int | None) -> None:
        began, came = time.monotonic(), 0
        while True:
            if self._stop.is_set():
                raise Stopped
            # What one read of the socket brings: a whole chunk may be long in coming, and no time would be looked at.
            data = answer.raw.read1(CHUNK, decode_content=False)
            if not data:
                break
            view = memoryview(data)
            while view:
                view = view[self._target.write(view) :]
            self._digest.update(data)
            self._have += len(data)
            came += len(data)
            self._report(self._have, total)
            if total is not None and self._have > total:
                self._ranges = False
                raise TransferError(f"{self._host} sends more than {_exactly(total)}")
            if (seconds := time.monotonic() - began) > WINDOW:
                if came < LEAST * seconds:
                    raise TransferError(f"{self._host} sends less than {pretty_size(LEAST)} a second")
                began, came = time.monotonic(), 0
        if total is not None and self._have < total:
            raise TransferError(_cut(self._host))

    def _restart(self) -> None:
        self._target.seek(0)
        self._target.truncate()
        self._digest, self._have, self.resumed = hashlib.sha256(), 0, False

    def _room(self, total: int | None) -> None:
        """Raise `OSError` before the disk is filled in vain."""
        free = shutil.disk_usage(self._target.fileno()).free
        if total is not None and total - self._have > free:
            need = pretty_size(total - self._have)
            raise OSError(errno.ENOSPC, f"{need} are still to come, {pretty_size(free)} are free")


def without_credentials(url: str) -> str:
    """`url` without user name and password: the session knows them by host, and nothing else is to see them."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _passes(status: int) -> bool:
    """Whether another attempt may bring another answer (RFC 9110, section 15; 429 of RFC 6585)."""
    return status >= 500 or status in (408, 425, 429)


def status_words(host: str, status: int) -> str:
    """`wheels.example answers 404 Not Found`."""
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"{host} answers {status} {phrase}".rstrip()


def _cut(host: str) -> str:
    return f"{host} broke the connection off in the middle of the file"


def _exactly(count: int) -> str:
    return f"{count:,} bytes"


def is_final(error: Exception) -> bool:
    """Whether another attempt would end the same way: a certificate does not get better."""
    broken = requests.exceptions.SSLError | requests.exceptions.InvalidURL | requests.exceptions.InvalidSchema
    tunnel = _tunnel(_causes(error))
    return isinstance(error, broken) or bool(tunnel and not _passes(int(tunnel[1])))


def project_page(name: str, settings: Settings, client: requests.Session | None = None) -> list[DistributionPackage]:
    """The files of a package on the default index, or the site's own. Raises `NoSuchProjectError`, `UnreachableError`.

    ``client`` is a session whose connections are open.
    """
    endpoint = without_credentials(settings.index) if settings.index else None
    named = {"endpoint": endpoint} if endpoint else {}
    try:
        with contextlib.ExitStack() as stack:
            site = PyPISimple(session=client or stack.enter_context(session(settings)), **named)
            return site.get_project_page(name, timeout=PAGE_TIMEOUT).packages
    except (UnsupportedContentTypeError, requests.exceptions.JSONDecodeError):
        because = f"what it answers is no page of `{name}`"
    except (requests.RequestException, ValueError) as error:
        because = explain(error, urlsplit(endpoint or "").netloc or "the index")
    raise no_releases(name, because)


def no_releases(name: str, because: str) -> UnreachableError:
    """The error for an index that does not tell a package's releases."""
    return UnreachableError(
        f"the index does not tell the releases of `{name}`",
        because=because,
        hint="see that the index answers; another is named with `--index default=URL` or `BUILDER_INDEX`",
    )


def explain(error: Exception, host: str) -> str:
    """What a failed request says, in words: no URL, no credentials. `host` is the one that was asked first."""
    asked = getattr(error, "request", None)
    if asked is not None and asked.url:
        host = urlsplit(without_credentials(asked.url)).netloc
    causes = _causes(error)
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"the certificate of {host} is not valid here: {cause.verify_message}"
    if isinstance(error, requests.exceptions.SSLError):
        return f"{host} and this machine have no TLS in common"
    if tunnel := _tunnel(causes):
        return f"the proxy on the way to {host} answers {tunnel[0]}"
    if isinstance(error, requests.exceptions.ProxyError):
        return f"the proxy on the way to {host} does not answer"
    if isinstance(error, requests.exceptions.ConnectTimeout):
        return f"no connection to {host} within {TIMEOUT[0]:g} s"
    for cause in causes:
        if isinstance(cause, ResponseError) and (found := re.search(r"\d{3}", str(cause))):
            return f"{status_words(host, int(found[0]))}, again and again"
        if isinstance(cause, NameResolutionError):
            return f"the name of {host} cannot be resolved"
        if isinstance(cause, ConnectionRefusedError):
            return f"{host} refuses the connection"
        if isinstance(cause, ReadTimeoutError | requests.exceptions.ReadTimeout | TimeoutError):
            return f"{host} sent nothing for {TIMEOUT[1]:g} s"
    if any(isinstance(cause, NewConnectionError) for cause in causes):
        return f"no connection to {host}"
    if any(isinstance(cause, IncompleteRead) for cause in causes):
        return _cut(host)
    if isinstance(error, requests.exceptions.ConnectionError | HTTPError):
        return f"{host} broke the connection off"
    if isinstance(error, requests.exceptions.HTTPError) and error.response is not None:
        return status_words(host, error.response.status_code)
    return f"the request to {host} failed ({type(error).__name__})"


def _tunnel(causes: list[BaseException]) -> tuple[str, str] | None:
    """What a proxy answered to the wish for a tunnel (`407 Proxy Authentication Required`), and its status alone."""
    for cause in causes:
        if found := re.fullmatch(r"Tunnel connection failed: ((\d{3})[ -~]{0,80})", str(cause)):
            return found[1], found[2]
    return None


def _causes(error: BaseException) -> list[BaseException]:
    """The error and everything it came from or carries, each once."""
    found: list[BaseException] = []
    queue: list[object] = [error]
    while queue:
        item = queue.pop(0)
        if isinstance(item, BaseException) and item not in found and len(found) < 50:
            found.append(item)
            queue += [item.__cause__, item.__context__, getattr(item, "reason", None), *item.args]
    return found
