"""The compiled kernels of blockwise quantization, with each of this machine's instruction sets, against the reference.

Everything is compared to the bit. Also: what is said when the library is missing, broken or not for this machine.
"""

from __future__ import annotations

import importlib.machinery
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.codec.format.blockwise import BLOCKS, code_bytes, scale_count
from peerd.codec.kernels import native, reference
from peerd.codec.kernels.reference import CodingOutputs
from tests.kit.amount import examples
from tests.kit.blockwise_cases import (
    DTYPES,
    INFINITY,
    NAMES,
    NAN,
    ONE,
    SIGN,
    bit_lists,
    from_bits,
    hard_cases,
    hard_codes,
    normal,
    same_bits,
)

built = pytest.mark.skipif(not native.available(), reason=native.why_not() or "built")
COMPILERS = ("c++", "g++", "clang++")
LARGE = (24 << 20) // 4 + 77  # values, so many that results go past the caches


@contextmanager
def using(isa: str) -> Iterator[None]:
    """Compute with this instruction set meanwhile."""
    before = native.isa()
    native.use_isa(isa)
    try:
        yield
    finally:
        native.use_isa(before)


@pytest.fixture
def fresh() -> Iterator[None]:
    """The library is looked for anew, in the test and after it."""
    native._load.cache_clear()
    yield
    native._load.cache_clear()


def same(left: Tensor, right: Tensor) -> bool:
    """To the bit, but for which NaN comes of a NaN: that is the processor's choice."""
    if same_bits(left, right):
        return True
    nan, zero = left.isnan() & right.isnan(), torch.zeros((), dtype=left.dtype)
    return same_bits(torch.where(nan, zero, left), torch.where(nan, zero, right))


def wrong(x: Tensor, code: str, block: int) -> list[str]:
    """Codes, scales and decoded values that differ from the reference's, with any instruction set; empty if none do."""
    expected_codes, expected_scales = reference.quantize(x, code, block)
    found = []
    for isa in native.isas():
        with using(isa):
            codes, scales = native.quantize(x, code, block)
            alone = native.block_scales(x, block)
        right = {
            "codes": same_bits(codes, expected_codes),
            "scales": same(scales, expected_scales),
            "scales alone": same(alone, expected_scales),
        }
        found += [f"{what} of {code}/{block}, {x.numel()} {x.dtype}, {isa}" for what in right if not right[what]]
    return found + wrongly_decoded(expected_codes, expected_scales, code, block, x.numel(), x.dtype)


def wrongly_decoded(codes: Tensor, scales: Tensor, code: str, block: int, count: int, dtype: torch.dtype) -> list[str]:
    """Decoded values that differ from the reference's, and outputs that are not the given tensor, as in `wrong`."""
    expected = reference.dequantize(codes, scales, code, block, torch.empty(count, dtype=dtype))
    found = []
    for isa in native.isas():
        out = torch.empty(count, dtype=dtype)
        with using(isa):
            given_back = native.dequantize(codes, scales, code, block, out) is out
        right = {"another tensor": given_back, "decoded values": same(out, expected)}
        found += [f"{what} of {code}/{block}, {count} {dtype}, {isa}" for what in right if not right[what]]
    return found


# --- the bits -------------------------------------------------------------------------------------------------------
@built
@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
def test_hard_cases_are_coded_and_decoded_like_the_reference(code: str, seed: int) -> None:
    for number, x in enumerate(hard_cases(seed).values()):
        for dtype in DTYPES:
            assert wrong(x.to(dtype), code, BLOCKS[number % len(BLOCKS)]) == []
            assert wrong(x.to(dtype), code, 64) == []


@built
@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
def test_any_length_and_block_size_will_do(code: str, seed: int) -> None:
    values = normal(5002, seed) ** 5
    for count in (*range(200), *range(200, 5001, 257), 5000):
        for dtype in DTYPES:
            assert wrong(values[:count].to(dtype), code, BLOCKS[count % len(BLOCKS)]) == []


@built
@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
@settings(max_examples=examples(100))
@given(bits=bit_lists(), dtype=st.sampled_from(DTYPES), block=st.sampled_from(BLOCKS))
def test_any_bits_are_coded_like_the_reference(code: str, bits: list[int], dtype: torch.dtype, block: int) -> None:
    assert wrong(from_bits(bits).to(dtype), code, block) == []


@built
@pytest.mark.parametrize("code", NAMES)
def test_every_code_is_decoded_with_any_scale_even_with_none_that_coding_makes(code: str, seed: int) -> None:
    strange = [0, SIGN, 1, 0x007FFFFF, 0x02081CEB, ONE, ONE | SIGN, 0x7F61B1E6, 0x7F7FFFFF]
    strange += [INFINITY, INFINITY | SIGN, NAN, NAN | SIGN, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF]
    scales = from_bits(strange)
    for dtype in DTYPES:
        codes, _ = hard_codes(code, 256 * len(scales), 256, seed)
        assert wrongly_decoded(codes, scales, code, 256, 256 * len(scales), dtype) == []
        for count in (1, 7, 1001):
            assert wrongly_decoded(*hard_codes(code, count, 64, seed), code, 64, count, dtype) == []


@built
@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("isa", native.isas())
def test_large_tensors_whose_results_go_past_the_caches_are_no_different(isa: str, code: str, seed: int) -> None:
    with using(isa):
        check_large_tensors(code, seed)


def check_large_tensors(code: str, seed: int) -> None:
    x = normal(1 << 16, seed).repeat(LARGE // (1 << 16) + 1)[:LARGE]
    one_codes, one_scales = native.quantize(x[: 1 << 16], code, 256)
    codes, scales = native.quantize(x, code, 256)
    repeats = LARGE // (1 << 16)
    assert torch.equal(codes[: repeats * len(one_codes)].view(repeats, -1), one_codes.expand(repeats, -1))
    assert torch.equal(scales[: repeats * len(one_scales)].view(repeats, -1), one_scales.expand(repeats, -1))
    rest = reference.quantize(x[repeats << 16 :], code, 256)
    assert torch.equal(codes[repeats * len(one_codes) :], rest[0])
    assert torch.equal(scales[repeats * len(one_scales) :], rest[1])
    buffer = torch.empty(LARGE + 1)
    for out in (buffer[:-1], buffer[1:]):  # in lines of the cache, and off them
        native.dequantize(codes, scales, code, 256, out)
        assert torch.equal(out[: 1 << 16], native.dequantize(one_codes, one_scales, code, 256, torch.empty(1 << 16)))
        assert torch.equal(out[: repeats << 16].view(repeats, -1), out[: 1 << 16].expand(repeats, -1))
        assert torch.equal(out[repeats << 16 :], reference.dequantize(*rest, code, 256, torch.empty(LARGE & 0xFFFF)))


@built
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("block", [64, 1024, 4096])
@pytest.mark.parametrize("more", [False, True])
def test_what_coding_misses_is_what_decoding_it_again_says(code: str, block: int, more: bool, seed: int) -> None:
    for count in (0, 1, 63, 64, 1023, 1024, 1025, 4097, 9001):
        values, before = normal(count, seed) ** 5, normal(count, seed + 1)
        codes, scales = reference.quantize(values, code, block)
        decoded = reference.dequantize(codes, scales, code, block, torch.empty_like(values))
        missed = before + (values - decoded) if more else values - decoded
        for isa in native.isas():
            x = values.clone()
            for seen in (None, torch.empty_like(x), x):  # x is overwritten by the last one
                found = torch.empty_like(codes), torch.empty_like(scales), before.clone()
                with using(isa):
                    native.quantize_missing(x, code, block, *found[:2], CodingOutputs(found[2], more, seen))
                assert all(map(same_bits, found, (codes, scales, missed))), isa
                assert seen is None or same_bits(seen, decoded), isa


@built
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("block", [64, 1024, 4096])
def test_decoding_onto_a_sum_is_decoding_and_adding(code: str, block: int, seed: int) -> None:
    for count in (0, 1, 63, 64, 1023, 1024, 1025, 4097, 9001):
        base, (codes, scales) = normal(count, seed), hard_codes(code, count, block, seed)
        expected = base + reference.dequantize(codes, scales, code, block, torch.empty(count))
        for isa in native.isas():
            sum_so_far = base.clone()
            for out in (torch.empty(count), sum_so_far):
                with using(isa):
                    native.dequantize_onto(codes, scales, code, block, sum_so_far, out)
                assert same(out, expected), isa


@built
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("isa", native.isas())
def test_a_program_that_flushes_denormals_to_zero_gets_the_same_bits(isa: str, code: str, seed: int) -> None:
    x = torch.cat((normal(640, seed, 5e37), normal(640, seed, 1e-37), normal(640, seed, 1e-5)))
    codes, scales = reference.quantize(x, code, 64)
    expected = reference.dequantize(codes, scales, code, 64, torch.empty_like(x))
    half = reference.quantize(x.half(), code, 64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals to zero")
    try:
        with using(isa):
            found = native.quantize(x, code, 64)
            out = native.dequantize(codes, scales, code, 64, torch.empty_like(x))
            found_half = native.quantize(x.half(), code, 64)
        still = float(torch.full((), 1e-39) * 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert same_bits(found[0], codes)
    assert same_bits(found[1], scales)
    assert same_bits(out, expected)
    assert same_bits(found_half[0], half[0])
    assert still == 0.0, "the caller's choice was changed"


# --- tensors of any layout ------------------------------------------------------------------------------------------
@built
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_may_start_anywhere_and_have_any_strides(code: str, dtype: torch.dtype, seed: int) -> None:
    values = normal(60 * 50, seed).to(dtype)
    for x in (values[1:], values[3:700], values.view(60, 50).T, values.view(60, 50)[:, 7], values[::2], values[0]):
        assert wrong(x, code, 64) == []
    raw = torch.zeros(1 + 4 * values.numel(), dtype=torch.uint8)
    size = values.numel() * values.element_size()
    raw[1 : 1 + size] = values.view(torch.uint8)
    codes, scales = torch.zeros(1 + values.numel(), dtype=torch.uint8), torch.zeros(1 + scale_count(values.numel(), 64))
    given_codes, given_scales = codes[1 : 1 + code_bytes(values.numel() - 2, code)], scales[1:]
    expected = reference.quantize(values[1:-1], code, 64)
    for isa in native.isas():
        with using(isa):
            found = native.quantize(values[1:-1], code, 64, given_codes, given_scales)
        assert all(map(torch.equal, found, expected)), isa
        assert [each.data_ptr() for each in found] == [given_codes.data_ptr(), given_scales.data_ptr()]
    assert wrongly_decoded(found[0], found[1], code, 64, values.numel() - 2, dtype) == []


@built
def test_an_empty_tensor_has_no_codes() -> None:
    for code in NAMES:
        assert wrong(torch.empty(0), code, 64) == []
        assert wrong(torch.empty(3, 0, 5, dtype=torch.bfloat16), code, 256) == []


@built
def test_a_tensor_that_requires_gradients_is_coded_as_it_is() -> None:
    x = torch.ones(70, requires_grad=True)
    codes, scales = native.quantize(x, "int8", 64)
    assert codes.tolist() == [127] * 70
    assert scales.tolist() == [1.0, 1.0]


# --- what is refused ------------------------------------------------------------------------------------------------
@built
def test_an_instruction_set_that_is_not_here_is_refused() -> None:
    before = native.isa()
    missing = [name for name in native.ISAS if name not in native.isas()]
    for name in (*missing, "mmx"):
        with pytest.raises(ValueError, match=name):
            native.use_isa(name)
    assert native.isa() == before
    assert "plain" in native.isas()


# --- without the library --------------------------------------------------------------------------------------------
def test_the_library_is_there_where_a_compiler_is() -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip("no C++ compiler on PATH")
    assert native.available(), native.why_not()
    assert native.why_not() == ""


def says(monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The reason given for the unusable library in this folder."""
    monkeypatch.setattr(native, "_FOLDER", folder)
    assert not native.available()
    assert native.isas() == []
    with pytest.raises(RuntimeError, match="reinstall peerd with a C"):
        native.quantize(torch.zeros(3), "int8", 64)
    said = native.why_not()
    assert "\n" not in said
    assert "slower" in said
    return said


def library_in(folder: Path, content: bytes) -> None:
    (folder / f"_blockwise{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(content)


@pytest.mark.usefixtures("fresh")
def test_without_a_library_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "were not built" in says(monkeypatch, tmp_path / "nowhere")


@pytest.mark.usefixtures("fresh")
def test_a_file_that_is_no_library_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library_in(tmp_path, b"not a library at all")
    assert "cannot be loaded" in says(monkeypatch, tmp_path)


@built
@pytest.mark.usefixtures("fresh")
def test_a_library_for_another_processor_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = bytearray(next(path for path in native._candidates(native._FOLDER) if path.exists()).read_bytes())
    if content[:4] != b"\x7fELF":
        pytest.skip("not a system with ELF libraries")
    content[18] ^= 0xD5  # the processor that it is for
    library_in(tmp_path, bytes(content))
    assert "cannot be loaded" in says(monkeypatch, tmp_path)


@built
@pytest.mark.usefixtures("fresh")
def test_a_library_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_ABI", native._ABI + 1)
    assert "another version" in says(monkeypatch, native._FOLDER)


@pytest.mark.usefixtures("fresh")
def test_a_library_of_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import _ctypes

    library_in(tmp_path, Path(_ctypes.__file__).read_bytes())
    assert "cannot be loaded" in says(monkeypatch, tmp_path)
