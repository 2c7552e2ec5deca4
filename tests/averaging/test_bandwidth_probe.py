"""Shares follow what passes the lines, and settle, though a fast line among slow ones never shows what it carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.bandwidth_probe import BandwidthProbe
from peerd.averaging.shares import MemberLine, bound_s_per_byte, load, shares
from peerd.averaging.topology import GroupTopology
from peerd.averaging.work_split import WorkSplitter
from peerd.messages.swarm import LineInfo
from peerd.wire.rate.access_line import AccessLine, Count

MB = 1e6
VECTOR = 10 * MB


class Swarm:
    """Members with lines that nobody states: rounds take as long as the model says, and each measures what passed."""

    def __init__(self, **lines_mbyte_s: float) -> None:
        self.true = {peer: rate * MB for peer, rate in lines_mbyte_s.items()}
        self.group = tuple(sorted(self.true))
        self.lines = WorkSplitter()
        self.grouping = GroupTopology(self.lines, 0)
        self.seen = dict.fromkeys(self.group, 0.0)
        self.seconds: list[float] = []
        self.fractions: list[dict[str, float]] = []

    def round(self) -> float:
        for peer in self.group:
            told = LineInfo("node", self.seen[peer], self.seen[peer], 2_500_000, "float32")
            self.lines.tell(peer, 0, told_measured(told))
        split = self.grouping.order(0, self.group).groups[0].split
        fractions = dict.fromkeys(self.group, 1 / len(self.group))
        if split is not None:
            fractions = {party.peer: party.share for party in split.parties}
        size = len(self.group)
        loads = {peer: load(MemberLine(peer), fractions.get(peer, 0.0), size) * VECTOR for peer in self.group}
        seconds = max(loads[peer] / self.true[peer] for peer in self.group)
        self.seen = {peer: max(self.seen[peer], loads[peer] / seconds) for peer in self.group}
        self.seconds.append(seconds)
        self.fractions.append(fractions)
        return seconds

    def best_s(self) -> float:
        lines = [MemberLine(peer, up_bytes_per_s=rate, down_bytes_per_s=rate) for peer, rate in self.true.items()]
        return bound_s_per_byte(lines, shares(lines).fractions) * VECTOR


def told_measured(line: LineInfo) -> LineInfo:
    return LineInfo(line.mode, line.up_bytes_per_s, line.down_bytes_per_s, line.elements, line.dtype, 0, True, True)


@pytest.mark.parametrize(
    "lines",
    [
        {"a": 5.0, "b": 5.0, "c": 5.0, "d": 20.0},
        {"a": 20.0, "b": 5.0, "c": 5.0, "d": 5.0},
        {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0, "e": 16.0},
        {"a": 1.0, "b": 10.0, "c": 10.0, "d": 10.0, "e": 10.0, "f": 10.0},
        {"a": 5.0, "b": 5.0, "c": 5.0, "d": 100.0, "e": 100.0},
    ],
)
def test_unknown_lines_end_in_the_right_division(lines: dict[str, float]) -> None:
    swarm = Swarm(**lines)
    for _ in range(40):
        swarm.round()
    best = swarm.best_s()
    assert min(swarm.seconds[-12:]) < 1.1 * best, swarm.seconds
    later = [swarm.round() for _ in range(200)]
    assert sum(later) / len(later) < 1.15 * best, "tries cost too much"
    assert sum(seconds < 1.1 * best for seconds in later) > 0.9 * len(later), "shares do not stand still"


def test_equal_lines_keep_equal_shares_but_for_ever_rarer_tries() -> None:
    swarm = Swarm(a=5.0, b=5.0, c=5.0, d=5.0)
    seconds = [swarm.round() for _ in range(400)]
    assert sum(took > 1.01 * swarm.best_s() for took in seconds[200:]) <= 16
    assert max(seconds) < 2 * swarm.best_s()


def test_lines_that_are_stated_are_not_tried() -> None:
    lines = WorkSplitter()
    for peer in "abc":
        lines.tell(peer, 0, LineInfo("node", MB, MB, 1000, "float32"))
    assert lines.measured(0, ("a", "b", "c")) == {}
    lines.tell("a", 0, LineInfo("node", MB, 2 * MB, 1000, "float32", 0, False, True))
    assert lines.measured(0, ("a", "b", "c")) == {}, "its limit is what counts"
    lines.tell("a", 0, LineInfo("node", 3 * MB, 2 * MB, 1000, "float32", 0, False, True))
    assert lines.measured(0, ("a", "b", "c")) == {"a": 2 * MB}
    lines.tell("b", 0, LineInfo("client", MB, MB, 1000, "float32", 0, True, True))
    assert "b" not in lines.measured(0, ("a", "b", "c"))


def test_a_line_that_grows_without_end_is_tried_without_end_and_nobody_else_forgotten_for_ever() -> None:
    exploring, rates = BandwidthProbe(), {"liar": 1.0, "b": 1.0}
    tried = []
    for _ in range(30):
        tried.append(exploring.next(rates))
        if tried[-1] == "liar":
            rates["liar"] = min(rates["liar"] * 2, 1e6)  # what anyone may say is bounded
    assert "b" in tried


def test_who_has_left_is_not_tried() -> None:
    exploring = BandwidthProbe()
    assert exploring.next({"a": 1.0, "b": 2.0}) == "a"
    assert exploring.next({"b": 2.0, "c": 1.0}) in ("b", "c")
    assert exploring.next({"b": 2.0}) in (None, "b", "c")
    assert exploring.next({}) is None


def test_an_idle_line_keeps_its_estimate_and_one_that_became_slower_is_believed_slower() -> None:
    line, now = AccessLine(), 0.0

    def minutes(count: float, mbyte_s: float) -> None:
        nonlocal now
        for _ in range(int(count * 240)):
            now += 0.25
            line.note(now, now, Count(int(mbyte_s * MB / 4), int(mbyte_s * MB / 8)))

    minutes(1, 10.0)
    assert line.up.most_bytes_per_s == pytest.approx(10 * MB)
    assert line.down.most_bytes_per_s == pytest.approx(5 * MB)
    minutes(200, 0.01)
    assert line.up.most_bytes_per_s == pytest.approx(10 * MB), "an idle line was forgotten"
    minutes(30, 2.0)
    assert line.up.most_bytes_per_s == pytest.approx(10 * MB)
    minutes(40, 2.0)
    assert line.up.most_bytes_per_s == pytest.approx(2 * MB)
    assert line.up.now_bytes_per_s == pytest.approx(2 * MB)


def test_what_is_told_changes_in_steps() -> None:
    line, told = AccessLine(), set[float]()
    assert line.up.told_bytes_per_s() == 0
    for number in range(400):
        rate = MB * (1 + number / 4000)
        line.note(number * 0.25, number * 0.25, Count(int(rate / 4), 0))
        told.add(line.up.told_bytes_per_s())
    assert len(told - {0.0}) <= 2
    assert line.down.told_bytes_per_s() == 0


def test_little_traffic_says_nothing_and_a_first_look_neither() -> None:
    line = AccessLine()
    line.note(0.0, 0.0, Count(10**9, 10**9))
    assert line.up.most_bytes_per_s == 0
    for number in range(1, 20):
        line.note(number * 0.25, number * 0.25, Count(1000, 1000))
    assert line.up.most_bytes_per_s == line.down.most_bytes_per_s == 0


def test_nothing_is_tried_where_the_slowest_sender_sets_the_pace() -> None:
    swarm = Swarm(a=5.0, b=5.0, c=5.0, d=40.0)
    swarm.seen = dict(swarm.true)
    seconds = [swarm.round() for _ in range(50)]
    assert max(seconds) == pytest.approx(swarm.best_s(), rel=1e-6)
    exploring = BandwidthProbe()
    assert all(exploring.next({"a": 1.0, "b": 2.0}, lambda: False) is None for _ in range(9))


@given(st.lists(st.tuples(st.floats(0.05, 0.6), st.floats(0, 0.3), st.floats(0, 1)), min_size=3, max_size=60))
def test_a_look_that_takes_long_never_finds_more_than_the_line_carried(looks: list[tuple[float, float, float]]) -> None:
    line, now, counted = AccessLine(), 0.0, 0
    for pause_s, takes_s, part in looks:
        begun = now + pause_s
        now = begun + takes_s
        passed = int(10 * MB * (begun + part * takes_s))  # until the moment at which it is really read
        line.note(begun, now, Count(passed - counted, 0))
        counted = passed
    assert line.up.most_bytes_per_s <= 10 * MB + 10


@given(st.lists(st.floats(0, 0.24), min_size=3, max_size=60))
def test_acknowledgements_that_had_waited_are_no_faster_line(delays_s: list[float]) -> None:
    line, counted = AccessLine(), 0
    for number, delay_s in enumerate(delays_s):
        now = (number + 1) * 0.25
        acknowledged = int(10 * MB * (now - delay_s))  # of a full line
        line.note(now, now, Count(acknowledged - counted, 0, delay_s))
        counted = acknowledged
    assert line.up.most_bytes_per_s <= 10 * MB + 10


def test_round_trips_that_stay_as_they_are_take_nothing_from_a_line() -> None:
    line = AccessLine()
    for number in range(100):
        line.note(number * 0.25, number * 0.25, Count(int(0.25 * 10 * MB), 0, 0.2))
    assert line.up.most_bytes_per_s == pytest.approx(10 * MB)


def test_a_look_that_always_takes_long_finds_nearly_all() -> None:
    line = AccessLine()
    for number in range(100):
        line.note(number * 0.3, number * 0.3 + 0.05, Count(int(0.3 * 10 * MB), 0))
    assert 0.9 * 10 * MB <= line.up.most_bytes_per_s <= 10 * MB
