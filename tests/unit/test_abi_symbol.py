"""A symbol alone: which torch exports it; and a torch that no index has. Both out of the shipped tables."""

from __future__ import annotations

import json

import pytest
from packaging.version import Version

from builder import cli
from builder.abi import symbol as symbols
from builder.abi import tables, vendor
from builder.abi.model import Known, Wheel
from builder.abi.symbol import look_up, spans
from builder.abi.vendor import OldStrings, judge
from builder.abi.verb import base_named
from builder.errors import UsageError
from builder.facts import ProviderFact, StringAbiFact, load_facts
from builder.nativefacts import NEEDED
from builder.smoke.link import base_name
from builder.vendors import vendor_build
from tests.unit.test_abi import Set, facts

SET_DEVICE = "_ZN3c104cuda9SetDeviceEa"
PARSE = "_ZN5torch3jit17parseSchemaOrNameERKSsb"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names as c++filt prints the ones of these tests, whether it is there or not."""
    words = {
        SET_DEVICE: "c10::cuda::SetDevice(signed char)",
        "_ZN3c104cuda9SetDeviceEab": "c10::cuda::SetDevice(signed char, bool)",
    }
    monkeypatch.setattr(
        symbols, "demangle", lambda names: {name: words.get(name, base_name(name) or name) for name in names}
    )


def test_a_name_that_newer_releases_replaced() -> None:
    text = look_up(SET_DEVICE).as_text()
    head, kernels = text.split("what is known of builds:\n")
    assert (
        head
        == """\
c10::cuda::SetDevice(signed char)
`_ZN3c104cuda9SetDeviceEa`

exported by torch 2.6.0 to 2.7.1
not by      torch 2.8.0 to 2.15.0
  nearest in 2.8.0 to 2.15.0: c10::cuda::SetDevice(signed char, bool)

so an extension that looks for it was compiled for one of the former, and the torch beside it is another

"""
    )
    lines = kernels.splitlines()
    assert lines[0] == "  sgl-kernel >=0.1.0,<=0.1.6.post1: for torch 2.6, which exports it"
    assert lines[2] == "  sgl-kernel >=0.3.0,<=0.3.18: for torch 2.8, which lacks it"
    assert lines[-2:] == ["", "hint: which releases fit yours: `builder abi PACKAGE==VERSION --find torch`"]


def test_a_name_that_only_newer_releases_have() -> None:
    found = look_up("aoti_torch_abi_version")
    assert (found.exported[0], found.absent, found.instead) == ("2.7.0", ("2.6.0",), {})


def test_a_name_that_is_not_torchs() -> None:
    found = look_up("ncclCommWindowRegister")
    assert found.as_text() == (
        "ncclCommWindowRegister\n\nno torch from 2.6.0 to 2.15.0 exports it: it is not torch's, or of another release"
    )
    assert found.built == ()


def test_a_name_that_all_have() -> None:
    text = look_up("_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE").as_text()
    assert "not by      torch 2.6.0" in text  # the old std::string ABI was 2.6.0's
    found = look_up("_ZN3c104cuda14current_deviceEv")
    assert not found.absent and "not by" not in found.as_text()


@pytest.mark.parametrize("symbol", ["", "c10::cuda::SetDevice(signed char)", "ä", "a\nb"])
def test_what_is_no_symbol(symbol: str) -> None:
    with pytest.raises(UsageError, match="is not a symbol"):
        look_up(symbol)


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["abi", "--symbol", SET_DEVICE, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["package"], said["exported"]) == ("torch", ["2.6.0", "2.7.0", "2.7.1"])
    assert said["nearest"]["2.8.0"] == "c10::cuda::SetDevice(signed char, bool)"
    assert {"package": "sgl-kernel", "versions": ">=0.1.7,<=0.2.9", "torch": "2.7", "exported": True} in said["built"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["abi"],
            "error: nothing to judge\n  hint: `builder abi sgl-kernel==0.3.21 torch==2.9.1`, or `--symbol SYMBOL`\n",
        ),
        (
            ["abi", "torch==2.9.1", "--symbol", SET_DEVICE],
            "error: `--symbol` goes without REQUIREMENT\n  hint: the shipped tables say which torch exports it\n",
        ),
    ],
)
def test_a_command_line_that_asks_for_nothing_or_for_both(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    ("some", "others", "text"),
    [
        (["2.6.0", "2.7.0", "2.9.0"], ["2.8.0"], "2.6.0 to 2.7.0, 2.9.0"),
        (["2.9.0", "2.10.0"], ["2.8.0"], "2.9.0 to 2.10.0"),
        (["2.6.0"], [], "2.6.0"),
        ([], ["2.6.0"], ""),
    ],
)
def test_ranges_of_releases(some: list[str], others: list[str], text: str) -> None:
    assert spans(some, others) == text


def test_a_build_for_releases_of_which_only_some_export_it_is_left_out() -> None:
    """sgl-kernel 0.3.21 is for torch 2.9: of a name that 2.9.1 alone has nothing is known there."""
    told = {(it.package, it.versions): it.exported for it in symbols._built(["2.9.1"], ["2.9.0", "2.11.0"])}
    assert ("sgl-kernel", ">=0.3.18.post1,<=0.3.21") not in told
    assert told["sglang-kernel", ">=0.4.2,<=0.4.6"] is False


# The driver's libraries.


def test_a_library_of_the_driver_is_noted() -> None:
    made = Set()
    made.wheel("kernel", {"kernel/ops.so": facts("cuInit", needed=("libcuda.so.1",))})
    assert made.one().notes == (
        "needs `libcuda.so.1` when it is opened: the driver's, so no RUN step of a build imports it without a stub",
    )
    made = Set()
    made.wheel("kernel", {"kernel/ops.so": facts("cuInit", needed=("libcuda.so.1",), uncertain=(NEEDED,))})
    assert made.one().notes == ()


# Beside a vendor's torch.

NGC = "2.9.0a0+50eac811a6.nv25.9"


def beside(version: str, *names: str) -> list[tuple[str, str, tuple[str, ...], tuple[str, ...]]]:
    fact = vendor_build("torch", version)
    assert fact is not None
    known = Known(
        base=base_named("bookworm"),
        python="3.11",
        providers=load_facts(ProviderFact),
        drivers={},
        os_packages={},
        cuda_sonames={},
        owners={"torch": ["^_ZN?K?(3c10|2at|5torch)"]},
    )
    file = facts(*names)
    wheel = Wheel("kernel", "1.0", ("kernel/ops.so",), lambda _: file, None)
    return [
        (found.verdict, found.file, tuple(each.symbol for each in found.missing_symbols), found.reasons)
        for found in judge(wheel, known, "torch", Version(version), fact)
    ]


def test_the_old_strings_are_not_in_a_vendors_torch() -> None:
    assert beside(NGC, PARSE, SET_DEVICE) == [("broken", "kernel/ops.so", (PARSE,), ())]


def test_other_names_of_a_vendors_torch_are_not_known() -> None:
    reason = (
        f"torch {NGC} is NVIDIA's build for its containers, and what it exports was not read: it is made from a commit between two "
        "releases, with the new std::string ABI; public extensions are compiled for a release"
    )
    assert beside(NGC, SET_DEVICE) == [("uncertain", "kernel/ops.so", (), (reason,))]


def test_which_strings_a_nightly_has_is_not_known() -> None:
    ((verdict, _, missing, reasons),) = beside("2.6.0.dev20241101+cu124", PARSE)
    assert (verdict, missing, len(reasons)) == ("uncertain", (), 1)


def test_a_file_that_asks_nothing_of_torch_fits_any() -> None:
    assert beside(NGC, "cudaMalloc") == [("ok", "kernel/ops.so", (), ())]


def test_a_name_near_by_without_the_new_string_is_no_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    (change,) = load_facts(StringAbiFact)
    made = {change.old: facts(exports=("_ZN2at1fERKSs",)), change.new: facts(exports=("_ZN2at1fEi",))}
    monkeypatch.setattr(vendor, "_exports", lambda package, version: [made[version].exports])
    assert OldStrings("torch").twin("_ZN2at1fERKSs") is None


def test_the_tables_have_the_releases_between_which_the_strings_changed() -> None:
    """Without their tables nothing would be known to be broken."""
    for fact in load_facts(StringAbiFact):
        assert {fact.old, fact.new} <= set(tables.versions(fact.package))


def test_the_twin_of_a_name() -> None:
    strings = OldStrings("torch")
    assert (
        strings.twin(PARSE)
        == "_ZN5torch3jit17parseSchemaOrNameERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEEb"
    )
    assert strings.twin(SET_DEVICE) is None
    assert strings.twin("_ZN3foo3barERKSs") is None
    assert OldStrings("numpy").twin(PARSE) is None
