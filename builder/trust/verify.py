"""Is this image what it is called? Signature, digest, labels, lock, SBOM, provenance and contents, in this order.

What fails stops what rests on it, and nothing else: of an image that is not signed no file is opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from builder.errors import IntegrityError, UsageError
from builder.labels import LABEL
from builder.lock import Lock
from builder.trust import material
from builder.trust.attach import Client
from builder.trust.checks import Failed, NotMade, Run
from builder.trust.cosign import PublicKey
from builder.trust.layout import FormError, digest_of
from builder.trust.material import Material
from builder.trust.proof import engine_proof

if TYPE_CHECKING:
    from builder.engine import Engine

CHECKS: Final = ("signature", "digest", "labels", "lock", "sbom", "provenance", "contents", "stand-in")

RESTS_ON: Final = {
    "labels": ("digest",),
    "lock": ("signature", "digest", "labels"),
    "sbom": ("signature", "lock"),
    "provenance": ("signature", "lock"),
    "contents": ("signature", "lock"),
    "stand-in": ("digest",),
}
"""A check is not made where one of these failed."""


@dataclass(frozen=True)
class Check:
    """``ok`` is None for what was not looked at: it does not apply, or a check that it rests on failed."""

    name: str
    ok: bool | None
    detail: str
    hint: str = ""

    def __str__(self) -> str:
        state = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        return f"{state:<6}  {self.name:<10}  {self.detail}"


@dataclass(frozen=True)
class Verified:
    """The outcome. ``image`` is the config digest (an engine's own id), ``digest`` the manifest's, "" where there is none."""

    reference: str
    image: str
    digest: str
    checks: tuple[Check, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    lock: Lock | None = None
    manifest: bytes = b""
    config: bytes = b""
    key: str = ""
    """The fingerprint of the key that it was verified with."""

    @property
    def ok(self) -> bool:
        """Whether no check failed. Of an image of an engine that says nothing of who made it: see ``signed``."""
        return all(check.ok is not False for check in self.checks)

    @property
    def signed(self) -> bool:
        """Whether a signature was verified."""
        return any(check.name == "signature" and check.ok for check in self.checks)

    @property
    def matrix(self) -> str:
        return self.labels.get(f"{LABEL}.matrix", "")

    def as_json(self) -> dict[str, Any]:
        """The shape `verify` of docs/distribution.md."""
        return {
            "ok": self.ok,
            "image": self.image,
            "reference": self.reference,
            "digest": self.digest,
            "key": self.key,
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in self.checks],
        }

    def as_text(self) -> str:
        """The verdict, then a line for each check."""
        if not self.ok:
            verdict = "NOT VERIFIED"
        else:
            verdict = "verified" if self.signed else "consistent; it has no signature, so who made it was not verified"
        return "\n".join([f"{self.reference}: {verdict}", *(f"  {check}" for check in self.checks)])

    def require(self) -> Self:
        """Itself. Raises `IntegrityError` with every check where one failed."""
        failed = [check for check in self.checks if check.ok is False]
        if not failed:
            return self
        at = f"{self.reference}, {self.digest}" if self.digest and self.digest not in self.reference else self.reference
        raise IntegrityError(
            f"the image is not verified: {', '.join(check.name for check in failed)}",
            where=at,
            because="\n".join([*(f"{check.name}: {check.detail}" for check in failed), *self._others()]),
            hint=failed[0].hint,
        )

    def _others(self) -> list[str]:
        """The states of the checks that did not fail."""
        lines = []
        for words, ok in (("passed", True), ("not looked at", None)):
            names = [check.name for check in self.checks if check.ok is ok]
            lines += [f"{words}: {', '.join(names)}"] if names else []
        return lines


def verify_remote(
    client: Client, reference: str, pub: PublicKey, *, lock: Lock | None = None, signed_as: str = ""
) -> Verified:
    """Verify `reference` (a tag or digest) in a registry. Fetches manifests, config, attachments and the proof layer only.

    With `lock`, an image of another lock fails. ``signed_as`` is the REGISTRY/NAME that the signature has to name where
    the image was copied from there. Raises `UnreachableError` where there is no such image, or no answer.
    """
    return examine(material.remote(client, reference), pub, lock=lock, signed_as=signed_as or client.name)


def verify_layout(folder: Path, pub: PublicKey, *, lock: Lock | None = None, signed_as: str = "") -> Verified:
    """Verify an OCI layout with what cosign attached, as `cosign save` writes it; its layers but the last are not read."""
    return examine(material.layout(folder), pub, lock=lock, signed_as=signed_as)


def verify_engine(engine: Engine, reference: str, *, lock: Lock | None = None) -> Verified:
    """Verify an image of an engine, which keeps no signatures: labels, lock and contents.

    Raises `UsageError` where there is none.
    """
    image = engine.find(reference)
    if image is None:
        hint = "an image in a registry is REGISTRY/NAME:TAG, with a dot or port in REGISTRY"
        raise UsageError(f"there is no image `{reference}`", where=engine.host, hint=hint)
    found = Material(
        shown=reference,
        digest="",
        manifest=b"",
        config=b"",
        proof=lambda: engine_proof(engine, image.id),
        signed=False,
        labels=image.labels,
        image=image.id,
    )
    return examine(found, None, lock=lock)


def examine(found: Material, pub: PublicKey | None, *, lock: Lock | None = None, signed_as: str = "") -> Verified:
    """Make every check on what was found. Without `pub` there must be nothing that could be signed."""
    with tempfile.TemporaryDirectory(prefix="builder-verify-") as folder:
        run = Run(found, pub, Path(folder) / "layout", lock, signed_as)
        outcomes: dict[str, Check] = {}
        for name in CHECKS:
            failed = [other for other in RESTS_ON.get(name, ()) if outcomes[other].ok is False]
            # What rests on what was not looked at for a failure's sake is not looked at either.
            failed += [o for o in RESTS_ON.get(name, ()) if outcomes[o].detail.startswith("not looked at: ")]
            if failed:
                root = next((o for o in failed if outcomes[o].ok is False), "")
                why = f"`{root}` failed" if root else outcomes[failed[0]].detail.removeprefix("not looked at: ")
                outcomes[name] = Check(name, None, f"not looked at: {why}")
                continue
            outcomes[name] = _made(name, getattr(run, f"check_{name.replace('-', '_')}"))
    return Verified(
        reference=found.shown,
        image=found.image or (digest_of(found.config) if found.config else ""),
        digest=found.digest,
        checks=tuple(outcomes[name] for name in CHECKS),
        labels=run.labels,
        lock=run.proven.lock if run.proven is not None else None,
        manifest=found.manifest,
        config=found.config,
        key=pub.fingerprint if pub is not None and found.signed else "",
    )


def _made(name: str, check: Callable[[], str]) -> Check:
    try:
        return Check(name, True, check())
    except Failed as failure:
        return Check(name, False, str(failure), failure.hint)
    except FormError as error:
        return Check(name, False, str(error))
    except NotMade as nothing:
        return Check(name, None, str(nothing))
