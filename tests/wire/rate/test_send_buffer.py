"""Send-buffer sizing: the bytes handed to a connection at once follow the rate at which it takes them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.wire.rate.send_buffer import (
    KEPT_BYTES_MAX,
    KEPT_BYTES_MIN,
    KEPT_S,
    WAITING_BYTES_MAX,
    WAITING_BYTES_MIN,
    WAITING_S,
    SendBufferSizer,
)


def drained(draught: SendBufferSizer, bytes_per_s: float, seconds: float, start_s: float = 0.0) -> int:
    """A connection of that rate with one who always has more to send; how often the system was told a new limit."""
    now, told = start_s, 0
    draught.begin(now)
    while now < start_s + seconds:
        told += draught.full(now)
        now += 0.006
        draught.took(int(0.006 * bytes_per_s))
    return told


@pytest.mark.parametrize("bytes_per_s", [5e6, 62.5e6])
def test_about_as_much_waits_as_leaves_in_some_milliseconds(bytes_per_s: float) -> None:
    draught = SendBufferSizer()
    drained(draught, bytes_per_s, 1.0)
    assert draught.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert draught.waiting_bytes == pytest.approx(WAITING_S * bytes_per_s, rel=0.3)
    assert draught.batch_bytes == draught.waiting_bytes // 2


@pytest.mark.parametrize(("bytes_per_s", "waiting"), [(1e4, WAITING_BYTES_MIN), (1e10, WAITING_BYTES_MAX)])
def test_very_slow_and_very_fast_lines_meet_the_bounds(bytes_per_s: float, waiting: int) -> None:
    draught = SendBufferSizer()
    drained(draught, bytes_per_s, 1.0)
    assert draught.waiting_bytes == waiting


def test_a_rate_that_stays_costs_no_more_system_calls() -> None:
    draught = SendBufferSizer()
    drained(draught, 62.5e6, 1.0)
    assert drained(draught, 60e6, 10.0, 1.0) == 0


def test_a_pause_of_the_sender_does_not_look_like_a_slow_line() -> None:
    draught = SendBufferSizer()
    drained(draught, 62.5e6, 1.0)
    draught.end(1.0)
    draught.begin(20.0)
    draught.took(1000)
    draught.full(20.0)
    assert draught.bytes_per_s == pytest.approx(62.5e6, rel=0.05)


def test_who_never_meets_a_full_buffer_is_known_to_be_at_least_as_fast_as_it_sends() -> None:
    draught = SendBufferSizer()
    now = 0.0
    for _ in range(100):
        draught.begin(now)
        draught.took(1 << 20)
        now += 0.001
        draught.end(now)
    assert draught.waiting_bytes == WAITING_BYTES_MAX


@pytest.mark.parametrize(
    ("bytes_per_s", "waiting"),
    [
        (2e4, KEPT_BYTES_MIN),
        (2e5, int(KEPT_S * 2e5)),
        (1e6, KEPT_BYTES_MAX),
        (1e7, int(WAITING_S * 1e7)),
        (1e10, WAITING_BYTES_MAX),
    ],
)
def test_where_the_rate_is_given_a_frame_may_wait_and_nothing_is_measured(bytes_per_s: float, waiting: int) -> None:
    draught = SendBufferSizer()
    draught.keep(bytes_per_s)
    assert draught.waiting_bytes == waiting
    assert drained(draught, 3 * bytes_per_s, 1.0) == 0
    assert (draught.waiting_bytes, draught.batch_bytes) == (waiting, KEPT_BYTES_MAX)
    draught.keep(math.inf)
    drained(draught, 62.5e6, 1.0, 2.0)
    assert draught.waiting_bytes == pytest.approx(WAITING_S * 62.5e6, rel=0.3), "measured again"


@given(st.lists(st.tuples(st.sampled_from(["begin", "took", "full", "end"]), st.floats(0, 5)), max_size=60))
def test_no_sequence_of_events_leads_beyond_the_bounds(events: list[tuple[str, float]]) -> None:
    draught, now = SendBufferSizer(), 0.0
    for what, passed_s in events:
        now += passed_s
        if what == "took":
            draught.took(int(passed_s * 1e8))
        else:
            getattr(draught, what)(now)
        assert WAITING_BYTES_MIN <= draught.waiting_bytes <= WAITING_BYTES_MAX
        assert draught.batch_bytes >= WAITING_BYTES_MIN // 2
