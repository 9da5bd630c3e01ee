"""Symmetric memory without multicast on real GPUs: S1 to S4c. Every function is a scenario that all ranks run."""

from __future__ import annotations

import os
import time
from types import ModuleType, SimpleNamespace
from typing import Any

from tests.gpu.rank import Context, World, fake_capability, gathered, start, timed
from tests.gpu.scenarios import LEGACY, NEXT
from tests.gpu.standins import PATCHED, UPSTREAM, install_utils, load, source, standin, taken_out

MIB = 1 << 20
SIZES = (16, 256, 4096, 14336, 65536, 262144, MIB - 16)
"""Bytes; 14336 are one token of 7168 bf16."""
ROUNDS = 100
STAYS_OFF = "symmetric memory stays off"


def _module(context: Context) -> ModuleType:
    install_utils(context)
    folder = "distributed/device_communicators/"
    standin(context, "sglang.srt.distributed.device_communicators")
    load(context, PATCHED, f"{folder}all_reduce_utils.py")
    return load(context, PATCHED, f"{folder}torch_symm_mem.py")


def _prepared(context: Context) -> tuple[World, ModuleType, list[str]]:
    """The groups, the patched communicator's module, and the kernels that will have been launched."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != "1":
        raise RuntimeError("TORCH_SYMM_MEM_DISABLE_MULTICAST=1 has to be set: multicast may harm a shared host")
    world = start(context)
    fake_capability(context)
    launched: list[str] = []
    two_shot = torch.ops.symm_mem.two_shot_all_reduce_

    def counted(*arguments: Any) -> Any:
        launched.append("two-shot")
        return two_shot(*arguments)

    def refused(*_: Any) -> None:
        raise RuntimeError("multimem was chosen")

    torch.ops.symm_mem.two_shot_all_reduce_ = counted
    torch.ops.symm_mem.multimem_all_reduce_ = refused
    return world, _module(context), launched


def _made(context: Context, world: World, module: ModuleType) -> Any:
    with timed(context, "time to make the communicator"):
        return module.TorchSymmMemCommunicator(group=world.cpu_group, device=world.device)


def _message(rank: int, count: int, turn: int, device: Any) -> Any:
    """Small whole numbers, whose sums bf16 holds exactly; every rank can make every other's."""
    import torch

    made = (torch.arange(count, device=device) * (rank + 3) + turn * (rank + 1)) % 17 - 8
    return made.to(torch.bfloat16)


def _sum(ranks: int, count: int, turn: int, device: Any) -> Any:
    return sum(_message(rank, count, turn, device) for rank in range(ranks))


def asked(context: Context) -> None:
    """Asked for on every rank: two-shot, right sums, in a CUDA graph too, and nothing above the cap."""
    import torch

    world, module, launched = _prepared(context)
    comm = _made(context, world, module)
    context.check("it is on", not comm.disabled, f"{context.warnings}")
    if comm.disabled:
        return
    context.note("largest message", f"{comm.max_size} B")
    handle = module.torch_symm_mem.rendezvous(comm.buffer, world.cpu_group.group_name)
    context.check("there is no multicast", handle.multicast_ptr == 0, handle.multicast_ptr)
    context.check("the known sum was added up before it was on", launched == ["two-shot"], launched)
    launched.clear()
    for size in SIZES:
        wrong = 0
        for turn in range(ROUNDS):
            message = _message(context.rank, size // 2, turn, world.device)
            if not comm.should_torch_symm_mem_allreduce(message):
                wrong += 1
                continue
            wrong += not torch.equal(comm.all_reduce(message), _sum(context.ranks, size // 2, turn, world.device))
        context.check(f"{size} B: sums are exact", wrong == 0, f"{wrong} of {ROUNDS} rounds differ")
    context.check("each was two-shot's", launched == ["two-shot"] * ROUNDS * len(SIZES), f"{len(launched)} launches")
    _random(context, world, comm)
    for size in (16, 14336, MIB - 16):
        _in_graph(context, world, comm, size)
    for size in (comm.max_size, comm.max_size + 16, 2 * comm.max_size):
        message = _message(context.rank, size // 2, 0, world.device)
        taken = comm.should_torch_symm_mem_allreduce(message)
        context.check(f"{size} B are not taken", not taken, f"largest is below {comm.max_size} B")


def _random(context: Context, world: World, comm: Any) -> None:
    """Numbers that are rounded: as NCCL does it, to one unit in the last place of bf16."""
    import torch
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    generator = torch.Generator(device=world.device).manual_seed(context.rank)
    worst = 0.0
    for _ in range(ROUNDS):
        message = torch.randn(7168 * 4, device=world.device, generator=generator).to(torch.bfloat16)
        ours = comm.all_reduce(message).float()
        dist.all_reduce(message, group=world.device_group)
        worst = max(worst, float(((ours - message.float()).abs() / message.float().abs().clamp(min=2**-6)).max()))
    context.check("random numbers as with NCCL", worst <= 2**-7, f"largest relative difference {worst:.2e}")


def _in_graph(context: Context, world: World, comm: Any, size: int) -> None:
    import torch

    message = _message(context.rank, size // 2, 0, world.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        comm.all_reduce(message)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gathered(world, None, context.ranks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = comm.all_reduce(message)
    wrong = 0
    for turn in range(ROUNDS):
        message.copy_(_message(context.rank, size // 2, turn, world.device))
        graph.replay()
        wrong += not torch.equal(out, _sum(context.ranks, size // 2, turn, world.device))
    context.check(f"{size} B in a CUDA graph: sums are exact", wrong == 0, f"{wrong} of {ROUNDS} replays differ")


def not_asked(context: Context) -> None:
    """Without the variable it is as before: off for want of multicast."""
    world, module, launched = _prepared(context)
    comm = _made(context, world, module)
    said = context.warned("multicast operations are not supported")
    context.check("it is off", comm.disabled and not launched, launched)
    context.check("for want of multicast, as upstream says it", len(said) == 1, context.warnings)


def asked_on_one(context: Context) -> None:
    """A variable that is set on one rank only: off on both."""
    _off(context, *_prepared(context), says="it is not set")


def fails_behind(context: Context) -> None:
    """The last rank fails when all have met: off on both, at once."""
    world, module, launched = _prepared(context)
    _injected(context, module, before=False)
    _off(context, world, module, launched, says="injected")
    _again(context, world, module)


def fails_before(context: Context) -> None:
    """The last rank fails before the rendezvous: the other waits for it as long as torch's store does, and no longer."""
    world, module, launched = _prepared(context)
    _injected(context, module, before=True)
    _off(context, world, module, launched, says="injected")
    _again(context, world, module)


def adds_up_wrongly(context: Context) -> None:
    """Two-shot that delivers something else, on the last rank: off on both."""
    import torch

    world, module, launched = _prepared(context)
    kernel = torch.ops.symm_mem.two_shot_all_reduce_

    def wrong(buffer: Any, *rest: Any) -> Any:
        found = kernel(buffer, *rest)
        if context.rank == context.ranks - 1:
            buffer[-1] += 1
        return found

    torch.ops.symm_mem.two_shot_all_reduce_ = wrong
    context.standin("torch.ops.symm_mem.two_shot_all_reduce_ on the last rank: one element wrong")
    _off(context, world, module, launched, says="two-shot gave a wrong sum", kernels=1)


def _injected(context: Context, module: ModuleType, *, before: bool) -> None:
    real = module.torch_symm_mem

    def rendezvous(*arguments: Any) -> Any:
        last = context.rank == context.ranks - 1
        if last and before:
            raise RuntimeError("injected before the rendezvous")
        handle = real.rendezvous(*arguments)
        if last:
            raise RuntimeError("injected behind the rendezvous")
        return handle

    module.torch_symm_mem = SimpleNamespace(empty=real.empty, rendezvous=rendezvous)  # type: ignore[attr-defined]
    context.standin(f"rendezvous of the last rank: raises {'before' if before else 'behind'} the real one")


def _off(
    context: Context, world: World, module: ModuleType, launched: list[str], *, says: str, kernels: int = 0
) -> None:
    comm = _made(context, world, module)
    off = gathered(world, bool(comm.disabled), context.ranks)
    context.check("it is off on every rank", all(off), off)
    context.check("nothing else was launched", len(launched) == kernels, launched)
    warned = gathered(world, context.warned(STAYS_OFF), context.ranks)
    said = [item for items in warned for item in items]
    context.check("one warning, which says why", len(said) == 1 and says in said[0], said)
    _still_reduces(context, world)


def _again(context: Context, world: World, module: ModuleType) -> None:
    """sglang makes one for each of its groups: after a failure none tries again, and none waits."""
    before = time.monotonic()
    comm = module.TorchSymmMemCommunicator(group=world.cpu_group, device=world.device)
    took = time.monotonic() - before
    context.check("the next group's is off at once", comm.disabled and took < 10, f"{took:.1f} s")


def _still_reduces(context: Context, world: World) -> None:
    import torch
    import torch.distributed as dist

    message = _message(context.rank, 7168, 1, world.device)
    dist.all_reduce(message, group=world.device_group)
    right = torch.equal(message, _sum(context.ranks, 7168, 1, world.device))
    context.check("NCCL goes on with right sums", right)


def past_it(context: Context) -> None:
    """What symmetric memory does not take, or is asked to do in place (S4c), with upstream's function beside ours."""
    import torch

    world, module, launched = _prepared(context)
    comm = _made(context, world, module)
    context.check("it is on", not comm.disabled, context.warnings)
    if comm.disabled:
        return
    launched.clear()
    group = SimpleNamespace(pynccl_comm=None, torch_symm_mem_comm=comm, device_group=world.device_group)
    context.standin("GroupCoordinator: its own _all_reduce_in_place, without pynccl")
    for size in (14336, 2 * comm.max_size):
        for kind in (PATCHED, UPSTREAM):
            path = source(context, kind, "distributed/parallel_state.py")
            reduce = taken_out(path, "GroupCoordinator._all_reduce_in_place", {"torch": torch})
            message = _message(context.rank, size // 2, 5, world.device)
            try:
                reduce(group, message)
                right = torch.equal(message, _sum(context.ranks, size // 2, 5, world.device))
                said = "the sum" if right else "not the sum"
            except RuntimeError as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if kind == PATCHED:
                context.check(f"{size} B in place: the sum", said == "the sum", said)
                # Releases from 0.5.14 on hand on what symmetric memory takes.
                known = ["two-shot"] if context.release == NEXT and size < comm.max_size else []
                context.check(f"{size} B in place: {' '.join(known) or 'NCCL'}'s", launched == known, launched)
            else:
                wrong = said != "the sum"
                context.check(f"{size} B in place, upstream's own", wrong == (context.release == LEGACY), said)
            launched.clear()
            torch.cuda.synchronize()
            gathered(world, None, context.ranks)


def times(context: Context) -> None:
    """How long one all-reduce takes, beside NCCL's; over NVLink, so that it says nothing about SM120."""
    import torch
    import torch.distributed as dist

    world, module, _ = _prepared(context)
    comm = _made(context, world, module)
    context.check("it is on", not comm.disabled, context.warnings)
    if comm.disabled:
        return

    def nccl(message: Any) -> None:
        dist.all_reduce(message, group=world.device_group)

    for size in SIZES:
        message = torch.ones(size // 2, dtype=torch.bfloat16, device=world.device)
        found = {name: microseconds(step, message) for name, step in (("two-shot", comm.all_reduce), ("NCCL", nccl))}
        context.note(f"{size} B", ", ".join(f"{name} {value:.1f} µs" for name, value in found.items()))


def microseconds(step: Any, *arguments: Any) -> float:
    """The time of one call, of many behind each other, launches included."""
    import torch

    count = 200
    for _ in range(20):
        step(*arguments)
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(count):
        step(*arguments)
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) * 1000 / count
