"""Checks of sgl_kernel's routing on a GPU: which experts, with which weights, and the order in which they are laid out."""

from __future__ import annotations

from typing import Any

from builder.smoke.gpu_case import Look, Skip
from builder.smoke.gpu_sglang import has, normal, start


def router(look: Look) -> None:
    """The small product before the routing (dsv3_router_gemm), for DeepSeek-V3 and, where there is one, Kimi K2."""
    torch, package, _ = start(look)
    has(package, "dsv3_router_gemm")
    if torch.cuda.get_device_capability()[0] < 9:
        raise Skip("dsv3_router_gemm needs compute capability 9.0")
    width = 7168
    for experts in (256, 384):
        for tokens in (1, 7, 16):
            x = normal(torch, (tokens, width), 1, torch.bfloat16)
            weights = normal(torch, (experts, width), 2, torch.bfloat16)
            with look.each(f"{tokens} tokens, {experts} experts"):
                got = package.dsv3_router_gemm(x.cuda(), weights.cuda(), torch.float32)
                # 7168 products of about 1: their sum is about 85.
                look.near(
                    f"{tokens} tokens, {experts} experts", got, x.double() @ weights.double().t(), rel=1e-3, abs=5e-2
                )


def _ranked(torch: Any, weights: Any, ids: Any) -> tuple[Any, Any]:
    """Each row's experts in order, with their weights: kernels may name them in any order."""
    ids, order = ids.cpu().long().sort(-1)
    return weights.cpu().double().gather(-1, order), ids


def topk(look: Look) -> None:
    """The experts with the largest softmax."""
    torch, package, _ = start(look)
    for tokens, experts, best in ((1, 8, 2), (33, 64, 6), (130, 256, 8)):
        logits = normal(torch, (tokens, experts), 3)
        for again in (False, True):
            weights = torch.empty(tokens, best, device="cuda")
            ids = torch.empty(tokens, best, device="cuda", dtype=torch.int32)
            package.topk_softmax(weights, ids, logits.cuda(), again)
            known, chosen = logits.double().softmax(-1).topk(best, -1)
            known = known / known.sum(-1, keepdim=True) if again else known
            got, expected = _ranked(torch, weights, ids), _ranked(torch, known, chosen)
            what = f"{best} of {experts}, {tokens} tokens, renormalised {again}"
            look.true(f"{what}: experts", torch.equal(got[1], expected[1]), "others")
            look.near(f"{what}: weights", got[0], expected[0], rel=1e-4)


def gate(look: Look) -> None:
    """DeepSeek-V3's choice by groups (moe_fused_gate) and Kimi K2's without (kimi_k2_moe_fused_gate)."""
    torch, package, _ = start(look)
    best, scale, tokens = 8, 2.5, 37
    with look.each("moe_fused_gate"):
        logits, bias = normal(torch, (tokens, 256), 4), normal(torch, (256,), 5)
        weights, ids = package.moe_fused_gate(logits.cuda(), bias.cuda(), 8, 4, best, 0, scale, False)[:2]
        score = logits.double().sigmoid()
        biased = score + bias.double()
        groups = biased.view(tokens, 8, 32).topk(2, -1).values.sum(-1).topk(4, -1).indices
        allowed = torch.zeros(tokens, 8, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(32, 1)
        chosen = biased.masked_fill(~allowed, float("-inf")).topk(best, -1).indices
        known = score.gather(-1, chosen)
        got, expected = _ranked(torch, weights, ids), _ranked(torch, known / known.sum(-1, keepdim=True), chosen)
        look.true("by groups: experts", torch.equal(got[1], expected[1]), "others")
        look.near("by groups: weights", got[0], expected[0], rel=1e-3)
    with look.each("kimi_k2_moe_fused_gate"):
        if not hasattr(package, "kimi_k2_moe_fused_gate"):
            look.say("no kimi_k2_moe_fused_gate in this release")
            return
        for count in (1, 37, 600):
            logits, bias = normal(torch, (count, 384), 6), normal(torch, (384,), 7) / 4
            weights, ids = package.kimi_k2_moe_fused_gate(logits.cuda(), bias.cuda(), best, True, scale, True)
            score = logits.double().sigmoid()
            chosen = (score + bias.double()).topk(best, -1).indices
            known = score.gather(-1, chosen)
            known = known / known.sum(-1, keepdim=True) * scale
            got, expected = _ranked(torch, weights, ids), _ranked(torch, known, chosen)
            look.true(f"Kimi K2, {count} tokens: experts", torch.equal(got[1], expected[1]), "others")
            look.near(f"Kimi K2, {count} tokens: weights", got[0], expected[0], rel=1e-3)


def align(look: Look) -> None:
    """Tokens laid out by expert in whole blocks: every token once, in blocks of its own expert, and nothing else."""
    torch, package, _ = start(look)
    for tokens, best, experts, block in ((1, 2, 8, 16), (100, 6, 64, 32), (1000, 8, 256, 64)):
        made = torch.Generator().manual_seed(8)
        ids = torch.stack([torch.randperm(experts, generator=made)[:best] for _ in range(tokens)]).int()
        count = ids.numel()
        # sglang calls it with one expert more, for what is filtered out (-1).
        room = count + (experts + 1) * (block - 1)
        laid = torch.empty(room, device="cuda", dtype=torch.int32)
        owners = torch.empty((room + block - 1) // block, device="cuda", dtype=torch.int32)
        total = torch.empty(1, device="cuda", dtype=torch.int32)
        sums = torch.empty(experts + 2, device="cuda", dtype=torch.int32)
        package.moe_align_block_size(ids.cuda(), experts + 1, block, laid, owners, total, sums, True)
        per_expert = torch.bincount(ids.flatten().long(), minlength=experts).tolist()
        what = f"{tokens} tokens, {best} of {experts}, blocks of {block}"
        padded = sum((number + block - 1) // block * block for number in per_expert)
        look.equal(f"{what}: length", int(total), padded)
        found: dict[int, list[int]] = {}
        for index, expert in enumerate(owners[: int(total) // block].tolist()):
            part = laid[index * block : (index + 1) * block].tolist()
            found.setdefault(expert, []).extend(place for place in part if place < count)
        flat = ids.flatten().tolist()
        right = {
            expert: [place for place in range(count) if flat[place] == expert]
            for expert in range(experts)
            if per_expert[expert]
        }
        look.true(f"{what}: places", {e: sorted(p) for e, p in found.items()} == right, "others")
