"""Small stacks of real wheels, and ways to bend a prepared build past the rules."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from builder.build import Prepared
from builder.lock import Lock
from builder.render import render

ROOT = Path(__file__).resolve().parents[2]
MATRIX = "cu130-next"

SMALL = """\
summary: A small stack for tests
as_of: 2026-08-01
platform: linux/amd64
python: "3.11"
base: {kind: archive, distribution: debian, release: bookworm}
cuda:
  version: 13.0.2
  jit: nvcc
  compiler:
    nvidia-cuda-nvcc: 13.0.88
    nvidia-nvvm: 13.0.88
    nvidia-cuda-crt: 13.0.88
    nvidia-cuda-cccl: 13.0.85
gpus: ["12.0", "9.0"]
stack: {}
extras: [numpy==2.2.6, nvidia-cuda-runtime==13.0.96, packaging==26.2]
budget: {image: 2 GB}
"""


def entries(docker: Callable[..., object], image: str, folder: Path) -> list[list[tuple[Any, ...]]]:
    """What each layer of an image holds, entry by entry and sorted: name, type, mode, owner, time, target, hash."""
    saved = folder / f"{image[-12:]}.tar"
    docker("save", "--output", str(saved), image)
    layers = []
    with tarfile.open(saved) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        for name in json.load(manifest)[0]["Layers"]:
            found = []
            with tarfile.open(fileobj=archive.extractfile(name)) as layer:
                for item in layer:
                    data = layer.extractfile(item) if item.isreg() else None
                    digest = hashlib.file_digest(data, "sha256").hexdigest() if data else ""  # type: ignore[arg-type]
                    found.append(
                        (item.name, item.type, item.mode, item.uid, item.gid, item.mtime, item.linkname, digest)
                    )
            layers.append(sorted(found))
    saved.unlink()
    return layers


def edited(prepared: Prepared, **fields: object) -> Prepared:
    """`prepared` with another lock or Dockerfile, past the rules: for what only the build itself can catch."""
    return replace(prepared, **fields)  # type: ignore[arg-type]


def relocked(prepared: Prepared, lock: Lock) -> Prepared:
    """`prepared` rendered from another lock."""
    rendered = render(prepared.loaded.matrix, lock, Path(find_uv_bin()))
    return edited(prepared, lock=lock, rendered=rendered)
