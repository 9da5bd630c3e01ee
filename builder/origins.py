"""What a matrix says of packages besides their versions: indexes and files of their own, broken pins, stand-ins."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import unquote

from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pydantic import AfterValidator, Field, model_validator

from builder.fields import (
    Complaint,
    EntryName,
    Model,
    NotEmpty,
    PackageName,
    Pin,
    Prose,
    Requirement,
    Sha256,
    Url,
    Version,
    complain,
    no_duplicates,
)
from builder.yamlsource import shown

PackageNames = Annotated[tuple[PackageName, ...], AfterValidator(no_duplicates)]


class Index(Model):
    """A package index besides the default one, for the packages named and for nothing else."""

    url: Url
    """where it is, as in https://wheels.example/cu130"""
    packages: Annotated[PackageNames, NotEmpty()]
    """the packages that are taken from it"""


class DirectFile(Model):
    """A wheel that is on no index: where it lives, and what it must be."""

    name: PackageName
    """the package"""
    version: Version | None = None
    """its version; what the file's name says unless it is given"""
    url: Url
    """where it lives; the last part is the wheel's file name"""
    sha256: Sha256
    """what it must be"""
    size: int | None = Field(None, gt=0)
    """its size in bytes, where the source states one"""
    attested_by: tuple[Prose, ...] = ()
    """who else says so: public locks, an index at a commit"""
    requires: tuple[Requirement, ...] = ()
    """its requirements, so that it need not be downloaded to be resolved"""
    metadata_version: Version | None = None
    """the version its METADATA states, where that lacks the local part"""

    @property
    def filename(self) -> str:
        """The wheel's file name, percent-decoded."""
        return unquote(self.url.rsplit("/", 1)[-1])

    @property
    def pinned_version(self) -> str:
        """``version``, or the one in the file's name."""
        return self.version or str(parse_wheel_filename(self.filename)[1])

    @model_validator(mode="after")
    def _names_agree(self) -> DirectFile:
        try:
            name, version = parse_wheel_filename(self.filename)[:2]
        except InvalidWheelFilename:
            text = f"{shown(self.filename)} is not a wheel's file name"
            raise complain(Complaint(text, "NAME-VERSION-PYTHON-ABI-PLATFORM.whl", at=("url",))) from None
        if name != self.name:
            raise complain(Complaint(f"the file is {shown(name)}'s, the entry says {shown(self.name)}", at=("url",)))
        if self.version is not None and str(version) != self.version:
            raise complain(
                Complaint(f"the file is version {shown(version)}, the entry says {shown(self.version)}", at=("url",))
            )
        return self


class Override(Model):
    """An upstream pin that this stack breaks on purpose."""

    package: PackageName
    """the package"""
    pin: Pin
    """what upstream requires, as in ==0.6.3"""
    ours: Version
    """what the image has instead"""
    because: Prose
    """why"""
    source: Prose
    """where the knowledge comes from"""
    runtime_check: Pin | None = None
    """what holds when it runs, where something checks; ours has to satisfy it"""

    @model_validator(mode="after")
    def _needed_and_enough(self) -> Override:
        if SpecifierSet(self.pin).contains(self.ours, prereleases=True):
            text = f"{shown(self.ours)} satisfies {shown(self.pin)}: nothing to override"
            raise complain(Complaint(text, hint="remove the override", at=("ours",)))
        if self.runtime_check and not SpecifierSet(self.runtime_check).contains(self.ours, prereleases=True):
            raise complain(
                Complaint(f"{shown(self.ours)} does not satisfy the run-time check", self.runtime_check, at=("ours",))
            )
        return self


LedgerCheck = Literal["cuda-major", "needed", "symbols", "load", "triton", "imports", "imports-faked", "gated-imports"]
"""The checks of the smoke test that know exceptions."""


class Difference(Model):
    """What fails the smoke test because a stand-in is not what it is called; as an entry of builder/facts/exceptions.yaml."""

    id: EntryName
    """its name in reports"""
    distribution: PackageName
    """the package"""
    file: Prose
    """the file, relative to site-packages; a pattern"""
    checks: Annotated[tuple[LedgerCheck, ...], NotEmpty()]
    """the checks that fail"""
    words: Prose
    """part of what the check says"""
    consequence: Prose
    """what it means for the image"""


class StandIn(Model):
    """For tests: wheels that are not what they are called. The image says so, its name ends in -standin, nothing pushes it."""

    packages: Annotated[PackageNames, NotEmpty()]
    """the packages that are not what they are called"""
    because: Prose
    """what they are, and why"""
    differences: tuple[Difference, ...] = ()
    """what fails the smoke test because of it; anything else still fails the build"""
