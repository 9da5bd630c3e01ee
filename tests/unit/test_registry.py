"""Names in registries, what engines and registries say in words, what an image is in a registry."""

from __future__ import annotations

import io
import json
import tarfile
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import BuilderError, BuildError, IntegrityError, UnreachableError, UsageError
from builder.files import sha256_hex
from builder.labels import LABEL, PARTIAL_LABEL, STAND_IN_LABEL
from builder.registry import push as pushing
from builder.registry import words
from builder.registry.predict import row_of
from builder.registry.pull import Remote, bytes_to_pull, partial_image, partial_layout
from builder.registry.reference import Reference
from builder.registry.transport import Events, Pushed
from builder.settings import Settings

DIGEST = f"sha256:{'a' * 64}"

# --- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("localhost/x", ("localhost", "x", "", "")),
        ("registry.example.com/team/sglang-stack", ("registry.example.com", "team/sglang-stack", "", "")),
        ("127.0.0.1:5000/x:cu130", ("127.0.0.1:5000", "x", "cu130", "")),
        (f"[::1]:5000/x@{DIGEST}", ("[::1]:5000", "x", "", DIGEST)),
        (f"r.example/x_y/z--a:T.1@{DIGEST}", ("r.example", "x_y/z--a", "T.1", DIGEST)),
    ],
)
def test_a_reference(text: str, parts: tuple[str, ...]) -> None:
    found = Reference.parse(text)
    assert (found.registry, found.repository, found.tag, found.digest) == parts
    assert str(found) == text
    assert found.name == f"{parts[0]}/{parts[1]}"


HINT = "\n  hint: write REGISTRY/NAME, as in `registry.example.com/team/sglang-stack`"


@pytest.mark.parametrize(
    ("text", "shown", "because"),
    [
        ("team/stack", "team/stack", "the first part has to be a registry, with a dot or a port in it, or `localhost`"),
        ("https://user:word@r.example/x", "https://***@r.example/x", "it is a name and no URL"),
        ("r.example/Team", "r.example/Team", "the name of an image has no capital letters"),
        ("r.example/", "r.example/", "the first part has to be a registry, with a dot or a port in it, or `localhost`"),
        (
            "r.example/x\n--help",
            "r.example/x?--help",
            "the first part has to be a registry, with a dot or a port in it, or `localhost`",
        ),
    ],
)
def test_what_is_no_reference(text: str, shown: str, because: str) -> None:
    with pytest.raises(UsageError) as caught:
        Reference.parse(text)
    assert str(caught.value) == f"error: `{shown}` does not name an image in a registry\n  because: {because}{HINT}"


@given(st.text(max_size=60))
def test_any_text_is_a_reference_or_refused(text: str) -> None:
    try:
        found = Reference.parse(text)
    except UsageError:
        return
    assert str(found) == text


@pytest.mark.parametrize(
    ("registry", "loopback"),
    [
        ("localhost:1", True),
        ("127.0.0.9", True),
        ("[::1]:5000", True),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_what_is_on_the_loopback_address(registry: str, loopback: bool) -> None:
    assert Reference.parse(f"{registry}/x").is_loopback is loopback


# --- what engines say -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "kind", "what"),
    [
        ("write /data/tmp/GetImageBlob1: no space left on device", BuildError, "the engine's disk is full"),
        (
            f"filesystem layer verification failed for digest {DIGEST}",
            IntegrityError,
            "a layer is not what its digest says",
        ),
        (
            f'failed commit on ref "layer-{DIGEST}": commit failed: unexpected commit digest {DIGEST}',
            IntegrityError,
            "a layer is not what its digest says",
        ),
        (
            'Get "https://r.example/v2/": tls: failed to verify certificate: x509: certificate signed by unknown authority',
            UnreachableError,
            "the registry's certificate is not one that is trusted",
        ),
        (
            'Get "https://r.example/v2/": http: server gave HTTP response to HTTPS client',
            UnreachableError,
            "the registry speaks plain HTTP",
        ),
        (
            "denied: requested access to the resource is denied",
            UnreachableError,
            "the registry does not let us in",
        ),
        ("manifest for r.example/x:y not found: manifest unknown", UnreachableError, "the registry has no such image"),
        ("dial tcp: lookup r.example: no such host", UnreachableError, "the registry's name is not known"),
        (
            "dial tcp 127.0.0.1:5000: connect: connection refused",
            UnreachableError,
            "nothing answers at the registry's address",
        ),
        ("net/http: TLS handshake timeout", UnreachableError, "the registry does not answer in time"),
        ("unexpected EOF", UnreachableError, "the registry broke the connection off"),
        (
            "received unexpected HTTP status: 503 Service Unavailable",
            UnreachableError,
            "the registry broke the connection off",
        ),
        ("something new", BuildError, "the Docker Engine refused"),
    ],
)
def test_what_an_engine_says(said: str, kind: type[BuilderError], what: str) -> None:
    error = words.engine_said(said, "r.example/team/x:y", engine="unix:///e")
    assert (type(error), error.what, error.because) == (kind, what, said)


def test_hints_name_the_registry_of_a_reference() -> None:
    for where in ("r.example:5000/team/x:y", f"r.example:5000/team/x@{DIGEST}", "r.example:5000/team/x"):
        error = words.engine_said("denied", where, engine="unix:///e")
        assert error.hint == "`docker login r.example:5000`, with a user who may do this in `team/x`"


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ("EOF", True),
        ("connection refused", True),
        ("no space left on device", False),
        ("x509: unknown", False),
        ("new", False),
    ],
)
def test_what_is_worth_another_try(said: str, again: bool) -> None:
    assert words.worth_again(said) is again


def test_a_full_disk_is_told_even_where_it_broke_a_connection() -> None:
    error = words.engine_said("write: no space left on device: unexpected EOF", "r.example/x", engine="unix:///e")
    assert (error.what, error.where) == ("the engine's disk is full", "unix:///e")


# --- events -----------------------------------------------------------------------------------------------------------


def test_events_of_a_push() -> None:
    events = Events()
    digits = "a" * 12
    said: list[dict[str, Any]] = [
        {"status": "Pushing", "id": digits, "progressDetail": {"current": 1, "total": 2}},
        {"status": "Pushing", "id": digits, "progressDetail": {"current": 2, "total": 2}},
        {"status": "Pushed", "id": digits},
        {"aux": {"Tag": "x", "Digest": DIGEST, "Size": 1}},
    ]
    assert [events.feed(event) for event in said] == [digits, "", digits, ""]
    assert events.has(DIGEST, "Pushed")
    assert (events.ended, events.digest, events.moved) == (True, DIGEST, {digits: (2, 2)})


def test_the_last_words_of_a_push_to_the_containerd_store() -> None:
    events = Events()
    events.feed({"status": f"v1: digest: {DIGEST} size: 1161"})
    assert (events.ended, events.digest) == (True, DIGEST)


def test_an_answer_without_last_words_has_not_ended() -> None:
    events = Events()
    events.feed({"status": "Pull complete", "id": "a" * 12})
    assert events.ended is False


# --- an image in a registry -------------------------------------------------------------------------------------------


def made(diff_ids: list[str], layers: int | None = None) -> tuple[bytes, bytes]:
    config = json.dumps({"rootfs": {"diff_ids": diff_ids}}).encode()
    count = len(diff_ids) if layers is None else layers
    manifest = {
        "config": {"digest": f"sha256:{sha256_hex(config)}"},
        "layers": [{"digest": f"sha256:{n}", "size": 10**n} for n in range(count)],
    }
    return json.dumps(manifest).encode(), config


def test_manifest_and_config() -> None:
    manifest, config = made(["sha256:x", "sha256:y"])
    remote = Remote.parse(manifest, config, "r.example/x")
    assert remote.digest == f"sha256:{sha256_hex(manifest)}"
    assert remote.layers == (("sha256:0", "sha256:x", 1), ("sha256:1", "sha256:y", 10))
    assert bytes_to_pull(remote, {"sha256:x"}) == 10


def test_manifest_and_config_that_do_not_belong_together() -> None:
    manifest, config = made(["sha256:x"], layers=2)
    with pytest.raises(IntegrityError) as caught:
        Remote.parse(manifest, config, "r.example/x")
    digest = f"sha256:{sha256_hex(config)}"
    assert str(caught.value) == (
        "error: config and manifest of the image do not belong together\n"
        "  at: r.example/x\n"
        f"  because: the manifest names {digest} and has 2 layers, the config has {digest} and 1"
    )


def test_an_image_that_holds_layers_has_none_in_its_archive() -> None:
    raw, image = partial_image([("sha256:1", "sha256:aa", 5), ("sha256:2", "sha256:bb", 6)])
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        assert archive.getnames() == ["config.json", "manifest.json"]
        file, listed = archive.extractfile("config.json"), archive.extractfile("manifest.json")
        assert file is not None and listed is not None
        config = file.read()
        assert json.load(listed) == [{"Config": "config.json", "RepoTags": None, "Layers": ["aa.tar", "bb.tar"]}]
    assert image == f"sha256:{sha256_hex(config)}"
    assert json.loads(config)["rootfs"]["diff_ids"] == ["sha256:aa", "sha256:bb"]
    assert json.loads(config)["config"]["Labels"] == {PARTIAL_LABEL: "1"}


def test_the_same_for_the_containerd_store() -> None:
    raw, name = partial_layout([("sha256:1", "sha256:aa", 5)])
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = files[f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}"]
    assert f"sha256:{sha256_hex(manifest)}" == entry["digest"]
    assert name == f"sglang-stack-partial:{sha256_hex(manifest)[:12]}"
    layers = json.loads(manifest)["layers"]
    assert [(layer["digest"], layer["size"]) for layer in layers] == [("sha256:1", 5)]
    config = json.loads(files[f"blobs/sha256/{json.loads(manifest)['config']['digest'].removeprefix('sha256:')}"])
    # One for the host would be unpacked.
    assert (config["architecture"], config["rootfs"]["diff_ids"]) == ("s390x", ["sha256:aa"])


def test_which_row_of_a_plan_a_layer_is() -> None:
    made_by = {
        "ADD rootfs.tar / # buildkit": "os",
        "RUN /bin/sh -c echo >>/etc/passwd": "os",
        "WORKDIR /": "os",
        "RUN python3.11 -m venv --without-pip /opt/venv": "python",
        "RUN /bin/sh -c layer=torch; uv pip install": "torch",
        "RUN /bin/sh -c cp /mnt/passed/smoke.json /opt": "proof",
        "RUN true": "",
    }
    assert {text: row_of(text) for text in made_by} == made_by


# --- push -------------------------------------------------------------------------------------------------------------


def prepared(name: str = "cu130") -> Any:
    lock = SimpleNamespace(digest="c" * 64)
    loaded = SimpleNamespace(matrix=SimpleNamespace(name=name))
    names = (f"sglang-stack:{name}-{'c' * 12}", f"sglang-stack:{name}")
    return SimpleNamespace(lock=lock, loaded=loaded, names=names, rendered=SimpleNamespace(digest="in"))


def test_the_tag_comes_from_the_content() -> None:
    to = pushing.target_of(prepared(), None, Settings(registry="r.example/team/x"))
    assert str(to.reference) == f"r.example/team/x:cu130-{'c' * 12}"
    assert (
        str(pushing.target_of(prepared(), "o.example/y", Settings(registry="r.example/x")).reference.name)
        == "o.example/y"
    )


def test_without_a_registry_nothing_is_pushed() -> None:
    with pytest.raises(UsageError) as caught:
        pushing.target_of(prepared(), None, Settings())
    assert str(caught.value) == (
        "error: no registry is named\n  because: there is no default one\n"
        '  hint: `--to REGISTRY/NAME`, or `registry = "REGISTRY/NAME"` in config.toml'
    )


def test_a_tag_of_ones_own_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        pushing.target_of(prepared(), "r.example/x:latest", Settings())
    assert str(caught.value) == (
        "error: `r.example/x:latest` has a tag\n"
        "  because: the tag comes from the content: MATRIX-<first 12 of the lock digest>\n"
        "  hint: write `r.example/x`; `--moving-tag` of a push puts MATRIX there, too"
    )


class FakeEngine:
    """A stand-in for an engine with one image of these labels under every name."""

    host = "unix:///e"

    def __init__(self, labels: dict[str, str] | None) -> None:
        self.labels = labels

    def find(self, _: str) -> Any:
        return SimpleNamespace(id="sha256:i", labels=self.labels) if self.labels is not None else None


def refused(labels: dict[str, str] | None) -> BuilderError:
    from pathlib import Path

    with pytest.raises(BuilderError) as caught:
        pushing.pushable(FakeEngine(labels), prepared(), Path("matrices/cu130.yaml"))  # type: ignore[arg-type]
    return caught.value


def test_a_stand_in_is_never_pushed() -> None:
    error = refused({STAND_IN_LABEL: "torch,sgl-kernel", f"{LABEL}.lock": "c" * 64, f"{LABEL}.inputs": "in"})
    assert error.exit_code == 3
    assert str(error) == (
        f"error: `sglang-stack:cu130-{'c' * 12}` is not what it is called, and nothing may push or bundle it\n"
        "  at: unix:///e\n"
        "  because: it has the label `sglang-stack.stand-in`: others stand in for torch, sgl-kernel\n"
        "  hint: it is for tests on this machine; docs/standin.md"
    )


@pytest.mark.parametrize(
    ("labels", "because"),
    [
        (None, f"the engine has no `sglang-stack:cu130-{'c' * 12}`"),
        ({f"{LABEL}.lock": "d" * 64}, f"the engine has no `sglang-stack:cu130-{'c' * 12}`"),
        (
            {f"{LABEL}.lock": "c" * 64, f"{LABEL}.inputs": "old"},
            f"`sglang-stack:cu130-{'c' * 12}` was built from another state of the matrix, its patches or this builder",
        ),
    ],
)
def test_only_the_image_of_the_matrix_as_it_is_now(labels: dict[str, str] | None, because: str) -> None:
    error = refused(labels)
    assert str(error) == (
        "error: there is no image of this matrix as it is now\n  at: unix:///e\n"
        f"  because: {because}\n  hint: build it: `builder build cu130`"
    )


def test_the_image_of_these_inputs_is_pushed() -> None:
    from pathlib import Path

    labels = {f"{LABEL}.lock": "c" * 64, f"{LABEL}.inputs": "in"}
    found = pushing.pushable(FakeEngine(labels), prepared(), Path("matrices/cu130.yaml"))  # type: ignore[arg-type]
    assert found.id == "sha256:i"


def test_what_was_sent_is_told_by_diff_id_or_digest() -> None:
    layers = tuple((f"sha256:{d * 64}", f"sha256:{i * 64}", 1) for d, i in (("1", "a"), ("2", "b"), ("3", "c")))
    remote = Remote(DIGEST, DIGEST, layers)
    rows = pushing._report(remote, Pushed(DIGEST, frozenset({"a" * 12, "2" * 12}), 1))
    assert [row["sent"] for row in rows] == [True, True, False]


def test_compression_by_media_type() -> None:
    kinds = ["application/vnd.docker.image.rootfs.diff.tar.gzip", "application/vnd.oci.image.layer.v1.tar+zstd"]
    assert (
        pushing.compression_of(json.dumps({"layers": [{"mediaType": kind} for kind in kinds]}).encode()) == "gzip,zstd"
    )
