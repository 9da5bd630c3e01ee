"""`builder smoke IMAGE`: which images it takes, and what it makes of a container's output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from builder import __version__, cli, smoking
from builder.engine import Image
from builder.errors import BuildError, UsageError
from builder.smoke.gpu_case import CASES

REPORT = {"ok": False, "matrix": "tiny", "checks": [{"name": "needed", "ok": False}, {"name": "installed", "ok": True}]}


class FakeEngine:
    """One image, and what its container says."""

    host = "unix:///made"

    def __init__(self, output: list[str | int], labels: dict[str, str] | None = None) -> None:
        self.output = output
        self.labels = {"sglang-stack": "image"} if labels is None else labels
        self.asked: dict[str, Any] = {}
        self.runtimes: tuple[str, ...] = ("nvidia",)

    def gpu_runtimes(self) -> tuple[str, ...]:
        return self.runtimes

    def find(self, reference: str) -> Image | None:
        return Image("sha256:abcdef0123456789", (), self.labels, 1, ()) if reference == "tiny" else None

    def run(self, image: str, command: list[str], **options: Any) -> Iterator[str | int]:
        self.asked = {"image": image, "program": command[0], **options}
        yield from self.output


def smoked(monkeypatch: pytest.MonkeyPatch, output: list[str | int], **options: Any) -> dict[str, Any]:
    fake = FakeEngine(output)
    monkeypatch.setattr(smoking, "connect", lambda: fake)
    data = smoking.smoke("tiny", user=options.get("user"))
    assert fake.asked["user"] == options.get("user")
    return data


def lines(report: object = REPORT) -> list[str | int]:
    return ["  ok  installed", smoking.MARK, *json.dumps(report, indent=1).split("\n")]


def test_a_report_and_what_was_said_while_it_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = smoked(monkeypatch, [*lines(), 3], user="12345:0")
    assert data == {**REPORT, "image": "sha256:abcdef0123456789"}
    assert capsys.readouterr() == ("", "  ok  installed\n")
    assert smoking.as_text(data) == "tiny: FAILED: needed (image sha256:abcdef012345, no GPU was used)"


def test_a_report_without_failures() -> None:
    data = {"ok": True, "matrix": "tiny", "image": "sha256:abcdef0123456789", "checks": [{"name": "x", "ok": True}]}
    assert smoking.as_text(data) == "tiny: ok, 1 checks (image sha256:abcdef012345, no GPU was used)"


@pytest.mark.parametrize("output", [["Traceback", 1], [1], [*lines(), 137]])
def test_a_container_that_did_not_get_so_far(monkeypatch: pytest.MonkeyPatch, output: list[str | int]) -> None:
    with pytest.raises(BuildError) as caught:
        smoked(monkeypatch, output)
    assert str(caught.value) == (
        f"error: the smoke test could not run in the image\n  because: its container ended with {output[-1]}"
    )


def test_a_damaged_report(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError) as caught:
        smoked(monkeypatch, [smoking.MARK, "{", 0])
    assert str(caught.value).startswith("error: the smoke test's report is damaged\n  because: ")


def test_no_such_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoking, "connect", lambda: FakeEngine([]))
    with pytest.raises(UsageError) as caught:
        smoking.smoke("other", user=None)
    assert str(caught.value) == ("error: there is no image `other`\n  at: unix:///made\n  hint: see `builder list`")


def test_an_image_of_somebody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoking, "connect", lambda: FakeEngine([], {}))
    with pytest.raises(UsageError) as caught:
        smoking.smoke("tiny", user=None)
    assert str(caught.value) == (
        "error: `tiny` is not an image of this builder\n"
        "  because: it has no label `sglang-stack=image`\n"
        "  hint: the test needs the lock that the image was built from"
    )


# --- on GPUs ----------------------------------------------------------------------------------------------------------

GPU = {"index": 0, "name": "Made GPU", "capability": "9.0", "memory": 80}


def gpu_report(**changes: Any) -> dict[str, Any]:
    """What the GPU part writes."""
    checks = [
        {"name": "torch-matmul", "gpu": 0, "ok": True, "skipped": None},
        {"name": "torch-matmul", "gpu": 1, "ok": True, "skipped": None},
        {"name": "sgl-tree", "gpu": 0, "ok": False, "skipped": None},
        {"name": "nccl", "gpu": None, "ok": False, "skipped": "one is visible"},
    ]
    numbers = {"ok": False, "verdict": "failed", "ran": 3, "failed": 1, "skipped": 1}
    about = {"matrix": "tiny", "lock": "1" * 64, "driver": "580.1", "cuda_driver": "13.0", "torch": None}
    return {"schema": 1, **numbers, **about, "gpus": [GPU, {**GPU, "index": 1}], "checks": checks, **changes}


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker client that is a script: it writes down its arguments and does what SCRIPT says. A stand-in, as the engine is."""
    made = tmp_path / "docker"
    made.write_text(f'#!/bin/sh\nprintf "%s\\n" "$DOCKER_HOST" "$@" > {tmp_path}/said\nexec sh -c "$SCRIPT"\n')
    made.chmod(0o755)
    monkeypatch.setattr(smoking, "find_client", lambda: str(made))
    return made


def on_gpus(
    monkeypatch: pytest.MonkeyPatch, script: str, *, gpus: str = "all", runtimes: tuple[str, ...] = ("nvidia",)
) -> dict[str, Any]:
    engine = FakeEngine([])
    engine.runtimes = runtimes
    monkeypatch.setattr(smoking, "connect", lambda: engine)
    monkeypatch.setenv("SCRIPT", script)
    return smoking.smoke_gpus("tiny", user="5:0", gpus=gpus)


def printing(report: dict[str, Any], status: int) -> str:
    said = ["GPU 0: Made GPU", smoking.MARK, json.dumps(report)]
    return f"printf '%s\\n' {shlex.join(said)}; exit {status}"


@pytest.mark.processes
def test_kernels_on_gpus(
    monkeypatch: pytest.MonkeyPatch, client: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = on_gpus(monkeypatch, printing(gpu_report(), 3), gpus="device=0,1")
    assert capsys.readouterr() == ("", "GPU 0: Made GPU\n")
    said = (tmp_path / "said").read_text(encoding="utf-8").split("\n")
    assert said[:2] == ["unix:///made", "run"]
    assert said[said.index("--gpus") :][:2] == ["--gpus", '"device=0,1"']
    assert said[said.index("--network") :][:4] == ["--network", "none", "--user", "5:0"]
    assert "sha256:abcdef0123456789" in said
    record = data.pop("record")
    assert data == {**gpu_report(), "image": "sha256:abcdef0123456789"}
    assert len(record.pop("date")) == len("2026-01-01")
    assert record == {
        "schema": 1,
        "image": "sha256:abcdef0123456789",
        "lock": "1" * 64,
        "matrix": "tiny",
        "driver": "580.1",
        "cuda_driver": "13.0",
        "gpus": [{"name": "Made GPU", "capability": "9.0", "count": 2}],
        "verdict": "failed",
        "ran": ["torch-matmul", "sgl-tree"],
        "failed": ["sgl-tree"],
        "skipped": {"nccl": "one is visible"},
        "builder": __version__,
    }
    assert smoking.as_text(data) == (
        "tiny: GPU checks: 3 ran, 1 failed, 1 skipped: sgl-tree (image sha256:abcdef012345, 2 × Made GPU (9.0), driver 580.1)"
    )


@pytest.mark.processes
def test_a_container_that_sees_no_gpu_leaves_no_record(monkeypatch: pytest.MonkeyPatch, client: Path) -> None:
    nothing = {"verdict": "skipped", "ran": 0, "failed": 0, "gpus": [], "driver": None, "checks": []}
    data = on_gpus(monkeypatch, printing(gpu_report(**nothing), 3))
    assert data["record"] is None
    assert smoking.as_text(data) == (
        "tiny: NO GPU CHECK RAN: 0 ran, 0 failed, 1 skipped; this is not a pass (image sha256:abcdef012345, no GPU)"
    )


REFUSED = "echo 'docker: could not select device driver \"\" with capabilities: [[gpu]]' >&2; exit 125"


@pytest.mark.processes
def test_an_engine_without_a_gpu_runtime_skips_everything_loudly(
    monkeypatch: pytest.MonkeyPatch, client: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = on_gpus(monkeypatch, REFUSED, runtimes=())
    loud = f"NO GPU CHECK RAN: 0 ran, 0 failed, {len(CASES)} skipped; this is not a pass"
    assert capsys.readouterr() == ("", f"{loud}\n")
    assert (data["ok"], data["verdict"], data["record"]) == (False, "skipped", None)
    assert {check["skipped"] for check in data["checks"]} == {
        "the engine has no GPU runtime: it lists no runtime and no device of NVIDIA"
    }


@pytest.mark.processes
def test_the_verb_without_a_gpu_is_no_success(
    monkeypatch: pytest.MonkeyPatch, client: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine([])
    engine.runtimes = ()
    monkeypatch.setattr(smoking, "connect", lambda: engine)
    monkeypatch.setenv("SCRIPT", REFUSED)
    assert cli.main(["smoke", "tiny", "--gpus", "all"]) == 3
    assert capsys.readouterr().out.startswith("image: NO GPU CHECK RAN: ")


@pytest.mark.processes
def test_a_gpu_runtime_that_refuses(monkeypatch: pytest.MonkeyPatch, client: Path) -> None:
    words = "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=13.0"
    with pytest.raises(BuildError) as caught:
        on_gpus(monkeypatch, f"echo '{words}' >&2; exit 125")
    assert str(caught.value) == (
        "error: the container did not start with the GPUs\n"
        "  at: unix:///made\n"
        f"  because: {words}\n"
        "  hint: `builder doctor IMAGE` says what this host can run"
    )


@pytest.mark.processes
def test_an_image_that_has_no_gpu_part(monkeypatch: pytest.MonkeyPatch, client: Path) -> None:
    with pytest.raises(BuildError) as caught:
        on_gpus(monkeypatch, "exit 4")
    assert str(caught.value) == (
        "error: the image has no GPU checks\n"
        "  because: it was built by a builder that had none\n"
        "  hint: build it again: `builder build MATRIX`"
    )


def test_no_gpu_is_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError) as caught:
        on_gpus(monkeypatch, "", gpus="none")
    assert str(caught.value) == (
        "error: `--gpus none` asks for no GPU\n  hint: leave it out: the build's own test needs none"
    )


@pytest.mark.processes
@pytest.mark.parametrize(("module", "status"), [("json.tool_that_is_not_there", 4), ("json", 1)])
def test_the_script_in_the_image(module: str, status: int) -> None:
    import subprocess

    command = smoking.container_command(module)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status
