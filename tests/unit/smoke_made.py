"""Made-up environments for the smoke test's tests: wheels with RECORDs in a temporary site-packages, and tiny libraries."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from builder.smoke.child import Workspace
from builder.smoke.ledger import Ledger
from builder.smoke.native import Native
from builder.smoke.report import Check, Result
from builder.smoke.spec import Spec, normalise, parse_spec
from builder.smoke.tree import Tree

FACTS: dict[str, Any] = {
    "driver_libraries": {"libcuda.so.1": {"symbols": "^cu[A-Z]"}},
    "os_packages": {"libnuma.so.1": "libnuma1"},
    "cuda_sonames": {"libcudart.so": {"12": 12, "13": 13}, "libcurand.so": {"10": [12, 13]}},
    "cuda_packages": {"patterns": ["-cu(1[0-9])$"]},
    "symbol_owners": {"torch": ["^_ZN?K?3c10"]},
}


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Site:
    """An environment below a folder, and the spec that it is checked against."""

    def __init__(self, root: Path) -> None:
        self.prefix = root / "venv"
        self.packages = self.prefix / "lib" / "python3.11" / "site-packages"
        self.packages.mkdir(parents=True)
        (self.prefix / "bin").mkdir()
        self.artefacts: list[dict[str, str]] = []
        self.spec_data: dict[str, Any] = {
            "schema": 1,
            "matrix": "tiny",
            "lock": "1" * 64,
            "native_lock": "1" * 64,
            "site_packages": str(self.packages),
            "cuda": {"version": "13.0.2", "major": 13, "home": str(root / "cuda"), "jit": "none"},
            "gpus": [{"capability": "12.0", "nvcc": "120a", "flashinfer": "12.0a"}],
            "artefacts": self.artefacts,
            "exceptions": [],
            "shared_files": [],
            "imports": [],
            "facts": dict(FACTS),
        }

    def wheel(
        self,
        name: str,
        version: str = "1.0",
        files: Mapping[str, str | bytes] | None = None,
        *,
        layer: str = "rest",
        locked: str | None = "",
        requires: tuple[str, ...] = (),
    ) -> str:
        """Install a wheel; files that are there already (compiled ones) are taken as they are. Returns its dist-info."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        metadata = "".join(
            [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"] + [f"Requires-Dist: {r}\n" for r in requires]
        )
        rows = []
        for path, content in {**(files or {}), f"{info}/METADATA": metadata}.items():
            place = self.packages / path
            place.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content
            place.write_bytes(data)
            rows.append(f"{path},{digest(data)},{len(data)}")
        (self.packages / info / "RECORD").write_text("\n".join([*rows, f"{info}/RECORD,,"]) + "\n")
        if locked is not None:
            self.lock(name, locked or version, layer=layer)
        return info

    def lock(self, name: str, version: str = "1.0", *, layer: str = "rest") -> None:
        """Put an artefact into the lock."""
        self.artefacts.append(
            {
                "name": normalise(name),
                "version": version,
                "metadata_version": version,
                "file": f"{name.replace('-', '_')}-{version}-py3-none-any.whl",
                "sha256": "0" * 64,
                "layer": layer,
            }
        )

    def exception(self, **fields: Any) -> None:
        """Put an entry into the ledger."""
        entry = {"id": "known", "distribution": "kernel", "file": "*", "checks": ["needed"], "words": "libx"}
        self.spec_data["exceptions"].append({**entry, "consequence": "none", "source": "made up", **fields})

    def variants(self, **fields: Any) -> None:
        """Let a wheel be one with a file for each CUDA."""
        entry = {
            "distribution": "kernel",
            "path": "kernel/x_cuda{cuda}.so",
            "near": False,
            "required": True,
            "elsewhere": [],
        }
        self.spec_data.setdefault("variants", []).append({**entry, "without": "it raises", **fields})

    @property
    def spec(self) -> Spec:
        return parse_spec(self.spec_data)

    @property
    def tree(self) -> Tree:
        return Tree.read(self.packages)

    @contextmanager
    def native(self, scope: frozenset[str] | None = None) -> Iterator[tuple[Native, Ledger]]:
        """What checks of native code get."""
        spec, tree = self.spec, self.tree
        with Workspace(tree) as workspace:
            yield Native(spec, tree, workspace, spec.names() if scope is None else scope), Ledger(spec, tree)


def compile_library(source: str, *options: str, name: str = "lib.so", folder: Path, language: str = "c") -> bytes:
    """A shared object made by the C or C++ compiler; skips the test loudly where there is none."""
    compiler = shutil.which({"c": "gcc", "c++": "g++"}[language])
    if compiler is None:
        pytest.skip("gcc is not installed: nothing to make shared objects with")
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / name
    command = [compiler, "-x", language, "-", "-shared", "-fPIC", "-O0", "-o", str(output), "-x", "none", *options]
    subprocess.run(command, input=source, text=True, check=True)
    return output.read_bytes()


def said(result: Result, name: str = "check") -> str:
    """All that a check has to say, as a run prints it, notes too."""
    return "\n".join(str(finding) for finding in finished(result, name).findings)


def finished(result: Result, name: str = "check") -> Check:
    return result.finish(name, "native")
