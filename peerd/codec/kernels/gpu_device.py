"""The CUDA driver through ctypes: the few calls that load a compiled kernel and launch it on a given stream.

Independent of torch and quantization. Any thread may make calls. A failed call raises DriverError with the driver's
name of the error, and so does a machine without a driver.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NAMES: Final = ("nvcuda.dll",) if sys.platform == "win32" else ("libcuda.so.1", "libcuda.so")

NO_BINARY_FOR_GPU: Final = 209  # the driver names these codes CUDA_ERROR_...
UNSUPPORTED_PTX: Final = 222
_OK: Final = 0
_Pointer = ctypes.c_void_p
_SM_COUNT, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_...
_NEEDED: Final = (
    *("cuInit", "cuDriverGetVersion", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    *("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel"),
    *("cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuGetErrorName"),
)


class DriverError(Exception):
    """A driver call failed. `code` is the driver's error number, or 0 if there is no driver."""

    def __init__(self, call: str, name: str, code: int) -> None:
        super().__init__(f"{call}: {name}" if code else name)
        self.code = code


def load() -> ctypes.CDLL:
    """Load this machine's driver. Raises DriverError if no driver is installed."""
    for name in NAMES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise DriverError("load", f"the NVIDIA driver ({NAMES[0]}) was not found", 0)


class GpuDevice:
    """One GPU and its primary context, which it shares with torch. Raises DriverError if driver or GPU cannot be used.

    `capability`: compute capability, such as (9, 0). `processors`: number of multiprocessors. `cuda`: newest version of
    CUDA that the driver supports, as (major, minor).
    """

    def __init__(self, library: ctypes.CDLL, ordinal: int) -> None:
        missing = [name for name in _NEEDED if not hasattr(library, name)]
        if missing:
            raise DriverError("load", f"the NVIDIA driver has no {missing[0]}", 0)
        self._library = library
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._start = library.cuLaunchKernel
        self._start.argtypes = (_Pointer, *(ctypes.c_uint,) * 7, _Pointer, _Pointer, _Pointer)
        self._call("cuInit", 0)
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        self.cuda = (version.value // 1000, version.value % 1000 // 10)
        self._device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self.capability = (self._attribute(_MAJOR), self._attribute(_MINOR))
        self.processors = self._attribute(_SM_COUNT)
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread, as needed to load modules and query kernels."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def module(self, image: bytes) -> ctypes.c_void_p:
        """Load machine code or PTX; it stays loaded until the process ends."""
        module = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(image))
        return module

    def function(self, module: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        """A kernel of a module."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def resident_blocks(self, function: ctypes.c_void_p, threads: int) -> int:
        """Number of CUDA blocks of a kernel that fit on the whole GPU at the same time, at least one."""
        blocks = ctypes.c_int()
        self._call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), function, threads, ctypes.c_size_t(0)
        )
        return max(1, blocks.value * self.processors)

    def launch(
        self, function: ctypes.c_void_p, blocks: int, threads: int, stream: int, argument: ctypes.Structure
    ) -> None:
        """Launch a kernel that takes one structure; returns before it ends. Any thread and context may call it."""
        parameters = _Pointer(ctypes.addressof(argument))
        self._check("cuCtxPushCurrent_v2", self._push(self._context))
        try:
            code = self._start(function, blocks, 1, 1, threads, 1, 1, 0, stream, ctypes.byref(parameters), None)
        finally:
            self._check("cuCtxPopCurrent_v2", self._pop(ctypes.byref(parameters)))
        self._check("cuLaunchKernel", code)

    def _attribute(self, which: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, self._device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code != _OK:
            text = ctypes.c_char_p()
            known = self._library.cuGetErrorName(code, ctypes.byref(text)) == _OK and text.value
            raise DriverError(name, known.decode() if known else f"error {code}", code)
