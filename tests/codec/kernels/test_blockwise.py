"""The definition of blockwise quantization, as the plain torch reference computes it.

It is held to an oracle that works with fractions, to the error that each code is known for, and to the rules for
zeros, denormals and what is not finite.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peerd.codec.format.blockwise import BLOCKS, CODES, code_bytes, scale_count
from peerd.codec.kernels import reference, tables
from tests.kit import blockwise_oracle as oracle
from tests.kit.amount import examples
from tests.kit.blockwise_cases import (
    DTYPES,
    INFINITY,
    LENGTHS,
    NAMES,
    NAN,
    ONE,
    SIGN,
    bit_lists,
    bits_of,
    from_bits,
    hard_cases,
    hard_codes,
    near_thresholds,
    normal,
    same_bits,
)

BITS_8 = [name for name in NAMES if CODES[name].bits == 8]
BITS_4 = [name for name in NAMES if CODES[name].bits == 4]


def round_trip(x: Tensor, code: str, block: int) -> Tensor:
    """The values that a receiver decodes."""
    codes, scales = reference.quantize(x, code, block)
    return reference.dequantize(codes, scales, code, block, torch.empty_like(x))


def wrong(x: Tensor, code: str, block: int) -> list[str]:
    """The results of encoding and decoding `x` that differ from the oracle's by a bit; empty when all are equal."""
    if x.dtype == torch.float16:  # which single its NaN becomes is the processor's choice
        x = x.masked_fill(x.isnan(), torch.inf)
    codes, scales = reference.quantize(x, code, block)
    coded = (bytes(codes.tolist()), bits_of(scales)) == oracle.quantized(bits_of(x), code, block)
    usable = torch.where(scales.view(torch.int32) > tables.LARGEST_BITS, 0.0, scales)
    out = reference.dequantize(codes, usable, code, block, torch.empty_like(x))
    name = str(x.dtype).removeprefix("torch.")
    decoded = bits_of(out) == oracle.dequantized(codes.tolist(), bits_of(usable), code, block, x.numel(), name)
    return [what for what, right in (("codes", coded), ("decoded values", decoded)) if not right]


# --- one value at a time --------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
@settings(max_examples=examples(100))
@given(values=bit_lists(), dtype=st.sampled_from(DTYPES), block=st.sampled_from(BLOCKS[:2]))
def test_whatever_the_values_they_are_coded_as_fractions_say(
    code: str, values: list[int], dtype: torch.dtype, block: int
) -> None:
    assert wrong(from_bits(values).to(dtype), code, block) == []


@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
def test_every_hard_case_is_coded_as_fractions_say(code: str, seed: int) -> None:
    for x in hard_cases(seed).values():
        assert wrong(x[:130], code, 64) == []


@pytest.mark.slow
@pytest.mark.parametrize("code", NAMES)
@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_values_next_to_each_threshold_go_to_the_side_that_fractions_say(code: str, scale: float) -> None:
    assert wrong(near_thresholds(scale), code, 64) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("code", NAMES)
def test_every_byte_decodes_as_fractions_say_under_every_kind_of_scale(
    code: str, dtype: torch.dtype, seed: int
) -> None:
    codes, scales = hard_codes(code, 64 * 12 + 5, 64, seed)
    count = 64 * 12 + 5
    out = reference.dequantize(codes, scales, code, 64, torch.empty(count, dtype=dtype))
    expected = oracle.dequantized(codes.tolist(), bits_of(scales), code, 64, count, str(dtype).removeprefix("torch."))
    assert bits_of(out) == expected


# --- rules ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", NAMES)
def test_a_block_with_something_not_finite_keeps_that_as_its_scale_and_has_zero_codes(code: str) -> None:
    for bad in (INFINITY, INFINITY | SIGN, NAN, NAN | SIGN | 5, 0x7F800001, tables.LARGEST_BITS + 1):
        x = normal(192, 1)
        x[70] = from_bits([bad])[0]
        codes, scales = reference.quantize(x, code, 64)
        whole, whole_scales = reference.quantize(torch.where(torch.arange(192) // 64 == 1, 0.0, x), code, 64)
        assert same_bits(codes, whole)
        assert bits_of(scales) == [bits_of(whole_scales)[0], bad & ~SIGN, bits_of(whole_scales)[2]]


@pytest.mark.parametrize("code", NAMES)
def test_infinity_does_not_hide_a_nan_nor_a_large_value(code: str) -> None:
    x = from_bits([INFINITY, NAN, ONE, 0x7F7FFFFF])
    assert bits_of(reference.quantize(x, code, 64)[1]) == [NAN]


@pytest.mark.parametrize("code", NAMES)
def test_a_block_of_nothing_above_the_smallest_magnitude_is_zero_and_decodes_to_zero(code: str) -> None:
    small = tables.SMALLEST_BITS
    for values in ([0, SIGN], [1, SIGN | 1], [small, small | SIGN], [0x00800000, 0x807FFFFF]):
        x = from_bits(values * 32)
        codes, scales = reference.quantize(x, code, 64)
        assert bits_of(scales) == [0]
        assert set(codes.tolist()) == {oracle.ZERO[code] * (0x11 if CODES[code].bits == 4 else 1)}
        assert same_bits(round_trip(x, code, 64), torch.zeros(64))
    above = from_bits([small + 1] * 64)
    assert bits_of(reference.quantize(above, code, 64)[1]) == [small + 1]


@pytest.mark.parametrize(
    ("code", "signed"), [("dynamic8", 0x80), ("fp8-e4m3", 0x80), ("int8", 0), ("int4", 8), ("nf4", 7)]
)
def test_minus_zero_keeps_its_sign_only_where_the_code_has_one(code: str, signed: int) -> None:
    codes, _ = reference.quantize(from_bits([ONE, SIGN, SIGN | 1, 0]), code, 64)
    if CODES[code].bits == 4:
        assert [int(codes[0]) >> 4, int(codes[1]) & 15, int(codes[1]) >> 4] == [signed] * 3
    else:
        assert codes[1:].tolist() == [signed, signed, 0]


@pytest.mark.parametrize("code", NAMES)
def test_no_byte_decodes_beyond_the_largest_value_of_its_block(code: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    count = 256 * 8 // CODES[code].bits
    for scale in (1.0, 0.3, 65504.0, 3e-37, 2.9999999e38):
        scales = torch.full((scale_count(count, 64),), scale)
        out = reference.dequantize(codes, scales, code, 64, torch.empty(count))
        assert out.isfinite().all()
        assert out.abs().double().max() <= scales[0].double() * (1 + 2**-22)


@pytest.mark.parametrize("code", BITS_4)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65])
def test_the_earlier_of_two_4_bit_codes_is_in_the_lower_half_and_padding_is_zero(code: str, count: int) -> None:
    x = normal(count, 1)
    codes, scales = reference.quantize(x, code, 64)
    nibbles = [nibble for byte in codes.tolist() for nibble in (byte & 15, byte >> 4)]
    expected = [oracle.encoded(bits, bits_of(scales)[i // 64], code) for i, bits in enumerate(bits_of(x))]
    assert nibbles == expected + [0] * (count % 2)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("code", NAMES)
def test_a_block_is_coded_as_if_it_were_alone(code: str, block: int) -> None:
    x = normal(block * 2 + 7, block) * torch.logspace(-3, 3, block * 2 + 7)
    codes, scales = reference.quantize(x, code, block)
    alone = [reference.quantize(x[at : at + block], code, block) for at in range(0, len(x), block)]
    assert same_bits(codes, torch.cat([part[0] for part in alone]))
    assert same_bits(scales, torch.cat([part[1] for part in alone]))


@pytest.mark.parametrize("code", NAMES)
def test_slices_of_the_work_do_not_show(code: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    x = normal(20_001, seed)
    whole = reference.quantize(x, code, 64)
    back = reference.dequantize(*whole, code, 64, torch.empty_like(x))
    monkeypatch.setattr(reference, "_SLICE_VALUES", 4096)
    assert all(map(same_bits, reference.quantize(x, code, 64), whole))
    assert same_bits(reference.dequantize(*whole, code, 64, torch.empty_like(x)), back)
    assert same_bits(reference.block_scales(x, 64), whole[1])


@pytest.mark.parametrize("code", NAMES)
def test_every_length_gives_as_many_codes_and_scales_as_are_due(code: str) -> None:
    for count in LENGTHS:
        codes, scales = reference.quantize(normal(count, 1), code, 128)
        assert (codes.shape, codes.dtype) == ((code_bytes(count, code),), torch.uint8)
        assert (scales.shape, scales.dtype) == ((scale_count(count, 128),), torch.float32)
        assert reference.dequantize(codes, scales, code, 128, torch.empty(count)).shape == (count,)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("code", NAMES)
def test_half_precision_values_are_coded_as_the_singles_they_are(code: str, dtype: torch.dtype, seed: int) -> None:
    x = normal(3000, seed, 3.0, dtype)
    assert all(map(same_bits, reference.quantize(x, code, 256), reference.quantize(x.float(), code, 256)))


# --- coding what was decoded ----------------------------------------------------------------------------------------
# Scales come back exactly when a code holds its largest value exactly (dynamic8 and nf4: 1 times the scale) or when
# the values are bfloat16, to which `127 * (scale / 127)` is rounded back. Otherwise they come back within two units
# in the last place. Codes come back in every case: what a value is off by is far less than half a step, as long as
# the scale stays inside the range that blocks may have, and no value falls below the smallest of its type.
# nf4 holds -1 and 1, so a block's largest value survives with either sign.
@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e37])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("code", NAMES)
def test_coding_what_was_decoded_gives_the_same_codes(code: str, dtype: torch.dtype, spread: float, seed: int) -> None:
    x = normal(9000, seed, spread, dtype)
    codes, scales = reference.quantize(x, code, 64)
    again, scales_again = reference.quantize(
        reference.dequantize(codes, scales, code, 64, torch.empty_like(x)), code, 64
    )
    assert same_bits(again, codes)
    units = (scales_again.view(torch.int32) - scales.view(torch.int32)).abs().max()
    exact = code in ("dynamic8", "nf4") or dtype == torch.bfloat16
    assert units <= (0 if exact else 2)


@pytest.mark.parametrize("code", NAMES)
def test_the_largest_value_of_a_block_comes_back_with_its_sign(code: str, seed: int) -> None:
    x = normal(64 * 200, seed).view(-1, 64)
    at = x.abs().argmax(dim=1, keepdim=True)
    largest, back = x.gather(1, at), round_trip(x, code, 64).gather(1, at)
    assert ((back - largest).abs() <= largest.abs() * 2**-22).all()


# --- how good it is -------------------------------------------------------------------------------------------------
KNOWN_ERROR_PERCENT = {  # (code, block): for normal values, for Student's t with three degrees of freedom
    ("dynamic8", 64): (0.95, 1.10),
    ("dynamic8", 256): (1.08, 1.37),
    ("dynamic8", 4096): (1.30, 1.85),
    ("int8", 64): (0.59, 1.09),
    ("int8", 256): (0.70, 1.89),
    ("int4", 64): (10.8, 16.3),
    ("nf4", 64): (9.2, 11.1),
    ("fp8-e4m3", 256): (2.6, 2.1),
}


def error_percent(x: Tensor, code: str, block: int) -> float:
    """Root of the mean squared error, relative to that of the values."""
    return float(100 * (round_trip(x, code, block) - x).norm() / x.norm())


@pytest.mark.parametrize(("code", "block"), KNOWN_ERROR_PERCENT)
def test_the_error_on_normal_values_is_the_known_one(code: str, block: int, seed: int) -> None:
    known, _ = KNOWN_ERROR_PERCENT[code, block]
    assert error_percent(normal(1 << 17, seed), code, block) == pytest.approx(known, rel=0.02)


@pytest.mark.parametrize(("code", "block"), KNOWN_ERROR_PERCENT)
def test_the_error_on_values_with_heavy_tails_is_about_the_known_one(code: str, block: int, seed: int) -> None:
    _, known = KNOWN_ERROR_PERCENT[code, block]
    chi = normal(3 << 17, seed + 1).view(3, -1).square().sum(dim=0)
    assert error_percent(normal(1 << 17, seed) / (chi / 3).sqrt(), code, block) == pytest.approx(known, rel=0.15)


@pytest.mark.parametrize("code", BITS_8)
def test_no_value_is_further_off_than_half_a_step_of_its_code(code: str, seed: int) -> None:
    x = normal(1 << 14, seed).view(-1, 64)
    largest = x.abs().amax(dim=1, keepdim=True)
    step = {"dynamic8": 0.0141, "int8": 1 / 127, "fp8-e4m3": 1 / 14}[code]
    assert ((round_trip(x, code, 64) - x).abs() <= largest * step / 2 * 1.001).all()
