"""What a patch can do wrong, done to every site: which of the two checks that do not rest on its finding refuses it.

`post` is the post-condition, `file` the bound on the whole file. To register a site, give it a `Trial`; a site of the sets
below that has none fails.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from textwrap import indent

import pytest

from builder.errors import IntegrityError
from builder.patches import capture
from builder.patches.apply import SETS
from builder.patches.engine import Edit, Module, Site, definitions, outside_of
from builder.smoke.post_base import KIMI
from builder.smoke.post_capture import MODELS
from tests import patch_made as made
from tests.eagle_made import DRAFT_OLD, MODEL_OLD, WORKER_OLD

SITES = {site.id: site for name in ("sm120", "eagle3", "eagle3-multimodal") for site in SETS[name]}
SITES |= {site.id: site for site in capture.SITES}

AUTO_FUSION = """\
from sglang.srt.utils import is_blackwell_supported, is_sm90_supported, is_sm100_supported


class ServerArgs:
    def adjust(self):
        # AllReduce Fusion
        if self.small and (is_sm90_supported() or is_blackwell_supported()):
            self.enable_flashinfer_allreduce_fusion = True
        return self
"""

UNRELATED = "\n\ndef unrelated(value):\n    return value\n"


@dataclass(frozen=True)
class Trial:
    """A site's old source, the definition that it is about, and one more edit there that undoes the patch."""

    old: str
    place: str
    undoing: tuple[str, str]
    only: tuple[tuple[str, str], ...] = ()
    """mutations that one check alone refuses, where it is both elsewhere"""


# Of a site that names no places, every function that it edits is one.
ANYWHERE = (("wrong place", "post"),)
_HOOKS = {"E1": "get_embed_and_head", "E2": "set_embed_and_head", "E3": "set_eagle3_layers_to_capture"}
TRIALS = {
    "S1": Trial(
        made.OLD[made.ALL_REDUCE],
        "TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES",
        ("        8: _SM120_MAX_SIZE,\n    },\n", "        8: _SM120_MAX_SIZE,\n    },\n    12: {},\n"),
    ),
    "S2": Trial(
        made.OLD[made.SYMM_MEM],
        "TorchSymmMemCommunicator.__init__",
        (
            "        if supported_max_sizes is None:",
            (
                "        supported_max_sizes = TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES[self.device_capability]\n"
                "        if supported_max_sizes is None:"
            ),
        ),
    ),
    "S3": Trial(
        made.OLD[made.SYMM_MEM],
        "TorchSymmMemCommunicator.all_reduce",
        (
            "        self.buffer[: inp.numel()].copy_(",
            (
                "        self._WORLD_SIZES_MULTIMEM[self.device_capability]\n"
                "        self.buffer[: inp.numel()].copy_("
            ),
        ),
    ),
    "S6": Trial(
        AUTO_FUSION,
        "ServerArgs.adjust",
        ("        return self\n", "        self.enable_flashinfer_allreduce_fusion = True\n        return self\n"),
        ANYWHERE,
    ),
    "F1": Trial(
        made.OLD[made.COMM],
        "gen_trtllm_comm_module",
        (
            '    return gen_jit_spec("trtllm_comm"',
            (
                "    flags = current_compilation_context.get_nvcc_flags_list(supported_major_versions=[9, 10])\n"
                '    return gen_jit_spec("trtllm_comm"'
            ),
        ),
    ),
    "D1": Trial(
        made.OLD[made.DEEP_GEMM],
        "_compute_enable_deep_gemm",
        ("// 10 == 12:\n        return False", "// 10 == 12:\n        return True"),
    ),
    "E1": Trial(
        made.OLD[made.KIMI_FILE],
        f"{KIMI}.{_HOOKS['E1']}",
        ("        return self.language_model.get", "        return None, None\n        return self.language_model.get"),
    ),
    "E2": Trial(
        made.OLD[made.KIMI_FILE],
        f"{KIMI}.{_HOOKS['E2']}",
        (
            "        self.language_model.set_embed_and_head(embed, head)\n",
            (
                "        self.language_model.set_embed_and_head(embed, head)\n"
                "        self.language_model.set_embed_and_head(None, None)\n"
            ),
        ),
    ),
    "E3": Trial(
        made.OLD[made.KIMI_FILE],
        f"{KIMI}.{_HOOKS['E3']}",
        (
            "        self.language_model.set_eagle3_layers_to_capture(layer_ids)\n",
            (
                "        self.language_model.set_eagle3_layers_to_capture(layer_ids)\n"
                "        self.language_model.set_eagle3_layers_to_capture()\n"
            ),
        ),
    ),
    "E4": Trial(
        made.OLD[made.GRAPHS],
        "CudaGraphRunner.__init__",
        (
            "        self.capture()",
            "        self.model_runner.model.set_eagle3_layers_to_capture()\n        self.capture()",
        ),
        ANYWHERE,
    ),
    **{
        site: Trial(
            MODEL_OLD[site],
            f"{MODELS[site]}.forward",
            ("                layer = self.layers", "                aux_hidden_states[-1:] = [hidden_states + residual]\n                layer = self.layers"),
        )
        for site in MODELS
        if site not in ("E5g", "E5i")
    },
    "E5g": Trial(
        MODEL_OLD["E5g"],
        "Glm5NextModel._prepare_aux_hidden_state",
        ("        return aux_hidden_state\n", "        aux_hidden_state = hidden_states + residual\n        return aux_hidden_state\n"),
    ),
    "E5i": Trial(
        MODEL_OLD["E5i"],
        "Qwen3MoeLLMModel.forward",
        ("            hidden_states, residual = layer(", "            aux_hidden_states[-1:] = [hidden_states + residual]\n            hidden_states, residual = layer("),
    ),
    "E6": Trial(
        DRAFT_OLD,
        "LlamaModel.forward",
        (
            "        hidden_states = forward_batch",
            "        embeds = self.embed_tokens(input_ids)\n        hidden_states = forward_batch",
        ),
    ),
    "E7": Trial(
        WORKER_OLD,
        "EagleDraftWorker._draft_extend_for_prefill",
        (
            "        logits_output = self.draft_runner",
            "        forward_batch.mm_input_embeds = None\n        logits_output = self.draft_runner",
        ),
    ),
}  # fmt: skip

REFUSED = {
    "wrong place": "post file",
    "defined twice": "post file",
    "dead code": "post file",
    "an edit more": "file",
    "an edit more that undoes it": "post",
    "not edited": "post",
}
"""The mutations, and what refuses them."""


def segment(text: str, place: str) -> str:
    """The lines of a definition; nothing where there is none."""
    found = [node for name, node in definitions(ast.parse(text)) if name in (place, f"class {place}")]
    if not found:
        return ""
    (node,) = found
    if name_of_class := (isinstance(node, ast.ClassDef) and node.name):
        # Its definition is listed without the body.
        (node,) = [item for item in ast.parse(text).body if getattr(item, "name", None) == name_of_class]
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def swapped(text: str, before: str, after: str) -> str:
    assert text.count(before) == 1, before
    return text.replace(before, after)


def mutation(kind: str, site: Site, trial: Trial) -> tuple[str, str]:
    """A source, and what a patch that went wrong would make of it."""
    owner = trial.place.partition(".")[0]
    before = trial.old + UNRELATED
    after = site.apply(before)
    old, new = segment(before, owner), segment(after, owner)
    assert old != new
    # All that the patch does outside of the class or function stays done.
    elsewhere = swapped(after, new, old)
    if kind == "wrong place":
        twin_old, twin_new = (re.sub(rf"\b{owner}\b", f"{owner}Twin", text) for text in (old, new))
        return f"{before}\n\n{twin_old}", f"{elsewhere}\n\n{twin_new}"
    if kind == "defined twice":
        mine = segment(after, trial.place)
        return before, swapped(after, mine, f"{mine}\n{segment(before, trial.place) or mine}")
    if kind == "dead code":
        head, result = UNRELATED.splitlines(keepends=True)[-2:]
        return before, swapped(elsewhere, f"{head}{result}", f"{head}{indent(new, '    ')}\n{result}")
    if kind == "an edit more":
        return before, swapped(after, "    return value\n", "    return None\n")
    if kind == "an edit more that undoes it":
        return before, swapped(after, *trial.undoing)
    return before, before


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("site", TRIALS)
def test_what_refuses_a_patch_that_went_wrong(site: str, kind: str) -> None:
    it, trial = SITES[site], TRIALS[site]
    before, after = mutation(kind, it, trial)
    ast.parse(after)
    module = Module(before)
    places = it.places or module.enclosing(it.plan(module))
    refused = {"post": it.verify(after), "file": outside_of(places, before, after)}
    assert {name for name, because in refused.items() if because} == set(
        dict(trial.only).get(kind, REFUSED[kind]).split()
    )


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("site", TRIALS)
def test_a_patch_that_went_wrong_is_not_applied(site: str, kind: str) -> None:
    before, after = mutation(kind, SITES[site], TRIALS[site])

    def plan(module: Module) -> list[Edit]:
        """Finds the file native when it has edited it, whatever it made of it."""
        return [Edit(0, len(before), after)] if plans.pop() else []

    plans = [False, True]
    # Where the places are those of the edits, they are the ones that the patch would have edited.
    module = Module(before)
    places = SITES[site].places or module.enclosing(SITES[site].plan(module))
    with pytest.raises(IntegrityError, match=f"the patch at site {site} went wrong"):
        replace(SITES[site], plan=plan, places=places).apply(before)


@pytest.mark.parametrize("site", TRIALS)
def test_the_same_patch_done_right_is_not_refused(site: str) -> None:
    it, before = SITES[site], TRIALS[site].old + UNRELATED
    after, module = it.apply(before), Module(before)
    assert it.verify(after) == ""
    assert outside_of(it.places or module.enclosing(it.plan(module)), before, after) == ""


@pytest.mark.parametrize("site", [site for site in TRIALS if SITES[site].places])
def test_a_twin_stays_as_it_is(site: str) -> None:
    before, _ = mutation("wrong place", SITES[site], TRIALS[site])
    alone = TRIALS[site].old + UNRELATED
    assert SITES[site].apply(before) == SITES[site].apply(alone) + before[len(alone) :]


def test_every_site_has_its_mutations() -> None:
    assert sorted(SITES) == sorted(TRIALS)
