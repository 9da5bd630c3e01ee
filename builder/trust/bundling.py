"""`builder bundle`: an image with all that proves it as one file, for networks without a registry.

From the local engine, whose `docker save` is taken apart while it comes: no layer is on this disk but compressed, in the
bundle. Or from a registry, as it was signed there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Self

from builder.display import note
from builder.errors import BuildError, IntegrityError, UnreachableError, UsageError
from builder.files import canonical_json, pretty_size
from builder.labels import content_tag
from builder.trust import material
from builder.trust.archive import blob_name, header, padding
from builder.trust.attach import attachments, subject
from builder.trust.bundle import Progress, engine_manifest, verify_bundle
from builder.trust.cosign import PublicKey, signing_key
from builder.trust.layout import (
    CONFIG,
    LAYOUT_FILE,
    MANIFEST,
    SMALL,
    Attachment,
    Descriptor,
    FormError,
    digest_of,
    index_json,
    is_digest,
    load,
    parse_manifest,
)
from builder.trust.proof import UNPACK_ERRORS, plain_reader
from builder.trust.squeeze import squeezed
from builder.trust.verify import examine

if TYPE_CHECKING:
    from builder.engine import Engine, Image
    from builder.lock import Lock
    from builder.registry.client import RegistryClient

LAYER: Final = "application/vnd.oci.image.layer.v1.tar+zstd"
NAME: Final = "sglang-stack"
"""What the signature of a bundle names where it was made from a local image: there is no registry to name."""


def bundle(path: Path, target: Path, key: Path | None, progress: Progress = lambda done, total: None) -> dict[str, Any]:
    """Write the image of the matrix at `path`, from the local engine, signed, to `target`; the shape `bundle`.

    Raises what preparing a build raises; `UsageError` where there is no image of these inputs or no key; `StandInError` for
    one with stand-ins; `IntegrityError` for one that is not what its labels say.
    """
    from builder.build import prepare
    from builder.engine import connect
    from builder.registry.push import pushable

    _free_place(target)
    opened = signing_key(key)
    prepared = prepare(path)
    engine = connect()
    image = pushable(engine, prepared, path)
    with Writer(target) as writer:
        config, layers = from_engine(engine, image, writer, progress)
        manifest = image_manifest(config, layers)
        about = subject(engine, image.id, prepared.loaded, manifest, config, NAME, prepared.rendered.digest)
        made = attachments(about, opened)
        write_rest(writer, manifest, config, made.signature, made.attestations)
        return _finished(writer, opened.public, prepared.lock, prepared.loaded.matrix.name)


def bundle_from(
    path: Path, target: Path, client: RegistryClient, pub: PublicKey, progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """The same out of a registry, with what is attached there: the image of the matrix's lock, verified first."""
    from builder.lock import lock_path, read_lock

    _free_place(target)
    lock = read_lock(lock_path(path))
    found = material.remote(client, content_tag(lock.matrix, lock.digest))
    examine(found, pub, lock=lock, signed_as=client.name).require()
    assert isinstance(found.signature, Attachment) and isinstance(found.attestations, Attachment)
    layers = {layer.digest: layer for layer in parse_manifest(found.manifest).layers}
    total, done = sum(layer.size for layer in layers.values()), 0
    with Writer(target) as writer:
        for layer in layers.values():
            digest, _ = writer.add_stream(_counted(download(client, layer), done, total, progress))
            done += layer.size
            if digest != layer.digest:
                raise IntegrityError(
                    "a layer in the registry is not what its digest says",
                    where=f"{client.name}@{layer.digest}",
                    because=f"its bytes have {digest}",
                    hint="its storage is damaged or was tampered with: delete the blob there and push again",
                )
        write_rest(writer, found.manifest, found.config, found.signature, found.attestations)
        return _finished(writer, pub, lock, lock.matrix)


def _finished(writer: Writer, pub: PublicKey, lock: Lock, matrix: str) -> dict[str, Any]:
    """Read back and verify what was written, then give it its name."""
    size, sha256 = writer.close()
    verified = replace(verify_bundle(writer.partial, pub, lock=lock), reference=str(writer.target)).require()
    writer.publish()
    return {
        "ok": True,
        "matrix": matrix,
        "file": str(writer.target),
        "bytes": size,
        "sha256": sha256,
        "digest": verified.digest,
        "image": {"id": verified.image, "lock": lock.digest},
        "key": verified.key,
    }


def _free_place(target: Path) -> None:
    if target.is_dir() or not target.parent.is_dir():
        raise UsageError(
            "the bundle cannot be written there",
            where=str(target),
            because="it is a folder" if target.is_dir() else f"there is no folder {target.parent}",
            hint="name a file: `-o FILE`",
        )


def _counted(chunks: Iterable[bytes], before: int, total: int, progress: Progress) -> Iterator[bytes]:
    for chunk in chunks:
        before += len(chunk)
        progress(before, total)
        yield chunk


def download(client: RegistryClient, layer: Descriptor) -> Iterator[bytes]:
    """The bytes of a layer as they come, never more than the manifest says. Raises `UnreachableError`, `IntegrityError`."""
    import requests

    answer = client._ask("GET", f"blobs/{layer.digest}", stream=True)
    if answer.status_code == 404:
        raise IntegrityError("the registry lacks a layer of the image", where=f"{client.name}@{layer.digest}")
    size = 0
    try:
        for chunk in answer.iter_content(1 << 20):
            size += len(chunk)
            if size > layer.size:
                raise IntegrityError(
                    "a layer in the registry is larger than it may be", where=f"{client.name}@{layer.digest}"
                )
            yield chunk
    except requests.RequestException as error:
        raise UnreachableError(
            "the registry broke the connection off", where=client.name, because=str(error)[:300]
        ) from error
    finally:
        answer.close()


# ------------------------------------------------------------------------------------------------- from an engine


class _Stream(io.RawIOBase):
    """Chunks as a file that is read once, from its start to its end."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._held = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._held:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._held = chunk
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count


def from_engine(engine: Engine, image: Image, writer: Writer, progress: Progress) -> tuple[bytes, list[Descriptor]]:
    """Take `docker save` apart: layers go compressed into the bundle; the config, and the layers as a manifest names them.

    Raises `BuildError` where the engine breaks off, `IntegrityError` where what it saves is not what it says it has.
    """
    import docker.errors
    import requests

    from builder.registry.transport import api

    note(f"asking the engine for {pretty_size(image.size)}: it lays them out on its own disk first")
    try:
        config, layers = take_apart(_counted(api(engine).get_image(image.id), 0, image.size, progress), writer)
    except (docker.errors.DockerException, requests.RequestException) as error:
        raise BuildError("the engine did not save the image", where=engine.host, because=str(error)[:300]) from error
    except (tarfile.TarError, FormError) as error:
        raise BuildError("what the engine saved cannot be read", where=engine.host, because=str(error)[:300]) from error
    wanted = diff_ids(config)
    if tuple(wanted) != image.diff_ids or any(name not in layers for name in wanted):
        raise IntegrityError(
            "the engine saved other layers than the image has",
            where=image.id,
            because="their contents do not have the diff IDs that the engine lists",
            hint="its storage is damaged: build the image again",
        )
    return config, [layers[name] for name in wanted]


def diff_ids(config: bytes) -> list[str]:
    """The digests of the layers without compression, as a config names them. Raises `FormError`."""
    rootfs = load(config).get("rootfs")
    found = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(found, list) or not all(is_digest(item) for item in found):
        raise FormError("the config names no layers")
    return found


def take_apart(chunks: Iterable[bytes], writer: Writer) -> tuple[bytes, dict[str, Descriptor]]:
    """The config and, by diff ID, the compressed layers of a `docker save`; engines before 25 save in another form.

    Raises `FormError` and `tarfile.TarError`.
    """
    small: dict[str, bytes] = {}
    layers: dict[str, Descriptor] = {}
    with tarfile.open(fileobj=io.BufferedReader(_Stream(chunks), 1 << 20), mode="r|", bufsize=1 << 20) as archive:
        for member in archive:
            # Older engines save a layer that comes twice as a link.
            if not member.isreg():
                continue
            reader = archive.extractfile(member)
            assert reader is not None
            start = reader.read(2)
            if start[:1] in (b"{", b"[") and member.size <= SMALL:
                small[member.name] = start + reader.read()
            elif member.size > SMALL or member.name.endswith("/layer.tar") or member.name.startswith("blobs/"):
                found = hashlib.sha256()
                packed = squeezed(_hashed(_plain(start, reader), found))
                digest, size = writer.add_stream(packed)
                layers[f"sha256:{found.hexdigest()}"] = Descriptor(LAYER, digest, size)
    listed = json.loads(small.get("manifest.json", b"[]"))
    if len(listed) != 1 or listed[0].get("Config") not in small:
        raise FormError("it has no `manifest.json` that names one image")
    return small[listed[0]["Config"]], layers


def _plain(start: bytes, reader: IO[bytes]) -> Iterator[bytes]:
    """A layer without its compression: the containerd store saves it as it was pulled or exported."""
    whole = _Stream(chain([start], iter(lambda: reader.read(1 << 20), b"")))
    try:
        plain = plain_reader(io.BufferedReader(whole, 1 << 20))
        while data := plain.read(1 << 20):
            yield data
    except UNPACK_ERRORS as error:
        raise FormError(f"a layer cannot be unpacked: {str(error)[:200]}") from error


def _hashed(chunks: Iterable[bytes], found: Any) -> Iterator[bytes]:
    for chunk in chunks:
        found.update(chunk)
        yield chunk


# ------------------------------------------------------------------------------------------------------- writing


_DISK: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


class Writer:
    """Writes a bundle beside its place; `close` ends it and `publish` puts it there. A context manager that leaves nothing behind."""

    def __init__(self, target: Path) -> None:
        self.target = target
        try:
            handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        except OSError as error:
            raise UsageError("the bundle cannot be written there", where=str(target), because=str(error)) from error
        self.partial = Path(name)
        self._file = os.fdopen(handle, "w+b")
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
            self._file.close()
        self.partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in _DISK:
            raise BuildError(
                "the bundle could not be written",
                where=str(self.target),
                because=error.strerror or str(error),
                hint="it needs about half of what the image has unpacked; what was there under its name is untouched",
            ) from error

    def add(self, name: str, data: bytes) -> None:
        """A file whose bytes are at hand; a blob that is there already is left."""
        if name in self._names:
            return
        self._names.add(name)
        self._file.write(header(name, len(data)) + data + padding(len(data)))

    def add_stream(self, chunks: Iterator[bytes]) -> tuple[str, int]:
        """A blob whose digest is known when it is written; its digest and size."""
        start = self._file.tell()
        self._file.write(header("oci-layout", 0))
        found, size = hashlib.sha256(), 0
        for chunk in chunks:
            found.update(chunk)
            size += len(chunk)
            self._file.write(chunk)
        digest = f"sha256:{found.hexdigest()}"
        if blob_name(digest) in self._names:
            # The same layer once more (an empty one comes twice): what was written goes.
            self._file.seek(start)
            self._file.truncate()
            return digest, size
        self._names.add(blob_name(digest))
        self._file.write(padding(size))
        self._file.seek(start)
        self._file.write(header(blob_name(digest), size))
        self._file.seek(0, os.SEEK_END)
        return digest, size

    def close(self) -> tuple[int, str]:
        """End the archive; its bytes and sha256 (hexadecimal)."""
        self._file.write(b"\0" * 1024)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.seek(0)
        sha256 = hashlib.file_digest(self._file, "sha256").hexdigest()
        size = self._file.tell()
        return size, sha256

    def publish(self) -> None:
        """Give the file its name."""
        self.partial.chmod(0o644)
        self.partial.replace(self.target)


def write_rest(
    writer: Writer, manifest: bytes, config: bytes, signature: Attachment | None, attestations: Attachment | None
) -> None:
    """All but the layers: manifest, config, what is attached, and the three files that say what there is."""
    rows = [("image", manifest, parse_manifest(manifest).media_type)]
    blobs = {digest_of(manifest): manifest, digest_of(config): config}
    for kind, attached in (("sigs", signature), ("atts", attestations)):
        if attached is not None:
            rows.append((kind, attached.manifest, MANIFEST))
            blobs |= {attached.digest: attached.manifest, **attached.blobs}
    for digest, data in sorted(blobs.items()):
        writer.add(blob_name(digest), data)
    writer.add("oci-layout", LAYOUT_FILE)
    writer.add("index.json", index_json(rows))
    writer.add("manifest.json", engine_manifest(manifest))


def image_manifest(config: bytes, layers: list[Descriptor]) -> bytes:
    """The manifest of an image whose layers were compressed here."""
    return canonical_json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": Descriptor(CONFIG, digest_of(config), len(config)).as_json(),
            "layers": [layer.as_json() for layer in layers],
        }
    )
