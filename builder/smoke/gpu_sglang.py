"""Checks of sgl_kernel on a GPU: what its own loader picks, and kernels whose results are compared with torch's in float64.

Kernels are called as `torch.ops.sgl_kernel` has them where sgl_kernel's own function would hand on to flashinfer.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from builder.smoke.gpu_case import Look, Skip
from builder.smoke.gpu_torch import whole

FP8_MOST = 448.0
"""The largest number of e4m3 (OCP 8-bit floating point specification)."""


def start(look: Look) -> tuple[Any, Any, Any]:
    """torch, sgl_kernel as its own loader loads it, and its operators. Raises what these raise, `Skip` without the package."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU: torch.cuda.is_available() is False")
    if importlib.util.find_spec("sgl_kernel") is None:
        raise Skip("sgl_kernel is not installed")
    package = importlib.import_module("sgl_kernel")
    look.loaded()
    return torch, package, torch.ops.sgl_kernel


def has(package: Any, *names: str) -> None:
    """Raise `Skip` unless this release has these functions."""
    if lacking := [name for name in names if not hasattr(package, name)]:
        version = getattr(package, "__version__", "this release")
        raise Skip(f"sgl_kernel {version} has no {', '.join(lacking)}")


def normal(torch: Any, shape: tuple[int, ...], seed: int, dtype: Any = None) -> Any:
    """Normally distributed numbers, the same on every machine, rounded to a format, on the CPU."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made if dtype is None else made.to(dtype)


def loader(look: Look) -> None:
    """The file that sgl_kernel's loader picks for this device, and a first kernel of it."""
    torch, package, operators = start(look)
    picked = str(getattr(package.common_ops, "__file__", ""))
    look.true("a file", picked.endswith(".so"), picked)
    folder = "/".join(picked.split("/")[-3:])
    look.tell("picked", file=folder)
    values = (torch.arange(1024, device="cuda").reshape(2, 512) / 512).bfloat16()
    out = torch.empty(2, 256, device="cuda", dtype=torch.bfloat16)
    operators.silu_and_mul.default(out, values)
    gate, up = values.cpu().double().split(256, dim=1)
    look.near("a first kernel", out, gate * torch.sigmoid(gate) * up, rel=2e-2)
    look.say(f"sgl_kernel {getattr(package, '__version__', '?')} picked {folder}")


def norm(look: Look) -> None:
    """RMS norm, with and without a residual, and Gemma's."""
    torch, _, operators = start(look)
    eager = torch.cuda.get_device_capability()[0] >= 9
    for rows, width in ((1, 128), (7, 4096), (33, 7168)):
        for dtype, rel in ((torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
            x, weight = normal(torch, (rows, width), 1, dtype), normal(torch, (width,), 2, dtype)
            scaled = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
            there, by = x.cuda(), weight.cuda()
            out = torch.empty_like(there)
            operators.rmsnorm.default(out, there, by, 1e-6, eager)
            look.near(f"rmsnorm {rows}x{width} {dtype}", out, scaled * weight.double(), rel=rel, abs=rel)
            operators.gemma_rmsnorm.default(out, there, by, 1e-6, eager)
            look.near(f"gemma_rmsnorm {rows}x{width} {dtype}", out, scaled * (1 + weight.double()), rel=rel, abs=rel)
            residual = normal(torch, (rows, width), 3, dtype)
            summed = x.double() + residual.double()
            scaled = summed * torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + 1e-6)
            left = residual.cuda()
            operators.fused_add_rmsnorm.default(there, left, by, 1e-6, eager)
            look.near(f"fused_add_rmsnorm {rows}x{width} {dtype}", there, scaled * weight.double(), rel=rel, abs=rel)
            look.near(f"its residual {rows}x{width} {dtype}", left, summed, rel=rel, abs=rel)


def activation(look: Look) -> None:
    """SiLU and GELU of one half, times the other."""
    torch, package, _ = start(look)
    functions = torch.nn.functional
    for rows, width in ((1, 64), (5, 1408), (64, 4096)):
        for dtype, rel in ((torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
            x = normal(torch, (rows, 2 * width), 4, dtype)
            gate, up = x.double().split(width, dim=1)
            for name, known in (
                ("silu_and_mul", functions.silu(gate)),
                ("gelu_and_mul", functions.gelu(gate)),
                ("gelu_tanh_and_mul", functions.gelu(gate, approximate="tanh")),
            ):
                got = getattr(package, name)(x.cuda())
                look.near(f"{name} {rows}x{width} {dtype}", got, known * up, rel=rel, abs=rel)


def rope(look: Look) -> None:
    """Rotary embedding, both layouts, in place."""
    torch, package, _ = start(look)
    has(package, "rotary_embedding")
    size, tokens, heads, shared = 64, 29, 8, 2
    steps = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.arange(512, dtype=torch.float64)[:, None] * steps
    # The kernel wants the table in the format of what it turns.
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).bfloat16()
    positions = (torch.arange(tokens) * 17) % 512
    for neox in (True, False):
        query, key = (normal(torch, (tokens, count * size), 5 + count, torch.bfloat16) for count in (heads, shared))
        q, k = query.cuda(), key.cuda()
        package.rotary_embedding(positions.cuda(), q, k, size, table.cuda(), neox)
        for what, got, before, count in (("query", q, query, heads), ("key", k, key, shared)):
            each = before.double().view(tokens, count, size)
            cosine, sine = table[positions][:, None].double().split(size // 2, dim=-1)
            first, second = (
                (each[..., : size // 2], each[..., size // 2 :]) if neox else (each[..., ::2], each[..., 1::2])
            )
            turned = first * cosine - second * sine, second * cosine + first * sine
            known = torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2)
            look.near(f"{what}, neox {neox}", got, known.reshape(tokens, -1), rel=2e-2, abs=2e-2)


def quantise(look: Look) -> None:
    """Numbers to fp8 by token and by group of 128, and to int8: scales exact to rounding, numbers within a step."""
    torch, package, _ = start(look)
    rows, width, group = 65, 2048, 128
    x = normal(torch, (rows, width), 6, torch.bfloat16)
    there, eight = x.cuda(), torch.float8_e4m3fn
    with look.each("sgl_per_token_quant_fp8"):
        held, scale = torch.empty(rows, width, device="cuda", dtype=eight), torch.empty(rows, 1, device="cuda")
        package.sgl_per_token_quant_fp8(there, held, scale)
        known = x.double().abs().amax(-1, keepdim=True) / FP8_MOST
        look.near("by token: scales", scale, known, rel=1e-5)
        # Half of the last of four bits (three that are written) of e4m3; below 2**-6 steps are 2**-9.
        step = (x.double().abs() / 15).maximum(known / 512)
        error = (held.cpu().double() * scale.cpu().double() - x.double()).abs()
        look.true("by token: numbers", bool((error <= step).all()), f"off by {float((error / step).max()):.2f} steps")
    with look.each("sgl_per_token_group_quant_8bit"):
        held, scale = torch.empty_like(held), torch.empty(rows, width // group, device="cuda")
        package.sgl_per_token_group_quant_8bit(there, held, scale, group, 1e-10, -FP8_MOST, FP8_MOST, False)
        parts = x.double().view(rows, -1, group)
        known = parts.abs().amax(-1) / FP8_MOST
        look.near("by group: scales", scale, known, rel=1e-5)
        step = (parts.abs() / 15).maximum(known[..., None] / 512)
        error = (held.cpu().double().view_as(parts) * scale.cpu().double()[..., None] - parts).abs()
        look.true("by group: numbers", bool((error <= step).all()), f"off by {float((error / step).max()):.2f} steps")
    with look.each("int8 by group"):
        small, scale = torch.empty(rows, width, device="cuda", dtype=torch.int8), torch.empty_like(scale)
        package.sgl_per_token_group_quant_int8(there, small, scale, group, 1e-10, -128.0, 127.0, False)
        known = parts.abs().amax(-1) / 127
        look.near("int8: scales", scale, known, rel=1e-5)
        error = (small.cpu().double().view_as(parts) * scale.cpu().double()[..., None] - parts).abs()
        # It may round to nearest, or cut off.
        look.true(
            "int8: numbers", bool((error <= known[..., None] * 1.01).all()), float((error / known[..., None]).max())
        )


def gemm_fp8(look: Look) -> None:
    """fp8 products with a scale for each row and column, exactly: whole numbers and powers of two."""
    torch, package, _ = start(look)
    if torch.cuda.get_device_capability() < (8, 9):
        raise Skip("fp8 products need compute capability 8.9")
    eight = torch.float8_e4m3fn
    for m, k, n in ((1, 128, 256), (48, 128, 512), (300, 128, 4096)):
        a, b = whole(torch, (m, k), 7), whole(torch, (n, k), 8)
        by_row = 2.0 ** (torch.arange(m) % 5 - 2).double()[:, None]
        by_column = 2.0 ** (torch.arange(n) % 3 - 1).double()[:, None]
        for dtype in (torch.bfloat16, torch.float16):
            got = package.fp8_scaled_mm(
                a.to("cuda", eight), b.to("cuda", eight).t(), by_row.float().cuda(), by_column.float().cuda(), dtype
            )
            known = (a @ b.t()) * by_row * by_column.t()
            look.true(f"{m}x{k}x{n} {dtype}", torch.equal(got.cpu().double(), known), "differs")
    bias = whole(torch, (n,), 9, 3)
    got = package.fp8_scaled_mm(
        a.to("cuda", eight),
        b.to("cuda", eight).t(),
        torch.ones(m, 1, device="cuda"),
        torch.ones(n, 1, device="cuda"),
        torch.bfloat16,
        bias.to("cuda", torch.bfloat16),
    )
    look.true("with a bias", torch.equal(got.cpu().double(), a @ b.t() + bias), "differs")


def gemm_blockwise(look: Look) -> None:
    """fp8 products with a scale for each block of 128 (DeepSeek's), exactly."""
    torch, package, _ = start(look)
    has(package, "fp8_blockwise_scaled_mm")
    major = torch.cuda.get_device_capability()[0]
    if major not in (9, 10, 12):
        raise Skip("the kernels of fp8_blockwise_scaled_mm are for 9.0, 10.x and 12.x")
    eight = torch.float8_e4m3fn
    for m, k, n in ((64, 256, 256), (128, 512, 1024)):
        a, b = whole(torch, (m, k), 10), whole(torch, (n, k), 11)
        by_row = 2.0 ** ((torch.arange(m)[:, None] + torch.arange(k // 128)) % 2).double()
        by_block = 2.0 ** ((torch.arange(n // 128)[:, None] + torch.arange(k // 128)) % 2 - 1).double()
        spread = by_block.repeat_interleave(128, 0).repeat_interleave(128, 1)
        known = (a * by_row.repeat_interleave(128, 1)) @ (b * spread).t()
        got = package.fp8_blockwise_scaled_mm(
            a.to("cuda", eight),
            b.to("cuda", eight).t(),
            by_row.float().cuda().t().contiguous().t(),
            by_block.float().cuda().t(),
            torch.float16,
        )
        # fp16 holds whole numbers and halves of this size.
        look.near(f"{m}x{k}x{n}", got, known, rel=1e-3)


def gemm_int8(look: Look) -> None:
    """int8 products with a scale for each row and column."""
    torch, package, _ = start(look)
    has(package, "int8_scaled_mm")
    if torch.cuda.get_device_capability()[0] > 9:
        raise Skip("the kernels of int8_scaled_mm are for 7.5 to 9.0")
    for m, k, n in ((16, 128, 256), (129, 512, 1024)):
        a, b = whole(torch, (m, k), 12, 20), whole(torch, (n, k), 13, 20)
        by_row, by_column = torch.full((m, 1), 0.5).cuda(), torch.full((n, 1), 0.25).cuda()
        got = package.int8_scaled_mm(
            a.to("cuda", torch.int8), b.to("cuda", torch.int8).t(), by_row, by_column, torch.bfloat16
        )
        look.near(f"{m}x{k}x{n}", got, (a @ b.t()) / 8, rel=2**-8, abs=1e-6)


def spatial(look: Look) -> None:
    """Two streams that share the GPU's multiprocessors (green contexts), and work on both."""
    torch, _, _ = start(look)
    if importlib.util.find_spec("sgl_kernel.spatial") is None:
        raise Skip("this release has no sgl_kernel.spatial")
    package = importlib.import_module("sgl_kernel.spatial")
    look.loaded()
    number = package.get_sm_available(0)
    look.equal("multiprocessors", number, torch.cuda.get_device_properties(0).multi_processor_count)
    share = max(8, number // 16 * 8)
    pair = package.create_greenctx_stream_by_value(share, number - share, 0)
    for name, stream in zip(("first", "second"), pair, strict=True):
        cells = torch.arange(1 << 20, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            cells.mul_(3)
        stream.synchronize()
        look.true(f"work on the {name}", torch.equal(cells.cpu(), torch.arange(1 << 20) * 3), "differs")
    look.say(f"{number} multiprocessors, {share} of them for the first")
