"""Known exceptions: what they excuse, and when they are an error themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.smoke.ledger import Ledger
from builder.smoke.report import Result
from tests.unit.smoke_made import Site, finished, said

MESSAGE = "`kernel/a.so` of kernel 1.0 needs `libx.so.1`, which nothing in the image provides"
FILE_HINT = "  hint: the entry is in builder/facts/exceptions.yaml"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    made.wheel("kernel", files={"kernel/a.so": b"", "kernel/b.so": b""})
    return made


def ledger(site: Site) -> Ledger:
    return Ledger(site.spec.exceptions, site.tree)


def settled(book: Ledger, *, gpus: tuple[str, ...] = (), scope: tuple[str, ...] = ("kernel",)) -> Result:
    result = Result(detail="looked")
    book.settle("needed", result, scope, gpus)
    return result


def test_failure_that_an_entry_names_passes_and_is_listed(site: Site) -> None:
    site.exception(file="kernel/a.so", words="libx.so.1")
    book = ledger(site)
    assert book.excuses("needed", "kernel", "kernel/a.so", MESSAGE) == "known"
    result = settled(book)
    assert (result.exceptions, result.findings, result.detail) == ({"known"}, [], "looked; 1 known exception")


@pytest.mark.parametrize(
    "fields",
    [{"checks": ["load"]}, {"distribution": "other"}, {"file": "kernel/b.so"}, {"words": "liby.so.1"}],
    ids=["another check", "another distribution", "another file", "other words"],
)
def test_failure_that_no_entry_names_is_not_excused(site: Site, fields: dict[str, object]) -> None:
    site.exception(**{"file": "kernel/a.so", "words": "libx.so.1", **fields})
    assert ledger(site).excuses("needed", "kernel", "kernel/a.so", MESSAGE) is None


def test_entry_that_no_longer_fails(site: Site) -> None:
    site.exception(file="kernel/a.so", words="libx.so.1")
    assert said(settled(ledger(site))) == (
        "error: exception `known` no longer fails: remove it [exception]\n"
        "  because: `kernel/a.so` of kernel 1.0 passes `needed`, or fails it in other words than `libx.so.1`\n"
        f"{FILE_HINT}; narrow its `file`, `versions` or `checks`, or take it out"
    )


def test_every_file_that_an_entry_names_has_to_fail(site: Site) -> None:
    site.exception(file="kernel/*.so", words="libx.so.1")
    book = ledger(site)
    book.excuses("needed", "kernel", "kernel/a.so", MESSAGE)
    assert [f.because for f in finished(settled(book)).findings] == [
        "`kernel/b.so` of kernel 1.0 passes `needed`, or fails it in other words than `libx.so.1`"
    ]


def test_entry_whose_file_is_absent(site: Site) -> None:
    site.exception(file="kernel/gone.so")
    assert said(settled(ledger(site))) == (
        "error: exception `known` names `kernel/gone.so`, which kernel 1.0 does not have: remove it [exception]\n"
        + FILE_HINT
    )


def test_entry_for_a_distribution_out_of_scope_does_not_count(site: Site) -> None:
    site.exception(file="kernel/gone.so")
    assert settled(ledger(site), scope=("other",)).findings == []


def test_entry_for_a_distribution_that_is_not_installed_does_not_count(site: Site) -> None:
    site.exception(distribution="absent")
    assert settled(ledger(site), scope=("absent",)).findings == []


def test_entry_for_one_gpu_excuses_that_one_only(site: Site) -> None:
    site.exception(file="kernel/a.so", words="libx.so.1", when={"gpu": "9.0"})
    book = ledger(site)
    assert book.excuses("needed", "kernel", "kernel/a.so", MESSAGE, "12.0") is None
    assert book.excuses("needed", "kernel", "kernel/a.so", MESSAGE, "9.0") == "known"
    assert settled(book, gpus=("9.0", "12.0")).findings == []


def test_entry_for_a_gpu_that_is_no_target_does_not_count(site: Site) -> None:
    site.exception(file="kernel/a.so", when={"gpu": "9.0"})
    assert settled(ledger(site), gpus=("12.0",)).findings == []


def test_entry_has_to_fail_for_each_target(site: Site) -> None:
    site.exception(file="kernel/a.so", words="libx.so.1")
    book = ledger(site)
    book.excuses("needed", "kernel", "kernel/a.so", MESSAGE, "9.0")
    assert [f.because for f in finished(settled(book, gpus=("9.0", "12.0"))).findings] == [
        "`kernel/a.so` of kernel 1.0 passes `needed` for GPU 12.0, or fails it in other words than `libx.so.1`"
    ]
