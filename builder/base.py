"""The OS of an image: its packages, its bootstrap from the distribution's archive, what the archive has now.

`mmdebstrap` makes the root file system (deterministic for one package list and date); apt itself answers which versions
the archive has. Both use the machine's own apt configuration: mirror, proxy, certificate authority, signatures.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from builder import archive, bootstrap, facts
from builder.errors import BuildError, LockError, UnreachableError
from builder.files import canonical_json, sha256_hex
from builder.lock import Base, OsPackage
from builder.matrix import Matrix
from builder.settings import Settings, redact

KEYRINGS = {
    "debian": Path("usr/share/keyrings/debian-archive-keyring.gpg"),
    "ubuntu": Path("usr/share/keyrings/ubuntu-archive-keyring.gpg"),
}
COMPONENTS = {"debian": ("main",), "ubuntu": ("main", "universe")}

# Documentation and translations: a third of the files of a minimal system, and nobody reads them in a container.
# Licences stay.
_EXCLUDES = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*", "/usr/share/lintian/*")
_INCLUDES = ("/usr/share/doc/*/copyright",)

RECIPE = (
    *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDES),
    *(f"--dpkgopt=path-include={pattern}" for pattern in _INCLUDES),
    # Leftovers that differ from run to run, or are the build machine's: logs, caches.
    "--customize-hook=rm -rf $1/var/log/* $1/var/cache/ldconfig $1/var/cache/debconf/*-old $1/var/lib/dpkg/*-old",
    # The site's mirror must not be in the image.
    "--customize-hook=rm -f $1/etc/apt/sources.list.d/*; : > $1/etc/apt/sources.list",
    # An engine mounts its own over these. Where they are missing it makes and removes them, and that changes the time of
    # /etc in the layer of every build step.
    "--customize-hook=for f in hostname hosts resolv.conf; do : > $1/etc/$f; done",
)
"""How the root file system is made, besides its packages: mmdebstrap's arguments."""


def os_packages(matrix: Matrix) -> list[str]:
    """The packages asked for besides the distribution's minimal set, sorted; the matrix's own extra ones among them."""
    jit = matrix.cuda.jit != "none"
    names = {fact.package for fact in facts.load_facts(facts.OsPackageFact) if jit or fact.when == "always"}
    return sorted(names | set(matrix.base.packages))


EPOCH = 1577836800
"""Seconds since 1970 that every file of an image carries: 2020-01-01. One for all, so that a matrix of another date
shares the layers whose wheels are the same; not 0, which some tools take for "no time"."""


def rootfs_path(base: Base, settings: Settings) -> Path:
    """Where the bootstrapped root file system of this package list is kept."""
    digest = sha256_hex(canonical_json([base.model_dump(mode="json"), RECIPE, EPOCH]))
    return settings.cache / "rootfs" / f"{base.distribution}-{base.release}-{digest[:16]}.tar"


def _sources(matrix: Matrix, settings: Settings) -> str:
    """One-line apt sources for the release, from the machine's own mirror or the one that is set."""
    distribution, release = matrix.base.distribution, matrix.base.release
    components = " ".join(COMPONENTS[distribution])
    if settings.archive is not None:
        suites = [(settings.archive, release), (settings.archive, f"{release}-updates")]
    else:
        suites = list(_host_suites(distribution, release))
    # Keys are of use only where there is a mirror.
    keyring = _keyring(distribution)
    return "".join(f"deb [signed-by={keyring}] {uri} {suite} {components}\n" for uri, suite in suites)


def site_sources(matrix: Matrix, settings: Settings) -> str | None:
    """The apt sources that the site has for the matrix's OS; None where it has none and an image's own have to serve."""
    if settings.archive is None and archive.os_release().get("ID") != matrix.base.distribution:
        return None
    return _sources(matrix, settings)


def _keyring(distribution: str) -> Path:
    relative = KEYRINGS[distribution]
    for path in (Path("/") / relative, archive.UNPACKED / relative):
        if path.is_file():
            return path
    package = relative.name.removesuffix(".gpg")
    try:
        bootstrap.setup_packages([package])
    except archive.SetupError as error:
        raise BuildError(
            f"the keys of {distribution}'s archive are not on this machine",
            because=f"{error.what}: {error.because}",
            hint=f"install `{package}`, or build on {distribution.capitalize()}",
        ) from error
    return archive.UNPACKED / relative


def _host_suites(distribution: str, release: str) -> Iterator[tuple[str, str]]:
    """(URI, suite) of the release as the host's apt has them; the host's own release name is exchanged."""
    host = archive.os_release()
    if host.get("ID") != distribution:
        raise BuildError(
            f"no mirror of {distribution} is known on this machine",
            because=f"the machine is {host.get('PRETTY_NAME', 'not Debian or Ubuntu')} and its apt has no {distribution}",
            hint='name one: `archive = "https://…"` in the configuration, or BUILDER_ARCHIVE',
        )
    own = host.get("VERSION_CODENAME", "")
    seen = set()
    for suite, uri in archive.Archive().suites():
        pair = (uri, suite.replace(own, release, 1))
        if suite.startswith(own) and pair not in seen:
            seen.add(pair)
            yield pair
    if not seen:
        raise BuildError(
            f"apt has no source for {own} main",
            because="the OS is bootstrapped from the mirror that the machine already uses",
            hint="add the release to the apt sources, or name a mirror with BUILDER_ARCHIVE",
        )


def _require_bootstrap() -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise BuildError(
            "`base.kind: archive` cannot be bootstrapped on this machine",
            because="it needs apt and dpkg, as on Debian or Ubuntu",
            hint="use `base: {kind: image, reference: NAME@sha256:…, …}`, or build on Debian or Ubuntu",
        )
    if os.geteuid() != 0:
        raise BuildError(
            "bootstrapping the OS needs root",
            because=f"this is uid {os.geteuid()}; packages' files have owners",
            hint="run the first build as root; the result is kept in the cache",
        )
    try:
        if bootstrap.find_program("mmdebstrap") is None or bootstrap.find_program("perl") is None:
            bootstrap.setup_packages(["mmdebstrap"])
    except archive.SetupError as error:
        raise BuildError(error.what, because=error.because, hint=error.hint) from error


def bootstrap_rootfs(matrix: Matrix, target: Path, settings: Settings) -> tuple[OsPackage, ...]:
    """Bootstrap the OS into the tar file `target` (written beside and renamed); return every package in it.

    Takes about half a minute. Raises `UnreachableError` if the archive does not answer, else `BuildError`.
    """
    if matrix.base.kind != "archive":
        raise BuildError("only `base.kind: archive` is bootstrapped")
    _require_bootstrap()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tar")
    argv = ["mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar", "--quiet"]
    argv += [f"--include={','.join(os_packages(matrix))}"]
    argv += list(RECIPE)
    argv += [matrix.base.release, str(partial), "-"]
    environment = {**bootstrap.tool_environment(), "SOURCE_DATE_EPOCH": str(EPOCH), "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(
            argv, input=_sources(matrix, settings), env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            words = redact("\n".join(done.stderr.strip().splitlines()[-12:]))
            kind = (
                UnreachableError
                if re.search(r"Could not (connect|resolve|handshake)|Failed to fetch", words)
                else BuildError
            )
            raise kind(
                f"{matrix.base.distribution} {matrix.base.release} could not be bootstrapped",
                because=words,
                hint="see that the archive answers (`apt-get update`); a mirror is named with BUILDER_ARCHIVE",
            )
        packages = packages_in(partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return packages


def packages_in(rootfs: Path) -> tuple[OsPackage, ...]:
    """Every installed package of a root file system in a tar file, from its package database, sorted by name."""
    with tarfile.open(rootfs) as tar:
        member = tar.extractfile("./var/lib/dpkg/status")
        assert member is not None
        text = member.read().decode()
    return parse_status(text)


def parse_status(text: str) -> tuple[OsPackage, ...]:
    """The installed packages in the text of a dpkg status file, sorted by name."""
    found = []
    for paragraph in text.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", paragraph, flags=re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found.append(
                OsPackage.model_validate(
                    {
                        "name": fields["Package"],
                        "version": fields["Version"],
                        "architecture": fields["Architecture"],
                    }
                )
            )
    return tuple(sorted(found, key=lambda package: package.name))


def lock_base(matrix: Matrix, settings: Settings) -> Base:
    """The base of a new lock, `kind: archive`: bootstraps the OS (kept for the build) and lists what is in it."""
    base = matrix.base
    partial = settings.cache / "rootfs" / f".lock-{os.getpid()}.tar"
    try:
        packages = bootstrap_rootfs(matrix, partial, settings)
        locked = Base(kind="archive", distribution=base.distribution, release=base.release, packages=packages)
        partial.replace(rootfs_path(locked, settings))
    finally:
        partial.unlink(missing_ok=True)
    return locked


def archive_versions(matrix: Matrix, base: Base, settings: Settings) -> tuple[OsPackage, ...]:
    """The locked packages at the versions that the archive has now: the list a bootstrap of today would give.

    Asks apt with a private state: nothing is downloaded but the archive's indexes. Packages that the archive no longer
    has are left out. Raises `LockError` or `UnreachableError`.
    """
    state = settings.cache / "apt" / f"{base.distribution}-{base.release}"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "sources.list").write_text(_sources(matrix, settings), encoding="utf-8")
    (state / "status").write_text("", encoding="utf-8")
    options = {
        "Dir::State::lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
        "Dir::Etc::sourcelist": state / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    argv = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
    try:
        archive.run(["apt-get", *argv, "-qq", "update"])
        names = [package.name for package in base.packages]
        listed = archive.run(["apt-cache", *argv, "policy", *names])
    except archive.SetupError as error:
        raise UnreachableError(error.what, because=error.because, hint=error.hint) from error
    candidates = dict(re.findall(r"^(\S+):\n  Installed: .*\n  Candidate: (\S+)$", listed, flags=re.MULTILINE))
    if not candidates:
        raise LockError("the archive names no candidate for any package", because=listed[:300])
    return tuple(
        package.model_copy(update={"version": candidates[package.name]})
        for package in base.packages
        if candidates.get(package.name, "(none)") != "(none)"
    )
