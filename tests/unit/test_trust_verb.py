"""`builder verify`, `bundle` and `load` on the command line: which kind of thing IMAGE is, and what is said of the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import settings
from builder.cli import main
from builder.lock import write_lock
from builder.trust import cosign
from builder.trust.bundle import verify_bundle
from builder.trust.bundling import Writer, write_rest
from builder.trust.layout import small_layout
from builder.trust.verb import compare
from tests.made import artefact, lock_of
from tests.trust_made import MadeImage, StandInCosign, key, pem


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing of this machine's configuration; a public key. cosign is a stand-in."""
    monkeypatch.setattr(cosign, "_cosign", StandInCosign())
    for variable in ("BUILDER_PUB", "BUILDER_KEY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "builder").mkdir(parents=True)
    (tmp_path / "ours.pub").write_text(pem("ours"), encoding="utf-8")
    settings.load.cache_clear()
    yield tmp_path
    settings.load.cache_clear()


def bundle_at(path: Path, image: MadeImage) -> Path:
    made = image.signed(name="sglang-stack")
    with Writer(path) as writer:
        for data in image.packed:
            writer.add_stream(iter([data]))
        write_rest(writer, image.manifest, image.config, made.signature, made.attestations)
        writer.close()
        writer.publish()
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_file(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bundle_at(site / "x.bundle", MadeImage())
    code, out, err = said(capsys, "verify", str(file), "--pub", str(site / "ours.pub"))
    assert (code, out.splitlines()[0]) == (0, f"{file}: verified")
    assert err.splitlines()[-1].startswith("hashed ")


def test_the_key_of_the_configuration(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bundle_at(site / "x.bundle", MadeImage())
    (site / "config" / "builder" / "config.toml").write_text(f'pub = "{site / "ours.pub"}"\n', encoding="utf-8")
    assert said(capsys, "verify", str(file))[0] == 0


def test_no_key_named(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = bundle_at(site / "x.bundle", MadeImage())
    code, _, err = said(capsys, "verify", str(file))
    assert (code, err.splitlines()[0]) == (2, "error: no public key is named")


@pytest.mark.parametrize("verb", ["verify", "load"])
def test_a_file_that_is_no_bundle_is_told_before_a_key_is_asked_for(
    site: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    (site / "x.bin").write_bytes(bytes(20_000))
    code, _, err = said(capsys, verb, str(site / "x.bin"))
    assert code == 7 and "no public key" not in err


def test_a_bundle_that_is_not_there(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "load", str(site / "none"))
    assert (code, err) == (2, f"error: there is no such bundle\n  at: {site / 'none'}\n")


def test_what_fails_is_told_twice_as_json_once(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = MadeImage()
    image.labels["sglang-stack.stand-in"] = "torch"
    file = bundle_at(site / "x.bundle", image)
    code, out, err = said(capsys, "verify", str(file), "--pub", str(site / "ours.pub"))
    assert (code, out.splitlines()[0]) == (7, f"{file}: NOT VERIFIED")
    assert err.startswith("error: the image is not verified: stand-in\n")
    code, out, err = said(capsys, "verify", str(file), "--pub", str(site / "ours.pub"), "--json")
    assert (code, json.loads(out)["ok"], err) == (7, False, "")


def test_a_layout_in_a_folder(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = MadeImage()
    made = image.signed()
    small_layout(site / "layout", image.manifest, image.config, made.signature, made.attestations)
    top = image.packed[-1]
    manifest = json.loads(image.manifest)["layers"][-1]["digest"]
    (site / "layout" / "blobs" / "sha256" / manifest[7:]).write_bytes(top)
    assert said(capsys, "verify", str(site / "layout"), "--pub", str(site / "ours.pub"))[0] == 0
    (site / "layout" / "index.json").unlink()
    code, _, err = said(capsys, "verify", str(site / "layout"), "--pub", str(site / "ours.pub"))
    assert (code, err.splitlines()[0]) == (2, "error: the folder is no OCI layout")


def test_a_repository_without_a_tag(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", "registry.example/team/stack") == (
        2,
        "",
        (
            "error: `registry.example/team/stack` names no image\n"
            "  because: it has neither a tag nor a digest\n"
            "  hint: write `registry.example/team/stack:MATRIX` or `registry.example/team/stack@sha256:…`\n"
        ),
    )


def test_an_image_of_the_engine_and_a_key(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "verify", "sglang-stack:tiny", "--pub", str(site / "ours.pub")) == (
        2,
        "",
        (
            "error: an image of the engine has no signature to verify\n"
            "  at: sglang-stack:tiny\n"
            "  because: engines do not keep what is attached to an image\n"
            "  hint: verify it where it came from, or its bundle; without `--pub` its labels, lock and contents are verified\n"
        ),
    )


def test_a_bundle_out_of_a_registry_is_not_signed_again(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bundle", "cu128", "-o", str(site / "b"), "--from", "registry.example/stack", "--key", "k")
    assert said(capsys, *words) == (
        2,
        "",
        "error: `--key` with `--from`\n  hint: an image out of a registry keeps the signature it has there\n",
    )


@pytest.mark.parametrize(("place", "because"), [("", "it is a folder"), ("none/b", "there is no folder FOLDER/none")])
def test_where_no_bundle_can_be(site: Path, place: str, because: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "bundle", "cu128", "-o", str(site / place), "--key", "k")
    assert code == 2
    assert err.replace(str(site), "FOLDER") == (
        "error: the bundle cannot be written there\n"
        f"  at: FOLDER{'/' + place if place else ''}\n"
        f"  because: {because}\n"
        "  hint: name a file: `-o FILE`\n"
    )


def test_a_bundle_that_was_never_one(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "x").write_text("x" * 2000)
    code, _, err = said(capsys, "load", str(site / "x"), "--pub", str(site / "ours.pub"))
    assert (code, err.splitlines()[0]) == (7, "error: the bundle cannot be used")


def test_another_lock_here_is_told(site: Path) -> None:
    image = MadeImage()
    found = verify_bundle(bundle_at(site / "x.bundle", image), key().public)
    assert compare(found, site) == ""
    write_lock(image.lock, site / "tiny.lock.json")
    assert compare(found, site) == ""
    other = lock_of(image.loaded.matrix, artefact("numpy", "2.2.7"), artefact("more"), artefact("six"))
    write_lock(other, site / "tiny.lock.json")
    assert compare(found, site) == (
        "note: the lock here, tiny.lock.json, is another one than the image's: more 1.0 is gone and 1 more"
    )
