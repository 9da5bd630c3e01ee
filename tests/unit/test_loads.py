"""How `python -m tests.loads` counts: a verdict beside what became of a file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.abi.model import Extension, MissingSymbol
from builder.nativefacts import NEEDED, ElfFacts
from builder.smoke.load_child import OPENED, REFUSED
from tests.loads import Opened, compare, judge

OK = Extension("p/x.so", "p 1", "ok", 3)
BROKEN = replace(OK, verdict="broken", missing_symbols=(MissingSymbol("f", None, "torch 2"),))
NO_LIBRARY = "libcudart.so.12: cannot open shared object file: No such file or directory"


@pytest.mark.parametrize(
    ("item", "opened", "said"),
    [
        (OK, Opened(OPENED, ""), "yes"),
        (OK, Opened(REFUSED, "p/x.so: undefined symbol: g"), "no"),
        (OK, Opened(-6, "terminate called"), "an ok that does not load"),
        (OK, Opened(None, ""), "an ok that does not load"),
        (replace(OK, packages=("libnuma1",)), Opened(REFUSED, NO_LIBRARY), "no"),
        (
            replace(OK, packages=("libnuma1",)),
            Opened(REFUSED, NO_LIBRARY.replace("libcudart.so.12", "libnuma.so.1")),
            "needs libnuma1 here",
        ),
        (replace(OK, by_design="none"), Opened(REFUSED, NO_LIBRARY), "by design"),
        (replace(OK, by_design="none"), Opened(OPENED, ""), "no: by design, and it opens"),
        (BROKEN, Opened(OPENED, ""), "no"),
        (BROKEN, Opened(-11, ""), "no"),
        (BROKEN, Opened(REFUSED, "p/x.so: undefined symbol: f"), "yes"),
        (BROKEN, Opened(REFUSED, "p/x.so: undefined symbol: g"), "yes, for another reason"),
        (BROKEN, Opened(REFUSED, NO_LIBRARY), "yes, for another reason"),
        (replace(BROKEN, missing_libraries=("libcudart.so.12",)), Opened(REFUSED, NO_LIBRARY), "yes"),
        (replace(OK, verdict="uncertain"), Opened(REFUSED, NO_LIBRARY), "nothing was said"),
    ],
)
def test_a_verdict_and_the_loader(item: Extension, opened: Opened, said: str) -> None:
    assert judge(item, opened) == said


def test_a_difference_that_is_not_marked() -> None:
    true = ElfFacts("x86_64", "dyn", needed=("a.so",))
    assert compare(true, true) == ("identical", [])
    assert compare(replace(true, uncertain=(NEEDED,)), true) == ("marked", [])
    assert compare(replace(true, needed=(), uncertain=(NEEDED,)), true) == ("marked", ["needed"])
    assert compare(replace(true, needed=()), true) == ("different", ["needed"])
    assert compare(replace(true, machine="aarch64", uncertain=(NEEDED,)), true) == ("different", ["machine"])
