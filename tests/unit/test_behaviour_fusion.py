"""`behaviour` of the fused all-reduce on SM120, on a stack of stand-ins of both kinds of releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.matrix import Patches, Sm120
from builder.smoke.post_capture import MODELS
from tests import fusion_made
from tests import patch_made as made
from tests.eagle_made import MODEL_OLD
from tests.unit.behaviour_made import behaviour, edited, stack
from tests.unit.smoke_made import Site, finished

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

ASKED = Patches(sm120=Sm120(allreduce_fusion="opt-in"))
FLASHINFER = {
    "flashinfer/comm/__init__.py": "",
    "flashinfer/comm/cuda_ipc.py": "create_shared_buffer = cudart = None\n",
    fusion_made.TRTLLM: fusion_made.OLD_FLAGS,
}
GLM = "sglang/srt/models/glm4_moe.py"
# As upstream's is called.
MODEL = fusion_made.swapped(
    MODEL_OLD["E5"],
    "    def forward(self, hidden_states, residual=None):\n",
    "    def forward(self, input_ids, positions, forward_batch, input_embeds=None):\n"
    "        hidden_states, residual = input_embeds, None\n",
)
MODEL = fusion_made.swapped(MODEL, "layer(hidden_states, residual)", "layer(positions, hidden_states, batch, residual)")
MODEL = fusion_made.swapped(MODEL, "            with self.ctx:", "            for batch in [forward_batch]:")


@pytest.fixture(params=["legacy", "unified"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def site(folder: Path, kind: str) -> Site:
    files = {file: text for file, text in fusion_made.OLD[kind].items() if file != fusion_made.TRTLLM}
    files |= {made.DEEPSEEK: MODEL, GLM: MODEL.replace("DeepseekV2Model", MODELS["E5b"])}
    return stack(folder, patches=ASKED, sglang=files, flashinfer=FLASHINFER)


def test_what_is_opted_into_does_what_it_is_for(tmp_path: Path, kind: str) -> None:
    check = finished(behaviour(site(tmp_path, kind)), "behaviour")
    assert (check.ok, check.findings, check.looked_at) == (True, (), 9)
    assert " S5 S7 S8 S8b S9 E5 E5b" in f"{check.detail} "


def test_a_gate_that_is_open_without_being_asked(tmp_path: Path, kind: str) -> None:
    found = edited(
        site(tmp_path, kind),
        fusion_made.COMMUNICATOR,
        '    and os.environ.get("SGLANG_STACK_SM120_FUSION") == "1"',
        "    and True",
    )
    assert "the gate on 12.0 for 1 tokens, not asked for: True" in found


def test_a_gate_without_a_limit(tmp_path: Path, kind: str) -> None:
    found = edited(
        site(tmp_path, kind),
        fusion_made.COMMUNICATOR,
        "    return fusion.sm120_open() and batch_size <= fusion.sm120_max_tokens()",
        "    return fusion.sm120_open()",
    )
    assert found == ["the gate on 12.0 for 17 tokens, asked for: True"]


def test_a_norm_of_partial_sums(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "legacy"),
        fusion_made.NORM,
        "                return self.forward(tensor_model_parallel_all_reduce(x), residual, None)",
        "                return self.forward(x, residual, None)",
    )
    assert found == ["the norm where the fused all-reduce did not run: of partial sums"]


def test_a_norm_of_partial_sums_of_experts(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "unified"),
        fusion_made.NORM,
        "                x = moe_tensor_model_parallel_all_reduce(moe_expert_parallel_all_reduce(x))",
        "                pass",
    )
    assert found == ["the norm where the fused all-reduce did not run, of experts: of partial sums"]


def test_a_rank_that_opens_it_alone(tmp_path: Path, kind: str) -> None:
    found = edited(
        site(tmp_path, kind),
        fusion_made.FUSION,
        "        why = _sm120_alike() or _any_of(_sm120_peers(_gather(_place())))",
        "        why = _sm120_alike() or _sm120_peers(_gather(_place()))",
    )
    assert found == ["whether a rank opens it while another has no P2P: True"]


def test_a_workspace_that_another_rank_lacks(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "legacy"),
        fusion_made.FUSION,
        "        why = _any_of(_attempt(_compile)) or _any_of(_attempt(lambda: _create(sizes)))",
        "        why = _attempt(_compile) or _attempt(lambda: _create(sizes))",
    )
    assert found == ["a workspace that another rank cannot make: True, then True"]


def test_a_backend_that_nobody_asked_for(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "unified"),
        fusion_made.FUSION,
        "    if not (is_sm90_supported() or is_sm100_supported() or sm120_asked()):",
        "    if False:",
    )
    assert found == ["the backend on 12.0, not asked for: trtllm"]


def test_an_early_start_on_sm120(tmp_path: Path, kind: str) -> None:
    found = edited(
        site(tmp_path, kind), fusion_made.FUSION, "    if torch.cuda.get_device_capability()[0] != 12:", "    if True:"
    )
    assert found == ["programmatic dependent launch on 12.0: True"]


def test_a_capture_of_partial_sums(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "legacy"),
        made.DEEPSEEK,
        '                    if getattr(hidden_states, "_sglang_needs_allreduce_fusion", False):',
        "                    if False:",
    )
    assert found == [
        "what DeepseekV2Model hands to the draft behind a layer that put its all-reduce off: 101, the layer is given 1"
    ]


def test_a_capture_that_reduces_the_stream_itself(tmp_path: Path) -> None:
    found = edited(
        site(tmp_path, "legacy"),
        made.DEEPSEEK,
        "                        reduced = tensor_model_parallel_all_reduce(hidden_states.clone())",
        "                        reduced = tensor_model_parallel_all_reduce(hidden_states)",
    )
    assert found == [
        "what DeepseekV2Model hands to the draft behind a layer that put its all-reduce off: 110, the layer is given 10"
    ]


def test_a_capture_that_upstream_made_right_by_itself_has_no_case(tmp_path: Path) -> None:
    ready = site(tmp_path, "legacy")
    for row in ready.spec_data["patches"][0]["sites"]:
        row["before"] = "native" if row["id"] == "E5" else row["before"]
    check = finished(behaviour(ready), "behaviour")
    assert (check.looked_at, check.detail.endswith("; no case for S8c E5 F5")) == (8, True)
