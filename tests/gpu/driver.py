"""Runs scenarios: every rank a process of its own, within its limit, whatever the others do; and writes the report."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.scenarios import SAFE, Scenario

GRACE = 20.0
"""Seconds that the others get once a rank has failed: they may wait for what does not come."""
LOG_BYTES = 40_000
"""Of what a rank prints, at most; its end."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Run:
    """Where things lie, how long it may take, and what was found by now."""

    carry: Path
    out: Path
    scratch: Path
    seconds: float
    arch: str = "9.0a"
    grace: float = GRACE
    began: float = field(default_factory=time.monotonic)
    checks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    standins: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def left(self) -> float:
        """Seconds until everything has to be over."""
        return self.seconds - (time.monotonic() - self.began)

    def all(self, steps: Iterable[Sequence[Sequence[Scenario]]]) -> bool:
        """Run the steps; whether every check holds."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / "log.txt").write_text("", encoding="utf-8")
        self._write()
        for step in steps:
            threads = [threading.Thread(target=self._lane, args=(lane,)) for lane in step]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return bool(self.checks) and all(item["ok"] for item in self.checks)

    def _lane(self, lane: Sequence[Scenario]) -> None:
        for scenario in lane:
            if scenario.needs in self.failed:
                self._add(scenario, [_check("runs", False, f"not run: {scenario.needs!r} went wrong")])
            elif self.left < 10:
                self._add(scenario, [_check("runs", False, "not run: no time is left")])
            else:
                try:
                    self._one(scenario)
                except Exception as error:  # noqa: BLE001 - a part that fails stops no other
                    self._add(scenario, [_check("runs", False, f"{type(error).__name__}: {error}")])

    def _one(self, scenario: Scenario) -> None:
        with tempfile.TemporaryDirectory(dir=self.scratch) as name:
            folder = Path(name)
            port = _free_port()
            before = time.monotonic()
            ranks = [self._start(scenario, rank, port, folder) for rank in range(scenario.ranks)]
            ended = self._wait(ranks, min(scenario.limit, self.left))
            took = time.monotonic() - before
            codes = [process.returncode for process in ranks]
            detail = f"{took:.0f} s, exit statuses {codes}" + ("" if ended else ", stopped at the limit")
            said = [_said(folder / f"rank{rank}.jsonl") for rank in range(scenario.ranks)]
            found = [_check("every rank ends by itself", ended and not any(codes), detail), *_merged(said)]
            self._log(scenario, folder, detail)
            self._add(scenario, found, said)

    def _start(self, scenario: Scenario, rank: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
        env |= {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "4",
            "CUDA_HOME": env.get("CUDA_HOME", "/usr/local/cuda"),
            "FLASHINFER_CUDA_ARCH_LIST": self.arch,
            "FLASHINFER_EXTRA_LDFLAGS": f"-L{self.scratch / 'lib'}",
            "FLASHINFER_WORKSPACE_BASE": str(self.scratch / "jit"),
            "TVM_FFI_CACHE_DIR": str(self.scratch / "tvm-ffi"),
        }
        env |= {} if rank in scenario.without else scenario.env
        command = [sys.executable, "-m", "tests.gpu.rank", scenario.run, "--release", scenario.release]
        command += [f"--rank={rank}", f"--ranks={scenario.ranks}", f"--port={port}", f"--carry={self.carry.resolve()}"]
        command += [f"--scratch={self.scratch.resolve()}", f"--out={folder / f'rank{rank}.jsonl'}"]
        with (folder / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=env | SAFE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, ranks: Sequence[subprocess.Popen[bytes]], limit: float) -> bool:
        """Whether all end in time; those that do not, and what they started, are killed."""
        until = time.monotonic() + limit
        try:
            while True:
                codes = [process.poll() for process in ranks]
                if None not in codes:
                    return True
                if any(codes):
                    until = min(until, time.monotonic() + self.grace)
                    self._until(ranks, until)
                    return all(process.poll() is not None for process in ranks)
                if time.monotonic() > until:
                    return False
                time.sleep(0.1)
        finally:
            for process in ranks:
                # The group as well where the rank has ended: a compiler may outlive it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    @staticmethod
    def _until(ranks: Sequence[subprocess.Popen[bytes]], until: float) -> None:
        while time.monotonic() < until and any(process.poll() is None for process in ranks):
            time.sleep(0.1)

    def _add(self, scenario: Scenario, found: list[dict[str, Any]], said: Sequence[list[dict[str, Any]]] = ()) -> None:
        where = {"part": scenario.part, "scenario": scenario.name}
        with self.lock:
            self.checks += [{**where, **item} for item in found]
            if not found[0]["ok"]:  # whether it ran at all
                self.failed.add(scenario.name)
            first = [item for item in (said[0] if said else []) if item["kind"] == "note"]
            self.notes += [{**where, "name": item["name"], "value": item["value"]} for item in first]
            for item in (item for lines in said for item in lines if item["kind"] == "standins"):
                self.standins.update(item["names"])
            self._write()

    def _write(self) -> None:
        machine = {item["name"]: item["value"] for item in self.notes if item["part"] == "machine"}
        report = {
            "seconds": time.monotonic() - self.began,
            "ok": bool(self.checks) and all(item["ok"] for item in self.checks),
            "machine": machine,
            "checks": self.checks,
            "notes": [item for item in self.notes if item["part"] != "machine"],
            "standins": sorted(self.standins),
        }
        path = self.out / "report.json"
        path.with_suffix(".new").write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def _log(self, scenario: Scenario, folder: Path, detail: str) -> None:
        lines = [f"=== {scenario.part}: {scenario.name}: {detail}"]
        for rank in range(scenario.ranks):
            printed = (folder / f"rank{rank}.log").read_bytes()[-LOG_BYTES:].decode(errors="replace")
            lines += [f"--- rank {rank}", printed.rstrip()]
        with self.lock, (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write("\n".join(lines) + "\n")


def unpack(carry: Path, scratch: Path) -> None:
    """Lay out what is carried as archives, and names to link against where the machine has the libraries alone."""
    folders = [Path(entry) / "nvidia" / "cu13" / "lib" for entry in sys.path if entry]
    folders += map(Path, ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu"))
    (scratch / "lib").mkdir(exist_ok=True)
    for name, major in (("libcudart.so", "13"), ("libcuda.so", "1")):
        found = next((path for folder in folders if (path := folder / f"{name}.{major}").exists()), None)
        if found is not None:
            (scratch / "lib" / name).symlink_to(found)
    for path in sorted([*carry.glob("*.zip"), *carry.glob("*.whl")]):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(scratch / "site")


def _check(name: str, ok: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _said(path: Path) -> list[dict[str, Any]]:
    """What a rank has said; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]


def _merged(said: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The checks of all ranks, each once: it holds where it does on every rank, and all have come to it."""
    checks = [{item["name"]: item for item in lines if item["kind"] == "check"} for lines in said]
    found = []
    for name in dict.fromkeys(name for items in checks for name in items):
        oks = [name in items and items[name]["ok"] for items in checks]
        details = [items[name]["detail"] if name in items else "it did not come to this" for items in checks]
        same = len(set(details)) == 1
        detail = details[0] if same else "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(details))
        found.append(_check(name, all(oks), detail))
    return found
