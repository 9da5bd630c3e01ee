"""Cases of symmetric memory without multicast: S4, S4b and S4c of `sm120-symm`. Standard library only.

The installed communicator is made by every rank of a group at once, each in a thread, on made-up devices.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from builder.smoke.behaviour_base import MIB, SIZES_FILE, SYMM_FILE
from builder.smoke.behaviour_case import Case, Comparison, Installed, dotted, outcome
from builder.smoke.post_base import COMMUNICATOR, SIZES, WORLD_SIZES
from builder.smoke.post_symm import COORDINATOR, IN_PLACE, VARIABLE

PARALLEL_FILE = "sglang/srt/distributed/parallel_state.py"
# Seconds; nothing is computed, so that who waits longer waits for ever.
_WAIT = 5.0
_COUNT = 8


class _World:
    """A group of ranks. ``broken`` goes wrong on the last rank: `rendezvous`, `sum`, `p2p`; or nothing does."""

    def __init__(self, module: ModuleType, capability: int, size: int, broken: str = "") -> None:
        self.module, self.capability, self.size, self.broken = module, capability, size, broken
        self.own = threading.local()
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size
        self.waited = False

    def make(self) -> str:
        """What every rank has in the end: one word where it is the same on all of them."""
        self._install()
        found = ["no end"] * self.size

        def one(rank: int) -> None:
            self.own.rank = rank
            found[rank] = outcome(self._one)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * _WAIT)
        waited = ["a rank waits for one that does not come"] if self.waited else []
        return " / ".join(dict.fromkeys([*found, *waited]))

    def _one(self) -> str:
        made = getattr(self.module, COMMUNICATOR)(SimpleNamespace(group_name="group"), self.own.rank)
        return "off" if made.disabled else f"on, up to {made.max_size / MIB:g} MiB"

    def _gather(self, values: list[Any], value: Any, group: object = None) -> None:
        values[:] = self._meet(value)

    def _meet(self, value: Any) -> list[Any]:
        self.slots[self.own.rank] = value
        try:
            self.barrier.wait(_WAIT)
            found = list(self.slots)
            self.barrier.wait(_WAIT)
        except threading.BrokenBarrierError:
            self.waited = True
            raise
        return found

    def _fails(self, where: str) -> bool:
        return self.broken == where and self.own.rank == self.size - 1

    def _rendezvous(self, buffer: object, name: str) -> Any:
        # torch's own store gives the others up after a while: the one that fails keeps them from nothing else.
        if self._meet(self._fails("rendezvous"))[-1]:
            raise RuntimeError("invalid device ordinal")
        return SimpleNamespace(multicast_ptr=0)

    def _two_shot(self, buffer: Any, *_: object) -> None:
        values = self._meet(float(buffer[0]))
        buffer.fill_(sum(values) + self._fails("sum"))

    def _install(self) -> None:
        import torch  # type: ignore[import-not-found,unused-ignore]

        cuda = torch.cuda
        cuda.set_device = lambda device: None
        cuda.device_count = lambda: self.size
        cuda.get_device_capability = lambda device=None: (self.capability, 0)
        cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{getattr(device, 'index', device)}")
        cuda.can_device_access_peer = lambda device, peer: not self._fails("p2p")
        cuda.Event = lambda: SimpleNamespace(record=lambda: None, query=lambda: True)
        torch.ops.symm_mem = SimpleNamespace(two_shot_all_reduce_=self._two_shot)
        self.module.dist = SimpleNamespace(  # type: ignore[attr-defined]
            get_world_size=lambda group=None: self.size,
            get_rank=lambda group=None: self.own.rank,
            all_gather_object=self._gather,
        )
        self.module.torch_symm_mem = SimpleNamespace(  # type: ignore[attr-defined]
            empty=lambda count, device, dtype: torch.zeros(_COUNT, dtype=dtype), rendezvous=self._rendezvous
        )


def _asked(installed: Installed) -> Iterator[Comparison]:
    sizes: dict[int, dict[int, int]] = getattr(installed.module(SIZES_FILE), SIZES)
    limit = {size: sizes[12][size] / MIB for size in WORLD_SIZES}
    os.environ[VARIABLE] = "1"

    def world(capability: int, size: int, broken: str = "") -> str:
        # A module of its own each time: it remembers that a rendezvous has failed.
        return _World(installed.again(SYMM_FILE), capability, size, broken).make()

    for size in WORLD_SIZES:
        yield Comparison(
            f"{size} GPUs of 12.0 without multicast, asked for", f"on, up to {limit[size]:g} MiB", world(12, size)
        )
    yield Comparison("6 GPUs of 12.0, asked for", "off", world(12, 6))
    for capability in (9, 10):
        yield Comparison(f"4 GPUs of {capability}.0 without multicast, asked for", "off", world(capability, 4))
    for broken, what in (
        ("p2p", "one without P2P"),
        ("rendezvous", "one whose rendezvous fails"),
        ("sum", "one that adds up wrongly"),
    ):
        yield Comparison(f"4 GPUs of 12.0, {what}", "off", world(12, 4, broken))


def _in_place(installed: Installed) -> Iterator[Comparison]:
    module = installed.module(PARALLEL_FILE)
    for capability in (9, 12):
        taken: list[str] = []
        communicator = SimpleNamespace(
            disabled=False,
            device_capability=capability,
            should_torch_symm_mem_allreduce=lambda message, c=capability: c != 12,
            all_reduce=lambda message, out=None, t=taken: t.append("symmetric memory"),
        )
        group = SimpleNamespace(pynccl_comm=None, torch_symm_mem_comm=communicator, device_group="group")
        reduce: Callable[..., Any] = lambda message, group=None, t=taken: t.append("NCCL")
        module.torch = SimpleNamespace(distributed=SimpleNamespace(all_reduce=reduce))  # type: ignore[attr-defined]
        said = outcome(getattr(getattr(module, COORDINATOR), IN_PLACE), group, "a message")
        expected = "NCCL" if capability == 12 else "symmetric memory"
        yield Comparison(
            f"a message that gets past symmetric memory on {capability}.0",
            f"{expected} → None",
            f"{' '.join(taken)} → {said}",
        )


CASES = (
    Case("two-shot without multicast", ("S1", "S4", "S4b"), _asked, (dotted(SYMM_FILE),)),
    Case("messages for NCCL", ("S4c",), _in_place, (dotted(PARALLEL_FILE),)),
)
