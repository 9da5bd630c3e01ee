"""A proxy for `https_proxy` that listens on one address: the way out for the build steps of an engine without NAT."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class ConnectProxy:
    """`CONNECT host:port` and nothing else. A context manager; ``url`` is what a build is given."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        self.url = f"http://{address}:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (data := near.recv(4096)):
                head += data
            target = head.split(b" ")[1].decode()
            self.asked.append(target)
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as far:
                far.settimeout(None)
                near.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_pump, args=(far, near), daemon=True)
                back.start()
                _pump(near, far)
                back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
