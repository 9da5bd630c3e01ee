"""Checks that take several GPUs: sums over all of them by NCCL, by symmetric memory without multicast, by sgl_kernel."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from builder.smoke.gpu_case import Look, Skip

WAIT = 90.0
"""Seconds that a rank waits for the others."""


@contextlib.contextmanager
def _world(look: Look) -> Iterator[Any]:
    """torch, with a group of all ranks over NCCL; they meet by a file."""
    import torch  # type: ignore[import-not-found,unused-ignore]
    import torch.distributed as dist  # type: ignore[import-not-found,unused-ignore]

    torch.cuda.set_device(look.rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{look.meet}",
        rank=look.rank,
        world_size=look.ranks,
        timeout=timedelta(seconds=WAIT),
        device_id=torch.device("cuda", look.rank),
    )
    yield torch
    # Every rank has to have finished before one takes its memory away.
    torch.cuda.synchronize()
    dist.barrier()


def _peers(torch: Any, look: Look) -> None:
    for other in range(look.ranks):
        if other != look.rank and not torch.cuda.can_device_access_peer(look.rank, other):
            raise Skip(f"GPU {look.rank} does not reach the memory of GPU {other}")


def _share(torch: Any, look: Look, count: int, dtype: Any, turn: int = 0) -> tuple[Any, Any]:
    """This rank's whole numbers, and the sum over all ranks; both small enough for 8 bits."""
    cells = torch.arange(count, device="cuda") % 5 + turn % 3
    return (cells + look.rank).to(dtype), (cells * look.ranks + look.ranks * (look.ranks - 1) // 2).to(dtype)


def nccl(look: Look) -> None:
    """Sum, gather and exchange by NCCL."""
    with _world(look) as torch:
        import torch.distributed as dist

        for count in (1, 1000, 1 << 20):
            for dtype in (torch.float32, torch.bfloat16):
                mine, total = _share(torch, look, count, dtype)
                dist.all_reduce(mine)
                look.true(f"sum of {count} {dtype}", torch.equal(mine, total), "differs")
        mine = torch.full((64,), float(look.rank), device="cuda")
        parts = torch.empty(64 * look.ranks, device="cuda")
        dist.all_gather_into_tensor(parts, mine)
        known = torch.arange(look.ranks, device="cuda").repeat_interleave(64).float()
        look.true("gather", torch.equal(parts, known), "differs")
        back = torch.empty(64, device="cuda")
        dist.reduce_scatter_tensor(back, parts)
        look.equal("reduce and scatter", back.unique(), [float(look.rank * look.ranks)])
        look.say("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))


def symm_mem(look: Look) -> None:
    """Sums by torch's symmetric memory, one-shot and two-shot; without multicast."""
    with _world(look) as torch:
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric  # type: ignore[import-not-found,unused-ignore]

        _peers(torch, look)
        group = dist.group.WORLD.group_name
        held = symmetric.empty(1 << 18, device=torch.device("cuda", look.rank), dtype=torch.bfloat16)
        symmetric.rendezvous(held, group)
        for turn in range(20):
            for count in (1 << 10, 1 << 18):
                part, (mine, total) = held[:count], _share(torch, look, count, torch.bfloat16, turn)
                part.copy_(mine)
                torch.ops.symm_mem.two_shot_all_reduce_(part, "sum", group)
                look.true(f"two-shot, {count}", torch.equal(part, total), "differs")
                part.copy_(mine)
                got = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", group)
                look.true(f"one-shot, {count}", torch.equal(got, total), "differs")


class _Runtime:
    """cudart, of which torch hands on no addresses of other processes."""

    def __init__(self) -> None:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            found = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libcudart.so" in line}
        if not found:
            raise RuntimeError("no libcudart is loaded after `import torch`")
        self._library = ctypes.CDLL(min(found))

    def __call__(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{function}: {self._library.cudaGetErrorString(code).decode()}")


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t: 64 bytes."""

    _fields_ = (("data", ctypes.c_byte * 64),)


def _shared(torch: Any, look: Look, size: int) -> list[int]:
    """Memory of ``size`` bytes on every GPU: the addresses of all of it in this process."""
    import torch.distributed as dist

    runtime, own, handle = _Runtime(), ctypes.c_void_p(), _Handle()
    runtime("cudaMalloc", ctypes.byref(own), ctypes.c_size_t(size))
    runtime("cudaMemset", own, 0, ctypes.c_size_t(size))
    runtime("cudaIpcGetMemHandle", ctypes.byref(handle), own)
    handles: list[Any] = [None] * look.ranks
    dist.all_gather_object(handles, bytes(handle.data))
    found = []
    for rank, data in enumerate(handles):
        if rank == look.rank:
            found.append(int(own.value or 0))
            continue
        place = ctypes.c_void_p()
        # cudaIpcMemLazyEnablePeerAccess
        runtime("cudaIpcOpenMemHandle", ctypes.byref(place), _Handle.from_buffer_copy(data), ctypes.c_uint(1))
        found.append(int(place.value or 0))
    return found


def custom(look: Look) -> None:
    """Sums by sgl_kernel's own all-reduce, over memory that each process opens of the others."""
    if look.ranks not in (2, 4, 6, 8):
        raise Skip(f"sgl_kernel's all-reduce is for 2, 4, 6 or 8 GPUs, and {look.ranks} are visible")
    with _world(look) as torch:
        from builder.smoke.gpu_sglang import has, start

        _, package, _ = start(look)
        has(package, "init_custom_ar", "meta_size", "all_reduce", "register_buffer", "dispose")
        _peers(torch, look)
        size = 1 << 20
        signals, buffers = _shared(torch, look, package.meta_size() + size), _shared(torch, look, size)
        space = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
        handle = package.init_custom_ar(signals, space, look.rank, True)
        package.register_buffer(handle, buffers)
        for turn in range(20):
            for count in (1 << 7, 1 << 15, 1 << 18):
                mine, total = _share(torch, look, count, torch.bfloat16, turn)
                got = torch.empty_like(mine)
                package.all_reduce(handle, mine, got, buffers[look.rank], size)
                look.true(f"sum of {count}", torch.equal(got, total), "differs")
        torch.cuda.synchronize()
        package.dispose(handle)
