"""The opt-in set for the fused all-reduce on SM120: S5, S7, S8, S8b, S8c and S9 in sglang, F5 in flashinfer.

On SM120 it is off until the user sets ``SGLANG_STACK_SM120_FUSION=1`` and gives ``--enable-flashinfer-allreduce-fusion``.
Elsewhere two things change: an all-reduce that was put off is made up for where the fused one does not run (S7), and in
releases that make the workspace unguarded every rank gets one or none (S8). What is known of each site is in
shared/facts/patches.md, section A1; what is put in is in `builder.patches.fusion_text`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from builder.patches import fusion_text as text
from builder.patches.engine import Edit, Module, Reader, Site, UnknownShapeError, definitions
from builder.patches.sm120 import find, function, klass
from builder.smoke.post_fusion import BUFFERS, ENSURE, FUSED, GATES, NORM, PREFLIGHT, PREPARE, RESOLVE

_NOTES = "shared/facts/patches.md section A1"
_LAYERS = "sglang/srt/layers/"
_FUSION_FILE = f"{_LAYERS}flashinfer_comm_fusion.py"
_DEVICES = "_is_sm90_supported or _is_sm100_supported"
_FLAGS = (
    "get_global_server_args().enable_flashinfer_allreduce_fusion",
    "get_global_server_args().flashinfer_allreduce_fusion_backend is not None",
    "get_server_args().flashinfer_allreduce_fusion_backend is not None",
    "get_exec().comm.flashinfer_allreduce_fusion_backend is not None",
)
"""How releases ask for sglang's own flag."""
_ALWAYS = {
    "_is_flashinfer_available",
    "batch_size > 0",
    "batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE",
    "not is_dp_attention_enabled()",
}
_LATER = {
    "not is_flashinfer_allreduce_unavailable()",
    "not uses_cutedsl_ar_fusion()",
    "get_global_server_args().attn_cp_size <= 1",
}
_PRODUCER = "should_fuse_mlp_allreduce_with_next_layer"
_CONSUMER = "_gather_hidden_states_and_residual"
_USERS = {
    f"{_LAYERS}layer_boundary/exit.py": ("_batch_allows_deferred_sum",),
    f"{_LAYERS}layer_boundary/fusions/allreduce.py": ("fused_attn_input", "fused_ffn_input"),
}


class _Parts:
    """The edits of a site, of which every one is made already, or none."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.edits: list[Edit] = []
        self.made = 0

    def before(self, body: Sequence[ast.stmt], anchor: ast.stmt, lines: str) -> None:
        at = list(body).index(anchor)
        if _same(body[:at][-len(ast.parse(lines).body) :], lines):
            self.made += 1
        else:
            self.edits.append(self.module.before(anchor, lines))

    def after(self, body: Sequence[ast.stmt], anchor: ast.stmt, lines: str) -> None:
        at = list(body).index(anchor) + 1
        if _same(body[at : at + len(ast.parse(lines).body)], lines):
            self.made += 1
        else:
            self.edits.append(self.module.after(anchor, lines))

    def replace(self, node: ast.expr, was: str, becomes: str) -> None:
        if ast.unparse(node) == becomes:
            self.made += 1
        elif ast.unparse(node) == was:
            self.edits.append(self.module.replace(node, becomes))
        else:
            raise UnknownShapeError(f"`{was}`")

    def done(self) -> list[Edit]:
        """The edits that are to be made. Raises `UnknownShapeError` where some are made and others are not."""
        if self.edits and self.made:
            raise UnknownShapeError("all edits of the site, or none")
        return self.edits


def _same(nodes: Sequence[ast.stmt], lines: str) -> bool:
    return [ast.unparse(node) for node in nodes] == [ast.unparse(node) for node in ast.parse(lines).body]


def _named(lines: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name, _ in definitions(ast.parse(lines))))


def _the_one(nodes: Sequence[ast.stmt], written: str) -> ast.stmt:
    found = [node for node in nodes if ast.unparse(node) == written]
    if len(found) != 1:
        raise UnknownShapeError(f"`{written}` ({len(found)} found)")
    return found[0]


def _functions(tree: ast.AST, name: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield node


def _gate(module: Module) -> list[Edit]:
    body = module.tree.body
    names = [name for name in GATES if any(_functions(module.tree, name))]
    if len(names) != 1:
        raise UnknownShapeError(
            f"`{GATES[0]}`, one gate for producer and consumer: here the producer puts the all-reduce off by the flag "
            "alone, on any device"
        )
    (name,) = names
    gate = function(body, name)
    value = gate.body[0].value if len(gate.body) == 1 and isinstance(gate.body[0], ast.Return) else None
    operands = [ast.unparse(node) for node in value.values] if isinstance(value, ast.BoolOp) else []
    flags = [operand for operand in operands if operand in _FLAGS]
    others = set(operands[1:]) - set(flags)
    if len(flags) != 1 or not _ALWAYS <= others <= _ALWAYS | _LATER or len(operands) != len(others) + 2:
        raise UnknownShapeError(f"`{name}` with sglang's flag, {', '.join(f'`{item}`' for item in sorted(_ALWAYS))}")
    for user in (_PRODUCER, _CONSUMER) if name == GATES[0] else ():
        users = list(_functions(module.tree, user))
        if not users or not all(f"{name}(" in ast.unparse(item) for item in users):
            raise UnknownShapeError(f"`{user}` that asks `{name}`")
    find(body, ast.Assign, "_is_cuda")
    assert isinstance(value, ast.BoolOp)
    parts = _Parts(module)
    parts.replace(value.values[0], _DEVICES, f"{_DEVICES} or _sm120_fusion(batch_size)")
    parts.before(body, gate, text.GATE.replace("{flag}", flags[0]))
    edits = parts.done()
    if edits and not any(isinstance(node, ast.Import) and node.names[0].name == "os" for node in body):
        imports = [node for node in body if isinstance(node, ast.Import)]
        if not imports:
            raise UnknownShapeError("an `import`")
        edits.append(module.before(imports[0], "import os"))
    return edits


def _asked_by_both(read: Reader) -> str:
    """Producer and consumer ask one gate, where they are not in its file (from 0.5.23 on)."""
    if read(f"{_LAYERS}communicator.py") is not None:
        return ""
    for file, names in _USERS.items():
        source = read(file)
        try:
            tree = ast.parse(source or "")
        except SyntaxError:
            tree = ast.Module([], [])
        for name in names:
            if not any(f"{GATES[1]}(" in ast.unparse(node) for node in _functions(tree, name)):
                return f"`{name}` that asks `{GATES[1]}`, in {file}"
    return ""


_NATIVE_FALLBACK = """\
if use_attn_tp_group:
    x = attention_tensor_model_parallel_all_reduce(x)
else:
    x = deferred_post_experts_all_reduce(x)
if post_residual_addition is None:
    residual = residual.clone()
return norm_module.forward(x, residual, None)"""


def _fallback(module: Module) -> list[Edit]:
    shared = [node for node in module.tree.body if getattr(node, "name", "") == f"_{NORM}"]
    owner = function(module.tree.body, f"_{NORM}") if shared else function(klass(module, "RMSNorm").body, NORM)
    returned = "if fused_result[0] is not None:\n    return fused_result"
    blocks = [
        block
        for node in ast.walk(owner)
        for block in (getattr(node, "body", []), getattr(node, "orelse", []))
        if isinstance(block, list) and any(ast.unparse(item) == returned for item in block)
    ]
    if len(blocks) != 1 or (f"{FUSED}(" not in ast.unparse(owner) and "fused_op(" not in ast.unparse(owner)):
        raise UnknownShapeError(f"`{FUSED}`, then once `{returned}`")
    (block,) = blocks
    anchor = _the_one(block, returned)
    behind = block[block.index(anchor) + 1 :]
    if shared:
        lines = text.FALLBACK_BY_GROUP
        if _same(behind, _NATIVE_FALLBACK):
            return []
        ends = "return norm_module.forward(x, residual, post_residual_addition)"
    else:
        added = "residual = residual + post_residual_addition" in ast.unparse(owner)
        later = [item.arg for item in owner.args.args[3:]]
        if later not in ([], ["post_residual_addition"]):
            raise UnknownShapeError(f"`{NORM}(self, x, residual, post_residual_addition)`, or without the last")
        third = [", None"] if added else [f", {name}" for name in later]
        lines = text.FALLBACK.replace("{third}", "".join(third))
        ends = f"return self.forward({', '.join(['x', 'residual', *later])})"
    if ast.unparse(owner.body[-1]) != ends or (behind and not _same(behind, lines)):
        raise UnknownShapeError(f"`{ends}` for where there is nothing to reduce, and nothing behind `{FUSED}`'s result")
    parts = _Parts(module)
    parts.after(block, anchor, lines)
    return parts.done()


_LEGACY_ENSURE = """\
if not is_flashinfer_available() or _flashinfer_comm is None:
    return False
world_size = get_tensor_model_parallel_world_size()
if world_size <= 1:
    return False
rank = dist.get_rank()
if not _workspace_manager.initialized or _workspace_manager.world_size != world_size:
    MAKE(world_size=world_size, rank=rank, max_token_num=max_token_num, hidden_dim=hidden_dim, use_fp32_lamport=use_fp32_lamport)
return _workspace_manager.initialized"""
_LEGACY = text.AGREED.replace("{imports}", text.IMPORTS).replace("{state}", text.STATE) + text.WORLD_SIZES + text.BY_ALL
_UNIFIED = text.AGREED.replace("{imports}", "").replace("{state}", "") + text.GROUP_SIZES
_TOKENS = "assert input_tensor.shape[0] <= max_token_num"


def _workspace(module: Module) -> list[Edit]:
    body = module.tree.body
    ensure, fused = function(body, ENSURE), function(body, FUSED)
    parts = _Parts(module)
    if any(node for node in ast.walk(ensure) if ast.unparse(node) == "_get_workspace_manager(use_attn_tp_group)"):
        _unified_shape(module, ensure)
        block, guard = _UNIFIED, text.ENSURE
        anchor = _the_one(ensure.body, "token_num = token_num or max_token_num")
        prepare = function(body, PREPARE)
        first = _the_one(prepare.body, "if _flashinfer_allreduce_unavailable or _flashinfer_comm is None:\n    return")
        parts.before(prepare.body, first, text.PREPARE)
    else:
        block, guard = _LEGACY, text.ENSURE_BY_ALL
        make = _legacy_make(module, ensure)
        parts.replace(make, "_workspace_manager.initialize", "_initialize_by_all")
        anchor = _the_one(ensure.body, _LEGACY_ENSURE.split("\nworld_size")[0])
    parts.before(body, ensure, block.rstrip("\n") + "\n\n")
    parts.before(ensure.body, anchor, guard)
    parts.before(fused.body, _the_one(fused.body, _TOKENS), text.TAKES)
    return parts.done()


def _legacy_make(module: Module, ensure: ast.FunctionDef) -> ast.expr:
    """What makes the workspace in releases before flashinfer's unified API, where nothing guards it."""
    makes = [
        node.func
        for node in ast.walk(ensure)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("_workspace_manager.initialize", "_initialize_by_all")
    ]
    rest = "\n".join(ast.unparse(node) for node in ensure.body if not isinstance(node, ast.Expr))
    own = ast.unparse(ast.parse(text.ENSURE_BY_ALL)) + "\n"
    wanted = {_LEGACY_ENSURE.replace("MAKE", "_workspace_manager.initialize")}
    wanted.add(own + _LEGACY_ENSURE.replace("MAKE", "_initialize_by_all"))
    creates = ast.unparse(function(klass(module, "FlashInferWorkspaceManager").body, "initialize"))
    if len(makes) != 1 or rest not in wanted or "trtllm_create_ipc_workspace_for_all_reduce_fusion" not in creates:
        raise UnknownShapeError(
            f"`{ENSURE}` that makes the workspace for all ranks of the world, or for a group with a vote"
        )
    if "group=group" not in creates:
        raise UnknownShapeError("`FlashInferWorkspaceManager.initialize` that hands on its `group`")
    return makes[0]


def _unified_shape(module: Module, ensure: ast.FunctionDef) -> None:
    """What a release with flashinfer's unified API has to have by itself. Raises `UnknownShapeError`."""
    if sum(1 for node in ast.walk(ensure) if ast.unparse(node) == "_sync_allreduce_unavailable_across_tp()") != 2:
        raise UnknownShapeError(f"a vote of the ranks, `_sync_allreduce_unavailable_across_tp()`, in `{ENSURE}`")
    initialize = function(klass(module, "FlashInferWorkspaceManager").body, "initialize")
    makes = ast.unparse(initialize)
    grouped = [
        node
        for node in ast.walk(initialize)
        if ast.unparse(node) in ("kwargs['group'] = device_group", "create_kw['group'] = device_group")
        or (isinstance(node, ast.keyword) and node.arg == "group" and ast.unparse(node.value) == "device_group")
    ]
    if len(grouped) != 1:
        raise UnknownShapeError(
            "a workspace that is made for its `group`: without, the release is for a flashinfer before 0.6.10, whose "
            "workspace asks for multicast (F6), which SM120 does not have over PCIe"
        )
    if "if not _preflight_check_workspace_memory(" not in makes or "except Exception" not in makes:
        raise UnknownShapeError("a workspace that is tried for before it is made, and whose failure is caught")
    find(module.tree.body, ast.Assign, "_flashinfer_allreduce_unavailable")


_SM90 = ("is_sm90_supported() or is_sm100_supported()", "get_platform().is_sm90 or get_platform().is_sm100")


def _backend(module: Module) -> list[Edit]:
    if not any(_functions(module.tree, RESOLVE)):
        return []
    owner = function(module.tree.body, RESOLVE)
    tests = [node.test for node in owner.body if isinstance(node, ast.If) and isinstance(node.test, ast.UnaryOp)]
    if not tests or not isinstance(tests[0].operand, ast.BoolOp):
        raise UnknownShapeError(f"`if not ({_SM90[0]})` in `{RESOLVE}`")
    written = ast.unparse(tests[0].operand)
    known = next((item for item in _SM90 if written in (item, f"{item} or sm120_asked()")), _SM90[0])
    parts = _Parts(module)
    parts.replace(tests[0].operand, known, f"{known} or sm120_asked()")
    return parts.done()


def _multicast(module: Module) -> list[Edit]:
    if not any(_functions(module.tree, PREFLIGHT)):
        return []
    owner = function(module.tree.body, PREFLIGHT)
    loops = [
        node for node in owner.body if isinstance(node, ast.For) and "cuMulticastGetGranularity" in ast.unparse(node)
    ]
    sizes = "allocation_size = ceil_align(buffer_size + signal_pad_size, alloc_granularity)"
    if len(loops) != 1:
        raise UnknownShapeError(f"one loop in `{PREFLIGHT}` that asks `cuMulticastGetGranularity`")
    _the_one(loops[0].body, sizes)
    anchor = _the_one(loops[0].body, "mc_prop = cuda_driver.CUmulticastObjectProp()")
    parts = _Parts(module)
    parts.before(loops[0].body, anchor, text.NO_MULTICAST)
    return parts.done()


def _pdl(module: Module) -> list[Edit]:
    values = [
        keyword.value
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "launch_with_pdl"
    ]
    if not values:
        raise UnknownShapeError("`launch_with_pdl=True`")
    parts = _Parts(module)
    for value in values:
        parts.replace(value, "True", "_launch_with_pdl()")
    parts.before(module.tree.body, function(module.tree.body, FUSED), text.PDL.rstrip("\n") + "\n\n")
    return parts.done()


_BUFFER_SHAPES = (
    "[buffer_size, flag_size, lamport_buffer_size]",
    "[(buffer_size, torch.float32), (flag_size, torch.int32), (lamport_buffer_size, lamport_buffer_dtype)]",
)


def _flags(module: Module) -> list[Edit]:
    owner = function(module.tree.body, BUFFERS)
    loops = [node for node in owner.body if isinstance(node, ast.For) and ast.unparse(node.iter) in _BUFFER_SHAPES]
    if len(loops) != 1:
        raise UnknownShapeError(f"one loop over {' or '.join(f'`{item}`' for item in _BUFFER_SHAPES)}")
    zeroed = ast.unparse(ast.parse(text.ZEROED))
    written = [ast.unparse(node) for node in owner.body]
    if f"if use_symm_dev_mem:\n    {zeroed}" in written:
        return []
    if "flag_size = tp_size * BarrierFlagCount * 4" not in written or "ipc_handles.append(" not in ast.unparse(
        loops[0]
    ):
        raise UnknownShapeError("`flag_size = tp_size * BarrierFlagCount * 4`, and `ipc_handles` filled by the loop")
    parts = _Parts(module)
    parts.after(owner.body, loops[0], text.ZEROED)
    return parts.done()


_OPT_IN = (
    "on SM120 off without `SGLANG_STACK_SM120_FUSION=1` and `--enable-flashinfer-allreduce-fusion`; as before elsewhere"
)

SITES: tuple[Site, ...] = (
    Site(
        id="S5",
        set="sm120-fusion",
        package="sglang",
        file=_LAYERS,
        marker="FUSE_ALLREDUCE_MAX_BATCH_SIZE =",
        trace="allreduce_fusion",
        what="the gate to flashinfer's fused all-reduce, by compute capability",
        consequence=f"{_OPT_IN}; at most `SGLANG_STACK_SM120_FUSION_MAX_TOKENS` tokens (16)",
        source=f"{_NOTES}, S5",
        places=("import", "_is_sm120_asked", "_sm120_fusion", *GATES),
        plan=_gate,
        context=_asked_by_both,
    ),
    Site(
        id="S7",
        set="sm120-fusion",
        package="sglang",
        file=f"{_LAYERS}layernorm.py",
        marker=f"def {NORM}",
        what="a fused all-reduce and norm that returns nothing, after the all-reduce was put off",
        consequence="an all-reduce and the plain norm, on every device; the norm alone, of partial sums, was wrong",
        source=f"{_NOTES}, S7",
        places=(f"_{NORM}", f"RMSNorm.{NORM}"),
        plan=_fallback,
    ),
    Site(
        id="S8",
        set="sm120-fusion",
        package="sglang",
        file=_FUSION_FILE,
        marker=f"def {ENSURE}",
        what="the workspace of the fused all-reduce, which some ranks may fail to make",
        consequence="every rank has it or none; on SM120 it is asked for, voted on and sized by the token limit, elsewhere "
        "a failure switches the fusion off instead of ending or stopping the server",
        source=f"{_NOTES}, S8",
        places=("import", *_named(_LEGACY), ENSURE, FUSED, PREPARE),
        plan=_workspace,
    ),
    Site(
        id="S8b",
        set="sm120-fusion",
        package="sglang",
        file=_FUSION_FILE,
        marker=f"def {ENSURE}",
        what="the backend of the fused all-reduce, refused off SM90 and SM10x; nothing to do in releases without it",
        consequence=f"`auto` is `trtllm` on SM120; {_OPT_IN}",
        source=f"{_NOTES}, section B, S8b",
        places=(RESOLVE,),
        plan=_backend,
    ),
    Site(
        id="S8c",
        set="sm120-fusion",
        package="sglang",
        file=_FUSION_FILE,
        marker=f"def {ENSURE}",
        what="a trial allocation that asks for multicast; nothing to do in releases without it",
        consequence=f"not asked on SM120; {_OPT_IN}",
        source=f"{_NOTES}, section B, S8c",
        places=(PREFLIGHT,),
        plan=_multicast,
    ),
    Site(
        id="S9",
        set="sm120-fusion",
        package="sglang",
        file=_FUSION_FILE,
        marker=f"def {ENSURE}",
        what="programmatic dependent launch of the fused all-reduce",
        consequence="off on SM120 without `SGLANG_STACK_SM120_FUSION_PDL=1`; as before elsewhere",
        source=f"{_NOTES}, S9",
        places=("_launch_with_pdl", FUSED, "flashinfer_allreduce"),
        plan=_pdl,
    ),
    Site(
        id="F5",
        set="sm120-fusion",
        package="flashinfer-python",
        file="flashinfer/comm/trtllm_ar.py",
        marker=f"def {BUFFERS}",
        what="the buffer with the flags by which ranks wait for each other, which may hold anything",
        consequence="it is zero before it is used, on every device",
        source=f"{_NOTES}, F5",
        places=(BUFFERS,),
        plan=_flags,
    ),
)
