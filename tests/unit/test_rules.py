"""Rules: each finding as a user reads it, and silence where there is nothing to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.findings import Finding, Severity
from builder.matrix import list_matrices, load, parse_matrix
from builder.rules import RULES, Context, Rule, evaluate_rules, local_cuda, rule
from tests.unit.test_lockrules import TEXT, TODAY, lock_of

MATRICES = Path(__file__).resolve().parents[2] / "matrices"


def told(*changes: tuple[str, str], text: str = TEXT) -> str:
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    return "\n".join(str(finding) for finding in evaluate_rules(Context(loaded, TODAY)))


@pytest.mark.parametrize("path", list_matrices(MATRICES), ids=lambda path: path.stem)
def test_checked_in_matrices_have_no_errors(path: Path) -> None:
    findings = evaluate_rules(Context(load(path), TODAY))
    assert [finding for finding in findings if finding.severity is Severity.ERROR] == []


def test_nothing_to_say_about_a_good_matrix() -> None:
    assert told() == ""


STACK_129 = ("torch: 2.11.0", "torch: 2.9.1")
CUDA_128 = ("13.0.2", "12.8.1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("2026-03-01", "2026-12-01")],
            """\
error: `as_of` is 2026-12-01, and today is 2026-11-30 [as-of-in-future]
  at: matrices/x.yaml:2
  because: files uploaded until then would still change what the matrix resolves to
  hint: write `as_of: 2026-11-30` or an earlier date""",
        ),
        (
            [("budget: {image: 13 GB}\n", "")],
            """\
note: no size budget, so an image that grows is not noticed [budget]
  at: matrices/x.yaml:1
  hint: add `budget: {image: 13 GB}`, with some room above what the image has now""",
        ),
        (
            [("12.0", "12.1"), CUDA_128, STACK_129],
            """\
warning: GPU 12.1 (GB10 (DGX Spark)) needs CUDA 12.9, the matrix has 12.8.1 [gpu-needs-cuda]
  at: matrices/x.yaml:7
  because: the first nvcc that compiles for sm_121a is CUDA 12.9's
  hint: take CUDA 12.9 or later, or remove 12.1 from `gpus`
  source: https://developer.nvidia.com/cuda-gpus; https://docs.nvidia.com/cuda/archive/12.9.1/cuda-features-archive/""",
        ),
        (
            [CUDA_128, ("torch: 2.11.0", "torch: 2.9.1\n  sglang: 0.5.9")],
            """\
warning: no compiler in the image: kernels that sglang compiles at run time cannot be used [jit-none]
  at: matrices/x.yaml:6
  because: nvidia-cuda-nvcc-cu12 12.8.93 and 12.9.86 hold ptxas, libnvvm and libdevice only, no nvcc: nothing can be compiled when \
the image runs; sglang 0.5.9 has no other code for rotary embeddings (of most models) and the repacking of INT4 weights (of Kimi-K2.5)
  hint: to serve such models take CUDA 13
  source: facts/stacks.md section 3.9, measured 2026-11-29; srt/layers/rotary_embedding.py (365), srt/layers/quantization/gptq.py \
(101) and jit_kernel of sglang 0.5.9, the same imports in 0.5.10.post1, 0.5.11 and 0.5.15.post1, none in 0.5.8.post1; read \
2026-11-30, not run without nvcc""",
        ),
        (
            [CUDA_128, ("torch: 2.11.0", "torch: 2.9.1\n  sglang: 0.5.8.post1")],
            """\
warning: no compiler in the image: kernels that sglang compiles at run time cannot be used [jit-none]
  at: matrices/x.yaml:6
  because: nvidia-cuda-nvcc-cu12 12.8.93 and 12.9.86 hold ptxas, libnvvm and libdevice only, no nvcc: nothing can be compiled when \
the image runs
  hint: take CUDA 13 if they are needed
  source: facts/stacks.md section 3.9, measured 2026-11-29""",
        ),
        (
            [("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: 0.6.12")],
            """\
warning: no compiler in the image: kernels that flashinfer compiles at run time cannot be used [jit-none]
  at: matrices/x.yaml:6
  because: the matrix says `jit: none`
  hint: write `jit: nvcc` and name CUDA 13.0's compiler parts
  source: facts/stacks.md sections 1 and 3.1, measured 2026-11-29""",
        ),
        (
            [("torch: 2.11.0", "torch: 2.11.0\n  sgl-kernel: 0.3.21")],
            """\
error: sgl-kernel 0.3.21 is linked to CUDA 12, the image has CUDA 13.0.2 [kernel-cuda]
  at: matrices/x.yaml:10
  because: its extensions need `libcudart.so.12`
  hint: take a sgl-kernel for CUDA 13, or CUDA 12
  source: facts/abi.md section D and facts/patches.md section E""",
        ),
        (
            [("torch: 2.11.0", "torch: 2.11.0\n  sglang-kernel: 0.4.4+cu129")],
            """\
error: sglang-kernel 0.4.4+cu129 is linked to CUDA 12, the image has CUDA 13.0.2 [kernel-cuda]
  at: matrices/x.yaml:10
  because: its extensions need `libcudart.so.12`
  hint: take a sglang-kernel for CUDA 13, or CUDA 12
  source: the wheel's local version""",
        ),
        (
            [("torch: 2.11.0", "torch: 2.9.1")],
            """\
error: torch 2.9.1 brings CUDA 12.8's libraries, the matrix names CUDA 13.0.2 [torch-cuda]
  at: matrices/x.yaml:9
  because: an image has one CUDA, and it is the one that torch pins
  hint: write `version: "12.8"` under `cuda`, or take a torch for CUDA 13.0
  source: METADATA of torch 2.8.0 to 2.10.0, read 2026-11-30; facts/abi.md section D""",
        ),
        (
            [("torch: 2.11.0", "torch: 2.9.1+cu129"), CUDA_128],
            """\
warning: torch 2.9.1+cu129 brings CUDA 12.9's libraries, the matrix names CUDA 12.8.1 [torch-cuda]
  at: matrices/x.yaml:9
  because: an image has one CUDA, and it is the one that torch pins
  hint: write `version: "12.9"` under `cuda`, or take a torch for CUDA 12.8
  source: the wheel's local version""",
        ),
        (
            [('python: "3.11"', 'python: "3.12"')],
            """\
error: debian bookworm has Python 3.11, the matrix says 3.12 [base-python]
  at: matrices/x.yaml:4
  because: with `kind: archive` the image's Python is the distribution's
  hint: write `python: "3.11"`, or take a release that has 3.12
  source: Debian's archive, bookworm (python3.11 3.11.2, libc6 2.36), seen 2026-11-30""",
        ),
        (
            [("bookworm", "forky")],
            """\
warning: no fact covers debian forky: whether it has Python 3.11 is not known [base-python]
  at: matrices/x.yaml:5
  hint: known are bookworm, trixie""",
        ),
    ],
)
def test_a_finding_as_text(changes: list[tuple[str, str]], message: str) -> None:
    assert told(*changes) == message


def test_a_kernel_of_another_name_than_sglang_requires() -> None:
    text = told(("torch: 2.11.0", "torch: 2.11.0\n  sgl-kernel: 0.3.21\n  sglang: 0.5.15.post1"))
    assert "error: sglang 0.5.15.post1 requires `sglang-kernel`, the stack has `sgl-kernel` [kernel-name]\n" in text
    assert "  hint: replace `sgl-kernel` by `sglang-kernel` (>=0.4.2)\n" in text


def test_a_cubin_that_is_not_on_the_default_index() -> None:
    text = told(("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: 0.6.14"))
    assert "error: flashinfer-cubin 0.6.14 is not on the default index [cubin-missing]\n" in text
    assert (
        "hint: write `flashinfer: {python: 0.6.14, cubin: none}`, or name where it lives under `indexes` or `files`"
        in text
    )
    elsewhere = "indexes: {site: {url: 'https://wheels.example/', packages: [flashinfer-cubin]}}\n"
    assert "cubin-missing" not in told(("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: 0.6.14"), text=TEXT + elsewhere)
    assert "cubin-missing" not in told(("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: {python: 0.6.14, cubin: none}"))


def test_flashinfer_beside_another_cubin() -> None:
    text = told(("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: {python: 0.6.12, cubin: 0.6.11.post1}"))
    assert "error: flashinfer-python 0.6.12 beside flashinfer-cubin 0.6.11.post1 [flashinfer-versions]\n" in text


def test_a_package_from_elsewhere_is_not_what_the_facts_are_about() -> None:
    elsewhere = "indexes: {site: {url: 'https://wheels.example/', packages: [torch]}}\n"
    assert told(("torch: 2.11.0", "torch: 2.9.1"), text=TEXT + elsewhere) == ""


def test_silence_where_no_fact_covers_a_version() -> None:
    assert told(("torch: 2.11.0", "torch: 2.99.0")) == ""


@pytest.mark.parametrize(
    ("version", "cuda"),
    [
        ("2.9.1+cu130", "13.0"),
        ("2.9.1+cu128", "12.8"),
        ("0.3.21+cu130.standin", "13.0"),
        ("2.9.1", None),
        ("2.9.1+cpu", None),
        ("1+cu13", None),
    ],
)
def test_cuda_of_a_local_version(version: str, cuda: str | None) -> None:
    assert local_cuda(version) == cuda


def test_rules_that_need_a_lock_wait_for_one() -> None:
    def evaluate(context: Context) -> Iterator[Finding]:
        yield Finding(rule="x", severity=Severity.NOTE, subject="s", message=f"{context.lock and context.lock.matrix}")

    rules = {"x": Rule("x", "title", evaluate, needs_lock=True)}
    loaded = parse_matrix(TEXT, Path("x.yaml"))
    assert evaluate_rules(Context(loaded, TODAY), rules) == []
    lock = lock_of([])
    assert [f.message for f in evaluate_rules(Context(loaded, TODAY, lock), rules)] == ["x"]


def test_a_rule_speaks_for_itself_only() -> None:
    def evaluate(context: Context) -> Iterator[Finding]:
        yield Finding(rule="y", severity=Severity.NOTE, subject="s", message="m")

    with pytest.raises(ValueError, match="the rule x made a finding of y"):
        evaluate_rules(Context(parse_matrix(TEXT, Path("x.yaml")), TODAY), {"x": Rule("x", "t", evaluate)})
    with pytest.raises(ValueError, match="two rules are called budget"):
        rule("budget")(evaluate)


def test_every_rule_has_a_title() -> None:
    assert all(each.title and each.title != each.name for each in RULES.values())
