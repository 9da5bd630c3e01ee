"""The `cosign` program: sign bytes with a key file, verify a layout in a folder. No network, no transparency log.

cosign is given files and gives back signatures; what it would fetch or upload goes through our own registry client. So
there is one place for credentials and authorities, and a bundle is verified as a registry's image is. Seen with cosign
2.5 (Debian 13).
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder import bootstrap
from builder.errors import BuildError, UsageError
from builder.files import sha256_hex

PASSWORD = "COSIGN_PASSWORD"
"""The variable with the private key's password; an empty one where it is not set, since nobody can be asked."""

TIMEOUT = 120
"""Seconds for one call, which takes less than one: what hangs is not waited for."""

_MAKE_ONE = "make a pair: `cosign generate-key-pair`"
_KEY_HINT = f"name one with `--key FILE`, or as `key` in the configuration; {_MAKE_ONE}"
_PUB_HINT = f"name one with `--pub FILE`, or as `pub` in the configuration; {_MAKE_ONE}"
_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----\s*(?P<body>[A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*\Z")


class CosignError(Exception):
    """cosign refused: its words, less what it says twice."""


@dataclass(frozen=True)
class PublicKey:
    """A public key. ``fingerprint`` is the sha256 of its DER form, in hexadecimal."""

    pem: str
    fingerprint: str


@dataclass(frozen=True)
class SigningKey:
    """A private key file of cosign's that was opened with the password at hand, and its public half."""

    path: Path
    public: PublicKey


def find_cosign() -> str:
    """The program: the system's, or the one in ``.tools``. Raises `BuildError` where there is none."""
    if (found := bootstrap.find_program("cosign")) is not None:
        return found
    raise BuildError(
        "`cosign` was not found",
        because="signatures are made and verified with it",
        hint="run `make tools`, which unpacks it on Debian 12 and 13; elsewhere put a cosign 2 on the PATH",
    )


def parse_public(text: str, where: str) -> PublicKey:
    """A public key from its PEM text. Raises `UsageError` for anything else."""
    found = _PEM.search(text)
    if found is None:
        secret = "PRIVATE KEY" in text
        raise UsageError(
            "the file is a private key" if secret else "the file is no public key",
            where=where,
            because="" if secret else "it holds no `BEGIN PUBLIC KEY`",
            hint="its public half lies beside it: `cosign.pub`" if secret else _PUB_HINT,
        )
    try:
        der = base64.b64decode("".join(found["body"].split()), validate=True)
    except binascii.Error as error:
        raise UsageError("the public key is damaged", where=where, because=str(error)) from error
    return PublicKey(text, sha256_hex(der))


def public_key(path: Path | None) -> PublicKey:
    """The key to verify with. Raises `UsageError` where there is none, or the file is no public key."""
    if path is None:
        raise UsageError("no public key is named", because="a signature is worth what its key is", hint=_PUB_HINT)
    return parse_public(_text(path, "public key", _PUB_HINT), str(path))


def signing_key(path: Path | None) -> SigningKey:
    """The key to sign with, opened once. Raises `UsageError` where there is none, or its password does not fit."""
    if path is None:
        raise UsageError("no key is named to sign with", hint=_KEY_HINT)
    if "PRIVATE KEY" not in _text(path, "key", _KEY_HINT):
        raise UsageError("the file is no private key", where=str(path), hint=_KEY_HINT)
    try:
        pem = _cosign("public-key", "--key", str(path.absolute()))
    except CosignError as error:
        wrong = "decryption failed" in str(error)
        raise UsageError(
            "the key's password is wrong" if wrong else "the key cannot be used",
            where=str(path),
            because=f"{PASSWORD} is {'set' if os.environ.get(PASSWORD) else 'not set'}" if wrong else str(error),
            hint=f"set {PASSWORD} to the password that the key was made with" if wrong else _KEY_HINT,
        ) from error
    return SigningKey(path, parse_public(pem.decode(), str(path)))


def sign(key: SigningKey, data: bytes) -> str:
    """The signature of `data`, in base64. Two of the same bytes differ, since ECDSA takes a random number."""
    with tempfile.TemporaryDirectory(prefix="builder-sign-") as folder:
        file = Path(folder) / "data"
        file.write_bytes(data)
        try:
            made = _cosign("sign-blob", "--key", str(key.path.absolute()), "--tlog-upload=false", "--yes", str(file))
        except CosignError as error:
            raise BuildError("cosign could not sign", where=str(key.path), because=str(error)) from error
    return made.decode().strip()


def verify_signatures(layout: Path, key: PublicKey) -> list[dict[str, Any]]:
    """The payloads of all signatures in a layout that the key made for its image. Raises `CosignError` where there is none."""
    found = json.loads(_verify("verify", layout, key))
    return [item for item in found if isinstance(item, dict)]


def verify_attestations(layout: Path, key: PublicKey, kind: str) -> list[dict[str, Any]]:
    """The statements of a predicate type (a name of cosign's, `cyclonedx`) that the key signed for a layout's image.

    Raises `CosignError` where there is none.
    """
    envelopes = _verify("verify-attestation", layout, key, "--type", kind).splitlines()
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in envelopes if line.strip()]


def _verify(verb: str, layout: Path, key: PublicKey, *options: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="builder-verify-") as folder:
        # The text that the fingerprint is of, not the file again: it may be another by now.
        file = Path(folder) / "cosign.pub"
        file.write_text(key.pem, encoding="utf-8")
        common = ("--key", str(file), "--insecure-ignore-tlog=true", "--local-image")
        return _cosign(verb, *common, *options, str(layout))


def _cosign(*arguments: str) -> bytes:
    environment = {**os.environ, PASSWORD: os.environ.get(PASSWORD, "")}
    try:
        done = subprocess.run(
            [find_cosign(), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CosignError(f"cosign {arguments[0]} did not end within {TIMEOUT} seconds") from None
    if done.returncode:
        raise CosignError(_words(done.stderr.decode(errors="replace"), done.returncode))
    return done.stdout


def _words(stderr: str, status: int) -> str:
    """What cosign says went wrong: everything after `Error: `, up to where it says it again."""
    text = stderr.split("error during command execution:")[0]
    _, mark, words = text.partition("Error: ")
    kept: list[str] = []
    for line in (line.strip() for line in (words if mark else text).splitlines()):
        if line and not line.startswith("WARNING") and not any(line in other for other in kept):
            kept.append(line)
    said = "; ".join(kept)
    return said[:500] or f"cosign ended with {status}"


def _text(path: Path, what: str, hint: str) -> str:
    try:
        data = path.open("rb").read(1 << 16)
        return data.decode()
    except FileNotFoundError:
        raise UsageError(f"there is no such {what} file", where=str(path), hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the {what} cannot be read", where=str(path), because=str(error)) from error
