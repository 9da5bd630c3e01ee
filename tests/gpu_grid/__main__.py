"""Build the grid with nvcc, load each case, compare with the rules; exit status 1 where a case differs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from builder import arch
from builder.arch import Answer
from tests.gpu_grid.cases import SOURCE, Built, Case, grid, newest_ptx
from tests.gpu_grid.driver import NO_BINARY, UNSUPPORTED_PTX, Driver

NVCC = ("nvcc", "/usr/local/cuda/bin/nvcc")
SUFFIXES = ("", "a", "f")


def main() -> int:
    """Run the grid."""
    arguments = argparse.ArgumentParser(prog="python -m tests.gpu_grid", description=__doc__)
    arguments.add_argument("--out", type=Path, required=True, help="the folder for grid.json")
    out: Path = arguments.parse_args().out
    nvcc = next((found for name in NVCC if (found := shutil.which(name))), None)
    if nvcc is None:
        print("no nvcc", file=sys.stderr)
        return 2
    driver = Driver()
    isa = newest_ptx(driver.cuda)
    with tempfile.TemporaryDirectory() as folder:
        built, texts, lacking = build(nvcc, Path(folder))
    cases: list[dict[str, Any]] = []
    observed: list[dict[str, Any]] = []
    for case in grid(built, texts, isa):
        (observed if case.artificial else cases).append(run(driver, case, isa))
    differ = [case for case in cases if not case["ok"]]
    data = {
        "capability": arch.dotted(driver.capability),
        "device": driver.name,
        "driver": driver_version(),
        "cuda": arch.dotted(driver.cuda),
        "newest_ptx": arch.dotted(isa),
        "nvcc": version_of(nvcc),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),  # noqa: UP017 - of Python 3.11
        "cases": cases,
        "observed": observed,
        "not_built": lacking,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "grid.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    for one in [*cases, *observed]:
        sign = "ok  " if one["ok"] else "DIFF" if one in cases else "note"
        print(f"{sign} {one['case']}: {one['got']}, {one['ran']} (predicted: {one['predicted']}, {one['will_run']})")
    print(f"{len(cases)} cases, {len(differ)} differ; {len(observed)} noted; not built: {', '.join(lacking) or 'none'}")
    print(
        f"{driver.name}, capability {data['capability']}, driver {data['driver']}, CUDA {data['cuda']}, {data['nvcc']}"
    )
    return 1 if differ or not cases else 0


class Loads(Protocol):
    """What is asked of a driver: `tests.gpu_grid.driver.Driver`."""

    capability: arch.Pair

    def answer(self, data: bytes) -> tuple[int, int | None]:
        """The code of the first error, and what the kernel wrote."""

    def error(self, code: int) -> str:
        """The name of an error."""


def run(driver: Loads, case: Case, isa: arch.Pair) -> dict[str, Any]:
    """What the driver did with a case, and whether the rules say so."""
    code, token = driver.answer(case.data)
    words = {0: Answer.RUNS.value, NO_BINARY: Answer.OTHER_DEVICE.value, UNSUPPORTED_PTX: Answer.NEWER_PTX.value}
    got = words.get(code, f"error {code} {driver.error(code)}")
    ran = None
    if code == 0:
        ran = case.tokens.get(token if token is not None else -1, f"a kernel that wrote {token}")
    predicted, will_run = case.predicted(driver.capability, isa)
    return {
        "case": case.name,
        "images": [{"name": image.name, "isa": arch.dotted(image.isa) if image.isa else None} for image in case.images],
        "predicted": predicted,
        "will_run": will_run,
        "got": got,
        "ran": ran,
        "code": code,
        "ok": (got, ran) == (predicted, will_run),
    }


def build(nvcc: str, folder: Path) -> tuple[list[Built], dict[str, tuple[int, bytes]], list[str]]:
    """Every image that this nvcc makes, the PTX of some as text, and what it would not make."""
    (folder / "answer.cu").write_text(SOURCE, encoding="utf-8")
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    numbers = sorted({int(found) for found in re.findall(r"sm_([0-9]+)", listed)})
    names = [f"{kind}_{number}{suffix}" for kind in ("sm", "compute") for number in numbers for suffix in SUFFIXES]

    def one(item: tuple[int, str]) -> Built | None:
        token, name = item
        target = name.split("_")[1]
        file = folder / f"{name}.fatbin"
        code = ["-fatbin", f"-gencode=arch=compute_{target},code={name}"]
        return Built(name, token, file.read_bytes()) if compiled(nvcc, folder, token, code, file) else None

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(one, enumerate(names, 1000)))
    texts = {}
    for token, target in enumerate(("80", "90"), 2000):
        file = folder / f"{target}.ptx"
        if compiled(nvcc, folder, token, ["-ptx", f"-arch=compute_{target}"], file):
            texts[target] = (token, file.read_bytes())
    # There is no `a` before 9.0 and no `f` before 10.0; only what the list has has to be there.
    lacking = [name for name, made in zip(names, found) if made is None and name[-1].isdigit()]  # noqa: B905 - 3.9
    return [made for made in found if made is not None], texts, lacking


def compiled(nvcc: str, folder: Path, token: int, options: list[str], file: Path) -> bool:
    """Whether nvcc compiled it. Stored as it is where nvcc can: PTX that is packed cannot be given another version."""
    for more in (["--no-compress"], []):
        argv = [nvcc, *options, *more, f"-DTOKEN={token}", str(folder / "answer.cu"), "-o", str(file)]
        if subprocess.run(argv, capture_output=True, check=False).returncode == 0:
            return True
    return False


def driver_version() -> str:
    """The driver's version, as the kernel module says it."""
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def version_of(nvcc: str) -> str:
    """`nvcc 13.0.88`."""
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V([0-9.]+)", said)
    return f"nvcc {found[1] if found else 'of an unknown version'}"


if __name__ == "__main__":
    sys.exit(main())
