"""Made-up sources with the places that the set `sm120-fusion` is about, and those that its sites make of them."""

from __future__ import annotations

import functools

from builder.patches.fusion import SITES as ALL

COMMUNICATOR = "sglang/srt/layers/communicator.py"
NORM = "sglang/srt/layers/layernorm.py"
FUSION = "sglang/srt/layers/flashinfer_comm_fusion.py"
TRTLLM = "flashinfer/comm/trtllm_ar.py"

# Of the shapes that sglang 0.5.9 and flashinfer 0.6.4 have, no more than the sites look at.
LEGACY = {
    COMMUNICATOR: """\
import logging

import torch

from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.server_args import get_global_server_args
from sglang.srt.utils import is_cuda, is_flashinfer_available, is_sm90_supported, is_sm100_supported

_is_cuda = is_cuda()
_is_flashinfer_available = is_flashinfer_available()
_is_sm90_supported = _is_cuda and is_sm90_supported()
_is_sm100_supported = _is_cuda and is_sm100_supported()

FUSE_ALLREDUCE_MAX_BATCH_SIZE = 2048


def apply_flashinfer_allreduce_fusion(batch_size: int):
    return (
        # NOTE: Größe
        (_is_sm90_supported or _is_sm100_supported)
        and _is_flashinfer_available
        and batch_size > 0
        and batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE
        and not is_dp_attention_enabled()
        and get_global_server_args().enable_flashinfer_allreduce_fusion
    )


class LayerCommunicator:
    def should_fuse_mlp_allreduce_with_next_layer(self, batch_size):
        return apply_flashinfer_allreduce_fusion(batch_size) and not self.is_last_layer


class CommunicateWithAllReduceAndLayerNormFn:
    @staticmethod
    def _gather_hidden_states_and_residual(hidden_states, residual, layernorm):
        if apply_flashinfer_allreduce_fusion(hidden_states.shape[0]) and hasattr(
            layernorm, "forward_with_allreduce_fusion"
        ):
            return layernorm.forward_with_allreduce_fusion(hidden_states, residual)
        return layernorm.forward(tensor_model_parallel_all_reduce(hidden_states), residual)
""",
    NORM: """\
class RMSNorm:
    def forward(self, x, residual=None, post_residual_addition=None):
        return self.plain(x, residual, post_residual_addition)

    def forward_with_allreduce_fusion(self, x, residual=None, post_residual_addition=None):
        if residual is not None:
            from sglang.srt.distributed import get_tensor_model_parallel_world_size
            from sglang.srt.layers.flashinfer_comm_fusion import (
                flashinfer_allreduce_residual_rmsnorm,
            )

            if get_tensor_model_parallel_world_size() > 1:
                if post_residual_addition is not None:
                    residual = residual + post_residual_addition
                fused_result = flashinfer_allreduce_residual_rmsnorm(
                    input_tensor=x,
                    residual=residual,
                )
                if fused_result[0] is not None:
                    return fused_result

        return self.forward(x, residual, post_residual_addition)
""",
    FUSION: """\
import logging

import torch
import torch.distributed as dist

from sglang.srt.distributed import get_tensor_model_parallel_world_size
from sglang.srt.utils import is_flashinfer_available
from sglang.srt.utils.custom_op import register_custom_op

logger = logging.getLogger(__name__)

import flashinfer.comm as comm

_flashinfer_comm = comm


class FlashInferWorkspaceManager:
    def __init__(self):
        self.workspace_tensor = None
        self.world_size = None
        self.initialized = False

    def initialize(self, world_size, rank, max_token_num, hidden_dim, group=None, use_fp32_lamport=False):
        self.ipc_handles, self.workspace_tensor = (
            comm.trtllm_create_ipc_workspace_for_all_reduce_fusion(
                rank,
                world_size,
                max_token_num,
                hidden_dim,
                group=group,
                use_fp32_lamport=use_fp32_lamport,
            )
        )
        self.world_size = world_size
        self.initialized = True


_workspace_manager = FlashInferWorkspaceManager()


def ensure_workspace_initialized(max_token_num=2048, hidden_dim=4096, use_fp32_lamport=False):
    \"\"\"Ensure workspace is initialized\"\"\"
    if not is_flashinfer_available() or _flashinfer_comm is None:
        return False

    world_size = get_tensor_model_parallel_world_size()
    if world_size <= 1:
        return False

    rank = dist.get_rank()

    if (
        not _workspace_manager.initialized
        or _workspace_manager.world_size != world_size
    ):
        _workspace_manager.initialize(
            world_size=world_size,
            rank=rank,
            max_token_num=max_token_num,
            hidden_dim=hidden_dim,
            use_fp32_lamport=use_fp32_lamport,
        )

    return _workspace_manager.initialized


@register_custom_op(mutates_args=["input_tensor"])
def flashinfer_allreduce_residual_rmsnorm(input_tensor, residual, max_token_num=2048):
    world_size = get_tensor_model_parallel_world_size()
    if world_size <= 1:
        return None, None

    assert input_tensor.shape[0] <= max_token_num

    if not ensure_workspace_initialized(
        max_token_num=max_token_num,
        hidden_dim=input_tensor.shape[-1],
        use_fp32_lamport=False,
    ):
        return None, None

    _flashinfer_comm.trtllm_allreduce_fusion(
        allreduce_in=input_tensor,
        launch_with_pdl=True,
    )
    return "norm", "residual"
""",
}

# Of the shapes that sglang 0.5.15.post1 has.
UNIFIED = {
    COMMUNICATOR: LEGACY[COMMUNICATOR]
    .replace(
        "get_global_server_args().enable_flashinfer_allreduce_fusion",
        "get_global_server_args().flashinfer_allreduce_fusion_backend is not None\n"
        "        and not is_flashinfer_allreduce_unavailable()",
    )
    .replace(
        "from sglang.srt.server_args",
        "from sglang.srt.layers.flashinfer_comm_fusion import is_flashinfer_allreduce_unavailable\nfrom sglang.srt.server_args",
    ),
    NORM: """\
def _forward_with_allreduce_fusion(norm_module, x, residual, post_residual_addition, weight, use_attn_tp_group=True):
    if residual is not None:
        from sglang.srt.distributed import get_tensor_model_parallel_world_size
        from sglang.srt.layers.flashinfer_comm_fusion import flashinfer_allreduce_residual_rmsnorm

        world_size = get_tensor_model_parallel_world_size()
        if world_size > 1:
            if post_residual_addition is not None:
                residual = residual + post_residual_addition
            fused_result = flashinfer_allreduce_residual_rmsnorm(
                input_tensor=x, residual=residual, use_attn_tp_group=use_attn_tp_group
            )
            if fused_result[0] is not None:
                return fused_result

    return norm_module.forward(x, residual, post_residual_addition)


class RMSNorm:
    weight = None

    def forward(self, x, residual=None, post_residual_addition=None):
        return self.plain(x, residual, post_residual_addition)

    def forward_with_allreduce_fusion(self, x, residual=None, post_residual_addition=None, use_attn_tp_group=True):
        return _forward_with_allreduce_fusion(
            self, x, residual, post_residual_addition, self.weight, use_attn_tp_group
        )
""",
    FUSION: """\
import logging

import torch

from sglang.srt.distributed import (
    get_attn_tp_group,
    get_moe_tp_group,
    get_tp_group,
)
from sglang.srt.utils import is_flashinfer_available, is_sm90_supported, is_sm100_supported
from sglang.srt.utils.custom_op import register_custom_op

logger = logging.getLogger(__name__)

_flashinfer_allreduce_unavailable = False


def _resolve_backend(backend, is_multi_node=False):
    if not (is_sm90_supported() or is_sm100_supported()):
        raise ValueError("requires SM90 or SM10X")
    return "mnnvl" if is_sm100_supported() else "trtllm"


import flashinfer.comm as comm

_flashinfer_comm = comm


def is_flashinfer_allreduce_unavailable():
    return _flashinfer_allreduce_unavailable


def _flashinfer_trtllm_workspace_allocation_sizes(cuda_driver, buffer_sizes):
    signal_pad_size, alloc_granularity = 2048, 1 << 21
    allocation_sizes = []
    for buffer_size in buffer_sizes:
        allocation_size = ceil_align(buffer_size + signal_pad_size, alloc_granularity)
        mc_prop = cuda_driver.CUmulticastObjectProp()
        mc_granularity = cuda_driver.cuMulticastGetGranularity(mc_prop)
        allocation_size = ceil_align(allocation_size, mc_granularity)
        allocation_sizes.append(allocation_size)
    return allocation_sizes


def ceil_align(size, to):
    return -(-size // to) * to


def _preflight_check_workspace_memory(cpu_group):
    return True


class FlashInferWorkspaceManager:
    def __init__(self):
        self.workspace = None
        self.initialized = False

    def initialize(self, world_size, rank, max_token_num, hidden_dim, backend, device_group, cpu_group):
        global _flashinfer_allreduce_unavailable
        if not _preflight_check_workspace_memory(cpu_group=cpu_group):
            _flashinfer_allreduce_unavailable = True
            return
        try:
            create_kw = dict(max_token_num=max_token_num, hidden_dim=hidden_dim, backend=backend, rank=rank)
            create_kw["group"] = device_group
            self.workspace = comm.create_allreduce_fusion_workspace(**create_kw)
            self.initialized = True
        except Exception as e:
            _flashinfer_allreduce_unavailable = True
            logger.warning(f"Failed to initialize FlashInfer workspace: {e}")


_workspace_manager = FlashInferWorkspaceManager()


def _get_workspace_manager(use_attn_tp_group):
    return _workspace_manager


def _sync_allreduce_unavailable_across_tp():
    global _flashinfer_allreduce_unavailable
    tp_group = get_tp_group()
    flags = [None] * tp_group.world_size
    torch.distributed.all_gather_object(flags, _flashinfer_allreduce_unavailable, group=tp_group.cpu_group)
    _flashinfer_allreduce_unavailable = any(flags)


def ensure_workspace_initialized(max_token_num=2048, hidden_dim=4096, token_num=None, use_attn_tp_group=True):
    if _flashinfer_allreduce_unavailable:
        return False

    coordinator = get_attn_tp_group() if use_attn_tp_group else get_moe_tp_group()
    world_size, rank = coordinator.world_size, coordinator.rank_in_group
    if world_size <= 1:
        return False

    workspace_manager = _get_workspace_manager(use_attn_tp_group)
    token_num = token_num or max_token_num
    backend = _resolve_backend("auto")

    if not workspace_manager.initialized:
        workspace_manager.initialize(
            world_size=world_size,
            rank=rank,
            max_token_num=max_token_num,
            hidden_dim=hidden_dim,
            backend=backend,
            device_group=coordinator.device_group,
            cpu_group=coordinator.cpu_group,
        )

        _sync_allreduce_unavailable_across_tp()

    return workspace_manager.initialized and not _flashinfer_allreduce_unavailable


@register_custom_op(mutates_args=["input_tensor"])
def flashinfer_allreduce_residual_rmsnorm(input_tensor, residual, max_token_num=2048, use_attn_tp_group=True):
    world_size = (get_attn_tp_group() if use_attn_tp_group else get_moe_tp_group()).world_size
    if world_size <= 1:
        return None, None

    assert input_tensor.shape[0] <= max_token_num
    if not ensure_workspace_initialized(
        max_token_num=max_token_num,
        hidden_dim=input_tensor.shape[-1],
        token_num=input_tensor.shape[0],
        use_attn_tp_group=use_attn_tp_group,
    ):
        return None, None

    kwargs = dict(
        input=input_tensor,
        launch_with_pdl=True,
    )
    _flashinfer_comm.allreduce_fusion(**kwargs)
    return "norm", "residual"


def pre_initialize_workspaces(max_token_num, hidden_dim):
    if _flashinfer_allreduce_unavailable or _flashinfer_comm is None:
        return

    ensure_workspace_initialized(max_token_num=max_token_num, hidden_dim=hidden_dim, use_attn_tp_group=False)
    ensure_workspace_initialized(max_token_num=max_token_num, hidden_dim=hidden_dim, use_attn_tp_group=True)
""",
}

OLD_FLAGS = """\
from ctypes import c_void_p

from .cuda_ipc import create_shared_buffer, cudart

BarrierFlagCount = 256


def trtllm_create_ipc_workspace_for_all_reduce(rank, tp_size, group=None):
    ipc_handles = list()
    for size in [buffer_size, flag_size, lamport_buffer_size]:
        ipc_handles.append(create_shared_buffer(size, group))
    return ipc_handles


def trtllm_create_ipc_workspace_for_all_reduce_fusion(tp_rank, tp_size, max_token_num, hidden_dim, group=None):
    buffer_size = tp_size * max_token_num * hidden_dim * 2
    flag_size = tp_size * BarrierFlagCount * 4
    lamport_buffer_size = buffer_size * 3
    ipc_handles = list()
    for size in [buffer_size, flag_size, lamport_buffer_size]:
        ipc_handles.append(create_shared_buffer(size, group))

    trtllm_lamport_initialize(ipc_handles[2][tp_rank], lamport_buffer_size // 2)
    dist.barrier(group=group)
    return ipc_handles
"""

OLD = {"legacy": {**LEGACY, TRTLLM: OLD_FLAGS}, "unified": UNIFIED}
"""By kind of release: with flashinfer's first interface, and with the unified one."""
SITES = {site.id: site for site in ALL}
NEEDED = [
    *(("legacy", site) for site in ("S5", "S7", "S8", "S9", "F5")),
    *(("unified", site) for site in ("S5", "S7", "S8", "S8b", "S8c", "S9")),
]


def file_of(site: str) -> str:
    """The made-up file that a site is about."""
    return COMMUNICATOR if site == "S5" else SITES[site].file


def old(kind: str, site: str) -> str:
    """What a site finds in a kind of release."""
    return OLD[kind][file_of(site)]


@functools.cache
def patched(kind: str) -> dict[str, str]:
    """The sources of a kind of release with all sites patched."""
    sources = dict(OLD[kind])
    for site in ALL:
        if (file := file_of(site.id)) in sources:
            sources[file] = site.apply(sources[file])
    return sources


def swapped(text: str, before: str, after: str) -> str:
    """``text`` with another piece in it, which has to be there."""
    assert before in text
    return text.replace(before, after)
