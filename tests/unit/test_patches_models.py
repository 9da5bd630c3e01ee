"""Which model classes can be EAGLE-3's target: read from made modules, as a user of `builder patches --models` sees it."""

from __future__ import annotations

import gc
from textwrap import dedent, indent

import pytest

from builder.patches.models import Inner, Kind, ModelTable, Passes, Row, model_table

HOOKS = """
    def get_embed_and_head(self): ...
    def set_embed_and_head(self, embed, head): ...
    def set_eagle3_layers_to_capture(self, layer_ids=None): ...
"""
CAPABLE = f"""
class Able:
    def forward(self, input_ids):
        hidden_states, aux_hidden_states = self.model(input_ids)
        return self.logits_processor(hidden_states, aux_hidden_states)
{HOOKS}
class Unable:
    def forward(self, input_ids): ...

EntryClass = [Able, Unable]
"""
ALL = ("get_embed_and_head", "set_embed_and_head", "set_eagle3_layers_to_capture")


def table(**modules: str) -> ModelTable:
    """The table of made modules; `a__b` is a/b.py."""
    texts = {f"sglang/srt/models/{name.replace('__', '/', 1)}.py": dedent(text) for name, text in modules.items()}
    return model_table(texts.get, ["sglang/__init__.py", "sglang/srt/models/notes.txt", *texts])


def row(name: str, **modules: str) -> Row:
    (found,) = [row for row in table(**modules).rows if row.name == name]
    return found


def wrapper(init: str, forward: str = "return self.language_model(input_ids)", extra: str = "") -> Row:
    """A class that holds something, beside a language model that has the methods and one that has not."""
    text = (
        "from sglang.srt.models.llm import Able, Unable\n"
        "from sglang.srt.managers.mm_utils import general_mm_embed_routine\n"
        f"{dedent(extra)}\n"
        "class Wrapper:\n"
        f"    def __init__(self, config):\n{indent(dedent(init), ' ' * 8)}\n"
        f"    def forward(self, input_ids):\n{indent(dedent(forward), ' ' * 8)}\n"
        "    def helper(self, input_ids):\n        return self.language_model(input_ids)\n"
        "EntryClass = Wrapper\n"
    )
    return row("Wrapper", llm=CAPABLE, wrapper=text)


# What is registered


def test_every_form_of_registering() -> None:
    found = table(
        one="class One: ...\nEntryClass = One",
        two="class Two: ...\nclass Three: ...\nclass Helper: ...\nEntryClass = [Two, Three]",
        entry="from sglang.srt.models.parts.inner import EntryClass",
        parts__inner="class Four: ...\nclass Five: ...\nEntryClass = [Four]",
        none="class Six: ...",
    )
    assert {row.name: row.file for row in found.rows} == {
        "One": "sglang/srt/models/one.py",
        "Two": "sglang/srt/models/two.py",
        "Three": "sglang/srt/models/two.py",
        "Four": "sglang/srt/models/parts/inner.py",
    }


def test_nothing_else_is_read() -> None:
    asked: list[str] = []

    def read(file: str) -> str:
        asked.append(file)
        return "class A: ...\nEntryClass = A"

    names = ["sglang/srt/models/a.py", "sglang/srt/models/b/c.py", "sglang/srt/layers/d.py", "flashinfer/e.py"]
    assert [row.name for row in model_table(read, names).rows] == ["A"]
    assert set(asked) == {"sglang/srt/models/a.py"}


def test_a_module_that_does_not_parse_is_told() -> None:
    found = table(broken="EntryClass = [", fine="class Fine: ...\nEntryClass = Fine")
    assert found.unread == ("sglang/srt/models/broken.py",)
    assert found.as_text().endswith("\n\nnot read, they do not parse:\n  sglang/srt/models/broken.py")


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    table(one="class One: ...\nEntryClass = One")
    assert gc.isenabled()


# What a class has


@pytest.mark.parametrize(
    ("name", "text", "kind", "missing"),
    [
        ("Own", f"class Own:{HOOKS}", Kind.CAPABLE, ()),
        ("None_", "class None_: ...", Kind.LACKS, ALL),
        (
            "NoSet",
            "class NoSet:\n    def get_embed_and_head(self): ...\n    def set_eagle3_layers_to_capture(self): ...",
            Kind.CAPABLE,
            ALL[1:2],
        ),
        ("NoLayers", "class NoLayers:\n    def get_embed_and_head(self): ...", Kind.LACKS, ALL[1:]),
        ("AbleEagle3", f"class AbleEagle3:{HOOKS}", Kind.DRAFT, ()),
        ("AbleForCausalLMMTP", "class AbleForCausalLMMTP: ...", Kind.DRAFT, ALL),
        ("AbleNextN", "class AbleNextN: ...", Kind.DRAFT, ALL),
        ("DFlashDraftModel", "class DFlashDraftModel: ...", Kind.DRAFT, ALL),
        (
            "Branch",
            "class Branch:\n    if True:\n        def get_embed_and_head(self): ...\n    set_eagle3_layers_to_capture = print",
            Kind.CAPABLE,
            ALL[1:2],
        ),
    ],
)
def test_what_a_class_is(name: str, text: str, kind: Kind, missing: tuple[str, ...]) -> None:
    found = row(name, module=f"{text}\nEntryClass = {name}")
    assert (found.kind, found.missing) == (kind, missing)


@pytest.mark.parametrize(
    ("imports", "base"),
    [
        ("from sglang.srt.models.llm import Able", "Able"),
        ("from sglang.srt.models.llm import Able as Base", "Base"),
        ("from .llm import Able", "Able"),
        ("from sglang.srt.models import llm", "llm.Able"),
        ("import sglang.srt.models.llm as llm", "llm.Able"),
        ("from sglang.srt.models.other import Able", "Able"),
        ("try:\n    from sglang.srt.models.llm import Able\nexcept ImportError:\n    Able = None", "Able"),
        ("from sglang.srt.models.llm import Able\nBase = Able", "Base"),
        ("from torch import nn\nfrom sglang.srt.models.llm import Unable, Able", "nn.Module, Unable, Able"),
    ],
)
def test_methods_of_a_base_in_another_module(imports: str, base: str) -> None:
    text = f"{imports}\nclass Heir({base}): ...\nEntryClass = Heir"
    assert row("Heir", llm=CAPABLE, other="from sglang.srt.models.llm import Able", heir=text).kind is Kind.CAPABLE


@pytest.mark.parametrize("imports", ["from elsewhere import Able", "from sglang.srt.layers.llm import Able", ""])
def test_a_base_from_elsewhere_is_not_guessed(imports: str) -> None:
    assert row("Heir", llm=CAPABLE, heir=f"{imports}\nclass Heir(Able): ...\nEntryClass = Heir").kind is Kind.LACKS


def test_modules_that_import_each_other_in_a_circle() -> None:
    modules = {"a": "from sglang.srt.models.b import X\nclass Heir(X): ...\nEntryClass = Heir"}
    modules["b"] = "from sglang.srt.models.a import X"
    assert row("Heir", **modules).kind is Kind.LACKS


# The language model in a class


ONE = Inner("language_model", ("Able",), ("Able",))
BOTH = Inner("language_model", ("Able", "Unable"), ("Able",))


@pytest.mark.parametrize(
    ("init", "inner"),
    [
        ("self.language_model = Able(config)", ONE),
        ("self.llm = Able(config)", Inner("llm", ("Able",), ("Able",))),
        ("self.vision = Unable()\nself.thinker = Able(config)", Inner("thinker", ("Able",), ("Able",))),
        ("if config:\n    self.language_model = Able()\nelse:\n    self.language_model = Unable()", BOTH),
        ("self.language_model = Able() if config else Unable()", BOTH),
        ("kind = Able if config else Unable\nself.language_model = kind(config)", BOTH),
        ("self.language_model = {1: Able, 2: Unable}[config.version]()", BOTH),
        ("kinds = {1: Able, 2: Unable}\nself.language_model = kinds.get(config.version)()", BOTH),
        ("kind = Able\nif config:\n    kind = Unable\nself.language_model = kind(config)", BOTH),
        ("made = Able(config)\nself.language_model = made", ONE),
        ("self.language_model: Able = Able(config)", ONE),
        ("from sglang.srt.models.llm import Able as Lazy\nself.language_model = Lazy(config)", ONE),
    ],
)
def test_a_language_model_that_a_class_holds(init: str, inner: Inner) -> None:
    found = wrapper(init)
    assert (found.kind, found.inner) == (Kind.WRAPS, inner)


@pytest.mark.parametrize(
    ("parameter", "classes"), [("kind=Able", ("Able",)), ("*, kind=Able", ("Able",)), ("kind", ())]
)
def test_a_language_model_of_a_class_that_is_a_parameter(parameter: str, classes: tuple[str, ...]) -> None:
    text = f"""
        from sglang.srt.models.llm import Able
        from sglang.srt.models.llm import Able as kind
        class Wrapper:
            def __init__(self, {parameter}):
                self.language_model = kind()
        EntryClass = Wrapper
    """
    assert row("Wrapper", llm=CAPABLE, wrapper=text).inner == Inner("language_model", classes, classes)


def test_a_language_model_that_a_method_makes() -> None:
    text = """
        from sglang.srt.models.llm import Able
        class Base:
            def __init__(self):
                self.llm = self.make()
            def make(self):
                raise NotImplementedError
        class Wrapper(Base):
            def make(self):
                return Able()
        EntryClass = [Wrapper, Base]
    """
    assert row("Wrapper", llm=CAPABLE, wrapper=text).inner == Inner("llm", ("Able",), ("Able",))
    assert row("Base", llm=CAPABLE, wrapper=text).inner == Inner("llm", (), ())


@pytest.mark.parametrize(
    ("init", "kind"),
    [("super().__init__()", Kind.WRAPS), ("pass", Kind.LACKS), ("self.super().__init__()", Kind.LACKS)],
)
def test_what_a_base_holds_counts_where_its_constructor_runs(init: str, kind: Kind) -> None:
    text = f"""
        from sglang.srt.models.llm import Able
        class Base:
            def __init__(self):
                self.language_model = Able()
        class Wrapper(Base):
            def __init__(self):
                {init}
        EntryClass = Wrapper
    """
    assert row("Wrapper", llm=CAPABLE, wrapper=text).kind is kind


@pytest.mark.parametrize(
    ("init", "inner"),
    [
        ("self.language_model = Unable()", Inner("language_model", ("Unable",), ())),
        ("self.language_model = registry.resolve(config)()", Inner("language_model", (), ())),
        ("self.encoder = Unable()", None),
        ("self.language_model = None", None),
    ],
)
def test_a_class_whose_language_model_does_not_help(init: str, inner: Inner | None) -> None:
    found = wrapper(init)
    assert (found.kind, found.inner, found.passes) == (Kind.LACKS, inner, None)


def proxy(behind: str) -> Row:
    text = f"""
        from sglang.srt.models.llm import Able, Unable
        class Old:
            def __init__(self):
                self.llm = Able()
            def forward(self, input_ids):
                return self.llm(input_ids)
            def pad_input_ids(self): ...
        class New:
            def __init__(self):
                self.llm = Unable()
            def forward(self, input_ids):
                return self.llm(input_ids)
            def pad_input_ids(self): ...
        class Proxy:
            def __init__(self, version):
                self.real = {behind}
            def __getattr__(self, name):
                return getattr(self.real, name)
        EntryClass = Proxy
    """
    return row("Proxy", llm=CAPABLE, proxy=text)


def test_a_class_that_hands_everything_on() -> None:
    assert proxy("Able()").kind is Kind.CAPABLE
    assert proxy("(Able if version else Unable)()").missing == ALL
    found = proxy("{1: Old, 2: New}[version]()")
    assert (found.kind, found.multimodal, found.passes) == (Kind.WRAPS, True, Passes.YES)
    assert found.inner == Inner("real.llm", ("Able", "Unable"), ("Able",))


# Whether `forward` passes through the language model's


ROUTINE = "general_mm_embed_routine(input_ids=input_ids, multimodal_model=self, language_model={})"


@pytest.mark.parametrize(
    ("forward", "passes"),
    [
        ("return self.language_model(input_ids)", Passes.YES),
        ("return self.language_model.forward(input_ids)", Passes.YES),
        (f"return {ROUTINE.format('self.language_model')}", Passes.YES),
        (f"return mm_utils.{ROUTINE.format('self.language_model')}", Passes.YES),
        (f"hidden_states = {ROUTINE.format('self.language_model')}\nreturn hidden_states", Passes.YES),
        ("return self.helper(input_ids)", Passes.YES),
        ("if input_ids:\n    return self.language_model(input_ids)\nreturn self.helper(input_ids)", Passes.YES),
        (f"return {ROUTINE.format('self.language_model.model')}", Passes.NO),
        ("return self.language_model.model(input_ids)", Passes.NO),
        ("hidden = self.language_model(input_ids)\nreturn self.logits_processor(hidden)", Passes.NO),
        ("if input_ids:\n    return self.language_model(input_ids)\nreturn self.pooler(input_ids)", Passes.NO),
        ("hidden, rest = self.language_model(input_ids)\nreturn hidden", Passes.UNKNOWN),
        ("hidden = self.language_model(input_ids)\nhidden += 1\nreturn hidden", Passes.UNKNOWN),
        ("hidden = self.language_model(input_ids)\nhidden, rest = hidden\nreturn hidden", Passes.UNKNOWN),
        ("return self.language_model(input_ids) * 2", Passes.UNKNOWN),
        ("return input_ids", Passes.UNKNOWN),
        ("return fused(input_ids)", Passes.UNKNOWN),
        ("return self.forward(input_ids)", Passes.UNKNOWN),
        ("pass", Passes.UNKNOWN),
    ],
)
def test_whether_forward_passes_through(forward: str, passes: Passes) -> None:
    assert wrapper("self.language_model = Able()", forward).passes is passes


def test_a_forward_that_is_a_bases() -> None:
    text = """
        from sglang.srt.models.llm import Able
        class Top:
            def __init__(self):
                self.language_model = Able()
            def forward(self, input_ids):
                return self.logits_processor(input_ids)
        class Left(Top): ...
        class Right(Top):
            def forward(self, input_ids):
                return self.language_model(input_ids)
        class Both(Left, Right): ...
        class Over(Right):
            def forward(self, input_ids):
                return super().forward(input_ids)
        EntryClass = [Left, Right, Both, Over]
    """
    rows = {row.name: row.passes for row in table(llm=CAPABLE, wrapper=text).rows}
    assert rows == {
        "Left": Passes.NO,
        "Right": Passes.YES,
        "Both": Passes.YES,
        "Over": Passes.YES,
        "Able": None,
        "Unable": None,
    }


def test_a_language_model_that_has_no_word_for_the_hidden_states() -> None:
    silent = f"class Silent:\n    def forward(self, input_ids):\n        return input_ids\n{HOOKS}"
    assert wrapper("self.language_model = Silent()", extra=silent).passes is Passes.UNKNOWN


# What a user reads


KIMI = f"""
from sglang.srt.models.llm import Able
class KimiK25ForConditionalGeneration:
    def __init__(self, config):
        self.language_model = Able(config)
    def pad_input_ids(self): ...
    def forward(self, input_ids):
        return {ROUTINE.format("self.language_model")}
class KimiVLForConditionalGeneration(KimiK25ForConditionalGeneration): ...
class Deaf(KimiK25ForConditionalGeneration):
    def get_embed_and_head(self): ...
    def forward(self, input_ids):
        return self.logits(input_ids)
class LateForCausalLM:
    def __init__(self, config):
        self.llm = resolve(config)(config)
    def pad_input_ids(self): ...
class AbleEagle3: ...
EntryClass = [KimiK25ForConditionalGeneration, KimiVLForConditionalGeneration, Deaf, LateForCausalLM, AbleEagle3]
"""


def test_the_table_for_people() -> None:
    assert (
        table(llm=CAPABLE, kimi=KIMI).as_text()
        == """\
7 model classes, 1 of them drafts; of the other 6, 1 have the methods that EAGLE-3 calls on its target, 5 lack one
  by method: `get_embed_and_head` 4, `set_embed_and_head` 5, `set_eagle3_layers_to_capture` 5 lack it; 1 have all three
  multimodal: 4; 4 lack one, 3 of these hold a language model that has them

wraps, 3: lack a method, and hold a language model that has it: methods that hand on to it are enough where `forward` passes through it
  Deaf  kimi.py  lacks set_embed_and_head, set_eagle3_layers_to_capture
      `language_model` is Able; `forward` does not pass through it: handing on is not enough
  KimiK25ForConditionalGeneration  kimi.py  lacks all three
      `language_model` is Able; `forward` passes through it
      the patch set `eagle3` adds them
  KimiVLForConditionalGeneration  kimi.py  lacks all three
      `language_model` is Able; `forward` passes through it

capable, 1: have the methods; that a draft works with them is not shown by that
  Able  llm.py

lacks, 2: lack a method, and no language model that has it was found in them
  LateForCausalLM  kimi.py  lacks all three
      `llm` is of a class that is chosen when it runs
  Unable  llm.py  lacks all three

draft, 1: models that draft, by their names
  AbleEagle3  kimi.py"""
    )


def test_a_language_model_of_several_classes_is_told() -> None:
    kinds = "from sglang.srt.models.llm import Able, Unable\nclass Third(Able): ...\n"
    init = "self.language_model = {1: Able, 2: Third, 3: Unable}[config]()"
    text = f"{kinds}class Wrapper:\n    def __init__(self, config):\n        {init}\nEntryClass = Wrapper"
    told = "      `language_model` is Able or Third, or Unable, which cannot; whether `forward` passes through it is not known"
    assert told in table(llm=CAPABLE, wrapper=text).as_text().split("\n")
    text = text.replace("1: Able, 2: Third, ", "")
    told = "      `language_model` is Unable, which cannot either"
    assert told in table(llm=CAPABLE, wrapper=text).as_text().split("\n")


def test_the_table_as_data() -> None:
    found = table(llm=CAPABLE, kimi=KIMI).as_json()
    assert found["counts"] == {
        "registered": 7,
        "non_draft": 6,
        "lack_get_embed_and_head": 4,
        "lack_set_embed_and_head": 5,
        "lack_set_eagle3_layers_to_capture": 5,
        "have_all": 1,
        "capable": 1,
        "lacking": 5,
        "multimodal": 4,
        "multimodal_lacking": 4,
        "multimodal_wraps": 3,
    }
    assert found["unread"] == []
    assert found["models"][1] == {
        "class": "KimiK25ForConditionalGeneration",
        "file": "sglang/srt/models/kimi.py",
        "state": "wraps",
        "multimodal": True,
        "missing": list(ALL),
        "inner": {"attribute": "language_model", "classes": ["Able"], "capable": ["Able"]},
        "passes_through": "yes",
        "edit": "eagle3",
    }
    assert (found["models"][3]["class"], found["models"][3]["inner"], found["models"][3]["passes_through"]) == (
        "Able",
        None,
        None,
    )
