"""The patch engine: spans of text by the syntax tree, the bound on the whole file, diffs that lead back."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.errors import BuildError, IntegrityError
from builder.patches.engine import Edit, Module, Site, State, UnknownShapeError, decode, outside_of, unified
from builder.smoke import patched
from builder.smoke.patched import reverse


def call(module: Module) -> ast.Call:
    """The first call of a source."""
    return next(node for node in ast.walk(module.tree) if isinstance(node, ast.Call))


# --- spans ------------------------------------------------------------------------------------------------------------


def test_columns_are_bytes_and_positions_are_characters() -> None:
    module = Module('ä = "größe" + f(1)  # ü\nb = 2\n')
    assert module.apply([module.replace(call(module), "g(2)")]) == 'ä = "größe" + g(2)  # ü\nb = 2\n'


def test_a_form_feed_ends_no_line() -> None:
    module = Module("a = 1\n\x0c\nb = f(1)\n")
    assert module.apply([module.replace(call(module), "2")]) == "a = 1\n\x0c\nb = 2\n"


def test_an_edit_takes_over_how_lines_end() -> None:
    module = Module("a = 1\r\nif a:\r\n    b = f(1)\r\n")
    body = module.tree.body
    assert isinstance(body[1], ast.If)
    edits = [module.before(body[1].body[0], "# new\nc = 3"), module.after(body[0], "d = 4")]
    assert module.apply(edits) == "a = 1\r\nd = 4\r\nif a:\r\n    # new\r\n    c = 3\r\n    b = f(1)\r\n"


def test_lines_behind_the_last_one_that_has_no_end() -> None:
    module = Module("def f():\n    return 1")
    assert module.apply([module.after(module.tree.body[0], "a = 1")]) == "def f():\n    return 1\na = 1\n"


def test_lines_before_a_decorated_definition() -> None:
    module = Module("@f\ndef g():\n    pass\n")
    assert module.apply([module.before(module.tree.body[0], "import os\n")]) == "import os\n\n@f\ndef g():\n    pass\n"


def test_an_empty_line_is_not_indented() -> None:
    module = Module("class A:\n    a = 1\n")
    owner = module.tree.body[0]
    assert isinstance(owner, ast.ClassDef)
    assert module.apply([module.after(owner.body[0], "\nb = 2")]) == "class A:\n    a = 1\n\n    b = 2\n"


def test_edits_that_overlap_are_a_fault() -> None:
    with pytest.raises(ValueError, match="two edits overlap"):
        Module("abc").apply([Edit(0, 2, ""), Edit(1, 3, "")])


@pytest.mark.parametrize(
    ("text", "looked_for"),
    [
        ("a = (\n", "a Python source (it does not parse: '(' was never closed (<unknown>, line 1))"),
        ("a = 1\rb = 2\n", "lines that end with LF or CRLF"),
    ],
)
def test_a_source_that_cannot_be_edited(text: str, looked_for: str) -> None:
    with pytest.raises(UnknownShapeError) as caught:
        Module(text)
    assert str(caught.value) == looked_for


def test_a_byte_order_mark_is_kept_apart() -> None:
    assert decode("\ufeffa = 1\n".encode()) == ("\ufeff", "a = 1\n")
    assert decode(b"a = 1\n") == ("", "a = 1\n")
    with pytest.raises(UnknownShapeError) as caught:
        decode(b"a = '\xff'\n")
    assert str(caught.value) == "a source in UTF-8 (invalid start byte at byte 5)"


# --- a site -----------------------------------------------------------------------------------------------------------


def _plan(module: Module) -> list[Edit]:
    if "OLD" in module.text:
        at = module.text.index("OLD")
        return [Edit(at, at + 3, "NEW")]
    if "NEW" in module.text:
        return []
    raise UnknownShapeError("`OLD`")


SITE = Site("X1", "made", "pack", "pack/a.py", "OLD", "a word", "it is new", "made up", ("word",), _plan)


@pytest.fixture(autouse=True)
def post_condition(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the post-condition of the made site finds wrong: nothing, until a test says so."""
    wrong: list[str] = []
    monkeypatch.setattr("builder.patches.engine.check_site", lambda site, text: "".join(wrong))
    return wrong


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("word = 'OLD'\n", State.NEEDED),
        ("word = 'NEW'\n", State.NATIVE),
        ("word = ''\n", State.UNKNOWN),
        ("(", State.UNKNOWN),
    ],
)
def test_the_state_of_a_text(text: str, state: State) -> None:
    assert SITE.probe(text) is state


def test_applied_twice_is_applied_once() -> None:
    once = SITE.apply("a = 1\nword = 'OLD'\n")
    assert once == "a = 1\nword = 'NEW'\n"
    assert SITE.apply(once) == once


def test_an_unknown_shape_is_not_passed_over() -> None:
    with pytest.raises(BuildError) as caught:
        SITE.apply("word = ''\n")
    assert str(caught.value) == (
        "error: site X1 of pack is of no known shape\n"
        "  at: pack/a.py\n"
        "  because: looked for: `OLD`\n"
        "    it is there for: a word\n"
        "  hint: `builder patches MATRIX` shows every site; take a release that is known, or leave out the set `made`"
    )


def went_wrong(text: str) -> str:
    with pytest.raises(IntegrityError) as caught:
        SITE.apply(text)
    assert caught.value.what == "the patch at site X1 went wrong"
    return caught.value.because


def test_a_post_condition_that_does_not_hold(post_condition: list[str]) -> None:
    post_condition.append("the word is too short")
    assert went_wrong("word = 'OLD'\n") == "afterwards it does not hold: the word is too short"


def test_an_edit_in_another_place_than_the_sites() -> None:
    # As `patch` with fuzz did on flashinfer 0.6.18: the right edit in the wrong function.
    assert went_wrong("def other():\n    return 'OLD'\n") == "`other` differs, which the site does not change"


def test_a_second_definition_of_what_is_edited() -> None:
    assert went_wrong("word = 'OLD'\nword = 3\n") == "`word` is there 2 times"


def test_an_edit_that_leaves_something_to_do() -> None:
    assert went_wrong("word = 'OLD OLD'\n") == "afterwards the site is needed: the edit changed nothing"


# --- the bound --------------------------------------------------------------------------------------------------------

BEFORE = (
    "import os\nA = 1\nclass C:\n    B = 2\n    def m(self):\n        return 1\nif A:\n    A = 3\ndef f():\n    pass\n"
)


@pytest.mark.parametrize(
    ("old", "new", "places", "found"),
    [
        ("return 1", "return 2", ("C.m",), ""),
        ("return 1", "return 2", ("m",), "`C.m`"),
        ("B = 2", "B = 3", ("C.B",), ""),
        ("A = 1", "A = 2", (), "`A`"),
        ("class C:", "class C(A):", ("C.m", "C.B"), "`class C`"),
        ("A = 3", "A = 4", ("A",), "`statement`"),
        ("import os\n", "import os\nimport re\n", ("import",), ""),
        ("import os\n", "", (), "`import`"),
        ("def f", "def g", ("f",), "`g`"),
        ("def f():\n    pass\n", "", (), "`f`"),
        ("# none", "", (), ""),
    ],
)
def test_what_may_differ(old: str, new: str, places: tuple[str, ...], found: str) -> None:
    expected = f"{found} differs, which the site does not change" if found else ""
    assert outside_of(places, BEFORE, BEFORE.replace(old, new)) == expected


def test_order_counts() -> None:
    assert outside_of((), "a = 1\nb = 2\n", "b = 2\na = 1\n") == "`a` differs, which the site does not change"


# --- diffs ------------------------------------------------------------------------------------------------------------


def test_a_diff_reads_as_one() -> None:
    assert unified("pack/a.py", b"a\nb\n", b"a\nc") == (
        "--- a/pack/a.py\n+++ b/pack/a.py\n@@ -1,2 +1,2 @@\n a\n-b\n+c\n\\ No newline at end of file\n"
    )


LINES = st.lists(st.sampled_from(["a", "b", "", "c\x0c", "d\r", "ä", "@@ -1 +1 @@", "-- x"]), max_size=12)


@given(LINES, LINES, st.booleans(), st.booleans())
def test_a_diff_leads_back(old: list[str], new: list[str], old_end: bool, new_end: bool) -> None:
    before = ("\n".join(old) + ("\n" if old_end else "")).encode()
    after = ("\n".join(new) + ("\n" if new_end else "")).encode()
    if before != after:
        assert reverse(unified("x", before, after), after) == before


def test_a_diff_of_another_file_does_not_lead_back() -> None:
    diff = unified("x", b"a\nb\n", b"a\nc\n")
    with pytest.raises(ValueError, match=r"line 2 of the file is not the diff's"):
        reverse(diff, b"a\nd\n")


def test_every_site_has_a_post_condition() -> None:
    from builder.patches.apply import SETS

    assert {site.id for sites in SETS.values() for site in sites} == set(patched.POSTCONDITIONS)
