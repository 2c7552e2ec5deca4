"""blockwise.cu on a machine without a GPU: built with g++ and run by fibers, and a fake driver and NVRTC around it.

`emulated` is the fixture that builds it, once for all processes of a test run. Kernels get addresses of CPU tensors.
The fake driver's side (`emulated.library`) is told what to fail by `fake_*` functions, see fake_cuda.cpp.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peerd.codec.format.blockwise import code_bytes, scale_count
from peerd.codec.kernels import cuda

HERE = Path(__file__).parent
KERNELS = Path(cuda.__file__).parent / "source"
SOURCES = ("cuda_shim.cpp", "fake_cuda.cpp")
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-strict-aliasing")
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


class Emulated:
    """The three functions of blockwise quantization, on CPU tensors, by the CUDA kernels."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self._run = library.peerd_shim_run
        self._run.restype = ctypes.c_char_p
        library.fake_complaint.restype = library.fake_launch.restype = ctypes.c_char_p
        self.grid, self.seed = 2, 1

    def quantize(
        self, x: Tensor, code: str, block: int, codes: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        codes = torch.empty(code_bytes(x.numel(), code), dtype=torch.uint8) if codes is None else codes
        scales = torch.empty(scale_count(x.numel(), block)) if scales is None else scales
        job = self.job(x, codes, scales, block)
        self.launch("quantize", code, x.dtype, job)
        return codes, scales

    def dequantize(self, codes: Tensor, scales: Tensor, code: str, block: int, out: Tensor) -> Tensor:
        self.launch("dequantize", code, out.dtype, self.job(out, codes, scales, block))
        return out

    def block_scales(self, x: Tensor, block: int) -> Tensor:
        scales = torch.empty(scale_count(x.numel(), block))
        self.launch("scales", "", x.dtype, self.job(x, None, scales, block))
        return scales

    def job(self, values: Tensor, codes: Tensor | None, scales: Tensor, block: int) -> cuda.KernelJob:
        log2 = block.bit_length() - 1
        at = 0 if codes is None else codes.data_ptr()
        return cuda.KernelJob(values.data_ptr(), at, scales.data_ptr(), values.numel(), log2)

    def launch(self, kind: str, code: str, dtype: torch.dtype, job: cuda.KernelJob, only: int = -1) -> None:
        """Run a kernel on a grid of `self.grid` CUDA blocks, or one block of it; the seed says in which order."""
        function = getattr(self.library, cuda.kernel_name(kind, code, cuda.SUFFIXES[dtype]))
        at, seed = ctypes.cast(function, ctypes.c_void_p), ctypes.c_uint64(self.seed)
        wrong = self._run(at, ctypes.byref(job), self.grid, cuda.THREADS, seed, only)
        assert wrong is None, wrong.decode()


@functools.cache
def _built(folder: Path) -> Emulated:
    import fcntl  # where there is a g++, there is this

    library = folder / "libfake_cuda.so"
    with library.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return Emulated(ctypes.CDLL(str(library)))


def _build(library: Path) -> None:
    whole, sources = library.with_suffix(".new"), [str(HERE / name) for name in SOURCES]
    command = ["g++", *FLAGS, *WARNINGS, f"-I{HERE}", f"-I{KERNELS}", "-o", str(whole), *sources, "-ldl"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    whole.rename(library)


@pytest.fixture
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """The kernels as g++ builds them; skips where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ to compile the CUDA kernels for a CPU")
    folder = tmp_path_factory.getbasetemp()
    found = _built(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    found.library.fake_reset()
    found.grid, found.seed = 2, 1
    return found
