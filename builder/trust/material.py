"""What a verification looks at, wherever it comes from: a registry, a layout in a folder, a bundle, an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from builder.errors import IntegrityError, UnreachableError, UsageError
from builder.trust.attach import Client, attachment_manifest, fetch_attachment
from builder.trust.layout import (
    KINDS,
    SMALL,
    Attachment,
    Descriptor,
    FormError,
    Manifest,
    digest_of,
    is_list,
    load,
    parse_manifest,
    tag_of,
)
from builder.trust.layout import descriptor as parse_descriptor
from builder.trust.proof import Proof, layer_proof

PROOF_LAYER: Final = 64 << 20
"""Bytes of the largest uppermost layer that is fetched for the proof in it; that of the default matrix has 0.2 MB."""


@dataclass(frozen=True)
class Material:
    """An image as it was found. ``problem`` is what is wrong with its manifest, config or blobs, "" if nothing.

    ``name`` and ``tag`` are how it was asked for, "" where that was by digest or file. ``attached`` are the signatures'
    and attestations' images, each of them None where there is none, or what is wrong with it.
    """

    shown: str
    digest: str
    manifest: bytes
    config: bytes
    proof: Callable[[], Proof]
    name: str = ""
    tag: str = ""
    problem: str = ""
    signature: Attachment | str | None = None
    attestations: Attachment | str | None = None
    detail: str = ""
    """What was looked at to say that the digests hold."""
    signed: bool = True
    """Whether there is a place where a signature would be; an engine has none."""
    labels: Mapping[str, str] | None = field(default=None)
    """Of an engine, which does not give the config's bytes."""
    image: str = ""


def remote(client: Client, reference: str) -> Material:
    """What a tag or digest names in a registry. Raises `UnreachableError` where there is nothing, or no answer."""
    found = client.manifest(reference)
    shown = f"{client.name}{'@' if reference.startswith('sha256:') else ':'}{reference}"
    if found is None:
        raise UnreachableError(
            "the registry has no such image",
            where=shown,
            hint="images are named MATRIX-<first 12 of the lock digest> there; put it there with `builder push`",
        )
    manifest, media_type = found
    digest = digest_of(manifest)
    tag = "" if reference.startswith("sha256:") else reference
    signature, attestations = (_attached(client, tag_of(digest, suffix)) for suffix in ("sig", "att"))
    config, problem, detail = b"", "", ""
    try:
        if is_list(manifest, media_type):
            raise FormError(LIST)
        parsed = parse_manifest(manifest)
        config = client.blob(parsed.config.digest, SMALL)
        detail = check_config(parsed, config)
    except FormError as error:
        problem = str(error)
    except IntegrityError as error:
        problem = said(error)

    def proof() -> Proof:
        top = proof_layer(parse_manifest(manifest))
        try:
            return layer_proof(client.blob(top.digest, PROOF_LAYER))
        except IntegrityError as error:
            raise FormError(said(error)) from error

    return Material(
        shown=shown,
        digest=digest,
        manifest=manifest,
        config=config,
        proof=proof,
        name=client.name,
        tag=tag,
        problem=problem,
        signature=signature,
        attestations=attestations,
        detail=detail,
    )


LIST: Final = "it names a list of images, not an image: what is signed is one image"


def _attached(client: Client, tag: str) -> Attachment | str | None:
    try:
        return fetch_attachment(client, tag)
    except IntegrityError as error:
        return said(error)


def said(error: IntegrityError) -> str:
    """An error in one line."""
    return f"{error.what}: {error.because.splitlines()[0]}" if error.because else error.what


def check_config(manifest: Manifest, config: bytes) -> str:
    """What was looked at. Raises `FormError` where a manifest and its config do not fit together."""
    if digest_of(config) != manifest.config.digest or len(config) != manifest.config.size:
        raise FormError("the config is not the one that the manifest names")
    raw = load(config)
    if (raw.get("os"), raw.get("architecture")) != ("linux", "amd64"):
        raise FormError(f"it is for {str(raw.get('os'))[:20]}/{str(raw.get('architecture'))[:20]}, not linux/amd64")
    rootfs = raw.get("rootfs")
    diff_ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diff_ids, list) or len(diff_ids) != len(manifest.layers):
        raise FormError("the config and the manifest have different numbers of layers")
    return f"manifest and config, {len(manifest.layers)} layers named"


def proof_layer(manifest: Manifest) -> Descriptor:
    """The uppermost layer, which has the proof. Raises `FormError`."""
    if not manifest.layers or manifest.layers[-1].size > PROOF_LAYER:
        raise FormError(f"its uppermost layer is larger than {PROOF_LAYER >> 20} MB, so it is not the proof's")
    return manifest.layers[-1]


def layout(folder: Path) -> Material:
    """An OCI layout with what cosign attached, as `cosign save` writes it. Raises `UsageError` where it is none."""

    def blob(item: Descriptor) -> bytes:
        path = folder / "blobs" / "sha256" / item.digest.removeprefix("sha256:")
        try:
            data = path.open("rb").read(PROOF_LAYER + 1)
        except OSError as error:
            raise FormError(f"a blob cannot be read: {item.digest}: {error.strerror}") from error
        if digest_of(data) != item.digest:
            raise FormError(f"a blob is not what its digest says: {item.digest}")
        return data

    try:
        return assemble(str(folder), (folder / "index.json").open("rb").read(SMALL + 1), blob)
    except OSError as error:
        raise UsageError("the folder is no OCI layout", where=str(folder), because=str(error)) from error


def assemble(shown: str, index: bytes, blob: Callable[[Descriptor], bytes], detail: str = "") -> Material:
    """The material in a layout whose blobs `blob` reads and checks (it raises `FormError`)."""
    try:
        listed = by_kind(index)
        manifest = blob(listed["image"])
        parsed = parse_manifest(manifest)
        config = blob(parsed.config)
        looked_at = check_config(parsed, config)
    except FormError as error:
        return Material(shown, "", b"", b"", _no_proof, problem=str(error))

    def attached(kind: str, suffix: str) -> Attachment | str | None:
        if kind not in listed:
            return None
        try:
            data = blob(listed[kind])
            inner = attachment_manifest(data)
            blobs = {item.digest: blob(item) for item in (*inner.layers, inner.config)}
        except FormError as error:
            return str(error)
        return Attachment(tag_of(digest_of(manifest), suffix), data, blobs)

    return Material(
        shown=shown,
        digest=digest_of(manifest),
        manifest=manifest,
        config=config,
        proof=lambda: layer_proof(blob(proof_layer(parsed))),
        signature=attached("sigs", "sig"),
        attestations=attached("atts", "att"),
        detail=detail or looked_at,
    )


def _no_proof() -> Proof:
    raise FormError("there is no image")


def by_kind(index: bytes) -> dict[str, Descriptor]:
    """The descriptors of an `index.json` by what cosign calls them: one image, its signatures, its attestations.

    Raises `FormError` where there is no image, or anything else.
    """
    names = {kind: name for name, kind in KINDS.items()}
    rows = load(index).get("manifests")
    if not isinstance(rows, list) or len(rows) > len(names):
        raise FormError("index.json lists no manifests, or more than an image and what is attached to it")
    found: dict[str, Descriptor] = {}
    for row in rows:
        item = parse_descriptor(row)
        kind = names.get(item.annotations.get("kind", ""))
        if kind is None or kind in found:
            raise FormError("index.json lists what is neither the image nor attached to it")
        found[kind] = item
    if "image" not in found:
        raise FormError("index.json lists no image")
    return found
