"""The set `sm120-symm`: its shapes, and what groups of ranks make of it when anything fails on any of them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from builder.errors import IntegrityError
from builder.matrix import Patches, Sm120
from builder.patches import patch_wheel
from builder.patches.engine import Edit, Module, State
from builder.patches.symm import SITES as ALL
from builder.smoke.post_symm import TWO_SHOT, VARIABLE
from builder.wheel import read_wheel
from tests.patch_made import SYMM_MEM, sglang_wheel
from tests.symm_made import FILES, INKLING, NEW, PARALLEL, Hang, World, patched, swapped

SITES = {site.id: site for site in ALL}
BASE = patched(SYMM_MEM, FILES[SYMM_MEM], "sm120")
WHOLE = patched(SYMM_MEM, BASE, "sm120-symm")
NEWER = patched(SYMM_MEM, NEW, "sm120", "sm120-symm")
MIB = 1024 * 1024
NO_MULTICAST = "multicast operations are not supported"


def before(site: str) -> str:
    """What a site is applied to: S4 calls what S4b puts in."""
    text = BASE if SITES[site].file == SYMM_MEM else FILES[SITES[site].file]
    return SITES["S4b"].apply(text) if site == "S4" else text


def stays_off(*reasons: str) -> list[str]:
    """The one warning of a group."""
    return [f"TorchSymmMemCommunicator: {VARIABLE}=1, but symmetric memory stays off: {'; '.join(reasons)}."]


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_the_old_shape_is_needed_and_ours_is_native(site: str) -> None:
    text = before(site)
    assert SITES[site].look(text) == (State.NEEDED, "")
    assert SITES[site].verify(text) != ""
    after = SITES[site].apply(text)
    assert after != text
    assert SITES[site].look(after) == (State.NATIVE, "")
    assert SITES[site].verify(after) == ""
    assert SITES[site].apply(after) == after


@pytest.mark.parametrize("site", SITES)
def test_line_ends_and_what_is_not_ascii_are_kept(site: str) -> None:
    text = "# ä\n" + before(site)
    assert SITES[site].apply(text.replace("\n", "\r\n")) == SITES[site].apply(text).replace("\n", "\r\n")


@pytest.mark.parametrize("text", [FILES[SYMM_MEM], NEW], ids=["0.5.9", "0.5.16"])
def test_upstreams_own_text_is_needed_as_well(text: str) -> None:
    assert [SITES[site].probe(text) for site in ("S4", "S4b")] == [State.NEEDED, State.NEEDED]


def test_upstreams_own_remedy_is_native() -> None:
    # From 0.5.15.post1 on.
    text = swapped(
        FILES[PARALLEL],
        (
            "elif torch_symm_mem_comm is not None and not torch_symm_mem_comm.disabled:",
            (
                "elif (\n            torch_symm_mem_comm is not None\n            and not torch_symm_mem_comm.disabled\n"
                "            and torch_symm_mem_comm.should_torch_symm_mem_allreduce(input_)\n        ):"
            ),
        ),
        ("torch_symm_mem_comm.all_reduce(input_)", "torch_symm_mem_comm.all_reduce(input_, out=input_)"),
    )
    assert SITES["S4c"].look(text) == (State.NATIVE, "")
    assert SITES["S4c"].verify(text) == ""


UNKNOWN: list[tuple[str, str, str, str]] = [
    (
        "S4",
        "        self.disabled = False\n",
        "",
        "allocation, rendezvous, `if handle.multicast_ptr == 0` that turns it off, and else on",
    ),
    (
        "S4",
        "if handle.multicast_ptr == 0:",
        "if handle.multicast_ptr == 0 and self.multimem:",
        "allocation, rendezvous, `if handle.multicast_ptr == 0` that turns it off, and else on",
    ),
    (
        "S4",
        "self.device = device",
        "pass",
        (
            "`self.group`, `self.device` and one `self.max_size = supported_max_sizes[self.world_size]` in "
            "`TorchSymmMemCommunicator.__init__`"
        ),
    ),
    ("S4", "class TorchSymm", "class Symm", "one `TorchSymmMemCommunicator` (0 found)"),
    (
        "S4b",
        "import torch.distributed as dist",
        "import torch.distributed",
        "`torch`, `torch.distributed as dist` and `… as torch_symm_mem`, imported",
    ),
    ("S4b", "logger = ", "log = ", "one `logger` (0 found)"),
    ("S4b", "class TorchSymm", f"def {TWO_SHOT}(comm): pass\n\n\nclass TorchSymm", f"`{TWO_SHOT}` as this builder writes it"),
    (
        "S4c",
        "group=self.cpu_group",
        "group=self.device_group",
        "`TorchSymmMemCommunicator(group=self.cpu_group, device=self.device)`",
    ),
    (
        "S4c",
        "torch_symm_mem_comm.all_reduce(input_)",
        "torch_symm_mem_comm.reduce(input_)",
        "`_all_reduce_in_place`, which hands on to symmetric memory, and else to `torch.distributed`",
    ),
    (
        "S4d",
        "group.world_size in _INKLING_AR_WORLD_SIZES and ",
        "",
        "`_INKLING_AR_WORLD_SIZES` or `_get_inkling_ar_resources` wherever symmetric memory is used",
    ),
    (
        "S4d",
        "(4, 6, 8)",
        "(2, 4, 6, 8)",
        "`_INKLING_AR_WORLD_SIZES = (4, 6, 8)`, and `_get_inkling_ar_resources` by the group's name",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("site", "old", "new", "looked_for"), UNKNOWN)
def test_another_shape_is_unknown(site: str, old: str, new: str, looked_for: str) -> None:
    text = BASE if SITES[site].file == SYMM_MEM else FILES[SITES[site].file]
    assert SITES[site].look(swapped(text, (old, new))) == (State.UNKNOWN, looked_for)


def test_a_wheel_with_the_set(tmp_path: Path) -> None:
    wheel = sglang_wheel(tmp_path, dict(FILES))
    patches = Patches(sm120=Sm120(symm_mem="opt-in"))
    done = patch_wheel(wheel, patches, tmp_path / "out", matrix_folder=tmp_path)
    assert done is not None
    assert done.version == "0.5.9+sm120.symm"
    assert {item["id"]: item["after"] for item in done.report["sites"] if item["set"] == "sm120-symm"} == dict.fromkeys(
        ("S4b", "S4", "S4c", "S4d"), "native"
    )
    assert read_wheel(done.path).read(SYMM_MEM).decode() == WHOLE
    assert patch_wheel(done.path, patches, tmp_path / "again", matrix_folder=tmp_path) is None


def test_without_the_communicators_home_there_is_nothing_half(tmp_path: Path) -> None:
    wheel = sglang_wheel(tmp_path, {SYMM_MEM: None})
    patches = Patches(sm120=Sm120(symm_mem="opt-in"))
    done = patch_wheel(wheel, patches, tmp_path / "out", matrix_folder=tmp_path)
    assert done is not None
    assert done.version == "0.5.9+sm120"


# --- what a group of ranks does ---------------------------------------------------------------------------------------

FAILS = ("", "props", "empty", "rendezvous", "sum")
FAILED = {
    "props": "RuntimeError: props failed",
    "empty": "RuntimeError: empty failed",
    "rendezvous": "RuntimeError: rendezvous failed",
    "sum": "two-shot gave a wrong sum",
}


def world(source: str, size: int, capability: int, multicast: int, asked: bool, apart: object, fails: str) -> World:
    return World(
        source,
        size,
        capability=capability,
        multicast=multicast,
        asks="all" if asked else (),
        apart=apart,
        fails={1: fails} if fails else {},
    )


@pytest.mark.parametrize("size", [2, 4, 6, 8])
@pytest.mark.parametrize("capability", [9, 10, 12])
def test_every_rank_or_none(capability: int, size: int) -> None:
    apart = [(f"GPU-{size - 1}", "GPU-0")]
    for multicast, asked, p2p, fails in itertools.product((0, 1), (False, True), (True, False), FAILS):
        case = multicast, asked, p2p, fails
        tried = world(WHOLE, size, capability, multicast, asked, () if p2p else apart, fails)
        ranks = tried.make()
        assert len(set(tried.votes.counts)) == 1, case
        if not (capability == 12 and asked and size != 6):
            # Every other device, and 12 where nobody asks: as without the set, in all that can be seen.
            same = world(BASE, size, capability, multicast, asked, () if p2p else apart, fails)
            same.make()
            assert tried.outcome() == same.outcome(), case
            assert tried.votes.counts[0] == (capability == 12 and size != 6), case
            continue
        assert [rank.error for rank in ranks] == [None] * size, case
        if p2p and not fails:
            assert tried.warnings == [], case
            assert [rank.found.disabled for rank in ranks] == [False] * size, case
            assert [rank.allocated for rank in ranks] == [[MIB // 2]] * size, case
            assert [rank.reduce() for rank in ranks] == [["two_shot"]] * size, case
        else:
            assert [rank.found.disabled for rank in ranks] == [True] * size, case
            assert [rank.found.buffer for rank in ranks] == [None] * size, case
            assert len(tried.warnings) == 1, case


@pytest.mark.parametrize("fails", FAILED)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_warning_says_which_rank_and_why(rank: int, fails: str) -> None:
    tried = World(WHOLE, 2, fails={rank: fails})
    tried.make()
    why = [f"rank {rank}: {FAILED[fails]}"]
    if fails == "rendezvous":  # the other one waited in vain
        why.insert(1 - rank, f"rank {1 - rank}: RuntimeError: wait timeout after 300000ms")
    assert tried.warnings == stays_off(*why)


def test_all_ranks_may_fail() -> None:
    tried = World(WHOLE, 4, fails=dict.fromkeys(range(4), "empty"))
    tried.make()
    assert tried.warnings == stays_off(*(f"rank {rank}: RuntimeError: empty failed" for rank in range(4)))


@pytest.mark.parametrize("asks", [[0], [1], [0, 2]])
def test_a_variable_that_is_set_on_some_ranks_only(asks: list[int]) -> None:
    tried = World(WHOLE, 4, asks=asks)
    ranks = tried.make()
    assert all(rank.found.disabled and not rank.allocated for rank in ranks)
    assert tried.warnings == stays_off(*(f"rank {rank}: it is not set" for rank in range(4) if rank not in asks))


def test_p2p_is_asked_for_every_pair_and_both_ways() -> None:
    for pair in itertools.permutations(range(4), 2):
        tried = World(WHOLE, 4, apart=[tuple(f"GPU-{rank}" for rank in pair)])
        tried.make()
        assert tried.warnings == stays_off(f"rank {pair[0]}: RuntimeError: no P2P access to the GPU of rank {pair[1]}")


def test_gpus_are_known_by_their_uuids() -> None:
    # Each process sees them in another order, so that every rank's own is `cuda:RANK` for itself alone.
    seen = {0: ["A", "B", "C"], 1: ["C", "B", "A"]}
    assert not World(WHOLE, 2, visible=seen).make()[0].found.disabled
    assert World(WHOLE, 2, visible=seen, apart=[("A", "C"), ("C", "A")]).make()[0].found.disabled is False
    tried = World(WHOLE, 2, visible=seen, apart=[("B", "A")])
    tried.make()
    assert tried.warnings == stays_off("rank 1: RuntimeError: no P2P access to the GPU of rank 0")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"hosts": {1: "other"}}, "ranks differ in largest message, host or PID namespace"),
        ({"spaces": {1: "pid:[2]"}}, "ranks differ in largest message, host or PID namespace"),
        ({"limits": {1: 2}}, "ranks differ in largest message, host or PID namespace"),
        ({"visible": {0: ["A", "B"], 1: ["B", "A"]}}, "ranks share a GPU"),
    ],
)
def test_what_ranks_have_to_have_in_common(given: dict[str, Any], why: str) -> None:
    tried = World(WHOLE, 2, **given)
    tried.make()
    assert tried.warnings == stays_off(f"rank 0: RuntimeError: {why}", f"rank 1: RuntimeError: {why}")


def test_a_gpu_that_a_peer_does_not_see() -> None:
    tried = World(WHOLE, 2, visible={0: ["A", "B"], 1: ["C", "D"]})
    tried.make()
    assert tried.warnings == stays_off(
        "rank 0: RuntimeError: the GPU of rank 1 is not visible",
        "rank 1: RuntimeError: the GPU of rank 0 is not visible",
    )


def test_two_shot_that_does_not_end_ends_the_server() -> None:
    tried = World(WHOLE, 2, fails={0: "hang", 1: "hang"})
    ranks = tried.make()
    assert [str(rank.error) for rank in ranks] == [f"two-shot does not end on these GPUs: start without {VARIABLE}"] * 2


def test_after_a_rendezvous_that_failed_there_is_no_other() -> None:
    tried = World(WHOLE, 2, fails={1: "rendezvous"})
    first, second = tried.make()
    tried.fails, first.warnings[:] = {}, []
    tried.make()
    assert first.found.disabled and second.found.disabled
    why = "RuntimeError: an earlier rendezvous of this process failed"
    assert tried.warnings == stays_off(f"rank 0: {why}", f"rank 1: {why}")
    assert (first.allocated, second.allocated) == ([MIB // 2], [MIB // 2])


def test_the_largest_message_is_the_tables() -> None:
    # sglang from 0.5.16 on makes the buffer larger for other kernels.
    for source in (WHOLE, NEWER):
        (rank, _) = World(source, 2, limits={0: 4, 1: 4}).make()
        assert (rank.found.max_size, rank.allocated) == (4 * MIB, [2 * MIB])
    assert World(NEWER, 2, capability=9, multicast=1).make()[0].found.max_size == 256 * MIB


@pytest.mark.parametrize(
    ("vote", "broken", "fails", "number"),
    [
        (
            "        if closed(troubles):\n            if step is",
            "        if trouble:\n            if step is",
            "empty",
            3,
        ),
        (
            "        ranks, troubles = zip",
            "        if trouble:\n            return True\n        ranks, troubles = zip",
            "props",
            1,
        ),
    ],
)
def test_without_a_vote_a_rank_would_hang(vote: str, broken: str, fails: str, number: int) -> None:
    # That the tests above would see it.
    tried = World(swapped(WHOLE, (vote, broken)), 2, fails={1: fails})
    with pytest.raises(Hang, match=f"rank 0 waits in round {number}"):
        tried.make()


# --- the other sites --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "by"), [(9, "symmetric memory"), (10, "symmetric memory"), (12, "NCCL")])
def test_what_two_shot_does_not_take_is_reduced_by_nccl(capability: int, by: str) -> None:
    assert reduced_by(patched(PARALLEL, FILES[PARALLEL], "sm120-symm"), capability) == [by]
    assert reduced_by(FILES[PARALLEL], capability) == ["symmetric memory"]


def reduced_by(source: str, capability: int) -> list[str]:
    found: list[str] = []
    distributed = SimpleNamespace(all_reduce=lambda tensor, group: found.append("NCCL"))
    scope: dict[str, Any] = {"torch": SimpleNamespace(distributed=distributed, Tensor=object)}
    exec(source.replace("import torch\n", ""), scope)  # noqa: S102 - to see what it does is what it is for
    owner = object.__new__(scope["GroupCoordinator"])
    owner.pynccl_comm, owner.device_group = None, "g"
    owner.torch_symm_mem_comm = SimpleNamespace(
        disabled=False, device_capability=capability, all_reduce=lambda tensor: found.append("symmetric memory")
    )
    owner._all_reduce_in_place("tensor")
    return found


@pytest.mark.parametrize(
    ("cuda", "capability", "sizes", "resources"),
    [(True, 9, (4, 6, 8), "g"), (True, 10, (4, 6, 8), "g"), (True, 12, (), None), (False, 0, (4, 6, 8), "g")],
)
def test_no_kernel_that_needs_multicast_on_12(
    cuda: bool, capability: int, sizes: tuple[int, ...], resources: str | None
) -> None:
    source = patched(INKLING, FILES[INKLING], "sm120-symm").partition("import is_cuda\n")[2]
    device = SimpleNamespace(get_device_capability=lambda: (capability, 0))
    scope: dict[str, Any] = {"is_cuda": lambda: cuda, "torch": SimpleNamespace(cuda=device)}
    exec(source, scope)  # noqa: S102 - to see what it does is what it is for
    comm = SimpleNamespace(device_capability=capability, group=SimpleNamespace(group_name="g"))
    assert (scope["_INKLING_AR_WORLD_SIZES"], scope["_get_inkling_ar_resources"](comm)) == (sizes, resources)


# --- what has to hold, and what may change ----------------------------------------------------------------------------

AFTER = {site: WHOLE if SITES[site].file == SYMM_MEM else SITES[site].apply(FILES[SITES[site].file]) for site in SITES}
BRANCH = "        if self.device_capability == 12 and _sm120_two_shot(self):\n            return\n"
GUARDED = "            torch_symm_mem_comm.all_reduce(input_)\n"
NOT_12 = " and torch_symm_mem_comm.device_capability != 12"

WRONG: list[tuple[str, str, str, str]] = [
    # the wrong function; a method that is there twice; code that never runs
    ("S4", BRANCH, "", "a call of `_sm120_two_shot` is there 0 times, not once"),
    ("S4", BRANCH, f"        def never():\n    {BRANCH.replace(chr(10), chr(10) + '    ', 1)}", "`if … _sm120_two_shot` is there 0 times, not once"),
    ("S4", "    def all_reduce(", "    def __init__(self, group, device):\n        self.disabled = False\n\n    def all_reduce(", "`__init__` is there 2 times, not once"),
    ("S4", "def _sm120_two_shot(comm):", "def two_shot(comm):", "`_sm120_two_shot` is there 0 times, not once"),
    # one further edit
    ("S4", "device_capability == 12 and _sm", "device_capability >= 9 and _sm", "`_sm120_two_shot` is called on other devices than 12"),
    ("S4", "device_capability == 12 and _sm", "device_capability == 12 or _sm", "`_sm120_two_shot` is called on other devices than 12"),
    ("S4", "and _sm120_two_shot(self)", "and not _sm120_two_shot(self)", "`_sm120_two_shot` is called on other devices than 12"),
    ("S4", BRANCH, BRANCH.replace("return", "pass"), "upstream's way goes on after it"),
    ("S4", BRANCH, f"        self.max_size *= 64\n{BRANCH}", "`_sm120_two_shot` does not follow the largest message"),
    ("S4", "        self.max_size = ", "        self.max_size = 64 * 2**20\n        self.max_size = ", "the largest message is not the table's"),
    ("S4", "handle.multicast_ptr == 0", "handle.multicast_ptr == 1", "the refusal without multicast has another condition"),
    ("S4", "            self.buffer = None\n            self.disabled = True\n            return", "            self.buffer = None", "without multicast it does not return"),
    ("S4", "        self.disabled = True\n        self.dtype", "        self.disabled = False\n        self.dtype", "it is turned on elsewhere than at the end"),
    ("S4b", "def _sm120_two_shot(comm):", "def _sm120_two_shot(comm):\n    return False\n\n\ndef two_shot(comm):", "`all_gather_object` is there 0 times, not once"),
    ("S4b", "\n\nclass TorchSymm", "\n\ndef _sm120_two_shot(comm):\n    return False\n\n\nclass TorchSymm", "`_sm120_two_shot` is there 2 times, not once"),
    ("S4b", "group=comm.group)", "group=None)", "ranks exchange over another group than the communicator's"),
    ("S4b", "        dist.all_gather_object", "        if value:\n            dist.all_gather_object", "an exchange may be left out"),
    ("S4b", "        return values\n", "        return [value]\n", "an exchange does not give what all ranks say"),
    ("S4b", "if not any(troubles):", "if not all(troubles):", "one rank with trouble does not decide for all"),
    ("S4b", "(identify, allocate, rendezvous)", "(identify, rendezvous, allocate)", "the rendezvous is not a step of its own, and the last"),
    ("S4b", "(identify, allocate, rendezvous)", "(identify, rendezvous)", "`can_device_access_peer` is not a step"),
    ("S4b", "except Exception as error", "except ValueError as error", "a step that fails is not caught"),
    ("S4b", "            trouble = f", "            return True\n            trouble = f", "a rank can leave before the exchange"),
    ("S4b", "            mine = step(ranks)", "            mine = None", "the step is not guarded"),
    ("S4b", "        if closed(troubles):", "        if False:\n            pass\n        elif closed(troubles):", "a step that failed does not end it"),
    ("S4b", "zip(*exchange((mine, trouble)))", "zip((mine, trouble))", "a step is not followed by an exchange"),
    ("S4b", '_SYMM_MEM") == "1")', '_SYMM_MEM", "1") == "1")', "`SGLANG_STACK_SM120_SYMM_MEM` is read in another way"),
    ("S4b", '    asked = exchange(os.environ.get("SGLANG_STACK_SM120_SYMM_MEM") == "1")', '    asked = [os.environ.get("SGLANG_STACK_SM120_SYMM_MEM") == "1"]', "not all ranks are asked"),
    ("S4b", "    ranks = None\n", "    comm.disabled = False\n    ranks = None\n", "it is turned on elsewhere than at the end"),
    ("S4b", "    ranks = None\n", "    return True\n    ranks = None\n", "a rank can leave by itself"),
    ("S4b", "    ranks = None\n", "    if comm.device == 1:\n        return True\n    ranks = None\n", "a rank can leave by itself"),
    ("S4b", "        mine = trouble = None\n", "        mine = trouble = None\n        if comm.device == 1:\n            continue\n", "a rank can leave before the exchange"),
    ("S4b", "    if not any(asked):", "    if not asked[0]:", "a rank can leave by itself"),
    ("S4b", 'if closed(exchange("two-shot gave', 'if bool(("two-shot gave', "a rank can leave by itself"),
    ("S4b", '    if closed(exchange("two-shot gave a wrong sum" if wrong else None)):\n        return True\n', "", "ranks do not agree on what two-shot gave"),
    ("S4b", "    torch.ops.symm_mem.two_shot_all_reduce_(comm.buffer", "    print(comm.buffer", "one two-shot that is looked at is there 0 times, not once"),
    ("S4c", NOT_12, "", "what two-shot does not take stays unreduced on 12"),
    ("S4c", NOT_12, f"{NOT_12} or True", "its condition has alternatives"),
    ("S4c", "device_capability != 12", "device_capability != 9", "what two-shot does not take stays unreduced on 12"),
    ("S4c", GUARDED, GUARDED * 2, "symmetric memory is there 2 times, not once"),
    ("S4c", "    def _all_reduce_in_place(", "    def _all_reduce(", "`_all_reduce_in_place` is there 0 times, not once"),
    ("S4c", "    def _all_reduce_in_place(", "    def _all_reduce_in_place(self, input_):\n        pass\n\n    def _all_reduce_in_place(", "`_all_reduce_in_place` is there 2 times, not once"),
    ("S4c", "group=self.cpu_group", "group=self.device_group", "`TorchSymmMemCommunicator` is not given the CPU group"),
    ("S4c", " and not torch_symm_mem_comm.disabled", "", "it is used although it is off"),
    ("S4d", "[0] == 12 else", "[0] != 12 else", "12 has world sizes for multimem"),
    ("S4d", "if is_cuda() and", "if is_cuda() or", "12 has world sizes for multimem"),
    ("S4d", "else (4, 6, 8)", "else ()", "other devices have no world sizes"),
    ("S4d", "    if comm.device_capability == 12:\n        return None\n", "    def never():\n        if comm.device_capability == 12:\n            return None\n", "kernels that need multicast are made ready on 12"),
    ("S4d", "\n\ndef _get_inkling", "\n_INKLING_AR_WORLD_SIZES = (4, 6, 8)\n\n\ndef _get_inkling", "`_INKLING_AR_WORLD_SIZES =` is there 2 times, not once"),
]  # fmt: skip


@pytest.mark.parametrize(("site", "old", "new", "wrong"), WRONG)
def test_a_post_condition_sees_what_is_wrong(site: str, old: str, new: str, wrong: str) -> None:
    assert SITES[site].verify(AFTER[site]) == ""
    broken = swapped(AFTER[site], (old, new))
    assert SITES[site].verify(broken) == wrong


@pytest.mark.parametrize("site", SITES)
def test_one_edit_more_than_the_site_has_is_refused(site: str) -> None:
    text = before(site) + "\n\nOTHER = 1\n"

    def plan(module: Module) -> list[Edit]:
        at = module.text.index("OTHER = ")
        edits = list(SITES[site].plan(module))
        return [*edits, Edit(at + 8, at + 9, "2")] if edits else []

    with pytest.raises(IntegrityError, match="`OTHER` differs, which the site does not change"):
        replace(SITES[site], plan=plan).apply(text)


def test_the_caller_comes_after_what_it_calls() -> None:
    with pytest.raises(IntegrityError, match=f"`{TWO_SHOT}` is there 0 times, not once"):
        SITES["S4"].apply(BASE)
