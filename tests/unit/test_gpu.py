"""The GPU part without a GPU: what it makes of checks that hold, differ, fault and hang, and of a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from builder.smoke import gpu
from builder.smoke.child import Outcome, Workspace
from builder.smoke.gpu import Given, Machine, Runner, judged, line, summed, verdict
from builder.smoke.gpu_case import CASES, Case
from builder.smoke.gpu_words import MEANINGS, meaning
from builder.smoke.stub import write_stub
from tests.unit.smoke_made import Site, compile_library

MADE = "tests.unit.gpu_made:"
ONE = {"index": 0, "name": "Made GPU", "capability": "9.0", "memory": 80 << 30}
TWO = [ONE, {**ONE, "index": 1}]


def run(
    folder: Path, *names: str, gpus: Sequence[dict[str, Any]] = (ONE,), ranks: Sequence[str] = (), limit: float = 60
) -> tuple[list[dict[str, Any]], list[str]]:
    """The made-up checks of these names, and what was said meanwhile."""
    cases = [Case(name, f"{MADE}{name}", limit) for name in names]
    cases += [Case(name, f"{MADE}{name}", limit, ranks=True) for name in ranks]
    said: list[str] = []
    machine = Machine("580.1", "13.0", list(gpus), "" if gpus else "the driver says no", ["4", "GPU-made"][: len(gpus)])
    given = Given("none", ("one",), {"MADE_NOTE": str(folder / "note")})
    with Workspace(Site(folder).tree) as workspace:
        return Runner(workspace, machine, given, said.append, cases).run(), said


class TestProcesses:
    """Each check is a real process."""

    pytestmark = pytest.mark.processes

    def test_a_check_that_holds(self, tmp_path: Path) -> None:
        checks, said = run(tmp_path, "holds")
        assert checks == [
            {
                "name": "holds",
                "gpu": 0,
                "ok": True,
                "looked_at": 2,
                "detail": "2 comparisons; sees 4",
                "skipped": None,
                "files": [],
                "predicted": None,
            }
        ]
        assert said == ["holds                GPU 0  ok      2 comparisons; sees 4"]

    def test_every_comparison_that_fails_is_told(self, tmp_path: Path) -> None:
        (check,), said = run(tmp_path, "differs")
        assert (check["ok"], check["looked_at"]) == (False, 4)
        assert check["detail"] == "a list: got [1, 2, 3], expected [1, 2, 4]\na bound: off by 3\nbare"
        assert said == [
            "differs              GPU 0  FAILED  a list: got [1, 2, 3], expected [1, 2, 4]\n  a bound: off by 3\n  bare"
        ]

    def test_the_kernels_own_words_and_what_they_mean(self, tmp_path: Path) -> None:
        (check,), _ = run(tmp_path, "raises")
        words, _, place = check["detail"].partition(" (")
        assert words == "RuntimeError: CUDA error: no kernel image is available for execution on the device"
        assert place.startswith("gpu_made.py, line ") and place.endswith(", in raises)")
        assert check["because"] == MEANINGS[0][1]
        assert not check["ok"] and check["looked_at"] == 1

    def test_a_part_that_fails_ends_no_other_but_a_fault_of_cuda_does(self, tmp_path: Path) -> None:
        (check,), _ = run(tmp_path, "parts")
        first, second = check["detail"].split("\n")
        assert first == "the first: ValueError: broken on purpose"
        assert second.startswith(
            "RuntimeError: CUDA error: an illegal memory access was encountered (gpu_made.py, line "
        )
        assert check["looked_at"] == 2

    def test_a_process_that_dies_or_hangs_takes_no_other_with_it(self, tmp_path: Path) -> None:
        checks, _ = run(tmp_path, "aborts", "faults", "hangs", "holds", limit=8)
        assert [check["ok"] for check in checks] == [False, False, False, True]
        details = [check["detail"] for check in checks[:3]]
        assert details[0] == "its process was ended by SIGABRT: terminate called after throwing"
        assert details[1] == "its process was ended by SIGSEGV: it said nothing"
        assert details[2] == "its process ran out of time: it said nothing"
        state = Path(f"/proc/{(tmp_path / 'note').read_text()}/stat")
        # Killed, and at most not yet collected by whoever adopted it.
        assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    def test_a_skip_is_no_pass_and_hides_no_failure(self, tmp_path: Path) -> None:
        checks, said = run(tmp_path, "skips", "skips_late")
        assert (checks[0]["ok"], checks[0]["skipped"]) == (False, "not on this GPU")
        assert (checks[1]["skipped"], checks[1]["detail"]) == (None, "wrong: already")
        assert said[0] == "skips                GPU 0  SKIPPED not on this GPU"
        assert summed(checks) == {"ok": False, "verdict": "failed", "ran": 1, "failed": 1, "skipped": 1}

    def test_a_check_that_compares_nothing_fails(self, tmp_path: Path) -> None:
        (check,), _ = run(tmp_path, "silent")
        assert (check["ok"], check["detail"]) == (False, "it compared nothing")

    def test_a_check_that_is_not_there_fails(self, tmp_path: Path) -> None:
        (check,), _ = run(tmp_path, "nothing_of_the_kind")
        assert not check["ok"]
        assert "has no attribute 'nothing_of_the_kind'" in check["detail"]

    def test_what_a_check_is_told(self, tmp_path: Path) -> None:
        assert [check["ok"] for check in run(tmp_path, "safe")[0]] == [True]

    def test_on_each_gpu_alone_and_on_all_together(self, tmp_path: Path) -> None:
        checks, _ = run(tmp_path, "holds", "silent", gpus=TWO, ranks=["ranked", "ranked_badly"])
        assert [(check["name"], check["gpu"], check["ok"]) for check in checks] == [
            ("holds", 0, True),
            ("silent", 0, False),
            ("holds", 1, True),
            ("silent", 1, False),
            ("ranked", None, True),
            ("ranked_badly", None, False),
        ]
        assert checks[2]["detail"] == "2 comparisons; sees GPU-made"
        assert checks[4]["detail"] == "6 comparisons; two ranks"
        assert checks[5]["detail"] == "rank 1: the first alone: no"

    def test_a_driver_that_has_no_gpu(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        names = ("cuDriverGetVersion", "cuInit", "cuGetErrorString", "cuDeviceGetCount")
        write_stub(tmp_path / "libcuda.so.1", "libcuda.so.1", names)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        with Workspace(Site(tmp_path).tree) as workspace:
            found = gpu.machine(workspace)
        assert (found.gpus, found.error) == ([], "cuDriverGetVersion: 100, an unknown error")

    def test_a_driver_that_names_gpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        compile_library(DRIVER, "-w", "-Wl,-soname,libcuda.so.1", name="libcuda.so.1", folder=tmp_path)
        compile_library(NVML, "-w", "-Wl,-soname,libnvidia-ml.so.1", name="libnvidia-ml.so.1", folder=tmp_path)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-b")
        with Workspace(Site(tmp_path).tree) as workspace:
            found = gpu.machine(workspace)
        made = {"name": "Made GPU", "memory": 1 << 36}
        assert found == Machine(
            "580.1.2",
            "13.0",
            [{"index": 0, "capability": "12.0", **made}, {"index": 1, "capability": "12.1", **made}],
            "",
            ["3", "GPU-b"],
        )

    def test_nothing_ran_is_no_pass(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
        write_stub(tmp_path / "libcuda.so.1", "libcuda.so.1", ("cuDriverGetVersion", "cuGetErrorString"))
        site = Site(tmp_path)
        spec, out = tmp_path / "spec.json", tmp_path / "out.json"
        spec.write_text(json.dumps(site.spec_data), encoding="utf-8")
        command = [sys.executable, "-m", "builder.smoke.gpu", "--spec", str(spec), "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        loud = f"NO GPU CHECK RAN: 0 ran, 0 failed, {len(CASES)} skipped; this is not a pass\n"
        why = "no GPU: cuDriverGetVersion: 100, an unknown error"
        assert (done.returncode, done.stderr) == (3, loud)
        assert done.stdout == f"{len(CASES)} checks SKIPPED: {why}\n{loud}"
        report = json.loads(out.read_text(encoding="utf-8"))
        assert {check["skipped"] for check in report["checks"]} == {why}
        del report["checks"]
        assert report == {
            "schema": 1,
            "ok": False,
            "verdict": "skipped",
            "ran": 0,
            "failed": 0,
            "skipped": len(CASES),
            "matrix": "tiny",
            "lock": "1" * 64,
            "driver": None,
            "cuda_driver": None,
            "torch": None,
            "gpus": [],
        }


DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuInit(unsigned f) { return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "Made GPU", n); return 0; }
int cuDeviceGetAttribute(int *v, int what, int d) { *v = what == 75 ? 12 : what == 76 ? d : -1; return 0; }
int cuDeviceTotalMem_v2(unsigned long *v, int d) { *v = 1ul << 36; return 0; }
"""
NVML = """
#include <string.h>
int nvmlInit_v2(void) { return 0; }
int nvmlSystemGetDriverVersion(char *s, unsigned n) { strncpy(s, "580.1.2", n); return 0; }
"""

# --- what is made of what a process said ------------------------------------------------------------------------------


def outcome(*events: dict[str, Any], code: int | None = 0, err: str = "") -> Outcome:
    return Outcome(code, "".join(json.dumps(event) + "\n" for event in events), err)


def ended(**rest: Any) -> dict[str, Any]:
    return {"event": "end", "looked_at": 1, "wrong": [], "said": [], "error": "", "skipped": "", **rest}


def mapped(*files: str) -> dict[str, Any]:
    return {"event": "mapped", "files": list(files)}


FLASH = Case("flash", "x:y", library="flash_ops")
FILE = "sgl_kernel/flash_ops.abi3.so"


def nothing(file: str) -> None:
    return None


def test_the_file_of_a_check_and_what_was_predicted_of_it() -> None:
    asked: list[str] = []

    def covers(file: str) -> dict[str, Any]:
        asked.append(file)
        return {"covered": 0, "of": 182, "by": {}}

    check = judged(
        FLASH,
        0,
        [outcome(mapped(FILE, "sgl_kernel/sm100/common_ops.abi3.so"), ended(error="RuntimeError: no image"))],
        covers,
    )
    assert asked == check["files"] == [FILE]
    assert check["predicted"] == {FILE: {"covered": 0, "of": 182, "by": {}}}
    assert line(check).splitlines()[-1] == f"  predicted: {FILE} has code for this GPU in 0 of 182 containers"
    skipped = judged(FLASH, 0, [outcome(mapped(FILE), ended(looked_at=0, skipped="not here"))], covers)
    assert line(skipped) == "flash                GPU 0  SKIPPED not here"


def test_a_file_without_device_code_is_predicted_nothing_of() -> None:
    check = judged(FLASH, 0, [outcome(mapped(FILE), ended())], lambda _: {"covered": 0, "of": 0, "by": {}})
    assert (check["ok"], check["predicted"]) == (True, None)


def test_what_came_before_a_crash_is_kept() -> None:
    check = judged(FLASH, 1, [outcome(mapped(FILE), code=-6, err="terminate called\nno more")], nothing)
    assert check["files"] == [FILE]
    assert check["detail"] == "its process was ended by SIGABRT: terminate called\nno more"


def test_what_a_driver_says_on_stderr_is_explained_too() -> None:
    said = "CUDA error: unspecified launch failure"
    check = judged(FLASH, 0, [outcome(code=-6, err=f"{said}\n" + "frame\n" * 20)], nothing)
    assert check["because"] == meaning("unspecified launch failure") != ""


def test_lines_that_are_no_events_are_passed_over() -> None:
    printed = Outcome(0, 'kernel says hello\n{"event": broken\n' + json.dumps(ended()) + "\n", "")
    assert judged(FLASH, 0, [printed], nothing)["ok"]


def test_many_differences_are_counted() -> None:
    check = judged(FLASH, 0, [outcome(ended(wrong=[f"row {i}" for i in range(9)]))], nothing)
    assert check["detail"].splitlines()[-2:] == ["row 5", "and 3 more"]


def test_a_rank_that_skips_where_another_fails_is_a_failure() -> None:
    check = judged(FLASH, None, [outcome(ended(skipped="no peer")), outcome(ended(wrong=["sum"]))], nothing)
    assert (check["skipped"], check["detail"]) == (None, "rank 1: sum")


@pytest.mark.parametrize(
    ("words", "known"),
    [
        (
            "RuntimeError: CUDA error: No kernel image is available for execution on the device",
            "the file has no code for this GPU",
        ),
        ("Error 802: system not yet initialized", "error 802: a host with NVSwitch needs the fabric manager"),
        (
            "Error 804: forward compatibility was attempted on non supported HW",
            "error 804: forward-compatibility libraries",
        ),
        ("libnuma.so.1: cannot open shared object file: No such file or directory", "a library is missing"),
        # As an H200 and torch 2.11.0 said it (tests/gpu_kernels/faults.py).
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "a kernel has found an index"),
        (
            "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
            "a kernel has read or written",
        ),
        ("undefined symbol: _ZN3c10", "it was built for another torch"),
    ],
)
def test_words_that_are_known(words: str, known: str) -> None:
    assert meaning(words).startswith(known)


def test_words_that_are_not_known() -> None:
    assert meaning("ValueError: something else") == ""


def test_the_verdict_over_checks() -> None:
    good = {"ok": True, "skipped": None, "name": "a"}
    bad = {"ok": False, "skipped": None, "name": "b"}
    left = {"ok": False, "skipped": "why", "name": "c"}

    def said(*checks: dict[str, Any]) -> tuple[str, str]:
        report = {**summed(checks), "checks": checks}
        return report["verdict"], verdict(report)

    assert said(good, left) == ("ok", "GPU checks: 1 ran, 0 failed, 1 skipped")
    assert said(good, bad, bad, left) == ("failed", "GPU checks: 3 ran, 2 failed, 1 skipped: b")
    assert said(left) == ("skipped", "NO GPU CHECK RAN: 0 ran, 0 failed, 1 skipped; this is not a pass")


def test_a_gpu_that_the_image_is_not_for(tmp_path: Path) -> None:
    said: list[str] = []
    machine = Machine(gpus=[{**ONE}, {**ONE, "index": 1, "capability": "12.0"}])
    gpu.say_targets(Site(tmp_path).spec, machine, said.append)
    assert [each["target"] for each in machine.gpus] == [False, True]
    assert said == ["GPU 0: this image is for 12.0, and that is none of them"]
    gpu.say_targets(None, machine, said.append)
    assert [each["target"] for each in machine.gpus] == [None, None]
    assert len(said) == 1


def test_every_check_is_there_once() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
    for case in CASES:
        module, _, function = case.run.partition(":")
        text = (Path(gpu.__file__).parent / f"{module}.py").read_text(encoding="utf-8")
        assert f"def {function}(look: Look)" in text, case


def test_the_parent_imports_no_torch() -> None:
    code = "import sys, builder.smoke.gpu; print([name for name in sys.modules if name.split('.')[0] in ('torch', 'triton')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout == "[]\n"


def test_an_unknown_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--spec", "x", "--out", "y", "--only", "sgl-norms"])
    assert "no check is called sgl-norms; there are torch-matmul, " in capsys.readouterr().err


def test_a_spec_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--spec", str(tmp_path / "no.json"), "--out", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
