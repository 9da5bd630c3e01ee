"""A real SSH server on loopback, with throw-away keys, whose logins reach an engine of the test.

    with Sshd(tmp_path / "ssh", f"unix:///…") as sshd, sshd.client():
        Host.parse("ssh://gpu1").engine()            # by the alias that the client's own configuration has

OpenSSH reads the home folder out of the password database and no variable: what stands before `ssh` on the PATH here is a
script that adds `-F` with the test's configuration. The server is OpenSSH's own, the system's or unpacked from the archive;
root only, since it changes the user. It sees a password database with one more user, `sshd`, in a mount namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from builder import bootstrap
from builder.archive import Archive
from tests.image.engines import free_port

_RUN = Path("/run/sshd")
_NOBODY = "sshd:x:64999:65534::/run/sshd:/usr/sbin/nologin\n"
_START = 'mount --bind "$1" /etc/passwd && shift && exec "$@"'


def sshd_program(folder: Path) -> tuple[str, str]:
    """The path of `sshd` and its library path; unpacked below ``folder`` where the system has none."""
    if (found := bootstrap.find_program("sshd")) is not None:
        return found, bootstrap.library_path()
    archive = Archive()
    archive.unpack(archive.missing(["openssh-server"]), target=folder)
    libraries = [folder / "lib/x86_64-linux-gnu", folder / "usr/lib/x86_64-linux-gnu"]
    return str(folder / "usr/sbin/sshd"), ":".join(str(path) for path in libraries)


class Sshd:
    """The server, for one user: this one. A context manager."""

    def __init__(self, folder: Path, docker_host: str, *, program: tuple[str, str], environment: str = "") -> None:
        self.folder, self.port = folder, free_port()
        self._program, self._libraries = program
        self._set = f'SetEnv DOCKER_HOST="{docker_host}" {environment}'
        self._process: subprocess.Popen[bytes] | None = None
        self._made = False

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True)
        for name in ("host", "user", "other"):
            keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(keygen, check=True)
        shutil.copy(self.folder / "user.pub", self.folder / "authorized")
        (self.folder / "passwd").write_text(Path("/etc/passwd").read_text(encoding="utf-8") + _NOBODY)
        lines = [f"Port {self.port}", "ListenAddress 127.0.0.1", f"HostKey {self.folder}/host", self._set]
        lines += [f"AuthorizedKeysFile {self.folder}/authorized", "StrictModes no", "UsePAM no", "PidFile none"]
        lines += ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "PermitRootLogin prohibit-password"]
        (self.folder / "sshd_config").write_text("\n".join(lines) + "\n")
        self.known(self.folder / "host.pub")
        self._made = not _RUN.exists()
        _RUN.mkdir(exist_ok=True)
        self.start()
        return self

    def start(self) -> None:
        """Start it and wait until it listens."""
        argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _START, "sh", str(self.folder / "passwd")]
        argv += [self._program, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        environment = {**os.environ, "LD_LIBRARY_PATH": self._libraries}
        with (self.folder / "sshd.log").open("ab") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        while "Server listening" not in self.log:
            assert self._process.poll() is None, self.log
            time.sleep(0.05)

    @property
    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(encoding="utf-8", errors="replace")

    def known(self, key: Path) -> None:
        """Make ``key`` (a public one) the host key that the client knows."""
        kind, value = key.read_text().split()[:2]
        (self.folder / "known_hosts").write_text(f"[127.0.0.1]:{self.port} {kind} {value}\n")

    @contextlib.contextmanager
    def client(self, key: str = "user") -> Iterator[None]:
        """`ssh` is one that knows this server as `gpu1`, and as any other name that resolves, with that key."""
        folder = self.folder / f"client-{key}"
        folder.mkdir(exist_ok=True)
        config = folder / "config"
        config.write_text(
            f"Host gpu1\n  HostName 127.0.0.1\n  Port {self.port}\nHost *\n  IdentityFile {self.folder}/{key}\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {self.folder}/known_hosts\n"
            "  GlobalKnownHostsFile /dev/null\n"
        )
        real = shutil.which("ssh")
        assert real is not None, "the tests need OpenSSH's client"
        script = folder / "ssh"
        script.write_text(f'#!/bin/sh\nexec {real} -F {config} "$@"\n')
        script.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
            yield

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)
        if self._made:
            with contextlib.suppress(OSError):
                _RUN.rmdir()
