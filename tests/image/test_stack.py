"""The default matrix, whole and for real: `make image`, and what it promises. The one full build of a run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder.build import build_image, prepare
from builder.engine import Buildx, Engine, Image
from builder.errors import BuildError
from builder.layers import COMPILED, ORDER
from builder.lock import Lock, lock_path, write_lock
from builder.locking import resolve_lock
from builder.matrix import Patches, Sm120, load
from builder.settings import Settings
from tests.image.stacks import MATRIX, ROOT, edited, relocked

pytestmark = [pytest.mark.image, pytest.mark.full]

Docker = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say something in the run's own output: what was built, how long it took. No test asserts a time."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n{text}", flush=True)

    return say


@pytest.fixture(scope="module")
def made(engine: Engine, tell: Callable[[str], None]) -> subprocess.CompletedProcess[str]:
    """`make image`, as a user types it."""
    start = time.monotonic()
    done = subprocess.run(["make", "image"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    tell("\n".join(line for line in done.stderr.splitlines() if not line.startswith(" ")))
    tell(done.stdout)
    tell(f"make image: {time.monotonic() - start:.0f} s")
    return done


@pytest.fixture(scope="module")
def image(made: subprocess.CompletedProcess[str], engine: Engine) -> Image:
    found = engine.find(f"sglang-stack:{MATRIX}")
    assert found is not None
    return found


def test_the_summary_says_what_was_made_and_checked(
    made: subprocess.CompletedProcess[str], reference_lock: Lock
) -> None:
    for part in (f"sglang-stack:{MATRIX}", reference_lock.digest[:12], "torch and CUDA libraries", "proof", "run it:"):
        assert part in made.stdout
    assert re.search(r"smoke test: \d+ checks, all passed, without a GPU", made.stdout)


def test_versions_and_user_in_the_image(image: Image, docker: Docker) -> None:
    script = (
        "import importlib.metadata as m, os; print(os.getuid(), *(m.version(n) for n in "
        "('torch', 'flashinfer-python', 'flashinfer-cubin', 'sglang-kernel', 'sglang')))"
    )
    said = docker("run", "--rm", "--network", "none", image.id, "python3", "-c", script).stdout
    assert said == "10001 2.11.0 0.6.12+sm120.fusion 0.6.12 0.4.4 0.5.15.post1+sm120.symm.fusion\n"


def test_the_patches_are_in_the_image_with_their_diff(image: Image, engine: Engine) -> None:
    reports = json.loads(engine.read_file(image.id, "/opt/sglang-stack/patches.json"))
    states = {(site["id"], site["before"], site["after"]) for report in reports for site in report["sites"]}
    needed = "S1 S3 D1 S4b S4 S5 S7 S8 S8b S8c S9 E5b E5c E5d E5e E5f E5i F1 F5"
    native, absent = "S2 S6 S4c E5 E1 E2 E3 E4", "S4d E5g E5h"
    expected = {(site, "needed", "native") for site in needed.split()}
    expected |= {(site, "native", "native") for site in native.split()}
    assert states == expected | {(site, "absent", "absent") for site in absent.split()}
    for report in reports:
        for site in report["sites"]:
            assert site["without"] and site["risk"] and site["upstream"] and site["source"], site["id"]
            opted = site["set"] in ("sm120-symm", "sm120-fusion")
            assert (site["waits_for"] is not None) <= opted, site["id"]
    diff = engine.read_file(image.id, "/opt/sglang-stack/patches.diff").decode()
    assert diff.count("\n+++ b/") == 14
    assert "+        supported_major_versions=[9, 10, 12]" in diff


def test_the_proof_looked_at_everything(image: Image, engine: Engine) -> None:
    proof = json.loads(engine.read_file(image.id, "/opt/sglang-stack/smoke.json"))
    assert proof["ok"] is True
    for check in proof["checks"]:
        assert check["ok"], check
        assert check["expected"] is None or check["looked_at"] == check["expected"], check
    patches, behaviour, baked = (
        next(check for check in proof["checks"] if check["name"] == name) for name in ("patches", "behaviour", "baked")
    )
    assert behaviour["looked_at"] == 18 and behaviour["detail"].startswith("95 comparisons for F1 S1 S2 S3 D1 S4b S4")
    assert "kernels for sm_120a 1,089 and 480 stubs, sm_90a 1,569" in baked["detail"]
    assert patches["detail"] == (
        "flashinfer-python 0.6.12+sm120.fusion, sglang 0.5.15.post1+sm120.symm.fusion patched, 9 sites native"
    )
    looked = {check["name"]: check["looked_at"] for check in proof["checks"] if check.get("part") == "native"}
    assert looked["load"] > 500 and looked["record"] > 70_000 and looked["symbols"] > 100_000


def test_nothing_changed_takes_no_network(image: Image, tell: Callable[[str], None]) -> None:
    unshare = shutil.which("unshare")
    assert unshare is not None
    start = time.monotonic()
    done = subprocess.run([unshare, "-n", "make", "image"], cwd=ROOT, capture_output=True, text=True, check=False)
    tell(f"make image with nothing changed, without network: {time.monotonic() - start:.2f} s")
    assert done.returncode == 0, done.stderr
    assert "nothing changed" in done.stdout


def test_smoke_again_under_an_arbitrary_user(image: Image) -> None:
    argv = [str(ROOT / ".venv/bin/builder"), "smoke", f"sglang-stack:{MATRIX}", "--user", "12345:54321", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout)
    assert report["ok"] is True and report["image"] == image.id


@pytest.fixture(scope="module")
def other_patch_level(
    image: Image, tmp_path_factory: pytest.TempPathFactory, settings: Settings, reference_lock: Lock
) -> Path:
    """The same stack with another patch level of sglang, locked."""
    path = tmp_path_factory.mktemp("other") / "other-patch.yaml"
    text = (ROOT / "matrices" / f"{MATRIX}.yaml").read_text(encoding="utf-8")
    path.write_text(text.replace("sglang: 0.5.15.post1", "sglang: 0.5.15"), encoding="utf-8")
    write_lock(resolve_lock(load(path), settings, reference_lock.base), lock_path(path))
    return path


def test_another_sglang_changes_the_layers_above_and_no_other(
    image: Image,
    other_patch_level: Path,
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    tell: Callable[[str], None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    other = build_image(prepare(other_patch_level), engine, buildx, settings)
    tell("".join(line for line in capfd.readouterr().err.splitlines(keepends=True) if not line.startswith(" ")))
    tell(f"another patch level of sglang: {time.monotonic() - start:.0f} s, the smoke test's part included")
    same = [a == b for a, b in zip(image.diff_ids, other.diff_ids, strict=True)]
    below = len(same) - 2
    assert same == [True] * below + [False, False], "sglang and the proof differ, nothing below"


def test_a_kernel_wheel_of_another_torch(
    image: Image, tmp_path: Path, engine: Engine, buildx: Buildx, settings: Settings, reference_lock: Lock
) -> None:
    path = tmp_path / "other-kernel.yaml"
    path.write_text(_KERNEL_ONLY, encoding="utf-8")
    kernel = resolve_lock(load(path), settings, reference_lock.base).by_name["sglang-kernel"]
    prepared = prepare(ROOT / "matrices" / f"{MATRIX}.yaml")
    # Without the compiled layer, which another kernel wheel below it would have compiled once more: minutes for nothing.
    matrix = prepared.loaded.matrix.model_copy(update={"patches": Patches(sm120=Sm120())})
    prepared = edited(prepared, loaded=replace(prepared.loaded, matrix=matrix))
    artefacts = tuple(kernel if a.name == "sglang-kernel" else a for a in prepared.lock.artefacts)
    with pytest.raises(BuildError) as caught:
        build_image(
            relocked(prepared, prepared.lock.model_copy(update={"artefacts": artefacts})), engine, buildx, settings
        )
    said = str(caught.value)
    assert "sglang-kernel 0.4.6.post1" in said or "sglang_kernel 0.4.6.post1" in said
    assert "built for another torch" in said
    assert "torch 2.11.0" in said
    still = engine.find(f"sglang-stack:{MATRIX}")
    assert still is not None and still.id == image.id, "the last good image keeps its name"


_KERNEL_ONLY = """\
summary: A kernel wheel that was built for torch 2.13
as_of: 2026-11-01
platform: linux/amd64
python: "3.11"
base: {kind: archive, distribution: debian, release: bookworm}
cuda: {version: 13.0.2, jit: none}
gpus: ["9.0"]
stack: {torch: 2.13.0, sglang-kernel: 0.4.6.post1}
budget: {image: 20 GB}
"""


def test_order_is_the_documented_one(image: Image, engine: Engine) -> None:
    made_by = [layer.created_by for layer in engine.layers(image.id)]
    names = [*ORDER[:-1], COMPILED, ORDER[-1]]
    found = [name for step in made_by for name in names if f"layer={name};" in step]
    assert found == names


def test_the_compiled_module_is_loaded_by_anybody_with_nothing_to_write_to(image: Image, docker: Docker) -> None:
    script = (
        "import os, sys, tempfile; os.environ['PATH'] = '/nowhere'; import flashinfer.jit.comm as comm; "
        "module = comm.gen_trtllm_comm_module(); print(module.is_aot, os.getuid()); "
        "print(module.build_and_load() is not None)"
    )
    said = docker(
        *("run", "--rm", "--network", "none", "--user", "54321:12345", "--read-only", "--tmpfs", "/tmp"),
        *("--env", "FLASHINFER_WORKSPACE_BASE=/tmp", "--env", "FLASHINFER_CUDA_ARCH_LIST=12.0a"),
        *("--env", "HOME=/tmp", image.id, "python3", "-c", script),
    ).stdout
    assert said.splitlines()[-2:] == ["True 54321", "True"]
