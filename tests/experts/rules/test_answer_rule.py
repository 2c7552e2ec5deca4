"""The answer rule: deadline, k_min, grace, and a shortage that names the experts asked.
Time of rounds of calls to experts: as the run file says at least, as calls take, and longer after rounds in vain.
"""

from __future__ import annotations

import random

import pytest

from peerd.core.errors import LocalError
from peerd.core.limits import RPC_DEADLINE_S
from peerd.experts.rules.answer_rule import AnswerRule, RoundLimit
from peerd.run.grid import Uid

A, B, C = (Uid(0, (1, n)) for n in range(3))


def rule(k_min: int = 1, grace_s: float = 0.5) -> AnswerRule:
    """Two samples: the first at A and B, the second at B and C."""
    made = AnswerRule([(A, (0,)), (B, (0, 1)), (C, (1,))], 2, k_min, grace_s)
    made.begin(0.0, 10.0)
    return made


def test_a_round_ends_a_grace_after_every_sample_has_enough() -> None:
    r = rule()
    assert r.answered(1.0, 0)
    assert r.wake_at() == 10.0
    assert r.answered(2.0, 2)
    assert r.wake_at() == 2.5
    assert not r.over(2.4)
    assert not r.answered(2.5, 1)
    assert r.over(2.5)
    assert (r.late(), r.shortage()) == ([1], None)


def test_a_round_ends_at_once_when_all_have_answered() -> None:
    r = rule()
    for call in range(3):
        assert r.answered(3.0, call)
        assert not r.answered(3.0, call)
    assert (r.wake_at(), r.late(), r.shortage()) == (3.0, [], None)


def test_a_shortage_names_the_experts_asked_and_what_became_of_each() -> None:
    r = rule()
    r.answered(1.0, 0)
    r.failed(2.0, 1, "refused: no such expert (peer …abc)")
    assert not r.over(9.9)
    assert r.over(10.0)
    assert r.shortage() == (
        "sample 1 has 0 of 1 answers: expert 0.1.1 refused: no such expert (peer …abc); expert 0.1.2 has not answered"
    )


def test_a_sample_that_cannot_get_enough_ends_the_round_at_once() -> None:
    r = rule(k_min=2)
    r.failed(1.0, 2, "was silent")
    assert r.over(1.0)
    assert (r.shortage() or "").startswith("sample 1 has 0 of 2 answers: expert 0.1.1 has not")
    nobody = AnswerRule([(A, (0,))], 2, 1, 0.5)
    nobody.begin(0.0, 10.0)
    assert nobody.over(0.0)
    nobody.answered(0.0, 0)
    assert (nobody.shortage() or "").startswith("sample 1 has 0 of 1 answers: no expert")


def test_a_sample_without_experts_says_that_none_is_known() -> None:
    r = AnswerRule([], 1, 1, 0.5)
    r.begin(0.0, 10.0)
    assert (r.over(0.0), r.shortage()) == (
        True,
        "sample 0 has 0 of 1 answers: no expert was asked, because none is known to be alive",
    )


def test_without_k_min_all_are_waited_for_until_the_deadline() -> None:
    r = AnswerRule([(A, (0,)), (B, (0,))], 1, 0, float("inf"))
    r.begin(0.0, 10.0)
    assert r.answered(1.0, 1)
    assert (r.wake_at(), r.shortage()) == (10.0, None)
    r.failed(2.0, 0, "gone")
    assert r.over(2.0)


def test_a_reason_of_a_host_does_not_flood_the_message() -> None:
    r = AnswerRule([(Uid(0, (n,)), (0,)) for n in range(64)], 1, 1, 0.5)
    r.begin(0.0, 1.0)
    for call in range(64):
        r.failed(0.5, call, "x" * 10_000)
    message = r.shortage() or ""
    assert len(message) < 2000
    assert message.endswith("; and 56 more")


def test_a_sample_out_of_range_is_our_own_fault() -> None:
    with pytest.raises(LocalError):
        AnswerRule([(A, (2,))], 2, 1, 0.5)


@pytest.mark.parametrize("seed", range(100))
def test_in_any_order_of_answers_failures_and_time_the_counts_are_right(seed: int) -> None:
    rng = random.Random(seed)
    samples, k_min = rng.randint(1, 6), rng.randint(0, 3)
    asks = [(Uid(0, (n,)), tuple(s for s in range(samples) if rng.random() < 0.6)) for n in range(rng.randint(0, 8))]
    r, now, counted = AnswerRule(asks, samples, k_min, rng.random()), 0.0, set[int]()
    r.begin(now, 5.0)
    while not r.over(now):
        now += rng.random() * rng.choice([0.01, 1.0])
        call = rng.randrange(len(asks))
        if rng.random() < 0.5:
            r.failed(now, call, "failed")
        elif r.answered(now, call):
            assert call not in counted
            counted.add(call)
        r.check()
    enough = all(sum(s in asks[c][1] for c in counted) >= k_min for s in range(samples))
    assert (r.shortage() is None) == enough, f"seed {seed}"
    assert now <= 6.0


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
