"""The patch sets on the real releases that facts/patched.yaml lists, from the package index."""

from __future__ import annotations

from pathlib import Path

import pytest
from pypi_simple import PyPISimple

from builder import facts, settings
from builder.index import TIMEOUT, session
from builder.matrix import Eagle3, Patches, Sm120
from builder.patches import asked, look, patch_wheel
from builder.patches.apply import SETS
from builder.patches.engine import State
from builder.wheel import Wheel, read_wheel
from tests import patch_made as made
from tests.patch_made import Communicator, deep_gemm_enabled, kimi, warnings

pytestmark = pytest.mark.index

BOTH = Patches(sm120=Sm120(), eagle3=Eagle3())
EVERY = Patches(sm120=Sm120(symm_mem="opt-in", allreduce_fusion="opt-in"), eagle3=Eagle3(multimodal="opt-in"))
WHEELS = {
    ("sglang", "0.5.9"): "sglang-0.5.9-py3-none-any.whl",
    ("sglang", "0.5.15.post1"): "sglang-0.5.15.post1-cp311-cp311-manylinux_2_34_x86_64.whl",
    ("flashinfer-python", "0.6.4"): "flashinfer_python-0.6.4-py3-none-any.whl",
    ("flashinfer-python", "0.6.12"): "flashinfer_python-0.6.12-py3-none-any.whl",
}
# Of each release: what is native and what is absent, in the order of the sites (one may be in several files). Everything
# else is needed (shared/facts/patches.md, B; read in the sources where that has no row).
NATIVE: dict[tuple[str, str], list[str]] = {
    ("sglang", "0.5.9"): ["S6", "S8b", "S8c", "E5c"],
    ("sglang", "0.5.15.post1"): ["S2", "S6", "S6", "S4c", "E5", "E1", "E2", "E3", "E4", "E6", "E7"],
    ("flashinfer-python", "0.6.4"): [],
    ("flashinfer-python", "0.6.12"): [],
}
ABSENT: dict[tuple[str, str], list[str]] = {
    ("sglang", "0.5.9"): ["S4d", "E5e", "E5g", "E5h"],
    ("sglang", "0.5.15.post1"): ["S4d", "E5g", "E5h"],
    ("flashinfer-python", "0.6.4"): [],
    ("flashinfer-python", "0.6.12"): [],
}
PATCHED = {
    ("sglang", "0.5.9"): "0.5.9+sm120.eagle3",
    ("sglang", "0.5.15.post1"): "0.5.15.post1+sm120",
    ("flashinfer-python", "0.6.4"): "0.6.4+sm120",
    ("flashinfer-python", "0.6.12"): "0.6.12+sm120",
}
PATCHED_WITH_ALL = {
    ("sglang", "0.5.9"): "0.5.9+sm120.symm.fusion.eagle3.multimodal",
    ("sglang", "0.5.15.post1"): "0.5.15.post1+sm120.symm.fusion",
    ("flashinfer-python", "0.6.4"): "0.6.4+sm120.fusion",
    ("flashinfer-python", "0.6.12"): "0.6.12+sm120.fusion",
}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Wheel]:
    """The four wheels, each with the sha256 that the index states."""
    site = settings.load()
    folder = tmp_path_factory.mktemp("wheels")
    found = {}
    endpoint = {"endpoint": site.index} if site.index else {}
    with PyPISimple(session=session(site), **endpoint) as client:
        for (name, version), file in WHEELS.items():
            page = client.get_project_page(name, timeout=TIMEOUT)
            (package,) = [package for package in page.packages if package.filename == file]
            client.download_package(package, folder / file, timeout=TIMEOUT)
            found[name, version] = read_wheel(folder / file)
    return found


@pytest.fixture(scope="session")
def patched(
    wheels: dict[tuple[str, str], Wheel], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Wheel]:
    """The same wheels, patched."""
    folder = tmp_path_factory.mktemp("patched")
    made_of = {key: patch_wheel(wheel.path, BOTH, folder, matrix_folder=folder) for key, wheel in wheels.items()}
    return {key: read_wheel(done.path) for key, done in made_of.items() if done is not None}


@pytest.mark.parametrize("release", WHEELS)
def test_the_states_of_a_release(wheels: dict[tuple[str, str], Wheel], release: tuple[str, str]) -> None:
    sites = look(wheels[release])
    assert {item.site.id for item in sites} == {s.id for x in SETS.values() for s in x if s.package == release[0]}
    found = {state.value: [item.site.id for item in sites if item.before is state] for state in State}
    assert (found["native"], found["absent"], found["unknown"]) == (NATIVE[release], ABSENT[release], [])


@pytest.mark.parametrize(("patches", "versions"), [(BOTH, PATCHED), (EVERY, PATCHED_WITH_ALL)], ids=["base", "all"])
@pytest.mark.parametrize("release", WHEELS)
def test_a_release_comes_out_as_it_is_listed(
    wheels: dict[tuple[str, str], Wheel],
    tmp_path: Path,
    release: tuple[str, str],
    patches: Patches,
    versions: dict[tuple[str, str], str],
) -> None:
    source = wheels[release]
    done = patch_wheel(source.path, patches, tmp_path, matrix_folder=tmp_path)
    assert done is not None
    written = read_wheel(done.path)
    after = {item.site.id: item.before.value for item in look(written, asked(patches))}
    wanted = {site.id: "native" for name in asked(patches) for site in SETS[name] if site.package == release[0]}
    assert after == {site: "absent" if site in ABSENT[release] else state for site, state in wanted.items()}
    changed = {item["file"] for item in done.report["files"] if item["before"] != item["after"]}
    others = [name for name in source.entries if ".dist-info/" not in name and name not in changed]
    assert all(source.entries[name] == written.entries[name] for name in others)
    assert (done.version, done.report["listed"]) == (versions[release], True)
    # What is listed is listed by the sites that change a file.
    listed = {
        (fact.path, fact.sites): (fact.before, fact.after or fact.before)
        for fact in facts.load_facts(facts.PatchedFact)
        if (fact.package, fact.version) == release
    }
    for item in done.report["files"]:
        here = [site for site in done.report["sites"] if site["file"] == item["file"]]
        sites = tuple(site["id"] for site in here if site["before"] == "needed")
        assert listed[item["file"], sites] == (item["before"], item["after"])
    assert patch_wheel(done.path, patches, tmp_path / "again", matrix_folder=tmp_path) is None


def text(wheel: Wheel, file: str) -> str:
    return wheel.read(file).decode("utf-8-sig")


SGLANG = [release for release in WHEELS if release[0] == "sglang"]
NOT_LISTED = "TorchSymmMemCommunicator: Device capability 11 not supported, communicator is not available."
NO_MULTICAST = "TorchSymmMemCommunicator: torch symmetric memory multicast operations are not supported."


@pytest.mark.parametrize("release", SGLANG)
def test_symmetric_memory(
    patched: dict[tuple[str, str], Wheel],
    release: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sizes, source = (text(patched[release], file) for file in (made.ALL_REDUCE, made.SYMM_MEM))
    communicator = Communicator(sizes, source, monkeypatch)
    assert list(communicator.sizes) == [9, 10, 12]
    assert communicator.kind._WORLD_SIZES_MULTIMEM[12] == []
    for world in (2, 4, 8):
        assert communicator.make(12, world, 0).disabled
        assert warnings(caplog) == [NO_MULTICAST]
        assert not communicator.make(12, world, 1).disabled
    assert communicator.make(11, 2, 1).disabled
    assert warnings(caplog) == [NOT_LISTED]
    for capability, kernel in ((12, "two_shot"), (9, "multimem")):
        found = communicator.make(capability, 8, 1)
        found.should_torch_symm_mem_allreduce = lambda _: True
        communicator.kernels.clear()
        found.all_reduce(made.Tensor())
        assert communicator.kernels == [kernel]


def test_without_the_patch_12_is_a_key_error(
    wheels: dict[tuple[str, str], Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, source = (text(wheels["sglang", "0.5.9"], file) for file in (made.ALL_REDUCE, made.SYMM_MEM))
    with pytest.raises(KeyError, match="12"):
        Communicator(sizes, source, monkeypatch).make(12, 2, 0)


@pytest.mark.parametrize("release", SGLANG)
def test_deep_gemm_is_off_on_12_x_alone(
    patched: dict[tuple[str, str], Wheel], release: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = text(patched[release], made.DEEP_GEMM)
    on = [arch for arch in (80, 90, 100, 103, 120, 121) if deep_gemm_enabled(source, arch, monkeypatch)]
    assert on == [90, 100, 103]


@pytest.mark.parametrize("release", SGLANG)
def test_the_hooks_hand_on_to_the_language_model(
    patched: dict[tuple[str, str], Wheel], release: tuple[str, str]
) -> None:
    model, inner = kimi(text(patched[release], made.KIMI_FILE))
    assert model.get_embed_and_head() == ("embed", "head")
    model.set_embed_and_head("e", "h")
    model.set_eagle3_layers_to_capture([1, 29, 57])
    model.set_eagle3_layers_to_capture()
    assert inner.asked == [("get",), ("set", "e", "h"), ("layers", [1, 29, 57]), ("layers", None)]
