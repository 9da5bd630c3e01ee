"""Requirements that exclude each other: which of them an override has to break, and with what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder.errors import UsageError
from builder.repro.clashes import Clash, clashes

DAY = date(2026, 3, 24)
BINDINGS = ("12.9.0", "12.9.4", "13.0.3", "13.2.0")
RELEASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "cuda-bindings": dict.fromkeys(BINDINGS, ()),
    "cuda-python": {
        "12.9.0": ("cuda-bindings~=12.9.0",),
        "13.0.3": ("cuda-bindings~=13.0.3",),
        "14.0.0": ("cuda-bindings~=14.0.0",),
    },
    "outlines": {"0.1.11": ("numpy<3",)},
    "numpy": {"2.3.5": (), "2.4.0": ()},
    "cuda-tile": {"1.5.0": (), "1.7.0": ()},
}
TORCH, SGLANG = ("cuda-bindings>=13.0.3,<14",), ("cuda-python==12.9", "outlines==0.1.11", "numpy")


class MadeIndex:
    """An index of these releases; cuda-python 14 came after the day."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def requires(self, name: str, version: str) -> Sequence[Requirement]:
        found = [texts for each, texts in RELEASES.get(name, {}).items() if Version(each) == Version(version)]
        if not found:
            raise UsageError(f"{name} has no release {version}")
        return [Requirement(text) for text in found[0]]

    def newest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        assert before == DAY
        self.asked.append(f"{name}{specifier}")
        return max(self._fits(name, specifier), key=Version, default=None)

    def oldest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        assert before == DAY
        return min(self._fits(name, specifier), key=Version, default=None)

    @staticmethod
    def _fits(name: str, specifier: str) -> list[str]:
        return [each for each in RELEASES.get(name, {}) if each != "14.0.0" and SpecifierSet(specifier).contains(each)]


def found(index: MadeIndex | None = None, **stated: tuple[str, ...]) -> list[Clash]:
    """The clashes of torch 2.11.0, sglang 0.5.9 and what else is named, of version 1.0."""
    pins = {name: {"torch": "2.11.0", "sglang": "0.5.9"}.get(name, "1.0") for name in stated}
    requirements = {name: [Requirement(text) for text in texts] for name, texts in stated.items()}
    return clashes(pins, requirements, index or MadeIndex(), DAY)


@pytest.mark.parametrize(
    ("pin", "ours"), [("==1.6.0rc5", "1.5.0"), ("==1.6.0", "1.5.0"), ("==1.4.0", "1.5.0"), ("==1.5.0", None)]
)
def test_a_release_that_has_no_wheel_is_pinned(pin: str, ours: str | None) -> None:
    """sglang 0.5.18 pins cuda-tile 1.6.0rc5, of which there is a source distribution alone."""
    expected = [Clash("cuda-tile", pin, "sglang 0.5.9", ours, absent=True)] if ours else []
    assert found(sglang=(f"cuda-tile{pin}",)) == expected


def test_no_release_of_a_package_has_a_wheel() -> None:
    assert found(sglang=("absent==1.0",)) == [Clash("absent", "==1.0", "sglang 0.5.9", None, absent=True)]


def test_a_package_that_nobody_named_is_pinned_to_what_another_excludes() -> None:
    """sglang 0.5.9 beside torch 2.11: cuda-python 12.9 goes with none of the bindings that torch takes."""
    against = "torch 2.11.0's `cuda-bindings<14,>=13.0.3`"
    assert found(torch=TORCH, sglang=SGLANG) == [Clash("cuda-python", "==12.9", "sglang 0.5.9", "13.0.3", against)]


def test_what_goes_together_is_no_clash_and_costs_no_page() -> None:
    index = MadeIndex()
    assert found(index, torch=("cuda-bindings<13",), sglang=SGLANG) == []
    assert found(index, torch=("numpy>=2.4",), sglang=("outlines==0.1.11", "numpy")) == []
    assert not [line for line in index.asked if line.startswith("cuda-python")]


def test_a_package_of_the_report_keeps_its_version() -> None:
    assert found(torch=(), sglang=("torch==2.9.1",)) == [Clash("torch", "==2.9.1", "sglang 0.5.9", "2.11.0")]


def test_two_pins_of_one_package_that_nobody_named() -> None:
    against = "torch 2.11.0's `cuda-python>=13`"
    assert found(torch=("cuda-python>=13",), sglang=SGLANG) == [
        Clash("cuda-python", "==12.9", "sglang 0.5.9", "13.0.3", against)
    ]


def test_where_no_release_fits_that_is_said() -> None:
    (clash,) = found(torch=("cuda-bindings==13.2.0",), sglang=("cuda-python==12.9",))
    assert (clash.package, clash.ours) == ("cuda-python", None)
