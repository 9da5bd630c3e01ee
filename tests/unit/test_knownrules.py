"""Rules about known releases: each finding as a user reads it, and silence where no fact covers a case."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from packaging.requirements import Requirement

from builder.facts import CostFact, IncompatibleFact, LaunchFact, SiteFact, TogetherFact, load_facts
from builder.findings import Finding, Severity
from builder.matrix import parse_matrix
from builder.rules import Context, evaluate_rules
from tests.unit.test_lockrules import JIT, TEXT, TODAY, findings, lock_of, told, wheel


def test_releases_that_do_not_work_together() -> None:
    assert (
        told(wheel("kernels 0.17.0"), wheel("sglang 0.5.12.post1"), text=TEXT + "extras: [kernels==0.17.0]\n")
        == """\
error: kernels 0.17.0 and sglang 0.5.12.post1 do not work together [known-incompatible]
  at: matrices/x.yaml:11
  because: `import sglang.srt.models.kimi_k25` fails: `Either a revision or a version must be specified`
  hint: add `kernels==0.14.1` to `extras`
  source: facts/stacks.md section 3.3, measured 2026-11-29; case 060 (sgl-project/sglang#27654)"""
    )


CUDNN = [wheel("nvidia-cudnn-cu13 9.13.0.50"), wheel("sglang 0.5.9"), wheel("torch 2.9.1+cu130")]


def test_what_a_matrix_can_accept() -> None:
    assert (
        told(*CUDNN)
        == """\
error: torch 2.9.1+cu130, nvidia-cudnn-cu13 9.13.0.50 and sglang 0.5.9 do not work together [known-incompatible]
  at: matrices/x.yaml:9
  because: sglang refuses to start multimodal models (Kimi-K2.5 is one), because of a defect of torch 2.9.1's Conv3d with it
  hint: declare under `overrides` that `nvidia-cudnn-cu13` is 9.16 or later, or set `SGLANG_DISABLE_CUDNN_CHECK: 1` under `environment`
  source: facts/patches.md section E (cuDNN check); case 054 (ai-dynamo/dynamo#5482, pytorch#168167); srt/server_args.py of \
0.5.6.post2 to 0.5.9 refuses, from 0.5.10.post1 on srt/layers/conv.py goes around it; read 2026-11-30"""
    )
    assert (
        told(*CUDNN, text=TEXT + 'environment: {SGLANG_DISABLE_CUDNN_CHECK: "1"}\n')
        == """\
note: torch 2.9.1+cu130, nvidia-cudnn-cu13 9.13.0.50 and sglang 0.5.9 do not work together [known-incompatible]
  at: matrices/x.yaml:11
  because: sglang refuses to start multimodal models (Kimi-K2.5 is one), because of a defect of torch 2.9.1's Conv3d with it; \
the matrix sets `SGLANG_DISABLE_CUDNN_CHECK`
  source: facts/patches.md section E (cuDNN check); case 054 (ai-dynamo/dynamo#5482, pytorch#168167); srt/server_args.py of \
0.5.6.post2 to 0.5.9 refuses, from 0.5.10.post1 on srt/layers/conv.py goes around it; read 2026-11-30"""
    )


def test_what_is_likely_and_about_some_gpus() -> None:
    wheels = [wheel("sglang 0.5.7"), wheel("flashinfer-python 0.5.3")]
    assert (
        told(*wheels)
        == """\
warning: sglang 0.5.7 and flashinfer-python 0.5.3 may not work together on GPU 12.0 [known-incompatible]
  at: matrices/x.yaml:1
  because: sglang switches flashinfer's fused all-reduce on for these GPUs and some models, and it has no kernel for them: \
`No supported CUDA architectures found for major versions [9, 10]`
  hint: take sglang 0.5.8 or later
  source: case 108 (sgl-project/sglang#15650, fixed by #16283); facts/patches.md sections 0.3 and B, S6
warning: sglang 0.5.7 may not work on GPU 12.0 [known-incompatible]
  at: matrices/x.yaml:1
  because: gpt-oss is forced onto flashinfer's MXFP4 MoE kernel, which only compute capability 10.0 has
  hint: take a later sglang, or serve other models
  source: case 044 (sgl-project/sglang#13061)"""
    )
    assert told(*wheels, text=TEXT.replace("12.0", "9.0")) == ""


@pytest.mark.parametrize(
    ("wheels", "severities"),
    [
        (["kernels 0.15.0", "sglang 0.5.11"], "error"),
        (["kernels 0.14.1", "sglang 0.5.12.post1"], ""),
        (["kernels 0.17.0", "sglang 0.5.15.post1"], ""),
        (["kernels 0.17.0"], ""),
        (["torch 2.9.1", "nvidia-cudnn-cu12 9.10.2.21", "sglang 0.5.9"], "error"),
        (["torch 2.9.1", "nvidia-cudnn-cu12 9.16.0.29", "sglang 0.5.9"], ""),
        (["torch 2.9.1", "nvidia-cudnn-cu12 9.10.2.21"], ""),
        (["torch 2.9.1", "nvidia-cudnn-cu12 9.10.2.21", "sglang 0.5.6.post2"], "error warning"),
        (["torch 2.9.1", "nvidia-cudnn-cu12 9.10.2.21", "sglang 0.5.10.post1"], ""),
        (["torch 2.8.0", "nvidia-nccl-cu12 2.26.2"], "error"),
        (["torch 2.7.1", "nvidia-nccl-cu12 2.26.2"], ""),
        (["cuda-bindings 12.9.4", "nvidia-cuda-runtime 13.0.48"], "note"),
        (["cuda-bindings 13.3.1", "nvidia-cuda-runtime 13.0.96"], ""),
        (["torch-memory-saver 0.0.9", "nvidia-cuda-runtime 13.0.48"], "warning"),
        (["torch-memory-saver 0.0.9.post1", "nvidia-cuda-runtime 13.0.96"], ""),
        (["torch-memory-saver 0.0.9", "nvidia-cuda-runtime-cu12 12.8.90"], ""),
        (["flashinfer-python 0.6.7.post3"], "warning"),
        (["sgl-kernel 0.3.12"], "warning"),
        (["tilelang 0.1.11", "flashinfer-python 0.6.18"], ""),
    ],
)
def test_known_releases(wheels: list[str], severities: str) -> None:
    found = findings(*map(wheel, wheels))
    assert " ".join(finding.severity for finding in found) == severities


def test_what_works_at_a_cost() -> None:
    assert (
        told(wheel("tilelang 0.1.11"), wheel("flashinfer-python 0.6.12"))
        == """\
warning: tilelang 0.1.11 beside flashinfer-python 0.6.12: works, at a cost [known-cost]
  at: matrices/x.yaml:1
  because: where tilelang is imported first, `import flashinfer.comm` binds its `libcudart_stub.so` and fails (`undefined symbol: \
cudaDeviceReset`); sglang then serves without flashinfer's fused all-reduce
  hint: nothing to do with the servers of this stack; in code of your own, import `flashinfer.comm` before tilelang
  source: facts/patches.md F7 (flashinfer #3676, #3930, #5198); both orders run with tilelang 0.1.11 and flashinfer 0.6.12, 2026-11-30"""
    )


def test_what_is_about_images_without_a_compiler() -> None:
    assert findings(wheel("sgl-kernel 0.3.12"), text=JIT) == []


@pytest.mark.parametrize("model", [IncompatibleFact, CostFact, LaunchFact])
def test_facts_name_distributions_in_normal_form(model: type[TogetherFact]) -> None:
    for fact in load_facts(model):
        assert all(Requirement(each).name.replace("_", "-").lower() == Requirement(each).name for each in fact.together)


# Compiled code and torch


def test_a_kernel_that_does_not_load_beside_this_torch() -> None:
    assert (
        told(wheel("sgl-kernel 0.3.21"), wheel("torch 2.10.0"))
        == """\
error: sgl-kernel 0.3.21 does not load beside torch 2.10.0 [built-for-torch]
  at: matrices/x.yaml:9
  because: it needs `c10::cuda::c10_cuda_check_implementation(int, char const*, char const*, int, bool)`, whose line number is \
unsigned from torch 2.10 on
  hint: take a sgl-kernel for torch 2.10.0, or torch 2.9
  source: facts/abi.md section B, measured 2026-11-29 (torch 2.8.0, 2.9.1, 2.10.0 and 2.11.0); case 005"""
    )


def test_a_kernel_of_another_build_is_not_what_was_measured() -> None:
    (found,) = findings(wheel("sgl-kernel 0.3.21+site", index="site"), wheel("torch 2.10.0"))
    assert found.severity is Severity.WARNING
    assert found.because.endswith("; seen with the default index's wheel, this is another file")


def test_a_kernel_built_for_another_torch() -> None:
    assert (
        told(wheel("sglang-kernel 0.4.4"), wheel("torch 2.13.0"))
        == """\
error: sglang-kernel 0.4.4 does not load beside torch 2.13.0 [built-for-torch]
  at: matrices/x.yaml:9
  because: it needs `at::cuda::getCurrentCUDABlasHandle()`, which has an argument from torch 2.12 on
  hint: take sglang-kernel >=0.4.6.post1,<=0.4.8, or torch 2.11
  source: every release of it beside torch 2.6.0, 2.7.1, 2.8.0, 2.9.1, 2.10.0, 2.11.0, 2.13.0 and 2.14.1, judged 2026-11-30 (`builder \
abi`); case 006"""
    )


def test_compiled_operators_that_are_left_out() -> None:
    assert (
        told(wheel("torchao 0.9.0"), wheel("torch 2.9.1+cu130"))
        == """\
warning: torchao 0.9.0 goes without its compiled operators beside torch 2.9.1+cu130 [built-for-torch]
  at: matrices/x.yaml:9
  because: they have the old std::string ABI; torchao swallows the error, and only `--torchao-config` uses them
  hint: take torchao 0.14.1, or torch <2.7
  source: facts/abi.md section B; facts/stacks.md section 1"""
    )


@pytest.mark.parametrize(
    ("what", "torch", "severities"),
    [
        ("sgl-kernel 0.3.21", "2.9.1", ""),
        ("sgl-kernel 0.3.21+cu130", "2.9.1+cu130", ""),
        ("sgl-kernel 0.3.21", "2.8.0", "error"),
        ("sgl-kernel 0.3.21", "2.11.0", "error"),
        ("sgl-kernel 0.3.21", "2.7.1", "error"),
        ("sgl-kernel 0.3.18", "2.9.1", "error"),
        ("sgl-kernel 0.3.18.post1", "2.9.1", ""),
        ("sgl-kernel 0.2.9", "2.7.1", ""),
        ("sgl-kernel 0.0.5", "2.7.1", ""),
        ("sglang-kernel 0.4.8", "2.13.0", ""),
        ("sglang-kernel 0.4.9", "2.13.0", "error"),
        ("sgl-kernel 0.1.2.post1", "2.9.1", "error"),
        ("sgl-kernel 0.1.2.post1", "2.6.0", ""),
        ("sglang-kernel 0.4.1", "2.9.1", ""),
        ("sglang-kernel 0.4.6.post1", "2.11.0", "error"),
        ("sglang-kernel 0.4.6.post1", "2.13.0", ""),
        ("torchvision 0.29.2", "2.11.0", "error"),
        ("torchvision 0.29.2", "2.14.1", ""),
        ("torchvision 0.24.1", "2.10.0", "error"),
        ("torchvision 0.26.0", "2.11.0", ""),
        ("torchaudio 2.11.0", "2.10.0", "error"),
        ("torchaudio 2.11.0", "2.13.0", ""),
        ("torchaudio 2.10.0", "2.6.0", "error"),
        ("torchao 0.16.0", "2.9.1", "warning"),
        ("torchao 0.17.0", "2.11.0", ""),
        ("torchao 0.99.0", "2.9.1", ""),
    ],
)
def test_compiled_code_and_torch(what: str, torch: str, severities: str) -> None:
    found = findings(wheel(what), wheel(f"torch {torch}"))
    assert " ".join(finding.severity for finding in found if finding.rule == "built-for-torch") == severities


def test_nothing_about_torch_without_torch() -> None:
    assert told(wheel("sgl-kernel 0.3.21")) == ""


# The OS and the GPU


def test_a_library_of_the_os_that_is_missing() -> None:
    assert (
        told(wheel("sglang-kernel 0.4.3"), os_packages=["libc6"])
        == """\
error: sglang-kernel 0.4.3 needs `libnuma.so.1`, and the base has none [os-library-missing]
  at: matrices/x.yaml:5
  because: no wheel brings it
  hint: add `libnuma1` to `packages` under `base`, and lock again
  source: facts/abi.md, things the checker must model (gone from 0.4.4)"""
    )


@pytest.mark.parametrize(
    ("what", "os_packages"),
    [("sglang-kernel 0.4.4", ["libc6"]), ("sglang-kernel 0.4.3", ["libc6", "libnuma1"]), ("sglang-kernel 0.4.3", [])],
)
def test_no_library_is_missing_or_the_base_is_not_known(what: str, os_packages: list[str]) -> None:
    assert told(wheel(what), os_packages=os_packages) == ""


def test_a_gpu_that_tritons_assembler_does_not_know() -> None:
    gb10 = TEXT.replace('["12.0"]', '["12.0", "12.1"]')
    assert (
        told(wheel("triton 3.5.1"), text=gb10)
        == """\
error: triton 3.5.1 cannot compile for GPU 12.1 [triton-ptxas]
  at: matrices/x.yaml:7
  because: its ptxas is CUDA 12.8's and does not know sm_121a
  hint: take a torch with a later triton
  source: ptxas 12.8.93 of 3.4.0, 3.5.0 and 3.5.1, run 2026-11-30; ptxas of nvidia-cuda-nvcc-cu12 12.8.61, 12.8.93, run 2026-11-30"""
    )
    own = "TRITON_PTXAS_PATH: /usr/local/cuda/bin/ptxas"
    with_nvcc = JIT.replace('["12.0"]', '["12.1"]')
    (found,) = findings(wheel("triton 3.5.1"), text=with_nvcc)
    assert found.hint == f"write `{own}` under `environment`, or take a torch with a later triton"
    assert told(wheel("triton 3.5.1"), text=with_nvcc + f"environment: {{{own}}}\n") == ""
    assert told(wheel("triton 3.6.0"), text=gb10) == ""
    assert told(wheel("triton 3.5.1")) == ""
    # Of an older one no device of this stack is known.
    (found,) = findings(wheel("triton 3.2.0"))
    assert found.because == "its ptxas is CUDA 12.4's and does not know sm_120a"
    assert told(wheel("triton 3.2.0"), text=TEXT.replace("12.0", "9.0")) == ""


# flashinfer's parts


def test_parts_of_flashinfer_that_something_else_brought() -> None:
    assert (
        told(wheel("flashinfer-python 0.6.14"), wheel("flashinfer-cubin 0.6.13"))
        == """\
error: flashinfer-python 0.6.14 beside flashinfer-cubin 0.6.13 [flashinfer-parts]
  at: matrices/x.yaml:1
  because: flashinfer raises at import unless the two versions are equal
  hint: make them equal, or leave the part out
  source: flashinfer/jit/env.py of 0.5.0 to 0.7.4 (`_get_cubin_dir`, `_get_aot_dir`), read 2026-11-30; case 050"""
    )
    assert "flashinfer-jit-cache 0.6.13+cu130" in told(
        wheel("flashinfer-python 0.6.12"), wheel("flashinfer-jit-cache 0.6.13+cu130")
    )
    equal = [
        wheel("flashinfer-python 0.6.13"),
        wheel("flashinfer-cubin 0.6.13"),
        wheel("flashinfer-jit-cache 0.6.13+cu130"),
    ]
    assert told(*equal) == ""


def test_parts_that_flashinfer_is_told_not_to_compare() -> None:
    unchecked = TEXT + 'environment: {FLASHINFER_DISABLE_VERSION_CHECK: "1"}\n'
    (found,) = findings(wheel("flashinfer-python 0.6.14"), wheel("flashinfer-cubin 0.6.13"), text=unchecked)
    assert found.severity is Severity.WARNING
    assert found.because == (
        "the matrix sets `FLASHINFER_DISABLE_VERSION_CHECK`, so flashinfer takes code that was made for another release"
    )


def test_parts_that_the_matrix_pins_unequal_are_told_once() -> None:
    text = TEXT.replace("torch: 2.11.0", "torch: 2.11.0\n  flashinfer: {python: 0.6.12, cubin: 0.6.13}")
    assert told(wheel("flashinfer-python 0.6.12"), wheel("flashinfer-cubin 0.6.13"), text=text) == ""


SM120 = TEXT + "patches: {sm120: {}}\n"
JIT_CACHE = wheel("flashinfer-jit-cache 0.6.12+cu130")


def test_compiled_modules_that_hide_a_patch() -> None:
    wheels = [wheel("flashinfer-python 0.6.12+sm120"), JIT_CACHE]
    assert (
        told(*wheels, text=SM120)
        == """\
error: flashinfer-jit-cache 0.6.12+cu130 hides what the patch set `sm120` changes in flashinfer-python 0.6.12+sm120 (F1) \
[jit-cache-hides-patch]
  at: matrices/x.yaml:11
  because: flashinfer loads its compiled `trtllm_comm`, which was built without 12, and compiles nothing
  hint: leave flashinfer-jit-cache out
  source: facts/patches.md section D, JIT caches; flashinfer/jit/core.py (`is_aot`) of 0.6.2 to 0.6.12, read 2026-11-30"""
    )
    assert told(*wheels) == ""
    assert told(wheels[0], text=SM120) == ""


@pytest.mark.parametrize(
    ("version", "severities"), [("0.6.4", "error"), ("0.6.13", "warning"), ("0.6.18.post1", ""), ("0.7.4", "")]
)
def test_compiled_modules_and_the_releases_that_need_the_patch(version: str, severities: str) -> None:
    found = findings(wheel(f"flashinfer-python {version}"), wheel(f"flashinfer-jit-cache {version}+cu130"), text=SM120)
    assert " ".join(finding.severity for finding in found) == severities


# Flags of a server


def launch(*wheels: str, text: str = TEXT) -> list[Finding]:
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    found = evaluate_rules(Context(loaded, TODAY, lock_of(map(wheel, wheels))))
    return [finding for finding in found if finding.rule == "launch-flags"]


STACK = ("sglang 0.5.9", "flashinfer-python 0.6.4")


def test_flags_on_a_gpu_and_with_a_patch_set() -> None:
    text = TEXT.replace('["12.0"]', '["9.0", "12.0"]') + "patches: {sm120: {}, eagle3: {}}\n"
    assert (
        "\n".join(map(str, launch(*STACK, text=text)))
        == """\
note: a server of sglang 0.5.9 on GPU 12.0: mind `--attention-backend trtllm_mla`, `--fp8-gemm-backend triton` and \
`--nsa-prefill-backend` [launch-flags]
  at: matrices/x.yaml:7
  because: `trtllm_mla` passes sglang's check, and flashinfer's kernel for the prefill refuses (`Unsupported architecture`); \
block-FP8 models take DeepGEMM (off with the patch set `sm120`), else flashinfer's GEMM of TensorRT-LLM, and neither is known to \
have code for it; models with DeepSeek sparse attention get FlashMLA's kernels (`flashmla_sparse`, `flashmla_kv`, `flashmla_auto`) \
unless other backends are named, and these have no code for 12.x; with 0.5.9 the decode gets `trtllm` where the KV cache is not FP8, \
and flashinfer's kernel refuses (`Unsupported architecture`)
  hint: take `--attention-backend triton` for MLA models, as Kimi-K2.5; give `--fp8-gemm-backend triton` for block-FP8 models, \
which Kimi-K2.5's INT4 is not; give `--nsa-prefill-backend` and `--nsa-decode-backend` for such models: `tilelang` is compiled for \
the GPU it runs on (not tried on 12.x)
  source: facts/patches.md D3; case 036 (flashinfer #3263); sglang's check and flashinfer's fmhaRunner.cuh in the wheels (sglang \
0.5.6.post2 to 0.5.23, flashinfer 0.6.2 to 0.7.4), read 2026-11-30; facts/patches.md D1 and D2; from 0.5.10.post1 on sglang \
chooses another one for SM120 itself (`initialize_fp8_gemm_config` in the wheels, read 2026-11-30); server_args.py of every sglang \
from 0.5.4 to 0.5.9 (_set_default_nsa_backends), read 2026-11-30; facts/loaders.yaml (flashmla_ops)
note: a server of sglang 0.5.9 with the patch set `eagle3`: mind `--speculative-draft-model-path` [launch-flags]
  at: matrices/x.yaml:11
  because: Kimi-K2.5 is not among the models that sglang finds a draft for
  hint: give `--speculative-draft-model-path` beside `--speculative-algorithm EAGLE3`
  source: facts/patches.md section A2 (server_args.py:2398 of 0.5.9); the lists of 0.5.10.post1 to 0.5.23, read 2026-11-30"""
    )


OPT_IN = "patches: {sm120: {symm_mem: opt-in, allreduce_fusion: opt-in}}\n"


def test_what_is_opted_in_promises_nothing() -> None:
    text = TEXT.replace("12.0", "9.0") + OPT_IN
    (found,) = launch("sglang 0.5.9", text=text)
    assert (
        str(found)
        == """\
note: a server of sglang 0.5.9 with the patch set `sm120`: mind `--enable-torch-symm-mem` and \
`--enable-flashinfer-allreduce-fusion` [launch-flags]
  at: matrices/x.yaml:11
  because: symmetric memory promises no speed-up over PCIe: every rank reads all peers' slices, and there is no public number for \
SM120; the fused all-reduce promises no speed-up over PCIe: upstream's own attempt was slower by much at TP 4, and faster by 2 to \
5 % at TP 2
  hint: measure with and without `--enable-torch-symm-mem`; measure with and without `--enable-flashinfer-allreduce-fusion`, at the \
tensor-parallel size that is served
  source: facts/patches.md section A1, S1 and S4, and the risks after it; not run on SM120; facts/patches.md section 0, 7 \
(sgl-project/sglang#32330, flashinfer-ai/flashinfer#3903); not run on SM120"""
    )
    (found,) = launch("sglang 0.5.9", text=text.replace("symm_mem: opt-in, ", ""))
    assert found.evidence["flags"] == ["--enable-flashinfer-allreduce-fusion"]
    assert launch("sglang 0.5.9", text=text.replace("opt-in", '"off"')) == []


def test_what_the_image_itself_switches_on_is_a_warning() -> None:
    text = TEXT.replace("12.0", "9.0") + OPT_IN + 'environment: {SGLANG_STACK_SM120_FUSION: "1"}\n'
    warning, note = launch("sglang 0.5.9", text=text)
    assert (note.severity, note.evidence["flags"]) == (Severity.NOTE, ["--enable-torch-symm-mem"])
    assert warning.severity is Severity.WARNING
    assert warning.where == "matrices/x.yaml:12"
    assert warning.because.endswith("; the matrix sets `SGLANG_STACK_SM120_FUSION` for every server")
    assert warning.hint.endswith("; leave `SGLANG_STACK_SM120_FUSION` to `builder run --env`")
    (found,) = launch("sglang 0.5.9", text=text.replace('"1"', '"0"'))
    assert found.severity is Severity.NOTE


@pytest.mark.parametrize(
    ("wheels", "gpu", "flags"),
    [
        (["sglang 0.5.9", "flashinfer-python 0.6.4"], "12.1", 3),
        (["sglang 0.5.10.post1", "flashinfer-python 0.6.7"], "12.0", 2),
        (["sglang 0.5.15.post1", "flashinfer-python 0.6.12"], "12.0", 2),
        (["sglang 0.5.23", "flashinfer-python 0.7.2"], "12.0", 2),
        (["sglang 0.5.3", "flashinfer-python 0.4.0"], "12.0", 0),
        (["sglang 0.5.24", "flashinfer-python 0.7.2"], "12.0", 0),
        (["sglang 0.5.9", "flashinfer-python 0.6.4"], "9.0", 0),
        (["sglang 0.5.9"], "12.0", 1),
        (["flashinfer-python 0.6.4"], "12.0", 0),
    ],
)
def test_flags_and_the_releases_that_they_are_about(wheels: list[str], gpu: str, flags: int) -> None:
    found = launch(*wheels, text=TEXT.replace("12.0", gpu))
    assert sum(len(cast(list[str], finding.evidence["flags"])) for finding in found) == flags


def test_a_variable_of_a_flag_is_one_that_a_patch_waits_for() -> None:
    waited_for = {fact.waits_for for fact in load_facts(SiteFact)}
    assert {fact.variable for fact in load_facts(LaunchFact) if fact.variable} <= waited_for
