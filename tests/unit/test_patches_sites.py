"""Each site: its shapes, what patching makes of the old one, and what the patched code does on made-up devices."""

from __future__ import annotations

import ast

import pytest

from builder.patches.apply import SETS
from builder.patches.engine import Site, State
from builder.patches.sm120 import LIMIT
from builder.smoke.post_base import SIZES
from tests import patch_made as made
from tests.patch_made import Communicator, deep_gemm_enabled, kimi, warnings

# The sites of the base sets; those that are opted into have tests of their own.
SITES = {site.id: site for name in ("sm120", "eagle3") for site in SETS[name]}
FILE_OF = {"E4": made.GRAPHS, "S6": made.SERVER_ARGS}


def old(site: str) -> str:
    return made.FUSION_RULES["0.5.7"] if site == "S6" else made.OLD[FILE_OF.get(site, SITES[site].file)]


def patched(file: str) -> str:
    """A file's text with all of its sites patched."""
    text = old("S6") if file == made.SERVER_ARGS else made.OLD[file]
    for site in SITES.values():
        if site.file == file or FILE_OF.get(site.id) == file:
            text = site.apply(text)
    return text


def swapped(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", SITES)
def test_the_old_shape_is_needed_and_ours_is_native(site: str) -> None:
    before = old(site)
    assert SITES[site].probe(before) is State.NEEDED
    assert SITES[site].verify(before) != ""
    after = SITES[site].apply(before)
    assert after != before
    assert SITES[site].probe(after) is State.NATIVE
    assert SITES[site].verify(after) == ""
    assert SITES[site].apply(after) == after


@pytest.mark.parametrize("site", SITES)
def test_line_ends_and_what_is_not_ascii_are_kept(site: str) -> None:
    before = ('X = "ä"; ' + old(site).lstrip()) if site == "S1" else "# ä\n" + old(site)
    after = SITES[site].apply(before.replace("\n", "\r\n"))
    assert after == SITES[site].apply(before).replace("\n", "\r\n")


# Upstream's own remedy, as it came in a later release; reduced to what the sites look at.
NATIVE = {
    "S2": swapped(
        made.OLD[made.SYMM_MEM],
        (
            "        if self.device_capability < 9:",
            (
                "        supported_max_sizes = TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES.get(\n            self.device_capability\n"
                "        )\n        if supported_max_sizes is None:"
            ),
        ),
        ("TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES[self.device_capability]", "supported_max_sizes"),
    ),
    "F1": made.OLD[made.COMM].replace("[9, 10]\n", "[9, 10, 12]\n"),
    "D1": swapped(
        made.OLD[made.DEEP_GEMM],
        ("    try:", "    if sm_version in (120, 121) and not _apis_available():\n        return False\n    try:"),
    ),
    "E1": swapped(
        made.OLD[made.KIMI_FILE],
        (
            "    def load_weights",
            (
                "    def get_embed_and_head(self) -> Tuple[torch.Tensor, torch.Tensor]:\n"
                "        if self.language_model is None:\n            raise AttributeError('no')\n"
                "        return self.language_model.get_embed_and_head()\n\n    def load_weights"
            ),
        ),
    ),
    "E3": swapped(
        made.OLD[made.KIMI_FILE],
        (
            "    def load_weights",
            (
                "    def set_eagle3_layers_to_capture(self, layer_ids: Optional[List[int]] = None) -> None:\n"
                "        self.language_model.set_eagle3_layers_to_capture(layer_ids)\n\n    def load_weights"
            ),
        ),
    ),
    "E4": swapped(
        made.OLD[made.GRAPHS],
        ("set_eagle3_layers_to_capture()", "set_eagle3_layers_to_capture(eagle_aux_hidden_state_layer_ids)"),
    ),
}


@pytest.mark.parametrize("site", NATIVE)
def test_upstreams_own_remedy_is_native(site: str) -> None:
    assert SITES[site].look(NATIVE[site]) == (State.NATIVE, "")
    assert SITES[site].verify(NATIVE[site]) == ""
    assert SITES[site].apply(NATIVE[site]) == NATIVE[site]


UNKNOWN: list[tuple[str, str, str, str]] = [
    ("S1", "    10: {", "    11: {", f"`{SIZES}`, a dictionary with the keys 9 and 10, and 12 at most"),
    (
        "S1",
        "        4: 64 * MiB,\n    },\n}",
        "        4: 64 * MiB,\n    },\n    12: {2: 64 * MiB},\n}",
        "12 with {2: _SM120_MAX_SIZE, 4: _SM120_MAX_SIZE, 8: _SM120_MAX_SIZE}",
    ),
    ("S1", "    },\n}", "    }\n}", "a dictionary with a line and a comma for each item"),
    ("S1", "MiB = 1024 * 1024", "from units import MiB", "one `MiB` (0 found)"),
    ("S2", "class TorchSymm", "class Symm", "one `TorchSymmMemCommunicator` (0 found)"),
    (
        "S2",
        "if self.device_capability < 9",
        "if self.device_capability < 8",
        "`if self.device_capability < 9`, then `TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES[self.device_capability]` twice",
    ),
    ("S3", "        10: [6, 8],", "        10: [6, 8],\n        12: [2, 4],", "12 with an empty list"),
    (
        "S3",
        "self._WORLD_SIZES_MULTIMEM[self.device_capability]",
        "self.multimem",
        "`self._WORLD_SIZES_MULTIMEM` looked up once by `self.device_capability`",
    ),
    (
        "F1",
        "[9, 10]\n",
        "[9, 10, 11]\n",
        "one `get_nvcc_flags_list(supported_major_versions=[9, 10])` in `gen_trtllm_comm_module`",
    ),
    ("F1", "def gen_trtllm_comm_module", "def gen_comm_module", "one `gen_trtllm_comm_module` (0 found)"),
    ("D1", "sm_version < 90", "sm_version < 100", "`if sm_version < 90: return False`"),
    (
        "S6",
        "(is_sm90_supported() or is_blackwell_supported())",
        "get_device_sm() >= 90",
        (
            "one condition for fusion: `is_sm100_supported()`, `is_sm90_supported() or is_sm100_supported()`, "
            "`get_platform().is_sm90 or get_platform().is_sm100`"
        ),
    ),
    (
        "S6",
        ", is_sm100_supported",
        "",
        (
            "one condition for fusion: `is_sm100_supported()`, `is_sm90_supported() or is_sm100_supported()`, "
            "`get_platform().is_sm90 or get_platform().is_sm100`"
        ),
    ),
    (
        "D1",
        "    try:",
        "    if sm_version >= 120:\n        return False\n    try:",
        "one guard for 12.x in `_compute_enable_deep_gemm`",
    ),
    (
        "E1",
        "DeepseekV3ForCausalLM(config",
        "Other(config",
        "`self.language_model = DeepseekV3ForCausalLM(…)` in `KimiK25ForConditionalGeneration`",
    ),
    (
        "E3",
        "    def load_weights",
        "    def set_eagle3_layers_to_capture(self, layer_ids=None):\n        self.model.set(layer_ids)\n\n    def load_weights",
        (
            "`set_eagle3_layers_to_capture` that delegates once, by "
            "`self.language_model.set_eagle3_layers_to_capture(layer_ids)`"
        ),
    ),
    (
        "E2",
        "    def load_weights",
        "    set_embed_and_head = None\n\n    def load_weights",
        "`set_embed_and_head` as a method of `KimiK25ForConditionalGeneration`, or not at all",
    ),
    (
        "E4",
        "self.model_runner.model.set",
        "get_model().set",
        "`self.model.set_eagle3_layers_to_capture()` or `self.model_runner.model.set_eagle3_layers_to_capture()`",
    ),
    (
        "E4",
        "set_eagle3_layers_to_capture()",
        "set_eagle3_layers_to_capture(default)",
        "`set_eagle3_layers_to_capture(eagle_aux_hidden_state_layer_ids)`",
    ),
]


@pytest.mark.parametrize(("site", "before", "after", "looked_for"), UNKNOWN)
def test_another_shape_is_unknown(site: str, before: str, after: str, looked_for: str) -> None:
    assert SITES[site].look(swapped(old(site), (before, after))) == (State.UNKNOWN, looked_for)


def test_a_method_that_is_there_twice_is_unknown() -> None:
    text = patched(made.KIMI_FILE)
    twice = text.replace("EntryClass", "    def get_embed_and_head(self):\n        return None\n\n\nEntryClass")
    assert SITES["E1"].look(twice) == (State.UNKNOWN, "one `get_embed_and_head` (2 found)")
    assert SITES["E1"].verify(twice) == "`get_embed_and_head` is there 2 times, not once"


@pytest.mark.parametrize("release", ["0.5.15.post1", "0.5.23"])
def test_fusion_that_is_asked_for_or_leaves_sm120_out_is_native(release: str) -> None:
    assert SITES["S6"].look(made.FUSION_RULES[release]) == (State.NATIVE, "")
    assert SITES["S6"].verify(made.FUSION_RULES[release]) == ""


def test_of_two_rules_the_one_with_sm120_changes() -> None:
    text = made.FUSION_RULES["0.5.6.post2"]
    rule = "            if is_blackwell_supported():\n                if not"
    comment = "            # sglang-stack S6: not by itself on SM120, where the fused all-reduce has to be asked for.\n"
    assert SITES["S6"].apply(text) == text.replace(rule, comment + rule.replace("is_blackwell", "is_sm100"))


def test_a_guard_for_12_0_alone_is_made_to_hold_for_12_1() -> None:
    # Upstream's, from sglang 0.5.13.post1 to 0.5.20.
    text = swapped(old("D1"), ("    try:", "    if sm_version == 120:\n        return False\n    try:"))
    assert SITES["D1"].apply(text) == text.replace("sm_version == 120", "sm_version // 10 == 12")


# --- what patching changes --------------------------------------------------------------------------------------------


def test_the_patched_files() -> None:
    from builder.patches.engine import unified
    from tests.made import golden

    diffs = [unified(file, made.OLD[file].encode(), patched(file).encode()) for file in made.OLD if file != made.RUNNER]
    golden("patches.diff", "".join(diffs))


def test_exactly_one_call_of_flashinfers_lists_12() -> None:
    def lists(text: str) -> list[str]:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.keywords]
        return [
            ast.unparse(word.value)
            for node in calls
            for word in node.keywords
            if word.arg == "supported_major_versions"
        ]

    assert lists(old("F1")) == ["[9, 10]", "[9, 10]"]
    assert lists(patched(made.COMM)) == ["[9, 10]", "[9, 10, 12]"]
    (wrong,) = [old("F1").replace("[9, 10]  #", "[9, 10, 12]  #")]
    assert SITES["F1"].verify(wrong) == "`gen_trtllm_comm_module` is compiled for [9, 10]"
    both = patched(made.COMM).replace("[9, 10]  #", "[9, 10, 12]  #")
    assert SITES["F1"].verify(both) == "`gen_trtllm_mnnvl_comm_module` is compiled for 12"


# --- what the patched code does ---------------------------------------------------------------------------------------

NO_DEVICE, NO_WORLD, NO_MULTICAST = (
    "Device capability 11 not supported",
    "World size 6 not supported",
    "multicast operations are not supported",
)
MIB = 1024 * 1024


@pytest.fixture
def communicator(monkeypatch: pytest.MonkeyPatch) -> Communicator:
    monkeypatch.delenv(LIMIT, raising=False)
    return Communicator(patched(made.ALL_REDUCE), patched(made.SYMM_MEM), monkeypatch)


@pytest.mark.parametrize(
    ("capability", "world", "multicast", "warned", "kernel"),
    [
        (12, 2, 0, [NO_MULTICAST], None),
        (12, 8, 0, [NO_MULTICAST], None),
        (12, 2, 1, [], "two_shot"),
        (12, 8, 1, [], "two_shot"),
        (12, 6, 1, [NO_WORLD], None),
        (11, 2, 1, [NO_DEVICE], None),
        (9, 4, 1, [], "multimem"),
        (9, 2, 1, [], "two_shot"),
        (9, 2, 0, [NO_MULTICAST], None),
        (10, 4, 1, [], "two_shot"),
    ],
)
def test_symmetric_memory(
    communicator: Communicator,
    caplog: pytest.LogCaptureFixture,
    capability: int,
    world: int,
    multicast: int,
    warned: list[str],
    kernel: str | None,
) -> None:
    found = communicator.make(capability, world, multicast)
    assert warnings(caplog) == warned
    assert found.disabled is (kernel is None)
    if kernel:
        found.all_reduce(made.Tensor())
        assert communicator.kernels == [kernel]


def test_without_the_patch_12_is_a_key_error(monkeypatch: pytest.MonkeyPatch) -> None:
    unpatched = Communicator(old("S1"), old("S2"), monkeypatch)
    with pytest.raises(KeyError, match="12"):
        unpatched.make(12, 2, 0)


def test_the_largest_messages(communicator: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert communicator.sizes[12] == dict.fromkeys((2, 4, 8), MIB)
    assert communicator.sizes[9] == communicator.sizes[10] == {2: 64 * MIB, 4: 64 * MIB}
    communicator.make(12, 2, 1)
    assert communicator.allocated == [MIB // 2]
    monkeypatch.setenv(LIMIT, "8")
    assert Communicator(patched(made.ALL_REDUCE), patched(made.SYMM_MEM), monkeypatch).sizes[12][2] == 8 * MIB


@pytest.mark.parametrize(
    ("architecture", "before", "after"),
    [
        (80, False, False),
        (90, True, True),
        (100, True, True),
        (103, True, True),
        (120, True, False),
        (121, True, False),
    ],
)
def test_deep_gemm_is_off_on_12_x_alone(
    architecture: int, before: bool, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert deep_gemm_enabled(old("D1"), architecture, monkeypatch) is before
    assert deep_gemm_enabled(patched(made.DEEP_GEMM), architecture, monkeypatch) is after


@pytest.mark.parametrize("model", ["DeepseekV3ForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("release", ["0.5.6.post2", "0.5.7"])
def test_fusion_is_not_turned_on_by_itself_on_sm120(release: str, model: str) -> None:
    before = made.FUSION_RULES[release]
    after = SITES["S6"].apply(before)
    assert not made.fuses_by_itself(after, model, 120)
    for architecture in (80, 90, 100):
        on = made.fuses_by_itself(before, model, architecture)
        assert made.fuses_by_itself(after, model, architecture) is on
    # What it is for: before, it was.
    assert made.fuses_by_itself(before, "GptOssForCausalLM", 120)


def test_the_hooks_hand_on_to_the_language_model() -> None:
    model, inner = kimi(patched(made.KIMI_FILE))
    assert model.get_embed_and_head() == ("embed", "head")
    model.set_embed_and_head("e", "h")
    model.set_eagle3_layers_to_capture([1, 29, 57])
    model.set_eagle3_layers_to_capture()
    assert inner.asked == [("get",), ("set", "e", "h"), ("layers", [1, 29, 57]), ("layers", None)]


def test_graphs_are_captured_with_the_drafts_layers() -> None:
    class Model:
        layers: object = None

        def set_eagle3_layers_to_capture(self, ids: object = "default") -> None:
            self.layers = ids

    class Runner:
        model = Model()
        eagle_use_aux_hidden_state = True
        eagle_aux_hidden_state_layer_ids = (1, 29, 57)

    for text, layers in ((made.OLD[made.GRAPHS], "default"), (patched(made.GRAPHS), (1, 29, 57))):
        scope: dict[str, type] = {}
        made.execute(text, made.GRAPHS, scope)
        runner = Runner()
        scope["CudaGraphRunner"].capture = lambda self: None  # type: ignore[attr-defined]
        scope["CudaGraphRunner"](runner)
        assert runner.model.layers == layers


# --- post-conditions --------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, str, str, str]] = [
    ("S1", "    12: {", "    13: {", f"`{SIZES}` does not list 9, 10 and 12"),
    ("S1", "        8: _SM", "        6: _SM", "12 lists world sizes [2, 4, 6], not [2, 4, 8]"),
    ("S1", "        8: _SM120_MAX_SIZE", "        8: 64 * MiB", "the size of 12 is there 2 times, not once"),
    ("S1", 'int(os.environ.get("SGLANG_STACK_SM120_SYMM_MEM_MAX_MIB", "1"))', "1", "`_SM120_MAX_SIZE` is not read from the environment"),
    ("S2", "is None:", "is not None:", "`if supported_max_sizes is None` is there 0 times, not once"),
    (
        "S2",
        "not supported\", self.device_capability)\n            return",
        "not supported\", self.device_capability)",
        "a device that is not listed does not return",
    ),
    ("S3", "12: []", "12: [8]", "12 has world sizes for multimem, which needs NVLink"),
    ("S3", ".get(self.device_capability, [])", ".get(self.device_capability)", "`_WORLD_SIZES_MULTIMEM.get` has no default"),
    ("S6", "is_sm90_supported() or is_sm100", "is_sm90_supported() or is_sm120", "fusion turns itself on on 12"),
    ("S6", "or is_sm100_supported())", "or is_sm100_supported() or self.fusion)", "fusion turns itself on on 12"),
    ("S6", "(is_sm90_supported() or is_sm100_supported())", "not is_sm90_supported()", "fusion turns itself on on 12"),
    ("S6", "is_sm90_supported() or is_sm100_supported()", "is_sm90_supported()", "fusion no longer turns itself on on 10"),
    ("S6", "    def _handle", "    def again(self):\n        self.enable_flashinfer_allreduce_fusion = True\n\n    def _handle", "fusion turns itself on on 12"),
    ("D1", "// 10 == 12", "// 10 == 13", "sm_120 is not turned off"),
    ("D1", "sm_version // 10 == 12", "sm_version == 120", "sm_121 is not turned off"),
    ("D1", "sm_version // 10 == 12", "sm_version in (100, 120, 121)", "sm_100 is turned off"),
    ("E1", "        return self.language_model.get", "        self.language_model.get", "`get_embed_and_head` does not return what the language model does"),
    ("E2", "set_embed_and_head(embed, head)\n", "set_embed_and_head(head, embed)\n", "`set_embed_and_head` passes ['head', 'embed'], not ['embed', 'head']"),
    ("E3", "layer_ids=None", "layer_ids", "`set_eagle3_layers_to_capture` has no default"),
    ("E4", "(self.model_runner.eagle_aux_hidden_state_layer_ids)", "()", "line 5 calls `set_eagle3_layers_to_capture` without the draft's layers"),
    ("E4", "set_eagle3_layers_to_capture", "set_layers", "`set_eagle3_layers_to_capture` is not called"),
    ("F1", "def gen_trtllm_comm_module", "gen = 1\ndef gen_comm", "`gen_trtllm_comm_module` is there 0 times, not once"),
    # What leaves the remedy in the file and takes away what it does.
    ("S1", "    12: {\n", "    12: {\n        **TORCH_SYMM_MEM_ALL_REDUCE_MAX_SIZES,\n", f"`{SIZES}` is changed, or used, where it is made"),
    ("S1", "        8: _SM120_MAX_SIZE,\n    },\n}", f"        8: _SM120_MAX_SIZE,\n    }},\n}}\n{SIZES}[12] = {{}}", f"`{SIZES}` is changed, or used, where it is made"),
    ("S1", f"{SIZES} = {{", f"_SM120_MAX_SIZE *= 1024\n{SIZES} = {{", "`_SM120_MAX_SIZE` gets a value 2 times, not once"),
    ("S2", "        if supported_max_sizes is None", "        supported_max_sizes = supported_max_sizes or {}\n        if supported_max_sizes is None", "`supported_max_sizes` gets a value 2 times, not once"),
    ("S3", "        12: [],\n    }\n", "        12: [],\n    }\n    _WORLD_SIZES_MULTIMEM[12] = [8]\n", "`_WORLD_SIZES_MULTIMEM` is changed, or used, elsewhere"),
    ("S3", "        self.disabled = True\n", "        self.disabled = True\n        self._WORLD_SIZES_MULTIMEM[12] = [8]\n", "`_WORLD_SIZES_MULTIMEM` is changed, or used, elsewhere"),
    ("S3", "        return out\n", "        return out\n\n\nTorchSymmMemCommunicator._WORLD_SIZES_MULTIMEM[12] = [8]\n", "`_WORLD_SIZES_MULTIMEM` is changed, or used, elsewhere"),
    ("D1", "== 12:", "== 12 and False:", "`sm_version // 10 == 12 and False` rests on a constant"),
    ("D1", "== 12:", "== 12 and sm_version == 1:", "sm_120 is not turned off"),
    ("D1", "== 12:", "== 12 and not sm_version >= 120:", "sm_120 is not turned off"),
    ("D1", "    if sm_version //", "    sm_version = 90\n    if sm_version //", "`sm_version` gets a value 2 times, not once"),
    ("D1", "sm_version = get_device_sm()", "sm_version = 90", "`sm_version` is `90`"),
    ("D1", "== 12:\n        return False", "== 12:\n        if sm_version == 1:\n            return False", "sm_120 is not turned off"),
    ("E1", "        return self.language_model.get", "        self = self.other\n        return self.language_model.get", "`get_embed_and_head` changes `self`"),
    ("E2", "        self.language_model.set_e", "        return\n        self.language_model.set_e", "`set_embed_and_head` does more than to hand on"),
    ("E2", "        self.language_model.set_e", "        embed = None\n        self.language_model.set_e", "`set_embed_and_head` changes `embed`"),
    ("E2", "        self.language_model.set_e", "        if embed:\n            self.language_model.set_e", "`set_embed_and_head` does not end with the language model's"),
    ("E3", "        self.language_model.set_eagle3", "        return\n        self.language_model.set_eagle3", "`set_eagle3_layers_to_capture` does more than to hand on"),
    ("E3", "        self.language_model.set_eagle3", "        raise AttributeError\n        self.language_model.set_eagle3", "`set_eagle3_layers_to_capture` does more than to hand on"),
    ("E3", "        self.language_model.set_eagle3", "        if True:\n            raise AttributeError\n        self.language_model.set_eagle3", "`set_eagle3_layers_to_capture` does more than to hand on"),
    ("E3", "        self.language_model.set_eagle3", "        layer_ids = None\n        self.language_model.set_eagle3", "`set_eagle3_layers_to_capture` changes `layer_ids`"),
]  # fmt: skip


@pytest.mark.parametrize(("site", "before", "after", "wrong"), WRONG)
def test_a_post_condition_sees_what_is_wrong(site: str, before: str, after: str, wrong: str) -> None:
    file = FILE_OF.get(site, SITES[site].file)
    assert SITES[site].verify(patched(file)) == ""
    assert SITES[site].verify(swapped(patched(file), (before, after))) == wrong


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        ("    return gen_jit", "    flags = []\n    return gen_jit", "`flags` gets a value 2 times, not once"),
        ("cflags=flags", "cflags=[]", "`gen_jit_spec` gets ['[]'], not the flags"),
    ],
)
def test_a_post_condition_of_flags_that_do_not_arrive(before: str, after: str, wrong: str) -> None:
    head, name, function = patched(made.COMM).partition("def gen_trtllm_comm_module")
    assert SITES["F1"].verify(head + name + swapped(function, (before, after))) == wrong


def test_a_post_condition_of_a_file_that_does_not_parse() -> None:
    assert SITES["S1"].verify("(") == "the file does not parse: '(' was never closed, line 1"


def test_sites_say_what_they_are_for() -> None:
    for site in SITES.values():
        assert isinstance(site, Site)
        assert site.what and site.consequence and site.source.startswith("shared/facts/patches.md section A")
