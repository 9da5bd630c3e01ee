"""One CUDA per image: `cuda-major` over packages and sonames, `compiler-coherent` over the parts of the compiler."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

from builder.smoke.child import Workspace
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Result, count, not_applicable, some
from builder.smoke.spec import Spec
from builder.smoke.tree import Tree

_TIMEOUT = 60.0


def soname_majors(spec: Spec, name: str) -> tuple[int, ...]:
    """The CUDA majors that have a library of this soname (facts: `cuda_sonames`); empty for one that tells nothing."""
    stem, _, number = name.partition(".so.")
    majors = spec.fact("cuda_sonames").get(f"{stem}.so", {})
    found = majors.get(number.split(".")[0], []) if isinstance(majors, dict) else []
    return tuple(found) if isinstance(found, list) else (int(found),)


def package_major(spec: Spec, name: str) -> int | None:
    """The CUDA major that a distribution's name states (facts: `cuda_packages`, patterns with one group).

    None for one that goes beside either (`both`).
    """
    if name in spec.fact("cuda_packages").get("both", ()):
        return None
    for pattern in spec.fact("cuda_packages").get("patterns", ()):
        if match := re.search(str(pattern), name):
            return int(match.group(1))
    return None


def check_cuda_major(native: Native, ledger: Ledger) -> Result:
    """Packages and needed sonames are all of the spec's CUDA major."""
    spec, wanted = native.spec, native.spec.cuda_major
    result = Result(0, len(native.shared_objects), "files")
    packages = votes = 0
    for distribution in native.tree.distributions:
        if distribution.name not in native.scope:
            continue
        major = package_major(spec, distribution.name)
        packages += major is not None
        if major is not None and major != wanted:
            message = f"{distribution} is for CUDA {major}, the stack is CUDA {wanted}"
            if ledger.excuses("cuda-major", distribution.name, "", message) is None:
                result.add("error", distribution.name, message, hint=_who_wants(native, distribution.name))
    for file in native.shared_objects:
        result.looked_at += 1
        if file.elf is None:
            continue
        other = []
        for name in file.elf.needed:
            majors = soname_majors(spec, name)
            votes += bool(majors)
            if majors and wanted not in majors:
                other.append((name, majors[0]))
        if not other:
            continue
        names = some((name for name, _ in other), 6)
        message = f"`{file.path}` of {file.owner} needs {names}, of CUDA {other[0][1]}; the stack is CUDA {wanted}"
        if ledger.excuses("cuda-major", file.owner.name, file.path, message) is None:
            result.add(
                "error",
                file.path,
                message,
                because="two CUDA runtimes in one process do not share devices, streams or memory, "
                "and the loader takes whichever it finds",
                hint=f"take the build of {file.owner.shown} for CUDA {wanted}",
            )
    result.detail = (
        f"CUDA {wanted}: {count(packages, 'package')} by name, {count(votes, 'needed library', 'needed libraries')}"
    )
    ledger.settle("cuda-major", result, native.scope)
    return result


def _who_wants(native: Native, name: str) -> str:
    """Which installed distributions require this one, by their METADATA."""
    wanting = []
    pattern = re.compile(
        r"^Requires-Dist:\s*" + re.escape(name).replace(r"\-", "[-_.]") + r"(?![\w.-])", re.IGNORECASE | re.MULTILINE
    )
    for distribution in native.tree.distributions:
        try:
            text = (native.tree.site_packages / distribution.info / "METADATA").read_text("utf-8", "replace")
        except OSError:
            continue
        if pattern.search(text.split("\n\n")[0]):
            wanting.append(str(distribution))
    return f"required by {some(wanting, 4)}" if wanting else "no installed distribution requires it: take it out"


def check_compiler(spec: Spec, tree: Tree, workspace: Workspace) -> Result:
    """nvcc, cicc, ptxas, the headers and their wheels are of one CUDA release.

    What each part says of itself is compared with what the wheels' versions say, so that the message names the package.
    """
    if spec.cuda_jit == "none":
        return not_applicable("the matrix has no CUDA compiler (jit: none)", "parts")
    home = Path(spec.cuda_home)
    wanted = ".".join(spec.cuda_version.split(".")[:2])
    parts = spec.fact("compiler_parts")
    result = Result(0, len(parts), "parts")
    said: list[str] = []
    named: set[str] = set()
    for part, fact in parts.items():
        result.looked_at += 1
        package = tree.by_name.get(str(fact["distribution"]))
        what = f"{part} ({package})" if package else part
        path = home / str(fact["file"])
        read: Callable[[Path], str | None] = {
            "run": lambda p: _run_version(workspace, p),
            "scan": _scan_version,
            "header": lambda p, f=fact: _header_version(p, str(f["macro"])),  # type: ignore[misc]
            "wheel": lambda p, t=package: _short(t.version) if t else None,  # type: ignore[misc]
        }[str(fact["how"])]
        if fact["how"] != "wheel" and not path.exists():
            result.add("error", part, f"{part} is not at `{path}`", hint=f"it is in the wheel {fact['distribution']}")
            continue
        if fact["how"] == "wheel" and package is None:
            result.add("error", part, f"no {fact['distribution']} is installed", hint="name it in the matrix")
            continue
        version = read(path)
        said.append(f"{part} {version or '?'}")
        if version is None:
            result.add("error", part, f"{what} does not say which release it is", because=f"looked at `{path}`")
        elif version != wanted and fact["how"] == "wheel" and fact["distribution"] in named:
            continue  # what that wheel brings was named already
        elif version != wanted:
            named.add(str(fact["distribution"]))
            result.add(
                "error",
                part,
                f"{what} is of CUDA {version}, the stack's compiler is CUDA {wanted}",
                because=str(fact.get("consequence", "")),
                hint=f"pin {fact['distribution']} to the version that belongs to CUDA {spec.cuda_version}",
                source=str(fact.get("source", "")),
            )
    result.detail = f"CUDA {wanted}: {', '.join(said)}"
    return result


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _run_version(workspace: Workspace, program: Path) -> str | None:
    try:
        outcome = workspace.run([str(program), "--version"], timeout=_TIMEOUT)
    except OSError:
        return None
    match = re.search(r"\brelease (\d+\.\d+)", outcome.out)
    return match.group(1) if match else None


def _scan_version(program: Path) -> str | None:
    """cicc prints no version, but holds the words that the other tools print."""
    try:
        with program.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            match = re.search(rb"Cuda compilation tools, release (\d+\.\d+)", data)
            return match.group(1).decode() if match else None
    except (OSError, ValueError):
        return None


def _header_version(header: Path, macro: str) -> str | None:
    """`#define CUDA_VERSION 13000` is 13.0 (1000 times major, 10 times minor)."""
    try:
        text = header.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(rf"^#\s*define\s+{re.escape(macro)}\s+(\d+)", text, re.MULTILINE)
    if not match:
        return None
    number = int(match.group(1))
    return f"{number // 1000}.{number % 1000 // 10}"


def home_environment(spec: Spec) -> dict[str, str]:
    """What a compiler run needs in its environment."""
    path = f"{spec.cuda_home}/bin:{os.environ.get('PATH', '/usr/bin:/bin')}"
    return {"CUDA_HOME": spec.cuda_home, "CUDA_PATH": spec.cuda_home, "PATH": path}
