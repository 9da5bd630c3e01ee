"""`builder diff`: what differs between two stacks, in which order, and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder import cli
from builder.differences import Side, as_text, compare, side
from builder.errors import BuildError, ExitCode
from builder.lock import lock_path, write_lock
from tests.made import TINY, artefact, golden, lock_of, settings_at, tiny


def _write(folder: Path, name: str, *artefacts: object, extra: str = "") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(TINY + extra, encoding="utf-8")
    loaded = tiny(extra, name=name)
    write_lock(lock_of(loaded.matrix, *artefacts), lock_path(path))  # type: ignore[arg-type]
    return path


def test_two_stacks(tmp_path: Path) -> None:
    a = _write(
        tmp_path, "a", artefact("torch", "2.9.1", layer="torch"), artefact("numpy", "2.3.5"), artefact("gone", "1.0")
    )
    b = _write(
        tmp_path,
        "b",
        artefact("torch", "2.11.0", layer="torch"),
        artefact("numpy", "2.3.6"),
        artefact("triton", "3.5.1"),
        artefact("come", "1.0", requires=("numpy<2",)),
        extra="environment: {SGLANG_FLAG: '1'}\n",
    )
    found = compare(side(str(a), tmp_path), side(str(b), tmp_path), settings_at(tmp_path), wheels=False)
    text = as_text(found).replace(str(tmp_path), "DIR")
    golden("diff.txt", text + "\n")
    # What a rule has something to say of comes before what only moved further.
    assert found.changes[0].notes


def test_the_same_stack_twice(tmp_path: Path) -> None:
    a = _write(tmp_path, "a", artefact("numpy", "2.3.5"))
    each = side(str(a), tmp_path)
    assert as_text(compare(each, each, settings_at(tmp_path), wheels=False)) == f"{a} and {a} are the same"


def test_the_same_version_of_another_file(tmp_path: Path) -> None:
    a = _write(tmp_path, "a", artefact("numpy", "2.3.5"))
    b = _write(tmp_path, "b", artefact("numpy", "2.3.5", sha256="0" * 64))
    found = compare(side(str(a), tmp_path), side(str(b), tmp_path), settings_at(tmp_path), wheels=False)
    assert [(change.name, change.notes) for change in found.changes] == [("numpy", ("the same version, another file",))]


def test_a_lock_without_its_matrix(tmp_path: Path) -> None:
    a = _write(tmp_path, "a", artefact("numpy", "2.3.5"))
    found = side(str(lock_path(a)), tmp_path)
    assert (found.packages, found.loaded) == ({"numpy": "2.3.5"}, None)


def test_a_matrix_without_a_lock_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(TINY, encoding="utf-8")
    assert cli.main(["diff", str(path), str(path)]) == ExitCode.LOCK
    assert capsys.readouterr().err == (
        f"error: the matrix has no lock\n  at: {tmp_path}/a.lock.json\n  hint: `builder lock {path}` makes it\n"
    )


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _write(tmp_path, "a", artefact("numpy", "2.3.5"))
    b = _write(tmp_path, "b", artefact("numpy", "2.4.0"))
    assert cli.main(["diff", str(a), str(b), "--no-wheels", "--json"]) == ExitCode.OK
    said = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["before"], each["after"]) for each in said["changes"]] == [("numpy", "2.3.5", "2.4.0")]


def test_sides_without_digests_are_compared_by_version() -> None:
    a, b = Side("a", {"x": "1"}, {}), Side("b", {"x": "1"}, {})
    assert compare(a, b, settings_at(Path("/nonexistent")), wheels=False).changes == ()


@pytest.mark.parametrize(
    ("before", "after", "notes"),
    [
        (
            {"torch": "2.10.0"},
            {"torch": "2.11.0"},
            ("GPU images gained sm_103a, sm_121a, compute_120; lost sm_50, sm_60, sm_70, compute_90",),
        ),
        ({"sglang-kernel": "0.4.4"}, {"sglang-kernel": "0.4.5"}, ()),
        # A build of somebody's own is not the index's.
        ({"torch": "2.10.0"}, {"torch": "2.11.0+mine"}, ()),
    ],
)
def test_gpu_images_gained_and_lost(
    before: dict[str, str], after: dict[str, str], notes: tuple[str, ...], tmp_path: Path
) -> None:
    found = compare(Side("a", before, {}), Side("b", after, {}), settings_at(tmp_path), wheels=False)
    assert [change.notes for change in found.changes] == [notes]


def test_what_only_one_has_is_said_where_nothing_of_it_changed(tmp_path: Path) -> None:
    numpy = artefact("numpy", "2.3.5")
    a = _write(tmp_path, "a", numpy, artefact("lib", "1.0"))
    b = _write(tmp_path, "b", numpy, artefact("lib", "1.1", requires=("numpy<2",)))
    text = as_text(compare(side(str(a), tmp_path), side(str(b), tmp_path), settings_at(tmp_path), wheels=False))
    assert text.splitlines()[:2] == [
        f"{a} → {b}: 1 change, most suspicious first",
        f"  only in {b}: lib 1.1 requires `numpy<2`, the lock has 2.3.5",
    ]


def test_without_an_engine_that_no_matrix_has_the_name_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise BuildError("no Docker Engine answers", because="nothing listens", hint="start it")

    monkeypatch.setattr("builder.engine.connect", absent)
    for words in (["diff", "cu131", "cu128"], ["doctor", "cu131"]):
        assert cli.main(words) == ExitCode.BUILD
        assert capsys.readouterr().err == (
            "error: no Docker Engine answers\n"
            "  because: no matrix is called `cu131` (did you mean `cu130`?), and nothing listens\n  hint: start it\n"
        )
