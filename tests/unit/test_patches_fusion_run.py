"""The set `sm120-fusion`: what the patched code does on made-up ranks."""

from __future__ import annotations

import ast
import os
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fusion_made import LEGACY, NORM, OLD, OLD_FLAGS, SITES, TRTLLM, patched, swapped
from tests.fusion_world import Tensor, World
from tests.patch_made import execute, warnings

VARIABLE, LIMIT, PDL = (f"SGLANG_STACK_SM120_FUSION{name}" for name in ("", "_MAX_TOKENS", "_PDL"))

# --- the gate ---------------------------------------------------------------------------------------------------------

KINDS = ["legacy", "unified"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, LIMIT, PDL):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("capability", "variable", "flag", "ranks", "tokens", "opened"),
    [
        (12, "1", True, 2, 1, True),
        (12, "1", True, 4, 16, True),
        (12, "1", True, 8, 8, True),
        (12, "1", True, 8, 17, False),
        (12, "1", True, 2, 0, False),
        (12, "1", True, 3, 1, False),
        (12, "1", False, 2, 1, False),
        (12, None, True, 2, 1, False),
        (12, "0", True, 2, 1, False),
        (12, "true", True, 2, 1, False),
        (9, None, True, 2, 2048, True),
        (9, "1", True, 2, 2048, True),
        (9, "1", True, 3, 1, True),
        (10, "1", True, 2, 2049, False),
        (9, "1", False, 2, 1, False),
        (8, "1", True, 2, 1, False),
    ],
)
def test_the_gate(
    kind: str,
    capability: int,
    variable: str | None,
    flag: bool,
    ranks: int,
    tokens: int,
    opened: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    world = World(monkeypatch, patched(kind), ranks, capability)
    world.flag = flag
    assert [bool(answer) for answer in world.gate(tokens)] == [opened] * ranks
    if capability != 12 or variable != "1":
        before = World(monkeypatch, OLD[kind], ranks, capability)
        before.flag = flag
        assert [bool(answer) for answer in before.gate(tokens)] == [opened] * ranks
        # Nothing is asked of the other ranks, and nothing is loaded for it.
        assert set(map(tuple, world.collectives.values())) == {()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("limit", "opened"), [("4", [True, False]), ("5", [True, True]), ("100000", [True, True])])
def test_the_token_limit(kind: str, limit: str, opened: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(LIMIT, limit)
    world = World(monkeypatch, patched(kind))
    assert [world.gate(4)[0], world.gate(5)[0]] == opened
    assert world.gate(2049) == [False, False]


SPAN = "tensor parallelism has to span all 4 ranks, without pipeline or expert parallelism"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("flag", False, "--enable-flashinfer-allreduce-fusion is not given, or was taken back"),
        ("dp", True, "attention is data parallel"),
        ("tp", 2, SPAN),
        ("capabilities", {0: 12, 1: 12, 2: 12, 3: 12, 4: 9}, "a visible GPU is not of compute capability 12.x"),
        ("blocked", {(2, 3)}, "rank 2: GPU 2 has no P2P access to GPU 3"),
        (
            "blocked",
            {(3, 0), (1, 0)},
            "rank 1: GPU 1 has no P2P access to GPU 0; rank 3: GPU 3 has no P2P access to GPU 0",
        ),
    ],
)
def test_a_gate_that_stays_shut_says_why_once(
    kind: str, name: str, value: Any, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind), 4)
    setattr(world, name, value)
    for _ in range(3):
        assert world.gate(1) == [False] * 4
    assert warnings(caplog) == [f"{VARIABLE}=1: the fused all-reduce stays off: {why}"]
    # Whatever a rank found, all made the same collectives, and made them once.
    assert len(set(map(tuple, world.collectives.values()))) == 1
    assert len(world.collectives[0]) == (2 if name == "blocked" else 0)


PLACED = "the ranks have to be on one node, each on a GPU of its own number"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [True, False])
def test_ranks_on_several_nodes_or_of_one_number_are_refused(
    kind: str, apart: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    if apart:
        monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename=f"node {world.rank}"))
    else:
        world.devices = [0, 0]
    assert world.gate(1) == [False] * 2
    assert warnings(caplog) == [f"{VARIABLE}=1: the fused all-reduce stays off: rank 0: {PLACED}"]


def test_a_rank_without_flashinfer_keeps_the_others_from_it_and_no_rank_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("unified"), 4)

    def prepare(modules: dict[str, ModuleType]) -> None:
        if world.rank == 2:
            modules["flashinfer_comm_fusion"].__dict__["_flashinfer_comm"] = None
        modules["flashinfer_comm_fusion"].pre_initialize_workspaces(2048, 7168)

    world.run(prepare)
    assert world.gate(1) == [False] * 4
    assert warnings(caplog) == [f"{VARIABLE}=1: the fused all-reduce stays off: rank 2: flashinfer.comm is not there"]


def test_expert_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("unified"), 4)
    world.moe = 1
    assert world.gate(1) == [False] * 4
    assert warnings(caplog) == [f"{VARIABLE}=1: the fused all-reduce stays off: {SPAN}"]


@pytest.mark.parametrize("limit", ["0", "-1", "many", ""])
def test_a_limit_that_is_no_number_shuts_the_gate(
    limit: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setenv(LIMIT, limit)
    assert World(monkeypatch, patched("legacy")).gate(1) == [False, False]
    assert warnings(caplog) == [f"{VARIABLE}=1: the fused all-reduce stays off: {LIMIT} is not a whole number above 0"]


@pytest.mark.parametrize("capability", [9, 12])
def test_without_the_variable_nothing_is_said(
    capability: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    World(monkeypatch, patched("legacy"), 3, capability).gate(1)
    assert warnings(caplog) == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_is_shut_inside_of_torch_compile(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    world.compiling = True
    assert world.gate(1) == [False, False]
    world.compiling = False
    assert world.gate(1) == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_producer_and_consumer_decide_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def both(modules: Any, tokens: int) -> tuple[bool, bool]:
        communicator = modules["communicator"]
        layer = communicator.LayerCommunicator()
        layer.is_last_layer = False
        norm = SimpleNamespace(forward_with_allreduce_fusion=lambda *_: "fused", forward=lambda *_: "plain")
        consumer = communicator.CommunicateWithAllReduceAndLayerNormFn._gather_hidden_states_and_residual
        producer = layer.should_fuse_mlp_allreduce_with_next_layer(tokens)
        return bool(producer), consumer(Tensor(tokens), Tensor(tokens), norm) == "fused"

    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    assert world.run(lambda modules: both(modules, 16)) == [(True, True)] * 2
    assert world.run(lambda modules: both(modules, 17)) == [(False, False)] * 2


# --- the workspace ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("capability", "variable", "limit", "tokens"),
    [(12, "1", None, 16), (12, "1", "8", 8), (12, "1", "4096", 2048), (9, "1", "8", 2048), (9, None, None, 2048)],
)
def test_the_workspace_is_as_large_as_the_limit_on_sm120_alone(
    kind: str, capability: int, variable: str | None, limit: str | None, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ((VARIABLE, variable), (LIMIT, limit)):
        if value is not None:
            monkeypatch.setenv(name, value)
    world = World(monkeypatch, patched(kind), 2, capability)
    for _ in range(2):
        assert world.fuse(1) == [("norm", "residual")] * 2
    assert world.workspaces == [tokens] * 2


@pytest.mark.parametrize("capability", [9, 12])
@pytest.mark.parametrize("failing", ["failing", "late", "uncompiled"])
@pytest.mark.parametrize("rank", [0, 3])
def test_where_one_rank_fails_none_has_a_workspace_and_none_hangs(
    capability: int, failing: str, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("legacy"), 4, capability)
    setattr(world, failing, {rank})
    assert world.fuse(1) == [(None, None)] * 4
    made_once = [list(item) for item in world.collectives.values()]
    assert len({tuple(item) for item in made_once}) == 1
    found = warnings(caplog)
    assert len(found) == 1
    assert found[0].startswith("FlashInfer's fused all-reduce is off for good: rank ")
    assert "out of memory" in found[0] or "no nvcc" in found[0] or "timed out in the workspace's group" in found[0]
    # For good: nobody tries again, whatever has changed.
    world.failing, world.late, world.uncompiled = set(), set(), set()
    assert world.fuse(1) == [(None, None)] * 4
    assert [list(item) for item in world.collectives.values()] == made_once
    assert [bool(answer) for answer in world.gate(1)] == [capability == 9] * 4
    assert world.launches == []


def test_without_the_patch_a_rank_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(World, "_legacy_workspace", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        World(monkeypatch, OLD["legacy"], 2, 9).fuse(1)


def test_the_workspace_is_made_in_a_group_of_its_own_and_is_set_up_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("legacy"))
    world.fuse(1)
    assert world.made_in == ["the workspace's group"] * 2
    assert len(world.synchronized) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_no_workspace_is_made_behind_a_gate_that_is_shut(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    world.blocked = {(0, 1)}
    assert world.run(lambda modules: modules["flashinfer_comm_fusion"].ensure_workspace_initialized()) == [False] * 2
    assert world.workspaces == []


def test_a_workspace_of_a_part_of_the_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(monkeypatch, patched("legacy"), 4, 9)
    world.tp = 2
    assert world.fuse(1) == [(None, None)] * 4
    assert world.workspaces == []
    assert set(warnings(caplog)) == {
        "FlashInfer's fused all-reduce is off for good: tensor parallelism does not span all ranks"
    }


def test_with_the_unified_interface_a_failure_is_voted_on_before_graphs_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("unified"), 4)
    world.failing = {1}
    world.run(lambda modules: modules["flashinfer_comm_fusion"].pre_initialize_workspaces(2048, 7168))
    assert world.gate(1) == [False] * 4
    assert world.fuse(1) == [(None, None)] * 4


def test_with_the_unified_interface_nothing_is_prepared_behind_a_gate_that_is_shut(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched("unified"), 4)
    world.blocked = {(0, 1)}
    world.run(lambda modules: modules["flashinfer_comm_fusion"].pre_initialize_workspaces(2048, 7168))
    assert world.workspaces == []
    assert warnings(caplog) == [
        f"{VARIABLE}=1: the fused all-reduce stays off: rank 0: GPU 0 has no P2P access to GPU 1"
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hidden", "taken"),
    [(7168, True), (4096, True), (8192, True), (5120, True), (2048, True), (2880, False), (2304, False), (7169, False)],
)
def test_hidden_sizes_that_do_not_fill_warps_are_refused(
    kind: str, hidden: int, taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    assert world.fuse(1, hidden) == [("norm", "residual") if taken else (None, None)] * 2
    said = [f"{VARIABLE}=1: the fused all-reduce stays off: hidden size {hidden} does not fill its warps"]
    assert warnings(caplog) == ([] if taken else said)
    nine = World(monkeypatch, patched(kind), 2, 9)
    assert nine.fuse(1, hidden) == [("norm", "residual")] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_the_workspace_is_not_fused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    world = World(monkeypatch, patched(kind))
    assert world.fuse(16) == [("norm", "residual")] * 2
    assert world.fuse(17) == [(None, None)] * 2
    assert world.fuse(1, 8192) == [(None, None)] * 2
    assert world.fuse(16) == [("norm", "residual")] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("capability", "variable", "pdl"),
    [(12, None, False), (12, "1", True), (12, "0", False), (9, None, True), (10, "0", True)],
)
def test_programmatic_dependent_launch(
    kind: str, capability: int, variable: str | None, pdl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    if variable is not None:
        monkeypatch.setenv(PDL, variable)
    world = World(monkeypatch, patched(kind), 2, capability)
    world.fuse(1)
    assert world.launches == [pdl] * 2


@pytest.mark.parametrize(
    ("capability", "variable", "backend"), [(12, "1", "trtllm"), (9, None, "trtllm"), (10, "1", "mnnvl")]
)
def test_the_backend(capability: int, variable: str | None, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable:
        monkeypatch.setenv(VARIABLE, variable)
    world = World(monkeypatch, patched("unified"), 2, capability)
    assert world.run(lambda modules: modules["flashinfer_comm_fusion"]._resolve_backend("auto")) == [backend] * 2


@pytest.mark.parametrize(("capability", "variable"), [(12, None), (8, "1")])
def test_the_backend_is_refused_as_before(
    capability: int, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(VARIABLE, variable)
    world = World(monkeypatch, patched("unified"), 2, capability)
    with pytest.raises(ValueError, match="requires SM90 or SM10X"):
        world.run(lambda modules: modules["flashinfer_comm_fusion"]._resolve_backend("auto"))


@pytest.mark.parametrize(("capability", "variable", "asked"), [(12, "1", 0), (12, None, 2), (9, "1", 2)])
def test_multicast_is_not_asked_for_on_sm120(
    capability: int, variable: str | None, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(VARIABLE, variable)
    calls: list[object] = []

    def granularity(prop: object) -> int:
        calls.append(prop)
        return 1 << 21

    driver = SimpleNamespace(CUmulticastObjectProp=object, cuMulticastGetGranularity=granularity)
    world = World(monkeypatch, patched("unified"), 2, capability)
    world.ranks = 1
    sizes = world.run(
        lambda modules: modules["flashinfer_comm_fusion"]._flashinfer_trtllm_workspace_allocation_sizes(
            driver, [1, 1 << 21]
        )
    )
    assert sizes == [[1 << 21, 2 << 21]]
    assert len(calls) == asked


# --- the fallback -----------------------------------------------------------------------------------------------------


def norm(kind: str, source: str, fused: tuple[object, object], monkeypatch: pytest.MonkeyPatch, ranks: int = 2) -> Any:
    """A norm of a source whose fused operator returns that, and the world it is in."""
    world = World(monkeypatch, {**patched(kind), NORM: source}, ranks)
    world.own.rank = 0
    operator = ModuleType("flashinfer_comm_fusion")
    operator.__dict__["flashinfer_allreduce_residual_rmsnorm"] = lambda **_: fused
    world.modules[0] = {operator.__name__: operator}
    scope: dict[str, Any] = {}
    execute(source, NORM, scope)
    made_norm = scope["RMSNorm"]()
    made_norm.plain = lambda *given: ("plain", *given)
    return made_norm, world


class Residual(str):
    """A residual that says whether it was added to or cloned."""

    def __add__(self, other: object) -> Residual:
        return Residual(f"{self!s}+{other}")

    def clone(self) -> Residual:
        return Residual(f"a clone of {self!s}")


@pytest.mark.parametrize("added", [None, "addition"])
def test_what_was_not_fused_is_reduced_once_before_the_norm(added: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    made_norm, world = norm("legacy", patched("legacy")[NORM], (None, None), monkeypatch)
    got = made_norm.forward_with_allreduce_fusion("x", Residual("r"), added)
    # What is added is added once: it is in the residual by then.
    assert got == ("plain", ("reduced", "x"), "r+addition" if added else "r", None)
    assert world.reduced == ["tensor_model_parallel_all_reduce"]


def test_what_older_releases_add_in_the_norm_is_still_added_there(monkeypatch: pytest.MonkeyPatch) -> None:
    # sglang 0.5.8.post1 leaves it to the plain norm.
    before = swapped(
        LEGACY[NORM],
        "                if post_residual_addition is not None:\n"
        "                    residual = residual + post_residual_addition\n",
        "",
    )
    made_norm, world = norm("legacy", SITES["S7"].apply(before), (None, None), monkeypatch)
    got = made_norm.forward_with_allreduce_fusion("x", Residual("r"), "addition")
    assert got == ("plain", ("reduced", "x"), "r", "addition")
    assert world.reduced == ["tensor_model_parallel_all_reduce"]


@pytest.mark.parametrize("added", [None, "addition"])
@pytest.mark.parametrize(
    ("attention", "reduced"),
    [
        (True, ["attention_tensor_model_parallel_all_reduce"]),
        (False, ["moe_expert_parallel_all_reduce", "moe_tensor_model_parallel_all_reduce"]),
    ],
)
def test_what_was_not_fused_is_reduced_over_the_group_that_put_it_off(
    attention: bool, reduced: list[str], added: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_norm, world = norm("unified", patched("unified")[NORM], (None, None), monkeypatch)
    _, x, residual, rest = made_norm.forward_with_allreduce_fusion("x", Residual("r"), added, attention)
    assert (residual, rest) == ("r+addition" if added else "a clone of r", None)
    for _ in reduced:
        assert x[0] == "reduced"
        x = x[1]
    assert x == "x"
    assert world.reduced == reduced


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_fused_is_not_reduced_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_norm, world = norm(kind, patched(kind)[NORM], ("n", "r"), monkeypatch)
    assert made_norm.forward_with_allreduce_fusion("x", Residual("r")) == ("n", "r")
    assert world.reduced == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_reduces_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_norm, world = norm(kind, patched(kind)[NORM], (None, None), monkeypatch, ranks=1)
    assert made_norm.forward_with_allreduce_fusion("x", Residual("r"), "addition") == ("plain", "x", "r", "addition")
    assert world.reduced == []


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_patch_partial_sums_get_to_the_norm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made_norm, world = norm(kind, OLD[kind][NORM], (None, None), monkeypatch)
    assert made_norm.forward_with_allreduce_fusion("x", Residual("r")) == ("plain", "x", "r", None)
    assert world.reduced == []


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
def test_the_flags_of_the_own_rank_are_zeroed_before_the_ranks_meet(rank: int) -> None:
    done: list[object] = []
    text = SITES["F5"].apply(OLD_FLAGS).replace("from .cuda_ipc", "from cuda_ipc")
    addresses = iter(range(100, 1000, 100))
    scope: dict[str, Any] = {
        "trtllm_lamport_initialize": lambda *_: done.append("lamport"),
        "dist": SimpleNamespace(barrier=lambda group: done.append("barrier")),
    }
    (owner,) = [node for node in ast.parse(text).body if getattr(node, "name", "").endswith("_fusion")]
    scope |= {
        "c_void_p": lambda address: address,
        "BarrierFlagCount": 256,
        "create_shared_buffer": lambda *_: [base := next(addresses), base + 1],
        "cudart": SimpleNamespace(cudaMemset=lambda *given: done.append(given)),
    }
    execute(ast.unparse(owner), TRTLLM, scope)
    scope["trtllm_create_ipc_workspace_for_all_reduce_fusion"](rank, 2, 16, 7168)
    assert done == [(200 + rank, 0, 2 * 256 * 4), "lamport", "barrier"]
