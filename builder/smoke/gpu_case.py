"""What a check on a GPU is: `Case`, which names it, and `Look`, with which it compares. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

SAFE = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast is off in every check: what uses it can disturb others on a shared host."""


class Skip(Exception):
    """A check that cannot run here, and why: never a pass."""


@dataclass(frozen=True)
class Case:
    """A check: `run` is MODULE:FUNCTION of this package; ``limit`` in seconds, an import of torch and the start of CUDA included.

    ``library`` is the shared object whose code it runs (its name up to the first dot), ``ranks`` whether it is one process
    for each GPU rather than one check on each.
    """

    name: str
    run: str
    limit: float = 120.0
    library: str = ""
    ranks: bool = False


CASES = (
    Case("torch-matmul", "gpu_torch:matmul"),
    Case("torch-reduce", "gpu_torch:reduce"),
    Case("torch-streams", "gpu_torch:streams"),
    Case("torch-memory", "gpu_torch:memory"),
    Case("torch-libraries", "gpu_torch:libraries"),
    Case("triton", "gpu_triton:kernels"),
    Case("sgl-loader", "gpu_sglang:loader", library="common_ops"),
    Case("sgl-norm", "gpu_sglang:norm", library="common_ops"),
    Case("sgl-activation", "gpu_sglang:activation", library="common_ops"),
    Case("sgl-rope", "gpu_sglang:rope", library="common_ops"),
    Case("sgl-quant", "gpu_sglang:quantise", library="common_ops"),
    Case("sgl-gemm-fp8", "gpu_sglang:gemm_fp8", library="common_ops"),
    Case("sgl-gemm-blockwise", "gpu_sglang:gemm_blockwise", library="common_ops"),
    Case("sgl-gemm-int8", "gpu_sglang:gemm_int8", library="common_ops"),
    Case("sgl-router", "gpu_moe:router", library="common_ops"),
    Case("sgl-topk", "gpu_moe:topk", library="common_ops"),
    Case("sgl-gate", "gpu_moe:gate", library="common_ops"),
    Case("sgl-moe-align", "gpu_moe:align", library="common_ops"),
    Case("sgl-merge-state", "gpu_attention:merge_state", library="common_ops"),
    Case("sgl-cutlass-mla", "gpu_attention:cutlass_mla", library="common_ops"),
    Case("sgl-flash-attn", "gpu_attention:flash_attn", library="flash_ops"),
    Case("sgl-flash-attn-paged", "gpu_attention:flash_attn_paged", library="flash_ops"),
    Case("sgl-flash-attn-mla", "gpu_attention:flash_attn_mla", library="flash_ops"),
    Case("sgl-flashmla", "gpu_attention:flashmla", library="flashmla_ops"),
    Case("sgl-spatial", "gpu_sglang:spatial", library="spatial_ops"),
    Case("sgl-tree", "gpu_tree:build", library="common_ops"),
    Case("sgl-verify", "gpu_tree:verify", library="common_ops"),
    Case("sgl-tree-sampling", "gpu_tree:sampling", library="common_ops"),
    Case("sgl-renorm", "gpu_tree:renorm", library="common_ops"),
    Case("flashinfer-jit", "gpu_flashinfer:compiled_here", limit=420.0),
    Case("flashinfer-cute", "gpu_flashinfer:cute", limit=240.0),
    Case("flashinfer-baked", "gpu_flashinfer:baked", library="trtllm_comm"),
    Case("flashinfer-cubin", "gpu_flashinfer:cubin", limit=240.0),
    Case("nccl", "gpu_ranks:nccl", limit=180.0, ranks=True),
    Case("symm-mem", "gpu_ranks:symm_mem", limit=180.0, ranks=True),
    Case("sgl-all-reduce", "gpu_ranks:custom", limit=180.0, library="common_ops", ranks=True),
)
"""In the order in which they run on a GPU; those with ``ranks`` run last, on all of them together."""


@dataclass
class Look:
    """What a check compares, and what it has to say. A comparison that fails is kept, and the check goes on.

    ``jit`` is `nvcc` or `none` as the matrix has it, ``compiled`` what the build compiled (`Spec.compiled`).
    """

    out: TextIO
    site_packages: str = ""
    jit: str = "nvcc"
    compiled: tuple[str, ...] = ()
    rank: int = 0
    ranks: int = 1
    meet: str = ""
    comparisons: int = 0
    wrong: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def tell(self, event: str, **facts: Any) -> None:
        """A line for the parent, at once: what comes before a crash is not lost."""
        print(json.dumps({"event": event, **facts}), file=self.out, flush=True)

    def loaded(self) -> None:
        """Tell which shared objects of site-packages this process has by now, relative to it: before a kernel may end it."""
        found = set()
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.split(maxsplit=5)[-1].strip()
                if path.startswith(f"{self.site_packages}/") and ".so" in os.path.basename(path):
                    found.add(os.path.relpath(path, self.site_packages))
        self.tell("mapped", files=sorted(found))

    def say(self, words: str) -> None:
        """What people want to know of a check that passed."""
        self.said.append(words)

    def true(self, what: str, holds: object, detail: object = "") -> None:
        """Something that has to hold."""
        self.comparisons += 1
        if not holds:
            self.wrong.append(f"{what}: {detail}" if detail != "" else what)

    def equal(self, what: str, got: Any, expected: Any) -> None:
        """Exactly this; tensors are compared as lists."""
        got, expected = _plain(got), _plain(expected)
        self.true(what, got == expected, f"got {_short(got)}, expected {_short(expected)}")

    def near(self, what: str, got: Any, expected: Any, *, rel: float, abs: float = 0.0) -> None:
        """Each element of two tensors of one shape within abs + rel * |expected|, in float64; NaN is never near."""
        import torch  # type: ignore[import-not-found,unused-ignore]

        got, expected = got.detach().cpu().to(torch.float64), expected.detach().cpu().to(torch.float64)
        if got.shape != expected.shape:
            self.true(what, False, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
            return
        error = (got - expected).abs()
        good = bool((error <= abs + rel * expected.abs()).all())
        worst = int(torch.nan_to_num(error, nan=float("inf")).argmax())
        self.true(
            what,
            good,
            f"{int((~(error <= abs + rel * expected.abs())).sum())} of {error.numel()} differ, the worst: "
            f"got {float(got.flatten()[worst]):.6g}, expected {float(expected.flatten()[worst]):.6g}",
        )

    @contextlib.contextmanager
    def each(self, what: str) -> Iterator[None]:
        """A part that may fail by itself where the rest is still worth a look; a fault of CUDA ends the check."""
        try:
            yield
        except Skip:
            raise
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            self.true(what, False, f"{type(error).__name__}: {_short(error, 600)}")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _short(value: object, most: int = 300) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[:most]} …"
