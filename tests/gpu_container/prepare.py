"""`python -m tests.gpu_container.prepare FOLDER` writes what travels to the GPU: `engine-NN` and `image-plan`, beside `kernels-NN`.

`kernels-NN` and `kernels-plan` are `tests.gpu_kernels.prepare`'s (kept if they are there); `engine-NN` is Docker's engine out of
`.tools` (`make engine`) with what the builder imports, in pieces that one call can carry; `image-plan` is the smoke
test of an image of `cu130-next`, with a spec of the stand-in's own, and its labels.

With `--bundle FILE --pub FILE` there is no stand-in for the image: `bundle-NN` are what `builder bundle` wrote, in pieces, beside the
key that signed it, and `engine-NN` has cosign, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from builder import bootstrap
from builder.labels import LABEL, STAND_IN_LABEL
from builder.lock import read_lock
from builder.matrix import load
from builder.render import image_labels, render
from tests.gpu.prepare import PYTHON
from tests.gpu_container import CUDA_HOME, KERNELS
from tests.gpu_kernels import prepare as kernels
from tests.gpu_kernels.carry import cut, pack

ROOT = Path(__file__).resolve().parents[2]
MATRIX = ROOT / "matrices/cu130-next.yaml"
PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc", "docker")
STAND_IN = "torch, CUDA and the system, which are those of the machine it was made on"


def engine(folder: Path, python: str, more: Sequence[str] = ()) -> None:
    """The engine's programs with ``more`` of them, and the packages that the builder imports, for that Python."""
    programs = folder / "tools/root/usr/bin"
    programs.mkdir(parents=True)
    for name in (*PROGRAMS, *more):
        if (found := bootstrap.find_program(name)) is None:
            raise SystemExit(f"error: there is no `{name}`: `make tools engine ENGINE=own` unpacks it")
        shutil.copy(found, programs / name)
    packages = folder / "packages"
    command = [
        find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--target",
        str(packages),
    ]
    command += ["--python-platform=x86_64-manylinux_2_28", f"--python-version={python}"]
    subprocess.run([*command, "--requirements", str(ROOT / "requirements/run.txt")], check=True)
    # Nothing is locked there: uv's program would be half of the bytes.
    shutil.rmtree(packages / "bin", ignore_errors=True)


def image_plan(folder: Path) -> None:
    """What `/opt/sglang-stack` holds, and the labels: of cu130-next's image, said to be a stand-in."""
    matrix, lock = load(MATRIX).matrix, read_lock(MATRIX.with_suffix(".lock.json"))
    rendered = render(matrix, lock, Path(find_uv_bin()))
    place = folder / "opt/sglang-stack"
    for name, data in rendered.context.items():
        rest = name.partition("/")[2]
        # Not the lock: the image is not made of it.
        if name.startswith("smoke/builder/") or name == "proof/spec.json":
            target = place / rest
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
    spec = json.loads((place / "spec.json").read_text(encoding="utf-8"))
    spec.update(matrix="gpu-container", lock="stand-in", site_packages=KERNELS, compiled=[])
    spec["cuda"]["home"] = CUDA_HOME
    (place / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    labels = {**image_labels(rendered.plan), LABEL: "image", STAND_IN_LABEL: STAND_IN}
    labels |= {f"{LABEL}.matrix": spec["matrix"], f"{LABEL}.lock": spec["lock"]}
    (folder / "labels.json").write_text(json.dumps(labels, indent=1), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Write everything, and say what is to be carried."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_container.prepare", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default=PYTHON, help="the Python of that machine (%(default)s)")
    parser.add_argument("--without-kernels", action="store_true", help="the engine and the image's own files alone")
    parser.add_argument("--bundle", type=Path, help="a real image: what `builder bundle` wrote; needs --pub")
    parser.add_argument("--pub", type=Path, help="the public key of the bundle's signature")
    given = parser.parse_args(arguments)
    if (given.bundle is None) != (given.pub is None):
        parser.error("--bundle and --pub go together")
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("engine-*"), *folder.glob("image-plan"), *folder.glob("bundle-*")):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        engine(Path(scratch), given.python, ["cosign"] if given.bundle else [])
        if given.bundle:
            shutil.copyfile(given.pub, Path(scratch) / "cosign.pub")
        pack(Path(scratch), folder, "engine", kernels.MOST)
    if given.bundle:
        cut(given.bundle, folder, "bundle", kernels.MOST)
    else:
        if not given.without_kernels and not (folder / "kernels-plan").is_dir():
            kernels.prepare(folder)
        image_plan(folder / "image-plan")
    for place in sorted(path for path in folder.iterdir() if path.is_dir()):
        size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        print(f"{place}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
