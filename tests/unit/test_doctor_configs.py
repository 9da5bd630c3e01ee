"""What images need by their configs, whoever tells them; a config may say nothing of how a container is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.doctor import verb
from builder.doctor.configs import of_config, of_inspected
from builder.doctor.needs import Needs
from builder.engine import Engine
from builder.hosts import cliverbs
from builder.settings import Settings

INNER = {"Labels": {"sglang-stack.gpus": "9.0"}, "Env": ["NVIDIA_REQUIRE_CUDA=cuda>=13.0", "A=B=C", "EMPTY"]}
MANIFEST = {"config": {"digest": "sha256:c"}, "layers": [{"size": 10}, {"size": 20}]}

NOTHING: list[dict[str, Any]] = [
    {},
    {"config": None},
    {"config": {}},
    {"config": {"Labels": None, "Env": None}},
]
"""Legal configs (OCI image specification, "Image JSON description": all of it is optional)."""


def test_what_a_config_says() -> None:
    found = of_config("x", {"os": "linux", "architecture": "arm64", "config": INNER}, MANIFEST)
    assert (found.subject, found.platform, found.gpus, found.require) == ("x", "linux/arm64", ("9.0",), "cuda>=13.0")
    assert (found.compressed, found.estimated) == (30, True)


def test_an_engine_says_the_same() -> None:
    raw = {"Os": "linux", "Architecture": "arm64", "Config": INNER}
    config = {"os": "linux", "architecture": "arm64", "config": INNER}
    assert of_inspected("x", raw, unpacked=7) == of_config("x", config, unpacked=7)


@pytest.mark.parametrize("config", NOTHING)
def test_a_config_that_says_nothing(config: dict[str, Any]) -> None:
    assert of_config("x", config) == Needs(subject="x", platform="linux/amd64")


@pytest.mark.parametrize("config", NOTHING)
def test_a_bundle_of_such_an_image_comes_to_hosts(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked: list[Needs] = []
    delivered = SimpleNamespace(as_text=lambda: "done", exit_code=0, interrupted=False)
    verified = SimpleNamespace(
        reference="x", config=json.dumps(config).encode(), manifest=json.dumps(MANIFEST).encode()
    )

    def deliver(hosts: object, delivery: object, needs: Needs, options: object) -> object:
        asked.append(needs)
        return delivered

    monkeypatch.setattr(cliverbs, "public_key", lambda path: None)
    monkeypatch.setattr(cliverbs, "FromBundle", lambda *_: SimpleNamespace(verified=lambda: verified))
    monkeypatch.setattr(cliverbs, "deliver", deliver)
    words = {"file": "x.tar", "pub": None, "host": None, "json": False}
    options = {"smoke": True, "gpus": "none", "anyway": False, "dry_run": False, "jobs": 1}
    assert cliverbs.load_verb(argparse.Namespace(**words, **options), Settings(cache=tmp_path)) == 0
    assert capsys.readouterr().out == "done\n"
    assert asked == [of_config("x", config, MANIFEST)]


@pytest.mark.parametrize("told", [{}, {"Config": None}, {"Config": {"Labels": None, "Env": None}}])
def test_an_engine_that_tells_of_no_config(
    told: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    raw = {"Id": "sha256:i", "Size": 7, "RootFS": None, **told}
    api = SimpleNamespace(inspect_image=lambda name: raw, close=lambda: None)
    engine = Engine.__new__(Engine)
    monkeypatch.setattr(engine, "host", "unix:///made", raising=False)
    monkeypatch.setattr(engine, "_client", SimpleNamespace(api=api), raising=False)
    monkeypatch.setattr("builder.engine.connect", lambda: engine)
    needs = verb.needs_of(verb.Question("some:image", hosts=("ssh://a",)), tmp_path)
    assert needs == Needs(subject="some:image", platform="linux/amd64", unpacked=7)
