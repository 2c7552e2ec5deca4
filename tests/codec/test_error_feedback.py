"""Error feedback: coarse codes lose nothing over many rounds, and a round that failed never was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.codec.error_feedback import ErrorFeedback, RoundResidual, Vector
from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import decode, encode
from peerd.codec.layout import NotFinite
from peerd.codec.policy import CodingPlan
from peerd.core.errors import ProtocolViolation
from tests.kit.amount import examples

CODES = ["int4", "nf4", "int8", "dynamic8", "fp8-e4m3", "bf16", "fp16", "none"]
SIZE = 100


class Row:
    """Pages in memory that count the bytes marked as used."""

    def __init__(self, size: int) -> None:
        self.row, self.used_bytes = memoryview(bytearray(size)), 0

    def used(self, count: int) -> None:
        self.used_bytes += count


def gradients(seed: int, rounds: int) -> list[Vector]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(SIZE).astype("float32") for _ in range(rounds)]


def coded(feedback: ErrorFeedback, begin: int, values: Vector) -> tuple[TensorFrame, Vector]:
    """The part that begins there, and as others decode it."""
    seen = np.full_like(values, np.nan)
    return feedback.encode(begin, values, seen), seen


@settings(max_examples=examples(25))
@given(
    code=st.sampled_from(CODES),
    rounds=st.lists(st.booleans(), min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, SIZE - 1), min_size=12, max_size=12),
    seed=st.integers(0, 99),
)
def test_the_sum_of_what_arrives_differs_from_the_true_sum_by_the_last_residual(
    code: str, rounds: list[bool], cuts: list[int], seed: int
) -> None:
    """Also when parts are cut elsewhere in each round."""
    feedback = ErrorFeedback(CodingPlan(code))
    true, arrived = np.zeros(SIZE), np.zeros(SIZE)
    for gradient, success, cut in zip(gradients(seed, len(rounds)), rounds, cuts, strict=False):
        vector = gradient.copy()
        feedback.begin(vector)
        parts = [coded(feedback, 0, vector[:cut]), coded(feedback, cut, vector[cut:])]
        seen = np.concatenate([feedback.decode(frame, part) for frame, part in parts])
        assert all(np.array_equal(feedback.decode(frame, part), part) for frame, part in parts)
        if success:
            feedback.settle()
            true += gradient
            arrived += seen
    residual = feedback.residual if feedback.residual is not None else np.zeros(SIZE)
    # Each round adds in single precision: a rounding of about 2^-24 of values below 16.
    assert np.abs(true - arrived - residual).max() <= len(rounds) * 2**-20
    # The residual is one round's error: at most half the largest step of any of these codes, of a largest value.
    assert np.abs(residual).max() <= 0.2 * (np.abs(true).max() + 8)


def descend(feedback: ErrorFeedback | None) -> float:
    """SGD on a quadratic whose first coordinate is noisy; returns how far the others end from their minimum."""
    rng = np.random.default_rng(1)
    target = np.linspace(0.5, 1.5, 64, dtype="float32")
    x = np.zeros(64, dtype="float32")
    for step in range(300):
        gradient = x - target
        gradient[0] = 40.0 * (-1) ** step  # every block has so large a value: int4's steps are a seventh of it
        gradient += 0.01 * rng.standard_normal(64).astype("float32")
        if feedback is None:
            seen = decode(encode(torch.from_numpy(gradient), CodingPlan("int4"))).numpy()
        else:
            feedback.begin(gradient)
            _, seen = coded(feedback, 0, gradient)
            feedback.settle()
        x -= 0.02 * seen
    return float(np.abs((x - target)[1:]).max())


def test_descent_in_four_bits_converges_with_feedback_and_stalls_without() -> None:
    assert descend(None) > 1.4
    assert descend(ErrorFeedback(CodingPlan("int4"))) < 0.2


def test_a_round_that_failed_leaves_the_same_bits_to_be_sent_again() -> None:
    straight, stumbling = ErrorFeedback(CodingPlan("int4")), ErrorFeedback(CodingPlan("int4"))
    for gradient in gradients(3, 3):
        vector = gradient.copy()
        straight.begin(vector)
        expected = straight.encode(0, vector)
        straight.settle()
        for attempt in range(3):
            vector = gradient.copy()
            stumbling.begin(vector)
            frame = stumbling.encode(0, vector[: SIZE if attempt == 2 else 50])
        assert bytes(frame.payload) == bytes(expected.payload)
        stumbling.settle()
    assert np.array_equal(straight.residual, stumbling.residual)  # type: ignore[arg-type]


def test_a_round_settles_what_it_missed_itself_though_another_has_begun() -> None:
    straight, overtaken = ErrorFeedback(CodingPlan("int4")), ErrorFeedback(CodingPlan("int4"))
    first, second = gradients(7, 2)
    new = overtaken.begin(first.copy())
    straight.begin(first.copy())
    overtaken.encode(0, first)
    straight.encode(0, first)
    straight.settle()
    overtaken.begin(second.copy())
    overtaken.encode(0, second)
    overtaken.settle(new)
    assert np.array_equal(straight.residual, overtaken.residual)  # type: ignore[arg-type]


def test_a_round_that_sends_nothing_uses_the_residual_up() -> None:
    feedback = ErrorFeedback(CodingPlan("int4"))
    first, second = gradients(4, 2)
    feedback.begin(first)
    feedback.encode(0, first)
    feedback.settle()
    kept = feedback.residual
    assert kept is not None
    assert kept.any()
    vector = second.copy()
    feedback.begin(vector)
    feedback.settle()
    assert np.array_equal(vector, second + kept)
    assert feedback.residual is None


def test_parameters_of_another_past_forget_it() -> None:
    feedback = ErrorFeedback(CodingPlan("int4"))
    (gradient,) = gradients(5, 1)
    feedback.begin(gradient)
    feedback.encode(0, gradient)
    feedback.settle()
    feedback.forget()
    assert feedback.residual is None


def test_what_cannot_be_coded_or_does_not_fit_is_named() -> None:
    feedback = ErrorFeedback(CodingPlan("int4"))
    (gradient,) = gradients(6, 1)
    with pytest.raises(NotFinite, match="a part of the gradient has NaN"):
        feedback.encode(0, gradient * np.float32("nan"))
    good = feedback.encode(0, gradient)
    with pytest.raises(ProtocolViolation, match="a part of a gradient has shape"):
        feedback.decode(good, gradient[:7])
    with pytest.raises(ProtocolViolation, match="a part of a gradient is of float32"):
        feedback.decode(good, gradient.astype("float64"))
    with pytest.raises(ProtocolViolation, match="not finite"):
        feedback.decode(TensorFrame("float32", (1,), np.array([np.inf], "float32").data.cast("B")), gradient[:1])


@given(
    spans=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE)).filter(lambda s: s[0] < s[1]), max_size=9)
)
def test_what_a_round_misses_adds_up_wherever_its_parts_overlap(spans: list[tuple[int, int]]) -> None:
    missed, expected = RoundResidual(np.full(SIZE, np.nan, dtype="float32")), np.zeros(SIZE, dtype="float32")
    for i, (begin, end) in enumerate(spans):
        meant, seen = np.full(end - begin, 2.0**i, dtype="float32"), np.ones(end - begin, dtype="float32")
        room, more = missed.room(begin, end - begin)
        room[:] = room + (meant - seen) if more else meant - seen
        expected[begin:end] += meant - seen
    assert np.array_equal(missed.whole(), expected)


@pytest.mark.parametrize("code", CODES)
def test_a_large_part_becomes_what_others_decode_and_misses_the_rest(code: str) -> None:
    """Of several runs of blocks, coded where it lies."""
    meant = np.random.default_rng(9).standard_normal(150_001).astype("float32")
    feedback, values = ErrorFeedback(CodingPlan(code)), np.concatenate([meant, meant])
    missed = feedback.begin(values)
    frame = feedback.encode(len(meant), values[len(meant) :], values[len(meant) :])
    seen = decode(frame).numpy()
    assert np.array_equal(values[len(meant) :], seen)
    assert np.array_equal(missed.whole(), np.concatenate([np.zeros_like(meant), meant - seen]))


@pytest.mark.parametrize("code", CODES)
def test_a_part_is_the_same_decoded_into_memory_that_is_there(code: str) -> None:
    (values,) = gradients(8, 1)
    frame, seen = coded(ErrorFeedback(CodingPlan(code)), 0, values)
    target = np.full(SIZE, np.nan, dtype="float32")
    ErrorFeedback(CodingPlan(code)).decode_into(frame, target)
    assert target.tobytes() == seen.tobytes()
    ErrorFeedback(CodingPlan(code)).decode_into(frame, target, onto=values)
    assert target.tobytes() == (values + seen).tobytes()
    ErrorFeedback(CodingPlan(code)).decode_into(frame, target, onto=target)
    assert target.tobytes() == (values + seen + seen).tobytes()
    with pytest.raises(ProtocolViolation):
        ErrorFeedback(CodingPlan(code)).decode_into(frame, target[:7])


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("added", [False, True])
def test_a_part_that_is_refused_leaves_the_sum_as_it_was(code: str, added: bool) -> None:
    (values,) = gradients(8, 1)
    payload = bytearray(ErrorFeedback(CodingPlan(code)).encode(0, values).payload)
    payload[:4] = b"\xff\xff\xff\xff"  # of a scale, or of values that become NaN
    frame = replace(ErrorFeedback(CodingPlan(code)).encode(0, values), payload=memoryview(payload))
    total = values.copy()
    with pytest.raises(ProtocolViolation):
        ErrorFeedback(CodingPlan(code)).decode_into(frame, total, onto=total if added else None)
    assert total.tobytes() == values.tobytes()


@pytest.mark.parametrize("in_pages", [(True,), (False,), (True, False)], ids=["pages", "memory", "in turn"])
def test_residuals_have_the_same_bits_wherever_they_lie(in_pages: tuple[bool, ...]) -> None:
    plain, rows = ErrorFeedback(CodingPlan("int4")), list[Row | None]()

    def pages(size: int) -> Row | None:
        rows.append(Row(size) if in_pages[len(rows) % len(in_pages)] else None)
        return rows[-1]

    feedback = ErrorFeedback(CodingPlan("int4"), pages)
    for gradient in gradients(8, 4):
        frames = []
        for one in (plain, feedback):
            vector = gradient.copy()
            begun = one.begin(vector)
            frames.append(one.encode(0, vector))
            further = one.go_on(vector)
            one.encode(40, vector[40:])
            one.settle(begun, further)
        assert bytes(frames[0].payload) == bytes(frames[1].payload)
        assert plain.residual is not None
        assert feedback.residual is not None
        assert plain.residual.tobytes() == feedback.residual.tobytes()
    for i, row in enumerate(rows):
        assert (row is not None) == in_pages[i % len(in_pages)]
        assert row is None or row.used_bytes >= len(row.row) * (0.6 if i % 2 else 1)  # a further round covers 60 of 100


def test_a_listeners_residual_grows_in_its_pages_by_what_further_rounds_missed() -> None:
    rows = list[Row]()

    def pages(size: int) -> Row:
        rows.append(Row(size))
        return rows[-1]

    feedback, missed = ErrorFeedback(CodingPlan("int4"), pages), list[Vector]()
    for gradient in gradients(9, 3):
        further = feedback.go_on(gradient)
        feedback.encode(0, gradient)
        missed.append(further.whole().copy())
        feedback.settle_further([further])
    assert feedback.residual is not None
    assert feedback.residual.tobytes() == bytes(rows[0].row) == (missed[0] + missed[1] + missed[2]).tobytes()
