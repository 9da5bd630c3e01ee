"""The shapes of facts about releases in one stack: what goes together, what does not, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from builder.facts.base import Fact, SiteId
from builder.fields import Capability, EnvName, Form, NotEmpty, PackageName, Pin, Prose, Requirement, Version


class CompiledFact(Fact):
    """What a release compiles when it runs, and has no other code for."""

    file = "compiled"

    package: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    what: Prose
    """what it compiles"""


class ImportPackageFact(Fact):
    """An import package that several distributions install."""

    file = "import-packages"

    package: Annotated[str, Form("an import package", r"[A-Za-z_]\w*", "as in sgl_kernel", max_length=100)]
    """the import package"""
    distributions: Annotated[tuple[Requirement, ...], NotEmpty()]
    """who installs it, where need be with the releases that do"""
    hint: Prose
    """which one to keep"""


class TorchBuildFact(Fact):
    """Which torch the compiled code in a release fits."""

    file = "torch-builds"

    package: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    torch: Pin | None = None
    """the torch that it was built for, or was seen to work with"""
    because: Prose | None = None
    """why it is that torch"""
    broken: Mapping[Pin, Prose] = Field(default_factory=dict)
    """the torch that was seen to lack what it needs, and what that is"""
    effect: Literal["fails", "degrades"] = "fails"
    """degrades: the package notices and goes on without its compiled operators"""


class TogetherFact(Fact):
    """What is known about releases when all of them are in one stack."""

    together: Annotated[tuple[Requirement, ...], NotEmpty()]
    """the releases, as in torch==2.9.1"""
    gpus: tuple[Capability, ...] = ()
    """the compute capabilities it is about; every one unless given"""
    jit: Literal["nvcc", "none"] | None = None
    """the kind of image it is about; both unless given"""
    because: Prose
    """what happens"""
    hint: Prose
    """what to do"""


class IncompatibleFact(TogetherFact):
    """Releases that do not work together."""

    file = "incompatible"

    confidence: Literal["proven", "likely"]
    """proven: seen to fail"""
    accepted_by: EnvName | None = None
    """the environment variable by which a matrix says that it knows"""


class CostFact(TogetherFact):
    """Releases that work together and cost something."""

    file = "costs"

    severity: Literal["warning", "note"]
    """how much it matters"""


Flag = Annotated[
    str,
    Form("a flag of the server", r"--[a-z][a-z0-9-]*( [\w./-]+)?", "as in --attention-backend triton", max_length=100),
]
PatchChoice = Literal["sm120", "sm120.symm_mem", "sm120.allreduce_fusion", "eagle3", "eagle3.multimodal"]


class LaunchFact(TogetherFact):
    """What a flag does when a server of this stack is launched: a matrix has no flags, whoever launches it has."""

    file = "launch"

    flag: Flag
    """the flag, with its value where that is what matters"""
    patches: PatchChoice | None = None
    """the patch set, or its option, that a matrix has to ask for; without it every matrix"""
    variable: EnvName | None = None
    """what has to be 1 in the environment for the flag to do what it is about: an image that has it says so itself"""


class ShadowFact(Fact):
    """A distribution whose compiled code is loaded instead of what a patch changes."""

    file = "shadows"

    package: PackageName
    """the distribution"""
    patched: Requirement
    """the releases whose patch it hides"""
    set: Literal["sm120", "eagle3"]
    """the patch set"""
    sites: Annotated[tuple[SiteId, ...], NotEmpty()]
    """its sites that have no effect then"""
    confidence: Literal["proven", "likely"]
    """proven: read in these releases; likely: they need not have the site"""
    because: Prose
    """what happens"""


class RenamedFact(Fact):
    """Distributions that go by another name now: the old one stays where it was, or is something else."""

    file = "renamed"

    names: Annotated[Mapping[PackageName, PackageName], Field(min_length=1)]
    """the old names, and what each is called now"""
    versions: Pin | None = None
    """the releases under the old name that are meant; every one unless it is given"""
    beside: Requirement | None = None
    """what has to be in the lock for the new name to be the right one"""
    severity: Literal["error", "warning", "note"]
    """how much it matters"""
    because: Prose
    """what the old name gives"""


class CoupledFact(Fact):
    """Distributions of one release train: each release of the first goes with certain ones of the others."""

    file = "coupled"

    packages: Annotated[tuple[PackageName, ...], Field(min_length=2)]
    """the distributions, the one that leads first"""
    how: Literal["equal", "series"]
    """equal: the public versions are equal; series: the first two numbers are as `series` has them"""
    series: Mapping[Version, tuple[Version, ...]] = Field(default_factory=dict)
    """a series of the first (2.9), and those of the others in their order (0.24, 2.9)"""
    because: Prose
    """what happens where they differ"""

    @model_validator(mode="after")
    def _a_column_each(self) -> CoupledFact:
        if any(len(row) != len(self.packages) - 1 for row in self.series.values()):
            raise ValueError("each row of `series` has a number for every package but the first")
        if (self.how == "series") != bool(self.series):
            raise ValueError("`series` belongs to `how: series`")
        return self


class RuntimeCheckFact(Fact):
    """What a release asserts of another distribution when it starts."""

    file = "runtime-checks"

    package: PackageName
    """who asserts it"""
    versions: Pin
    """its releases, as a range"""
    requires: PackageName
    """what has to be there"""
    minimum: Version
    """the oldest release of it that passes"""
    when: Literal["always", "flashinfer"]
    """flashinfer: only where a server's attention backend is flashinfer"""
    skip: EnvName | None = None
    """the environment variable by which the check is skipped"""


class ExtraFact(Fact):
    """Extras without which a release is not what its users have."""

    file = "extras"

    package: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    extras: Annotated[tuple[PackageName, ...], NotEmpty()]
    """the extras that it is installed with"""
    because: Prose
    """what they have"""


class StringAbiFact(Fact):
    """Between which releases a package's compiled code went from the old std::string ABI to the new one."""

    file = "string-abi"

    package: PackageName
    """the package"""
    old: Version
    """the last release with the old one"""
    new: Version
    """the first release with the new one"""


class VendorBuildFact(Fact):
    """Versions that say that a build is a vendor's, a nightly or from source."""

    file = "vendor-builds"

    package: PackageName
    """the package"""
    pattern: Annotated[str, Form("a regular expression", r"[ -~]{1,200}", "as in \\+git[0-9a-f]+")]
    """what the whole version matches, as PEP 440 writes it"""
    what: Prose
    """what such a build is"""
    new_strings: bool
    """whether they have the new std::string ABI, whichever the public releases of their time had"""
    because: Prose
    """why"""
    hint: Prose
    """what to do"""
