"""Resolution: what is asked of uv, what is taken from its answer, what a user is told. The index is on loopback."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import Tag

from builder import facts, resolve
from builder.errors import BuilderError, ExitCode, LockError, UnreachableError
from builder.lock import Artefact
from builder.matrix import Matrix
from builder.resolve import marker_environment, requirements, target_tags
from builder.settings import Settings
from tests.loopback import Loopback, Served, loopback, metadata, wheel
from tests.made import settings_at, sha, tiny

pytestmark = pytest.mark.processes


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with loopback() as server:
        yield server


def run(site: Loopback, tmp_path: Path, extra: str = "", **fields: Any) -> list[Artefact]:
    changes = {key: fields.pop(key) for key in ("as_of", "python", "base", "stack") if key in fields}
    settings = settings_at(tmp_path, index=f"{site.url}/simple", **fields)
    return resolve.resolve(tiny(extra, **changes).matrix, settings)[0]


def names(artefacts: list[Artefact]) -> list[str]:
    return [f"{artefact.name} {artefact.version}" for artefact in artefacts]


def refusal(site: Loopback, tmp_path: Path, extra: str = "", **fields: Any) -> BuilderError:
    with pytest.raises(BuilderError) as caught:
        run(site, tmp_path, extra, **fields)
    return caught.value


# --- the target -------------------------------------------------------------------------------------------------------


def test_the_best_tag_is_the_newest_c_library_that_the_os_has() -> None:
    tags = target_tags(tiny().matrix)
    assert [str(tag) for tag in tags[:3]] == [
        "cp311-cp311-manylinux_2_36_x86_64",
        "cp311-cp311-manylinux_2_35_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
    ]


def test_the_order_of_tags_is_native_then_stable_abi_then_pure() -> None:
    wanted = [
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux2014_x86_64",
        "cp311-cp311-manylinux1_x86_64",
        "cp311-cp311-linux_x86_64",
        "cp311-abi3-manylinux_2_36_x86_64",
        "cp311-none-manylinux_2_36_x86_64",
        "cp310-abi3-manylinux_2_36_x86_64",
        "py311-none-manylinux_2_36_x86_64",
        "py3-none-manylinux2014_x86_64",
        "cp311-none-any",
        "py3-none-any",
    ]
    order = [str(tag) for tag in target_tags(tiny().matrix)]
    assert [order.index(tag) for tag in wanted] == sorted(order.index(tag) for tag in wanted)


@pytest.mark.parametrize(
    "tag", ["cp311-cp311-manylinux_2_37_x86_64", "cp312-cp312-linux_x86_64", "cp311-cp311-musllinux_1_2_x86_64",
            "cp311-cp311-manylinux_2_17_aarch64", "cp311-cp311t-linux_x86_64", "cp311-cp311d-linux_x86_64"]
)  # fmt: skip
def test_tags_that_do_not_fit(tag: str) -> None:
    assert Tag(*tag.split("-")) not in target_tags(tiny().matrix)


def test_the_tags_do_not_depend_on_the_python_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    before = target_tags(tiny(python='"3.13"').matrix)
    import sysconfig

    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: 1)
    assert target_tags(tiny(python='"3.13"').matrix) == before


def test_the_markers_are_those_of_the_image_and_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    matrix = tiny(python='"3.12"').matrix
    for name in ("machine", "release", "version", "system", "python_implementation"):
        monkeypatch.setattr(platform, name, lambda: "elsewhere")
    environment = marker_environment(matrix)
    assert environment == {
        "implementation_name": "cpython",
        "implementation_version": "3.12.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": "3.12.0",
        "python_version": "3.12",
        "sys_platform": "linux",
    }


def test_an_os_whose_c_library_no_fact_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = tiny().matrix
    monkeypatch.setattr(facts, "load_facts", lambda _: ())
    with pytest.raises(LockError) as caught:
        target_tags(matrix)
    assert str(caught.value) == (
        "error: the C library of debian bookworm is not known\n"
        "  because: it decides which wheels install\n"
        "  hint: add the release to builder/facts/distributions.yaml, with its source"
    )


def test_what_is_asked_for_is_the_stack_the_compiler_and_the_extras() -> None:
    matrix = tiny(
        "extras: [packaging==24.2]\n",
        stack="{torch: 2.11.0, flashinfer: 0.6.12}",
        cuda="{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
        "nvidia-cuda-cccl: 13.0.85}}",
    ).matrix
    assert requirements(matrix) == [
        "flashinfer-cubin==0.6.12",
        "flashinfer-python==0.6.12",
        "nvidia-cuda-cccl==13.0.85",
        "nvidia-cuda-crt==13.0.88",
        "nvidia-cuda-nvcc==13.0.88",
        "nvidia-nvvm==13.0.88",
        "packaging==24.2",
        "torch==2.11.0",
    ]


# --- what is taken ----------------------------------------------------------------------------------------------------


def test_every_field_of_an_artefact(site: Loopback, tmp_path: Path) -> None:
    text = metadata("part", "1.0", ['idna>=3 ; python_version >= "3.9"', "x; sys_platform == 'win32'"])
    made = wheel("part", "1.0+cu1", text=text)
    site.add(made)
    site.add(wheel("idna", "3.7"))
    found = run(site, tmp_path, "extras: [part==1.0+cu1]\n")
    assert names(found) == ["idna 3.7", "part 1.0+cu1"]
    import hashlib

    assert found[1] == Artefact(
        name="part",
        version="1.0+cu1",
        metadata_version="1.0",
        file="part-1.0+cu1-py3-none-any.whl",
        sha256=hashlib.sha256(made[1]).hexdigest(),
        size=len(made[1]),
        index="default",
        url=None,
        requires=("idna>=3",),
        layer="rest",
    )


def test_requirements_are_those_that_hold_for_the_target_sorted(site: Loopback, tmp_path: Path) -> None:
    lines = [
        "zipp>=1; python_version < '4'",
        "idna",
        "idna",
        'never>=1; extra == "all"',
        'never2; python_full_version < "3.11.0"',
        'never3; platform_machine == "aarch64"',
    ]
    site.add(wheel("part", "1.0", lines))
    site.add(wheel("zipp", "1.0"))
    site.add(wheel("idna", "1.0"))
    part = next(a for a in run(site, tmp_path, "extras: [part==1.0]\n") if a.name == "part")
    assert part.requires == ("idna", "zipp>=1")


def test_lines_of_old_metadata_that_are_no_requirements_are_left_out() -> None:
    assert resolve._requires(["idna (>=3)", "x>=1.*", "?"], {}) == ["idna>=3"]


def test_the_wheel_that_an_installer_would_take(site: Loopback, tmp_path: Path) -> None:
    for tag in (
        "py3-none-any",
        "cp310-abi3-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_39_x86_64",
        "cp311-cp311-musllinux_1_2_x86_64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp311-cp311-win_amd64",
    ):
        site.add(wheel("part", "1.0", tag=tag))
    assert [a.file for a in run(site, tmp_path, "extras: [part==1.0]\n")] == [
        "part-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    ]


@pytest.mark.parametrize("builds", [(2, 10, 9), (10, 9, 2), (9, 2, 10)])
def test_of_two_builds_the_higher_is_taken(builds: tuple[int, ...]) -> None:
    wheels = [{"name": f"part-1.0-{build}-py3-none-any.whl"} for build in builds]
    assert resolve._best(wheels, {Tag("py3", "none", "any"): 0}) == {"name": "part-1.0-10-py3-none-any.whl"}


def test_a_build_number_does_not_beat_a_better_tag() -> None:
    wheels = [{"name": "part-1.0-9-py3-none-any.whl"}, {"name": "part-1.0-cp311-cp311-linux_x86_64.whl"}]
    ranks = {tag: rank for rank, tag in enumerate(target_tags(tiny().matrix))}
    assert resolve._best(wheels, ranks) == wheels[1]


def test_a_file_uploaded_on_the_day_or_later_is_not_seen(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", ["dep"]))
    site.add(wheel("dep", "1.0"), uploaded="2026-02-28T23:59:59Z")
    site.add(wheel("dep", "2.0"), uploaded="2026-03-01T00:00:01Z")
    assert names(run(site, tmp_path, "extras: [part==1.0]\n")) == ["dep 1.0", "part 1.0"]
    assert names(run(site, tmp_path, "extras: [part==1.0]\n", as_of="2026-03-02")) == ["dep 2.0", "part 1.0"]


def test_two_resolutions_are_equal(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", ["dep", "idna"]))
    site.add(wheel("dep", "1.0", ["idna<4"]))
    site.add(wheel("idna", "3.0"))
    first, second = (run(site, tmp_path / word, "extras: [part==1.0]\n") for word in ("a", "b"))
    assert first == second


def test_an_os_newer_than_uv_knows_takes_the_newest_that_uv_knows(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", tag="cp313-cp313-manylinux_2_39_x86_64"))
    found = run(
        site,
        tmp_path,
        "extras: [part==1.0]\n",
        python='"3.13"',
        base="{kind: archive, distribution: debian, release: trixie}",
    )
    assert names(found) == ["part 1.0"]


# --- overrides, pre-releases, direct files, indexes -------------------------------------------------------------------


def test_an_override_wins_over_an_upstream_pin(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", ["dep==1.0"]))
    site.add(wheel("dep", "1.0"))
    site.add(wheel("dep", "2.0.1"))
    extra = 'extras: [part==1.0]\noverrides: [{package: dep, pin: "==1.0", ours: 2.0.1, because: it works, source: a test}]\n'
    assert names(run(site, tmp_path, extra)) == ["dep 2.0.1", "part 1.0"]


@pytest.fixture
def prereleases(site: Loopback) -> Loopback:
    site.add(wheel("part", "1.0", ["dep>=1.0b1"]))
    site.add(wheel("dep", "1.0b2"))
    return site


def test_a_pre_release_that_is_named_is_taken(prereleases: Loopback, tmp_path: Path) -> None:
    found = run(prereleases, tmp_path, "extras: [part==1.0]\nprereleases: [dep]\n")
    assert names(found) == ["dep 1.0b2", "part 1.0"]


def test_a_pre_release_is_not_taken_though_it_is_necessary_and_asked_for_by_another(
    prereleases: Loopback, tmp_path: Path
) -> None:
    error = refusal(prereleases, tmp_path, "extras: [part==1.0]\n")
    assert error.exit_code is ExitCode.LOCK
    assert str(error) == (
        "error: `tiny` has no resolution as of 2026-03-01\n"
        "  because: error: No solution found when resolving dependencies\n"
        "      cause: Because there is no version of dep==1.0b2 and all versions of part depend on dep==1.0b2, we can "
        "conclude that all versions of part cannot be used.\n"
        "             And because you require part==1.0, we can conclude that your requirements are unsatisfiable.\n"
        "  hint: a package of which a pre-release may be taken is named under `prereleases`: dep"
    )


def test_a_stable_release_is_taken_before_a_newer_pre_release(prereleases: Loopback, tmp_path: Path) -> None:
    prereleases.add(wheel("dep", "1.0"))
    prereleases.add(wheel("dep", "1.1rc1"))
    assert names(run(prereleases, tmp_path, "extras: [part==1.0]\n")) == ["dep 1.0", "part 1.0"]


def direct(site: Loopback, made: tuple[str, bytes], *requires: str) -> str:
    name = made[0].split("-")[0]
    url = f"{site.url}/files/{made[0].replace('+', '%2B')}"
    listed = ", ".join(json.dumps(line) for line in requires)
    return f"files: [{{name: {name}, url: '{url}', sha256: {sha('direct')}, requires: [{listed}]}}]\n"


def test_a_direct_file_is_resolved_from_what_the_matrix_says_and_not_downloaded(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("idna", "3.7"))
    extra = direct(site, wheel("part", "1.0+cu1"), 'idna>=3; python_version >= "3.9"', "x; sys_platform == 'win32'")
    found = run(site, tmp_path, f"{extra}extras: [part==1.0+cu1]\n")
    assert names(found) == ["idna 3.7", "part 1.0+cu1"]
    assert (found[1].sha256, found[1].index, found[1].requires) == (sha("direct"), None, ("idna>=3",))
    assert found[1].url == f"{site.url}/files/part-1.0%2Bcu1-py3-none-any.whl"
    assert not [path for path in site.paths() if path.startswith("/files/")]


def test_a_direct_file_wins_over_the_same_version_on_the_index(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0"))
    found = run(site, tmp_path, f"{direct(site, wheel('part', '1.0'))}extras: [part==1.0]\n")
    assert [(a.index, a.sha256) for a in found] == [(None, sha("direct"))]


def test_a_direct_file_of_another_version_than_the_resolution_has(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("other", "1.0", ["part"]))
    site.add(wheel("part", "2.0"))
    error = refusal(site, tmp_path, f"{direct(site, wheel('part', '1.0'))}extras: [other==1.0]\n")
    assert str(error) == (
        "error: the file of `part 1.0` is not used\n"
        "  because: the resolution has part 2.0\n"
        "  hint: pin `part==1.0` under `extras`, or remove the entry under `files`"
    )


def test_a_direct_file_that_nothing_requires(site: Loopback, tmp_path: Path) -> None:
    assert str(refusal(site, tmp_path, direct(site, wheel("part", "1.0")))) == (
        "error: the file of `part 1.0` is not used\n"
        "  because: nothing in the stack requires part\n"
        "  hint: pin `part==1.0` under `extras`, or remove the entry under `files`"
    )


@pytest.fixture
def two(site: Loopback) -> Loopback:
    """Two indexes that have the same packages, the second in newer and other builds."""
    site.add(wheel("part", "1.0", ["dep", "other"]))
    site.add(wheel("part", "1.0+cu1", ["dep", "other"]), index="extra")
    for name in ("dep", "other"):
        site.add(wheel(name, "1.0"))
        site.add(wheel(name, "9.0"), index="extra")
    return site


def test_only_the_named_packages_come_from_an_index(two: Loopback, tmp_path: Path) -> None:
    extra = f"extras: [part==1.0+cu1]\nindexes: {{cu1: {{url: '{two.url}/extra', packages: [part, dep]}}}}\n"
    found = run(two, tmp_path, extra)
    assert [(a.name, a.version, a.index) for a in found] == [
        ("dep", "9.0", "cu1"),
        ("other", "1.0", "default"),
        ("part", "1.0+cu1", "cu1"),
    ]


def test_an_override_of_a_package_of_another_index(two: Loopback, tmp_path: Path) -> None:
    two.add(wheel("more", "1.0", ["part==7"]))
    extra = (
        f"extras: [part==1.0+cu1, more==1.0]\nindexes: {{cu1: {{url: '{two.url}/extra', packages: [part]}}}}\n"
        'overrides: [{package: part, pin: "==7", ours: 1.0+cu1, because: it works, source: a test}]\n'
    )
    assert ("part", "1.0+cu1", "cu1") in [(a.name, a.version, a.index) for a in run(two, tmp_path, extra)]


def test_the_sites_mirror_of_a_named_index_is_used_with_its_credentials(two: Loopback, tmp_path: Path) -> None:
    for path, served in two.files.items():
        served.auth = "me:secret" if path.startswith("/extra") else ""
    extra = "extras: [part==1.0+cu1]\nindexes: {cu1: {url: https://wheels.example/cu1, packages: [part]}}\n"
    mirror = two.url.replace("://", "://me:secret@") + "/extra"
    found = run(two, tmp_path, extra, indexes={"cu1": mirror})
    assert ("part", "1.0+cu1", "cu1") in [(a.name, a.version, a.index) for a in found]


def test_a_package_that_is_not_on_the_index_it_is_to_come_from(two: Loopback, tmp_path: Path) -> None:
    del two.files["/extra/part/"]
    extra = f"extras: [part==1.0]\nindexes: {{cu1: {{url: '{two.url}/extra', packages: [part]}}}}\n"
    error = refusal(two, tmp_path, extra)
    assert str(error) == (
        "error: `part` is not on the index `cu1`\n"
        f"  at: {two.url}/extra\n"
        "  because: the default index has it, and `indexes` says that it comes from this one\n"
        "  hint: remove it from `indexes.cu1.packages`, or pin a version that the index has"
    )


# --- what a user is told ----------------------------------------------------------------------------------------------


def test_no_resolution_is_told_in_uvs_words(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", ["dep==1.0"]))
    site.add(wheel("dep", "1.0"))
    site.add(wheel("dep", "2.0"))
    error = refusal(site, tmp_path, "extras: [part==1.0, dep==2.0]\n")
    assert (type(error), error.exit_code) == (LockError, ExitCode.LOCK)
    assert str(error) == (
        "error: `tiny` has no resolution as of 2026-03-01\n"
        "  because: error: No solution found when resolving dependencies\n"
        "      cause: Because all versions of part depend on dep==1.0 and you require dep==2.0, we can conclude that your "
        "requirements and all versions of part are incompatible.\n"
        "             And because you require part==1.0, we can conclude that your requirements are unsatisfiable.\n"
        "  hint: where part's requirement `dep==1.0` is to be broken on purpose, add "
        '`{package: dep, pin: "==1.0", ours: 2.0, because: …, source: …}` to `overrides`'
    )


def test_a_package_that_there_is_not_is_no_index_that_does_not_answer(site: Loopback, tmp_path: Path) -> None:
    error = refusal(site, tmp_path, "extras: [connect==1.0]\n")
    assert type(error) is LockError
    assert "connect was not found in the package registry" in error.because


def test_an_index_that_is_down(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = site.url
    site.stop()
    monkeypatch.setattr(Settings, "child_environment", quick(Settings.child_environment))
    error = refusal(site, tmp_path, "extras: [part==1.0]\n")
    assert (type(error), error.exit_code) == (UnreachableError, ExitCode.UNREACHABLE)
    assert str(error) == (
        "error: the package index does not answer\n"
        f"  because: error: Failed to fetch: {url}/simple/part/\n"
        f"      cause: error sending request for url ({url}/simple/part/)\n"
        "      cause: client error (Connect)\n"
        "      cause: tcp connect error\n"
        "      cause: Connection refused (os error 111)\n"
        '  hint: see that it can be reached; mirror and certificate authority: README, "Mirrors and authorities"'
    )


def quick(original: Any) -> Any:
    return lambda self: {**original(self), "UV_HTTP_RETRIES": "0"}


def test_an_index_in_trouble(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "child_environment", quick(Settings.child_environment))
    site.files["/simple/part/"] = Served(b"", status=503)
    error = refusal(site, tmp_path, "extras: [part==1.0]\n")
    assert type(error) is UnreachableError
    assert "503" in error.because


def test_a_package_of_which_there_are_only_sources(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0"))
    page = site.files["/simple/part/"]
    page.data = page.data.replace(b"part-1.0-py3-none-any.whl", b"part-1.0.tar.gz").replace(b'"core-metadata"', b'"x"')
    error = refusal(site, tmp_path, "extras: [part==1.0]\n")
    assert type(error) is LockError
    assert str(error) == (
        "error: `tiny` has no resolution as of 2026-03-01\n"
        "  because: error: No solution found when resolving dependencies\n"
        "      cause: Because part==1.0 has no usable wheels and you require part==1.0, we can conclude that your "
        "requirements are unsatisfiable.\n"
        "  hint: a build installs wheels only, it compiles nothing: pin a release that has a wheel under `extras`"
    )


def test_a_package_with_wheels_for_others_only(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", tag="cp311-cp311-win_amd64"))
    error = refusal(site, tmp_path, "extras: [part==1.0]\n")
    assert type(error) is LockError
    assert "part==1.0 has no wheels with a matching platform tag" in error.because


def test_the_override_that_would_break_an_exact_pin_is_named(site: Loopback, tmp_path: Path) -> None:
    site.add(wheel("part", "1.0", requires=["middle==1.0"]))
    site.add(wheel("other", "1.0", requires=["leaf>=2"]))
    site.add(wheel("middle", "1.0", requires=["leaf<2"]))
    site.add(wheel("leaf", "1.0"))
    site.add(wheel("leaf", "2.0"))
    error = refusal(site, tmp_path, "extras: [part==1.0, other==1.0]\n")
    assert error.hint == (
        "where part's requirement `middle==1.0` is to be broken on purpose, "
        'add `{package: middle, pin: "==1.0", ours: VERSION, because: …, source: …}` to `overrides`; '
        "VERSION is a release that the others allow"
    )


def test_where_an_index_states_no_hash_the_wheel_is_fetched_for_it(site: Loopback, tmp_path: Path) -> None:
    made = wheel("part", "1.0")
    site.add(made, hashes=False)
    import hashlib

    assert run(site, tmp_path, "extras: [part==1.0]\n")[0].sha256 == hashlib.sha256(made[1]).hexdigest()


def test_an_answer_without_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = '[{ url = "https://wheels.example/part-1.0-py3-none-any.whl", hashes = { md5 = "x" } }]'
    fake_uv(tmp_path, monkeypatch, f'[[packages]]\nname = "part"\nversion = "1.0"\nwheels = {wheels}\n')
    with pytest.raises(LockError) as caught:
        resolve.resolve(tiny().matrix, settings_at(tmp_path))
    assert str(caught.value) == (
        "error: no sha256 is known of: part 1.0\n"
        "  because: the index does not state one, and a lock pins files by it\n"
        "  hint: take it from another index, or name the file and its sha256 under `files`"
    )


def test_credentials_are_not_in_what_a_user_is_told(
    site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "child_environment", quick(Settings.child_environment))
    site.stop()
    matrix = tiny("extras: [part==1.0]\n").matrix
    with pytest.raises(UnreachableError) as caught:
        index = site.url.replace("://", "://me:secret@")
        resolve.resolve(matrix, settings_at(tmp_path, index=index))
    assert "secret" not in str(caught.value)


# --- how uv is called: a stand-in that writes down its arguments and answers from a fixture -----------------------------

FAKE = """\
#!{python}
import json, os, sys
from pathlib import Path
if sys.argv[1:] == ["--version"]:
    print("uv 9.9.9 (made)")
    sys.exit(0)
said = {{"argv": sys.argv[1:], "env": {{k: v for k, v in os.environ.items() if k.startswith(("UV_", "PIP_", "NO_P", "no_p"))}}}}
for option in ("--overrides", "--config-file", "--find-links"):
    if option in sys.argv:
        said[option] = Path(sys.argv[sys.argv.index(option) + 1]).read_text()
said["asked"] = Path(sys.argv[3]).read_text()
Path({said!r}).write_text(json.dumps(said))
Path(sys.argv[sys.argv.index("--output-file") + 1]).write_text({answer!r})
"""


def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str = "") -> Path:
    program, said = tmp_path / "uv", tmp_path / "said.json"
    program.write_text(FAKE.format(python=sys.executable, said=str(said), answer=answer))
    program.chmod(0o755)
    monkeypatch.setattr(resolve, "find_uv_bin", lambda: str(program))
    return said


def said_by(matrix: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> dict[str, Any]:
    for name in [name for name in os.environ if name.startswith(("UV_", "PIP_")) or name.lower() == "no_proxy"]:
        monkeypatch.delenv(name)
    path = fake_uv(tmp_path, monkeypatch)
    assert resolve._compile(matrix, settings_at(tmp_path, **fields)) == []
    said: dict[str, Any] = json.loads(path.read_text())
    folder = str(Path(said["argv"][2]).parent)
    told: dict[str, Any] = json.loads(json.dumps(said).replace(folder, "TMP").replace(sys.executable, "PYTHON"))
    return told


def test_the_command_line_of_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_by(tiny("extras: [idna==3.7]\nprereleases: [x, y]\n").matrix, tmp_path, monkeypatch)
    assert said == {
        "argv": [
            *("pip", "compile", "TMP/requirements.in", "--format", "pylock.toml", "--output-file", "TMP/pylock.toml"),
            *("--quiet", "--no-header", "--no-build", "--prerelease", "disallow", "--python", "PYTHON"),
            *("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_36"),
            *("--exclude-newer", "2026-03-01T00:00:00Z", "--overrides", "TMP/overrides.txt"),
            *("--prerelease-package", "x=allow", "--prerelease-package", "y=allow"),
        ],
        "env": {"UV_NO_CONFIG": "1", "UV_NO_PROGRESS": "1"},
        "--overrides": "",
        "asked": "idna==3.7\n",
    }


def test_the_files_for_uv_where_there_are_overrides_and_direct_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = (
        f"files: [{{name: part, url: 'https://wheels.example/part-1.0%2Bcu1-py3-none-any.whl', sha256: {sha('x')}, "
        "requires: ['idna>=3; python_version >= \"3.9\"', zipp]}]\n"
        'overrides: [{package: zipp, pin: "==1.0", ours: 2.0.1, because: it works, source: a test}]\n'
    )
    said = said_by(tiny(extra).matrix, tmp_path, monkeypatch)
    assert said["argv"][-4:] == ["--find-links", "TMP/links.html", "--config-file", "TMP/uv.toml"]
    assert said["--overrides"] == "zipp==2.0.1\n"
    assert said["--find-links"] == (
        f'<!DOCTYPE html>\n<a href="https://wheels.example/part-1.0%2Bcu1-py3-none-any.whl#sha256={sha("x")}">'
        "part-1.0+cu1-py3-none-any.whl</a>\n"
    )
    assert said["--config-file"] == (
        '[[dependency-metadata]]\nname = "part"\nversion = "1.0+cu1"\n'
        'requires-dist = ["idna>=3; python_version >= \\"3.9\\"", "zipp"]\n'
    )
    assert said["env"] == {"UV_NO_PROGRESS": "1"}


def test_no_credentials_are_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = tiny("indexes: {site: {url: https://wheels.example/x, packages: [part]}}\n").matrix
    said = said_by(
        matrix,
        tmp_path,
        monkeypatch,
        index="https://me:secret@wheels.example/simple",
        indexes={"site": "https://me:secret@wheels.example/site"},
    )
    assert "secret" not in " ".join(said["argv"])
    assert said["env"]["UV_DEFAULT_INDEX"] == "https://me:secret@wheels.example/simple"
    assert said["env"]["UV_INDEX"].startswith("site=http://127.0.0.1:")
    assert (said["env"]["NO_PROXY"], said["env"]["no_proxy"]) == ("127.0.0.1", "127.0.0.1")


def test_the_answer_of_uv_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        'lock-version = "1.0"\n[[packages]]\nname = "Part"\nversion = "1.0"\n'
        'wheels = [{ url = "https://wheels.example/part-1.0%2Bx-py3-none-any.whl", size = 7, hashes = {} }]\n'
    )
    fake_uv(tmp_path, monkeypatch, answer)
    packages = resolve._compile(tiny().matrix, settings_at(tmp_path))
    assert [(package["name"], resolve._file_name(package["wheels"][0])) for package in packages] == [
        ("Part", "part-1.0+x-py3-none-any.whl")
    ]


def test_a_release_that_has_no_wheel_for_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = (
        '[[packages]]\nname = "part"\nversion = "1.0"\n'
        'wheels = [{ url = "https://wheels.example/part-1.0-cp39-cp39-linux_x86_64.whl", hashes = {} },'
        ' { url = "https://wheels.example/nonsense.whl", hashes = {} }]\n[[packages]]\nname = "dep"\nversion = "2"\n'
    )
    fake_uv(tmp_path, monkeypatch, answer)
    with pytest.raises(LockError) as caught:
        resolve.resolve(tiny().matrix, settings_at(tmp_path))
    assert str(caught.value) == (
        "error: no wheel for Python 3.11 on linux/amd64: part 1.0, dep 2\n"
        "  because: a build installs wheels only, it compiles nothing\n"
        "  hint: pin a release that has one under `extras`"
    )


def test_which_uv_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_uv(tmp_path, monkeypatch)
    assert resolve.resolve(tiny().matrix, settings_at(tmp_path))[1].version == "9.9.9"
