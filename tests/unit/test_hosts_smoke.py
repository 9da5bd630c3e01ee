"""The smoke test on a host: what is run there, and what counts as passed. Engine and containers are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from builder import smoking
from builder.engine import Engine
from builder.errors import BuildError
from builder.hosts import smoke
from builder.hosts.fanout import Reporter
from builder.hosts.records import Smoke
from builder.hosts.smoke import smoke_on


class StandInEngine:
    host = "unix:///made.sock"

    def __init__(self, report: dict[str, Any]) -> None:
        self._report = report

    def run(self, image: str, command: list[str], **_: object) -> Iterator[str | int]:
        yield "native part"
        yield smoking.MARK
        yield json.dumps(self._report)
        yield 0 if self._report["ok"] else 3


class Said:
    """A reporter that keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def run(report: dict[str, Any], gpus: str = "none") -> tuple[Smoke, list[dict[str, object]], list[str]]:
    said = Said()
    found, checks = smoke_on(cast("Engine", StandInEngine(report)), "sha256:a", gpus, cast("Reporter", said))
    return found, checks, said.lines


def report(ok: bool = True) -> dict[str, Any]:
    return {"ok": ok, "matrix": "cu130", "checks": [{"name": "load", "ok": ok, "detail": ""}]}


def on_gpus(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> list[list[str]]:
    argvs = []

    def lines(argv: list[str], engine: object, words: list[str]) -> Iterator[str | int]:
        argvs.append(argv)
        if not found:
            words.append("docker: could not select device driver")
            raise smoking.NotStartedError
        yield smoking.MARK
        yield json.dumps(found)
        yield 0 if found["ok"] else 3

    monkeypatch.setattr(smoking, "output_lines", lines)
    monkeypatch.setattr(smoke, "find_client", lambda: "docker")
    return argvs


KERNEL = {"name": "gemm", "ok": True, "skipped": ""}


@pytest.mark.parametrize("ok", [True, False])
def test_the_builds_own_test(ok: bool) -> None:
    found, checks, lines = run(report(ok))
    assert (found, checks) == (Smoke(ok=ok, checks=1), report(ok)["checks"])
    # Its lines are the host's, the report is not.
    assert lines == ["native part"]


def test_on_gpus_kernels_are_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [{"name": "RTX PRO 6000", "capability": "12.0"}]
    argvs = on_gpus(monkeypatch, {"ok": True, "ran": True, "gpus": gpus, "checks": [KERNEL]})
    found, checks, _ = run(report(), "device=0")
    assert found == Smoke(ok=True, gpus=("RTX PRO 6000",), checks=2)
    assert [check["name"] for check in checks] == ["load", "gemm"]
    (argv,) = argvs
    assert "device=0" in " ".join(argv) and argv[argv.index("--network") + 1] == "none"


@pytest.mark.parametrize(
    "found",
    [
        {"ok": False, "ran": True, "gpus": [], "checks": [{**KERNEL, "ok": False}]},
        {"ok": False, "ran": False, "gpus": [], "checks": [{**KERNEL, "ok": False, "skipped": "no GPU"}]},
    ],
)
def test_what_failed_or_did_not_run_on_a_gpu_is_no_pass(monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]) -> None:
    on_gpus(monkeypatch, found)
    assert run(report(), "all")[0].ok is False


def test_a_container_that_does_not_start_with_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, {})
    with pytest.raises(BuildError) as caught:
        run(report(), "all")
    assert str(caught.value) == (
        "error: the container did not start with the GPUs\n  because: docker: could not select device driver"
    )
