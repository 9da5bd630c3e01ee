"""Contents of one URL: which one came, which one was wanted, in the words that a user reads."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from builder import download, facts
from builder.contents import described, difference
from builder.errors import IntegrityError
from builder.facts import ContentFact, KnownContent
from builder.fetch import fetch_all
from builder.lock import Artefact
from tests.loopback import Loopback, Served, loopback
from tests.made import artefact, lock_of, settings_at, sha, tiny

WHEEL = "sgl_kernel-0.3.21+cu130-cp310-abi3-manylinux2014_x86_64.whl"
DATED = [
    ("2026-01-14", "6a8b9aa", "c9a389f5eca00675c6e842faafb4c66f01edf49c8a4f58185978fa294f461822"),
    ("2026-01-22", "6d72c31", "970e10c14f3349b8e0e4a660b8de2c4fb1e82162c115186ebc0ca6e32952532b"),
    ("2026-01-26", "f959603", "3a0b3eb1ac55a0f46ea8f4e006d0b641a36c15a1e9f42ed506c7f3790acf68b1"),
    ("2026-02-14", "b028a0e", "b1f78776faf645ad82ddedf0e5dbbc5a612d558a7aba5c29956ef68ded479230"),
    ("2026-02-21", "192beef", "4be1313f82808f0fb6df8107e79f6b6cea07a4aa2b20139e0342eafe31eb28bd"),
]
BY_DATE = {day: sha256 for day, _, sha256 in DATED}
PATH = f"/v0.3.21/{WHEEL.replace('+', '%2B')}"


def test_the_five_contents_of_sgl_kernel() -> None:
    (fact,) = [fact for fact in facts.load_facts(ContentFact) if fact.wheel == WHEEL]
    assert [(str(content.date), content.commit, content.sha256) for content in fact.contents] == DATED


def test_both_contents_are_known() -> None:
    assert difference(WHEEL, BY_DATE["2026-01-26"], BY_DATE["2026-02-21"]) == (
        "the file is the content of 2026-01-26 (index commit f959603), the lock wants that of 2026-02-21 (192beef)"
    )


def test_the_one_that_came_is_not_known() -> None:
    assert difference(WHEEL, sha("x"), BY_DATE["2026-02-21"]) == (
        "the file is none of the contents that are known of this name, "
        "the lock wants that of 2026-02-21 (index commit 192beef)"
    )


def test_the_one_that_is_wanted_is_not_known() -> None:
    assert difference(WHEEL, BY_DATE["2026-01-26"], sha("x")) == (
        "the file is the content of 2026-01-26 (index commit f959603), the lock wants one that is not known"
    )


@pytest.mark.parametrize("file", [WHEEL, "part-1.0-py3-none-any.whl"])
def test_neither_is_known(file: str) -> None:
    assert difference(file, sha("x"), sha("y")) == (
        "the file is another one than the lock wants, and nothing is known of it"
    )


def test_what_is_said_of_one_content() -> None:
    assert described(WHEEL, BY_DATE["2026-01-26"]) == "content of 2026-01-26, index commit f959603"
    assert described(WHEEL, sha("x")) == "a content that is not known"
    assert described("part-1.0-py3-none-any.whl", BY_DATE["2026-01-26"]) is None


# --- each of them at the one URL, as a user of a build meets it: contents made, with the dates of the real ones --------

MADE = {day: f"the content of {day}".encode() for day, _, _ in DATED}


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    contents = [KnownContent(date=date.fromisoformat(d), commit=c, sha256=sha(MADE[d].decode())) for d, c, _ in DATED]
    made = ContentFact(source="made", wheel=WHEEL, contents=tuple(contents))
    real = facts.load_facts
    monkeypatch.setattr(facts, "load_facts", lambda model: (made,) if model is ContentFact else real(model))
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        yield server


def kernel(site: Loopback) -> Artefact:
    """The wheel with the content of 2026-02-21."""
    return artefact(
        "sgl-kernel",
        "0.3.21+cu130",
        file=WHEEL,
        sha256=sha(MADE["2026-02-21"].decode()),
        index=None,
        url=f"{site.url}{PATH}",
        size=None,
        layer="kernels",
    )


def refusal(site: Loopback, tmp_path: Path, served: bytes) -> str:
    site.files[PATH] = Served(served)
    wanted = kernel(site)
    with pytest.raises(IntegrityError) as caught:
        fetch_all(lock_of(tiny().matrix, wanted), settings_at(tmp_path))
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []
    return str(caught.value).replace(site.url, "SITE")


def message(why: str) -> str:
    return (
        "error: 1 of 1 files that are on no index could not be had: nothing was started\n"
        "  because: sgl-kernel 0.3.21+cu130\n"
        f"      file    {WHEEL}\n"
        f"      url     SITE{PATH}\n"
        f"      sha256  {sha(MADE['2026-02-21'].decode())}\n"
        f"      why     its URL: {why}\n"
        "  hint: each of these provides a file; it is checked wherever it comes from, and what is here already stays:\n"
        "    a folder that has it: `--wheels DIR`, BUILDER_WHEELS=DIR, or `wheels` in the configuration\n"
        "    a mirror (an index, or a folder on a web server): `--index NAME=URL`, BUILDER_INDEX_NAME=URL, or `indexes.NAME`\n"
        "    a way to its URL: https_proxy, the site's authority BUILDER_CA, credentials BUILDER_NETRC\n"
        "    take the content that is there now, if it was replaced on purpose: `builder lock tiny --repin sgl-kernel`"
    )


@pytest.mark.parametrize(("day", "commit"), [(day, commit) for day, commit, _ in DATED[:-1]])
def test_an_older_content_at_the_url(site: Loopback, tmp_path: Path, day: str, commit: str) -> None:
    assert refusal(site, tmp_path, MADE[day]) == message(
        f"the file is the content of {day} (index commit {commit}), the lock wants that of 2026-02-21 (192beef); "
        f"got sha256 {sha(MADE[day].decode())}"
    )


def test_the_content_that_is_wanted(site: Loopback, tmp_path: Path) -> None:
    refusal(site, tmp_path, MADE["2026-01-14"])
    site.files[PATH] = Served(MADE["2026-02-21"])
    wanted = kernel(site)
    found = fetch_all(lock_of(tiny().matrix, wanted), settings_at(tmp_path))
    assert found[WHEEL].read_bytes() == MADE["2026-02-21"]


def test_a_sixth_content_at_the_url(site: Loopback, tmp_path: Path) -> None:
    assert refusal(site, tmp_path, b"a sixth") == message(
        "the file is none of the contents that are known of this name, the lock wants that of 2026-02-21 "
        f"(index commit 192beef); got sha256 {sha('a sixth')}"
    )
