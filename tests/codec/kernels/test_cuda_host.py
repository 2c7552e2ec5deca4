"""Host side of the CUDA kernels, which finds, compiles and starts them, against a fake NVRTC and driver on this CPU.

Grids, streams and contexts are what a real driver needs; every failure becomes one sentence, and plain torch goes on.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from peerd.codec.format.blockwise import BLOCKS
from peerd.codec.kernels import cuda, gpu_device, nvrtc, ops, reference
from tests.kit.blockwise_cases import DTYPES, NAMES, normal, same_bits
from tests.kit.cuda_shim import Emulated, emulated

__all__ = ["emulated"]  # the fixture

CPU = torch.device("cpu")
RESIDENT = 4  # CUDA blocks that the fake GPU runs at once: 2 on each of 2 multiprocessors
STREAM = 0x7777


class Without:
    """A library that lacks one function."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._library, self._name = library, name

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._library, name)


@pytest.fixture
def gpu(emulated: Emulated, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulated]:
    """CPU tensors pass for CUDA tensors; nothing is known yet."""
    monkeypatch.setattr(cuda, "_TYPE", "cpu")
    monkeypatch.setattr(cuda, "_ordinal", lambda device: 0)
    monkeypatch.setattr(cuda, "_stream", lambda device: STREAM)
    monkeypatch.setattr(cuda, "_libraries", lambda: (emulated.library, emulated.library))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "_kernels", {})
    monkeypatch.setattr(cuda, "_problems", {})
    yield emulated
    assert emulated.library.fake_depth() == 0, "a context stayed pushed"


def called(gpu: Emulated, name: str) -> int:
    """The number of calls of a function by the code under test."""
    return int(gpu.library.fake_calls(name.encode()))


def fail(gpu: Emulated, name: str, code: int) -> None:
    """From now on this function fails so."""
    gpu.library.fake_fail(name.encode(), code)


def last_launch(gpu: Emulated) -> tuple[str, int, int, int]:
    """Kernel, CUDA blocks, threads, stream."""
    blocks, threads, stream = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_void_p()
    which = gpu.library.fake_launches() - 1
    name = gpu.library.fake_launch(which, ctypes.byref(blocks), ctypes.byref(threads), ctypes.byref(stream))
    return name.decode(), blocks.value, threads.value, stream.value or 0


# --- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_are_coded_as_by_the_reference(gpu: Emulated, code: str, dtype: torch.dtype, seed: int) -> None:
    assert cuda.available("cpu"), cuda.why_not("cpu")
    for number, block in enumerate(BLOCKS):
        x = normal(3000 * number + 1, seed + number, dtype=dtype)
        codes, scales = reference.quantize(x, code, block)
        found, found_scales = cuda.quantize(x, code, block)
        assert torch.equal(found, codes)
        assert same_bits(found_scales, scales)
        assert same_bits(cuda.block_scales(x, block), scales)
        out = torch.empty_like(x)
        assert cuda.dequantize(codes, scales, code, block, out) is out
        assert same_bits(out, reference.dequantize(codes, scales, code, block, torch.empty_like(x)))
    ending = cuda.SUFFIXES[dtype]
    assert last_launch(gpu) == (cuda.kernel_name("dequantize", code, ending), RESIDENT, cuda.THREADS, STREAM)


@pytest.mark.slow
def test_any_layout_is_read_and_given_memory_is_written(gpu: Emulated, seed: int) -> None:
    x = normal(60 * 50, seed).view(60, 50).t()[::2]
    expected, expected_scales = reference.quantize(x.contiguous(), "int4", 128)
    codes, scales = torch.empty_like(expected), torch.empty_like(expected_scales)
    assert cuda.quantize(x.requires_grad_(), "int4", 128, codes, scales)[0] is codes
    assert torch.equal(codes, expected)
    assert same_bits(scales, expected_scales)
    assert same_bits(cuda.block_scales(x, 128), expected_scales)
    out = torch.empty(25, 60)
    assert same_bits(
        cuda.dequantize(codes, scales, "int4", 128, out),
        reference.dequantize(codes, scales, "int4", 128, torch.empty(25, 60)),
    )
    assert cuda.quantize(torch.empty(3, 0), "nf4", 64)[0].numel() == 0


@pytest.mark.slow
def test_wrong_arguments_are_refused_before_any_address_is_used(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "best", lambda device: cuda)
    quantize, decode = torch.ops.peerd.quantize_blockwise, torch.ops.peerd.dequantize_blockwise.out
    x, codes, scales = torch.zeros(100), torch.zeros(100, dtype=torch.uint8), torch.zeros(2)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: quantize(x.double(), "int8", 64), "float32, bfloat16, float16"),
        (lambda: quantize(x, "int9", 64), "unknown code 'int9'"),
        (lambda: quantize(x, "int8", 100), "block size of 100; allowed: 64"),
        (lambda: quantize.out(x, "int8", 64, codes=codes[:99], scales=scales), "codes for 100 values must be 100"),
        (lambda: quantize.out(x, "int8", 64, codes=codes, scales=scales.double()), "scales for 100 values must be 2"),
        (lambda: quantize.out(x, "int8", 64, codes=codes.repeat(2)[::2], scales=scales), "contiguous"),
        (lambda: quantize.out(x, "int8", 64, codes=codes.to("meta"), scales=scales), "codes are on meta"),
        (lambda: decode(codes, scales[:1], "int8", 64, out=x), "scales for 100 values must be 2"),
        (lambda: decode(codes.int(), scales, "int8", 64, out=x), "codes for 100 values must be 100"),
        (lambda: decode(codes.repeat(2)[::2], scales, "int8", 64, out=x), "contiguous"),
        (lambda: torch.ops.peerd.block_scales(x, 32), "block size of 32; allowed: 64"),
    ]
    for wrong, words in cases:
        with pytest.raises(ValueError, match=words):
            wrong()
    assert gpu.library.fake_launches() == 0
    assert cuda.available("cpu"), cuda.why_not("cpu")
    before = gpu.library.fake_launches()
    torch.ops.peerd.block_scales(x, 64)
    assert gpu.library.fake_launches() == before + 1


@pytest.mark.slow
def test_decoding_with_gaps_between_the_values_is_done_beside_them(
    gpu: Emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "best", lambda device: cuda)
    x = normal(100, 1)
    codes, scales = reference.quantize(x, "int8", 64)
    whole = torch.full((200,), 5.0)
    torch.ops.peerd.dequantize_blockwise.out(codes, scales, "int8", 64, out=whole[::2])
    assert same_bits(whole[::2].contiguous(), reference.dequantize(codes, scales, "int8", 64, torch.empty(100)))
    assert set(whole[1::2].tolist()) == {5.0}


# --- addresses ------------------------------------------------------------------------------------------------------


def test_a_code_is_compiled_once_even_when_threads_race(gpu: Emulated, seed: int) -> None:
    kernels = cuda.CudaKernels(gpu.library, gpu.library, 0)
    x = normal(5000, seed)
    expected, expected_scales = reference.quantize(x, "int8", 64)
    results: list[bool] = []

    def work() -> None:
        codes, scales = torch.empty_like(expected), torch.empty_like(expected_scales)
        job = cuda.KernelJob(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), len(x), 6)
        kernels.run("quantize", "int8", "f32", job, 0)
        results.append(torch.equal(codes, expected) and same_bits(scales, expected_scales))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert called(gpu, "nvrtcCompileProgram") == called(gpu, "cuModuleLoadData") == 1
    assert called(gpu, "nvrtcDestroyProgram") == 1
    assert called(gpu, "cuLaunchKernel") == 4


@pytest.mark.slow
@pytest.mark.parametrize(("count", "blocks"), [(1, 1), (4096, 1), (4097, 2), (4096 * 4, 4), (4096 * 9 + 1, 4)])
def test_the_grid_has_a_block_for_each_tile_until_the_gpu_is_full(gpu: Emulated, count: int, blocks: int) -> None:
    kernels = cuda.CudaKernels(gpu.library, gpu.library, 1)
    x, scales = torch.ones(count), torch.empty(count // 64 + 1)
    kernels.run("scales", "", "f32", cuda.KernelJob(x.data_ptr(), 0, scales.data_ptr(), count, 6), STREAM + count)
    assert last_launch(gpu) == ("peerd_scales_f32", blocks, 256, STREAM + count)


@pytest.mark.parametrize(
    ("capability", "target"), [((8, 0), "sm_80"), ((9, 0), "sm_90"), ((8, 6), "compute_80"), ((12, 0), "compute_100")]
)
def test_a_gpu_gets_its_own_code_or_what_its_driver_can_translate(
    gpu: Emulated, capability: tuple[int, int], target: str
) -> None:
    gpu.library.fake_capability(*capability)
    kernels = cuda.CudaKernels(gpu.library, gpu.library, 0)
    assert kernels.target == target
    kernels.prepare("nf4")
    kind = "nvrtcGetCUBINSize" if target.startswith("sm") else "nvrtcGetPTXSize"
    assert called(gpu, kind) == 1
    image = nvrtc.Nvrtc(gpu.library).compile("__global__", {"tables.h": "PEERD_"}, target, ["A=1"])
    assert image.rstrip(b"\0").decode().split() == [
        *("image", f"--gpu-architecture={target}", "--fmad=false", "--ftz=false", "--prec-div=true"),
        *("--prec-sqrt=true", "--define-macro=A=1"),
    ]


# --- what can be wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "code", "words"),
    [
        ("cuInit", 100, "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("cuDeviceGet", 101, "cuDeviceGet: CUDA_ERROR_INVALID_DEVICE"),
        ("cuDevicePrimaryCtxRetain", 2, "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuCtxPushCurrent_v2", 12345, "cuCtxPushCurrent_v2: error 12345"),
        ("cuModuleLoadData", 209, "CUDA_ERROR_NO_BINARY_FOR_GPU.*a newer torch may support this GPU"),
        ("cuModuleLoadData", 222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION.*update the NVIDIA driver"),
        ("cuModuleGetFunction", 500, "CUDA_ERROR_NOT_FOUND"),
        ("cuOccupancyMaxActiveBlocksPerMultiprocessor", 200, "CUDA_ERROR_INVALID_IMAGE"),
        ("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED"),
        ("nvrtcVersion", 3, "NVRTC failed in nvrtcVersion: NVRTC_ERROR_INVALID_INPUT"),
        ("nvrtcCreateProgram", 4, "NVRTC failed in nvrtcCreateProgram"),
        ("nvrtcCompileProgram", 6, r"NVRTC rejected peerd's kernels: peerd.cu\(9\): error: a mistake;"),
        ("nvrtcGetCUBINSize", 5, "NVRTC failed in nvrtcGetCUBINSize"),
    ],
)
def test_every_failure_is_one_sentence_and_plain_torch_goes_on(
    gpu: Emulated, call: str, code: int, words: str, seed: int
) -> None:
    fail(gpu, call, code)
    sentence = cuda.why_not("cpu")
    assert not cuda.available("cpu")
    assert "\n" not in sentence
    assert sentence.startswith("the CUDA kernels of blockwise quantization are not used on cpu: ")
    assert "; the slower plain torch is used; " in sentence
    assert re.search(words, sentence), sentence
    x = normal(500, seed)
    expected, scales = reference.quantize(x, "nf4", 64)
    found, found_scales = cuda.quantize(x, "nf4", 64)
    assert torch.equal(found, expected)
    assert same_bits(found_scales, scales)
    assert same_bits(cuda.block_scales(x, 64), scales)
    out = cuda.dequantize(found, found_scales, "nf4", 64, torch.empty(500))
    assert same_bits(out, reference.dequantize(found, scales, "nf4", 64, torch.empty(500)))


def test_a_failure_is_found_out_once(gpu: Emulated) -> None:
    fail(gpu, "cuModuleLoadData", 222)
    assert cuda.why_not("cpu") == cuda.why_not("cpu")
    assert called(gpu, "cuModuleLoadData") == 1


@pytest.mark.parametrize("name", ["nvrtcGetSupportedArchs", "cuLaunchKernel"])
def test_a_library_that_lacks_a_function_is_named(gpu: Emulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Without(gpu.library, name)
    monkeypatch.setattr(cuda, "_libraries", lambda: (old, old))
    assert name in cuda.why_not("cpu")


def test_a_gpu_older_than_the_compiler_knows_is_told_so(gpu: Emulated) -> None:
    gpu.library.fake_capability(6, 1)
    assert "NVRTC 12.8 does not compile for a GPU as old as compute capability 6.1" in cuda.why_not("cpu")


@pytest.mark.slow
def test_kernels_that_compute_something_else_are_not_used(gpu: Emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it is the reference that is wrong, which looks the same."""
    right = reference.quantize

    def wrong(x: torch.Tensor, code: str, block: int, *given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = right(x, code, block, *given)
        if x.dtype == torch.bfloat16 and code == "int8":
            codes[-1] ^= 1
        return codes, scales

    monkeypatch.setattr(reference, "quantize", wrong)
    assert cuda.available("cpu")
    x = torch.ones(70, dtype=torch.bfloat16)
    assert torch.equal(cuda.quantize(x, "int8", 64)[0], wrong(x, "int8", 64)[0])
    (sentence,) = filter(None, cuda._problems.values())
    assert "of code int8 are not used on cpu: their results differ from the definition (bf16, blocks of 64)" in sentence
    launches = gpu.library.fake_launches()
    cuda.quantize(x, "int4", 64)
    assert gpu.library.fake_launches() > launches


def test_a_machine_without_gpu_or_driver_or_compiler_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "need an NVIDIA GPU that torch detects; cpu is not one" in cuda.why_not("cpu")
    monkeypatch.setattr(gpu_device, "NAMES", ("libnone.so.1",))
    with pytest.raises(gpu_device.DriverError, match=r"the NVIDIA driver \(libnone.so.1\) was not found"):
        gpu_device.load()
    with pytest.raises(nvrtc.NvrtcError, match="the compiler that torch's CUDA builds bring, was not found"):
        nvrtc.load([tmp_path], [99])
    (tmp_path / "libnvrtc.so.99").write_bytes(b"no library")
    with pytest.raises(nvrtc.NvrtcError, match="cannot be loaded: "):
        nvrtc.load([tmp_path], [99])


def test_nvrtc_is_found_under_its_many_names(tmp_path: Path) -> None:
    for name in (
        *("nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cu13/lib/libnvrtc-builtins.so.13.0"),
        *("nvidia/cu13/lib/libnvrtc.alt.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        *("nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.8", "torch/lib/libnvrtc-1ea278b5.so.11.2"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    folders = nvrtc.folders_of(tmp_path)
    for major, first in (
        (13, "nvidia/cu13/lib/libnvrtc.so.13"),
        (12, "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
        (11, "torch/lib/libnvrtc-1ea278b5.so.11.2"),
    ):
        assert list(nvrtc.candidates(folders, [major])) == [tmp_path / first, Path(f"libnvrtc.so.{major}")]
