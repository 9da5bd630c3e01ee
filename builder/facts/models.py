"""The shapes of the facts: one model a file, each fact with its source.

To add a file `facts/NAME.yaml`: a subclass of `Fact` with ``file = "NAME"`` here, in `devices` or in `together`; its
entries go under ``facts:``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, model_validator

from builder.facts.base import (
    BaseName,
    Fact,
    LayerName,
    MemberGlob,
    MemberPath,
    Pattern,
    SiteId,
    Soname,
    SonamePattern,
    VersionFamily,
)
from builder.fields import (
    Codename,
    Date,
    EnvName,
    Form,
    Model,
    NotEmpty,
    OsPackage,
    PackageName,
    Pin,
    Prose,
    Sha256,
    Version,
)


class LayerFact(Fact):
    """A layer of the image and the distributions in it."""

    file = "layers"

    layer: LayerName
    """the layer's name, as in a lock"""
    title: Prose
    """what a person reads in a summary"""
    packages: Annotated[tuple[Pattern, ...], NotEmpty()]
    """the distributions in it; a name beats a pattern, a longer pattern a shorter one; * is everything else"""
    reason: Prose
    """why it is a layer of its own"""


class CubinFact(Fact):
    """flashinfer releases that have no flashinfer-cubin on the default index."""

    file = "cubins"

    versions: Pin
    """the flashinfer releases, as a range"""
    because: Prose
    """what is known"""


class DistributionFact(Fact):
    """An operating system release: what its archive gives."""

    file = "distributions"

    distribution: Prose
    """debian or ubuntu"""
    release: Codename
    """the code name"""
    python: Version
    """the Python in its archive"""
    glibc: Version | None = None
    """its C library, which decides which wheels install, where it was seen"""


class OsPackageFact(Fact):
    """An OS package that every image has, and why."""

    file = "os-packages"

    package: OsPackage
    """the package"""
    when: Literal["always", "jit"] = "always"
    """jit: only in images that can compile kernels when they run"""
    reason: Prose
    """why it is there"""


class BytecodeFact(Fact):
    """A distribution whose import packages get bytecode in the image, because a server imports them at start."""

    file = "bytecode"

    distribution: PackageName
    """the distribution"""
    packages: tuple[
        Annotated[
            str,
            Form("a folder or module in site-packages", r"[A-Za-z_]\w*(/\w+)*(\.py)?", "as in torch", max_length=100),
        ],
        ...,
    ] = Field(min_length=1)
    """its folders or modules, relative to site-packages"""


class EngineFact(Fact):
    """Docker Engines that read everything again before a build step that mounts a secret."""

    file = "engines"

    versions: Pin
    """the engine's releases, as in ==26.*"""
    what: Prose
    """what they do"""


class ToolFact(Fact):
    """The oldest release of a part of Docker that images can be built with."""

    file = "tools"

    tool: Literal["engine", "buildx"]
    """the part"""
    minimum: Version
    """its oldest release"""
    because: Prose
    """what an older one lacks, or what needs it"""


class CacheFact(Fact):
    """A cache that a server fills, and the variable that says where it lies."""

    file = "caches"

    variable: EnvName
    """the environment variable"""
    folder: Annotated[str, Form("a folder's name", r"[a-z0-9]+(-[a-z0-9]+)*", "as in tvm-ffi")]
    """its folder below the image's cache folder"""
    what: Prose
    """what is in it"""


class OsLibraryFact(Fact):
    """A library of the operating system that a wheel links to and does not bring."""

    file = "os-libraries"

    package: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    library: Annotated[str, Form("a library", r"lib[A-Za-z0-9_.+-]+\.so(\.[0-9]+)*", "as in libnuma.so.1")]
    """what it links to"""
    os_packages: Annotated[tuple[OsPackage, ...], NotEmpty()]
    """the OS packages that have it, one of which is enough"""


class UnpackedFact(Fact):
    """What the wheels of a stack became when they were installed. Sizes in bytes."""

    file = "unpacked"

    stack: Prose
    """which stack"""
    wheels: int = Field(gt=0)
    """the wheels, as they are downloaded"""
    files: int = Field(gt=0)
    """the sum of the files' sizes: what an image's size says"""
    disk: int = Field(gt=0)
    """the blocks that the files take on a disk"""


class TransferFact(Fact):
    """What a layer of an image became when it was packed for a registry, by gzip."""

    file = "transfer"

    layer: LayerName
    """the layer: a layer of wheels, os, python, compiled or proof"""
    amount: int = Field(gt=0)
    """what its size follows: its wheels' bytes; of os its packages, of compiled its targets, of python and proof 1"""
    compressed: int = Field(gt=0)
    """its bytes as it is pushed and pulled"""
    size: int | None = Field(None, gt=0)
    """its bytes in the image; of os alone: what wheels become is in unpacked.yaml"""


class KnownContent(Model):
    """One content of a file, and where it was stated."""

    date: Date
    """when the index stated it first"""
    commit: Annotated[str, Form("a commit", r"[0-9a-f]{7,40}", "7 to 40 hexadecimal digits, quoted")]
    """the commit of the index that states it"""
    sha256: Sha256
    """its hash"""


class ContentFact(Fact):
    """A file that was replaced at its URL, and every content that is known of it."""

    file = "contents"

    wheel: Annotated[
        str, Form("a wheel's file name", r"[A-Za-z0-9][A-Za-z0-9._+!-]*\.whl", "NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    ]
    """the wheel's file name, percent-decoded"""
    contents: Annotated[tuple[KnownContent, ...], NotEmpty()]
    """its contents, the oldest first"""


class PatchedFact(Fact):
    """A file of a release that a patch site is in, as it is and as the patch set leaves it."""

    file = "patched"

    package: PackageName
    """the package"""
    version: Version
    """its release"""
    path: Annotated[str, Form("a file in site-packages", r"[A-Za-z_][\w./-]*\.py", "as in sglang/srt/utils.py")]
    """the file, relative to site-packages"""
    sites: tuple[SiteId, ...]
    """the sites that are patched in it, in this order; none where all that it has are native"""
    before: Sha256
    """the file as the release has it"""
    after: Sha256 | None = None
    """the file as it is patched; the same as before unless it is given"""


class SiteFact(Fact):
    """What is to be known of patch sites that are one matter: those that are patched, and those that are only noted."""

    file = "sites"

    sites: Annotated[tuple[SiteId, ...], NotEmpty()]
    """the sites"""
    without: Prose
    """what breaks where a release needs it and does not have it"""
    upstream: Prose
    """what upstream has done, and since when, as far as it was looked at"""
    risk: Prose | None = None
    """what may go wrong with the patch; of sites that are patched"""
    alone: Prose | None = None
    """what the patch changes by itself, without a flag or variable; of sites that are patched"""
    waits_for: EnvName | None = None
    """the environment variable that has to be 1 for what the patch is there for; alone says what changes without it"""
    advice: Prose | None = None
    """what to do instead of a patch; of sites that are only noted"""

    @model_validator(mode="after")
    def _patched_or_noted(self) -> SiteFact:
        patched = (self.risk is not None, self.alone is not None)
        if self.advice is None and not all(patched):
            raise ValueError("a site that is patched has `risk` and `alone`, one that is only noted `advice`")
        if self.advice is not None and (any(patched) or self.waits_for is not None):
            raise ValueError("a site that is only noted has `advice`, and no `risk`, `alone` or `waits_for`")
        return self


class BaseMachine(Model):
    """What an operating system release brings on another machine than x86_64, where that differs."""

    versions: Mapping[VersionFamily, Version]
    """the newest symbol version of each family"""
    libraries: Annotated[tuple[Soname, ...], NotEmpty()]
    """libraries that are always there"""
    source: Prose
    """where that is from"""


class BaseFact(Fact):
    """What an operating system release brings that wheels link to."""

    file = "bases"

    distribution: Prose
    """debian, ubuntu, or rhel with what is built from it"""
    release: BaseName
    """the code name, or what people write for it"""
    title: Prose
    """what people call it"""
    versions: Mapping[VersionFamily, Version]
    """the newest symbol version of each family"""
    libraries: Annotated[tuple[Soname, ...], NotEmpty()]
    """libraries that are always there"""
    packages: Mapping[Soname, OsPackage]
    """further libraries, and the OS package of this release that has each"""
    machines: Mapping[Literal["aarch64"], BaseMachine] = Field(default_factory=dict)
    """other machines than x86_64"""

    def on(self, machine: str) -> BaseFact | None:
        """The base as it is on a machine; None where that is not known."""
        if machine == "x86_64":
            return self
        other = next((found for name, found in self.machines.items() if name == machine), None)
        if other is None:
            return None
        return self.model_copy(update={"versions": other.versions, "libraries": other.libraries})


class ProviderFact(Fact):
    """What a process has loaded once it imported a package."""

    file = "providers"

    distribution: PackageName
    """the package"""
    roots: Annotated[tuple[MemberPath, ...], NotEmpty()]
    """its libraries that lead to all that it links to, cheap ones first"""
    preloads: tuple[SonamePattern, ...] = ()
    """libraries of other distributions that its Python code opens by name"""
    opened_global: tuple[MemberPath, ...] = ()
    """its libraries that are opened RTLD_GLOBAL"""
    elsewhere: tuple[Pattern, ...] = ()
    """distributions that never define a name of this package"""
    names: Mapping[SonamePattern, Prose] = Field(default_factory=dict)
    """their libraries, and a regular expression for the names that each defines"""
    libraries: tuple[SonamePattern, ...] = ()
    """libraries that are this package's by their name: no operating system has them under it"""


class VariantFact(Fact):
    """A package with a file for each CUDA or torch, which opens the one of the torch beside it and no other."""

    file = "variants"

    distribution: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    path: Annotated[
        str,
        Form(
            "a file in site-packages with {cuda} or {torch}",
            r"[A-Za-z_][\w./+-]*\{(cuda|torch)\}[\w.*+-]*\.so",
            "as in x/liba_cuda{cuda}.so",
        ),
    ]
    """the files, relative to site-packages, with {cuda} where each has its CUDA (130 for 13.0), or {torch} (29 for 2.9)"""
    near: bool = False
    """whether another release of the same major is taken where the very one is not there: the nearest before, else after"""
    required: bool = True
    """whether the package needs the file that it would open"""
    elsewhere: tuple[MemberGlob, ...] = ()
    """files for other devices, which it does not open beside a torch for CUDA"""
    without: Prose
    """what follows where the file to open is not there"""


class PlatformFact(Fact):
    """The C libraries that a resolver can be told to resolve for."""

    file = "platforms"

    resolver: Prose
    """the resolver"""
    glibc: Annotated[tuple[int, ...], NotEmpty()]
    """minor versions of glibc 2, the oldest first: a newer C library takes the wheels of an older one"""
