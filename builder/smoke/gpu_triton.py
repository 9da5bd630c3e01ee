"""A check of Triton on a GPU: two kernels compiled for the device that is there, and run."""

from __future__ import annotations

from typing import Any

from builder.smoke.gpu_case import Look, Skip

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError as error:
    triton, _WHY = None, str(error)


def kernels(look: Look) -> None:
    """A masked sum, exactly, and a product by tensor cores, of whole numbers, exactly."""
    if triton is None:
        raise Skip(f"triton cannot be imported: {_WHY}")
    import torch  # type: ignore[import-not-found,unused-ignore]

    from builder.smoke.gpu_torch import whole

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def add(x, y, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)

    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def product(a, b, out, N: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
        found = tl.dot(tl.load(a + row * N + column), tl.load(b + row * N + column))
        tl.store(out + row * N + column, found)

    count = 100_003
    x, y = (torch.arange(count, device="cuda") * factor for factor in (1, 2))
    out = torch.full((count + 100,), -1, device="cuda")
    held: Any = add[(triton.cdiv(count, 1024),)](x, y, out, count, BLOCK=1024)
    look.true("a sum", torch.equal(out[:count].cpu(), torch.arange(count) * 3), "differs")
    look.equal("what lies behind it", out[count:].unique(), [-1])
    a, b = whole(torch, (64, 64), 1), whole(torch, (64, 64), 2)
    for dtype in (torch.float16, torch.bfloat16):
        got = torch.empty(64, 64, device="cuda")
        product[(1,)](a.to("cuda", dtype), b.to("cuda", dtype), got, N=64)
        look.true(f"a product, {dtype}", torch.equal(got.cpu().to(torch.float64), a @ b), "differs")
    torch.cuda.synchronize()
    target = held.metadata.target
    major, minor = torch.cuda.get_device_capability()
    look.equal("compiled for", target.arch, major * 10 + minor)
    look.say(f"triton {triton.__version__}, compiled for {target.backend} {target.arch}")
