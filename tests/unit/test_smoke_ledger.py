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
    return Ledger(site.spec, site.tree)


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


@pytest.fixture
def each_cuda(tmp_path: Path) -> Site:
    made = Site(tmp_path)
    names = ("x_cuda118", "x_cuda128", "x_cuda129", "x_rocm62", "other")
    made.wheel("kernel", files={f"kernel/{name}.so": b"" for name in names})
    made.spec_data["cuda"]["version"], made.spec_data["cuda"]["major"] = "12.8.1", 12
    return made


def test_of_files_for_each_cuda_those_that_are_not_opened_may_fail(each_cuda: Site) -> None:
    each_cuda.variants(elsewhere=["kernel/x_rocm*.so"])
    book = ledger(each_cuda)
    excused = {
        name: book.excuses("needed", "kernel", f"kernel/{name}.so", "whatever") is not None
        for name in ("x_cuda118", "x_cuda128", "x_cuda129", "x_rocm62", "other")
    }
    assert excused == {"x_cuda118": True, "x_cuda128": False, "x_cuda129": True, "x_rocm62": True, "other": False}
    result = settled(book)
    assert (result.exceptions, result.findings, result.detail) == ({"kernel-variants"}, [], "looked; 1 known exception")


def test_files_for_another_cuda_may_load_as_well(each_cuda: Site) -> None:
    each_cuda.variants()
    assert (settled(ledger(each_cuda)).findings, settled(ledger(each_cuda)).exceptions) == ([], set())


def test_the_nearest_file_is_opened_where_the_package_does_so(each_cuda: Site) -> None:
    each_cuda.spec_data["cuda"]["version"] = "12.7.0"
    each_cuda.variants(near=True)
    book = ledger(each_cuda)
    assert book.excuses("load", "kernel", "kernel/x_cuda128.so", "whatever") is None
    assert book.excuses("load", "kernel", "kernel/x_cuda129.so", "whatever") == "kernel-variants"
    assert settled(book).findings == []


def test_no_file_for_the_cuda(each_cuda: Site) -> None:
    each_cuda.spec_data["cuda"]["version"] = "13.0.2"
    each_cuda.variants()
    book = ledger(each_cuda)
    assert said(settled(book)) == (
        "error: kernel 1.0 has no file for CUDA 13.0.2: it raises [variants]\n"
        "  because: it has files for 118, 128, 129\n"
        "  hint: take a release of kernel that has one"
    )
    assert settled(book, scope=("other",)).findings == []


def test_files_for_each_torch(each_cuda: Site) -> None:
    each_cuda.wheel("torch", "2.9.1")
    each_cuda.wheel("addon", files={f"addon/x_torch{number}.abi3.so": b"" for number in ("29", "210")})
    each_cuda.variants(distribution="addon", path="addon/x_torch{torch}.*.so", required=False)
    book = ledger(each_cuda)
    assert book.excuses("load", "addon", "addon/x_torch29.abi3.so", "whatever") is None
    assert book.excuses("load", "addon", "addon/x_torch210.abi3.so", "whatever") == "addon-variants"


def test_a_file_that_is_not_required_may_be_absent(each_cuda: Site) -> None:
    each_cuda.wheel("torch", "2.11.0")
    each_cuda.wheel("addon", files={"addon/x_torch29.so": b""})
    each_cuda.variants(distribution="addon", path="addon/x_torch{torch}.so", required=False)
    assert settled(ledger(each_cuda), scope=("addon",)).findings == []


def test_without_torch_nothing_is_known_of_files_for_each_torch(each_cuda: Site) -> None:
    each_cuda.wheel("addon", files={"addon/x_torch29.so": b""})
    each_cuda.variants(distribution="addon", path="addon/x_torch{torch}.so")
    book = ledger(each_cuda)
    assert book.excuses("load", "addon", "addon/x_torch29.so", "whatever") is None
    assert settled(book, scope=("addon",)).findings == []
