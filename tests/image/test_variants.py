"""bitsandbytes in an image: a file for each CUDA, of which the one of torch's CUDA has to load and no other."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.build import build_image, prepare
from builder.engine import Buildx, Engine
from builder.errors import BuildError
from builder.settings import Settings
from tests.image.stacks import SMALL

pytestmark = pytest.mark.image


def matrix(version: str) -> str:
    """A matrix with torch and this release of bitsandbytes alone."""
    text = SMALL.replace("stack: {}", "stack: {torch: 2.11.0}").replace("image: 2 GB", "image: 9 GB")
    return re.sub(r"extras: .*", f"extras: [bitsandbytes=={version}]", text)


def test_the_file_of_torch_s_cuda_is_the_one_that_has_to_load(
    make_small: Callable[..., Path],
    engine: Engine,
    buildx: Buildx,
    settings: Settings,
    docker: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    path = make_small("bitsandbytes", matrix("0.49.2"))
    image = build_image(prepare(path), engine, buildx, settings)
    words = ("run", "--rm", "--network", "none", image.id)
    proof = json.loads(docker(*words, "cat", "/opt/sglang-stack/smoke.json").stdout)
    used = {each["name"] for each in proof["checks"] if "bitsandbytes-variants" in each["exceptions"]}
    # Those for CUDA 12 and for other devices' runtimes cannot load beside CUDA 13.
    assert used >= {"needed", "load", "cuda-major"}
    found = docker(*words, "python3", "-c", "import torch, bitsandbytes; print(bitsandbytes.__version__)").stdout
    assert found.splitlines()[-1] == "0.49.2"


def test_a_release_that_has_no_file_for_torch_s_cuda(
    make_small: Callable[..., Path], engine: Engine, buildx: Buildx, settings: Settings
) -> None:
    path = make_small("bitsandbytes-before", matrix("0.46.0"))
    with pytest.raises(BuildError) as caught:
        build_image(prepare(path, rules={}), engine, buildx, settings)
    assert "bitsandbytes 0.46.0 has no file for CUDA 13.0.2: it is imported, and raises where a GPU is used" in str(
        caught.value
    )
    assert engine.find("sglang-stack:bitsandbytes-before") is None
