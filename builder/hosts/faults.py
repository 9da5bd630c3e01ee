"""What goes wrong between here and an engine elsewhere, in words: by what `ssh`, the client there or the system said.

`UnreachableError` where the machine is not reached or does not let us in, `BuildError` where its engine is the matter.
"""

from __future__ import annotations

import re
import ssl as _ssl
from dataclasses import dataclass

from builder.errors import BuilderError, BuildError, UnreachableError

# ssh says each thing in words of its own that have not changed in many releases (its `LogLevel` would hide none of them).
_SSH = (
    (
        r"Could not resolve hostname",
        "the machine's name is not known",
        "see the name, and `~/.ssh/config`, which may give it another",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|[Hh]ost key .* (?:has )?changed",
        "the machine's host key is another one than before",
        "find out why first: it may be another machine. Then `ssh-keygen -R {known}`, and look at the new key with `ssh {host}`",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "the machine's host key is not known",
        "look at it and accept it once: `ssh {host} true`",
    ),
    (
        r"Permission denied \(|Too many authentication failures|No supported authentication",
        "the machine refused every key",
        "see that `ssh -o BatchMode=yes {host} true` works; a key with a passphrase has to be in the agent: `ssh-add`",
    ),
    (r"Connection refused", "nothing answers to SSH on the machine", "see that its SSH server runs, and the port"),
    (
        r"timed out|Timeout|No route to host|Network is unreachable",
        "the machine is not reached",
        "see that it is up, and that this machine has a way to it",
    ),
)


@dataclass(frozen=True)
class Login:
    """A machine in the words that `ssh` takes, for commands that a user types."""

    host: str
    port: int | None = None
    user: str | None = None

    @property
    def words(self) -> str:
        """`-p 2222 ops@gpu2`: with a port in it a name is no word that ssh takes."""
        return (f"-p {self.port} " if self.port else "") + (f"{self.user}@" if self.user else "") + self.host

    @property
    def known(self) -> str:
        """As known_hosts has it: `[gpu2]:2222`."""
        return f"'[{self.host}]:{self.port}'" if self.port else self.host


def ssh(name: str, words: str, login: Login) -> UnreachableError:
    """The error for what `ssh` said when it ended by itself; ``name`` is the host's as the user gave it."""
    for pattern, what, hint in _SSH:
        if re.search(pattern, words):
            return UnreachableError(
                what, where=name, because=_last(words, pattern), hint=hint.format(host=login.words, known=login.known)
            )
    return UnreachableError(
        "`ssh` ended", where=name, because=_last(words) or "it said nothing", hint=f"try `ssh {login.words} true`"
    )


def dial(name: str, status: int, words: str, login: Login) -> BuilderError:
    """The error for a machine that is reached, and on which `docker system dial-stdio` ended with ``status``."""
    if status == 255:
        return ssh(name, words, login)
    if status == 127 or (re.search(r"not found|No such file or directory\s*$", words) and "dial unix" not in words):
        return BuildError(
            "there is no Docker client on the machine",
            where=name,
            because=_last(words),
            hint="its engine is reached through `docker system dial-stdio`: install Docker there, or put `docker` on the "
            "PATH of a login that is not interactive",
        )
    if "permission denied" in words.lower():
        return BuildError(
            "the user may not use the machine's Docker Engine",
            where=name,
            because=_last(words, "permission denied"),
            hint="on the machine: `sudo usermod -aG docker USER`, then log in again; or name a user who may: `ssh://USER@HOST`",
        )
    if re.search(r"[Cc]annot connect|connection refused|no such file", words):
        return BuildError(
            "the machine's Docker Engine does not answer",
            where=name,
            because=_last(words, "annot connect|refused|no such file"),
            hint="on the machine: `sudo systemctl start docker`",
        )
    return BuildError(
        "the machine's Docker Engine is not reached",
        where=name,
        because=_last(words) or f"`docker system dial-stdio` there ended with {status}",
        hint="on the machine: `docker version`",
    )


def engine_socket(name: str, error: OSError) -> BuildError:
    """The error for a socket of this machine that nothing useful listens on."""
    if isinstance(error, FileNotFoundError):
        return BuildError(
            "there is no Docker Engine",
            where=name,
            because="the socket does not exist",
            hint="start it, or see the path",
        )
    if isinstance(error, PermissionError):
        return BuildError(
            "this user may not use the Docker Engine",
            where=name,
            because=error.strerror or str(error),
            hint="`sudo usermod -aG docker $USER`, then log in again",
        )
    because = "nothing listens on the socket" if isinstance(error, ConnectionRefusedError) else str(error)
    return BuildError("the Docker Engine does not answer", where=name, because=because, hint="see that it runs")


def tls(name: str, error: OSError) -> BuilderError:
    """The error for a TCP port that does not lead to an engine."""
    if isinstance(error, _ssl.SSLCertVerificationError):
        return UnreachableError(
            "the engine's certificate is not one that we trust",
            where=name,
            because=error.verify_message,
            hint="its authority has to be in `ca.pem` of DOCKER_CERT_PATH, and the machine's name in the certificate",
        )
    if isinstance(error, _ssl.SSLError):
        return UnreachableError(
            "the engine refused the connection",
            where=name,
            because=str(error),
            hint="it has to speak TLS there and to trust `cert.pem` of DOCKER_CERT_PATH",
        )
    return UnreachableError(
        "the machine is not reached", where=name, because=str(error), hint="see that it is up, and the port"
    )


def _last(words: str, pattern: str = "") -> str:
    """The line that says it: the last that matches ``pattern``, else the last."""
    lines = [line.strip() for line in words.splitlines() if line.strip(" @\r")]
    said = [line for line in lines if pattern and re.search(pattern, line)]
    return (said or lines or [""])[-1][:300]
