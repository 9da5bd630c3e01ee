"""The opt-in set for EAGLE-3 with images: E6 and E7 in sglang.

The draft reads the prompt as token ids, and an image has none that mean anything: its places hold a hash, clamped to the
vocabulary. With the set, and the variable below, it reads the embeddings that the target computed. What is known of the
sites is in shared/facts/patches.md, section A2.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from builder.patches.engine import Edit, Module, Reader, Site, UnknownShapeError
from builder.patches.sm120 import find, function, klass
from builder.smoke.post_multimodal import CONSTANT, DRAFT, DRAFT_WORKER, EMBEDS, PREFILL, SWITCH, WORKER

_NOTES = "shared/facts/patches.md section A2"
_BATCH_FILE = "sglang/srt/model_executor/forward_batch_info.py"
_LOGITS_FILE = "sglang/srt/layers/logits_processor.py"
_ROUTINE_FILE = "sglang/srt/managers/mm_utils.py"

_READ = f'{CONSTANT} = os.environ.get("{SWITCH}", "") == "1"'

_OLD_EMBEDS = """\
if input_embeds is None:
    embeds = self.embed_tokens(input_ids)
else:
    embeds = input_embeds"""
_EMBEDS_COMMENT = """\
# sglang-stack E6: the target's embeddings hold the images. The draft reads each
# request one token further on, so they move up by one; each request's last token
# is the one that the target has just sampled, and the draft embeds it itself."""
_EMBEDS = f"""\
target_embeds = forward_batch.{EMBEDS} if {CONSTANT} else None
if (
    target_embeds is not None
    and target_embeds.shape == embeds.shape
    and forward_batch.forward_mode.is_extend_without_speculative()
):
    last = torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1
    target_embeds = torch.roll(target_embeds, -1, dims=0).to(embeds.dtype)
    target_embeds[last] = embeds[last]
    embeds = target_embeds"""
# Upstream's own: from 0.5.10 on, and from 0.5.16 on.
_NATIVE_EMBEDS = tuple(
    f"""\
if input_embeds is None:
    embeds = forward_batch.{EMBEDS}
    if forward_batch.forward_mode.is_extend() and forward_batch.contains_mm_inputs() and (not forward_batch.forward_mode.{mode}):
        assert embeds is not None
{last}
    if embeds is None:
        embeds = self.embed_tokens(input_ids)
else:
    embeds = input_embeds"""
    for mode, last in (
        (
            "is_draft_extend(include_v2=True)",
            "        embeds = torch.cat([embeds[:-1], self.embed_tokens(input_ids[-1].unsqueeze(0))])",
        ),
        (
            "is_draft_extend_v2()",
            """\
        last_indices = (forward_batch.extend_start_loc + forward_batch.extend_seq_lens - 1).long()
        embeds[last_indices] = self.embed_tokens(input_ids[last_indices])""",
        ),
    )
)

_FORWARD_BATCH = "forward_batch = ForwardBatch.init_new(batch, self.draft_runner)"
_HAND_ON = f"    forward_batch.{EMBEDS} = {EMBEDS}"
_OLD_ARGUMENTS = ["batch_output.logits_output.hidden_states", "batch_output.next_token_ids"]
_OLD_PARAMETERS = ["self", "batch", "target_hidden_states", "next_token_ids"]
_ARGUMENT = f"batch_output.logits_output.{EMBEDS}"


def _switch(module: Module, site: str) -> Iterator[Edit]:
    """The variable, read when the process imports the module."""
    body = module.tree.body
    imports = [node for node in body if isinstance(node, ast.Import)]
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    names = [item.name for node in imports for item in node.names if item.asname is None]
    if "torch" not in names or not classes:
        raise UnknownShapeError("`import torch` and a class")
    if "os" not in names:
        yield module.before(imports[0], "import os")
    comment = f"# sglang-stack {site}: read once in each process; unless it is 1, all is as it was."
    yield module.before(classes[0], f"{comment}\n{_READ}\n\n")


def _switched(module: Module) -> None:
    """Raises `UnknownShapeError` where our switch is not as we write it."""
    if ast.unparse(find(module.tree.body, ast.Assign, CONSTANT)) != ast.unparse(ast.parse(_READ)):
        raise UnknownShapeError(f"`{_READ}`")


def _embeds(module: Module) -> list[Edit]:
    forward = function(klass(module, DRAFT).body, "forward")
    choices = [n for n in ast.walk(forward) if isinstance(n, ast.If) and ast.unparse(n.test) == "input_embeds is None"]
    if len(choices) == 1 and choices[0] in forward.body:
        found = ast.unparse(choices[0])
        if found in _NATIVE_EMBEDS:
            return []
        if found == _OLD_EMBEDS and EMBEDS not in module.text:
            return [*_switch(module, "E6"), module.after(choices[0].body[0], f"{_EMBEDS_COMMENT}\n{_EMBEDS}")]
        ours = ast.parse(_OLD_EMBEDS).body[0]
        assert isinstance(ours, ast.If)
        ours.body += ast.parse(_EMBEDS).body
        if found == ast.unparse(ours):
            _switched(module)
            return []
    raise UnknownShapeError(f"`embeds = self.embed_tokens(input_ids)` where `{DRAFT}.forward` is given no embeddings")


def _worker(module: Module) -> list[Edit]:
    method = function(klass(module, DRAFT_WORKER).body, PREFILL)
    calls = [n for n in ast.walk(klass(module, WORKER)) if isinstance(n, ast.Call) and _is_prefill(n.func)]
    made = [node for node in method.body if ast.unparse(node).startswith("forward_batch = ForwardBatch.init_new(")]
    if len(calls) != 1 or len(made) != 1:
        raise UnknownShapeError(
            f"`self.draft_worker.{PREFILL}(…)` and `forward_batch = ForwardBatch.init_new(…)`, once"
        )
    parameters = [item.arg for item in method.args.args]
    arguments = [ast.unparse(item) for item in calls[0].args][1:]
    guards = [ast.unparse(node) for node in method.body if isinstance(node, ast.If) and _hands_on(node)]
    if parameters == _OLD_PARAMETERS and arguments == _OLD_ARGUMENTS and EMBEDS not in module.text:
        if ast.unparse(made[0]) != _FORWARD_BATCH or method.args.defaults or calls[0].keywords:
            raise UnknownShapeError(f"`{_FORWARD_BATCH}`")
        return [
            *_switch(module, "E7"),
            *_added(module, method.args.args[-1], f"{EMBEDS}: Optional[torch.Tensor] = None"),
            module.after(
                made[0],
                "# sglang-stack E7: the target's embeddings, which hold the images, go to the draft.\n"
                f"if {CONSTANT} and {EMBEDS} is not None:\n{_HAND_ON}",
            ),
            *_added(module, calls[0].args[-1], _ARGUMENT),
        ]
    if parameters[:5] == [*_OLD_PARAMETERS, EMBEDS] and arguments == [*_OLD_ARGUMENTS, _ARGUMENT]:
        if guards == [f"if {EMBEDS} is not None:\n{_HAND_ON}"] and CONSTANT not in module.text:
            return []
        if guards == [f"if {CONSTANT} and {EMBEDS} is not None:\n{_HAND_ON}"]:
            _switched(module)
            return []
    raise UnknownShapeError(f"`{EMBEDS}` handed on as in 0.5.10, or not at all")


def _is_prefill(node: ast.expr) -> bool:
    return ast.unparse(node) == f"self.draft_worker.{PREFILL}"


def _hands_on(node: ast.If) -> bool:
    return any(ast.unparse(item).startswith(f"forward_batch.{EMBEDS} =") for item in ast.walk(node))


def _added(module: Module, last: ast.arg | ast.expr, text: str) -> Iterator[Edit]:
    """One more behind the last parameter or argument, which has a line of its own with a comma."""
    assert last.end_lineno is not None and last.end_col_offset is not None
    start = module.at(last.lineno, 0)
    end = module.at(last.end_lineno, last.end_col_offset)
    lead = module.text[start : module.at(last.lineno, last.col_offset)]
    if lead.strip() or module.text[end : end + 1 + len(module.newline)] != f",{module.newline}":
        raise UnknownShapeError(f"`{ast.unparse(last)}` on a line of its own")
    yield Edit(end, end, f",{module.newline}{lead}{text}")


def _has(*fields: tuple[str, str]) -> Callable[[Reader], str]:
    def context(read: Reader) -> str:
        """The package keeps the target's embeddings on their way from the target to the draft."""
        for file, line in fields:
            text = read(file)
            if text is None or line not in map(str.strip, text.splitlines()):
                return f"`{line}` in {file}"
        return ""

    return context


_FIELD = f"{EMBEDS}: Optional[torch.Tensor] = None"
_KEPT = _has(
    (_BATCH_FILE, _FIELD),
    (_LOGITS_FILE, _FIELD),
    (_ROUTINE_FILE, f"forward_batch.{EMBEDS} = input_embeds"),
)

SITES = (
    Site(
        id="E6",
        set="eagle3-multimodal",
        package="sglang",
        file="sglang/srt/models/llama_eagle3.py",
        marker=f"class {DRAFT}",
        what="what the draft reads of a prompt with images",
        consequence=f"with `{SWITCH}=1` it reads the target's embeddings in prefill, each request's moved up by one as its "
        "tokens are; without it, and where the shapes differ, token ids as before",
        source=f"{_NOTES}, E6",
        places=("import", CONSTANT, f"{DRAFT}.forward"),
        plan=_embeds,
        context=_KEPT,
    ),
    Site(
        id="E7",
        set="eagle3-multimodal",
        package="sglang",
        file="sglang/srt/speculative/eagle_worker_v2.py",
        marker=f"class {WORKER}",
        what="whether the overlapping worker hands the target's embeddings to the draft",
        consequence=f"with `{SWITCH}=1` it does, as the other worker does without it",
        source=f"{_NOTES}, E7",
        places=("import", CONSTANT, f"{DRAFT_WORKER}.{PREFILL}", f"{WORKER}.forward_batch_generation"),
        plan=_worker,
        context=_KEPT,
    ),
)
