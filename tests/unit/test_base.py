"""The OS of an image: package lists, their versions, sources. No archive is asked."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from builder import archive, base, bootstrap
from builder.errors import BuildError, LockError, UnreachableError
from builder.lock import OsPackage
from tests.made import lock_of, settings_at, tiny

STATUS = """\
Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13.dfsg-1
Description: x
 Package: not-this

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: base-files
Status: install ok installed
Version: 12.4+deb12u15
Architecture: amd64
"""
INSTALLED = (
    OsPackage(name="base-files", version="12.4+deb12u15", architecture="amd64"),
    OsPackage(name="zlib1g", version="1:1.2.13.dfsg-1", architecture="amd64"),
)


@pytest.fixture
def debian(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "TOOLS", tmp_path / "tools")
    release = {"ID": "debian", "VERSION_CODENAME": "bookworm", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}
    monkeypatch.setattr(archive, "os_release", lambda: release)
    monkeypatch.setattr(base, "_keyring", lambda _: Path("/keyring.gpg"))


def test_the_installed_packages_of_a_status_file_by_name() -> None:
    assert base.parse_status(STATUS) == INSTALLED


def test_the_packages_in_a_root_file_system(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "rootfs.tar", "w") as archive:
        member = tarfile.TarInfo("./var/lib/dpkg/status")
        member.size = len(STATUS.encode())
        archive.addfile(member, io.BytesIO(STATUS.encode()))
    assert base.packages_in(tmp_path / "rootfs.tar") == INSTALLED


def test_a_compilers_packages_are_for_images_that_compile() -> None:
    jit = tiny(
        cuda="{version: 13.0.2, compiler: {nvidia-cuda-nvcc: 13.0.88, nvidia-nvvm: 13.0.88, nvidia-cuda-crt: 13.0.88, "
        "nvidia-cuda-cccl: 13.0.85}}"
    ).matrix
    assert set(base.os_packages(tiny().matrix)) < set(base.os_packages(jit))
    assert "g++" in set(base.os_packages(jit)) - set(base.os_packages(tiny().matrix))


def test_a_matrix_adds_packages() -> None:
    own = tiny(base="{kind: archive, distribution: debian, release: bookworm, packages: [zsh]}").matrix
    assert sorted([*base.os_packages(tiny().matrix), "zsh"]) == base.os_packages(own)


def test_another_package_list_is_another_file(tmp_path: Path) -> None:
    lock = lock_of(tiny().matrix)
    other = lock.base.model_copy(update={"packages": ()})
    paths = {base.rootfs_path(found, settings_at(tmp_path)) for found in (lock.base, other, lock.base)}
    assert len(paths) == 2
    assert {path.parent for path in paths} == {tmp_path / "cache" / "rootfs"}


TARGETS = """\
Packages|bookworm|main|https://archive.example/debian/
Packages|bookworm|contrib|https://archive.example/debian/
Packages|bookworm-updates|main|https://archive.example/debian/
Translations|bookworm|main|https://archive.example/debian/
Packages|bookworm-security|main|https://archive.example/security/
Packages|bookworm|main|https://archive.example/debian/
Packages|sid|main|https://archive.example/debian/
"""


@pytest.mark.usefixtures("debian")
def test_the_hosts_own_mirrors_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "run", lambda *_, **__: TARGETS)
    assert base._sources(tiny().matrix, settings_at(tmp_path)) == (
        "deb [signed-by=/keyring.gpg] https://archive.example/debian/ bookworm main\n"
        "deb [signed-by=/keyring.gpg] https://archive.example/debian/ bookworm-updates main\n"
        "deb [signed-by=/keyring.gpg] https://archive.example/security/ bookworm-security main\n"
    )


@pytest.mark.usefixtures("debian")
def test_another_release_is_taken_from_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "run", lambda *_, **__: TARGETS)
    trixie = tiny(base="{kind: archive, distribution: debian, release: trixie}").matrix
    assert "https://archive.example/security/ trixie-security main\n" in base._sources(trixie, settings_at(tmp_path))


@pytest.mark.usefixtures("debian")
def test_a_mirror_that_is_set_is_used_instead(tmp_path: Path) -> None:
    settings = settings_at(tmp_path, archive="https://mirror.example/debian")
    assert base._sources(tiny().matrix, settings) == (
        "deb [signed-by=/keyring.gpg] https://mirror.example/debian bookworm main\n"
        "deb [signed-by=/keyring.gpg] https://mirror.example/debian bookworm-updates main\n"
    )


@pytest.mark.usefixtures("debian")
def test_another_distribution_has_no_mirror_here(tmp_path: Path) -> None:
    ubuntu = tiny(base="{kind: archive, distribution: ubuntu, release: noble}", python='"3.12"').matrix
    with pytest.raises(BuildError) as caught:
        base._sources(ubuntu, settings_at(tmp_path))
    assert str(caught.value) == (
        "error: no mirror of ubuntu is known on this machine\n"
        "  because: the machine is Debian GNU/Linux 12 (bookworm) and its apt has no ubuntu\n"
        '  hint: name one: `archive = "https://…"` in the configuration, or BUILDER_ARCHIVE'
    )


def test_a_machine_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.base.shutil.which", lambda _: None)
    with pytest.raises(BuildError) as caught:
        base._require_bootstrap()
    assert str(caught.value) == (
        "error: `base.kind: archive` cannot be bootstrapped on this machine\n"
        "  because: it needs apt and dpkg, as on Debian or Ubuntu\n"
        "  hint: use `base: {kind: image, reference: NAME@sha256:…, …}`, or build on Debian or Ubuntu"
    )


def test_a_user_who_is_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.base.shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BuildError) as caught:
        base._require_bootstrap()
    assert str(caught.value) == (
        "error: bootstrapping the OS needs root\n"
        "  because: this is uid 1000; packages' files have owners\n"
        "  hint: run the first build as root; the result is kept in the cache"
    )


POLICY = """\
base-files:
  Installed: (none)
  Candidate: 12.4+deb12u16
  Version table:
     12.4+deb12u16 500
tini:
  Installed: (none)
  Candidate: (none)
  Version table:
"""


@pytest.mark.usefixtures("debian")
def test_what_the_archive_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(argv: list[str], **_: object) -> str:
        ran.append(argv)
        return POLICY

    monkeypatch.setattr(archive, "run", run)
    settings = settings_at(tmp_path, archive="https://mirror.example/debian")
    found = base.archive_versions(tiny().matrix, lock_of(tiny().matrix).base, settings)
    assert found == (OsPackage(name="base-files", version="12.4+deb12u16", architecture="amd64"),)
    assert [argv[0] for argv in ran] == ["apt-get", "apt-cache"]
    state = tmp_path / "cache" / "apt" / "debian-bookworm"
    assert all(f"Dir::State::lists={state}/lists" in argv and "Dir::Etc::sourceparts=/dev/null" in argv for argv in ran)


def test_keys_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror of Ubuntu is set on Debian, whose archive may lack Ubuntu's keys."""

    def refused(_: object) -> None:
        raise archive.SetupError("`apt-get -o …` exited with 100", "Unable to locate package", "see the sources")

    monkeypatch.setattr(bootstrap, "setup_packages", refused)
    monkeypatch.setattr(archive, "UNPACKED", tmp_path)
    monkeypatch.setitem(base.KEYRINGS, "ubuntu", Path("usr/share/keyrings/made-ubuntu-archive-keyring.gpg"))
    ubuntu = tiny(base="{kind: archive, distribution: ubuntu, release: noble}", python='"3.12"').matrix
    with pytest.raises(BuildError) as caught:
        base._sources(ubuntu, settings_at(tmp_path, archive="https://mirror.example/ubuntu"))
    assert str(caught.value) == (
        "error: the keys of ubuntu's archive are not on this machine\n"
        "  because: `apt-get -o …` exited with 100: Unable to locate package\n"
        "  hint: install `made-ubuntu-archive-keyring`, or build on Ubuntu"
    )


@pytest.mark.usefixtures("debian")
def test_without_a_mirror_no_key_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_keyring", lambda _: pytest.fail("looked for"))
    ubuntu = tiny(base="{kind: archive, distribution: ubuntu, release: jammy}", python='"3.10"').matrix
    with pytest.raises(BuildError, match="no mirror of ubuntu is known"):
        base._sources(ubuntu, settings_at(tmp_path))


@pytest.mark.usefixtures("debian")
def test_an_archive_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise archive.SetupError("`apt-get -o …` exited with 100", "Could not connect", "see the sources")

    monkeypatch.setattr(archive, "run", broken)
    settings = settings_at(tmp_path, archive="https://mirror.example/debian")
    with pytest.raises(UnreachableError, match="exited with 100"):
        base.archive_versions(tiny().matrix, lock_of(tiny().matrix).base, settings)


@pytest.mark.usefixtures("debian")
def test_an_archive_that_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "run", lambda *_, **__: "")
    settings = settings_at(tmp_path, archive="https://mirror.example/debian")
    with pytest.raises(LockError, match="the archive names no candidate for any package"):
        base.archive_versions(tiny().matrix, lock_of(tiny().matrix).base, settings)
