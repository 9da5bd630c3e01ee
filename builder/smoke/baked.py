"""Does flashinfer load what the build compiled for it, and is there code for each GPU target in it: `baked`."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from builder.fatbin import STUB, Container, FatbinError, Image, read_file
from builder.smoke.child import shorten
from builder.smoke.cuda import home_environment
from builder.smoke.native import Native
from builder.smoke.report import Result, count, not_applicable
from builder.smoke.tree import Tree

# Seconds; importing torch and flashinfer is nearly all of it.
_TIMEOUT = 300.0
_REBUILD = "build again without the cache: `builder build MATRIX --no-cache`"


def check_baked(native: Native) -> Result:
    """Each compiled module is flashinfer-python's file, is loaded with no ninja, lock or writable folder by any user, and has
    kernels for each GPU target in each container of its fat binary."""
    spec = native.spec
    if not spec.compiled:
        return not_applicable("the build compiles nothing for this stack", "GPU images")
    result = Result(0, None, "GPU images")
    folder = native.workspace.root / "baked"
    folder.mkdir()
    # Another user has to get through to the folder and to the stub of the driver.
    native.workspace.root.chmod(0o711)
    assert native.stubs is not None
    targets = " ".join(gpu.flashinfer for gpu in spec.gpus)
    outcome = native.workspace.run(
        native.workspace.python_command(
            "baked_child.py", str(native.tree.site_packages), str(folder), targets, *spec.compiled
        ),
        timeout=_TIMEOUT,
        extra=home_environment(spec),
    )
    answers = {}
    for line in outcome.out.splitlines():
        if line.startswith('{"function"'):
            answer = json.loads(line)
            answers[answer["function"]] = answer
    details = []
    for function in spec.compiled:
        if function not in answers:
            result.add("error", function, f"the process that loads {function} {outcome.ended}", because=outcome.tail())
            continue
        details.append(_check(native.tree, result, answers[function]))
    result.detail = "; ".join(detail for detail in details if detail)
    return result


def _check(tree: Tree, result: Result, answer: dict[str, Any]) -> str:
    """Report what is wrong with one module; what it is, for the detail."""
    function = str(answer["function"])
    # Children's words are scrubbed of our folders; the module lies in site-packages, whose path stays.
    file = tree.relative(answer["file"]) if answer["file"] else ""
    if answer["error"]:
        lines = [line for line in str(answer["error"]).splitlines() if line.strip()]
        hint = ""
        if file and not tree.path(file).exists():
            hint = f"`{file}` is missing: {_REBUILD}"
        result.add(
            "error",
            file or function,
            f"flashinfer does not load what {function} stands for: {shorten(lines[-1], 300)}",
            because="\n".join(line.replace(f"{tree.site_packages}/", "") for line in lines[-9:-1]),
            hint=hint,
        )
        return ""
    owner = tree.owner(tree.path(file))
    if owner is None or owner.name != "flashinfer-python":
        result.add("error", file, f"`{file}` is in no RECORD of flashinfer-python", hint=_REBUILD)
    wanted = _targets(answer["flags"])
    try:
        containers = read_file(tree.path(file))
    except (OSError, FatbinError) as error:
        result.add("error", file, f"the GPU code of `{file}` cannot be read: {error}", hint=_REBUILD)
        return ""
    told = [_look(result, file, containers, target) for target in wanted]
    size = os.stat(tree.path(file)).st_size / 1e6
    who = "another user" if answer["uid"] != os.geteuid() else "this user"
    return (
        f"{Path(file).name}, {size:.1f} MB, loaded by {who} with no ninja and nothing to write to; "
        f"{count(len(containers), 'container')}, kernels for {', '.join(told)}"
    )


def _targets(flags: list[str]) -> list[str]:
    """`sm_120a` for `-gencode=arch=compute_120a,code=sm_120a`, in order; targets that flashinfer has no code for are not there."""
    found = (re.search(r"^-gencode=.*code=(sm_\w+)$", flag) for flag in flags)
    return sorted(match.group(1) for match in found if match)


def _look(result: Result, file: str, containers: tuple[Container, ...], target: str) -> str:
    """Every container has an image for the target, with more than stubs in it; how many kernels, for the detail."""
    result.expected = (result.expected or 0) + max(1, len(containers))
    real = stubs = 0
    empty = []
    for container in containers:
        images = [image for image in container.images if image.name == target]
        result.looked_at += len(images[:1])
        if not images or not _has_code(images[0]):
            empty.append(container)
            continue
        real += images[0].real or 0
        stubs += len(images[0].kernels or ()) - (images[0].real or 0)
    if not containers or empty:
        what = (
            f"{len(empty)} of its {count(len(containers), 'container')}"
            if containers
            else "it: it holds no device code"
        )
        result.add(
            "error",
            file,
            f"`{file}` has no kernel for {target} in {what}",
            because="the driver refuses a kernel that has no image for its GPU; a name in a list of targets is no code",
            hint=_REBUILD,
        )
        result.looked_at = result.expected
    shown = f"{target} {real:,}" if real or stubs else target
    return f"{shown} and {count(stubs, 'stub')}" if stubs else shown


def _has_code(image: Image) -> bool:
    """Whether there is more than stubs; of an image that cannot be unpacked its size alone is known."""
    return image.size > STUB if image.real is None else image.real > 0
