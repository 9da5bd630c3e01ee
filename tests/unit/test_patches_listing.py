"""`builder patches`: what it prints, as text, JSON, diff and table, and its exit status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder import cli
from builder.facts import SiteFact, parse_facts
from builder.lock import Artefact, lock_path, write_lock
from builder.patches import apply, noted, releases
from builder.patches.apply import SETS, SiteState, site_facts
from builder.patches.engine import State
from builder.patches.listing import (
    Listing,
    Package,
    as_json,
    as_table,
    as_text,
    cost,
    listing,
    release_listing,
)
from builder.patches.noted import NOTED, NotedState
from builder.patches.releases import Traffic
from builder.patches.source import Source
from builder.remote import open_local
from builder.yamlsource import SourceError
from tests import patch_made as made
from tests.made import TINY, artefact, lock_of
from tests.made import tiny as matrix_of
from tests.patch_made import make_wheel, sglang_wheel


class Stack:
    """A locked matrix and the wheels of its lock, opened as `builder.patches.releases.Releases` does it."""

    traffic = Traffic(1_234_000, 13_000_000, 5)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tiny.yaml"
        self.wheels: dict[str, Path] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []

    def write(self, extra: str, *wheels: Path) -> None:
        """Write the matrix and its lock, of these wheels."""
        self.path.write_text(TINY + extra)
        locked = []
        for wheel in wheels:
            name, version = wheel.name.split("-")[:2]
            self.wheels[name.replace("_", "-")] = wheel
            locked.append(artefact(name.replace("_", "-"), version))
        locked.append(artefact("idna", "3.7"))
        write_lock(lock_of(matrix_of(extra).matrix, *locked), lock_path(self.path))

    def artefact(self, wanted: Artefact, indexes: Mapping[str, str]) -> Source:
        self.asked.append((wanted.name, dict(indexes)))
        return open_local(self.wheels[wanted.name])

    def release(self, name: str, version: str) -> Source:
        self.asked.append((name, {"version": version}))
        return open_local(self.wheels[name])


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path)


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base sets alone: what is opted into has words of its own."""
    for name in SETS:
        if "-" in name:
            monkeypatch.setitem(apply.SETS, name, ())


FLASHINFER = """\
sets that the matrix asks for: sm120

flashinfer-python 0.6.4 (unlisted: its outcome is in no facts yet)
  needed   F1
  F1   needed   flashinfer/jit/comm.py
       what     the architectures that the fused all-reduce is compiled for
       patch    it compiles for 12.0a as well; nothing calls it on SM120 unless sglang's gate is
                opened
       without  the fused all-reduce does not compile for 12.x (`No supported CUDA architectures
                found for major versions [9, 10]`)
       risk     it was compiled for sm_120a and never run there; a `flashinfer-jit-cache` with its
                own build makes it void
       upstream native since 0.6.17 (flashinfer #3903), needed up to 0.6.16
       set      sm120
       alone    nothing: sglang's own gate stays shut
  the patches change 1 file: +1 -1 lines

flashinfer-python 0.6.4, noted, not patched
  F7   needed   flashinfer/comm/cuda_ipc.py
       what     which libcudart the peers' memory is opened by
       without  `import flashinfer.comm` finds libcudart by a part of its name, and can bind
                tilelang's `libcudart_stub.so`; up to 0.6.12 when it is imported
       upstream later, when it is first used, since 0.6.18.post1 at the latest; by its whole name
                since 0.7.2 (flashinfer #5198)
       advice   in code of your own import `flashinfer.comm` before tilelang

1.23 MB of 13 MB of wheels fetched in 5 requests, 0.5 s"""

CUDA_IPC = "flashinfer/comm/cuda_ipc.py"
OLD_LIBRARY = """\
def find_loaded_library(lib_name):
    with open("/proc/self/maps") as f:
        for line in f:
            if lib_name in line:
                return line


class CudaRTLibrary:
    pass


cudart = CudaRTLibrary()
"""


def test_the_text(stack: Stack, base: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted, "NOTED", [place for place in NOTED if place.id == "F7"])
    files = {**made.FLASHINFER, CUDA_IPC: OLD_LIBRARY}
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", files))
    assert as_text(replace(listing(stack.path, stack), seconds=0.5)) == FLASHINFER
    assert stack.asked == [("flashinfer-python", {})]


TOGETHER = """\
every patch set, as these releases are; nothing is asked for

sglang 0.5.9
  native   E2
  needed   E1 E4
  absent   S4d
  unknown  E3
  E1   needed   kimi.py
       what     `KimiK25ForConditionalGeneration.get_embed_and_head`, which EAGLE-3's workers call
       patch    the draft shares the language model's embedding and head
  E2   native   kimi.py
       what     `KimiK25ForConditionalGeneration.set_embed_and_head`, which EAGLE-3's workers call
       patch    the counterpart of E1
  E3   unknown  kimi.py
       looked   for something else
       what     `KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture`, which EAGLE-3's
                workers call
       patch    the language model hands out the hidden states that the draft was trained on
       without  EAGLE-3 with Kimi-K2.5 ends in `AttributeError`, E3's first, when the graphs are
                captured
       risk     small: each hands on to the language model, which has had the three methods in all
                releases looked at
       upstream native since 0.5.10 (sglang #19689); 0.5.8.post1 and older have no Kimi-K2.5
       set      eagle3
       alone    three methods that nobody calls without a draft
  E4   needed   graphs.py
  E4   needed   runner.py
       what     which layers' hidden states CUDA graphs capture
       patch    graphs are captured with the draft's layers, not with the default ones
       without  graphs are captured with the default layers, the draft's own come too late: drafts
                trained on other layers are accepted less often, silently; [1, 29, 57] of 61 layers
                is the default
       risk     small: the same ids reach the graphs and the run without graphs
       upstream native since 0.5.11 (sglang #22836), needed up to 0.5.10.post1
       set      eagle3
       alone    EAGLE-3 with other layers than the default ones captures those; everything else is
                the same
  S4d  absent   comm.py
       what     W
       patch    P
       without  from 0.5.16 on models of the Inkling family take symmetric memory that is on for
                memory with multicast
       risk     small: on 12.x those kernels are never chosen, as without symmetric memory
       upstream not there up to 0.5.23; older than 0.5.16 there are no such models
       set      sm120-symm, waits for SGLANG_STACK_SM120_SYMM_MEM=1
       alone    nothing: symmetric memory is not on there without S4

nothing fetched of 13 MB of wheels, 2.0 s"""


def state(site: str, file: str, before: State, looked_for: str = "") -> SiteState:
    (found,) = [item for sites in SETS.values() for item in sites if item.id == site]
    return SiteState(found, file, before, before, looked_for)


def several() -> Listing:
    opted = state("S4d", "comm.py", State.ABSENT)
    sites = (
        state("E1", "kimi.py", State.NEEDED),
        state("E2", "kimi.py", State.NATIVE),
        state("E3", "kimi.py", State.UNKNOWN, "something else"),
        state("E4", "graphs.py", State.NEEDED),
        state("E4", "runner.py", State.NEEDED),
        replace(opted, site=replace(opted.site, what="W", consequence="P")),
    )
    return Listing(None, (Package("sglang", "0.5.9", sites, ()),), Traffic(0, 13_000_000, 0), 2.0)


def test_sites_that_are_one_matter_share_their_words_in_the_text() -> None:
    assert as_text(several()) == TOGETHER
    assert not several().ok


def test_no_line_of_any_site_is_longer_than_100_columns() -> None:
    sites = tuple(state(site.id, "f", State.NEEDED) for sites in SETS.values() for site in sites)
    places = tuple(NotedState(place, "f", State.NEEDED) for place in NOTED)
    text = as_text(Listing(None, (Package("x", "1", sites, places),), Traffic(1, 1, 1), 1))
    assert [line for line in text.splitlines() if len(line) > 100] == []
    for site in site_facts():
        assert len(re.findall(rf"^  {site} ", text, re.MULTILINE)) == 1


def test_every_set_is_looked_at_also_where_none_is_asked_for(stack: Stack) -> None:
    stack.write("", sglang_wheel(stack.folder))
    found = listing(stack.path, stack)
    states = [(item.site.id, item.before.value) for item in found.packages[0].sites if item.site.set == "eagle3"]
    assert states[-3:] == [("E3", "needed"), ("E4", "needed"), ("E4", "needed")]
    assert (found.sets, found.diff, found.ok) == ((), "", True)
    assert as_text(found).startswith("sets that the matrix asks for: none\n\nsglang 0.5.9\n")


UNKNOWN = """\
  D1   unknown  sglang/srt/layers/deep_gemm_wrapper/configurer.py
       looked   for `if sm_version < 90: return False`
       what     whether DeepGEMM is used
"""


def run(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, str]:
    monkeypatch.setattr(releases, "Releases", lambda settings: stack)
    code = cli.main(["patches", str(stack.path), *more])
    return code, capsys.readouterr().out


def test_an_unknown_site_is_shown_and_fails(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "def _compute_enable_deep_gemm():\n    return True\n"
    stack.write("patches: {sm120: {}}\n", sglang_wheel(stack.folder, {made.DEEP_GEMM: text}))
    code, out = run(stack, monkeypatch, capsys)
    assert code == 3
    assert UNKNOWN in out
    # Of a set that the matrix does not ask for, it is a state like any other.
    stack.write("patches: {eagle3: {}}\n", sglang_wheel(stack.folder, {made.DEEP_GEMM: text}))
    code, out = run(stack, monkeypatch, capsys)
    assert (code, UNKNOWN in out) == (0, True)


def test_a_noted_place_of_no_known_shape_fails_nothing(stack: Stack, base: None) -> None:
    files = {**made.FLASHINFER, CUDA_IPC: OLD_LIBRARY.replace("if lib_name in line", "if lib_name == line")}
    stack.write("", make_wheel(stack.folder, "flashinfer-python", "0.6.4", files))
    found = release_listing({"flashinfer-python": "0.6.4"}, stack)
    assert {item.noted.id: item.state for item in found.packages[0].noted}["F7"] is State.UNKNOWN
    assert found.ok
    assert stack.asked == [("flashinfer-python", {"version": "0.6.4"})]


DATA = {
    "ok": True,
    "sets": ["sm120"],
    "sites": [
        {
            "id": "F1",
            "set": "sm120",
            "package": "flashinfer-python",
            "version": "0.6.4",
            "file": made.COMM,
            "state": "needed",
            "looked_for": "",
            "listed": False,
            "what": "the architectures that the fused all-reduce is compiled for",
            "patch": "it compiles for 12.0a as well; nothing calls it on SM120 unless sglang's gate is opened",
            "without": "the fused all-reduce does not compile for 12.x (`No supported CUDA architectures found for major "
            "versions [9, 10]`)",
            "risk": "it was compiled for sm_120a and never run there; a `flashinfer-jit-cache` with its own build makes it "
            "void",
            "upstream": "native since 0.6.17 (flashinfer #3903), needed up to 0.6.16",
            "alone": "nothing: sglang's own gate stays shut",
            "waits_for": None,
            "source": "shared/facts/patches.md section A1, F1, and section 0, 4 (flashinfer-ai/flashinfer#3903)",
        }
    ],
    "noted": [
        {
            "id": "F7",
            "package": "flashinfer-python",
            "version": "0.6.4",
            "file": CUDA_IPC,
            "state": "absent",
            "looked_for": "",
            "what": "which libcudart the peers' memory is opened by",
            "without": "`import flashinfer.comm` finds libcudart by a part of its name, and can bind tilelang's "
            "`libcudart_stub.so`; up to 0.6.12 when it is imported",
            "upstream": "later, when it is first used, since 0.6.18.post1 at the latest; by its whole name since 0.7.2 "
            "(flashinfer #5198)",
            "waits_for": None,
            "advice": "in code of your own import `flashinfer.comm` before tilelang",
            "source": "shared/facts/patches.md section A1, F7 (flashinfer-ai/flashinfer#3676, #3930, #5198)",
        }
    ],
    "bytes_read": 1_234_000,
    "bytes_total": 13_000_000,
    "requests": 5,
}


def test_the_data(
    stack: Stack, base: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(noted, "NOTED", [place for place in NOTED if place.id == "F7"])
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", made.FLASHINFER))
    code, out = run(stack, monkeypatch, capsys, "--json")
    found = json.loads(out)
    assert 0 <= found.pop("seconds") < 60
    assert (code, found) == (0, DATA)


def test_the_diff(stack: Stack, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stack.write("patches: {sm120: {}}\n", make_wheel(stack.folder, "flashinfer-python", "0.6.4", made.FLASHINFER))
    code, out = run(stack, monkeypatch, capsys, "--diff")
    assert (code, out) == (
        0,
        (
            f"--- a/{made.COMM}\n+++ b/{made.COMM}\n@@ -10,6 +10,6 @@\n \n def gen_trtllm_comm_module():\n"
            "     flags = current_compilation_context.get_nvcc_flags_list(\n-        supported_major_versions=[9, 10]\n"
            '+        supported_major_versions=[9, 10, 12]\n     )\n     return gen_jit_spec("trtllm_comm", extra_cuda_cflags=flags)\n'
        ),
    )
    assert json.loads(run(stack, monkeypatch, capsys, "--diff", "--json")[1])["diff"] == out


@pytest.mark.parametrize(
    ("traffic", "text"),
    [
        (Traffic(0, 5_200_000, 0), "nothing fetched of 5.2 MB of wheels, 1.2 s"),
        (Traffic(300_000, 5_200_000, 1), "300 kB of 5.2 MB of wheels fetched in 1 request, 1.2 s"),
    ],
)
def test_what_it_cost(traffic: Traffic, text: str) -> None:
    assert cost(traffic, 1.23) == text


# --- the table --------------------------------------------------------------------------------------------------------

TABLES = """\
| sglang | 0.5.9 | 0.5.10 |
|---|---|---|
| E1, E2 | **N** | n |
| E3 | **N** | ? |
| E4 | **N** | n |
| E8 | – | n |

| flashinfer-python | 0.6.4 |
|---|---|
| F1 | **N** |"""


def test_the_table() -> None:
    (e8,) = [place for place in NOTED if place.id == "E8"]

    def sglang(version: str, hook: State, last: State, e4: tuple[State, State], extras: State) -> Package:
        sites = [state(site, "k", hook) for site in ("E1", "E2")]
        sites += [state("E3", "k", last), state("E4", "a", e4[0]), state("E4", "b", e4[1])]
        return Package("sglang", version, tuple(sites), (NotedState(e8, "k", extras),))

    packages = [
        sglang("0.5.10", State.NATIVE, State.UNKNOWN, (State.NATIVE, State.NATIVE), State.NATIVE),
        Package("flashinfer-python", "0.6.4", (state("F1", "f", State.NEEDED),), ()),
        sglang("0.5.9", State.NEEDED, State.NEEDED, (State.NEEDED, State.NATIVE), State.ABSENT),
    ]
    assert as_table(packages) == TABLES


def test_the_command_for_the_table(stack: Stack, base: None, capsys: pytest.CaptureFixture[str]) -> None:
    from builder.patches.__main__ import main

    wheel = make_wheel(stack.folder, "flashinfer-python", "0.6.4", {**made.FLASHINFER, CUDA_IPC: OLD_LIBRARY})
    assert main(["--table", str(wheel)]) == 0
    assert capsys.readouterr().out == (
        "| flashinfer-python | 0.6.4 |\n|---|---|\n| F1 | **N** |\n| F2 | – |\n| F3 | – |\n| F4 | – |\n| F6 | – |\n"
        "| F7 | **N** |\n"
    )
    assert main(["--table", "absent-1.0-py3-none-any.whl"]) == 2


# --- facts ------------------------------------------------------------------------------------------------------------


def test_every_site_has_one_fact_and_every_fact_its_sites() -> None:
    patched = [site.id for sites in SETS.values() for site in sites]
    only_noted = [place.id for place in NOTED]
    facts = [site for fact in site_facts_in_order() for site in fact.sites]
    assert sorted(facts) == sorted(patched + only_noted)
    assert len(set(facts)) == len(facts)
    assert {site for fact in site_facts_in_order() if fact.advice for site in fact.sites} == set(only_noted)


def site_facts_in_order() -> tuple[SiteFact, ...]:
    from builder.facts import load_facts

    return load_facts(SiteFact)


def test_a_set_that_is_opted_into_waits_for_its_variable_or_says_what_it_changes() -> None:
    variables = {
        "sm120-symm": "SGLANG_STACK_SM120_SYMM_MEM",
        "sm120-fusion": "SGLANG_STACK_SM120_FUSION",
        "eagle3-multimodal": "SGLANG_STACK_EAGLE3_MULTIMODAL",
    }
    known = site_facts()
    for name, sites in SETS.items():
        for site in sites:
            fact = known[site.id]
            assert fact.waits_for in (None, variables.get(name)), site.id
            assert fact.waits_for or not (fact.alone or "").startswith("nothing") or name in ("sm120", "eagle3"), (
                site.id
            )


@pytest.mark.parametrize(
    ("rest", "because"),
    [
        ("risk: r", "a site that is patched has `risk` and `alone`, one that is only noted `advice`"),
        ("advice: a, risk: r", "a site that is only noted has `advice`, and no `risk`, `alone` or `waits_for`"),
        ("advice: a, waits_for: X", "a site that is only noted has `advice`, and no `risk`, `alone` or `waits_for`"),
    ],
)
def test_a_fact_is_of_one_kind(rest: str, because: str) -> None:
    text = f"facts:\n  - {{sites: [S1], without: w, upstream: u, source: s, {rest}}}\n"
    with pytest.raises(SourceError, match=re.escape(because)):
        parse_facts(SiteFact, "sites.yaml", text)


def test_the_data_has_a_fact_for_each_site(stack: Stack) -> None:
    stack.write("", sglang_wheel(stack.folder))
    found: dict[str, Any] = as_json(release_listing({"sglang": "0.5.9"}, stack))
    assert {item["id"] for item in found["sites"]} == {
        site.id for sites in SETS.values() for site in sites if site.package == "sglang"
    }
    assert all(item["without"] and item["risk"] and item["alone"] for item in found["sites"])
    assert all(item["advice"] for item in found["noted"])
