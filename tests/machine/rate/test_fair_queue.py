"""Shares of a rate: equal for places that want more than there is, all of it for those that want less."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.machine.rate.fair_queue import FairQueue, FlowPace
from tests.kit.amount import examples

RATE, PIECE_BYTES, SECONDS = 1e6, 10_000, 20.0


def run(flows: list[tuple[str, float]], rng: random.Random) -> list[int]:
    """The bytes that each flow gets in 20 s; a flow is its place and the bytes/s that it asks for."""
    shares = FairQueue(RATE)
    carried = [0] * len(flows)
    waiting: dict[int, int] = {}
    due = [(rng.random() * 0.1, number) for number in range(len(flows))]
    heapq.heapify(due)
    now = 0.0
    while now < SECONDS:
        while due and due[0][0] <= now:
            number = heapq.heappop(due)[1]
            waiting[shares.ask(flows[number][0], PIECE_BYTES)] = number
        ticket = shares.pop(now)
        if ticket is not None:
            number = waiting.pop(ticket)
            carried[number] += PIECE_BYTES
            wanted_at = carried[number] / flows[number][1]
            heapq.heappush(due, (max(now, wanted_at), number))
            continue
        now = max(now + 1e-9, min(shares.wake_at(), due[0][0] if due else math.inf))
    return carried


@settings(max_examples=examples(10))
@given(st.integers(0, 2**32))
def test_a_modest_place_gets_what_it_wants_beside_any_number_of_greedy_flows(seed: int) -> None:
    rng = random.Random(seed)
    greedy = rng.randrange(1, 5)
    flows = [(f"greedy {n}", math.inf) for n in range(greedy) for _ in range(rng.randrange(1, 9))]
    wanted = rng.uniform(0.1, 0.9) * RATE / (greedy + 1)
    carried = run([*flows, ("modest", wanted)], rng)
    assert carried[-1] >= 0.95 * wanted * SECONDS - 2 * PIECE_BYTES
    assert sum(carried) <= RATE * (SECONDS + 0.1) + PIECE_BYTES
    by_place = {place: 0 for place, _ in flows}
    for (place, _), count in zip(flows, carried, strict=False):
        by_place[place] += count
    fair = (sum(carried) - carried[-1]) / greedy
    assert all(abs(count - fair) <= 0.05 * fair + 10 * PIECE_BYTES for count in by_place.values())


def test_a_piece_that_was_given_back_holds_nobody_up_and_costs_nothing() -> None:
    shares = FairQueue(RATE)
    first, second = shares.ask("a", PIECE_BYTES), shares.ask("b", PIECE_BYTES)
    shares.give_back(first)
    assert shares.pop(1.0) == second
    assert shares.pop(2.0) is None
    assert shares.wake_at() == math.inf


def test_a_rate_is_kept_after_a_pause_too() -> None:
    shares = FairQueue(RATE)
    passed = []
    for now in (0.0, 100.0):
        for _ in range(100):
            shares.ask("a", PIECE_BYTES)
        at = now
        while shares.wake_at() < math.inf:
            if shares.pop(at) is None:
                at = shares.wake_at()
        passed.append(at - now)
    assert passed == pytest.approx([0.94, 0.94], abs=0.02)


def test_one_flow_keeps_to_its_pace() -> None:
    pace, now = FlowPace(RATE), 0.0
    for _ in range(200):
        now = pace.ask(now, PIECE_BYTES)
    assert now == pytest.approx(1.94, abs=0.02)
    assert FlowPace(math.inf).ask(5.0, 1 << 30) == 5.0
