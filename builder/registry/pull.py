"""An image by its digest out of a registry into an engine, without a name; layers that arrived whole are kept for another try.

An engine drops the layers of a pull that failed, since no image holds them. So while it pulls, an image of the layers so far is
put beside it (a config of a few hundred bytes, no layer is moved): it holds them, and goes when the pull is through.
"""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import docker.errors

from builder.engine import Engine
from builder.errors import BuilderError, IntegrityError
from builder.files import sha256_hex
from builder.labels import LABEL, PARTIAL_LABEL
from builder.registry.client import RegistryClient
from builder.registry.reference import Reference
from builder.registry.transport import PAUSES, STALL, Events, Progress, api, auth_config, follow, pull_stream
from builder.settings import load as load_settings

Layer = tuple[str, str, int]
"""Digest, diff ID and compressed bytes."""

LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class LayerState:
    """A layer of the image: digest and compressed bytes in the registry, diff ID, and whether it had to be pulled."""

    digest: str
    diff_id: str
    bytes: int
    pulled: bool


@dataclass(frozen=True)
class Pulled:
    """An image that arrived. ``id`` is the engine's (of the classic store the config's digest, of the containerd store the
    manifest's), ``config`` the config's digest, which every store agrees on.
    """

    reference: str
    digest: str
    id: str
    config: str
    layers: tuple[LayerState, ...]
    tries: int
    seconds: float

    @property
    def bytes_pulled(self) -> int:
        return sum(layer.bytes for layer in self.layers if layer.pulled)

    @property
    def bytes_there(self) -> int:
        return sum(layer.bytes for layer in self.layers if not layer.pulled)


@dataclass(frozen=True)
class Remote:
    """What a registry says of an image. ``layers`` are (digest, diff ID, compressed bytes), from the bottom."""

    digest: str
    config: str
    layers: tuple[Layer, ...]

    @classmethod
    def parse(cls, manifest: bytes, config: bytes, where: str) -> Remote:
        """Raises `IntegrityError` where config and manifest do not belong together."""
        data, inner = json.loads(manifest), json.loads(config)
        wanted = str(data["config"]["digest"])
        diff_ids = (inner.get("rootfs") or {}).get("diff_ids") or []
        if wanted != f"sha256:{sha256_hex(config)}" or len(diff_ids) != len(data["layers"]):
            raise IntegrityError(
                "config and manifest of the image do not belong together",
                where=where,
                because=f"the manifest names {wanted} and has {len(data['layers'])} layers, the config has "
                f"sha256:{sha256_hex(config)} and {len(diff_ids)}",
            )
        layers = zip(data["layers"], diff_ids, strict=True)
        rows = tuple((str(layer["digest"]), str(diff_id), int(layer["size"])) for layer, diff_id in layers)
        return cls(f"sha256:{sha256_hex(manifest)}", wanted, rows)


def read_remote(client: RegistryClient, digest: str) -> Remote:
    """Manifest and config of the image with this digest. Raises `UnreachableError`, `IntegrityError`."""
    found, data = client.image(digest)
    raw = client.manifest(found)
    assert raw is not None
    return Remote.parse(raw[0], client.blob(str(data["config"]["digest"])), f"{client.name}@{digest}")


def known_layers(engine: Engine) -> set[str]:
    """What `bytes_to_pull` has to know of an engine: the layers that it will not pull again, as its store tells layers.

    The containerd store tells a layer by the digest of its compressed form, which is one diff ID's; the classic store by its
    chain ID, which depends on all layers below. Both know it after a push or pull only: a layer that was built or loaded is
    pulled all the same (seen with Docker Engine 26.1).
    """
    classic = engine.info().store == "classic"
    return {key for layers in moved_images(engine) for key in (chain_ids(layers) if classic else layers)}


def moved_images(engine: Engine) -> list[tuple[str, ...]]:
    """The diff IDs of each image that came from a registry or went to one, whole or (`Holder`) in part."""
    try:
        rows = [row for row in api(engine).images(all=True) if row.get("RepoDigests") or _is_partial(row)]
    except docker.errors.DockerException as error:
        raise engine.error(error) from error
    images = (engine.find(row["Id"]) for row in rows)
    return [image.diff_ids for image in images if image is not None]


def _is_partial(row: Mapping[str, Any]) -> bool:
    return PARTIAL_LABEL in (row.get("Labels") or {})


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """The chain ID of each layer, from the bottom (OCI image specification, "Layer ChainID")."""
    found: list[str] = []
    for diff_id in diff_ids:
        found.append(f"sha256:{sha256_hex(f'{found[-1]} {diff_id}'.encode())}" if found else diff_id)
    return found


def bytes_to_pull(remote: Remote, known: set[str]) -> int:
    """Compressed bytes that an engine pulls; `known` is what `known_layers` said of it, or diff IDs, or chain IDs."""
    chains = chain_ids([diff_id for _, diff_id, _ in remote.layers])
    rows = zip(remote.layers, chains, strict=True)
    return sum(size for (_, diff_id, size), chain in rows if not {diff_id, chain} & known)


def pull_image(
    engine: Engine,
    reference: Reference,
    digest: str,
    progress: Progress,
    *,
    remote: Remote | None = None,
    plain_http: bool = False,
    stall: float = STALL,
    pauses: tuple[float, ...] = PAUSES,
) -> Pulled:
    """Pull the image with this digest into an engine. It gets no name there; what is there under any name stays.

    ``remote`` is what its (verified) manifest says; without it, it is asked for. Raises `UnreachableError`, `BuildError`, and
    `IntegrityError` where a layer or the image that arrived is another. What arrived whole before an error is kept.
    """
    began = time.monotonic()
    where = reference.with_digest(digest)
    if remote is None:
        client = RegistryClient(reference, load_settings(), plain_http)
        try:
            remote = read_remote(client, digest)
        finally:
            client.close()
    login = auth_config(reference)
    classic = engine.info().store == "classic"
    holder = Holder(engine, remote, classic=classic)

    def begin(client: Any) -> Iterator[Mapping[str, Any]]:
        return pull_stream(client, reference, digest, login)

    def seen(events: Events, _layer: str) -> None:
        holder.hold(events)

    try:
        tries = follow(engine, str(where), begin, progress, seen=seen, stall=stall, pauses=pauses)
    except IntegrityError:
        if not classic:
            # The containerd store keeps the damaged bytes and goes on with them once more; then it drops them, and a registry
            # that is mended is asked again (seen with 26.1).
            with contextlib.suppress(BuilderError):
                follow(engine, str(where), begin, progress, stall=stall, pauses=())
        raise
    image = _arrived(engine, where, remote, classic=classic)
    release(engine)
    done = ("Pull complete", "Download complete")
    layers = tuple(
        LayerState(layer, diff_id, size, any(events.has(layer, *done) for events in tries))
        for layer, diff_id, size in remote.layers
    )
    return Pulled(str(where), digest, image, remote.config, layers, len(tries), time.monotonic() - began)


def _arrived(engine: Engine, where: Reference, remote: Remote, *, classic: bool) -> str:
    """The id of the image that came; it has to be the one that the manifest names."""
    image = engine.find(str(where))
    wanted = remote.config if classic else where.digest
    if image is None or image.id != wanted or image.diff_ids != tuple(row[1] for row in remote.layers):
        found = f"{image.id} with {len(image.diff_ids)} layers" if image else "no image"
        raise IntegrityError(
            "the image that arrived is not the one that the registry's manifest names",
            where=f"{engine.host}, {where}",
            because=f"wanted {wanted} with {len(remote.layers)} layers, the engine has {found}",
            hint="nothing was named; pull again, and if it stays, push the image again",
        )
    return image.id


class Holder:
    """Holds the layers of a pull that are whole, with an image of nothing but them."""

    def __init__(self, engine: Engine, remote: Remote, *, classic: bool) -> None:
        self._engine, self._remote, self._classic = engine, remote, classic
        self._held: Sequence[Layer] = ()
        self._name = ""

    def hold(self, events: Events) -> None:
        """Hold what is whole by now: of the classic store what is unpacked, from the bottom; else what was downloaded."""
        whole = self._whole(events)
        # The last layer makes the image itself.
        if len(whole) <= len(self._held) or len(whole) == len(self._remote.layers):
            return
        before, self._held = self._name, whole
        try:
            client = api(self._engine)
            archive, self._name = partial_image(whole) if self._classic else partial_layout(whole)
            for _ in client.load_image(archive):
                pass
            if before:
                client.remove_image(before, noprune=True)
        except (docker.errors.DockerException, BuilderError):
            # Then a pull that breaks off begins anew, and that is all.
            self._name = ""

    def _whole(self, events: Events) -> list[Layer]:
        if not self._classic:
            return [
                layer for layer in self._remote.layers if events.has(layer[0], "Download complete", "Already exists")
            ]
        unpacked = [events.has(layer[0], "Pull complete", "Already exists") for layer in self._remote.layers]
        return list(self._remote.layers[: [*unpacked, False].index(False)])


def _config(layers: Sequence[Layer], architecture: str) -> bytes:
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Labels": {PARTIAL_LABEL: "1"}},
        "rootfs": {"type": "layers", "diff_ids": [diff_id for _, diff_id, _ in layers]},
    }
    return json.dumps(config).encode()


def partial_image(layers: Sequence[Layer]) -> tuple[bytes, str]:
    """An archive for `docker load` of an image of layers that a classic store has, without the layers; the image's id."""
    raw = _config(layers, "amd64")
    names = [f"{diff_id.rpartition(':')[2]}.tar" for _, diff_id, _ in layers]
    listed = [{"Config": "config.json", "RepoTags": None, "Layers": names}]
    files = {"config.json": raw, "manifest.json": json.dumps(listed).encode()}
    return _archive(files), f"sha256:{sha256_hex(raw)}"


def partial_layout(layers: Sequence[Layer]) -> tuple[bytes, str]:
    """The same for a containerd store: an OCI layout; the image's name, since that store keeps no image without one.

    The image is said to be for another architecture: the store would unpack one for its own.
    """

    def described(kind: str, data: bytes) -> dict[str, Any]:
        media = f"application/vnd.oci.image.{kind}.v1+json"
        return {"mediaType": media, "digest": f"sha256:{sha256_hex(data)}", "size": len(data)}

    config = _config(layers, "s390x")
    rows = [{"mediaType": LAYER_TYPE, "digest": digest, "size": size} for digest, _, size in layers]
    manifest = json.dumps({"schemaVersion": 2, "config": described("config", config), "layers": rows}).encode()
    name = f"{LABEL}-partial:{sha256_hex(manifest)[:12]}"
    entry = {
        **described("manifest", manifest),
        "annotations": {"io.containerd.image.name": f"docker.io/library/{name}"},
    }
    files = {f"blobs/sha256/{sha256_hex(data)}": data for data in (config, manifest)}
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    return _archive(files), name


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def release(engine: Engine) -> None:
    """Remove the images that held layers: the image that came holds them now."""
    client = api(engine)
    try:
        for row in client.images(all=True):
            if _is_partial(row):
                client.remove_image((row.get("RepoTags") or [row["Id"]])[0], force=True)
    except docker.errors.DockerException:
        return
