"""A limited line: what passes, and whose turn it is."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peerd.wire.rate.limiter import SLACK_S, Account, Flow, Limiter, Rank
from tests.kit.amount import examples

RATE = 1_000_000.0


@dataclass
class Line:
    """A Limiter whose flows each do one thing: here they always want more."""

    limiter: Limiter
    now: float = 0.0
    passed: dict[Flow, int] = field(default_factory=dict)

    def ask(self, flow: Flow, wanted: int) -> int:
        got = self.limiter.ask(self.now, flow, wanted)
        self.note(flow, got)
        return got

    def note(self, flow: Flow, got: int) -> None:
        self.passed[flow] = self.passed.get(flow, 0) + got
        self.limiter.check()

    def run(self, until: float, wants: dict[Flow, int], late_s: float = 0.0) -> None:
        """All `wants` flows ask again as soon as they were served; wake-ups come `late_s` after their time."""
        ready = [flow for flow in wants if not flow.waits]
        while True:
            for flow in ready:
                while self.ask(flow, wants[flow]):
                    pass
            at = max(self.limiter.wake_at(), self.now) + late_s
            if at > until:
                return
            self.now = at
            ready = []
            for flow, got in self.limiter.wake(self.now):
                self.note(flow, got)
                ready.append(flow)


def test_an_idle_line_lets_a_burst_through_and_then_waits() -> None:
    limiter, flow = Limiter(RATE), Flow()
    passed = 0
    while got := limiter.ask(0.0, flow, 1 << 20):
        passed += got
    assert limiter.burst_bytes - limiter.quantum_bytes < passed <= limiter.burst_bytes
    at = limiter.wake_at()
    assert 0 < at <= limiter.quantum_bytes / RATE
    assert limiter.wake(at - 1e-5) == []
    assert limiter.wake(at) == [(flow, limiter.quantum_bytes)]
    assert limiter.wake_at() == math.inf


@given(
    steps=st.lists(st.tuples(st.floats(0, 0.3), st.integers(0, 4), st.integers(1, 200_000)), max_size=80),
    rate=st.sampled_from([1e3, 1e5, 1e6, 1e9]),
)
def test_no_window_carries_more_than_rate_times_time_and_a_burst(
    steps: list[tuple[float, int, int]], rate: float
) -> None:
    limiter, flows, now = Limiter(rate), [Flow() for _ in range(4)], 0.0
    log: list[tuple[float, int]] = []
    for pause_s, who, wanted in steps:
        now += pause_s
        log += [(now, got) for _, got in limiter.wake(now)]
        if who == 4:
            limiter.charge(wanted % 100)
            log.append((now, wanted % 100))
        elif flows[who].waits and wanted % 2:
            limiter.leave(flows[who])
        elif not flows[who].waits:
            got = limiter.ask(now, flows[who], wanted)
            back = got // 3 if wanted % 3 == 0 else 0
            limiter.give_back(flows[who], back)
            log.append((now, got - back))
        limiter.check()
    for first in range(len(log)):
        passed = 0
        for at, count in log[first:]:
            passed += count
            # Headers are charged when they have passed: the last ones are not yet paid for.
            assert passed <= rate * (at - log[first][0]) + limiter.burst_bytes + 100 * len(steps) + 2


@pytest.mark.parametrize("late_s", [0.0, 0.01, SLACK_S * 0.9])
def test_a_line_that_is_wanted_is_full_though_the_loop_is_late(late_s: float) -> None:
    line, flows = Line(Limiter(RATE)), [Flow() for _ in range(3)]
    line.run(20.0, dict.fromkeys(flows, 1 << 20), late_s)
    assert sum(line.passed.values()) == pytest.approx(20.0 * RATE, rel=0.01)


@pytest.mark.slow
@given(sizes=st.lists(st.integers(1000, 1 << 20), min_size=2, max_size=8))
def test_flows_that_always_want_more_get_equal_bytes_whatever_they_ask_for_at_once(sizes: list[int]) -> None:
    line = Line(Limiter(RATE))
    flows = [Flow() for _ in sizes]
    line.run(0.7, dict(zip(flows, sizes, strict=True)))
    shares = [line.passed[flow] for flow in flows]
    assert max(shares) - min(shares) <= 2 * line.limiter.quantum_bytes + line.limiter.burst_bytes


def test_a_small_message_overtakes_the_bulk_of_others() -> None:
    line, bulk, call = Line(Limiter(RATE)), [Flow() for _ in range(20)], Flow()
    line.run(5.0, dict.fromkeys(bulk, 1 << 20))
    for _ in range(50):
        line.run(line.now + 0.1, dict.fromkeys(bulk, 1 << 20))
        asked_at = line.now
        if not line.limiter.ask(line.now, call, 100):
            assert (line.limiter.wake_at() - asked_at) <= 100 / RATE + 1e-9
            assert line.limiter.wake(line.limiter.wake_at())[0] == (call, 100)


def test_a_flood_of_newcomers_starves_nobody() -> None:
    limiter, bulk = Limiter(RATE), Flow()
    while limiter.ask(0.0, bulk, 1 << 20):
        pass
    served, now = 0, 0.0
    for _ in range(4000):  # each millisecond one more than the line carries in it
        now += 0.001
        limiter.ask(now, Flow(), 1400)
        for flow, got in limiter.wake(now):
            if flow is bulk:
                served += got
                limiter.ask(now, bulk, 1 << 20)
    assert served > 0.3 * RATE * 4, "bulk was starved"


def test_who_leaves_is_passed_over() -> None:
    limiter, first, second = Limiter(RATE), Flow(), Flow()
    while limiter.ask(0.0, first, 1 << 20):
        pass
    limiter.ask(0.0, second, 1 << 20)
    limiter.leave(first)
    assert limiter.wake(1.0) == [(second, limiter.quantum_bytes)]
    limiter.leave(second)
    assert limiter.wake_at() == math.inf
    assert limiter.wake(9.0) == []


def test_what_was_charged_is_paid_back_but_no_figure_silences_the_line_for_long() -> None:
    limiter, flow = Limiter(RATE), Flow()
    limiter.ask(0.0, flow, 1)
    limiter.charge(100_000)
    assert limiter.ask(0.0, flow, 1000) == 0
    assert limiter.wake_at() == pytest.approx((100_000 - limiter.burst_bytes + 1001) / RATE, abs=1e-3)
    limiter.charge(1 << 60)
    assert limiter.wake_at() < 1.1


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Limiter(rate)


def strangers(count: int, account: Account | None = None) -> list[Flow]:
    return [Flow(account, Rank.REST) for _ in range(count)]


@pytest.mark.parametrize("others", [1, 50])
def test_strangers_take_a_sixteenth_of_what_members_want_however_many_they_are(others: int) -> None:
    line, members, rest = Line(Limiter(RATE)), [Flow(), Flow()], strangers(others)
    line.run(20.0, dict.fromkeys([*rest, *members], 1 << 20))
    of_members = sum(line.passed[flow] for flow in members)
    assert of_members / 20.0 == pytest.approx(RATE * 15 / 16, rel=0.02)
    assert sum(line.passed.values()) == pytest.approx(20.0 * RATE, rel=0.01)


def test_small_messages_of_strangers_are_no_more_than_that_either() -> None:
    line, member, rest = Line(Limiter(RATE)), Flow(), strangers(40)
    line.run(10.0, {member: 1 << 20} | dict.fromkeys(rest, 500))
    assert line.passed[member] > 0.9 * 10.0 * RATE


def test_strangers_have_the_line_that_no_member_wants_and_leave_half_of_the_bucket() -> None:
    limiter = Limiter(RATE)
    line, rest, member = Line(limiter), strangers(2), Flow()
    line.run(10.0, dict.fromkeys(rest, 1 << 20))
    assert sum(line.passed.values()) == pytest.approx(10.0 * RATE, rel=0.01)
    passed = 0
    while limiter.ask(line.now, member, 1 << 20) or limiter.wake(line.now):
        passed += limiter.quantum_bytes
    assert limiter.burst_bytes / 2 - limiter.quantum_bytes < passed <= limiter.burst_bytes


def test_connections_of_strangers_at_one_place_share_one_turn() -> None:
    line, many, one = Line(Limiter(RATE)), strangers(30, Account()), strangers(1)
    line.run(20.0, dict.fromkeys([*many, *one], 1 << 20))
    assert line.passed[one[0]] == pytest.approx(10.0 * RATE, rel=0.05)
    assert min(line.passed[flow] for flow in many) > 0.5 * max(line.passed[flow] for flow in many)


def carried(limiter: Limiter, flows: dict[Flow, float], seconds: float) -> dict[Flow, int]:
    """The bytes that each flow gets; given are the bytes/s that it asks for, in whole quanta."""
    got, now = dict.fromkeys(flows, 0), 0.0
    due = [(number * 1e-4, number) for number in range(len(flows))]
    numbers = {flow: number for number, flow in enumerate(flows)}

    def moved(flow: Flow, count: int) -> None:
        got[flow] += count
        heapq.heappush(due, (max(now, got[flow] / flows[flow]), numbers[flow]))

    while (now := max(now, min(limiter.wake_at(), due[0][0] if due else math.inf))) < seconds:
        while due and due[0][0] <= now:
            flow = list(flows)[heapq.heappop(due)[1]]
            if count := limiter.ask(now, flow, limiter.quantum_bytes):
                moved(flow, count)
        for flow, count in limiter.wake(now):
            moved(flow, count)
    return got


@settings(max_examples=examples(10))
@given(st.integers(0, 2**32))
def test_a_modest_place_gets_what_it_wants_beside_any_number_of_greedy_flows(seed: int) -> None:
    rng, seconds, limiter = random.Random(seed), 20.0, Limiter(RATE)
    places = [strangers(rng.randrange(1, 9), Account()) for _ in range(rng.randrange(1, 5))]
    (modest,), wanted = strangers(1), rng.uniform(0.1, 0.9) * RATE / (len(places) + 1)
    got = carried(limiter, {flow: math.inf for place in places for flow in place} | {modest: wanted}, seconds)
    slack = 10 * limiter.quantum_bytes
    assert got[modest] >= 0.95 * wanted * seconds - slack
    assert sum(got.values()) <= RATE * seconds + limiter.burst_bytes
    fair = (sum(got.values()) - got[modest]) / len(places)
    assert all(abs(sum(got[flow] for flow in place) - fair) <= 0.05 * fair + slack for place in places)
