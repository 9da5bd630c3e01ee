"""The driver and its GPUs, by the driver's own libraries: no torch, no nvidia-smi. A script of its own.

Prints one JSON object: {"driver": "580.159.04" or "", "cuda": "13.0" or "", "gpus": [{"index", "name", "capability", "memory"}],
"error"}; memory in bytes. CUDA_VISIBLE_DEVICES holds, as for everything else. No UUID is asked for.
"""

from __future__ import annotations

import ctypes
import json
import re
from pathlib import Path
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_MODULE = Path("/proc/driver/nvidia/version")


def driver_version() -> str:
    """The driver's version by NVML, else by its kernel module; empty where neither answers."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        said = ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(said, len(said)) == 0:
            return said.value.decode()
    except (OSError, AttributeError):
        pass
    try:
        found = re.search(r"\b[0-9]{3}\.[0-9.]+\b", _MODULE.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return found[0] if found else ""


class _Cuda:
    """libcuda, each call of which raises RuntimeError with the driver's words."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, function)(*arguments):
            words = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(words))
            raise RuntimeError(f"{function}: {code}, {(words.value or b'an unknown error').decode()}")


def look() -> dict[str, Any]:
    """What there is; ``error`` says in the driver's words why there is none."""
    found: dict[str, Any] = {"driver": driver_version(), "cuda": "", "gpus": [], "error": ""}
    try:
        cuda = _Cuda()
        number, count = ctypes.c_int(), ctypes.c_int()
        cuda("cuDriverGetVersion", ctypes.byref(number))
        found["cuda"] = f"{number.value // 1000}.{number.value % 1000 // 10}"
        cuda("cuInit", 0)
        cuda("cuDeviceGetCount", ctypes.byref(count))
        for index in range(count.value):
            device, major, minor, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
            name = ctypes.create_string_buffer(100)
            cuda("cuDeviceGet", ctypes.byref(device), index)
            cuda("cuDeviceGetName", name, len(name), device)
            cuda("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
            cuda("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
            cuda("cuDeviceTotalMem_v2", ctypes.byref(size), device)
            found["gpus"].append(
                {
                    "index": index,
                    "name": name.value.decode(errors="replace"),
                    "capability": f"{major.value}.{minor.value}",
                    "memory": size.value,
                }
            )
        if not found["gpus"]:
            found["error"] = "the driver names no GPU"
    except (OSError, AttributeError, RuntimeError) as error:
        found["error"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(look()))
