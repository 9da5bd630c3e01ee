"""`builder lock --repin`: what is written into the matrix and its lock, what is left alone, what is told."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from urllib3.util import Retry

from builder import cli, download, facts, verbs
from builder import settings as settings_module
from builder.errors import ExitCode, IntegrityError, LockError, UnreachableError, UsageError
from builder.facts import ContentFact, KnownContent
from builder.lock import Lock, check_current, lock_path, read_lock, write_lock
from builder.matrix import load, parse_matrix
from builder.repin import edited, repin
from tests.loopback import Loopback, Served, loopback, wheel
from tests.made import ROOT, TINY, artefact, lock_of, settings_at, sha

FILE, OLD = wheel("part", "1.0+cu1", ["idna>=3"])
_, NEW = wheel("part", "1.0+cu1", ["idna>=3"], files={"part/__init__.py": b"replaced = True\n"})
OLD_SHA, NEW_SHA = (hashlib.sha256(data).hexdigest() for data in (OLD, NEW))
PATH = f"/files/{FILE.replace('+', '%2B')}"

BLOCK = """\
# Where it lives
files:
  - name: part
    url: URL  # the vendor's
    sha256: OLD  # last seen
    attested_by:  # who says so
      - uv.lock of one at 2ff49d0
      # and
      - "uv.lock of two: d15fbb4"  # 2026-07-05
    # As METADATA says.
    requires: [idna>=3]
# The end
"""


def flow(fields: str) -> str:
    return f"files: [{{name: part, url: 'URL', sha256: OLD, requires: [idna>=3]{fields}}}]  # one\n"


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loopback]:
    monkeypatch.setattr(download, "PAUSE", 0.0)
    monkeypatch.setattr(Retry, "get_backoff_time", lambda _: 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with loopback() as server:
        server.files[PATH] = Served(NEW)
        yield server


def matrix(tmp_path: Path, site: Loopback, files: str = BLOCK, **fields: Any) -> tuple[Path, Lock]:
    """A matrix with one direct file and a package of the default index, and its lock."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + files.replace("URL", f"{site.url}{PATH}").replace("OLD", OLD_SHA))
    found = load(path).matrix
    data: dict[str, Any] = {"url": f"{site.url}{PATH}", "index": None, "size": found.files[0].size, "file": FILE}
    data |= {"sha256": OLD_SHA, "requires": ("idna>=3",), **fields}
    lock = lock_of(found, artefact("part", "1.0+cu1", **data), artefact("idna", "3.7"))
    write_lock(lock, lock_path(path))
    return path, lock


# --- what is written --------------------------------------------------------------------------------------------------


def test_the_new_hash_goes_into_matrix_and_lock(site: Loopback, tmp_path: Path) -> None:
    path, lock = matrix(tmp_path, site)
    before = path.read_text()
    report = repin(path, "part", settings_at(tmp_path))
    assert path.read_text() == before.replace(OLD_SHA, NEW_SHA).replace(
        '    attested_by:  # who says so\n      - uv.lock of one at 2ff49d0\n      # and\n      - "uv.lock of two: d15fbb4"  # 2026-07-05\n',
        "    attested_by: []  # who says so\n",
    )
    new = read_lock(lock_path(path))
    check_current(new, load(path).matrix, lock_path(path))
    assert new.by_name["part"] == lock.by_name["part"].model_copy(update={"sha256": NEW_SHA})
    assert new == lock.model_copy(update={"artefacts": new.artefacts, "inputs": new.inputs})
    assert (report.exit_code, report.lock) == (ExitCode.OK, new.digest)
    assert report.as_text("tiny").replace(site.url, "SITE") == (
        f"part 1.0+cu1: SITE{PATH} has another content of {FILE}\n"
        f"  old: sha256 {OLD_SHA}\n"
        f"  new: sha256 {NEW_SHA}\n"
        "  no longer attested by: uv.lock of one at 2ff49d0\n"
        "  no longer attested by: uv.lock of two: d15fbb4\n"
        f"written: {path}, {lock_path(path)}; lock {new.digest[:12]}"
    )


def test_what_is_known_of_each_content_is_told(site: Loopback, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = matrix(tmp_path, site)
    contents = (
        KnownContent(date=date(2026, 1, 26), commit="f959603", sha256=NEW_SHA),
        KnownContent(date=date(2026, 2, 21), commit="192beef", sha256=OLD_SHA),
    )
    real, made = facts.load_facts, ContentFact(source="made", wheel=FILE, contents=contents)
    monkeypatch.setattr(facts, "load_facts", lambda model: (made,) if model is ContentFact else real(model))
    assert repin(path, "part", settings_at(tmp_path)).as_text("tiny").splitlines()[1:3] == [
        f"  old: sha256 {OLD_SHA} (content of 2026-02-21, index commit 192beef)",
        f"  new: sha256 {NEW_SHA} (content of 2026-01-26, index commit f959603)",
    ]


def test_what_was_fetched_for_it_is_there_for_the_build(site: Loopback, tmp_path: Path) -> None:
    from builder.fetch import fetch_all

    path, _ = matrix(tmp_path, site)
    repin(path, "part", settings_at(tmp_path))
    site.requests.clear()
    fetch_all(read_lock(lock_path(path)), settings_at(tmp_path))
    assert site.requests == []


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        (flow(""), flow("")),
        (flow(", attested_by: [one, 'two, or [three]']"), flow(", attested_by: []")),
        (flow(f", size: {len(OLD)}, attested_by: []"), flow(f", size: {len(NEW)}, attested_by: []")),
        (flow(", attested_by: [\n  one,\n  two,\n]"), flow(", attested_by: []")),
        (BLOCK.replace("OLD", "'OLD'"), None),
        (BLOCK.replace("      -", "    -"), None),
        (BLOCK.replace("files:\n", "files:\n  - {name: idna, url: URL2, sha256: OTHER, attested_by: [x]}\n"), None),
        (BLOCK.partition("    # As METADATA")[0] + "    requires: [idna>=3]", None),
        ("files:\n- attested_by:\n  - one\n  - two\n  name: part\n  sha256: OLD\n  url: URL\n  requires: [idna>=3]\n",
         "files:\n- attested_by: []\n  name: part\n  sha256: OLD\n  url: URL\n  requires: [idna>=3]\n"),
        ("files:\n- name: part\n  sha256: OLD\n  url: URL\n  attested_by:\n  - one", "files:\n- name: part\n  sha256: OLD\n  url: URL\n  attested_by: []"),
    ],
)  # fmt: skip
def test_only_the_entry_is_edited(files: str, changed: str | None) -> None:
    def whole(text: str, sha256: str) -> str:
        text = text.replace("URL2", "https://wheels.example/idna-3.7-py3-none-any.whl").replace("OTHER", sha("other"))
        return TINY + text.replace("URL", f"https://wheels.example{PATH}").replace("OLD", sha256)

    loaded = parse_matrix(whole(files, OLD_SHA), Path("tiny.yaml"))
    position = len(loaded.matrix.files) - 1
    size = None if loaded.matrix.files[position].size is None else len(NEW)
    text = edited(loaded, position, NEW_SHA, size)
    found = parse_matrix(text, Path("tiny.yaml")).matrix.files[position]
    assert (found.sha256, found.attested_by, found.size) == (NEW_SHA, (), size)
    if changed is not None:
        assert text == whole(changed, NEW_SHA)
    else:
        kept = [
            line
            for line in whole(files, NEW_SHA).splitlines()
            if "attested_by:  #" not in line and "uv.lock" not in line
        ]
        assert [line for line in text.splitlines() if line != "    attested_by: []  # who says so"] == [
            line for line in kept if line not in ("      # and", "    # and")
        ]


def test_a_text_that_cannot_be_edited_is_left_alone(site: Loopback, tmp_path: Path) -> None:
    # A value that is written in another way than it is.
    escaped = f"{OLD_SHA[0]}\\x{ord(OLD_SHA[1]):02x}{OLD_SHA[2:]}"
    files = f'files: [{{name: part, url: URL, sha256: "{escaped}"}}]\n'
    path, _ = matrix(tmp_path, site, files)
    before = path.read_text(), lock_path(path).read_text()
    with pytest.raises(LockError) as caught:
        repin(path, "part", settings_at(tmp_path))
    assert str(caught.value) == (
        "error: the entry of `part` cannot be edited in its place\n"
        f"  at: {path}:9\n"
        f"  hint: write it yourself: `sha256: {NEW_SHA}`, `attested_by: []`; then `builder lock tiny`"
    )
    assert (path.read_text(), lock_path(path).read_text()) == before


def test_the_real_matrix_can_be_edited(tmp_path: Path) -> None:
    loaded = load(ROOT / "matrices" / "cu130.yaml")
    for position, entry in enumerate(loaded.matrix.files):
        text = edited(loaded, position, NEW_SHA, None)
        gone = sorted(set(loaded.text.splitlines()) - set(text.splitlines()))
        assert len(gone) <= 1 + len(entry.attested_by), gone
        assert text.count("attested_by: []") == 1


# --- where it is looked for -------------------------------------------------------------------------------------------


def test_a_wheel_folder_comes_first(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / FILE).write_bytes(NEW)
    report = repin(path, "part", settings_at(tmp_path, wheels=(folder,)))
    assert (report.place, report.sha256, site.requests) == (f"folder {folder}", NEW_SHA, [])


def test_a_folder_and_a_mirror_that_have_what_is_pinned_say_nothing_of_a_new_one(
    site: Loopback, tmp_path: Path
) -> None:
    path, _ = matrix(tmp_path, site)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / FILE).write_bytes(OLD)
    site.add((FILE, OLD), index="mirror", beside=False)
    settings = settings_at(tmp_path, wheels=(folder,), indexes={"any": f"{site.url}/mirror"})
    assert repin(path, "part", settings).sha256 == NEW_SHA
    assert site.paths() == ["/mirror/part/", PATH]


def test_a_mirror_has_another_content(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    site.add((FILE, NEW), index="mirror", beside=False)
    report = repin(path, "part", settings_at(tmp_path, indexes={"any": f"{site.url}/mirror"}))
    assert (report.place, report.sha256) == (f"index `any` ({site.url}/mirror)", NEW_SHA)


def test_nothing_new(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    site.files[PATH].data = OLD
    before = path.read_text(), lock_path(path).read_text()
    report = repin(path, "part", settings_at(tmp_path))
    assert report.exit_code == ExitCode.OK
    assert report.as_text("tiny") == (
        f"part 1.0+cu1: {site.url}{PATH} has the file that the lock pins, sha256 {OLD_SHA}: nothing to take"
    )
    assert (path.read_text(), lock_path(path).read_text()) == before


def test_nowhere_to_be_had(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / FILE).write_bytes(OLD)
    site.files[PATH].status = 404
    with pytest.raises(UnreachableError) as caught:
        repin(path, "part", settings_at(tmp_path, wheels=(folder,)))
    host = site.url.removeprefix("http://")
    assert str(caught.value).partition("\n  hint:")[0] == (
        f"error: `{FILE}` could not be had\n  at: {site.url}{PATH}\n"
        f"  because: folder {folder}: has the content that the lock pins\n"
        f"    its URL: {host} answers 404 Not Found\n    the lock pins sha256 {OLD_SHA}"
    )


# --- what is not believed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "because"),
    [
        (b"<html>log in", "File is not a zip file"),
        (wheel("other", "1.0")[1], "its METADATA is that of `other`"),
        (NEW[:-30], "File is not a zip file"),
        (wheel("part", "1.0+cu1", text=b"")[1], "its METADATA is that of `None`"),
    ],
)
def test_what_is_no_wheel_of_the_package_is_not_taken(
    site: Loopback, tmp_path: Path, data: bytes, because: str
) -> None:
    path, _ = matrix(tmp_path, site)
    site.files[PATH].data = data
    before = path.read_text(), lock_path(path).read_text()
    with pytest.raises(IntegrityError) as caught:
        repin(path, "part", settings_at(tmp_path))
    assert str(caught.value) == (
        f"error: what came is not a wheel of `part`\n  at: {site.url}{PATH}\n  because: {because}\n"
        "  hint: nothing was written; look at what the address gives, a login page as a rule"
    )
    assert (path.read_text(), lock_path(path).read_text()) == before
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()] == []


def test_what_its_metadata_says_otherwise_is_told(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    lines = ['numpy; python_version >= "3.8"', "old; python_version < '3'", "x; extra == 'y'", "not a requirement"]
    site.files[PATH].data = wheel("part", "1.0", lines)[1]
    report = repin(path, "part", settings_at(tmp_path))
    assert report.remarks == (
        "its METADATA says version 1.0, the matrix 1.0+cu1 (`metadata_version`)",
        "requires in METADATA, not in the matrix: `numpy`",
        "the reverse: `idna>=3`",
    )
    assert "\n  note: the reverse: `idna>=3`\n" in report.as_text("tiny")


def test_a_matrix_that_was_changed_since_it_was_locked(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    path.write_text(path.read_text() + "extras: [six==1.17.0]\n")
    with pytest.raises(LockError, match="the lock does not belong to this matrix"):
        repin(path, "part", settings_at(tmp_path))


def test_a_package_that_is_not_in_the_lock(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    with pytest.raises(UsageError) as caught:
        repin(path, "pert", settings_at(tmp_path))
    assert str(caught.value) == (
        f"error: `pert` is not in the lock\n  at: {lock_path(path)}\n  hint: did you mean `part`"
    )


# --- a package of an index --------------------------------------------------------------------------------------------


def of_index(site: Loopback, tmp_path: Path, data: bytes | None) -> Any:
    path, _ = matrix(tmp_path, site)
    if data is not None:
        site.add(("idna-3.7-py3-none-any.whl", data), beside=False)
    before = path.read_text(), lock_path(path).read_text()
    report = repin(path, "idna", settings_at(tmp_path, index=f"{site.url}/simple"))
    assert (path.read_text(), lock_path(path).read_text()) == before
    return report


def test_an_index_that_has_the_same_file(site: Loopback, tmp_path: Path) -> None:
    report = of_index(site, tmp_path, b"idna 3.7")
    assert (report.exit_code, report.as_text("tiny")) == (
        ExitCode.OK,
        f"idna 3.7: the index `default` has the file that the lock pins, sha256 {sha('idna 3.7')}: nothing to take",
    )


def test_an_index_that_has_another_file(site: Loopback, tmp_path: Path) -> None:
    report = of_index(site, tmp_path, b"other")
    assert (report.exit_code, report.as_text("tiny")) == (
        ExitCode.LOCK,
        (
            "idna 3.7: the index `default` has another content of idna-3.7-py3-none-any.whl\n"
            f"  old: sha256 {sha('idna 3.7')}\n"
            f"  new: sha256 {sha('other')}\n"
            "nothing was written; resolve again: `builder lock tiny`"
        ),
    )


def test_an_index_that_has_it_no_longer(site: Loopback, tmp_path: Path) -> None:
    report = of_index(site, tmp_path, None)
    assert (report.exit_code, report.as_text("tiny")) == (
        ExitCode.LOCK,
        "idna 3.7: the index `default` no longer has idna-3.7-py3-none-any.whl; resolve again: `builder lock tiny`",
    )


def test_an_index_that_does_not_answer(site: Loopback, tmp_path: Path) -> None:
    path, _ = matrix(tmp_path, site)
    site.files["/simple/idna/"] = Served(b"", status=503)
    with pytest.raises(UnreachableError) as caught:
        repin(path, "idna", settings_at(tmp_path, index=f"{site.url}/simple"))
    host = site.url.removeprefix("http://")
    assert str(caught.value) == (
        f"error: the index page of `idna` could not be read\n  at: {site.url}/simple\n"
        f"  because: {host} answers 503 Service Unavailable, again and again"
    )


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings from the environment, and nothing in it but a cache."""
    import os

    for name in [name for name in os.environ if name.startswith(("BUILDER_", "UV_", "PIP_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BUILDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(verbs, "MATRICES", tmp_path)
    settings_module.load.cache_clear()
    yield
    settings_module.load.cache_clear()


def test_the_command(site: Loopback, tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = matrix(tmp_path, site)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    assert cli.main(["lock", str(tmp_path / "copy" / "tiny.yaml"), "--repin", "part"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == f"part 1.0+cu1: {site.url}{PATH} has another content of {FILE}"
    assert err.splitlines()[0] == f"fetching {site.url}{PATH} …"
    assert cli.main(["lock", "tiny", "--repin", "part", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data == {
        "ok": True,
        "package": "part",
        "file": FILE,
        "from": f"{site.url}{PATH}",
        "old": {"sha256": OLD_SHA, "known": None},
        "new": {"sha256": NEW_SHA, "known": None},
        "written": [str(path), str(lock_path(path))],
        "lock": read_lock(lock_path(path)).digest,
        "withdrawn": ["uv.lock of one at 2ff49d0", "uv.lock of two: d15fbb4"],
        "remarks": [],
    }


def test_the_command_takes_a_folder_and_a_mirror(
    site: Loopback, tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix(tmp_path, site)
    site.files.clear()
    site.add((FILE, NEW), index="mirror", beside=False)
    (tmp_path / "empty").mkdir()
    argv = ["lock", "tiny", "--repin", "part", "--wheels", str(tmp_path / "empty"), "--index", f"any={site.url}/mirror"]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"part 1.0+cu1: index `any` ({site.url}/mirror) has another content of {FILE}"
    )


def test_wheels_are_for_repin_only(
    site: Loopback, tmp_path: Path, machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    matrix(tmp_path, site)
    assert cli.main(["lock", "tiny", "--wheels", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        "error: `--wheels` without `--repin`\n"
        "  hint: a resolution fetches no wheels; they are looked at with `--repin PACKAGE`\n"
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--index", "any"],
            (
                "error: `any` is not NAME=URL\n  at: --index\n"
                "  hint: as in `--index torch-cu130=https://mirror.example/whl/cu130`; `default` is the default index\n"
            ),
        ),
        (
            ["--index", "me:hunter2@x.example"],
            (
                "error: `***@x.example` is not NAME=URL\n  at: --index\n"
                "  hint: as in `--index torch-cu130=https://mirror.example/whl/cu130`; `default` is the default index\n"
            ),
        ),
        (
            ["--index", "A_B=https://x.example"],
            (
                "error: `A_B` cannot name an index\n  at: --index\n"
                "  because: allowed: a-z, 0-9 and -\n  hint: `default` is the default index\n"
            ),
        ),
        (
            ["--index", "any=ftp://me:hunter2@x.example"],
            (
                "error: `any` is not a URL\n  at: --index\n"
                "  because: got 'ftp://***@x.example', allowed: https://…, http://…\n"
            ),
        ),
        (
            ["--wheels", "/nowhere"],
            ("error: `wheels` names a folder that does not exist\n  at: --wheels\n  because: no folder at /nowhere\n"),
        ),
        (
            ["--wheels", "/dev/null"],
            ("error: `wheels` names a folder that does not exist\n  at: --wheels\n  because: /dev/null is a file\n"),
        ),
    ],
)
@pytest.mark.parametrize("verb", [["build", "tiny"], ["lock", "tiny", "--repin", "part"]])
def test_bad_values_of_the_options(
    site: Loopback,
    tmp_path: Path,
    machine: None,
    capsys: pytest.CaptureFixture[str],
    verb: list[str],
    options: list[str],
    told: str,
) -> None:
    matrix(tmp_path, site)
    assert cli.main([*verb, *options]) == 2
    assert capsys.readouterr() == ("", told)
