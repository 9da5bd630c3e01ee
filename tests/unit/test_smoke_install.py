"""`installed`, `record` and `ownership` on made-up environments."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import struct
from pathlib import Path

import pytest

from builder.smoke.install import check_installed, check_ownership, check_record
from builder.smoke.tree import Tree, is_shared_object
from tests.unit.smoke_made import Site, finished, said

REBUILD = "  hint: build again from the lock; nothing else may install into the environment"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.wheel("alpha", files={"alpha/__init__.py": "a = 1\n", "alpha/data.txt": "text\n"})
    made.wheel("sglang", "0.5", {"sglang/__init__.py": "s = 1\n"}, layer="sglang")
    return made


def installed(site: Site, *, native: bool = False) -> str:
    return said(check_installed(site.spec, site.tree, native=native), "installed")


def record(site: Site, *, native: bool = True) -> str:
    return said(check_record(site.spec, site.tree, native=native), "record")


def ownership(site: Site, *, native: bool = False) -> str:
    return said(check_ownership(site.spec, site.tree, native=native), "ownership")


def test_installed_as_locked(site: Site) -> None:
    check = finished(check_installed(site.spec, site.tree, native=False))
    assert (check.ok, check.looked_at, check.expected) == (True, 2, 2)


def test_installed_leaves_the_sglang_layer_out_of_the_native_part(site: Site) -> None:
    check = finished(check_installed(site.spec, site.tree, native=True))
    assert (check.ok, check.looked_at, check.expected) == (True, 1, 1)


def test_installed_names_what_is_missing(site: Site) -> None:
    site.lock("beta", "2.0")
    site.lock("gamma", "3.0")
    assert installed(site) == (
        f"error: 2 distributions of the lock are not installed: `beta 2.0`, `gamma 3.0` [installed]\n{REBUILD}"
    )


def test_installed_names_what_is_extra(site: Site) -> None:
    site.wheel("pip", "26.0", locked=None)
    assert installed(site) == (
        "error: 1 distribution is installed but not in the lock: `pip 26.0` [installed]\n"
        "  because: the lock is all that may be installed; a resolver or an installer ran beside it\n" + REBUILD
    )


def test_installed_in_another_version(site: Site) -> None:
    site.wheel("nvidia-nvvm", "13.5.37", locked="13.0.88")
    assert installed(site) == (
        "error: nvidia-nvvm 13.5.37 is installed, the lock has 13.0.88 [installed]\n"
        "  because: the lock's file is nvidia_nvvm-13.0.88-py3-none-any.whl\n" + REBUILD
    )


def test_installed_twice(site: Site) -> None:
    site.wheel("beta", "1.0")
    site.wheel("beta", "2.0", locked=None)
    assert installed(site) == (
        f"error: beta is installed 2 times: `beta-1.0.dist-info`, `beta-2.0.dist-info` [installed]\n{REBUILD}"
    )


def test_record_as_installed(site: Site) -> None:
    check = finished(check_record(site.spec, site.tree, native=True))
    assert (check.ok, check.looked_at, check.expected, check.findings) == (True, 4, 4, ())


def test_record_of_the_sglang_part_looks_at_that_layer_only(site: Site) -> None:
    assert finished(check_record(site.spec, site.tree, native=False)).looked_at == 3


def test_record_missing_file(site: Site) -> None:
    (site.packages / "alpha/data.txt").unlink()
    assert record(site) == (
        "error: `alpha/data.txt` of alpha 1.0 is missing [record]\n"
        f"  because: RECORD names what the wheel installed\n{REBUILD}"
    )


def test_record_other_content(site: Site) -> None:
    (site.packages / "alpha/data.txt").write_text("tixt\n")
    assert record(site) == (
        "error: `alpha/data.txt` of alpha 1.0 is not as installed: other content [record]\n"
        f"  because: its sha256 is not the one in RECORD\n{REBUILD}"
    )


def test_record_other_size(site: Site) -> None:
    (site.packages / "alpha/data.txt").write_text("more text\n")
    assert record(site) == (
        "error: `alpha/data.txt` of alpha 1.0 is not as installed: other size [record]\n"
        f"  because: its size is not the one in RECORD\n{REBUILD}"
    )


def test_record_sums_up_what_befell_one_distribution(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.wheel("alpha", files={f"alpha/{i}.txt": "" for i in range(5)})
    for i in range(5):
        (site.packages / f"alpha/{i}.txt").unlink()
    assert record(site) == (
        "error: 5 files of alpha 1.0 are missing: `alpha/0.txt`, `alpha/1.txt`, `alpha/2.txt` and 2 more [record]\n"
        f"  because: RECORD names what the wheel installed\n{REBUILD}"
    )


def test_record_without_a_hash(site: Site) -> None:
    info = site.wheel("beta", files={"beta.py": ""})
    path = site.packages / info / "RECORD"
    path.write_text(path.read_text().replace(path.read_text().splitlines()[0], "beta.py,,"))
    assert record(site) == (
        "error: `beta.py` of beta 1.0 is without a hash in RECORD [record]\n"
        f"  because: nothing says what it should hold\n{REBUILD}"
    )


def test_record_that_is_not_there(site: Site) -> None:
    (site.packages / site.wheel("beta") / "RECORD").unlink()
    assert record(site).splitlines()[0] == (
        "error: beta 1.0: RECORD cannot be read: No such file or directory [record]"
    )


def test_record_that_is_malformed(site: Site) -> None:
    (site.packages / site.wheel("beta") / "RECORD").write_text("beta.py\n")
    assert record(site).splitlines()[0] == "error: beta 1.0: RECORD is malformed: line with 1 fields: beta.py [record]"


def test_file_that_no_record_owns(site: Site) -> None:
    (site.packages / "stray.py").write_text("")
    (site.prefix / "bin" / "tool").write_text("")
    assert record(site) == (
        "error: 2 files in the environment that no RECORD owns: `stray.py`, `../../../bin/tool` [record]\n"
        "  because: something wrote them after, or beside, the installation of the lock's wheels\n"
        "  hint: remove them in the step that makes them"
    )


def test_files_of_the_environment_itself_are_expected(site: Site) -> None:
    for name in ("python", "python3", "python3.11", "activate", "activate.fish", "Activate.ps1"):
        (site.prefix / "bin" / name).write_text("")
    (site.packages / "_virtualenv.pth").write_text("")
    assert record(site) == ""


def compiled(site: Site, mode: py_compile.PycInvalidationMode) -> Path:
    source = site.packages / "alpha/__init__.py"
    target = importlib.util.cache_from_source(str(source))
    py_compile.compile(str(source), cfile=target, invalidation_mode=mode)
    return Path(target)


def test_bytecode_by_hash_is_fine(site: Site) -> None:
    compiled(site, py_compile.PycInvalidationMode.CHECKED_HASH)
    assert record(site) == ""


def rewrite(site: Site, text: str) -> None:
    """Change the source, and RECORD with it."""
    (site.packages / "alpha-1.0.dist-info" / "RECORD").unlink()
    site.artefacts.pop(0)
    site.wheel("alpha", files={"alpha/__init__.py": text, "alpha/data.txt": "text\n"})


BYTECODE_HINT = (
    "  because: bytecode that is not of its source hides what a user edits in a container\n"
    "  hint: compile with `python -m compileall --invalidation-mode checked-hash`"
)


@pytest.mark.parametrize(
    ("mode", "trouble"),
    [
        (py_compile.PycInvalidationMode.CHECKED_HASH, "error: 1 bytecode file stale, its source has other content"),
        (py_compile.PycInvalidationMode.TIMESTAMP, "error: 1 bytecode file stale, its source has another time or size"),
    ],
)
def test_stale_bytecode(site: Site, mode: py_compile.PycInvalidationMode, trouble: str) -> None:
    path = compiled(site, mode)
    rewrite(site, "a = 12345\n")
    relative = path.relative_to(site.packages)
    assert record(site) == f"{trouble}: `{relative}` [record]\n{BYTECODE_HINT}"


@pytest.mark.parametrize(
    ("mode", "trouble"),
    [
        (py_compile.PycInvalidationMode.UNCHECKED_HASH, "never compared with its source (`unchecked-hash`)"),
        (py_compile.PycInvalidationMode.TIMESTAMP, "going by time, not by content"),
    ],
)
def test_bytecode_that_would_hide_an_edit(site: Site, mode: py_compile.PycInvalidationMode, trouble: str) -> None:
    relative = compiled(site, mode).relative_to(site.packages)
    assert record(site) == f"warning: 1 bytecode file {trouble}: `{relative}` [record]\n{BYTECODE_HINT}"


def test_bytecode_without_a_source(site: Site) -> None:
    relative = compiled(site, py_compile.PycInvalidationMode.CHECKED_HASH).relative_to(site.packages)
    orphan = site.packages / relative.with_name(f"gone.{relative.name.split('.', 1)[1]}")
    (site.packages / relative).rename(orphan)
    assert record(site).splitlines()[0] == (
        f"error: 1 bytecode file without a source: `{orphan.relative_to(site.packages)}` [record]"
    )


def share(site: Site, **fields: object) -> None:
    entry = {
        "id": "laid-over",
        "files": ["common/*"],
        "distributions": ["base", "over"],
        "wins": "over",
        "source": "measured on the wheels",
    }
    site.spec_data["shared_files"].append({**entry, **fields})


def overlaid(site: Site, base: str = "base\n", over: str = "over\n") -> None:
    """Two wheels with one file; `over` is installed last."""
    site.wheel("base", files={"common/x.py": base})
    site.wheel("over", files={"common/x.py": over})


def test_record_of_a_shared_file_is_the_winner_s(site: Site) -> None:
    overlaid(site)
    share(site)
    check = finished(check_record(site.spec, site.tree, native=True))
    assert (check.ok, check.detail) == (True, "0.00 GB hashed, 1 left to the distribution that wins a shared file")


def test_record_of_a_shared_file_when_the_loser_was_installed_last(site: Site) -> None:
    overlaid(site, base="base!\n")
    share(site)
    (site.packages / "common/x.py").write_text("base!\n")
    assert record(site).splitlines()[0] == "error: `common/x.py` of over 1.0 is not as installed: other size [record]"


def test_one_owner_for_each_file(site: Site) -> None:
    check = finished(check_ownership(site.spec, site.tree, native=False))
    assert (check.ok, check.looked_at, check.expected, check.findings) == (True, 7, 7, ())


def test_same_bytes_from_two_distributions(site: Site) -> None:
    overlaid(site, "same\n", "same\n")
    assert ownership(site) == "note: 1 file with one content from base 1.0 and over 1.0: `common/x.py` [ownership]"


def test_different_bytes_from_two_distributions(site: Site) -> None:
    overlaid(site)
    assert ownership(site) == (
        "error: base 1.0 and over 1.0 bring different versions of 1 file: `common/x.py` [ownership]\n"
        "  because: which of them is on disk depends on the order of installation\n"
        "  hint: drop one of the two, or say in `shared_files` of builder/facts/smoke.yaml whose has to win, and why"
    )


def test_different_bytes_that_the_facts_know(site: Site) -> None:
    overlaid(site)
    share(site)
    check = finished(check_ownership(site.spec, site.tree, native=False), "ownership")
    assert (check.ok, check.exceptions) == (True, ("laid-over",))
    assert str(check.findings[0]) == (
        "note: 1 file of base and over differ, and over's are installed: `common/x.py` [ownership]\n"
        "  source: measured on the wheels"
    )


def test_shared_files_entry_that_is_of_no_use(site: Site) -> None:
    overlaid(site, "same\n", "same\n")
    share(site)
    assert ownership(site).splitlines()[:2] == [
        (
            "error: `shared_files` entry `laid-over` is of no use: base and over share no file that differs: remove it "
            "[exception]"
        ),
        "  hint: the entry is in builder/facts/smoke.yaml",
    ]


def test_two_distributions_are_one_import_package(site: Site) -> None:
    site.wheel("sgl-kernel", "0.3.21", {"sgl_kernel/__init__.py": "same\n"})
    site.wheel("sglang-kernel", "0.4.4", {"sgl_kernel/__init__.py": "same\n"})
    assert ownership(site).splitlines()[:3] == [
        "error: sgl-kernel 0.3.21 and sglang-kernel 0.4.4 both are the import package `sgl_kernel` [ownership]",
        "  because: the one that was installed last has overwritten the other's files",
        "  hint: keep one of them in the matrix (`exclude` the other, if something requires it)",
    ]


def test_namespace_packages_may_be_shared(site: Site) -> None:
    site.wheel("one", files={"space/one/__init__.py": ""})
    site.wheel("two", files={"space/two/__init__.py": ""})
    assert ownership(site) == ""


def test_empty_namespaces_may_be_shared(site: Site) -> None:
    site.wheel("one", files={"space/__init__.py": "", "space/one/__init__.py": ""})
    site.wheel("two", files={"space/__init__.py": "", "space/two/__init__.py": ""})
    assert ownership(site) == (
        "note: 1 file with one content from one 1.0 and two 1.0: `space/__init__.py` [ownership]"
    )


def test_ownership_of_the_native_part_leaves_the_sglang_layer_out(site: Site) -> None:
    assert finished(check_ownership(site.spec, site.tree, native=True)).looked_at == 4


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("x.so", True),
        ("libx.so.12", True),
        ("a/libx.so.1.2.3", True),
        ("libcrypto-5409cd36.so.1.1.1k", True),
        ("libaws-c-s3-1c5ac285.so.0unstable", True),
        ("libazure-core-a1893739.so.1.17.0-beta.1", True),
        ("libcrypto.so.1.1.hmac", False),
        (".so", False),
        ("x.source.so", True),
        ("x.so.py", False),
        ("x.soup", False),
    ],
)
def test_names_of_shared_objects(name: str, answer: bool) -> None:
    assert is_shared_object(name) is answer


def test_shared_objects_are_what_record_says(site: Site) -> None:
    site.wheel("beta", files={"beta/x.so": b"", "beta/libx.so.1": b"", "beta/x.py": ""})
    assert [path for path, _ in Tree.read(site.packages).shared_objects({"beta"})] == ["beta/libx.so.1", "beta/x.so"]


def elf_head(machine: int) -> bytes:
    return b"\x7fELF" + bytes(12) + struct.pack("<HH", 3, machine) + bytes(44)


@pytest.mark.parametrize(
    ("files", "looked_at"),
    [
        ({"x/ops.so": "here", "x/stubs/libx.so": "there"}, ["x/ops.so"]),
        ({"x/libx.so": "there"}, ["x/libx.so"]),
        ({"x/ops.so": "here", "x/ext.abi3.so": "there"}, ["x/ext.abi3.so", "x/ops.so"]),
        ({"x/ops.so": "here", "x/text.so": ""}, ["x/ops.so", "x/text.so"]),
    ],
    ids=["stubs", "all of it", "an extension", "no ELF file"],
)
def test_libraries_for_another_machine_are_left_out_beside_those_for_this_one(
    site: Site, files: dict[str, str], looked_at: list[str]
) -> None:
    here, there = (62, 183) if os.uname().machine == "x86_64" else (183, 62)
    made = {"here": elf_head(here), "there": elf_head(there), "": b"text"}
    site.wheel("x", files={name: made[kind] for name, kind in files.items()})
    assert [path for path, _ in site.tree.shared_objects(["x"])] == looked_at
