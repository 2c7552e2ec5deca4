"""Forecasts in records of the directory: whose word counts, within which bounds, and when to look again."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.errors import ProtocolViolation
from peerd.core.limits import FORESEEABLE_S
from peerd.messages.encoding import decode, encode
from peerd.messages.progress import StageProgress, decode_stage, encode_progress, followed_most, foretold_in_s, pause_s
from peerd.messages.swarm import Forecast, MemberAnswer

TOLD = StageProgress(0, 1.0, 7, 4, 9.5, "cpu", "a", "", [])
WALL = 1.7e9


def told_at(step_at: float) -> float:
    return decode_stage(encode_progress(msgspec.structs.replace(TOLD, step_at=step_at))).step_at


def test_a_record_tells_when_the_step_is_due_and_an_older_one_tells_nothing() -> None:
    assert told_at(WALL) == WALL
    older = msgspec.msgpack.encode(msgspec.msgpack.decode(encode_progress(TOLD))[:-1])
    assert decode_stage(older).step_at == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e30])
def test_a_record_whose_forecast_is_no_moment_is_refused(bad: float) -> None:
    with pytest.raises(ProtocolViolation):
        told_at(bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, FORESEEABLE_S * 1.01])
def test_an_answer_whose_forecast_is_no_span_of_time_is_refused(bad: float) -> None:
    for forecast in (Forecast(bad, 1.0), Forecast(1.0, bad)):
        answer = MemberAnswer(1, None, False, "", False, 1, None, forecast)
        with pytest.raises(ProtocolViolation):
            decode(MemberAnswer, encode(answer))


def test_the_conductor_is_the_one_that_most_follow_if_it_conducts() -> None:
    rows = [("a", "a"), ("b", "a"), ("liar", "liar"), ("new", "")]
    assert followed_most(rows) == "a"
    assert followed_most([("b", "a"), ("c", "a"), ("liar", "liar")]) is None, "it does not say that it conducts"
    assert followed_most([]) is None
    assert followed_most([("new", "")]) is None


def test_the_word_of_whom_most_follow_counts() -> None:
    rows = [("a", "a", WALL + 12.0), ("b", "a", 0.0), ("liar", "liar", WALL + 999.0)]
    assert foretold_in_s(rows, WALL) == 12.0
    assert foretold_in_s([*rows, ("friend", "liar", 0.0), ("other", "liar", 0.0)], WALL) == 999.0
    assert foretold_in_s([("b", "a", WALL + 12.0)], WALL) is None  # only the conductor foretells
    assert foretold_in_s([("a", "", WALL + 12.0)], WALL) is None
    assert foretold_in_s([], WALL) is None


def test_a_forecast_that_is_overdue_says_any_moment_and_an_old_one_nothing() -> None:
    assert foretold_in_s([("a", "a", WALL - 3.0)], WALL) == 0.0
    assert foretold_in_s([("a", "a", WALL - 60.0)], WALL) is None
    assert foretold_in_s([("a", "a", WALL + 2 * FORESEEABLE_S)], WALL) is None


@given(st.one_of(st.none(), st.floats(allow_nan=True)), st.floats(0.1, 10.0), st.floats(0.0, 100.0))
def test_pauses_are_never_shorter_than_usual_nor_longer_than_allowed(
    due_in_s: float | None, usual_s: float, more_s: float
) -> None:
    assert usual_s <= pause_s(due_in_s, usual_s, usual_s + more_s) <= usual_s + max(more_s, usual_s)


@given(st.floats(0.0, 1e4), st.floats(0.1, 10.0), st.floats(1.0, 20.0))
def test_a_step_is_looked_at_shortly_before_and_after_its_end_and_rarely_before(
    due_s: float, usual_s: float, times: float
) -> None:
    longest_s = usual_s * times
    looks = [0.0]
    while looks[-1] <= due_s:
        looks.append(looks[-1] + pause_s(due_s - looks[-1], usual_s, longest_s))
    slack = 1e-9 * due_s
    assert due_s < looks[-1] <= due_s + usual_s + slack
    assert due_s - 1.5 * usual_s - slack <= looks[-2] <= due_s
    assert len(looks) <= due_s / longest_s + 4


def test_pauses_follow_the_forecast() -> None:
    assert [pause_s(due, 2.0, 10.0) for due in (None, -5.0, 0.0, 0.2, 2.5, 4.0, 8.0, 600.0)] == [
        *(2.0, 2.0, 2.0, 2.0, 3.5, 3.0, 7.0, 10.0)
    ]
