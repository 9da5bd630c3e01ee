"""The opt-in set for symmetric memory on SM120 without multicast: S4, S4b, S4c and S4d in sglang.

An image that has it behaves as before until `SGLANG_STACK_SM120_SYMM_MEM=1` is set, with sglang's own
`--enable-torch-symm-mem`. The base set comes first: the table of sizes has 12 (S1), and 12 never takes multimem (S3).
S4 and S4b are in shared/facts/patches.md, section A1. It lacks S4c and S4d, which were read in the source. Without S4c
sglang up to 0.5.13.post1 gives symmetric memory what it does not take as well: messages that are too large fail, and
others stay unreduced. Without S4d models of the Inkling family, from 0.5.16 on, take symmetric memory for multicast.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

from builder.patches.engine import Edit, Module, Site, UnknownShapeError
from builder.patches.sm120 import find, function, klass
from builder.smoke.post_base import COMMUNICATOR, SIZES
from builder.smoke.post_symm import COORDINATOR, IN_PLACE, INKLING_RESOURCES, INKLING_SIZES, TWO_SHOT, VARIABLE

_FOLDER = "sglang/srt/distributed/"
_SYMM_MEM = f"{_FOLDER}device_communicators/torch_symm_mem.py"
_NOTES = "shared/facts/patches.md section A1"

_BRANCH = f"""\
if self.device_capability == 12 and {TWO_SHOT}(self):
    return"""

_HELPER = f'''\
# sglang-stack S4b: two-shot needs no multicast, but all ranks: every one of the group turns it on, or none does.
def {TWO_SHOT}(comm):
    """Turn `comm` on for two-shot over P2P where {VARIABLE}=1 asks for it.

    False where no rank asks: `comm` is as it was. Else True, and `comm.disabled` says what came of it. All ranks make
    the same exchanges over the CPU group in the same order, whatever fails on one of them: before the rendezvous, in
    which each waits for all others, and after it.
    """
    import os
    import socket
    import time

    def exchange(value):
        values = [None] * comm.world_size
        dist.all_gather_object(values, value, group=comm.group)
        return values

    def closed(troubles):
        if not any(troubles):
            return False
        comm.buffer = None
        if dist.get_rank(comm.group) == 0:
            logger.warning(
                "TorchSymmMemCommunicator: {VARIABLE}=1, but symmetric memory stays off: %s.",
                "; ".join(f"rank {{rank}}: {{text}}" for rank, text in enumerate(troubles) if text),
            )
        return True

    def identify(_):
        if getattr({TWO_SHOT}, "failed", False):
            # torch numbers the exchanges of a process: after a failure ranks may differ, and would wait for each other.
            raise RuntimeError("an earlier rendezvous of this process failed")
        gpu = str(torch.cuda.get_device_properties(comm.device).uuid)
        # Memory is handed over between processes of one host that see each other.
        return gpu, comm.max_size, socket.gethostname(), os.readlink("/proc/self/ns/pid")

    def allocate(ranks):
        if len({{rank[1:] for rank in ranks}}) > 1:
            raise RuntimeError("ranks differ in largest message, host or PID namespace")
        gpus = [rank[0] for rank in ranks]
        if len(set(gpus)) < len(gpus):
            raise RuntimeError("ranks share a GPU")
        # Not by rank: what a process calls a GPU depends on what it may see.
        index_of = {{
            str(torch.cuda.get_device_properties(index).uuid): index
            for index in range(torch.cuda.device_count())
        }}
        for peer, gpu in enumerate(gpus):
            if gpu not in index_of:
                raise RuntimeError(f"the GPU of rank {{peer}} is not visible")
            if peer != dist.get_rank(comm.group) and not torch.cuda.can_device_access_peer(
                comm.device, index_of[gpu]
            ):
                raise RuntimeError(f"no P2P access to the GPU of rank {{peer}}")
        comm.buffer = torch_symm_mem.empty(
            comm.max_size // comm.dtype.itemsize,
            device=comm.device,
            dtype=comm.dtype,
        )

    def rendezvous(_):
        torch_symm_mem.rendezvous(comm.buffer, comm.group.group_name)

    # Ranks that do not ask take part as well: a variable that is set on some of them must not leave those waiting.
    asked = exchange(os.environ.get("{VARIABLE}") == "1")
    if not any(asked):
        return False
    if closed([None if here else "it is not set" for here in asked]):
        return True
    ranks = None
    for step in (identify, allocate, rendezvous):
        mine = trouble = None
        try:
            mine = step(ranks)
        except Exception as error:
            trouble = f"{{type(error).__name__}}: {{error}}".split("\\n")[0]
        ranks, troubles = zip(*exchange((mine, trouble)))
        if closed(troubles):
            if step is rendezvous:
                {TWO_SHOT}.failed = True
            return True

    # P2P over PCIe may be there and still deliver something else, or never let a barrier end: first a known sum.
    comm.buffer.fill_(dist.get_rank(comm.group) + 1)
    torch.ops.symm_mem.two_shot_all_reduce_(comm.buffer, "sum", comm.group.group_name)
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + 60
    while not done.query():
        if time.monotonic() > until:
            # A kernel cannot be taken back, and everything after it would wait: better no server than one that hangs.
            raise RuntimeError("two-shot does not end on these GPUs: start without {VARIABLE}")
        time.sleep(0.01)
    wrong = bool((comm.buffer != comm.world_size * (comm.world_size + 1) // 2).any())
    if closed(exchange("two-shot gave a wrong sum" if wrong else None)):
        return True
    comm.disabled = False
    return True
'''


def _tail(module: Module) -> tuple[ast.stmt, list[ast.stmt]]:
    """Where the largest message is known in the communicator's construction, and what comes after it."""
    init = function(klass(module, COMMUNICATOR).body, "__init__")
    known = (f"{SIZES}[self.device_capability][self.world_size]", "supported_max_sizes[self.world_size]")
    at = [i for i, node in enumerate(init.body) if ast.unparse(node) in [f"self.max_size = {value}" for value in known]]
    set_before = [ast.unparse(node) for node in init.body]
    lacking = [line for line in ("self.group = group", "self.device = device") if line not in set_before]
    if len(at) != 1 or lacking:
        raise UnknownShapeError(
            f"`self.group`, `self.device` and one `self.max_size = {known[1]}` in `{COMMUNICATOR}.__init__`"
        )
    return init.body[at[0]], init.body[at[0] + 1 :]


def _upstreams(rest: Sequence[ast.stmt]) -> None:
    """Upstream's way from the largest message on: allocation, rendezvous, off without multicast. Raises."""
    steps = [ast.unparse(node) for node in rest]
    if steps and steps[0].startswith("if envs.SGLANG_OPT_USE_INKLING_CUSTOM_AR.get():\n"):
        # A buffer for other kernels, which are not for SM120 (S4d).
        rest, steps = rest[1:], steps[1:]
    refusal = rest[2] if len(rest) == 4 else None
    if (
        not isinstance(refusal, ast.If)
        or not steps[0].startswith("self.buffer = torch_symm_mem.empty(self.max_size // self.dtype.itemsize,")
        or steps[1] != "handle = torch_symm_mem.rendezvous(self.buffer, self.group.group_name)"
        or ast.unparse(refusal.test) != "handle.multicast_ptr == 0"
        or [ast.unparse(node) for node in refusal.body[1:]] != ["self.buffer = None", "self.disabled = True", "return"]
        or not ast.unparse(refusal.body[0]).startswith("logger.warning(")
        or refusal.orelse
        or steps[3] != "self.disabled = False"
    ):
        raise UnknownShapeError("allocation, rendezvous, `if handle.multicast_ptr == 0` that turns it off, and else on")


def _branch(module: Module) -> list[Edit]:
    anchor, rest = _tail(module)
    if rest and ast.unparse(rest[0]) == _BRANCH:
        _upstreams(rest[1:])
        return []
    _upstreams(rest)
    comment = "# sglang-stack S4: two-shot instead of nothing, on compute capability 12 and where it is asked for."
    return [module.after(anchor, f"{comment}\n{_BRANCH}")]


def _vote(module: Module) -> list[Edit]:
    body = module.tree.body
    if any(getattr(node, "name", None) == TWO_SHOT for node in body):
        if ast.unparse(function(body, TWO_SHOT)) != ast.unparse(ast.parse(_HELPER)):
            raise UnknownShapeError(f"`{TWO_SHOT}` as this builder writes it")
        return []
    imported = {
        alias.asname or alias.name
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if not {"torch", "dist", "torch_symm_mem"} <= imported:
        raise UnknownShapeError("`torch`, `torch.distributed as dist` and `… as torch_symm_mem`, imported")
    find(body, ast.Assign, "logger")
    _tail(module)
    return [module.before(klass(module, COMMUNICATOR), f"{_HELPER}\n")]


_TAKEN = "torch_symm_mem_comm is not None and (not torch_symm_mem_comm.disabled)"
_FITS = f"{_TAKEN} and torch_symm_mem_comm.should_torch_symm_mem_allreduce(input_)"
_NOT_12 = f"{_TAKEN} and (torch_symm_mem_comm.device_capability != 12)"


def _in_place(module: Module) -> list[Edit]:
    owner = klass(module, COORDINATOR)
    made = [node for node in ast.walk(owner) if isinstance(node, ast.Call) and ast.unparse(node.func) == COMMUNICATOR]
    if [ast.unparse(node) for node in made] != [f"{COMMUNICATOR}(group=self.cpu_group, device=self.device)"]:
        raise UnknownShapeError(f"`{COMMUNICATOR}(group=self.cpu_group, device=self.device)`")
    branches = [
        node
        for node in ast.walk(function(owner.body, IN_PLACE))
        if isinstance(node, ast.If) and "torch_symm_mem_comm" in ast.unparse(node.test)
    ]
    found = [(ast.unparse(node.test), *map(ast.unparse, [*node.body, *node.orelse])) for node in branches]
    nccl = "torch.distributed.all_reduce(input_, group=self.device_group)"
    if found in (
        [(_FITS, "torch_symm_mem_comm.all_reduce(input_, out=input_)", nccl)],
        [(_NOT_12, "torch_symm_mem_comm.all_reduce(input_)", nccl)],
    ):
        return []
    if found != [(_TAKEN, "torch_symm_mem_comm.all_reduce(input_)", nccl)]:
        raise UnknownShapeError(f"`{IN_PLACE}`, which hands on to symmetric memory, and else to `torch.distributed`")
    comment = "# sglang-stack S4c: what two-shot does not take gets here: it would fail if too large, and else stay unreduced."
    return [
        module.before(branches[0], comment),
        module.replace(
            branches[0].test,
            "torch_symm_mem_comm is not None and not torch_symm_mem_comm.disabled"
            " and torch_symm_mem_comm.device_capability != 12",
        ),
    ]


_SIZES_ELSEWHERE = "(4, 6, 8)"
_SIZES_NOT_12 = f"() if is_cuda() and torch.cuda.get_device_capability()[0] == 12 else {_SIZES_ELSEWHERE}"
_NO_RESOURCES = """\
if comm.device_capability == 12:
    return None"""


def _inkling(module: Module) -> list[Edit]:
    body = module.tree.body
    sizes = find(body, ast.Assign, INKLING_SIZES)
    assert isinstance(sizes, ast.Assign)
    resources = function(body, INKLING_RESOURCES)
    first = resources.body[min(1, len(resources.body) - 1)]  # after the docstring
    written = ast.unparse(sizes.value), ast.unparse(first)
    for node in body:
        text = ast.unparse(node) if isinstance(node, ast.FunctionDef) else ""
        if ".torch_symm_mem_comm" in text and INKLING_SIZES not in text and INKLING_RESOURCES not in text:
            raise UnknownShapeError(f"`{INKLING_SIZES}` or `{INKLING_RESOURCES}` wherever symmetric memory is used")
    if written == (_SIZES_NOT_12, _NO_RESOURCES):
        return []
    imports = {ast.unparse(node) for node in body if isinstance(node, ast.Import | ast.ImportFrom)}
    needed = {"import torch", "from sglang.srt.utils import is_cuda"}
    if written != (_SIZES_ELSEWHERE, "key = comm.group.group_name") or not needed <= imports:
        raise UnknownShapeError(
            f"`{INKLING_SIZES} = {_SIZES_ELSEWHERE}`, and `{INKLING_RESOURCES}` by the group's name"
        )
    comment = "# sglang-stack S4d: these kernels need multicast; on SM120 symmetric memory may be on without (S4)."
    return [
        module.before(sizes, comment),
        module.replace(sizes.value, _SIZES_NOT_12),
        module.before(first, f"{comment}\n{_NO_RESOURCES}"),
    ]


SITES: tuple[Site, ...] = (
    # The function first: S4 calls it.
    Site(
        id="S4b",
        set="sm120-symm",
        package="sglang",
        file=_SYMM_MEM,
        marker=f"class {COMMUNICATOR}",
        what="how ranks agree on symmetric memory",
        consequence=f"where `{VARIABLE}=1` is set, P2P between all GPUs is checked, what may fail is guarded, two-shot "
        "adds a known sum, and every rank turns it on or none does, with one warning that says why",
        source=f"{_NOTES}, S4b",
        places=(TWO_SHOT,),
        plan=_vote,
    ),
    Site(
        id="S4",
        set="sm120-symm",
        package="sglang",
        file=_SYMM_MEM,
        marker=f"class {COMMUNICATOR}",
        what="symmetric memory where there is no multicast",
        consequence=f"on 12.x it is on, by two-shot, where `{VARIABLE}=1` is set and all ranks agree; else as before",
        source=f"{_NOTES}, S4",
        places=(f"{COMMUNICATOR}.__init__",),
        plan=_branch,
    ),
    Site(
        id="S4c",
        set="sm120-symm",
        package="sglang",
        file=f"{_FOLDER}parallel_state.py",
        marker=f"def {IN_PLACE}",
        what="messages that symmetric memory does not take",
        consequence="on 12.x they go to NCCL; as before elsewhere",
        source=f"{_NOTES}, S4; read in parallel_state.py of 0.5.6.post2 to 0.5.23",
        places=(f"{COORDINATOR}.{IN_PLACE}",),
        plan=_in_place,
    ),
    Site(
        id="S4d",
        set="sm120-symm",
        package="sglang",
        file="sglang/srt/models/inkling_common/kernels/comm.py",
        marker=f"{INKLING_SIZES} =",
        what="kernels of the Inkling models that need multicast wherever symmetric memory is on",
        consequence="on 12.x they are never chosen; as before elsewhere",
        source=f"{_NOTES}, S4; read in comm.py of 0.5.16, 0.5.20 and 0.5.23",
        places=(INKLING_SIZES, INKLING_RESOURCES),
        plan=_inkling,
    ),
)
