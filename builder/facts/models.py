"""The shapes of the facts: one model a file, each fact with its source.

To add a file `facts/NAME.yaml`: a subclass of `Fact` with ``file = "NAME"`` here; its entries go under ``facts:``.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from builder.fields import Capability, Codename, CudaVersion, Form, Model, NotEmpty, PackageName, Pin, Prose, Version

Pattern = Annotated[
    str, Form("a package name or pattern", r"[a-z0-9][a-z0-9-]*\*?|\*", "as in nvidia-* or torch", max_length=100)
]
NvccArch = Annotated[str, Form("an nvcc architecture", r"[1-9][0-9]{1,2}[af]?", "as in 120a")]
FlashinferArch = Annotated[str, Form("a flashinfer architecture", r"[1-9][0-9]?\.[0-9][af]?", "as in 12.0a")]
MinorVersion = Annotated[str, Form("a CUDA version", r"1[0-9](\.[0-9]{1,2})?", "as in 13.0, or 12 for every 12.x")]
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
