"""What a server asserts when it starts: the rule, and the reader that makes its facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from builder.facts import RuntimeCheckFact, load_facts, parse_facts
from builder.findings import Finding
from builder.lock import Artefact
from builder.matrix import parse_matrix
from builder.rules import Context, evaluate_rules
from builder.runtimechecks import Check, as_yaml, checks, rows
from tests.unit.test_lockrules import TEXT, TODAY, lock_of, wheel


def asserted(*wheels: Artefact, text: str = TEXT) -> list[Finding]:
    loaded = parse_matrix(text, Path("matrices/x.yaml"))
    found = evaluate_rules(Context(loaded, TODAY, lock_of(wheels)))
    return [finding for finding in found if finding.rule == "runtime-check"]


def told(*wheels: str, text: str = TEXT) -> str:
    return "\n".join(map(str, asserted(*map(wheel, wheels), text=text)))


def test_a_kernel_that_is_too_old() -> None:
    assert (
        told("sglang 0.5.9", "sgl-kernel 0.3.20", "flashinfer-python 0.6.3")
        == """\
error: sglang 0.5.9 asserts `sgl-kernel>=0.3.21` when it starts, the lock has 0.3.20 [runtime-check]
  at: matrices/x.yaml:1
  because: no server starts on a GPU of NVIDIA's
  hint: take sgl-kernel 0.3.21 or later, or set `SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK: 1` under `environment`
  source: sglang/srt/entrypoints/engine.py of sglang 0.5.9, as facts/runtime-checks.yaml has it"""
    )


def test_a_flashinfer_that_is_too_old() -> None:
    assert (
        told("sglang 0.4.6.post4", "sgl-kernel 0.1.2.post1", "flashinfer-python 0.2.3")
        == """\
error: sglang 0.4.6.post4 asserts `flashinfer-python>=0.2.5` when it starts, the lock has 0.2.3 [runtime-check]
  at: matrices/x.yaml:1
  because: a server whose attention backend is flashinfer does not start
  hint: take flashinfer-python 0.2.5 or later
  source: sglang/srt/entrypoints/engine.py of sglang 0.4.6.post4, as facts/runtime-checks.yaml has it"""
    )


def test_what_is_not_there() -> None:
    assert (
        told("sglang 0.5.16")
        == """\
warning: sglang 0.5.16 asserts `flashinfer-python>=0.6.14` when it starts and `--attention-backend flashinfer` is given, the lock \
has none [runtime-check]
  at: matrices/x.yaml:1
  because: a server whose attention backend is flashinfer does not start
  hint: add `flashinfer-python` 0.6.14 or later to the stack, or serve with another attention backend
  source: sglang/srt/entrypoints/engine.py of sglang 0.5.16, as facts/runtime-checks.yaml has it
warning: sglang 0.5.16 asserts `sglang-kernel>=0.4.5` when it starts, the lock has none [runtime-check]
  at: matrices/x.yaml:1
  because: no server starts on a GPU of NVIDIA's
  hint: add `sglang-kernel` 0.4.5 or later to the stack
  source: sglang/srt/entrypoints/engine.py of sglang 0.5.16, as facts/runtime-checks.yaml has it"""
    )


def test_what_metadata_requires_is_told_by_the_rule_on_metadata() -> None:
    assert asserted(wheel("sglang 0.5.16", "sglang-kernel==0.4.5", "flashinfer-python==0.6.14")) == []


@pytest.mark.parametrize(
    "wheels",
    [
        ("sglang 0.5.9", "sgl-kernel 0.3.21", "flashinfer-python 0.6.3"),
        # A patched wheel asserts what the release does, and another build of a release is not older than it.
        ("sglang 0.5.9+sm120", "sgl-kernel 0.3.21+cu130", "flashinfer-python 0.6.4+sm120"),
        # Of a release that nobody read nothing is said.
        ("sglang 0.5.24", "sglang-kernel 0.4.0"),
        ("sglang 0.4.5", "sgl-kernel 0.0.5"),
        ("sgl-kernel 0.3.20",),
    ],
)
def test_what_satisfies_it(wheels: tuple[str, ...]) -> None:
    assert told(*wheels) == ""


def test_what_an_installer_reports_is_what_is_compared() -> None:
    other = [wheel("sglang 0.5.9"), wheel("flashinfer-python 0.6.3")]
    assert asserted(*other, wheel("sgl-kernel 0.3.21+cu130", index=None, metadata_version="0.3.20"))
    assert not asserted(*other, wheel("sgl-kernel 0.3.21+cu130", index=None, metadata_version="0.3.21"))


def test_a_check_that_the_matrix_skips() -> None:
    text = TEXT + 'environment: {SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK: "1"}\n'
    assert (
        told("sglang 0.5.9", "sgl-kernel 0.3.20", "flashinfer-python 0.6.3", text=text)
        == """\
note: sglang 0.5.9 asserts `sgl-kernel>=0.3.21` when it starts, the lock has 0.3.20 [runtime-check]
  at: matrices/x.yaml:1
  because: no server starts on a GPU of NVIDIA's; the matrix sets `SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK`
  source: sglang/srt/entrypoints/engine.py of sglang 0.5.9, as facts/runtime-checks.yaml has it"""
    )
    # The older releases know no such variable.
    (found,) = asserted(*map(wheel, ("sglang 0.4.9", "sgl-kernel 0.2.3", "flashinfer-python 0.2.7.post1")), text=text)
    assert found.severity == "error" and "SKIP" not in found.hint


def test_one_assertion_a_release_and_package() -> None:
    facts = load_facts(RuntimeCheckFact)
    for release in ("0.4.6.post1", "0.4.9.post4", "0.5.0rc1", "0.5.3rc2", "0.5.9", "0.5.10.post1", "0.5.16", "0.5.23"):
        here = [f.requires for f in facts if SpecifierSet(f.versions).contains(release, prereleases=True)]
        assert min(here) == "flashinfer-python" and len(here) == 2, release
    assert len(facts) == 72


# The reader.

ENGINE = """\
def launch(server_args):
    if server_args.attention_backend == "flashinfer":
        assert_pkg_version("flashinfer_python", "0.2.5", "reinstall")
    if _is_cuda and not get_bool_env_var("SKIP_IT"):
        assert_pkg_version("sgl-kernel", "0.3.21", "reinstall")
"""

NESTED = """\
if not get_bool_env_var("SKIP_IT"):
    if "flashinfer" in backends(server_args) or server_args.other == "flashinfer":
        assert_pkg_version("flashinfer_python", "0.6.18", "reinstall")
    if _is_cuda:
        assert_pkg_version(
            "sglang-kernel",
            "0.4.7",
            "reinstall",
        )
"""


def test_assertions_and_their_conditions_are_read() -> None:
    assert checks(ENGINE) == [
        Check("flashinfer-python", "0.2.5", when="flashinfer"),
        Check("sgl-kernel", "0.3.21", skip="SKIP_IT"),
    ]
    assert checks(NESTED) == [
        Check("flashinfer-python", "0.6.18", when="flashinfer", skip="SKIP_IT"),
        Check("sglang-kernel", "0.4.7", skip="SKIP_IT"),
    ]
    assert checks("def assert_pkg_version(pkg, minimum, message): ...") == []


@pytest.mark.parametrize(
    "text",
    [
        "if something_new:\n    assert_pkg_version('a', '1', '')",
        "if _is_cuda:\n    pass\nelse:\n    assert_pkg_version('a', '1', '')",
        "if not get_bool_env_var('A') or _is_cuda:\n    assert_pkg_version('a', '1', '')",
    ],
)
def test_a_condition_that_nobody_knows_ends_it(text: str) -> None:
    with pytest.raises(ValueError, match="an assertion on a under a condition that is not known"):
        checks(text)


def test_releases_that_assert_the_same_are_a_range() -> None:
    old, new = Check("a", "1"), Check("a", "2", when="flashinfer", skip="SKIP_IT")
    found = {"0.1": [old], "0.2rc0": [old], "0.2": [new], "0.3": [], "0.4": [new, Check("b", "5")]}
    assert rows(found) == [
        (">=0.1,<=0.2rc0", old),
        ("==0.2", new),
        ("==0.4", new),
        ("==0.4", Check("b", "5")),
    ]


def test_what_is_written_is_a_file_of_facts() -> None:
    text = as_yaml({"0.5.9": checks(ENGINE)})
    flashinfer, kernel = parse_facts(RuntimeCheckFact, "x.yaml", text)
    assert (flashinfer.versions, flashinfer.minimum, flashinfer.when, flashinfer.skip) == (
        "==0.5.9",
        "0.2.5",
        "flashinfer",
        None,
    )
    assert (kernel.requires, kernel.when, kernel.skip) == ("sgl-kernel", "always", "SKIP_IT")
