"""Made-up sources for symmetric memory on SM120, and a group of ranks, one thread each, that run them on made-up devices."""

from __future__ import annotations

import builtins
import itertools
import threading
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

from builder.patches.apply import SETS
from builder.smoke.post_base import SIZES
from builder.smoke.post_symm import VARIABLE
from tests.patch_made import ALL_REDUCE, OLD, SYMM_MEM

PARALLEL = "sglang/srt/distributed/parallel_state.py"
INKLING = "sglang/srt/models/inkling_common/kernels/comm.py"


def swapped(text: str, *changes: tuple[str, str]) -> str:
    """A text with each change made once."""
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


FILES: dict[str, str] = {
    ALL_REDUCE: OLD[ALL_REDUCE].replace(
        "        4: 64 * MiB,\n", "".join(f"        {n}: 64 * MiB,\n" for n in (4, 6, 8))
    ),
    SYMM_MEM: swapped(
        OLD[SYMM_MEM],
        ("        self.group = group\n", "        self.device = device\n        self.group = group\n"),
        ("self.buffer, group.group_name)", "self.buffer, self.group.group_name)"),
        ("            self.buffer = None\n", "            self.buffer = None\n            self.disabled = True\n"),
    ),
    PARALLEL: """\
import torch


class GroupCoordinator:
    def __init__(self, symm_mem):
        self.torch_symm_mem_comm = None
        if symm_mem:
            self.torch_symm_mem_comm = TorchSymmMemCommunicator(
                group=self.cpu_group,
                device=self.device,
            )

    def _all_reduce_in_place(self, input_: torch.Tensor) -> None:
        pynccl_comm = self.pynccl_comm
        torch_symm_mem_comm = self.torch_symm_mem_comm
        if pynccl_comm is not None and not pynccl_comm.disabled:
            pynccl_comm.all_reduce(input_)
        elif torch_symm_mem_comm is not None and not torch_symm_mem_comm.disabled:
            torch_symm_mem_comm.all_reduce(input_)
        else:
            torch.distributed.all_reduce(input_, group=self.device_group)
""",
    INKLING: '''\
import torch

from sglang.srt.utils import is_cuda

_INKLING_AR_WORLD_SIZES = (4, 6, 8)


def _get_inkling_ar_resources(comm):
    """What the kernels need."""
    key = comm.group.group_name
    return key


def symm_mem_all_reduce(input, group):
    comm = group.torch_symm_mem_comm
    if group.world_size in _INKLING_AR_WORLD_SIZES and not comm.disabled:
        return comm.buffer
''',
}
"""As patch_made.OLD, of the shapes that sglang 0.5.9 has (the last: 0.5.16), as much as the set looks at."""

NEW = swapped(
    FILES[SYMM_MEM],
    (
        "        if self.device_capability < 9:",
        f"        supported_max_sizes = {SIZES}.get(self.device_capability)\n        if supported_max_sizes is None:",
    ),
    (f"not in {SIZES}[self.device_capability]", "not in supported_max_sizes"),
    (
        f"{SIZES}[self.device_capability][\n            self.world_size\n        ]",
        "supported_max_sizes[self.world_size]",
    ),
    (
        "        self.buffer = torch_symm_mem.empty(",
        (
            "        if envs.SGLANG_OPT_USE_INKLING_CUSTOM_AR.get():\n"
            "            self.max_size = max(self.max_size, 256 * 1024 * 1024)\n"
            "        self.buffer = torch_symm_mem.empty("
        ),
    ),
    ("import torch\n", "import torch\nfrom sglang.srt.environ import envs\n"),
)
"""The communicator as sglang 0.5.16 has it: a larger buffer for other kernels."""


def patched(file: str, text: str, *sets: str) -> str:
    """A file's text with the sites of the sets that it has."""
    for site in (site for name in sets for site in SETS[name]):
        if site.file == file:
            text = site.apply(text)
    return text


@lru_cache
def compiled(source: str) -> CodeType:
    """A source that many ranks run."""
    return compile(source, "<made>", "exec")


class Buffer:
    """A tensor whose elements are all the same; large enough to be seen as what was asked for."""

    shape = (8,)

    def __init__(self, count: int = 8) -> None:
        self.count, self.value = count, 0

    def numel(self) -> int:
        return 8

    def view(self, *_: object) -> Buffer:
        return self

    def copy_(self, _: object) -> None:
        return None

    def fill_(self, value: int) -> None:
        self.value = value

    def __getitem__(self, _: object) -> Buffer:
        return self

    def __ne__(self, other: object) -> Any:
        return SimpleNamespace(any=lambda: self.value != other)

    __hash__ = None  # type: ignore[assignment]


class Hang(AssertionError):
    """A rank that waits for peers which do not come."""


class Meeting:
    """Where ranks wait for each other, round after round. A rank that went is waited for no longer: that is a `Hang`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rounds: dict[int, dict[int, Any]] = {}
        self.counts = [0] * size
        self.gone = False
        self.changed = threading.Condition()

    def bring(self, rank: int, value: Any) -> list[Any]:
        """What all ranks brought to this round, by rank. Raises `Hang` where one never will."""
        with self.changed:
            number = self.counts[rank]
            self.counts[rank] += 1
            here = self.rounds.setdefault(number, {})
            here[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(here) == self.size or self.gone, 10)
            if len(here) < self.size:
                raise Hang(f"rank {rank} waits in round {number}")
            return [here[peer] for peer in range(self.size)]

    def leave(self) -> None:
        """A rank will not come again."""
        with self.changed:
            self.gone = True
            self.changed.notify_all()


class World:
    """A group of ranks. What is set for a rank in ``fails`` goes wrong on it: `props`, `empty`, `rendezvous`, `sum`, `hang`."""

    def __init__(
        self,
        source: str,
        size: int,
        *,
        sizes: str = "",
        capability: int = 12,
        multicast: int = 0,
        asks: object = "all",
        apart: object = (),
        fails: Mapping[int, str] | None = None,
        visible: Mapping[int, list[str]] | None = None,
        hosts: Mapping[int, str] | None = None,
        spaces: Mapping[int, str] | None = None,
        limits: Mapping[int, int] | None = None,
    ) -> None:
        self.source, self.size, self.capability, self.multicast = source, size, capability, multicast
        self.sizes = sizes or patched(ALL_REDUCE, FILES[ALL_REDUCE], "sm120")
        self.asks: Any = range(size) if asks == "all" else asks
        self.apart: Any = apart
        self.fails, self.hosts, self.spaces, self.limits = fails or {}, hosts or {}, spaces or {}, limits or {}
        self.visible = visible or {rank: [f"GPU-{n}" for n in range(size)] for rank in range(size)}
        self.ranks = [Rank(self, rank) for rank in range(size)]

    def make(self) -> list[Rank]:
        """Every rank makes its communicator, at the same time; one that hangs fails the test."""
        # Waiting for a rank that went ends in an error where it is torch's store, and would take hours in the CPU group.
        self.votes, self.store, self.kernels = Meeting(self.size), Meeting(self.size), Meeting(self.size)
        threads = [threading.Thread(target=rank.make, daemon=True) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a rank hangs"
        for rank in self.ranks:
            if isinstance(rank.error, Hang):
                raise rank.error
        return self.ranks

    def outcome(self) -> tuple[object, ...]:
        """What came of it: what each rank has, logged and launched, apart from the exchanges."""
        return tuple(
            (
                getattr(rank.found, "disabled", None),
                getattr(rank.found, "max_size", None),
                repr(rank.error),
                rank.warnings,
            )
            for rank in self.ranks
        )

    @property
    def warnings(self) -> list[str]:
        """Those of all ranks."""
        return [line for rank in self.ranks for line in rank.warnings]


class Rank:
    """One process: its own modules, environment and devices."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.found: Any = None
        self.error: Exception | None = None
        self.warnings: list[str] = []
        self.launched: list[str] = []
        self.allocated: list[int] = []
        self.group = SimpleNamespace(group_name="g")
        environ = {VARIABLE: "1"} if rank in world.asks else {}
        if rank in world.limits:
            environ["SGLANG_STACK_SM120_SYMM_MEM_MAX_MIB"] = str(world.limits[rank])
        clock = itertools.count(0, 10)
        self.modules: dict[str, Any] = {
            "os": SimpleNamespace(environ=environ, readlink=lambda path: world.spaces.get(rank, f"{path}:[1]")),
            "socket": SimpleNamespace(gethostname=lambda: world.hosts.get(rank, "host")),
            "time": SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None),
            "logging": SimpleNamespace(getLogger=lambda _: SimpleNamespace(warning=self._warn)),
        }
        self._torch()
        sizes: dict[str, Any] = {"__builtins__": {**vars(builtins), "__import__": self._import}}
        exec(compiled(world.sizes), sizes)  # noqa: S102 - to see what it does is what it is for
        self.modules["sglang.srt.distributed.device_communicators.all_reduce_utils"] = SimpleNamespace(
            **{SIZES: sizes[SIZES]}
        )
        self.scope: dict[str, Any] = {
            "__name__": "patched",
            "__builtins__": {**vars(builtins), "__import__": self._import},
        }
        exec(compiled(world.source), self.scope)  # noqa: S102

    def _import(
        self, name: str, _globals: object = None, _locals: object = None, wanted: Any = (), level: int = 0
    ) -> Any:
        """What the patched source imports: with ``wanted`` names the module itself, else the outermost package."""
        return self.modules[name if wanted else name.partition(".")[0]]

    def _torch(self) -> None:
        torch, dist, symm = (ModuleType(name) for name in ("torch", "dist", "symm"))
        cuda = SimpleNamespace(
            set_device=lambda _: None,
            get_device_capability=lambda *_: (self.world.capability, 0),
            get_device_properties=self._properties,
            device_count=lambda: len(self.world.visible[self.rank]),
            can_device_access_peer=self._reaches,
            Event=lambda: SimpleNamespace(record=lambda: None, query=lambda: self.world.fails.get(self.rank) != "hang"),
        )
        operators = SimpleNamespace(multimem_all_reduce_=self._launch("multimem"), two_shot_all_reduce_=self._two_shot)
        torch.__dict__.update(
            device=Device,
            bfloat16=SimpleNamespace(itemsize=2),
            Tensor=Buffer,
            empty_like=lambda _: Buffer(),
            cuda=cuda,
            ops=SimpleNamespace(symm_mem=operators),
            distributed=dist,
        )
        dist.__dict__.update(
            get_world_size=lambda _: self.world.size,
            get_rank=lambda _: self.rank,
            all_gather_object=self._gather,
            ProcessGroup=object,
            _symmetric_memory=symm,
        )
        symm.__dict__.update(empty=self._empty, rendezvous=self._rendezvous)
        utils = SimpleNamespace(is_cuda=lambda: True, is_hip=lambda: False)
        on = SimpleNamespace(get=lambda: True)
        environment = SimpleNamespace(SGLANG_OPT_USE_INKLING_CUSTOM_AR=on, SGLANG_OPT_USE_INKLING_FUSED_AR_SCONV=on)
        execution = SimpleNamespace(comm=SimpleNamespace(enable_scattered_sconv=False))
        self.modules |= {
            "torch": torch,
            "torch.distributed": dist,
            "typing": __import__("typing"),
            "sglang.srt.utils": utils,
            "sglang.srt.environ": SimpleNamespace(envs=environment),
            "sglang.srt.runtime_context": SimpleNamespace(
                get_exec=lambda: execution, get_server_args=lambda: execution.comm
            ),
        }

    def make(self) -> None:
        """The communicator of this rank, or the error that its construction ended in."""
        try:
            self.found = self.scope["TorchSymmMemCommunicator"](self.group, self.rank)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.error = error
        for meeting in (self.world.votes, self.world.store, self.world.kernels):
            meeting.leave()

    def reduce(self) -> list[str]:
        """The kernels that one all-reduce launches on this rank."""
        self.launched.clear()
        self.found.should_torch_symm_mem_allreduce = lambda _: True
        self.found.all_reduce(Buffer())
        return self.launched

    def _warn(self, text: str, *values: object) -> None:
        self.warnings.append(text % values)

    def _gather(self, values: list[Any], value: Any, group: object = None) -> None:
        assert group is self.group, "not the CPU group"
        values[:] = self.world.votes.bring(self.rank, value)

    def _fail(self, where: str) -> None:
        if self.world.fails.get(self.rank) == where:
            raise RuntimeError(f"{where} failed\nand this is why")

    def _properties(self, device: Any) -> Any:
        self._fail("props")
        return SimpleNamespace(uuid=self.world.visible[self.rank][getattr(device, "index", device)])

    def _reaches(self, device: Any, peer: int) -> bool:
        seen = self.world.visible[self.rank]
        assert 0 <= peer < len(seen)
        pair = seen[getattr(device, "index", device)], seen[peer]
        assert pair[0] != pair[1], "a device is no peer of itself"
        return pair not in self.world.apart

    def _empty(self, count: int, **_: object) -> Buffer:
        self._fail("empty")
        self.allocated.append(count)
        return Buffer(count)

    def _rendezvous(self, buffer: Buffer, name: str) -> Any:
        assert buffer is not None and name == "g"
        if self.world.fails.get(self.rank) == "rendezvous":
            self.world.store.leave()
        self._fail("rendezvous")
        try:
            self.world.store.bring(self.rank, None)
        except Hang as error:
            raise RuntimeError("wait timeout after 300000ms") from error
        return SimpleNamespace(multicast_ptr=self.world.multicast)

    def _launch(self, kernel: str) -> Any:
        return lambda *_: self.launched.append(kernel)

    def _two_shot(self, buffer: Buffer, _kind: str, _name: str) -> None:
        self.launched.append("two_shot")
        if self.found is None:  # the sum that is looked at; all ranks are there
            buffer.value = sum(self.world.kernels.bring(self.rank, buffer.value))
            buffer.value += self.world.fails.get(self.rank) == "sum"


class Device(str):
    """`torch.device`."""

    @property
    def index(self) -> int:  # type: ignore[override]
        return int(self.partition(":")[2])
