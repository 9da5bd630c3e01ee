"""`python -m tests.gpu_kernels.prepare FOLDER` writes what travels to the GPU, and what is predicted of it.

FOLDER gets `kernels-01`, `kernels-02`, …: the wheel's files in pieces that one call can carry, the whole of which is
checked against the wheel's RECORD there; and `kernels-plan`: what was predicted, and the part of this project that runs there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from builder import arch, settings
from builder.abi.report import as_json as abi_json
from builder.abi.verb import ask
from builder.archreport import as_json as arch_json
from builder.archverb import asked, look
from builder.fetch import fetch_artefact
from builder.lock import read_lock
from tests.gpu.prepare import PLATFORMS
from tests.gpu_kernels.carry import pack

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "matrices/cu130-next.lock.json"
PACKAGE, TORCH = "sglang-kernel", "2.11.0"
"""torch: the GPU machine's, and the lock's."""
BESIDE = "flashinfer-python"
"""As the lock has it, not patched; with apache-tvm-ffi, of which it takes another file for that Python."""
CAPABILITY, DRIVER, PYTHON, BASE = "9.0", "580.159.04", "3.12", "noble"
MOST = 60_000_000
"""Bytes of a piece: one call carries 64 MiB, the working tree included."""
CODE = (
    "builder/__init__.py",
    "builder/arch.py",
    "builder/elf.py",
    "builder/elf_hash.py",
    "builder/elf_image.py",
    "builder/fatbin.py",
    "tests/__init__.py",
    "tests/gpu_kernels/__init__.py",
    "tests/gpu_kernels/__main__.py",
    "tests/gpu_kernels/carry.py",
    "tests/gpu_kernels/faults.py",
    "tests/gpu_kernels/report.py",
)


def predicted(wheel: Path, version: str) -> dict[str, Any]:
    """What `builder arch` and `builder abi` say of the wheel, for that GPU and that torch: no GPU, no import."""
    site = settings.load()
    on_gpu = arch_json(look([str(wheel)], asked([CAPABILITY], DRIVER, None), site))
    linked = abi_json(ask([f"{PACKAGE}=={version}", f"torch=={TORCH}"], site, python=PYTHON, base=BASE, find=None))
    links = {row["file"]: row for row in linked["extensions"]}
    rows = []
    for row in on_gpu["files"]:
        link = links.get(row["file"], {})
        there = row["gpus"][arch.dotted(arch.pair(CAPABILITY))]
        rows.append(
            {
                "file": row["file"],
                "images": row["images"] + row["ptx"],
                "covered": there["covered"],
                "of": there["of"],
                "by": there["by"],
                "loaded": there["loaded"],
                "links": link.get("verdict", "unknown"),
                "missing": [item["symbol"] for item in link.get("missing_symbols", [])]
                + link.get("missing_libraries", []),
            }
        )
    return {
        "package": PACKAGE,
        "version": version,
        "wheel": wheel.name,
        "capability": CAPABILITY,
        "driver": DRIVER,
        "torch": TORCH,
        "python": PYTHON,
        "base": BASE,
        "extensions": rows,
    }


def _tvm_ffi(folder: Path, version: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*command, f"apache-tvm-ffi=={version}"], check=True)
    (found,) = folder.glob("apache_tvm_ffi-*.whl")
    return found


def prepare(folder: Path) -> list[Path]:
    """Write everything into ``folder``; what was there of an earlier run is replaced. The folders that are to be carried."""
    locked = {item.name: item for item in read_lock(LOCK).artefacts}
    artefact = locked[PACKAGE]
    wheel = fetch_artefact(artefact, settings.load())
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kernels-*"):
        shutil.rmtree(old)
    plan = folder / "kernels-plan"
    plan.mkdir()
    data = predicted(wheel, artefact.version)
    (plan / "predicted.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    smoke = (path.relative_to(ROOT).as_posix() for path in (ROOT / "builder/smoke").glob("*.py"))
    for name in (*CODE, *smoke):
        target = plan / "code" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, tempfile.TemporaryDirectory() as fetched:
        beside = fetch_artefact(locked[BESIDE], settings.load())
        for path in (wheel, beside, _tvm_ffi(Path(fetched), locked["apache-tvm-ffi"].version)):
            with zipfile.ZipFile(path) as archive:
                archive.extractall(scratch)
        return [plan, *pack(Path(scratch), folder, "kernels", MOST)]


def main(arguments: list[str]) -> int:
    """Prepare one folder, and say what is to be carried."""
    (folder,) = map(Path, arguments)
    for place in prepare(folder):
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        print(f"{place}: {size / 1e6:.1f} MB")
    for row in json.loads((folder / "kernels-plan/predicted.json").read_text(encoding="utf-8"))["extensions"]:
        runs = f"{row['covered']} of {row['of']} containers for {CAPABILITY}"
        print(f"{row['file']}: links {row['links']}; {runs}; {'loaded' if row['loaded'] else 'not loaded'} there")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
