"""What every model of facts has in common: the base class, and the forms that several models use."""

from __future__ import annotations

from typing import Annotated, ClassVar

from builder.fields import Form, Model, Prose

Pattern = Annotated[
    str, Form("a package name or pattern", r"[a-z0-9][a-z0-9-]*\*?|\*", "as in nvidia-* or torch", max_length=100)
]
NvccArch = Annotated[str, Form("an nvcc architecture", r"[1-9][0-9]{1,2}[af]?", "as in 120a")]
FlashinferArch = Annotated[str, Form("a flashinfer architecture", r"[1-9][0-9]?\.[0-9][af]?", "as in 12.0a")]
MinorVersion = Annotated[str, Form("a CUDA version", r"1[0-9](\.[0-9]{1,2})?", "as in 13.0, or 12 for every 12.x")]
SiteId = Annotated[str, Form("a patch site", r"[A-Z][0-9]{1,2}[a-z]?", "as in S1 or S4b")]
LayerName = Annotated[str, Form("a layer's name", r"[a-z]{2,20}", "a-z")]
DeviceWord = Annotated[
    str, Form("a device", r"[1-9][0-9]?(\.[0-9])?", "a compute capability as in 9.0, or 9 for every 9.x", max_length=5)
]
Target = Annotated[str, Form("an nvcc target", r"sm_[1-9][0-9]{1,2}[af]?", "as in sm_120a")]
PtxIsa = Annotated[str, Form("a version of PTX", r"[1-9]\.[0-9]", "as in 9.0")]
DriverVersion = Annotated[
    str, Form("a driver's version", r"[1-9][0-9]{2}(\.[0-9]{1,3}){1,2}", "as in 580.159.04, quoted")
]
DriverFloor = Annotated[
    str, Form("a driver's version or branch", r"[1-9][0-9]{2}(\.[0-9]{1,3}){0,2}", 'as in 525.60.13 or "580", quoted')
]
BaseName = Annotated[str, Form("a release's name", r"[a-z][a-z0-9]{2,19}", "as in bookworm or el9")]
Soname = Annotated[str, Form("a library", r"[A-Za-z0-9_.+-]+\.so(\.[0-9]+)*", "as in libnuma.so.1", max_length=100)]
SonamePattern = Annotated[str, Form("a library or pattern", r"[A-Za-z0-9_.+*-]+\.so[.0-9*]*", "as in libnvrtc.so.*")]
MemberPath = Annotated[str, Form("a file in site-packages", r"[A-Za-z_][\w./+-]*\.so", "as in torch/lib/libc10.so")]
MemberGlob = Annotated[
    str, Form("files in site-packages", r"[A-Za-z_][\w./+*-]*\.so", "as in x/liba_*.so", max_length=200)
]
VersionFamily = Annotated[str, Form("a family of symbol versions", r"[A-Z]{2,10}", "as in GLIBC")]


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
