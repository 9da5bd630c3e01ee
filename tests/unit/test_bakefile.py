"""The bake file: the same matrices, the same bytes; nothing of a site or a machine in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.bakefile import Cache, Target, bake_file, bake_text, owner_pattern
from builder.errors import UsageError

GOLDEN = Path(__file__).parent / "golden"

TWO = [Target("cu128", "1" * 64, ("proxies", "ca")), Target("cu130.next", "2" * 64)]


def test_the_file() -> None:
    text = bake_text(TWO, Cache("registry.example/cache", ("registry.example/cache",)))
    assert text == (GOLDEN / "docker-bake.json").read_text(encoding="utf-8")


def test_a_base_image_is_a_layout_where_the_builder_does_not_see_the_engine_s() -> None:
    target = Target("cu128", "1" * 64, layout="sglang-stack-base:debian-bookworm-4e3ca57f7122")
    made = bake_file([target], Cache())
    assert made["variable"]["BUILDER_LAYOUTS"] == {"default": "layouts"}
    assert made["target"]["cu128"]["contexts"] == {
        "sglang-stack-base:debian-bookworm-4e3ca57f7122": "oci-layout://${BUILDER_LAYOUTS}/"
        "sglang-stack-base-debian-bookworm-4e3ca57f7122:debian-bookworm-4e3ca57f7122"
    }


def test_the_inline_cache_is_part_of_the_image() -> None:
    made = bake_file(TWO, Cache("inline", ("registry.example/stack",)))["target"]["cu128"]
    assert made["cache-to"] == ["type=inline"]
    assert "type=registry,ref=registry.example/stack:cu128" in made["cache-from"]


def test_without_a_cache_nothing_is_said_of_one() -> None:
    assert not {"cache-to", "cache-from"} & bake_file(TWO, Cache())["target"]["cu128"].keys()


def test_two_matrices_of_one_name() -> None:
    with pytest.raises(UsageError) as caught:
        bake_file([Target("a.b", ""), Target("a_b", "")], Cache())
    assert caught.value.what == "two matrices have one name in the bake file"


@pytest.mark.parametrize("reference", ["registry.example/cache:x", "registry.example/cache@sha256:" + "0" * 64])
def test_a_cache_has_no_tag(reference: str) -> None:
    with pytest.raises(UsageError) as caught:
        Cache(reference)
    assert str(caught.value) == (
        f"error: `{reference}` names one image\n"
        "  because: each matrix has a cache of its own, at the tag `MATRIX-cache`\n"
        "  hint: write `registry.example/cache`"
    )


@pytest.mark.parametrize(
    "reference", ["cache", "ubuntu/cache", "https://registry.example/cache", "r.example/a,mode=max"]
)
def test_a_cache_is_in_a_registry(reference: str) -> None:
    with pytest.raises(UsageError):
        Cache("", (reference,))


def test_json_of_it_is_what_the_data_is() -> None:
    assert json.loads(bake_text(TWO, Cache())) == bake_file(TWO, Cache())


@pytest.mark.parametrize(
    ("step", "target"),
    [
        ("[cu128 torch 1/1] RUN --mount=type=tmpfs", "cu128"),
        ("[cu130_next internal] load build context", "cu130_next"),
        ("[cu128] exporting to image", "cu128"),
    ],
)
def test_a_step_names_its_target(step: str, target: str) -> None:
    match = owner_pattern().match(step)
    assert match is not None and match["target"] == target
