"""Finishing a layer: times, modes, droppings and bytecode, on a small tree."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from builder.smoke import finish
from tests.made import ROOT

EPOCH = 1772323200
SCRIPT = ROOT / "builder" / "smoke" / "finish.py"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What was there before the step (`old`), then the start mark, then what the step wrote (`new`)."""
    top = tmp_path / "top"
    (top / "old").mkdir(parents=True)
    (top / "old" / "file").write_text("x")
    os.utime(top / "old" / "file", (1, 1))
    os.utime(top / "old", (1, 1))
    time.sleep(0.02)
    (tmp_path / "start").touch()
    time.sleep(0.02)
    (top / "new" / "deep").mkdir(parents=True)
    (top / "new" / "deep" / "file").write_text("x")
    (top / "new" / "link").symlink_to("deep/file")
    (top / "new" / "broken").symlink_to("nowhere")
    return top


def run(tree: Path, *more: str) -> None:
    subprocess.run(
        [
            sys.executable,
            "-P",
            str(SCRIPT),
            "--epoch",
            str(EPOCH),
            "--start",
            str(tree.parent / "start"),
            *more,
            str(tree),
        ],
        check=True,
    )


def times(top: Path) -> dict[str, int]:
    found = [top, *top.rglob("*")]
    return {str(path.relative_to(top)): int(path.lstat().st_mtime) for path in found}


def test_what_the_step_wrote_carries_the_time_and_what_was_there_does_not(tree: Path) -> None:
    run(tree)
    assert times(tree) == {
        ".": EPOCH,
        "old": 1,
        "old/file": 1,
        "new": EPOCH,
        "new/deep": EPOCH,
        "new/deep/file": EPOCH,
        "new/link": EPOCH,
        "new/broken": EPOCH,
    }


def test_the_start_mark_goes(tree: Path) -> None:
    run(tree)
    assert not (tree.parent / "start").exists()


def test_a_file_of_below_that_the_step_changed_is_touched_too(tree: Path) -> None:
    (tree / "old" / "file").write_text("changed")
    run(tree)
    assert times(tree)["old/file"] == EPOCH


def test_running_again_changes_nothing(tree: Path) -> None:
    run(tree)
    before = times(tree)
    (tree.parent / "start").touch()
    run(tree)
    assert times(tree) == before


def test_without_a_start_mark_it_fails(tree: Path) -> None:
    (tree.parent / "start").unlink()
    with pytest.raises(subprocess.CalledProcessError):
        run(tree)


def test_a_link_is_not_followed_out_of_the_tree(tree: Path) -> None:
    outside = tree.parent / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    os.utime(outside / "file", (1, 1))
    os.utime(outside, (1, 1))
    (tree / "new" / "away").symlink_to(outside)
    run(tree)
    assert times(outside) == {".": 1, "file": 1}


def test_the_installers_droppings_go_from_disk_and_record(tree: Path) -> None:
    info = tree / "new" / "idna-3.7.dist-info"
    info.mkdir()
    (info / "uv_cache.json").write_text("{}")
    (info / "RECORD").write_text(
        "idna/__init__.py,sha256=x,1\nidna-3.7.dist-info/uv_cache.json,,\nidna-3.7.dist-info/RECORD,,\n"
    )
    (tree / "new" / "uv_cache.json").write_text("somebody's own")
    run(tree)
    assert sorted(path.name for path in info.iterdir()) == ["RECORD"]
    assert (info / "RECORD").read_text() == "idna/__init__.py,sha256=x,1\nidna-3.7.dist-info/RECORD,,\n"
    assert (tree / "new" / "uv_cache.json").read_text() == "somebody's own"


RECORD_FIRST = ("RECORD", "uv_cache.json")


@pytest.mark.parametrize("names", [RECORD_FIRST, ("uv_cache.json", "RECORD")])
def test_a_record_that_lost_a_line_carries_the_time_whichever_comes_first(
    tree: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, str]
) -> None:
    info = tree / "new" / "idna-3.7.dist-info"
    info.mkdir()
    (info / "uv_cache.json").write_text("{}")
    (info / "RECORD").write_text("idna-3.7.dist-info/uv_cache.json,,\n")
    real = finish.changed

    def ordered(top: str, start: int) -> list[str]:
        return sorted(real(top, start), key=lambda path: (-path.count("/"), path.endswith(names[1]), path))

    monkeypatch.setattr(finish, "changed", ordered)
    finish.finish(str(tree.parent / "start"), EPOCH, [str(tree)])
    assert int((info / "RECORD").stat().st_mtime) == EPOCH


@pytest.mark.parametrize(
    ("path", "mode", "wanted"),
    [
        ("/opt/venv/lib/x.py", 0o600, 0o644),
        ("/opt/venv/lib/x.py", 0o664, 0o644),
        ("/opt/venv/lib/x.py", 0o644, None),
        ("/opt/venv/bin/x", 0o700, 0o755),
        ("/opt/venv/bin/x", 0o755, None),
        ("/usr/local/cuda/x.so", 0o640, 0o644),
        ("/opt/x", 0o4755, 0o755),
        ("/etc/passwd", 0o600, None),
        ("/home/sglang/x", 0o600, None),
    ],
)
def test_modes_do_not_show_the_umask_of_the_builder(path: str, mode: int, wanted: int | None) -> None:
    assert finish.fixed_mode(path, mode) == wanted


def test_bytecode_checks_its_source_by_hash_and_is_the_same_everywhere(tmp_path: Path) -> None:
    written: list[bytes] = []
    for place in ("a", "b"):
        package = tmp_path / place / "part"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("VALUE = 1\n")
        (package / "broken.py").write_text("this is no python\n")
        os.utime(package / "__init__.py", (len(written), len(written)))
        subprocess.run([sys.executable, "-P", str(SCRIPT), "--compile", str(package)], check=True, cwd=tmp_path)
        (cached,) = (package / "__pycache__").iterdir()
        written.append(cached.read_bytes())
    flags = struct.unpack("<I", written[0][4:8])[0]
    assert flags == 0b11, "checked-hash: the source is compared each time (PEP 552)"
    assert written[0][:16] == written[1][:16]


def test_a_module_is_compiled_as_well_and_what_there_is_not_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("VALUE = 1\n")
    subprocess.run(
        [sys.executable, "-P", str(SCRIPT), "--compile", str(tmp_path / "one.py"), "--compile", str(tmp_path / "none")],
        check=True,
    )
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [f"one.{sys.implementation.cache_tag}.pyc"]


def test_an_edited_module_is_not_hidden_by_its_bytecode(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("VALUE = 1\n")
    finish.compile_package(str(tmp_path / "one.py"), 1)
    stamp = (tmp_path / "one.py").stat()
    (tmp_path / "one.py").write_text("VALUE = 2\n")
    os.utime(tmp_path / "one.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    script = [sys.executable, "-B", "-c", "import one; print(one.VALUE)"]
    assert subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, check=True).stdout == "2\n"


def test_bytecode_carries_the_time_too(tree: Path) -> None:
    (tree / "new" / "part.py").write_text("VALUE = 1\n")
    run(tree, "--compile", str(tree / "new" / "part.py"))
    (cached,) = (tree / "new" / "__pycache__").iterdir()
    assert int(cached.stat().st_mtime) == EPOCH
    assert stat.S_ISREG(cached.stat().st_mode)
