"""flashinfer's fused all-reduce on real GPUs: F1, F5, S5, S7, S8 and S9. Every function is a scenario that all ranks run."""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tests.gpu.rank import Context, World, fake_capability, gathered, start, timed
from tests.gpu.standins import PATCHED, UPSTREAM, install_flashinfer, install_fusion, load
from tests.gpu.symm import microseconds

HIDDEN, EPS = 7168, 1e-6
TOKENS = range(1, 17)
ROUNDS = 20
TOLERANCE = 2**-5
"""Relative to the value, or to 1 below it. Sum, residual and norm are each rounded to bf16; NCCL's way comes to 2**-6."""


@dataclass
class Stack:
    """The patched modules of sglang, and flashinfer's calls as they are made."""

    world: World
    operators: Any
    fusion: ModuleType
    layernorm: ModuleType
    communicator: ModuleType
    arguments: Any
    launches: list[dict[str, Any]]

    def gate(self, tokens: int) -> bool:
        """Whether an all-reduce is put off."""
        return bool(self.communicator.apply_flashinfer_allreduce_fusion(tokens))


def stack(context: Context) -> Stack:
    """Everything loaded, on a device that says 12.0."""
    world = start(context)
    fake_capability(context)
    operators = install_flashinfer(context)
    arguments = install_fusion(context, world)
    fusion = load(context, PATCHED, "layers/flashinfer_comm_fusion.py")
    layernorm = load(context, PATCHED, "layers/layernorm.py")
    communicator = load(context, PATCHED, "layers/communicator.py")
    context.check("flashinfer is there for sglang", fusion._flashinfer_comm is not None)
    launches: list[dict[str, Any]] = []
    real = fusion._flashinfer_comm.trtllm_allreduce_fusion

    def counted(**named: Any) -> None:
        launches.append(named)
        real(**named)

    fusion._flashinfer_comm.trtllm_allreduce_fusion = counted
    return Stack(world, operators, fusion, layernorm, communicator, arguments, launches)


def parts(context: Context, world: World, tokens: int, hidden: int, turn: int) -> tuple[Any, Any, Any, Any]:
    """This rank's part of a sum, the residual, the weight, and what the sum has to be in float64."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    def made(seed: int, *shape: int) -> Any:
        generator = torch.Generator(device=world.device).manual_seed(seed)
        return torch.randn(*shape, device=world.device, generator=generator).to(torch.bfloat16)

    shares = [made(1000 * turn + rank, tokens, hidden) for rank in range(context.ranks)]
    residual, weight = made(1000 * turn + 500, tokens, hidden), made(7, hidden).abs() + 0.5
    return shares[context.rank], residual, weight, sum(share.double() for share in shares)


def reference(total: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
    """Norm and residual of a sum, in float64."""
    import torch

    added = total + residual.double()
    return added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + EPS) * weight.double(), added


def error(found: Any, known: Any) -> tuple[float, float]:
    """The largest absolute difference, and the largest relative to the value or to 1, whichever is more."""
    difference = (found.double() - known).abs()
    return float(difference.max()), float((difference / known.abs().clamp(min=1)).max())


def norm_of(module: ModuleType, weight: Any) -> Any:
    """sglang's RMSNorm with this weight."""
    import torch

    made = module.RMSNorm(weight.shape[0], eps=EPS).to(weight.device, torch.bfloat16)
    made.weight.data.copy_(weight)
    return made


def _nccl(stack: Stack, norm: Any, share: Any, residual: Any) -> tuple[Any, Any]:
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    share, residual = share.clone(), residual.clone()
    dist.all_reduce(share, group=stack.world.device_group)
    found: tuple[Any, Any] = norm.forward(share, residual)
    return found


def _compare(
    context: Context, stack: Stack, what: str, tokens: int, hidden: int = HIDDEN, rounds: int = ROUNDS
) -> None:
    """The norm with the all-reduce put off, against float64, with NCCL and the plain norm beside it."""
    import torch

    worst = {name: [0.0, 0.0] for name in ("fused norm", "fused residual", "NCCL norm", "NCCL residual")}
    alone = float("inf")
    for turn in range(rounds):
        share, residual, weight, total = parts(context, stack.world, tokens, hidden, turn)
        known = reference(total, residual, weight)
        norm = norm_of(stack.layernorm, weight)
        with torch.no_grad():
            partial = norm.forward(share.clone(), residual.clone())[0]
            plain = _nccl(stack, norm, share, residual)
            fused = norm.forward_with_allreduce_fusion(share.clone(), residual.clone())
        for name, pair in (("fused", fused), ("NCCL", plain)):
            for part, found, wanted in zip(("norm", "residual"), pair, known, strict=True):
                now = worst[f"{name} {part}"]
                now[:] = [max(a, b) for a, b in zip(now, error(found, wanted), strict=True)]
        alone = min(alone, error(partial, known[0])[1])
    said = ", ".join(f"{name} {absolute:.1e}/{relative:.1e}" for name, (absolute, relative) in worst.items())
    ours = max(worst["fused norm"][1], worst["fused residual"][1])
    detail = f"largest error absolute/relative: {said}; without an all-reduce {alone:.1e}; {rounds} rounds"
    context.check(what, ours <= TOLERANCE < alone, detail)


def compiles(context: Context) -> None:
    """flashinfer's own compilation of the patched module for this GPU, and what it asks nvcc for on SM120."""
    import torch

    torch.cuda.set_device(0)
    operators: Any = install_flashinfer(context)
    version, module, built_for = (
        importlib.import_module(f"flashinfer.{name}") for name in ("version", "jit.comm", "compilation_context")
    )
    comm: Any = module

    context.note("flashinfer", version.__version__)
    with timed(context, "time to compile"):
        operators.get_trtllm_comm_module()
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "12.0a"
    comm.current_compilation_context = built_for.CompilationContext()
    flags = [flag for flag in comm.gen_trtllm_comm_module().extra_cuda_cflags if flag.startswith("-gencode")]
    context.check("F1: asks for sm_120a there", flags == ["-gencode=arch=compute_120a,code=sm_120a"], flags)


def asked(context: Context) -> None:
    """Asked for: the gate, right sums for 1 to 16 tokens, and what is not for the kernel."""
    import torch

    made = stack(context)
    with timed(context, "time of the gate's vote"):
        opened = made.gate(1)
    context.check("the gate is open for 1 to 16 tokens", opened and all(made.gate(n) for n in TOKENS), context.warnings)
    shut = [made.gate(n) for n in (0, 17, 2048, 4096)]
    context.check("and shut for 0, 17 and more", not any(shut), shut)
    with timed(context, "time to make the workspace"):
        ready = made.fusion.ensure_workspace_initialized(max_token_num=2048, hidden_dim=HIDDEN)
    context.check("the workspace is there", ready, context.warnings)
    if not ready:
        return
    _flags_are_zero(context, made)
    for tokens in TOKENS:
        made.launches.clear()
        _compare(context, made, f"{tokens} tokens: the fused norm", tokens)
        context.check(f"{tokens} tokens: the kernel's", len(made.launches) == ROUNDS, f"{len(made.launches)} launches")
    early = {item["launch_with_pdl"] for item in made.launches}
    context.check("S9: not launched early", early == {False}, early)
    made.launches.clear()
    _compare(context, made, "17 tokens, past the gate: the sum by NCCL (S7)", 17, rounds=2)
    _compare(context, made, "hidden size 2880: the sum by NCCL (S7)", 4, hidden=2880, rounds=2)
    context.check("neither was the kernel's", not made.launches, f"{len(made.launches)} launches")
    _two_shot(context, made)
    torch.cuda.synchronize()


def _flags_are_zero(context: Context, made: Stack) -> None:
    """The buffer with the barriers' flags, read back before any kernel has run (F5)."""
    flags = (ctypes.c_ubyte * (context.ranks * made.operators.BarrierFlagCount * 4))()
    mine = made.fusion._workspace_manager.ipc_handles[1][context.rank]
    made.operators.cudart.cudaMemcpy(ctypes.cast(flags, ctypes.c_void_p), ctypes.c_void_p(mine), len(flags))
    context.check(
        "F5: the flags are zero at first", not any(flags), f"{sum(map(bool, flags))} of {len(flags)} bytes are not"
    )


def _two_shot(context: Context, made: Stack) -> None:
    """flashinfer's other kernel, which waits by those flags; sglang leaves the choice to flashinfer."""
    import torch

    for tokens in (4, 16):
        worst = 0.0
        for turn in range(ROUNDS):
            share, residual, weight, total = parts(context, made.world, tokens, HIDDEN, turn)
            with torch.no_grad():
                found = made.fusion.flashinfer_allreduce_residual_rmsnorm(
                    input_tensor=share, residual=residual, weight=weight, eps=EPS, use_oneshot=False
                )
            known = reference(total, residual, weight)
            worst = max([worst, *(error(a, b)[1] for a, b in zip(found, known, strict=True))])
        context.check(
            f"{tokens} tokens by its two-shot kernel", worst <= TOLERANCE, f"largest relative error {worst:.1e}"
        )


def graph(context: Context) -> None:
    """The fused norm in a CUDA graph, replayed."""
    import torch

    made = stack(context)
    context.check("the gate is open", made.gate(8), context.warnings)
    for tokens in (1, 8, 16):
        share, residual, weight, _ = parts(context, made.world, tokens, HIDDEN, 0)
        norm = norm_of(made.layernorm, weight)
        with torch.no_grad():
            norm.forward_with_allreduce_fusion(share, residual)
            torch.cuda.synchronize()
            gathered(made.world, None, context.ranks)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, capture_error_mode="thread_local"):
                found = norm.forward_with_allreduce_fusion(share, residual)
        worst = 0.0
        for turn in range(100):
            next_share, next_residual, _, total = parts(context, made.world, tokens, HIDDEN, turn)
            share.copy_(next_share)
            residual.copy_(next_residual)
            captured.replay()
            known = reference(total, next_residual, weight)
            worst = max([worst, *(error(a, b)[1] for a, b in zip(found, known, strict=True))])
        context.check(f"{tokens} tokens, 100 replays", worst <= TOLERANCE, f"largest relative error {worst:.1e}")


def not_asked(context: Context) -> None:
    """Without the variable, or without sglang's flag, the gate stays shut and nothing is made."""
    made = stack(context)
    context.check("without the variable the gate is shut", not any(made.gate(n) for n in TOKENS), context.warnings)
    context.check("nobody is asked, nothing is said", not context.warned("SGLANG_STACK_SM120_FUSION"), context.warnings)
    context.check("no workspace was made", not made.fusion._workspace_manager.initialized)


def no_compiler(context: Context) -> None:
    """The last rank cannot have the module: off on both, at once."""
    made = stack(context)
    if context.rank == context.ranks - 1:

        def refused() -> None:
            raise RuntimeError("injected: no compiler")

        made.operators.get_trtllm_comm_module = refused
    context.standin("get_trtllm_comm_module of the last rank: raises")
    _gives_up(context, made, within=30)


def no_workspace(context: Context) -> None:
    """The last rank fails when it makes its second buffer: the other gives it up after a minute, and both are off."""
    made = stack(context)
    if context.rank == context.ranks - 1:
        real, calls = made.operators.create_shared_buffer, []

        def failing(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == 2:
                raise RuntimeError("injected: out of memory")
            return real(*arguments)

        made.operators.create_shared_buffer = failing
    context.standin("create_shared_buffer of the last rank: raises the second time")
    _gives_up(context, made, within=90)


def _gives_up(context: Context, made: Stack, *, within: float) -> None:
    context.check("the gate is open at first", made.gate(4), context.warnings)
    before = time.monotonic()
    _compare(context, made, "the sum by NCCL all the same (S7)", 4, rounds=1)
    took = time.monotonic() - before
    context.check(f"within {within:g} s", took < within, f"{took:.1f} s")
    context.check("the gate is shut for good", not any(made.gate(n) for n in TOKENS))
    before = time.monotonic()
    _compare(context, made, "and again", 4, rounds=3)
    context.check("without another try", time.monotonic() - before < 20 and not made.launches)
    said = gathered(made.world, context.warned("is off for good"), context.ranks)
    warned = [item for items in said for item in items]
    context.check("one warning", len(warned) == 1, warned)
    context.check("it says what the failing rank had", all("injected" in item for item in warned), warned)
    _upstreams_fallback(context, made)


def _upstreams_fallback(context: Context, made: Stack) -> None:
    """What upstream's own layer norm does there: the norm of one rank's part."""
    import torch

    module = load(context, UPSTREAM, "layers/layernorm.py", "upstreams_layernorm")
    share, residual, weight, total = parts(context, made.world, 4, HIDDEN, 0)
    with torch.no_grad():
        found = norm_of(module, weight).forward_with_allreduce_fusion(share.clone(), residual.clone())
    wrong = error(found[0], reference(total, residual, weight)[0])[1]
    context.check(
        "upstream's layer norm leaves the all-reduce out", wrong > 10 * TOLERANCE, f"relative error {wrong:.1e}"
    )


def times(context: Context) -> None:
    """How long the fused norm takes beside NCCL and the plain one; over NVLink, so that it says nothing about SM120."""
    import torch

    made = stack(context)
    context.check("the gate is open", made.gate(8), context.warnings)
    for tokens in (1, 4, 16):
        share, residual, weight, _ = parts(context, made.world, tokens, HIDDEN, 0)
        norm = norm_of(made.layernorm, weight)
        with torch.no_grad():
            fused = microseconds(norm.forward_with_allreduce_fusion, share, residual)
            plain = microseconds(lambda n=norm, s=share, r=residual: _nccl(made, n, s, r))
        context.note(
            f"{tokens} tokens of {HIDDEN}",
            f"fused {fused:.1f} µs, NCCL and a norm of several kernels (a stand-in) {plain:.1f} µs",
        )
