"""The set `sm120-fusion`: the shapes of its sites, and what their post-conditions see."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.patches import look
from builder.patches.engine import Site, State
from builder.patches.fusion import SITES as ALL
from builder.wheel import Wheel, read_wheel
from tests.fusion_made import (
    COMMUNICATOR,
    FUSION,
    LEGACY,
    NEEDED,
    NORM,
    OLD,
    OLD_FLAGS,
    SITES,
    UNIFIED,
    file_of,
    old,
    patched,
    swapped,
)
from tests.patch_made import make_wheel

# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "site"), NEEDED)
def test_the_old_shape_is_needed_and_ours_is_native(kind: str, site: str) -> None:
    before = old(kind, site)
    assert SITES[site].look(before) == (State.NEEDED, "")
    assert SITES[site].verify(before) != ""
    after = SITES[site].apply(before)
    assert after != before
    assert SITES[site].look(after) == (State.NATIVE, "")
    assert SITES[site].verify(after) == ""
    assert SITES[site].apply(after) == after


@pytest.mark.parametrize(("kind", "site"), NEEDED)
def test_line_ends_and_what_is_not_ascii_are_kept(kind: str, site: str) -> None:
    before = "# ä\n" + old(kind, site)
    assert SITES[site].apply(before.replace("\n", "\r\n")) == SITES[site].apply(before).replace("\n", "\r\n")


@pytest.mark.parametrize("kind", OLD)
def test_every_line_that_is_put_in_is_behind_a_comment_that_names_its_site(kind: str) -> None:
    for site in ALL:
        if (kind, site.id) in NEEDED and site.id != "S8b":
            assert f"# sglang-stack {site.id}: " in site.apply(old(kind, site.id))


@pytest.mark.parametrize("site", ["S8b", "S8c"])
def test_a_release_without_the_thing_needs_nothing(site: str) -> None:
    assert SITES[site].look(LEGACY[FUSION]) == (State.NATIVE, "")
    assert SITES[site].verify(LEGACY[FUSION]) == ""


NATIVE = {
    # sglang 0.5.23
    "S7": swapped(
        UNIFIED[NORM],
        "                return fused_result\n",
        "                return fused_result\n"
        "            if use_attn_tp_group:\n                x = attention_tensor_model_parallel_all_reduce(x)\n"
        "            else:\n                x = deferred_post_experts_all_reduce(x)\n"
        "            if post_residual_addition is None:\n                residual = residual.clone()\n"
        "            return norm_module.forward(x, residual, None)\n",
    ),
    # flashinfer 0.6.18
    "F5": swapped(
        OLD_FLAGS,
        "    trtllm_lamport_initialize(",
        "    if use_symm_dev_mem:\n        cudart.cudaMemset(c_void_p(ipc_handles[1][tp_rank]), 0, flag_size)\n"
        "    trtllm_lamport_initialize(",
    ),
}


@pytest.mark.parametrize("site", NATIVE)
def test_upstreams_own_remedy_is_native(site: str) -> None:
    assert SITES[site].look(NATIVE[site]) == (State.NATIVE, "")
    assert SITES[site].verify(NATIVE[site]) == ""


UNKNOWN: list[tuple[str, str, str, str, str]] = [
    (
        # sglang 0.5.6.post2 and 0.5.7
        "legacy",
        "S5",
        "apply_flashinfer_allreduce_fusion",
        "something",
        (
            "`apply_flashinfer_allreduce_fusion`, one gate for producer and consumer: here the producer puts the all-reduce off "
            "by the flag alone, on any device"
        ),
    ),
    (
        "legacy",
        "S5",
        "        return apply_flashinfer_allreduce_fusion(batch_size) and",
        "        return enabled and",
        "`should_fuse_mlp_allreduce_with_next_layer` that asks `apply_flashinfer_allreduce_fusion`",
    ),
    (
        "legacy",
        "S5",
        "        and batch_size > 0\n",
        "",
        (
            "`apply_flashinfer_allreduce_fusion` with sglang's flag, `_is_flashinfer_available`, `batch_size <= "
            "FUSE_ALLREDUCE_MAX_BATCH_SIZE`, `batch_size > 0`, `not is_dp_attention_enabled()`"
        ),
    ),
    (
        "legacy",
        "S5",
        "(_is_sm90_supported or _is_sm100_supported)",
        "(_is_sm90_supported or _is_sm100_supported or _is_sm120_supported)",
        "`_is_sm90_supported or _is_sm100_supported`",
    ),
    (
        "legacy",
        "S7",
        "                    return fused_result\n",
        "                    return fused_result\n                x = reduce(x)\n",
        (
            "`return self.forward(x, residual, post_residual_addition)` for where there is nothing to reduce, and nothing behind "
            "`flashinfer_allreduce_residual_rmsnorm`'s result"
        ),
    ),
    (
        "legacy",
        "S8",
        "    if world_size <= 1:\n        return False\n\n    rank",
        "    rank",
        "`ensure_workspace_initialized` that makes the workspace for all ranks of the world, or for a group with a vote",
    ),
    (
        "legacy",
        "S8",
        "                group=group,\n",
        "",
        "`FlashInferWorkspaceManager.initialize` that hands on its `group`",
    ),
    (
        # sglang 0.5.11
        "unified",
        "S8",
        '            create_kw["group"] = device_group\n',
        "",
        (
            "a workspace that is made for its `group`: without, the release is for a flashinfer before 0.6.10, whose workspace "
            "asks for multicast (F6), which SM120 does not have over PCIe"
        ),
    ),
    (
        "unified",
        "S8",
        "        _sync_allreduce_unavailable_across_tp()\n",
        "",
        "a vote of the ranks, `_sync_allreduce_unavailable_across_tp()`, in `ensure_workspace_initialized`",
    ),
    (
        "unified",
        "S8b",
        "not (is_sm90_supported() or is_sm100_supported())",
        "not (is_sm90_supported() or is_sm100_supported() or is_sm120_supported())",
        "`is_sm90_supported() or is_sm100_supported()`",
    ),
    (
        "unified",
        "S8c",
        "cuMulticastGetGranularity",
        "granularity",
        "one loop in `_flashinfer_trtllm_workspace_allocation_sizes` that asks `cuMulticastGetGranularity`",
    ),
    ("legacy", "S9", "launch_with_pdl=True", "launch_with_pdl=pdl", "`True`"),
    (
        "legacy",
        "F5",
        "    flag_size = tp_size * BarrierFlagCount * 4\n",
        "    flag_size = count()\n",
        "`flag_size = tp_size * BarrierFlagCount * 4`, and `ipc_handles` filled by the loop",
    ),
]


@pytest.mark.parametrize(("kind", "site", "before", "after", "looked_for"), UNKNOWN)
def test_another_shape_is_unknown(kind: str, site: str, before: str, after: str, looked_for: str) -> None:
    assert SITES[site].look(swapped(old(kind, site), before, after)) == (State.UNKNOWN, looked_for)


@pytest.mark.parametrize(
    ("kind", "site", "before", "after"),
    [
        ("legacy", "S5", " or _sm120_fusion(batch_size))", ")"),
        ("legacy", "S5", "fusion.sm120_open() and", "True and"),
        ("legacy", "S8", "        _initialize_by_all(", "        _workspace_manager.initialize("),
        ("unified", "S8", "        if not sm120_open():\n            return False\n", ""),
        ("legacy", "S8", "    if sm120_asked() and not sm120_takes(input_tensor):\n        return None, None\n", ""),
    ],
)  # fmt: skip
def test_a_site_of_which_a_part_is_missing_is_unknown(kind: str, site: str, before: str, after: str) -> None:
    text = swapped(patched(kind)[file_of(site)], before, after)
    assert SITES[site].probe(text) is State.UNKNOWN
    assert SITES[site].verify(text) != ""


MOVED = (
    LEGACY[COMMUNICATOR]
    .split("\n\n\nclass ")[0]
    .replace("apply_flashinfer_allreduce_fusion", "flashinfer_ar_fusion_applies")
)
USERS = {
    "exit.py": "def _batch_allows_deferred_sum(batch):\n    return flashinfer_ar_fusion_applies(batch)\n",
    "fusions/allreduce.py": (
        "def fused_attn_input(x):\n    return flashinfer_ar_fusion_applies(x)\n\n\n"
        "def fused_ffn_input(x):\n    return flashinfer_ar_fusion_applies(x)\n"
    ),
}


def test_a_gate_that_moved_is_found_where_it_is(tmp_path: Path) -> None:
    # sglang 0.5.23
    folder = "sglang/srt/layers/layer_boundary"
    gate = f"{folder}/residual/add_norm.py"
    files = {gate: MOVED, **{f"{folder}/{name}": text for name, text in USERS.items()}}
    (found,) = (item for item in look(_wheel(tmp_path / "a", files), ["sm120-fusion"]) if item.site.id == "S5")
    assert (found.file, found.before) == (gate, State.NEEDED)
    assert SITES["S5"].verify(SITES["S5"].apply(MOVED)) == ""
    wrong = f"{folder}/fusions/allreduce.py"
    files[wrong] = files[wrong].replace("def fused_ffn_input(x):\n    return flashinfer_ar_fusion_applies(x)", "")
    (found,) = (item for item in look(_wheel(tmp_path / "b", files), ["sm120-fusion"]) if item.site.id == "S5")
    assert found.before is State.UNKNOWN
    assert found.looked_for == f"`fused_ffn_input` that asks `flashinfer_ar_fusion_applies`, in {wrong}"


def _wheel(folder: Path, files: dict[str, str]) -> Wheel:
    return read_wheel(make_wheel(folder, "sglang", "0.5.23", files))


# --- post-conditions --------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, str, str, str]] = [
    ("legacy", "S5", "== 12\n", "== 13\n", "`_is_sm120_asked` is ['_is_cuda', \"os.environ.get('SGLANG_STACK_SM120_FUSION') == '1'\", 'torch.cuda.get_device_capability()[0] == 13']"),
    ("legacy", "S5", "\n\n\nclass Layer", "\n\n\n_is_sm120_asked = True\n\n\nclass Layer", "`_is_sm120_asked` is given a value 2 times, not once"),
    ("legacy", "S5", "\n\n\nclass Layer", "\n\n\ndef _sm120_fusion(n):\n    return True\n\n\nclass Layer", "`_sm120_fusion` is there 2 times, not once"),
    ("legacy", "S5", "    if is_dp_attention_enabled():\n", "    if False:\n", "`_sm120_fusion` does not ask for data parallel attention"),
    ("legacy", "S5", "or torch.compiler.is_compiling()", "or False", "`_sm120_fusion` does not start with what was asked"),
    ("legacy", "S5", "fusion.sm120_open() and", "True and", "`_sm120_fusion` is open by something else"),
    ("legacy", "S5", "        and batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE\n", "", "`apply_flashinfer_allreduce_fusion` does not ask `batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE`"),
    ("legacy", "S5", "batch_size: int):\n    return (", "batch_size: int):\n    return True\n    return (", "`apply_flashinfer_allreduce_fusion` returns in several places"),
    ("legacy", "S7", "tensor_model_parallel_all_reduce(x), residual", "x, residual", "the plain norm is not of one all-reduce"),
    ("legacy", "S7", "                return self.forward(tensor", "                x = tensor_model_parallel_all_reduce(x)\n                return self.forward(tensor", "the plain norm is not of one all-reduce"),
    ("legacy", "S7", "residual, None)", "residual, post_residual_addition)", "the plain norm gets ['residual', 'post_residual_addition'], not ['residual', 'None']"),
    ("unified", "S7", "                x = attention_tensor_model_parallel_all_reduce(x)", "                pass", "what was put off is reduced by [[], ['moe_expert_parallel_all_reduce', 'moe_tensor_model_parallel_all_reduce']]"),
    ("unified", "S7", "                x = attention_", "                y = attention_", "the reduced tensor is lost"),
    ("unified", "S7", "moe_tensor_model_parallel_all_reduce(moe_expert_parallel_all_reduce(x))", "moe_tensor_model_parallel_all_reduce(x)", "what was put off is reduced by [['attention_tensor_model_parallel_all_reduce'], ['moe_tensor_model_parallel_all_reduce']]"),
    ("legacy", "S8", 'SM120_FUSION") == "1"', 'SM120_FUSION") != "0"', "`sm120_asked` is [\"os.environ.get('SGLANG_STACK_SM120_FUSION') != '0'\", 'torch.cuda.is_available()', 'torch.cuda.get_device_capability()[0] == 12']"),
    ("legacy", "S8", "(2, 4, 8)", "(2, 4, 6, 8)", "`if world not in (2, 4, 8): return …` in `_sm120_alike` is there 0 times, not once"),
    ("legacy", "S8", 'return f"GPU {mine} has no', 'return "" and f"GPU {mine} has no', "`_sm120_peers` goes on although `not torch.cuda.can_device_access_peer(mine, other)`"),
    ("legacy", "S8", "_any_of(_sm120_peers(_gather(_place())))", "_sm120_peers(_gather(_place()))", "`sm120_open` has `why = _sm120_alike() or _any_of(_sm120_peers(_gather(_place())))` 0 times, not once"),
    ("legacy", "S8", "min(max_token_num, sm120_max_tokens())", "max_token_num", "`if sm120_asked()` in `ensure_workspace_initialized` does ['if not sm120_open():\\n    return False', 'max_token_num = max_token_num']"),
    ("legacy", "S8", "        _initialize_by_all(", "        _workspace_manager.initialize(", "`ensure_workspace_initialized` makes no workspace"),
    ("legacy", "S8", "        _flashinfer_allreduce_unavailable = True\n", "", "`_initialize_by_all` has `_flashinfer_allreduce_unavailable = True` 0 times, not once"),
    ("legacy", "S8", ", timeout=datetime.timedelta(seconds=60)", "", "the group that makes the workspace waits for ever"),
    ("legacy", "S8", "    except Exception as error:\n        return f\"{type", "    except ValueError as error:\n        return f\"{type", "`_attempt` does not catch what fails"),
    ("legacy", "S8", "    if _flashinfer_allreduce_unavailable:\n        return False\n", "", "`ensure_workspace_initialized` tries again after a failure"),
    ("legacy", "S8", "not sm120_takes(input_tensor)", "not sm120_open()", "`if sm120_asked() and not sm120_takes(input_tensor)` in `flashinfer_allreduce_residual_rmsnorm` is there 0 times, not once"),
    ("legacy", "S8", "_workspace_manager = Flash", "_sm120_is_open = True\n_workspace_manager = Flash", "`_sm120_is_open` is given a value 3 times, not twice"),
    ("unified", "S8", "        _sync_allreduce_unavailable_across_tp()\n", "", "a vote of the ranks is there 0 times, not once"),
    ("unified", "S8", "    if sm120_asked() and not sm120_open():\n        return\n", "", "`if sm120_asked() and not sm120_open()` in `pre_initialize_workspaces` is there 0 times, not once"),
    ("legacy", "S7", "                fused_result = ", "                x = tensor_model_parallel_all_reduce(x)\n                fused_result = ", "what is to be fused is reduced before"),
    ("legacy", "S8", "    global _sm120_is_open\n", "    global _sm120_is_open\n    return True\n", "`sm120_open` returns in 2 places, not 1"),
    ("legacy", "S8", "    if world not in", "    world = 2\n    if world not in", "`world` of `_sm120_alike` is given a value several times"),
    ("unified", "S8b", " or sm120_asked())", " or True)", "`_resolve_backend` takes ['is_sm90_supported()', 'is_sm100_supported()', 'True']"),
    ("unified", "S8c", "            continue\n", "", "on SM120 it does ['allocation_sizes.append(allocation_size)']"),
    ("legacy", "S9", "launch_with_pdl=_launch_with_pdl()", "launch_with_pdl=True", "the kernel is launched with ['True']"),
    ("legacy", "S9", '_PDL") == "1"', '_PDL") != "0"', "`_launch_with_pdl` is ['import os', 'if torch.cuda.get_device_capability()[0] != 12:\\n    return True', \"return os.environ.get('SGLANG_STACK_SM120_FUSION_PDL') != '0'\"]"),
    ("legacy", "F5", "ipc_handles[1]", "ipc_handles[0]", "`cudart.cudaMemset(c_void_p(ipc_handles[1][tp_rank]), 0, flag_size)` is there 0 times, not once"),
    ("legacy", "F5", "    # sglang-stack F5", "    trtllm_lamport_initialize(0)\n    # sglang-stack F5", "the flags are zeroed before they are there, or too late"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "site", "before", "after", "wrong"), WRONG)
def test_a_post_condition_sees_what_is_wrong(kind: str, site: str, before: str, after: str, wrong: str) -> None:
    text = patched(kind)[file_of(site)]
    assert SITES[site].verify(text) == ""
    assert SITES[site].verify(swapped(text, before, after)) == wrong


def test_the_flags_of_another_function_are_not_enough() -> None:
    # The function before it has the same loop.
    (line,) = [item for item in SITES["F5"].apply(OLD_FLAGS).split("\n") if "cudaMemset" in item]
    wrong = OLD_FLAGS.replace("    return ipc_handles\n", f"{line}\n    return ipc_handles\n", 1)
    assert SITES["F5"].verify(wrong) != ""
    assert SITES["F5"].probe(wrong) is State.NEEDED


def test_a_helper_that_is_nested_elsewhere_is_not_enough() -> None:
    text = patched("legacy")[FUSION]
    assert (
        SITES["S8"].verify(swapped(text, "def sm120_open()", "def f():\n    def sm120_open(): pass\ndef _sm120()"))
        != ""
    )


def test_the_names_that_a_site_puts_in_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sm120_takes", "_any_of", "_initialize_by_all"):
        text = patched("legacy")[FUSION] + f"\n\ndef outer():\n    global {name}\n    {name} = None\n"
        assert SITES["S8"].verify(text) == f"`{name}` is given a value 2 times, not once"


def test_sites_say_what_they_are_for() -> None:
    assert [site.id for site in ALL] == ["S5", "S7", "S8", "S8b", "S8c", "S9", "F5"]
    for site in ALL:
        assert isinstance(site, Site)
        assert site.set == "sm120-fusion"
        assert site.what and site.consequence and site.source.startswith("shared/facts/patches.md section A")


def test_a_gate_under_another_name_is_unknown_and_not_absent(tmp_path: Path) -> None:
    renamed = "FUSED_MOST = 2048\n\n\ndef allreduce_fusion_fits(batch_size):\n    return batch_size <= FUSED_MOST\n"
    source = _wheel(tmp_path, {"sglang/srt/layers/elsewhere.py": renamed})
    (found,) = [item for item in look(source, ["sm120-fusion"]) if item.site.id == "S5"]
    assert found.before is State.UNKNOWN
    assert found.looked_for == (
        "`FUSE_ALLREDUCE_MAX_BATCH_SIZE =` in `sglang/srt/layers/`; "
        "`allreduce_fusion` is in `sglang/srt/layers/elsewhere.py`"
    )
