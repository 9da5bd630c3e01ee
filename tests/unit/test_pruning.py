"""`builder prune`: what is ours, what is freed, what is left alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from builder import pruning
from builder.engine import Buildx, Image
from builder.errors import BuildError, UsageError
from tests.made import ROOT, settings_at
from tests.unit.test_render import tiny_rendered

# As buildx 0.13.1 prints them, shortened; the third and the last are not ours.
DU = """\
ID:\t\tours1
Parent:\t\tparent
Created at:\t2026-11-30 08:13:05.365800927 +0000 UTC
Mutable:\tfalse
Reclaimable:\ttrue
Shared:\t\ttrue
Size:\t\t5.039GB
Description:\tmount / from exec /bin/sh -c set -eu;     touch /opt/.start;     . /mnt/tools/site.sh;     install_from default
Usage count:\t2
Last used:\t2 minutes ago
Type:\t\tregular

ID:\t\tours2
Size:\t\t1.5kB
Description:\t[archive 1/1] ADD rootfs.tar /
Type:\t\tregular

ID:\t\ttheirs1
Size:\t\t10.72GB
Description:\tmount / from exec /bin/sh -c SSL_CERT_FILE=/run/secrets/ca /ctx/uv pip install --python /opt/venv/bin/python
Type:\t\tregular

ID:\t\tours3
Size:\t\t0B
Description:\tmount / from exec /bin/sh -c mkdir /proof && cd /proof && PYTHONPATH=/mnt/smoke PYTHONDONTWRITEBYTECODE=1 python3
Type:\t\tregular

ID:\t\ttheirs2
Size:\t\t1B
Description:\t[stage-1 2/3] ADD rootfs.tar.xz /
Type:\t\tregular

ID:\t\ttheirs3
Description:\tlocal source for context

Reclaimable:\t5.1GB
Total:\t\t15.8GB
"""


class FakeEngine:
    """An engine with images, and what was removed of them."""

    host = "unix:///made"

    def __init__(self, *images: Image, busy: str = "", volumes: tuple[str, ...] = ()) -> None:
        self.images, self.busy, self.removed = images, busy, list[str]()
        self.there = volumes

    def volumes(self, label: str) -> list[str]:
        assert label == "sglang-stack=cache"
        return list(self.there)

    def remove_volume(self, name: str) -> None:
        self.remove(f"volume {name}")

    def ours(self, label: str) -> list[Image]:
        assert label in ("sglang-stack", "sglang-stack.partial")
        return [image for image in self.images if label in image.labels]

    def remove(self, reference: str) -> None:
        if reference == self.busy:
            raise BuildError("the Docker Engine refused", because="a container uses it")
        self.removed.append(reference)


def image(name: str, kind: str = "image", tags: tuple[str, ...] | None = None) -> Image:
    labels = {"sglang-stack": kind} | ({"sglang-stack.matrix": name} if kind == "image" else {})
    names = (f"sglang-stack:{name}",) if tags is None else tags
    return Image(f"sha256:{name:0<64}", names, labels, 11_300_000_000, ())


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Set up an engine with two images and a base; what was run of buildx."""
    commands: list[list[str]] = []

    def run(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(argv[1:])
        return subprocess.CompletedProcess(argv, 0, DU if "du" in argv else "", "")

    monkeypatch.setattr("builder.pruning.subprocess.run", run)
    monkeypatch.setattr(pruning, "find_buildx", lambda: Buildx(("buildx",), "0.13.1"))
    monkeypatch.setattr(pruning, "settings", lambda: settings_at(tmp_path))
    return commands


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    fake = FakeEngine(image("one"), image("two"), image("base", "base", ("sglang-stack-base:x",)))
    monkeypatch.setattr(pruning, "connect", lambda: fake)
    return fake


def cached(tmp_path: Path, *names: str) -> None:
    for name in names:
        (tmp_path / "cache" / name).mkdir(parents=True)
        (tmp_path / "cache" / name / "file").write_bytes(bytes(1500))


def test_what_is_shown(tmp_path: Path, engine: FakeEngine, ran: list[list[str]]) -> None:
    cached(tmp_path, "rootfs", "metadata", "unknown")
    data = pruning.prune(yes=False, keep=[], matrices=ROOT / "matrices")
    assert data["text"] == (
        "image     11.3 GB  sglang-stack:one\n"
        "image     11.3 GB  sglang-stack:two\n"
        "image     11.3 GB  sglang-stack-base:x\n"
        "cache     5.04 GB  3 records of the build cache, shared with the images\n"
        f"files      1.5 kB  {tmp_path}/cache/rootfs (bootstrapped OS file systems)\n"
        f"files      1.5 kB  {tmp_path}/cache/metadata (METADATA of wheels)\n"
        "nothing was removed; free it: `builder prune --yes`"
    )
    assert engine.removed == []
    assert ran == [["du", "--verbose"]]
    assert (tmp_path / "cache" / "rootfs" / "file").exists()


def test_what_is_freed(tmp_path: Path, engine: FakeEngine, ran: list[list[str]]) -> None:
    cached(tmp_path, "rootfs", "unknown")
    data = pruning.prune(yes=True, keep=[], matrices=ROOT / "matrices")
    assert engine.removed == ["sglang-stack:one", "sglang-stack:two", "sglang-stack-base:x"]
    assert ran[1:] == [
        ["prune", "--all", "--force", "--filter", f"id={identifier}"] for identifier in ("ours1", "ours2", "ours3")
    ]
    assert not (tmp_path / "cache" / "rootfs").exists()
    assert (tmp_path / "cache" / "unknown" / "file").exists()
    assert (data["freed"], data["text"].splitlines()[-1]) == (True, "freed")


def test_a_matrix_that_is_kept_keeps_the_base(engine: FakeEngine, ran: list[list[str]]) -> None:
    data = pruning.prune(yes=False, keep=["one"], matrices=ROOT / "matrices")
    assert [found["names"] for found in data["images"]] == [["sglang-stack:two"]]


def test_volumes_with_compiled_kernels(monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]) -> None:
    ours = [f"sglang-stack-cache-{f'{name:0<64}'[:12]}" for name in ("one", "two", "gone")]
    fake = FakeEngine(image("one"), image("two"), volumes=(*ours, "mine"), busy=f"volume {ours[2]}")
    monkeypatch.setattr(pruning, "connect", lambda: fake)
    assert pruning.prune(yes=False, keep=["one"], matrices=ROOT / "matrices")["text"] == (
        "image     11.3 GB  sglang-stack:two\n"
        f"volume             {ours[1]} (kernels that servers compiled)\n"
        f"volume             {ours[2]} (kernels that servers compiled)\n"
        "volume             mine (kernels that servers compiled)\n"
        "cache     5.04 GB  3 records of the build cache, shared with the images\n"
        "nothing was removed; free it: `builder prune --yes`"
    )
    data = pruning.prune(yes=True, keep=["one"], matrices=ROOT / "matrices")
    assert fake.removed == ["sglang-stack:two", f"volume {ours[1]}", "volume mine"]
    assert (data["volumes"], data["problems"]) == ([ours[1], "mine"], [f"{ours[2]} stays: a container uses it"])


def test_an_image_without_a_name_is_removed_by_its_id(monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]) -> None:
    fake = FakeEngine(image("one", tags=()))
    monkeypatch.setattr(pruning, "connect", lambda: fake)
    data = pruning.prune(yes=True, keep=[], matrices=ROOT / "matrices")
    assert fake.removed == [f"sha256:{'one':0<64}"]
    assert data["text"].splitlines()[0] == "image     11.3 GB  sha256:one000000000"


def test_an_image_in_use_stays_and_does_not_stop_the_rest(
    monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]
) -> None:
    fake = FakeEngine(image("one"), image("two"), busy="sglang-stack:one")
    monkeypatch.setattr(pruning, "connect", lambda: fake)
    data = pruning.prune(yes=True, keep=[], matrices=ROOT / "matrices")
    assert fake.removed == ["sglang-stack:two"]
    assert data["problems"] == ["sglang-stack:one stays: a container uses it"]
    assert data["text"].splitlines()[0] == "engine: sglang-stack:one stays: a container uses it"


def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise BuildError("no Docker Engine answers")

    monkeypatch.setattr(pruning, "connect", absent)


def test_without_an_engine_files_are_shown_and_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]
) -> None:
    without_engine(monkeypatch)
    cached(tmp_path, "contexts")
    data = pruning.prune(yes=True, keep=[], matrices=ROOT / "matrices")
    assert data["text"] == (
        f"engine: no Docker Engine answers\nfiles      1.5 kB  {tmp_path}/cache/contexts (build contexts)\nfreed"
    )
    assert not (tmp_path / "cache" / "contexts").exists()


def test_where_nothing_is_ours(monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]) -> None:
    monkeypatch.setattr(pruning, "connect", lambda: FakeEngine())
    monkeypatch.setattr(pruning, "_records", lambda *_: [])
    assert pruning.prune(yes=False, keep=[], matrices=ROOT / "matrices")["text"] == "nothing of ours is on this machine"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0B", 0),
        ("12B", 12),
        ("1.5kB", 1500),
        ("5.039GB", 5_039_000_000),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 3 * 2**29),
        ("4.1GB (shared)", 4_100_000_000),
        ("?", 0),
        ("", 0),
    ],
)
def test_the_sizes_of_records(text: str, count: int) -> None:
    assert pruning._bytes(text) == count


def test_every_step_of_ours_is_known_as_ours() -> None:
    dockerfiles = [tiny_rendered().dockerfile, (ROOT / "Dockerfile.base").read_text()]
    steps = [step for text in dockerfiles for step in re.findall(r"^RUN ((?:.*\\\n)*.*)", text, re.MULTILINE)]
    commands = [re.sub(r"\\\n", "", re.sub(r"--(?:mount|network)=\S+ ", "", step)).strip() for step in steps]
    commands = [command for command in commands if "apt-get" not in command]
    assert len(commands) >= 6
    unknown = [c for c in commands if not pruning._OUR_STEPS.match(f"mount / from exec /bin/sh -c {c}")]
    assert unknown == []


def test_what_an_interrupted_pull_left_is_ours_too() -> None:
    left = Image("sha256:aa", ("sglang-stack-partial:aa",), {"sglang-stack.partial": "1"}, 5, ())
    engine = FakeEngine(left)
    found = pruning._images(engine, [])  # type: ignore[arg-type]
    assert found == [{"id": "sha256:aa", "names": ["sglang-stack-partial:aa"], "bytes": 5}]


@pytest.mark.parametrize(
    ("keep", "because", "hint"),
    [
        ("cu130_next", "there are `cu128`, `cu130`, `cu130-next`, `one`, `two`", "did you mean `cu130-next`"),
        ("zzz.yaml", "there are `cu128`, `cu130`, `cu130-next`, `one`, `two`", "`builder list` shows the matrices"),
        ("tow", "there are `cu128`, `cu130`, `cu130-next`, `one`, `two`", "did you mean `two`"),
    ],
)
def test_a_slip_in_what_to_keep_removes_nothing(
    tmp_path: Path, engine: FakeEngine, ran: list[list[str]], keep: str, because: str, hint: str
) -> None:
    cached(tmp_path, "rootfs")
    with pytest.raises(UsageError) as raised:
        pruning.prune(yes=True, keep=["one", keep], matrices=ROOT / "matrices")
    assert (raised.value.because, raised.value.hint) == (because, hint)
    assert (engine.removed, ran) == ([], [])
    assert (tmp_path / "cache" / "rootfs" / "file").exists()


def test_a_slip_is_said_without_an_engine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[list[str]]
) -> None:
    without_engine(monkeypatch)
    cached(tmp_path, "contexts")
    with pytest.raises(UsageError) as raised:
        pruning.prune(yes=True, keep=["mine"], matrices=ROOT / "matrices")
    assert raised.value.because.endswith("`cu130-next`; no engine answers, whose images could not be looked at")
    assert (tmp_path / "cache" / "contexts" / "file").exists()


def test_a_matrix_that_is_kept_may_be_named_by_its_file(engine: FakeEngine, ran: list[list[str]]) -> None:
    data = pruning.prune(yes=False, keep=["mine/one.yaml"], matrices=ROOT / "matrices")
    assert [found["names"] for found in data["images"]] == [["sglang-stack:two"]]
