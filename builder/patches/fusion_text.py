"""What the set `sm120-fusion` puts into sglang, as text; where it goes is `builder.patches.fusion`'s."""

from __future__ import annotations

GATE = """\
# sglang-stack S5: on SM120 (compute capability 12.x) the fused all-reduce is opted into; read once, as the others are.
_is_sm120_asked = (
    _is_cuda
    and os.environ.get("SGLANG_STACK_SM120_FUSION") == "1"
    and torch.cuda.get_device_capability()[0] == 12
)


def _sm120_fusion(batch_size: int) -> bool:
    # torch.compile cannot follow a vote of the ranks, nor an operator that returns None: it stays off there.
    if not _is_sm120_asked or torch.compiler.is_compiling():
        return False
    # Not at the top: it loads flashinfer.comm.
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    if not ({flag}):
        return fusion.sm120_refuse("--enable-flashinfer-allreduce-fusion is not given, or was taken back")
    if is_dp_attention_enabled():
        return fusion.sm120_refuse("attention is data parallel")
    return fusion.sm120_open() and batch_size <= fusion.sm120_max_tokens()

"""

FALLBACK = """\
# sglang-stack S7: the all-reduce was put off to here, and the fused one did not do it.
from sglang.srt.distributed import tensor_model_parallel_all_reduce

return self.forward(tensor_model_parallel_all_reduce(x), residual{third})"""

FALLBACK_BY_GROUP = """\
# sglang-stack S7: the all-reduce was put off to here, and the fused one did not do it. A group of one is left alone.
from sglang.srt.distributed import (
    attention_tensor_model_parallel_all_reduce,
    moe_expert_parallel_all_reduce,
    moe_tensor_model_parallel_all_reduce,
)

if use_attn_tp_group:
    x = attention_tensor_model_parallel_all_reduce(x)
else:
    x = moe_tensor_model_parallel_all_reduce(moe_expert_parallel_all_reduce(x))
# The plain norm writes into the residual, which the fused one leaves as it is: EAGLE-3 may have captured it.
if post_residual_addition is None:
    residual = residual.clone()
return norm_module.forward(x, residual, None)"""

AGREED = """\
# sglang-stack S8: the fused all-reduce is on for every rank or for none. On SM120 (compute capability 12.x) it is opted
# into; what is below is the same on every rank, and every rank comes to each collective.
{imports}import functools
import os

{state}_sm120_is_open = None
_sm120_shape = None
_sm120_warned = False


@functools.lru_cache(maxsize=None)
def sm120_asked() -> bool:
    \"\"\"Whether this is SM120 and the fused all-reduce is asked for.\"\"\"
    return (
        os.environ.get("SGLANG_STACK_SM120_FUSION") == "1"
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] == 12
    )


@functools.lru_cache(maxsize=None)
def sm120_max_tokens() -> int:
    \"\"\"The most tokens that it takes there; 0 if the variable is not a whole number.\"\"\"
    text = os.environ.get("SGLANG_STACK_SM120_FUSION_MAX_TOKENS", "16")
    return min(int(text), 2048) if text.isascii() and text.isdigit() else 0


def sm120_refuse(why: str) -> bool:
    \"\"\"False; the first rank says why, once.\"\"\"
    global _sm120_warned
    if not _sm120_warned and _tp_group().rank_in_group == 0:
        logger.warning(
            "SGLANG_STACK_SM120_FUSION=1: the fused all-reduce stays off: %s", why
        )
    _sm120_warned = True
    return False


def sm120_open() -> bool:
    \"\"\"Whether it is on. The first call is a collective, so every rank makes it at the same place.\"\"\"
    global _sm120_is_open
    if _sm120_is_open is None:
        why = _sm120_alike() or _any_of(_sm120_peers(_gather(_place())))
        _sm120_is_open = not why or sm120_refuse(why)
    return _sm120_is_open and not _flashinfer_allreduce_unavailable


def sm120_takes(input_tensor: torch.Tensor) -> bool:
    \"\"\"Whether the fused kernel is for this shape there; one shape for good, as there is one workspace.\"\"\"
    global _sm120_shape
    tokens, hidden = input_tensor.shape
    # How flashinfer's launcher divides a token: before 0.6.18 a warp that is not full adds up wrongly.
    threads, cluster = hidden * input_tensor.element_size() // 16, 8
    while cluster > 1 and threads % cluster:
        cluster //= 2
    block = threads // cluster
    while block < 128 and cluster >= 2:
        block, cluster = block * 2, cluster // 2
    if block % 32 or hidden * input_tensor.element_size() % 16:
        return sm120_refuse(f"hidden size {hidden} does not fill its warps")
    if tokens > sm120_max_tokens():
        return False
    _sm120_shape = _sm120_shape or (hidden, input_tensor.dtype)
    return _sm120_shape == (hidden, input_tensor.dtype)


def _sm120_alike() -> str:
    \"\"\"What is against it that every rank sees alike, without a collective.\"\"\"
    world = torch.distributed.get_world_size()
    if world not in (2, 4, 8):
        return f"it is for 2, 4 or 8 ranks, not {world}"
    if any(size != world for size in _sizes()):
        return f"tensor parallelism has to span all {world} ranks, without pipeline or expert parallelism"
    if any(
        torch.cuda.get_device_capability(device)[0] != 12
        for device in range(torch.cuda.device_count())
    ):
        return "a visible GPU is not of compute capability 12.x"
    if not sm120_max_tokens():
        return "SGLANG_STACK_SM120_FUSION_MAX_TOKENS is not a whole number above 0"
    return ""


def _place() -> tuple:
    return os.uname().nodename, torch.cuda.current_device()


def _sm120_peers(places: list) -> str:
    \"\"\"What this rank has against it; it has to reach every other rank's GPU.\"\"\"
    mine = torch.cuda.current_device()
    devices = {device for _, device in places}
    if len({node for node, _ in places}) > 1 or len(devices) < len(places):
        return "the ranks have to be on one node, each on a GPU of its own number"
    try:
        for other in sorted(devices - {mine}):
            if not torch.cuda.can_device_access_peer(mine, other):
                return f"GPU {mine} has no P2P access to GPU {other}"
    except Exception as error:
        return f"P2P access of GPU {mine}: {error}"
    return "" if _flashinfer_comm is not None else "flashinfer.comm is not there"


def _tp_group():
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()


def _gather(item) -> list:
    group = _tp_group()
    items = [None] * group.world_size
    torch.distributed.all_gather_object(items, item, group=group.cpu_group)
    return items


def _any_of(why: str) -> str:
    \"\"\"Each reason that a rank has, on every rank: who waited for another in vain has one, too.\"\"\"
    said = _gather(why)
    return "; ".join(
        f"rank {said.index(text)}: {text}" for text in dict.fromkeys(said) if text
    )


"""
"""Before the function that makes the workspace; ``{imports}`` and ``{state}`` are what a release lacks of it."""

IMPORTS, STATE = "import datetime\n", "_flashinfer_allreduce_unavailable = False\n"

WORLD_SIZES = """\
def _sizes() -> list:
    return [_tp_group().world_size]


"""

GROUP_SIZES = """\
def _sizes() -> list:
    from sglang.srt.distributed import get_attn_tp_group, get_moe_tp_group

    return [
        group().world_size for group in (_tp_group, get_attn_tp_group, get_moe_tp_group)
    ]


"""

BY_ALL = """\
def _initialize_by_all(**sizes) -> None:
    \"\"\"Make the workspace on every rank or, for good, on none; a rank that fails keeps no other waiting for ever.\"\"\"
    global _flashinfer_allreduce_unavailable
    if torch.distributed.get_world_size() != sizes["world_size"]:
        # Rank and group of the workspace are the world's.
        why = "tensor parallelism does not span all ranks"
    else:
        # What fails most likely is compiling, and that before any rank waits for another.
        why = _any_of(_attempt(_compile)) or _any_of(_attempt(lambda: _create(sizes)))
    if why:
        _flashinfer_allreduce_unavailable = True
        # Nothing is freed: that would be a collective, and peers may have the buffers open.
        _workspace_manager.initialized = False
        if _tp_group().rank_in_group == 0:
            logger.warning("FlashInfer's fused all-reduce is off for good: %s", why)


def _attempt(step) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compile() -> None:
    from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

    get_trtllm_comm_module()


def _create(sizes: dict) -> None:
    # A group of its own, so that a peer that failed is given up after a minute, and no other collective is disturbed.
    group = torch.distributed.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=60)
    )
    _workspace_manager.initialize(group=group, **sizes)
    # No peer may write into what this rank has not set up yet.
    torch.cuda.synchronize()


"""

ENSURE = """\
# sglang-stack S8: on SM120 only where every rank has it, and with memory for no more tokens than it takes.
if sm120_asked():
    if not sm120_open():
        return False
    max_token_num = min(max_token_num, sm120_max_tokens())"""

ENSURE_BY_ALL = f"""\
if _flashinfer_allreduce_unavailable:
    return False
{ENSURE}"""

PREPARE = """\
# sglang-stack S8: here every rank comes by, before anything in which a rank may fail.
if sm120_asked() and not sm120_open():
    return"""

TAKES = """\
# sglang-stack S8: what is not for the kernel on SM120 gets a plain all-reduce and norm (S7).
if sm120_asked() and not sm120_takes(input_tensor):
    return None, None"""

NO_MULTICAST = """\
# sglang-stack S8c: SM120 has no multicast over PCIe to ask for, and the workspace does not use it.
if sm120_asked():
    allocation_sizes.append(allocation_size)
    continue"""

PDL = """\
# sglang-stack S9: started early, the kernel reads the residual before it waits for its predecessor. Not on SM120.
def _launch_with_pdl() -> bool:
    import os

    if torch.cuda.get_device_capability()[0] != 12:
        return True
    return os.environ.get("SGLANG_STACK_SM120_FUSION_PDL") == "1"


"""

ZEROED = """\
# sglang-stack F5: the kernels wait for flags in it, and fresh memory is not always zero.
cudart.cudaMemset(c_void_p(ipc_handles[1][tp_rank]), 0, flag_size)"""
