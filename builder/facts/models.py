"""The shapes of the facts: one model a file, each fact with its source.

To add a file `facts/NAME.yaml`: a subclass of `Fact` with ``file = "NAME"`` here; its entries go under ``facts:``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from builder.fields import (
    Capability,
    Codename,
    CudaVersion,
    Date,
    EnvName,
    Form,
    Model,
    NotEmpty,
    OsPackage,
    PackageName,
    Pin,
    Prose,
    Requirement,
    Sha256,
    Version,
)

Pattern = Annotated[
    str, Form("a package name or pattern", r"[a-z0-9][a-z0-9-]*\*?|\*", "as in nvidia-* or torch", max_length=100)
]
NvccArch = Annotated[str, Form("an nvcc architecture", r"[1-9][0-9]{1,2}[af]?", "as in 120a")]
FlashinferArch = Annotated[str, Form("a flashinfer architecture", r"[1-9][0-9]?\.[0-9][af]?", "as in 12.0a")]
MinorVersion = Annotated[str, Form("a CUDA version", r"1[0-9](\.[0-9]{1,2})?", "as in 13.0, or 12 for every 12.x")]
SiteId = Annotated[str, Form("a patch site", r"[A-Z][0-9]{1,2}[a-z]?", "as in S1 or S4b")]
LayerName = Annotated[str, Form("a layer's name", r"[a-z]{2,20}", "a-z")]


class Fact(Model):
    """Base of every fact. ``file`` is the name of the YAML file, without its ending."""

    file: ClassVar[str]
    models: ClassVar[dict[str, type[Fact]]] = {}

    source: Prose
    """where the knowledge comes from: a URL, a section of the project's notes, a measurement with its date"""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: object) -> None:
        """Register the model under its file's name."""
        super().__pydantic_init_subclass__(**kwargs)
        if "file" in cls.__dict__:
            Fact.models[cls.file] = cls


class GpuFact(Fact):
    """A compute capability and how the tools call it."""

    file = "gpus"

    capability: Capability
    """the compute capability, as in 12.0"""
    names: Annotated[tuple[Prose, ...], NotEmpty()]
    """devices that have it, some of them"""
    nvcc_arch: NvccArch
    """what nvcc calls it, with the suffix that its own instructions need: sm_NVCC_ARCH"""
    flashinfer_arch: FlashinferArch
    """what FLASHINFER_CUDA_ARCH_LIST calls it"""
    minimum_cuda: CudaVersion
    """the first CUDA release whose nvcc compiles for nvcc_arch"""


class CudaFact(Fact):
    """What the wheels of a CUDA release can do."""

    file = "cuda"

    version: MinorVersion
    """the release: 13.0, or 12 for every 12.x"""
    jit: bool
    """whether the wheels hold a compiler"""
    compiler: tuple[PackageName, ...] = ()
    """the wheels the compiler consists of, each of which has to be named"""
    lockstep: tuple[PackageName, ...] = ()
    """those of them whose versions have to be equal"""
    incoherent: Prose | None = None
    """what parts of two releases were seen to do"""
    because: Prose
    """what it means for an image"""

    def covers(self, minor: str) -> bool:
        """Whether this fact is about the release ``minor`` (`13.0`)."""
        return self.version in (minor, minor.split(".")[0])


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


class TorchFact(Fact):
    """The CUDA release of a torch wheel on the default index."""

    file = "torch"

    versions: Pin
    """the torch releases, as a range"""
    cuda: CudaVersion
    """the CUDA release whose libraries it requires"""


class KernelFact(Fact):
    """The kernel package that sglang releases require, or a CUDA major that a kernel wheel needs."""

    file = "kernels"

    package: PackageName
    """sgl-kernel or sglang-kernel"""
    versions: Pin
    """its releases, as a range"""
    sglang: Pin | None = None
    """the sglang releases that require the package"""
    cuda_major: int = Field(ge=11, le=20)
    """the CUDA major its wheels on the default index are linked to"""


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


class CacheFact(Fact):
    """A cache that a server fills, and the variable that says where it lies."""

    file = "caches"

    variable: EnvName
    """the environment variable"""
    folder: Annotated[str, Form("a folder's name", r"[a-z0-9]+(-[a-z0-9]+)*", "as in tvm-ffi")]
    """its folder below the image's cache folder"""
    what: Prose
    """what is in it"""


class CompiledFact(Fact):
    """What a release compiles when it runs, and has no other code for."""

    file = "compiled"

    package: PackageName
    """the package"""
    versions: Pin
    """its releases, as a range"""
    what: Prose
    """what it compiles"""


class CudaMajorFact(Fact):
    """Which CUDA major a distribution's files belong to: by the end of its name, or by name and version."""

    file = "cuda-majors"

    suffixes: tuple[Annotated[str, Form("a suffix", r"-[a-z0-9]{1,20}", "as in -cu13")], ...] = ()
    """ends of names"""
    packages: tuple[PackageName, ...] = ()
    """names"""
    versions: Pin | None = None
    """the releases, as a range; every one unless it is given"""
    major: int | Literal["version", "both"]
    """the major; version: the first number of the version; both: none, it is there for several on purpose"""


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


class TritonFact(Fact):
    """The assembler in triton's wheels."""

    file = "triton"

    versions: Pin
    """the triton releases, as a range"""
    ptxas: CudaVersion
    """the CUDA release of its newest ptxas"""
    lacks: Annotated[tuple[Capability, ...], NotEmpty()]
    """the compute capabilities it cannot assemble for"""


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


Soname = Annotated[str, Form("a library", r"[A-Za-z0-9_.+-]+\.so(\.[0-9]+)*", "as in libnuma.so.1", max_length=100)]
SonamePattern = Annotated[str, Form("a library or pattern", r"[A-Za-z0-9_.+*-]+\.so[.0-9*]*", "as in libnvrtc.so.*")]
MemberPath = Annotated[str, Form("a file in site-packages", r"[A-Za-z_][\w./+-]*\.so", "as in torch/lib/libc10.so")]
VersionFamily = Annotated[str, Form("a family of symbol versions", r"[A-Z]{2,10}", "as in GLIBC")]


class BaseFact(Fact):
    """What an operating system release brings that wheels link to."""

    file = "bases"

    distribution: Prose
    """debian or ubuntu"""
    release: Codename
    """the code name"""
    title: Prose
    """what people call it"""
    versions: Mapping[VersionFamily, Version]
    """the newest symbol version of each family"""
    libraries: Annotated[tuple[Soname, ...], NotEmpty()]
    """libraries that are always there"""
    packages: Mapping[Soname, OsPackage]
    """further libraries, and the OS package of this release that has each"""


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


DeviceWord = Annotated[
    str, Form("a device", r"[1-9][0-9]?(\.[0-9])?", "a compute capability as in 9.0, or 9 for every 9.x", max_length=5)
]
PtxIsa = Annotated[str, Form("a version of PTX", r"[1-9]\.[0-9]", "as in 9.0")]
DriverVersion = Annotated[
    str, Form("a driver's version", r"[1-9][0-9]{2}(\.[0-9]{1,3}){1,2}", "as in 580.159.04, quoted")
]


class LoaderFact(Fact):
    """What a package does with one of its compiled files, on which devices: what its own code and sglang's say."""

    file = "loaders"

    releases: Annotated[tuple[Requirement, ...], NotEmpty()]
    """the releases that have it, by distribution"""
    path: Annotated[
        str,
        Form("a file in a wheel", r"[A-Za-z_][\w./-]*\.so[\w.]*", "as in sgl_kernel/flash_ops.abi3.so", max_length=200),
    ]
    """the file, as the wheel has it"""
    devices: tuple[DeviceWord, ...] | None = None
    """where it is loaded: none of them means nowhere; without it everywhere"""
    except_devices: tuple[DeviceWord, ...] = ()
    """where it is not loaded, in place of devices"""
    only_for: Prose | None = None
    """what asks for it, where a server does without as a rule"""
    otherwise: Prose
    """what it means where it is not loaded, or has no code for the device"""

    @model_validator(mode="after")
    def _one_of_them(self) -> LoaderFact:
        if self.devices is not None and self.except_devices:
            raise ValueError("`devices` and `except_devices` are two ways of saying one thing")
        return self


class PtxFact(Fact):
    """The newest PTX that a driver compiles."""

    file = "ptx"

    isa: PtxIsa
    """the version of PTX"""
    cuda: CudaVersion
    """the CUDA release that came with it, which such a driver names (`CUDA Version` of nvidia-smi)"""
    driver: int = Field(ge=400, le=999)
    """the driver branch: the first number of its version"""


class ArchRunFact(Fact):
    """A compute capability for which the rules on GPU images were run on a device."""

    file = "arch-runs"

    capability: Capability
    """the compute capability"""
    device: Prose
    """the device"""
    driver: DriverVersion
    """its driver"""
    cases: int = Field(gt=0)
    """how many images were loaded or refused as the rules say; none did otherwise"""
    date: Date
    """when"""
