"""Images between real engines and a real registry: what moves, what breaks off and goes on, what is refused.

Tiny images of random layers, small ones below and a large one near the top, so that a push or pull can be stopped when the
small ones are through.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from builder.engine import Buildx, Engine
from builder.errors import BuilderError, BuildError, IntegrityError, UnreachableError, UsageError
from builder.labels import PARTIAL_LABEL
from builder.registry.client import RegistryClient
from builder.registry.pull import Remote, bytes_to_pull, known_layers, pull_image, read_remote
from builder.registry.push import compression_of, packed, require_zstd
from builder.registry.reference import Reference
from builder.registry.transport import push_image
from builder.settings import Settings
from tests.image.engines import Registry, SecondEngine, Throttle, small_disk, tiny_image

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]

SIZES = (1_000_000, 1_000_000, 12_000_000)
"""The layers from the bottom; then comes one with a program."""

QUICK = (1.0, 2.0, 4.0, 4.0)
"""Pauses between tries, so that nobody waits long."""


@dataclass(frozen=True)
class There:
    """An image in the registry. Run, it ends with status ``seed``."""

    reference: Reference
    remote: Remote
    seed: int

    @property
    def digest(self) -> str:
        return self.remote.digest

    @property
    def big(self) -> str:
        """The digest of the large layer."""
        return max(self.remote.layers, key=lambda layer: layer[2])[0]

    def through(self, proxy: Throttle) -> Reference:
        return Reference.parse(f"{proxy.address}/{self.reference.repository}")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    with Registry(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that images are made on and pushed from: not the one of all tests, whose pushes these would wait for."""
    with SecondEngine(tmp_path_factory.mktemp("maker")) as started:
        yield started.engine()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """A host with the classic store, which tries a layer once: the tries are ours, and nobody waits for the engine's own."""
    with SecondEngine(tmp_path_factory.mktemp("host"), config={"max-download-attempts": 1}) as started:
        yield started


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecondEngine]:
    """A host with the containerd store."""
    with SecondEngine(tmp_path_factory.mktemp("newer"), "containerd") as started:
        yield started


@pytest.fixture
def empty(host: SecondEngine) -> Iterator[SecondEngine]:
    """`host` without an image."""
    yield host
    for image in host.docker("images", "--all", "--quiet", "--no-trunc").stdout.split():
        host.docker("rmi", "--force", image, check=False)


@pytest.fixture(scope="module")
def make_there(
    registry: Registry, engine: Engine, buildx: Buildx, settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., There]]:
    """Make an image and push it; its names are gone at the end."""
    names: set[str] = set()

    def make(seed: int, sizes: tuple[int, ...] = SIZES) -> There:
        reference = Reference.parse(f"{registry.address}/team/tiny").with_tag(f"v{seed}-{sizes[0]}")
        tiny_image(buildx.argv, engine.host, tmp_path_factory.mktemp("tiny"), str(reference), sizes=sizes, seed=seed)
        names.add(str(reference))
        image = engine.find(str(reference))
        assert image is not None
        pushed = push_image(engine, image.id, reference, print)
        return There(reference, read_remote(RegistryClient(reference, settings), pushed.digest), seed)

    yield make
    for name in names:
        engine.remove(name)


@pytest.fixture(scope="module")
def one(make_there: Callable[..., There]) -> There:
    return make_there(41)


def status(host: SecondEngine, image: str) -> int:
    """Run an image on a host: the exit status of its program."""
    return host.docker("run", "--rm", "--network", "none", image, check=False).returncode


def fetched(registry: Registry, since: int = 0) -> dict[str, int]:
    """How often the registry sent each blob in full."""
    sent: dict[str, int] = {}
    for request in registry.requests()[since:]:
        if request.method == "GET" and request.blob:
            sent[request.blob] = sent.get(request.blob, 0) + request.bytes
    return {digest: count for digest, count in sent.items() if count}


def uploaded(registry: Registry, since: int = 0) -> list[str]:
    """The blobs whose upload was finished."""
    return [request.blob for request in registry.requests()[since:] if request.blob and request.method == "PUT"]


class Once:
    """Does something when a line of progress has these words for the ``count``-th time."""

    def __init__(self, words: str, count: int, action: Callable[[], None]) -> None:
        self.words, self.left, self.action = words, count, action
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self.words in line:
            self.left -= 1
            if self.left == 0:
                self.action()


def refusal(call: Callable[[], object], kind: type[BuilderError]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# --- what moves -------------------------------------------------------------------------------------------------------


def test_a_pull_says_what_came_and_what_was_there(
    one: There, make_there: Callable[..., There], registry: Registry, empty: SecondEngine
) -> None:
    two = make_there(42)
    engine = empty.engine()
    since = len(registry.requests())
    first = pull_image(engine, one.reference, one.digest, print, remote=one.remote)
    sizes = {digest: size for digest, _, size in one.remote.layers}
    assert first.bytes_pulled == sum(sizes.values())
    assert {digest: fetched(registry, since).get(digest) for digest in sizes} == sizes
    assert first.config == first.id == one.remote.config
    assert bytes_to_pull(two.remote, known_layers(engine)) == sum(size for _, _, size in two.remote.layers[2:])
    since = len(registry.requests())
    second = pull_image(engine, two.reference, two.digest, print, remote=two.remote)
    assert [layer.pulled for layer in second.layers] == [False, False, True, True]
    assert second.bytes_pulled == sum(size for _, _, size in two.remote.layers[2:])
    assert fetched(registry, since).keys() <= {two.remote.config, *(row[0] for row in two.remote.layers[2:])}


@pytest.mark.parametrize(("store", "again"), [("host", True), ("newer", False)])
def test_layers_above_one_that_changed(
    store: str, again: bool, one: There, make_there: Callable[..., There], request: pytest.FixtureRequest
) -> None:
    host: SecondEngine = request.getfixturevalue(store)
    other = make_there(41, (1_000_001, *SIZES[1:]))
    first = pull_image(host.engine(), one.reference, one.digest, print, remote=one.remote)
    foreseen = bytes_to_pull(other.remote, known_layers(host.engine()))
    second = pull_image(host.engine(), other.reference, other.digest, print, remote=other.remote)
    assert [layer.pulled for layer in second.layers] == [True, again, again, again]
    assert second.bytes_pulled == foreseen
    for pulled in (first, second):
        host.docker("rmi", "--force", pulled.id)


def test_a_pulled_image_has_no_name_and_runs(one: There, empty: SecondEngine) -> None:
    pulled = pull_image(empty.engine(), one.reference, one.digest, print)
    tags = json.loads(empty.docker("image", "inspect", "--format", "{{json .RepoTags}}", pulled.id).stdout)
    assert tags == []
    assert status(empty, pulled.id) == one.seed
    assert empty.engine().ours(PARTIAL_LABEL) == []


def test_a_layer_that_the_registry_has_is_not_sent_again(one: There, registry: Registry, engine: Engine) -> None:
    since = len(registry.requests())
    image = engine.find(str(one.reference))
    assert image is not None
    again = push_image(engine, image.id, one.reference.with_tag("again"), print)
    engine.remove(str(one.reference.with_tag("again")))
    assert (again.sent, again.digest) == (frozenset(), one.digest)
    assert uploaded(registry, since) == []


# --- what breaks off goes on -----------------------------------------------------------------------------------------


def test_an_interrupted_push_goes_on(
    registry: Registry, engine: Engine, buildx: Buildx, settings: Settings, tmp_path: Path
) -> None:
    with Throttle(registry.port, 6_000_000) as proxy:
        reference = Reference.parse(f"{proxy.address}/team/pushed").with_tag("v43")
        tiny_image(buildx.argv, engine.host, tmp_path / "tiny", "tiny:43", sizes=SIZES, seed=43)
        image = engine.find("tiny:43")
        assert image is not None
        since = len(registry.requests())

        def interrupt() -> None:
            raise KeyboardInterrupt

        try:
            with pytest.raises(KeyboardInterrupt):
                push_image(engine, image.id, reference, Once("pushed", 3, interrupt))
            assert engine.find(str(reference)) is None
            assert RegistryClient(reference, settings).manifest("v43") is None
            done = uploaded(registry, since)
            assert len(done) == 3
            pushed = push_image(engine, image.id, reference, print)
            assert len(pushed.sent) == 1
            # The config is a blob, too.
            assert len(uploaded(registry, since)) == 5
            assert len(set(uploaded(registry, since))) == 5
        finally:
            for name in ("tiny:43", str(reference)):
                if engine.find(name) is not None:
                    engine.remove(name)


def test_a_push_goes_on_when_the_registry_comes_back(
    registry: Registry, engine: Engine, buildx: Buildx, settings: Settings, tmp_path: Path
) -> None:
    with Throttle(registry.port, 6_000_000) as proxy:
        reference = Reference.parse(f"{proxy.address}/team/killed").with_tag("v44")
        tiny_image(buildx.argv, engine.host, tmp_path / "tiny", str(reference), sizes=SIZES, seed=44)
        image = engine.find(str(reference))
        assert image is not None
        since = len(registry.requests())

        def restart() -> None:
            registry.kill()
            registry.start()

        try:
            said = Once("pushed", 3, restart)
            pushed = push_image(engine, image.id, reference, said, pauses=QUICK)
        finally:
            engine.remove(str(reference))
        done = uploaded(registry, since)
        assert len(done) == len(set(done)) == 5
        assert any("retrying" in line for line in said.lines)
        digest, manifest = RegistryClient(reference, settings).image("v44")
        assert (digest, len(manifest["layers"])) == (pushed.digest, 4)


def test_a_pull_goes_on_when_the_registry_comes_back(one: There, registry: Registry, empty: SecondEngine) -> None:
    with Throttle(registry.port, 6_000_000) as proxy:

        def restart() -> None:
            registry.kill()
            threading.Timer(2, registry.start).start()

        since = len(registry.requests())
        said = Once("pull complete", 2, restart)
        pulled = pull_image(empty.engine(), one.through(proxy), one.digest, said, remote=one.remote, pauses=QUICK)
    assert pulled.tries > 1
    assert sum("already exists" in line for line in said.lines) >= 2
    # The two below came once; of the large one, what was on its way when the registry died came twice.
    for digest, _, size in one.remote.layers[:2]:
        assert fetched(registry, since)[digest] == size
    assert status(empty, pulled.id) == one.seed
    assert empty.engine().ours(PARTIAL_LABEL) == []


@pytest.mark.parametrize(("store", "words"), [("host", "pull complete"), ("newer", "download complete")])
def test_a_registry_that_stays_away_ends_a_pull_and_what_came_is_kept(
    store: str, words: str, one: There, registry: Registry, request: pytest.FixtureRequest
) -> None:
    host: SecondEngine = request.getfixturevalue(store)
    small = {row[0] for row in one.remote.layers[:2]}
    with Throttle(registry.port, 4_000_000) as proxy:
        where = one.through(proxy)
        # The containerd store says of all layers how far they are, in any order: the three small ones.
        said = Once(words, 2 if store == "host" else 3, registry.kill)
        with pytest.raises(UnreachableError) as caught:
            pull_image(host.engine(), where, one.digest, said, remote=one.remote, pauses=(0.5,))
        assert caught.value.exit_code == 5
        registry.start()
        known = known_layers(host.engine())
        assert bytes_to_pull(one.remote, known) < one.remote.layers[2][2] + 1000
        # An engine drops what nothing holds, in its own time.
        time.sleep(3)
        since = len(registry.requests())
        pulled = pull_image(host.engine(), where, one.digest, print, remote=one.remote)
        assert [layer.pulled for layer in pulled.layers][:3] == [False, False, True]
        assert not small & fetched(registry, since).keys()
    assert status(host, pulled.id) == one.seed
    assert (
        PARTIAL_LABEL
        not in host.docker("image", "inspect", *host.docker("images", "--all", "--quiet").stdout.split()).stdout
    )
    host.docker("rmi", "--force", pulled.id)


def test_an_engine_that_is_killed_goes_on_with_what_it_had(
    one: There, make_there: Callable[..., There], registry: Registry, empty: SecondEngine
) -> None:
    old = pull_image(empty.engine(), one.reference, one.digest, print, remote=one.remote)
    empty.docker("tag", old.id, "sglang-stack:tiny")
    two = make_there(45, (1_000_000, 1_000_000, 3_000_000, 12_000_000))
    with Throttle(registry.port, 6_000_000) as proxy:
        said = refusal(
            lambda: pull_image(
                empty.engine(), two.through(proxy), two.digest, Once("pull complete", 1, empty.kill), remote=two.remote
            ),
            BuildError,
        )
    assert said.startswith(f"error: the Docker Engine went away\n  at: {empty.address}\n")
    assert said.endswith("  hint: start it again; then the same command goes on, and what it had whole is kept")
    empty.start()
    assert status(empty, "sglang-stack:tiny") == one.seed
    pulled = pull_image(empty.engine(), two.reference, two.digest, print, remote=two.remote)
    assert [layer.pulled for layer in pulled.layers][:2] == [False, False]
    assert status(empty, pulled.id) == two.seed
    assert status(empty, "sglang-stack:tiny") == one.seed
    empty.docker("rmi", "sglang-stack:tiny")


@pytest.mark.parametrize("store", ["host", "newer"])
def test_a_registry_that_hangs_is_given_up(
    store: str, one: There, registry: Registry, request: pytest.FixtureRequest
) -> None:
    engine: SecondEngine = request.getfixturevalue(store)
    with Throttle(registry.port, 3_000_000) as proxy:
        began = proxy.down

        def hang() -> None:
            proxy.wait_for(lambda: proxy.down - began, 2_000_000)
            registry.pause()

        hanging = threading.Thread(target=hang)
        hanging.start()
        try:
            said = refusal(
                lambda: pull_image(
                    engine.engine(), one.through(proxy), one.digest, print, remote=one.remote, stall=4, pauses=()
                ),
                UnreachableError,
            )
        finally:
            hanging.join()
            registry.resume()
        assert said == (
            "error: the registry does not answer\n"
            f"  at: {one.through(proxy)}@{one.digest}\n"
            "  because: nothing came for 4 s, and the connections hang\n"
            "  hint: the same command goes on: layers that were whole are kept"
        )
        pulled = pull_image(engine.engine(), one.reference, one.digest, print, remote=one.remote, pauses=QUICK)
    assert status(engine, pulled.id) == one.seed
    engine.docker("rmi", "--force", pulled.id)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["host", "newer"])
def test_a_layer_that_was_tampered_with(
    store: str, one: There, make_there: Callable[..., There], registry: Registry, request: pytest.FixtureRequest
) -> None:
    host: SecondEngine = request.getfixturevalue(store)
    old = pull_image(host.engine(), one.reference, one.digest, print, remote=one.remote)
    host.docker("tag", old.id, "sglang-stack:tiny")
    two = make_there(46)
    file = registry.blob_path(two.big)
    raw = file.read_bytes()
    file.write_bytes(raw[:5000] + bytes(64) + raw[5064:])
    try:
        with pytest.raises(IntegrityError) as caught:
            pull_image(host.engine(), two.reference, two.digest, print, remote=two.remote)
    finally:
        file.write_bytes(raw)
    assert caught.value.exit_code == 7
    assert caught.value.what == "a layer is not what its digest says"
    assert two.big in caught.value.because
    assert host.engine().find(f"{two.reference.name}@{two.digest}") is None
    assert status(host, "sglang-stack:tiny") == one.seed
    # The registry is mended by now.
    assert status(host, pull_image(host.engine(), two.reference, two.digest, print, remote=two.remote).id) == two.seed
    host.docker("rmi", "--force", old.id)


def test_a_full_disk(
    one: There, make_there: Callable[..., There], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    huge = make_there(47, (1_000_000, 1_000_000, 90_000_000))
    with (
        small_disk(tmp_path / "disk", 100_000_000) as disk,
        SecondEngine(tmp_path / "host", data=disk, config={"max-download-attempts": 1}) as host,
    ):
        old = pull_image(host.engine(), one.reference, one.digest, print, remote=one.remote)
        host.docker("tag", old.id, "sglang-stack:tiny")
        with pytest.raises(BuildError) as caught:
            pull_image(host.engine(), huge.reference, huge.digest, print, remote=huge.remote, pauses=QUICK)
        assert caught.value.exit_code == 6
        assert (caught.value.what, caught.value.where) == ("the engine's disk is full", host.address)
        assert "no space left on device" in caught.value.because
        assert host.engine().find(f"{huge.reference.name}@{huge.digest}") is None
        assert status(host, "sglang-stack:tiny") == one.seed


def test_a_registry_that_is_not_there(one: There, registry: Registry, empty: SecondEngine, settings: Settings) -> None:
    registry.kill()
    try:
        reference, remote = one.reference, one.remote
        pulling = refusal(
            lambda: pull_image(empty.engine(), reference, one.digest, print, remote=remote, pauses=(0.1,)),
            UnreachableError,
        )
        client = RegistryClient(reference, settings)
        client.pause = lambda seconds: None
        asking = refusal(lambda: client.image("v41"), UnreachableError)
    finally:
        registry.start()
    head = "error: nothing answers at the registry's address\n"
    assert pulling.startswith(f"{head}  at: {reference.name}@{one.digest}\n  because: ")
    assert pulling.endswith("\n  hint: see that the registry runs, and the port")
    assert asking == (
        f"{head}  at: {reference.name}\n  because: [Errno 111] Connection refused\n"
        "  hint: see that the registry runs, and the port"
    )


def test_an_image_that_is_not_there(one: There, empty: SecondEngine, settings: Settings) -> None:
    hint = "see what it has: the tags are MATRIX-<first 12 of the lock digest>; put it there with `builder push`"
    assert refusal(lambda: RegistryClient(one.reference, settings).image("none"), UnreachableError) == (
        f"error: the registry has no such image\n  at: {one.reference.name}:none\n  hint: {hint}"
    )
    digest = f"sha256:{'0' * 64}"
    said = refusal(
        lambda: pull_image(empty.engine(), one.reference, digest, print, remote=one.remote), UnreachableError
    )
    assert said.startswith(f"error: the registry has no such image\n  at: {one.reference.name}@{digest}\n")
    assert said.endswith(f"\n  hint: {hint}")


# --- who is let in ----------------------------------------------------------------------------------------------------

# `tester` and `geheim`, by bcrypt.
HTPASSWD = "tester:$2b$04$BmvdlfOuQja4y5SnmDobcOfnQH/YkVbUw2QtLCc7ozt97VnIKinHy\n"
HELPER = '#!/bin/sh\ncat >/dev/null\necho \'{"ServerURL": "x", "Username": "tester", "Secret": "geheim"}\'\n'


@pytest.mark.parametrize("stored", ["file", "helper"])
def test_what_docker_login_stored_lets_us_and_the_engine_in(
    stored: str, one: There, engine: Engine, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    (tmp_path / "htpasswd").write_text(HTPASSWD, encoding="utf-8")
    image = engine.find(str(one.reference))
    assert image is not None
    with Registry(tmp_path / "registry", htpasswd=tmp_path / "htpasswd") as closed:
        reference = Reference.parse(f"{closed.address}/team/tiny").with_tag("v41")
        client = RegistryClient(reference, settings)
        assert refusal(lambda: client.manifest("v41"), UnreachableError) == (
            "error: the registry does not let us in\n"
            f"  at: {reference.name}\n"
            f"  because: no credentials are stored for `{closed.address}`: 401: UNAUTHORIZED: authentication required\n"
            f"  hint: `docker login {closed.address}`"
        )
        said = refusal(lambda: push_image(engine, image.id, reference, print), UnreachableError)
        assert said.startswith(f"error: the registry does not let us in\n  at: {reference}\n  because: ")
        assert said.endswith(f"\n  hint: `docker login {closed.address}`, with a user who may do this in `team/tiny`")
        assert engine.find(str(reference)) is None
        config: dict[str, object] = {"auths": {closed.address: {"auth": "dGVzdGVyOmdlaGVpbQ=="}}}
        if stored == "helper":
            config = {"credHelpers": {closed.address: "made"}}
            (tmp_path / "docker-credential-made").write_text(HELPER, encoding="utf-8")
            (tmp_path / "docker-credential-made").chmod(0o755)
            monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        (tmp_path / "docker" / "config.json").write_text(json.dumps(config), encoding="utf-8")
        try:
            pushed = push_image(engine, image.id, reference, print)
        finally:
            if engine.find(str(reference)):
                engine.remove(str(reference))
        assert RegistryClient(reference, settings).image("v41")[0] == pushed.digest == one.digest


def test_a_registry_with_a_certificate_of_the_sites_own(settings: Settings, tmp_path: Path) -> None:
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    argv += ["-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    pair = (tmp_path / "cert.pem", tmp_path / "key.pem")
    subprocess.run([*argv, "-out", str(pair[0]), "-keyout", str(pair[1])], check=True, capture_output=True)
    with Registry(tmp_path / "registry", tls=pair) as registry:
        reference = Reference.parse(f"{registry.address}/team/tiny")
        assert refusal(lambda: RegistryClient(reference, Settings()).tags(), UnreachableError) == (
            "error: the registry's certificate is not one that is trusted\n"
            f"  at: {reference.name}\n"
            "  because: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate\n"
            "  hint: name the site's authority: `ca` in config.toml, or BUILDER_CA"
        )
        assert RegistryClient(reference, Settings(ca=pair[0])).tags() == []


# --- zstd -------------------------------------------------------------------------------------------------------------


def test_zstd_where_the_engine_can(
    registry: Registry, newer: SecondEngine, empty: SecondEngine, buildx: Buildx, settings: Settings, tmp_path: Path
) -> None:
    engine = newer.engine()
    tiny_image(buildx.argv, newer.address, tmp_path / "tiny", "tiny:48", seed=48)
    image = engine.find("tiny:48")
    assert image is not None
    reference = Reference.parse(f"{registry.address}/team/zstd").with_tag("v48")
    made = packed(engine, image, reference)
    pushed = push_image(engine, made.id, reference, print)
    client = RegistryClient(reference, settings)
    raw = client.manifest("v48")
    assert raw is not None
    assert compression_of(raw[0]) == "zstd"
    remote = read_remote(client, pushed.digest)
    assert tuple(row[1] for row in remote.layers) == image.diff_ids
    # A host with the classic store takes them.
    pulled = pull_image(empty.engine(), reference, pushed.digest, print, remote=remote)
    assert status(empty, pulled.id) == 48


def test_zstd_where_the_engine_cannot(host: SecondEngine) -> None:
    assert refusal(lambda: require_zstd(host.engine()), UsageError) == (
        "error: this engine cannot push zstd layers\n"
        f"  at: {host.address}\n"
        "  because: its classic image store packs layers itself when it pushes them, and knows gzip alone\n"
        "  hint: `--compression gzip` (the default), or an engine with the containerd image store: "
        '`"features": {"containerd-snapshotter": true}` in its daemon.json, and build there'
    )
