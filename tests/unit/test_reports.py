"""Environment reports: every format, their traps, and that nothing personal gets out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.facts import load_facts
from builder.facts.reportmodels import GpuNameFact
from builder.reports import forms
from builder.reports.model import Origin, Report
from builder.reports.parse import parse
from tests.made import golden
from tests.reports import PERSONAL, mutated, planted

DATA = Path(__file__).parent / "reports_data"
NAMES = sorted(path.name for path in DATA.iterdir())


def _text(report: Report) -> str:
    lines = [
        f"{fact.name}: {'absent' if fact.absent else fact.value or '?'} ({fact.origin}, line {fact.line}, {fact.source})"
        + (f" because {fact.because}" if fact.because else "")
        for fact in report.facts.values()
    ]
    lines += [f"symptom: {each.kind}: {each.text} (line {each.line})" for each in report.symptoms]
    lines += [f"conflict: {json.dumps(each.as_json())}" for each in report.conflicts]
    lines += [f"note: {text}" for text in report.notes]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_report_says(name: str) -> None:
    golden(f"report-{name.partition('.')[0]}.txt", _text(parse((DATA / name).read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_personal_gets_out(name: str) -> None:
    report = parse((DATA / name).read_text(encoding="utf-8"))
    out = json.dumps([fact.as_json() for fact in report.facts.values()] + [s.as_json() for s in report.symptoms])
    assert [word for word in PERSONAL if word in out] == []


def test_what_is_not_said_is_unknown_and_not_absent() -> None:
    report = parse("PyTorch: 2.9.1\nvllm: Module Not Found\n")
    assert report.facts["package.vllm"].absent
    assert report.facts["driver"].origin is Origin.UNKNOWN
    assert report.facts["driver"].as_json()["value"] is None
    assert "package.triton" not in report.facts


def test_one_value_less_precise_is_no_conflict() -> None:
    report = parse("PyTorch: 2.9.1+cu130\n[pip3] torch==2.9.1\n")
    assert report.package("torch") == "2.9.1+cu130"
    assert report.conflicts == ()


def test_two_drivers_are_both_kept() -> None:
    header = "| NVIDIA-SMI 570.86.10   Driver Version: 570.86.10   CUDA Version: 12.8 |"
    report = parse(f"CUDA Driver Version: 580.95.05\n{header}\n")
    assert report.value("driver") == "580.95.05"
    (conflict,) = report.conflicts
    assert conflict.as_json() == {
        "name": "driver",
        "values": [
            {"value": "580.95.05", "line": 1, "source": "check_env"},
            {"value": "570.86.10", "line": 2, "source": "nvidia-smi"},
        ],
        "chosen": "580.95.05",
        "because": "check_env is taken before nvidia-smi",
    }


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.0", "12.0"),
        ("120", "12.0"),
        ("sm_120", "12.0"),
        ("SM120", "12.0"),
        ("sm_120a", "12.0"),
        ("12.0a", "12.0"),
        ("(12, 0)", "12.0"),
        ("(12, '0f')", "12.0"),
        ("compute_120", "12.0"),
        ("90", "9.0"),
        ("sm_90a", "9.0"),
        ("99.9", None),
        ("abc", None),
    ],
)
def test_forms_of_a_compute_capability(text: str, value: str | None) -> None:
    assert forms.capability(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("580.126.09", "580.126.09"),
        ("575", "575"),
        ("r575", "575"),
        ("577.00", "577.00"),
        ("595.58.03-p2p", "595.58.03"),
        ("540.4.0", "540.4.0"),
        ("550.xx", "550"),
        ("N/A", None),
        ("12", None),
    ],
)
def test_forms_of_a_driver(text: str, value: str | None) -> None:
    assert forms.driver(text) == value


def test_a_name_that_nvidia_smi_cut_decides_nothing() -> None:
    report = parse("|   0  NVIDIA GeForce RTX 408...    Off |   00000000:01:00.0 Off |\n")
    assert report.facts["gpu.0"].origin is Origin.UNKNOWN


def test_the_processor_follows_from_the_gpu() -> None:
    fact = parse("GPU 0: NVIDIA GB10\n").facts["arch"]
    assert (fact.value, fact.origin, fact.because) == (
        "aarch64",
        Origin.INFERRED,
        "NVIDIA GB10 comes with such a processor",
    )


@pytest.mark.parametrize("text", ["", "\0", "\n" * 1000, "Python:", "GPU 0:", "|" * 5000, "== ==", "<!--", "\x1b[4m"])
def test_hardly_anything_is_no_error(text: str) -> None:
    report = parse(text)
    assert all(fact.origin is Origin.UNKNOWN for fact in report.facts.values())


@given(st.text(max_size=2000))
@settings(max_examples=200, deadline=None)
def test_no_text_raises(text: str) -> None:
    parse(text)


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=300, deadline=None)
def test_a_mutated_report_neither_raises_nor_tells_who(seed: int) -> None:
    texts = [planted((DATA / name).read_text(encoding="utf-8")) for name in NAMES]
    report = parse(mutated(texts, seed))
    out = json.dumps([fact.as_json() for fact in report.facts.values()] + [s.as_json() for s in report.symptoms])
    assert not re.search("|".join(map(re.escape, PERSONAL)), out)


@pytest.mark.parametrize(
    ("text", "symbols"),
    [
        ("undefined symbol: cudaGetDevice@libcudart.so.12", ["cudaGetDevice@libcudart.so.12"]),
        ("undefined symbol: __isoc23_strtol@GLIBC_2.38\n", ["__isoc23_strtol@GLIBC_2.38"]),
        ("undefined symbol: _ZN3c104cuda9SetDeviceEa, version X", ["_ZN3c104cuda9SetDeviceEa"]),
        # A line that ran into the prompt after it: where the symbol ends and the user begins nobody can tell.
        ("undefined symbol: _ZN3c104cuda9SetDeviceEaalice@gpu-node-7:~$ nvidia-smi", []),
    ],
)
def test_where_a_symbol_ends(text: str, symbols: list[str]) -> None:
    assert [each.parts["symbol"] for each in parse(text).symptoms] == symbols


@pytest.mark.parametrize("name", [name for fact in load_facts(GpuNameFact) for name in fact.names])
def test_every_product_of_the_facts_is_a_name(name: str) -> None:
    assert forms.gpu(name) == name


@pytest.mark.parametrize("text", ["alice", "NVIDIA", "with", "V", "Spark plug of alice"])
def test_what_is_no_name_of_a_gpu(text: str) -> None:
    assert forms.gpu(text) is None


PIP_LOG = "Successfully installed flash-attn-4-4.0.0b1 sglang-0.5.10.post1 torch-2.9.1+cu130"


def test_what_pip_installed() -> None:
    report = parse(f"Collecting torch\n{PIP_LOG}\n")
    assert {name: fact.value for name, fact in report.packages()} == {
        "flash-attn-4": "4.0.0b1",
        "sglang": "0.5.10.post1",
        "torch": "2.9.1+cu130",
    }


def test_what_pip_installed_in_one_long_line() -> None:
    many = " ".join(f"part-number-{number}-1.{number}" for number in range(400))
    report = parse(f"Successfully installed {many} torch-2.9.1\n")
    assert report.package("torch") == "2.9.1"
    assert {report.package(f"part-number-{number}") for number in range(400)} == {f"1.{n}" for n in range(400)}


def test_what_stands_behind_pips_line_is_no_package() -> None:
    report = parse(f"{PIP_LOG} alice@gpu-node-7:~$ gpu-node-7\n")
    assert "package.gpu-node" not in report.facts


@pytest.mark.parametrize(
    "line",
    [
        "Using Python 3.12.3 environment at: /home/alice/.venv",
        "Using CPython 3.12.3 interpreter at: /usr/bin/python3.12",
        "Using CPython 3.12.3",
    ],
)
def test_uv_names_the_python(line: str) -> None:
    report = parse(line)
    assert (report.value("python"), report.facts["python"].origin, report.conflicts) == ("3.12.3", Origin.STATED, ())


def test_a_collective_that_failed_is_a_symptom() -> None:
    report = parse(
        "torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, unhandled cuda error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\ntorch==2.9.1 @ file:///home/alice/torch.whl\n"
        "RuntimeError: NCCL error: unhandled system error\n"
    )
    assert [each.text for each in report.symptoms] == [
        "NCCL error: unhandled cuda error, NCCL version 2.27.3",
        "NCCL error: unhandled system error",
    ]
    assert report.package("torch") == "2.9.1"


CONDA = """\
# packages in environment at /home/alice/miniconda3/envs/serve:
#
# Name                    Version                   Build  Channel
_libgcc_mutex             0.1                        main
numpy                     1.26.4          py311h08b1b3b_0
openssl                   3.0.14               h5eee18b_0
python                    3.11.9               h955ad1f_0
pytorch                   2.5.1           py3.11_cuda12.4_cudnn9.1.0_0    pytorch
pytorch-cuda              12.4                 hc786d27_7    pytorch
typing_extensions         4.12.2             pyha770c72_0    conda-forge
xformers                  0.0.28.post3             pypi_0    pypi
"""


def test_a_list_of_condas() -> None:
    report = parse(CONDA)
    assert {name: fact.value for name, fact in report.packages() if fact.value} == {
        "numpy": "1.26.4",
        "torch": "2.5.1",
        "typing-extensions": "4.12.2",
        "xformers": "0.0.28.post3",
    }
    assert (report.value("python"), report.value("torch_cuda")) == ("3.11.9", "12.4")


def test_a_folders_python_says_less_of_the_same() -> None:
    trace = 'File "/usr/lib/python3.10/site-packages/torch/cuda/__init__.py", line 3\n'
    report = parse(f"Python: 3.10.12\n{trace}")
    assert (report.value("python"), report.conflicts) == ("3.10.12", ())
    (conflict,) = parse(f"Python: 3.1\n{trace}").conflicts
    assert {fact.value for fact in conflict.values} == {"3.1", "3.10"}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by x.so)", "GLIBCXX_3.4.32"),
        ("GLIBCXX_3.4.32 not found", "GLIBCXX_3.4.32"),
        ("version `GLIBCXX_3.4.30'' not found", "GLIBCXX_3.4.30"),
        ("CXXABI_1.3.15' not found", "CXXABI_1.3.15"),
    ],
)
def test_a_version_that_a_library_has_not(text: str, version: str) -> None:
    (symptom,) = parse(text).symptoms
    assert (symptom.kind, symptom.parts["version"]) == ("missing-version", version)


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        (
            "Linux gpu-node-7 6.8.0-1024-nvidia-64k #28 SMP PREEMPT Mon Jan 6 aarch64 aarch64 aarch64 GNU/Linux",
            "aarch64",
        ),
        ("uname -a: Linux spark 6.11.0-1016-nvidia #16-Ubuntu SMP aarch64 GNU/Linux", "aarch64"),
        ("uname -m: aarch64", "aarch64"),
        ("$ uname -m\naarch64", "aarch64"),
        ("it is said of aarch64", None),
    ],
)
def test_the_processor_is_read(text: str, arch: str | None) -> None:
    assert parse(text).value("arch") == arch


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", ["NVIDIA RTX PRO 6000 Blackwell Server Edition"]),
        ("2x NVIDIA H200", ["NVIDIA H200", "NVIDIA H200"]),
        ("NVIDIA H200\nNVIDIA H200\n\nNVIDIA H200", ["NVIDIA H200"] * 3),
        ("NVIDIA H200\nor so\nNVIDIA H200", ["NVIDIA H200"]),
        ("A2", []),
        ("NVIDIA H200 of alice", []),
    ],
)
def test_a_gpu_alone_on_a_line(text: str, gpus: list[str]) -> None:
    report = parse(text)
    assert [fact.value for name, fact in report.facts.items() if name.startswith("gpu.") and fact.value] == gpus


def test_the_cuda_of_condas_build_is_of_its_own_torch() -> None:
    assert "torch_cuda" not in parse(f"{CONDA}\ntorch==2.9.1\n").facts
    assert parse(f"{CONDA}\ntorch==2.9.1+cu130\n").value("torch_cuda") == "13.0"
