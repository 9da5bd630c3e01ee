"""`python -m tests.gpu.prepare FOLDER` writes what travels to the GPUs: sources that the product's own engine has patched.

The wheels are those of the matrices' locks, by their sha256; beside each patched file lies upstream's, for comparison.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from builder import settings
from builder.fetch import fetch_artefact
from builder.files import sha256_hex
from builder.lock import Artefact, read_lock
from builder.matrix import Patches, Sm120
from builder.patches.apply import PatchResult, inspect_wheel
from builder.wheel import read_wheel
from tests.gpu.scenarios import FLASHINFER, LEGACY, NEXT
from tests.gpu.standins import PATCHED, UPSTREAM

MATRICES = Path(__file__).resolve().parents[2] / "matrices"
SYMM_FILES = (
    "distributed/device_communicators/all_reduce_utils.py",
    "distributed/device_communicators/torch_symm_mem.py",
    "distributed/parallel_state.py",
)
FUSION_FILES = (
    "layers/communicator.py",
    "layers/flashinfer_comm_fusion.py",
    "layers/layernorm.py",
    "layers/utils/multi_platform.py",
    "models/deepseek_v2.py",
    "utils/common.py",
    "utils/custom_op.py",
)
PYTHON, PLATFORMS = "3.12", ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64")
"""The GPU machine's."""
BOTH = Patches(sm120=Sm120(symm_mem="opt-in", allreduce_fusion="opt-in"))


def _locked(matrix: str, name: str) -> Artefact:
    (found,) = [item for item in read_lock(MATRICES / f"{matrix}.lock.json").artefacts if item.name == name]
    return found


def _wheel(matrix: str, name: str, version: str) -> Path:
    artefact = _locked(matrix, name)
    assert artefact.version == version, (
        f"{matrix} has {name} {artefact.version}; the scenarios are written for {version}"
    )
    return fetch_artefact(artefact, settings.load())


def _sglang(folder: Path, path: Path, version: str, files: tuple[str, ...]) -> PatchResult:
    wheel = read_wheel(path)
    result = inspect_wheel(wheel, BOTH, MATRICES)
    changed = {change.file: change.after for change in result.files}
    for file in (f"sglang/srt/{name}" for name in files):
        before = wheel.read(file)
        for kind, data in ((UPSTREAM, before), (PATCHED, changed.get(file, before))):
            target = folder / f"sglang-{version}" / kind / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    return result


def _flashinfer(folder: Path, path: Path) -> PatchResult:
    """The whole package, patched, compressed: the product's own wheel is stored without, and too large to travel."""
    wheel = read_wheel(path)
    result = inspect_wheel(wheel, BOTH, MATRICES)
    changed = {change.file: change.after for change in result.files}
    names = [name for name in wheel.entries if name.startswith("flashinfer")]
    with zipfile.ZipFile(folder / f"flashinfer-{FLASHINFER}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for start in range(0, len(names), 500):
            for name, data in wheel.read_all(names[start : start + 500]).items():
                archive.writestr(name, changed.get(name, data))
    return result


def _tvm_ffi(folder: Path) -> str:
    version = _locked("cu130", "apache-tvm-ffi").version
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*command, f"apache-tvm-ffi=={version}"], check=True)
    return version


def _row(result: PatchResult) -> dict[str, Any]:
    return {
        "file": result.wheel.path.name,
        "local": result.local,
        "sites": {item.site.id: f"{item.before} → {item.after}" for item in result.sites},
        "files": {
            change.file: [sha256_hex(change.before), sha256_hex(change.after)]
            for change in result.files
            if change.before != change.after
        },
    }


def prepare(folder: Path) -> dict[str, Any]:
    """Write everything into a folder that is not there yet, or was made by this. Returns the manifest."""
    if folder.exists() and not (folder / "manifest.json").exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} holds other things")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    manifest: dict[str, Any] = {
        f"sglang {LEGACY}": _row(
            _sglang(folder, _wheel("cu130", "sglang", LEGACY), LEGACY, (*SYMM_FILES, *FUSION_FILES))
        ),
        f"sglang {NEXT}": _row(_sglang(folder, _wheel("cu130-next", "sglang", NEXT), NEXT, SYMM_FILES)),
        f"flashinfer {FLASHINFER}": _row(_flashinfer(folder, _wheel("cu130", "flashinfer-python", FLASHINFER))),
        "apache-tvm-ffi": _tvm_ffi(folder),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, ensure_ascii=False), encoding="utf-8")
    return manifest


def main(arguments: list[str]) -> int:
    """Prepare one folder, and say what it weighs."""
    (folder,) = map(Path, arguments)
    manifest = prepare(folder)
    for name, row in manifest.items():
        print(f"{name}: {', '.join(row['sites']) if isinstance(row, dict) else row}")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 1e6:.1f} MB in {folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
