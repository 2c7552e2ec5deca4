"""Time of rounds of calls to experts: as the run file says at least, as calls take, and longer after rounds in vain."""

from __future__ import annotations

import pytest

from peerd.core.limits import RPC_DEADLINE_S
from peerd.machine.experts.answer_rule import RoundLimit


def test_quick_calls_have_what_the_run_file_says() -> None:
    limit = RoundLimit(5.0)
    assert limit.seconds == 5.0
    limit.ended(5.0, [0.1] * 8, in_vain=False)
    assert limit.seconds == 5.0


@pytest.mark.parametrize("takes_s", [7.0, 40.0, 150.0])
def test_calls_that_take_longer_get_done_and_have_room_from_then_on(takes_s: float) -> None:
    limit, rounds = RoundLimit(5.0), 0
    while limit.seconds < takes_s:
        limit.ended(limit.seconds, [], in_vain=True)
        rounds += 1
        assert rounds < 6
    limit.ended(limit.seconds, [takes_s], in_vain=False)
    assert limit.seconds == 4 * takes_s


def test_few_slow_hosts_stretch_nothing() -> None:
    limit = RoundLimit(5.0)
    for _ in range(20):
        limit.ended(limit.seconds, [0.2, 0.2, 4.9], in_vain=False)
    assert limit.seconds == 5.0


def test_hosts_that_never_answer_stretch_a_round_so_far_and_no_further() -> None:
    limit = RoundLimit(5.0)
    for _ in range(20):
        limit.ended(limit.seconds, [], in_vain=True)
    assert limit.seconds == 32 * 5.0
    limit.ended(limit.seconds, [0.2], in_vain=False)
    assert limit.seconds == 5.0, "they answer again"


def test_no_round_takes_longer_than_a_host_works_on_a_call() -> None:
    limit = RoundLimit(5.0)
    limit.ended(5.0, [RPC_DEADLINE_S], in_vain=False)
    assert limit.seconds == RPC_DEADLINE_S


def test_slow_calls_are_forgotten_after_a_while() -> None:
    limit = RoundLimit(5.0)
    limit.ended(5.0, [30.0] * 4, in_vain=False)
    assert limit.seconds == 120.0
    limit.ended(5.0, [0.1] * 4, in_vain=False)
    limit.ended(5.0, [0.1] * 4, in_vain=False)
    assert limit.seconds == 5.0
