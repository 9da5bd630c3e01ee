"""Checks of torch on a GPU: small whole numbers, whose sums every format holds exactly, and library calls with known results.

Each function is a check of `gpu_case.CASES`; they run in children (`gpu_child.py`).
"""

from __future__ import annotations

import os
from typing import Any

from builder.smoke.gpu_case import Look, Skip


def _torch() -> Any:
    import torch  # type: ignore[import-not-found,unused-ignore]

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU: torch.cuda.is_available() is False")
    return torch


def whole(torch: Any, shape: tuple[int, ...], seed: int, most: int = 1) -> Any:
    """Whole numbers from -most to most, on the CPU, as float64."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=made).to(torch.float64)


def matmul(look: Look) -> None:
    """Products of whole numbers: sums of at most 128, exact in bf16 (8 bits) and all the others."""
    torch = _torch()
    capability = torch.cuda.get_device_capability()
    formats = [("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp64", torch.float64)]
    told = []
    for m, k, n in ((1, 128, 256), (64, 128, 192), (513, 128, 1000)):
        a, b = whole(torch, (m, k), 1), whole(torch, (k, n), 2)
        expected = a @ b
        for name, dtype in formats:
            got = a.to("cuda", dtype) @ b.to("cuda", dtype)
            look.true(f"{name} {m}x{k}x{n}", torch.equal(got.cpu().to(torch.float64), expected), "differs")
    told += [name for name, _ in formats]
    batch = whole(torch, (6, 33, 64), 3), whole(torch, (6, 64, 40), 4)
    got = torch.bmm(batch[0].to("cuda", torch.bfloat16), batch[1].to("cuda", torch.bfloat16))
    look.true("bf16 in batches", torch.equal(got.cpu().to(torch.float64), torch.bmm(*batch)), "differs")
    ints = whole(torch, (64, 128), 5, 100).to(torch.int8), whole(torch, (128, 64), 6, 100).to(torch.int8)
    got = torch._int_mm(ints[0].cuda(), ints[1].cuda())
    look.true("int8", torch.equal(got.cpu().long(), ints[0].long() @ ints[1].long()), "differs")
    told.append("int8")
    if capability >= (8, 9):
        eight = torch.float8_e4m3fn
        a, b = whole(torch, (64, 128), 7), whole(torch, (96, 128), 8)
        two, half = torch.tensor(2.0, device="cuda"), torch.tensor(0.5, device="cuda")
        got = torch._scaled_mm(a.to("cuda", eight), b.to("cuda", eight).t(), two, half, out_dtype=torch.bfloat16)
        look.true("fp8", torch.equal(got.cpu().to(torch.float64), a @ b.t()), "differs")
        told.append("fp8")
    look.say(", ".join(told))


def reduce(look: Look) -> None:
    """Sums, maxima, sorts and the like of numbers whose outcome is known."""
    torch = _torch()
    count = 1 << 22
    line = torch.arange(count, device="cuda", dtype=torch.int64)
    look.equal("sum", int(line.sum()), count * (count - 1) // 2)
    look.equal("fp32 sum of ones", float(torch.ones(count, device="cuda").sum()), float(count))
    look.equal("cumulative sum", int(torch.ones_like(line).cumsum(0)[-1]), count)
    mixed = (line * 1_000_003) % count
    look.equal("a permutation", int(mixed.unique().numel()), count)
    look.true("sort", torch.equal(mixed.sort().values, line), "not in order")
    look.equal("argmax", int(mixed[int(mixed.argmax())]), count - 1)
    look.equal("top 3", mixed.topk(3).values, [count - 1, count - 2, count - 3])
    rows = torch.randn(512, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    look.near("softmax", rows.softmax(-1), rows.cpu().double().softmax(-1), rel=1e-5)
    picked = rows[torch.arange(511, -1, -1, device="cuda")]
    look.true("gather", torch.equal(picked.cpu(), rows.cpu().flip(0)), "differs")
    added = torch.zeros(16, device="cuda").index_add_(0, line[:4096] % 16, torch.ones(4096, device="cuda"))
    look.equal("index_add", added, [256.0] * 16)


def streams(look: Look) -> None:
    """Two streams that wait for each other, and a captured graph that is replayed."""
    torch = _torch()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    value = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    for turn in range(20):
        stream, other = (first, second) if turn % 2 == 0 else (second, first)
        stream.wait_stream(other)
        with torch.cuda.stream(stream):
            value.mul_(2).add_(1)
    torch.cuda.synchronize()
    # As float32, whose whole numbers are exact up to 2**24.
    look.equal("twenty turns", (float(value.min()), float(value.max())), (float(2**20 - 1), float(2**20 - 1)))
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    held = torch.zeros(4096, device="cuda")
    warm = torch.cuda.Stream()
    with torch.cuda.stream(warm):
        held.add_(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held.add_(3)
        held.mul_(2)
    held.zero_()
    began.record()
    for _ in range(5):
        graph.replay()
    ended.record()
    torch.cuda.synchronize()
    look.equal("five replays", held.unique(), [186.0])
    look.true("time passes", began.elapsed_time(ended) > 0, began.elapsed_time(ended))


def memory(look: Look) -> None:
    """A quarter of what is free, at most 8 GB, written and read again; copies both ways, pinned."""
    torch = _torch()
    free, total = torch.cuda.mem_get_info()
    count = min(free // 4, 8 << 30) // 8
    look.true("a gigabyte is free", free >= 1 << 30, f"{free} of {total} bytes are free")
    cells = torch.arange(count, device="cuda", dtype=torch.int64)
    cells.bitwise_xor_(0x5A5A5A5A5A5A5A5A)
    bad = 0
    for start in range(0, count, 1 << 27):
        part = cells[start : start + (1 << 27)]
        known = torch.arange(start, start + part.numel(), device="cuda", dtype=torch.int64)
        bad += int((part.bitwise_xor(0x5A5A5A5A5A5A5A5A) != known).sum())
    look.equal("cells that lost their content", bad, 0)
    pinned = torch.arange(1 << 24, dtype=torch.int32).pin_memory()
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty_like(pinned).pin_memory()
    back.copy_(there + 1, non_blocking=True)
    torch.cuda.synchronize()
    look.true("there and back", torch.equal(back, pinned + 1), "differs")
    before = torch.cuda.memory_reserved()
    del cells, there, part, known
    torch.cuda.empty_cache()
    look.true("what was freed is free", torch.cuda.memory_reserved() < before, torch.cuda.memory_reserved())
    look.say(f"{count * 8 / 1e9:.1f} GB of {total / 1e9:.0f} GB written and read")


def libraries(look: Look) -> None:
    """One call each of what torch brings: cuDNN, cuFFT, cuSOLVER, cuSPARSE, cuRAND's generator, NVRTC, attention."""
    torch = _torch()
    with look.each("cuDNN"):
        image, kernel = whole(torch, (2, 8, 17, 19), 1), whole(torch, (16, 8, 3, 3), 2)
        got = torch.nn.functional.conv2d(image.to("cuda", torch.float16), kernel.to("cuda", torch.float16), padding=1)
        expected = torch.nn.functional.conv2d(image, kernel, padding=1)
        look.true("cuDNN: convolution", torch.equal(got.cpu().to(torch.float64), expected), "differs")
        look.say(f"cuDNN {torch.backends.cudnn.version()}")
    with look.each("cuFFT"):
        wave = torch.cos(2 * torch.pi * 5 * torch.arange(4096, dtype=torch.float64) / 4096)
        got = torch.fft.rfft(wave.cuda()).abs()
        look.equal("cuFFT: the wave's frequency", int(got.argmax()), 5)
    with look.each("cuSOLVER"):
        matrix = torch.eye(96, dtype=torch.float64) * 8 + whole(torch, (96, 96), 3) / 32
        right = whole(torch, (96, 4), 4, 9)
        got = torch.linalg.solve(matrix.cuda(), right.cuda())
        look.near("cuSOLVER: solution", matrix @ got.cpu(), right, rel=1e-10, abs=1e-10)
    with look.each("cuSPARSE"):
        dense = whole(torch, (64, 64), 5)
        got = dense.to_sparse_csr().cuda() @ torch.ones(64, 3, dtype=torch.float64, device="cuda")
        look.near("cuSPARSE: product", got, dense.sum(1, keepdim=True).expand(64, 3), rel=1e-12)
    with look.each("random numbers"):
        got = torch.rand(1 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
        again = torch.rand(1 << 20, device="cuda", generator=torch.Generator("cuda").manual_seed(7))
        look.true("random: again", torch.equal(got, again), "another sequence")
        look.true("random: evenly", abs(float(got.mean()) - 0.5) < 0.005, float(got.mean()))
    with look.each("NVRTC"):
        made = torch.cuda.jiterator._create_jit_fn("template <typename T> T f(T x, T y) { return x * y + 1; }")
        got = made(torch.arange(100.0, device="cuda"), torch.full((100,), 3.0, device="cuda"))
        look.true("NVRTC: a kernel", torch.equal(got.cpu(), torch.arange(100.0) * 3 + 1), "differs")
    with look.each("attention"):
        made = torch.Generator().manual_seed(8)
        q, k, v = (torch.randn(2, 4, 77, 64, generator=made).to(torch.bfloat16) for _ in range(3))
        got = torch.nn.functional.scaled_dot_product_attention(q.cuda(), k.cuda(), v.cuda(), is_causal=True)
        expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
        look.near("attention", got, expected, rel=2e-2, abs=2e-2)


def devices(look: Look) -> None:
    """No check: what torch says of itself and of the GPU, for the record."""
    import torch

    look.tell(
        "torch",
        version=torch.__version__,
        cuda=torch.version.cuda,
        archs=torch.cuda.get_arch_list() if torch.cuda.is_available() else [],
        visible=torch.cuda.device_count(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "",
    )
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        raise Skip("CUDA_VISIBLE_DEVICES is empty")
