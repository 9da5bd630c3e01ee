"""Signature, SBOM and provenance of an image as cosign attaches them: two small images beside it in the registry."""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from builder.errors import IntegrityError
from builder.files import canonical_json
from builder.matrix import LoadedMatrix
from builder.trust.cosign import CosignError, PublicKey, SigningKey, sign, verify_attestations, verify_signatures
from builder.trust.layout import (
    ENVELOPE,
    MANIFEST,
    SIGNATURE,
    SIGNATURE_ANNOTATION,
    SMALL,
    Attachment,
    FormError,
    Manifest,
    digest_of,
    load,
    make_attachment,
    parse_manifest,
    small_layout,
    tag_of,
)
from builder.trust.proof import Licences, Proof, engine_proof, licences
from builder.trust.provenance import provenance
from builder.trust.sbom import components, sbom

if TYPE_CHECKING:
    from builder.engine import Engine

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT: Final = "https://in-toto.io/Statement/v1"
PREDICATES: Final = {"cyclonedx": "https://cyclonedx.org/bom", "slsaprovenance1": "https://slsa.dev/provenance/v1"}
"""Predicate types by the names that cosign's `--type` has for them."""

MAX_BLOBS: Final = 64
"""Signatures or attestations of one image that are looked at, of `MAX_BYTES` together."""

MAX_BYTES: Final = 4 * SMALL


class Client(Protocol):
    """What is used of `builder.registry.client.RegistryClient`. A reference is a tag or a digest `sha256:…`.

    Every method raises `UnreachableError` where the registry does not answer or refuses.
    """

    @property
    def name(self) -> str:
        """REGISTRY/NAME."""

    def manifest(self, reference: str) -> tuple[bytes, str] | None:
        """The manifest's bytes, as they came, and its media type; None where there is none."""

    def blob(self, digest: str, limit: int = ...) -> bytes:
        """A small blob; raises `IntegrityError` where it is larger than `limit` bytes or not what its digest says."""

    def put_blob(self, data: bytes) -> str:
        """Upload a small blob unless it is there; its digest."""

    def put_manifest(self, reference: str, data: bytes, media_type: str) -> str:
        """Upload a manifest under a tag or its digest; its digest."""


@dataclass(frozen=True)
class Subject:
    """The image that is spoken of. ``manifest`` and ``config`` are bytes as pushed; ``name`` is what the signature is for.

    ``name`` is REGISTRY/NAME, without tag. ``rendered`` is the inputs digest that this checkout gives for the matrix.
    """

    loaded: LoadedMatrix
    proof: Proof
    manifest: bytes
    config: bytes
    name: str
    rendered: str = ""
    licences: Licences | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        return labels_of(self.config)


def subject(
    engine: Engine,
    image: str,
    loaded: LoadedMatrix,
    manifest: bytes,
    config: bytes,
    name: str,
    rendered: str = "",
) -> Subject:
    """The subject for an image that an engine has: its proof and its packages' licences are read out of it.

    Raises `IntegrityError` for an image without a proof, `BuildError` where the engine cannot say.
    """
    try:
        proof = engine_proof(engine, image)
    except FormError as error:
        raise IntegrityError(
            "the image has no proof that can be read",
            where=image,
            because=str(error),
            hint=f"build it again: `builder build {loaded.matrix.name}`",
        ) from error
    return Subject(loaded, proof, manifest, config, name, rendered, licences(engine, image, label="sglang-stack"))


@dataclass(frozen=True)
class Attachments:
    """All that is attached to one image."""

    manifest: bytes
    config: bytes
    signature: Attachment
    attestations: Attachment
    sbom: bytes
    provenance: bytes
    public: PublicKey

    def as_json(self) -> dict[str, Any]:
        """`sbom`, `provenance` and `signature` of docs/distribution.md.

        The digests of the first two are those of the documents, as canonical JSON; that of the signature is its manifest's.
        """
        return {
            "sbom": {"digest": digest_of(self.sbom), "components": components(json.loads(self.sbom))},
            "provenance": {"digest": digest_of(self.provenance)},
            "signature": {"digest": self.signature.digest, "key": self.public.fingerprint},
        }


def attachments(said: Subject, key: SigningKey) -> Attachments:
    """Make and sign what is attached to an image; touches no network. Raises `BuildError` where cosign cannot sign."""
    digest = digest_of(said.manifest)
    bill = sbom(said.proof, digest_of(said.config), said.labels, said.licences)
    origin = provenance(said.loaded, said.proof, said.labels, rendered=said.rendered)
    claim = payload(said.name, digest)
    signature = make_attachment(tag_of(digest, "sig"), SIGNATURE, [(claim, {SIGNATURE_ANNOTATION: sign(key, claim)})])
    envelopes: list[tuple[bytes, Mapping[str, str]]] = []
    for kind, predicate in (("cyclonedx", bill), ("slsaprovenance1", origin)):
        envelope = _envelope(statement(said.name, digest, kind, predicate), key)
        # cosign looks for an annotation of this name on every entry; the signatures are inside of the envelope.
        envelopes.append((envelope, {SIGNATURE_ANNOTATION: "", "predicateType": PREDICATES[kind]}))
    attested = make_attachment(tag_of(digest, "att"), ENVELOPE, envelopes)
    return Attachments(
        said.manifest, said.config, signature, attested, canonical_json(bill), canonical_json(origin), key.public
    )


def payload(name: str, digest: str) -> bytes:
    """What a signature is over: cosign's "simple signing" claim that an image of this name has this digest."""
    critical = {
        "identity": {"docker-reference": name},
        "image": {"docker-manifest-digest": digest},
        "type": "cosign container image signature",
    }
    return canonical_json({"critical": critical, "optional": None})


def statement(name: str, digest: str, kind: str, predicate: Mapping[str, Any]) -> bytes:
    """An in-toto statement v1 about the image."""
    about = [{"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}]
    said = {"_type": STATEMENT, "subject": about, "predicateType": PREDICATES[kind], "predicate": predicate}
    return canonical_json(said)


def _envelope(body: bytes, key: SigningKey) -> bytes:
    """A DSSE envelope: what is signed is the type and the body with their lengths (DSSE v1, "PAE")."""
    kind = PAYLOAD_TYPE.encode()
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(body), body)
    return canonical_json(
        {
            "payload": base64.b64encode(body).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": sign(key, signed)}],
        }
    )


def attach(client: Client, made: Attachments) -> Attachments:
    """Upload: blobs first, then the manifests at their tags; what is there afterwards.

    What is attached already stays, whoever signed it. What the same key said before in the same words is not said again,
    so that a push that is repeated changes nothing.
    """
    signature, attested = (fetch_attachment(client, new.tag) for new in (made.signature, made.attestations))
    with tempfile.TemporaryDirectory(prefix="builder-attached-") as folder:
        layout = Path(folder) / "layout"
        small_layout(layout, made.manifest, made.config, signature, attested)
        said = _said_already(layout, made.public, signature, attested)
    signature = _joined(signature, made.signature, said)
    attested = _joined(attested, made.attestations, said)
    for whole in (signature, attested):
        for data in whole.blobs.values():
            client.put_blob(data)
        client.put_manifest(whole.tag, whole.manifest, MANIFEST)
    return replace(made, signature=signature, attestations=attested)


def _said_already(
    layout: Path, key: PublicKey, signature: Attachment | None, attested: Attachment | None
) -> set[bytes]:
    """The claims and statements that the key has signed, in canonical JSON."""
    found: list[dict[str, Any]] = []
    # cosign 2.5 breaks down over a layout without attestations.
    if signature is not None:
        with contextlib.suppress(CosignError):
            found += verify_signatures(layout, key)
    if attested is not None:
        for kind in PREDICATES:
            with contextlib.suppress(CosignError):
                found += verify_attestations(layout, key, kind)
    return {canonical_json(item) for item in found}


def _joined(old: Attachment | None, new: Attachment, said: set[bytes]) -> Attachment:
    """What is there and what is new, the latest `MAX_BLOBS` of it."""
    fresh = [(item, data) for item, data in new.entries if _about(data) not in said]
    if old is None:
        return new
    if not fresh:
        return old
    entries = [*old.entries, *fresh][-MAX_BLOBS:]
    kind = parse_manifest(new.manifest).layers[0].media_type
    return make_attachment(new.tag, kind, [(data, item.annotations) for item, data in entries])


def fetch_attachment(client: Client, tag: str) -> Attachment | None:
    """What is attached at a tag, its blobs too; None where there is nothing.

    Raises `IntegrityError` for what is none of cosign's, or too much of it.
    """
    found = client.manifest(tag)
    if found is None:
        return None
    try:
        manifest = attachment_manifest(found[0])
    except FormError as error:
        raise IntegrityError(
            "what is attached to the image cannot be read", where=f"{client.name}:{tag}", because=str(error)
        ) from error
    blobs = {item.digest: client.blob(item.digest, item.size) for item in (*manifest.layers, manifest.config)}
    return Attachment(tag, found[0], blobs)


def attachment_manifest(data: bytes) -> Manifest:
    """The manifest of what is attached to an image. Raises `FormError` where it is none, or names more than is looked at."""
    manifest = parse_manifest(data)
    if len(manifest.layers) > MAX_BLOBS:
        raise FormError(f"it has {len(manifest.layers)} entries, more than {MAX_BLOBS}")
    if (size := sum(item.size for item in (*manifest.layers, manifest.config))) > MAX_BYTES:
        raise FormError(f"its entries have {size:,} bytes, more than {MAX_BYTES:,}")
    return manifest


def _about(data: bytes) -> bytes:
    """What an entry says, without who signed it: a claim, or an envelope's body."""
    try:
        return base64.b64decode(load(data)["payload"])
    except (ValueError, KeyError, TypeError):
        return data


def labels_of(config: bytes) -> dict[str, str]:
    """The labels in an image's config. Raises `FormError`."""
    inner = load(config).get("config")
    labels = inner.get("Labels") if isinstance(inner, dict) else None
    if labels is None:
        return {}
    if not isinstance(labels, dict) or not all(isinstance(value, str) for value in labels.values()):
        raise FormError("the config's labels are no texts")
    return labels
