"""What the run was made on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess

from tests.gpu.rank import Context


def about(context: Context) -> None:
    """Note the software and devices; two devices that reach each other are what everything else needs."""
    import torch  # type: ignore[import-not-found,unused-ignore]

    context.note("Python", platform.python_version())
    context.note("torch", torch.__version__)
    context.note("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        context.note(f"GPU {index}", f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}")
    for name, command in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]),
        ("nvcc", [shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '')}/bin/nvcc", "--version"]),
        ("links", ["nvidia-smi", "topo", "-m"]),
    ):
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
        except OSError as error:
            said = str(error)
        context.note(name, said.splitlines()[-1] if name == "nvcc" and said else said[:500])
    names = ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")
    context.note("multicast", ", ".join(f"{name}={os.environ.get(name)}" for name in names))
    count = torch.cuda.device_count()
    context.check("two GPUs", count >= 2, count)
    both = count >= 2 and torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)
    context.check("P2P both ways", both)
