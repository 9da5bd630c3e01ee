"""From a report to a matrix, to predictions, to why: with a made index."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import JsonValue

from builder.errors import ExitCode, LockError, UnreachableError, UsageError
from builder.findings import Finding, Severity
from builder.matrix import Matrix, parse_matrix
from builder.origins import DirectFile
from builder.reports.parse import parse
from builder.repro import live, verb
from builder.repro.bundle import write_bundle
from builder.repro.explain import explain, from_symptom_alone
from builder.repro.model import Reconstruction
from builder.repro.predict import predict
from builder.repro.stack import reconstruct
from builder.repro.verb import Answer, as_json, as_text, read_report, repro, when_of
from builder.repro.verdicts import link_findings, needed_findings
from builder.resolve import UnnamedPrereleaseError, requirements
from tests.made import artefact, golden, lock_of, settings_at, sha, tiny

TODAY = date(2026, 11, 30)

RELEASES: dict[str, dict[str, tuple[str, ...]]] = {
    "torch": {
        "2.8.0": ("nvidia-cuda-runtime-cu12==12.8.90", "triton==3.4.0"),
        "2.9.1": ("nvidia-cuda-runtime-cu12==12.8.90", "triton==3.5.1"),
        "2.11.0": ("cuda-toolkit==13.0.2", "triton==3.6.0"),
    },
    "triton": {"3.4.0": (), "3.5.1": (), "3.6.0": ()},
    "sglang": {
        "0.5.9": ("torch==2.9.1", "sgl-kernel==0.3.21", "flashinfer-python==0.6.3"),
        "0.5.11": ("torch==2.11.0",),
    },
    "sgl-kernel": {"0.3.21": (), "0.3.20": ()},
    "sglang-kernel": {"0.4.2": ()},
    "flashinfer-python": {"0.6.3": (), "0.6.4": ()},
    "flashinfer-cubin": {"0.6.4": ()},
    "numpy": {"2.3.5": ()},
    "nvidia-cuda-runtime-cu12": {"12.8.90": ()},
    "nvidia-cuda-runtime": {"13.0.48": ()},
    "cuda-toolkit": {"13.0.2": ()},
    **{name: {"13.0.88": ()} for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")},
    "nvidia-cuda-cccl": {"13.0.85": ()},
}


class MadeIndex:
    """An index of a few releases; each was uploaded on a day that its name and version give."""

    def exists(self, name: str, version: str) -> bool:
        return version in RELEASES.get(name, {})

    def near(self, name: str, version: str) -> str | None:
        known = sorted(RELEASES.get(name, {}), key=Version)
        before = [each for each in known if Version(each) <= Version(version)]
        return (before or known or [""])[-1] or None

    def requires(self, name: str, version: str) -> Sequence[Requirement]:
        if not self.exists(name, version):
            raise UsageError(f"there is no {name} {version}")
        return [Requirement(text) for text in RELEASES[name][version]]

    def uploaded(self, name: str, version: str) -> date | None:
        return date(2026, 2, 23) if (name, version) == ("sglang", "0.5.9") else date(2026, 1, 5)

    def appeared(self, name: str, version: str) -> date | None:
        return self.uploaded(name, version)

    def yanked(self, name: str, version: str) -> bool:
        return (name, version) == ("sgl-kernel", "0.3.20")

    def newest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        return max(self._fits(name, specifier, before), key=Version, default=None)

    def oldest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        return min(self._fits(name, specifier, before), key=Version, default=None)

    def _fits(self, name: str, specifier: str, before: date | None) -> list[str]:
        return [
            each
            for each in RELEASES.get(name, {})
            if SpecifierSet(specifier).contains(each)
            and (before is None or (self.uploaded(name, each) or date.min) < before)
        ]


REPORT = """\
Python: 3.11.9
GPU 0,1: NVIDIA RTX PRO 6000 Blackwell Server Edition
GPU 0,1 Compute Capability: 12.0
CUDA Driver Version: 570.86.10
PyTorch: 2.9.1
sglang: 0.5.9
sgl_kernel: 0.3.21
flashinfer_python: 0.6.4
flashinfer_cubin: 0.6.4
numpy: 2.3.5
"""


def made(text: str, when: date | None = None, files: dict[tuple[str, str], DirectFile] | None = None) -> Reconstruction:
    return reconstruct(parse(text), MadeIndex(), name="repro", today=TODAY, when=when, files=files)


def test_a_whole_report_makes_a_matrix() -> None:
    found = made(REPORT)
    golden("repro-matrix.yaml", found.text)
    matrix = parse_matrix(found.text, Path("matrices/repro.yaml")).matrix
    assert matrix.stack.pins()["sgl-kernel"] == "0.3.21"
    assert matrix.overrides[0].package == "flashinfer-python"


def test_what_only_an_extra_of_a_release_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 0.5.2 sglang's own requirements are six packages, none of them a server's."""
    monkeypatch.setitem(RELEASES, "sglang", {"0.5.2": ("torch==2.8.0",), "0.5.9": RELEASES["sglang"]["0.5.9"]})
    old = parse_matrix(made("sglang: 0.5.2\n").text, Path("matrices/repro.yaml")).matrix
    assert (old.extras, old.stack.sglang, old.stack.torch) == (("sglang[srt]==0.5.2",), "0.5.2", "2.8.0")
    assert {"sglang==0.5.2", "sglang[srt]==0.5.2"} <= set(requirements(old))
    assert "[srt]" not in made("sglang: 0.5.9\n").text


def test_a_pre_release_that_a_pinned_package_asks_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang pins a beta of flash-attn-4, which no report has to name; numpy has a final release that does."""
    requires = ("torch==2.11.0", "flash-attn-4>=4.0.0b9", "numpy>=2.3rc1", "absent==1.0b1")
    monkeypatch.setitem(RELEASES, "sglang", {"0.5.12.post1": requires})
    monkeypatch.setitem(RELEASES, "flash-attn-4", {"4.0.0b8": (), "4.0.0b9": ()})
    found = made("PyTorch: 2.11.0+cu130\nsglang: 0.5.12.post1\n")
    assert parse_matrix(found.text, Path("matrices/repro.yaml")).matrix.prereleases == ("flash-attn-4",)


def test_the_day_is_the_newest_packages() -> None:
    found = made(REPORT)
    assert str(found.as_of) == "2026-02-24"
    assert found.as_of_because == "inferred: the day after sglang 0.5.9, the newest package in it"
    assert str(made(REPORT, date(2026, 3, 9)).as_of) == "2026-03-09"
    assert made("nothing").as_of_because == "today: nothing in the report has a date"


@pytest.mark.parametrize(
    ("torch", "instead"),
    [
        ("2.9.1", []),
        ("2.9.1+cu128", []),
        (
            "2.9.1+cu130",
            [
                "torch 2.9.1+cu130: the default index has no local versions; 2.9.1, which may be for another CUDA instead"
            ],
        ),
        (
            "2.9.0.dev20250722+cu128",
            ["torch 2.9.0.dev20250722+cu128: a nightly or a commit, on no index; 2.8.0 instead"],
        ),
        (
            "2.10.0a0+b4e4ee81d3.nv25.12",
            ["torch 2.10.0a0+b4e4ee81d3.nv25.12: a vendor's build, on no index; 2.9.1 instead"],
        ),
    ],
)
def test_what_cannot_be_had_is_named_with_what_stands_in_its_place(torch: str, instead: list[str]) -> None:
    assert made(f"PyTorch: {torch}\n").instead == instead


def test_a_file_that_a_matrix_of_ours_knows_is_taken() -> None:
    file = DirectFile(
        name="torch",
        url="https://wheels.example/torch-2.9.1%2Bcu130-cp311-cp311-manylinux_2_28_x86_64.whl",
        sha256=sha("torch"),
        requires=("nvidia-cuda-runtime==13.0.48",),
    )
    found = made("PyTorch: 2.9.1+cu130\n", files={("torch", "2.9.1+cu130"): file})
    assert found.instead == []
    assert "cuda:\n  version: 13.0.0\n" in found.text
    assert parse_matrix(found.text, Path("matrices/repro.yaml")).matrix.files[0].sha256 == sha("torch")


def test_what_was_taken_back_and_what_is_not_there() -> None:
    found = made("PyTorch: 2.9.1\nsgl_kernel: 0.3.20\nxgrammar: 0.1.27\n")
    assert found.open[-1] == "no GPU that is known here is stated: compute capability 9.0"
    assert "sgl-kernel 0.3.20 was taken back by its publisher since" in found.open
    assert found.left_out == ["xgrammar 0.1.27: not on the default index"]


def test_torch_follows_from_what_requires_one() -> None:
    found = made("sglang: 0.5.11\nsglang-kernel: 0.4.2\n")
    assert found.pins["torch"].version == "2.11.0"
    assert "torch is not stated: 2.11.0, which sglang 0.5.11 requires" in found.open
    alone = made("sgl_kernel: 0.3.21\n")
    assert alone.left_out == ["sgl-kernel 0.3.21: needs a torch, and none is known"]


def test_torch_is_not_stated_beside_a_wheel_that_is_on_no_index() -> None:
    file = DirectFile(
        name="sgl-kernel",
        url="https://wheels.example/sgl_kernel-0.3.21%2Bcu130-cp310-abi3-manylinux_2_28_x86_64.whl",
        sha256=sha("sgl-kernel"),
        requires=("torch==2.9.1",),
    )
    found = made("sgl-kernel==0.3.21+cu130\n", files={("sgl-kernel", "0.3.21+cu130"): file})
    assert found.pins["torch"].version == "2.9.1"
    assert "torch is not stated: 2.9.1, which sgl-kernel 0.3.21+cu130 requires" in found.open


def test_aarch64_is_recognised() -> None:
    found = made("GPU 0: NVIDIA GB10\nPyTorch: 2.9.1\n")
    assert not found.builds_here
    assert found.instead == [
        "aarch64 (inferred from the GPU): images are built for x86_64 only, its wheels are not those of the report"
    ]


def test_a_python_that_no_image_has() -> None:
    found = made("Python: 3.14.0\n")
    assert found.python == "3.13"
    assert found.instead == ["Python 3.14: images are made for 3.10 to 3.13; 3.13 instead"]


def _predicted(text: str, *more: Finding) -> Answer:
    report, found = parse(text), made(text)
    asks = {"abi": lambda: list(more)}
    prediction = predict(report, found, MadeIndex(), today=TODAY, asks=asks)
    return Answer(report, found, prediction, explain(report, prediction.findings), "cu128")


def test_the_rules_speak_of_the_reports_own_versions() -> None:
    answer = _predicted(REPORT)
    said = {(finding.rule, finding.subject) for finding in answer.prediction.findings}
    assert ("conflict-undeclared", "flashinfer-python") in said
    # Nothing is missing that the report does not name.
    assert not [rule for rule, _ in said if rule == "requirement-missing"]


def test_the_driver_of_the_report_is_judged() -> None:
    text = "CUDA Driver Version: 570.86.10\nPyTorch: 2.11.0\nRuntimeError: The NVIDIA driver on your system is too old (found version 12080).\n"
    answer = _predicted(text)
    (why,) = answer.why
    assert [answer.prediction.findings[number].rule for number in why.findings] == ["driver"]


def test_a_reported_cuda_is_held_against_the_driver() -> None:
    header = "| NVIDIA-SMI {0}       Driver Version: {0}     CUDA Version: {1}     |\nPyTorch: 2.11.0\n"

    def told(driver: str, cuda: str) -> list[str]:
        found = _predicted(header.format(driver, cuda)).prediction.findings
        return [finding.message for finding in found if finding.rule == "driver"]

    assert "driver 535.104.05 is CUDA 12.2's, and CUDA 12.8 is reported" in told("535.104.05", "12.8")
    assert len(told("535.104.05", "12.2")) == 1
    # Windows' number of a driver, on WSL, goes with other releases.
    assert len(told("572.16", "12.9")) == 1


@pytest.mark.parametrize(
    ("line", "explained"),
    [
        ("ModuleNotFoundError: No module named 'sgl_kernel.flash_ops'", True),
        ("ModuleNotFoundError: No module named 'common'", False),
        ("ModuleNotFoundError: No module named 'gl_kernel'", False),
    ],
)
def test_a_module_is_explained_by_what_names_it_as_a_word(line: str, explained: bool) -> None:
    answer = _predicted(f"PyTorch: 2.9.1\n{line}\n", *link_findings(ABI))
    assert bool(answer.why[0].findings) is explained


def test_a_name_that_cannot_be_imported_is_not_any_incompatibility_s() -> None:
    finding = Finding(
        rule="known-incompatible",
        severity=Severity.ERROR,
        subject="kernels",
        message="kernels 0.15.2 and sglang 0.5.11 do not work together",
        because="made",
        hint="",
        source="made",
    )
    for owner, explained in (("kernels.layer", True), ("transformers", False)):
        answer = _predicted(f"PyTorch: 2.9.1\nImportError: cannot import name 'x' from '{owner}' (y.py)\n", finding)
        assert bool(answer.why[0].findings) is explained


ABI = {
    "extensions": [
        {
            "file": "sgl_kernel/common_ops.abi3.so",
            "distribution": "sgl-kernel 0.3.21",
            "verdict": "broken",
            "by_design": None,
            "missing_symbols": [{"symbol": "_Z3fooi", "demangled": "foo(int)", "nearest": "foo(unsigned int)"}],
            "missing_libraries": ["libnvrtc.so.12"],
            "missing_versions": [],
        }
    ],
    "fitting": ["torch 2.9.1"],
}


def test_two_causes_behind_one_message_are_both_given() -> None:
    text = (
        REPORT
        + "ImportError: x/common_ops.abi3.so: undefined symbol: _Z3fooi\nlibnvrtc.so.12: cannot open shared object file\n"
    )
    answer = _predicted(text, *link_findings(ABI))
    by_kind = {each.symptom.kind: [answer.prediction.findings[n].rule for n in each.findings] for each in answer.why}
    assert by_kind["undefined-symbol"][0] == "links-broken"
    assert by_kind["missing-library"][0] == "links-broken"
    said = as_json(answer)
    assert said["findings"][0]["rule"] == "links-broken"
    assert said["symptoms"][0]["explained_by"][0] == 0
    assert set(said) >= {"matrix", "facts", "findings"}
    assert {"name", "value", "origin", "line"} <= set(said["facts"][0])


def test_a_finding_of_another_symbol_explains_nothing() -> None:
    answer = _predicted("PyTorch: 2.9.1\nundefined symbol: _Z3bari\n", *link_findings(ABI))
    assert answer.why[0].findings == ()


def test_the_text_for_people() -> None:
    text = REPORT + "ImportError: x/common_ops.abi3.so: undefined symbol: _Z3fooi\nNo space left on device\n"
    golden("repro-answer.txt", as_text(_predicted(text, *link_findings(ABI))) + "\n")


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (
            "GPU 0: NVIDIA GeForce RTX 4090\npeer access is not supported between these two devices",
            "GeForce cards have no peer-to-peer access, and a custom all-reduce was started all the same",
        ),
        (
            "peer access is not supported between these two devices",
            "these GPUs cannot reach each other's memory, and something that needs it was started all the same",
        ),
        (
            "libcudart.so.12: cannot open shared object file",
            "libcudart.so.12 is CUDA 12's: something was compiled for CUDA 12, and its wheels are not there",
        ),
    ],
)
def test_what_a_symptom_says_by_itself(text: str, because: str) -> None:
    report = parse(text)
    assert from_symptom_alone(report.symptoms[0], report)[0][0] == because


def test_a_symbol_alone_tells_which_torch_exports_it() -> None:
    report = parse("undefined symbol: _ZN3c104cuda9SetDeviceEa")
    ((because, _, _),) = from_symptom_alone(report.symptoms[0], report)
    assert because == (
        "`c10::cuda::SetDevice(signed char)` is torch's, and 2.6.0, 2.7.0, 2.7.1 export it: "
        "what needs it was built for one of them, or before"
    )


def test_a_bundle_does_not_say_where_the_checkout_lies(tmp_path: Path) -> None:
    answer = replace(_predicted(REPORT), written=Path("/home/alice/checkout/matrices/repro.yaml"))
    write_bundle(tmp_path / "one.tar.gz", answer)
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        texts = {each.name: file.read().decode() for each in archive if (file := archive.extractfile(each)) is not None}
    assert "alice" not in "".join(texts.values())
    assert json.loads(texts["repro/facts.json"])["matrix"] == "matrices/repro.yaml"
    assert "written: matrices/repro.yaml; next: `builder lock repro`" in texts["repro/report.txt"]


def test_a_bundle_has_the_same_bytes_and_nothing_of_the_pasted_text(tmp_path: Path) -> None:
    answer = _predicted(REPORT + "SGLANG_ENABLE_JIT_DEEPGEMM=0\nCUDA_HOME: /home/alice/cuda\n")
    for name in ("one.tar.gz", "two.tar.gz"):
        write_bundle(tmp_path / name, answer)
    assert (tmp_path / "one.tar.gz").read_bytes() == (tmp_path / "two.tar.gz").read_bytes()
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        texts = {each.name: file.read().decode() for each in archive if (file := archive.extractfile(each)) is not None}
    assert sorted(texts) == [
        f"repro/{name}" for name in ("README.txt", "environment", "facts.json", "matrices/repro.yaml", "report.txt")
    ]
    assert "alice" not in "".join(texts.values())
    assert texts["repro/environment"] == "SGLANG_ENABLE_JIT_DEEPGEMM=0\n"
    assert json.loads(texts["repro/facts.json"])["symptoms"] == []


def test_a_day() -> None:
    assert when_of("2026-03-09") == date(2026, 3, 9)
    with pytest.raises(Exception, match="`yesterday` is not a date"):
        when_of("yesterday")


SAID = {
    "python": "3.11.2",
    "machine": "x86_64",
    "libc": "glibc2.36",
    "os": 'NAME="Debian GNU/Linux"\nVERSION_ID="12"\n',
    "packages": {"Torch": "1.0", "part_two": "2.0"},
    "nvcc": "Cuda compilation tools, release 13.0, V13.0.88\n",
    "smi": "NVIDIA H200, 9.0, 580.95.05\nNVIDIA H200, 9.0, 580.95.05\n",
    "header": "",
    "topology": "",
    "environment": {"NCCL_P2P_DISABLE": "1", "SGLANG_API_KEY": "secret", "CUDA_HOME": "/home/alice/cuda"},
}


def test_a_live_environment_as_a_report() -> None:
    golden("live-report.txt", live.report_text(SAID, None))
    report = parse(live.report_text(SAID, None))
    assert report.package("part-two") == "2.0"
    assert report.value("capability.1") == "9.0"


def test_an_environment_of_ours_names_its_matrix(tmp_path: Path) -> None:
    from builder.lock import lock_path, write_lock

    loaded = tiny(name="mine")
    lock = lock_of(loaded.matrix, artefact("torch", "1.0"), artefact("part-two", "2.0"))
    path = tmp_path / "mine.yaml"
    path.write_text(loaded.text, encoding="utf-8")
    write_lock(lock, lock_path(path))
    found = live.origin(live.Live("", {"Torch": "1.0+sm120", "part_two": "2.0"}, lock), tmp_path)
    assert found == live.Origin("mine", lock.digest, 2, ())
    other = live.origin(live.Live("", {"Torch": "1.0+cu128", "part_two": "2.0"}, lock), tmp_path)
    assert other is not None and other.differs == ("torch: locked 1.0, installed 1.0+cu128",)
    changed = live.origin(live.Live("", {"Torch": "1.1", "extra": "3"}, lock), tmp_path)
    assert changed is not None
    assert changed.differs == (
        "extra: installed 3, not locked",
        "part-two: locked 2.0, installed none",
        "torch: locked 1.0, installed 1.1",
    )


def test_severities_stay_those_of_the_rules() -> None:
    assert {finding.severity for finding in _predicted(REPORT).prediction.findings} <= set(Severity)


def test_the_reports_variables_are_in_the_matrix_and_paths_are_not() -> None:
    found = made("PyTorch: 2.11.0\nNCCL_P2P_DISABLE=1\nCUDA_HOME=/home/alice/cuda\nHF_TOKEN=abc\n")
    matrix = parse_matrix(found.text, Path("matrices/repro.yaml")).matrix
    assert dict(matrix.environment) == {"NCCL_P2P_DISABLE": "1"}


TWO_GPUS = "GPU 0: {0}\nGPU 1: {0}\nPyTorch: 2.9.1\n"
TABLE = "\tGPU0\tGPU1\nGPU0\t X \t{0}\nGPU1\t{0}\t X \n"


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        (TABLE.format("PHB"), ["p2p-not-known"]),
        (TABLE.format("NV18"), []),
        (TWO_GPUS.format("NVIDIA H200"), []),
        (TWO_GPUS.format("NVIDIA GeForce RTX 4090"), ["no-peer-access"]),
    ],
)
def test_several_gpus_over_pcie_are_warned_of(text: str, rules: list[str]) -> None:
    found = [each for each in _predicted(text).prediction.findings if each.subject == "pcie"]
    assert [(each.rule, each.severity) for each in found] == [(rule, Severity.WARNING) for rule in rules]


def test_a_hang_is_matched_to_how_the_gpus_are_joined() -> None:
    answer = _predicted(TABLE.format("PHB") + "all_reduce_perf hangs after init\n")
    (why,) = answer.why
    assert [answer.prediction.findings[number].rule for number in why.findings] == ["p2p-not-known"]


def test_a_kernel_of_the_hub_without_a_version() -> None:
    report = parse("ValueError: Either a revision or a version must be specified.\n")
    ((because, hint, _),) = from_symptom_alone(report.symptoms[0], report)
    assert because.startswith("kernels 0.15.1 and later load nothing from the hub without a revision or a version")
    assert "`kernels==0.14.1`" in hint


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "the report is empty"), (" \n", "the report is empty"), ("hello\n", "nothing in the report was recognised")],
)
def test_nothing_to_go_by(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        repro(text, settings_at(tmp_path), tmp_path)
    assert str(caught.value) == (
        f"error: {words}\n  hint: paste what `python3 -m sglang.check_env` prints, `pip freeze`, or the error"
    )


@pytest.mark.parametrize("name", ["../x", "", "a/b", "Ä"])
def test_a_name_that_is_none_writes_nothing(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "matrices"
    folder.mkdir()
    with pytest.raises(UsageError) as caught:
        repro(REPORT, settings_at(tmp_path), folder, name=name)
    assert str(caught.value) == (
        f"error: `{name}` is no name for a matrix\n  at: --write\n"
        "  because: a matrix is called as its file: a-z, 0-9, and . _ - after the first"
    )
    assert [each for each in tmp_path.rglob("*") if each.suffix == ".yaml"] == []


@pytest.mark.parametrize("further", [(), ("parts",)], ids=["then it can", "it cannot"])
def test_what_is_written_can_be_locked_or_that_it_cannot_is_said(
    further: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pre-release that a package further down asks for is found by a resolver alone."""
    asked: list[tuple[str, ...]] = []

    def resolve(matrix: Matrix, settings: object) -> None:
        asked.append(matrix.prereleases)
        for name in ("deep", "deeper"):
            if name not in matrix.prereleases:
                error = UnnamedPrereleaseError("no resolution")
                error.packages = (name,)
                raise error
        if further:
            raise LockError("no resolution")

    monkeypatch.setattr(verb, "Releases", lambda *_: MadeIndex())
    monkeypatch.setattr(verb, "resolve", resolve)
    folder = tmp_path / "matrices"
    folder.mkdir()
    answer = repro(REPORT, settings_at(tmp_path), folder, name="mine", static=False)
    assert asked == [(), ("deep",), ("deep", "deeper")]
    assert answer.written is not None
    text = answer.written.read_text()
    assert parse_matrix(text, answer.written).matrix.prereleases == ("deep", "deeper")
    words = "it has no resolution as of 2026-02-24: `builder lock mine` says why, and what can be done"
    assert (f"#   {words}\n" in text, words in answer.made.open) == (bool(further),) * 2


def test_a_resolver_that_finds_the_same_again_is_not_asked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Matrix] = []

    def resolve(matrix: Matrix, settings: object) -> None:
        asked.append(matrix)
        error = UnnamedPrereleaseError("no resolution")
        error.packages = (f"part-{len(asked)}",)
        raise error

    monkeypatch.setattr(verb, "Releases", lambda *_: MadeIndex())
    monkeypatch.setattr(verb, "resolve", resolve)
    answer = repro(REPORT, settings_at(tmp_path), tmp_path, name="mine", static=False)
    assert len(asked) == verb.ROUNDS and "it has no resolution" in answer.made.open[0]


def test_a_report_that_is_too_long_is_read_up_to_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "MOST", 10)
    (tmp_path / "long.txt").write_text("0123456789abc")
    assert read_report(str(tmp_path / "long.txt")) == "0123456789"
    assert capsys.readouterr().err == "the report is longer than 10 bytes: what comes after them is not read\n"


def test_a_day_that_is_not_yet() -> None:
    with pytest.raises(UsageError, match="`2999-01-01` is in the future"):
        when_of("2999-01-01")


def test_a_hang_of_gpus_whose_links_are_not_in_the_report() -> None:
    answer = _predicted(TWO_GPUS.format("NVIDIA RTX PRO 6000 Blackwell Server Edition") + "inference stuck\n")
    (why,) = answer.why
    assert [answer.prediction.findings[number].rule for number in why.findings] == ["p2p-not-known"]


def test_a_variable_that_an_image_cannot_have_is_named() -> None:
    found = made("PyTorch: 2.11.0\nSGLANG_PROXY=1\n")
    assert found.left_out == ["SGLANG_PROXY=1: the image or its build owns that variable"]
    assert "environment" not in found.text


def _finding(rule: str, subject: str, **evidence: JsonValue) -> Finding:
    return Finding(
        rule=rule, severity=Severity.ERROR, subject=subject, message=f"{rule} of {subject}", evidence=evidence
    )


def test_an_operator_that_is_not_there_is_explained_by_its_own_package() -> None:
    findings = [
        _finding("conflict-undeclared", "transformers", required_by=["sglang"]),
        _finding("conflict-undeclared", "torch", required_by=["torchvision"]),
        _finding("links-broken", "torchaudio"),
        _finding("built-for-torch", "torchvision"),
    ]
    (why,) = explain(parse("RuntimeError: operator torchvision::nms does not exist\n"), findings)
    assert [findings[number] for number in why.findings] == [findings[3], findings[1]]
    kernels = [_finding("links-broken", "sglang-kernel"), _finding("links-broken", "flashinfer-python")]
    (why,) = explain(parse("operator sgl_kernel::rmsnorm does not exist\n"), kernels)
    assert why.findings == (0,)
    (why,) = explain(parse("operator flashinfer::rmsnorm does not exist\n"), kernels)
    assert why.findings == (1,)


@pytest.mark.parametrize(
    ("text", "because", "source"),
    [
        (
            "GLIBCXX_3.4.32 not found",
            "something was compiled by a newer GCC than the libstdc++ that was loaded",
            "case 031",
        ),
        (
            "CXXABI_1.3.15 not found",
            "something was compiled by a newer GCC than the libstdc++ that was loaded",
            "case 031",
        ),
        (
            "GLIBC_2.38 not found",
            "something was compiled for a newer C library than the system has",
            "cases 029 and 031",
        ),
    ],
)
def test_a_library_that_is_too_old_is_explained(text: str, because: str, source: str) -> None:
    report = parse(text)
    ((said, hint, where),) = from_symptom_alone(report.symptoms[0], report)
    assert said.startswith(because)
    assert (where, "`builder abi " in hint) == (source, True)


def test_a_rule_of_the_c_library_does_not_explain_libstdcxx() -> None:
    findings = [_finding("glibc", "torch")]
    assert explain(parse("GLIBC_2.38 not found"), findings)[0].findings == (0,)
    assert explain(parse("GLIBCXX_3.4.32 not found"), findings)[0].findings == ()


SITES = [
    {"id": number, "set": of, "package": "sglang", "version": "0.5.9", "file": file, "what": what}
    for number, of, file, what in (
        ("S1", "sm120", "all_reduce_utils.py", "the largest messages"),
        ("E1", "eagle3", "kimi_k25.py", "`KimiK25ForConditionalGeneration.get_embed_and_head`"),
        ("E3", "eagle3", "kimi_k25.py", "`KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture`"),
        ("S4b", "sm120-symm", "torch_symm_mem.py", "how ranks agree"),
    )
]
ATTRIBUTE = "AttributeError: '{}' object has no attribute 'set_eagle3_layers_to_capture'"


def test_the_site_that_adds_the_attribute_is_why() -> None:
    report = parse(ATTRIBUTE.format("KimiK25ForConditionalGeneration"))
    name = "KimiK25ForConditionalGeneration.set_eagle3_layers_to_capture"
    findings = list(needed_findings(SITES, {name}))
    ((number,),) = [each.findings for each in explain(report, findings)]
    assert findings[number].message == "sglang 0.5.9 lacks what the patch sites E3, E1 add"
    assert findings[number].hint == "`patches: {eagle3: {}}` in a matrix bakes them in"
    assert [each.evidence["sites"] for each in findings] == [["E3", "E1"], ["S1", "S4b"]]


def test_another_classes_attribute_is_no_sites() -> None:
    report = parse(ATTRIBUTE.format("Qwen3VLMoeForConditionalGeneration"))
    findings = list(needed_findings(SITES, {"Qwen3VLMoeForConditionalGeneration.set_eagle3_layers_to_capture"}))
    assert [each.message for each in findings] == ["sglang 0.5.9 lacks what the patch sites S1, E1, E3, S4b add"]
    assert explain(report, findings)[0].findings == ()
    ((because, _, _),) = from_symptom_alone(report.symptoms[0], report)
    assert because == "EAGLE-3's workers call it, and this model's class of this release lacks it"


def test_torch_follows_from_any_package_that_requires_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RELEASES, "xformers", {"0.0.30": ("torch==2.9.1",)})
    monkeypatch.setitem(RELEASES, "accelerate", {"1.0": ("torch>=2.0",)})
    found = made("xformers==0.0.30\naccelerate==1.0\nsgl_kernel: 0.3.21\n")
    assert "torch is not stated: 2.9.1, which xformers 0.0.30 requires" in found.open


def test_a_cuda_that_nothing_states_is_of_the_reports_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RELEASES, "torch", {**RELEASES["torch"], "2.15.0": ("cuda-toolkit==13.2.2",)})
    uploaded = MadeIndex.uploaded

    def late(self: MadeIndex, name: str, version: str) -> date | None:
        return date(2026, 11, 1) if version == "2.15.0" else uploaded(self, name, version)

    monkeypatch.setattr(MadeIndex, "uploaded", late)
    assert "no CUDA is stated: 13.0.2, which torch 2.11.0 requires" in made("numpy: 2.3.5\n").open


def test_a_day_before_the_packages_came_is_said() -> None:
    found = made(REPORT, date(1999, 1, 1))
    said = [line for line in found.open if line.startswith("the report is younger than --date 1999-01-01: ")]
    assert len(said) == 1
    assert "sglang 0.5.9 came on 2026-02-23, torch 2.9.1 came on 2026-01-05" in said[0]
    assert said[0].endswith("Name 2026-02-24 or later, or leave --date out")
    assert f"#   {said[0]}" in found.text.splitlines()
    assert [line for line in made(REPORT, date(2026, 2, 24)).open if "--date" in line] == []


def _unreachable(*_: object, **__: object) -> Reconstruction:
    raise UnreachableError("the index does not answer", where="https://index.example")


def test_without_an_index_what_was_read_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "reconstruct", _unreachable)
    folder = tmp_path / "matrices"
    folder.mkdir()
    answer = repro(REPORT + "No space left on device\n", settings_at(tmp_path), folder, name="mine")
    assert answer.exit_code == ExitCode.UNREACHABLE
    text = as_text(answer)
    assert re.search(r"^  torch +2\.9\.1 +line 5$", text, re.MULTILINE)
    assert "because: /dev/shm is full" in text
    assert text.endswith(
        "nothing was resolved and no rule was asked: the index does not answer\n"
        "hint: again where the index answers; `--live --report-only` prints a report to take there"
    )
    assert "error: the index does not answer" in capsys.readouterr().err
    said = as_json(answer)
    assert (said["unreached"], said["matrix"], said["findings"]) == ("the index does not answer", None, [])
    assert list(folder.iterdir()) == []
    write_bundle(tmp_path / "one.tar.gz", answer)
    with tarfile.open(tmp_path / "one.tar.gz") as archive:
        assert not [name for name in archive.getnames() if name.endswith(".yaml")]


def test_a_live_report_has_no_escapes_of_a_terminal() -> None:
    topology = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-1\nGPU1\tNV18\t X \t0-1\n"
    text = live.report_text({**SAID, "topology": topology}, None)
    assert text.isascii() and all(letter.isprintable() or letter in "\t\n" for letter in text)
    assert "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-1\n" in text
    assert parse(text).value("topology") == "nvlink"


def test_another_processor_is_not_told_to_make_an_image() -> None:
    answer = _predicted("uname -m: aarch64\nPyTorch: 2.9.1\nsgl_kernel: 0.3.21\n")
    text = as_text(answer)
    assert "make image" not in text
    assert text.endswith(
        "hint: `builder abi torch==2.9.1 sgl-kernel==0.3.21 --platform linux/arm64` reads that machine's own wheels"
    )
    assert "written, with x86_64's wheels: m.yaml" in as_text(replace(answer, written=Path("m.yaml")))


def test_a_matrix_of_a_report_is_not_the_nearest_known(tmp_path: Path) -> None:
    found = made(REPORT)
    path = tmp_path / "repro-1.yaml"
    path.write_text(found.text, encoding="utf-8")
    assert verb._nearest(found, tmp_path) is None
    (tmp_path / "ours.yaml").write_text("# Kept by hand.\n" + found.text.partition("\n")[2], encoding="utf-8")
    assert verb._nearest(found, tmp_path) == "ours"


def test_a_verdict_that_takes_long_says_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verb, "Releases", lambda *_: MadeIndex())
    monkeypatch.setattr(verb, "asks", lambda *_: {name: list for name in ("abi", "patches", "arch")})
    repro(REPORT, settings_at(tmp_path), tmp_path)
    assert capsys.readouterr().err.splitlines()[2:] == [
        "reading what the wheels need of each other …",
        "looking for what the patch sets would change …",
        "looking which GPUs the kernels have code for …",
    ]
