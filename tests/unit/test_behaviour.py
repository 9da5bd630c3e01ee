"""`behaviour` with stand-ins for torch and the patched packages: what the cases see, and what is said where they fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from builder.matrix import Eagle3, Patches, Sm120
from builder.smoke import behaviour as module
from builder.smoke.__main__ import main as smoke
from builder.smoke.behaviour import CASES
from builder.smoke.behaviour_case import Case, Installed, outcome
from builder.smoke.patched import POSTCONDITIONS
from builder.smoke.report import Result
from tests import patch_made as made
from tests.unit.behaviour_made import behaviour, stack
from tests.unit.smoke_made import Site, finished, said

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes


def swap(site: Site, file: str, old: str, new: str) -> None:
    """Edit an installed file, so that its diff still leads back."""
    place = site.packages / file
    text = place.read_text()
    assert old in text
    place.write_text(text.replace(old, new))
    for report in site.spec_data["patches"]:
        for item in report["files"]:
            if item["file"] == file:
                assert f"+{old}" in item["diff"]
                item["diff"] = item["diff"].replace(f"+{old}", f"+{new}")


def test_what_was_patched_does_what_it_is_for(tmp_path: Path) -> None:
    check = finished(behaviour(stack(tmp_path)), "behaviour")
    assert (check.ok, check.findings) == (True, ())
    assert (check.looked_at, check.expected, check.unit) == (6, 6, "cases")
    assert check.detail == "49 comparisons for S1 S2 S3 D1 E1 E2 E3 F1; no case for E4"


def test_sites_that_upstream_has_itself_are_run_too(tmp_path: Path) -> None:
    site = stack(tmp_path)
    for report in site.spec_data["patches"]:
        for item in report["files"]:
            item["diff"] = ""
        for row in report["sites"]:
            row["before"] = "native"
    check = finished(behaviour(site), "behaviour")
    assert (check.ok, check.looked_at) == (True, 6)


def test_only_cases_of_sites_that_hold_are_run(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))
    assert finished(behaviour(site)).detail == "7 comparisons for E1 E2 E3; no case for E4"
    site.spec_data["patches"][0]["sites"][0]["after"] = "absent"
    assert finished(behaviour(site)).looked_at == 2


def test_a_stack_without_patches(tmp_path: Path) -> None:
    assert finished(behaviour(Site(tmp_path))).detail == "not applicable: no patch site of this stack has a case"


def test_symmetric_memory_that_would_take_multimem(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(sm120=Sm120()))
    swap(site, made.SYMM_MEM, "        12: [],", "        12: [4],")
    assert said(behaviour(site), "behaviour") == (
        "error: the communicator, capability 12, 4 GPUs, multicast on: multimem, up to 1 MiB [behaviour]\n"
        "  because: it has to be: two-shot, up to 1 MiB; case: symmetric memory by device"
    )


def test_symmetric_memory_that_other_devices_lose(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(sm120=Sm120()))
    name = "        if supported_max_sizes is None:"
    swap(site, made.SYMM_MEM, name, "        if supported_max_sizes is None or self.device_capability == 9:")
    messages = [finding.message for finding in behaviour(site).findings]
    assert messages == [
        "the communicator, capability 9, 2 GPUs, multicast on: off",
        "the communicator, capability 9, 4 GPUs, multicast on: off",
    ]


def test_deep_gemm_on_sm120(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(sm120=Sm120()))
    swap(site, made.DEEP_GEMM, "    if sm_version // 10 == 12:", "    if sm_version == 121:")
    assert said(behaviour(site), "behaviour") == (
        "error: whether sm_120 uses DeepGEMM: True [behaviour]\n  because: it has to be: False; case: DeepGEMM by device"
    )


def test_fused_all_reduce_without_the_target(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(sm120=Sm120()))
    line = "        supported_major_versions=[9, 10, 12]"
    swap(site, made.COMM, line, "        supported_major_versions=[9, 10, 11]")
    assert said(behaviour(site), "behaviour") == (
        "error: the targets of gen_trtllm_comm_module for 12.0a: RuntimeError: No supported CUDA architectures found for "
        "major versions [9, 10, 11]. [behaviour]\n"
        "  because: it has to be: -gencode=arch=compute_120a,code=sm_120a; case: targets of the fused all-reduce"
    )


def test_a_patch_in_the_neighbour(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(sm120=Sm120()))
    place = site.packages / made.COMM
    text = made.OLD[made.COMM].replace("[9, 10]  # SM12x", "[9, 10, 12]  # SM12x")
    place.write_text(text)
    site.spec_data["patches"][1]["files"][0]["diff"] = (
        "--- a\n+++ b\n@@ -5,3 +5,3 @@\n"
        "     flags = current_compilation_context.get_nvcc_flags_list(\n"
        "-        supported_major_versions=[9, 10]  # SM12x is left out on purpose\n"
        "+        supported_major_versions=[9, 10, 12]  # SM12x is left out on purpose\n"
        "     )\n"
    )
    messages = [finding.message for finding in behaviour(site).findings]
    assert messages == [
        (
            "the targets of gen_trtllm_comm_module for 12.0a: RuntimeError: No supported CUDA architectures found for "
            "major versions [9, 10]."
        ),
        "all flags of gen_trtllm_mnnvl_comm_module for 12.0a: -fPIC -gencode=arch=compute_120a,code=sm_120a -O3",
    ]


@pytest.mark.parametrize(
    ("old", "new", "got"),
    [
        ("set_eagle3_layers_to_capture(layer_ids)", "set_eagle3_layers_to_capture()", "set_eagle3_layers_to_capture(nothing) → None"),
        ("set_embed_and_head(embed, head)", "set_embed_and_head(head, embed)", "set_embed_and_head(head, embed) → None"),
        ("get_embed_and_head()", "get_embed_and_head", "nothing asked → "),
    ],
)  # fmt: skip
def test_a_hook_that_hands_on_something_else(tmp_path: Path, old: str, new: str, got: str) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))
    swap_inner = "return " if "get_" in old else ""
    swap(
        site,
        made.KIMI_FILE,
        f"        {swap_inner}self.language_model.{old}",
        f"        {swap_inner}self.language_model.{new}",
    )
    found = [finding for finding in behaviour(site).findings if finding.message.startswith(old.split("(")[0])]
    assert found
    assert all(f": {got}" in finding.message for finding in found)


def test_a_case_that_cannot_tell_the_patch_from_upstreams_file_fails(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))
    for item in site.spec_data["patches"][0]["files"]:
        item["diff"] = ""
    messages = [finding.message for finding in behaviour(site).findings]
    assert messages[0] == (
        "get_embed_and_head of upstream's KimiK25ForConditionalGeneration: get_embed_and_head() → ('embed', 'head')"
    )
    assert len(messages) == 3


def test_a_module_that_does_not_import(tmp_path: Path) -> None:
    site = stack(
        tmp_path, patches=Patches(eagle3=Eagle3()), sglang={"sglang/srt/models/__init__.py": "import nowhere\n"}
    )
    text = said(behaviour(site), "behaviour")
    assert text.splitlines()[0] == (
        "error: the case `Kimi-K2.5 hands get_embed_and_head on` broke off: ModuleNotFoundError: No module named 'nowhere' "
        "[behaviour]"
    )
    assert '    File "sglang/srt/models/__init__.py", line 1, in <module>' in text


def test_a_process_that_ends_in_a_case(tmp_path: Path) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))
    swap(
        site,
        made.KIMI_FILE,
        "        return self.language_model.get_",
        "        import os; os._exit(7); self.language_model.get_",
    )
    assert said(behaviour(site), "behaviour").splitlines()[0] == (
        "error: the case `Kimi-K2.5 hands get_embed_and_head on` broke off: the process ended with 7 [behaviour]"
    )


def test_a_diff_that_does_not_lead_back(tmp_path: Path) -> None:
    site = stack(tmp_path)
    (site.packages / made.ALL_REDUCE).write_text("")
    assert said(behaviour(site), "behaviour") == (
        "error: upstream's files cannot be had: line 1 of the file is not the diff's [behaviour]\n  hint: see `patches`"
    )


def test_a_case_that_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))
    with site.native() as (native, _):
        result = Result()
        module._report(native, result, CASES[0], {"wrong": [], "error": "", "comparisons": 0})
    assert said(result, "behaviour") == "error: the case `symmetric memory by device` compared nothing [behaviour]"


def test_the_check_runs_in_the_sglang_part_where_something_was_patched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = stack(tmp_path, patches=Patches(eagle3=Eagle3()))

    def run(part: str) -> str:
        (tmp_path / "spec.json").write_text(json.dumps(site.spec_data))
        smoke([part, "--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path / "o.json"), "--only", "behaviour"])
        return capsys.readouterr().out.splitlines()[0]

    assert run("sglang") == "behaviour          ok      3 cases; 7 comparisons for E1 E2 E3; no case for E4"
    assert run("native") == "smoke test of tiny (111111111111): 0 checks, 0 failed"
    del site.spec_data["patches"]
    assert run("sglang") == "smoke test of tiny (111111111111): 0 checks, 0 failed"


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_case_is_of_sites_that_there_are() -> None:
    assert {site for case in CASES for site in case.sites} <= set(POSTCONDITIONS)
    assert len({case.name for case in CASES}) == len(CASES)
    assert all(case.sites for case in CASES)


def test_what_an_outcome_says() -> None:
    assert outcome(int, "7") == "7"
    assert outcome({}.__getitem__, 12) == "KeyError: 12"


def test_upstreams_module_lies_beside_the_installed_one() -> None:
    text = "import dataclasses\nfrom . import parse\n\n\n@dataclasses.dataclass\nclass A:\n    x: int\n"
    installed = Installed(frozenset(), frozenset(), "12.0a", {"urllib/request.py": text}, {})
    ours, upstream = installed.module("urllib/request.py"), installed.upstream("urllib/request.py")
    assert hasattr(ours, "urlopen")
    assert (upstream.__name__, upstream.A(3).x, hasattr(upstream, "urlopen")) == ("urllib.request", 3, False)


def test_a_case_says_what_it_needs() -> None:
    assert Case("x", ("S1",), lambda installed: iter(())).imports == ()
