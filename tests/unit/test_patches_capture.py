"""E5: which captures it knows, what it makes of them, and what the draft gets from layers that put their all-reduce off."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from builder.patches import capture
from builder.patches.apply import look
from builder.patches.engine import State
from builder.smoke.post_capture import FLAG, MODELS
from builder.wheel import read_wheel
from tests.eagle_made import (
    BARE,
    BEHIND,
    GATHERED,
    HELPED,
    IF_ANY,
    IF_LATER,
    INHERITED,
    MODEL_OLD,
    QWEN3,
    Layers,
    model_source,
)
from tests.patch_made import sglang_wheel

SITES = {site.id: site for site in capture.SITES}
SHAPES = {
    "bare": BARE,
    "if any": IF_ANY,
    "if later": IF_LATER,
    "gathered": GATHERED,
    "gathered by the group": GATHERED.replace(
        "tensor_model_parallel_all_gather", "get_attention_tp_group().all_gather"
    ),
}


def swapped(text: str, before: str, after: str) -> str:
    assert before in text
    return text.replace(before, after)


# --- shapes -----------------------------------------------------------------------------------------------------------


# Of a method, and behind a layer: one release had each of these.
OWN = {"E5g": HELPED, "E5h": BEHIND, "E5i": INHERITED}
SOURCES = {(site, shape): model_source(site, SHAPES[shape]) for site in SITES if site not in OWN for shape in SHAPES}
SOURCES |= {(site, "its own"): text for site, text in OWN.items()}


@pytest.mark.parametrize(("site", "shape"), SOURCES)
def test_the_old_shapes_are_needed_and_ours_are_native(site: str, shape: str) -> None:
    before = SOURCES[site, shape]
    assert SITES[site].look(before) == (State.NEEDED, "")
    assert "captures what may be one rank's partial sums" in SITES[site].verify(before)
    after = SITES[site].apply(before)
    assert SITES[site].look(after) == (State.NATIVE, "")
    assert SITES[site].verify(after) == ""
    assert SITES[site].apply(after) == after


def test_line_ends_and_what_is_not_ascii_are_kept() -> None:
    before = MODEL_OLD["E5f"]
    assert SITES["E5f"].apply(before.replace("\n", "\r\n")) == SITES["E5f"].apply(before).replace("\n", "\r\n")


def test_only_lines_of_the_capture_change() -> None:
    before, after = (text.splitlines() for text in (MODEL_OLD["E5"], SITES["E5"].apply(MODEL_OLD["E5"])))
    assert [line.strip() for line in after if line not in before] == [
        "# sglang-stack E5: a layer whose all-reduce is put off leaves one rank's partial",
        "# sums. A clone is reduced: NCCL does it in place, and the stream's turn comes later.",
        "reduced = hidden_states",
        f'if getattr(hidden_states, "{FLAG}", False):',
        "reduced = tensor_model_parallel_all_reduce(hidden_states.clone())",
        "reduced + residual, dim=0",
        "aux_hidden_states.append(reduced + residual)",
    ]
    assert [line.strip() for line in before if line not in after] == [
        "hidden_states + residual, dim=0",
        "aux_hidden_states.append(hidden_states + residual)",
    ]


def handed_on(keyword: str) -> str:
    """The layers capture themselves: upstream, from 0.5.15.post1 on for the first of the models."""
    text = MODEL_OLD["E5"].replace(GATHERED + "\n", "").replace("                if i in self.layers_to_capture:\n", "")
    text = swapped(text, "layer(hidden_states, residual)", f"layer(hidden_states, residual, {keyword})")
    behind = (
        "        hidden_states, residual = self.prepare_attn_and_capture_last_layer_outputs(hidden_states, residual)\n"
    )
    return swapped(text, "        hidden_states = self.mlp", behind + "        hidden_states = self.mlp")


KEYWORD = "captured_last_layer_outputs=aux_hidden_states if i in self.layers_to_capture else None"
NATIVE = {
    "the layers capture": handed_on(KEYWORD),
    "packed": handed_on(KEYWORD).replace(
        "aux_hidden_states = []", "aux_hidden_states = P(len(self.layers_to_capture))"
    ),
    "nothing is captured": handed_on("None"),
    "the base captures": "class DeepseekV2Model:\n    pass\n\n\nclass Glm4MoeLiteModel(DeepseekV2Model):\n    layers = 1\n",
    # 0.5.23: no mark on a tensor; who puts the all-reduce off is asked.
    "snapshots": swapped(
        MODEL_OLD["E5"]
        .replace(GATHERED, BARE)
        .replace(f"            hidden_states.{FLAG} = True\n", "            pass\n"),
        "hidden_states + residual)",
        "residual_batch.snapshot(hidden_states, forward_batch))",
    ),
}


@pytest.mark.parametrize("shape", NATIVE)
def test_upstreams_own_remedy_is_native(shape: str) -> None:
    site = SITES["E5c" if shape == "the base captures" else "E5"]
    assert site.look(NATIVE[shape]) == (State.NATIVE, "")
    assert site.verify(NATIVE[shape]) == ""
    assert site.apply(NATIVE[shape]) == NATIVE[shape]


CAPTURES = "`aux_hidden_states.append(hidden_states + residual)`, or as it is elsewhere, under `if i in self.layers_to_capture`"
MENTIONED = "`self.layers_to_capture` in `Glm4MoeModel.forward` as releases up to 0.5.23 use it"
UNKNOWN = {
    "another sum": ("hidden_states + residual)", "hidden_states + 2 * residual)", CAPTURES),
    "another test": ("if i in self", "if i and i in self", CAPTURES),
    "otherwise": (
        BARE,
        BARE + "\n                else:\n                    pass",
        CAPTURES,
    ),
    "one line": (f":\n{BARE}", f": {BARE.strip()}", CAPTURES),
    "a comprehension": (
        "        aux_hidden_states = []",
        "        aux_hidden_states = [1 for i in self.layers_to_capture]",
        MENTIONED,
    ),
    "a name that is taken": ("        aux_hidden_states = []", "        reduced = aux_hidden_states = []", "no `reduced` in `Glm4MoeModel.forward`"),
    "no mark": (f"hidden_states.{FLAG} = True", "pass", f"`hidden_states.{FLAG} = True`"),
    "another all-reduce": (
        "    tensor_model_parallel_all_reduce,\n",
        "",
        "`from sglang.srt.distributed import tensor_model_parallel_all_reduce`",
    ),
    "another class": ("class Glm4MoeModel:", "class Model:", "one `Glm4MoeModel` (0 found)"),
    "no forward": ("    def forward(self, hidden_states, residual=None):", "    def run(self, hidden_states, residual=None):", "one `forward` (0 found)"),
}  # fmt: skip


@pytest.mark.parametrize("shape", UNKNOWN)
def test_another_shape_is_unknown(shape: str) -> None:
    before, after, looked_for = UNKNOWN[shape]
    assert SITES["E5b"].look(swapped(MODEL_OLD["E5b"], before, after)) == (State.UNKNOWN, looked_for)


def test_one_capture_patched_and_one_not_is_unknown() -> None:
    text = SITES["E5e"].apply(MODEL_OLD["E5e"])
    late = "        if self.end_layer in self.layers_to_capture:\n            aux_hidden_states.append(hidden_states + residual)\n"
    text = swapped(text, "        return hidden_states, aux", f"{late}        return hidden_states, aux")
    assert SITES["E5e"].look(text) == (State.UNKNOWN, "captures of one kind in `LagunaModel.forward`")


def test_a_release_that_lacks_a_model(tmp_path: Path) -> None:
    files = {SITES[site].file: MODEL_OLD[site] for site in ("E5", "E5b")}
    found = look(read_wheel(sglang_wheel(tmp_path, files)), ("sm120-fusion",))
    states = {item.site.id: item.before.value for item in found if item.site.id.startswith("E5")}
    assert states == {
        "E5": "needed",
        "E5b": "needed",
        **dict.fromkeys([site for site in SITES if site not in ("E5", "E5b")], "absent"),
    }


# --- what the patched code does ---------------------------------------------------------------------------------------

# Layer i leaves i + 1 on this rank, and a tenfold when it is reduced; the residual is 1000.


@pytest.mark.parametrize("site", MODELS)
def test_the_draft_gets_reduced_activations(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(SITES[site].apply(MODEL_OLD[site]), MODELS[site], [0, 2], monkeypatch)
    assert layers.run(1, 2, 3) == [1010, 1002, 1030]
    # Exactly one for each captured layer behind one that waits, and none of the stream itself.
    assert len(layers.reduced) == 2
    assert not any(hasattr(tensor, FLAG) for tensor in layers.reduced)
    # Each next layer gets what its predecessor left: as it is, and still marked.
    assert layers.seen == [(1, False), (1, True), (2, False), (3, True)]


@pytest.mark.parametrize("site", MODELS)
def test_without_the_patch_it_gets_partial_sums(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(MODEL_OLD[site], MODELS[site], [0, 2], monkeypatch)
    assert layers.run(1, 2, 3) == [1001, 1002, 1003]


@pytest.mark.parametrize("site", MODELS)
def test_where_nothing_is_put_off_nothing_changes(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in (MODEL_OLD[site], SITES[site].apply(MODEL_OLD[site])):
        layers = Layers(source, MODELS[site], [], monkeypatch)
        assert layers.run(1, 2, 3) == [1001, 1002, 1003]
        assert layers.reduced == []
        assert layers.seen == [(1, False), (1, False), (2, False), (3, False)]


def test_where_nothing_is_captured_nothing_is_reduced(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(SITES["E5"].apply(MODEL_OLD["E5"]), MODELS["E5"], [0, 1, 2], monkeypatch)
    assert layers.run() == []
    assert layers.reduced == []


@pytest.mark.parametrize("site", ["E5", "E5g"])
def test_what_is_gathered_is_reduced_before(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(SITES[site].apply(MODEL_OLD[site]), MODELS[site], [0, 2], monkeypatch)
    layers.model.enable_a2a_moe = True
    # In front of layers 2 and 3 it is gathered: hundredfold here.
    assert layers.run(1, 2, 3) == [1010, 100_200, 103_000]


@pytest.mark.parametrize("site", ["E5e", "E5f", "E5g", "E5i"])
def test_the_first_layer_has_no_residual(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Layers(SITES[site].apply(MODEL_OLD[site]), MODELS[site], [0], monkeypatch)
    assert layers.run(0, 1) == [1, 1010]


# --- the post-condition -----------------------------------------------------------------------------------------------

CLONE = "reduced = tensor_model_parallel_all_reduce(hidden_states.clone())"
LAST = "                    aux_hidden_states.append(reduced + residual)"
WRONG = {
    "in place": (".clone()", "", "line 21 does not reduce a clone, once"),
    "not reduced": (CLONE, "reduced = hidden_states.clone()", "line 21 does not reduce a clone, once"),
    "another mark": (f'"{FLAG}"', '"_needs"', f"line 21 does not ask for `{FLAG}`"),
    "always": (f'getattr(hidden_states, "{FLAG}", False)', "True", f"line 21 does not ask for `{FLAG}`"),
    "the stream": (LAST, LAST.replace("reduced", "hidden_states"), "line 21 captures the stream itself"),
    "undone": (LAST, f"                    reduced = self.stream\n{LAST}", "line 21 captures something else"),
    "another residual": (LAST, f"                    residual = 0\n{LAST}", "line 21 captures something else"),
    "twice": (LAST, LAST.replace("reduced +", "tensor_model_parallel_all_reduce(reduced) +"), "line 21 reduces twice"),
    "nothing": (LAST, "                    reduced + residual", "line 21 captures nothing"),
    "else": (LAST, f"{LAST}\n                else:\n                    pass", "line 21 asks for more than whether a layer is captured"),
    "sometimes": ("if i in self", "if i and i in self", "line 21 asks for more than whether a layer is captured"),
    "late": ("                layer = self", "                aux_hidden_states.append(self.x)\n                layer = self", "line 28 captures outside of `if … in self.layers_to_capture`"),
    "replaced": ("        return hidden_states, aux", "        aux_hidden_states[0] = self.x\n        return hidden_states, aux", "line 30 changes what was captured"),
    "summed": ("        return hidden_states, aux", "        self.x = hidden_states + residual\n        return hidden_states, aux", "line 30 adds up one rank's partial sums"),
    "mark": ("                layer = self", f"                hidden_states.{FLAG} = False\n                layer = self", f"`Glm4MoeModel.forward` changes `{FLAG}`"),
    "another all-reduce": ("\n\nclass DecoderLayer", "\ntensor_model_parallel_all_reduce = None\n\nclass DecoderLayer", "`tensor_model_parallel_all_reduce` is there 2 times, not once"),
    "not sglang's": ("from sglang.srt.distributed", "from sglang.srt.other", "`tensor_model_parallel_all_reduce` is not sglang's"),
    "not Python's": ("\n\nclass DecoderLayer", "\ndef getattr(*_):\n    return False\n\nclass DecoderLayer", "`getattr` is not Python's"),
    "no class": ("class Glm4MoeModel:", "class Model:", "`Glm4MoeModel` is there 0 times, not once"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_a_post_condition_sees_what_is_wrong(change: str) -> None:
    before, after, wrong = WRONG[change]
    text = SITES["E5b"].apply(MODEL_OLD["E5b"])
    assert SITES["E5b"].verify(text) == ""
    assert SITES["E5b"].verify(swapped(text, before, after)) == wrong


def test_a_post_condition_of_a_capture_that_nobody_calls() -> None:
    text = SITES["E5b"].apply(MODEL_OLD["E5b"])
    block = text[text.index("                if i in self") : text.index("                layer = self")]
    dead = "                def dead():\n" + "".join(f"    {line}\n" for line in block.splitlines())
    assert SITES["E5b"].verify(swapped(text, block, dead)) == "the layers do not capture behind the norm that reduces"


def test_a_post_condition_of_layers_that_do_not_capture_behind_the_norm() -> None:
    text = NATIVE["the layers capture"].replace("prepare_attn_and_capture_last_layer_outputs", "prepare_attn")
    assert SITES["E5"].verify(text) == "the layers do not capture behind the norm that reduces"


def test_a_post_condition_of_a_base_that_captures() -> None:
    text = NATIVE["the base captures"] + "\n    def forward(self, hidden_states):\n        return hidden_states\n"
    assert SITES["E5c"].verify(text) == "`Glm4MoeLiteModel` has a `forward` of its own"


def test_the_code_put_in_is_the_same_everywhere() -> None:
    for name, site in SITES.items():
        text = ast.unparse(ast.parse(site.apply(MODEL_OLD[name])))
        assert text.count(CLONE if name != "E5h" else STEPS) == 1


STEPS = """\
                        reduced = moe_expert_parallel_all_reduce(hidden_states.clone())
                        reduced = moe_tensor_model_parallel_all_reduce(reduced)
"""
WRONG_ELSEWHERE = {
    "a stream that is captured past the method": ("E5g", "self._prepare_aux_hidden_state(\n                        hidden_states, residual\n                    )", "hidden_states if residual is None else self._prepare_aux_hidden_state(hidden_states, residual)", "line 33 captures the stream itself"),
    "a method that takes something else": ("E5g", "(self, hidden_states, residual)", "(self, residual, hidden_states)", "`_prepare_aux_hidden_state` takes ['self', 'residual', 'hidden_states']"),
    "a method that returns before": ("E5g", "        # sglang-stack E5: a layer", "        return residual\n        # sglang-stack E5: a layer", "line 15 captures what may be one rank's partial sums"),
    "a method that returns the stream": ("E5g", "        if self.dflash", "        if self.other:\n            return hidden_states\n        if self.dflash", "line 15 captures the stream itself"),
    "a method that returns twice": ("E5g", "        if self.dflash", "        if self.other:\n            return reduced\n        if self.dflash", "line 15 does not end with the one value that it returns"),
    "the tensors alone": ("E5h", "reduced = moe_expert_parallel_all_reduce", "reduced = ", "line 25 does not reduce a clone, once"),
    "the experts alone": ("E5h", "                        reduced = moe_tensor_model_parallel_all_reduce(reduced)\n", "", "line 25 does not reduce a clone, once"),
    "seldom": ("E5h", "hidden_states.shape[0] != 0", "hidden_states.shape[0] == 0", "line 25 asks for more than whether a layer is captured"),
    "no import": ("E5i", "from sglang.srt.distributed import tensor_model_parallel_all_reduce\n", "", "`tensor_model_parallel_all_reduce` is there 0 times, not once"),
    "a stream that each rank changes": ("E5i", "            layer_idx += self.start_layer\n", "            layer_idx += self.start_layer\n            hidden_states.add_(self.x)\n", "line 16 changes what may be one rank's partial sums"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG_ELSEWHERE)
def test_a_post_condition_sees_what_is_wrong_elsewhere(change: str) -> None:
    site, before, after, wrong = WRONG_ELSEWHERE[change]
    text = SITES[site].apply(MODEL_OLD[site])
    assert SITES[site].verify(swapped(text, before, after)) == wrong


def test_a_post_condition_of_layers_that_are_anothers() -> None:
    # The file itself says nothing of an all-reduce that is put off.
    assert SITES["E5i"].verify(INHERITED) == "line 14 captures what may be one rank's partial sums"


# --- of single releases -----------------------------------------------------------------------------------------------


def test_what_reduces_is_imported_where_it_is_not() -> None:
    for site, other in (
        ("E5g", "sglang.srt.distributed.parallel_state import get_pp"),
        ("E5i", "sglang.srt.models.qwen3_moe import Q"),
    ):
        comment = "# sglang-stack E5: completes what the draft gets of a layer whose all-reduce is put off.\n"
        line = f"from sglang.srt.distributed import tensor_model_parallel_all_reduce\nfrom {other}"
        assert comment + line in SITES[site].apply(MODEL_OLD[site])
        twice = MODEL_OLD[site].replace(f"from {other}", line)
        assert comment not in SITES[site].apply(twice)


def test_the_residual_of_a_wider_stream_is_contracted_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for source, captured in ((HELPED, [7 * 1001]), (SITES["E5g"].apply(HELPED), [7 * 1010])):
        layers = Layers(source, MODELS["E5g"], [0], monkeypatch)
        layers.model.dflash_capture = True
        assert layers.run(1) == captured


@pytest.mark.parametrize(
    ("site", "before", "after", "looked_for"),
    [
        ("E5g", "            aux_hidden_state = hc_contract", "            aux_hidden_state = hc_expand", "`_prepare_aux_hidden_state` as in 0.5.20"),
        ("E5g", "hidden_states, residual\n", "residual, hidden_states\n", "one `self._prepare_aux_hidden_state(hidden_states, residual)` under `if i in self.layers_to_capture`"),
        ("E5g", "        # With mHC", "        reduced = 1\n        # With mHC", "`_prepare_aux_hidden_state` as in 0.5.20"),
        ("E5h", "    moe_expert_parallel_all_reduce,\n", "", "`from sglang.srt.distributed import moe_expert_parallel_all_reduce`"),
        ("E5h", "hidden_states.shape[0] != 0", "hidden_states.shape[0] != 1", CAPTURES),
        ("E5i", "from sglang.srt", "from other", "`from sglang.srt.distributed import tensor_model_parallel_all_reduce`"),
        ("E5i", "            hidden_states, residual = layer(hidden_states, residual)\n", "            hidden_states, residual = layer(hidden_states, residual)\n            hidden_states.add_(self.deepstack)\n", "no `hidden_states.add_(…)` in `Qwen3MoeLLMModel.forward`: where the all-reduce is put off each rank adds it to its partial sums, and the model itself comes out wrong"),
    ],
)  # fmt: skip
def test_another_shape_of_those_is_unknown(site: str, before: str, after: str, looked_for: str) -> None:
    assert SITES[site].look(swapped(MODEL_OLD[site], before, after)) == (State.UNKNOWN, looked_for)


@pytest.mark.parametrize(("files", "state"), [(QWEN3, "needed"), ({}, "unknown")])
def test_layers_of_another_file_have_to_be_as_known(tmp_path: Path, files: dict[str, str], state: str) -> None:
    wheel = read_wheel(sglang_wheel(tmp_path, {SITES["E5i"].file: INHERITED, **files}))
    (found,) = [item for item in look(wheel, ("sm120-fusion",)) if item.site.id == "E5i"]
    assert found.before.value == state
    if not files:
        assert found.looked_for == f"`hidden_states.{FLAG} = True` in sglang/srt/models/qwen3_moe.py"


def test_a_class_of_that_name_that_captures_nothing_is_not_meant(tmp_path: Path) -> None:
    other = {"sglang/srt/models/bailing_moe_linear.py": "class BailingMoELinearModel:\n    pass\n"}
    (found,) = [
        item for item in look(read_wheel(sglang_wheel(tmp_path, other)), ("sm120-fusion",)) if item.site.id == "E5h"
    ]
    assert found.before is State.ABSENT
