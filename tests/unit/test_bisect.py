"""Bisection: the search, the order of the changes, what may be mixed, the log, and the verb with a planted change."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import cli, engine
from builder.bisect import images, verb
from builder.bisect.changes import changes, conflicts, mixed, with_needs
from builder.bisect.journal import Journal
from builder.bisect.runners import Container, Environment, judged
from builder.bisect.search import Found, Result, search
from builder.elf import read_file
from builder.engine import EngineInfo
from builder.errors import BuilderError, BuildError, ExitCode, UnreachableError, UsageError
from builder.lock import Artefact, Lock, lock_path, read_lock, write_lock
from builder.matrix import load_matrix
from builder.smoke.stub import write_stub
from tests.made import TINY, artefact, lock_of, settings_at, tiny
from tests.unit.smoke_made import compile_library


@given(st.integers(min_value=1, max_value=200), st.data())
def test_a_planted_change_is_found_in_few_steps(count: int, data: st.DataObject) -> None:
    planted = data.draw(st.integers(min_value=1, max_value=count))
    found = search(count, lambda state: Result.BAD if state >= planted else Result.GOOD)
    assert (found.good, found.bad) == (planted - 1, planted)
    assert found.tested <= math.ceil(math.log2(count + 1))


@given(st.integers(min_value=1, max_value=60), st.sets(st.integers(min_value=1, max_value=60)), st.data())
def test_states_that_cannot_be_told_are_stepped_around(count: int, untold: set[int], data: st.DataObject) -> None:
    planted = data.draw(st.integers(min_value=1, max_value=count))
    asked: list[int] = []

    def test(state: int) -> Result:
        asked.append(state)
        if state in untold:
            return Result.SKIP
        return Result.BAD if state >= planted else Result.GOOD

    found = search(count, test)
    assert found.good < planted <= found.bad
    # Whatever lies between could not be told.
    assert all(state in untold for state in range(found.good + 1, found.bad))
    assert len(asked) == len(set(asked))


def test_no_change_between_is_found_without_a_test() -> None:
    assert search(1, lambda _: pytest.fail("there is nothing to test")) == Found(0, 1, 0)


def _locks(good: list[Artefact], bad: list[Artefact]) -> tuple[Lock, Lock]:
    loaded = tiny()
    return lock_of(loaded.matrix, *good), lock_of(loaded.matrix, *bad)


def test_what_pins_each_other_changes_together() -> None:
    good, bad = _locks(
        [
            artefact("torch", "1.0", requires=("triton==3.0",), layer="torch"),
            artefact("triton", "3.0"),
            artefact("idna", "3.0"),
        ],
        [
            artefact("torch", "2.0", requires=("triton==3.1",), layer="torch"),
            artefact("triton", "3.1"),
            artefact("idna", "3.1"),
        ],
    )
    assert [change.title for change in changes(good, bad)] == ["torch 1.0 → 2.0 and 1 with it", "idna 3.0 → 3.1"]


def test_what_is_required_comes_first_and_what_would_be_too_new_waits() -> None:
    good, bad = _locks(
        [artefact("app", "1.0", requires=("lib<2",)), artefact("lib", "1.5"), artefact("zed", "1.0")],
        [artefact("app", "2.0", requires=("zed>=2",)), artefact("lib", "2.1"), artefact("zed", "2.0")],
    )
    row = changes(good, bad)
    assert [change.names[0] for change in row] == ["zed", "app", "lib"]
    assert all(not conflicts(mixed(good, row[:number], "x")) for number in range(len(row) + 1))


def test_what_each_has_to_come_before_the_other_is_one_change() -> None:
    good, bad = _locks(
        [artefact("app", "1.0", requires=("lib<2",)), artefact("lib", "1.5")],
        [artefact("app", "2.0", requires=("lib>=2",)), artefact("lib", "2.1")],
    )
    assert [change.names for change in changes(good, bad)] == [("app", "lib")]


def test_packages_that_come_and_go() -> None:
    good, bad = _locks([artefact("old", "1.0")], [artefact("new", "1.0")])
    row = changes(good, bad)
    assert [change.title for change in row] == ["new none → 1.0", "old 1.0 → none"]
    assert [each.name for each in mixed(good, row, "x").artefacts] == ["new"]


def test_a_change_takes_along_what_it_requires() -> None:
    good, bad = _locks(
        [artefact("app", "1.0"), artefact("lib", "1.0")],
        [artefact("app", "2.0", requires=("lib>=2", "new")), artefact("lib", "2.0"), artefact("new", "1.0")],
    )
    row = changes(good, bad)
    app = next(change for change in row if change.names[0] == "app")
    assert {name for change in with_needs(row, good, app, set()) for name in change.names} == {"app", "lib", "new"}


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, "fine", (Result.GOOD, "exit status 0")),
        (125, "cannot tell", (Result.SKIP, "exit status 125")),
        (1, "Traceback\nImportError: no\n\n", (Result.BAD, "exit status 1: ImportError: no")),
        (139, "", (Result.BAD, "exit status 139")),
    ],
)
def test_what_an_exit_status_means(status: int, output: str, expected: tuple[Result, str]) -> None:
    assert judged(status, output) == expected


def test_the_log_is_taken_up_again_and_tells_another_bisection(tmp_path: Path) -> None:
    Journal(tmp_path, "a b cmd").note("f00", "1 of 2 changes", Result.BAD, "exit status 1", 2.0)
    assert Journal(tmp_path, "a b cmd").recall("f00") == (Result.BAD, "exit status 1")
    with pytest.raises(UsageError) as caught:
        Journal(tmp_path, "a c cmd")
    assert str(caught.value) == (
        "error: the folder has the log of another bisection\n"
        f"  at: {tmp_path}/log.jsonl\n"
        "  because: that one was of a b cmd\n"
        "  hint: name another folder with `--log`, or remove this one"
    )
    (tmp_path / "log.jsonl").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="the log of the bisection is damaged"):
        Journal(tmp_path, "a b cmd")


class _Planted:
    """A runner for which a lock is bad that has one package in one version."""

    def __init__(self, name: str, version: str) -> None:
        self.name, self.version, self.asked = name, version, 0

    def test(self, lock: Lock) -> tuple[Result, str]:
        self.asked += 1
        bad = lock.by_name[self.name].version == self.version
        return (Result.BAD, "exit status 1: it is planted") if bad else (Result.GOOD, "exit status 0")


def _pair(folder: Path, count: int) -> tuple[Path, Path]:
    paths = []
    for name, version in (("good", "1.0"), ("bad", "2.0")):
        path = folder / f"{name}.yaml"
        path.write_text(TINY, encoding="utf-8")
        loaded = tiny(name=name)
        parts = [artefact(f"part-{number:02}", version, index="other") for number in range(count)]
        write_lock(lock_of(loaded.matrix, *parts), lock_path(path))
        paths.append(path)
    return paths[0], paths[1]


def test_the_verb_finds_one_change_of_thirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = _pair(tmp_path, 30)
    runner = _Planted("part-17", "2.0")
    monkeypatch.setattr(verb, "_runner", lambda *_: runner)
    log = tmp_path / "log"
    words = ["bisect", str(good), str(bad), "--log", str(log), "--", "true"]
    assert cli.main(words) == ExitCode.OK
    assert runner.asked <= 2 + math.ceil(math.log2(31)) + 1
    out = capsys.readouterr().out
    assert out.splitlines()[:4] == [
        "it is part-17 1.0 → 2.0",
        "  because: exit status 1: it is planted",
        "  this change alone, on top of the good stack, is enough",
        "",
    ]
    proof = [
        read_lock(log / name).by_name["part-17"].version for name in ("last-good.lock.json", "first-bad.lock.json")
    ]
    assert proof == ["1.0", "2.0"]
    # The same again asks nothing: the log has it.
    asked = runner.asked
    assert cli.main([*words[:1], "--json", *words[1:]]) == ExitCode.OK
    assert runner.asked == asked
    again = json.loads(capsys.readouterr().out)
    assert (again["culprit"], again["why"]) == ("part-17 1.0 → 2.0", "exit status 1: it is planted")
    assert len(again["steps"]) == asked


def test_a_good_stack_that_is_bad_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = _pair(tmp_path, 3)
    monkeypatch.setattr(verb, "_runner", lambda *_: _Planted("part-01", "1.0"))
    assert cli.main(["bisect", str(good), str(bad), "--log", str(tmp_path / "log"), "--", "true"]) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(
        "error: the bad stack is not bad\n"
        "  because: all changes: good (exit status 0)\n"
        "  hint: name a COMMAND that fails on it\n"
    )


def test_a_stack_that_cannot_be_tried_is_not_called_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Runner(_Planted):
        def test(self, lock: Lock) -> tuple[Result, str]:
            return Result.SKIP, "no image: the smoke test failed"

    good, bad = _pair(tmp_path, 3)
    monkeypatch.setattr(verb, "_runner", lambda *_: Runner("part-01", "1.0"))
    log = tmp_path / "log"
    assert cli.main(["bisect", str(good), str(bad), "--log", str(log), "--", "true"]) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(
        "error: whether the bad stack is bad cannot be told\n"
        "  because: all changes: no image: the smoke test failed\n"
        f"  hint: see to that, and remove `{log}`, which remembers it; then search again\n"
    )


@pytest.mark.parametrize(
    "error",
    [BuildError("the engine is not there"), UnreachableError("the index does not answer")],
    ids=["engine", "index"],
)
def test_what_is_no_state_s_fault_ends_the_search_and_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BuilderError
) -> None:
    class MadeEngine:
        def require(self) -> None:
            if isinstance(error, BuildError):
                raise error

    def build_lock(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine, "connect", MadeEngine)
    monkeypatch.setattr(images, "build_lock", build_lock)
    good, bad = _pair(tmp_path, 3)
    log = tmp_path / "log"
    assert cli.main(["bisect", str(good), str(bad), "--log", str(log), "--", "true"]) == error.exit_code
    assert len((log / "log.jsonl").read_text().splitlines()) == 1


def test_an_image_that_is_not_made_is_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MadeEngine:
        def require(self) -> None:
            pass

    def build_lock(*_: object) -> None:
        raise BuildError("the build failed", because="smoke: symbols")

    monkeypatch.setattr(engine, "connect", MadeEngine)
    monkeypatch.setattr(images, "build_lock", build_lock)
    lock = lock_of(tiny().matrix, artefact("part", "1.0"))
    found = Container(tiny(), ["true"], settings_at(tmp_path)).test(lock)
    assert found == (Result.SKIP, "no image: smoke: symbols")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "limit", "expected"),
    [
        ("sleep 600 & echo $! > pid; echo no >&2; exit 3", 60, (Result.BAD, "exit status 3: no")),
        ("sleep 600 & echo $! > pid; wait", 1, (Result.BAD, "did not end in 1 s")),
        ("true & echo $! > pid; echo fine", 60, (Result.GOOD, "exit status 0")),
    ],
)
def test_what_a_command_leaves_behind_is_ended_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, limit: int, expected: tuple[Result, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = Environment(tmp_path, ["sh", "-c", script], settings_at(tmp_path), limit)
    assert runner._command_in(tmp_path / "environment") == expected
    began = time.monotonic()
    left = Path("/proc", (tmp_path / "pid").read_text().strip(), "stat")
    while _runs(left):
        assert time.monotonic() - began < 60
        time.sleep(0.05)


def _runs(stat: Path) -> bool:
    """Whether a process does: one whose parent is gone may still wait to be collected."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.processes
def test_the_stub_of_the_driver_has_the_names_of_the_state_that_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda _: None)
    packages = tmp_path / "environment" / "lib" / "python3.11" / "site-packages"
    packages.mkdir(parents=True)
    runner = Environment(tmp_path, ["true"], settings_at(tmp_path), 10)
    write_stub(tmp_path / "libcuda.so.1", "libcuda.so.1", ["cuInit", "cuMemCreate"])
    for name in ("cuInit", "cuMemCreate"):
        source = f"extern int {name}(void); int run(void) {{ return {name}(); }}"
        data = compile_library(source, str(tmp_path / "libcuda.so.1"), folder=tmp_path)
        (packages / "module.so").write_bytes(data)
        folder = runner._stubs(tmp_path / "environment")
        assert folder is not None
        exported = {each.name for each in read_file(folder / "libcuda.so.1").symbols if each.defined}
        assert name in exported


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "error: no COMMAND\n  hint: `builder bisect GOOD BAD -- COMMAND`, or `--static` to go by verdicts alone\n",
        ),
        (["--static", "--", "true"], "error: COMMAND with `--static`\n  hint: verdicts alone need none\n"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    good, bad = _pair(tmp_path, 2)
    assert cli.main(["bisect", str(good), str(bad), *words]) == ExitCode.USAGE
    assert capsys.readouterr().err == message


def test_verdicts_that_find_nothing_ask_for_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = _pair(tmp_path, 2)
    assert cli.main(["bisect", str(good), str(bad), "--static", "--log", str(tmp_path / "log")]) == ExitCode.USAGE
    assert capsys.readouterr().err.endswith(
        "  because: all changes: good (no new error)\n  hint: search with a COMMAND: the rules have no error for it\n"
    )


def test_by_verdicts_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = _pair(tmp_path, 20)
    matrix = tiny(name="bad").matrix
    lock = read_lock(lock_path(bad))
    wants = lock.by_name["part-05"].model_copy(update={"requires": ("part-06==1.0",)})
    others = [each for each in lock.artefacts if each.name != "part-05"]
    write_lock(lock_of(matrix, wants, *others), lock_path(bad))
    assert cli.main(["bisect", str(good), str(bad), "--static", "--log", str(tmp_path / "log")]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "part-06" in out.splitlines()[0] or "part-05" in out.splitlines()[0]
    assert "part-05 2.0 requires `part-06==1.0`, the lock has 2.0" in out


def _written(folder: Path, name: str, extra: str, *artefacts: Artefact, text: str = TINY) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(text + extra, encoding="utf-8")
    write_lock(lock_of(load_matrix(path), *artefacts), lock_path(path))
    return str(path)


_OVERRIDE = "overrides: [{package: numpy, pin: ==1.26.4, ours: 2.1.0, because: it is fine, source: read}]\n"


def test_a_good_matrix_s_overrides_are_not_asked_of_the_bad_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wants = artefact("needs-numpy", requires=("numpy==1.26.4",))
    good = _written(tmp_path, "good", _OVERRIDE, wants, artefact("numpy", "2.1.0"))
    bad = _written(tmp_path, "bad", "", artefact("idna", "3.7"), artefact("numpy", "2.2.0"))
    assert cli.main(["bisect", good, bad, "--static", "--log", str(tmp_path / "log")]) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert "error: the bad stack is not bad\n  because: all changes: good (no new error)\n" in err


def test_the_bad_stack_s_overrides_count_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wants = artefact("needs-numpy", requires=("numpy==1.26.4",))
    good = _written(tmp_path, "good", "", artefact("numpy", "1.26.4"))
    bad = _written(tmp_path, "bad", _OVERRIDE, wants, artefact("numpy", "2.1.0"))
    assert cli.main(["bisect", good, bad, "--static", "--log", str(tmp_path / "log")]) == ExitCode.USAGE
    assert "error: the bad stack is not bad\n" in capsys.readouterr().err


def test_an_error_that_neither_stack_has_is_a_skip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Halfway it is CUDA 13 beside CUDA 12, which neither end is; the bad one has a requirement that is not met.
    ends = {}
    for name, major, requires in (("good", 12, ()), ("bad", 13, ("idna<3",))):
        suffix = "-cu12" if major == 12 else ""
        libraries = [artefact(f"nvidia-{each}{suffix}", f"{major}.0") for each in ("cublas", "cufft", "curand")]
        late = artefact("zeta", f"{major}", requires=requires)
        text = TINY if major == 13 else TINY.replace("13.0.2", "12.8.1")
        ends[name] = _written(tmp_path, name, "", artefact("idna", "3.7"), late, *libraries, text=text)
    words = ["bisect", "--json", ends["good"], ends["bad"], "--static", "--log", str(tmp_path / "log")]
    assert cli.main(words) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["culprit"], found["why"]) == (
        "zeta 12 → 13",
        "zeta 13 requires `idna<3`, the lock has 3.7",
    )
    assert all("CUDA 13 beside CUDA 12" in each for each in found["skipped"])


def test_an_error_of_the_matrix_alone_is_no_package_s(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = _written(tmp_path, "good", "", artefact("idna", "3.7"))
    bad = _written(tmp_path, "bad", "", artefact("idna", "3.8"), text=TINY.replace("as_of: 2026", "as_of: 2999"))
    assert cli.main(["bisect", good, bad, "--static", "--log", str(tmp_path / "log")]) == ExitCode.USAGE
    assert "good (no new error of a package; this one is of the bad stack's matrix: `as_of` is 2999" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("sides", "words", "message"),
    [
        (
            ("good", "good"),
            [],
            (
                "error: there is nothing to search for\n  because: good and good have the same wheels\n"
                "  hint: `builder diff` tells what else differs\n"
            ),
        ),
        (("good", "bad"), ["--within", "numpy"], "error: `numpy` is in neither stack\n  at: --within\n"),
    ],
)
def test_nothing_to_search_is_said_before_anything_is_tested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sides: tuple[str, str], words: list[str], message: str
) -> None:
    _pair(tmp_path, 2)
    paths = [str(tmp_path / f"{side}.yaml") for side in sides]
    assert cli.main(["bisect", *paths, *words, "--log", str(tmp_path / "log"), "--", "true"]) == ExitCode.USAGE
    assert capsys.readouterr().err == message
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("mode", "local", "said"),
    [
        (0o755, True, ""),
        (0o700, True, "the container's user (uid 10001, gid 0) may not read the current folder"),
        (0o755, False, "the engine is on another machine"),
    ],
)
def test_the_current_folder_in_a_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: int,
    local: bool,
    said: str,
) -> None:
    class MadeEngine:
        def info(self) -> EngineInfo:
            return EngineInfo("26.1.5", "classic", Path("/var/lib/docker"), local)

    here = tmp_path / "here"
    here.mkdir(mode=mode)
    monkeypatch.chdir(here)
    runner = Container(tiny(), ["true"], settings_at(tmp_path))
    found = [runner._here(MadeEngine()) for _ in range(2)]  # type: ignore[arg-type]
    assert found == ([{}, {}] if said else [{str(here): "/mnt/here"}] * 2)
    # Once is enough.
    assert capsys.readouterr().err == (f"COMMAND does not see the current folder: {said}\n" if said else "")


def test_a_state_that_the_rules_call_broken_is_skipped_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # flashinfer's two parts go together, and nothing in METADATA says so: the state with one of them is never run.
    paths = []
    for name, version in (("good", "0.6.3"), ("bad", "0.6.4")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(TINY, encoding="utf-8")
        parts = [artefact(each, version) for each in ("flashinfer-cubin", "flashinfer-python")]
        write_lock(lock_of(tiny(name=name).matrix, *parts), lock_path(path))
        paths.append(str(path))
    asked: list[tuple[str, ...]] = []

    class Runner(_Planted):
        def test(self, lock: Lock) -> tuple[Result, str]:
            asked.append(tuple(each.version for each in lock.artefacts))
            return super().test(lock)

    monkeypatch.setattr(verb, "_runner", lambda *_: Runner("flashinfer-python", "0.6.4"))
    assert cli.main(["bisect", *paths, "--log", str(tmp_path / "log"), "--", "true"]) == ExitCode.FINDINGS
    assert set(asked) == {("0.6.3", "0.6.3"), ("0.6.4", "0.6.4")}
    out = capsys.readouterr().out
    assert out.startswith("it is one of these 2 changes, and no state between them could be told\n")
    assert "flashinfer-python 0.6.3 beside flashinfer-cubin 0.6.4" in out
