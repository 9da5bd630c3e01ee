"""The shapes of facts about GPUs, CUDA and drivers: what can be compiled, what loads where."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from builder.facts.base import (
    DeviceWord,
    DriverFloor,
    DriverVersion,
    Fact,
    FlashinferArch,
    MinorVersion,
    NvccArch,
    PtxIsa,
    Target,
)
from builder.fields import Capability, CudaVersion, Date, Form, NotEmpty, PackageName, Pin, Prose, Requirement


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
    data_centre: tuple[Prose, ...] = ()
    """data-centre GPUs that have it, some of them: forward compatibility is for no others"""


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


class TargetFact(Fact):
    """The GPUs that a CUDA release's ptxas, and so its nvcc, knows."""

    file = "targets"

    cuda: MinorVersion
    """the CUDA release, as in 12.8"""
    targets: Annotated[tuple[Target, ...], NotEmpty()]
    """what its ptxas takes for `--gpu-name`"""

    def knows(self, gpu: GpuFact) -> bool:
        """Whether it assembles for a GPU with the suffix that its own instructions need."""
        return f"sm_{gpu.nvcc_arch}" in self.targets


class TritonFact(Fact):
    """The assembler in triton's wheels. What it knows is what the ptxas of its CUDA release knows (`TargetFact`)."""

    file = "triton"

    versions: Pin
    """the triton releases, as a range"""
    ptxas: CudaVersion
    """the CUDA release of its newest ptxas"""


class DriverFact(Fact):
    """The driver that came with a CUDA release: it has all that the release can ask of a driver."""

    file = "drivers"

    cuda: CudaVersion
    """the CUDA release, as in 13.0.2 for 13.0 Update 2"""
    driver: DriverVersion
    """its driver for Linux: this one or a later one"""


class DriverMajorFact(Fact):
    """The oldest driver that runs what was built with any release of a CUDA major (minor-version compatibility)."""

    file = "driver-majors"

    major: int = Field(ge=11, le=20)
    """the CUDA major"""
    driver: DriverFloor
    """the driver: this one or a later one"""
    limits: Prose
    """what does not work with a driver that is older than the release's own"""


class CompatFact(Fact):
    """The package of forward-compatibility libraries of a CUDA release: `cuda-compat-13-0`."""

    file = "compat"

    cuda: MinorVersion
    """the CUDA release that a driver gives with it"""
    branches: Annotated[tuple[Annotated[int, Field(ge=400, le=999)], ...], NotEmpty()]
    """the driver branches that it is meant for"""

    @property
    def package(self) -> str:
        """Its name in NVIDIA's repositories."""
        return f"cuda-compat-{self.cuda.replace('.', '-')}"


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
