"""The package index as a reconstruction asks it: over `builder.abi.wheels.Index`, which keeps what it was told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pypi_simple import DistributionPackage, NoSuchProjectError

from builder.abi.wheels import Index as Wheels
from builder.abi.wheels import Target
from builder.download import project_page
from builder.errors import UsageError
from builder.repro.model import installed_extras
from builder.settings import Settings


class Releases:
    """Releases on the default index for one target. Raises `UnreachableError` where it does not answer."""

    def __init__(self, settings: Settings, target: Target) -> None:
        self._settings = settings
        self._wheels = Wheels(settings, target)
        self._pages: dict[str, Mapping[Version, Sequence[DistributionPackage]]] = {}

    def exists(self, name: str, version: str) -> bool:
        """Whether the release has a wheel for the target."""
        try:
            self._wheels.release(name, Version(version))
        except UsageError:
            return False
        return True

    def near(self, name: str, version: str) -> str | None:
        """The newest release with a wheel that is no newer than `version`, else the oldest that is."""
        page = [found for found in self._files(name) if not found.is_prerelease]
        wanted = Version(version)
        before = sorted((v for v in page if v <= wanted), reverse=True)
        after = sorted(v for v in page if v > wanted)
        return next((str(v) for v in [*before[:5], *after[:5]] if self.exists(name, str(v))), None)

    def requires(self, name: str, version: str) -> Sequence[Requirement]:
        """What a release requires on the target, with the extras that it is installed with: facts/extras.yaml.

        Raises `UsageError` for one that is not there.
        """
        release = self._wheels.release(name, Version(version))
        asked = set(installed_extras(name, version))
        while True:
            found = self._wheels.requires(release, asked)
            # An extra may be made of others of the package.
            more = {extra for each in found if each.name == release.name for extra in each.extras} - asked
            if not more:
                return [each for each in found if each.name != release.name]
            asked |= more

    def uploaded(self, name: str, version: str) -> date | None:
        """The day on which the release's last wheel came."""
        return max(self._days(name, version), default=None)

    def appeared(self, name: str, version: str) -> date | None:
        """The day on which the release's first file came."""
        return min(self._days(name, version), default=None)

    def yanked(self, name: str, version: str) -> bool:
        """Whether all of its files were taken back."""
        files = self._files(name).get(Version(version), ())
        return bool(files) and all(package.is_yanked for package in files)

    def newest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        """The newest release with a wheel for the target that a specifier takes, of those that there were before a day."""
        return self._first_before(name, self._with_wheel(name, specifier)[::-1], before)

    def oldest_of(self, name: str, specifier: str, before: date | None = None) -> str | None:
        """The oldest one, as `newest_of` otherwise."""
        return self._first_before(name, self._with_wheel(name, specifier), before)

    def _with_wheel(self, name: str, specifier: str) -> list[str]:
        """The releases with a wheel that a specifier takes, the oldest first; none where the package is not there."""
        try:
            return [str(version) for version in self._wheels.versions(name, SpecifierSet(specifier))]
        except UsageError:
            return []

    def _first_before(self, name: str, versions: Sequence[str], before: date | None) -> str | None:
        for version in versions:
            if before is None or (day := self.appeared(name, version)) is None or day < before:
                return version
        return None

    def _days(self, name: str, version: str) -> list[date]:
        times = [package.upload_time for package in self._files(name).get(Version(version), ())]
        return [time.date() for time in times if time is not None]

    def _files(self, name: str) -> Mapping[Version, Sequence[DistributionPackage]]:
        """The files of a package by its releases; none where the index does not have it."""
        if name not in self._pages:
            found: dict[Version, list[DistributionPackage]] = {}
            try:
                page = project_page(name, self._settings)
            except NoSuchProjectError:
                page = []
            for package in page:
                try:
                    found.setdefault(Version(package.version or ""), []).append(package)
                except InvalidVersion:
                    continue
            self._pages[name] = found
        return self._pages[name]
