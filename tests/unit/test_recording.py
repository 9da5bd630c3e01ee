"""`builder run --record`: a dated folder with command, output and exit status, that can be handed on."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from datetime import UTC, datetime
from pathlib import Path

import pytest

from builder import recording, running
from builder.errors import UsageError
from builder.running import Mount, RunOptions
from tests.made import ROOT

NOW = datetime(2026, 11, 30, 23, 5, 7, tzinfo=UTC)
LOCK = "f407c0ffee11" + "0" * 52

OPTIONS = RunOptions(
    image="sglang-stack:mine",
    command=("python3", "bug.py"),
    mounts=(Mount("bind", "/home/alice/models/Kimi", "/models/Kimi", readonly=True),),
    environment=("NCCL_DEBUG=INFO", "HF_TOKEN=abc", "WANDB_API_KEY=abc", "SGLANG_FOO"),
    lock=LOCK,
)


def test_what_is_kept_of_a_command(tmp_path: Path) -> None:
    kept = running.record(OPTIONS, tmp_path / "runs", NOW)
    assert kept.folder == tmp_path / "runs" / "20261130T230507Z-f407c0ffee11"
    assert json.loads((kept.folder / "command.json").read_text()) == {
        "schema": 1,
        "started": "2026-11-30T23:05:07Z",
        "image": "sglang-stack:mine",
        "lock": LOCK,
        "command": ["python3", "bug.py"],
        "gpus": "all",
        "ipc": "host",
        "nccl_p2p": True,
        "environment": {"NCCL_DEBUG": "INFO", "HF_TOKEN": None, "WANDB_API_KEY": None, "SGLANG_FOO": None},
        "models": ["/models/Kimi"],
    }


def test_two_runs_in_one_second_and_an_image_that_names_no_lock(tmp_path: Path) -> None:
    names = [recording.begin(tmp_path, {}, lock, NOW).folder.name for lock in (LOCK, LOCK, "")]
    assert names == ["20261130T230507Z-f407c0ffee11", "20261130T230507Z-f407c0ffee11-2", "20261130T230507Z-nolock"]


def test_a_run_that_was_not_seen_to_end_has_no_status(tmp_path: Path) -> None:
    kept = recording.begin(tmp_path, {}, LOCK, NOW)
    assert sorted(each.name for each in kept.folder.iterdir()) == ["command.json", "output.log"]


def test_a_place_that_is_a_file(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.write_text("")
    with pytest.raises(UsageError) as caught:
        recording.begin(place, {}, LOCK, NOW)
    assert str(caught.value) == (
        f"error: the run cannot be recorded\n  at: {place}\n  because: File exists\n  hint: name a folder that can be written to"
    )


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "status"), [("echo out; echo err >&2; exit 7", 7), ("printf unended; kill -9 $$", 137)]
)
def test_output_goes_where_it_went_and_into_the_log(tmp_path: Path, script: str, status: int) -> None:
    # A process of its own: what is handed on are its real stdout and stderr.
    code = textwrap.dedent("""\
        import sys
        from pathlib import Path
        from builder.recording import Recording
        from builder.running import execute
        class Engine:
            host = "unix:///x"
        sys.exit(execute(["sh", "-c", sys.argv[1]], Engine(), gpus=False, recording=Recording(Path(sys.argv[2]))))
    """)
    plain = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    done = subprocess.run(
        [sys.executable, "-c", code, script, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == (plain.stdout, plain.stderr, status)
    assert sorted((tmp_path / "output.log").read_text().split()) == sorted((plain.stdout + plain.stderr).split())
    assert (tmp_path / "status").read_text() == f"{status}\n"


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_does_not_stop_what_runs(tmp_path: Path) -> None:
    (tmp_path / "output.log").symlink_to("/dev/full")
    code = textwrap.dedent("""\
        import sys, subprocess
        from pathlib import Path
        from builder.recording import Tee
        process = subprocess.Popen(["sh", "-c", "seq 100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        tee = Tee(process, Path(sys.argv[1]))
        status = process.wait()
        tee.join()
        sys.exit(status)
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "output.log")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()[-1]) == (0, "100000")
    assert done.stderr == "the log of the run is not whole: No space left on device\n"
