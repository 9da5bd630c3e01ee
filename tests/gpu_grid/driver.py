"""The CUDA driver by ctypes: load an image, run its kernel."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
NO_BINARY, UNSUPPORTED_PTX = 209, 222


class DriverError(RuntimeError):
    """A call that failed and is not what is looked at."""


class Driver:
    """The first GPU. Raises `DriverError` or OSError where there is none."""

    def __init__(self) -> None:
        # Else code is loaded when a function is asked for, and what cannot be loaded is told then.
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._do("cuInit", 0)
        device = ctypes.c_int()
        self._do("cuDeviceGet", ctypes.byref(device), 0)
        context = ctypes.c_void_p()
        self._do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._do("cuCtxSetCurrent", context)
        major, minor, version = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._do("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, device)
        self._do("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, device)
        self._do("cuDriverGetVersion", ctypes.byref(version))
        name = ctypes.create_string_buffer(100)
        self._do("cuDeviceGetName", name, len(name), device)
        self.name = name.value.decode()
        self.capability = (major.value, minor.value)
        self.cuda = (version.value // 1000, version.value % 1000 // 10)
        self._out = ctypes.c_uint64()
        self._do("cuMemAlloc_v2", ctypes.byref(self._out), ctypes.c_size_t(4))

    def _do(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._cuda, function)(*arguments):
            raise DriverError(f"{function}: {code} {self.error(code)}")

    def error(self, code: int) -> str:
        """The name of an error."""
        name = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"?").decode()

    def answer(self, data: bytes) -> tuple[int, int | None]:
        """Load an image and run its kernel `answer`: the first error's code (0: none), and what the kernel wrote."""
        module, function, written = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(-1)
        held = ctypes.create_string_buffer(data, len(data))
        if code := self._cuda.cuModuleLoadData(ctypes.byref(module), held):
            return int(code), None
        try:
            pointer = ctypes.byref(self._out)
            parameters = (ctypes.c_void_p * 1)(ctypes.cast(pointer, ctypes.c_void_p))
            zero = ctypes.c_void_p()
            self._do("cuMemsetD32_v2", self._out, ctypes.c_uint(0xFFFFFFFF), ctypes.c_size_t(1))
            for call, arguments in (
                ("cuModuleGetFunction", (ctypes.byref(function), module, b"answer")),
                ("cuLaunchKernel", (function, 1, 1, 1, 1, 1, 1, 0, zero, parameters, zero)),
                ("cuCtxSynchronize", ()),
                ("cuMemcpyDtoH_v2", (ctypes.byref(written), self._out, ctypes.c_size_t(4))),
            ):
                if code := getattr(self._cuda, call)(*arguments):
                    return int(code), None
            return 0, written.value
        finally:
            self._cuda.cuModuleUnload(module)
