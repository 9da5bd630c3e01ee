"""A world of ranks, in threads, that runs the patched sources of `sm120-fusion` on made-up devices."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fusion_made import COMMUNICATOR, FUSION, NORM
from tests.patch_made import execute


class Group:
    """A process group of threads. Who waits longer than ``timeout`` seconds for the others gets an error, as with gloo."""

    def __init__(self, name: str, size: int, timeout: float) -> None:
        self.name, self.timeout = name, timeout
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def gather(self, rank: int, item: object) -> list[Any]:
        """``item`` of every rank. Raises RuntimeError for a rank that does not come."""
        try:
            self.slots[rank] = item
            self.barrier.wait(self.timeout)
            found = list(self.slots)
            self.barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise RuntimeError(f"timed out in {self.name}") from None
        return found


class Tensor:
    """As much of a tensor as is looked at."""

    dtype = "bfloat16"

    def __init__(self, tokens: int, hidden: int = 7168) -> None:
        self.shape = (tokens, hidden)

    def element_size(self) -> int:
        return 2


class World:
    """Ranks that run patched sources on made-up devices, each in a thread and with modules of its own."""

    def __init__(
        self, patch: pytest.MonkeyPatch, sources: dict[str, str], ranks: int = 2, capability: int = 12
    ) -> None:
        self.ranks, self.tp, self.moe = ranks, ranks, ranks
        self.capabilities = dict.fromkeys(range(ranks), capability)
        self.flag, self.dp, self.compiling, self.multicast = True, False, False, False
        self.blocked: set[tuple[int, int]] = set()
        self.failing: set[int] = set()
        self.late: set[int] = set()
        self.uncompiled: set[int] = set()
        self.devices = list(range(ranks))
        self.collectives: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
        self.workspaces: list[int] = []
        self.made_in: list[str] = []
        self.synchronized: list[int] = []
        self.launches: list[bool] = []
        self.reduced: list[str] = []
        self.own = threading.local()
        self.lock = threading.Lock()
        self.cpu = Group("the group of all", ranks, 5)
        self.groups: list[Group] = []
        self.sources = sources
        self.modules: dict[int, dict[str, ModuleType]] = {}
        self._install(patch)

    def run(self, step: Callable[[dict[str, ModuleType]], Any]) -> list[Any]:
        """What ``step`` returns on each rank; it gets the rank's modules. A rank that hangs or raises fails the test."""
        found: list[Any] = ["hangs"] * self.ranks

        def one(rank: int) -> None:
            self.own.rank = rank
            try:
                if rank not in self.modules:
                    self._load(rank)
                found[rank] = step(self.modules[rank])
            except Exception as error:  # noqa: BLE001 - raised again where the test is
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return found

    def gate(self, tokens: int) -> list[Any]:
        """What the gate says on each rank."""
        return self.run(lambda modules: modules["communicator"].apply_flashinfer_allreduce_fusion(tokens))

    def fuse(self, tokens: int, hidden: int = 7168) -> list[Any]:
        """What the fused operator returns on each rank."""
        return self.run(
            lambda modules: modules["flashinfer_comm_fusion"].flashinfer_allreduce_residual_rmsnorm(
                input_tensor=Tensor(tokens, hidden), residual=Tensor(tokens, hidden)
            )
        )

    @property
    def rank(self) -> int:
        """The rank whose thread this is."""
        return int(self.own.rank)

    def _load(self, rank: int) -> None:
        self.modules[rank] = {}
        for file in (FUSION, NORM, COMMUNICATOR):
            name = file.rpartition("/")[2].removesuffix(".py")
            module = ModuleType(f"sglang.srt.layers.{name}")
            self.modules[rank][name] = module
            execute(self.sources[file], file, module.__dict__)

    def _install(self, patch: pytest.MonkeyPatch) -> None:
        torch = _module(
            "torch",
            Tensor=Tensor,
            compiler=SimpleNamespace(is_compiling=lambda: self.compiling),
            cuda=SimpleNamespace(
                is_available=lambda: True,
                get_device_capability=lambda device=None: (
                    self.capabilities[self.rank if device is None else device],
                    0,
                ),
                device_count=lambda: len(self.capabilities),
                current_device=lambda: self.devices[self.rank],
                can_device_access_peer=lambda a, b: (a, b) not in self.blocked,
                synchronize=self._synchronize,
            ),
        )
        torch.__dict__["distributed"] = _module(
            "torch.distributed",
            get_world_size=lambda: self.ranks,
            get_rank=lambda: self.rank,
            all_gather_object=self._gather,
            new_group=self._new_group,
        )
        layers = _module("sglang.srt.layers", __getattr__=lambda name: self.modules[self.rank][name])
        fusion = _module(
            "sglang.srt.layers.flashinfer_comm_fusion",
            __getattr__=lambda name: getattr(self.modules[self.rank]["flashinfer_comm_fusion"], name),
        )
        for module in (
            torch,
            torch.distributed,
            layers,
            fusion,
            _module("sglang"),
            _module("sglang.srt"),
            _module(
                "sglang.srt.distributed",
                get_tensor_model_parallel_world_size=lambda: self.tp,
                get_tp_group=lambda: self._coordinator(self.tp),
                get_attn_tp_group=lambda: self._coordinator(self.tp),
                get_moe_tp_group=lambda: self._coordinator(self.moe),
                **{
                    name: self._reduce(name)
                    for name in (
                        "tensor_model_parallel_all_reduce",
                        "attention_tensor_model_parallel_all_reduce",
                        "moe_expert_parallel_all_reduce",
                        "moe_tensor_model_parallel_all_reduce",
                    )
                },
            ),
            _module("sglang.srt.layers.dp_attention", is_dp_attention_enabled=lambda: self.dp),
            _module("sglang.srt.server_args", get_global_server_args=self._args),
            _module(
                "sglang.srt.utils",
                is_cuda=lambda: True,
                is_flashinfer_available=lambda: True,
                is_sm90_supported=lambda: self.capabilities[self.rank] == 9,
                is_sm100_supported=lambda: self.capabilities[self.rank] == 10,
            ),
            _module("sglang.srt.utils.custom_op", register_custom_op=lambda **_: lambda operator: operator),
            _module("flashinfer"),
            _module(
                "flashinfer.comm",
                trtllm_create_ipc_workspace_for_all_reduce_fusion=self._legacy_workspace,
                create_allreduce_fusion_workspace=self._workspace,
                trtllm_allreduce_fusion=self._launch,
                allreduce_fusion=self._launch,
            ),
            _module("flashinfer.comm.trtllm_ar", get_trtllm_comm_module=self._compile),
        ):
            patch.setitem(sys.modules, module.__name__, module)
        sys.modules["flashinfer"].__dict__["comm"] = sys.modules["flashinfer.comm"]

    def _args(self) -> SimpleNamespace:
        return SimpleNamespace(
            enable_flashinfer_allreduce_fusion=self.flag,
            flashinfer_allreduce_fusion_backend="auto" if self.flag else None,
        )

    def _coordinator(self, size: int) -> SimpleNamespace:
        return SimpleNamespace(world_size=size, rank_in_group=self.rank, cpu_group=self.cpu, device_group=self.cpu)

    def _gather(self, items: list[Any], item: object, group: Group) -> None:
        self.collectives[self.rank].append(group.name)
        items[:] = group.gather(self.rank, item)

    def _new_group(self, backend: str, timeout: Any) -> Group:
        assert (backend, timeout.total_seconds()) == ("gloo", 60)
        with self.lock:
            made = sum(name == "new group" for name in self.collectives[self.rank])
            self.collectives[self.rank].append("new group")
            if made == len(self.groups):
                self.groups.append(Group("the workspace's group", self.ranks, 0.5))
            return self.groups[made]

    def _reduce(self, name: str) -> Callable[[Any], Any]:
        def reduce(x: object) -> object:
            with self.lock:
                self.reduced.append(name)
            return ("reduced", x)

        return reduce

    def _compile(self) -> None:
        if self.rank in self.uncompiled:
            raise RuntimeError("no nvcc")

    def _legacy_workspace(self, rank: int, size: int, tokens: int, hidden: int, **more: Any) -> tuple[object, object]:
        return self._workspace(max_token_num=tokens, **more), "tensor"

    def _workspace(self, *, max_token_num: int, group: Group, **_: object) -> object:
        """Made in three steps, each with every rank; the second is where a failing rank fails."""
        group.gather(self.rank, "first buffer")
        if self.rank in self.failing:
            raise RuntimeError("out of memory")
        if not self.failing or group is not self.cpu:
            group.gather(self.rank, "second buffer")
        if self.rank in self.late:
            raise RuntimeError("out of memory")
        with self.lock:
            self.workspaces.append(max_token_num)
            self.made_in.append(group.name)
        return SimpleNamespace()

    def _synchronize(self) -> None:
        with self.lock:
            self.synchronized.append(len(self.workspaces))

    def _launch(self, *, launch_with_pdl: bool, **_: object) -> None:
        with self.lock:
            self.launches.append(launch_with_pdl)


def _module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(members, __path__=[])
    return module
