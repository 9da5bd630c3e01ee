"""Makes `torch.cuda` say that one GPU of a given compute capability is there, so that imports take the CUDA path.

A script's helper, loaded from its file in isolated children: standard library only, nothing of this package. Only what
is asked at import is faked: availability, count, capability, name, properties, free memory. Whatever touches the
device afterwards fails as it does without a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

_GIB = 1 << 30
# Bytes of shared memory a block may opt in to, by major (CUDA C++ Programming Guide, technical specifications).
_SHARED_OPT_IN = {8: 99 << 10, 9: 227 << 10, 10: 227 << 10, 12: 99 << 10}


def properties(major: int, minor: int) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` has; sizes in bytes."""
    shared = _SHARED_OPT_IN.get(major, 99 << 10)
    return SimpleNamespace(
        name=f"fake sm_{major}{minor}",
        major=major,
        minor=minor,
        total_memory=96 * _GIB,
        multi_processor_count=128,
        max_threads_per_multi_processor=2048 if major in (8, 9, 10) else 1536,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + 1024,
        warp_size=32,
        L2_cache_size=64 << 20,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=1,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=1_000_000,
        memory_clock_rate=1_000_000,
        memory_bus_width=512,
    )


def fake(torch: Any, capability: str) -> None:
    """Patch ``torch.cuda``; ``capability`` like `12.0`."""
    major, minor = (int(part) for part in capability.split("."))
    device = properties(major, minor)
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (major, minor)
    cuda.get_device_properties = lambda device_=None: device
    cuda.get_device_name = lambda device_=None: device.name
    cuda.mem_get_info = lambda device_=None: (device.total_memory - 2 * _GIB, device.total_memory)
    cuda.is_bf16_supported = lambda including_emulation=True: major >= 8
    _fake_triton(device)


def _fake_triton(device: SimpleNamespace) -> None:
    """Triton asks the driver itself for the device's properties, and its error path crashes where there is none."""
    try:
        from triton.backends.nvidia import driver  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    made = driver.CudaUtils.__init__
    answer = {
        "max_shared_mem": device.shared_memory_per_block_optin,
        "max_num_regs": device.regs_per_multiprocessor,
        "multiprocessor_count": device.multi_processor_count,
        "warpSize": device.warp_size,
        "sm_clock_rate": device.clock_rate,
        "mem_clock_rate": device.memory_clock_rate,
        "mem_bus_width": device.memory_bus_width,
    }

    def make(self: Any) -> None:
        made(self)
        self.get_device_properties = lambda index: dict(answer)

    driver.CudaUtils.__init__ = make
