"""Bug reports → the image that shows the bug, or the step of the build that refuses it in the reporter's words.

The reports are in `reports/`, made after public ones. Their stacks have the torch layer of the default matrix, which is then
built once for all. No GPU is needed for any of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builder import differences
from builder.build import FindingsError, build_image, prepare
from builder.engine import Buildx, Engine, Image
from builder.errors import BuildError, UsageError
from builder.fetch import fetch_artefact
from builder.files import sha256_hex
from builder.lock import Lock, lock_path, read_lock, write_lock
from builder.locking import resolve_lock
from builder.matrix import load
from builder.repro.live import Origin, look, origin
from builder.repro.verb import Answer, read_report, repro
from builder.settings import Settings
from tests.image.stacks import ROOT, SMALL
from tests.loopback import wheel

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]
REPORTS = Path(__file__).parent / "reports"


@pytest.fixture(scope="module")
def reproduced(
    tmp_path_factory: pytest.TempPathFactory, settings: Settings, reference_lock: Lock
) -> Callable[[str], Answer]:
    """A report's answer, with its matrix written and locked, on the base of the checked-in lock."""

    def make(name: str) -> Answer:
        folder = tmp_path_factory.mktemp("matrices")
        answer = repro(read_report(str(REPORTS / f"{name}.txt")), settings, folder, name=f"r-{name}", static=False)
        assert answer.written is not None
        _lock(answer.written, settings, reference_lock)
        return answer

    return make


def _lock(path: Path, settings: Settings, reference: Lock) -> None:
    write_lock(resolve_lock(load(path), settings, reference.base), lock_path(path))


def _torch_layer(lock: Lock) -> dict[str, str]:
    return {each.name: each.sha256 for each in lock.artefacts if each.layer == "torch"}


def test_a_package_of_another_cuda(
    reproduced: Callable[[str], Answer], engine: Engine, buildx: Buildx, settings: Settings, reference_lock: Lock
) -> None:
    answer = reproduced("libnvrtc")
    path = answer.written
    assert path is not None
    assert _torch_layer(read_lock(lock_path(path))) == _torch_layer(reference_lock), (
        "its torch layer is built for it alone"
    )
    by_kind = {each.symptom.kind: [answer.prediction.findings[n].rule for n in each.findings] for each in answer.why}
    assert by_kind["missing-library"] == ["kernel-cuda"]
    # The rules refuse it before anything is built; past them, the loader does.
    with pytest.raises(FindingsError) as refused:
        prepare(path)
    assert "sgl-kernel 0.3.21 is linked to CUDA 12, the image has CUDA 13.0.2" in str(refused.value)
    with pytest.raises(BuildError) as caught:
        build_image(prepare(path, rules={}), engine, buildx, settings)
    assert "libnvrtc.so.12: cannot open shared object file" in str(caught.value)
    assert engine.find("sglang-stack:r-libnvrtc") is None


@pytest.fixture(scope="module")
def kernels(
    reproduced: Callable[[str], Answer], engine: Engine, buildx: Buildx, settings: Settings
) -> tuple[Path, Image]:
    """The matrix of the report `kernels`, and the image that shows it."""
    path = reproduced("kernels").written
    assert path is not None
    return path, build_image(prepare(path), engine, buildx, settings)


def test_a_torchvision_of_another_torch(
    kernels: tuple[Path, Image],
    reproduced: Callable[[str], Answer],
    settings: Settings,
    docker: Docker,
    tmp_path: Path,
) -> None:
    answer = reproduced("nms")
    assert answer.written is not None
    by_kind = {each.symptom.kind: [answer.prediction.findings[n].rule for n in each.findings] for each in answer.why}
    assert by_kind["missing-operator"] == ["conflict-undeclared"]
    wanted = read_lock(lock_path(answer.written)).by_name
    path, image = kernels
    here = read_lock(lock_path(path)).by_name
    assert wanted["torch"].sha256 == here["torch"].sha256
    # An image of this lock is refused, and would be five gigabytes of its own: torchvision lies in torch's layer. The
    # locked wheel is laid over the other report's image, which has the same torch.
    with zipfile.ZipFile(fetch_artefact(wanted["torchvision"], settings)) as archive:
        archive.extractall(tmp_path / "over")
    words = ("run", "--rm", "--network", "none")
    over = ("--volume", f"{tmp_path / 'over'}:/mnt/over:ro", "--env", "PYTHONPATH=/mnt/over")
    command = ("python3", "-c", "import torchvision; print(torchvision.__version__)")
    done = docker(*words, *over, image.id, *command, check=False)
    assert done.stderr.splitlines()[-1] == "RuntimeError: operator torchvision::nms does not exist"
    # What the hint asks for, a release that fits, is in the image.
    assert docker(*words, image.id, *command).stdout.partition("+")[0].strip() == here["torchvision"].version


def test_a_helper_that_is_too_new_and_the_hint_that_helps(
    kernels: tuple[Path, Image],
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    docker: Docker,
    reference_lock: Lock,
) -> None:
    path, image = kernels
    words = ("run", "--rm", "--network", "none")
    command = ("python3", "-c", "import transformers.modeling_utils")
    done = docker(*words, image.id, *command, check=False)
    assert done.stderr.splitlines()[-1] == "ValueError: Either a revision or a version must be specified."
    path.write_text(path.read_text().replace("kernels==0.15.2", "kernels==0.14.1"))
    _lock(path, settings, reference_lock)
    fixed = build_image(prepare(path), engine, buildx, settings)
    assert docker(*words, fixed.id, *command).returncode == 0


@pytest.fixture
def container(built_small: Image, docker: Docker) -> Iterator[str]:
    """A running container of the small image."""
    name = docker("run", "--detach", "--network", "none", built_small.id, "sleep", "600").stdout.strip()
    yield name
    docker("rm", "--force", name)


def test_what_runs_gives_back_the_matrix_that_it_was_built_from(
    built_small: Image, small: Path, container: str, docker: Docker
) -> None:
    lock = read_lock(lock_path(small))
    for target in (built_small.id, container):
        live = look(target)
        assert origin(live, small.parent) == Origin("small", lock.digest, len(lock.artefacts), ())
        assert f"sglang-stack lock: {lock.digest}\n" in live.text
    docker(
        "exec",
        "--user",
        "0:0",
        container,
        "rm",
        "-r",
        "/opt/venv/lib/python3.11/site-packages/packaging-26.2.dist-info",
    )
    changed = origin(look(container), small.parent)
    assert changed is not None and changed.differs == ("packaging: locked 26.2, installed none",)


def test_what_cannot_be_looked_at(container: str, docker: Docker, engine: Engine) -> None:
    docker("stop", "--time", "0", container)
    with pytest.raises(UsageError) as stopped:
        look(container)
    assert str(stopped.value) == (
        f"error: the container `{container}` does not run\n"
        f"  at: {engine.host}\n"
        f"  hint: start it, `docker start {container}`, or name its image"
    )
    with pytest.raises(UsageError) as nothing:
        look("no-such-thing")
    assert str(nothing.value) == f"error: there is no container and no image `no-such-thing`\n  at: {engine.host}"


def test_an_image_beside_its_lock_and_a_container_that_was_changed(
    built_small: Image, small: Path, container: str, docker: Docker, settings: Settings
) -> None:
    lock = str(lock_path(small))
    same = differences.compare(
        differences.side(lock, small.parent), differences.side(built_small.id, small.parent), settings, wheels=False
    )
    assert [change for change in same.changes if change.group not in ("platform", "settings")] == []
    docker(
        "exec",
        "--user",
        "0:0",
        container,
        "rm",
        "-r",
        "/opt/venv/lib/python3.11/site-packages/packaging-26.2.dist-info",
    )
    other = differences.compare(
        differences.side(built_small.id, small.parent),
        differences.side(container, small.parent),
        settings,
        wheels=False,
    )
    assert [(each.name, each.before, each.after) for each in other.changes] == [("packaging", "26.2", "")]


# --- a bisection in images ------------------------------------------------------------------------------------------

PARTS, PLANTED = 20, 13


@pytest.fixture(scope="module")
def planted(
    make_small: Callable[..., Path], built_small: Image, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """Two matrices of twenty made wheels, all of them newer in the second, where one fails; and the folder of the wheels.

    Their OS is the one of `built_small`: without a compiler they would bootstrap fewer packages than their locks have.
    """
    assert built_small
    folder = tmp_path_factory.mktemp("wheels")
    paths = []
    for side, version in (("good", "1.0"), ("bad", "2.0")):
        lines = []
        for number in range(PARTS):
            broken = side == "bad" and number == PLANTED
            code = b"raise ImportError('planted')\n" if broken else f"version = {version!r}\n".encode()
            name, data = wheel(f"part-{number:02}", version, files={f"part_{number:02}/__init__.py": code})
            (folder / name).write_bytes(data)
            lines.append(
                f"  - {{name: part-{number:02}, url: https://wheels.invalid/{name}, sha256: {sha256_hex(data)}}}\n"
            )
        paths.append(make_small(f"planted-{side}", _BARE.replace("VERSION", version) + f"files:\n{''.join(lines)}"))
    return paths[0], paths[1], folder


_BARE = SMALL.replace(
    SMALL[SMALL.index("cuda:") : SMALL.index("gpus:")], "cuda: {version: 13.0.2, jit: none}\n"
).replace(
    "numpy==2.2.6, nvidia-cuda-runtime==13.0.96, packaging==26.2",
    ", ".join(f"part-{number:02}==VERSION" for number in range(PARTS)),
)


def test_a_planted_change_among_twenty_is_found_and_an_interrupted_search_goes_on(
    planted: tuple[Path, Path, Path], tmp_path: Path, engine: Engine
) -> None:
    good, bad, wheels = planted
    code = "import " + ", ".join(f"part_{number:02}" for number in range(PARTS))
    tmp_path.chmod(0o755)
    (tmp_path / "bug.py").write_text(code + "\n")
    argv = [sys.executable, "-m", "builder", "bisect", str(good), str(bad), "--json", "--wheels", str(wheels)]
    argv += ["--log", str(tmp_path / "log"), "--", "python3", "bug.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen(
        argv, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert first.stderr is not None
    seen = []
    for line in first.stderr:
        seen.append(line)
        if line.startswith("no change: good"):
            break
    first.send_signal(signal.SIGINT)
    _, after = first.communicate(timeout=120)
    assert first.returncode == 130, f"{''.join(seen)}--- the interrupt ---\n{after}"
    assert after.endswith("interrupted: what was not finished is not tagged\n")
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["culprit"] == "part-13 1.0 → 2.0"
    assert found["why"].endswith("ImportError: planted")
    assert found["changes"] == PARTS
    assert "no change: good (exit status 0, from the log)" in done.stderr
    assert not [tag for image in engine.ours("sglang-stack=image") for tag in image.tags if "bisect" in tag]
    # Five halvings, the two ends, and the change alone.
    assert found["tested"] <= 8
    assert read_lock(tmp_path / "log" / "first-bad.lock.json").by_name["part-13"].version == "2.0"
