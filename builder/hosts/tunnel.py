"""A socket on this machine that leads to an engine elsewhere: through `ssh`, or through TLS.

The Docker SDK, buildx and the client all speak to a unix socket; so one way serves all three, and OpenSSH's own client
makes the connection, with the user's configuration, agent and known hosts. (The SDK's transport for SSH needs paramiko
even where it starts `ssh`, knows no time limits and lets ssh write to the terminal.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from builder.errors import UsageError

PIECE = 256 << 10
"""Bytes moved at a time."""

TIMEOUT = 20.0
"""Seconds that a connection may take to be made, and to end."""


class Tunnel(Protocol):
    """Listens on a socket in a folder that only we can read. `close` ends every connection and removes the socket."""

    @property
    def address(self) -> str:
        """What the SDK and the client take: `unix://…`."""

    def close(self) -> None: ...


def _bound() -> tuple[Path, socket.socket]:
    """A folder that only we can read, with a socket in it. Raises `UsageError` where none can be made; then nothing stays."""
    folder = Path(tempfile.mkdtemp(prefix="builder-"))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(folder / "engine"))
    except OSError as error:
        listener.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise UsageError(
            "no socket can be made in the folder for temporary files",
            where=str(folder.parent),
            because=str(error),
            hint="the path of a socket ends at 107 bytes: a shorter folder, as in `TMPDIR=/tmp`",
        ) from error
    return folder, listener


class CommandTunnel:
    """Each connection is handed to a program of its own, which has it as its standard input and output."""

    def __init__(self, argv: Sequence[str]) -> None:
        self._argv = list(argv)
        self._folder, self._listener = _bound()
        self._listener.listen(64)
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock, self._closed = threading.Lock(), False
        threading.Thread(target=self._serve, name="tunnel", daemon=True).start()

    @property
    def address(self) -> str:
        return f"unix://{self._folder}/engine"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, self._lock:
                if self._closed:
                    return
                self._processes = {process for process in self._processes if process.poll() is None}
                # A session of its own: Ctrl-C reaches us alone, and we end things in order. What it has to say was said
                # when the engine was asked whether it is there.
                process = subprocess.Popen(
                    self._argv,
                    stdin=connection.fileno(),
                    stdout=connection.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                self._processes.add(process)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        # `accept` in the other thread does not notice that its socket was closed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for process in self._processes:
            end(process)
        shutil.rmtree(self._folder, ignore_errors=True)


def end(process: subprocess.Popen[bytes], timeout: float = TIMEOUT) -> None:
    """End a program that leads a session, with what it started: `ssh` may have a proxy's."""
    if process.poll() is not None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            process.wait(timeout=timeout)
        except subprocess.TimeoutExpired:
            continue
        return


@dataclass(frozen=True)
class Tls:
    """A TCP port that speaks TLS."""

    host: str
    port: int
    context: ssl.SSLContext


class TlsTunnel:
    """Each connection is one to a TCP port, in TLS."""

    def __init__(self, target: Tls) -> None:
        self._target = target
        # Here, where it raises: the thread could only end, and leave whoever waits for it waiting.
        self._folder, self._listener = _bound()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="tunnel", daemon=True)
        self._thread.start()
        ready.wait()

    @property
    def address(self) -> str:
        return f"unix://{self._folder}/engine"

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(timeout=TIMEOUT)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        server = await asyncio.start_unix_server(self._accept, sock=self._listener)
        ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            opening = asyncio.open_connection(self._target.host, self._target.port, ssl=self._target.context)
            there, back = await asyncio.wait_for(opening, TIMEOUT)
            try:
                # TLS has no half of a connection that is closed: the side that ends first ends both.
                await _first(_move(reader, back), _move(there, writer))
            finally:
                back.close()
        except (OSError, TimeoutError):
            # The client sees a connection that ends, as it does when an engine goes down.
            pass
        except asyncio.CancelledError:
            # `close` waits for this task; asyncio's own callback for a connection logs a cancelled one.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _move(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Hand on what comes until it ends."""
    with contextlib.suppress(ConnectionError):
        while data := await source.read(PIECE):
            target.write(data)
            await target.drain()


async def _first(*moves: Coroutine[Any, Any, None]) -> None:
    """Until one of the directions has ended."""
    tasks = [asyncio.ensure_future(move) for move in moves]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
