"""`builder abi` beside a torch that is no release, on wheels of an index on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.abi.report import as_text
from builder.abi.verb import ask
from builder.errors import UsageError
from builder.settings import Settings
from tests.loopback import Loopback, loopback, wheel
from tests.made import settings_at
from tests.unit.test_abiverb import ABI3, TAG, kernel, library

# Servers of their own, and a compiler: `make processes`.
pytestmark = pytest.mark.processes

NGC = "2.9.0a0+50eac811a6.nv25.9"
PARSE = "_ZN5torch3jit17parseSchemaOrNameERKSsb"


@pytest.fixture
def index() -> Iterator[Loopback]:
    with loopback() as site:
        site.add(kernel())
        old = library("", wants=(PARSE,), needed=("libc10.so",))
        site.add(wheel("oldkernel", "1.0", tag=ABI3, files={"oldkernel/ops.abi3.so": old}))
        site.add(wheel("torch", "2.9.1", tag=TAG, files={"torch/lib/libc10.so": library("libc10.so", ("other",))}))
        yield site


@pytest.fixture
def site(index: Loopback, tmp_path: Path) -> Settings:
    return settings_at(tmp_path, index=f"{index.url}/simple/")


def told(site: Settings, *lines: str) -> str:
    return as_text(ask(lines, site, python="3.11", base="bookworm", find=None))


def test_what_a_vendors_torch_exports_is_not_known(site: Settings) -> None:
    assert (
        told(site, "kernel==0.3.21", f"torch=={NGC}")
        == """\
uncertain: 1 of 1 native file of kernel 0.3.21 (Python 3.11, Debian 12)

uncertain  kernel/ops.abi3.so
  not known: torch 2.9.0a0+50eac811a6.nv25.9 is NVIDIA's build for its containers, and what it exports was not read: it is made from \
a commit between two releases, with the new std::string ABI; public extensions are compiled for a release

note: `kernel/ops.abi3.so`: take a public torch, or extensions that are built in that container (JIT flashinfer, sgl-kernel from source)"""
    )


def test_the_old_strings_do_not_fit_it(site: Settings) -> None:
    text = told(site, "oldkernel==1.0", f"torch=={NGC}")
    assert text.startswith("broken: 1 of 1 native file of oldkernel 1.0 (Python 3.11, Debian 12)\n")
    assert (
        "because: torch 2.9.0a0+50eac811a6.nv25.9 is NVIDIA's build for its containers, which has the new std::string"
        in text
    )
    assert text.endswith("hint: which releases of torch fit: `builder abi oldkernel==1.0 --find torch`")


def test_a_build_that_is_at_hand_is_read(index: Loopback, site: Settings) -> None:
    index.add(wheel("torch", NGC, tag=TAG, files={"torch/lib/libc10.so": library("libc10.so", ("other",))}))
    assert "NVIDIA's build" not in told(site, "kernel==0.3.21", f"torch=={NGC}")


def test_a_torch_alone_that_is_nowhere_is_refused(site: Settings) -> None:
    with pytest.raises(UsageError, match=r"torch has no release 2.9.0a0\+50eac811a6.nv25.9"):
        told(site, f"torch=={NGC}")
