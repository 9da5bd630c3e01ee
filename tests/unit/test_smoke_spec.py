"""The smoke test's spec: what it accepts, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder.smoke.spec import SpecError, parse_spec, read_spec
from tests.unit.smoke_made import Site


def test_names_of_layers(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.lock("Torch_Vision", layer="torch")
    site.lock("sglang", layer="sglang")
    spec = site.spec
    assert (spec.names(sglang=False), spec.names(sglang=True)) == (frozenset({"torch-vision"}), frozenset({"sglang"}))


def test_exception_for_another_cuda_is_left_out(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.exception(id="twelve", when={"cuda": 12})
    site.exception(id="thirteen", when={"cuda": 13})
    assert [entry.id for entry in site.spec.exceptions] == ["thirteen"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "spec.schema is 2, this version reads 1"),
        ({"matrix": 3}, "spec.matrix is int, not str"),
        ({"artefacts": [{"name": "x"}]}, "spec.artefacts[0].version is missing"),
        ({"artefacts": ["x"]}, "spec.artefacts[0] is str, not an object"),
        (
            {"cuda": {"version": "13.0", "major": 13, "home": "", "jit": "gcc"}},
            "spec.cuda.jit is `gcc`, allowed are `nvcc` and `none`",
        ),
        ({"cuda": {"version": "13.0", "major": True, "home": "", "jit": "none"}}, "spec.cuda.major is bool, not int"),
        (
            {"gpus": [{"capability": "12", "nvcc": "120", "flashinfer": "12.0"}]},
            "spec.gpus[0].capability is `12`, not like `12.0`",
        ),
        ({"imports": ["a", 1]}, "spec.imports[1] is int, not str"),
    ],
)
def test_refusal(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec({**Site(tmp_path).spec_data, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"words": ""}, "spec.exceptions[0].words is empty: it would excuse every failure"),
        ({"checks": []}, "spec.exceptions[0].checks is empty: an exception that excuses nothing"),
        (
            {"when": {"os": "debian"}},
            "spec.exceptions[0].when may hold `gpu` and `cuda` only, such as {'gpu': '9.0', 'cuda': 13}",
        ),
    ],
)
def test_ledger_entry_that_says_too_little(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    site = Site(tmp_path)
    site.exception(**fields)
    with pytest.raises(SpecError) as caught:
        _ = site.spec
    assert str(caught.value) == message


def test_file_that_is_not_json(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text("{")
    with pytest.raises(SpecError, match=r"^the spec is not JSON: Expecting property name"):
        read_spec(path)


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        read_spec(tmp_path / "absent.json")
    assert str(caught.value) == f"cannot read the spec: No such file or directory: {tmp_path}/absent.json"


def test_round_trip_through_json(tmp_path: Path) -> None:
    data = Site(tmp_path).spec_data
    (tmp_path / "spec.json").write_text(json.dumps(data))
    assert read_spec(tmp_path / "spec.json") == parse_spec(data)
