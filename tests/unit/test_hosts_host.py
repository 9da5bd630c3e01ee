"""What names a host, what is refused, and what is told when one is not reached. No network but loopback, no engine."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import bootstrap
from builder.errors import BuildError, ExitCode, UnreachableError, UsageError
from builder.hosts import faults
from builder.hosts.host import FORMS, Address, Host

# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "address", "name"),
    [
        ("local", Address("local"), "local"),
        ("unix:///run/docker.sock", Address("unix", path="/run/docker.sock"), "unix:///run/docker.sock"),
        ("context:gpu-1", Address("context", "gpu-1"), "context:gpu-1"),
        ("ssh://gpu1", Address("ssh", "gpu1"), "ssh://gpu1"),
        ("ssh://alice@gpu1.example.com:2222", Address("ssh", "gpu1.example.com", 2222, "alice"), "ssh://gpu1.example.com:2222"),
        ("ssh://[fd00::1]:22/", Address("ssh", "[fd00::1]", 22), "ssh://[fd00::1]:22"),
        ("tcp://gpu1", Address("tcp", "gpu1", 2376), "tcp://gpu1:2376"),
        ("tcp://10.0.0.7:2377", Address("tcp", "10.0.0.7", 2377), "tcp://10.0.0.7:2377"),
    ],
)  # fmt: skip
def test_what_names_a_host(text: str, address: Address, name: str) -> None:
    assert Address.parse(text) == address
    assert Host.parse(text).name == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu1",
        "LOCAL",
        "local ",
        "ssh://",
        "ssh://gpu1/path",
        "ssh://gpu1:0",
        "ssh://gpu1:65536",
        "ssh://gpu 1",
        "ssh://gpu1\n",
        "ssh://gpu1;reboot",
        "ssh://$(reboot)",
        "ssh://gpu1:22:22",
        "ssh://a@b@gpu1",
        "ssh://gpü1",
        "tcp://alice@gpu1",
        "http://gpu1",
        "unix://run/docker.sock",
        "unix:///run/docker\n.sock",
        "context:",
        "context:-x",
        "context:a b",
        "context:../x",
    ],
)
def test_what_does_not(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Host.parse(text)
    assert caught.value.hint == f"allowed: {FORMS}"


@pytest.mark.parametrize(
    "text",
    [
        "ssh://-oProxyCommand=reboot",
        "ssh://-oProxyCommand=reboot@gpu1",
        "ssh://alice@-oProxyCommand=reboot",
        "tcp://-h",
    ],
)
def test_a_name_that_ssh_would_take_for_an_option(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Host.parse(text)
    assert caught.value.because == "a name that starts with `-` would be an option of `ssh`"


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(UsageError) as caught:
        Host.parse("ssh://alice:se@cret@gpu1")
    assert str(caught.value) == (
        "error: `ssh://***@gpu1` does not name a host\n"
        "  because: a password has no place in it: ssh uses keys, and keeps them in its agent\n"
        f"  hint: allowed: {FORMS}"
    )


@given(st.text(max_size=60), st.sampled_from(["ssh://", "tcp://", "context:", "unix://", ""]))
def test_whatever_is_taken_cannot_be_an_option_or_another_word(rest: str, scheme: str) -> None:
    try:
        address = Address.parse(scheme + rest)
    except UsageError:
        return
    for word in (address.name, address.user or ""):
        assert not word.startswith("-")
        assert not set(word) & set(" \t\n'\"\\$`;&|<>()*?~#=%")
    assert "@" not in str(address) or address.kind == "unix"
    assert Address.parse(str(address)).name == address.name


# --- words of ssh -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "what"),
    [
        ("ssh: Could not resolve hostname gpu1: Name or service not known", "the machine's name is not known"),
        ("ssh: connect to host gpu1 port 22: Connection refused", "nothing answers to SSH on the machine"),
        ("ssh: connect to host gpu1 port 22: Connection timed out", "the machine is not reached"),
        ("ssh: connect to host gpu1 port 22: No route to host", "the machine is not reached"),
        ("Connection timed out during banner exchange", "the machine is not reached"),
        ("Host key verification failed.", "the machine's host key is not known"),
        ("alice@gpu1: Permission denied (publickey,password).", "the machine refused every key"),
        ("Received disconnect from 10.0.0.7 port 22:2: Too many authentication failures", "the machine refused every key"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "the machine's host key is another one than before"),
        ("Connection closed by 10.0.0.7 port 22", "`ssh` ended"),
        ("", "`ssh` ended"),
    ],
)  # fmt: skip
def test_what_ssh_says_in_other_words(said: str, what: str) -> None:
    error = faults.ssh("ssh://gpu1", said, faults.Login("gpu1"))
    assert (error.what, error.where, error.exit_code) == (what, "ssh://gpu1", ExitCode.UNREACHABLE)
    assert error.because and error.hint


def test_a_hint_is_a_command_that_works_with_a_port() -> None:
    error = faults.ssh("context:lab", "Host key verification failed.", faults.Login("gpu1", 2222, "ops"))
    assert error.hint == "look at it and accept it once: `ssh -p 2222 ops@gpu1 true`"


def test_a_key_that_changed_is_forgotten_under_the_name_that_known_hosts_has() -> None:
    said = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @"
    assert "`ssh-keygen -R '[gpu1]:2222'`" in faults.ssh("ssh://gpu1:2222", said, faults.Login("gpu1", 2222)).hint
    assert "`ssh-keygen -R gpu1`" in faults.ssh("ssh://gpu1", said, faults.Login("gpu1")).hint


@pytest.mark.parametrize(
    ("status", "said", "what"),
    [
        (127, "sh: 1: docker: not found", "there is no Docker client on the machine"),
        (127, "bash: line 1: docker: command not found", "there is no Docker client on the machine"),
        (1, "permission denied while trying to connect to the Docker daemon socket at unix:///var/run/docker.sock", "the user may not use the machine's Docker Engine"),
        (1, "failed to open the raw stream connection: dial unix /var/run/docker.sock: connect: no such file or directory", "the machine's Docker Engine does not answer"),
        (1, "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", "the machine's Docker Engine does not answer"),
        (1, "dial unix /var/run/docker.sock: connect: connection refused", "the machine's Docker Engine does not answer"),
        (1, "unknown command", "the machine's Docker Engine is not reached"),
    ],
)  # fmt: skip
def test_what_the_client_there_says_in_other_words(status: int, said: str, what: str) -> None:
    error = faults.dial("ssh://gpu1", status, said, faults.Login("gpu1"))
    assert (error.what, error.because, error.exit_code) == (what, said, ExitCode.BUILD)


def test_a_connection_that_breaks_off_is_ssh_s_matter() -> None:
    error = faults.dial("ssh://gpu1", 255, "Connection closed by 10.0.0.7 port 22", faults.Login("gpu1"))
    assert error.exit_code == ExitCode.UNREACHABLE


# --- sockets ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(listener: socket.socket, answer: bytes) -> Iterator[None]:
    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

    with listener:
        threading.Thread(target=serve, daemon=True).start()
        yield


def test_a_socket_that_does_not_exist(short_folder: Path) -> None:
    path = short_folder / "docker.sock"
    with pytest.raises(BuildError) as caught:
        Host.parse(f"unix://{path}").engine()
    assert str(caught.value) == (
        f"error: there is no Docker Engine\n  at: unix://{path}\n  because: the socket does not exist\n"
        "  hint: start it, or see the path"
    )


def test_a_socket_that_nothing_listens_on(short_folder: Path) -> None:
    path = short_folder / "docker.sock"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        with pytest.raises(BuildError) as caught:
            Host.parse(f"unix://{path}").engine()
    assert (caught.value.what, caught.value.because) == (
        "the Docker Engine does not answer",
        "nothing listens on the socket",
    )


def test_a_socket_that_this_user_may_not_use() -> None:
    error = faults.engine_socket("local", PermissionError(13, "Permission denied"))
    assert str(error) == (
        "error: this user may not use the Docker Engine\n  at: local\n  because: Permission denied\n"
        "  hint: `sudo usermod -aG docker $USER`, then log in again"
    )


@pytest.mark.processes
def test_something_else_that_listens(short_folder: Path) -> None:
    path = short_folder / "docker.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    with answering(listener, b"SSH-2.0-OpenSSH_9.2\r\n"), pytest.raises(BuildError) as caught:
        Host.parse(f"unix://{path}").engine()
    assert caught.value.because == "it said 'SSH-2.0-OpenSSH_9.2\\r\\n'"


@pytest.mark.processes
def test_a_shell_of_this_machine(tmp_path: Path) -> None:
    host = Host.parse("local")
    assert host.run_shell('echo "$((6 * 7))"', 10) == "42\n"
    assert host.run_shell("exit 3", 10) == ""
    with pytest.raises(UnreachableError) as caught:
        host.run_shell("sleep 30", 0.2)
    assert caught.value.what == "the machine did not finish in time"


@pytest.mark.processes
def test_a_client_in_that_shell_speaks_to_the_engine_that_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///another.sock")
    assert Host.parse("unix:///run/made.sock").run_shell("echo $DOCKER_HOST", 10) == "unix:///run/made.sock\n"
    assert Host.parse("local").run_shell("echo $DOCKER_HOST", 10) == "unix:///another.sock\n"


@pytest.mark.processes
def test_that_shell_finds_the_client_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "find_program", lambda name: "/made/tools/bin/docker")
    path = Host.parse("local").run_shell("echo $PATH", 10)
    assert path is not None and path.endswith(":/made/tools/bin\n")


def test_tcp_has_no_shell() -> None:
    assert Host.parse("tcp://gpu1:2376").run_shell("true", 1) is None


# --- TLS --------------------------------------------------------------------------------------------------------------


def test_tcp_needs_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_CERT_PATH", raising=False)
    with pytest.raises(UsageError) as caught:
        Host.parse("tcp://gpu1:2376").engine()
    assert (caught.value.what, caught.value.because) == (
        "an engine behind TCP is reached with TLS only",
        "DOCKER_CERT_PATH is not set",
    )


def test_files_for_tls_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    with pytest.raises(UsageError) as caught:
        Host.parse("tcp://gpu1:2376").engine()
    assert (caught.value.what, caught.value.where) == ("the files for TLS cannot be read", str(tmp_path))


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), "the engine's certificate is not one that we trust"),
        (ssl.SSLError(1, "wrong version number"), "the engine refused the connection"),
        (ConnectionRefusedError(111, "Connection refused"), "the machine is not reached"),
        (TimeoutError("timed out"), "the machine is not reached"),
    ],
)  # fmt: skip
def test_what_tls_says_in_other_words(error: OSError, what: str) -> None:
    if isinstance(error, ssl.SSLCertVerificationError):
        error.verify_message = "self-signed certificate"
    found = faults.tls("tcp://gpu1:2376", error)
    assert (found.what, found.exit_code) == (what, ExitCode.UNREACHABLE)


# --- contexts ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, int], None]:
    """A stand-in for the docker client, which prints a text."""

    def make(text: str, status: int) -> None:
        script = tmp_path / "docker"
        (tmp_path / "said").write_text(text)
        script.write_text(f"#!/bin/sh\ncat {tmp_path}/said {'>&2' if status else ''}\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setattr(bootstrap, "find_program", lambda name: str(script))

    return make


@pytest.mark.processes
def test_a_context_leads_to_a_socket(client: Callable[[str, int], None], tmp_path: Path) -> None:
    endpoint = {"Endpoints": {"docker": {"Host": f"unix://{tmp_path}/nowhere"}}, "Storage": {"TLSPath": "<IN MEMORY>"}}
    client(json.dumps([endpoint]), 0)
    with pytest.raises(BuildError) as caught:
        Host.parse("context:second").engine()
    assert (caught.value.what, caught.value.where) == ("there is no Docker Engine", "context:second")


@pytest.mark.processes
def test_a_context_that_does_not_exist(client: Callable[[str, int], None]) -> None:
    client('context "nobody": context not found\n', 1)
    with pytest.raises(UsageError) as caught:
        Host.parse("context:nobody").engine()
    assert str(caught.value) == (
        "error: there is no context `nobody`\n  at: context:nobody\n"
        '  because: context "nobody": context not found\n  hint: see `docker context ls`'
    )


@pytest.mark.processes
def test_a_context_of_a_kind_that_we_do_not_know(client: Callable[[str, int], None]) -> None:
    client(json.dumps([{"Endpoints": {"docker": {"Host": "npipe:////./pipe/docker"}}}]), 0)
    with pytest.raises(UsageError) as caught:
        Host.parse("context:windows").engine()
    assert caught.value.what == "`npipe:////./pipe/docker` does not name a host"
