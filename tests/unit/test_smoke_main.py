"""The whole run: parts, report, exit status, and what is printed."""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from builder.smoke.__main__ import main
from builder.smoke.child import Workspace, describe_end
from builder.smoke.report import Finding, Reporter, Result, Scrubber, count, not_applicable, some
from tests.unit.smoke_made import Site, compile_library

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes


def tiny(root: Path) -> Site:
    """A stack of numpy's kind: one wheel with native code, no torch, no sglang."""
    site = Site(root)
    lib = compile_library("int answer(void) { return 42; }", "-nostdlib", folder=root / "build")
    site.wheel("numpy", "2.0", {"numpy/__init__.py": "", "numpy/core.so": lib})
    return site


def run(site: Site, part: str, *more: str) -> tuple[int, dict[str, Any]]:
    folder = site.prefix.parent
    (folder / "spec.json").write_text(json.dumps(site.spec_data))
    out = folder / f"{part}.json"
    code = main([part, "--spec", str(folder / "spec.json"), "--out", str(out), *more])
    return code, json.loads(out.read_text()) if out.exists() else {}


NATIVE = """\
installed          ok      1 distribution; 1 artefact in the lock
record             ok      4 files; 0.00 GB hashed
ownership          ok      4 files; of 1 distribution
cuda-major         ok      1 file; CUDA 13: 0 packages by name, 0 needed libraries
compiler-coherent  -       not applicable: the matrix has no CUDA compiler (jit: none)
needed             ok      1 file; 0 needed libraries
symbols            ok      0 symbols; in 1 of 1 shared object, 0 symbol versions
load               ok      1 file; opened one process each, in a bare python (no torch in the lock)
nvcc               -       not applicable: the matrix has no CUDA compiler (jit: none)
triton             -       not applicable: triton is not in the lock
flashinfer         -       not applicable: flashinfer is not in the lock
smoke test of tiny (111111111111): 11 checks, 0 failed
"""


def test_native_part_of_a_tiny_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = run(tiny(tmp_path), "native")
    assert (code, report["ok"], report["image"], report["matrix"], report["lock"]) == (0, True, None, "tiny", "1" * 64)
    assert capsys.readouterr().out == NATIVE


def test_native_part_takes_no_notice_of_an_installed_sglang_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tiny(tmp_path)
    site.wheel("sglang", "0.5", {"sglang/__init__.py": "raise OSError\n"}, layer="sglang")
    assert run(site, "native")[0] == 0
    assert capsys.readouterr().out == NATIVE


def test_sglang_part_puts_the_native_part_in_front(tmp_path: Path) -> None:
    site = tiny(tmp_path)
    run(site, "native")
    site.wheel("sglang", "0.5", {"sglang/__init__.py": ""}, layer="sglang")
    code, report = run(site, "sglang", "--native", str(tmp_path / "native.json"))
    assert code == 0
    assert [(check["part"], check["name"]) for check in report["checks"]][9:14] == [
        ("native", "triton"),
        ("native", "flashinfer"),
        ("sglang", "installed"),
        ("sglang", "record"),
        ("sglang", "ownership"),
    ]


def test_failed_native_part_fails_the_whole(tmp_path: Path) -> None:
    site = tiny(tmp_path)
    site.lock("absent")
    assert run(site, "native")[0] == 3
    site.artefacts.pop()
    site.wheel("sglang", "0.5", layer="sglang")
    code, report = run(site, "sglang", "--native", str(tmp_path / "native.json"))
    assert (code, report["ok"]) == (3, False)


def test_all_is_both_parts(tmp_path: Path) -> None:
    site = tiny(tmp_path)
    code, report = run(site, "all")
    assert (code, len(report["checks"])) == (0, 20)


def test_report_is_the_same_in_another_place_at_another_time(tmp_path: Path) -> None:
    reports = []
    for name in ("one", "two/deeper"):
        site = tiny(tmp_path / name)
        site.wheel(
            "x",
            files={
                "x/bad.so": compile_library("int gone(void); int f(void) { return gone(); }", folder=tmp_path / "b")
            },
        )
        site.spec_data["cuda"]["home"] = "/usr/local/cuda"
        assert run(site, "all")[0] == 3
        reports.append((tmp_path / name / "all.json").read_bytes())
    assert reports[0] == reports[1]


def test_report_says_neither_where_nor_who(tmp_path: Path) -> None:
    site = tiny(tmp_path)
    run(site, "all")
    text = (tmp_path / "all.json").read_text()
    assert not [word for word in (str(tmp_path), tempfile.gettempdir(), os.uname().nodename) if word in text]


def test_nothing_temporary_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run(tiny(tmp_path), "all")
    assert list(folder.iterdir()) == []


def test_environment_is_left_as_it_was(tmp_path: Path) -> None:
    site = tiny(tmp_path)
    before = sorted(path for path in site.prefix.rglob("*"))
    run(site, "all")
    assert sorted(path for path in site.prefix.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["native", "--native", "x.json"], "error: --native goes with the part `sglang`\n"),
        (
            ["sglang", "--native", "absent.json"],
            "error: cannot read the native part: No such file or directory: absent.json\n",
        ),
    ],
)
def test_wrong_use(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(Site(tmp_path), arguments[0], *arguments[1:])[0] == 2
    assert capsys.readouterr().err == message


def test_native_part_of_another_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = tiny(tmp_path)
    run(site, "native")
    capsys.readouterr()
    site.spec_data["native_lock"] = "2" * 64
    assert run(site, "sglang", "--native", str(tmp_path / "native.json"))[0] == 2
    assert (
        capsys.readouterr().err
        == "error: the native part is of another lock: 111111111111, the spec's is 222222222222\n"
    )


def test_spec_of_another_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Site(tmp_path)
    site.spec_data["schema"] = 7
    assert run(site, "all")[0] == 2
    assert capsys.readouterr().err == "error: spec.schema is 7, this version reads 1\n"


def test_check_that_breaks_is_a_failure_of_that_check(tmp_path: Path) -> None:
    out = io.StringIO()
    reporter = Reporter(out)

    def broken() -> Result:
        raise KeyError("x")

    reporter.run("odd", "native", broken)
    assert out.getvalue().splitlines()[:2] == [
        "odd                FAILED  0 files; the check itself broke",
        "  error: the check broke: KeyError: 'x' [odd]",
    ]


def test_check_that_looked_at_less_than_there_is() -> None:
    check = Result(4, 5, "files").finish("load", "native")
    assert [str(finding) for finding in check.findings] == [
        (
            "error: looked at 4 files, but there are 5 to look at [load]\n"
            "  because: a check that skips something proves nothing about it"
        )
    ]


def test_long_list_of_findings_is_cut_in_print_and_whole_in_the_report() -> None:
    out = io.StringIO()
    result = Result()
    for i in range(15):
        result.add("error", f"{i:02}", f"number {i}")
    check = Reporter(out).run("many", "native", lambda: result)
    assert (len(check.findings), out.getvalue().splitlines()[-1]) == (
        15,
        "  … and 3 more findings of many (all are in the JSON report)",
    )


def test_notes_are_not_printed() -> None:
    out = io.StringIO()
    result = Result(1, 1)
    result.add("note", "x", "worth knowing")
    Reporter(out).run("quiet", "native", lambda: result)
    assert out.getvalue() == "quiet              ok      1 file\n"


def test_text_of_a_finding() -> None:
    finding = Finding("load", "error", "x", "it fails", because="one\ntwo", hint="do this", source="measured")
    assert str(finding) == "error: it fails [load]\n  because: one\n    two\n  hint: do this\n  source: measured"


def test_not_applicable_is_never_silent() -> None:
    check = not_applicable("triton is not in the lock", "artefacts").finish("triton", "native")
    assert (check.ok, check.looked_at, check.expected, check.detail) == (
        True,
        0,
        None,
        "not applicable: triton is not in the lock",
    )


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/work/smoke-abc/tmp/x.c:1", "TMP/tmp/x.c:1"),
        ("tmpxft_0000a1b2_00000000-7_smoke.ptx", "tmpxft-7_smoke.ptx"),
        ("/tmp/tmpabc123/main.c", "TMP/file/main.c"),
        ("<object at 0x7f93c124e450>", "<object at 0x…>"),
        ("error 0x64", "error 0x64"),
    ],
)
def test_scrubber(text: str, clean: str) -> None:
    assert Scrubber("/work/smoke-abc")(text) == clean


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "ended with status 1"),
        (-11, "was ended by SIGSEGV"),
        (-99, "was ended by signal 99"),
        (None, "ran out of time"),
    ],
)
def test_how_a_process_ended(code: int | None, words: str) -> None:
    assert describe_end(code) == words


def test_child_runs_out_of_time(tmp_path: Path) -> None:
    with Workspace(Site(tmp_path).tree) as workspace:
        assert workspace.run(["sleep", "60"], timeout=0.1).code is None


def test_child_gets_a_private_home_and_no_one_else_s_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.setenv("LD_PRELOAD", "/nonexistent.so")
    with Workspace(Site(tmp_path).tree) as workspace:
        env = workspace.environment()
        assert Path(env["HOME"]).is_dir() and Path(env["FLASHINFER_WORKSPACE_BASE"]).is_dir()
        assert "LD_PRELOAD" not in env


def test_words() -> None:
    assert (count(1, "file"), count(2, "library", "libraries"), some("abcde", 2)) == (
        "1 file",
        "2 libraries",
        "`a`, `b` and 3 more",
    )
