"""E6 and E7: their shapes, and what the draft reads of a prompt with images, with the variable and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.patches import multimodal
from builder.patches.apply import look
from builder.patches.engine import State
from builder.smoke.post_multimodal import CONSTANT, SWITCH
from builder.wheel import read_wheel
from tests.eagle_made import DRAFT_OLD, KEPT, WORKER_OLD, Draft, Rows, worker_batch
from tests.patch_made import sglang_wheel

SITES = {site.id: site for site in multimodal.SITES}
OLD = {"E6": DRAFT_OLD, "E7": WORKER_OLD}


def swapped(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


def patched(site: str) -> str:
    return SITES[site].apply(OLD[site])


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_the_old_shape_is_needed_and_ours_is_native(site: str) -> None:
    assert SITES[site].look(OLD[site]) == (State.NEEDED, "")
    assert SITES[site].verify(OLD[site]) != ""
    after = patched(site)
    assert SITES[site].look(after) == (State.NATIVE, "")
    assert SITES[site].verify(after) == ""
    assert SITES[site].apply(after) == after
    assert SITES[site].apply(OLD[site].replace("\n", "\r\n")) == after.replace("\n", "\r\n")


EMBEDDED = "            embeds = self.embed_tokens(input_ids)\n"
HANDED = "        if mm_input_embeds is not None:\n            forward_batch.mm_input_embeds = mm_input_embeds\n"
WORKER_NATIVE = swapped(
    WORKER_OLD,
    ("    next_token_ids: torch.Tensor,\n", "    next_token_ids: torch.Tensor,\n        mm_input_embeds: Optional[torch.Tensor] = None,\n"),
    ("        logits_output = self", f"{HANDED}        logits_output = self"),
    ("batch_output.next_token_ids,\n", "batch_output.next_token_ids,\n                batch_output.logits_output.mm_input_embeds,\n"),
)  # fmt: skip
EXTENDED = (
    "            embeds = forward_batch.mm_input_embeds\n"
    "            if (\n                forward_batch.forward_mode.is_extend()\n"
    "                and forward_batch.contains_mm_inputs()\n"
)
# Upstream's own, as it came in 0.5.10 and again in 0.5.16; reduced to what the sites look at.
NATIVE = {
    "the whole batch's last token": (
        "E6",
        swapped(
            DRAFT_OLD,
            (
                EMBEDDED,
                (
                    f"{EXTENDED}"
                    "                and not forward_batch.forward_mode.is_draft_extend(include_v2=True)\n            ):\n"
                    "                assert embeds is not None\n"
                    "                embeds = torch.cat([embeds[:-1], self.embed_tokens(input_ids[-1].unsqueeze(0))])\n"
                    f"            if embeds is None:\n    {EMBEDDED}"
                ),
            ),
        ),
    ),
    "each request's last token": (
        "E6",
        swapped(
            DRAFT_OLD,
            (
                EMBEDDED,
                (
                    f"{EXTENDED}"
                    "                and not forward_batch.forward_mode.is_draft_extend_v2()\n            ):\n"
                    "                assert embeds is not None\n"
                    "                last_indices = (\n"
                    "                    forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1\n"
                    "                ).long()\n"
                    "                embeds[last_indices] = self.embed_tokens(input_ids[last_indices])\n"
                    f"            if embeds is None:\n    {EMBEDDED}"
                ),
            ),
        ),
    ),
    "handed on": ("E7", WORKER_NATIVE),
    "handed on, moved": (
        "E7",
        swapped(
            WORKER_NATIVE,
            (
                "        batch.spec_info =",
                (
                    "        if mm_input_embeds is not None:\n            rotated_mm = rotated(mm_input_embeds)\n"
                    "            mm_input_embeds = rotated_mm\n        batch.spec_info ="
                ),
            ),
        ),
    ),
}


@pytest.mark.parametrize("shape", NATIVE)
def test_upstreams_own_remedy_is_native(shape: str) -> None:
    site, text = NATIVE[shape]
    assert SITES[site].look(text) == (State.NATIVE, "")
    assert SITES[site].verify(text) == ""
    assert SITES[site].apply(text) == text


EMBEDS = "`embeds = self.embed_tokens(input_ids)` where `LlamaModel.forward` is given no embeddings"
HANDED_ON = "`mm_input_embeds` handed on as in 0.5.10, or not at all"
CALLED = "`self.draft_worker._draft_extend_for_prefill(…)` and `forward_batch = ForwardBatch.init_new(…)`, once"
READ = f'`{CONSTANT} = os.environ.get("{SWITCH}", "") == "1"`'
UNKNOWN = {
    "another embedding": ("E6", DRAFT_OLD, "self.embed_tokens(", "self.embed(", EMBEDS),
    "another test": ("E6", DRAFT_OLD, "if input_embeds is None", "if not input_embeds", EMBEDS),
    "something of the kind": ("E6", DRAFT_OLD, "        hidden_states = f", "        forward_batch.mm_input_embeds\n        hidden_states = f", EMBEDS),
    "no torch": ("E6", DRAFT_OLD, "import torch\n", "from torch import Tensor\n", "`import torch` and a class"),
    "another switch": ("E6", "ours", SWITCH, "OTHER", READ),
    "no switch": ("E6", "ours", f"\n{CONSTANT} =", "\n_OTHER =", f"one `{CONSTANT}` (0 found)"),
    "no method": ("E7", WORKER_OLD, "def _draft_extend_for_prefill", "def prefill", "one `_draft_extend_for_prefill` (0 found)"),
    "no call": ("E7", WORKER_OLD, "self.draft_worker._draft", "draft._draft", CALLED),
    "another batch": ("E7", WORKER_OLD, "init_new(batch, self.draft_runner)", "init_new(batch, self.runner)", "`forward_batch = ForwardBatch.init_new(batch, self.draft_runner)`"),
    "a parameter more": ("E7", WORKER_OLD, "next_token_ids: torch.Tensor,\n", "next_token_ids: torch.Tensor,\n        more=None,\n", HANDED_ON),
    "no line of its own": ("E7", WORKER_OLD, "next_token_ids: torch.Tensor,\n", "next_token_ids: torch.Tensor\n", "`next_token_ids: torch.Tensor` on a line of its own"),
    "parameters of one line": ("E7", WORKER_OLD, "torch.Tensor,\n        next_token_ids", "torch.Tensor, next_token_ids", "`next_token_ids: torch.Tensor` on a line of its own"),
    "something of the kind in the worker": ("E7", WORKER_OLD, "        return batch_output", "        batch_output.mm_input_embeds = 1\n        return batch_output", HANDED_ON),
    "half of it": ("E7", WORKER_NATIVE, HANDED, "", HANDED_ON),
    "another switch of the worker": ("E7", "ours", SWITCH, "OTHER", READ),
}  # fmt: skip


@pytest.mark.parametrize("shape", UNKNOWN)
def test_another_shape_is_unknown(shape: str) -> None:
    site, text, before, after, looked_for = UNKNOWN[shape]
    text = patched(site) if text == "ours" else text
    assert SITES[site].look(swapped(text, (before, after))) == (State.UNKNOWN, looked_for)


FILES = {SITES["E6"].file: DRAFT_OLD, SITES["E7"].file: WORKER_OLD}


def states(folder: Path, files: dict[str, str | None]) -> dict[str, tuple[str, str]]:
    found = look(read_wheel(sglang_wheel(folder, files)), ("eagle3-multimodal",))
    return {item.site.id: (item.before.value, item.looked_for) for item in found}


def test_a_release_that_keeps_the_targets_embeddings(tmp_path: Path) -> None:
    assert states(tmp_path, {**FILES, **KEPT}) == {"E6": ("needed", ""), "E7": ("needed", "")}


@pytest.mark.parametrize("file", KEPT)
def test_a_release_that_drops_them_on_the_way_is_unknown(tmp_path: Path, file: str) -> None:
    line = KEPT[file].split("\n")[1].strip()
    for kept in (None, "class Other:\n    pass\n"):
        missing = ("unknown", f"`{line}` in {file}")
        assert states(tmp_path, {**FILES, **KEPT, file: kept}) == {"E6": missing, "E7": missing}


# --- what the patched code does ---------------------------------------------------------------------------------------

# Two requests, of three tokens and of two; the draft's ids are theirs moved up by one, and the token just sampled.
IDS, LENGTHS = [11, 12, 13, 21, 22], [3, 2]


def target(width: int = 8, dtype: str = "bf16", count: int = 5) -> Rows:
    return Rows([f"target {i}" for i in (10, 11, 12, 20, 21)][:count], width, dtype)


OWN = [f"token {i}" for i in IDS]


def test_the_draft_reads_the_targets_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    embeds = target()
    found = Draft(patched("E6"), "1", monkeypatch).reads(IDS, embeds, LENGTHS)
    assert found.rows == ["target 11", "target 12", "token 13", "target 21", "token 22"]
    assert embeds.rows == target().rows  # they are the target's: another reader may come


def test_of_one_request_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Draft(patched("E6"), "1", monkeypatch).reads([11], target(count=1), [1])
    assert found.rows == ["token 11"]


def test_the_draft_takes_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Draft(patched("E6"), "1", monkeypatch).reads(IDS, target(dtype="fp16"), LENGTHS)
    assert (found.rows[0], found.dtype) == ("target 11", "bf16")


@pytest.mark.parametrize("switch", [None, "", "0", "true"])
def test_without_the_variable_it_reads_tokens(switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Draft(patched("E6"), switch, monkeypatch).reads(IDS, target(), LENGTHS).rows == OWN
    assert Draft(DRAFT_OLD, switch, monkeypatch).reads(IDS, target(), LENGTHS).rows == OWN


def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft(patched("E6"), None, monkeypatch)
    monkeypatch.setenv(SWITCH, "1")
    assert draft.reads(IDS, target(), LENGTHS).rows == OWN


def test_what_it_reads_tokens_of(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Draft(patched("E6"), "1", monkeypatch)
    assert draft.reads(IDS, None, LENGTHS).rows == OWN  # no images
    assert draft.reads(IDS, target(), LENGTHS, prefill=False).rows == OWN
    assert draft.reads(IDS, target(width=16), LENGTHS).rows == OWN  # a draft that is narrower than its target
    assert draft.reads(IDS, target(count=4), LENGTHS).rows == OWN  # a batch that was padded


def test_the_worker_hands_them_on(monkeypatch: pytest.MonkeyPatch) -> None:
    embeds = target()
    assert worker_batch(patched("E7"), "1", embeds, monkeypatch).mm_input_embeds is embeds
    assert worker_batch(patched("E7"), "1", None, monkeypatch).mm_input_embeds is None


@pytest.mark.parametrize("switch", [None, "", "0", "true"])
def test_without_the_variable_the_worker_does_not(switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_batch(patched("E7"), switch, target(), monkeypatch).mm_input_embeds is None
    assert worker_batch(WORKER_OLD, switch, target(), monkeypatch).mm_input_embeds is None


# --- post-conditions --------------------------------------------------------------------------------------------------

GUARD = f"if {CONSTANT} and mm_input_embeds is not None"
WRONG = {
    "always on": ("E6", f'os.environ.get("{SWITCH}", "") == "1"', "True", f"`{CONSTANT}` is not what `{SWITCH}` says"),
    "on by default": ("E6", f'"{SWITCH}", ""', f'"{SWITCH}", "1"', f"`{CONSTANT}` is not what `{SWITCH}` says"),
    "read twice": ("E6", "class LlamaModel:", f"{CONSTANT} = True\n\n\nclass LlamaModel:", f"`{CONSTANT} =` is there 2 times, not once"),
    "set elsewhere": ("E6", "class LlamaModel:", f"if True:\n    {CONSTANT} = True\n\n\nclass LlamaModel:", f"a value of `{CONSTANT}` is there 2 times, not once"),
    "no import": ("E6", "import os\n", "", "`os` is not imported"),
    "without the switch": ("E6", f" if {CONSTANT} else None", "", "`mm_input_embeds` is taken without the switch"),
    "any shape": ("E6", "target_embeds.shape == embeds.shape", "True", "they are taken if ['target_embeds is not None', 'True', 'forward_batch.forward_mode.is_extend_without_speculative()'], not if ['target_embeds is not None', 'target_embeds.shape == embeds.shape', 'forward_batch.forward_mode.is_extend_without_speculative()']"),
    "or": ("E6", "and target_embeds.shape == embeds.shape\n                and", "or target_embeds.shape == embeds.shape\n                or", "they are taken in any case"),
    "another way": ("E6", "-1, dims=0", "1, dims=0", "they do not move up by one"),
    "not moved": ("E6", "torch.roll(target_embeds, -1, dims=0)", "target_embeds", "they do not move up by one"),
    "the first": ("E6", "dim=0) - 1", "dim=0)", "`last` is not each request's last token"),
    "the target's last": ("E6", "target_embeds[last] = embeds[last]", "embeds[last] = target_embeds[last]", "each request's last token is not the draft's own"),
    "undone": ("E6", "                embeds = target_embeds", "                target_embeds = embeds", "the target's embeddings are not taken"),
    "one step more": ("E6", "                embeds = target_embeds", "                embeds = target_embeds\n                embeds = 1", "the target's embeddings are not moved in four steps"),
    "undone later": ("E6", "        hidden_states = f", "        embeds = self.embed_tokens(input_ids)\n        hidden_states = f", "line 46 gives `embeds` another value"),
    "given ones": ("E6", "            embeds = input_embeds", "            embeds = None", "given embeddings are not taken"),
    "the worker, always": ("E7", f"{CONSTANT} and mm", "mm", f"`mm_input_embeds` is not handed on by `{GUARD}`"),
    "the worker, on by default": ("E7", f'"{SWITCH}", ""', f'"{SWITCH}", "1"', f"`{CONSTANT}` is not what `{SWITCH}` says"),
    "without a default": ("E7", "Tensor] = None", "Tensor]", "`mm_input_embeds` has no default, or one that is not None"),
    "without a parameter": ("E7", "        mm_input_embeds: Optional[torch.Tensor] = None,\n", "", "`_draft_extend_for_prefill` has no `mm_input_embeds`"),
    "not passed": ("E7", "                batch_output.logits_output.mm_input_embeds,\n", "", "`_draft_extend_for_prefill` is called without `mm_input_embeds`"),
    "something else": ("E7", "        batch.spec_info =", "        mm_input_embeds = None\n        batch.spec_info =", "line 22 gives `mm_input_embeds` another value"),
    "taken back": ("E7", "        logits_output =", "        forward_batch.mm_input_embeds = None\n        logits_output =", "`forward_batch.mm_input_embeds =` is there 2 times, not once"),
    "made anew": ("E7", "        logits_output =", "        forward_batch = ForwardBatch.init_new(batch, self.draft_runner)\n        logits_output =", "the batch is made anew"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG)
def test_a_post_condition_sees_what_is_wrong(change: str) -> None:
    site, before, after, wrong = WRONG[change]
    text = patched(site)
    assert SITES[site].verify(text) == ""
    assert SITES[site].verify(swapped(text, (before, after))) == wrong


def test_a_post_condition_of_what_is_handed_on_too_late() -> None:
    lines = patched("E7").split("\n")
    (run,) = [i for i, line in enumerate(lines) if "draft_runner.forward(forward_batch)" in line]
    lines.insert(run - 3, lines.pop(run))
    assert SITES["E7"].verify("\n".join(lines)) == "it is handed on after the draft ran"


@pytest.mark.parametrize("shape", ["the whole batch's last token", "each request's last token"])
def test_a_post_condition_of_upstreams_own(shape: str) -> None:
    _, text = NATIVE[shape]
    for change, wrong in (
        (("embeds = forward_batch.mm_input_embeds", "embeds = None"), "`embeds` does not come from `mm_input_embeds`"),
        (("contains_mm_inputs()", "contains()"), "only prompts with images have embeddings"),
        (("            if embeds is None:", "            if True:"), "prompts without images have no embeddings"),
    ):
        assert SITES["E6"].verify(swapped(text, change)) == wrong
