"""Checks of flashinfer on a GPU: a kernel that it compiles here, the module that the build compiled, and one of its cubins."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
from typing import Any

from builder.smoke.gpu_case import Look, Skip
from builder.smoke.gpu_sglang import normal


def _start(look: Look) -> Any:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if importlib.util.find_spec("flashinfer") is None:
        raise Skip("flashinfer is not installed")
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU: torch.cuda.is_available() is False")
    return torch


def _norm(torch: Any) -> tuple[Any, Any, Any]:
    """Numbers, weights, and what RMS norm makes of them."""
    x, weight = normal(torch, (7, 4096), 1, torch.bfloat16), normal(torch, (4096,), 2, torch.bfloat16)
    scaled = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    return x.cuda(), weight.cuda(), scaled * weight.double()


def compiled_here(look: Look) -> None:
    """RMS norm, compiled for this GPU by nvcc when it is first called."""
    torch = _start(look)
    home = os.environ.get("CUDA_HOME", "")
    if look.jit == "none":
        raise Skip("this image has no compiler (`jit=none`): what flashinfer compiles cannot be used in it")
    if not (home and os.path.exists(os.path.join(home, "bin", "nvcc"))) and shutil.which("nvcc") is None:
        raise RuntimeError(f"there is no nvcc: CUDA_HOME is `{home}`")
    from flashinfer import norm  # type: ignore[import-not-found,unused-ignore]

    x, weight, known = _norm(torch)
    out = torch.empty_like(x)
    # Its own function may take a kernel of CuTe's instead, which nvcc has no part in.
    norm.get_norm_module().rmsnorm(out, x, weight, 1e-6, False)
    look.near("rmsnorm", out, known, rel=2e-2, abs=2e-2)
    look.say(f"flashinfer {importlib.import_module('flashinfer').__version__}")


def cute(look: Look) -> None:
    """RMS norm as sglang calls it, where flashinfer has a kernel in CuTe's language for it: no nvcc, the driver's own assembler."""
    torch = _start(look)
    from flashinfer import norm

    if getattr(norm, "_USE_CUDA_NORM", True):
        raise Skip("this flashinfer takes nvcc's kernel, or nvidia-cutlass-dsl is not installed")
    x, weight, known = _norm(torch)
    look.near("rmsnorm", norm.rmsnorm(x, weight, 1e-6), known, rel=2e-2, abs=2e-2)


def baked(look: Look) -> None:
    """The fused all-reduce that the build compiled: the one of its functions that a single GPU can run clears a buffer."""
    torch = _start(look)
    if not look.compiled:
        raise Skip("the build compiled no module of flashinfer for this stack")
    comm = importlib.import_module("flashinfer.jit.comm")
    for function in look.compiled:
        spec = getattr(comm, function)()
        look.true(f"{function}: it is there", os.path.exists(spec.aot_path), spec.aot_path)
        module = spec.build_and_load()
        look.loaded()
        if not hasattr(module, "trtllm_lamport_initialize"):
            look.say(f"{function}: no function for one GPU")
            continue
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            cells = torch.ones(4096, device="cuda", dtype=dtype)
            module.trtllm_lamport_initialize(cells.data_ptr(), cells.numel(), dtype)
            torch.cuda.synchronize()
            # A Lamport buffer is empty where it is negative zero.
            look.true(f"zeros, {dtype}", bool((cells == 0).all()) and bool(cells.signbit().all()), cells[:4].tolist())


def cubin(look: Look) -> None:
    """Decode by TensorRT-LLM's kernels, which flashinfer-cubin brings as cubins: for 10.x alone."""
    torch = _start(look)
    major, minor = torch.cuda.get_device_capability()
    if importlib.util.find_spec("flashinfer_cubin") is None:
        raise Skip("flashinfer-cubin is not installed")
    if major != 10:
        raise Skip(f"flashinfer's cubins of attention are for 10.x; this GPU is of {major}.{minor}")
    from flashinfer import decode  # type: ignore[import-not-found,unused-ignore]

    from builder.smoke.gpu_attention import NEAR, attend

    lengths, page, heads, groups, width = [70, 200], 32, 8, 1, 128
    pages = 7
    table = torch.arange(2 * pages, dtype=torch.int32).flip(0).view(2, pages)
    cache = normal(torch, (2 * pages, 2, groups, page, width), 3, torch.bfloat16)
    q = normal(torch, (2, heads, width), 4, torch.bfloat16)
    got = decode.trtllm_batch_decode_with_kv_cache(
        q.cuda(),
        cache.cuda(),
        torch.zeros(128 << 20, dtype=torch.uint8, device="cuda"),
        table.cuda(),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        max(lengths),
        bmm1_scale=width**-0.5,
        bmm2_scale=1.0,
    )
    for request, length in enumerate(lengths):
        held = cache[table[request].long()].permute(1, 0, 3, 2, 4).reshape(2, -1, groups, width)[:, :length]
        known, _ = attend(q[request][None], held[0], held[1], width**-0.5)
        look.near(f"{length} tokens", got[request][None], known, **NEAR)
