"""`builder push`: the image of a matrix into a registry, with what proves it, signed and read back."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from builder.build import Prepared, current_image, prepare
from builder.display import note
from builder.engine import BuildRequest, Engine, Image, connect, find_buildx
from builder.errors import BuilderError, BuildError, ExitCode, IntegrityError, UsageError
from builder.files import pretty_size, sha256_hex
from builder.interrupts import check
from builder.labels import LABEL, STAND_IN_LABEL, content_tag
from builder.planning import Row, plan
from builder.registry.client import RegistryClient
from builder.registry.predict import Blob, Sizes, contents, predicted
from builder.registry.pull import Remote, moved_images
from builder.registry.reference import Reference
from builder.registry.transport import Pushed, name_put_back, push_image
from builder.settings import Settings
from builder.solve import solve
from builder.summary import layer_rows

Compression = Literal["gzip", "zstd"]

ZSTD_LEVEL = 3
"""docs/measurements.md: what it costs and saves beside gzip."""


class StandInError(BuilderError):
    """An image that is not what it is called."""

    exit_code = ExitCode.FINDINGS


@dataclass(frozen=True)
class Target:
    """Where an image goes. ``reference`` has the tag that its content gives it."""

    reference: Reference
    matrix: str
    lock: str


def push(
    path: Path,
    target: str | None,
    settings: Settings,
    *,
    key: str | None = None,
    moving_tag: bool = False,
    compression: Compression = "gzip",
    plain_http: bool = False,
    progress: Callable[[str], None] = note,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """Push the image of the matrix at `path`; the shape `push` of docs/distribution.md.

    ``engine`` is the one that has the image, if that is not the one that the environment names.

    The moving tag is put there only after signature, SBOM and provenance were attached, read back and verified. Raises
    `UsageError` (no registry, no key, no such image), `StandInError`, `UnreachableError`, `BuildError`, `IntegrityError`.
    """
    from builder.trust.attach import attach, attachments, subject
    from builder.trust.cosign import signing_key
    from builder.trust.verb import named_key
    from builder.trust.verify import verify_remote

    check()
    began = time.monotonic()
    prepared = prepare(path)
    to = target_of(prepared, target, settings)
    engine = engine or connect()
    image = pushable(engine, prepared, path)
    if compression == "zstd":
        require_zstd(engine)
    signer = signing_key(named_key(key, settings, "key"))
    client = RegistryClient(to.reference, settings, plain_http)
    try:
        sizes = Sizes.of(settings.cache)
        rows = plan(path, None, sizes)
        # Asked before anything is sent: it also tells at once that a registry is not there, or does not let us in.
        client.manifest(to.reference.tag)
        before = _there(client, rows)
        foreseen = to_send(engine, rows, before)
        progress(f"pushing {to.reference}: about {pretty_size(foreseen)}")
        pushed = send(engine, image, to.reference, compression, progress)
        digest, manifest, config, layers = read_back(client, engine, image, pushed, to.reference.tag)
        report = _report(layers, pushed)
        titles = layer_rows(engine, prepared, image)
        sizes.remember(
            contents(
                rows, engine.layers(image.id), [Blob(row["diff_id"], row["digest"], row["bytes"]) for row in report]
            )
        )
        progress(f"signing {client.name}@{digest}")
        about = subject(engine, image.id, prepared.loaded, manifest, config, client.name, prepared.rendered.digest)
        attached = attach(client, attachments(about, signer))
        verify_remote(client, digest, signer.public, lock=prepared.lock).require()
        tags = [to.reference.tag]
        if moving_tag:
            client.tag(digest, to.matrix)
            tags.append(to.matrix)
    finally:
        client.close()
    return {
        "ok": True,
        "matrix": to.matrix,
        "image": {"id": layers.config, "lock": to.lock},
        "reference": f"{client.name}:{to.reference.tag}",
        "digest": digest,
        "tags": tags,
        "layers": [{**row, "layer": title} for row, (title, _, _) in zip(report, titles, strict=True)],
        "bytes_sent": sum(row["bytes"] for row in report if row["sent"]),
        "bytes_there": sum(row["bytes"] for row in report if not row["sent"]),
        "predicted_bytes": foreseen,
        "compression": compression_of(manifest),
        **attached.as_json(),
        "seconds": round(time.monotonic() - began, 1),
    }


def target_of(prepared: Prepared, target: str | None, settings: Settings) -> Target:
    """Where the image of a matrix goes: REGISTRY/NAME of the command line or the configuration, and the tag of its content."""
    text = target or settings.registry
    if not text:
        raise UsageError(
            "no registry is named",
            because="there is no default one",
            hint='`--to REGISTRY/NAME`, or `registry = "REGISTRY/NAME"` in config.toml',
        )
    reference = Reference.named(text)
    name = prepared.loaded.matrix.name
    return Target(reference.with_tag(content_tag(name, prepared.lock.digest)), name, prepared.lock.digest)


def pushable(engine: Engine, prepared: Prepared, path: Path) -> Image:
    """The image of exactly these inputs; raises `UsageError` where there is none, `StandInError` where nothing may push it."""
    content = prepared.names[0]
    image = engine.find(content)
    if image is not None and (names := image.labels.get(STAND_IN_LABEL)):
        raise StandInError(
            f"`{content}` is not what it is called, and nothing may push or bundle it",
            where=engine.host,
            because=f"it has the label `{STAND_IN_LABEL}`: others stand in for {names.replace(',', ', ')}",
            hint="it is for tests on this machine; docs/standin.md",
        )
    # The engine is asked for a name that anybody may give: the labels decide.
    if image is not None and image.labels.get(f"{LABEL}.lock") == prepared.lock.digest:
        current = current_image(engine, prepared)
        if current is not None:
            return current
        because = f"`{content}` was built from another state of the matrix, its patches or this builder"
    else:
        because = f"the engine has no `{content}`"
    raise UsageError(
        "there is no image of this matrix as it is now",
        where=engine.host,
        because=because,
        hint=f"build it: `builder build {path if path.is_absolute() else prepared.loaded.matrix.name}`",
    )


# ----------------------------------------------------------------------------------------------- sending


def require_zstd(engine: Engine) -> None:
    """Raise `UsageError` where an engine cannot make zstd layers."""
    if engine.info().store != "containerd":
        raise UsageError(
            "this engine cannot push zstd layers",
            where=engine.host,
            because="its classic image store packs layers itself when it pushes them, and knows gzip alone",
            hint="`--compression gzip` (the default), or an engine with the containerd image store: "
            '`"features": {"containerd-snapshotter": true}` in its daemon.json, and build there',
        )


def send(
    engine: Engine, image: Image, reference: Reference, compression: Compression, progress: Callable[[str], None]
) -> Pushed:
    """Push an image by the engine's own push; with zstd its layers are packed anew first, by BuildKit.

    The image that was pushed keeps its name in the registry in the engine, too; one that was not leaves none behind.
    """
    if compression == "gzip":
        return push_image(engine, image.id, reference, progress)
    progress(f"packing the layers with zstd, level {ZSTD_LEVEL}")
    # Packing names the image already.
    with name_put_back(engine, str(reference)):
        return push_image(engine, packed(engine, image, reference).id, reference, progress)


def packed(engine: Engine, image: Image, reference: Reference, level: int = ZSTD_LEVEL) -> Image:
    """The same image (config and diff IDs) with zstd layers, in an engine with the containerd store. Raises `BuildError`."""
    require_zstd(engine)
    name = str(reference)
    with tempfile.TemporaryDirectory(prefix="builder-zstd-") as temporary:
        folder = Path(temporary)
        # BuildKit exports the image that it starts from as it is, config and all, where there is nothing to do.
        named = next((tag for tag in image.tags if tag != name), image.id)
        (folder / "Dockerfile").write_text(f"FROM {named}\n", encoding="utf-8")
        options = f"compression=zstd,compression-level={level},force-compression=true,oci-mediatypes=true"
        request = BuildRequest(folder / "Dockerfile", folder, output=f"type=image,name={name},{options}")
        solve(engine, find_buildx(), request, [])
    made = engine.find(name)
    if made is None or made.diff_ids != image.diff_ids:
        raise BuildError("the layers packed anew are not those of the image", where=f"{engine.host}, {name}")
    return made


def to_send(engine: Engine, rows: list[Row], there: set[str]) -> int:
    """Compressed bytes that a push will send: of layers that the registry lacks.

    The classic store also sends those that it neither pushed nor pulled before: it cannot know what they become.
    """
    known = there
    if engine.info().store == "classic":
        known = there & {diff_id for layers in moved_images(engine) for diff_id in layers}
    return sum(predicted(rows, known).values())


def _there(client: RegistryClient, rows: list[Row]) -> set[str]:
    """The diff IDs of layers whose blobs the registry has, as far as earlier pushes tell what to ask for."""
    blobs = [blob for row in rows for blob in row.blobs]
    return {blob.diff_id for blob in blobs if client.head_blob(blob.digest) is not None}


def read_back(
    client: RegistryClient, engine: Engine, image: Image, pushed: Pushed, tag: str
) -> tuple[str, bytes, bytes, Remote]:
    """What is in the registry now: digest, manifest, config, layers. Raises `IntegrityError` where it is not what was pushed."""
    found = client.manifest(tag)
    digest, data = client.image(tag)
    raw = client.manifest(digest)
    if (
        found is None
        or raw is None
        or (pushed.digest and pushed.digest not in (digest, f"sha256:{sha256_hex(found[0])}"))
    ):
        raise IntegrityError(
            "the tag does not name what was pushed",
            where=f"{client.name}:{tag}",
            because=f"pushed {pushed.digest}, the tag names {digest}: another push was faster",
            hint="push again",
        )
    config = client.blob(str(data["config"]["digest"]))
    remote = Remote.parse(raw[0], config, f"{client.name}@{digest}")
    if tuple(row[1] for row in remote.layers) != image.diff_ids:
        raise IntegrityError(
            "the image in the registry has other layers than the engine's",
            where=f"{client.name}@{digest}",
            hint="push again",
        )
    return digest, raw[0], config, remote


def _report(remote: Remote, pushed: Pushed) -> list[dict[str, Any]]:
    # The classic store tells layers by their diff ID, the containerd store by their digest.
    return [
        {
            "layer": "",
            "diff_id": diff_id,
            "digest": digest,
            "bytes": size,
            "sent": bool({diff_id[7:19], digest[7:19]} & pushed.sent),
        }
        for digest, diff_id, size in remote.layers
    ]


def compression_of(manifest: bytes) -> str:
    """`gzip`, `zstd` or `none`, as the layers' media types say; several with a comma."""
    kinds = set()
    for layer in json.loads(manifest)["layers"]:
        kind = str(layer["mediaType"])
        kinds.add("zstd" if kind.endswith("zstd") else "gzip" if kind.endswith("gzip") else "none")
    return ",".join(sorted(kinds))


def as_text(data: dict[str, Any]) -> str:
    """What was pushed, for people."""
    width = max(len(row["layer"]) for row in data["layers"])
    lines = [f"{'layer':<{width}}       size  sent  digest"]
    for row in data["layers"]:
        sent = "yes" if row["sent"] else "no"
        lines.append(f"{row['layer']:<{width}}  {pretty_size(row['bytes']):>9}  {sent:>4}  {row['digest'][7:19]}")
    names = ("bytes_sent", "predicted_bytes", "bytes_there")
    sent, foreseen, there = (pretty_size(data[name]) for name in names)
    lines += [
        f"sent {sent} (predicted {foreseen}), {there} were there, {data['compression']}, {data['seconds']:.0f} s",
        "",
        f"{data['reference']}",
        f"  digest {data['digest']}",
        f"  signed with {data['signature']['key']}, SBOM of {data['sbom']['components']} components, provenance: read back and verified",
        f"  tags {', '.join(data['tags'])}",
    ]
    return "\n".join(lines)
