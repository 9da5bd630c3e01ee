"""What is said once and where: findings of the rules and of the wheels put together; and GPU code, case by case."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from builder.fatbin import Container, Image
from builder.findings import Finding, Severity
from builder.lock import Lock
from builder.rulebook import Context
from builder.static.answers import Looked
from builder.static.check import Checked, check
from builder.static.gpucode import Code
from builder.static.gpufindings import gpu_findings, is_cudas
from builder.static.hints import pins
from builder.static.linkfindings import bases_with
from builder.static.merge import merged
from tests.made import artefact, lock_of, settings_at, tiny

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def finding(rule: str, subject: str, severity: Severity = ERROR, **fields: Any) -> Finding:
    return Finding(rule=rule, severity=severity, subject=subject, message=f"{subject} by {rule}", **fields)


def broken(subject: str, cause: str, severity: Severity = ERROR, **fields: Any) -> Finding:
    because = "1 of its 2 native files cannot be loaded: `f` is not there"
    return finding(
        "link-broken", subject, severity, because=because, source="wheels", evidence={"cause": cause}, **fields
    )


def rules(*findings: Finding) -> list[str]:
    return [item.rule for item in findings]


# --- one matter, one finding ------------------------------------------------------------------------------------------


def test_a_wheel_says_what_a_fact_said_before() -> None:
    fact = finding("built-for-torch", "sgl-kernel", source="case 005", hint="take another")
    (found,) = merged([fact], [broken("sgl-kernel", "torch")])
    assert (found.rule, found.source, found.hint) == ("link-broken", "wheels; case 005", "take another")
    assert found.evidence["rules"] == ["built-for-torch"]


def test_another_package_is_another_matter() -> None:
    fact = finding("built-for-torch", "torchvision")
    assert rules(*merged([fact], [broken("sgl-kernel", "torch")])) == ["built-for-torch", "link-broken"]


def test_what_is_known_to_fail_stays_the_rules() -> None:
    """torchao notices that its operators do not load: the rule has the consequence, the wheel the proof."""
    fact = finding("built-for-torch", "torchao", WARNING, because="it goes on without")
    (found,) = merged([fact], [broken("torchao", "torch", WARNING)])
    assert (found.rule, found.severity) == ("built-for-torch", WARNING)
    assert found.because == "it goes on without; as its wheel shows, 1 of its 2 native files cannot be loaded"


@pytest.mark.parametrize("rule", ["torch-cuda", "kernel-cuda", "cuda-majors-mixed"])
def test_which_cuda_is_the_odd_one_is_the_cause(rule: str) -> None:
    cause = finding(rule, "sgl-kernel", because="it is tagged so", evidence={"required_by": ["sgl-kernel"]})
    (found,) = merged([cause], [broken("sgl-kernel", "cuda")])
    assert (found.rule, found.evidence["wheel"]) == (rule, {"cause": "cuda"})


@pytest.mark.parametrize(
    ("package", "by", "subject", "cause", "same"),
    [
        ("nvidia-nccl-cu12", "torch", "torch", "nvidia-nccl-cu12", True),  # it requires another release
        ("sgl-kernel", "sglang", "sgl-kernel", "torch", True),  # another requires another release of it
        ("torch", "torchvision", "torchvision", "cuda", True),
        ("torch", "sglang", "sgl-kernel", "torch", False),
        ("numpy", "sgl-kernel", "sgl-kernel", "torch", False),
    ],
)
def test_a_requirement_that_is_not_met_is_why_a_wheel_is_broken(
    package: str, by: str, subject: str, cause: str, same: bool
) -> None:
    conflict = finding("conflict-undeclared", package, evidence={"required_by": [by]})
    found = rules(*merged([conflict], [broken(subject, cause)]))
    assert found == (["link-broken"] if same else ["conflict-undeclared", "link-broken"])


def test_what_is_not_known_for_want_of_a_requirement() -> None:
    missing = finding("requirement-missing", "nvidia-cudnn-cu13", evidence={"required_by": ["torch"]})
    doubt = finding("link-uncertain", "torch", NOTE, evidence={"reasons": ["x"]})
    (found,) = merged([missing], [doubt])
    assert (found.rule, found.evidence["wheel"]) == ("requirement-missing", {"reasons": ["x"]})


def test_the_cause_comes_first() -> None:
    found = merged(
        [finding("z-rule", "a"), finding("b-rule", "a", NOTE)],
        [finding("arch-uncovered", "a"), broken("b", "torch"), finding("link-uncertain", "a", NOTE)],
    )
    assert rules(*found) == ["z-rule", "link-broken", "arch-uncovered", "b-rule", "link-uncertain"]


def test_a_torch_that_several_wheels_do_not_fit_comes_before_all() -> None:
    torch = finding("link-broken", "torch", evidence={"cause": "torch", "wheels": {"a": {}, "b": {}}})
    conflicts = [
        finding("conflict-undeclared", "numpy", evidence={"required_by": ["torch"]}),
        finding("conflict-undeclared", "torch", evidence={"required_by": ["a"]}),
        finding("built-for-torch", "b"),
    ]
    found = merged(conflicts, [torch])
    assert [(item.rule, item.subject) for item in found] == [("link-broken", "torch"), ("conflict-undeclared", "numpy")]


# --- GPUs -------------------------------------------------------------------------------------------------------------


def boxes(*images: str) -> tuple[Container, ...]:
    made = [
        Image(
            "ptx" if name.startswith("compute") else "cubin",
            name.partition("_")[2],
            1,
            "",
            None,
            (8, 7) if name.startswith("compute") else None,
        )
        for name in images
    ]
    return (Container("", 0, tuple(made)),)


def context(*gpus: str, name: str = "kernel") -> tuple[Context, Lock]:
    loaded = tiny(gpus="[" + ", ".join(f'"{gpu}"' for gpu in gpus) + "]")
    lock = lock_of(loaded.matrix, artefact(name))
    return Context(loaded, date(2026, 3, 1), lock), lock


def said(
    gpus: tuple[str, ...], lost: tuple[str, ...] = (), large: dict[str, int] | None = None, **files: tuple[str, ...]
) -> list[str]:
    around, lock = context(*gpus)
    code = Code({f"kernel/{name}.so": boxes(*images) for name, images in files.items()}, large or {})
    found = gpu_findings(around, lock, {"kernel": code}, {"kernel": lost})
    return [f"{item.severity}: {item.message}" for item in found if item.rule != "arch-not-run"]


def test_no_file_has_code_for_a_gpu() -> None:
    assert said(("9.0", "12.0"), a=("sm_80",), b=("sm_90",)) == [
        "note: kernel 1.0 has no code for GPU 9.0 in 1 of its 2 files with GPU code",
        "error: kernel 1.0 has no code for GPU 12.0",
    ]


def test_a_file_for_single_devices_is_for_these_on_purpose() -> None:
    assert said(("12.0",), a=("sm_120",), hopper=("sm_90a",)) == []


def test_a_file_that_does_not_load_is_not_asked() -> None:
    assert said(("12.0",), lost=("kernel/a.so",), a=("sm_80",)) == []


def test_ptx_is_code() -> None:
    assert said(("12.0",), a=("sm_80", "compute_90")) == []


def test_code_that_was_not_looked_at() -> None:
    (text,) = said(("12.0",), large={"kernel/a.so": 500_000_000})
    assert text == "note: the GPU code of kernel 1.0 was not looked at"


def test_cudas_own_libraries_choose_among_their_kernels() -> None:
    assert is_cudas("nvidia-cublas")
    assert not is_cudas("torch")


def test_bases_that_are_new_enough() -> None:
    assert bases_with(["GLIBC_2.38"]) == ["debian trixie", "ubuntu noble"]
    assert bases_with(["GLIBC_2.99"]) == []


# --- the whole --------------------------------------------------------------------------------------------------------


def test_who_pins_a_package() -> None:
    loaded = tiny()
    lock = lock_of(
        loaded.matrix,
        artefact("sglang", requires=("torch==2.9.1", "numpy>=1")),
        artefact("vision", requires=("torch==2.9.*",)),
        artefact("audio", requires=("torch==2.9.1",)),
    )
    assert pins(lock, "torch", ["audio"]) == {"sglang": "2.9.1"}


@pytest.mark.parametrize(
    ("found", "index_unread", "strict", "code"),
    [
        ([], False, True, 0),
        ([finding("x", "a")], True, False, 3),
        ([finding("wheel-unread", "a", NOTE)], False, False, 0),
        ([finding("wheel-unread", "a", NOTE)], False, True, 3),
        ([finding("wheel-unread", "a", NOTE)], True, True, 5),
        ([finding("known-cost", "a", WARNING)], False, True, 0),
    ],
)
def test_the_exit_status(found: list[Finding], index_unread: bool, strict: bool, code: int) -> None:
    assert Checked("tiny", tuple(found), {}, index_unread=index_unread).exit_code(strict=strict) == code


def test_a_base_that_no_fact_is_about(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.static.looking.base_named", _unknown)
    loaded = tiny()
    lock = lock_of(loaded.matrix, artefact("a", file="a-1.0-cp311-cp311-manylinux_2_17_x86_64.whl"))
    found = check(Context(loaded, date(2026, 3, 1), lock), lock, settings_at(tmp_path))
    assert [item.message for item in found.findings if item.rule == "wheels-unread"] == [
        "the wheels were not looked at: what the base has is not known"
    ]
    assert found.verdict == "uncertain"
    assert Looked().findings == []


def _unknown(name: str) -> Any:
    from builder.errors import UsageError

    raise UsageError(f"the base `{name}` is not known", hint="known: `bookworm`")
