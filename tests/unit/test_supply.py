"""What a build takes from this machine: patched wheels in place of the lock's, and what an image says of them. No network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from builder import download
from builder.build import Prepared, supplied
from builder.errors import UnreachableError, UsageError
from builder.files import sha256_hex
from builder.lock import Lock
from builder.matrix import LoadedMatrix
from builder.render import render
from builder.supply import gather, patch_inputs, patch_words
from tests.made import direct, lock_of, settings_at, tiny
from tests.patch_made import FLASHINFER, make_wheel, sglang_wheel

UV = Path("/usr/bin/env")
ASKED = "patches: {sm120: {}, eagle3: {}}\n"
STACK = "{torch: 2.9.1, flashinfer: 0.6.4, sglang: 0.5.9}"


def stack(tmp_path: Path, extra: str = ASKED) -> tuple[LoadedMatrix, Lock, Path]:
    """A matrix of sglang and flashinfer with the old shapes, its lock, and the folder of its wheels."""
    folder = tmp_path / "wheels"
    paths = [sglang_wheel(folder), make_wheel(folder, "flashinfer-python", "0.6.4", FLASHINFER)]
    loaded = tiny(extra, stack=STACK)
    layers = {"sglang": "sglang", "flashinfer-python": "flashinfer"}
    artefacts = []
    for path, (name, layer) in zip(paths, layers.items(), strict=True):
        version = path.name.split("-")[1]
        artefacts.append(direct(name, version, layer=layer, sha256=sha256_hex(path.read_bytes())))
    return loaded, lock_of(loaded.matrix, *sorted(artefacts, key=lambda a: a.name)), folder


def test_patched_wheels_stand_in_for_the_locks(tmp_path: Path) -> None:
    loaded, lock, folder = stack(tmp_path)
    supplies = gather(loaded, lock, settings_at(tmp_path, wheels=(folder,)))
    assert {name: artefact.version for name, artefact in supplies.installed.items()} == {
        "flashinfer-python": "0.6.4+sm120",
        "sglang": "0.5.9+sm120.eagle3",
    }
    rendered = render(loaded.matrix, lock, UV, supplies)
    file = "sglang-0.5.9+sm120.eagle3-py3-none-any.whl"
    patched = rendered.links[f"layers/sglang/wheels/{file}"]
    assert rendered.context["layers/sglang/files.txt"].decode() == (
        f"./wheels/{file} --hash=sha256:{sha256_hex(patched.read_bytes())}\n"
    )
    # Upstream's own file is not sent to the engine, and the lock in the image is the one that was checked.
    assert [name for name in rendered.links if name.endswith(".whl")] == [
        "layers/flashinfer/wheels/flashinfer_python-0.6.4+sm120-py3-none-any.whl",
        f"layers/sglang/wheels/{file}",
    ]
    assert rendered.context["proof/lock.json"].decode() == lock.text()


def test_an_image_says_what_was_patched_and_the_smoke_test_knows(tmp_path: Path) -> None:
    loaded, lock, folder = stack(tmp_path)
    supplies = gather(loaded, lock, settings_at(tmp_path, wheels=(folder,)))
    rendered = render(loaded.matrix, lock, UV, supplies)
    context = rendered.context
    assert json.loads(context["proof/about.json"])["patches"] == [
        "flashinfer-python 0.6.4+sm120: F1 patched",
        "sglang 0.5.9+sm120.eagle3: S1 S2 S3 D1 E1 E2 E3 E4 patched",
    ]
    spec = json.loads(context["proof/spec.json"])
    installed = {item["name"]: (item["version"], item["metadata_version"]) for item in spec["artefacts"]}
    assert installed["sglang"] == ("0.5.9+sm120.eagle3", "0.5.9+sm120.eagle3")
    assert spec["patches"] == json.loads(context["proof/patches.json"])
    assert rendered.plan.lock is lock
    assert 'LABEL sglang-stack.patches="sm120,eagle3"' in rendered.dockerfile
    assert "+    def get_embed_and_head(self):" in context["proof/patches.diff"].decode()


def test_where_nothing_is_needed_the_wheel_stays_and_is_still_looked_at(tmp_path: Path) -> None:
    loaded, lock, folder = stack(tmp_path)
    once = gather(loaded, lock, settings_at(tmp_path, wheels=(folder,)))
    patched = once.wheels["flashinfer_python-0.6.4+sm120-py3-none-any.whl"]
    # A release that has it already.
    native = patched.rename(folder / "flashinfer_python-0.6.4+sm120-py3-none-any.whl")
    entry = direct("flashinfer-python", "0.6.4+sm120", layer="flashinfer", sha256=sha256_hex(native.read_bytes()))
    lock = lock_of(loaded.matrix, entry, lock.by_name["sglang"])
    supplies = gather(loaded, lock, settings_at(tmp_path, wheels=(folder,)))
    assert supplies.installed["flashinfer-python"].version == "0.6.4+sm120"
    assert patch_words(supplies.reports)[0] == "flashinfer-python 0.6.4+sm120: F1 native"
    assert native.name in supplies.wheels


def test_a_matrix_without_patches_or_files_needs_nothing(tmp_path: Path) -> None:
    loaded = tiny(stack=STACK)
    lock = lock_of(loaded.matrix)
    prepared = Prepared(loaded, lock, render(loaded.matrix, lock, UV), [])
    assert supplied(prepared, settings_at(tmp_path)) is prepared
    assert patch_inputs(loaded.matrix) == ""


def test_the_inputs_are_known_before_anything_is_fetched_and_stay(tmp_path: Path) -> None:
    loaded, lock, folder = stack(tmp_path)
    prepared = Prepared(loaded, lock, render(loaded.matrix, lock, UV), [])
    full = supplied(prepared, settings_at(tmp_path, wheels=(folder,)))
    assert full.rendered.digest == prepared.rendered.digest
    assert full.rendered.dockerfile == prepared.rendered.dockerfile
    # What is asked for decides: other sets make another image of the same lock.
    other = loaded.matrix.model_copy(update={"patches": tiny("patches: {eagle3: {}}\n", stack=STACK).matrix.patches})
    assert replace(prepared, rendered=render(other, lock, UV)).rendered.digest != prepared.rendered.digest


def test_a_set_with_nothing_to_patch_is_refused_before_a_fetch(tmp_path: Path) -> None:
    loaded, lock, _ = stack(tmp_path)
    lock = lock_of(loaded.matrix, lock.by_name["flashinfer-python"])
    with pytest.raises(UsageError, match="the patch set `eagle3` has nothing to patch"):
        gather(loaded, lock, settings_at(tmp_path))


def test_a_file_that_is_missing_is_said_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    loaded, lock, folder = stack(tmp_path)
    for path in folder.iterdir():
        path.unlink()
    with pytest.raises(UnreachableError) as caught:
        gather(loaded, lock, settings_at(tmp_path, wheels=(folder,)))
    assert "sglang-0.5.9-py3-none-any.whl" in str(caught.value)
    assert "flashinfer_python-0.6.4-py3-none-any.whl" in str(caught.value)
