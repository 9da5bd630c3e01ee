"""Writing files atomically, canonical JSON, sizes for people."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.files import canonical_json, pretty_size, sha256_hex, write_atomic


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_written_with_its_folders(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b" / "file", "ü\n")
    assert (tmp_path / "a" / "b" / "file").read_bytes() == b"\xc3\xbc\n"


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    if step == "fsync":
        monkeypatch.setattr(os, "fsync", full_disk)
    else:
        monkeypatch.setattr(Path, step, full_disk)
    with pytest.raises(OSError, match="No space left on device"):
        write_atomic(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_link_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("target")
    (tmp_path / "link").symlink_to("target")
    write_atomic(tmp_path / "link", "new")
    assert ((tmp_path / "target").read_text(), (tmp_path / "link").is_symlink()) == ("target", False)


def test_the_mode_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "file", b"")
        write_atomic(tmp_path / "program", b"", 0o755)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "program")]
    assert modes == [0o644, 0o755]


def test_canonical_json_is_sorted_without_blanks_and_utf_8() -> None:
    assert canonical_json({"b": [1, None], "a": "ü"}) == b'{"a":"\xc3\xbc","b":[1,null]}'


def test_canonical_json_does_not_depend_on_the_order_of_keys() -> None:
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


def test_sha256_is_hexadecimal() -> None:
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.4, "999 B"),
        (999.9, "1 kB"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_900, "1 MB"),
        (999_999, "1 MB"),
        (1_000_000, "1 MB"),
        (999_999_999, "1 GB"),
        (4_640_000_000, "4.64 GB"),
        (11_300_000_000, "11.3 GB"),
        (999_999_999_999, "1000 GB"),
        (12_345_000_000_000, "12345 GB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert pretty_size(count) == text


@given(st.integers(0, 10**15))
def test_a_size_never_shows_an_exponent_and_is_right_to_half_a_percent(count: int) -> None:
    number, unit = pretty_size(count).split(" ")
    assert "e" not in number
    factor = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}[unit]
    assert abs(float(number) * factor - count) <= 0.00501 * count


def test_what_can_be_had_again_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: pytest.fail("waited"))
    write_atomic(tmp_path / "a", "text", durable=False)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "text")]
