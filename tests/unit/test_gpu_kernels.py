"""What travels to a GPU in pieces, and the table of what was predicted beside what happened. No GPU, no index, no torch."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_kernels import __main__ as command
from tests.gpu_kernels.carry import CarryError, cut, join, pack, unpack
from tests.gpu_kernels.prepare import CODE, ROOT
from tests.gpu_kernels.report import as_text, compared, markdown
from tests.made import lacking

needs_zstd = pytest.mark.skipif(shutil.which("zstd") is None, reason="the program `zstd` is not there")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep/noise").write_bytes(random.Random(1).randbytes(300_000))
    (folder / "text").write_text("x" * 1_000_000, encoding="utf-8")
    return folder


def content(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@needs_zstd
@pytest.mark.processes
def test_pieces_are_small_and_give_the_same_again(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    places = pack(tree, tmp_path / "out", "kernels", 100_000)
    assert [place.name for place in places] == ["kernels-01", "kernels-02", "kernels-03", "kernels-04"]
    assert sorted((tmp_path / "out").iterdir()) == places, "nothing else is left there"
    assert all((place / "piece").stat().st_size <= 100_000 for place in places)
    unpack(places[::-1], tmp_path / "again")
    assert content(tmp_path / "again") == content(tree)


@needs_zstd
@pytest.mark.processes
def test_a_file_is_cut_and_joined(tmp_path: Path) -> None:
    source = tmp_path / "a.bundle"
    source.write_bytes(bytes(range(256)) * 10)
    pieces = cut(source, tmp_path, "bundle", 1000)
    assert [(piece.name, (piece / "piece").stat().st_size) for piece in pieces] == [
        ("bundle-01", 854),
        ("bundle-02", 854),
        ("bundle-03", 852),
    ]
    join(pieces[::-1], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == source.read_bytes()
    with pytest.raises(CarryError, match=r"pieces \[2\] of 3 are missing"):
        join([pieces[0], pieces[2]], tmp_path / "again")


def test_a_piece_that_is_missing_or_damaged(tree: Path, tmp_path: Path) -> None:
    places = pack(tree, tmp_path, "kernels", 100_000)
    with pytest.raises(CarryError, match=r"^pieces \[2, 4\] of 4 are missing$"):
        unpack([places[0], places[2]], tmp_path / "again")
    with pytest.raises(CarryError, match=r"^pieces \[1\] of \? are missing$"):
        unpack([], tmp_path / "again")
    (places[1] / "piece").write_bytes(b"other")
    with pytest.raises(CarryError, match=r"kernels-02/piece is damaged$"):
        unpack(places, tmp_path / "again")


def test_without_a_piece_the_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "kernels-plan"
    plan.mkdir()
    (plan / "predicted.json").write_text("{}", encoding="utf-8")
    assert command.main(["--carry", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == "error: pieces [1] of ? are missing\n"


def test_the_record_finds_what_was_changed(tmp_path: Path) -> None:
    info = tmp_path / "one-1.dist-info"
    info.mkdir()
    (tmp_path / "good").write_bytes(b"")
    (tmp_path / "bad").write_bytes(b"changed")
    nothing = "sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0"
    (info / "RECORD").write_text(f"good,{nothing}\nbad,{nothing}\none-1.dist-info/RECORD,,\n", encoding="utf-8")
    assert command.recorded(tmp_path) == {"files": 2, "wrong": ["bad"]}


def test_the_code_that_travels_is_there_with_all_that_it_imports() -> None:
    smoke = [path.relative_to(ROOT).as_posix() for path in (ROOT / "builder" / "smoke").glob("*.py")]
    assert lacking({name: (ROOT / name).read_bytes() for name in (*CODE, *smoke)}) == set()


# --- the table --------------------------------------------------------------------------------------------------------

NINETY, HUNDRED, FLASH = (f"sgl_kernel/{name}.abi3.so" for name in ("sm90/common_ops", "sm100/common_ops", "flash_ops"))


def extension(file: str, **changes: Any) -> dict[str, Any]:
    return {"file": file, "covered": 74, "of": 74, "loaded": True, "links": "ok", "missing": [], **changes}


def check(name: str, *files: str, ok: bool = True, skipped: str | None = None) -> dict[str, Any]:
    detail = "" if skipped else "3 comparisons" if ok else "rows: differ"
    base = {"gpu": 0, "looked_at": 3, "detail": detail, "predicted": None}
    return {"name": name, "ok": ok and not skipped, "skipped": skipped, "files": list(files), **base}


def table(*checks: dict[str, Any], opened: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "package": "sglang-kernel",
        "version": "0.4.4",
        "extensions": [extension(NINETY, **changes), extension(HUNDRED, loaded=False), extension(FLASH, covered=0)],
    }
    loads = {
        row["file"]: {"code": (opened or {}).get(row["file"], 0), "error": "", "seconds": 0}
        for row in plan["extensions"]
    }
    gpus = [{"index": 0, "name": "Made GPU", "capability": "9.0", "memory": 1}]
    numbers = {"verdict": "failed", "ran": 2, "failed": 1, "skipped": 1}
    report = {"checks": list(checks), "gpus": gpus, "driver": "580.1", "torch": {"version": "2.11.0"}, **numbers}
    return {
        "predicted": plan,
        "record": {"files": 80, "wrong": []},
        "loads": loads,
        "extensions": compared(plan, loads, report),
        "python": "3.12.3",
        "gpu": report,
        "seconds": 94.2,
    }


def agreed(data: dict[str, Any]) -> dict[str, list[str]]:
    return {row["file"]: [name for name, agree in row["agree"].items() if not agree] for row in data["extensions"]}


def test_as_predicted() -> None:
    data = table(check("norm", NINETY), check("flash", FLASH, ok=False))
    assert agreed(data) == {NINETY: [], HUNDRED: [], FLASH: []}
    assert [row["ran"] for row in data["extensions"]] == [True, None, False]
    assert all(row["as_predicted"] for row in data["extensions"])


@pytest.mark.parametrize(
    ("checks", "changes", "wrong"),
    [
        ([check("norm", HUNDRED), check("flash", FLASH, ok=False)], {}, {NINETY: ["loaded"], HUNDRED: ["loaded"]}),
        ([check("norm", NINETY, ok=False), check("flash", FLASH, ok=False)], {}, {NINETY: ["runs"]}),
        ([check("norm", NINETY), check("flash", FLASH)], {}, {FLASH: ["runs"]}),
        ([check("norm", NINETY), check("flash", FLASH, skipped="why")], {}, {FLASH: ["loaded"]}),
        ([check("norm", NINETY), check("flash", FLASH, ok=False)], {"links": "broken"}, {NINETY: ["opens"]}),
        ([check("norm", NINETY), check("flash", FLASH, ok=False)], {"links": "uncertain"}, {}),
    ],
)
def test_not_as_predicted(checks: list[dict[str, Any]], changes: dict[str, Any], wrong: dict[str, list[str]]) -> None:
    assert {file: names for file, names in agreed(table(*checks, **changes)).items() if names} == wrong


def test_a_file_that_does_not_open_was_not_predicted() -> None:
    data = table(check("norm", NINETY), check("flash", FLASH, ok=False), opened={HUNDRED: 3})
    assert agreed(data)[HUNDRED] == ["opens"]


TEXT = """\
sglang-kernel 0.4.4 on Made GPU (9.0), driver 580.1, torch 2.11.0, Python 3.12.3; 94 s
RECORD: 80 files, 0 differ

extension                                links      opens  code       loaded           kernels  checks
sgl_kernel/sm90/common_ops.abi3.so       ok         yes    74/74      yes → yes        FAIL     1 of 2   NOT AS PREDICTED
sgl_kernel/sm100/common_ops.abi3.so      ok         yes    74/74      no → no          none run 0 of 0
sgl_kernel/flash_ops.abi3.so             ok         yes    0/74       yes → no         none run 0 of 0   NOT AS PREDICTED

norm                 GPU 0  ok      3 comparisons
rope                 GPU 0  FAILED  rows: differ
flash                GPU 0  SKIPPED not here

GPU checks: 2 ran, 1 failed, 1 skipped: rope"""


def test_the_tables() -> None:
    data = table(check("norm", NINETY), check("rope", NINETY, ok=False), check("flash", FLASH, skipped="not here"))
    assert as_text(data) == TEXT
    rows = markdown(data).splitlines()
    assert rows[2] == "| sgl_kernel/sm90/common_ops.abi3.so | ok, 74 of 74, yes | yes | yes | **wrong** | 1 of 2 |"
    assert rows[-3:] == [
        "| norm | 0 | holds | 3 |  |",
        "| rope | 0 | **fails** | 3 | rows: differ |",
        "| flash | 0 | skipped | 3 | not here |",
    ]


def test_what_is_the_same_on_several_gpus_is_one_row() -> None:
    checks = [check("norm", NINETY), {**check("norm", NINETY), "gpu": 1}, {**check("sum", NINETY), "gpu": None}]
    assert markdown(table(*checks)).splitlines()[-2:] == [
        "| norm | 0, 1 | holds | 3 |  |",
        "| sum | all together | holds | 3 |  |",
    ]


def test_the_report_prints_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu_kernels import report

    data = table(check("norm", NINETY))
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    assert report.main([str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out == f"{markdown(data)}\n"


@pytest.mark.parametrize("fault", ["no_image", "wild", "index"])
def test_the_faults_are_of_known_words(fault: str) -> None:
    from builder.smoke.gpu_words import meaning
    from tests.gpu_kernels.faults import EXPECTED

    words, because = EXPECTED[fault]
    assert because
    assert meaning(f"CUDA error: {words}").startswith(because)
