"""Wheel tags and markers of a target."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.tags import Tag

from builder.errors import UsageError
from builder.tags import MACHINES, glibc_needed, glibc_of_platform, is_native, machine_of, markers, wheel_tags


def test_a_newer_glibc_comes_first_and_the_old_names_beside_their_numbers() -> None:
    platforms = list(dict.fromkeys(tag.platform for tag in wheel_tags("3.11", 2, 18) if tag.platform != "any"))
    assert platforms[:4] == [
        "manylinux_2_18_x86_64",
        "manylinux_2_17_x86_64",
        "manylinux2014_x86_64",
        "manylinux_2_16_x86_64",
    ]
    assert platforms[-2:] == ["manylinux1_x86_64", "linux_x86_64"]


def test_aarch64_has_no_name_older_than_2014() -> None:
    tags = wheel_tags("3.11", 2, 36, "aarch64")
    legacy = {tag.platform for tag in tags if not tag.platform.startswith("manylinux_2_")}
    assert legacy == {"manylinux2014_aarch64", "linux_aarch64", "any"}
    assert Tag("cp310", "abi3", "manylinux2014_aarch64") in tags
    assert not any(tag.platform.endswith("x86_64") for tag in tags)


@pytest.mark.parametrize(
    ("platform", "x86_64", "aarch64"),
    [
        ("any", (0, 0), (0, 0)),
        ("linux_x86_64", (0, 0), None),
        ("linux_aarch64", None, (0, 0)),
        ("manylinux1_x86_64", (2, 5), None),
        ("manylinux2010_x86_64", (2, 12), None),
        ("manylinux2014_x86_64", (2, 17), None),
        ("manylinux2014_aarch64", None, (2, 17)),
        ("manylinux2010_aarch64", None, None),
        ("manylinux_2_34_x86_64", (2, 34), None),
        ("manylinux_2_34_aarch64", None, (2, 34)),
        ("manylinux_2_34_ppc64le", None, None),
        ("musllinux_1_2_x86_64", None, None),
        ("win_amd64", None, None),
        ("macosx_11_0_arm64", None, None),
    ],
)
def test_glibc_of_a_platform_tag(
    platform: str, x86_64: tuple[int, int] | None, aarch64: tuple[int, int] | None
) -> None:
    assert (glibc_of_platform(platform), glibc_of_platform(platform, "aarch64")) == (x86_64, aarch64)


@given(st.text("abcdefilmnuxy0123456789_", max_size=30))
def test_glibc_of_any_text(platform: str) -> None:
    glibc_of_platform(platform)


@pytest.mark.parametrize("machine", MACHINES.values())
def test_what_a_target_takes_asks_for_no_newer_glibc(machine: str) -> None:
    """One table gives the tags of a C library and the C library of a tag."""
    needs = {glibc_of_platform(tag.platform, machine) for tag in wheel_tags("3.11", 2, 36, machine)}
    assert needs == {(0, 0), *((2, minor) for minor in range(5, 37))}


@pytest.mark.parametrize(
    ("tag", "glibc", "native"),
    [
        ("cp310-abi3-manylinux2014_x86_64", (2, 17), True),
        ("py3-none-manylinux_2_28_x86_64.manylinux_2_34_x86_64", (2, 28), True),
        ("cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64", (2, 17), True),
        ("cp311-cp311-linux_x86_64", (0, 0), True),
        ("cp311-cp311-manylinux_2_28_aarch64", None, True),
        ("py2.py3-none-any", (0, 0), False),
        ("py3-none-any.manylinux_2_28_x86_64", (0, 0), True),
    ],
)
def test_what_a_wheels_name_says(tag: str, glibc: tuple[int, int] | None, native: bool) -> None:
    file = f"a-1-{tag}.whl"
    assert (glibc_needed(file), is_native(file)) == (glibc, native)


def test_markers() -> None:
    assert markers("3.12", "aarch64")["platform_machine"] == "aarch64"
    assert markers("3.12")["platform_machine"] == "x86_64"


def test_a_platform() -> None:
    assert machine_of("linux/arm64") == "aarch64"
    with pytest.raises(UsageError) as caught:
        machine_of("windows/amd64")
    assert str(caught.value) == (
        "error: the platform `windows/amd64` is not known\n  hint: known are `linux/amd64` and `linux/arm64`"
    )
