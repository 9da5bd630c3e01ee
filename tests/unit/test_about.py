"""What `docker run IMAGE` prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.made import ROOT

SCRIPT = ROOT / "builder" / "smoke" / "about.py"
ABOUT: dict[str, Any] = {
    "matrix": "cu130-next",
    "summary": "A stack",
    "lock": "ab" * 32,
    "as_of": "2026-08-01",
    "system": "debian bookworm, 103 packages",
    "python": "3.11",
    "cuda": "13.0.2, nvcc in the image",
    "gpus": ["12.0", "9.0"],
    "patches": [],
    "stack": [["torch", "2.11.0"], ["sglang", "0.5.15.post1"]],
    "sglang": True,
}
SMOKE: dict[str, Any] = {
    "ok": True,
    "checks": [
        {"name": "installed", "ok": True, "looked_at": 193, "unit": "packages", "detail": ""},
        {"name": "needed", "ok": True, "looked_at": 12345, "unit": "files", "detail": "x"},
    ],
}


def told(tmp_path: Path, about: dict[str, Any] | None = None, smoke: dict[str, Any] | None = None) -> str:
    (tmp_path / "about.json").write_text(json.dumps(ABOUT | (about or {})))
    (tmp_path / "smoke.json").write_text(json.dumps(SMOKE | (smoke or {})))
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(tmp_path)], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_whole_text(tmp_path: Path) -> None:
    assert told(tmp_path) == (
        "cu130-next: A stack\n"
        "\n"
        f"  lock         {'ab' * 32}\n"
        "  as of        2026-08-01\n"
        "  system       debian bookworm, 103 packages\n"
        "  python       3.11\n"
        "  CUDA         13.0.2, nvcc in the image\n"
        "  torch        2.11.0\n"
        "  sglang       0.5.15.post1\n"
        "  GPU targets  12.0, 9.0\n"
        "  patches      none\n"
        f"  user         uid {os.getuid()}, gid {os.getgid()}\n"
        "\n"
        "ABI smoke test: passed in the build, 2 checks, no GPU was used\n"
        "  ok      installed        193 packages\n"
        "  ok      needed        12,345 files\n"
        "\n"
        "start a server: python3 -m sglang.launch_server --help\n"
    )


def test_a_stand_in_says_so_before_anything_else(tmp_path: Path) -> None:
    lines = told(tmp_path, {"stand_in": "STAND-IN, for tests only: torch is not what it is called"}).splitlines()
    assert lines[:3] == ["cu130-next: A stack", "STAND-IN, for tests only: torch is not what it is called", ""]


def test_a_stack_without_torch_and_sglang(tmp_path: Path) -> None:
    text = told(tmp_path, {"cuda": "", "stack": [], "sglang": False, "patches": ["one", "two"]})
    assert "CUDA" not in text
    assert "launch_server" not in text
    assert "  patches      one\n               two\n" in text


def test_a_proof_that_failed_says_so(tmp_path: Path) -> None:
    checks = [{"name": "needed", "ok": False, "looked_at": 1, "unit": "files", "detail": ""}]
    text = told(tmp_path, smoke={"ok": False, "checks": checks})
    assert "ABI smoke test: FAILED, 1 checks, no GPU was used\n  FAILED  needed          1 files\n" in text


def test_checks_that_do_not_apply_are_left_out(tmp_path: Path) -> None:
    check = {
        "name": "triton",
        "ok": True,
        "looked_at": 0,
        "unit": "",
        "detail": "not applicable: no triton in the lock",
    }
    text = told(tmp_path, smoke={"checks": [*SMOKE["checks"], check]})
    assert "2 checks" in text
    assert "triton" not in text


def test_in_the_image_it_finds_its_proof_by_itself(tmp_path: Path) -> None:
    told(tmp_path)
    place = tmp_path / "builder" / "smoke"
    place.mkdir(parents=True)
    (place / "about.py").write_text(SCRIPT.read_text())
    done = subprocess.run(
        [sys.executable, "-P", str(place / "about.py")], capture_output=True, text=True, check=True, cwd="/"
    )
    assert done.stdout.startswith("cu130-next: A stack\n")
