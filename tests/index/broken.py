"""Copies of the real matrices and locks, each broken in one way: what `builder check` says of them.

`python -m tests.index.broken [NAME…] [--folder DIR]` writes the copies and prints what is said beyond what the whole one
says; `--update` writes that into tests/index/data/check. The wheels that are exchanged are the index's.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from packaging.version import Version

from builder import cli, settings
from builder.abi.verb import base_named
from builder.abi.wheels import Index, Target
from builder.facts import layer_of
from builder.findings import Finding
from builder.lock import Artefact, Lock, inputs_digest, lock_path, read_lock, write_lock
from builder.matrix import load
from tests.made import ROOT

EXPECTED = Path(__file__).with_name("data") / "check"


@dataclass(frozen=True)
class Copy:
    """A copy of the matrix ``of``: lines exchanged in it, wheels exchanged (None: left out), fields of the lock."""

    name: str
    of: str
    text: Mapping[str, str] = field(default_factory=dict)
    wheels: Mapping[str, str | None] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    release: str | None = None
    """Another release of the base."""


CUDNN = """\
  - package: nvidia-cudnn-cu12
    pin: ==9.10.2.21
    ours: 9.16.0.29
    because: on torch 2.9.1 sglang refuses to start multimodal models (Kimi-K2.5 is one) with cuDNN before 9.15
    source: METADATA of torch 2.9.1; srt/server_args.py (5263-5300) of sglang 0.5.9; pytorch/pytorch#168167
    runtime_check: ">=9.15"
"""

COPIES = (
    Copy(
        "kernel-of-another-torch",
        "cu130-next",
        {"sglang-kernel: 0.4.4": "sglang-kernel: 0.4.6.post1"},
        {"sglang-kernel": "0.4.6.post1"},
    ),
    Copy("torchaudio-of-another-torch", "cu128", wheels={"torchaudio": "2.10.0"}),
    Copy("cuda-12-in-cuda-13", "cu130-next", wheels={"torchvision": "0.24.1"}),
    Copy("torch-exchanged", "cu128", {"torch: 2.9.1": "torch: 2.10.0"}, {"torch": "2.10.0", "triton": "3.6.0"}),
    Copy("gpu-12.1", "cu130-next", {'gpus: ["12.0", "9.0"]': 'gpus: ["12.1"]'}),
    Copy("gpu-12.1-triton", "cu128", {'gpus: ["12.0", "9.0"]': 'gpus: ["12.1"]'}),
    Copy("gpu-10.3", "cu128", {'gpus: ["12.0", "9.0"]': 'gpus: ["10.3"]'}),
    Copy("nccl-too-old", "cu128", wheels={"nvidia-nccl-cu12": "2.26.2"}),
    Copy(
        "another-python",
        "cu130-next",
        {'python: "3.11"': 'python: "3.13"', "release: bookworm": "release: trixie"},
        fields={"python": "3.13"},
        release="trixie",
    ),
    Copy(
        "kernel-of-another-sglang",
        "cu128",
        {"sgl-kernel: 0.3.21": "sglang-kernel: 0.4.1"},
        {"sgl-kernel": None, "sglang-kernel": "0.4.1"},
    ),
    Copy("cudnn-below-the-floor", "cu128", {CUDNN: ""}, {"nvidia-cudnn-cu12": "9.14.0.64"}),
    Copy(
        "flashinfer-cubin-of-another-release",
        "cu130-next",
        {"flashinfer: 0.6.12": "flashinfer: {python: 0.6.12, cubin: 0.6.11.post3}"},
        {"flashinfer-cubin": "0.6.11.post3"},
    ),
    Copy("provider-left-out", "cu130-next", wheels={"nvidia-cusparselt-cu13": None}),
    Copy("torchao-of-another-torch", "cu130-next", wheels={"torchao": "0.9.0"}),
)


def write(copy: Copy, folder: Path) -> Path:
    """The matrix of a copy, with its lock beside it."""
    source = ROOT / "matrices" / f"{copy.of}.yaml"
    text = source.read_text(encoding="utf-8")
    for old, new in copy.text.items():
        assert old in text, f"{copy.name}: {old}"
        text = text.replace(old, new)
    path = folder / f"{copy.of}.yaml"
    path.write_text(text, encoding="utf-8")
    matrix, lock = load(path).matrix, read_lock(lock_path(source))
    artefacts = {artefact.name: artefact for artefact in lock.artefacts}
    target = Target(str(copy.fields.get("python", lock.python)), base_named(copy.release or lock.base.release))
    index = Index(settings.load(), target)
    for name, version in copy.wheels.items():
        artefacts.pop(name, None)
        if version is not None:
            artefacts[name] = _artefact(index, name, version)
    update: dict[str, Any] = {
        "artefacts": tuple(artefacts[name] for name in sorted(artefacts)),
        "inputs": inputs_digest(matrix),
    }
    if copy.release is not None:
        update["base"] = lock.base.model_copy(update={"release": copy.release})
    write_lock(
        Lock.model_validate(lock.model_copy(update={**update, **copy.fields}).model_dump(by_alias=True)),
        lock_path(path),
    )
    return path


def _artefact(index: Index, name: str, version: str) -> Artefact:
    release = index.release(name, Version(version))
    return Artefact(
        name=name,
        version=version,
        metadata_version=version,
        file=release.file,
        sha256=release.sha256,
        size=release.size,
        index="default",
        url=None,
        requires=tuple(sorted(map(str, index.requires(release)))),
        layer=layer_of(name),
    )


def said(path: Path) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `builder check` on a matrix."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = int(cli.main(["check", str(path), "--json"]))
    return code, json.loads(out.getvalue())


def beyond(copy: Copy, folder: Path, whole: Callable[[str], dict[str, Any]]) -> str:
    """What is said of a copy and not of the whole matrix: the findings as they are printed, and the exit status."""
    path = write(copy, folder)
    code, report = said(path)
    known = {_key(finding) for finding in whole(copy.of)["findings"]}
    lines = []
    for finding in report["findings"]:
        ours = finding["severity"] != "note" or finding["rule"].startswith(("link-", "wheel-", "arch-"))
        if ours and _key(finding) not in known:
            shown = str(Finding.model_validate_json(json.dumps(finding)))
            lines.append(shown.replace(str(path), f"{copy.of}.yaml"))
    return "\n".join([*lines, f"exit status {code}, {report['verdict']}", ""])


def _key(finding: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(finding[part]) for part in ("rule", "severity", "message", "because"))


def whole_of(kept: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """What is said of a whole matrix, asked once."""
    if name not in kept:
        kept[name] = said(ROOT / "matrices" / f"{name}.yaml")[1]
    return kept[name]


def main() -> int:
    """Print what is said of each copy."""
    parser = argparse.ArgumentParser(prog="python -m tests.index.broken", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--update", action="store_true", help="write the expected texts")
    given = parser.parse_args()
    whole = partial(whole_of, {})
    for copy in COPIES:
        if given.names and copy.name not in given.names:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = given.folder / copy.name if given.folder else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            text = beyond(copy, folder, whole)
        print(f"== {copy.name} ({copy.of})\n{text}")
        if given.update:
            EXPECTED.mkdir(parents=True, exist_ok=True)
            (EXPECTED / f"{copy.name}.txt").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
