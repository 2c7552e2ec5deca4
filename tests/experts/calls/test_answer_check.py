"""Answers of experts: whatever they travel as, NaN and infinity are seen, and sizes are bounded by the rows asked."""

from __future__ import annotations

import random

import numpy as np
import pytest

from peerd.codec.format.blockwise import BLOCKS, CODES
from peerd.codec.format.frame import TensorFrame, expected_bytes
from peerd.core.errors import ProtocolViolation
from peerd.experts.calls.answer_check import AnswerCheck, is_finite
from peerd.messages.encoding import Empty
from peerd.rpc.rpc import Answer
from tests.worlds.machines.workers import InlineWorker

BAD = [float("nan"), float("inf"), -float("inf")]


def sent(values: np.ndarray, dtype: str, coding: str) -> TensorFrame:
    """Values as they travel in a coding of two or four bytes."""
    word = coding if coding != "none" else {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[dtype]
    if word == "bf16":
        data = (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = values.astype("<f2" if word == "fp16" else "<f4").tobytes()
    return TensorFrame(dtype, values.shape, data, coding)


@pytest.mark.parametrize(
    ("dtype", "coding"),
    [("float32", "none"), ("float32", "bf16"), ("float32", "fp16"), ("bfloat16", "none"), ("bfloat16", "bf16")],
)
def test_one_value_that_is_no_number_is_seen_among_all(dtype: str, coding: str) -> None:
    rng = np.random.default_rng(1)
    values = np.clip(rng.standard_normal((5, 7)) * 1e4, -6e4, 6e4).astype(np.float32)
    assert is_finite(sent(values, dtype, coding))
    for bad in BAD:
        for _ in range(10):
            spoilt = values.copy()
            spoilt[rng.integers(5), rng.integers(7)] = bad
            assert not is_finite(sent(spoilt, dtype, coding))


def test_a_scale_that_is_no_number_is_seen() -> None:
    payload = bytearray(expected_bytes("float32", (3, 100), "int8", 64))
    frame = TensorFrame("float32", (3, 100), payload, "int8", 64)
    assert is_finite(frame)
    payload[4 * 4 : 5 * 4] = np.float32(np.inf).tobytes()
    assert not is_finite(frame)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_code_an_answer_as_asked_fits_into_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    rows, shape = rng.randint(1, 500), tuple(rng.randint(1, 40) for _ in range(rng.randint(1, 3)))
    code = rng.choice(["none", "bf16", "fp16", "dynamic8", "int8"])
    block = rng.choice(BLOCKS) if code in CODES else 0
    most = AnswerCheck(shape, "float32", code, InlineWorker()).most_bytes(rows)
    assert expected_bytes("float32", (rows, *shape), code, block) <= most, f"seed {seed}"
    assert expected_bytes("float32", (2 * rows + 70, *shape), "none") > most


async def test_the_runs_own_code_is_taken_and_no_other_and_nothing_packed() -> None:
    check = AnswerCheck((2,), "float32", "bf16", InlineWorker())
    zeros = np.zeros((3, 2), np.float32)
    await check.check(Answer(Empty(), (sent(zeros, "float32", "bf16"),)), 3)
    await check.check(Answer(Empty(), (sent(zeros, "float32", "none"),)), 3)
    for frame in (sent(zeros, "float32", "fp16"), TensorFrame("float32", (3, 2), bytes(29), lossless=True)):
        with pytest.raises(ProtocolViolation):
            await check.check(Answer(Empty(), (frame,)), 3)


async def test_large_answers_are_looked_at_in_a_worker() -> None:
    jobs = list[str]()

    class Noting(InlineWorker):
        async def run(self, job, *, name, cost_s=0.0, urgent=False):  # type: ignore[no-untyped-def]
            jobs.append(name)
            return await super().run(job, name=name)

    check = AnswerCheck((1 << 17,), "float32", "none", Noting())
    values = np.zeros((1, 1 << 17), np.float32)
    await check.check(Answer(Empty(), (sent(values, "float32", "none"),)), 1)
    values[0, -1] = np.nan
    with pytest.raises(ProtocolViolation, match="NaN"):
        await check.check(Answer(Empty(), (sent(values, "float32", "none"),)), 1)
    assert jobs == ["check answers"] * 2
