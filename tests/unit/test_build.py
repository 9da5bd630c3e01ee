"""Building: what is refused before it starts, what a failed build is told, what goes in as a secret. No engine."""

from __future__ import annotations

import base64
import hashlib
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder import build
from builder.build import Prepared, check_disk, current_image, prepare, secret_files, stages_of, supplied
from builder.display import Progress, Stage
from builder.engine import EngineInfo, Image
from builder.errors import BuilderError, BuildError, ExitCode, IntegrityError, LockError
from builder.labels import INPUTS_LABEL
from builder.lock import lock_path, write_lock
from builder.render import render
from builder.solve import failure
from builder.supply import Supplies
from tests.made import TINY, artefact, direct, lock_of, settings_at, tiny

UV = Path("/usr/bin/env")


def prepared(extra: str = "", *artefacts: Any) -> Prepared:
    loaded = tiny(extra)
    lock = lock_of(loaded.matrix, *(artefacts or (artefact("idna", "3.7", size=1_000_000_000),)))
    return Prepared(loaded, lock, render(loaded.matrix, lock, UV), [])


def image(ready: Prepared, **labels: str) -> Image:
    return Image("sha256:1", ready.names, {INPUTS_LABEL: ready.rendered.digest, **labels}, 1, ())


class FakeEngine:
    """Images by name, and where the data are."""

    def __init__(self, images: dict[str, Image], info: EngineInfo | None = None) -> None:
        self.images, self._info = images, info

    def find(self, name: str) -> Image | None:
        return self.images.get(name)

    def info(self) -> EngineInfo:
        assert self._info is not None
        return self._info


# --- before it starts -------------------------------------------------------------------------------------------------


def test_names_are_by_content_and_by_matrix() -> None:
    ready = prepared()
    assert ready.names == (f"sglang-stack:tiny-{ready.lock.digest[:12]}", "sglang-stack:tiny")


def test_a_matrix_is_prepared_without_network_and_engine(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    lock = lock_of(tiny().matrix, artefact("idna", "3.7"))
    write_lock(lock, lock_path(path))
    ready = prepare(path)
    assert (ready.lock, ready.rendered.plan.lock) == (lock, lock)


def test_a_matrix_that_was_changed_is_not_built(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"{TINY}extras: [idna==3.8]\n")
    write_lock(lock_of(tiny().matrix, artefact("idna", "3.7")), lock_path(path))
    with pytest.raises(LockError, match="the lock does not belong to this matrix"):
        prepare(path)


def test_an_image_of_these_inputs_is_current() -> None:
    ready = prepared()
    found = image(ready)
    assert current_image(FakeEngine(dict.fromkeys(ready.names, found)), ready) is found  # type: ignore[arg-type]


@pytest.mark.parametrize("case", ["one name", "other inputs", "no label", "two images", "none"])
def test_an_image_that_is_not_current(case: str) -> None:
    ready = prepared()
    found = image(ready)
    content, plain = ready.names
    images = {
        "one name": {content: found},
        "other inputs": dict.fromkeys(ready.names, replace(found, labels={INPUTS_LABEL: "x"})),
        "no label": dict.fromkeys(ready.names, replace(found, labels={})),
        "two images": {content: found, plain: replace(found, id="sha256:2")},
        "none": {},
    }[case]
    assert current_image(FakeEngine(images), ready) is None  # type: ignore[arg-type]


def too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> str:
    monkeypatch.setattr("builder.build.shutil.disk_usage", lambda _: SimpleNamespace(free=500_000_000))
    with pytest.raises(BuildError) as caught:
        check_disk(FakeEngine({}, EngineInfo("26", store, tmp_path, True)), prepared())  # type: ignore[arg-type]
    return str(caught.value)


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = too_small(tmp_path, monkeypatch, "classic")
    assert re.sub(r"about [0-9.]+ GB", "about N GB", told) == (
        "error: there is not enough disk space for this build\n"
        f"  at: {tmp_path}\n"
        "  because: it needs about N GB (1 GB of wheels unpacked, classic store), 500 MB are free\n"
        "  hint: see what this builder keeps: `builder prune`; free it: `builder prune --yes`"
    )


def test_the_containerd_store_needs_twice_as_much_besides_the_headroom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = []
    for store in ("classic", "containerd"):
        found = re.search(r"about ([0-9.]+) GB", too_small(tmp_path, monkeypatch, store))
        assert found is not None
        needs.append(float(found[1]) - build.HEADROOM / 1e9)
    assert needs[1] == pytest.approx(2 * needs[0], abs=0.05)


def test_a_disk_that_is_large_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.build.shutil.disk_usage", lambda _: SimpleNamespace(free=9_000_000_000))
    check_disk(FakeEngine({}, EngineInfo("26", "classic", tmp_path, True)), prepared())  # type: ignore[arg-type]


def test_a_disk_on_another_machine_is_not_checked_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    info = EngineInfo("26", "classic", Path("/var/lib/docker"), False)
    check_disk(FakeEngine({}, info), prepared())  # type: ignore[arg-type]
    assert capsys.readouterr().err == "disk: not checked, /var/lib/docker is on another machine\n"


def with_direct_file(tmp_path: Path) -> tuple[Prepared, Path]:
    """A stack with a direct file, and the folder of wheels that has it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    wanted = direct("part", "1.0+cu1", sha256=hashlib.sha256(b"part").hexdigest())
    (folder / wanted.file).write_bytes(b"part")
    return prepared("", wanted), folder


def test_a_direct_file_is_bound_into_the_build(tmp_path: Path) -> None:
    ready, folder = with_direct_file(tmp_path)
    place = "layers/kernels/wheels/part-1.0+cu1-py3-none-any.whl"
    assert place not in ready.rendered.links
    full = supplied(ready, settings_at(tmp_path, wheels=(folder,)))
    assert full.rendered.links[place] == folder / "part-1.0+cu1-py3-none-any.whl"
    assert full.rendered.digest == ready.rendered.digest, "what decides the image is the lock's hash of it"
    full.rendered.write(tmp_path / "context")
    assert (tmp_path / "context" / place).read_bytes() == b"part"


def test_a_stack_without_direct_files_needs_nothing(tmp_path: Path) -> None:
    ready = prepared()
    assert supplied(ready, settings_at(tmp_path)) is ready


def test_without_its_files_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, folder = with_direct_file(tmp_path)
    (folder / "part-1.0+cu1-py3-none-any.whl").write_bytes(b"other")
    monkeypatch.setattr("builder.download.FAILURES", 1)
    monkeypatch.setattr(build, "prepare", lambda _: ready)
    monkeypatch.setattr(build, "connect", lambda: SimpleNamespace(require=lambda: None, find=lambda _: None))
    monkeypatch.setattr(build, "find_buildx", lambda: None)
    for name in ("check_disk", "build_image"):
        monkeypatch.setattr(build, name, lambda *_, **__: pytest.fail("the build was started"))
    with pytest.raises(IntegrityError, match="1 of 1 files that are on no index could not be had: nothing was started"):
        build.make(tmp_path / "tiny.yaml", settings_at(tmp_path, wheels=(folder,)))


def test_the_size_of_a_direct_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, folder = with_direct_file(tmp_path)
    with (folder / "part-1.0+cu1-py3-none-any.whl").open("r+b") as file:
        file.truncate(3_000_000_000)
    ready = replace(
        ready, rendered=render(ready.loaded.matrix, ready.lock, UV, Supplies({p.name: p for p in folder.iterdir()}))
    )
    monkeypatch.setattr("builder.build.shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(BuildError, match="there is not enough disk space") as caught:
        check_disk(FakeEngine({}, EngineInfo("26", "classic", tmp_path, True)), ready)  # type: ignore[arg-type]
    assert "(3 GB of wheels unpacked, classic store)" in caught.value.because


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_what_goes_in_as_secrets(tmp_path: Path) -> None:
    ready = prepared("indexes: {site: {url: https://wheels.example/x, packages: [part]}}\n")
    settings = settings_at(
        tmp_path,
        ca=tmp_path / "ca.pem",
        netrc=tmp_path / "netrc",
        index="https://me:hunter2@wheels.example/simple",
        proxies={"https_proxy": "http://me:hunter2@proxy.example/$x"},
    )
    with secret_files(ready, settings) as secrets:
        assert sorted(secrets) == ["ca", "index", "index-site", "netrc", "proxies"]
        assert secrets["proxies"].read_text() == (
            "export https_proxy='http://me:hunter2@proxy.example/$x'\n"
            "export HTTPS_PROXY='http://me:hunter2@proxy.example/$x'\n"
        )
        assert (secrets["ca"], secrets["netrc"]) == (tmp_path / "ca.pem", tmp_path / "netrc")
        assert secrets["index"].read_text() == "https://me:hunter2@wheels.example/simple"
        assert secrets["index-site"].read_text() == "https://wheels.example/x"
        for path in (secrets["index"], secrets["index-site"], secrets["proxies"]):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not secrets["index"].exists()


def test_a_sites_mirror_of_an_index_goes_in_instead(tmp_path: Path) -> None:
    ready = prepared("indexes: {site: {url: https://wheels.example/x, packages: [part]}}\n")
    with secret_files(ready, settings_at(tmp_path, indexes={"site": "https://mirror.example/x"})) as secrets:
        assert secrets["index-site"].read_text() == "https://mirror.example/x"


def test_a_site_that_wants_nothing_has_no_secrets(tmp_path: Path) -> None:
    with secret_files(prepared(), settings_at(tmp_path)) as secrets:
        assert secrets == {}


def test_secrets_are_removed_when_the_build_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(BuildError),
        secret_files(prepared(), settings_at(tmp_path, index="https://wheels.example")) as secrets,
    ):
        raise BuildError("x")
    assert not secrets["index"].exists()


# --- the rows of the display ------------------------------------------------------------------------------------------


def test_the_native_part_of_the_test_comes_before_sglang() -> None:
    stack = (artefact("idna", "3.7"), artefact("sglang", "0.5.9", layer="sglang"))
    assert [stage.name for stage in stages_of(prepared("", *stack))] == [
        *("python", "rest", "proof_native", "sglang", "proof_sglang", "image", "export")
    ]


def test_without_sglang_it_comes_after_the_last_layer() -> None:
    assert [stage.name for stage in stages_of(prepared())] == [
        *("python", "rest", "proof_native", "proof_sglang", "image", "export")
    ]


# --- what a failed build is told --------------------------------------------------------------------------------------


def failed(stage: str, log: str, error: str = "exit code: 1", words: str = "") -> BuilderError:
    progress = Progress([Stage("rest", "other wheels"), Stage("proof_native", "smoke test, native part")])
    name = f"[{stage} 2/2] RUN x"
    progress.feed({"vertexes": [{"digest": "d", "name": name, "started": "t"}]})
    data = base64.b64encode(log.encode()).decode()
    progress.feed({"logs": [{"vertex": "d", "stream": 2, "data": data}]})
    progress.feed({"vertexes": [{"digest": "d", "name": name, "error": error}]})
    return failure(progress, words)


def test_a_file_that_is_not_the_pinned_one() -> None:
    error = failed(
        "rest",
        "Resolved 3 packages\nerror: Failed to fetch x\n  cause: Hash mismatch for `idna==3.7`\n\nExpected:\n"
        "  sha256:aa\n\nComputed:\n  sha256:bb\n",
    )
    assert (type(error), error.exit_code) == (IntegrityError, ExitCode.INTEGRITY)
    assert str(error) == (
        "error: a file is not the one that the lock pins (stage `rest`)\n"
        "  because:   cause: Hash mismatch for `idna==3.7`\n"
        "    Expected:\n"
        "      sha256:aa\n"
        "    Computed:\n"
        "      sha256:bb\n"
        "  hint: the index, or something between it and here, serves other bytes under this name; nothing was installed"
    )


def test_a_smoke_test_that_fails_shows_its_findings() -> None:
    error = failed(
        "proof_native",
        "smoke test: native part\n  ok      installed  3 packages\n  FAILED  needed  412 files\n"
        "error: `a.so` of part needs libnuma1, which nothing in the image provides\n"
        "  because: libnuma.so.1 is in no folder that the loader looks into\n"
        "  hint: add `libnuma1` to `base.packages`\n",
    )
    assert (type(error), error.exit_code) == (BuildError, ExitCode.BUILD)
    assert str(error) == (
        "error: the smoke test failed: there is no image\n"
        "  because: error: `a.so` of part needs libnuma1, which nothing in the image provides\n"
        "      because: libnuma.so.1 is in no folder that the loader looks into\n"
        "      hint: add `libnuma1` to `base.packages`\n"
        "  hint: each error above names its cause; the layers stay in the build cache"
    )


def test_a_smoke_test_that_crashes_shows_its_last_words() -> None:
    error = failed("proof_native", "Traceback (most recent call last):\nModuleNotFoundError: No module named 'x'\n")
    assert str(error) == (
        "error: the smoke test failed: there is no image\n"
        "  because: Traceback (most recent call last):\n"
        "    ModuleNotFoundError: No module named 'x'\n"
        "  hint: each error above names its cause; the layers stay in the build cache"
    )


@pytest.mark.parametrize(
    ("log", "error"),
    [("error: failed to write: No space left on device (os error 28)\n", "exit code: 2"),
     ("", "failed to copy: write /x: no space left on device")],
)  # fmt: skip
def test_a_full_disk(log: str, error: str) -> None:
    assert str(failed("rest", log, error)) == (
        f"error: the disk is full\n  because: {log.strip() or error}\n  hint: free space: `builder prune --yes`"
    )


@pytest.mark.parametrize("words", ["invalid peer certificate: UnknownIssuer", "certificate verify failed"])
def test_an_authority_that_is_not_known(words: str) -> None:
    assert str(failed("rest", f"error: Failed to fetch\n  cause: {words}\n")) == (
        "error: stage `rest` failed\n"
        "  because: error: Failed to fetch\n"
        f"      cause: {words}\n"
        "  hint: name the site's certificate authority: BUILDER_CA=/path/to/ca.pem"
    )


@pytest.mark.parametrize(
    "words", ["dns error: failed to lookup", "operation timed out", "error sending request for url"]
)
def test_an_index_that_the_build_cannot_reach(words: str) -> None:
    error = failed("rest", f"error: Failed to fetch\n  cause: {words}\n")
    assert (
        error.hint == 'the build cannot reach the package index; mirrors and proxies: README, "Mirrors and authorities"'
    )


def test_any_other_failure_shows_the_stage_and_its_last_lines() -> None:
    error = failed("rest", "".join(f"line {number}\n" for number in range(40)))
    assert error.what == "stage `rest` failed"
    assert error.because.splitlines() == [f"line {number}" for number in range(25, 40)]


def test_a_failure_without_words_shows_buildkits() -> None:
    assert str(failed("rest", "", "executor failed running")) == (
        "error: stage `rest` failed\n  because: executor failed running"
    )


def test_a_build_that_fails_before_any_step() -> None:
    assert str(failure(Progress([]), "ERROR: no builder found")) == (
        "error: the build failed\n  because: ERROR: no builder found"
    )
    assert failure(Progress([]), "").because == "buildx gave no reason"


def test_two_builds_of_one_matrix_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import threading
    import time

    path, order = tmp_path / "tiny.lock", []

    def second() -> None:
        with build.locked(path):
            order.append("second")

    with build.locked(path):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert capsys.readouterr().err == "waiting for another build of tiny …\n"
