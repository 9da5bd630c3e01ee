"""Sockets that lead elsewhere: through a program, and through TLS to an engine that is a stand-in."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from builder.errors import UnreachableError, UsageError
from builder.hosts import tunnel as tunnel_module
from builder.hosts.host import Host
from builder.hosts.tunnel import CommandTunnel, Tls, TlsTunnel

pytestmark = pytest.mark.processes


def connected(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(20)
    made.connect(address.removeprefix("unix://"))
    return made


def say(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def test_each_connection_is_a_program_s_input_and_output() -> None:
    tunnel = CommandTunnel(["sh", "-c", "tr a-z A-Z"])
    try:
        with connected(tunnel.address) as one, connected(tunnel.address) as other:
            # More than the buffers between take: sent while the answer is read.
            sender = threading.Thread(target=say, args=(other, b"other" * 100_000))
            sender.start()
            say(one, b"one")
            assert read_all(one) == b"ONE"
            assert read_all(other) == b"OTHER" * 100_000
            sender.join()
    finally:
        tunnel.close()


def test_closing_it_ends_programs_and_what_they_started() -> None:
    # As `ssh` with a proxy: what it started holds the connection, too.
    tunnel = CommandTunnel(["sh", "-c", "sh -c 'echo begun; exec sleep 1000'; true"])
    folder = Path(tunnel.address.removeprefix("unix://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    with connected(tunnel.address) as connection:
        assert connection.recv(100) == b"begun\n"
        tunnel.close()
        assert read_all(connection) == b""
    assert not folder.exists()


LONG = "x" * 120
"""More than the path of a socket may have."""


@pytest.mark.parametrize(
    "make", [lambda: CommandTunnel(["true"]), lambda: TlsTunnel(Tls("127.0.0.1", 1, ssl.create_default_context()))]
)
def test_a_folder_in_which_there_can_be_no_socket(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / LONG
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    made: list[object] = []
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            made.append(make())
        except (UsageError, OSError) as error:
            raised.append(error)

    # In a thread that is not waited for: what this is about is a tunnel whose maker waited without end.
    maker = threading.Thread(target=attempt, daemon=True)
    maker.start()
    maker.join(20)
    assert not maker.is_alive() and not made
    assert str(raised[0]) == (
        "error: no socket can be made in the folder for temporary files\n"
        f"  at: {place}\n"
        "  because: AF_UNIX path too long\n"
        "  hint: the path of a socket ends at 107 bytes: a shorter folder, as in `TMPDIR=/tmp`"
    )
    assert list(place.iterdir()) == []


# --- TLS --------------------------------------------------------------------------------------------------------------


class StandIn(BaseHTTPRequestHandler):
    """As much of an engine as answers to being connected to."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        text = b'{"Version": "99.1.2", "ApiVersion": "1.45"}' if self.path.endswith("version") else b"OK"
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ca.pem`, `cert.pem` and `key.pem` of DOCKER_CERT_PATH; one certificate is all three."""
    program = shutil.which("openssl")
    if program is None:
        if os.environ.get("CI"):
            pytest.fail("openssl is not installed: TLS was not tested")
        pytest.skip("NO openssl, TLS was not tested")
    folder = tmp_path_factory.mktemp("tls")
    argv = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=made", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*argv, "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")], check=True, capture_output=True
    )
    shutil.copy(folder / "cert.pem", folder / "ca.pem")
    return folder


@pytest.fixture
def behind_tls(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an engine that asks for a client's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    context.load_verify_locations(certificates / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    server = ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_an_engine_behind_tls(behind_tls: int) -> None:
    with Host.parse(f"tcp://127.0.0.1:{behind_tls}") as host:
        assert host.engine().version == "99.1.2"
        folder = Path(host.engine().host.removeprefix("unix://")).parent
        assert host.is_tunnelled
    assert not folder.exists()


def test_a_certificate_of_another_name(behind_tls: int) -> None:
    with pytest.raises(UnreachableError) as caught:
        Host.parse(f"tcp://localhost:{behind_tls}").engine()
    assert caught.value.what == "the engine's certificate is not one that we trust"
    assert "localhost" in caught.value.because


def test_a_port_that_does_not_speak_tls_ends_a_connection_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel_module, "TIMEOUT", 0.3)
    # It takes connections, and says nothing: asyncio itself would wait a minute for its handshake.
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        tunnel = TlsTunnel(Tls("127.0.0.1", silent.getsockname()[1], ssl.create_default_context()))
        try:
            with connected(tunnel.address) as connection:
                assert read_all(connection) == b""
        finally:
            tunnel.close()


def test_a_port_that_nobody_listens_on(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(UnreachableError) as caught:
        Host.parse(f"tcp://127.0.0.1:{port}").engine()
    assert (caught.value.what, caught.value.where) == ("the machine is not reached", f"tcp://127.0.0.1:{port}")
