"""`load`: the fork server on libraries that load, refuse, abort, crash and hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.smoke import load
from builder.smoke.load import check_load
from builder.smoke.report import Check
from tests.unit.smoke_made import Site, compile_library, finished, said

pytestmark = pytest.mark.processes

LAYOUT_HINT = (
    "  hint: all its symbols may resolve and its layout still be another's: it was most likely built for another torch"
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def loaded(site: Site) -> tuple[Check, str]:
    with site.native() as (native, ledger):
        result = check_load(native, ledger)
    return finished(result, "load"), said(result, "load")


def constructor(body: str, folder: Path) -> bytes:
    source = f"#include <stdlib.h>\n#include <stdio.h>\n#include <unistd.h>\n__attribute__((constructor)) void f(void) {{ {body} }}"
    return compile_library(source, folder=folder)


def test_every_file_loads(site: Site, tmp_path: Path) -> None:
    site.wheel("x", files={f"x/{i}.so": constructor("", tmp_path / "build") for i in range(5)})
    check, text = loaded(site)
    assert (check.ok, check.looked_at, check.expected, text) == (True, 5, 5, "")
    assert check.detail == "opened one process each, in a bare python (no torch in the lock)"


def test_torch_is_imported_first(site: Site, tmp_path: Path) -> None:
    """The file loads only where `import torch` has brought what it needs."""
    lib = compile_library(
        "int answer(void) { return 1; }", "-Wl,-soname,libt.so", name="libt.so", folder=tmp_path / "b"
    )
    ext = compile_library(
        "int answer(void); int f(void) { return answer(); }", str(tmp_path / "b/libt.so"), folder=tmp_path / "b"
    )
    opens = (
        "import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'libt.so'))\n__version__ = '2.11.0'\n"
    )
    site.wheel("torch", "2.11.0", {"torch/__init__.py": opens, "torch/libt.so": lib}, layer="torch")
    site.wheel("x", files={"x/ext.so": ext})
    check, text = loaded(site)
    assert (text, check.detail) == ("", "opened one process each, after `import torch` (2.11.0)")


def test_file_that_lacks_a_symbol(site: Site, tmp_path: Path) -> None:
    ext = compile_library("int absent(void); int f(void) { return absent(); }", folder=tmp_path / "b")
    site.wheel("x", files={"x/ext.so": ext})
    assert loaded(site)[1] == (
        "error: `x/ext.so` of x 1.0 does not load: x/ext.so: undefined symbol: absent [load]\n"
        "  hint: `symbols` says what it expects, and from whom"
    )


def test_file_that_lacks_a_library(site: Site, tmp_path: Path) -> None:
    compile_library(
        "int answer(void) { return 1; }", "-Wl,-soname,libgone.so.7", name="libgone.so", folder=tmp_path / "b"
    )
    ext = compile_library(
        "int answer(void); int f(void) { return answer(); }", str(tmp_path / "b/libgone.so"), folder=tmp_path / "b"
    )
    site.wheel("x", files={"x/ext.so": ext})
    assert loaded(site)[1] == (
        "error: `x/ext.so` of x 1.0 does not load: libgone.so.7: cannot open shared object file: No such file or directory "
        "[load]\n"
        "  hint: `needed` says which library is missing, and where it can come from"
    )


def test_file_that_aborts_does_not_end_the_others(site: Site, tmp_path: Path) -> None:
    bad = constructor('fprintf(stderr, "terminate called: std::bad_alloc\\n"); abort();', tmp_path / "b")
    good = constructor("", tmp_path / "b")
    site.wheel("x", files={"x/a.so": good, "x/b.so": bad, "x/c.so": good})
    check, text = loaded(site)
    assert (check.looked_at, text) == (
        3,
        (
            "error: `x/b.so` of x 1.0 does not load: the process that opened it was ended by SIGABRT [load]\n"
            f"  because: terminate called: std::bad_alloc\n{LAYOUT_HINT}"
        ),
    )


def test_file_that_crashes(site: Site, tmp_path: Path) -> None:
    site.wheel("x", files={"x/a.so": constructor("*(volatile int *)0 = 1;", tmp_path / "b")})
    assert loaded(site)[1] == (
        f"error: `x/a.so` of x 1.0 does not load: the process that opened it was ended by SIGSEGV [load]\n{LAYOUT_HINT}"
    )


def test_file_that_hangs(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "FILE_TIMEOUT", 0.3)
    site.wheel("x", files={"x/a.so": constructor("sleep(60);", tmp_path / "b")})
    assert loaded(site)[1] == (
        f"error: `x/a.so` of x 1.0 does not load: the process that opened it ran out of time [load]\n{LAYOUT_HINT}"
    )


def test_exception_excuses_a_file(site: Site, tmp_path: Path) -> None:
    ext = compile_library("int absent(void); int f(void) { return absent(); }", folder=tmp_path / "b")
    site.wheel("kernel", files={"kernel/ext.so": ext})
    site.exception(checks=["load"], words="undefined symbol: absent", file="kernel/ext.so")
    check, text = loaded(site)
    assert (check.exceptions, text) == (("known",), "")


def test_import_torch_that_fails_is_said_once(site: Site, tmp_path: Path) -> None:
    site.wheel("torch", "2.11.0", {"torch/__init__.py": "raise OSError('libtorch.so: broken')\n"}, layer="torch")
    site.wheel("x", files={"x/a.so": constructor("", tmp_path / "b")})
    site.exception(checks=["load"], words="undefined symbol: absent", file="x/a.so")
    check, text = loaded(site)
    assert not check.ok
    assert text == (
        "error: no file was opened: `import torch` fails [load]\n"
        "  because: OSError: libtorch.so: broken\n"
        "  hint: `needed` and `symbols` say what torch lacks"
    )


def test_missing_file_is_left_to_needed(site: Site, tmp_path: Path) -> None:
    site.wheel("x", files={"x/a.so": constructor("", tmp_path / "b"), "x/b.so": b"gone"})
    (site.packages / "x/b.so").unlink()
    check, text = loaded(site)
    assert (check.looked_at, check.expected, text) == (2, 2, "")


def test_stack_without_native_code(site: Site) -> None:
    site.wheel("pure", files={"pure.py": ""})
    check, _ = loaded(site)
    assert (check.ok, check.looked_at, check.detail) == (True, 0, "no shared object in these wheels")
