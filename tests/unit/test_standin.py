"""Stand-ins: a matrix that says so, everywhere that it shows; and the one of `cu130`, which differs in what it has to."""

from __future__ import annotations

import hashlib
import zipfile
from datetime import date
from pathlib import Path

import pytest

from builder.labels import STAND_IN_LABEL
from builder.layers import plan_layers
from builder.ledger import exceptions
from builder.lock import lock_path, read_lock
from builder.matrix import load
from builder.render import about, image_labels
from builder.rules import Context, evaluate_rules
from builder.smokespec import smoke_spec
from builder.wheel import read_wheel
from tests.loopback import wheel
from tests.made import ROOT
from tests.standin.relabel import relabel

STANDIN = ROOT / "tests" / "standin" / "cu130-standin.yaml"
CU130 = ROOT / "matrices" / "cu130.yaml"
FOUR = ["torch", "torchvision", "torchaudio", "sgl-kernel"]


def test_the_stand_in_is_cu130_but_for_what_it_has_to_be() -> None:
    ours, theirs = (load(path).matrix.model_dump(mode="json") for path in (STANDIN, CU130))
    assert {key for key in ours if ours[key] != theirs[key]} == {"name", "summary", "files", "stand_in"}
    assert ours["stand_in"]["packages"] == FOUR == [file["name"] for file in ours["files"]]
    for mine, real in zip(ours["files"], theirs["files"], strict=True):
        changed = {key for key in mine if mine[key] != real[key]}
        assert changed <= {"url", "sha256", "attested_by", "requires"}
        assert mine["url"] == "https://standin.invalid/" + real["url"].rsplit("/", 1)[1]
        other = ["nvidia-nccl-cu13==2.28.9", "nvidia-nvshmem-cu13==3.4.5"] if mine["name"] == "torch" else []
        assert [item for item in mine["requires"] if item not in real["requires"]] == other


def test_its_lock_is_cu130s_but_for_six_packages() -> None:
    ours, theirs = (read_lock(lock_path(path)) for path in (STANDIN, CU130))
    differ = [name for name in ours.by_name if ours.by_name[name] != theirs.by_name.get(name)]
    assert differ == sorted([*FOUR, "nvidia-nccl-cu13", "nvidia-nvshmem-cu13"])
    assert ours.by_name.keys() == theirs.by_name.keys()
    assert ours.base == theirs.base
    kernel = ours.by_name["sgl-kernel"]
    assert (kernel.version, kernel.metadata_version) == ("0.3.21+cu130", "0.3.21")


def test_its_image_says_so_and_knows_its_differences() -> None:
    loaded, lock = load(STANDIN), read_lock(lock_path(STANDIN))
    plan = plan_layers(loaded.matrix, lock)
    because = loaded.matrix.stand_in.because if loaded.matrix.stand_in else ""
    assert image_labels(plan)[STAND_IN_LABEL] == ",".join(FOUR)
    assert about(plan)["stand_in"] == (
        f"STAND-IN, for tests only: {', '.join(FOUR)} are not what they are called ({because})"
    )
    known = {entry["id"] for entry in exceptions()}
    of_it = [entry for entry in smoke_spec(plan, native=False)["exceptions"] if entry["id"] not in known]
    assert of_it and {entry["source"] for entry in of_it} == {"`stand_in` of cu130-standin.yaml"}
    findings = evaluate_rules(Context(loaded, date(2026, 11, 30), lock))
    assert [finding.message for finding in findings if finding.rule == "stand-in"] == [
        "`torch`, `torchvision`, `torchaudio`, `sgl-kernel`: not what the name and version say, the image is for tests only"
    ]


def test_no_other_image_says_anything_of_stand_ins() -> None:
    loaded, lock = load(CU130), read_lock(lock_path(CU130))
    plan = plan_layers(loaded.matrix, lock)
    assert STAND_IN_LABEL not in image_labels(plan)
    assert about(plan)["stand_in"] == ""


@pytest.fixture
def relabelled(tmp_path: Path) -> Path:
    files = {"sgl_kernel/__init__.py": b"x = 1\n", "sglang_kernel-0.4.2.data/data/a": b"1"}
    name, data = wheel("sglang-kernel", "0.4.2", ["numpy>=1"], tag="cp310-abi3-manylinux2014_x86_64", files=files)
    (tmp_path / name).write_bytes(data)
    target = tmp_path / "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux2014_x86_64.whl"
    appended = {"sgl_kernel/__init__.py": "y = 2\n"}
    relabel(tmp_path / name, target, metadata_version="0.3.21", requires=["torch==2.9.1"], appended=appended)
    return target


def test_a_relabelled_wheel_is_sound_and_has_the_flaw_of_the_one_it_stands_for(relabelled: Path) -> None:
    made = read_wheel(relabelled)
    assert (made.name, made.version, made.metadata_version) == ("sgl-kernel", "0.3.21+cu130", "0.3.21")
    assert made.info == "sgl_kernel-0.3.21.dist-info"
    assert made.read("sgl_kernel/__init__.py") == b"x = 1\ny = 2\n"
    assert made.read("sgl_kernel-0.3.21.data/data/a") == b"1"
    assert made.read("sgl_kernel-0.3.21.dist-info/METADATA").decode() == (
        "Metadata-Version: 2.1\nName: sgl-kernel\nVersion: 0.3.21\nRequires-Dist: torch==2.9.1\n"
    )


def test_relabelling_again_gives_the_same_bytes(relabelled: Path, tmp_path: Path) -> None:
    first = hashlib.sha256(relabelled.read_bytes()).hexdigest()
    source = next(tmp_path.glob("sglang_kernel*"))
    appended = {"sgl_kernel/__init__.py": "y = 2\n"}
    relabel(source, relabelled, metadata_version="0.3.21", requires=["torch==2.9.1"], appended=appended)
    assert hashlib.sha256(relabelled.read_bytes()).hexdigest() == first
    assert not list(tmp_path.glob(".*"))
    with zipfile.ZipFile(relabelled) as archive:
        assert archive.namelist()[-1] == "sgl_kernel-0.3.21.dist-info/RECORD"
