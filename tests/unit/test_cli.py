"""The command line: help at once, exit codes, JSON on stdout and everything else on stderr."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builder import cli, inventory, verbs
from builder.errors import BuildError, IntegrityError, LockError, UnreachableError, UsageError
from builder.lock import lock_path, write_lock
from tests.made import ROOT, TINY, artefact, lock_of, tiny

VERBS = (
    "abi",
    "arch",
    "bake",
    "bisect",
    "build",
    "bundle",
    "check",
    "diff",
    "doctor",
    "hosts",
    "list",
    "load",
    "lock",
    "patches",
    "plan",
    "prune",
    "pull",
    "push",
    "render",
    "repro",
    "run",
    "smoke",
    "verify",
)


def run(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "builder", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.fixture
def matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one locked matrix, as the only one."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    write_lock(lock_of(tiny().matrix, artefact("idna", "3.7")), lock_path(path))
    monkeypatch.setattr(verbs, "MATRICES", tmp_path)
    monkeypatch.setattr(inventory, "engine_host", lambda: None)
    return path


# --- help -------------------------------------------------------------------------------------------------------------


def test_the_command_line_is_built_without_heavy_imports() -> None:
    script = (
        "import sys, builder.cli; builder.cli.parser();"
        "print(sorted({'pydantic', 'docker', 'jinja2', 'requests', 'rich', 'ruamel', 'packaging'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_verbs_of_the_help_are_those_that_are_tested() -> None:
    (action,) = [a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert tuple(sorted(action.choices)) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    out, err = capsys.readouterr()
    assert (caught.value.code, err) == (0, "")
    assert out.startswith(f"usage: builder {verb} ")
    assert "--json" in out


def test_help_in_a_process_of_its_own() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: builder [-h] [--version] VERB ...\n")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from builder import __version__

    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"builder {__version__}\n"


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["check"],
        ["lock", "x", "--check", "--as-of", "2026-01-01"],
        ["patches", "x", "--models", "--diff"],
        ["arch"],
        ["arch", "torch==2.9.1", "--driver", "580", "--cuda-driver", "13.0"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError, 2), (LockError, 4), (UnreachableError, 5), (BuildError, 6), (IntegrityError, 7)]
)
def test_an_error_goes_to_stderr_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: type[UsageError], code: int
) -> None:
    def broken(_: argparse.Namespace) -> int:
        raise error("it broke", hint="mend it")

    monkeypatch.setattr(verbs, "do_list", broken)
    assert cli.main(["list"]) == code
    assert capsys.readouterr() == ("", "error: it broke\n  hint: mend it\n")


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "do_list", interrupted)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr() == ("", "interrupted: what was not finished is not tagged\n")


def test_an_unknown_matrix() -> None:
    done = run("check", "cu130-nxt")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error: there is no matrix `cu130-nxt`"
    assert done.stderr.splitlines()[-1] == "  hint: did you mean `cu130-next`"


def test_a_reader_that_went_away() -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run("render", "cu130-next", stdout=write)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [("list",), ("list", "--json"), ("render", "cu130-next")])
def test_an_output_that_is_full(words: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = run(*words, stdout=full, PYTHONUNBUFFERED="")
    finally:
        os.close(full)
    assert done.returncode == 6
    assert done.stderr.startswith("error: the disk is full\n")
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int) -> None:
    def full(_: argparse.Namespace) -> int:
        raise OSError(number, os.strerror(number), "/data/log")

    monkeypatch.setattr(verbs, "do_list", full)
    assert cli.main(["list"]) == 6
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[:3]) == (
        "",
        ["error: the disk is full", "  at: /data/log", f"  because: {os.strerror(number)}"],
    )


@pytest.mark.parametrize(
    "words",
    [
        ["arch", "LONG"],
        ["verify", "LONG", "--pub", "x"],
        ["check", "a/LONG"],
        ["diff", "LONG.lock.json", "cu128"],
        ["bundle", "cu128", "-o", "LONG"],
        ["check", "cu128", "--wheels", "LONG"],
        ["bisect", "cu128", "cu130", "--static", "--log", "LONG"],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_no_file_can_have(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word.replace("LONG", "x" * 5000) for word in words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: a name is too long for a file\n") and len(err) < 300


def test_render_as_json(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "tiny"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["render", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"matrix": "tiny", "dockerfile": text}


def test_a_folder_is_no_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path is told whole, however long it is: its end says what is wrong with it."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    assert cli.main(["check", str(folder)]) == 2
    assert capsys.readouterr().err == f"error: `{folder}` is a folder\n  hint: name the matrix's file in it\n"
    assert cli.main(["check", f"{folder}/none.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"error: there is no file `{folder}/none.yaml`\n")


def test_a_report_without_a_name_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["repro", ""]) == 2
    assert capsys.readouterr().err.splitlines()[:2] == ["error: the report cannot be read", "  at: ''"]


def test_a_matrix_is_read_before_a_key_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    for words in (["bundle", str(empty), "-o", str(tmp_path / "out")], ["bake", str(empty)]):
        assert cli.main(words) == 2
        assert "the file is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["A", "x y", "x:", "-x", "x\ny", "$(x)", "x:y:z"],
)
def test_what_is_no_image_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["build", "tiny", f"--tag={name}"])
    assert caught.value.code == 2
    assert f"`{name}` is not an image name: NAME or NAME:TAG" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("x", "x:latest"),
        ("x:y", "x:y"),
        ("registry.example:5000/a/b", "registry.example:5000/a/b:latest"),
        ("registry.example:5000/a/b:c", "registry.example:5000/a/b:c"),
    ],
)
def test_an_image_name_is_whole(name: str, full: str) -> None:
    assert cli._tag(name) == full


@pytest.mark.parametrize("user", ["root", "1:", ":1", "-1", "1:2:3", "1\n"])
def test_what_is_no_user(user: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not UID or UID:GID"):
        cli._user(user)


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_check_as_json(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "tiny", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["matrix"]) == (True, "tiny")
    assert isinstance(data["findings"], list)


def test_check_as_text_ends_with_the_verdict(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "tiny"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("tiny: fine, ")


def test_list_as_json(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "matrices": [
            {
                "name": "tiny",
                "summary": "A tiny stack",
                "stack": {},
                "cuda": "13.0.2",
                "lock": "locked",
                "image": "unknown",
            }
        ]
    }


def test_plan_as_json(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [layer["layer"] for layer in data["layers"]] == ["os", "python", "rest", "proof"]
    assert (data["bytes"], data["bytes_to_pull"]) == (1000, 1000)


def test_plan_against_itself(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "tiny", "--from", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_to_pull"] == 0


def test_render_prints_the_dockerfile_and_nothing_else(matrix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", str(matrix)]) == 0
    out, err = capsys.readouterr()
    assert (out.splitlines()[0], err) == ("# tiny: A tiny stack", "")


def test_a_lock_that_drifted(matrix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from builder import locking

    monkeypatch.setattr(locking, "check_lock", lambda *_: ["idna 3.7 → 3.8"])
    assert cli.main(["lock", "tiny", "--check"]) == 4
    assert capsys.readouterr().out == "idna 3.7 → 3.8\n"
    assert cli.main(["lock", "tiny", "--check", "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == {"ok": False, "drift": ["idna 3.7 → 3.8"]}


def test_a_lock_that_is_current(
    matrix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from builder import locking

    monkeypatch.setattr(locking, "check_lock", lambda *_: [])
    assert cli.main(["lock", str(matrix), "--check"]) == 0
    assert capsys.readouterr().out == f"{matrix}: the lock is current\n"
