"""The numbers of blockwise quantization: where they come from, and that every form of them says the same."""

from __future__ import annotations

import bisect
import itertools
import random
import statistics
from fractions import Fraction
from pathlib import Path

import pytest

from peerd.codec.kernels import tables
from tests.kit.blockwise_cases import SIGN, to_bits
from tests.kit.blockwise_oracle import exact, rounded


def after(bits: int) -> int:
    """The next larger single."""
    return bits - 1 if bits & SIGN else bits + 1


def before(bits: int) -> int:
    return bits + 1 if bits & SIGN else bits - 1


def test_dynamic_values_are_the_means_of_equal_steps_in_six_decades() -> None:
    means = [Fraction(0)]
    for decade in range(1, 7):
        steps = 2**decade
        bounds = [Fraction(1, 10) + Fraction(9, 10) * Fraction(i, steps) for i in range(steps + 1)]
        means += [(low + high) / 2 * Fraction(10) ** (decade - 6) for low, high in itertools.pairwise(bounds)]
    means.append(Fraction(1))
    assert len(tables.DYNAMIC) == len(means) == 128
    for bits, mean in zip(tables.DYNAMIC, means, strict=True):
        assert abs(exact(bits) - mean) <= exact(after(bits)) - exact(bits)
    assert (tables.DYNAMIC[0], tables.DYNAMIC[-1]) == (0, tables.ONE_BITS)


def test_nf4_values_are_quantiles_of_the_normal_distribution() -> None:
    quantile, offset = statistics.NormalDist().inv_cdf, 0.9677083
    largest = quantile(offset)
    upper = [quantile(offset + (0.5 - offset) * i / 8) / largest for i in range(8)]
    lower = [-quantile(offset + (0.5 - offset) * i / 7) / largest for i in range(7)]
    expected = sorted([*upper, *lower, 0.0])
    assert [float(exact(bits)) for bits in tables.NF4] == pytest.approx(expected, abs=2e-7)


@pytest.mark.parametrize("name", ["DYNAMIC", "NF4"])
def test_a_threshold_is_the_first_single_that_is_not_nearer_to_the_lower_value(name: str) -> None:
    values, thresholds = getattr(tables, name), getattr(tables, f"{name}_THRESHOLDS")
    assert len(thresholds) == len(values) - 1
    for low, high, threshold in zip(values, values[1:], thresholds, strict=False):
        middle = (exact(low) + exact(high)) / 2
        assert exact(low) < exact(before(threshold)) < middle <= exact(threshold) <= exact(high)


@pytest.mark.parametrize("name", ["DYNAMIC", "NF4", "DYNAMIC_THRESHOLDS", "NF4_THRESHOLDS"])
def test_tables_ascend_strictly(name: str) -> None:
    values = [exact(bits) for bits in getattr(tables, name)]
    assert all(low < high for low, high in itertools.pairwise(values))


def test_the_constants_are_the_singles_they_are_said_to_be() -> None:
    for bits, steps in ((tables.INV127_BITS, 127), (tables.INV7_BITS, 7), (tables.INV448_BITS, 448)):
        assert exact(bits) == rounded(Fraction(1, steps))
    assert to_bits(1e-37) == tables.SMALLEST_BITS
    assert to_bits(3e38) == tables.LARGEST_BITS
    assert to_bits(65504.0) == tables.FLOAT16_LARGEST_BITS
    assert to_bits(1.0) == tables.ONE_BITS


def looked_up(magnitude_bits: int, lut: list[int]) -> int:
    """The kernels' table look-up of a magnitude's bits."""
    shift, first = tables.DYNAMIC_LUT_SHIFT, tables.DYNAMIC_LUT_FIRST
    clamped = min(max(magnitude_bits, first << shift), tables.ONE_BITS)
    entry = lut[(clamped >> shift) - first]
    return (entry & 0xFF) + ((clamped & ((1 << shift) - 1)) >= entry >> 8)


def test_the_look_up_finds_the_code_that_a_search_among_the_thresholds_finds(seed: int) -> None:
    lut = tables.dynamic_lut()
    draw = random.Random(seed)
    shift = tables.DYNAMIC_LUT_SHIFT
    tried = [bits + step for bits in tables.DYNAMIC_THRESHOLDS for step in range(-2, 3)]
    tried += [(tables.DYNAMIC_LUT_FIRST + bucket << shift) + step for bucket in range(len(lut)) for step in (-1, 0, 1)]
    tried += [0, 1, tables.ONE_BITS, tables.ONE_BITS + 1, tables.ONE_BITS + 3]
    tried += [draw.randrange(tables.DYNAMIC_THRESHOLDS[0] - 9, tables.ONE_BITS) for _ in range(20_000)]
    for bits in tried:
        assert looked_up(bits, lut) == bisect.bisect_right(tables.DYNAMIC_THRESHOLDS, bits), hex(bits)


def test_no_bucket_of_the_look_up_holds_two_thresholds() -> None:
    buckets = [threshold >> tables.DYNAMIC_LUT_SHIFT for threshold in tables.DYNAMIC_THRESHOLDS]
    assert len(set(buckets)) == len(buckets)
    assert all(entry < 1 << 32 for entry in tables.dynamic_lut())


def test_the_header_of_the_compiled_kernels_is_made_of_these_tables() -> None:
    header = (Path(tables.__file__).with_name("source") / "tables.h").read_text()
    assert header == tables.c_header()
