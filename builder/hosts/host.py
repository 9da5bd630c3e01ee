"""HOST: a machine with an engine, as a user names it; its engine and its shell.

`ssh://[user@]host[:port]`, `context:NAME` (a Docker context), `tcp://host:2376` (TLS, with the files of `DOCKER_CERT_PATH`),
`unix:///path` or `local`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from builder import bootstrap
from builder.engine import Engine
from builder.errors import BuilderError, BuildError, UnreachableError, UsageError
from builder.hosts import faults
from builder.hosts.tunnel import CommandTunnel, Tls, TlsTunnel, Tunnel, end

CONNECT = 10
"""Seconds for a connection to another machine, its handshake included."""

ANSWER = 30
"""Seconds for a machine that is connected to answer the first question."""

FORMS = "`ssh://[user@]host[:port]`, `context:NAME`, `tcp://host:2376`, `unix:///path` or `local`"

# What a remote command line, ssh's own or a URL could take for something else is in none of these.
_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?"
_ADDRESS = rf"(?P<host>{_NAME}|\[[0-9A-Fa-f:.]{{2,45}}\])(?::(?P<port>[1-9][0-9]{{0,4}}))?"
_SSH = re.compile(rf"ssh://(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,63}})@)?{_ADDRESS}/?", re.ASCII)
_TCP = re.compile(rf"tcp://{_ADDRESS}/?", re.ASCII)
_CONTEXT = re.compile(r"context:(?P<name>[A-Za-z0-9][A-Za-z0-9_.+-]{0,127})", re.ASCII)
_UNIX = re.compile(r"unix://(?P<path>/[^\x00-\x1f\x7f]{1,200})")

DIAL = ("docker", "system", "dial-stdio")
"""What the Docker client itself runs on a machine that it reaches by SSH: needs a client there, 18.09 or newer."""

_PING = b"GET /_ping HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n\r\n"

Kind = Literal["ssh", "context", "tcp", "unix", "local"]


@dataclass(frozen=True)
class Address:
    """A HOST that was understood; nothing was asked yet. ``path`` is a socket, ``name`` a context or host name."""

    kind: Kind
    name: str = ""
    port: int | None = None
    user: str | None = None
    path: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises `UsageError` for what is none of the forms; a password in it is not repeated."""
        if text == "local":
            return cls("local")
        if found := _UNIX.fullmatch(text):
            return cls("unix", path=found["path"])
        if found := _CONTEXT.fullmatch(text):
            return cls("context", found["name"])
        found = _SSH.fullmatch(text) or _TCP.fullmatch(text)
        if found is None or int(found["port"] or 1) > 65535:
            raise UsageError(
                f"`{_shown(text)}` does not name a host", because=_reason(text), hint=f"allowed: {FORMS}"
            ) from None
        port = int(found["port"]) if found["port"] else None
        if text.startswith("ssh:"):
            return cls("ssh", found["host"], port, found["user"])
        return cls("tcp", found["host"], port or 2376)

    def __str__(self) -> str:
        """As it is shown and recorded: without the user, whom a machine's name does not depend on."""
        port = f":{self.port}" if self.port else ""
        return {
            "local": "local",
            "unix": f"unix://{self.path}",
            "context": f"context:{self.name}",
            "ssh": f"ssh://{self.name}{port}",
            "tcp": f"tcp://{self.name}{port}",
        }[self.kind]


def _shown(text: str) -> str:
    # Up to the last `@`: a password may hold one.
    bare = re.sub(r"(?<=://).*@", "***@", text)
    return re.sub(r"[^\x20-\x7e]", "?", bare)[:100]


def _reason(text: str) -> str:
    try:
        if urlsplit(text).password is not None:
            return "a password has no place in it: ssh uses keys, and keeps them in its agent"
    except ValueError:
        pass
    if re.match(r"(?:ssh|tcp)://(?:[^@]*@)?-", text):
        return "a name that starts with `-` would be an option of `ssh`"
    return ""


class Host:
    """A machine and what leads to it. Use as a context manager, or `close` it: connections by SSH are processes.

    One thread at a time uses a host.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.name = str(address)
        """As shown in messages, tables and records: without user and password."""
        self._real: Address | None = None if address.kind == "context" else address
        self._tls: Path | None = None
        self._ssh: Ssh | None = None
        self._tunnel: Tunnel | None = None
        self._engine: Engine | None = None

    @classmethod
    def parse(cls, text: str) -> Host:
        """Raises `UsageError` for what is none of the forms."""
        return cls(Address.parse(text))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every connection to the machine."""
        if self._engine is not None:
            self._engine.close()
        if self._tunnel is not None:
            self._tunnel.close()
        if self._ssh is not None:
            self._ssh.close()
        self._engine = self._tunnel = self._ssh = None

    @property
    def is_tunnelled(self) -> bool:
        """Whether the engine's address here is that of a tunnel, so that its paths are another machine's."""
        return self._tunnel is not None

    def engine(self) -> Engine:
        """The machine's engine, connected once; its ``host`` is an address for the client and buildx on this machine.

        Raises `UnreachableError` where the machine or its SSH server does not let us in, `BuildError` where its engine
        does not answer, `UsageError` for a context that is not there. All within `CONNECT` and `ANSWER` seconds.
        """
        if self._engine is None:
            self._engine = Engine(self._engine_address())
        return self._engine

    def run_shell(self, script: str, timeout: float) -> str | None:
        """What a POSIX shell on the machine prints for ``script``, which it reads from its standard input.

        None where there is none to be had: by TCP only the engine is reached, and a key may be allowed nothing but that.
        Raises as `engine`, and `UnreachableError` after ``timeout`` seconds.
        """
        real = self._resolved()
        if real.kind == "tcp":
            return None
        argv = self._shell().argv("sh", "-s") if real.kind == "ssh" else ["sh", "-s"]
        try:
            done = subprocess.run(
                argv,
                input=script.encode(),
                env=None if real.kind == "ssh" else shell_environment(real),
                capture_output=True,
                timeout=timeout,
                start_new_session=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UnreachableError(
                "the machine did not finish in time", where=self.name, because=f"waited {timeout:.0f} s for its shell"
            ) from None
        if real.kind == "ssh" and done.returncode == 255 and not done.stdout:
            raise faults.ssh(self.name, done.stderr.decode(errors="replace"), self._shell().login)
        # A key that may only reach the engine gets that, whatever it asks for.
        if done.returncode in (126, 127) or done.stdout.startswith(b"HTTP/1."):
            return None
        return done.stdout.decode(errors="replace")

    def explain(self, error: BuilderError) -> BuilderError:
        """``error`` as a user sees it: with the machine's name for the socket that leads there."""
        if self._tunnel is not None:
            lead = self._tunnel.address
            error.where = error.where.replace(lead, self.name)
            error.because = error.because.replace(lead, self.name)
        if not error.where:
            error.where = self.name
        return error

    def _resolved(self) -> Address:
        if self._real is None:
            self._real, self._tls = _context(self.address.name)
        return self._real

    def _shell(self) -> Ssh:
        if self._ssh is None:
            self._ssh = Ssh(self._resolved(), self.name)
        return self._ssh

    def _engine_address(self) -> str:
        real = self._resolved()
        if real.kind == "local":
            return _local(self.name)
        if real.kind == "unix":
            _ping_socket(Path(real.path), self.name)
            return f"unix://{real.path}"
        if real.kind == "tcp":
            port = Tls(real.name.strip("[]"), real.port or 2376, _tls_context(self._tls, self.name))
            _ping_tls(port, self.name)
            self._tunnel = TlsTunnel(port)
        else:
            self._tunnel = CommandTunnel(self._shell().ping())
        return self._tunnel.address


class Ssh:
    """One connection of the user's `ssh` to a machine, which every command and every connection to the engine shares.

    Nothing is asked on the terminal (several machines are reached at once): keys come from files and the agent, and a
    host key that is not known is refused. Raises what `faults.ssh` says.
    """

    def __init__(self, address: Address, name: str) -> None:
        program = shutil.which("ssh")
        if program is None:
            raise UnreachableError("there is no `ssh` on this machine", where=name, hint="install OpenSSH's client")
        self.name = name
        self.login = faults.Login(address.name.strip("[]"), address.port, address.user)
        # As short as can be: ssh adds to it, and the path of a socket ends at 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="builder-"))
        self._options = [program, "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT}"]
        for option in (
            "ServerAliveInterval=10",
            "ServerAliveCountMax=3",
            "ClearAllForwardings=yes",
            "RemoteCommand=none",
        ):
            self._options += ["-o", option]
        self._options += ["-o", "PermitLocalCommand=no", "-o", f"ControlPath={self._folder}/c"]
        self._where = ["-l", address.user] if address.user else []
        self._where += ["-p", str(address.port)] if address.port else []
        # A name cannot start with `-` (Address), and `--` keeps ssh from looking.
        self._where += ["--", self.login.host]
        self._master: subprocess.Popen[bytes] | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        # `cat` ends when its input does: were we killed, nothing would stay behind.
        argv = [*self._options, "-o", "ControlMaster=yes", "-o", "ControlPersist=no", *self._where, "cat"]
        errors = self._folder / "errors"
        with errors.open("wb") as sink:
            self._master = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=sink, start_new_session=True
            )
        deadline = time.monotonic() + CONNECT + ANSWER
        while not (self._folder / "c").exists():
            if self._master.poll() is not None:
                raise faults.ssh(self.name, errors.read_text(encoding="utf-8", errors="replace"), self.login)
            if time.monotonic() > deadline:
                raise UnreachableError(
                    "the machine did not let us in in time",
                    where=self.name,
                    because=f"waited {CONNECT + ANSWER} s for `ssh`",
                    hint=f"try `ssh {self.login.words} true`",
                )
            time.sleep(0.02)

    def argv(self, *command: str) -> list[str]:
        """The command line that runs ``command`` there. It is words without quotes: the login shell reads them."""
        return [*self._options, "-o", "ControlMaster=no", *self._where, *command]

    def ping(self) -> list[str]:
        """The command line whose standard input and output are the engine, once it was seen to answer."""
        argv = self.argv(*DIAL)
        try:
            done = subprocess.run(
                argv, input=_PING, capture_output=True, timeout=ANSWER, start_new_session=True, check=False
            )
        except subprocess.TimeoutExpired:
            raise BuildError(
                "the Docker Engine does not answer",
                where=self.name,
                because=f"waited {ANSWER} s",
                hint="see that it runs",
            ) from None
        if b" 200 " not in done.stdout.split(b"\r\n", 1)[0]:
            raise faults.dial(
                self.name, done.returncode, (done.stderr or done.stdout).decode(errors="replace"), self.login
            )
        return argv

    def close(self) -> None:
        if self._master is not None:
            assert self._master.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._master.stdin.close()
            end(self._master, timeout=5)
        shutil.rmtree(self._folder, ignore_errors=True)


def shell_environment(address: Address) -> dict[str, str]:
    """For a shell of this machine: it finds the client that there is, which speaks to the engine that is meant."""
    environment = dict(os.environ)
    if engine := f"unix://{address.path}" if address.kind == "unix" else bootstrap.engine_host():
        environment["DOCKER_HOST"] = engine
    if client := bootstrap.find_program("docker"):
        environment["PATH"] = f"{environment.get('PATH', os.defpath)}:{Path(client).parent}"
    return environment


def _local(name: str) -> str:
    host = bootstrap.engine_host()
    if host is None:
        raise BuildError(
            "no Docker Engine answers",
            where=name,
            because=f"nothing listens on {bootstrap.DEFAULT_SOCKET} and DOCKER_HOST is not set",
            hint="start it, or name one: `--host unix:///path`",
        )
    if host.startswith("unix://"):
        _ping_socket(Path(host.removeprefix("unix://")), name)
    return host


def _ping_socket(path: Path, name: str) -> None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER)
            connection.connect(str(path))
            _answered(connection, name)
    except OSError as error:
        raise faults.engine_socket(name, error) from error


def _answered(connection: socket.socket, name: str) -> None:
    connection.sendall(_PING)
    if b" 200 " not in (first := connection.recv(4096)).split(b"\r\n", 1)[0]:
        raise BuildError(
            "what answers is no Docker Engine",
            where=name,
            because=f"it said {first[:60].decode(errors='replace')!r}",
            hint="see what listens there",
        )


def _tls_context(folder: Path | None, name: str) -> ssl.SSLContext:
    given = folder or (Path(value).expanduser() if (value := os.environ.get("DOCKER_CERT_PATH")) else None)
    if given is None:
        raise UsageError(
            "an engine behind TCP is reached with TLS only",
            where=name,
            because="DOCKER_CERT_PATH is not set",
            hint="set it to the folder with `ca.pem`, `cert.pem` and `key.pem`, or reach the machine by `ssh://`",
        )
    try:
        context = ssl.create_default_context(cafile=str(given / "ca.pem"))
        context.load_cert_chain(given / "cert.pem", given / "key.pem")
    except OSError as error:
        raise UsageError(
            "the files for TLS cannot be read",
            where=str(given),
            because=str(error),
            hint="`ca.pem`, `cert.pem` and `key.pem` have to be there, in PEM form",
        ) from error
    return context


def _ping_tls(target: Tls, name: str) -> None:
    try:
        with (
            socket.create_connection((target.host, target.port), timeout=CONNECT) as plain,
            target.context.wrap_socket(plain, server_hostname=target.host) as connection,
        ):
            connection.settimeout(ANSWER)
            _answered(connection, name)
    except OSError as error:
        raise faults.tls(name, error) from error


def _context(name: str) -> tuple[Address, Path | None]:
    """Where a Docker context leads, and the folder with its TLS files."""
    program = bootstrap.find_program("docker")
    where = f"context:{name}"
    if program is None:
        raise UsageError(
            "there is no Docker client on this machine", where=where, hint="contexts are its own: install it"
        )
    done = subprocess.run(
        [program, "context", "inspect", name],
        env=bootstrap.tool_environment(),
        capture_output=True,
        text=True,
        timeout=ANSWER,
        check=False,
    )
    if done.returncode:
        because = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise UsageError(
            f"there is no context `{name}`", where=where, because=because[0], hint="see `docker context ls`"
        )
    found = json.loads(done.stdout)[0]
    endpoint = found.get("Endpoints", {}).get("docker", {})
    leads = str(endpoint.get("Host", ""))
    address = Address.parse(leads)
    folder = Path(str(found.get("Storage", {}).get("TLSPath", ""))) / "docker"
    return address, folder if folder.is_dir() else None
