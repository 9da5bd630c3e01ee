"""`builder plan`: what a host would pull, and what it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import planning
from builder.errors import LockError
from builder.facts import TransferFact
from builder.lock import Artefact, Lock, OsPackage, lock_path, write_lock
from builder.matrix import parse_matrix
from builder.registry import predict
from builder.registry.predict import Blob, Sizes
from tests.made import TINY, artefact, direct, lock_of, sha, tiny

STACK = (
    artefact("torch", "2.11.0", layer="torch", size=500_000_000),
    artefact("idna", "3.7"),
    artefact("numpy", "2.2.6", size=16_800_000),
    artefact("sglang", "0.5.9", layer="sglang", size=4_000_000),
)


ROWS = ("os", "python", "torch", "rest", "sglang", "proof")


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured, in round numbers: a layer is as large as its wheels, sglang's twice that."""
    rows = {"os": (2, 100_000_000), "python": (1, 15_000), "torch": (10, 10), "rest": (10, 10), "sglang": (1, 2)}
    facts = [
        TransferFact(layer=layer, amount=amount, compressed=compressed, source="made")
        for layer, (amount, compressed) in rows.items()
    ]
    monkeypatch.setattr(
        predict,
        "load_facts",
        lambda _: (*facts, TransferFact(layer="proof", amount=1, compressed=60_000, source="made")),
    )


def written(folder: Path, name: str, *artefacts: Artefact, text: str = TINY, **fields: object) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    changes = {"as_of": text.split("as_of: ")[1][:10]}
    matrix = tiny(name=name, **changes).matrix
    write_lock(lock_of(matrix, *artefacts, **fields), lock_path(path))
    return path


def new(path: Path, other: Path) -> dict[str, bool]:
    return {row.layer: row.new for row in planning.plan(path, other)}


def test_the_plan_of_a_matrix(tmp_path: Path) -> None:
    rows = planning.plan(written(tmp_path, "one", *STACK), None)
    assert planning.as_text(rows).splitlines() == [
        "layer                             wheels  their bytes  as a layer    to pull",
        "OS (debian bookworm, 2 packages)       0            -     ~100 MB    ~100 MB",
        "Python environment                     0            -      ~15 kB     ~15 kB",
        "torch and CUDA libraries               1       500 MB     ~500 MB    ~500 MB",
        "other wheels                           2      16.8 MB    ~16.8 MB   ~16.8 MB",
        "sglang                                 1         4 MB       ~8 MB      ~8 MB",
        "proof                                  0            -      ~60 kB     ~60 kB",
        "all                                    4       521 MB     ~625 MB    ~625 MB",
        "~ is predicted from what such layers became when they were measured; the others were pushed before",
    ]


def test_against_a_matrix_with_another_sglang(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    wanted = written(tmp_path, "wanted", *STACK[:3], artefact("sglang", "0.5.9.post1", layer="sglang", size=4_000_000))
    assert planning.as_text(planning.plan(wanted, host)).splitlines() == [
        "layer                             wheels  their bytes  as a layer    to pull",
        "OS (debian bookworm, 2 packages)       0            -     ~100 MB          -",
        "Python environment                     0            -      ~15 kB          -",
        "torch and CUDA libraries               1       500 MB     ~500 MB          -",
        "other wheels                           2      16.8 MB    ~16.8 MB          -",
        "sglang                                 1         4 MB       ~8 MB      ~8 MB",
        "  sglang 0.5.9 → 0.5.9.post1",
        "proof                                  0            -      ~60 kB     ~60 kB",
        "all                                    4       521 MB     ~625 MB   ~8.06 MB",
        "~ is predicted from what such layers became when they were measured; the others were pushed before",
    ]


def test_what_was_pushed_before_is_known(tmp_path: Path) -> None:
    path = written(tmp_path, "one", *STACK)
    sizes = Sizes(tmp_path / "cache" / "layers.json")
    keys = {row.layer: row.key for row in planning.plan(path, None)}
    sizes.remember({keys["os"]: [Blob("sha256:1", "sha256:a", 90_000_000), Blob("sha256:2", "sha256:b", 400)]})
    rows = planning.plan(path, None, Sizes(tmp_path / "cache" / "layers.json"))
    assert [(row.layer, row.predicted_bytes, row.diff_ids) for row in rows if row.known] == [
        ("os", 90_000_400, ("sha256:1", "sha256:2"))
    ]
    assert "OS (debian bookworm, 2 packages)       0            -       90 MB      90 MB" in planning.as_text(rows)
    assert predict.predicted(rows, {"sha256:1", "sha256:2"})["os"] == 0
    assert predict.predicted(rows, {"sha256:1"})["os"] == 90_000_400


def test_a_record_that_is_damaged_is_none(tmp_path: Path) -> None:
    (tmp_path / "layers.json").write_text('{"schema": 1, "contents": {"x": [{"diff": 1}]}}')
    assert Sizes(tmp_path / "layers.json").get("x") == ()


def test_a_kind_that_was_not_measured_is_not_predicted(tmp_path: Path) -> None:
    rows = planning.plan(written(tmp_path, "one", artefact("part", layer="kernels")), None)
    assert "GPU kernels                            1         1 kB           ?          ?" in planning.as_text(rows)


def test_what_lies_above_a_new_layer_is_pulled_by_the_classic_store(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    wanted = written(tmp_path, "wanted", artefact("torch", "2.12.0", layer="torch", size=500_000_000), *STACK[1:])
    rows = planning.plan(wanted, host)
    assert {row.layer: (row.new, row.pulled) for row in rows} == {
        "os": (False, False),
        "python": (False, False),
        "torch": (True, True),
        "rest": (False, True),
        "sglang": (False, True),
        "proof": (True, True),
    }
    assert planning.as_text(rows).splitlines()[-2] == (
        "the classic image store tells a layer by all below it, and pulls every layer above a new one; "
        "the containerd store pulls ~500 MB"
    )


PATCHED = TINY + "patches: {sm120: {symm_mem: OPTION}}\n"


def test_another_patch_makes_the_layer_of_its_package_new(tmp_path: Path) -> None:
    paths = []
    for option in ("off", "opt-in"):
        path = tmp_path / f"{option}.yaml"
        path.write_text(PATCHED.replace("OPTION", option))
        write_lock(lock_of(parse_matrix(path.read_text(), path).matrix, *STACK), lock_path(path))
        paths.append(path)
    assert new(*paths) == {
        "os": False, "python": False, "torch": False, "rest": False, "sglang": True, "proof": True
    }  # fmt: skip


def test_against_itself_nothing_is_pulled(tmp_path: Path) -> None:
    path = written(tmp_path, "one", *STACK)
    assert planning.as_json(planning.plan(path, path))["bytes_to_pull"] == 0


def test_what_differs_in_a_layer(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    rest = (artefact("idna", "3.7", sha256=sha("other")), artefact("zipp", "1.0"))
    rows = planning.plan(written(tmp_path, "wanted", *rest), host)
    assert [row.differs for row in rows if row.layer == "rest"] == [
        ("idna 3.7 is another file", "numpy 2.2.6 is gone", "zipp 1.0 is new")
    ]


def test_where_a_file_comes_from_does_not_make_a_layer_new(tmp_path: Path) -> None:
    host = written(tmp_path, "host", artefact("part", layer="kernels"))
    wanted = written(tmp_path, "wanted", direct("part", "1.0"))
    assert new(wanted, host) == {"os": False, "python": False, "kernels": False, "proof": True}


def test_another_date_with_the_same_wheels_changes_no_layer(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    path = tmp_path / "wanted.yaml"
    path.write_text(TINY.replace("as_of: 2026-03-01", "as_of: 2026-03-02"))
    write_lock(lock_of(tiny(name="wanted", as_of="2026-03-02").matrix, *STACK), lock_path(path))
    assert new(path, host) == dict.fromkeys(ROWS, False) | {"proof": True}


def test_another_python_makes_every_layer_of_wheels_new(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    path = tmp_path / "wanted.yaml"
    path.write_text(TINY.replace('python: "3.11"', 'python: "3.12"'))
    write_lock(lock_of(tiny(name="wanted", python='"3.12"').matrix, *STACK), lock_path(path))
    assert new(path, host) == dict.fromkeys(ROWS, True) | {"os": False}


def test_another_os_package_makes_the_os_new_and_nothing_else(tmp_path: Path) -> None:
    lock: Lock = lock_of(tiny().matrix)
    packages = (*lock.base.packages, OsPackage(name="zlib1g", version="1", architecture="amd64"))
    host = written(tmp_path, "host", *STACK)
    wanted = written(tmp_path, "wanted", *STACK, base=lock.base.model_copy(update={"packages": packages}))
    assert new(wanted, host) == dict.fromkeys(ROWS, False) | {"os": True, "proof": True}


FUSED = TINY.replace(
    "{version: 13.0.2, jit: none}",
    "{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
    "nvidia-cuda-cccl: 13.0.85}}",
) + "patches: {sm120: {allreduce_fusion: opt-in}}\n"  # fmt: skip


def fused(folder: Path, name: str, *changed: Artefact, gpus: str = '["12.0"]') -> Path:
    """A stack whose build compiles the fused all-reduce."""
    stack = {
        item.name: item
        for item in (
            artefact("nvidia-cuda-nvcc", "13.0.88", layer="torch"),
            artefact("flashinfer-python", "0.6.12", layer="flashinfer"),
            artefact("idna", "3.7"),
            *changed,
        )
    }
    path = folder / f"{name}.yaml"
    path.write_text(FUSED.replace('["12.0"]', gpus))
    matrix = parse_matrix(path.read_text(), path).matrix
    write_lock(lock_of(matrix, *stack.values()), lock_path(path))
    return path


def test_what_is_compiled_is_a_row_without_wheels(tmp_path: Path) -> None:
    rows = planning.plan(fused(tmp_path, "one"), None)
    assert [(row.title, row.wheels, row.new) for row in rows if row.layer == "compiled"] == [
        ("flashinfer's fused all-reduce, compiled", 0, True)
    ]


@pytest.mark.parametrize(
    ("changed", "gpus", "is_new"),
    [
        ((), '["12.0"]', False),
        ((artefact("idna", "3.8"),), '["12.0"]', False),
        ((artefact("nvidia-cuda-nvcc", "13.0.89", layer="torch"),), '["12.0"]', True),
        ((artefact("flashinfer-python", "0.6.13", layer="flashinfer"),), '["12.0"]', True),
        ((), '["12.0", "9.0"]', True),
    ],
)
def test_what_makes_it_new(tmp_path: Path, changed: tuple[Artefact, ...], gpus: str, is_new: bool) -> None:
    host = fused(tmp_path, "host")
    assert new(fused(tmp_path, "wanted", *changed, gpus=gpus), host)["compiled"] is is_new


def test_wheels_of_unknown_size_are_named(tmp_path: Path) -> None:
    rows = planning.plan(written(tmp_path, "one", direct("part", "1.0"), artefact("idna", "3.7", size=2000)), None)
    assert planning.as_text(rows).splitlines()[-2] == "not counted, since their sources state no size: part"
    assert planning.as_json(rows)["uncounted"] == ["part"]


def test_the_plan_as_data(tmp_path: Path) -> None:
    host = written(tmp_path, "host", *STACK)
    wanted = written(tmp_path, "wanted", artefact("idna", "3.8"))
    data = planning.as_json(planning.plan(wanted, host))
    assert [row["layer"] for row in data["layers"]] == ["os", "python", "rest", "proof"]
    assert data["layers"][2] == {
        "layer": "rest",
        "title": "other wheels",
        "wheels": 1,
        "bytes": 1000,
        "new": True,
        "differs": ["idna 3.7 → 3.8", "numpy 2.2.6 is gone"],
        "predicted_bytes": 1000,
        "known": False,
        "pulled": True,
    }
    assert {key: value for key, value in data.items() if key != "layers"} == {
        "bytes": 1000,
        "uncounted": [],
        "bytes_to_pull": 1000,
        "predicted_bytes": 100_076_000,
        "predicted_to_pull": 61_000,
        "predicted_to_pull_containerd": 61_000,
    }


def test_a_lock_that_is_out_of_date_is_not_planned(tmp_path: Path) -> None:
    path = written(tmp_path, "one", *STACK)
    path.write_text(f"{TINY}extras: [idna==3.7]\n")
    with pytest.raises(LockError, match="the lock does not belong to this matrix"):
        planning.plan(path, None)
