"""Cases of the base sets: S1, S2, S3, D1 and F1 of `sm120`, E1, E2 and E3 of `eagle3`. Standard library only.

Each compares with what upstream's file does, where the site was patched: that shows that the case would see the fault.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from builder.smoke.behaviour_case import Case, Comparison, Installed, dotted, outcome
from builder.smoke.post_base import COMMUNICATOR, DEEP_GEMM, FUSION, KIMI, LAYERS, SIZES, WORLD_SIZES
from builder.smoke.post_symm import VARIABLE

SIZES_FILE = "sglang/srt/distributed/device_communicators/all_reduce_utils.py"
SYMM_FILE = "sglang/srt/distributed/device_communicators/torch_symm_mem.py"
DEEP_GEMM_FILE = "sglang/srt/layers/deep_gemm_wrapper/configurer.py"
KIMI_FILE = "sglang/srt/models/kimi_k25.py"
COMM_FILE = "flashinfer/jit/comm.py"
NEIGHBOUR = "gen_trtllm_mnnvl_comm_module"

MIB = 1 << 20
# A message's elements; small enough for every table, and of a size that is a multiple of four bytes.
_COUNT = 8


def communicator(module: ModuleType, capability: int, world_size: int, multicast: int) -> str:
    """What `TorchSymmMemCommunicator` of a module does for one rank on such devices: whether it is on, and its kernel.

    Stand-ins take the place of the process group, the symmetric buffer and both kernels; the rest is the module's own.
    """
    import torch  # type: ignore[import-not-found,unused-ignore]

    launched = []
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_capability = lambda device=None: (capability, 0)
    torch.ops.symm_mem = SimpleNamespace(
        multimem_all_reduce_=lambda *_: launched.append("multimem"),
        two_shot_all_reduce_=lambda *_: launched.append("two-shot"),
    )
    module.dist = SimpleNamespace(  # type: ignore[attr-defined]
        get_world_size=lambda group=None: world_size,
        # Where the image can be asked for more (S4): every rank says that it is not.
        all_gather_object=lambda values, value, group=None: values.__setitem__(slice(None), [value] * len(values)),
    )
    module.torch_symm_mem = SimpleNamespace(  # type: ignore[attr-defined]
        empty=lambda count, device, dtype: torch.zeros(_COUNT, dtype=dtype),
        rendezvous=lambda buffer, name: SimpleNamespace(multicast_ptr=multicast),
    )
    made = getattr(module, COMMUNICATOR)(SimpleNamespace(group_name="group"), 0)
    if made.disabled:
        return "off"
    message = torch.ones(_COUNT, dtype=torch.bfloat16)
    # Later releases decline a message that is on another device than theirs.
    made.device = message.device
    made.all_reduce(message)
    return f"{' '.join(launched) or 'no kernel'}, up to {made.max_size / MIB:g} MiB"


def _symm_mem(installed: Installed) -> Iterator[Comparison]:
    os.environ.pop(VARIABLE, None)
    ours = installed.module(SYMM_FILE)
    sizes: dict[int, dict[int, int]] = getattr(installed.module(SIZES_FILE), SIZES)
    installed.stand_in(SIZES_FILE)
    upstream = installed.upstream(SYMM_FILE)
    for capability in (9, 10, 12):
        for world_size in (2, 4, 6, 8):
            for multicast in (0, 1):
                where = f"capability {capability}, {world_size} GPUs, multicast {'on' if multicast else 'off'}"
                known = outcome(communicator, upstream, capability, world_size, multicast)
                if capability == 12:
                    if "S1" in installed.patched:
                        # A release that looks 12 up by itself says no; one that does not, fails.
                        said = "KeyError: 12" if "S2" in installed.patched else "off"
                        yield Comparison(f"upstream's communicator, {where}", said, known)
                    known = "off"
                    if multicast and world_size in WORLD_SIZES:
                        known = f"two-shot, up to {sizes[12][world_size] / MIB:g} MiB"
                got = outcome(communicator, ours, capability, world_size, multicast)
                yield Comparison(f"the communicator, {where}", known, got)


def _deep_gemm(installed: Installed) -> Iterator[Comparison]:
    ours = installed.module(DEEP_GEMM_FILE)
    os.environ["SGLANG_ENABLE_JIT_DEEPGEMM"] = "1"
    # It is asked for, not called; the real one looks for a compiler when it is imported.
    sys.modules["deep_gemm"] = ModuleType("deep_gemm")
    upstream = installed.upstream(DEEP_GEMM_FILE)
    for architecture in (90, 100, 103, 120, 121):
        before, now = (_uses_deep_gemm(module, architecture) for module in (upstream, ours))
        expected = "False" if architecture // 10 == 12 else before
        yield Comparison(f"whether sm_{architecture} uses DeepGEMM", expected, now)
        if architecture == 90:
            yield Comparison("whether sm_90 uses DeepGEMM", "True", now)
        if architecture == 121 and "D1" in installed.patched:
            yield Comparison("whether sm_121 uses DeepGEMM in upstream's file", "True", before)


def _uses_deep_gemm(module: ModuleType, architecture: int) -> str:
    module.get_device_sm = lambda: architecture  # type: ignore[attr-defined]
    return outcome(getattr(module, DEEP_GEMM))


def _fusion(installed: Installed) -> Iterator[Comparison]:
    ours, upstream = installed.module(COMM_FILE), installed.upstream(COMM_FILE)
    number = installed.arch.replace(".", "")
    flag = f"-gencode=arch=compute_{number},code=sm_{number}"
    yield Comparison(f"the targets of {FUSION} for {installed.arch}", flag, _targets(ours, FUSION))
    if "F1" in installed.patched:
        said = "RuntimeError: No supported CUDA architectures found for major versions [9, 10]."
        yield Comparison(f"{FUSION} of upstream's file for {installed.arch}", said, _targets(upstream, FUSION))
    if hasattr(upstream, NEIGHBOUR):
        before, now = (outcome(_flags, module, NEIGHBOUR) for module in (upstream, ours))
        yield Comparison(f"all flags of {NEIGHBOUR} for {installed.arch}", before, now)


def _flags(module: ModuleType, generator: str) -> str:
    spec = getattr(module, generator)()
    return " ".join([*(spec.extra_cflags or ()), *(spec.extra_cuda_cflags or ()), *(spec.extra_ldflags or ())])


def _targets(module: ModuleType, generator: str) -> str:
    said = outcome(_flags, module, generator)
    return " ".join(word for word in said.split() if word.startswith("-gencode")) or said


class _LanguageModel:
    """What the hooks of the wrapper reach, and all that it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def get_embed_and_head(self) -> tuple[str, str]:
        self.asked.append("get_embed_and_head()")
        return "embed", "head"

    def set_embed_and_head(self, embed: object, head: object) -> None:
        self.asked.append(f"set_embed_and_head({embed}, {head})")

    def set_eagle3_layers_to_capture(self, layer_ids: object = "nothing") -> None:
        self.asked.append(f"{LAYERS}({layer_ids})")


def _wrapper(module: ModuleType) -> Any:
    """A KimiK25 that is a bare module with a language model: nothing is constructed, and no weight is there."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    owner = getattr(module, KIMI)
    made = owner.__new__(owner)
    torch.nn.Module.__init__(made)
    made.language_model = _LanguageModel()
    return made


def _hook(module: ModuleType, name: str, *arguments: object) -> str:
    made = _wrapper(module)
    said = outcome(lambda: getattr(made, name)(*arguments))
    return f"{'; '.join(made.language_model.asked) or 'nothing asked'} → {said}"


def _hooks(site: str, name: str, *calls: tuple[tuple[object, ...], str]) -> Case:
    """``calls`` are arguments, and what has to come of them."""

    def run(installed: Installed) -> Iterator[Comparison]:
        ours = installed.module(KIMI_FILE)
        for arguments, expected in calls:
            shown = f"{name}({', '.join(map(str, arguments))})"
            yield Comparison(f"{shown} of {KIMI}", expected, _hook(ours, name, *arguments))
        if site in installed.patched:
            arguments = calls[0][0]
            said = _hook(installed.upstream(KIMI_FILE), name, *arguments).split(":")[0]
            yield Comparison(f"{name} of upstream's {KIMI}", "nothing asked → AttributeError", said)

    return Case(f"Kimi-K2.5 hands {name} on", (site,), run, (dotted(KIMI_FILE),))


CASES = (
    Case("symmetric memory by device", ("S1", "S2", "S3"), _symm_mem, (dotted(SYMM_FILE),)),
    Case("DeepGEMM by device", ("D1",), _deep_gemm, (dotted(DEEP_GEMM_FILE),)),
    Case("targets of the fused all-reduce", ("F1",), _fusion, (dotted(COMM_FILE),)),
    _hooks("E1", "get_embed_and_head", ((), "get_embed_and_head() → ('embed', 'head')")),
    _hooks("E2", "set_embed_and_head", (("embed", "head"), "set_embed_and_head(embed, head) → None")),
    _hooks("E3", LAYERS, ((), f"{LAYERS}(None) → None"), (([1, 29, 57],), f"{LAYERS}([1, 29, 57]) → None")),
)
