"""The summary of a finished build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builder import summary
from builder.build import Prepared
from builder.engine import Image, LayerSize
from builder.render import render
from tests.made import artefact, lock_of, tiny

UV = Path("/usr/bin/env")
CHECKS: list[dict[str, Any]] = [
    {"name": "installed", "part": "native", "ok": True, "looked_at": 193, "unit": "packages", "detail": "as locked"},
    {"name": "triton", "part": "native", "ok": True, "looked_at": 0, "unit": "", "detail": "not applicable: no triton"},
    {"name": "imports", "part": "sglang", "ok": True, "looked_at": 1234, "unit": "modules", "detail": ""},
]


def prepared(sglang: bool = True) -> Prepared:
    loaded = tiny(stack="{torch: 2.11.0, sglang: 0.5.9}" if sglang else "{torch: 2.11.0}")
    stack = [artefact("torch", "2.11.0", layer="torch"), artefact("idna", "3.7")]
    stack += [artefact("sglang", "0.5.9", layer="sglang")] if sglang else []
    lock = lock_of(loaded.matrix, *stack)
    return Prepared(loaded, lock, render(loaded.matrix, lock, UV), [])


def data(ready: Prepared, checks: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    layers = [
        ("OS", 120_000_000, "sha256:" + "a" * 64),
        ("torch and CUDA libraries (1 wheels)", 5_039_000_000, "sha256:" + "b" * 64),
    ]
    return {
        "ok": True,
        "image": {"id": "sha256:1", "names": list(ready.names), "size": 11_300_000_000},
        "patches": ["sglang 0.5.9+eagle3: E1 patched"],
        "layers": [{"title": title, "bytes": count, "diff_id": diff} for title, count, diff in layers],
        "checks": CHECKS if checks is None else checks,
    }


def test_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.summary.shutil.which", lambda _: "/usr/bin/docker")
    ready = prepared()
    digest = ready.lock.digest[:12]
    assert summary.as_text(data(ready), ready) == (
        "\n"
        "sglang-stack:tiny  11.3 GB\n"
        "  A tiny stack\n"
        "  torch 2.11.0, sglang 0.5.9\n"
        "  CUDA 13.0.2, Python 3.11, debian bookworm, for compute capability 12.0\n"
        "  patches: sglang 0.5.9+eagle3: E1 patched\n"
        f"  also named sglang-stack:tiny-{digest} (lock {digest})\n"
        "\n"
        "layers                                    size  diff ID\n"
        "  OS                                      120 MB  aaaaaaaaaaaa\n"
        "  torch and CUDA libraries (1 wheels)    5.04 GB  bbbbbbbbbbbb\n"
        "\n"
        "smoke test: 2 checks, all passed, 1 not applicable, without a GPU\n"
        "  native part\n"
        "    ok     installed  193 packages      as locked\n"
        "    -      triton                       not applicable: no triton\n"
        "  sglang part\n"
        "    ok     imports    1,234 modules\n"
        "\n"
        "run it:\n"
        "  docker run --rm sglang-stack:tiny                # what it is\n"
        "  docker run --rm --gpus all --ipc host sglang-stack:tiny python3 -m sglang.launch_server --help"
    )


def test_a_stack_without_sglang_has_no_server_to_start() -> None:
    ready = prepared(sglang=False)
    assert "launch_server" not in summary.as_text(data(ready), ready)


def test_where_docker_is_unpacked_it_is_named_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.summary.shutil.which", lambda _: None)
    monkeypatch.setattr("builder.archive.UNPACKED", Path("/x/.tools/root"))
    ready = prepared()
    assert "\n  /x/.tools/root/usr/bin/docker run --rm sglang-stack:tiny " in summary.as_text(data(ready), ready)


def test_checks_that_failed_are_counted() -> None:
    failed = {**CHECKS[0], "ok": False}
    assert summary.check_lines([failed, *CHECKS[1:]])[0] == (
        "smoke test: 2 checks, 1 FAILED, 1 not applicable, without a GPU"
    )


class FakeEngine:
    """An image with the layers that our own Dockerfile makes, and its report."""

    def __init__(self, ready: Prepared) -> None:
        steps = [step for step in ready.rendered.dockerfile.split("\n\n") if "RUN " in step and "AS proof_" not in step]
        self.steps = ["ADD rootfs.tar / # buildkit", *steps]

    def layers(self, _: str) -> list[LayerSize]:
        return [LayerSize(f"sha256:{number}", number, step) for number, step in enumerate(self.steps)]

    def read_file(self, _: str, path: str) -> bytes:
        if path == "/opt/sglang-stack/about.json":
            return b'{"patches": ["sglang 0.5.9+eagle3: E1 patched"]}'
        assert path == "/opt/sglang-stack/smoke.json"
        return b'{"ok": true, "checks": []}'


def test_each_layer_of_our_own_dockerfile_gets_its_title() -> None:
    ready = prepared()
    image = Image("sha256:1", (), {}, 42, ())
    found = summary.as_json(FakeEngine(ready), ready, image, built=True)  # type: ignore[arg-type]
    assert [layer["title"] for layer in found["layers"]] == [
        "OS",
        "Python environment",
        "torch and CUDA libraries (1 wheels)",
        "other wheels (1 wheels)",
        "sglang (1 wheels)",
        "proof",
    ]


def test_the_summary_as_data() -> None:
    ready = prepared()
    image = Image("sha256:1", (), {}, 42, ())
    found = summary.as_json(FakeEngine(ready), ready, image, built=False)  # type: ignore[arg-type]
    assert {key: found[key] for key in ("ok", "matrix", "lock", "built", "image", "checks", "findings")} == {
        "ok": True,
        "matrix": "tiny",
        "lock": ready.lock.digest,
        "built": False,
        "image": {"id": "sha256:1", "names": list(ready.names), "size": 42},
        "checks": [],
        "findings": [],
    }
    assert found["patches"] == ["sglang 0.5.9+eagle3: E1 patched"]
