"""`builder arch` on real releases, from the package index: about 15 MB are fetched, none of a large shared object."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from builder import cli, settings
from builder.archverb import loadings
from builder.fatbin_stream import scan_stream
from builder.streaming import StreamedReleases, StreamedWheel

pytestmark = pytest.mark.index

PICK = """\
    if compute_capability == 90:
        ops_subdir = "sm90"
        variant_name = "SM90 (Hopper/H100 with fast math optimization)"
    elif compute_capability is not None:
        ops_subdir = "sm100"
"""
FA3 = """\
        torch.cuda.get_device_capability(device)[0] == 9
        or torch.cuda.get_device_capability(device)[0] == 8
"""
RELEASES = [
    ("sgl-kernel", "0.3.21"),
    ("sglang-kernel", "0.4.1"),
    ("sglang-kernel", "0.4.3"),
    ("sglang-kernel", "0.4.4"),
    ("sglang-kernel", "0.4.10"),
]


@pytest.fixture(scope="module")
def opener(tmp_path_factory: pytest.TempPathFactory) -> StreamedReleases:
    return StreamedReleases(replace(settings.load(), cache=tmp_path_factory.mktemp("cache"), wheels=()))


@pytest.mark.parametrize("release", RELEASES)
def test_what_the_loaders_facts_say_is_in_the_wheel(opener: StreamedReleases, release: tuple[str, str]) -> None:
    wheel = opener.release(*release)
    sources = wheel.read_all(["sgl_kernel/load_utils.py", "sgl_kernel/flash_attn.py"])
    assert PICK in sources["sgl_kernel/load_utils.py"].decode()
    assert FA3 in sources["sgl_kernel/flash_attn.py"].decode()
    libraries = {name for name in wheel.entries if ".so" in name}
    known = {loading.file for loading in loadings(*release)}
    assert known <= libraries
    # deep_gemm's has no GPU code: it compiles when it runs.
    assert libraries - known <= {"deep_gemm/deep_gemm_cpp.abi3.so"}


def images(wheel: StreamedWheel, member: str) -> list[tuple[tuple[str, ...], int]]:
    """The names in each container, and how many containers have just these."""
    found = Counter(tuple(image.name for image in each.images) for each in scan_stream(wheel.stream(member)))
    return found.most_common()


def test_members_of_sgl_kernel(opener: StreamedReleases) -> None:
    """As shared/facts/abi.md has them, section C."""
    wheel = opener.release("sgl-kernel", "0.3.21")
    flashmla = images(wheel, "sgl_kernel/flashmla_ops.abi3.so")
    assert sum(count for _, count in flashmla) == 11
    assert {name for names, _ in flashmla for name in names} == {"sm_90a", "sm_100a"}
    ((spatial, count),) = images(wheel, "sgl_kernel/spatial_ops.abi3.so")
    assert (sorted(spatial), count) == (["sm_100a", "sm_120a", "sm_80", "sm_89", "sm_90", "sm_90a"], 1)


def test_a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BUILDER_CACHE", str(tmp_path))
    arguments = ["arch", "torchvision==0.24.1", "--gpu", "12.0", "--gpu", "6.0", "--json"]
    assert cli.main(arguments) == 3
    first = json.loads(capsys.readouterr().out)
    (ops,) = [file for file in first["files"] if file["file"] == "torchvision/_C.so"]
    assert (ops["containers"], ops["gpus"]["12.0"]["by"], ops["gpus"]["6.0"]["covered"]) == (6, {"sm_120": 6}, 0)
    assert ops["images"] == ["sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
    assert 0 < first["bytes_read"] <= 1.01 * first["bytes_total"]
    assert cli.main(arguments) == 3
    again = json.loads(capsys.readouterr().out)
    assert (again["bytes_read"], again["requests"], again["files"]) == (0, 0, first["files"])
