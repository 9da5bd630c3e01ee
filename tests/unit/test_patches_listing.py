"""`builder patches`: what it prints, as text, JSON and diff, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from builder import cli, fetch
from builder.lock import Artefact, lock_path, write_lock
from builder.patches.listing import as_text, listing
from tests import patch_made as made
from tests.made import TINY, artefact, lock_of
from tests.made import tiny as matrix_of
from tests.patch_made import make_wheel, sglang_wheel


class Stack:
    """A locked matrix and the wheels of its lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tiny.yaml"
        self.wheels: dict[str, Path] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []

    def write(self, extra: str, *wheels: Path) -> None:
        """Write the matrix and its lock, of these wheels."""
        self.path.write_text(TINY + extra)
        locked = []
        for wheel in wheels:
            name, version = wheel.name.split("-")[:2]
            self.wheels[name.replace("_", "-")] = wheel
            locked.append(artefact(name.replace("_", "-"), version))
        locked.append(artefact("idna", "3.7"))
        write_lock(lock_of(matrix_of(extra).matrix, *locked), lock_path(self.path))

    def fetch(self, wanted: Artefact, indexes: dict[str, str]) -> Path:
        """As `builder.fetch` does it."""
        self.asked.append((wanted.name, dict(indexes)))
        return self.wheels[wanted.name]


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


FLASHINFER = """\
sets that the matrix asks for: sm120

flashinfer-python 0.6.4 (unlisted: its outcome is in no facts yet)
  F1  needed   sm120   flashinfer/jit/comm.py
               the architectures that the fused all-reduce is compiled for
  the patches change 1 file: +1 -1 lines"""


def test_the_text(stack: Stack) -> None:
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", made.FLASHINFER))
    assert as_text(listing(stack.path, stack.fetch)) == FLASHINFER
    assert stack.asked == [("flashinfer-python", {})]


def test_every_set_is_looked_at_also_where_none_is_asked_for(stack: Stack) -> None:
    stack.write("", sglang_wheel(stack.folder))
    found = listing(stack.path, stack.fetch)
    assert [(item.site.id, item.before.value) for item in found.packages[0].sites][-3:] == [
        ("E3", "needed"),
        ("E4", "needed"),
        ("E4", "needed"),
    ]
    assert (found.sets, found.diff, found.ok) == ((), "", True)
    assert as_text(found).startswith(
        "sets that the matrix asks for: none\n\nsglang 0.5.9\n  S1  needed   sm120   sglang/"
    )


UNKNOWN = """\
  D1  unknown  sm120   sglang/srt/layers/deep_gemm_wrapper/configurer.py
               whether DeepGEMM is used
               looked for: `if sm_version < 90: return False`
"""


def run(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    def fetched(wanted: Artefact, settings: Any, *, indexes: dict[str, str]) -> Path:
        return stack.fetch(wanted, indexes)

    monkeypatch.setattr(fetch, "fetch_artefact", fetched)
    code = cli.main(["patches", str(stack.path), *more])
    return code, capsys.readouterr().out


def test_an_unknown_site_is_shown_and_fails(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def _compute_enable_deep_gemm():\n    return True\n"
    stack.write("patches: {sm120: {}}\n", sglang_wheel(stack.folder, {made.DEEP_GEMM: text}))
    code, out = run(stack, monkeypatch, capsys)
    assert code == 3
    assert UNKNOWN in out
    # Of a set that the matrix does not ask for, it is a state like any other.
    stack.write("patches: {eagle3: {}}\n", sglang_wheel(stack.folder, {made.DEEP_GEMM: text}))
    code, out = run(stack, monkeypatch, capsys)
    assert (code, UNKNOWN in out) == (0, True)


def test_the_data(stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", made.FLASHINFER))
    code, out = run(stack, monkeypatch, capsys, "--json")
    assert (code, json.loads(out)) == (
        0,
        {
            "ok": True,
            "sets": ["sm120"],
            "sites": [
                {
                    "id": "F1",
                    "set": "sm120",
                    "package": "flashinfer-python",
                    "version": "0.6.4",
                    "file": made.COMM,
                    "state": "needed",
                    "looked_for": "",
                    "listed": False,
                }
            ],
        },
    )


def test_the_diff(stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", made.FLASHINFER))
    code, out = run(stack, monkeypatch, capsys, "--diff")
    assert (code, out) == (
        0,
        (
            f"--- a/{made.COMM}\n+++ b/{made.COMM}\n@@ -10,6 +10,6 @@\n \n def gen_trtllm_comm_module():\n"
            "     flags = current_compilation_context.get_nvcc_flags_list(\n-        supported_major_versions=[9, 10]\n"
            '+        supported_major_versions=[9, 10, 12]\n     )\n     return gen_jit_spec("trtllm_comm", extra_cuda_cflags=flags)\n'
        ),
    )
    assert json.loads(run(stack, monkeypatch, capsys, "--diff", "--json")[1])["diff"] == out
