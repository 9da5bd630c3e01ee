"""Checks of sgl_kernel's attention on a GPU, each beside the plain formula in float64."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

from builder.smoke.gpu_case import Look, Skip
from builder.smoke.gpu_sglang import has, normal, start

NEAR = {"rel": 2e-2, "abs": 2e-2}
"""bf16 has 8 bits, and attention of normal numbers is smaller than 1."""


def attend(q: Any, k: Any, v: Any, scale: float, causal: bool = False) -> tuple[Any, Any]:
    """Attention in float64: q (s, h, d), k (t, g, d), v (t, g, e) → out (s, h, e), log-sum-exp (h, s)."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    share = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(share, 1), v.double().repeat_interleave(share, 1)
    scores = torch.einsum("shd,thd->hst", q.double(), k) * scale
    if causal:
        s, t = scores.shape[-2:]
        later = torch.arange(t)[None] > torch.arange(s)[:, None] + t - s
        scores = scores.masked_fill(later, float("-inf"))
    return torch.einsum("hst,the->she", scores.softmax(-1), v), scores.logsumexp(-1)


def merge_state(look: Look) -> None:
    """Two halves of an attention put together, by their log-sum-exps."""
    torch, package, _ = start(look)
    has(package, "merge_state_v2")
    q, k, v = (normal(torch, (31, 8, 128), seed, torch.bfloat16) for seed in (1, 2, 3))
    whole, total = attend(q, k, v, 128**-0.5)
    halves = [attend(q, k[part], v[part], 128**-0.5) for part in (slice(0, 11), slice(11, 31))]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        given = [
            item.contiguous()
            for out, lse in halves
            for item in (out.to("cuda", dtype), lse.t().to("cuda", torch.float32))
        ]
        got, lse = package.merge_state_v2(*given)
        look.near(f"out {dtype}", got, whole, **NEAR)
        look.near(f"log-sum-exp {dtype}", lse, total.t(), rel=1e-4, abs=1e-4)


def cutlass_mla(look: Look) -> None:
    """MLA's decode of CUTLASS: compute capability 10.0 alone has it."""
    torch, package, _ = start(look)
    has(package, "cutlass_mla_decode", "cutlass_mla_get_workspace_size")
    if torch.cuda.get_device_capability()[0] != 10:
        raise Skip("the kernels of cutlass_mla_decode are for 10.x")
    heads, page, pages = 128, 128, 6
    lengths = [200, 384]
    q, cache = normal(torch, (2, heads, 576), 1, torch.bfloat16), normal(torch, (pages, page, 576), 2, torch.bfloat16)
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    space = package.cutlass_mla_get_workspace_size(3 * page, 2)
    got = package.cutlass_mla_decode(
        q[..., :512].contiguous().cuda(),
        q[..., 512:].contiguous().cuda(),
        cache.cuda(),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        table.cuda(),
        torch.empty(space, device="cuda", dtype=torch.uint8),
        192**-0.5,
    )
    for request, length in enumerate(lengths):
        held = cache[table[request].long()].reshape(-1, 1, 576)[:length]
        known, _ = attend(q[request][None], held, held[..., :512], 192**-0.5)
        look.near(f"{length} tokens", got[request][None], known, **NEAR)


def _flash(torch: Any, look: Look) -> Any:
    if torch.cuda.get_device_capability()[0] not in (8, 9):
        raise Skip("FlashAttention 3 of sgl_kernel is for 8.x and 9.x; sglang refuses it elsewhere")
    package = importlib.import_module("sgl_kernel.flash_attn")
    look.loaded()
    return package


def flash_attn(look: Look) -> None:
    """Prefill with sequences of different lengths, causal and not, fewer key heads than query heads."""
    torch, _, _ = start(look)
    flash = _flash(torch, look)
    queries, keys = [5, 64, 200], [5, 100, 333]
    first, last = (torch.tensor([0, *items]).cumsum(0).int().cuda() for items in (queries, keys))
    for width, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)):
        with look.each(f"heads of {width}, {dtype}"):
            q = normal(torch, (sum(queries), 8, width), 1, dtype)
            k, v = (normal(torch, (sum(keys), 2, width), seed, dtype) for seed in (2, 3))
            for causal in (False, True):
                got = flash.flash_attn_varlen_func(
                    q.cuda(), k.cuda(), v.cuda(), first, last, max(queries), max(keys), causal=causal
                )
                got = got[0] if isinstance(got, tuple) else got
                known = torch.cat(
                    [
                        attend(q[a:b], k[c:d], v[c:d], width**-0.5, causal)[0]
                        for (a, b), (c, d) in zip(pairwise(first.tolist()), pairwise(last.tolist()), strict=True)
                    ]
                )
                look.near(f"heads of {width}, {dtype}, causal {causal}", got, known, **NEAR)


def _pages(torch: Any, lengths: list[int], page: int) -> tuple[Any, int]:
    """A table of pages in no order, and how many there are."""
    most = (max(lengths) + page - 1) // page
    order = torch.randperm(most * len(lengths), generator=torch.Generator().manual_seed(9))
    return order.int().view(len(lengths), most), most * len(lengths)


def flash_attn_paged(look: Look) -> None:
    """Decode from a paged cache, with pages of 1 (sglang's default), 64 and 256 tokens."""
    torch, _, _ = start(look)
    flash, lengths, width = _flash(torch, look), [17, 300, 512], 128
    for page in (1, 64, 256):
        with look.each(f"pages of {page}"):
            table, count = _pages(torch, lengths, page)
            q = normal(torch, (3, 1, 8, width), 4, torch.bfloat16)
            k, v = (normal(torch, (count, page, 2, width), seed, torch.bfloat16) for seed in (5, 6))
            got = flash.flash_attn_with_kvcache(
                q.cuda(),
                k.cuda(),
                v.cuda(),
                cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
                page_table=table.cuda(),
                causal=True,
            )
            got = got[0] if isinstance(got, tuple) else got
            for request, length in enumerate(lengths):
                keys, values = (cache[table[request].long()].reshape(-1, 2, width)[:length] for cache in (k, v))
                known, _ = attend(q[request], keys, values, width**-0.5)
                look.near(f"pages of {page}, {length} tokens", got[request], known, **NEAR)


def flash_attn_mla(look: Look) -> None:
    """MLA as sglang decodes Kimi-K2.5 and DeepSeek on 9.0: 64 rotated and 512 latent numbers a token."""
    torch, _, _ = start(look)
    if torch.cuda.get_device_capability()[0] != 9:
        raise Skip("FlashAttention 3 takes `qv` on 9.x alone")
    flash, lengths, heads, scale = _flash(torch, look), [3, 129, 400], 16, 192**-0.5
    table, count = _pages(torch, lengths, 1)
    q, latent = (
        normal(torch, (3, 1, heads, 64), 7, torch.bfloat16),
        normal(torch, (3, 1, heads, 512), 8, torch.bfloat16),
    )
    rotated, held = (normal(torch, (count, 1, 1, width), 9 + width, torch.bfloat16) for width in (64, 512))
    got = flash.flash_attn_with_kvcache(
        q.cuda(),
        rotated.cuda(),
        held.cuda(),
        qv=latent.cuda(),
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        page_table=table.cuda(),
        cu_seqlens_q=None,
        softmax_scale=scale,
        causal=True,
    )
    got = got[0] if isinstance(got, tuple) else got
    for request, length in enumerate(lengths):
        places = table[request].long()[:length]
        keys = torch.cat([rotated[places], held[places]], -1).reshape(length, 1, 576)
        queries = torch.cat([q[request], latent[request]], -1)
        known, _ = attend(queries, keys, keys[..., 64:], scale)
        look.near(f"{length} tokens", got[request], known, **NEAR)


def flashmla(look: Look) -> None:
    """FlashMLA's dense decode: 9.0 alone has it."""
    torch, _, _ = start(look)
    if torch.cuda.get_device_capability() != (9, 0):
        raise Skip("FlashMLA's dense decode is for 9.0")
    try:
        package = importlib.import_module("sgl_kernel.flash_mla")
    except ImportError as error:
        raise Skip(f"this release has no sgl_kernel.flash_mla: {error}") from error
    look.loaded()
    page, heads, lengths, scale = 64, 64, [65, 200, 256], 192**-0.5
    table, count = _pages(torch, lengths, page)
    q, cache = (
        normal(torch, (3, 1, heads, 576), 1, torch.bfloat16),
        normal(torch, (count, page, 1, 576), 2, torch.bfloat16),
    )
    sizes = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if hasattr(package, "FlashMLASchedMeta"):
        plan, splits = package.get_mla_metadata()
    else:
        plan, splits = package.get_mla_metadata(sizes, heads, 1)
    got, _ = package.flash_mla_with_kvcache(
        q.cuda(), cache.cuda(), table.cuda(), sizes, 512, plan, splits, softmax_scale=scale, causal=True
    )
    for request, length in enumerate(lengths):
        held = cache[table[request].long()].reshape(-1, 1, 576)[:length]
        known, _ = attend(q[request], held, held[..., :512], scale)
        look.near(f"{length} tokens", got[request], known, **NEAR)
