"""What images are called: by content and by matrix, in engines and registries."""

from __future__ import annotations

from builder.labels import content_tag, image_names

LOCK = "0123456789abcdef" * 4


def test_the_names_of_an_image() -> None:
    assert content_tag("cu130", LOCK) == "cu130-0123456789ab"
    assert image_names("cu130", LOCK) == ("sglang-stack:cu130-0123456789ab", "sglang-stack:cu130")
