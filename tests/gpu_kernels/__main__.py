"""`python -m tests.gpu_kernels --carry FOLDER --out FOLDER`: reassemble the package, load it, run it, compare with the prediction.

FOLDER is where `prepare` wrote, or where its pieces were put together. Standard library and torch alone; no network. Exit status: 0
where everything was as predicted and every check holds, 3 where not, 2 where a piece is missing.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder.smoke import precompile
from builder.smoke.child import Workspace
from builder.smoke.gpu import Given, look, summed
from builder.smoke.gpu_case import CASES
from builder.smoke.tree import Tree
from tests.gpu_kernels.carry import CarryError, unpack
from tests.gpu_kernels.report import as_text, compared

LOADED_FIRST = "torch"
FILE_LIMIT, COMPILE_LIMIT = 120.0, 270.0
"""Seconds for one file to be opened, and for flashinfer's module to be compiled."""
MODULE = "gen_trtllm_comm_module"


def recorded(site: Path) -> dict[str, Any]:
    """Every file beside what the wheels' RECORDs say of it."""
    wrong, count = [], 0
    rows = [row for record in site.glob("*.dist-info/RECORD") for row in csv.reader(record.open(encoding="utf-8"))]
    for path, digest, _ in rows:
        if not digest:
            continue
        count += 1
        with (site / path).open("rb") as content:
            found = hashlib.file_digest(content, "sha256").digest()
        if base64.urlsafe_b64encode(found).rstrip(b"=").decode() != digest.partition("=")[2]:
            wrong.append(path)
    return {"files": count, "wrong": wrong}


def compiler(folder: Path) -> dict[str, str]:
    """What flashinfer needs to compile and link on that machine, whose CUDA has no `libcuda.so` to link with."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    folder.mkdir()
    places = [Path(item) for item in os.environ.get("LD_LIBRARY_PATH", "").split(":") if item]
    places += [Path("/usr/local/nvidia/lib64"), Path("/usr/local/nvidia/lib"), Path("/usr/lib/x86_64-linux-gnu")]
    for name, major in (("libcuda.so", "1"), ("libcudart.so", "13")):
        found = next(
            (path for place in [*places, Path(home) / "lib64"] if (path := place / f"{name}.{major}").exists()), None
        )
        if found is not None:
            (folder / name).symlink_to(found)
    programs = [f"{home}/bin", str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {"CUDA_HOME": home, "LIBRARY_PATH": str(folder), "PATH": os.pathsep.join(programs)}


def baked(site: Path, environment: dict[str, str], target: str, folder: Path) -> tuple[str, ...]:
    """Compile flashinfer's fused all-reduce by the step of a build that does it; empty where that fails."""
    script = Path(precompile.__file__)
    command = [
        sys.executable,
        str(script),
        "--site-packages",
        str(site),
        "--work",
        str(folder),
        "--module",
        MODULE,
        target,
    ]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **environment, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=COMPILE_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{MODULE}: not compiled after {COMPILE_LIMIT:.0f} s", flush=True)
        return ()
    said = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip().splitlines()
    print(f"{MODULE}: exit status {done.returncode} after {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(said[-30:] if done.returncode else said[-1:]), flush=True)
    return (MODULE,) if done.returncode == 0 else ()


def opened(workspace: Workspace, files: Sequence[str]) -> dict[str, Any]:
    """Each shared object opened by itself, in a fork of a process that has imported torch: the smoke test's own way."""
    site = workspace.tree.site_packages
    command = workspace.python_command("load_child.py", str(site), LOADED_FIRST, str(FILE_LIMIT))
    jobs = "".join(json.dumps({"path": str(site / file), "first": []}) + "\n" for file in files)
    outcome = workspace.run(command, timeout=FILE_LIMIT * 2, stdin=jobs)
    found: dict[str, Any] = {}
    for text in outcome.out.splitlines():
        answer = json.loads(text)
        file = next(file for file in files if answer["path"].endswith(file))
        found[file] = {"code": answer["code"], "error": answer["error"], "seconds": round(answer["seconds"], 2)}
    for file in files:
        found.setdefault(file, {"code": 1, "error": f"the process {outcome.ended}: {outcome.tail()}", "seconds": 0})
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Everything, in one report."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_kernels", description=__doc__)
    parser.add_argument(
        "--carry", type=Path, required=True, help="what `python -m tests.gpu_kernels.prepare` has written"
    )
    parser.add_argument("--out", type=Path, required=True, help="where report.json and report.txt go")
    parser.add_argument("--site", type=Path, help="where the package is unpacked, and looked for before it is")
    parser.add_argument("--compile", action="store_true", help="flashinfer's modules, too: nvcc and ninja are there")
    parser.add_argument("--only", action="append", default=[], help="only these checks; may be given again")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    plan = json.loads((given.carry / "kernels-plan/predicted.json").read_text(encoding="utf-8"))
    given.out.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if given.site is None else None
    try:
        # An environment of the usual shape: the smoke test takes Python from there, if there is one.
        root = given.site or Path(scratch.name if scratch else "")
        site = root.resolve() / "env/lib/python3/site-packages"
        if not (site / "sgl_kernel").is_dir():
            try:
                unpack(sorted(given.carry.glob("kernels-[0-9]*")), site)
            except CarryError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
        print(f"unpacked after {time.monotonic() - began:.0f} s", flush=True)
        record = recorded(site)
        print(f"RECORD: {record['files']} files, {len(record['wrong'])} differ", flush=True)
        with Workspace(Tree.read(site)) as workspace:
            files = [row["file"] for row in plan["extensions"]]
            loads = opened(workspace, files)
            for file, answer in loads.items():
                print(f"opened {file}: {answer['code']} {answer['error']} {answer['seconds']} s", flush=True)
            cases = [case for case in CASES if not given.only or case.name in given.only]
            place = workspace.root / "compile"
            place.mkdir()
            environment = compiler(place / "lib")
            done: tuple[str, ...] = ()
            if given.compile and (site / "flashinfer").is_dir():
                done = baked(site, environment, f"{plan['capability']}a", place / "work")
            told = Given("nvcc" if given.compile else "none", done, environment)
            report = look(workspace, told, lambda text: print(text, flush=True), cases=cases)
    finally:
        if scratch is not None:
            scratch.cleanup()
    rows = compared(plan, loads, report)
    data = {
        "predicted": plan,
        "record": record,
        "loads": loads,
        "extensions": rows,
        "python": platform.python_version(),
        "gpu": report,
        "seconds": round(time.monotonic() - began, 1),
    }
    (given.out / "report.json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = as_text(data)
    (given.out / "report.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    good = not record["wrong"] and all(row["as_predicted"] for row in rows) and summed(report["checks"])["ok"]
    return 0 if good else 3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
