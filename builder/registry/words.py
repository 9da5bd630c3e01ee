"""What goes wrong between an engine, us and a registry, in words: by what the engine or the HTTP client said.

`UnreachableError` (5) where the registry is the matter, `BuildError` (6) where the engine or its disk is, `IntegrityError`
(7) where bytes are not what their digest says. The engines' words are those of Docker Engine 26.1 (both stores), seen with
a registry that was killed, stopped, tampered with, and with a full disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from builder.errors import BuilderError, BuildError, IntegrityError, UnreachableError
from builder.settings import redact


@dataclass(frozen=True)
class Case:
    """A failure that is known. ``again`` says that it may be gone in a moment; hints are for the engine's and our own requests."""

    pattern: str
    error: type[BuilderError]
    what: str
    engine_hint: str
    own_hint: str = ""
    again: bool = False


# Most telling first: an engine wraps one message in another.
_CASES = (
    Case(
        r"no space left on device|disk quota exceeded",
        BuildError,
        "the engine's disk is full",
        "free space there: `docker system df`, `builder prune --yes`; layers that were whole before are kept for the next try",
    ),
    Case(
        r"filesystem layer verification failed|verification failed for digest|unexpected commit digest|failed commit on ref"
        r"|image config verification failed|manifest verification failed|layers from manifest don't match"
        r"|failed size validation|invalid checksum|gzip: invalid|flate: corrupt|invalid tar header|archive/tar: |unexpected diffid"
        r"|magic number mismatch|corrupted block",
        IntegrityError,
        "a layer is not what its digest says",
        "the registry's storage is damaged or was tampered with: delete the blob there and push the image again",
    ),
    Case(
        r"x509|certificate|CERTIFICATE_VERIFY_FAILED|tls: (?:failed|bad|unknown)",
        UnreachableError,
        "the registry's certificate is not one that is trusted",
        "the engine reads the site's authority from `/etc/docker/certs.d/{registry}/ca.crt` on its machine",
        "name the site's authority: `ca` in config.toml, or BUILDER_CA",
    ),
    Case(
        r"server gave HTTP response to HTTPS client|WRONG_VERSION_NUMBER|wrong version number|first record does not look like a TLS",
        UnreachableError,
        "the registry speaks plain HTTP",
        "the engine has to be told: `\"insecure-registries\": [\"{registry}\"]` in its daemon.json",
        "`--plain-http` allows it",
    ),
    Case(
        r"denied|unauthorized|authentication required|no basic auth credentials|insufficient_scope|authorization failed"
        r"|403 Forbidden|401 Unauthorized",
        UnreachableError,
        "the registry does not let us in",
        "`docker login {registry}`, with a user who may do this in `{repository}`",
    ),
    Case(
        r"manifest unknown|manifest for .* not found|name unknown|MANIFEST_UNKNOWN|NAME_UNKNOWN|: not found",
        UnreachableError,
        "the registry has no such image",
        "see what it has: the tags are MATRIX-<first 12 of the lock digest>; put it there with `builder push`",
    ),
    Case(
        r"blob unknown|BLOB_UNKNOWN|unknown blob",
        IntegrityError,
        "the registry lacks a layer of the image",
        "its storage lost a blob: push the image again",
    ),
    Case(
        r"no such host|[Nn]ame or service not known|[Nn]ame resolution|Failed to resolve|server misbehaving",
        UnreachableError,
        "the registry's name is not known",
        "see the name, and the name service of the engine's machine",
        "see the name",
        again=True,
    ),
    Case(
        r"connection refused|Connection refused",
        UnreachableError,
        "nothing answers at the registry's address",
        "see that the registry runs, and the port",
        again=True,
    ),
    Case(
        r"timeout|[Tt]imed out|deadline exceeded|no route to host|network is unreachable|Network is unreachable",
        UnreachableError,
        "the registry does not answer in time",
        "see that it is up, and that the engine's machine has a way to it (proxies: the engine's own configuration)",
        "see that it is up; proxies are read from `https_proxy` and `no_proxy`",
        again=True,
    ),
    Case(
        r"toomanyrequests|Too Many Requests|\b429\b",
        UnreachableError,
        "the registry wants fewer requests",
        "wait, or `docker login {registry}` for a higher limit",
        again=True,
    ),
    Case(
        r"EOF|connection reset|[Cc]onnection aborted|RemoteDisconnected|broken pipe|use of closed network|IncompleteRead|blob upload"
        r"|IncompleteBody|ConnectionReset|\b50[0234]\b|http2|short read|short copy",
        UnreachableError,
        "the registry broke the connection off",
        "the same command goes on: what arrived whole is kept",
        again=True,
    ),
)  # fmt: skip


def _case(text: str) -> Case | None:
    return next((case for case in _CASES if re.search(case.pattern, text)), None)


def worth_again(text: str) -> bool:
    """Whether what an engine said is something that may be gone in a moment."""
    case = _case(text)
    return case is not None and case.again


def engine_said(text: str, where: str, *, engine: str) -> BuilderError:
    """The error for what an engine said of a push or pull of ``where`` (REGISTRY/NAME…)."""
    case = _case(text)
    because = redact(text).strip()[:500]
    if case is None:
        return BuildError("the Docker Engine refused", where=f"{engine}, {where}", because=because)
    registry, _, repository = re.sub(r"[@:][^/]*\Z", "", where).partition("/")
    hint = case.engine_hint.format(registry=registry, repository=repository)
    place = engine if case.error is BuildError else where
    return case.error(case.what, where=place, because=because, hint=hint)


def engine_gone(text: str, engine: str) -> BuildError:
    """The error for an engine that stopped answering in the middle."""
    return BuildError(
        "the Docker Engine went away",
        where=engine,
        because=redact(text).strip()[:300],
        hint="start it again; then the same command goes on, and what it had whole is kept",
    )


def unreachable(text: str, where: str) -> BuilderError:
    """The error for a request of our own that failed below HTTP."""
    case = _case(text)
    because = _core(redact(text))
    if case is None or not issubclass(case.error, UnreachableError):
        return UnreachableError("the registry does not answer", where=where, because=because)
    registry, _, repository = where.partition("/")
    hint = (case.own_hint or case.engine_hint).format(registry=registry, repository=repository)
    return UnreachableError(case.what, where=where, because=because, hint=hint)


def _core(text: str) -> str:
    """The innermost words of urllib3's nested messages."""
    inner = re.findall(r"(?:\[Errno -?\d+\] |\[SSL: \w+\] )[^'\")]+", text)
    # Which line of Python said so is of no use to anybody.
    return re.sub(r" \(_ssl\.c:.*", "", inner[-1] if inner else text).strip()[:300]
