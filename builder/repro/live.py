"""`builder repro --live`: what a report would say of this machine, a running container or an image, as text to paste.

Only what a verdict needs is asked for, so there is nothing personal to be taken out again: no names, paths, addresses, serials.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.errors import BuildError, UsageError
from builder.lock import Lock, lock_path, read_lock
from builder.matrix import list_matrices
from builder.reports.lines import plain

LOCK = "/opt/sglang-stack/lock.json"
"""Where our images have the lock that they were built from."""

LIMIT = 120
"""Seconds that the looking may take: nvidia-smi hangs on a sick driver."""

PROBE = f"""
import importlib.metadata, json, os, platform, subprocess, sys
def ask(*words):
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=30).stdout
    except Exception:
        return ""
def read(path):
    try:
        return open(path, encoding="utf-8").read()
    except OSError:
        return ""
packages = {{}}
for each in importlib.metadata.distributions():
    try:
        packages.setdefault(each.metadata["Name"], each.version)
    except Exception:
        pass
said = {{"python": platform.python_version(), "machine": platform.machine(), "libc": "".join(platform.libc_ver()),
        "os": read("/etc/os-release"), "packages": {{k: v for k, v in packages.items() if k and v}},
        "lock": read({LOCK!r}), "nvcc": ask("nvcc", "--version"),
        "smi": ask("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"),
        "header": ask("nvidia-smi").split("\\n\\n")[0], "topology": ask("nvidia-smi", "topo", "-m").split("Legend")[0],
        "environment": {{k: v for k, v in os.environ.items() if k.startswith(({", ".join(repr(p) for p in ("SGLANG_", "NCCL_", "FLASHINFER_", "VLLM_", "TORCH_", "CUDA_", "PYTORCH_", "TRITON_"))}))}}}}
print(json.dumps(said))
"""


class NothingThere(UsageError):
    """Neither a container nor an image is called so."""


@dataclass(frozen=True)
class Live:
    """What was found: the report as text, and the lock of the image, if it is one of ours."""

    text: str
    packages: Mapping[str, str]
    lock: Lock | None


@dataclass(frozen=True)
class Origin:
    """The matrix that an environment was built from: its lock has the digest, and the packages are as locked but for ``differs``."""

    matrix: str | None
    lock: str
    same: int
    differs: tuple[str, ...]


def look(target: str | None) -> Live:
    """Look at a running container or an image, or at this machine with its `python3`. Raises `UsageError`, `BuildError`."""
    said = _here() if target is None else _there(target)
    lock = None
    if said.get("lock"):
        try:
            lock = Lock.model_validate_json(str(said["lock"]))
        except ValueError:
            lock = None
    return Live(report_text(said, lock), said["packages"], lock)


def _here() -> Mapping[str, Any]:
    program = shutil.which("python3") or shutil.which("python")
    if program is None:
        raise UsageError("there is no `python3` on the PATH", hint="name a container or an image after `--live`")
    try:
        done = subprocess.run([program, "-c", PROBE], capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired as error:
        raise BuildError("the environment did not answer", because=f"nothing after {LIMIT} s") from error
    return _parsed(done.stdout, done.stderr)


def _there(target: str) -> Mapping[str, Any]:
    from builder.engine import connect
    from builder.labels import LABEL

    engine = connect()
    output = engine.execute(target, ["python3", "-c", PROBE])
    if output is None:
        image = engine.find(target)
        if image is None:
            raise NothingThere(f"there is no container and no image `{target}`", where=engine.host)
        lines = [item for item in engine.run(image.id, ["python3", "-c", PROBE], label=LABEL) if isinstance(item, str)]
        output = "\n".join(lines)
    return _parsed(output, "")


def _parsed(output: str, trouble: str) -> Mapping[str, Any]:
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                said: Mapping[str, Any] = json.loads(line)
                return said
            except ValueError:
                break
    raise BuildError("the environment did not answer", because=(trouble or output)[-300:] or "it printed nothing")


def report_text(said: Mapping[str, Any], lock: Lock | None) -> str:
    """The report, in the forms that `builder.reports` and people read: check_env's keys, then `name==version` lines."""
    lines = [f"Python: {said['python']}", f"Python platform: {said['machine']}"]
    release = dict(line.partition("=")[::2] for line in str(said["os"]).splitlines())
    if release.get("NAME"):
        lines.append(f"OS: {release['NAME'].strip(chr(34))} {release.get('VERSION_ID', '').strip(chr(34))}".rstrip())
    if said["libc"].startswith("glibc"):
        lines.append(f"Libc version: {said['libc'].replace('glibc', 'glibc-', 1)}")
    lines += [f"NVCC: {line.strip()}" for line in str(said["nvcc"]).splitlines() if "release" in line]
    for number, row in enumerate(line for line in str(said["smi"]).splitlines() if line.count(",") == 2):
        name, capability, driver = (part.strip() for part in row.split(","))
        lines += [f"GPU {number}: {name}", f"GPU {number} Compute Capability: {capability}"]
        lines += [f"CUDA Driver Version: {driver}"] if number == 0 else []
    lines += [line for line in str(said["header"]).splitlines() if "NVIDIA-SMI" in line and "Driver Version" in line]
    if lock is not None:
        lines += [f"sglang-stack matrix: {lock.matrix}", f"sglang-stack lock: {lock.digest}"]
    lines += [
        f"{name}=={version}" for name, version in sorted(said["packages"].items(), key=lambda item: item[0].lower())
    ]
    lines += _variables(said["environment"])
    if str(said["topology"]).strip():
        lines += ["NVIDIA Topology:", *(line for line in str(said["topology"]).splitlines() if line.strip())]
    # nvidia-smi underlines a table's head even where nobody looks at it.
    return "".join(f"{plain(line)}\n" for line in lines)


def _variables(environment: Mapping[str, str]) -> list[str]:
    """The variables that the reader of reports takes, in the form it takes them in: no paths, no secrets."""
    from builder.reports.fields import keyed
    from builder.reports.lines import Line

    lines = [Line(1, f"{name}={value}") for name, value in sorted(environment.items()) if "\n" not in value]
    return [
        f"{fact.name.removeprefix('env.')}={fact.value}"
        for line in lines
        for fact in keyed([line])
        if fact.name.startswith("env.")
    ]


def as_locked(installed: str, locked: str) -> bool:
    """Whether what is installed is the release that was locked: of the same CUDA, and patched or not.

    A patched wheel has a local version that names the sets; one that names another CUDA is another build.
    """
    from packaging.version import InvalidVersion, Version

    from builder.rulebook import local_cuda

    try:
        same = Version(installed).public == Version(locked).public
        return same and local_cuda(installed) == local_cuda(locked)
    except InvalidVersion:
        return installed == locked


def origin(live: Live, matrices: Path) -> Origin | None:
    """Which of our matrices it was built from, and whether what is installed is still what was locked."""
    if live.lock is None:
        return None
    from packaging.utils import canonicalize_name

    installed: dict[str, str] = {canonicalize_name(name): version for name, version in live.packages.items()}
    differs = []
    same = 0
    for artefact in live.lock.artefacts:
        found = installed.get(artefact.name)
        if found is not None and as_locked(found, artefact.metadata_version):
            same += 1
        else:
            differs.append(f"{artefact.name}: locked {artefact.metadata_version}, installed {found or 'none'}")
    locked: set[str] = {artefact.name for artefact in live.lock.artefacts}
    differs += [f"{name}: installed {version}, not locked" for name, version in installed.items() if name not in locked]
    known = None
    for path in list_matrices(matrices):
        if path.stem == live.lock.matrix and lock_path(path).is_file():
            known = path.stem if read_lock(lock_path(path)).digest == live.lock.digest else None
    return Origin(known, live.lock.digest, same, tuple(sorted(differs)))
