"""Patch sets on whole wheels: what is written, what is refused, and that an image can prove it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from builder import facts
from builder.errors import BuildError, IntegrityError, UsageError
from builder.matrix import Eagle3, Patches, Sm120, UserDiff
from builder.patches import apply as applying
from builder.patches import asked, concerned, inspect_wheel, patch_wheel, states
from builder.patches.__main__ import main as measure
from builder.patches.engine import unified
from builder.smoke.__main__ import main as smoke
from builder.smoke.patched import check_patches, verify_installed
from builder.smoke.spec import SpecError, parse_spec
from builder.wheel import read_wheel
from tests import patch_made as made
from tests import symm_made
from tests.eagle_made import DRAFT_OLD, KEPT, MODEL_OLD, WORKER_OLD
from tests.fusion_made import UNIFIED
from tests.patch_made import make_wheel, sglang_wheel
from tests.unit.smoke_made import Site, finished, said

BOTH = Patches(sm120=Sm120(), eagle3=Eagle3())
SM120, EAGLE3, NONE = Patches(sm120=Sm120()), Patches(eagle3=Eagle3()), Patches()
SYMM = Patches(sm120=Sm120(symm_mem="opt-in"), eagle3=Eagle3())
SITES = {site.id: site for sites in applying.SETS.values() for site in sites}
EVERY = Patches(sm120=Sm120(symm_mem="opt-in", allreduce_fusion="opt-in"), eagle3=Eagle3(multimodal="opt-in"))


def sha(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def patch(source: Path, patches: Patches, folder: Path) -> Any:
    found = patch_wheel(source, patches, folder / "out", matrix_folder=folder)
    assert found is not None
    return found


def rows(source: Path, patches: Patches | None = BOTH) -> list[tuple[str, str, str]]:
    return [(row["id"], row["state"], row["file"].rsplit("/", 1)[-1]) for row in states([source], patches)]


# --- states -----------------------------------------------------------------------------------------------------------


def test_the_states_of_a_release(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path)
    assert rows(source) == [
        ("S1", "needed", "all_reduce_utils.py"),
        ("S2", "needed", "torch_symm_mem.py"),
        ("S3", "needed", "torch_symm_mem.py"),
        ("D1", "needed", "configurer.py"),
        # What turns fusion on by itself may be in any file: none has it.
        ("S6", "absent", ""),
        ("E1", "needed", "kimi_k25.py"),
        ("E2", "needed", "kimi_k25.py"),
        ("E3", "needed", "kimi_k25.py"),
        ("E4", "needed", "cuda_graph_runner.py"),
        ("E4", "needed", "model_runner.py"),
    ]
    assert [row[0] for row in rows(source, EAGLE3)] == ["E1", "E2", "E3", "E4", "E4"]
    assert states([source])[0] == {
        "id": "S1",
        "set": "sm120",
        "package": "sglang",
        "version": "0.5.9",
        "file": made.ALL_REDUCE,
        "state": "needed",
        "looked_for": "",
    }


def test_without_a_matrix_all_sets_are_told(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path)
    told = states([source])
    assert list(dict.fromkeys(row["set"] for row in told)) == list(applying.SETS)
    # Asking for a set changes nothing about what is told of it.
    assert states([source], EVERY) == told
    for patches in (SM120, EAGLE3, BOTH):
        assert states([source], patches) == [row for row in told if row["set"] in asked(patches)]
    assert states([source], NONE) == []


def test_a_set_that_is_opted_into_is_told_of_and_not_applied(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path, dict(symm_made.FILES))
    told = {row["id"]: row["state"] for row in states([source]) if row["set"] == "sm120-symm"}
    assert told == dict.fromkeys(("S4", "S4b", "S4c", "S4d"), "needed")
    done = patch(source, BOTH, tmp_path)
    assert done.version == "0.5.9+sm120.eagle3"
    assert {row["id"]: row["state"] for row in states([done.path]) if row["set"] == "sm120-symm"} == told
    assert not {site["id"] for site in done.report["sites"]} & set(told)


def test_what_a_set_that_nobody_asked_for_lacks_stops_nothing(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path)
    assert {row["set"] for row in states([source]) if row["state"] == "unknown"} == {"sm120-symm"}
    assert patch(source, BOTH, tmp_path).version == "0.5.9+sm120.eagle3"
    with pytest.raises(BuildError, match="site S4b of sglang is of no known shape"):
        inspect_wheel(source, SYMM, tmp_path)


def test_after_patching_every_site_is_native_or_absent(tmp_path: Path) -> None:
    done = patch(sglang_wheel(tmp_path), BOTH, tmp_path)
    assert {row[1] for row in rows(done.path) if row[0] != "S6"} == {"native"}
    assert [row[1] for row in rows(done.path) if row[0] == "S6"] == ["absent"]
    assert patch_wheel(done.path, BOTH, tmp_path / "again", matrix_folder=tmp_path) is None
    assert not (tmp_path / "again").exists()


def test_a_release_without_the_model_has_no_hooks_to_patch(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path, {made.KIMI_FILE: None})
    assert rows(source, EAGLE3)[:3] == [(site, "absent", "kimi_k25.py") for site in ("E1", "E2", "E3")]
    done = patch(source, EAGLE3, tmp_path)
    assert [site["after"] for site in done.report["sites"]] == ["absent"] * 3 + ["native"] * 2


def unknown(source: Path, patches: Patches, folder: Path) -> str:
    with pytest.raises(BuildError) as caught:
        patch_wheel(source, patches, folder / "out", matrix_folder=folder)
    assert not (folder / "out").exists()
    return str(caught.value)


HINT = "  hint: `builder patches MATRIX` shows every site; take a release that is known, or leave out the set `{}`"


def test_what_has_moved_is_not_absent(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path, {made.KIMI_FILE: None, "sglang/srt/models/kimi.py": made.OLD[made.KIMI_FILE]})
    assert unknown(source, EAGLE3, tmp_path) == (
        "error: site E1 of sglang is of no known shape\n"
        "  at: sglang/srt/models/kimi_k25.py in sglang-0.5.9-py3-none-any.whl\n"
        "  because: looked for: `class KimiK25ForConditionalGeneration` in `sglang/srt/models/kimi_k25.py`; "
        "`class KimiK25ForConditionalGeneration` is in `sglang/srt/models/kimi.py`\n"
        "    it is there for: `KimiK25ForConditionalGeneration.get_embed_and_head`, which EAGLE-3's workers call\n"
        + HINT.format("eagle3")
    )


def test_nothing_is_written_where_one_site_is_unknown(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path, {made.DEEP_GEMM: "def _compute_enable_deep_gemm():\n    return True\n"})
    assert unknown(source, BOTH, tmp_path) == (
        "error: site D1 of sglang is of no known shape\n"
        f"  at: {made.DEEP_GEMM} in sglang-0.5.9-py3-none-any.whl\n"
        "  because: looked for: `if sm_version < 90: return False`\n"
        "    it is there for: whether DeepGEMM is used\n" + HINT.format("sm120")
    )
    # Of a set that is not asked for, nothing is wanted.
    assert patch(source, EAGLE3, tmp_path).version == "0.5.9+eagle3"


@pytest.mark.parametrize(
    ("file", "old", "new", "looked_for"),
    [
        (
            made.DEEPSEEK,
            "    def get_embed_and_head",
            "    def get_embed",
            (
                "`DeepseekV3ForCausalLM(DeepseekV2ForCausalLM)` and `DeepseekV2ForCausalLM.get_embed_and_head` in "
                "sglang/srt/models/deepseek_v2.py"
            ),
        ),
        (
            made.RUNNER,
            "        self.eagle_aux_hidden_state_layer_ids = [1, 29, 57]\n",
            "",
            (
                "`self.eagle_aux_hidden_state_layer_ids` set in `ModelRunner.__init__`, in "
                "sglang/srt/model_executor/model_runner.py"
            ),
        ),
    ],
)
def test_what_an_edit_rests_on_has_to_be_there(tmp_path: Path, file: str, old: str, new: str, looked_for: str) -> None:
    assert old in made.OLD[file]
    source = sglang_wheel(tmp_path, {file: made.OLD[file].replace(old, new)})
    found = [row["looked_for"] for row in states([source], EAGLE3) if row["state"] == "unknown"]
    assert set(found) == {looked_for}


def test_a_call_that_is_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    text = "def init(runner, eagle_aux_hidden_state_layer_ids):\n    runner.model.set_eagle3_layers_to_capture(eagle_aux_hidden_state_layer_ids)\n"
    source = sglang_wheel(tmp_path, {made.GRAPHS: None, made.RUNNER: None, "sglang/srt/new/setup.py": text})
    assert rows(source, EAGLE3)[3:] == [("E4", "native", "setup.py")]


def test_a_release_in_which_nobody_calls_the_hook_is_unknown(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path, {made.GRAPHS: None, made.RUNNER: None})
    (row,) = [row for row in states([source], EAGLE3) if row["id"] == "E4"]
    assert (row["state"], row["looked_for"]) == (
        "unknown",
        (
            "`.set_eagle3_layers_to_capture(` in `sglang/srt/`; `def set_eagle3_layers_to_capture` is in "
            "`sglang/srt/models/deepseek_v2.py`"
        ),
    )


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patches", "version"), [(BOTH, "0.5.9+sm120.eagle3"), (SM120, "0.5.9+sm120"), (EAGLE3, "0.5.9+eagle3")]
)
def test_the_version_names_the_sets(tmp_path: Path, patches: Patches, version: str) -> None:
    done = patch(sglang_wheel(tmp_path), patches, tmp_path)
    assert (done.version, done.file) == (version, f"sglang-{version}-py3-none-any.whl")
    assert (sha(done.path.read_bytes()), done.path.stat().st_size) == (done.sha256, done.size)


def test_the_version_names_each_set_that_is_opted_into(tmp_path: Path) -> None:
    done = patch(sglang_wheel(tmp_path, dict(symm_made.FILES)), SYMM, tmp_path)
    assert (done.version, done.report["sets"]) == ("0.5.9+sm120.symm.eagle3", ["sm120", "sm120-symm", "eagle3"])
    assert {row[1] for row in rows(done.path, SYMM) if row[0] != "S6"} == {"native"}
    assert patch_wheel(done.path, SYMM, tmp_path / "again", matrix_folder=tmp_path) is None


def test_all_sets_at_once(tmp_path: Path) -> None:
    files = {**symm_made.FILES, **UNIFIED, SITES["E5d"].file: MODEL_OLD["E5d"], **KEPT}
    source = sglang_wheel(tmp_path, {**files, SITES["E6"].file: DRAFT_OLD, SITES["E7"].file: WORKER_OLD})
    done = patch(source, EVERY, tmp_path)
    assert done.version == "0.5.9+sm120.symm.fusion.eagle3.multimodal"
    assert done.report["sets"] == list(applying.SETS)
    assert {item["after"] for item in done.report["sites"]} == {"native", "absent"}
    assert patch_wheel(done.path, EVERY, tmp_path / "again", matrix_folder=tmp_path) is None


def test_what_a_set_does_to_a_file_does_not_depend_on_the_others(tmp_path: Path) -> None:
    # Of a file that only one set is about, whatever else is asked for.
    source = sglang_wheel(tmp_path, dict(symm_made.FILES))
    contents: dict[str, bytes] = {}
    for patches in (SM120, EAGLE3, BOTH, SYMM):
        done = inspect_wheel(source, patches, tmp_path)
        for change in done.files:
            if change.file not in (made.SYMM_MEM, made.DEEPSEEK):
                assert contents.setdefault(change.file, change.after) == change.after


def test_the_version_names_only_sets_that_change_something(tmp_path: Path) -> None:
    native = patch(sglang_wheel(tmp_path), EAGLE3, tmp_path)
    files = {name: read_wheel(native.path).read(name) for name in made.SGLANG}
    done = patch(make_wheel(tmp_path / "later", "sglang", "0.5.15.post1", files), BOTH, tmp_path)
    assert done.version == "0.5.15.post1+sm120"
    assert {site["id"] for site in done.report["sites"] if site["before"] == "native"} == {"E1", "E2", "E3", "E4"}


def test_flashinfer_keeps_what_it_says_of_itself(tmp_path: Path) -> None:
    # Its import compares this with flashinfer-cubin's, and it keys the cache of compiled modules.
    files = {**made.FLASHINFER, "flashinfer/_build_meta.py": '__version__ = "0.6.4"\n'}
    done = patch(make_wheel(tmp_path, "flashinfer-python", "0.6.4", files), BOTH, tmp_path)
    assert done.file == "flashinfer_python-0.6.4+sm120-py3-none-any.whl"
    assert read_wheel(done.path).read("flashinfer/_build_meta.py") == b'__version__ = "0.6.4"\n'
    assert done.report["sets"] == ["sm120"]


def test_patching_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = (patch(sglang_wheel(tmp_path), BOTH, tmp_path / name) for name in ("one", "two"))
    assert one.path.read_bytes() == two.path.read_bytes()
    assert one.report == two.report


def test_a_byte_order_mark_and_every_other_byte_stay(tmp_path: Path) -> None:
    text = "\ufeff" + made.OLD[made.DEEP_GEMM].replace("\n", "\r\n")
    done = patch(sglang_wheel(tmp_path, {made.DEEP_GEMM: text}), SM120, tmp_path)
    after = read_wheel(done.path).read(made.DEEP_GEMM).decode()
    lines = "    # sglang-stack D1: DeepGEMM needs TMEM and tcgen05, which SM12x does not have.\r\n"
    lines += "    if sm_version // 10 == 12:\r\n        return False\r\n"
    assert lines in after
    assert after.replace(lines, "") == text


def test_a_package_without_sites_stays_as_it_is(tmp_path: Path) -> None:
    assert (
        patch_wheel(make_wheel(tmp_path, "idna", "3.7", {"idna/x.py": ""}), BOTH, tmp_path, matrix_folder=tmp_path)
        is None
    )


def test_without_patches_nothing_is_looked_at(tmp_path: Path) -> None:
    assert patch_wheel(sglang_wheel(tmp_path), NONE, tmp_path / "out", matrix_folder=tmp_path) is None


def test_the_packages_that_patches_are_about() -> None:
    locked = ["torch", "sglang", "flashinfer-python", "idna"]
    mine = UserDiff(package="idna", file="x.diff", sha256="0" * 64)
    assert asked(NONE) == ()
    assert concerned(NONE, locked) == []
    assert concerned(EAGLE3, locked) == ["sglang"]
    assert concerned(SM120, ["flashinfer-python"]) == ["flashinfer-python"]
    assert concerned(Patches(sm120=Sm120(), diffs=(mine,)), locked) == ["flashinfer-python", "idna", "sglang"]


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        (
            EAGLE3,
            "error: the patch set `eagle3` has nothing to patch\n  because: the lock has none of `sglang`\n  hint: leave out `patches.eagle3`",
        ),
        (
            Patches(diffs=(UserDiff(package="sgl-kernel", file="x.diff", sha256="0" * 64),)),
            "error: `patches.diffs[0]` has nothing to patch\n  because: the lock has no `sgl-kernel`\n  hint: the package is named as the lock names it",
        ),
    ],
)
def test_patches_that_have_nothing_to_patch(patches: Patches, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        concerned(patches, ["flashinfer-python"])
    assert str(caught.value) == message


def test_the_report(tmp_path: Path) -> None:
    report = patch(sglang_wheel(tmp_path), SM120, tmp_path).report
    assert [report[key] for key in ("schema", "package", "version", "patched_version", "listed", "sets", "diffs")] == [
        1,
        "sglang",
        "0.5.9",
        "0.5.9+sm120",
        False,
        ["sm120"],
        [],
    ]
    known = next(fact for fact in facts.load_facts(facts.SiteFact) if fact.sites == ("D1",))
    assert report["sites"][3] == {
        "id": "D1",
        "set": "sm120",
        "file": made.DEEP_GEMM,
        "before": "needed",
        "after": "native",
        "what": "whether DeepGEMM is used",
        "consequence": "off on 12.x, where block-FP8 would die with `Unknown recipe`; as before everywhere else",
        "without": known.without,
        "risk": known.risk,
        "upstream": known.upstream,
        "alone": known.alone,
        "waits_for": None,
        "source": known.source,
    }
    (file,) = [item for item in report["files"] if item["file"] == made.DEEP_GEMM]
    after = read_wheel(tmp_path / "out" / "sglang-0.5.9+sm120-py3-none-any.whl").read(made.DEEP_GEMM)
    assert file == {
        "file": made.DEEP_GEMM,
        "before": sha(made.OLD[made.DEEP_GEMM]),
        "after": sha(after),
        "listed": False,
        "diff": unified(made.DEEP_GEMM, made.OLD[made.DEEP_GEMM].encode(), after),
    }


def test_sets_that_are_opted_into_come_with_their_base() -> None:
    assert asked(EVERY) == ("sm120", "sm120-symm", "sm120-fusion", "eagle3", "eagle3-multimodal")
    assert asked(Patches(sm120=Sm120(symm_mem="opt-in"))) == ("sm120", "sm120-symm")
    assert asked(BOTH) == ("sm120", "eagle3")
    assert asked(NONE) == ()


def test_the_choices_among_sets_are_those_that_a_matrix_has() -> None:
    assert applying.choices(["sm120", "sm120-symm"]) == [(), ("sm120",), ("sm120", "sm120-symm")]
    assert applying.choices(["sm120-fusion"]) == [(), ("sm120-fusion",)]


# --- known files ------------------------------------------------------------------------------------------------------


def known(monkeypatch: pytest.MonkeyPatch, path: str, after: str | None) -> None:
    fact = facts.PatchedFact(
        package="sglang",
        version="0.5.9",
        path=path,
        sites=("D1",),
        before=sha(made.OLD[path]),
        after=after,
        source="made up",
    )
    monkeypatch.setattr(applying, "patched_facts", lambda: {("sglang", path, fact.before, ("D1",)): fact})


def test_a_known_file_that_comes_out_as_known_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = patch(sglang_wheel(tmp_path), SM120, tmp_path)
    known(monkeypatch, made.DEEP_GEMM, sha(read_wheel(first.path).read(made.DEEP_GEMM)))
    report = patch(sglang_wheel(tmp_path), SM120, tmp_path).report
    assert {item["file"] for item in report["files"] if item["listed"]} == {made.DEEP_GEMM}
    assert report["listed"] is False


@pytest.mark.parametrize("after", ["0" * 64, None])
def test_a_known_file_that_comes_out_as_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str | None
) -> None:
    got = sha(read_wheel(patch(sglang_wheel(tmp_path), SM120, tmp_path).path).read(made.DEEP_GEMM))
    known(monkeypatch, made.DEEP_GEMM, after)
    with pytest.raises(IntegrityError) as caught:
        patch_wheel(sglang_wheel(tmp_path), SM120, tmp_path / "no", matrix_folder=tmp_path)
    assert str(caught.value) == (
        f"error: `{made.DEEP_GEMM}` of sglang 0.5.9 came out of the patches as another file than the known one\n"
        f"  because: wanted sha256 {after or sha(made.OLD[made.DEEP_GEMM])}\n"
        f"    got    sha256 {got}\n"
        "  hint: where the patch set was changed on purpose, measure again: `python -m builder.patches WHEEL…`"
    )
    assert not (tmp_path / "no").exists()


def test_the_measurements_command_prints_the_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_wheel(tmp_path, "flashinfer-python", "0.6.4", made.FLASHINFER)
    after = read_wheel(patch(source, SM120, tmp_path).path).read(made.COMM)
    assert measure([str(source)]) == 0
    printed = capsys.readouterr().out
    (fact,) = facts.parse_facts(facts.PatchedFact, "patched.yaml", f"facts:\n{printed}")
    assert (fact.package, fact.version, fact.path, fact.sites) == ("flashinfer-python", "0.6.4", made.COMM, ("F1",))
    assert (fact.before, fact.after) == (sha(made.OLD[made.COMM]), sha(after))


def test_the_facts_are_of_files_with_sites() -> None:
    sites = {site.id: site for sites in applying.SETS.values() for site in sites}
    for fact in facts.load_facts(facts.PatchedFact):
        assert bool(fact.sites) == (fact.after is not None)
        for name in fact.sites:
            assert (sites[name].package, fact.path.startswith(sites[name].file)) == (fact.package, True)


# --- a diff of the user's, after the sets -----------------------------------------------------------------------------


def diff(folder: Path, old: str, new: str, file: str = made.DEEP_GEMM) -> UserDiff:
    text = unified(file, old.encode(), new.encode())
    (folder / "mine.diff").write_text(text)
    return UserDiff(package="sglang", file="mine.diff", sha256=sha(text))


def test_a_diff_comes_after_the_sets(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path)
    between = read_wheel(patch(source, SM120, tmp_path).path).read(made.DEEP_GEMM).decode()
    mine = diff(tmp_path, between, between + "MINE = 1\n")
    done = patch(source, Patches(sm120=Sm120(), diffs=(mine,)), tmp_path)
    assert done.version == "0.5.9+sm120.diff1"
    assert read_wheel(done.path).read(made.DEEP_GEMM).decode() == between + "MINE = 1\n"
    assert done.report["diffs"] == [{"file": "mine.diff", "sha256": mine.sha256}]


def test_a_diff_alone(tmp_path: Path) -> None:
    text = made.OLD[made.RUNNER]
    done = patch(
        sglang_wheel(tmp_path), Patches(diffs=(diff(tmp_path, text, text + "A = 1\n", made.RUNNER),)), tmp_path
    )
    assert (done.version, done.report["sets"], done.report["sites"]) == ("0.5.9+diff1", [], [])
    assert [item["file"] for item in done.report["files"]] == [made.RUNNER]


def test_diffs_have_the_number_of_their_place_in_the_matrix(tmp_path: Path) -> None:
    text = made.OLD[made.RUNNER]
    mine = diff(tmp_path, text, text + "A = 1\n", made.RUNNER)
    other = UserDiff(package="torch", file="x.diff", sha256="0" * 64)
    assert patch(sglang_wheel(tmp_path), Patches(diffs=(other, mine)), tmp_path).version == "0.5.9+diff2"


def test_a_diff_may_not_undo_a_site(tmp_path: Path) -> None:
    source = sglang_wheel(tmp_path)
    between = read_wheel(patch(source, SM120, tmp_path).path).read(made.DEEP_GEMM).decode()
    mine = diff(tmp_path, between, between.replace("// 10 == 12", "// 10 == 13"))
    with pytest.raises(UsageError) as caught:
        inspect_wheel(source, Patches(sm120=Sm120(), diffs=(mine,)), tmp_path)
    assert str(caught.value) == (
        "error: a diff undoes site D1\n"
        f"  at: {made.DEEP_GEMM}\n"
        "  because: sm_120 is not turned off\n"
        "  hint: diffs come after the sets"
    )


# --- in an image ------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """An environment in which the patched wheel is installed, and whose spec has its report."""
    made_site = Site(tmp_path)
    done = patch(sglang_wheel(tmp_path), BOTH, tmp_path)
    wheel = read_wheel(done.path)
    files = {name: wheel.read(name) for name in wheel.entries if ".dist-info" not in name}
    made_site.wheel("sglang", done.version, files, layer="sglang")
    made_site.spec_data["patches"] = [done.report]
    return made_site


def test_what_is_installed_is_what_was_patched(site: Site) -> None:
    check = finished(check_patches(site.spec), "patches")
    assert (check.ok, check.looked_at) == (True, 16)
    assert (check.unit, check.detail) == ("files and sites", "sglang 0.5.9+sm120.eagle3 patched, 0 sites native")


def test_the_check_runs_where_the_spec_has_reports(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> tuple[int, str]:
        (tmp_path / "spec.json").write_text(json.dumps(site.spec_data))
        arguments = ["sglang", "--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path / "out.json")]
        return smoke([*arguments, "--only", "patches"]), capsys.readouterr().out

    assert run() == (
        0,
        (
            "patches            ok      16 files and sites; sglang 0.5.9+sm120.eagle3 patched, 0 sites native\n"
            "smoke test of tiny (111111111111): 1 checks, 0 failed\n"
        ),
    )
    (site.packages / made.ALL_REDUCE).write_text("")
    assert run()[0] == 3
    del site.spec_data["patches"]
    assert run() == (0, "smoke test of tiny (111111111111): 0 checks, 0 failed\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": 1}, "spec.patches[0].files is int, not list"),
        ({"sites": [{"id": "S1"}]}, "spec.patches[0].sites[0].file is missing"),
        ({"package": None}, "spec.patches[0].package is NoneType, not str"),
    ],
)
def test_a_report_of_another_shape_is_refused(site: Site, change: dict[str, Any], message: str) -> None:
    site.spec_data["patches"][0].update(change)
    with pytest.raises(SpecError) as caught:
        parse_spec(site.spec_data)
    assert str(caught.value) == message


def test_the_spec_has_reports_in_the_sglang_part_alone() -> None:
    from builder.layers import plan_layers
    from builder.smokespec import smoke_spec
    from tests.made import artefact, lock_of, tiny

    plan = plan_layers(tiny().matrix, lock_of(tiny().matrix, artefact("idna", "3.7")))
    assert smoke_spec(plan, native=False, patches=[{"package": "x"}])["patches"] == [{"package": "x"}]
    assert "patches" not in smoke_spec(plan, native=True, patches=[{"package": "x"}])
    assert "patches" not in smoke_spec(plan, native=False)


def test_a_file_that_was_edited_afterwards(site: Site) -> None:
    (site.packages / made.DEEP_GEMM).write_text(made.OLD[made.DEEP_GEMM])
    after = site.spec.patches[0]["files"][2]["after"]
    assert said(check_patches(site.spec), "patches") == (
        f"error: D1 does not hold in `{made.DEEP_GEMM}`: sm_120 is not turned off [patches]\n"
        "  hint: build again from the lock\n"
        f"error: `{made.DEEP_GEMM}` is not as it was patched: its sha256 is not {after[:12]}… [patches]\n"
        "  hint: build again from the lock"
    )


def test_a_file_that_is_gone(site: Site) -> None:
    (site.packages / made.DEEP_GEMM).unlink()
    assert verify_installed(site.packages, site.spec.patches[0]) == [
        f"`{made.DEEP_GEMM}` cannot be read: No such file or directory",
        f"D1 does not hold in `{made.DEEP_GEMM}`: it cannot be read (FileNotFoundError)",
    ]


def test_a_report_whose_diff_is_another(site: Site) -> None:
    report = site.spec_data["patches"][0]
    (file,) = [item for item in report["files"] if item["file"] == made.DEEP_GEMM]
    good = file["diff"]
    file["diff"] = good.replace("+    if sm_version // 10", "+    if sm_version // 11")
    assert verify_installed(site.packages, report) == [
        f"the diff of `{made.DEEP_GEMM}` does not fit: line 10 of the file is not the diff's"
    ]
    file["diff"] = good + "-more\n"
    assert verify_installed(site.packages, report) == [
        f"the diff of `{made.DEEP_GEMM}` does not lead back to upstream's file"
    ]


def test_a_native_site_is_verified_as_well(tmp_path: Path) -> None:
    # Nothing is patched, so no hash is ours: what has to hold does not.
    files = made.SGLANG
    site = Site(tmp_path)
    site.wheel("sglang", "0.5.9", files, layer="sglang")
    entry = {"id": "D1", "file": made.DEEP_GEMM, "before": "native", "after": "native"}
    report = {"package": "sglang", "patched_version": "0.5.9", "files": [], "sites": [entry]}
    assert verify_installed(site.packages, report) == [
        f"D1 does not hold in `{made.DEEP_GEMM}`: sm_120 is not turned off"
    ]


def test_a_release_where_all_is_native_says_so(tmp_path: Path) -> None:
    done = patch(sglang_wheel(tmp_path), BOTH, tmp_path)
    native = inspect_wheel(done.path, BOTH, tmp_path)
    site = Site(tmp_path)
    site.wheel("sglang", done.version, {name: native.wheel.read(name) for name in made.SGLANG}, layer="sglang")
    site.spec_data["patches"] = [native.as_json()]
    check = finished(check_patches(site.spec), "patches")
    assert (check.ok, check.detail) == (True, "nothing patched, 9 sites native")
