"""Bundles: what is written is verified as a whole, and what was changed since is refused before an engine sees it."""

from __future__ import annotations

import errno
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from builder.engine import Image
from builder.errors import BuildError, IntegrityError, UsageError
from builder.files import canonical_json, pretty_size
from builder.trust.archive import BLOCK, Archive, blob_name, header, padding
from builder.trust.bundle import _engine_stream, load_into, verify_bundle
from builder.trust.bundling import Writer, diff_ids, from_engine, image_manifest, take_apart, write_rest
from builder.trust.layout import FormError, digest_of, parse_manifest
from builder.trust.verify import Verified
from tests.trust_made import MadeImage, key, tar_of

pytestmark = pytest.mark.usefixtures("stand_in_cosign")

OURS = key().public


@pytest.fixture
def image() -> MadeImage:
    return MadeImage()


def written(image: MadeImage, target: Path, *, signed: bool = True) -> Path:
    made = image.signed(name="sglang-stack")
    with Writer(target) as writer:
        for data in image.packed:
            writer.add_stream(iter([data]))
        both = (made.signature, made.attestations) if signed else (None, None)
        write_rest(writer, image.manifest, image.config, *both)
        writer.close()
        writer.publish()
    return target


def repacked(path: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """The bundle with its files exchanged."""
    archive = Archive(path)
    files = {name: b"".join(archive.chunks(name)) for name in archive.members}
    archive.close()
    change(files)
    rows = [header(name, len(data)) + data + padding(len(data)) for name, data in files.items()]
    path.write_bytes(b"".join(rows) + b"\0" * (2 * BLOCK))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(IntegrityError) as caught:
        verify_bundle(path, OURS).require()
    return str(caught.value)


def test_what_is_written_is_verified(image: MadeImage, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    found = verify_bundle(
        written(image, tmp_path / "b.tar"), OURS, lock=image.lock, progress=lambda *at: seen.append(at)
    )
    total = sum(map(len, image.packed))
    assert found.ok and found.signed
    assert found.checks[1].detail == f"manifest, config and 2 layers, {pretty_size(total)}"
    assert seen[-1] == (total, total)


def test_the_same_image_gives_the_same_bytes(image: MadeImage, tmp_path: Path) -> None:
    assert written(image, tmp_path / "a").read_bytes() == written(image, tmp_path / "b").read_bytes()


def test_nothing_is_left_where_writing_fails(image: MadeImage, tmp_path: Path) -> None:
    (tmp_path / "b.tar").write_text("the old one")

    def breaks_off() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(BuildError) as caught, Writer(tmp_path / "b.tar") as writer:
        writer.add_stream(breaks_off())
    assert str(caught.value) == (
        "error: the bundle could not be written\n"
        f"  at: {tmp_path / 'b.tar'}\n"
        "  because: No space left on device\n"
        "  hint: it needs about half of what the image has unpacked; what was there under its name is untouched"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["b.tar"]
    assert (tmp_path / "b.tar").read_text() == "the old one"


def test_a_layer_that_comes_twice_is_there_once(tmp_path: Path) -> None:
    with Writer(tmp_path / "b.tar") as writer:
        first = writer.add_stream(iter([b"abc"]))
        assert writer.add_stream(iter([b"a", b"bc"])) == first
        writer.add("index.json", b"{}")
        writer.close()
        writer.publish()
    archive = Archive(tmp_path / "b.tar")
    assert list(archive.members) == [blob_name(first[0]), "index.json"]
    archive.close()


# -------------------------------------------------------------------------------------------------------- refused


def test_not_signed(image: MadeImage, tmp_path: Path) -> None:
    assert "signature: the image is not signed\n" in refusal(written(image, tmp_path / "b.tar", signed=False))


def test_a_layer_that_was_changed(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    digest = digest_of(image.packed[0])
    said = refusal(repacked(path, lambda files: files.update({blob_name(digest): b"y" * len(image.packed[0])})))
    assert said == (
        "error: the image is not verified: digest\n"
        f"  at: {path}, {image.digest}\n"
        f"  because: digest: a blob is not what its digest says: {digest} has {digest_of(b'y' * len(image.packed[0]))}\n"
        "    passed: signature, labels, lock, sbom, provenance, contents, stand-in\n"
        "  hint: copy the bundle again"
    )


def test_a_layer_of_another_size(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    digest = digest_of(image.packed[0])
    said = refusal(repacked(path, lambda files: files.update({blob_name(digest): b""})))
    assert f"digest: a layer has another size than the manifest says: {digest}\n" in said


def test_the_proof_layer_that_was_changed(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    digest = digest_of(image.packed[-1])
    said = refusal(repacked(path, lambda files: files.update({blob_name(digest): b"y" * len(image.packed[-1])})))
    assert f"lock: a blob is not what its digest says: {digest} has sha256:" in said


def first_entry(image: MadeImage, kind: str) -> str:
    made = image.signed(name="sglang-stack")
    one = {"sig": made.signature, "att": made.attestations}[kind]
    return blob_name(parse_manifest(one.manifest).layers[0].digest)


@pytest.mark.parametrize(("kind", "check"), [("sig", "signature"), ("att", "sbom")])
def test_what_is_attached_was_changed(image: MadeImage, tmp_path: Path, kind: str, check: str) -> None:
    path = written(image, tmp_path / "b.tar")
    name = first_entry(image, kind)
    said = refusal(repacked(path, lambda files: files.update({name: files[name][:-1] + b" "})))
    assert f"{check}: a blob is not what its digest says: " in said


def damage(files: dict[str, bytes], **changes: bytes | None) -> None:
    for name, data in changes.items():
        full = name.replace("_", ".")
        if data is None:
            del files[full]
        else:
            files[full] = data


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: f.pop("oci-layout"), "it has no `oci-layout`"),
        (lambda f: f.update({"oci-layout": b"{}"}), "its `oci-layout` is of another version"),
        (lambda f: f.pop("index.json"), "it has no `index.json`"),
        (lambda f: f.update({"index.json": b"{"}), "it is no JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (lambda f: f.update({"index.json": b'{"manifests": []}'}), "index.json lists no image"),
        (lambda f: f.pop("manifest.json"), "it has no `manifest.json`"),
        (lambda f: f.update({"manifest.json": b"[]"}), "its `manifest.json` names another image than its `index.json`"),
        (lambda f: f.update({blob_name(digest_of(b"x")): b"x"}), f"it has a file that nothing names: `{blob_name(digest_of(b'x'))}`"),
    ],
)  # fmt: skip
def test_another_form(
    image: MadeImage, tmp_path: Path, change: Callable[[dict[str, bytes]], object], words: str
) -> None:
    path = written(image, tmp_path / "b.tar")
    assert refusal(repacked(path, change)) == (
        "error: the bundle cannot be used\n"
        f"  at: {path}\n"
        f"  because: {words}\n"
        "  hint: copy it again, or make it again: `builder bundle MATRIX -o FILE`"
    )


def test_a_missing_layer(image: MadeImage, tmp_path: Path) -> None:
    name = blob_name(digest_of(image.packed[0]))
    path = repacked(written(image, tmp_path / "b.tar"), lambda files: files.pop(name))
    assert f"because: it has no `{name}`\n" in refusal(path)


def test_half_of_a_copy(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    data = path.read_bytes()
    for length in (0, 100, len(data) // 3, len(data) - 600):
        path.write_bytes(data[:length])
        assert "because: it ends in the middle" in refusal(path)


def test_two_images(image: MadeImage, tmp_path: Path) -> None:
    def twice(files: dict[str, bytes]) -> None:
        index = json.loads(files["index.json"])
        index["manifests"].append(index["manifests"][0])
        files["index.json"] = canonical_json(index)

    said = refusal(repacked(written(image, tmp_path / "b.tar"), twice))
    assert "because: index.json lists no manifests, or more than an image and what is attached to it\n" in said


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such bundle"):
        verify_bundle(tmp_path / "none", OURS)


# --------------------------------------------------------------------------------------------------- to an engine


def streamed(path: Path, found: Verified) -> bytes:
    archive = Archive(path)
    try:
        return b"".join(_engine_stream(archive, found, lambda done, total: None))
    finally:
        archive.close()


def test_what_an_engine_is_given(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    found = verify_bundle(path, OURS).require()
    with tarfile.open(fileobj=io.BytesIO(streamed(path, found))) as archive:
        names = archive.getnames()
        said = json.load(archive.extractfile("manifest.json"))  # type: ignore[arg-type]
    assert names[-1] == "manifest.json"
    assert said == [
        {
            "Config": blob_name(digest_of(image.config)),
            "RepoTags": None,
            "Layers": [blob_name(digest_of(data)) for data in image.packed],
        }
    ]
    # Nothing of what proves it: an engine keeps none of it.
    assert set(names) == {
        "oci-layout",
        "index.json",
        "manifest.json",
        blob_name(image.digest),
        blob_name(digest_of(image.config)),
        *(blob_name(digest_of(data)) for data in image.packed),
    }


def test_changed_after_it_was_verified(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    found = verify_bundle(path, OURS).require()
    digest = digest_of(image.packed[0])
    repacked(path, lambda files: files.update({blob_name(digest): b"y" * len(image.packed[0])}))
    with pytest.raises(FormError, match="a blob is not what its digest says"):
        streamed(path, found)


def test_what_was_not_verified_is_not_loaded(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar", signed=False)
    engine: Any = object()
    with pytest.raises(IntegrityError, match="the bundle was not verified"):
        load_into(engine, path, verify_bundle(path, OURS))


class StandInEngine:
    """An engine that reads what it is given, and then says something."""

    host = "unix:///made"

    def __init__(self, *events: dict[str, object]) -> None:
        self.events = events
        self._client = self
        self.api = self

    def load_image(self, data: Iterator[bytes], quiet: bool) -> Iterator[dict[str, object]]:
        for _ in data:
            pass
        yield from self.events

    def find(self, reference: str) -> None:
        return None


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            {"error": "write /var/lib/docker/tmp/x: no space left on device"},
            (
                "error: the engine's disk is full\n  at: unix:///made\n"
                "  because: write /var/lib/docker/tmp/x: no space left on device\n"
                "  hint: free space there: `docker system df`, `builder prune --yes`"
            ),
        ),
        (
            {"error": "invalid tar header"},
            "error: the engine did not take the image\n  at: unix:///made\n  because: invalid tar header",
        ),
        (
            {"stream": "Loaded image ID: sha256:x"},
            (
                "error: the engine loaded another image than it was given\n  at: unix:///made\n"
                "  because: it has none with the id IMAGE"
            ),
        ),
    ],
)
def test_an_engine_that_refuses(image: MadeImage, tmp_path: Path, event: dict[str, object], message: str) -> None:
    path = written(image, tmp_path / "b.tar")
    engine: Any = StandInEngine(event)
    with pytest.raises(BuildError) as caught:
        load_into(engine, path, verify_bundle(path, OURS))
    assert str(caught.value) == message.replace("IMAGE", digest_of(image.config))


def test_a_file_that_changes_while_an_engine_reads(image: MadeImage, tmp_path: Path) -> None:
    path = written(image, tmp_path / "b.tar")
    found = verify_bundle(path, OURS)
    repacked(path, lambda files: files.update({blob_name(digest_of(image.packed[0])): b"y" * len(image.packed[0])}))
    engine: Any = StandInEngine()
    with pytest.raises(IntegrityError, match="the bundle cannot be used"):
        load_into(engine, path, found)


# ------------------------------------------------------------------------------------------------- from an engine


def saved(image: MadeImage, form: str) -> bytes:
    """`docker save` in the form of Engine 25 and newer, of older ones, or of the containerd store (compressed)."""
    files: dict[str, bytes] = {}
    config = digest_of(image.config).removeprefix("sha256:")
    if form == "old":
        files[f"{config}.json"] = image.config
        names = [f"layer{number}/layer.tar" for number in range(len(image.layers))]
        for name, layer in zip(names, image.layers, strict=True):
            files[name.replace("layer.tar", "VERSION")] = b"1.0"
            files[name.replace("layer.tar", "json")] = b'{"id": "x"}'
            files[name] = layer
        at = f"{config}.json"
    else:
        layers = [gzip.compress(layer) for layer in image.layers] if form == "containerd" else image.layers
        at = f"blobs/sha256/{config}"
        names = [blob_name(digest_of(layer)) for layer in layers]
        files |= {at: image.config, **dict(zip(names, layers, strict=True)), blob_name(image.digest): image.manifest}
        files["index.json"] = b"{}"
    files["manifest.json"] = json.dumps([{"Config": at, "RepoTags": ["x:y"], "Layers": names}]).encode()
    return tar_of(dict(sorted(files.items())))


@pytest.mark.parametrize("form", ["new", "old", "containerd"])
def test_taken_apart(image: MadeImage, tmp_path: Path, form: str) -> None:
    data = saved(image, form)
    with Writer(tmp_path / "b.tar") as writer:
        config, layers = take_apart((data[at : at + 1000] for at in range(0, len(data), 1000)), writer)
        writer.close()
        writer.publish()
    assert config == image.config
    # Compressed here, the layers have one digest whatever form they came in.
    assert [layers[name].digest for name in diff_ids(config)] == [digest_of(packed) for packed in image.packed]


class SavingEngine(StandInEngine):
    """An engine that saves what it is told to."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def get_image(self, name: str) -> Iterator[bytes]:
        yield self.data


def engine_image(image: MadeImage) -> Image:
    diff_ids = tuple(digest_of(layer) for layer in image.layers)
    return Image(digest_of(image.config), ("sglang-stack:tiny",), image.labels, 5000, diff_ids)


def test_what_an_engine_saves_is_the_image(image: MadeImage, tmp_path: Path) -> None:
    engine: Any = SavingEngine(saved(image, "new"))
    with Writer(tmp_path / "b.tar") as writer:
        config, layers = from_engine(engine, engine_image(image), writer, lambda done, total: None)
    assert image_manifest(config, layers) == image.manifest


def test_an_engine_that_saves_other_layers(image: MadeImage, tmp_path: Path) -> None:
    other = MadeImage()
    other.edit("smoke.json", ok=False)
    engine: Any = SavingEngine(saved(other, "new"))
    with pytest.raises(IntegrityError) as caught, Writer(tmp_path / "b.tar") as writer:
        from_engine(engine, engine_image(image), writer, lambda done, total: None)
    assert str(caught.value) == (
        "error: the engine saved other layers than the image has\n"
        f"  at: {digest_of(image.config)}\n"
        "  because: their contents do not have the diff IDs that the engine lists\n"
        "  hint: its storage is damaged: build the image again"
    )


def test_a_layer_whose_bytes_are_not_its_diff_id(image: MadeImage, tmp_path: Path) -> None:
    data = saved(image, "new")
    # In the first layer's content, past the header of the tar archive in the archive.
    at = data.index(b"x" * 3000)
    engine: Any = SavingEngine(data[:at] + b"y" + data[at + 1 :])
    with pytest.raises(IntegrityError, match="other layers than the image has"), Writer(tmp_path / "b.tar") as writer:
        from_engine(engine, engine_image(image), writer, lambda done, total: None)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_breaks_off(image: MadeImage, tmp_path: Path) -> None:
    with Writer(tmp_path / "b.tar") as writer, pytest.raises((tarfile.TarError, FormError)):
        take_apart([saved(image, "new")[:4000]], writer)
    assert not list(tmp_path.iterdir())
