"""Rules: facts × (matrix, lock) → findings.

A rule is a small function under a stable name. It says nothing where no fact covers a case, and every finding carries
the source of the fact it rests on. Here are those over the matrix alone; `lockrules`, `knownrules`, `namerules` and
`startrules` look at the lock.
Whoever wants all of them imports `RULES` or `evaluate_rules` from here.
"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from builder import knownrules, lockrules, namerules, startrules
from builder.facts import (
    CompiledFact,
    CubinFact,
    CudaFact,
    DistributionFact,
    GpuFact,
    KernelFact,
    TorchFact,
    load_facts,
)
from builder.findings import Finding, Severity
from builder.matrix import ArchiveBase
from builder.rulebook import RULES, Context, Evaluate, Rule, evaluate_rules, local_cuda, rule

__all__ = [
    "RULES",
    "Context",
    "Evaluate",
    "Rule",
    "evaluate_rules",
    "knownrules",
    "local_cuda",
    "lockrules",
    "namerules",
    "rule",
    "startrules",
]

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def _fits(version: str, versions: str) -> bool:
    return SpecifierSet(versions).contains(version, prereleases=True)


def _minor(version: str) -> tuple[int, ...]:
    return Version(version).release[:2]


@rule("as-of-in-future")
def _as_of(context: Context) -> Iterator[Finding]:
    """The date a matrix resolves as of has to be past, or the same matrix resolves differently tomorrow."""
    as_of = context.loaded.matrix.as_of
    if as_of > context.today:
        yield Finding(
            rule="as-of-in-future",
            severity=ERROR,
            subject="as_of",
            message=f"`as_of` is {as_of}, and today is {context.today}",
            because="files uploaded until then would still change what the matrix resolves to",
            hint=f"write `as_of: {context.today}` or an earlier date",
            where=context.loaded.where("as_of"),
            evidence={"as_of": str(as_of), "today": str(context.today)},
        )


@rule("budget")
def _budget(context: Context) -> Iterator[Finding]:
    """A matrix without a size budget cannot notice that its image grows."""
    if context.loaded.matrix.budget is None:
        yield Finding(
            rule="budget",
            severity=NOTE,
            subject="budget",
            message="no size budget, so an image that grows is not noticed",
            hint="add `budget: {image: 13 GB}`, with some room above what the image has now",
            where=context.loaded.where(),
        )


@rule("stand-in")
def _stand_in(context: Context) -> Iterator[Finding]:
    """An image that is not what its versions say is for tests only."""
    stand_in = context.loaded.matrix.stand_in
    if stand_in is not None:
        packages = ", ".join(f"`{name}`" for name in stand_in.packages)
        yield Finding(
            rule="stand-in",
            severity=WARNING,
            subject="stand_in",
            message=f"{packages}: not what the name and version say, the image is for tests only",
            because=stand_in.because,
            hint="nothing is to be served with it, and nothing will push it",
            where=context.loaded.where("stand_in"),
        )


@rule("gpu-needs-cuda")
def _gpu_needs_cuda(context: Context) -> Iterator[Finding]:
    """A GPU that the matrix's CUDA does not know yet."""
    matrix = context.loaded.matrix
    known = {fact.capability: fact for fact in load_facts(GpuFact)}
    for i, gpu in enumerate(matrix.gpus):
        fact = known[gpu]
        if _minor(matrix.cuda.version) < _minor(fact.minimum_cuda):
            yield Finding(
                rule="gpu-needs-cuda",
                severity=ERROR if matrix.cuda.jit == "nvcc" else WARNING,
                subject=f"gpus[{i}]",
                message=f"GPU {gpu} ({fact.names[0]}) needs CUDA {fact.minimum_cuda}, the matrix has {matrix.cuda.version}",
                because=f"the first nvcc that compiles for sm_{fact.nvcc_arch} is CUDA {fact.minimum_cuda}'s",
                hint=f"take CUDA {fact.minimum_cuda} or later, or remove {gpu} from `gpus`",
                where=context.loaded.where("gpus", i),
                source=fact.source,
                evidence={"gpu": gpu, "needs": fact.minimum_cuda, "has": matrix.cuda.version},
            )


@rule("jit-none")
def _jit_none(context: Context) -> Iterator[Finding]:
    """What an image without a compiler cannot do."""
    matrix = context.loaded.matrix
    users = [name for name in ("sglang", "flashinfer") if getattr(matrix.stack, name) is not None]
    if matrix.cuda.jit == "nvcc" or not users:
        return
    fact = next((f for f in load_facts(CudaFact) if f.covers(matrix.cuda.minor)), None)
    possible = fact is not None and fact.jit
    pins = matrix.stack.pins()
    lost = [f for f in load_facts(CompiledFact) if f.package in pins and _fits(pins[f.package], f.versions)]
    because = fact.because if fact is not None and not possible else "the matrix says `jit: none`"
    because += "".join(f"; {f.package} {pins[f.package]} has no other code for {f.what}" for f in lost)
    serve = "to serve such models " if lost else ""
    verb = "compiles" if len(users) == 1 else "compile"
    yield Finding(
        rule="jit-none",
        severity=WARNING,
        subject="cuda.jit",
        message=f"no compiler in the image: kernels that {' and '.join(users)} {verb} at run time cannot be used",
        because=because,
        hint=f"{serve}write `jit: nvcc` and name CUDA {matrix.cuda.minor}'s compiler parts"
        if possible
        else f"{serve}take CUDA 13" + ("" if serve else " if they are needed"),
        where=context.loaded.where("cuda", "jit"),
        source="; ".join([*([fact.source] if fact is not None else []), *(f.source for f in lost)]),
    )


@rule("kernel-name")
def _kernel_name(context: Context) -> Iterator[Finding]:
    """sglang up to 0.5.9 requires `sgl-kernel`, later ones `sglang-kernel`; both own one import package."""
    stack = context.loaded.matrix.stack
    if stack.kernel is None or stack.sglang is None:
        return
    name, _ = stack.kernel
    for fact in load_facts(KernelFact):
        if fact.sglang is not None and _fits(stack.sglang, fact.sglang) and fact.package != name:
            yield Finding(
                rule="kernel-name",
                severity=ERROR,
                subject=name,
                message=f"sglang {stack.sglang} requires `{fact.package}`, the stack has `{name}`",
                because="both install the import package `sgl_kernel`: the resolver would add the other one, over the same files",
                hint=f"replace `{name}` by `{fact.package}` ({fact.versions})",
                where=context.loaded.where("stack", name),
                source=fact.source,
                evidence={"sglang": stack.sglang, "requires": fact.package, "has": name},
            )


@rule("kernel-cuda")
def _kernel_cuda(context: Context) -> Iterator[Finding]:
    """A kernel wheel that is linked to another CUDA major than the image has."""
    matrix = context.loaded.matrix
    if matrix.stack.kernel is None:
        return
    name, version = matrix.stack.kernel
    has = matrix.cuda.version.split(".")[0]
    fact = next((f for f in load_facts(KernelFact) if f.package == name and _fits(version, f.versions)), None)
    tagged = local_cuda(version)
    if tagged is None and (fact is None or _elsewhere(context, name)):
        return
    needs = tagged.split(".")[0] if tagged is not None else str(fact.cuda_major) if fact is not None else has
    if needs != has:
        yield Finding(
            rule="kernel-cuda",
            severity=ERROR,
            subject=name,
            message=f"{name} {version} is linked to CUDA {needs}, the image has CUDA {matrix.cuda.version}",
            because=f"its extensions need `libcudart.so.{needs}`",
            hint=f"take a {name} for CUDA {has}, or CUDA {needs}",
            where=context.loaded.where("stack", name),
            source=fact.source if tagged is None and fact is not None else "the wheel's local version",
            evidence={"package": name, "version": version, "needs": needs, "has": has},
        )


@rule("torch-cuda")
def _torch_cuda(context: Context) -> Iterator[Finding]:
    """A torch whose CUDA libraries are of another CUDA than the matrix names."""
    matrix = context.loaded.matrix
    torch = matrix.stack.torch
    if torch is None:
        return
    fact = next((f for f in load_facts(TorchFact) if _fits(torch, f.versions)), None)
    tagged = local_cuda(torch)
    if tagged is None and (fact is None or _elsewhere(context, "torch")):
        return
    needs = tagged if tagged is not None else fact.cuda if fact is not None else ""
    if _minor(needs) == _minor(matrix.cuda.version):
        return
    majors = _minor(needs)[0] != _minor(matrix.cuda.version)[0]
    yield Finding(
        rule="torch-cuda",
        severity=ERROR if majors else WARNING,
        subject="torch",
        message=f"torch {torch} brings CUDA {needs}'s libraries, the matrix names CUDA {matrix.cuda.version}",
        because="an image has one CUDA, and it is the one that torch pins",
        hint=f'write `version: "{needs}"` under `cuda`, or take a torch for CUDA {matrix.cuda.minor}',
        where=context.loaded.where("stack", "torch"),
        source=fact.source if tagged is None and fact is not None else "the wheel's local version",
        evidence={"torch": torch, "brings": needs, "has": matrix.cuda.version},
    )


@rule("cubin-missing")
def _cubin_missing(context: Context) -> Iterator[Finding]:
    """A flashinfer release without a flashinfer-cubin on the default index."""
    flashinfer = context.loaded.matrix.stack.flashinfer
    cubin = flashinfer.cubin_version if flashinfer is not None else None
    if flashinfer is None or cubin is None or _elsewhere(context, "flashinfer-cubin"):
        return
    for fact in load_facts(CubinFact):
        if _fits(cubin, fact.versions):
            yield Finding(
                rule="cubin-missing",
                severity=ERROR,
                subject="flashinfer-cubin",
                message=f"flashinfer-cubin {cubin} is not on the default index",
                because=fact.because,
                hint=f"write `flashinfer: {{python: {flashinfer.python}, cubin: none}}`, or name where it lives under `indexes` or `files`",
                where=context.loaded.where("stack", "flashinfer"),
                source=fact.source,
                evidence={"version": cubin},
            )


@rule("flashinfer-versions")
def _flashinfer_versions(context: Context) -> Iterator[Finding]:
    """flashinfer refuses to be imported beside a flashinfer-cubin of another version."""
    flashinfer = context.loaded.matrix.stack.flashinfer
    cubin = flashinfer.cubin_version if flashinfer is not None else None
    if flashinfer is not None and cubin is not None and Version(cubin).public != Version(flashinfer.python).public:
        yield Finding(
            rule="flashinfer-versions",
            severity=ERROR,
            subject="flashinfer-cubin",
            message=f"flashinfer-python {flashinfer.python} beside flashinfer-cubin {cubin}",
            because="flashinfer raises at import unless the two versions are equal",
            hint="make them equal, or write `cubin: none`",
            where=context.loaded.where("stack", "flashinfer", "cubin"),
            source="facts/stacks.md section 1",
            evidence={"python": flashinfer.python, "cubin": cubin},
        )


@rule("base-python")
def _base_python(context: Context) -> Iterator[Finding]:
    """A base made from an archive has that archive's Python."""
    matrix = context.loaded.matrix
    base = matrix.base
    known = {fact.release: fact for fact in load_facts(DistributionFact) if fact.distribution == base.distribution}
    if not isinstance(base, ArchiveBase):
        return
    fact = known.get(base.release)
    if fact is None:
        yield Finding(
            rule="base-python",
            severity=WARNING,
            subject="base.release",
            message=f"no fact covers {base.distribution} {base.release}: whether it has Python {matrix.python} is not known",
            hint=f"known are {', '.join(sorted(known))}",
            where=context.loaded.where("base", "release"),
        )
    elif fact.python != matrix.python:
        yield Finding(
            rule="base-python",
            severity=ERROR,
            subject="python",
            message=f"{base.distribution} {base.release} has Python {fact.python}, the matrix says {matrix.python}",
            because="with `kind: archive` the image's Python is the distribution's",
            hint=f'write `python: "{fact.python}"`, or take a release that has {matrix.python}',
            where=context.loaded.where("python"),
            source=fact.source,
            evidence={"has": fact.python, "wanted": matrix.python},
        )


def _elsewhere(context: Context, package: str) -> bool:
    """Whether ``package`` is taken from somewhere else than the default index, which the facts are about."""
    matrix = context.loaded.matrix
    return any(f.name == package for f in matrix.files) or any(package in i.packages for i in matrix.indexes.values())
