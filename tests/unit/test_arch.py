"""Which image runs on which device, what of a file is covered, and the verb `arch` over made-up wheels on loopback."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3.util import Retry

from builder import arch, cli, settings, streaming
from builder.arch import Answer, Loading, answer, choose, cover, pair
from builder.archverb import asked, loadings
from builder.errors import UsageError
from builder.facts import load_facts
from builder.facts.devices import ArchRunFact, LoaderFact, PtxFact
from builder.fatbin import Container, Image
from builder.settings import Settings
from tests import loopback as site_of
from tests.gpu_grid import cases
from tests.gpu_grid.__main__ import run as run_case
from tests.loopback import Loopback, loopback
from tests.made import ROOT, golden, settings_at
from tests.unit.fatbin_made import A, F, container, cubin, elf, entry, module

GRID = Path(__file__).with_name("arch_grid.json")


def image(name: str, isa: str | None = None) -> Image:
    """`sm_90a`, or `compute_90` with its PTX ISA."""
    prefix, target = name.split("_")
    kind = "cubin" if prefix == "sm" else "ptx"
    return Image(kind, target, 1, "", None, pair(isa or "8.0") if kind == "ptx" else None)


# --- the rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "runs", "not_on"),
    [
        ("sm_80", "8.0 8.6 8.9", "7.5 9.0 10.0 12.0 8.7"),
        ("sm_86", "8.6 8.9", "8.0 9.0"),
        ("sm_87", "8.7", "8.6 8.9"),
        ("sm_90", "9.0", "8.9 10.0 12.0"),
        ("sm_90a", "9.0", "8.9 9.1 10.0"),
        ("sm_100", "10.0 10.3", "9.0 11.0 12.0"),
        ("sm_100a", "10.0", "10.3 12.0"),
        ("sm_100f", "10.0 10.3", "11.0 12.0"),
        ("sm_103f", "10.3", "10.0"),
        ("sm_120", "12.0 12.1", "10.0 10.3 11.0"),
        ("sm_120a", "12.0", "12.1"),
        ("sm_121", "12.1", "12.0"),
        ("compute_75", "7.5 8.0 8.7 9.0 10.3 12.1", "7.0"),
        ("compute_90", "9.0 10.0 12.0", "8.9"),
        ("compute_90a", "9.0", "8.9 10.0"),
        ("compute_100f", "10.0 10.3", "9.0 11.0 12.0"),
        ("compute_120a", "12.0", "12.1"),
    ],
)
def test_where_an_image_runs(name: str, runs: str, not_on: str) -> None:
    for device in runs.split():
        assert answer(image(name), pair(device)) is Answer.RUNS
    for device in not_on.split():
        assert answer(image(name), pair(device)) is Answer.OTHER_DEVICE


@pytest.mark.parametrize(
    ("isa", "driver", "found"),
    [
        ("9.0", "9.0", Answer.RUNS),
        ("8.8", "9.0", Answer.RUNS),
        ("9.1", "9.0", Answer.NEWER_PTX),
        ("9.1", None, Answer.RUNS),
    ],
)
def test_ptx_and_the_driver(isa: str, driver: str | None, found: Answer) -> None:
    assert answer(image("compute_90", isa), (9, 0), pair(driver) if driver else None) is found
    assert answer(image("compute_100", isa), (9, 0), pair(driver) if driver else None) is Answer.OTHER_DEVICE


def test_what_is_neither_cubin_nor_ptx_runs_nowhere() -> None:
    assert answer(Image("kind-8", "90", 1, "", None), (9, 0)) is Answer.OTHER_DEVICE
    assert answer(Image("cubin", "9000", 1, "", None), (9, 0)) is Answer.OTHER_DEVICE


targets = st.sampled_from(["75", "80", "86", "90", "90a", "100", "100a", "100f", "103f", "120", "120a", "120f", "121a"])
devices = st.sampled_from([(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)])


@given(targets, devices)
def test_a_suffix_narrows_and_ptx_widens(target: str, device: tuple[int, int]) -> None:
    def runs(name: str) -> bool:
        return answer(image(name), device) is Answer.RUNS

    plain = target.rstrip("af")
    assert not runs(f"sm_{target}") or runs(f"sm_{plain}")
    assert not runs(f"sm_{plain}a") or runs(f"sm_{plain}f")
    assert not runs(f"sm_{target}") or runs(f"compute_{target}")
    assert runs(f"sm_{device[0]}{device[1]}a")


@pytest.mark.parametrize(
    ("names", "device", "found"),
    [
        ("sm_80 sm_86 compute_80", "8.9", "sm_86"),
        ("sm_90 sm_90a", "9.0", "sm_90a"),
        ("sm_80 compute_80 compute_90", "12.0", "compute_90"),
        ("compute_120 sm_120", "12.1", "sm_120"),
        ("sm_100f sm_100a sm_100", "10.3", "sm_100f"),
        ("sm_80 sm_90a", "10.0", None),
    ],
)
def test_the_image_that_is_named(names: str, device: str, found: str | None) -> None:
    _, chosen = choose([image(name) for name in names.split()], pair(device))
    assert (chosen.name if chosen else None) == found


def boxes(*images: str) -> list[Container]:
    """A container for each text of images."""
    return [Container(".nv_fatbin", 0, tuple(image(name) for name in names.split())) for names in images]


def test_containers_count_and_not_the_union_of_names() -> None:
    found = cover(boxes("sm_80 sm_120a", "sm_80", "sm_80 compute_80", ""), (12, 0))
    assert (found.covered, found.of, found.by) == (2, 4, (("compute_80", 1), ("sm_120a", 1)))
    assert (found.whole, cover([], (12, 0)).whole) == (False, True)


def test_ptx_that_the_driver_does_not_know_is_apart() -> None:
    file = [Container("", 0, (image("compute_90", "9.1"),)), Container("", 0, (image("compute_80", "8.8"),))]
    found = cover(file, (9, 0), (9, 0))
    assert (found.covered, found.by, found.newer, found.isa) == (
        1,
        (("compute_80", 1),),
        (("compute_90", 1),),
        (8, 8),
    )


def test_where_a_file_is_loaded() -> None:
    for loading, on, off in (
        (Loading("x"), "8.0 9.0", ""),
        (Loading("x", devices=("9.0",)), "9.0", "9.1 12.0"),
        (Loading("x", devices=("8", "9")), "8.9 9.0", "10.0"),
        (Loading("x", except_devices=("9.0",)), "8.0 12.0", "9.0"),
        (Loading("x", devices=()), "", "8.0 9.0"),
    ):
        assert all(loading.on(pair(device)) for device in on.split())
        assert not any(loading.on(pair(device)) for device in off.split())


def test_the_rules_need_the_standard_library_alone() -> None:
    """So that they can be compared with a GPU where nothing is installed (tests/gpu_grid)."""
    script = (
        "import sys, builder.arch; print([m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names"
        " and m.split('.')[0] not in ('builder', '__main__') and not m.startswith('_')])"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- what a GPU did ---------------------------------------------------------------------------------------------------


def run_there() -> list[ArchRunFact]:
    """The facts that rest on the file of a run."""
    return [fact for fact in load_facts(ArchRunFact) if GRID.name in fact.source]


@pytest.mark.skipif(
    not GRID.exists() and not run_there(), reason="tests/gpu_grid was not run on a GPU yet: no fact rests on its file"
)
def test_the_rules_say_what_a_gpu_did() -> None:
    """Each case of `python -m tests.gpu_grid`: what the driver did with it is what the rules say now."""
    grid = json.loads(GRID.read_text())
    device, isa = pair(grid["capability"]), pair(grid["newest_ptx"])
    assert {fact.cuda: pair(fact.isa) for fact in load_facts(PtxFact)}[grid["cuda"]] == isa
    for case in grid["cases"]:
        verdict, chosen = choose([image(one["name"], one["isa"]) for one in case["images"]], device, isa)
        ran = chosen.name if chosen and verdict is Answer.RUNS else None
        assert (verdict.value, ran) == (case["got"], case["ran"]), case["case"]
    (fact,) = run_there()
    said = (fact.capability, fact.driver, fact.cases, str(fact.date))
    assert said == (grid["capability"], grid["driver"], len(grid["cases"]), grid["date"])


def made(name: str, token: int) -> cases.Built:
    """What nvcc would have made."""
    prefix, target = name.split("_")
    flags = {"a": A, "f": F}.get(target[-1], 0)
    text = b".version 9.0 of %d" % token
    code = entry(text, int(target.rstrip("af")), flags, kind=1 if prefix == "compute" else 2)
    found = cases.with_isa(container(code), (9, 0)) if prefix == "compute" else container(code)
    assert found is not None
    return cases.Built(name, token, found)


TARGETS = ["75", "80", "86", "89", "90", "90a", "100", "100a", "100f", "120", "120a", "120f"]
BUILT = [
    made(name, token) for token, name in enumerate(f"{kind}_{one}" for kind in ("sm", "compute") for one in TARGETS)
]
TEXTS = {"80": (500, b".version 9.0\n.target sm_80\n"), "90": (501, b".version 9.0\n.target sm_90\n")}


class FakeDriver:
    """A driver for 9.0 that does what the rules say, but for ``wrong``: code and token by a case's name."""

    capability, name = (9, 0), "a made-up GPU"

    def __init__(self, every: list[cases.Case], wrong: dict[str, tuple[int, int | None]]) -> None:
        self.known: dict[bytes, tuple[int, int | None]] = {}
        for case in every:
            verdict, ran = case.predicted((9, 0), (9, 0))
            code = {"runs": 0, "for another device": 209, "PTX newer than the driver": 222}[verdict]
            token = next((token for token, name in case.tokens.items() if name == ran), None)
            self.known.setdefault(case.data, wrong.get(case.name, (code, token)))

    def error(self, code: int) -> str:
        return f"CUDA_ERROR_{code}"

    def answer(self, data: bytes) -> tuple[int, int | None]:
        return self.known[data]


def test_the_grid() -> None:
    every = list(cases.grid(BUILT, TEXTS, (9, 0)))
    assert len({case.name for case in every}) == len({case.data for case in every}) == len(every)
    assert [case.name for case in every if case.artificial] == [
        "compute_90 as PTX 9.1 in its header alone",
        "compute_90 as PTX 9.1 in its text alone",
    ]
    said = {case.name: case.predicted((9, 0), (9, 0)) for case in every}
    assert said["sm_90a"] == ("runs", "sm_90a")
    assert said["sm_120f"] == ("for another device", None)
    assert said["compute_90 as PTX 8.8 (older)"] == ("runs", "compute_90")
    assert said["compute_90 as PTX 9.3 (far newer)"] == ("PTX newer than the driver", None)
    assert said["text for 80, PTX 9.1"] == ("PTX newer than the driver", None)
    assert said["sm_90 + sm_90a"] == said["sm_90a + sm_90"] == ("runs", "sm_90a")
    assert said["sm_80 + compute_80 as PTX 9.1"] == ("PTX newer than the driver", None)
    assert said["sm_90 + compute_90 as PTX 9.1"] == ("runs", "sm_90")


def test_a_run_of_the_grid() -> None:
    every = list(cases.grid(BUILT, TEXTS, (9, 0)))
    wrong: dict[str, tuple[int, int | None]] = {
        "sm_90": (0, 99),
        "sm_80": (1, None),
        "sm_100f + sm_120f": (222, None),
    }
    driver = FakeDriver(every, wrong)
    found = [run_case(driver, case, (9, 0)) for case in every if not case.artificial]
    assert {case["case"]: (case["got"], case["ran"]) for case in found if not case["ok"]} == {
        "sm_90": ("runs", "a kernel that wrote 99"),
        "sm_80": ("error 1 CUDA_ERROR_1", None),
        "sm_100f + sm_120f": ("PTX newer than the driver", None),
    }
    assert found[0]["images"] == [{"name": "sm_75", "isa": None}]


def test_what_nvcc_made_is_what_the_reader_finds() -> None:
    wrong = [cases.Built("sm_90a", 1, made("sm_90", 1).data)]
    with pytest.raises(AssertionError, match=r"sm_90a: the reader found \['sm_90'\]"):
        list(cases.grid(wrong, {}, (9, 0)))


def test_the_grid_reads_the_facts_without_a_library() -> None:
    for fact in load_facts(PtxFact):
        assert cases.newest_ptx(pair(fact.cuda)) == pair(fact.isa)


# --- facts ------------------------------------------------------------------------------------------------------------


def test_ptx_rises_with_the_driver() -> None:
    rows = [(pair(row.isa), pair(row.cuda), row.driver) for row in load_facts(PtxFact)]
    assert rows == sorted(rows)
    assert len({cuda for _, cuda, _ in rows}) == len({driver for *_, driver in rows}) == len(rows)


def test_the_loader_takes_one_common_ops_on_each_device() -> None:
    for release in (
        ("sgl-kernel", "0.3.13"),
        ("sgl-kernel", "0.3.16.post4"),
        ("sgl-kernel", "0.3.21"),
        ("sglang-kernel", "0.4.0"),
        ("sglang-kernel", "0.4.2.post2"),
        ("sglang-kernel", "0.4.10"),
    ):
        known = [loading for loading in loadings(*release) if "common_ops" in loading.file]
        for device in ((8, 0), (9, 0), (10, 3), (12, 0), (12, 1)):
            (taken,) = [loading.file for loading in known if loading.on(device)]
            assert taken == f"sgl_kernel/{'sm90' if device == (9, 0) else 'sm100'}/common_ops.abi3.so"
    # Up to 0.3.12 there is one, for every device.
    assert not any("common_ops" in loading.file for loading in loadings("sgl-kernel", "0.3.12"))
    assert loadings("sgl-kernel", "0.0.5") == loadings("torch", "2.9.1") == []
    assert len({(fact.path, fact.releases) for fact in load_facts(LoaderFact)}) == len(load_facts(LoaderFact))


@pytest.mark.parametrize(
    ("driver", "cuda", "isa"),
    [
        ("580.159.04", None, (9, 0)),
        ("580", None, (9, 0)),
        ("560.35.03", None, (8, 5)),
        (None, "12.8", (8, 7)),
        (None, None, None),
    ],
)
def test_what_ptx_a_driver_knows(driver: str | None, cuda: str | None, isa: tuple[int, int] | None) -> None:
    assert asked(["9.0", "9.0"], driver, cuda).isa == isa
    assert asked(["9.0", "9.0"], driver, cuda).gpus == ((9, 0),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (["sm_90"], None, None),
            "error: `--gpu sm_90` is no compute capability\n  hint: as in `--gpu 12.0`; known: 8.0, 8.6, 8.9, 9.0, 10.0",
        ),
        (
            (["9.0"], "585.1", None),
            "error: what PTX the driver 585.1 compiles is not known\n  because: facts/ptx.yaml has 445,",
        ),
        (
            (["9.0"], "x", None),
            "error: what PTX the driver x compiles is not known\n  because: facts/ptx.yaml has 445,",
        ),
        (
            (["9.0"], None, "19.1"),
            "error: what PTX a driver for CUDA 19.1 compiles is not known\n  because: facts/ptx.yaml has 11.0,",
        ),
    ],
)
def test_what_is_asked_in_vain(arguments: tuple[list[str], str | None, str | None], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        asked(*arguments)
    assert str(caught.value).startswith(message)


# --- the verb ---------------------------------------------------------------------------------------------------------

COMMON = module([container(entry(cubin(9), 80, 0), entry(cubin(9), 90), entry(cubin(9), 120))] * 3)
FLASH = module([container(entry(cubin(9), 80, 0), entry(cubin(9), 90))] * 2)
TOOLS = module([container(entry(cubin(9), 80, 0), entry(b".version 8.1\n", 90, 0, kind=1))])
FILES = {
    "sgl_kernel/sm90/common_ops.abi3.so": COMMON,
    "sgl_kernel/sm100/common_ops.abi3.so": COMMON,
    "sgl_kernel/flash_ops.abi3.so": FLASH,
    "sgl_kernel/flashmla_ops.abi3.so": module([container(entry(cubin(9), 90), entry(cubin(9), 100, F))]),
    "sgl_kernel/other.so": TOOLS,
    "sgl_kernel/other.so.1": TOOLS,
    "sgl_kernel/plain.so": elf({".text": b"\x90" * 1000}),
    "sgl_kernel/__init__.py": b"",
}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        yield server


@pytest.fixture
def mine(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    made = settings_at(tmp_path, index=f"{site.url}/simple")
    monkeypatch.setattr(settings, "load", lambda: made)
    return made


def squeezed(made: tuple[str, bytes]) -> tuple[str, bytes]:
    """The same wheel with its members deflated, as real ones are."""
    name, data = made
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(zipfile.ZipInfo(info.filename, info.date_time), old.read(info), zipfile.ZIP_DEFLATED)
    return name, buffer.getvalue()


def add(site: Loopback, *, deflate: bool = True, files: dict[str, bytes] = FILES) -> str:
    made = site_of.wheel("sgl-kernel", "0.3.21", tag="cp310-abi3-manylinux2014_x86_64", files=files)
    return site.add(squeezed(made) if deflate else made, beside=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["arch", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def told(text: str) -> str:
    """The text without what differs from run to run."""
    return text.rsplit("\n", 2)[0] + "\n"


@pytest.mark.parametrize("deflate", [True, False])
def test_a_release_from_an_index(
    site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str], deflate: bool
) -> None:
    add(site, deflate=deflate)
    code, out, _ = run(capsys, "sgl-kernel==0.3.21", "--gpu", "9.0", "--gpu", "12.0", "--gpu", "12.1")
    assert code == 3
    golden("arch_release.txt", told(out))


def test_another_platform_has_another_wheel(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site)
    code, out, err = run(capsys, "sgl-kernel==0.3.21", "--platform", "linux/arm64")
    assert (code, out, err.splitlines()[0]) == (2, "", "error: sgl-kernel 0.3.21 has no wheel for Linux aarch64")
    tag = "cp310-abi3-manylinux2014_aarch64"
    site.add(site_of.wheel("sgl-kernel", "0.3.21", tag=tag, files=FILES), beside=False)
    assert run(capsys, "sgl-kernel==0.3.21")[1].startswith(
        "sgl-kernel 0.3.21, sgl_kernel-0.3.21-cp310-abi3-manylinux2014_x86_64.whl"
    )
    assert run(capsys, "sgl-kernel==0.3.21", "--platform", "linux/arm64")[1].startswith(
        f"sgl-kernel 0.3.21, sgl_kernel-0.3.21-{tag}.whl"
    )


def test_no_device_is_asked_for(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site)
    code, out, _ = run(capsys, "sgl-kernel==0.3.21")
    assert code == 0
    golden("arch_all.txt", told(out))


def test_devices_that_are_covered(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site)
    code, out, _ = run(capsys, "sgl-kernel==0.3.21", "--gpu", "12.0", "--cuda-driver", "12.8")
    assert code == 0
    assert told(out).splitlines()[-1] == "12.0, RTX PRO 6000 Blackwell: covered by every file that is loaded there"


def test_a_file_without_gpu_code_is_not_called_covered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plain.so").write_bytes(elf({}))
    code, out, _ = run(capsys, str(tmp_path / "plain.so"), "--gpu", "12.0")
    last = "12.0, RTX PRO 6000 Blackwell: nothing to cover: no file that was looked at has GPU code"
    assert (code, out.splitlines()[-1]) == (0, last)


def test_ptx_too_new_for_the_driver(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    # The made-up PTX says 1.8 in its header.
    new = module([container(entry(b".version 9.1\n", 80, 0, kind=1))]).replace(
        b"\x08\0\x01\0\x50\0\0\0", b"\x01\0\x09\0\x50\0\0\0"
    )
    add(site, files={"sgl_kernel/other.so": new})
    code, out, _ = run(capsys, "sgl-kernel==0.3.21", "--gpu", "9.0", "--driver", "580.159.04")
    assert code == 3
    assert out.splitlines()[4:8] == [
        "error: `sgl_kernel/other.so` has no code for 9.0 that a driver 580.159.04 takes [arch-newer-ptx]",
        "  because: there is PTX 9.1 for it, and the driver compiles PTX 9.0 at most",
        "  hint: PTX 9.1 needs a driver for CUDA 13.1 or newer (branch 590)",
        "",
    ]


def test_the_report_as_data(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site)
    code, out, _ = run(capsys, "sgl-kernel==0.3.21", "--gpu", "12.0", "--gpu", "9.0", "--json")
    data = json.loads(out)
    assert (code, data["ok"]) == (0, True)
    files: dict[str, dict[str, Any]] = {file["file"]: file for file in data["files"]}
    assert list(files) == [name for name in FILES if ".so" in name]
    common = files["sgl_kernel/sm90/common_ops.abi3.so"]
    assert (common["containers"], common["images"], common["ptx"]) == (3, ["sm_80", "sm_90a", "sm_120a"], [])
    assert common["gpus"]["12.0"] == {
        "covered": 3,
        "of": 3,
        "by": {"sm_120a": 3},
        "newer_ptx": {},
        "loaded": False,
        "only_for": None,
        "evidence": "documented",
    }
    assert common["gpus"]["9.0"]["evidence"] == "run"
    assert files["sgl_kernel/other.so"]["gpus"]["12.0"]["by"] == {"compute_90": 1}
    assert {finding["rule"] for finding in data["findings"]} == {
        "arch-not-loaded",
        "arch-compiled-there",
        "arch-not-run",
    }


def test_a_second_look_costs_nothing(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site)
    first = json.loads(run(capsys, "sgl-kernel==0.3.21", "--json")[1])
    asked_before = len(site.requests)
    second = json.loads(run(capsys, "sgl-kernel==0.3.21", "--json")[1])
    assert len(site.requests) == asked_before
    assert (second["bytes_read"], second["requests"]) == (0, 0)
    assert first["files"] == second["files"]
    # Eight names, but six contents.
    assert len(list((mine.cache / "arch").glob("*/*.json"))) == 5


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"schema": 1, "images": [], "containers": [["", 0, [7]]]}', b"\xff"])
def test_what_was_kept_and_damaged_is_looked_at_again(
    site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str], damage: bytes
) -> None:
    add(site)
    first = json.loads(run(capsys, "sgl-kernel==0.3.21", "--json")[1])
    for kept in (mine.cache / "arch").glob("*/*.json"):
        kept.write_bytes(damage)
    assert json.loads(run(capsys, "sgl-kernel==0.3.21", "--json")[1])["files"] == first["files"]


def test_members_larger_than_a_window(
    site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "WINDOW", 1000)
    monkeypatch.setattr(streaming, "PIECE", 700)
    noise = random.Random(1).randbytes(20_000)
    url = add(site, files={"sgl_kernel/other.so": elf({".text": noise, ".nv_fatbin": container(entry(noise, 90))})})
    # The first answer is the wheel's end; of the windows some break off.
    site.files[url.removeprefix(site.url)].cuts = [1 << 20, 300, 1000, 200]
    data = json.loads(run(capsys, "sgl-kernel==0.3.21", "--gpu", "9.0", "--json")[1])
    assert (data["ok"], data["files"][0]["containers"]) == (True, 1)
    assert data["requests"] > 20


def test_a_wheel_and_a_file_on_this_machine(
    site: Loopback, mine: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, data = squeezed(site_of.wheel("sgl-kernel", "0.3.21", tag="cp310-abi3-manylinux2014_x86_64", files=FILES))
    (tmp_path / name).write_bytes(data)
    (tmp_path / "x.so").write_bytes(FLASH)
    code, out, _ = run(capsys, str(tmp_path / name), str(tmp_path / "x.so"), "--gpu", "12.0")
    assert code == 3
    assert out.splitlines()[-3:-1] == [
        "",
        f"12.0, RTX PRO 6000 Blackwell: not covered by {tmp_path}/x.so",
    ]
    assert f"nothing fetched of {len(data) / 1000:.2f} kB of wheels" in out
    assert site.requests == []


@pytest.mark.parametrize(
    ("subject", "code", "message"),
    [
        ("nothing.so", 2, "error: there is no file `nothing.so`\n  hint: FILE.so, FILE.whl, or a release as in"),
        ("torch", 2, "error: `torch` is not one release\n  hint: `torch==VERSION`"),
        ("torch>=2,<3", 2, "error: `torch>=2,<3` is not one release\n"),
        ("torch==2.*", 2, "error: `torch==2.*` is not one release\n"),
        ("nothing.whl", 2, "error: `nothing.whl` cannot be read\n"),
        ("pyproject.toml", 2, "error: the GPU code of `pyproject.toml` cannot be read\n  because: not an ELF64"),
        ("torch==2.9.1", 5, "error: the index does not tell the releases of `torch`\n"),
    ],
)
def test_what_is_no_subject(
    mine: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    subject: str,
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(ROOT)
    found, out, err = run(capsys, subject)
    assert (found, out) == (code, "")
    assert err.startswith(message)


def test_a_member_that_is_another_file(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    url = add(site, deflate=False)
    served = site.files[url.removeprefix(site.url)]
    at = served.data.index(COMMON) + 200
    served.data = served.data[:at] + b"?" + served.data[at + 1 :]
    code, out, err = run(capsys, "sgl-kernel==0.3.21")
    assert (code, out) == (7, "")
    assert "`sgl_kernel/sm90/common_ops.abi3.so` is not the file that RECORD has the hash of" in err
    assert not (mine.cache / "arch").exists()


def test_a_member_that_is_no_elf_file(site: Loopback, mine: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    add(site, files={"sgl_kernel/other.so": b"INPUT(-lother)\n"})
    code, out, _ = run(capsys, "sgl-kernel==0.3.21", "--gpu", "9.0")
    assert code == 3
    assert out.splitlines()[4:6] == [
        "error: the GPU code of `sgl_kernel/other.so` cannot be read [arch-unreadable]",
        "  because: not an ELF64 little-endian file",
    ]


def test_names_of_images_are_in_order() -> None:
    assert arch.names(boxes("sm_120a sm_80", "sm_90 compute_90"), "cubin") == ["sm_80", "sm_90", "sm_120a"]
