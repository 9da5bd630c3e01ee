"""Bundles read: verified as a whole before an engine sees a byte, and hashed again on the way into one.

A bundle is a tar archive of an OCI layout: the image with compressed layers, cosign's signature and attestations, and the
`manifest.json` that engines read. `bundling.py` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import BuildError, IntegrityError, UsageError
from builder.files import canonical_json, pretty_size
from builder.lock import Lock
from builder.trust.archive import Archive, blob_name, damaged, header, padding
from builder.trust.layout import LAYOUT_FILE, FormError, digest_of, index_json, parse_manifest
from builder.trust.material import Material, assemble, by_kind
from builder.trust.verify import Verified, examine, verify_engine

if TYPE_CHECKING:
    from builder.engine import Engine
    from builder.trust.cosign import PublicKey

Progress = Callable[[int, int], None]
"""Is told of bytes done and bytes in all."""


def engine_manifest(manifest: bytes) -> bytes:
    """`manifest.json` as engines read it, without a name for the image: that comes after the smoke test."""
    parsed = parse_manifest(manifest)
    layers = [blob_name(layer.digest) for layer in parsed.layers]
    return canonical_json([{"Config": blob_name(parsed.config.digest), "RepoTags": None, "Layers": layers}])


def verify_bundle(
    file: Path,
    pub: PublicKey,
    *,
    lock: Lock | None = None,
    signed_as: str = "",
    progress: Progress = lambda done, total: None,
) -> Verified:
    """Verify a bundle as a registry's image; then every layer's digest. Reads each byte once, a megabyte at a time.

    The layers are hashed only where all else holds: what is not signed is not read to its end. Raises `IntegrityError`
    where the file is no bundle.
    """
    archive = _open(file)
    try:
        verified = examine(_material(archive, file), pub, lock=lock, signed_as=signed_as)
        return _with_layers(archive, verified, progress) if verified.ok else verified
    finally:
        archive.close()


def require_bundle(file: Path) -> None:
    """Raise what `verify_bundle` raises for a file that is none, before a key is asked for. Reads no layer."""
    archive = _open(file)
    try:
        _material(archive, file)
    finally:
        archive.close()


def _open(file: Path) -> Archive:
    try:
        return Archive(file)
    except FileNotFoundError:
        raise UsageError("there is no such bundle", where=str(file)) from None
    except OSError as error:
        raise UsageError("the bundle cannot be read", where=str(file), because=str(error)) from error


def _material(archive: Archive, file: Path) -> Material:
    """What is in the archive, apart from the layers. Raises `IntegrityError` where a file is missing or one too many."""
    try:
        if archive.small("oci-layout") != LAYOUT_FILE:
            raise FormError("its `oci-layout` is of another version")
        index = archive.small("index.json")
        listed = by_kind(index)
        wanted = {"oci-layout", "index.json", "manifest.json"}
        for item in listed.values():
            wanted.add(blob_name(item.digest))
            inner = parse_manifest(archive.blob(item.digest))
            wanted |= {blob_name(blob.digest) for blob in (inner.config, *inner.layers)}
        if missing := sorted(wanted - set(archive.members)):
            raise FormError(f"it has no `{missing[0]}`")
        if more := sorted(set(archive.members) - wanted):
            raise FormError(f"it has a file that nothing names: `{more[0]}`")
        manifest = archive.blob(listed["image"].digest)
        if archive.small("manifest.json") != engine_manifest(manifest):
            raise FormError("its `manifest.json` names another image than its `index.json`")
    except FormError as error:
        raise damaged(file, str(error)) from error
    found = parse_manifest(manifest)
    detail = f"manifest, config and {len(found.layers)} layers"
    return assemble(str(file), index, lambda item: archive.blob(item.digest, max(item.size, 1)), detail)


def _with_layers(archive: Archive, verified: Verified, progress: Progress) -> Verified:
    layers = parse_manifest(verified.manifest).layers
    total = sum(layer.size for layer in layers)
    done, problem = 0, ""
    try:
        for layer in {layer.digest: layer for layer in layers}.values():
            if archive.size(layer.digest) != layer.size:
                raise FormError(f"a layer has another size than the manifest says: {layer.digest}")
            for chunk in archive.hashed(layer.digest):
                done += len(chunk)
                progress(done, total)
    except FormError as error:
        problem = str(error)
    checks = []
    for check in verified.checks:
        if check.name == "digest":
            whole = f"{check.detail}, {pretty_size(done)}"
            check = replace(check, ok=not problem, detail=problem or whole, hint="copy the bundle again")
        checks.append(check)
    return replace(verified, checks=tuple(checks))


def load_into(engine: Engine, file: Path, verified: Verified, progress: Progress = lambda done, total: None) -> str:
    """Load a verified bundle's image into an engine, without a name; its id there.

    The bytes are hashed again on their way: the file may have changed since. Raises `IntegrityError` (then nothing was
    loaded), or `BuildError`. Safe from several threads at once, each with its own engine.
    """
    from builder.registry.transport import api

    if not (verified.ok and verified.signed):
        raise IntegrityError("the bundle was not verified", where=str(file))
    archive = _open(file)
    trouble: list[FormError] = []

    def stream() -> Iterator[bytes]:
        try:
            yield from _engine_stream(archive, verified, progress)
        except FormError as error:
            trouble.append(error)
            raise

    refused = ""
    try:
        for event in api(engine).load_image(stream(), quiet=True):
            refused = str(event.get("error") or refused)
    except Exception as error:
        # However the connection ends when our stream does: what was wrong with the file is the reason.
        if trouble:
            raise damaged(file, str(trouble[0])) from error
        refused = str(error)
    finally:
        archive.close()
    if refused:
        full = "no space left" in refused
        raise BuildError(
            "the engine's disk is full" if full else "the engine did not take the image",
            where=engine.host,
            because=refused[:500],
            hint="free space there: `docker system df`, `builder prune --yes`" if full else "",
        )
    # An engine names an image by its config, or (containerd store) by its manifest.
    for name in (verified.image, verified.digest):
        if (image := engine.find(name)) is not None:
            verify_engine(engine, image.id, lock=verified.lock).require()
            return image.id
    raise BuildError(
        "the engine loaded another image than it was given",
        where=engine.host,
        because=f"it has none with the id {verified.image}",
    )


def _engine_stream(archive: Archive, verified: Verified, progress: Progress) -> Iterator[bytes]:
    """The image as a tar stream for an engine: made from what was verified, not copied from the file."""
    parsed = parse_manifest(verified.manifest)
    rows = [("image", verified.manifest, parsed.media_type)]
    small = {
        blob_name(digest_of(verified.manifest)): verified.manifest,
        blob_name(parsed.config.digest): verified.config,
        "oci-layout": LAYOUT_FILE,
        "index.json": index_json(rows),
    }
    total = sum(layer.size for layer in parsed.layers)
    done = 0
    for digest, layer in {layer.digest: layer for layer in parsed.layers}.items():
        if archive.size(digest) != layer.size:
            raise FormError(f"a layer has another size than the manifest says: {digest}")
        yield header(blob_name(digest), layer.size)
        for chunk in archive.hashed(digest):
            done += len(chunk)
            progress(done, total)
            yield chunk
        yield padding(layer.size)
    # Last, so that a stream that breaks off is no image.
    for name, data in (*small.items(), ("manifest.json", engine_manifest(verified.manifest))):
        yield header(name, len(data)) + data + padding(len(data))
    yield b"\0" * 1024
