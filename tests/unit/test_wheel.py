"""Wheels: read whole and compared with RECORD; repacked with other contents, the same bytes each time."""

from __future__ import annotations

import csv
import os
import subprocess
import zipfile
from pathlib import Path

import pytest
from uv import find_uv_bin

from builder.errors import IntegrityError, UsageError
from builder.wheel import Entry, digest, read_wheel, repack, with_local
from tests.patch_made import make_wheel

FILES = {"pack/__init__.py": "", "pack/a.py": "A = 1\n", "pack/E=1,N=2.json": "{}", "pack/tool.sh": "#!/bin/sh\n"}


def made(folder: Path, **fields: object) -> Path:
    return make_wheel(folder, "pack", "1.2", FILES, executable=("pack/tool.sh",), **fields)  # type: ignore[arg-type]


# --- reading ----------------------------------------------------------------------------------------------------------


def test_what_a_wheel_is(tmp_path: Path) -> None:
    wheel = read_wheel(made(tmp_path))
    assert (wheel.name, wheel.version, wheel.metadata_version, wheel.info) == (
        "pack",
        "1.2",
        "1.2",
        "pack-1.2.dist-info",
    )
    assert sorted(wheel.entries) == [
        "pack-1.2.dist-info/METADATA",
        "pack-1.2.dist-info/WHEEL",
        "pack/E=1,N=2.json",
        "pack/__init__.py",
        "pack/a.py",
        "pack/tool.sh",
    ]
    assert wheel.entries["pack/tool.sh"] == Entry(digest(b"#!/bin/sh\n"), 10, executable=True)
    assert wheel.read("pack/a.py") == b"A = 1\n"
    assert wheel.read_all(["pack/a.py", "none"]) == {"pack/a.py": b"A = 1\n"}


def test_metadata_may_lack_the_local_part(tmp_path: Path) -> None:
    # sgl-kernel's +cu130 wheels have it so (sglang #14327).
    path = make_wheel(tmp_path, "sgl-kernel", "0.3.21+cu130", {"sgl_kernel/x.py": ""}, metadata_version="0.3.21")
    assert (read_wheel(path).version, read_wheel(path).metadata_version) == ("0.3.21+cu130", "0.3.21")


def test_a_member_that_record_does_not_have_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        read_wheel(made(tmp_path)).read("pack-1.2.dist-info/RECORD")


def refusal(path: Path) -> str:
    with pytest.raises(IntegrityError) as caught:
        read_wheel(path)
    return str(caught.value)


def damaged(path: Path, because: str) -> str:
    return (
        f"error: `{path.name}` is a damaged wheel\n"
        f"  at: {path}\n"
        f"  because: {because}\n"
        "  hint: remove the file, so that it is fetched again"
    )


INFO = "pack-1.2.dist-info"
GOOD = {"pack/a.py": b"A = 1\n"}
ROW = f"pack/a.py,{digest(b'A = 1' + chr(10).encode())},6\n"


def rows(tmp_path: Path) -> str:
    """The RECORD of a wheel with one file."""
    with zipfile.ZipFile(make_wheel(tmp_path / "good", "pack", "1.2", GOOD)) as archive:
        return archive.read(f"{INFO}/RECORD").decode()


@pytest.mark.parametrize(
    ("old", "new", "because"),
    [
        (ROW, "", "RECORD does not name `pack/a.py`, which is in the wheel"),
        (ROW, ROW + "pack/b.py,sha256=abc,1\n", "RECORD names `pack/b.py`, which is not in the wheel"),
        (ROW, ROW + ROW, "RECORD has `pack/a.py` twice"),
        (ROW, ROW.replace(",6\n", ",7\n"), "`pack/a.py` has 6 bytes, RECORD says 7"),
        (
            ROW,
            ROW.replace(digest(b"A = 1\n"), digest(b"A = 2\n")),
            "`pack/a.py` is not the file that RECORD has the hash of",
        ),
        (ROW, "pack/a.py,,\n", "RECORD has no sha256 of `pack/a.py`"),
        (ROW, "pack/a.py,md5=abc,6\n", "RECORD has no sha256 of `pack/a.py`"),
        (ROW, "pack/a.py,6\n", "RECORD has a line with 2 fields: pack/a.py,6"),
    ],
)
def test_a_record_that_is_not_the_wheels(tmp_path: Path, old: str, new: str, because: str) -> None:
    assert old in rows(tmp_path)
    path = make_wheel(tmp_path, "pack", "1.2", GOOD, record=rows(tmp_path).replace(old, new))
    assert refusal(path) == damaged(path, because)


@pytest.mark.parametrize(
    ("member", "because"),
    [
        ("../out.py", "`../out.py` does not stay inside of it"),
        ("/etc/out.py", "`/etc/out.py` does not stay inside of it"),
        ("pack/./out.py", "`pack/./out.py` does not stay inside of it"),
        ("other-1.dist-info/METADATA", "it has 2 dist-info folders: other-1.dist-info, pack-1.2.dist-info"),
        ("pack/b.py", "RECORD does not name `pack/b.py`, which is in the wheel"),
    ],
)
def test_a_member_that_does_not_belong_there(tmp_path: Path, member: str, because: str) -> None:
    path = make_wheel(tmp_path, "pack", "1.2", GOOD, more={member: ""})
    assert refusal(path) == damaged(path, because)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "pack", "1.2", GOOD)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("pack/a.py", "A = 2\n")
    assert refusal(path) == damaged(path, "it has `pack/a.py` twice")


def test_another_packages_wheel_under_a_name(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "pack", "1.2", GOOD).rename(tmp_path / "pack-1.3-py3-none-any.whl")
    assert refusal(path) == damaged(path, "its file name says pack 1.3, its folder `pack-1.2.dist-info`")


def test_metadata_of_another_version(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "pack", "1.2", GOOD, metadata_version="1.1")
    assert refusal(path) == damaged(path, "its file name says version 1.2, its METADATA 1.1")


def test_a_wheel_that_is_cut_off(tmp_path: Path) -> None:
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[:-200])
    assert refusal(path) == damaged(path, "File is not a zip file")


def test_a_file_that_is_not_called_as_a_wheel(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        read_wheel(tmp_path / "pack.whl")
    assert str(caught.value) == f"error: `pack.whl` is not a wheel's file name\n  at: {tmp_path / 'pack.whl'}"


# --- local versions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "local", "expected"),
    [
        ("0.5.9", "sm120.eagle3", "0.5.9+sm120.eagle3"),
        ("0.3.21+cu130", "sm120", "0.3.21+cu130.sm120"),
        ("0.5.15.post1", "diff1", "0.5.15.post1+diff1"),
        ("1!2.0rc1", "x", "1!2.0rc1+x"),
    ],
)
def test_a_local_version(version: str, local: str, expected: str) -> None:
    assert with_local(version, local) == expected


@pytest.mark.parametrize("local", ["", "a b", "A", "a..b", "a\n"])
def test_what_cannot_be_a_local_version(local: str) -> None:
    with pytest.raises(ValueError, match="cannot be a local version"):
        with_local("1.0", local)


# --- repacking --------------------------------------------------------------------------------------------------------


def test_a_repacked_wheel_is_whole_and_says_what_it_is(tmp_path: Path) -> None:
    files = {**FILES, "pack-1.2.data/scripts/run": "x"}
    source = make_wheel(tmp_path, "pack", "1.2", files, executable=("pack/tool.sh",))
    done = repack(source, tmp_path / "out", {"pack/a.py": b"A = 2\n"}, {"pack/new.py": b"N = 1\n"}, "sm120.eagle3")
    assert (done.file, done.version) == ("pack-1.2+sm120.eagle3-py3-none-any.whl", "1.2+sm120.eagle3")
    assert done.path.stat().st_size == done.size
    wheel = read_wheel(done.path)
    assert (wheel.version, wheel.metadata_version, wheel.info) == (
        *[done.version] * 2,
        f"pack-{done.version}.dist-info",
    )
    assert wheel.read("pack/a.py") == b"A = 2\n"
    assert wheel.read("pack/new.py") == b"N = 1\n"
    assert wheel.read(f"{wheel.info}/METADATA") == (
        b"Metadata-Version: 2.1\nName: pack\nVersion: 1.2+sm120.eagle3\n\nVersion: of the text\n"
    )
    with zipfile.ZipFile(done.path) as archive:
        infos = archive.infolist()
        record = archive.read(f"{wheel.info}/RECORD").decode()
    assert [info.filename for info in infos] == [
        "pack-1.2+sm120.eagle3.data/scripts/run",
        "pack/E=1,N=2.json",
        "pack/__init__.py",
        "pack/a.py",
        "pack/new.py",
        "pack/tool.sh",
        "pack-1.2+sm120.eagle3.dist-info/METADATA",
        "pack-1.2+sm120.eagle3.dist-info/WHEEL",
        "pack-1.2+sm120.eagle3.dist-info/RECORD",
    ]
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    assert {info.filename for info in infos if info.external_attr >> 16 == 0o100755} == {"pack/tool.sh"}
    assert {info.external_attr >> 16 for info in infos} == {0o100644, 0o100755}
    assert list(csv.reader(record.splitlines()))[-1] == [f"{wheel.info}/RECORD", "", ""]


def test_one_content_gives_the_same_bytes_however_it_was_packed(tmp_path: Path) -> None:
    one = repack(made(tmp_path / "1"), tmp_path / "out1", {}, {}, "x")
    two = made(tmp_path / "2", time=(2000, 1, 1, 0, 0, 0), backwards=True, compression=zipfile.ZIP_BZIP2)
    again = repack(two, tmp_path / "out2", {}, {}, "x")
    assert one.path.read_bytes() == again.path.read_bytes()
    assert one.sha256 == again.sha256


def test_a_local_version_is_made_longer_also_where_metadata_lacks_it(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "sgl-kernel", "0.3.21+cu130", {"sgl_kernel/x.py": ""}, metadata_version="0.3.21")
    wheel = read_wheel(repack(path, tmp_path / "out", {}, {}, "diff1").path)
    assert (wheel.version, wheel.metadata_version) == ("0.3.21+cu130.diff1", "0.3.21+cu130.diff1")


def test_a_signature_of_the_old_record_is_left_out(tmp_path: Path) -> None:
    path = make_wheel(tmp_path, "pack", "1.2", GOOD, more={f"{INFO}/RECORD.jws": "{}"})
    with zipfile.ZipFile(repack(path, tmp_path / "out", {}, {}, "x").path) as archive:
        assert [name for name in archive.namelist() if "jws" in name] == []


@pytest.mark.parametrize(
    ("replaced", "added", "message"),
    [
        ({"pack/none.py": b""}, {}, "error: `pack-1.2-py3-none-any.whl` has no file `pack/none.py`"),
        ({}, {"pack/a.py": b""}, "error: `pack-1.2-py3-none-any.whl` has a file `pack/a.py` already"),
        ({}, {"../x": b""}, "error: `../x` does not stay inside of a wheel"),
        (
            {f"{INFO}/METADATA": b""},
            {},
            f"error: `{INFO}/METADATA` of `pack-1.2-py3-none-any.whl` is not to be changed\n  because: it describes the wheel",
        ),
    ],
)
def test_members_that_cannot_be_changed(
    tmp_path: Path, replaced: dict[str, bytes], added: dict[str, bytes], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        repack(made(tmp_path), tmp_path / "out", replaced, added, "x")
    assert str(caught.value) == message


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        repack(made(tmp_path), tmp_path / "out", {}, {}, "x")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_installer_takes_it(tmp_path: Path) -> None:
    done = repack(made(tmp_path), tmp_path / "out", {"pack/a.py": b"A = 2\n"}, {}, "sm120")
    target = tmp_path / "site"
    command = [find_uv_bin(), "pip", "install", "--offline", "--no-deps", "--no-config", "--target", str(target)]
    environment = {**os.environ, "UV_CACHE_DIR": str(tmp_path / "cache")}
    subprocess.run([*command, str(done.path)], check=True, capture_output=True, env=environment)
    assert (target / "pack" / "a.py").read_text() == "A = 2\n"
    assert (target / "pack-1.2+sm120.dist-info" / "METADATA").read_text().splitlines()[2] == "Version: 1.2+sm120"
    assert os.access(target / "pack" / "tool.sh", os.X_OK)
