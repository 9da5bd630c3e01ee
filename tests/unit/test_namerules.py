"""Old names, release trains, builds that are no release: each finding as a user reads it, and silence where none is due."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.facts import CoupledFact, RenamedFact, load_facts, parse_facts
from builder.findings import Finding, Severity
from builder.lock import Artefact
from builder.matrix import parse_matrix
from builder.rules import Context, evaluate_rules
from builder.vendors import vendor_build
from builder.yamlsource import SourceError
from tests.unit.test_lockrules import TEXT, TODAY, lock_of, wheel


def findings(rule: str, *wheels: Artefact, text: str = TEXT, locked: bool = True) -> list[Finding]:
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    found = evaluate_rules(Context(loaded, TODAY, lock_of(wheels) if locked else None))
    return [finding for finding in found if finding.rule == rule]


def told(rule: str, *wheels: str, text: str = TEXT, locked: bool = True) -> str:
    return "\n".join(map(str, findings(rule, *map(wheel, wheels), text=text, locked=locked)))


# Names.


def test_a_name_that_is_only_a_placeholder_now_is_told_before_anything_is_locked() -> None:
    text = TEXT + "extras: [nvidia-cublas-cu13==0.0.1]\n"
    assert (
        told("renamed", text=text, locked=False)
        == """\
error: `nvidia-cublas-cu13` is called `nvidia-cublas` now [renamed]
  at: matrices/x.yaml:11
  because: from CUDA 13 on NVIDIA's wheels have no suffix; under the old name the index has a placeholder (0.0.1, without a wheel)
  hint: name `nvidia-cublas` instead
  source: the default index; facts/stacks.md section 1 (what torch 2.9.1+cu130 requires)"""
    )


def test_an_old_name_beside_the_new_one() -> None:
    assert (
        told("renamed", "pynvml 11.5.3", "nvidia-ml-py 13.610.43")
        == """\
warning: `pynvml` beside `nvidia-ml-py`, which is its name now [renamed]
  at: matrices/x.yaml:1
  because: up to 11 it brings a module `pynvml` of its own, which is not NVIDIA's current one
  hint: leave `pynvml` out
  source: RECORD of nvidia-ml-py 13.610.43; https://github.com/gpuopenanalytics/pynvml"""
    )


def test_a_kernel_under_the_name_that_a_later_sglang_does_not_ask_for() -> None:
    assert (
        told("renamed", "sgl-kernel 0.3.21", "sglang 0.5.10")
        == """\
error: `sgl-kernel` is called `sglang-kernel` now [renamed]
  at: matrices/x.yaml:1
  because: both install the import package `sgl_kernel`, and sglang asserts that `sglang-kernel` is there when it starts
  hint: name `sglang-kernel` instead
  source: facts/runtime-checks.yaml (sglang 0.5.10rc0 and later); facts/patches.md section B"""
    )


@pytest.mark.parametrize(
    "wheels",
    [
        ("sgl-kernel 0.3.21", "sglang 0.5.9"),
        ("sgl-kernel 0.3.21",),
        ("pynvml 13.0.1", "nvidia-ml-py 13.610.43"),
        ("nvidia-cudnn-cu13 9.13.0.50", "nvidia-nccl-cu13 2.28.9", "nvidia-cublas 13.1.0.3"),
        ("nvidia-cublas-cu12 12.8.4.1",),
        ("flashinfer-python 0.6.12",),
    ],
)
def test_names_that_are_right(wheels: tuple[str, ...]) -> None:
    assert told("renamed", *wheels) == ""


def test_no_new_name_is_an_old_one() -> None:
    old = {name for fact in load_facts(RenamedFact) for name in fact.names}
    assert not old & {name for fact in load_facts(RenamedFact) for name in fact.names.values()}


# Trains.


def test_releases_of_two_trains() -> None:
    assert (
        told("release-train", "torch 2.9.1+cu130", "triton 3.6.0")
        == """\
warning: torch 2.9.1+cu130 beside triton 3.6.0, which is not of its release train [release-train]
  at: matrices/x.yaml:9
  because: torch.compile is written for one release of triton
  hint: take triton 3.5.*
  source: METADATA of torch 2.5.0 to 2.15.0, read 2026-11-30"""
    )


@pytest.mark.parametrize(
    ("wheels", "others"),
    [
        (("torch 2.10.0", "torchvision 0.25.0", "torchaudio 2.10.0", "triton 3.6.0"), []),
        (("torch 2.8.0", "torchvision 0.22.0", "torchaudio 2.9.0"), ["torchaudio", "torchvision"]),
        (("torch 2.12.0", "torchvision 0.26.0", "torchaudio 2.11.0"), ["torchvision"]),
        (("nvidia-cutlass-dsl 4.5.2", "nvidia-cutlass-dsl-libs-cu13 4.6.0"), ["nvidia-cutlass-dsl-libs-cu13"]),
        (("nvidia-cutlass-dsl 4.5.2", "nvidia-cutlass-dsl-libs-base 4.5.2"), []),
        # Of a torch that nobody noted nothing is said; nor where a fact on builds says more (`built-for-torch`).
        (("torch 2.16.0", "torchvision 0.20.0"), []),
        (("torch 2.10.0", "torchvision 0.24.1"), []),
        (("torchvision 0.24.1",), []),
    ],
)
def test_trains(wheels: tuple[str, ...], others: list[str]) -> None:
    assert [finding.subject for finding in findings("release-train", *map(wheel, wheels))] == others


def test_what_metadata_binds_is_told_by_the_rule_on_metadata() -> None:
    assert not findings("release-train", wheel("torch 2.9.1+cu130", "triton==3.5.1"), wheel("triton 3.6.0"))
    assert findings("release-train", wheel("torch 2.9.1+cu130", "triton"), wheel("triton 3.6.0"))


def test_a_train_needs_a_number_for_each() -> None:
    text = "facts:\n  - {packages: [a, b, c], how: series, series: {'1.0': ['2.0']}, because: x, source: y}\n"
    with pytest.raises(SourceError, match="each row of `series` has a number for every package but the first"):
        parse_facts(CoupledFact, "x.yaml", text)
    with pytest.raises(SourceError, match="`series` belongs to `how: series`"):
        parse_facts(CoupledFact, "x.yaml", "facts:\n  - {packages: [a, b], how: series, because: x, source: y}\n")


# Builds.


def test_public_extensions_beside_a_vendors_torch() -> None:
    text = TEXT.replace("torch: 2.11.0", "torch: 2.9.0a0+50eac811a6.nv25.9") + "prereleases: [torch]\n"
    vendor = wheel("torch 2.9.0a0+50eac811a6.nv25.9", index=None)
    (found,) = findings("vendor-build", vendor, wheel("sgl-kernel 0.3.21"), text=text)
    assert (
        str(found)
        == """\
warning: torch 2.9.0a0+50eac811a6.nv25.9 is NVIDIA's build for its containers, and sgl-kernel 0.3.21 is compiled for a public release \
[vendor-build]
  at: matrices/x.yaml:9
  because: it is made from a commit between two releases, with the new std::string ABI; public extensions are compiled for a release
  hint: take a public torch, or extensions that are built in that container (JIT flashinfer, sgl-kernel from source)
  source: case 011 (flashinfer-ai/flashinfer#911)"""
    )
    assert found.severity is Severity.WARNING
    assert not findings(
        "vendor-build", vendor, wheel("numpy 2.0.0", tag="cp311-cp311-manylinux_2_28_x86_64"), text=text
    )
    # What is built beside it is another build.
    assert not findings("vendor-build", vendor, wheel("sgl-kernel 0.3.21+site", index="site"), text=text)
    native = wheel("flash-attn 2.8.0", "torch", tag="cp311-cp311-linux_x86_64")
    assert findings("vendor-build", vendor, native, text=text)
    assert not findings("vendor-build", vendor, wheel("xgrammar 0.1.0", "torch"), text=text)


@pytest.mark.parametrize(
    ("version", "what"),
    [
        ("2.5.0a0+872d972e41.nv24.8", "NVIDIA's build for its containers"),
        ("2.8.0a0+5228986c39.nv25.6", "NVIDIA's build for its containers"),
        ("2.5.0a0+872d972e41.nv24.8.17622132", "NVIDIA's build for its containers"),
        ("2.9.0.dev20250801+cu128", "a nightly build"),
        ("2.9.0a0+git1a2b3c4", "a build from source"),
        ("2.9.1", None),
        ("2.9.1+cu130", None),
        ("2.10.0rc3", None),
        ("2.11.0+cpu", None),
    ],
)
def test_versions_that_say_where_a_build_comes_from(version: str, what: str | None) -> None:
    fact = vendor_build("torch", version)
    assert (fact.what if fact is not None else None) == what
    assert vendor_build("numpy", version) is None
