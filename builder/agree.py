"""What the parts of a matrix have to agree on: one pin, one source a package, and no pre-release by accident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

from builder.fields import Complaint
from builder.yamlsource import FieldPath

if TYPE_CHECKING:
    from builder.matrix import Matrix

KERNELS = ("sgl-kernel", "sglang-kernel")
STAND_IN = "-standin"
"""How the name of a matrix ends whose wheels are not what they are called."""

RESERVED = frozenset({"default", "files"})
"""Where a lock says that a wheel comes from: the default index, or a file of its own."""


def disagreements(matrix: Matrix) -> list[Complaint]:
    """Everything that two parts of ``matrix`` say differently, or twice."""
    return [
        *_one_pin_each(matrix),
        *_one_source_each(matrix),
        *_prereleases_named(matrix),
        *_stand_in_named(matrix),
    ]


def _one_pin_each(matrix: Matrix) -> Iterator[Complaint]:
    """Two places that pin one thing: the second is at best redundant, at worst a lie."""
    pins = {name: (version, "stack") for name, version in matrix.stack.pins().items()}
    pins |= {name: (version, "cuda.compiler") for name, version in matrix.cuda.compiler.items()}
    taken = {name: place for name, (_, place) in pins.items()}
    if matrix.stack.kernel is not None:  # the other one would overwrite its files
        taken |= dict.fromkeys(KERNELS, "stack")
    for i, (name, version) in enumerate(_extras(matrix)):
        if name in pins and "[" in matrix.extras[i]:
            # It adds the package's own extras to what is pinned.
            if pins[name][0] != version:
                text = f"`{name}` is {version} here and {pins[name][0]} under `{pins[name][1]}`"
                yield Complaint(text, hint="make the two equal", at=("extras", i))
        elif name in taken:
            hint = f"set it under `{taken[name]}` only"
            yield Complaint(f"`{name}` is pinned under `{taken[name]}` already", hint=hint, at=("extras", i))
        else:
            pins[name] = (version, "extras")
    said: list[tuple[str, str, FieldPath]] = [
        *((o.package, o.ours, ("overrides", i, "ours")) for i, o in enumerate(matrix.overrides)),
        *((f.name, f.pinned_version, ("files", i, "url")) for i, f in enumerate(matrix.files)),
    ]
    for name, version, at in said:
        if name in pins and pins[name][0] != version:
            text = f"`{name}` is {version} here and {pins[name][0]} under `{pins[name][1]}`"
            yield Complaint(text, hint="make the two equal", at=at)


def _one_source_each(matrix: Matrix) -> Iterator[Complaint]:
    """A package from two indexes, or two files of it: which one wins would be chance."""
    for name in RESERVED & matrix.indexes.keys():
        yield Complaint(
            f"`{name}` cannot name an index", hint="it has a meaning of its own; choose another", at=("indexes", name)
        )
    seen: dict[str, str] = {}
    places: list[tuple[str, str, FieldPath]] = [
        (package, f"indexes.{name}", ("indexes", name, "packages", i))
        for name, index in matrix.indexes.items()
        for i, package in enumerate(index.packages)
    ]
    places += [(file.name, f"files[{i}]", ("files", i, "name")) for i, file in enumerate(matrix.files)]
    for package, where, at in places:
        if package in seen:
            yield Complaint(f"`{package}` comes from `{seen[package]}` already", hint="name one source for it", at=at)
        seen.setdefault(package, where)
    overridden: set[str] = set()
    for i, override in enumerate(matrix.overrides):
        if override.package in overridden:
            text = f"`{override.package}` is overridden twice"
            yield Complaint(text, hint="keep one of the two", at=("overrides", i, "package"))
        overridden.add(override.package)


def _prereleases_named(matrix: Matrix) -> Iterator[Complaint]:
    pins: list[tuple[str, str, FieldPath]] = [
        (name, version, ("stack", "flashinfer" if name.startswith("flashinfer") else name))
        for name, version in matrix.stack.pins().items()
    ]
    pins += [(name, version, ("extras", i)) for i, (name, version) in enumerate(_extras(matrix))]
    for name, version, at in pins:
        if Version(version).is_prerelease and name not in matrix.prereleases:
            text = f"`{name} {version}` is a pre-release that is not named"
            yield Complaint(text, hint=f"add `{name}` to `prereleases`", at=at)


def _stand_in_named(matrix: Matrix) -> Iterator[Complaint]:
    """The name of a stand-in's image has to say what it is: a tag is all that many people ever see."""
    if matrix.stand_in is None:
        return
    if not matrix.name.endswith(STAND_IN):
        hint = f"call the file `{matrix.name}{STAND_IN}.yaml`"
        yield Complaint(f"`{matrix.name}` does not say that it is a stand-in", hint=hint, at=("stand_in",))
    named = {file.name for file in matrix.files}
    for i, package in enumerate(matrix.stand_in.packages):
        if package not in named:
            hint = f"add its wheel under `files`, or leave out `{package}` here"
            yield Complaint(f"`{package}` is no direct file", hint=hint, at=("stand_in", "packages", i))


def _extras(matrix: Matrix) -> list[tuple[str, str]]:
    """Name and version of each extra (a form that `fields.PinnedRequirement` has checked)."""
    parsed = [Requirement(extra) for extra in matrix.extras]
    return [(requirement.name, next(iter(requirement.specifier)).version) for requirement in parsed]
