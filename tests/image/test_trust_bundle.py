"""A bundle from the engine to other engines, without a registry: verified by us and by the real cosign, loaded, proven again there."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder.build import Prepared
from builder.cli import main
from builder.engine import Image
from builder.errors import IntegrityError
from builder.trust.archive import Archive
from builder.trust.bundle import load_into, verify_bundle
from builder.trust.cosign import public_key
from builder.trust.layout import parse_manifest
from tests.image.engines import SecondEngine
from tests.image.test_trust import Signed, built, key_pair, signed, trusted

pytestmark = pytest.mark.image

# Fixtures of the other file.
__all__ = ["built", "signed", "trusted"]

Docker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def keys(cosign: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    key_pair(cosign, folder)
    return folder


@pytest.fixture(scope="module")
def file(trusted: Prepared, built: Image, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, as a user makes it."""
    target = tmp_path_factory.mktemp("bundle") / "trusted.bundle"
    assert main(["bundle", str(trusted.loaded.path), "-o", str(target), "--key", str(keys / "cosign.key")]) == 0
    return target


@pytest.fixture(params=["classic", "containerd"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SecondEngine]:
    with SecondEngine(tmp_path / "host", request.param) as engine:
        yield engine


def names(trusted: Prepared) -> tuple[str, str]:
    return f"sglang-stack:trusted-{trusted.lock.digest[:12]}", "sglang-stack:trusted"


def test_a_bundle_is_verified(file: Path, keys: Path, built: Image, capsys: pytest.CaptureFixture[str]) -> None:
    other = ["--signed-as", "registry.example/other"]
    assert main(["verify", str(file), "--pub", str(keys / "cosign.pub"), *other]) == 7
    capsys.readouterr()
    assert main(["verify", str(file), "--pub", str(keys / "cosign.pub"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert all(check["ok"] for check in said["checks"])
    assert said["image"] == built.id


def test_cosign_alone_verifies_it(file: Path, keys: Path, cosign: str, tmp_path: Path) -> None:
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path / "layout", filter="data")
    for command in (["verify"], ["verify-attestation", "--type", "cyclonedx"]):
        argv = [cosign, *command, "--key", str(keys / "cosign.pub"), "--insecure-ignore-tlog=true", "--local-image"]
        done = subprocess.run([*argv, str(tmp_path / "layout")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_made_again_only_the_signatures_differ(file: Path, trusted: Prepared, keys: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["bundle", str(trusted.loaded.path), "-o", str(again), "--key", str(keys / "cosign.key")]) == 0
    key = public_key(keys / "cosign.pub")
    one, two = verify_bundle(file, key).require(), verify_bundle(again, key).require()
    assert one.manifest == two.manifest


def test_out_of_a_registry_it_is_as_signed_there(signed: Signed, tmp_path: Path) -> None:
    target, path = tmp_path / "from", str(signed.prepared.loaded.path)
    where = ["--from", signed.client.name, "--pub", signed.pub]
    assert main(["bundle", path, "-o", str(target), *where]) == 0
    assert verify_bundle(target, signed.key.public).require().digest == signed.digest
    assert main(["bundle", path, "-o", str(tmp_path / "again"), *where]) == 0
    assert (tmp_path / "again").read_bytes() == target.read_bytes()


def test_onto_an_engine_that_has_nothing(
    file: Path,
    keys: Path,
    trusted: Prepared,
    host: SecondEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host.address)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    # There need not be a GPU here, which is what doctor asks for.
    command = ["load", str(file), "--pub", str(keys / "cosign.pub"), "--anyway", "--json"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)["hosts"]
    assert (row["state"], row["smoke"]["ok"]) == ("tagged", True)
    listed = host.docker("images", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    assert sorted(listed) == sorted(names(trusted))
    # Once more: nothing to do but to say so.
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["hosts"][0]["state"] == "had it"


def other_image(host: SecondEngine, tmp_path: Path, trusted: Prepared) -> str:
    """Another image under the names that a load would give."""
    (tmp_path / "empty").mkdir()
    made = subprocess.run(["tar", "-C", str(tmp_path / "empty"), "-c", "."], capture_output=True, check=True)
    (tmp_path / "empty.tar").write_bytes(made.stdout)
    for name in names(trusted):
        host.docker("import", str(tmp_path / "empty.tar"), name)
    return host.docker("inspect", "--format", "{{.Id}}", names(trusted)[1]).stdout


def flip(file: Path, target: Path, layer: int) -> Path:
    """A copy with a bit of a layer changed."""
    archive = Archive(file)
    manifest = archive.blob(json.loads(archive.small("index.json"))["manifests"][0]["digest"])
    member = archive.members["blobs/sha256/" + parse_manifest(manifest).layers[layer].digest[7:]]
    archive.close()
    data = bytearray(file.read_bytes())
    data[member.offset + member.size // 2] ^= 1
    target.write_bytes(bytes(data))
    return target


@pytest.mark.parametrize("host", ["classic"], indirect=True)
def test_a_layer_that_was_changed_leaves_all_as_it_was(
    file: Path,
    keys: Path,
    trusted: Prepared,
    host: SecondEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = other_image(host, tmp_path, trusted)
    monkeypatch.setenv("DOCKER_HOST", host.address)
    bad = flip(file, tmp_path / "bad.bundle", 0)
    assert main(["load", str(bad), "--pub", str(keys / "cosign.pub")]) == 7
    assert "because: digest: a blob is not what its digest says: sha256:" in capsys.readouterr().err
    assert host.docker("inspect", "--format", "{{.Id}}", names(trusted)[1]).stdout == before


@pytest.mark.parametrize("host", ["classic", "containerd"], indirect=True)
def test_changed_while_it_is_loaded(
    file: Path, keys: Path, trusted: Prepared, host: SecondEngine, tmp_path: Path
) -> None:
    before = other_image(host, tmp_path, trusted)
    verified = verify_bundle(file, public_key(keys / "cosign.pub")).require()
    with pytest.raises(IntegrityError, match="the bundle cannot be used"):
        load_into(host.engine(), flip(file, tmp_path / "bad.bundle", -1), verified)
    assert host.docker("inspect", "--format", "{{.Id}}", names(trusted)[1]).stdout == before
    assert host.engine().find(verified.image) is None


def test_no_key_no_bundle(trusted: Prepared, built: Image, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bundle", str(trusted.loaded.path), "-o", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.startswith("error: no key is named to sign with\n")
    assert not list(tmp_path.iterdir())
