"""Several images in one run: what fails is told and loses nothing else. Engine and buildx are stand-ins; buildx is a process."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from builder import bake as module
from builder import bakeverb, builders, cli
from builder.bake import Baked, Outcome, Watch, bake, print_text
from builder.bakefile import Cache
from builder.bakeverb import bake_verb
from builder.build import Prepared, prepare
from builder.builders import Place
from builder.engine import Buildx, Engine, EngineInfo, Image
from builder.errors import BuildError, IntegrityError, LockError, UnreachableError, UsageError
from builder.labels import INPUTS_LABEL
from builder.settings import Settings

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PATHS = [ROOT / "matrices" / f"{name}.yaml" for name in ("cu128", "cu130-next")]

STAND_IN = """\
import json, os, sys
from pathlib import Path
folder = Path({folder!r})
script = json.loads((folder / "script.json").read_text())
words = sys.argv[1:]
file = Path(words[words.index("--file") + 1])
targets = words[words.index("--metadata-file") + 2:]
calls = folder / "calls.jsonl"
seen = {{"targets": targets, "file": json.loads(file.read_text()), "mode": file.stat().st_mode & 0o777}}
seen["secrets"] = sorted(str(p.relative_to(os.environ["BUILDER_SECRETS"])) for p in Path(os.environ["BUILDER_SECRETS"]).rglob("*"))
seen["contexts"] = [(Path(os.environ["BUILDER_CONTEXTS"]) / name.replace("_", ".") / "Dockerfile").is_file() for name in targets]
seen["host"] = os.environ["DOCKER_HOST"]
with calls.open("a") as log:
    log.write(json.dumps(seen) + "\\n")
step = script[len(calls.read_text().splitlines()) - 1]
for event in step["events"]:
    print(json.dumps(event), file=sys.stderr)
if step.get("words"):
    print(step["words"], file=sys.stderr)
if not step["exit"]:
    made = {{name: {{"containerimage.config.digest": "sha256:" + name}} for name in targets}}
    Path(words[words.index("--metadata-file") + 1]).write_text(json.dumps(made))
sys.exit(step["exit"])
"""


@dataclass
class StandInEngine:
    host: str = "unix:///made.sock"
    names: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    store: str = "classic"

    def find(self, name: str) -> Image | None:
        label = self.inputs.get(name.removeprefix("sha256:"))
        return Image(name, (), {INPUTS_LABEL: label}, 0, ()) if label else None

    def tag(self, image: str, names: tuple[str, ...]) -> None:
        self.names |= dict.fromkeys(names, image)

    def info(self) -> EngineInfo:
        return EngineInfo("26.1.5", self.store, Path("/nowhere"), False)


@dataclass
class Site:
    folder: Path
    engine: StandInEngine

    @property
    def place(self) -> Place:
        engine = cast("Engine", self.engine)
        return Place("default", engine, {"DOCKER_HOST": self.engine.host, "BUILDX_BUILDER": "default"}, direct=False)

    def script(self, *steps: dict[str, Any]) -> None:
        (self.folder / "script.json").write_text(json.dumps(steps))

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "calls.jsonl").read_text().splitlines()]

    def run(self, paths: list[Path] | None = None, cache: Cache | None = None) -> Baked:
        settings = Settings(cache=self.folder / "cache", proxies={"https_proxy": "http://proxy.example:3128"})
        return bake(paths or PATHS, settings, self.place, cache or Cache())


@pytest.fixture(scope="module")
def prepared() -> dict[str, Prepared]:
    return {path.stem: prepare(path) for path in PATHS}


@pytest.fixture
def site(prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Site:
    (tmp_path / "buildx.py").write_text(STAND_IN.format(folder=str(tmp_path)))
    engine = StandInEngine(inputs={name: each.rendered.digest for name, each in prepared.items()})
    monkeypatch.setattr(module, "find_buildx", lambda: Buildx((sys.executable, str(tmp_path / "buildx.py")), "0.13.1"))
    monkeypatch.setattr(module, "ensure_base", lambda *_: "sglang-stack-base:made")
    monkeypatch.setattr(module, "prepare", lambda path: prepared[path.stem])
    monkeypatch.setattr(module, "supplied", lambda each, settings: each)
    monkeypatch.setattr(module, "current_image", lambda engine, each: None)
    return Site(tmp_path, engine)


def step(name: str, **more: Any) -> dict[str, Any]:
    return {"vertexes": [{"digest": f"sha256:{name}", "name": name, "started": "2026-11-30T22:30:34Z", **more}]}


def failing(target: str, stage: str, words: str) -> list[dict[str, Any]]:
    name = f"[{target} {stage} 1/1] RUN x"
    log = {"vertex": f"sha256:{name}", "stream": 2, "data": base64.b64encode(words.encode()).decode()}
    return [step(name), {"logs": [log]}, step(name, error="process did not complete", completed="2026-11-30T22:31:34Z")]


FINE: dict[str, Any] = {"exit": 0, "events": []}


# --- what becomes of them ---------------------------------------------------------------------------------------------


def test_both_are_named(site: Site, prepared: dict[str, Prepared]) -> None:
    site.script(FINE)
    done = site.run()
    assert done.exit_code == 0
    assert site.engine.names == {name: f"sha256:{key}" for key, each in prepared.items() for name in each.names}
    (call,) = site.calls
    assert (call["targets"], call["contexts"], call["host"]) == (
        ["cu128", "cu130-next"],
        [True, True],
        "unix:///made.sock",
    )


def test_secrets_lie_in_a_folder_of_their_own_that_goes_away(site: Site) -> None:
    site.script(FINE)
    site.run()
    (call,) = site.calls
    assert call["secrets"] == ["cu128", "cu128/proxies", "cu130-next", "cu130-next/proxies"]
    assert call["mode"] == 0o600
    assert "proxy.example" not in json.dumps(call["file"])


def test_one_that_fails_is_left_out_of_the_next_round(site: Site, prepared: dict[str, Prepared]) -> None:
    broken = failing("cu128", "proof_native", "error: it is broken [load]\n  because: a symbol\n")
    cancelled = failing("cu130-next", "torch", "")[0]
    ended = step("[cu130-next torch 1/1] RUN x", error="context canceled", completed="2026-11-30T22:31:34Z")
    site.script({"exit": 1, "events": [cancelled, *broken, ended]}, FINE)
    done = site.run()
    assert [call["targets"] for call in site.calls] == [["cu128", "cu130-next"], ["cu130-next"]]
    assert set(site.engine.names) == set(prepared["cu130-next"].names)
    first, second = done.outcomes
    assert (first.ok, second.ok, done.exit_code) == (False, True, 6)
    assert str(first.error) == (
        "error: the smoke test failed: there is no image\n"
        "  because: error: it is broken [load]\n"
        "      because: a symbol\n"
        "  hint: each error above names its cause; the layers stay in the build cache"
    )


def test_what_concerns_all_is_told_of_all(site: Site) -> None:
    site.script({"exit": 1, "events": [], "words": "ERROR: no builder"})
    done = site.run()
    assert [(each.ok, str(each.error)) for each in done.outcomes] == [
        (False, "error: the build failed\n  at: default\n  because: ERROR: no builder")
    ] * 2
    assert (len(site.calls), site.engine.names) == (1, {})


def test_one_that_cannot_be_prepared_keeps_no_other_from_it(
    site: Site, prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    def supplied(each: Prepared, settings: Settings) -> Prepared:
        if each.loaded.matrix.name == "cu128":
            raise UnreachableError("4 files of this stack could not be had", hint="put them into a folder")
        return each

    monkeypatch.setattr(module, "supplied", supplied)
    site.script(FINE)
    done = site.run()
    assert [(each.matrix, each.ok) for each in done.outcomes] == [("cu128", False), ("cu130-next", True)]
    assert (done.exit_code, site.calls[0]["targets"]) == (5, ["cu130-next"])


def test_what_is_wrong_with_any_is_told_before_anything_is_fetched(
    site: Site, prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def prepare(path: Path) -> Prepared:
        order.append(f"read {path.stem}")
        if path.stem == "cu130-next":
            raise LockError("the lock is out of date")
        return prepared[path.stem]

    def supplied(each: Prepared, settings: Settings) -> Prepared:
        order.append(f"fetched {each.loaded.matrix.name}")
        return each

    monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(module, "supplied", supplied)
    site.script(FINE)
    done = site.run()
    assert order == ["read cu128", "read cu130-next", "fetched cu128"]
    assert ([each.ok for each in done.outcomes], done.exit_code) == ([True, False], 4)
    assert "cu130-next: the lock is out of date\n" in capsys.readouterr().err


def test_what_is_current_is_not_built(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "current_image", lambda engine, each: Image("sha256:there", (), {}, 0, ()))
    done = site.run()
    assert [(each.cached, each.image) for each in done.outcomes] == [(True, "sha256:there")] * 2
    assert not (site.folder / "calls.jsonl").exists()


def test_an_image_of_other_inputs_gets_no_name(site: Site) -> None:
    site.engine.inputs["cu128"] = "another"
    site.script(FINE)
    done = site.run([PATHS[0]])
    assert (done.outcomes[0].ok, site.engine.names) == (False, {})
    assert str(done.outcomes[0].error) == "error: the build ended without its image\n  at: default"


def test_one_path_twice_is_one(site: Site) -> None:
    site.script(FINE)
    assert [each.ok for each in site.run([PATHS[0], PATHS[0]]).outcomes] == [True]


def test_two_matrices_of_one_name(site: Site, prepared: dict[str, Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "prepare", lambda path: prepared["cu128"])
    site.script(FINE)
    done = site.run()
    assert [each.ok for each in done.outcomes] == [True, False]
    assert done.outcomes[1].error is not None and done.outcomes[1].error.what == "`cu128` is named twice"


def test_the_classic_store_exports_no_cache(site: Site) -> None:
    with pytest.raises(UsageError) as caught:
        site.run(cache=Cache("registry.example/cache"))
    assert str(caught.value) == (
        "error: this builder cannot write a build cache into a registry\n"
        "  at: default\n"
        "  because: Docker Engine 26.1.5 does that with the containerd image store only, this one has the classic\n"
        "  hint: `--cache-to inline` with `--push`, or an engine with `features.containerd-snapshotter`"
    )


def test_the_containerd_store_does(site: Site) -> None:
    site.engine.store = "containerd"
    site.script(FINE)
    assert site.run([PATHS[0]], Cache("registry.example/cache")).exit_code == 0
    assert site.calls[0]["file"]["target"]["cu128"]["cache-to"] == [
        "type=registry,ref=registry.example/cache:cu128-cache,mode=max"
    ]


# --- events -----------------------------------------------------------------------------------------------------------


def test_a_step_that_two_share_is_told_of_both(prepared: dict[str, Prepared]) -> None:
    watch = Watch(prepared)
    for name in prepared:
        event = step(f"[{name} torch 1/1] RUN x")
        event["vertexes"][0]["digest"] = "sha256:one"
        watch.feed(event)
    line = base64.b64encode(b"+ torch==2.9.1\n").decode()
    assert watch.feed({"logs": [{"vertex": "sha256:one", "data": line}]}) == set(prepared)
    assert [watch.at(name)[0] for name in prepared] == [watch.progress[name].stages["torch"].title for name in prepared]


def test_a_cache_that_is_not_there_yet_fails_nothing(prepared: dict[str, Prepared]) -> None:
    watch = Watch(prepared)
    name = "[cu128] importing cache manifest from registry.example/cache:cu128-cache"
    watch.feed(step(name, error="registry.example/cache:cu128-cache: not found", completed="2026-11-30T22:31:34Z"))
    assert watch.failed() == {}


def test_one_target_alone_has_no_name_in_its_steps(prepared: dict[str, Prepared]) -> None:
    watch = Watch({"cu128": prepared["cu128"]})
    assert watch.feed(step("[torch 1/1] RUN x")) == {"cu128"}
    assert watch.feed(step("[internal] load local bake definitions")) == set()


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_text() -> None:
    baked = Baked(
        "second",
        [
            Outcome("cu128", image="sha256:" + "a" * 64, cached=True),
            Outcome("cu130", error=UnreachableError("4 files could not be had")),
            Outcome("cu130-next", image="sha256:" + "b" * 64, seconds=61.4),
        ],
    )
    assert baked.as_text() == (
        "cu130:\n"
        "error: 4 files could not be had\n"
        "\n"
        "cu128       nothing changed   sha256:aaaaaaaaaaaa\n"
        "cu130       FAILED\n"
        "cu130-next  built and proven  sha256:bbbbbbbbbbbb  61 s"
    )


def test_json_has_the_shape_of_the_contract() -> None:
    data = Baked("second", [Outcome("cu128", image="sha256:a"), Outcome("cu130", error=BuildError("x"))]).as_json()
    assert data.keys() == {"ok", "builder", "targets"}
    assert [target.keys() for target in data["targets"]] == [
        {"matrix", "ok", "image", "digest", "cached", "seconds", "message"}
    ] * 2
    assert (data["ok"], data["targets"][1]["image"], data["targets"][1]["message"]) == (False, None, "error: x")


@pytest.mark.parametrize(
    ("errors", "code"), [([None], 0), ([BuildError("x"), None], 6), ([IntegrityError("x"), UnreachableError("y")], 5)]
)
def test_the_exit_status(errors: list[Any], code: int) -> None:
    assert Baked("x", [Outcome("m", error=error) for error in errors]).exit_code == code


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def words() -> Callable[..., argparse.Namespace]:
    def make(**more: Any) -> argparse.Namespace:
        plain: dict[str, Any] = {"matrices": ["cu128"], "builder": None, "cache_to": "", "cache_from": [], "push": None}
        return argparse.Namespace(**{**plain, "key": None, "plain_http": False, "show": False, "json": False, **more})

    return make


def test_print_needs_no_engine(
    words: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = Settings(cache=tmp_path)
    assert bake_verb(words(show=True), settings, ROOT / "matrices") == 0
    assert capsys.readouterr().out == print_text([PATHS[0]], settings, Cache(), layouts=False)[0]
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_every_matrix_that_is_none_is_told_at_once(words: Callable[..., argparse.Namespace], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bake_verb(words(matrices=["cu12", "cu128", "./none.yaml"]), Settings(cache=tmp_path), ROOT / "matrices")
    assert str(caught.value) == (
        "error: 2 of the matrices are not there\n"
        "  because: there is no matrix `cu12` (did you mean `cu128`)\n"
        f"    there is no file `./none.yaml` (a name in `{ROOT / 'matrices'}` is written without `.yaml`)"
    )


def test_print_tells_every_matrix_that_cannot_be_baked(
    words: Callable[..., argparse.Namespace],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    prepared: dict[str, Prepared],
    tmp_path: Path,
) -> None:
    def prepare(path: Path) -> Prepared:
        if path.stem == "cu128":
            return prepared["cu128"]
        raise LockError("the lock is out of date") if path.stem == "cu130" else UsageError("a field is wrong")

    monkeypatch.setattr(module, "prepare", prepare)
    named = words(matrices=["cu130", "cu128", "cu130-next"], show=True)
    assert bake_verb(named, Settings(cache=tmp_path), ROOT / "matrices") == 2
    assert capsys.readouterr() == (
        "",
        "cu130:\nerror: the lock is out of date\n\ncu130-next:\nerror: a field is wrong\n",
    )


def test_files_that_are_no_matrices_are_told_without_a_builder(
    words: Callable[..., argparse.Namespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bakeverb, "place_of", lambda _: pytest.fail("a builder was looked for"))
    files = [tmp_path / "a.yaml", tmp_path / "b.yaml"]
    for file in files:
        file.touch()
    with pytest.raises(UsageError) as caught:
        bake_verb(words(matrices=[str(file) for file in files]), Settings(cache=tmp_path), ROOT / "matrices")
    assert caught.value.what == "none of the 2 files is a matrix"
    assert len(caught.value.because.splitlines()) == 2


def test_a_builder_s_name_is_never_an_option_of_buildx(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "find_buildx", lambda: pytest.fail("buildx was asked"))
    assert cli.main(["bake", "cu128", "--print", "--builder=-x"]) == 2
    assert capsys.readouterr() == ("", "error: '-x' does not name a builder\n  hint: see `docker buildx ls`\n")


def test_all_matrices_unless_some_are_named(
    words: Callable[..., argparse.Namespace], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bake_verb(words(matrices=[], show=True), Settings(cache=tmp_path), ROOT / "matrices") == 0
    targets = json.loads(capsys.readouterr().out)["group"]["default"]["targets"]
    assert targets == sorted(path.stem.replace(".", "_") for path in (ROOT / "matrices").glob("*.yaml"))


def test_an_inline_cache_goes_nowhere_without_a_push(words: Callable[..., argparse.Namespace], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        bake_verb(words(cache_to="inline"), Settings(cache=tmp_path), ROOT / "matrices")
    assert str(caught.value) == (
        "error: `--cache-to inline` without `--push`\n"
        "  because: it goes where its image is pushed\n"
        "  hint: add `--push REGISTRY/NAME`, or keep it in a registry: `--cache-to REGISTRY/NAME`"
    )
