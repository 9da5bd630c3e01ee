"""Which wheels a question of `builder abi` is about: requirements, the index, and what the wheels themselves require.

A pin is taken as it is, also where no resolver would put it beside the others: that is what is asked. Where something is
left open, uv resolves all of it at once; what the wheels require further is looked up as far as a verdict needs it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from functools import cached_property, partial
from pathlib import Path

import requests
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage, NoSuchProjectError

from builder.cache import file_sha256, find_wheel, not_writable
from builder.download import project_page, without_credentials
from builder.errors import IntegrityError, LockError, UnreachableError, UsageError
from builder.facts import BaseFact, resolver_glibc
from builder.files import canonical_json, sha256_hex, write_atomic
from builder.index import NoRangesError, RemoteWheel, fetch_metadata, session
from builder.members import Members, Opened
from builder.nearest import no_release
from builder.remote import RangedFile
from builder.settings import Settings, redact
from builder.tags import markers, wheel_tags
from builder.zipdir import sound

END = 64 * 1024
"""Bytes of a wheel's end that are asked for first; the directory of torch's has 1.1 MB, that of most others a tenth of this."""


@dataclass(frozen=True)
class Target:
    """What the wheels are for."""

    python: str
    base: BaseFact
    machine: str = "x86_64"

    @cached_property
    def tags(self) -> Mapping[Tag, int]:
        """The wheel tags that install, with their ranks: the lower the better."""
        return {tag: rank for rank, tag in enumerate(wheel_tags(self.python, 2, self.glibc, self.machine))}

    @property
    def glibc(self) -> int:
        """The minor version of the base's C library."""
        return int(self.base.versions["GLIBC"].split(".")[1])

    @property
    def environment(self) -> dict[str, str]:
        """The values of PEP 508's markers there."""
        return markers(self.python, self.machine)

    def __str__(self) -> str:
        """`Python 3.11 on Debian 12`."""
        there = "" if self.machine == "x86_64" else f", {self.machine}"
        return f"Python {self.python} on {self.base.title}{there}"


shallow = partial(RangedFile, tail=END)
"""A wheel of which the end is read no further than a small directory needs: CUDA's wheels have a hundred members."""


@dataclass(frozen=True)
class Release:
    """A wheel that was chosen. ``path`` is where it lies, if it is on this machine."""

    name: str
    version: str
    file: str
    sha256: str
    size: int | None
    url: str = ""
    path: Path | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def parse(lines: Sequence[str]) -> list[Requirement]:
    """Requirements of a command line, names normalised, each package once. Raises `UsageError`."""
    found: dict[str, Requirement] = {}
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            first = str(error).partition("\n")[0]
            raise UsageError(
                f"`{line[:200]}` is not a requirement", because=first, hint="as in `torch==2.9.1`"
            ) from None
        requirement.name = canonicalize_name(requirement.name)
        if requirement.url or requirement.marker:
            raise UsageError(f"`{line[:200]}` is more than a name and versions", hint="as in `torch==2.9.1`")
        if requirement.name in found:
            raise UsageError(f"`{requirement.name}` is named twice")
        found[requirement.name] = requirement
    return list(found.values())


def pin(requirement: Requirement) -> Version | None:
    """The one version of a requirement that is exact; None for any other."""
    (only, *more) = [*requirement.specifier] or [None]
    if only is None or more or only.operator not in ("==", "===") or only.version.endswith(".*"):
        return None
    try:
        return Version(only.version)
    except InvalidVersion:
        raise UsageError(f"`{only.version[:100]}` is not a version", hint="as in `0.5.9` or `0.5.10.post1`") from None


class Index:
    """Releases, their METADATA and their native members: from folders of wheels, the cache, and the default index.

    What is asked for by an exact version is kept, for a release's files do not change: a second time asks nothing.
    """

    def __init__(self, settings: Settings, target: Target) -> None:
        self._settings, self.target = settings, target
        self._pages: dict[str, list[DistributionPackage]] = {}
        self._opened: dict[str, RangedFile] = {}
        self._sizes: dict[str, int] = {}
        self.open_ended = False
        """Whether something was looked up by a range: another release may answer to it tomorrow."""

    @property
    def bytes_read(self) -> int:
        """Bytes of wheels that came over the network; an index's pages are not in it."""
        return sum(file.bytes_read for file in self._opened.values())

    @property
    def bytes_total(self) -> int:
        """Bytes that the wheels have of which something was asked."""
        return sum(self._sizes.values())

    def count(self, file: str, size: int) -> None:
        """Count a wheel of which a table told."""
        self._sizes[file] = size

    def release(self, name: str, version: Version) -> Release:
        """The wheel of a release for the target. Raises `UsageError` for one that does not exist or has none."""
        if found := self._in_folders(name, version) or self._known(name, version):
            return found
        here = [package for package in self._page(name) if _version(package) == version]
        if not here:
            known = (other for package in self._page(name) if (other := _version(package)))
            raise no_release(name, version, known)
        found = self._best(name, here)
        if found is None:
            files = ", ".join(sorted(package.filename for package in here)[:8])
            instead = self._instead(name, version)
            if not any(package.package_type == "wheel" for package in here):
                raise UsageError(
                    f"{name} {version} has no wheel at all",
                    because=f"it is built from source (the index has {files}), so there are no native files to look at",
                    hint=instead.removesuffix("; ") or "a wheel of your own is named with `--wheels DIR`",
                )
            raise UsageError(
                f"{name} {version} has no wheel for {self.target}",
                because=f"the index has {files}",
                hint=f"{instead}another Python is named with `--python`, another base with `--base`",
            )
        said = {
            "index": self._endpoint,
            "file": found.file,
            "sha256": found.sha256,
            "size": found.size,
            "url": found.url,
        }
        path = self._answer(name, version)
        try:
            write_atomic(path, canonical_json(said), durable=False)
        except OSError as error:
            raise not_writable(path, error) from error
        return found

    def has(self, name: str, version: Version) -> bool:
        """Whether there is such a release at all, in a folder of wheels, the cache or on the index."""
        if self._in_folders(name, version) or self._known(name, version):
            return True
        return any(_version(package) == version for package in self._page(name))

    def _instead(self, name: str, version: Version) -> str:
        """The nearest release that has a wheel for the target: a later one, if there is one."""
        others = self.versions(name, SpecifierSet())
        near = next((other for other in others if other > version), others[-1] if others else None)
        return f"the nearest release with one is `{near}`; " if near is not None else ""

    def files(self, name: str, version: Version) -> dict[str, str]:
        """The Linux x86_64 wheels of a release, for any Python: file name → sha256."""
        return {
            package.filename: package.digests["sha256"]
            for package in self._page(name)
            if _version(package) == version
            and package.filename.endswith("x86_64.whl")
            and "win" not in package.filename
        }

    def versions(self, name: str, specifier: SpecifierSet) -> list[Version]:
        """The releases that have a wheel for the target, the oldest first; no pre-releases, unless the specifier has one."""
        self.open_ended = True
        found: dict[Version, list[DistributionPackage]] = {}
        for package in self._page(name):
            version = _version(package)
            if version is not None and specifier.contains(version, prereleases=specifier.prereleases or False):
                found.setdefault(version, []).append(package)
        return sorted(version for version, packages in found.items() if self._best(name, packages) is not None)

    def newest(self, name: str, specifier: SpecifierSet) -> Release | None:
        """The newest release that a requirement takes; None where there is none."""
        found = self.versions(name, specifier)
        return self.release(name, found[-1]) if found else None

    def requires(self, release: Release, extras: Iterable[str] = ()) -> list[Requirement]:
        """What its METADATA requires on the target, with these extras; names normalised."""
        if release.path is not None:
            text = _metadata(release.path, release.file)
        else:
            self._metadata_of_opened(release)
            wheel = RemoteWheel(release.name, release.version, release.file, release.url, release.sha256)
            (text,) = fetch_metadata([wheel], self._settings, self._client)
        found = []
        for line in HeaderParser().parsestr(text).get_all("Requires-Dist") or []:
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue  # an installer skips or repairs it, nobody relies on it
            marker = requirement.marker
            named = ("", *extras)
            if marker is None or any(marker.evaluate({**self.target.environment, "extra": extra}) for extra in named):
                requirement.name = canonicalize_name(requirement.name)
                found.append(requirement)
        return found

    def _metadata_of_opened(self, release: Release) -> None:
        """Take METADATA from the end of a wheel that is open: it is here, and few wheels have it beside them."""
        file = self._opened.get(release.file)
        place = self._settings.cache / "metadata" / release.sha256
        if file is not None and not place.exists():
            write_atomic(place, _metadata(file, release.file))

    def members(self, release: Release) -> Members:
        """The native members of a wheel, read by byte ranges where it is not here."""
        self._sizes[release.file] = release.size or 0
        return Members.lazy(release.file, release.sha256, lambda: self._open(release), self._settings.cache)

    def _open(self, release: Release) -> Opened:
        path = release.path or find_wheel(self._settings, release.sha256, release.file)
        if path is None:
            folder = self._settings.cache / "ranges" / release.sha256[:2] / release.sha256
            try:
                ranged = shallow(folder, release.file, release.sha256, self._client, lambda: release.url, release.size)
            except NoRangesError:
                path = self._whole(release)
            else:
                self._sizes[release.file] = ranged.size
                self._opened[release.file] = ranged
                return ranged, ranged.fetch
        return path.open("rb"), lambda _: None

    @cached_property
    def _client(self) -> requests.Session:
        return session(self._settings)

    def _whole(self, release: Release) -> Path:
        # They take their time to import, and hardly anybody needs them.
        from builder.fetch import fetch_artefact
        from builder.lock import Artefact

        wanted = Artefact(
            name=release.name,
            version=release.version,
            metadata_version=release.version,
            file=release.file,
            sha256=release.sha256,
            size=release.size,
            index="default",
            url=None,
            requires=(),
            layer="rest",
        )
        return fetch_artefact(wanted, self._settings)

    # Which file.

    def _in_folders(self, name: str, version: Version) -> Release | None:
        ranked = []
        for folder in self._settings.wheels:
            for path in sorted(folder.glob("*.whl")):
                if _named(path.name) == (name, version) and (rank := self._rank(path.name)) is not None:
                    ranked.append((rank, path))
        if not ranked:
            return None
        path = max(ranked, key=lambda item: item[0])[1]
        return Release(name, str(version), path.name, file_sha256(path), path.stat().st_size, path=path)

    def _best(self, name: str, packages: Iterable[DistributionPackage]) -> Release | None:
        ranked = [
            (rank, package)
            for package in packages
            if package.package_type == "wheel"
            and (rank := self._rank(package.filename)) is not None
            and package.digests.get("sha256")
        ]
        if not ranked:
            return None
        package = max(ranked, key=lambda item: item[0])[1]
        size, sha256 = package.size, package.digests["sha256"]
        return Release(
            name, str(_version(package)), package.filename, sha256, size, url=without_credentials(package.url)
        )

    def _rank(self, file: str) -> tuple[int, tuple[int, str]] | None:
        """How well a wheel fits; of two that fit alike the one with the higher build number, as installers do."""
        try:
            *_, build, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            return None
        rank = min((self.target.tags[tag] for tag in tags if tag in self.target.tags), default=None)
        return None if rank is None else (-rank, build or (-1, ""))

    @cached_property
    def _endpoint(self) -> str:
        return sha256_hex((self._settings.index or "").encode())

    def _answer(self, name: str, version: Version) -> Path:
        asked = [name, str(version), self.target.python, self.target.glibc, self.target.machine]
        key = sha256_hex(canonical_json(asked))
        return self._settings.cache / "releases" / f"{name}-{key[:24]}.json"

    def _known(self, name: str, version: Version) -> Release | None:
        try:
            said = json.loads(self._answer(name, version).read_bytes())
            if said["index"] == self._endpoint:
                return Release(name, str(version), said["file"], said["sha256"], said["size"], url=said["url"])
        except (OSError, ValueError, KeyError, TypeError):
            pass
        return None

    def _page(self, name: str) -> list[DistributionPackage]:
        if name not in self._pages:
            try:
                self._pages[name] = project_page(name, self._settings, self._client)
            except NoSuchProjectError:
                raise UsageError(f"the index has no package `{name}`") from None
        return self._pages[name]


def _version(package: DistributionPackage) -> Version | None:
    try:
        return Version(package.version) if package.version else None
    except InvalidVersion:
        return None


def _named(file: str) -> tuple[str, Version] | None:
    try:
        return parse_wheel_filename(file)[:2]
    except InvalidWheelFilename:
        return None


def _metadata(file: Path | RangedFile, name: str) -> str:
    try:
        with sound(zipfile.ZipFile(file)) as archive:
            (member,) = [item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item)]
            return archive.read(member).decode("utf-8", errors="replace")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError) as error:
        raise IntegrityError(f"`{name}` is a damaged wheel", because=str(error)) from error


def resolve(asked: Sequence[Requirement], target: Target, settings: Settings) -> dict[str, Version]:
    """What uv makes of requirements that leave something open: name → version of all that they need.

    Raises `LockError` where there is no resolution, `UnreachableError` for an index that does not answer.
    """
    from uv import find_uv_bin

    minor = resolver_glibc(target.glibc)
    with tempfile.TemporaryDirectory(prefix="builder-abi-") as temporary:
        lines = Path(temporary) / "requirements.in"
        lines.write_text("".join(f"{requirement}\n" for requirement in asked), encoding="utf-8")
        argv = [find_uv_bin(), "pip", "compile", str(lines), "--quiet", "--no-header", "--no-annotate", "--no-build"]
        argv += ["--python", sys.executable, "--python-version", target.python]
        argv += ["--python-platform", f"{target.machine}-manylinux_2_{minor}"]
        done = subprocess.run(argv, env=settings.child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        words = redact(done.stderr.replace(f"{temporary}/", "")).strip()
        because = "\n".join(words.splitlines()[-25:])
        if "No solution found" not in words:
            raise UnreachableError("the package index does not answer", because=because)
        raise LockError(
            "these requirements have no resolution",
            because=because,
            hint="exact pins (`==`) are taken as they are, also where they contradict each other",
        )
    found = {}
    for line in done.stdout.splitlines():
        name, equals, version = line.split(";")[0].strip().partition("==")
        if equals:
            found[str(canonicalize_name(name))] = Version(version)
    return found
