"""A user's own diff: exact lines at exact places, or a message that says which line differs."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from builder.errors import BuilderError, IntegrityError, UsageError
from builder.matrix import UserDiff
from builder.patches.diffs import apply
from builder.patches.engine import unified
from builder.wheel import Wheel, read_wheel
from tests.patch_made import make_wheel

TEXT = "".join(f"line{i} = {i}\n" for i in range(1, 11))


@pytest.fixture
def wheel(tmp_path: Path) -> Wheel:
    files = {"pack/a.py": TEXT, "pack/b.txt": "one\r\ntwo\r\nthree", "pack/c.py": "c = 1\n"}
    return read_wheel(make_wheel(tmp_path, "pack", "1.2", files))


def run(wheel: Wheel, folder: Path, text: str, changed: dict[str, bytes] | None = None) -> dict[str, str]:
    (folder / "mine.diff").write_bytes(text.encode())
    pinned = UserDiff(package="pack", file="mine.diff", sha256=hashlib.sha256(text.encode()).hexdigest())
    return {file: data.decode() for file, data in apply(pinned, folder, wheel, changed or {}).items()}


def refused(wheel: Wheel, folder: Path, text: str) -> str:
    with pytest.raises(UsageError) as caught:
        run(wheel, folder, text)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_hunks_of_several_files(wheel: Wheel, tmp_path: Path) -> None:
    after = TEXT.replace("line2 = 2\n", "line2 = 20\nnew = 1\n").replace("line9 = 9\n", "")
    text = unified("pack/a.py", TEXT.encode(), after.encode()) + unified("pack/c.py", b"c = 1\n", b"c = 2\n")
    assert run(wheel, tmp_path, text) == {"pack/a.py": after, "pack/c.py": "c = 2\n"}


def test_a_diff_as_git_writes_it(wheel: Wheel, tmp_path: Path) -> None:
    text = (
        "From 0123 Mon Sep 17 00:00:00 2001\nSubject: [PATCH] x\n\n---\n pack/c.py | 2 +-\n\n"
        "diff --git a/pack/c.py b/pack/c.py\nindex 1..2 100644\n--- a/pack/c.py\n+++ b/pack/c.py\n"
        "@@ -1 +1 @@ def f():\n-c = 1\n+c = 2\n-- \n2.39.5\n"
    )
    assert run(wheel, tmp_path, text) == {"pack/c.py": "c = 2\n"}


def test_line_ends_are_part_of_a_line(wheel: Wheel, tmp_path: Path) -> None:
    text = unified("pack/b.txt", b"one\r\ntwo\r\nthree", b"one\r\n2\r\nthree\n")
    assert run(wheel, tmp_path, text) == {"pack/b.txt": "one\r\n2\r\nthree\n"}
    assert "because: line 1 has to be 'one\\n'\n    but it is 'one\\r\\n'" in refused(
        wheel, tmp_path, text.replace("\r\n", "\n")
    )


def test_a_file_that_is_changed_already_is_taken_as_it_is_now(wheel: Wheel, tmp_path: Path) -> None:
    text = unified("pack/c.py", b"c = 5\n", b"c = 6\n")
    assert run(wheel, tmp_path, text, {"pack/c.py": b"c = 5\n"}) == {"pack/c.py": "c = 6\n"}


def test_lines_are_added_to_an_empty_place(wheel: Wheel, tmp_path: Path) -> None:
    text = "--- a/pack/c.py\n+++ b/pack/c.py\n@@ -1,0 +2 @@\n+d = 2\n"
    assert run(wheel, tmp_path, text) == {"pack/c.py": "c = 1\nd = 2\n"}


HEAD = "--- a/pack/a.py\n+++ b/pack/a.py\n"
AGAIN = "  hint: it is applied without fuzz or offset, after the patch sets: make it again from the file as it is"
ONLY = "  because: a diff may change lines of files that are there"
PATHS = "  hint: paths are as in the wheel, with `a/` and `b/` in front"
UNIFIED = "  hint: it has to be a unified diff"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f"{HEAD}@@ -4,3 +4,3 @@\n line3 = 3\n-line4 = 4\n+x = 1\n line5 = 5\n",
            (
                "error: the diff does not apply to `pack/a.py`\n  at: FOLDER/mine.diff:4\n"
                f"  because: line 4 has to be 'line3 = 3\\n'\n    but it is 'line4 = 4\\n'\n{AGAIN}"
            ),
        ),
        (
            f"{HEAD}@@ -3,3 +3,3 @@\n line3 = 3\n-line4 = 5\n+x = 1\n line5 = 5\n",
            (
                "error: the diff does not apply to `pack/a.py`\n  at: FOLDER/mine.diff:5\n"
                f"  because: line 4 has to be 'line4 = 5\\n'\n    but it is 'line4 = 4\\n'\n{AGAIN}"
            ),
        ),
        (
            f"{HEAD}@@ -10,2 +10,2 @@\n line10 = 10\n-line11 = 11\n+x = 1\n",
            (
                "error: the diff does not apply to `pack/a.py`\n  at: FOLDER/mine.diff:5\n"
                f"  because: line 11 has to be 'line11 = 11\\n'\n    but it is the end of its 10 lines\n{AGAIN}"
            ),
        ),
        (
            f"{HEAD}@@ -1 +1 @@\n-line1 = 1\n+line1 = (\n",
            (
                "error: with the diff `pack/a.py` does not parse\n  at: FOLDER/mine.diff\n"
                "  because: '(' was never closed (<unknown>, line 1)"
            ),
        ),
        (
            f"{HEAD}@@ -5 +5 @@\n-line5 = 5\n+x = 1\n@@ -1 +1 @@\n-line1 = 1\n+x = 1\n",
            "error: the diff's hunks are not in order\n  at: FOLDER/mine.diff:6",
        ),
        (
            f"{HEAD}@@ -1,2 +1,2 @@\n-line1 = 1\n+x = 1\n",
            "error: the diff's hunk is cut short\n  at: FOLDER/mine.diff:5",
        ),
        (
            f"{HEAD}@@ -1,1 +1,2 @@\n line1 = 1\n line2 = 2\n+x = 1\n",
            "error: the diff's hunk has more lines than it says\n  at: FOLDER/mine.diff:3",
        ),
        (
            f"{HEAD}@@ line1 @@\n-line1 = 1\n",
            "error: the diff has a hunk without its place\n  at: FOLDER/mine.diff:3\n  hint: as in `@@ -3,4 +3,5 @@`",
        ),
        ("", f"error: the diff changes nothing\n  at: FOLDER/mine.diff\n{UNIFIED}"),
        (HEAD, f"error: the diff changes nothing\n  at: FOLDER/mine.diff\n{UNIFIED}"),
        ("@@ -1 +1 @@\n-a\n+b\n", f"error: the diff has a hunk of no file\n  at: FOLDER/mine.diff:1\n{UNIFIED}"),
        (
            "--- a/pack/z.py\n+++ b/pack/z.py\n@@ -1 +1 @@\n-a\n+b\n",
            f"error: `pack-1.2-py3-none-any.whl` has no file `pack/z.py`\n  at: FOLDER/mine.diff\n{PATHS}",
        ),
        (
            "--- a/../../etc/x\n+++ b/../../etc/x\n@@ -1 +1 @@\n-a\n+b\n",
            f"error: `pack-1.2-py3-none-any.whl` has no file `../../etc/x`\n  at: FOLDER/mine.diff\n{PATHS}",
        ),
        (
            "--- a/pack-1.2.dist-info/METADATA\n+++ b/pack-1.2.dist-info/METADATA\n@@ -1 +1 @@\n-a\n+b\n",
            (
                "error: `pack-1.2-py3-none-any.whl` has no file `pack-1.2.dist-info/METADATA`\n"
                f"  at: FOLDER/mine.diff\n{PATHS}"
            ),
        ),
        (
            "--- a/pack/a.py\n+++ b/pack/c.py\n@@ -1 +1 @@\n-a\n+b\n",
            f"error: the diff is of two files, `pack/a.py` and `pack/c.py`\n  at: FOLDER/mine.diff:2\n{PATHS}",
        ),
        (
            "--- /dev/null\n+++ b/pack/new.py\n@@ -0,0 +1 @@\n+a = 1\n",
            f"error: the diff makes or removes a file\n  at: FOLDER/mine.diff:2\n{ONLY}",
        ),
        (
            "diff --git a/pack/a.py b/pack/z.py\nsimilarity index 100%\nrename from pack/a.py\nrename to pack/z.py\n",
            f"error: the diff renames a file\n  at: FOLDER/mine.diff:3\n{ONLY}",
        ),
        ("GIT binary patch\nliteral 3\n", f"error: the diff is binary\n  at: FOLDER/mine.diff:1\n{ONLY}"),
        (
            "old mode 100644\nnew mode 100755\n",
            f"error: the diff changes a file's mode\n  at: FOLDER/mine.diff:1\n{ONLY}",
        ),
    ],
)
def test_a_diff_that_is_refused(wheel: Wheel, tmp_path: Path, text: str, message: str) -> None:
    assert refused(wheel, tmp_path, text) == message


def test_another_diff_than_the_pinned_one(wheel: Wheel, tmp_path: Path) -> None:
    (tmp_path / "mine.diff").write_text("x")
    with pytest.raises(IntegrityError) as caught:
        apply(UserDiff(package="pack", file="mine.diff", sha256="0" * 64), tmp_path, wheel, {})
    assert str(caught.value) == (
        "error: the diff is not the one that the matrix pins\n"
        f"  at: {tmp_path / 'mine.diff'}\n"
        f"  because: wanted sha256 {'0' * 64}\n"
        f"    got    sha256 {hashlib.sha256(b'x').hexdigest()}\n"
        "  hint: where the change is yours, write the new sha256 into the matrix"
    )


def test_a_diff_that_is_not_there(wheel: Wheel, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        apply(UserDiff(package="pack", file="none.diff", sha256="0" * 64), tmp_path, wheel, {})
    assert str(caught.value) == (
        f"error: the diff cannot be read\n  at: {tmp_path / 'none.diff'}\n  because: No such file or directory"
    )


LINES = st.lists(st.sampled_from(["a", "b", "", "c d", "-- x", "++ y", "@@ -1 +1 @@", "\\ z"]), max_size=12)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(LINES, LINES, st.booleans(), st.booleans())
def test_what_a_diff_was_made_of_comes_out_of_it(
    wheel: Wheel, tmp_path: Path, old: list[str], new: list[str], old_end: bool, new_end: bool
) -> None:
    before, after = ("\n".join(lines) + ("\n" if end else "") for lines, end in ((old, old_end), (new, new_end)))
    if before != after:
        text = unified("pack/b.txt", before.encode(), after.encode())
        assert run(wheel, tmp_path, text, {"pack/b.txt": before.encode()}) == {"pack/b.txt": after}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.text("-+ @\\\n\rab01,/", max_size=80))
def test_no_text_breaks_the_reader(wheel: Wheel, tmp_path: Path, text: str) -> None:
    try:
        run(wheel, tmp_path, HEAD + text)
    except BuilderError as error:
        assert error.exit_code in (2, 7)


def test_a_file_that_is_not_utf_8(wheel: Wheel, tmp_path: Path) -> None:
    text = unified("pack/c.py", b"c = 1\n", b"c = 2\n")
    with pytest.raises(UsageError) as caught:
        run(wheel, tmp_path, text, {"pack/c.py": b"c = 1\n# \xff\n"})
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == (
        "error: with the diff `pack/c.py` is not UTF-8\n  at: FOLDER/mine.diff\n"
        "  because: 'utf-8' codec can't decode byte 0xff in position 8: invalid start byte"
    )


def test_git_agrees(wheel: Wheel, tmp_path: Path) -> None:
    after = TEXT.replace("line5 = 5\n", "five = 5\n")
    text = unified("pack/a.py", TEXT.encode(), after.encode())
    (tmp_path / "tree" / "pack").mkdir(parents=True)
    (tmp_path / "tree" / "pack" / "a.py").write_text(TEXT)
    subprocess.run(["git", "apply"], input=text, text=True, cwd=tmp_path / "tree", check=True)
    assert (tmp_path / "tree" / "pack" / "a.py").read_text() == after == run(wheel, tmp_path, text)["pack/a.py"]
