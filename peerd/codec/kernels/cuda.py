"""Blockwise quantization of CUDA tensors: blockwise.cu, compiled at first use by torch's NVRTC.

Needs only torch and the NVIDIA driver. Kernels run on torch's current stream of the tensor's device, may be launched
from any thread, and are compiled once per process, device and code. Before a code is used on a device, its kernels must
reproduce the reference's bits for a small tensor. Failures are never raised: `why_not` explains them in one sentence,
and plain torch then does the work on the device, slower.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from peerd.codec.format.blockwise import CODES, scale_count
from peerd.codec.kernels import gpu_device, nvrtc, reference
from peerd.codec.kernels.reference import contiguous, room_for

SOURCE: Final = "blockwise.cu"
HEADERS: Final = ("tables.h", "blockwise_gpu.h")
THREADS: Final = 256  # of a CUDA block
TILE_VALUES: Final = 4096  # processed by a CUDA block at a time
SUFFIXES: Final = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

_FOLDER: Final = Path(__file__).parent / "source"
_SCALES: Final = ""  # used instead of a code's name if only scales are needed
_REMEDIES: Final = {
    gpu_device.NO_BINARY_FOR_GPU: "a newer torch may support this GPU",
    gpu_device.UNSUPPORTED_PTX: "update the NVIDIA driver",
}
_ANY_REMEDY: Final = "install a CUDA build of torch that matches the driver"


class KernelJob(ctypes.Structure):
    """Arguments of a kernel, as `struct Job` in blockwise.cu: device addresses and the number of values."""

    _fields_ = (
        ("values", ctypes.c_uint64),
        ("codes", ctypes.c_uint64),
        ("scales", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("block_log2", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class CudaKernels:
    """The kernels of one GPU, called with addresses and numbers; independent of torch.

    `ordinal` is the driver's number of the GPU. Raises NvrtcError or DriverError, here and at the first use of a code,
    if compiling or loading fails.
    """

    def __init__(self, compiler: ctypes.CDLL, the_driver: ctypes.CDLL, ordinal: int) -> None:
        self._nvrtc = nvrtc.Nvrtc(compiler)
        self._device = gpu_device.GpuDevice(the_driver, ordinal)
        self.target = self._nvrtc.target(self._device.capability)
        self._lock = threading.Lock()
        self._ready: dict[str, tuple[ctypes.c_void_p, int]] = {}  # kernel -> function, CUDA blocks that fit at once

    def prepare(self, code: str) -> None:
        """Compile and load the kernels of a code, or those for scales alone if `code` is empty, unless done already."""
        kinds = ("quantize", "dequantize") if code else ("scales",)
        names = [kernel_name(kind, code, suffix) for kind in kinds for suffix in SUFFIXES.values()]
        with self._lock:
            if names[-1] in self._ready:
                return
            only = f"PEERD_ONLY={CODES[code].number if code else 0}"
            headers = {name: _text(name) for name in HEADERS}
            image = self._nvrtc.compile(_text(SOURCE), headers, self.target, [only])
            with self._device.current():
                module = self._device.module(image)
                for name in names:
                    function = self._device.function(module, name)
                    self._ready[name] = (function, self._device.resident_blocks(function, THREADS))

    def run(self, kind: str, code: str, suffix: str, job: KernelJob, stream: int) -> None:
        """Launch `kind` ("quantize", "dequantize" or "scales") for values of the type `suffix`; returns at once."""
        if job.count == 0:
            return
        name = kernel_name(kind, code, suffix)
        if name not in self._ready:
            self.prepare(code)
        function, most_blocks = self._ready[name]
        blocks = min(-(-job.count // TILE_VALUES), most_blocks)
        self._device.launch(function, blocks, THREADS, stream, job)


@functools.cache
def kernel_name(kind: str, code: str, suffix: str) -> str:
    """Name of a kernel in blockwise.cu."""
    return f"peerd_{kind}_{code.removeprefix('fp8-')}_{suffix}" if code else f"peerd_{kind}_{suffix}"


def _text(name: str) -> str:
    return (_FOLDER / name).read_text("utf-8")


# --- tensors --------------------------------------------------------------------------------------------------------

_lock: Final = threading.RLock()
_kernels: Final[dict[int, CudaKernels]] = {}  # by device
_problems: Final[dict[tuple[int, str], str]] = {}  # by device and code: empty, or the reason for not using it


def available(device: torch.device | str) -> bool:
    """True if the kernels can be used on this GPU. The first call compiles some, which takes a while."""
    return not why_not(device)


def why_not(device: torch.device | str) -> str:
    """One sentence why the kernels are not used, with the effect and the remedy; empty if they are used."""
    device = torch.device(device)
    if device.type == _TYPE and (known := _problems.get((device.index or 0, _SCALES))) is not None:
        return known  # before every call: torch takes long to report whether there are GPUs
    if device.type != _TYPE or not torch.cuda.is_available():
        return f"the CUDA kernels of blockwise quantization need an NVIDIA GPU that torch detects; {device} is not one"
    return _problem(device, _SCALES)


def quantize(
    x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes (uint8, flat) and scales (float32, one per block) of `x` (float32, bfloat16 or float16 on a GPU; any
    shape).

    They are written into `codes` and `scales` if given: contiguous, of exactly that size, on x's device.
    """
    if _problem(x.device, code):
        return reference.quantize(x, code, block, codes, scales)
    x = contiguous(x)
    codes, scales = room_for(x, code, block, codes, scales)
    _run("quantize", code, SUFFIXES[x.dtype], _job(x, codes, scales, block), x.device)
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor:
    """Decode into `out`, which has the shape and dtype of the encoded values; returns it. All are contiguous, on one
    device.

    Accepts any codes and scales.
    """
    if _problem(out.device, code):
        return reference.dequantize(codes, scales, code, block, out)
    _run("dequantize", code, SUFFIXES[out.dtype], _job(out, codes, scales, block), out.device)
    return out


def block_scales(x: Tensor, block: int) -> Tensor:
    """The scales alone, which show whether `x` can be encoded."""
    if _problem(x.device, _SCALES):
        return reference.block_scales(x, block)
    x = contiguous(x)
    scales = torch.empty(scale_count(x.numel(), block), dtype=torch.float32, device=x.device)
    _run("scales", _SCALES, SUFFIXES[x.dtype], _job(x, None, scales, block), x.device)
    return scales


def _job(values: Tensor, codes: Tensor | None, scales: Tensor, block: int) -> KernelJob:
    at = 0 if codes is None else codes.data_ptr()
    return KernelJob(values.data_ptr(), at, scales.data_ptr(), values.numel(), block.bit_length() - 1)


def _run(kind: str, code: str, suffix: str, job: KernelJob, device: torch.device) -> None:
    _kernels[_ordinal(device)].run(kind, code, suffix, job, _stream(device))


def _problem(device: torch.device, code: str) -> str:
    """Why the kernels of a code (or of the scales) are not used on a device; empty if they are. Determined once."""
    key = (_ordinal(device), code)
    if (known := _problems.get(key)) is None:
        with _lock:
            if (known := _problems.get(key)) is None:
                known = _problems[key] = _try(device, code)
    return known


def _try(device: torch.device, code: str) -> str:
    """Prepare the kernels of a code and compare their results with the reference; returns the problem, or ""."""
    ordinal = _ordinal(device)
    remedy = _ANY_REMEDY
    try:
        if ordinal not in _kernels:
            _kernels[ordinal] = CudaKernels(*_libraries(), ordinal)
        _kernels[ordinal].prepare(code)
        if not (wrong := _differs(device, code)):
            return ""
        what = f"their results differ from the definition ({wrong})"
        remedy = "please report this with the name of the GPU"
    except gpu_device.DriverError as error:
        what, remedy = str(error), _REMEDIES.get(error.code, _ANY_REMEDY)
    except nvrtc.NvrtcError as error:
        what = str(error)
    which = f"code {code}" if code else "blockwise quantization"
    return f"the CUDA kernels of {which} are not used on {device}: {what}; the slower plain torch is used; {remedy}"


def _differs(device: torch.device, code: str) -> str:
    """Run the kernels on about 5000 values; returns the case that differs from the reference, or ""."""
    values = torch.linspace(-3.0, 2.0, 5003)
    values = values * values * values * (torch.arange(5003) % 7 + 1)
    values[::11] = -0.0
    for dtype, suffix in SUFFIXES.items():
        for block in (64, 256, 4096):
            x = values.to(dtype)
            scales = reference.block_scales(x, block)
            seen = x.to(device)
            found = torch.empty_like(scales, device=device)
            if not code:
                _run("scales", code, suffix, _job(seen, None, found, block), device)
                same = torch.equal(found.cpu(), scales)
            else:
                codes, scales = reference.quantize(x, code, block)
                its = torch.empty_like(codes, device=device)
                job = _job(seen, its, found, block)
                _run("quantize", code, suffix, job, device)
                same = torch.equal(its.cpu(), codes) and torch.equal(found.cpu(), scales)
                _run("dequantize", code, suffix, job, device)
                decoded = reference.dequantize(codes, scales, code, block, torch.empty_like(x))
                same = same and torch.equal(seen.cpu(), decoded)
            if not same:
                return f"{suffix}, blocks of {block}"
    return ""


# --- calls of torch, replaced by tests without a GPU ----------------------------------------------------------------

_TYPE: Final = "cuda"


def _ordinal(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _stream(device: torch.device) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """NVRTC for torch's version of CUDA, and the driver."""
    version = torch.version.cuda
    majors = (int(version.partition(".")[0]),) if version else nvrtc.MAJORS
    sites = dict.fromkeys((Path(torch.__file__).parents[1], *(Path(entry) for entry in sys.path if entry)))
    folders = [folder for site in sites for folder in nvrtc.folders_of(site)]
    return nvrtc.load(folders, majors), gpu_device.load()
