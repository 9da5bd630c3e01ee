"""`builder abi` on real releases: the pairs that were measured before (shared/facts/abi.md, section B; the cases named)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from builder import settings
from builder.abi.report import Report
from builder.abi.verb import ask
from builder.settings import Settings

pytestmark = pytest.mark.index

CHECK = "c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)"
LOGGER = "c10::MessageLogger::MessageLogger(char const*, int, int)"
# Distinct missing symbols, files that are broken, missing libraries.
PAIRS = {
    ("sgl-kernel==0.3.21", "torch==2.9.1"): (0, 0, ()),
    ("sgl-kernel==0.3.21", "torch==2.8.0"): (2, 4, ()),
    ("sgl-kernel==0.3.21", "torch==2.10.0"): (2, 4, ()),
    ("sgl-kernel==0.3.21", "torch==2.11.0"): (
        *(2, 13),
        ("libcublas.so.12", "libcublasLt.so.12", "libcudart.so.12", "libnvrtc.so.12"),
    ),
    ("sgl-kernel==0.1.2.post1", "torch==2.9.1"): (10, 2, ()),  # case 001
    ("torchao==0.9.0", "torch==2.9.1"): (6, 1, ()),
    ("torchao==0.16.0", "torch==2.9.1"): (10, 2, ()),  # case 055: 3 and 7
    ("torchcodec==0.8.0", "torch==2.9.1"): (0, 0, ()),
    ("torch-memory-saver==0.0.9.post1", "torch==2.11.0"): (0, 0, ()),
    ("torchvision==0.29.2", "torch==2.11.0"): (3, 2, ()),
    ("torchvision==0.24.1", "torch==2.10.0"): (2, 2, ()),  # case 062
    ("sgl-deep-gemm==0.1.4.post1", "torch==2.11.0"): (0, 0, ()),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    yield replace(settings.load(), cache=tmp_path_factory.mktemp("cache"))


def answer(site: Settings, *lines: str, find: str | None = None) -> Report:
    return ask(lines, site, python="3.11", base="bookworm", find=find)


@pytest.mark.parametrize("pair", PAIRS, ids=" ".join)
def test_a_pair_that_was_measured(site: Settings, pair: tuple[str, str]) -> None:
    report = answer(site, *pair)
    symbols, files, libraries = PAIRS[pair]
    found = report.extensions
    assert report.verdict == ("broken" if files else "ok")
    assert len({missing.symbol for item in found for missing in item.missing_symbols}) == symbols
    assert sum(item.verdict == "broken" for item in found) == files
    missing = {name for item in found if not item.by_design for name in item.missing_libraries}
    assert tuple(sorted(missing)) == libraries


def test_the_two_symbols_and_what_torch_has_instead(site: Settings) -> None:
    from builder.abi.report import as_json

    said = as_json(answer(site, "sgl-kernel==0.3.21", "torch==2.10.0"))
    found = {m["demangled"]: m["nearest"] for e in said["extensions"] for m in e["missing_symbols"]}
    assert found == {
        CHECK: CHECK.replace("char const*, int, bool", "char const*, unsigned int, bool"),
        LOGGER: "c10::MessageLogger::MessageLogger(char const*, int, int, bool)",
    }
    assert said["fitting"] == ["torch 2.9.0", "torch 2.9.1"]


def test_which_torch_fits(site: Settings) -> None:
    report = answer(site, "sgl-kernel==0.3.21", find="torch")
    assert [item.version for item in report.candidates][:3] == ["2.6.0", "2.7.0", "2.7.1"]
    assert [item.version for item in report.candidates if item.verdict == "ok"] == ["2.9.0", "2.9.1"]
    assert {item.verdict for item in report.candidates} == {"ok", "broken"}


def test_the_tables_say_what_the_wheels_say(site: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same verdict, read from torch's wheel itself: within 15 MB."""
    shipped = answer(site, "sgl-kernel==0.3.21", "torch==2.10.0")
    monkeypatch.setattr("builder.abi.tables.wheels", lambda *_: [])
    read = answer(replace(site, cache=tmp_path), "sgl-kernel==0.3.21", "torch==2.10.0")
    assert read.extensions == shipped.extensions
    assert read.bytes_read < 15_000_000 < read.bytes_total
