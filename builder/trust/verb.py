"""What `builder verify` does: which of four kinds of thing IMAGE is, and what is said beside the verdict."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from builder.errors import BuilderError, UsageError
from builder.files import pretty_size
from builder.lock import drift, read_lock
from builder.settings import Settings
from builder.trust.bundle import Progress, require_bundle, verify_bundle
from builder.trust.cosign import PublicKey, public_key
from builder.trust.verify import Verified, verify_engine, verify_layout, verify_remote


def named_key(option: str | None, site: Settings, name: Literal["key", "pub"]) -> Path | None:
    """The key file that the command line or the configuration (`key`, `pub`) names."""
    return Path(option).expanduser() if option else getattr(site, name)


def verify_image(
    image: str, site: Settings, *, pub: str | None = None, plain_http: bool = False, signed_as: str = ""
) -> Verified:
    """Verify a bundle (a file), an OCI layout (a folder), an image in a registry, or one of the local engine.

    Raises `UsageError` for what is none of them, and for a key where there is no signature; `UnreachableError`.
    """
    path = Path(image)
    if path.is_file():
        require_bundle(path)
        return verify_bundle(path, _public(pub, site), signed_as=signed_as, progress=progress("hashed"))
    if path.is_dir():
        return verify_layout(path, _public(pub, site), signed_as=signed_as)
    from builder.registry.client import RegistryClient
    from builder.registry.reference import Reference, is_registry

    first, slash, _ = image.partition("/")
    if not (slash and is_registry(first)):
        if pub or signed_as:
            raise UsageError(
                "an image of the engine has no signature to verify",
                where=image,
                because="engines do not keep what is attached to an image",
                hint="verify it where it came from, or its bundle; without `--pub` its labels, lock and contents are verified",
            )
        from builder.engine import connect

        return verify_engine(connect(), image)
    reference = Reference.parse(image)
    if not reference.tag and not reference.digest:
        raise UsageError(
            f"`{image}` names no image",
            because="it has neither a tag nor a digest",
            hint=f"write `{image}:MATRIX` or `{image}@sha256:…`",
        )
    client = RegistryClient(reference, site, plain_http)
    try:
        return verify_remote(client, reference.digest or reference.tag, _public(pub, site), signed_as=signed_as)
    finally:
        client.close()


def _public(option: str | None, site: Settings) -> PublicKey:
    return public_key(named_key(option, site, "pub"))


def compare(verified: Verified, matrices: Path) -> str:
    """A line on the lock of that matrix here, where it is another one; nothing where it is the same or there is none."""
    here = matrices / f"{verified.matrix}.lock.json"
    if verified.lock is None or not here.is_file():
        return ""
    try:
        lines = drift(read_lock(here), verified.lock)
    except BuilderError:
        return ""
    if not lines:
        return ""
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"note: the lock here, {here.name}, is another one than the image's: {lines[0]}{more}"


def progress(word: str) -> Progress:
    """Says on stderr how far a pass over a large file is: a bar where that is a terminal, else a line each tenth."""
    terminal = sys.stderr.isatty()
    shown = -1

    def report(done: int, total: int) -> None:
        nonlocal shown
        step = (100 if terminal else 10) * done // max(total, 1)
        if step == shown:
            return
        shown = step
        line = f"{word} {pretty_size(done)} of {pretty_size(total)}"
        print(f"\r{line:<60}" if terminal else line, end="" if terminal else "\n", file=sys.stderr, flush=True)
        if terminal and done >= total:
            print(file=sys.stderr)

    return report
