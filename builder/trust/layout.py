"""Manifests, descriptors and small OCI layouts in a folder: what cosign reads, and what it attached.

Everything read here may come from anybody: sizes are bounded and every digest is computed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from builder.errors import IntegrityError
from builder.files import canonical_json, sha256_hex

MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
INDEX: Final = "application/vnd.oci.image.index.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
DOCKER_MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST: Final = "application/vnd.docker.distribution.manifest.list.v2+json"
SIGNATURE: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
ENVELOPE: Final = "application/vnd.dsse.envelope.v1+json"
SIGNATURE_ANNOTATION: Final = "dev.cosignproject.cosign/signature"

KINDS: Final = {
    "image": "dev.cosignproject.cosign/image",
    "sigs": "dev.cosignproject.cosign/sigs",
    "atts": "dev.cosignproject.cosign/atts",
}
"""The annotations by which `cosign save` and `--local-image` tell the images of a layout apart."""

SMALL = 16 << 20
"""Bytes of the largest manifest, config, payload or attestation that is looked at; an SBOM of 300 packages has 0.5 MB."""

MAX_LAYERS = 200
"""Layers of an image; engines allow 127."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class FormError(ValueError):
    """What was read is not what it would have to be; the words say what it is."""


def digest_of(data: bytes) -> str:
    """`sha256:…`."""
    return f"sha256:{sha256_hex(data)}"


def is_digest(value: object) -> bool:
    """Whether it is `sha256:` and 64 hexadecimal digits."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def tag_of(digest: str, suffix: str) -> str:
    """The tag at which cosign keeps what belongs to an image: `sha256-….sig`, `sha256-….att`."""
    return f"{digest.replace(':', '-')}.{suffix}"


@dataclass(frozen=True)
class Descriptor:
    """A blob as a manifest names it; ``size`` in bytes."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        noted = {"annotations": dict(self.annotations)} if self.annotations else {}
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size, **noted}


@dataclass(frozen=True)
class Manifest:
    """An image manifest."""

    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


def is_list(data: bytes, media_type: str = "") -> bool:
    """Whether a manifest is a list of images, by what the registry says of it or by what is in it."""
    try:
        parsed = load(data)
    except FormError:
        return media_type in (INDEX, DOCKER_LIST)
    return (
        media_type in (INDEX, DOCKER_LIST) or parsed.get("mediaType") in (INDEX, DOCKER_LIST) or "manifests" in parsed
    )


def load(data: bytes) -> dict[str, Any]:
    """A JSON object of at most `SMALL` bytes, each key once. Raises `FormError`."""
    if len(data) > SMALL:
        raise FormError(f"it has {len(data):,} bytes, more than {SMALL:,}")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Two readers of `{"a": 1, "a": 2}` may see two things; what is signed is read by several.
        if len({key for key, _ in pairs}) != len(pairs):
            raise FormError("a key is there twice")
        return dict(pairs)

    try:
        value = json.loads(data, object_pairs_hook=once)
    except RecursionError:
        raise FormError("it is nested too deep") from None
    except FormError:
        raise
    except ValueError as error:
        raise FormError(f"it is no JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict):
        raise FormError("it is no JSON object")
    return value


def parse_manifest(data: bytes) -> Manifest:
    """An image manifest from its bytes. Raises `FormError` where it is anything else, or a blob has no sha256."""
    raw = load(data)
    if raw.get("schemaVersion") != 2:
        raise FormError(f"schemaVersion is {str(raw.get('schemaVersion'))[:40]}, not 2")
    kind = raw.get("mediaType", MANIFEST)
    if kind not in (MANIFEST, DOCKER_MANIFEST):
        raise FormError(f"its media type is `{str(kind)[:100]}`")
    layers = raw.get("layers")
    if not isinstance(layers, list) or len(layers) > MAX_LAYERS:
        raise FormError("it has no list of layers, or too long a one")
    return Manifest(kind, descriptor(raw.get("config")), tuple(descriptor(item) for item in layers))


def descriptor(raw: object) -> Descriptor:
    """A descriptor from its JSON. Raises `FormError`."""
    if not isinstance(raw, dict):
        raise FormError("a descriptor is no object")
    kind, digest, size, noted = (raw.get(key) for key in ("mediaType", "digest", "size", "annotations"))
    if not isinstance(kind, str) or not is_digest(digest):
        raise FormError(f"a descriptor has no sha256: {str(digest)[:80]!r}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise FormError(f"a descriptor's size is {str(size)[:40]!r}")
    if noted is None:
        noted = {}
    if not isinstance(noted, dict) or not all(isinstance(value, str) for value in noted.values()):
        raise FormError("a descriptor's annotations are no texts")
    assert isinstance(digest, str)
    return Descriptor(kind, digest, size, noted)


@dataclass(frozen=True)
class Attachment:
    """An image of cosign's beside another one: the tag it lives at, its manifest, its blobs by digest."""

    tag: str
    manifest: bytes
    blobs: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)

    @property
    def entries(self) -> list[tuple[Descriptor, bytes]]:
        """What is attached: signatures' payloads, or envelopes."""
        return [(item, self.blobs[item.digest]) for item in parse_manifest(self.manifest).layers]


def make_attachment(tag: str, media_type: str, entries: list[tuple[bytes, Mapping[str, str]]]) -> Attachment:
    """An attachment as cosign writes it: each entry is a blob and its annotations. No time is in it."""
    blobs = {digest_of(data): data for data, _ in entries}
    layers = [Descriptor(media_type, digest_of(data), len(data), noted) for data, noted in entries]
    none = "0001-01-01T00:00:00Z"
    config = canonical_json(
        {
            "architecture": "",
            "config": {},
            "created": none,
            "history": [{"created": none} for _ in layers],
            "os": "",
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    blobs[digest_of(config)] = config
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": Descriptor(CONFIG, digest_of(config), len(config)).as_json(),
        "layers": [layer.as_json() for layer in layers],
    }
    return Attachment(tag, canonical_json(manifest), blobs)


def index_json(manifests: list[tuple[str, bytes, str]]) -> bytes:
    """`index.json` over (kind, manifest, media type)."""
    listed = [
        {**Descriptor(kind, digest_of(data), len(data)).as_json(), "annotations": {"kind": KINDS[name]}}
        for name, data, kind in manifests
    ]
    return canonical_json({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})


LAYOUT_FILE = canonical_json({"imageLayoutVersion": "1.0.0"})
"""The file `oci-layout`."""


def small_layout(
    folder: Path, manifest: bytes, config: bytes, signature: Attachment | None, attestations: Attachment | None
) -> None:
    """Write a layout for cosign's `--local-image`: the image without its layers, which cosign does not read."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    rows = [("image", manifest, parse_manifest(manifest).media_type)]
    files = {digest_of(manifest): manifest, digest_of(config): config}
    for name, attached in (("sigs", signature), ("atts", attestations)):
        if attached is not None:
            rows.append((name, attached.manifest, MANIFEST))
            files |= {attached.digest: attached.manifest, **attached.blobs}
    for digest, data in files.items():
        if digest_of(data) != digest:
            raise IntegrityError("a blob is not what its digest says", where=digest)
        (blobs / digest.removeprefix("sha256:")).write_bytes(data)
    (folder / "index.json").write_bytes(index_json(rows))
    (folder / "oci-layout").write_bytes(LAYOUT_FILE)
