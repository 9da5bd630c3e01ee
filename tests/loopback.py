"""A package index on the loopback address, and tiny wheels for it: made here, nothing is fetched.

The index speaks the JSON form of the simple API with upload times, so that `uv --exclude-newer` works on it. Files can be
told to misbehave: no byte ranges, an error for some time, a connection that breaks off, a body that is long in coming.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import ssl
import sys
import threading
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from packaging.utils import canonicalize_name

JSON = "application/vnd.pypi.simple.v1+json"


def metadata(name: str, version: str, requires: Sequence[str] = ()) -> bytes:
    """The METADATA of a tiny wheel."""
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def wheel(
    name: str,
    version: str,
    requires: Sequence[str] = (),
    *,
    tag: str = "py3-none-any",
    files: Mapping[str, bytes] | None = None,
    text: bytes | None = None,
) -> tuple[str, bytes]:
    """File name and bytes of a wheel; ``text`` is its METADATA if that is to say something else."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    members = dict(files or {f"{module}/__init__.py": b""})
    members[f"{info}/METADATA"] = metadata(name, version, requires) if text is None else text
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: made\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    record = ""
    for member, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{member},sha256={digest},{len(data)}\n"
    members[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for member, data in members.items():
            archive.writestr(zipfile.ZipInfo(member, (2020, 1, 1, 0, 0, 0)), data)
    return f"{module}-{version}-{tag}.whl", buffer.getvalue()


@dataclass
class Served:
    """A file of the server and how it answers."""

    data: bytes
    ranges: bool = True
    statuses: list[int] = field(default_factory=list)
    """Statuses of the next answers, one each, before it answers as it should; -1 breaks the connection off."""
    status: int = 200
    auth: str = ""
    """`user:password` that it wants."""
    content_range: str | None = None
    """What it says instead of the right `Content-Range`; empty for no such header."""
    cuts: list[int] = field(default_factory=list)
    """Bytes of the body after which the next answers break off, one each."""
    pause: float = 0.0
    """Seconds before each piece of the body."""
    piece: int = 65536
    """Bytes of the body sent at a time."""
    location: str = ""
    """Where it sends one on to (302)."""
    length: bool = True
    """Whether it tells the body's length; else the body ends with the connection."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Loopback:
    """An HTTP server on 127.0.0.1: `files` maps paths to what is served, `requests` is what was asked.

    With ``tls`` it speaks HTTPS, by that context.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[tuple[str, str]] = []
        """Path and `Range` of each request."""
        self.authorizations: list[str] = []
        """The `Authorization` of each request."""
        self.bytes_sent = 0
        self._scheme = "http" if tls is None else "https"
        handler = type("Handler", (_Handler,), {"site": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        """Answer nothing from now on; the port stays free for nobody in particular."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def paths(self) -> list[str]:
        """The paths that were asked for, in order."""
        return [path for path, _ in self.requests]

    # The simple API, below a prefix each.

    def add(
        self,
        made: tuple[str, bytes],
        *,
        uploaded: str | None = "2024-01-01T00:00:00Z",
        beside: bool = True,
        index: str = "simple",
        hashes: bool = True,
    ) -> str:
        """Put a file on an index; ``beside`` serves its METADATA beside it (PEP 658). Returns the file's URL."""
        file, data = made
        name = canonicalize_name(file.split("-")[0])
        self.files[f"/{index}/files/{file}"] = Served(data)
        entry: dict[str, object] = {"filename": file, "url": f"{self.url}/{index}/files/{file}", "size": len(data)}
        entry["hashes"] = {"sha256": hashlib.sha256(data).hexdigest()} if hashes else {}
        if uploaded is not None:
            entry["upload-time"] = uploaded
        if beside:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                text = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA")))
            self.files[f"/{index}/files/{file}.metadata"] = Served(text)
            entry["core-metadata"] = {"sha256": hashlib.sha256(text).hexdigest()}
        page = f"/{index}/{name}/"
        listed: dict[str, Any] = {"name": name, "files": []}
        if page in self.files:
            listed = json.loads(self.files[page].data)
        listed |= {"meta": {"api-version": "1.1"}, "versions": []}
        listed["files"].append(entry)
        self.files[page] = Served(json.dumps(listed).encode())
        return f"{self.url}/{index}/files/{file}"


class _Handler(BaseHTTPRequestHandler):
    site: ClassVar[Loopback]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a file, as it is told to."""
        site, wanted = self.site, self.headers.get("Range", "")
        site.requests.append((self.path, wanted))
        site.authorizations.append(self.headers.get("Authorization", ""))
        served = site.files.get(self.path)
        if served is None:
            self._answer(404, b"no such file")
            return
        if (
            served.auth
            and self.headers.get("Authorization") != "Basic " + base64.b64encode(served.auth.encode()).decode()
        ):
            self._answer(401, b"who are you")
            return
        status = served.statuses.pop(0) if served.statuses else served.status
        if status == -1:
            self.send_response(200)
            self.send_header("Content-Length", str(len(served.data) + 1))
            self.end_headers()
            self.wfile.write(served.data[: len(served.data) // 2])
            self.close_connection = True
            return
        if served.location:
            self._answer(302, b"", {"Location": served.location})
            return
        if status == 200 and served.ranges and wanted.startswith("bytes="):
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            size = len(served.data)
            if start and int(start) >= size:
                self._answer(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            first = int(start) if start else max(0, size - int(end))
            last = min(int(end), size - 1) if start and end else size - 1
            told = f"bytes {first}-{last}/{size}" if served.content_range is None else served.content_range
            self._answer(206, served.data[first : last + 1], {"Content-Range": told} if told else {})
            return
        self._answer(status, served.data)

    do_HEAD = do_GET

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        if status != 206 and self.path.endswith("/"):
            self.send_header("Content-Type", JSON)
        served = self.site.files.get(self.path, Served(b""))
        cut = served.cuts.pop(0) if served.cuts and status in (200, 206) else len(data)
        if served.length:
            self.send_header("Content-Length", str(len(data)))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with contextlib.suppress(OSError):  # the client may have enough
            for start in range(0, min(len(data), cut), served.piece):
                time.sleep(served.pause)
                piece = data[start : min(start + served.piece, cut)]
                self.wfile.write(piece)
                self.site.bytes_sent += len(piece)
        self.close_connection = self.close_connection or cut < len(data) or not served.length

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def loopback(tls: ssl.SSLContext | None = None) -> Iterator[Loopback]:
    """A server for a `with` block or a fixture."""
    server = Loopback(tls)
    try:
        yield server
    finally:
        with contextlib.suppress(Exception):
            server.stop()
