"""`builder abi --platform linux/arm64`, on made wheels: libraries of a compiler here, with the machine in their headers changed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.abi.report import Report, as_json, as_text
from builder.abi.verb import ask
from builder.errors import UsageError
from builder.settings import Settings
from tests.loopback import Loopback, loopback, wheel
from tests.made import settings_at
from tests.unit.test_abiverb import CHECK, library

pytestmark = pytest.mark.processes

ARM = "cp311-cp311-manylinux_2_28_aarch64"
X86 = "cp311-cp311-manylinux_2_28_x86_64"
EM_AARCH64 = (183).to_bytes(2, "little")


def arm(data: bytes) -> bytes:
    """The same library, said to be for aarch64."""
    return data[:18] + EM_AARCH64 + data[20:]


def kernel(version: str, tag: str, *needed: str, machine: bool = True) -> tuple[str, bytes]:
    data = library("", wants=(CHECK,), needed=("libc10.so", *needed))
    return wheel("kernel", version, tag=tag, files={"kernel/ops.abi3.so": arm(data) if machine else data})


@pytest.fixture
def index() -> Iterator[Loopback]:
    """torch 2.9.1 for aarch64 is built without CUDA; kernel has wheels for aarch64 from 0.3.12 on."""
    c10 = library("libc10.so", (CHECK,))
    deps = library("libtorch_global_deps.so", ("deps",))
    cuda = library("libc10_cuda.so", ("cuda",))
    both = {"torch/lib/libtorch_global_deps.so": deps, "torch/lib/libc10.so": c10}
    with loopback() as site:
        for made in (
            wheel("torch", "2.9.1", tag=X86, files={**both, "torch/lib/libc10_cuda.so": cuda}),
            wheel("torch", "2.9.1", tag=ARM, files={name: arm(data) for name, data in both.items()}),
            kernel("0.3.11", X86, machine=False),
            kernel("0.3.12", ARM),
            kernel("0.3.21", X86, "libc10_cuda.so", machine=False),
            kernel("0.3.21", ARM, "libc10_cuda.so"),
            kernel("0.3.22", ARM, machine=False),
        ):
            site.add(made)
        yield site


@pytest.fixture
def site(index: Loopback, tmp_path: Path) -> Settings:
    return settings_at(tmp_path, index=f"{index.url}/simple/")


def answer(site: Settings, *lines: str, base: str = "bookworm", platform: str = "linux/arm64") -> Report:
    return ask(lines, site, python="3.11", base=base, find=None, platform=platform)


def test_text_of_a_torch_without_cuda(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch==2.9.1")
    assert as_text(report) == (
        "broken: 1 of 1 native file of kernel 0.3.21 (Python 3.11, Debian 12, aarch64)\n"
        "\n"
        "broken     kernel/ops.abi3.so\n"
        "  no library  libc10_cuda.so\n"
        "  because: `libc10_cuda.so` is torch's, and torch 2.9.1 does not have it: it was built without CUDA"
    )
    assert as_json(report)["machine"] == "aarch64"


def test_each_platform_has_its_wheel(site: Settings) -> None:
    assert answer(site, "kernel==0.3.21", "torch==2.9.1", platform="linux/amd64").verdict == "ok"
    assert answer(site, "kernel==0.3.12", "torch==2.9.1").verdict == "ok"


def test_a_release_without_a_wheel_names_the_nearest_that_has_one(site: Settings) -> None:
    with pytest.raises(UsageError) as caught:
        answer(site, "kernel==0.3.11", "torch==2.9.1")
    assert str(caught.value) == (
        "error: kernel 0.3.11 has no wheel for Python 3.11 on Debian 12, aarch64\n"
        f"  because: the index has kernel-0.3.11-{X86}.whl\n"
        "  hint: the nearest release with one is `0.3.12`; another Python is named with `--python`, another base with `--base`"
    )


def test_a_file_of_another_machine_in_a_wheel(site: Settings) -> None:
    (found,) = answer(site, "kernel==0.3.22", "torch==2.9.1").extensions
    assert (found.verdict, found.because) == ("broken", ("it is for x86_64, and the target is aarch64",))


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (
            {"platform": "linux/riscv64"},
            "error: the platform `linux/riscv64` is not known\n  hint: known are `linux/amd64` and `linux/arm64`",
        ),
        ({"base": "noble"}, "error: what `noble` has on aarch64 is not known\n  hint: known: `bookworm`"),
    ],
)
def test_what_is_refused(site: Settings, named: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        answer(site, "kernel==0.3.21", **named)
    assert str(caught.value) == said
