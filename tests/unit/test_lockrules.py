"""Rules over the lock: each finding as a user reads it, and silence where there is nothing to say or nothing is known."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from pathlib import Path

import pytest

from builder.findings import Finding, Severity
from builder.lock import Artefact, Base, Lock, OsPackage, Resolver, lock_path, read_lock
from builder.lockrules import cuda_major, listed
from builder.matrix import LoadedMatrix, list_matrices, load, parse_matrix
from builder.rules import Context, evaluate_rules
from tests.made import SMALL

TODAY = date(2026, 11, 30)
MATRICES = Path(__file__).resolve().parents[2] / "matrices"

TEXT = f"{SMALL}budget: {{image: 13 GB}}\n"

NVCC = """\
cuda:
  version: 13.0.2
  compiler:
    nvidia-cuda-nvcc: 13.0.88
    nvidia-nvvm: 13.0.88
    nvidia-cuda-crt: 13.0.88
    nvidia-cuda-cccl: 13.0.85
"""
JIT = TEXT.replace("cuda: {version: 13.0.2, jit: none}\n", NVCC)
TORCH_291 = TEXT.replace("13.0.2", "13.0.1").replace("torch: 2.11.0", "torch: 2.9.1+cu130")

OVERRIDE = """\
overrides:
  - {package: flashinfer-python, pin: ==0.6.3, ours: 0.6.4, because: the stack's, source: s}
"""


def wheel(
    what: str,
    *requires: str,
    tag: str = "py3-none-any",
    size: int | None = 1000,
    index: str | None = "default",
    metadata_version: str = "",
) -> Artefact:
    """`wheel("torch 2.11.0", "filelock")`."""
    name, version = what.split()
    return Artefact(
        name=name,
        version=version,
        metadata_version=metadata_version or version,
        file=f"{name.replace('-', '_')}-{version}-{tag}.whl",
        sha256="0" * 64,
        size=size,
        index=index,
        url=None if index else "https://wheels.example/x.whl",
        requires=requires,
        layer="rest",
    )


def lock_of(wheels: Iterable[Artefact], os_packages: Iterable[str] = ("libnuma1",)) -> Lock:
    packages = tuple(OsPackage(name=name, version="1", architecture="amd64") for name in os_packages)
    return Lock(
        schema=1,
        matrix="x",
        inputs="0" * 64,
        as_of="2026-03-01",
        platform="linux/amd64",
        python="3.11",
        resolver=Resolver(name="uv", version="0.13.9"),
        base=Base(kind="archive", distribution="debian", release="bookworm", packages=packages),
        artefacts=tuple(sorted(wheels, key=lambda each: each.name)),
    )


def findings(*wheels: Artefact, text: str = TEXT, os_packages: Iterable[str] = ("libnuma1",)) -> list[Finding]:
    """The findings over the lock; those over the matrix alone, and on how a server starts, have tests of their own."""
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    alone = evaluate_rules(Context(loaded, TODAY))
    every = evaluate_rules(Context(loaded, TODAY, lock_of(wheels, os_packages)))
    return [f for f in every if f not in alone and f.rule not in ("launch-flags", "runtime-check")]


def told(*wheels: Artefact, text: str = TEXT, os_packages: Iterable[str] = ("libnuma1",)) -> str:
    return "\n".join(str(finding) for finding in findings(*wheels, text=text, os_packages=os_packages))


@pytest.mark.parametrize("path", list_matrices(MATRICES), ids=lambda path: path.stem)
def test_checked_in_locks_have_no_errors(path: Path) -> None:
    if not lock_path(path).exists():
        pytest.skip("not locked yet")
    found = evaluate_rules(Context(load(path), TODAY, read_lock(lock_path(path))))
    assert [str(finding) for finding in found if finding.severity is Severity.ERROR] == []


@pytest.mark.parametrize(
    ("name", "package", "message"),
    [
        (
            "cu130",
            "flashinfer-python",
            "sglang 0.5.9 requires `flashinfer-python==0.6.3`, the lock has 0.6.4",
        ),
        (
            "cu130",
            "flashinfer-cubin",
            "sglang 0.5.9 requires `flashinfer-cubin==0.6.3`, the lock has 0.6.4",
        ),
        (
            "cu130",
            "nvidia-cudnn-cu13",
            "torch 2.9.1+cu130 requires `nvidia-cudnn-cu13==9.13.0.50`, the lock has 9.16.0.29",
        ),
        (
            "cu128",
            "flashinfer-python",
            "sglang 0.5.9 requires `flashinfer-python==0.6.3`, the lock has 0.6.4",
        ),
        (
            "cu128",
            "flashinfer-cubin",
            "sglang 0.5.9 requires `flashinfer-cubin==0.6.3`, the lock has 0.6.4",
        ),
        (
            "cu128",
            "nvidia-cudnn-cu12",
            "torch 2.9.1 requires `nvidia-cudnn-cu12==9.10.2.21`, the lock has 9.16.0.29",
        ),
    ],
)
def test_each_conflict_of_a_checked_in_lock_is_declared_by_its_override(name: str, package: str, message: str) -> None:
    path = MATRICES / f"{name}.yaml"
    loaded, lock = load(path), read_lock(lock_path(path))
    kept = tuple(each for each in loaded.matrix.overrides if each.package != package)
    assert len(kept) == len(loaded.matrix.overrides) - 1 == 2
    without = LoadedMatrix(loaded.matrix.model_copy(update={"overrides": kept}), loaded.source)
    found = [f for f in evaluate_rules(Context(without, TODAY, lock)) if f.severity is Severity.ERROR]
    assert [(f.rule, f.subject, f.message) for f in found] == [("conflict-undeclared", package, message)]
    (override,) = (each for each in loaded.matrix.overrides if each.package == package)
    stale = override.model_copy(update={"package": "numpy", "pin": "==1.0"})
    more = LoadedMatrix(
        loaded.matrix.model_copy(update={"overrides": (*loaded.matrix.overrides, stale)}), loaded.source
    )
    rules = [f.rule for f in evaluate_rules(Context(more, TODAY, lock)) if f.subject == "numpy"]
    assert "conflict-stale" in rules


def test_nothing_to_say_about_a_good_lock() -> None:
    assert told(wheel("torch 2.11.0", "filelock>=3"), wheel("filelock 3.20.0")) == ""


# Requirements


def test_a_conflict_that_no_override_declares() -> None:
    text = told(
        wheel("sglang 0.5.9", "flashinfer_python==0.6.3", "numpy"), wheel("flashinfer-python 0.6.4"), wheel("numpy 2")
    )
    assert (
        text
        == """\
error: sglang 0.5.9 requires `flashinfer-python==0.6.3`, the lock has 0.6.4 [conflict-undeclared]
  at: matrices/x.yaml:1
  because: no override declares it, so it may be an accident
  hint: take a release that fits, or add `{package: flashinfer-python, pin: "==0.6.3", ours: 0.6.4, because: …, source: …}` to `overrides`
  source: METADATA of sglang-0.5.9-py3-none-any.whl"""
    )


def test_a_conflict_is_told_once_for_all_who_state_it_where_the_matrix_names_the_package() -> None:
    text = told(
        wheel("a 1", "torch==2.9.1"), wheel("b 2", "torch==2.9.1"), wheel("c 3", "torch ==2.9.1"), wheel("torch 2.11.0")
    )
    assert text.startswith("""\
error: a 1, b 2 and c 3 require `torch==2.9.1`, the lock has 2.11.0 [conflict-undeclared]
  at: matrices/x.yaml:9
""")


def test_a_declared_conflict_is_no_finding() -> None:
    assert (
        told(wheel("sglang 0.5.9", "flashinfer_python==0.6.3"), wheel("flashinfer-python 0.6.4"), text=TEXT + OVERRIDE)
        == ""
    )


def test_an_override_of_another_pin() -> None:
    text = told(
        wheel("sglang 0.5.10", "flashinfer_python==0.6.7"), wheel("flashinfer-python 0.6.4"), text=TEXT + OVERRIDE
    )
    assert (
        text
        == """\
error: sglang 0.5.10 requires `flashinfer-python==0.6.7`, the lock has 0.6.4 [conflict-undeclared]
  at: matrices/x.yaml:12
  because: the override of flashinfer-python declares `==0.6.3`, which nothing requires
  hint: write `pin: "==0.6.7"`
  source: METADATA of sglang-0.5.10-py3-none-any.whl"""
    )


def test_an_override_covers_one_pin() -> None:
    text = told(
        wheel("sglang 0.5.9", "flashinfer_python==0.6.3"),
        wheel("other 1", "flashinfer-python<0.6"),
        wheel("flashinfer-python 0.6.4"),
        text=TEXT + OVERRIDE,
    )
    assert (
        text
        == """\
error: other 1 requires `flashinfer-python<0.6`, the lock has 0.6.4 [conflict-undeclared]
  at: matrices/x.yaml:12
  because: the override of flashinfer-python declares `==0.6.3`, and an override covers one pin
  hint: take releases that require the same flashinfer-python
  source: METADATA of other-1-py3-none-any.whl"""
    )


@pytest.mark.parametrize(
    ("wheels", "severity", "because"),
    [
        ([wheel("sglang 0.6")], "error", "the lock has no flashinfer-python"),
        (
            [wheel("flashinfer-python 0.6.4"), wheel("sglang 0.6", "flashinfer_python==0.6.4")],
            "error",
            "sglang 0.6 requires `flashinfer-python==0.6.4`",
        ),
        (
            [wheel("flashinfer-python 0.6.4"), wheel("sglang 0.6", "flashinfer-python")],
            "error",
            "no METADATA bounds flashinfer-python",
        ),
        (
            [
                wheel("flashinfer-python 0.6.4"),
                wheel("torch 2.11.0", "cuda-toolkit[cublas]"),
                wheel("cuda-toolkit 13.0.2"),
            ],
            "warning",
            "no METADATA bounds flashinfer-python; extras of cuda-toolkit were not looked at",
        ),
    ],
)
def test_a_stale_override(wheels: list[Artefact], severity: str, because: str) -> None:
    assert (
        told(*wheels, text=TEXT + OVERRIDE)
        == f"""\
{severity}: nothing requires `flashinfer-python==0.6.3`, which an override declares [conflict-stale]
  at: matrices/x.yaml:12
  because: {because}
  hint: remove the override, or write the pin that it breaks
  source: METADATA of the lock's wheels"""
    )


def test_an_override_of_another_version_than_the_locked_one() -> None:
    text = told(
        wheel("sglang 0.5.9", "flashinfer_python==0.6.3"), wheel("flashinfer-python 0.6.5"), text=TEXT + OVERRIDE
    )
    assert (
        text
        == """\
error: the override says flashinfer-python 0.6.4, the lock has 0.6.5 [override-mismatch]
  at: matrices/x.yaml:12
  because: the reason that it gives is about another release
  hint: lock again: `builder lock x`
  source: the lock"""
    )


@pytest.mark.parametrize(
    ("requirement", "conflicts"),
    [
        ("==0.5.9", False),
        ("<=0.5.9", False),
        ("~=0.5.9", False),
        (">=0.5.9", False),
        ("===0.5.9", True),
        (">0.5.9", True),
        ("!=0.5.9", True),
        ("==0.5.9+sm120", False),
        ("==0.5.9+other", True),
    ],
)
def test_local_versions(requirement: str, conflicts: bool) -> None:
    """facts/patches.md section D."""
    found = findings(wheel("user 1", f"thing{requirement}"), wheel("thing 0.5.9+sm120"))
    assert [finding.rule for finding in found] == ["conflict-undeclared"] * conflicts


@pytest.mark.parametrize("requirement", [">=0.14.0.dev1", ">=0.14.0rc1,<1", ""])
def test_a_locked_prerelease_satisfies_a_range_that_holds_it(requirement: str) -> None:
    text = TEXT + "prereleases: [thing]\n"
    assert findings(wheel("user 1", f"thing{requirement}"), wheel("thing 0.14.0rc2"), text=text) == []


def test_a_requirement_that_is_not_in_the_lock() -> None:
    direct = wheel("torch 2.11.0", "Typing_Extensions>=4", index=None)
    assert (
        told(direct)
        == """\
error: torch 2.11.0 requires `typing-extensions>=4`, and the lock has no typing-extensions [requirement-missing]
  at: matrices/x.yaml:9
  because: the image would lack it
  hint: lock again: `builder lock x`; see that `requires` of torch under `files` is right
  source: METADATA of torch-2.11.0-py3-none-any.whl"""
    )


# CUDA


def compiler(
    nvcc: str = "13.0.88", nvvm: str = "13.0.88", crt: str = "13.0.88", cccl: str = "13.0.85"
) -> list[Artefact]:
    parts = {"nvidia-cuda-nvcc": nvcc, "nvidia-nvvm": nvvm, "nvidia-cuda-crt": crt, "nvidia-cuda-cccl": cccl}
    return [wheel(f"{name} {version}") for name, version in parts.items()]


def test_a_coherent_compiler() -> None:
    assert told(*compiler(), text=JIT) == ""


@pytest.mark.parametrize(
    ("changed", "message", "line", "hint"),
    [
        (
            {"nvvm": "13.5.37"},
            "nvidia-nvvm 13.5.37 beside nvidia-cuda-nvcc 13.0.88 is not of CUDA 13.0",
            10,
            "nvidia-nvvm: 13.0.88",
        ),
        (
            {"crt": "13.0.48"},
            "nvidia-cuda-crt 13.0.48 beside nvidia-cuda-nvcc 13.0.88: the two have to be equal",
            11,
            "nvidia-cuda-crt: 13.0.88",
        ),
        (
            {"cccl": "13.3.3"},
            "nvidia-cuda-cccl 13.3.3 beside nvidia-cuda-nvcc 13.0.88 is not of CUDA 13.0",
            12,
            "nvidia-cuda-cccl: 13.0.…",
        ),
        (
            {"nvcc": "13.2.78"},
            "nvidia-cuda-nvcc 13.2.78 beside nvidia-nvvm 13.0.88 is not of CUDA 13.0",
            9,
            "nvidia-cuda-nvcc: 13.0.88",
        ),
    ],
)
def test_an_incoherent_compiler(changed: dict[str, str], message: str, line: int, hint: str) -> None:
    assert (
        told(*compiler(**changed), text=JIT)
        == f"""\
error: {message} [compiler-incoherent]
  at: matrices/x.yaml:{line}
  because: nvidia-nvvm 13.5.37 beside nvcc 13.0.88 makes every compilation die with `ptxas fatal: Unsupported .version 9.5; \
current version is '9.0'`
  hint: write `{hint}` under `cuda.compiler`, and lock again
  source: facts/stacks.md sections 1 and 3.1, measured 2026-11-29"""
    )


def test_a_compiler_is_not_judged_where_none_is_used_or_no_fact_covers_the_release() -> None:
    assert told(*compiler(nvvm="13.5.37")) == ""
    other = JIT.replace("13.0", "13.1")
    assert told(*compiler("13.1.80", "13.0.88", "13.1.80", "13.1.80"), text=other) == ""


def test_two_cuda_majors() -> None:
    text = told(
        wheel("torch 2.11.0", "nvidia-nccl-cu13", "nvidia-cublas"),
        wheel("nvidia-nccl-cu13 2.28.9"),
        wheel("nvidia-cublas 13.1.0.3"),
        wheel("vllm 0.16.0", "nvidia-nccl-cu12", "nvidia-cudnn-cu12"),
        wheel("nvidia-nccl-cu12 2.27.5"),
        wheel("nvidia-cudnn-cu12 9.10.2.21", "nvidia-cublas-cu12"),
        wheel("nvidia-cublas-cu12 12.8.4.1"),
    )
    assert (
        text
        == """\
error: CUDA 12 beside CUDA 13: nvidia-cublas-cu12 12.8.4.1, nvidia-cudnn-cu12 9.10.2.21 and nvidia-nccl-cu12 2.27.5 [cuda-majors-mixed]
  at: matrices/x.yaml:1
  because: vllm 0.16.0 requires nvidia-nccl-cu12 and nvidia-cudnn-cu12
  hint: take vllm for CUDA 13, or leave it out
  source: NVIDIA's naming of wheels; facts/abi.md section D (nvidia-*-cu12)"""
    )


def test_a_local_version_names_a_cuda_major() -> None:
    text = told(wheel("torch 2.11.0"), wheel("nvidia-cublas 13.1.0.3"), wheel("flashinfer-jit-cache 0.6.13+cu129"))
    assert (
        text
        == """\
error: CUDA 12 beside CUDA 13: flashinfer-jit-cache 0.6.13+cu129 [cuda-majors-mixed]
  at: matrices/x.yaml:1
  because: no wheel of the lock requires it
  hint: take releases for CUDA 13, or leave them out
  source: the wheels' local versions"""
    )


def test_both_cuda_majors_on_purpose_and_one_major_throughout() -> None:
    nixl = [
        wheel("nixl 1.5.2", "nixl-cu12==1.5.2", "nixl-cu13==1.5.2"),
        wheel("nixl-cu12 1.5.2"),
        wheel("nixl-cu13 1.5.2"),
    ]
    assert told(wheel("nvidia-cublas 13.1.0.3"), *nixl) == ""
    assert told(wheel("nvidia-nccl-cu12 2.27.5"), wheel("nvidia-cublas-cu12 12.8.4.1")) == ""


@pytest.mark.parametrize(
    ("what", "major"),
    [
        ("nvidia-cublas 13.1.0.3", 13),
        ("nvidia-cublas-cu12 12.8.4.1", 12),
        ("nvidia-cufft 12.0.0.61", 13),
        ("nvidia-cufft 13.0.0", None),
        ("nvidia-curand 10.4.0.35", 13),
        ("cupy-cuda12x 13.0.0", 12),
        ("torch 2.9.1+cu128", 12),
        ("torch 2.11.0", None),
        ("cuda-bindings 12.9.4", None),
        ("nixl-cu12 1.5.2", None),
        ("nvidia-cutlass-dsl-libs-cu12 4.8.0", None),
        ("nvidia-cutlass-dsl-libs-cu13 4.5.2", 13),
        ("nvidia-ml-py 13.610.43", None),
    ],
)
def test_cuda_major_of_a_wheel(what: str, major: int | None) -> None:
    known = cuda_major(wheel(what))
    assert (known[0] if known else None) == major


# Names and files


def test_two_owners_of_an_import_package() -> None:
    assert (
        told(wheel("sgl-kernel 0.3.5"), wheel("sglang-kernel 0.4.4"))
        == """\
error: sgl-kernel 0.3.5 and sglang-kernel 0.4.4 install one import package, `sgl_kernel` [import-package-twice]
  at: matrices/x.yaml:1
  because: the files of the one are overwritten by the other's
  hint: keep the one that your sglang requires
  source: facts/patches.md section B (renamed at sglang 0.5.10); design, what others got wrong"""
    )


@pytest.mark.parametrize(
    ("wheels", "packages"),
    [
        (["opencv-python 4.12", "opencv-python-headless 4.12"], ["cv2"]),
        (["sgl-kernel 0.3.21", "sgl-deep-gemm 0.1.4"], ["deep_gemm"]),
        (["sglang-kernel 0.4.4", "sgl-deep-gemm 0.1.4", "flash-attn-4 4.0.0"], []),
        (["pynvml 11.5.0", "nvidia-ml-py 13.610.43"], ["pynvml"]),
        (["pynvml 12.0.0", "nvidia-ml-py 13.610.43"], []),
    ],
)
def test_owners_of_import_packages(wheels: list[str], packages: list[str]) -> None:
    found = findings(*map(wheel, wheels))
    assert [finding.subject for finding in found if finding.rule == "import-package-twice"] == packages


def test_a_prerelease_that_nobody_names() -> None:
    wheels = [wheel("fastapi 0.120", "starlette>=0.40"), wheel("starlette 1.0.0rc1")]
    assert (
        told(*wheels)
        == """\
error: starlette 1.0.0rc1 is a pre-release, and `prereleases` does not name it [prerelease-unnamed]
  at: matrices/x.yaml:1
  because: fastapi 0.120 requires `starlette>=0.40`
  hint: add `starlette` to `prereleases`, or a release of it to `extras`
  source: facts/stacks.md section 3.7; design decision 2"""
    )
    assert told(*wheels, text=TEXT + "prereleases: [starlette]\n") == ""


def test_a_prerelease_that_metadata_pins_is_named_there() -> None:
    assert told(wheel("sglang 0.6", "flash-attn-4==4.0.0b15"), wheel("flash-attn-4 4.0.0b15")) == ""
    assert "[prerelease-unnamed]" in told(wheel("sglang 0.6", "flash-attn-4>=4.0.0b9"), wheel("flash-attn-4 4.0.0b15"))


def test_a_wheel_for_a_newer_c_library() -> None:
    tag = "cp311-cp311-manylinux_2_39_x86_64"
    assert (
        told(wheel("thing 1.0", tag=tag))
        == """\
error: thing 1.0 needs glibc 2.39, debian bookworm has 2.36 [wheel-platform]
  at: matrices/x.yaml:5
  because: its wheel is tagged manylinux_2_39_x86_64
  hint: take debian trixie or ubuntu noble, or a release of thing with a wheel for it
  source: Debian's archive, bookworm (python3.11 3.11.2, libc6 2.36), seen 2026-11-30"""
    )
    assert told(wheel("thing 1.0", tag=tag), text=TEXT.replace("bookworm", "forky")) == ""


def test_a_wheel_for_another_platform() -> None:
    assert (
        told(wheel("torch 2.11.0", tag="cp311-cp311-manylinux_2_28_aarch64"))
        == """\
error: torch 2.11.0 is not for linux/amd64 [wheel-platform]
  at: matrices/x.yaml:9
  because: its wheel is tagged manylinux_2_28_aarch64
  hint: take a release of torch with a wheel for it
  source: Debian's archive, bookworm (python3.11 3.11.2, libc6 2.36), seen 2026-11-30"""
    )


def test_the_least_demanding_tag_of_a_wheel_decides() -> None:
    assert told(wheel("thing 1.0", tag="cp311-cp311-manylinux_2_17_x86_64.manylinux_2_39_x86_64")) == ""


def test_a_wheel_whose_metadata_states_another_version() -> None:
    text = told(wheel("sgl-kernel 0.3.5+cu130", metadata_version="0.3.5"))
    assert (
        text
        == """\
note: the METADATA of sgl-kernel 0.3.5+cu130 says 0.3.5 [metadata-version]
  at: matrices/x.yaml:1
  because: uv installs it and reports that version, pip discards the file
  hint: nothing to do in the image; install it with uv elsewhere
  source: facts/stacks.md section 1; case 091 (sgl-project/sglang#14327)"""
    )


# Sizes


def test_wheels_over_the_budget() -> None:
    text = told(wheel("big 1", size=5_000_000_000), wheel("small 1", size=1_000_000_000))
    assert (
        text
        == """\
warning: the wheels unpack to about 14 GB, the budget is 13 GB [size-budget]
  at: matrices/x.yaml:10
  because: they have 6 GB, and 2.33 bytes come of each; the largest are big (5 GB) and small (1 GB)
  hint: raise `budget.image`, or leave out what is not needed
  source: cu130-next, 193 wheels: site-packages of the image, measured 2026-11-30 (files' sizes, and blocks of 4 KiB)"""
    )


def test_wheels_of_unknown_size() -> None:
    assert (
        told(wheel("torch 2.11.0", size=None), wheel("other 1"))
        == """\
note: the budget is checked without torch [size-unknown]
  at: matrices/x.yaml:9
  because: its source states no size
  hint: add `size` under `files` where it is known
  source: the lock"""
    )


def test_no_budget_nothing_to_check() -> None:
    text = TEXT.replace("budget: {image: 13 GB}\n", "")
    assert told(wheel("big 1", size=50_000_000_000), wheel("torch 2.11.0", size=None), text=text) == ""


@pytest.mark.parametrize(
    ("words", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_words_in_a_sentence(words: list[str], text: str) -> None:
    assert listed(words) == text
