"""Which code a tensor travels in: by the run file, the line, the values; and when packing pays."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from peerd.codec.format.frame import CODINGS
from peerd.codec.policy import CodingPlan, PackingSpeed, TensorSummary, choose
from peerd.run.runfile import BoundarySection

MB = 125_000.0  # bytes per second of one Mb/s
NORMAL, OUTLIERS = TensorSummary(6.5), TensorSummary(40.0)


def plan(code: str, mbit_per_s: float | None, sample: TensorSummary | None = NORMAL, dtype: str = "float32") -> str:
    """The choice without packing, as text."""
    boundary = BoundarySection(code=code, lossless="never")  # type: ignore[arg-type]
    chosen, why = choose(boundary, mbit_per_s and mbit_per_s * MB, sample, dtype)
    assert why
    assert chosen.coding in CODINGS
    return str(chosen)


def packed(code: str, mbit_per_s: float | None, dtype: str = "float32", values: int | None = None) -> bool:
    boundary = BoundarySection(code=code)  # type: ignore[arg-type]
    return choose(boundary, mbit_per_s and mbit_per_s * MB, None, dtype, values)[0].lossless


def test_a_code_that_the_run_file_names_is_taken_whatever_the_line() -> None:
    expected = ["none", "bf16", "fp16", "dynamic8/256", "int8/64", "int4/64", "nf4/64", "fp8-e4m3/256"]
    for rate in (None, 0.0, 1.0, 1e6):
        assert [plan(text.partition("/")[0], rate) for text in expected] == expected


def test_a_block_that_the_run_file_names_is_taken_where_there_are_blocks() -> None:
    for code, sample, expected in [
        ("dynamic8", None, "dynamic8/1024"),
        ("auto", NORMAL, "int8/1024"),
        ("auto", OUTLIERS, "dynamic8/1024"),
    ]:
        boundary = BoundarySection(code=code, block=1024, lossless="never")  # type: ignore[arg-type]
        assert str(choose(boundary, None, sample, "float32")[0]) == expected
    assert choose(BoundarySection(code="auto", block=1024), 2e9, None, "float32")[0] == CodingPlan()


@pytest.mark.parametrize(
    ("mbit_per_s", "expected"),
    [
        (100_000, "none"),
        (8000, "none"),
        (7999, "bf16"),
        (2000, "bf16"),
        (1999, "int8/64"),
        (1, "int8/64"),
        (0, "int8/64"),
        (None, "int8/64"),
    ],
)
def test_auto_sends_fewer_bytes_the_slower_the_line(mbit_per_s: float | None, expected: str) -> None:
    assert plan("auto", mbit_per_s) == expected


def test_auto_takes_int8_only_for_values_without_outliers_that_it_has_seen() -> None:
    assert plan("auto", 100, NORMAL) == "int8/64"
    assert plan("auto", 100, TensorSummary(0.0)) == "int8/64"
    assert plan("auto", 100, OUTLIERS) == "dynamic8/64"
    assert plan("auto", 100, TensorSummary(math.nan)) == "dynamic8/64"
    assert plan("auto", 100, None) == "dynamic8/64"


def test_the_predicted_error_of_int8_is_the_measured_one_for_normal_values() -> None:
    assert NORMAL.int8_error == pytest.approx(0.0058, abs=0.0001)
    assert TensorSummary((0.0094 * 127) ** 2 * 12).int8_error == pytest.approx(0.0094)


@pytest.mark.parametrize(
    ("dtype", "fast", "middle", "slow"),
    [
        ("float64", "none", "bf16", "bf16"),
        ("float32", "none", "bf16", "int8/64"),
        ("bfloat16", "none", "none", "int8/64"),
        ("float16", "none", "none", "int8/64"),
        ("int64", "none", "none", "none"),
        ("bool", "none", "none", "none"),
    ],
)
def test_auto_never_takes_what_a_dtype_cannot_or_need_not_be_coded_in(
    dtype: str, fast: str, middle: str, slow: str
) -> None:
    assert [plan("auto", rate, NORMAL, dtype) for rate in (9000, 4000, 100)] == [fast, middle, slow]
    assert plan("bf16", 100, NORMAL, dtype) == ("none" if dtype in ("int64", "bool") else "bf16")


# --- packing -------------------------------------------------------------------------------------------------------


def test_packing_pays_exactly_where_the_saved_time_is_more_than_it_takes() -> None:
    for ratio, pack, unpack in [(0.9, 1e9, 2e9), (0.5, 1e8, 1e9), (0.99, 5e9, 5e9)]:
        line = PackingSpeed(ratio, pack, unpack).pays_below_bytes_per_s
        for rate, pays in [(line * 0.99, True), (line * 1.01, False)]:
            whole_s = 1 / rate
            packed_s = 1 / pack + ratio / rate + 1 / unpack
            assert (packed_s < whole_s) is pays
    assert PackingSpeed(1.0, 1e9, 1e9).pays_below_bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("code", "dtype", "pays", "does_not"),
    [
        ("dynamic8", "float32", 360, 380),
        ("int8", "float32", 200, 210),
        ("int4", "float32", 505, 530),
        ("nf4", "float32", 165, 175),
        ("fp8-e4m3", "float32", 730, 770),
        ("auto", "float32", 360, 380),  # dynamic8, for nobody looked at the values
        ("bf16", "float32", 880, 930),
        ("bf16", "float64", 880, 930),
        ("fp16", "float32", 870, 910),
        ("none", "float32", 670, 700),
        ("none", "bfloat16", 880, 930),
        ("none", "float16", 870, 910),
        ("none", "float64", 580, 610),
        ("none", "int64", 1260, 1310),
        ("int8", "int64", 1260, 1310),
    ],
)
def test_payloads_are_packed_on_lines_where_it_pays(code: str, dtype: str, pays: float, does_not: float) -> None:
    assert packed(code, 1, dtype)
    assert packed(code, pays, dtype)
    assert not packed(code, does_not, dtype)
    assert not packed(code, None, dtype)
    assert not packed(code, 0.0, dtype)


@pytest.mark.parametrize(
    ("code", "values"), [("none", 4096), ("bf16", 8192), ("int8", 15421), ("nf4", 29128), ("dynamic8", 16132)]
)
def test_a_payload_below_16_kib_is_not_packed(code: str, values: int) -> None:
    assert packed(code, 10, values=values)
    assert not packed(code, 10, values=values - 100)


def test_who_wants_packing_always_or_never_gets_it() -> None:
    for rate in (None, 1e6, 1e10):
        for values in (0, 10, None):
            assert choose(BoundarySection(lossless="always"), rate, None, "float32", values)[0].lossless
            assert not choose(BoundarySection(lossless="never"), rate, None, "float32", values)[0].lossless


def test_the_reason_is_a_sentence() -> None:
    assert choose(BoundarySection(code="auto"), 12.5e6, NORMAL, "float32", 1 << 20) == (
        CodingPlan("int8", 64, True),
        "8 bits per value on a link of 12.5 MB/s; int8 would have an error of 0.58 %, dynamic8 of 0.94 %; "
        "packed, which pays below 25.6 MB/s",
    )
    assert choose(BoundarySection(code="bf16"), None, None, "float32")[1] == (
        "set by the run file; not packed because the link's speed is unknown"
    )
    assert choose(BoundarySection(code="auto", lossless="always"), 1e9, None, "int64")[1] == (
        "int64 is sent uncoded; always packed, set by the run file"
    )


def test_a_choice_needs_no_torch() -> None:
    code = "import sys, peerd.codec.policy; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
