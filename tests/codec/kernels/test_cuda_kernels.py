"""The CUDA kernels of blockwise quantization repeat the reference's bits.

Without a GPU: the same source, built with g++, run by fibers in changing orders (tests/kit/cuda_shim). NVIDIA's
compilers, where they can be had, translate it without a complaint. With a GPU: the real thing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.codec.format.blockwise import BLOCKS, CODES, code_bytes, scale_count
from peerd.codec.kernels import cuda, nvrtc, reference
from tests.kit.amount import examples
from tests.kit.blockwise_cases import DTYPES, NAMES, bit_lists, from_bits, hard_cases, hard_codes, normal, same_bits
from tests.kit.cuda_shim import KERNELS, Emulated, emulated

__all__ = ["emulated"]  # the fixture

ARCHITECTURES = ("sm_80", "sm_90")
TILE = cuda.TILE_VALUES
ENDS = tuple(cuda.SUFFIXES.values())
ALL_KERNELS = [cuda.kernel_name("scales", "", end) for end in ENDS]
for kind in ("quantize", "dequantize"):
    ALL_KERNELS += [cuda.kernel_name(kind, code, end) for code in NAMES for end in ENDS]
each_code = pytest.mark.parametrize("code", NAMES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
with_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def surrounded(count: int, dtype: torch.dtype, fill: Tensor, shift: int) -> tuple[Tensor, Tensor]:
    """Memory full of a pattern, and `count` elements in it that begin `shift` elements after an aligned address."""
    whole = fill.repeat(64 + count + 64)[: 64 + count + 64].to(dtype)
    begin = 32 + shift
    return whole, whole[begin : begin + count]


def untouched(whole: Tensor, inside: Tensor, before: Tensor) -> bool:
    """True when nothing but `inside` was written."""
    begin, end = inside.storage_offset(), inside.storage_offset() + inside.numel()
    return same_bits(whole[:begin], before[:begin]) and same_bits(whole[end:], before[end:])


def same_scales(left: Tensor, right: Tensor, dtype: torch.dtype) -> bool:
    """To the bit; but a NaN of float16 has no certain bits as a single: each processor widens it in its own way."""
    if dtype != torch.float16:
        return same_bits(left, right)
    return same_bits(torch.where(left.isnan(), -1.0, left), torch.where(right.isnan(), -1.0, right))


def wrong(kernels: Emulated, x: Tensor, code: str, block: int) -> list[str]:
    """The results of quantizing and decoding `x` that differ from the reference's; empty when all are equal."""
    codes, scales = reference.quantize(x, code, block)
    found, found_scales = kernels.quantize(x, code, block)
    same = {
        "scales": same_scales(found_scales, scales, x.dtype),
        "codes": torch.equal(found, codes),
        "scales alone": same_scales(kernels.block_scales(x, block), scales, x.dtype),
    }
    usable = torch.where(scales <= 3e38, scales, 0.0)
    expected = reference.dequantize(codes, usable, code, block, torch.empty_like(x))
    same["decoded values"] = same_bits(kernels.dequantize(codes, usable, code, block, torch.empty_like(x)), expected)
    return [what for what, right in same.items() if not right]


# --- the source, run by fibers --------------------------------------------------------------------------------------


@pytest.mark.slow
@each_code
@each_dtype
@pytest.mark.thorough
def test_hard_cases_give_the_bits_of_the_reference(
    emulated: Emulated, code: str, dtype: torch.dtype, seed: int
) -> None:
    for number, values in enumerate(hard_cases(seed).values()):
        assert wrong(emulated, values.to(dtype), code, BLOCKS[number % len(BLOCKS)]) == []
        assert wrong(emulated, values.to(dtype), code, CODES[code].block) == []


@pytest.mark.slow
@each_code
@each_dtype
def test_every_block_size_and_every_end_of_a_tile(emulated: Emulated, code: str, dtype: torch.dtype, seed: int) -> None:
    for block in BLOCKS:
        for count in (TILE - 1, TILE, TILE + 1, 2 * TILE + block, 3 * TILE + block // 2 + 1):
            assert wrong(emulated, normal(count, seed + count, dtype=dtype), code, block) == []


@pytest.mark.slow
@each_code
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bits=bit_lists(), dtype=st.sampled_from(DTYPES), block=st.sampled_from(BLOCKS), order=st.integers(1, 1 << 30))
def test_any_bits_give_the_bits_of_the_reference(
    emulated: Emulated, code: str, bits: list[int], dtype: torch.dtype, block: int, order: int
) -> None:
    emulated.seed = order
    assert wrong(emulated, from_bits(bits).to(dtype), code, block) == []


@pytest.mark.slow
@each_code
@each_dtype
def test_no_value_is_read_or_written_outside_whatever_the_alignment(
    emulated: Emulated, code: str, dtype: torch.dtype, seed: int
) -> None:
    """NaN lies around what is read: it would poison a block. A vector at a wrong address fails in the shim."""
    for block in (64, 512, 4096):
        for count in (1, 77, TILE, TILE + 1001):
            x = normal(count, seed + count, dtype=dtype)
            codes, scales = reference.quantize(x, code, block)
            decoded = reference.dequantize(codes, scales, code, block, torch.empty_like(x))
            for shift in (0, 1, 2, 3, 4, 8):
                _, given = surrounded(count, dtype, torch.tensor([torch.nan]), shift)
                given.copy_(x)
                around, found = surrounded(len(codes), torch.uint8, torch.tensor([7, 99]), shift)
                around_scales, found_scales = surrounded(len(scales), torch.float32, torch.tensor([3.0]), shift)
                before, before_scales = around.clone(), around_scales.clone()
                emulated.quantize(given, code, block, found, found_scales)
                assert torch.equal(found, codes), shift
                assert same_bits(found_scales, scales), shift
                assert untouched(around, found, before), shift
                assert untouched(around_scales, found_scales, before_scales), shift
                around, out = surrounded(count, dtype, torch.tensor([5.0]), shift)
                before = around.clone()
                assert same_bits(emulated.dequantize(found, found_scales, code, block, out), decoded), shift
                assert untouched(around, out, before), shift


@pytest.mark.slow
@each_code
@each_dtype
def test_every_byte_is_decoded_with_every_kind_of_scale(
    emulated: Emulated, code: str, dtype: torch.dtype, seed: int
) -> None:
    for block in BLOCKS:
        codes, scales = hard_codes(code, 8 * block + 301, block, seed)
        out = torch.empty(8 * block + 301, dtype=dtype)
        expected = reference.dequantize(codes, scales, code, block, torch.empty_like(out))
        assert same_bits(emulated.dequantize(codes, scales, code, block, out), expected)


@pytest.mark.slow
@each_code
def test_neither_the_grid_nor_the_order_of_threads_changes_anything(emulated: Emulated, code: str, seed: int) -> None:
    x = normal(5 * TILE + 123, seed)
    for order, (grid, block) in enumerate([(1, 4096), (2, 1024), (3, 2048), (6, 64), (9, 512), (1, 2048), (1, 1024)]):
        emulated.grid, emulated.seed = grid, seed + order
        assert wrong(emulated, x, code, block) == []


@each_dtype
def test_values_beyond_four_thousand_million_are_found(emulated: Emulated, dtype: torch.dtype, seed: int) -> None:
    """One CUDA block of a huge grid sees only its own tile, here the last; the memory before it does not exist."""
    tile, block, code = 1_100_003, 256, "dynamic8"
    x, begin = normal(TILE, seed, dtype=dtype), tile * TILE
    expected, scales = reference.quantize(x, code, block)
    codes, found = torch.empty_like(expected), torch.empty_like(scales)
    values = x.clone()
    job = cuda.KernelJob(
        values.data_ptr() - begin * x.element_size(),
        codes.data_ptr() - code_bytes(begin, code),
        found.data_ptr() - 4 * scale_count(begin, block),
        begin + TILE,
        8,
    )
    emulated.grid = tile + 1
    emulated.launch("quantize", code, dtype, job, only=tile)
    assert torch.equal(codes, expected)
    assert same_bits(found, scales)
    emulated.launch("dequantize", code, dtype, job, only=tile)
    assert same_bits(values, reference.dequantize(codes, scales, code, block, torch.empty_like(x)))


def test_each_tile_is_the_work_of_one_block(emulated: Emulated, seed: int) -> None:
    x = normal(5 * TILE, seed)
    codes, scales = torch.full((5 * TILE,), 200, dtype=torch.uint8), torch.zeros(5 * TILE // 64)
    emulated.grid = 3
    emulated.launch("quantize", "int8", x.dtype, emulated.job(x, codes, scales, 64), only=1)
    assert (codes.view(5, TILE) != 200).any(dim=1).tolist() == [False, True, False, False, True]
    assert (scales.view(5, -1) > 0).any(dim=1).tolist() == [False, True, False, False, True]


def test_nothing_is_done_for_no_values(emulated: Emulated) -> None:
    codes, scales = emulated.quantize(torch.empty(0), "int4", 64)
    assert codes.numel() == scales.numel() == 0


# --- NVIDIA's compilers ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.thorough
def test_nvcc_compiles_every_kernel_without_warnings_or_spills(architecture: str, tmp_path: Path) -> None:
    image = tmp_path / "blockwise.cubin"
    options = ["-cubin", f"-arch={architecture}", *nvrtc.STRICT, "-Xptxas", "-v", "-Wno-deprecated-gpu-targets"]
    command = ["nvcc", *options, "-o", str(image), str(KERNELS / cuda.SOURCE)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    told = ended.stdout + ended.stderr
    assert ended.returncode == 0, told
    assert "warning" not in told, told
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)
    assert len(spills) >= len(ALL_KERNELS)
    assert {number for found in spills for number in found} == {"0"}, told
    assert max(int(number) for number in re.findall(r"Used (\d+) registers", told)) <= 64  # 1024 threads at a time
    held = image.read_bytes()
    assert [name for name in ALL_KERNELS if name.encode() not in held] == []


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "compute_80"])
def test_a_real_nvrtc_compiles_every_kernel(architecture: str) -> None:
    folders = [folder for entry in sys.path if entry for folder in nvrtc.folders_of(Path(entry))]
    try:
        compiler = nvrtc.Nvrtc(nvrtc.load(folders))
    except nvrtc.NvrtcError as error:
        pytest.skip(str(error))
    source, *headers = ((KERNELS / name).read_text() for name in (cuda.SOURCE, *cuda.HEADERS))
    named = dict(zip(cuda.HEADERS, headers, strict=True))
    found = set()
    for only in (0, *(code.number for code in CODES.values())) if architecture == "sm_90" else (0, 16, 18):
        image = compiler.compile(source, named, architecture, [f"PEERD_ONLY={only}"])
        assert image.startswith(b"\x7fELF" if architecture.startswith("sm_") else b"//")
        found |= {name for name in ALL_KERNELS if name.encode() in image}
    if architecture == "sm_90":
        assert found == set(ALL_KERNELS)
    assert {name for name in ALL_KERNELS if re.search("dynamic8|int4|scales", name)} <= found


# --- a GPU ----------------------------------------------------------------------------------------------------------


def wrong_on_gpu(x: Tensor, code: str, block: int) -> list[str]:
    """As `wrong`."""
    codes, scales = reference.quantize(x, code, block)
    found, found_scales = cuda.quantize(x.cuda(), code, block)
    same = {
        "scales": same_scales(found_scales.cpu(), scales, x.dtype),
        "codes": torch.equal(found.cpu(), codes),
        "scales alone": same_scales(cuda.block_scales(x.cuda(), block).cpu(), scales, x.dtype),
    }
    usable = torch.where(scales <= 3e38, scales, 0.0)
    expected = reference.dequantize(codes, usable, code, block, torch.empty_like(x))
    out = torch.empty_like(x, device="cuda")
    found = cuda.dequantize(codes.cuda(), usable.cuda(), code, block, out)
    same["decoded values"] = same_bits(found.cpu(), expected)
    return [what for what, right in same.items() if not right]


@with_gpu
def test_the_kernels_serve_on_this_gpu() -> None:
    assert cuda.why_not("cuda") == ""


@pytest.mark.slow
@with_gpu
@each_code
@each_dtype
def test_a_gpu_gives_the_bits_of_the_reference(code: str, dtype: torch.dtype, seed: int) -> None:
    cases = [*hard_cases(seed).values(), normal(3_000_017, seed)]
    for number, values in enumerate(cases):
        assert wrong_on_gpu(values.to(dtype), code, BLOCKS[number % len(BLOCKS)]) == []
        assert wrong_on_gpu(values.to(dtype), code, CODES[code].block) == []
        assert wrong_on_gpu(values.to(dtype)[1:], code, BLOCKS[-1 - number % len(BLOCKS)]) == []
    for block in BLOCKS:
        codes, scales = hard_codes(code, 8 * block + 301, block, seed)
        out = torch.empty(8 * block + 301, dtype=dtype)
        expected = reference.dequantize(codes, scales, code, block, out)
        found = torch.empty_like(out, device="cuda")
        assert same_bits(cuda.dequantize(codes.cuda(), scales.cuda(), code, block, found).cpu(), expected)


@with_gpu
def test_kernels_wait_for_what_torch_does_on_the_same_stream(seed: int) -> None:
    x = normal(1 << 22, seed)
    codes, scales = reference.quantize(x * 3, "int8", 64)
    side, on_gpu = torch.cuda.Stream(), x.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            found, found_scales = cuda.quantize(on_gpu * 3, "int8", 64)
    side.synchronize()
    assert torch.equal(found.cpu(), codes)
    assert same_bits(found_scales.cpu(), scales)


@with_gpu
def test_any_thread_may_use_a_gpu(seed: int) -> None:
    found: list[list[str]] = []

    def work(number: int) -> None:
        found.append(wrong_on_gpu(normal(70_000, seed + number), NAMES[number % 5], 256))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[]] * 8
