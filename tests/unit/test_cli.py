"""The command line: help at once, exit codes, JSON on stdout and everything else on stderr."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builder import cli, inventory
from builder.errors import BuildError, IntegrityError, LockError, UnreachableError, UsageError
from builder.lock import lock_path, write_lock
from tests.made import ROOT, TINY, artefact, lock_of, tiny

VERBS = ("abi", "arch", "build", "check", "list", "lock", "patches", "plan", "prune", "render", "run", "smoke")


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
    monkeypatch.setattr(cli, "MATRICES", tmp_path)
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

    monkeypatch.setattr(cli, "_list", broken)
    assert cli.main(["list"]) == code
    assert capsys.readouterr() == ("", "error: it broke\n  hint: mend it\n")


def test_an_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_list", interrupted)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr() == ("", "interrupted: nothing was tagged\n")


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
    assert [layer["layer"] for layer in data["layers"]] == ["os", "rest"]
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
