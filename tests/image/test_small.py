"""What a build promises, on a stack of a few real wheels: reproducible, named only when proven, nothing of the site in it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from builder import ledger
from builder.build import build_image, prepare
from builder.cli import main
from builder.engine import Buildx, Engine, Image
from builder.errors import BuildError, IntegrityError, UnreachableError
from builder.labels import LABEL
from builder.render import Rendered
from builder.settings import Settings
from tests.image.stacks import ROOT, SMALL, edited, entries, relocked
from tests.loopback import wheel

pytestmark = pytest.mark.image

Docker = Callable[..., subprocess.CompletedProcess[str]]


def refusal(small: Path, change: Callable[[Rendered], Rendered], engine: Engine, buildx: Buildx, site: Settings) -> str:
    """The message of the build of `small` with its rendering changed."""
    prepared = prepare(small)
    with pytest.raises(BuildError) as caught:
        build_image(edited(prepared, rendered=change(prepared.rendered)), engine, buildx, site)
    return str(caught.value)


def in_stage(rendered: Rendered, stage: str, instruction: str) -> Rendered:
    """`rendered` with an instruction at the end of a stage: something that goes wrong between install and test."""
    head, mark, tail = rendered.dockerfile.partition(f"AS {stage}\n")
    body, blank, rest = tail.partition("\n\n")
    return replace(rendered, dockerfile=f"{head}{mark}{body}\n{instruction}{blank}{rest}")


def test_layers_have_the_same_diff_ids_after_a_rebuild_from_nothing(
    small: Path,
    built_small: Image,
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    docker: Docker,
    tmp_path: Path,
) -> None:
    again = build_image(prepare(small), engine, buildx, settings, no_cache=True)
    # An engine that has a twin of the layer below walks a layer in another order (docs/measurements.md): then what counts
    # is that nothing else differs.
    if again.diff_ids != built_small.diff_ids:
        assert entries(docker, again.id, tmp_path) == entries(docker, built_small.id, tmp_path)


def test_the_image_says_what_it_is(built_small: Image, docker: Docker) -> None:
    said = docker("run", "--rm", "--network", "none", "sglang-stack:small").stdout
    assert said.startswith("small: A small stack for tests\n")
    assert "uid 10001, gid 0" in said
    assert "passed in the build" in said


@pytest.mark.parametrize("user", ["0:0", "12345:54321"])
def test_any_user_can_write_home_and_caches(built_small: Image, docker: Docker, user: str) -> None:
    script = "set -e; touch ~/x $XDG_CACHE_HOME/x; mkdir -p $TRITON_CACHE_DIR; python3 -c 'import getpass, numpy; getpass.getuser()'"
    docker("run", "--rm", "--network", "none", "--user", user, "sglang-stack:small", "sh", "-c", script)


def test_an_init_is_pid_1(built_small: Image, docker: Docker) -> None:
    assert docker("run", "--rm", "sglang-stack:small", "cat", "/proc/1/comm").stdout == "tini\n"


def test_the_stub_driver_is_on_no_loader_path(built_small: Image, docker: Docker) -> None:
    script = "import ctypes; ctypes.CDLL('libcuda.so.1')"
    done = docker("run", "--rm", "sglang-stack:small", "python3", "-c", script, check=False)
    assert "libcuda.so.1: cannot open shared object file" in done.stderr


def test_nvcc_links_by_its_plain_name(built_small: Image, docker: Docker) -> None:
    script = (
        "cd /tmp; echo '#include <cuda.h>\nint main() { return cuInit(0); }' > a.cu; "
        "nvcc -arch=sm_120a a.cu -o a -lcuda && ls a"
    )
    assert docker("run", "--rm", "sglang-stack:small", "sh", "-c", script).stdout == "a\n"


def test_nothing_of_the_site_is_in_the_image(
    small: Path, engine: Engine, buildx: Buildx, settings: Settings, docker: Docker, tmp_path: Path
) -> None:
    mark = "tell-tale-5f0c1d"
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine {mark}.invalid login {mark} password {mark}\n")
    bundle = tmp_path / "ca.pem"
    bundle.write_bytes((settings.ca.read_bytes() if settings.ca else b"") + f"# {mark}\n".encode())
    proxies = {**settings.proxies, "no_proxy": f"{mark}.invalid"}
    site = replace(settings, netrc=netrc, ca=bundle, proxies=proxies)
    image = build_image(prepare(small), engine, buildx, site, no_cache=True)
    assert mark not in docker("image", "inspect", image.id).stdout
    assert mark not in docker("history", "--no-trunc", image.id).stdout
    saved = subprocess.run(
        [sys.executable, "-c", _SEARCH, mark, image.id, engine.host], capture_output=True, text=True, check=True
    )
    assert int(saved.stdout) > 100 << 20, "the search has to have seen the layers"
    # And not in the build cache either: everything that the engine keeps, snapshots and records alike.
    data = engine.info().data_root
    found = subprocess.run(["grep", "-rlF", mark, str(data)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (1, ""), found.stderr[-2000:]


def test_a_proxy_is_asked(small: Path, engine: Engine, buildx: Buildx, settings: Settings) -> None:
    nobody = dict.fromkeys(("http_proxy", "https_proxy"), "http://me:hunter2@127.0.0.1:9")
    with pytest.raises(BuildError) as caught:
        build_image(prepare(small), engine, buildx, replace(settings, proxies=nobody), no_cache=True)
    assert "the build cannot reach the package index" in str(caught.value)
    assert "hunter2" not in str(caught.value)


# A process of its own: half a gigabyte of layers need not stay in this one's memory.
_SEARCH = """
import sys, docker
mark, image, host = sys.argv[1].encode(), sys.argv[2], sys.argv[3]
seen, tail = 0, b""
for chunk in docker.DockerClient(base_url=host).api.get_image(image):
    seen += len(chunk)
    if mark in tail + chunk:
        sys.exit("found")
    tail = chunk[-64:]
print(seen)
"""


def test_smoke_again_as_any_user(built_small: Image, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "sglang-stack:small", "--user", "12345:54321", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    named = engine.find("sglang-stack:small")
    assert named is not None
    assert report["ok"] and report["image"] == named.id
    assert {check["name"]: check["ok"] for check in report["checks"]}["nvcc"]


def test_other_bytes_than_the_lock_pins(small: Path, engine: Engine, buildx: Buildx, settings: Settings) -> None:
    prepared = prepare(small)
    artefacts = tuple(
        a.model_copy(update={"sha256": "0" * 64}) if a.name == "packaging" else a for a in prepared.lock.artefacts
    )
    with pytest.raises(IntegrityError) as caught:
        build_image(
            relocked(prepared, prepared.lock.model_copy(update={"artefacts": artefacts})), engine, buildx, settings
        )
    assert "Hash mismatch for `packaging==26.2`" in str(caught.value)
    assert "sha256:" + "0" * 64 in str(caught.value)


def test_a_file_that_is_on_no_index(
    make_small: Callable[..., Path],
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    docker: Docker,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    name, data = wheel("only-here", "1.0+local", files={"only_here/__init__.py": b"word = 'from the folder'\n"})
    (folder / name).write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    text = SMALL.replace("extras: [", "extras: [only-here==1.0+local, ")
    text += (
        f"files:\n  - {{name: only-here, url: https://wheels.invalid/{name.replace('+', '%2B')}, sha256: {sha256}}}\n"
    )
    path = make_small("direct", text)
    with pytest.raises(
        UnreachableError, match="1 of 1 files that are on no index could not be had: nothing was started"
    ):
        build_image(prepare(path), engine, buildx, settings)
    image = build_image(prepare(path), engine, buildx, replace(settings, wheels=(folder,)))
    said = docker("run", "--rm", "--network", "none", image.id, "python3", "-c", "import only_here as o; print(o.word)")
    assert said.stdout == "from the folder\n"


def test_an_extension_removed(small: Path, engine: Engine, buildx: Buildx, settings: Settings) -> None:
    gone = "RUN rm /opt/venv/lib/python3.11/site-packages/numpy/linalg/_umath_linalg*.so"
    said = refusal(small, lambda r: in_stage(r, "rest", gone), engine, buildx, settings)
    assert "_umath_linalg.cpython-311-x86_64-linux-gnu.so" in said
    assert "numpy 2.2.6" in said
    assert engine.find("sglang-stack:small") is not None, "the last good image keeps its name"


def test_a_compiler_of_two_releases(
    make_small: Callable[..., Path], engine: Engine, buildx: Buildx, settings: Settings
) -> None:
    other = make_small(
        "nvvm-13-5", SMALL.replace("nvidia-nvvm: 13.0.88", "nvidia-nvvm: 13.0.88").replace("2026-08-01", "2026-11-01")
    )
    prepared = prepare(other)
    newer = make_small("only-nvvm", _ONLY_NVVM)
    nvvm = prepare(newer, rules={}).lock.by_name["nvidia-nvvm"]
    artefacts = tuple(nvvm if a.name == "nvidia-nvvm" else a for a in prepared.lock.artefacts)
    with pytest.raises(BuildError) as caught:
        build_image(
            relocked(prepared, prepared.lock.model_copy(update={"artefacts": artefacts})), engine, buildx, settings
        )
    said = str(caught.value)
    assert "nvidia-nvvm" in said and "13.5" in said and "13.0" in said


_ONLY_NVVM = (
    SMALL.replace("nvidia-nvvm: 13.0.88", "nvidia-nvvm: 13.0.88")
    .replace("jit: nvcc", "jit: none")
    .replace(
        "  compiler:\n    nvidia-cuda-nvcc: 13.0.88\n    nvidia-nvvm: 13.0.88\n    nvidia-cuda-crt: 13.0.88\n    nvidia-cuda-cccl: 13.0.85\n",
        "",
    )
    .replace("2026-08-01", "2026-11-20")
    .replace("[numpy==2.2.6, nvidia-cuda-runtime==13.0.96, packaging==26.2]", "[nvidia-nvvm==13.5.37]")
)


def test_a_library_that_the_os_lacks(small: Path, engine: Engine, buildx: Buildx, settings: Settings) -> None:
    # An extension that needs libnuma.so.1, as sgl-kernel's did, on an OS without libnuma1.
    steps = (
        "RUN set -e; cd /opt/venv/lib/python3.11/site-packages/numpy/linalg; "
        "echo 'int numa_available(void); int f(void) { return numa_available(); }' > /tmp/a.c; "
        "gcc -shared -fPIC /tmp/a.c -o lapack_lite*.so -l:libnuma.so.1; rm /usr/lib/x86_64-linux-gnu/libnuma.so.1*"
    )
    said = refusal(small, lambda r: in_stage(r, "rest", steps), engine, buildx, settings)
    assert "`libnuma.so.1`" in said
    assert "`libnuma.so.1` is in the OS package `libnuma1`" in said


def test_an_exception_that_no_longer_fails(
    small: Path, engine: Engine, buildx: Buildx, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {
        "id": "numpy-linalg",
        "distribution": "numpy",
        "versions": "",
        "file": "numpy/linalg/_umath_linalg*.so",
        "checks": ["load"],
        "words": "cannot open shared object file",
        "consequence": "none: made for this test",
        "source": "this test",
    }
    monkeypatch.setattr(ledger, "exceptions", lambda: (entry,))
    monkeypatch.setattr("builder.smokespec.exceptions", lambda: (entry,))
    with pytest.raises(BuildError) as caught:
        build_image(prepare(small), engine, buildx, settings)
    assert "`numpy-linalg` no longer fails" in str(caught.value) or "numpy-linalg" in str(caught.value)


def test_ctrl_c_leaves_no_container_and_no_name(
    make_small: Callable[..., Path], engine: Engine, docker: Docker, tmp_path: Path
) -> None:
    path = make_small("interrupted", SMALL.replace("numpy==2.2.6", "numpy==2.2.5"))
    before = docker("ps", "--all", "--quiet").stdout
    process = subprocess.Popen(
        [sys.executable, "-m", "builder", "build", str(path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "smoke test" in line or "running" in line:
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert docker("ps", "--all", "--quiet").stdout == before
    assert engine.find("sglang-stack:interrupted") is None
    assert not [image for image in engine.ours(f"{LABEL}.matrix=interrupted") if image.tags]


def test_layer_contents_are_readable_and_owned_by_root(built_small: Image, docker: Docker, engine: Engine) -> None:
    listing = docker(
        "run", "--rm", "--network", "none", "sglang-stack:small", "find", "/opt", "(", "!", "-uid", "0", "-o", "!", "-perm",
        "-444", ")", "!", "-type", "l",
    ).stdout  # fmt: skip
    assert listing == ""
    data = engine.read_file(built_small.id, "/opt/sglang-stack/smoke.json")
    assert json.loads(data)["ok"] is True


def test_no_dropping_of_the_installer_stays(built_small: Image, engine: Engine) -> None:
    names = []
    stream = b"".join(engine._client.api.get_image(built_small.id))
    with tarfile.open(fileobj=io.BytesIO(stream)) as archive:
        for member in archive.getmembers():
            if member.name.endswith(("layer.tar", ".tar")) or member.name.startswith("blobs/sha256/"):
                file = archive.extractfile(member)
                try:
                    with tarfile.open(fileobj=file) as layer:
                        names += layer.getnames()
                except tarfile.ReadError:
                    continue
    bad = [
        n
        for n in names
        if n.endswith(("uv_cache.json", "/.lock", ".ninja_log"))
        or n.startswith(("tmp/", "opt/.tmp", "root/.cache", "run/secrets/"))
    ]
    assert "opt/venv/pyvenv.cfg" in names
    assert bad == []
