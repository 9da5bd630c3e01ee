"""`builder lock`: what is written, what drifted, and another date."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder import base, locking
from builder.errors import LockError, UsageError
from builder.lock import Artefact, Base, OsPackage, Resolver, lock_path, read_lock, write_lock
from builder.matrix import Matrix
from builder.settings import Settings
from tests.made import OS_PACKAGES, TINY, artefact, lock_of, settings_at, tiny

BASE = Base(kind="archive", distribution="debian", release="bookworm", packages=OS_PACKAGES)


class World:
    """What the index and the archive have."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.artefacts = [artefact("idna", "3.7")]
        self.uv = "0.13.9"
        self.packages = OS_PACKAGES
        self.failure: Exception | None = None
        self.bootstrapped = 0
        monkeypatch.setattr(locking, "resolve", self.resolve)
        monkeypatch.setattr(base, "lock_base", self.lock_base)
        monkeypatch.setattr(base, "archive_versions", lambda *_: self.packages)

    def resolve(self, _matrix: Matrix, _settings: Settings) -> tuple[list[Artefact], Resolver]:
        if self.failure:
            raise self.failure
        return self.artefacts, Resolver(name="uv", version=self.uv)

    def lock_base(self, *_: object) -> Base:
        self.bootstrapped += 1
        return BASE.model_copy(update={"packages": self.packages})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "tiny.yaml"
    found.write_text(TINY)
    return found


def test_a_first_lock(world: World, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock, lines = locking.make_lock(path, settings_at(tmp_path))
    assert lock == lock_of(tiny().matrix, artefact("idna", "3.7")) == read_lock(lock_path(path))
    assert lines == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("resolving tiny as of 2026-03-01 …\nbootstrapping debian bookworm for its package list …\n")


def test_two_locks_are_equal_bytes(world: World, path: Path, tmp_path: Path) -> None:
    locking.make_lock(path, settings_at(tmp_path))
    first = lock_path(path).read_bytes()
    locking.make_lock(path, settings_at(tmp_path))
    assert lock_path(path).read_bytes() == first


def test_a_new_lock_says_what_changed(world: World, path: Path, tmp_path: Path) -> None:
    locking.make_lock(path, settings_at(tmp_path))
    world.artefacts = [artefact("idna", "3.8")]
    assert locking.make_lock(path, settings_at(tmp_path))[1] == ["idna 3.7 → 3.8"]


def test_a_damaged_lock_is_replaced_as_its_message_says(world: World, path: Path, tmp_path: Path) -> None:
    lock_path(path).write_text("{")
    lock, lines = locking.make_lock(path, settings_at(tmp_path))
    assert (read_lock(lock_path(path)), lines) == (lock, [])


def test_a_matrix_without_a_resolution_keeps_its_lock_and_bootstraps_nothing(
    world: World, path: Path, tmp_path: Path
) -> None:
    lock_path(path).write_text("old")
    world.failure = LockError("no resolution")
    with pytest.raises(LockError):
        locking.make_lock(path, settings_at(tmp_path))
    assert (lock_path(path).read_text(), world.bootstrapped) == ("old", 0)


def test_a_current_lock_has_no_drift(world: World, path: Path, tmp_path: Path) -> None:
    locking.make_lock(path, settings_at(tmp_path))
    before = lock_path(path).read_bytes()
    assert locking.check_lock(path, settings_at(tmp_path)) == []
    assert (lock_path(path).read_bytes(), world.bootstrapped) == (before, 1)


def test_what_drifted(world: World, path: Path, tmp_path: Path) -> None:
    locking.make_lock(path, settings_at(tmp_path))
    world.artefacts = [artefact("idna", "3.8")]
    world.packages = (OsPackage(name="base-files", version="13", architecture="amd64"), OS_PACKAGES[1])
    world.uv = "0.14.0"
    path.write_text(f"{TINY}extras: [idna==3.8]\n")
    assert locking.check_lock(path, settings_at(tmp_path)) == [
        "the matrix was changed after it was locked",
        "idna 3.7 → 3.8",
        "OS package base-files 12.4+deb12u15 → 13",
        "uv 0.13.9 → 0.14.0",
    ]


def test_no_lock_to_check(world: World, path: Path, tmp_path: Path) -> None:
    with pytest.raises(LockError, match="the matrix has no lock"):
        locking.check_lock(path, settings_at(tmp_path))


def test_a_base_from_an_image_asks_no_archive(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = "sha256:" + "0" * 64
    text = TINY.replace(
        "{kind: archive, distribution: debian, release: bookworm}",
        f"{{kind: image, reference: 'debian@{digest}', distribution: debian, release: bookworm}}",
    )
    path = tmp_path / "tiny.yaml"
    path.write_text(text)
    reference = f"debian@{digest}"
    matrix = tiny(base=f"{{kind: image, reference: '{reference}', distribution: debian, release: bookworm}}").matrix
    write_lock(lock_of(matrix, artefact("idna", "3.7")), lock_path(path))
    monkeypatch.setattr(base, "archive_versions", lambda *_: pytest.fail("the archive was asked"))
    assert locking.check_lock(path, settings_at(tmp_path)) == []


# --- another date -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("as_of: 2026-03-01", "as_of: 2026-04-01"),
        ("as_of: 2026-03-01  # after 0.5.9", "as_of: 2026-04-01  # after 0.5.9"),
        ("as_of:   2026-03-01", "as_of:   2026-04-01"),
        ("as_of: '2026-03-01' # x", "as_of: 2026-04-01 # x"),
    ],
)
def test_the_date_alone_is_changed(path: Path, line: str, changed: str) -> None:
    text = "# head\n" + TINY.replace("as_of: 2026-03-01", line) + "# tail\n"
    path.write_text(text)
    assert locking.with_as_of(path, "2026-04-01") == text.replace(line, changed)
    assert path.read_text() == text, "written by `make_lock`, once the date has a resolution"


@pytest.mark.parametrize("day", ["2026-13-01", "20260401", "tomorrow", "2026-W14-3", "2026-04-01\nx: 1", ""])
def test_what_is_no_date(path: Path, day: str) -> None:
    with pytest.raises(UsageError) as caught:
        locking.with_as_of(path, day)
    assert str(caught.value) == f"error: `{day}` is not a date\n  because: `--as-of` takes YYYY-MM-DD"
    assert path.read_text() == TINY


def test_a_date_that_is_not_on_a_line_of_its_own(path: Path) -> None:
    path.write_text("{" + ", ".join(line for line in TINY.splitlines()) + "}\n")
    with pytest.raises(LockError) as caught:
        locking.with_as_of(path, "2026-04-01")
    assert str(caught.value) == f"error: the matrix has no `as_of:` line of its own\n  at: {path}"
