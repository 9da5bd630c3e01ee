"""Records of what was put on which host: written whole, listed, forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.cli import main
from builder.errors import UsageError
from builder.hosts import records
from builder.hosts.records import Gpu, Record, Smoke


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def made(host: str = "ssh://gpu1", matrix: str = "cu130", smoke: Smoke | None = None) -> Record:
    return Record(
        host=host,
        matrix=matrix,
        lock="7bc2f3463192" + "0" * 52,
        image="sha256:" + "a" * 64,
        digest="sha256:" + "b" * 64,
        reference="registry.example/stack:cu130-7bc2f3463192",
        driver="580.95.05",
        gpus=(Gpu(name="RTX PRO 6000", capability="12.0"),) * 2 + (Gpu(name="H200", capability="9.0"),),
        smoke=smoke,
        doctor="ok",
        date="2026-11-30T22:48:52+00:00",
        builder="0.1.0",
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    record = made(smoke=Smoke(ok=True, gpus=("RTX PRO 6000",), checks=25))
    path = records.write(record)
    assert path == tmp_path / "builder/hosts/ssh_gpu1-a21c6d07--cu130.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert records.read("ssh://gpu1", "cu130") == record
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_newer_one_of_the_same_matrix_replaces_it() -> None:
    records.write(made(smoke=None))
    records.write(made(smoke=Smoke(ok=True)))
    records.write(made(matrix="cu128"))
    assert [(record.matrix, record.smoke) for record in records.records()] == [
        ("cu128", None),
        ("cu130", Smoke(ok=True)),
    ]


@given(st.lists(st.text(min_size=1, max_size=80), min_size=2, max_size=2, unique=True))
def test_two_hosts_never_share_a_file(names: list[str]) -> None:
    paths = [records.path_of(name, "cu130") for name in names]
    assert paths[0] != paths[1]
    assert all(path.parent == records.folder() and len(path.name) < 120 for path in paths)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    records.write(made(smoke=Smoke(ok=True, gpus=("RTX PRO 6000",))))
    records.write(made("local", "cu128", smoke=Smoke(ok=True)))
    records.write(made("unix:///run/x.sock", "cu128"))
    assert main(["hosts"]) == 0
    gpus = "2 × RTX PRO 6000, 1 × H200"
    assert capsys.readouterr().out == (
        "host                matrix  lock          driver     GPUs                        smoke        date\n"
        f"local               cu128   7bc2f3463192  580.95.05  {gpus}  ok, no GPU   2026-11-30\n"
        f"ssh://gpu1          cu130   7bc2f3463192  580.95.05  {gpus}  ok, on GPUs  2026-11-30\n"
        f"unix:///run/x.sock  cu128   7bc2f3463192  580.95.05  {gpus}  not run      2026-11-30\n"
    )


def test_json_has_the_shape_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    records.write(made(smoke=Smoke(ok=True)))
    assert main(["hosts", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["hosts"]
    wanted = {"host", "matrix", "lock", "image", "digest", "driver", "gpus", "smoke", "date", "doctor"}
    assert wanted <= row.keys()
    assert row["smoke"] == {"ok": True, "gpus": [], "checks": 0}


def test_none_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts"]) == 0
    assert capsys.readouterr().out == "no image was put on a host yet\n"


def test_a_host_is_forgotten_by_the_name_that_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    for matrix in ("cu128", "cu130"):
        records.write(made(matrix=matrix))
    records.write(made("local"))
    assert main(["hosts", "--forget", "ssh://alice@gpu1"]) == 0
    assert capsys.readouterr().out == "ssh://gpu1: 2 records removed\n"
    assert [record.host for record in records.records()] == ["local"]


def test_one_that_nobody_knows_cannot_be_forgotten() -> None:
    records.write(made())
    with pytest.raises(UsageError) as caught:
        records.forget("ssh://gpu2")
    assert str(caught.value) == (
        "error: there is no record of `ssh://gpu2`\n  because: known: `ssh://gpu1`\n  hint: see `builder hosts`"
    )


def test_a_damaged_one_is_told_and_the_others_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    path = records.write(made())
    records.write(made("local"))
    path.write_text("{")
    assert [record.host for record in records.records()] == ["local"]
    assert capsys.readouterr().err.startswith(f"warning: a record cannot be read: {path}: ")


def test_one_of_a_newer_builder_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    path = records.write(made())
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2'))
    assert records.records() == []
    assert capsys.readouterr().err == f"warning: a record is of schema 2, this builder reads 1: {path}\n"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "builder").write_text("a file")
    with pytest.raises(UsageError) as caught:
        records.write(made())
    assert caught.value.what == "the record cannot be written"
