"""What is run on the GPUs, in which order, and with which variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

SAFE = {
    # Multicast of a host's GPUs may put them out of service for others; and SM120 over PCIe has none.
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    # A machine without a network may not know its own name.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""Variables of every process, whatever else is set."""

SYMM = {"SGLANG_STACK_SM120_SYMM_MEM": "1"}
FUSION = {"SGLANG_STACK_SM120_FUSION": "1"}
LEGACY, NEXT = "0.5.9", "0.5.15.post1"
FLASHINFER = "0.6.4"


@dataclass(frozen=True)
class Scenario:
    """A function of this package that every rank runs, each in a process of its own.

    ``run`` is `module:function`; ``limit`` in seconds; ``env`` is for all ranks, ``without`` names the ranks that do not
    get it; ``needs`` is a scenario without which this one is not worth its time.
    """

    name: str
    part: str
    run: str
    release: str = LEGACY
    ranks: int = 2
    limit: float = 90
    env: Mapping[str, str] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    needs: str = ""


def _symm(release: str) -> list[Scenario]:
    run = "tests.gpu.symm:"
    tag = f"sglang {release}"
    return [
        Scenario(f"{tag}, asked for", "symm", f"{run}asked", release, env=SYMM, limit=120),
        Scenario(f"{tag}, not asked for", "symm", f"{run}not_asked", release),
        Scenario(f"{tag}, asked for on one rank", "symm", f"{run}asked_on_one", release, env=SYMM, without=(1,)),
        Scenario(f"{tag}, a rank fails behind the rendezvous", "symm", f"{run}fails_behind", release, env=SYMM),
        Scenario(f"{tag}, a rank adds up wrongly", "symm", f"{run}adds_up_wrongly", release, env=SYMM),
        Scenario(f"{tag}, messages past it", "symm", f"{run}past_it", release, env=SYMM),
    ]


def lanes() -> list[list[list[Scenario]]]:
    """Steps behind each other; the lanes of a step run side by side."""
    fused, compiled = "tests.gpu.fusion:", "the module is compiled"

    def fusion(
        name: str, run: str, part: str = "fusion", *, env: Mapping[str, str] = FUSION, limit: float = 90
    ) -> Scenario:
        return Scenario(name, part, run, env=env, limit=limit, needs=compiled)

    machine = Scenario("machine", "machine", "tests.gpu.machine:about", ranks=1)
    before = Scenario(
        f"sglang {LEGACY}, a rank fails before the rendezvous",
        "symm",
        "tests.gpu.symm:fails_before",
        env=SYMM,
        limit=150,
    )
    second = [
        Scenario(compiled, "fusion", f"{fused}compiles", ranks=1, limit=300),
        fusion("asked for", f"{fused}asked", limit=120),
        fusion("in a CUDA graph", f"{fused}graph"),
        fusion("not asked for", f"{fused}not_asked", env={}),
        fusion("a rank has no compiler", f"{fused}no_compiler"),
        fusion("a rank gets no workspace", f"{fused}no_workspace", limit=180),
        fusion("what the draft gets", "tests.gpu.capture:captured", "capture"),
    ]
    times = [
        Scenario("time of one all-reduce", "times", "tests.gpu.symm:times", env=SYMM),
        fusion("time of the fused all-reduce", f"{fused}times", "times"),
    ]
    return [[[machine]], [[*_symm(LEGACY), before, *_symm(NEXT)], second], [times]]
