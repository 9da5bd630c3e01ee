"""`builder abi` on wheels of an index on loopback, with libraries that the compiler made."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from builder import cli
from builder.abi import tables
from builder.abi import verb as abiverb
from builder.abi.answers import RELEASES_LAST
from builder.abi.model import Facts
from builder.abi.report import Report, as_json, as_text
from builder.abi.tables import Names, pack, unpack
from builder.abi.tables.__main__ import Tables, member
from builder.abi.verb import ask, facts_of
from builder.abi.wheels import parse, pin
from builder.errors import ExitCode, IntegrityError, LockError, UnreachableError, UsageError
from builder.nativefacts import EXPORTED, ElfFacts
from builder.settings import Settings
from tests.loopback import Loopback, loopback, wheel
from tests.made import settings_at
from tests.unit.smoke_made import compile_library

# Processes and servers of their own: `make processes`.
pytestmark = pytest.mark.processes

CHECK = "_ZN3c104cuda5checkEiPKcb"
CHECK_NOW = "_ZN3c104cuda5checkEjPKcb"
TAG = "cp311-cp311-manylinux_2_17_x86_64"
ABI3 = "cp310-abi3-manylinux2014_x86_64"


@cache
def library(soname: str, exports: Sequence[str] = (), wants: Sequence[str] = (), needed: Sequence[str] = ()) -> bytes:
    """A shared object that defines names, wants others, and needs libraries."""
    with TemporaryDirectory() as folder:
        place = Path(folder)
        source = "".join(f"void {name}(void) {{}}\n" for name in exports)
        source += "".join(f"extern void {name}(void);\n" for name in wants)
        source += f"void use_{abs(hash(soname))}(void) {{ {' '.join(f'{name}();' for name in wants)} }}\n"
        options = [f"-Wl,-soname,{soname}", "-Wl,--no-as-needed", "-nostdlib"]
        for name in needed:
            compile_library("", f"-Wl,-soname,{name}", "-nostdlib", name=name, folder=place)
            options.append(str(place / name))
        if exports or wants:
            options.append("-Wl,-rpath,$ORIGIN/../../nvidia/cuda_runtime/lib")
        return compile_library(source, *options, name="made.so", folder=place / "out")


def torch(version: str, check: str, cuda: int = 12) -> tuple[str, bytes]:
    """A torch, and what it pins."""
    files = {
        "torch/lib/libtorch_global_deps.so": library(
            "libtorch_global_deps.so", ("deps",), needed=(f"libcudart.so.{cuda}",)
        ),
        "torch/lib/libc10.so": library("libc10.so", (check, "_ZN3c105otherEv")),
    }
    pins = {12: "nvidia-cuda-runtime-cu12==12.8.90", 13: "cuda-toolkit[cudart]==13.0.2"}
    return wheel("torch", version, (f'{pins[cuda]}; platform_system == "Linux"', "sympy>=1.13"), tag=TAG, files=files)


def cudart(name: str, version: str, major: int) -> tuple[str, bytes]:
    file = f"nvidia/cuda_runtime/lib/libcudart.so.{major}"
    return wheel(
        name, version, tag=TAG.replace("cp311-cp311", "py3-none"), files={file: library(f"libcudart.so.{major}")}
    )


def kernel(version: str = "0.3.21", requires: Sequence[str] = (), **files: bytes) -> tuple[str, bytes]:
    ops = library("", wants=(CHECK,), needed=("libc10.so", "libcudart.so.12"))
    found = {f"kernel/{name}.abi3.so": data for name, data in (files or {"ops": ops}).items()}
    return wheel("kernel", version, requires, tag=ABI3, files={"kernel/__init__.py": b"", **found})


@pytest.fixture
def index() -> Iterator[Loopback]:
    """kernel 0.3.21 was built for torch 2.9; 2.10 changed a name, 2.11 the CUDA major."""
    with loopback() as site:
        for made in (
            kernel(),
            torch("2.8.0", CHECK.replace("check", "chuck")),
            torch("2.9.0", CHECK),
            torch("2.9.1", CHECK),
            torch("2.10.0", CHECK_NOW),
            torch("2.11.0", CHECK_NOW, 13),
            cudart("nvidia-cuda-runtime-cu12", "12.8.90", 12),
            cudart("nvidia-cuda-runtime", "13.0.96", 13),
            wheel("cuda-toolkit", "13.0.2", ("nvidia-cuda-runtime==13.0.96.*; extra == 'cudart'",)),
            wheel("sympy", "1.14"),
        ):
            site.add(made)
        yield site


@pytest.fixture
def site(index: Loopback, tmp_path: Path) -> Settings:
    return settings_at(tmp_path, index=f"{index.url}/simple/")


def answer(
    site: Settings, *lines: str, find: str | None = None, python: str = "3.11", base: str = "bookworm"
) -> Report:
    return ask(lines, site, python=python, base=base, find=find)


def verdicts(report: Report) -> dict[str, str]:
    return {item.file: item.verdict for item in report.extensions}


# What people read.


def test_text_of_a_set_that_is_broken(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch==2.10.0")
    assert as_text(report) == (
        "broken: 1 of 1 native file of kernel 0.3.21 (Python 3.11, Debian 12)\n"
        "\n"
        "broken     kernel/ops.abi3.so\n"
        "  no symbol   c10::cuda::check(int, char const*, bool)\n"
        "    nearest   c10::cuda::check(unsigned int, char const*, bool)\n"
        "  because: kernel 0.3.21 was built for another torch, 2.10.0 does not export it\n"
        "\n"
        "hint: which releases of torch fit: `builder abi kernel==0.3.21 --find torch`"
    )


def test_text_of_a_set_that_is_fine(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch==2.9.1")
    assert as_text(report) == (
        "ok: all names of 1 native file of kernel 0.3.21 resolve (Python 3.11, Debian 12)\n"
        "  not proven: names that resolve say nothing of layouts; a load test in the image does\n"
        "\n"
        "ok         kernel/ops.abi3.so"
    )
    assert report.wheels == ("kernel 0.3.21", "torch 2.9.1", "nvidia-cuda-runtime-cu12 12.8.90")


def test_a_wheel_in_the_place_of_one_that_torch_pins(index: Loopback, site: Settings) -> None:
    """torch's own files are what it may not fit, also where something else was asked about."""
    needs = library("libtorch_cuda.so", wants=("cudaNew",), needed=("libcudart.so.12",))
    files = {"torch/lib/libtorch_cuda.so": needs}
    index.add(wheel("torch", "2.9.5", ("nvidia-cuda-runtime-cu12==12.9.1",), tag=TAG, files=files))
    place = "nvidia/cuda_runtime/lib/libcudart.so.12"
    for version, names in (("12.9.1", ("cudaNew",)), ("12.9.0", ())):
        made = {place: library("libcudart.so.12", names)}
        index.add(wheel("nvidia-cuda-runtime-cu12", version, tag="py3-none-manylinux_2_17_x86_64", files=made))
    fits = answer(site, "torch==2.9.5", "nvidia-cuda-runtime-cu12==12.9.1")
    assert verdicts(fits) == {place: "ok", "torch/lib/libtorch_cuda.so": "ok"}
    older = answer(site, "torch==2.9.5", "nvidia-cuda-runtime-cu12==12.9.0")
    assert verdicts(older) == {place: "ok", "torch/lib/libtorch_cuda.so": "broken"}
    assert [item.symbol for found in older.extensions for item in found.missing_symbols] == ["cudaNew"]


def test_text_of_another_cuda_in_the_set(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch==2.11.0")
    assert as_text(report) == (
        "broken: 1 of 1 native file of kernel 0.3.21 (Python 3.11, Debian 12)\n"
        "\n"
        "broken     kernel/ops.abi3.so\n"
        "  no library  libcudart.so.12\n"
        "  no symbol   c10::cuda::check(int, char const*, bool)\n"
        "    nearest   c10::cuda::check(unsigned int, char const*, bool)\n"
        "  because: kernel 0.3.21 was built for another torch, 2.11.0 does not export it\n"
        "  because: `libcudart.so.12` is CUDA 12's, the set is CUDA 13\n"
        "\n"
        "hint: which releases of torch fit: `builder abi kernel==0.3.21 --find torch`"
    )


def test_text_of_what_is_not_known(index: Loopback, site: Settings) -> None:
    index.add(kernel("1.0", plain=library("", wants=("frobnicate",))))
    report = answer(site, "kernel==1.0", "torch==2.9.1")
    assert as_text(report) == (
        "uncertain: 1 of 1 native file of kernel 1.0 (Python 3.11, Debian 12)\n"
        "\n"
        "uncertain  kernel/plain.abi3.so\n"
        "  not known: `frobnicate` is in no library of the set that it needs: whether the base has it is not known"
    )


def test_text_of_notes_and_many_names(index: Loopback, site: Settings) -> None:
    gone = tuple(f"_ZN3c105gone{n}Ev" for n in range(1, 9))
    many = library("", wants=gone, needed=("libc10.so", "libnuma.so.1"))
    fine = library("", wants=(CHECK,), needed=("libc10.so",))
    files = {"kernel/many.so": many, "kernel/fine.cpython-310-x86_64-linux-gnu.so": fine}
    index.add(wheel("kernel", "2.0", tag=ABI3, files=files))
    report = answer(site, "kernel==2.0", "torch==2.9.1")
    assert as_text(report).splitlines() == [
        "broken: 1 of 2 native files of kernel 2.0 (Python 3.11, Debian 12)",
        "",
        "broken     kernel/many.so",
        *(f"  no symbol   c10::gone{n}()" for n in range(1, 7)),
        "  no symbol   and 2 more (`--json` has all)",
        "  because: kernel 2.0 was built for another torch, 2.9.1 does not export it",
        "",
        "ok         kernel/fine.cpython-310-x86_64-linux-gnu.so",
        "",
        "note: `kernel/fine.cpython-310-x86_64-linux-gnu.so`: is built for CPython 3.10: Python 3.11 does not find it by name",
        "note: OS packages that the base has to have: libnuma1",
        "",
        "hint: which releases of torch fit: `builder abi kernel==2.0 --find torch`",
    ]


def test_text_of_wheels_without_native_code(site: Settings) -> None:
    report = answer(site, "sympy==1.14")
    assert as_text(report) == "ok: none of these wheels has native code"


def test_text_of_find(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", find="torch>=2.8")
    assert as_text(report) == (
        "torch 2.9.0, 2.9.1 fit kernel 0.3.21 (Python 3.11, Debian 12)\n"
        "  not proven: names that resolve say nothing of layouts; a load test in the image does\n"
        "\n"
        "  2.8.0   broken     1 missing: c10::cuda::check(int, char const*, bool)\n"
        "  2.9.0   ok\n"
        "  2.9.1   ok\n"
        "  2.10.0  broken     1 missing: c10::cuda::check(int, char const*, bool)\n"
        "  2.11.0  broken     2 missing: libcudart.so.12"
    )


def test_text_of_find_in_vain(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch>=2.10", find="torch")
    assert as_text(report).splitlines()[0] == (
        "no release of torch that was looked at fits kernel 0.3.21 (Python 3.11, Debian 12)"
    )


def test_find_without_the_torch_that_is_needed_asks_for_it(index: Loopback, site: Settings) -> None:
    index.add(wheel("alone", "1.0", tag=ABI3, files={"alone/ops.so": library("ops.so", needed=("libc10.so",))}))
    for version in ("1.0", "2.0"):
        index.add(wheel("numbers", version))
    with pytest.raises(UsageError) as caught:
        answer(site, "alone==1.0", find="numbers")
    assert str(caught.value) == (
        "error: the set has no torch, which its native files need\n"
        "  because: none is named, and none of what is named requires one\n"
        "  hint: name it: `builder abi alone==1.0 torch==VERSION --find numbers`"
    )


def test_find_where_nothing_is_known_says_so(index: Loopback, site: Settings) -> None:
    index.add(wheel("alone", "1.0", tag=ABI3, files={"alone/ops.so": library("ops.so", needed=("libaws.so",))}))
    index.add(wheel("numbers", "1.0"))
    report = answer(site, "alone==1.0", find="numbers")
    assert as_text(report).splitlines()[0] == (
        "whether a release of numbers fits alone 1.0 is not known (Python 3.11, Debian 12)"
    )


def test_a_release_that_is_built_from_source(index: Loopback, site: Settings) -> None:
    index.add(wheel("source", "1.0"))
    page = index.files["/simple/source/"]
    page.data = page.data.replace(b"source-1.0-py3-none-any.whl", b"source-1.0.tar.gz").replace(
        b'"core-metadata"', b'"x"'
    )
    with pytest.raises(UsageError) as caught:
        answer(site, "source==1.0")
    assert str(caught.value) == (
        "error: source 1.0 has no wheel at all\n"
        "  because: it is built from source (the index has source-1.0.tar.gz), so there are no native files to look at\n"
        "  hint: a wheel of your own is named with `--wheels DIR`"
    )


def test_find_a_kernel_for_a_torch(index: Loopback, site: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abiverb, "CANDIDATES", 2)
    for version in ("0.3.20", "0.4.0"):
        index.add(kernel(version, ops=library("", wants=(CHECK_NOW,), needed=("libc10.so",))))
    report = answer(site, "torch==2.10.0", find="kernel")
    assert [(item.version, item.verdict) for item in report.candidates] == [("0.3.21", "broken"), ("0.4.0", "ok")]
    assert "1 older release was not looked at: `--find 'kernel>=VERSION'` says from which on" in as_text(report)


# What programs read.


def test_json_of_a_verdict(site: Settings) -> None:
    said = as_json(answer(site, "kernel==0.3.21", "torch==2.10.0"))
    assert said["bytes_read"] > 0
    assert said["bytes_total"] >= said["bytes_read"]
    assert {key: said[key] for key in ("verdict", "python", "base", "wheels", "extensions")} == {
        "verdict": "broken",
        "python": "3.11",
        "base": "debian:bookworm",
        "wheels": ["kernel 0.3.21", "torch 2.10.0", "nvidia-cuda-runtime-cu12 12.8.90"],
        "extensions": [
            {
                "file": "kernel/ops.abi3.so",
                "distribution": "kernel 0.3.21",
                "verdict": "broken",
                "symbols": 1,
                "missing_symbols": [
                    {
                        "symbol": CHECK,
                        "demangled": "c10::cuda::check(int, char const*, bool)",
                        "nearest": "c10::cuda::check(unsigned int, char const*, bool)",
                        "nearest_symbol": CHECK_NOW,
                        "lacking": "torch 2.10.0",
                    }
                ],
                "missing_libraries": [],
                "missing_versions": [],
                "by_design": None,
                "os_packages": [],
                "because": [],
                "uncertain": [],
                "notes": [],
            }
        ],
    }


def test_json_of_find(site: Settings) -> None:
    said = as_json(answer(site, "kernel==0.3.21", find="torch>=2.9"))
    assert (said["verdict"], said["package"]) == ("ok", "torch")
    assert said["candidates"] == [
        {"version": "2.9.0", "verdict": "ok", "missing": 0},
        {"version": "2.9.1", "verdict": "ok", "missing": 0},
        {"version": "2.10.0", "verdict": "broken", "missing": 1},
        {"version": "2.11.0", "verdict": "broken", "missing": 2},
    ]


# Which wheels.


def test_a_second_time_nothing_is_asked(index: Loopback, site: Settings) -> None:
    first = answer(site, "kernel==0.3.21", "torch==2.10.0")
    index.requests.clear()
    second = answer(site, "kernel==0.3.21", "torch==2.10.0")
    assert (second.extensions, second.bytes_read, second.bytes_total) == (first.extensions, 0, first.bytes_total)
    assert index.requests == []


def test_a_torch_that_is_required_is_the_newest_that_fits(index: Loopback, site: Settings) -> None:
    index.add(kernel("1.0", ("torch<2.10",)))
    report = answer(site, "kernel==1.0")
    assert (report.verdict, report.wheels[1]) == ("ok", "torch 2.9.1")


def test_without_any_torch_it_is_not_known(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21")
    assert report.verdict == "uncertain"
    assert "`libc10.so` is torch's, and the set has no torch: none is named or required" in report.extensions[0].reasons


def test_torch_alone_is_judged_itself(site: Settings) -> None:
    assert verdicts(answer(site, "torch==2.9.1")) == {
        "torch/lib/libc10.so": "ok",
        "torch/lib/libtorch_global_deps.so": "ok",
    }


def test_a_library_of_a_wheel_that_is_required(index: Loopback, site: Settings) -> None:
    work = "_ZN5other4workEv"
    runpath = library("", wants=(work,), needed=("libother.so",))
    index.add(wheel("kernel", "1.0", ("middle",), tag=ABI3, files={"kernel/x/ops.so": runpath}))
    index.add(wheel("middle", "1.0", ("other>=2",)))
    place = "nvidia/cuda_runtime/lib/libother.so"
    index.add(wheel("other", "1.0", tag=ABI3, files={place: library("libother.so")}))
    index.add(wheel("other", "2.0", tag=ABI3, files={place: library("libother.so", (work,))}))
    report = answer(site, "kernel==1.0")
    assert (report.verdict, report.wheels) == ("ok", ("kernel 1.0", "other 2.0"))


def test_a_library_that_no_wheel_has(index: Loopback, site: Settings) -> None:
    """One that only wheels have is not there, any other may be the system's: with a number in its name or without."""
    for version, needed in (("1.0", "libtorch_other.so"), ("2.0", "libother.so"), ("3.0", "libother.so.1")):
        files = {"kernel/ops.so": library("", needed=(needed,))}
        index.add(wheel("kernel", version, ("sympy",), tag=ABI3, files=files))
    reports = [answer(site, f"kernel=={version}.0") for version in (1, 2, 3)]
    assert [report.verdict for report in reports] == ["broken", "uncertain", "uncertain"]
    assert reports[0].extensions[0].missing_libraries == ("libtorch_other.so",)


def test_what_is_left_open_is_resolved(site: Settings) -> None:
    report = answer(site, "kernel==0.3.21", "torch<2.10")
    assert (report.verdict, report.wheels[1]) == ("ok", "torch 2.9.1")


def test_what_has_no_resolution(index: Loopback, site: Settings) -> None:
    index.add(kernel("1.0", ("torch<2.10",)))
    with pytest.raises(LockError) as caught:
        answer(site, "kernel>=1", "torch==2.11.0")
    assert caught.value.exit_code == ExitCode.LOCK
    assert str(caught.value).splitlines()[0] == "error: these requirements have no resolution"
    assert "hint: exact pins (`==`) are taken as they are, also where they contradict each other" in str(caught.value)


def test_pins_that_contradict_each_other_are_judged(index: Loopback, site: Settings) -> None:
    index.add(kernel("1.0", ("torch<2.10",)))
    assert answer(site, "kernel==1.0", "torch==2.10.0").verdict == "broken"


def test_wheels_in_a_folder_come_first(index: Loopback, site: Settings, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    file, data = kernel(ops=library("", wants=(CHECK_NOW,), needed=("libc10.so",)))
    (folder / file).write_bytes(data)
    report = answer(replace(site, wheels=(folder,)), "kernel==0.3.21", "torch==2.10.0")
    assert report.verdict == "ok"
    assert not any("kernel-0.3.21" in path for path in index.paths())


def test_the_build_with_the_highest_number_is_taken(index: Loopback, site: Settings) -> None:
    file, data = torch("2.12.0", CHECK_NOW)
    index.add((file, data))
    _, rebuilt = torch("2.12.0", CHECK)
    index.add((file.replace("2.12.0-", "2.12.0-3-"), rebuilt))
    assert answer(site, "kernel==0.3.21", "torch==2.12.0").verdict == "ok"


def test_a_server_without_ranges(index: Loopback, site: Settings) -> None:
    for served in index.files.values():
        served.ranges = False
    assert answer(site, "kernel==0.3.21", "torch==2.9.1").verdict == "ok"


# What is refused.


@pytest.mark.parametrize(
    ("lines", "named", "said"),
    [
        (["torch=2.9"], {}, "error: `torch=2.9` is not a requirement"),
        (["torch @ file:///x.whl"], {}, "error: `torch @ file:///x.whl` is more than a name and versions"),
        (["torch==2.9", "Torch==2.8"], {}, "error: `torch` is named twice"),
        (["torch==2.9.1"], {"python": "3"}, "error: `3` is not a Python version"),
        (["torch==2.9.1"], {"base": "sid"}, "error: the base `sid` is not known"),
        (["torch==2.9.1"], {"find": "torch"}, "error: there is nothing that it is to fit"),
        (["kernel==0.3.21"], {"find": "=="}, "error: `==` is not a package"),
        (["kernel==9"], {}, "error: kernel has no release 9"),
        (["nothing==1"], {}, "error: the index has no package `nothing`"),
        (["torch==2.9.1"], {"python": "3.12"}, "error: torch 2.9.1 has no wheel for Python 3.12 on Debian 12"),
    ],
)
def test_what_is_refused(site: Settings, lines: list[str], named: Mapping[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        answer(site, *lines, **named)
    assert str(caught.value).splitlines()[0] == said


@pytest.mark.parametrize(
    "data", [b"", b"PK", wheel("kernel", "0.3.21", tag=ABI3)[1][:-40]], ids=["empty", "stub", "cut"]
)
def test_a_wheel_that_is_none(site: Settings, tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / kernel()[0]).write_bytes(data)
    with pytest.raises(IntegrityError, match="is a damaged wheel"):
        answer(replace(site, wheels=(folder,)), "kernel==0.3.21", "torch==2.9.1")


def test_an_index_that_does_not_answer(index: Loopback, site: Settings) -> None:
    index.files["/simple/kernel/"].status = 404
    index.stop()
    with pytest.raises(UnreachableError):
        answer(site, "kernel==0.3.21", "torch==2.9.1")


@pytest.fixture
def run(
    site: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.setattr("builder.settings.load", lambda: site)

    def command(*words: str) -> tuple[int, str]:
        code = cli.main(["abi", *words])
        return code, capsys.readouterr().out

    return command


Run = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["kernel==0.3.21", "torch==2.9.1"], ExitCode.OK),
        (["kernel==0.3.21", "torch==2.9.1", "--strict"], ExitCode.OK),
        (["kernel==0.3.21", "torch==2.10.0"], ExitCode.FINDINGS),
        (["kernel==0.3.21"], ExitCode.OK),
        (["kernel==0.3.21", "--strict"], ExitCode.FINDINGS),
        (["kernel==0.3.21", "--find", "torch>=2.9"], ExitCode.OK),
        (["kernel==0.3.21", "--find", "torch>=2.10"], ExitCode.FINDINGS),
        (["kernel==9", "torch==2.9.1"], ExitCode.USAGE),
        (["torch>=9"], ExitCode.LOCK),
    ],
)
def test_the_exit_status(run: Run, words: list[str], code: ExitCode) -> None:
    assert run(*words)[0] == code
    assert run(*words)[0] == code, "and again"


def test_what_it_cost_is_the_last_line(run: Run) -> None:
    _, out = run("kernel==0.3.21", "torch==2.9.1", "--base", "noble")
    assert out.startswith("ok: all names of 1 native file of kernel 0.3.21 resolve (Python 3.11, Ubuntu 24.04)\n")
    assert re.fullmatch(r"read [\d.]+ kB of [\d.]+ kB in [\d.]+ s", out.splitlines()[-1])


def test_an_answer_is_kept(run: Run, index: Loopback, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first = run("torch==2.9.1", "kernel==0.3.21", "--json")
    index.stop()
    monkeypatch.setattr(abiverb, "ask", lambda *_, **__: pytest.fail("asked again"))
    _, second = run("kernel==0.3.21", "torch==2.9.1", "--json")
    one, two = json.loads(first), json.loads(second)
    assert (one["bytes_read"] > 0, two["bytes_read"]) == (True, 0)
    assert {**one, "bytes_read": 0, "seconds": 0} == {**two, "seconds": 0}


@pytest.mark.parametrize(
    "words",
    [
        ["kernel==0.3.21", "torch==2.9.1", "--python", "3.10"],
        ["kernel==0.3.21", "torch==2.9.1", "--base", "noble"],
        ["kernel==0.3.21", "torch==2.10.0"],
        ["kernel==0.3.21", "torch<2.10"],
        ["kernel==0.3.21", "--find", "torch"],
        # cuda-toolkit's pins are ranges: another build of CUDA 13.0's runtime may answer to it tomorrow.
        ["kernel==0.3.21", "torch==2.11.0"],
    ],
)
def test_another_question_is_asked(run: Run, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    run("kernel==0.3.21", "torch==2.9.1")
    run("kernel==0.3.21", "torch==2.11.0")
    monkeypatch.setattr(abiverb, "ask", lambda *_, **__: pytest.fail("asked again"))
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        run(*words)


FIND = ["kernel==0.3.21", "--find", "torch>=2.9"]


def test_an_answer_with_find_is_kept_for_an_hour_and_says_of_when(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    first = run(*FIND)[1]
    assert first.endswith("; the releases that the index had at 2027-01-15 08:00 UTC\n")
    monkeypatch.setattr(abiverb, "ask", lambda *_, **__: pytest.fail("asked again"))
    now += RELEASES_LAST - 1
    again = run(*FIND)[1]
    assert again.splitlines()[:-1] == first.splitlines()[:-1]
    assert again.endswith("; the releases that the index had at 2027-01-15 08:00 UTC\n")
    now += 1
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        run(*FIND)


def test_an_answer_with_find_that_left_something_open_is_not_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("kernel<0.4", "--find", "torch>=2.9")
    monkeypatch.setattr(abiverb, "ask", lambda *_, **__: pytest.fail("asked again"))
    with pytest.raises(pytest.fail.Exception, match="asked again"):
        run("kernel<0.4", "--find", "torch>=2.9")


def test_a_kept_answer_that_was_damaged_is_asked_for_again(run: Run, site: Settings) -> None:
    first = run("kernel==0.3.21", "torch==2.10.0")[0]
    for path in (site.cache / "abi").iterdir():
        path.write_text("{")
    assert run("kernel==0.3.21", "torch==2.10.0")[0] == first


# Small things.


def test_pins() -> None:
    assert [str(pin(item)) for item in parse(["a==1", "b===1.0", "c==1.*", "d>=1", "e", "f>=1,<2"])] == [
        "1",
        "1.0",
        *["None"] * 4,
    ]


# The tables that are shipped.


def test_a_block_comes_out_as_it_went_in() -> None:
    rows = [("", 3), ("_Z3foov", 0), ("_Z3foovE", 17), ("abc", 1), ("ünïcode", 2)]
    assert list(unpack(pack(rows))) == rows


def names(size: int) -> Names:
    rows = [(f"_ZN1a{n:03}bEv", n % 2) for n in range(100)]
    blocks, data = [], b""
    for start in range(0, len(rows), size):
        block = pack(rows[start : start + size])
        blocks.append((rows[start][0], len(data), len(block)))
        data += block
    return Names(blocks, ["1", "6"], lambda offset, length: data[offset : offset + length])


def test_names_of_a_read_file_are_found_by_their_beginning() -> None:
    names = ["_ZN1aEv", "_ZN1a1bEv", "b", "_ZN1b", "_ZN1a1a", "_ZN1a\u00e9", "a"]
    found = facts_of(ElfFacts("", "", exported=((None, tuple(sorted(names))),)), "").exports
    for prefix in ("_ZN1a", "_ZN1a1", "_ZN1b", "", "_ZN2", "b", "_ZN1bx"):
        assert sorted(found.starting(prefix)) == sorted(name for name in names if name.startswith(prefix))


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
def test_names_are_found_in_blocks(size: int) -> None:
    found = names(size)
    assert [found.columns(name) for name in ("_ZN1a000bEv", "_ZN1a057bEv", "_ZN1a099bEv", "_ZN1a1", "", "~")] == [
        *(1, 6, 6),
        *(0, 0, 0),
    ]
    assert [name for name, _ in found.starting("_ZN1a04")] == [f"_ZN1a04{n}bEv" for n in range(10)]
    assert len(list(found.starting(""))) == 100
    assert list(found.starting("_ZN2")) == []


def test_what_is_collected_is_found_again() -> None:
    collected = Tables()
    first = collected.add([(None, ["b", "a"]), ("V_1", ["c"])])
    second = collected.add([(None, ["a"])])
    assert (first, second) == ([(None, 0), ("V_1", 1)], [(None, 2)])
    blocks, masks, data = collected.blocks()
    found = Names(blocks, masks, lambda offset, size: data[offset : offset + size])
    assert {name: found.columns(name) for name in "abcd"} == {"a": 0b101, "b": 0b001, "c": 0b010, "d": 0}


def test_half_a_library_makes_no_table() -> None:
    with pytest.raises(SystemExit, match="it would be a table that lies"):
        member(ElfFacts("x86_64", "dyn", soname="libc10.so", uncertain=(EXPORTED,)), Tables())


def test_the_releases_that_there_are_tables_of() -> None:
    assert tables.versions("torch") == [
        *("2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1", "2.10.0", "2.11.0"),
        *("2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    ]


def test_the_tables_say_which_torch_has_which_name() -> None:
    """shared/facts/abi.md, section B; cases 001 and 016."""
    wanted = {
        "_ZN3c104cuda9SetDeviceEa": "2.6.0 2.7.0 2.7.1",
        "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_ib": "2.6.0 2.7.0 2.7.1 2.8.0 2.9.0 2.9.1",
        "_ZN3c104cuda29c10_cuda_check_implementationEiPKcS2_jb": "2.10.0 2.11.0 2.12.0 2.12.1 2.13.0",
        "torch_dtype_float4_e2m1fn_x2": "2.11.0 2.12.0 2.12.1 2.13.0 2.14.0 2.14.1 2.15.0",
    }
    having: dict[str, list[str]] = {name: [] for name in wanted}
    for version in tables.versions("torch"):
        sha256 = next(iter(tables.files("torch", version).values()))
        for made, _, _ in tables.wheels(sha256, lambda *_: pytest.fail("nothing more has to be read")):
            for file in made.natives:
                if file.startswith("torch/lib/"):
                    for name in wanted:
                        having[name] += [version] * bool(made.read(file).exports.versions(name))
    assert {name: " ".join(dict.fromkeys(found)) for name, found in having.items()} == wanted


def test_the_tables_know_a_wheel_by_its_hash_alone() -> None:
    assert tables.wheels("0" * 64, lambda *_: pytest.fail("asked")) == []


def test_a_library_that_the_tables_only_name_is_asked_for() -> None:
    (sha256, *_) = tables.files("torch", "2.9.1").values()
    asked = []

    def read(*what: str) -> Facts:
        asked.append(what)
        return facts_of(None, "not read")

    (curand,) = [made for made, _, _ in tables.wheels(sha256, read) if "curand" in made.name]
    curand.read("nvidia/curand/lib/libcurand.so.10")
    assert asked == [("nvidia-curand-cu12", "10.3.9.90", "nvidia/curand/lib/libcurand.so.10")]


def test_the_compiler_s_libraries_are_as_they_are_thought_to_be(tmp_path: Path) -> None:
    path = tmp_path / "ops.so"
    path.write_bytes(library("", wants=(CHECK,), needed=("libc10.so", "libcudart.so.12")))
    said = subprocess.run(
        ["readelf", "-dW", "--dyn-syms", str(path)], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"Shared library: \[(.*)\]", said) == ["libc10.so", "libcudart.so.12"]
    assert re.search(rf"UND {CHECK}$", said, re.MULTILINE)
