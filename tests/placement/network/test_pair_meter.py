"""Measurements of one peer's links: only transfers that say something, the least round trip, limited pairs.
Which figures a report tells: what changed first, nothing twice without need, all of it in time.
"""

from __future__ import annotations

import math
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import LINE_BYTES_PER_S, NETWORK_PEERS, NETWORK_REPORT_PAIRS, NETWORK_RTT_S
from peerd.messages.encoding import decode, encode
from peerd.messages.network import PairFigures
from peerd.placement.network.pair_meter import KEPT_S, REFRESH_S, LinkSnapshot, OwnLine, PairMeter, ReportChanges

LINE = OwnLine(10e6, 10e6)
UNKNOWN = OwnLine()


def rates_seen(
    rates: dict[str, tuple[float, float]], seconds: int = 3, line: OwnLine = LINE, **more: object
) -> list[PairFigures]:
    """The figures after so many bytes/s out and in have passed with each peer; `more`: of every look."""
    meter = PairMeter()
    for now in range(seconds + 1):
        looks = {
            peer: LinkSnapshot(int(out * now), int(into * now), **more)  # type: ignore[arg-type]
            for peer, (out, into) in rates.items()
        }
        meter.look(float(now), looks, line)
    return meter.figures(float(seconds), line)


def test_what_waited_all_the_time_is_a_rate_and_what_trickled_is_none() -> None:
    (found,) = rates_seen({"a": (2e6, 1e6)}, waits=True, arrival_bytes_per_s=9e5)
    assert (found.up_bytes_per_s, found.down_bytes_per_s) == (2e6, 1e6)
    assert rates_seen({"a": (1e5, 1e5)}, waits=True, arrival_bytes_per_s=9e5) == []
    assert rates_seen({"a": (0, 1e6)}) == [], "many small messages do not fill a line"
    (idle,) = rates_seen({"a": (0, 0)}, rtt_s=0.02)
    assert idle == PairFigures("a", 0.02)


def test_a_program_that_has_no_more_to_send_or_holds_it_back_says_nothing_of_the_path() -> None:
    assert rates_seen({"a": (2e6, 0)}) == []
    assert rates_seen({"a": (2e6, 0)}, waits=True, paced=True) == []


def test_the_median_of_timed_payloads_counts_where_it_is_more_than_a_second_shows() -> None:
    (found,) = rates_seen({"a": (0, 1e6)}, arrival_bytes_per_s=9e6)
    assert found.down_bytes_per_s == 9e6
    assert rates_seen({"a": (0, 1e3)}, arrival_bytes_per_s=9e6) == []  # it is of long ago


def test_a_pair_is_limited_only_where_our_line_had_room_for_twice_as_much() -> None:
    passed = partial(rates_seen, waits=True, arrival_bytes_per_s=1e6)
    (alone,) = passed({"a": (1e6, 1e6)})
    assert alone.up_limited
    assert alone.down_limited
    crowd = passed({"a": (1e6, 1e6), "b": (5e6, 5e6)})
    assert not any(one.up_limited or one.down_limited for one in crowd)
    (unknown,) = passed({"a": (1e6, 1e6)}, line=UNKNOWN)
    assert not unknown.up_limited
    (wide,) = passed({"a": (6e6, 6e6)})
    assert not wide.up_limited


def test_the_least_round_trip_of_the_last_minutes_counts_and_is_forgotten() -> None:
    meter = PairMeter()
    for now, rtt_s in [(0.0, 0.05), (10.0, 0.02), (20.0, 0.5)]:
        meter.look(now, {"a": LinkSnapshot(0, 0, rtt_s)}, LINE)
    assert meter.figures(25.0, LINE) == [PairFigures("a", 0.02, rtt_age_s=5.0)]
    for minute in range(1, 6):
        meter.look(60.0 * minute, {"a": LinkSnapshot(0, 0, 0.09)}, LINE)
    assert meter.figures(300.0, LINE)[0].rtt_s == 0.09
    meter.look(301.0, {}, LINE)
    assert meter.figures(300.0 + KEPT_S + 2, LINE) == []


def test_a_link_that_ends_takes_its_count_along() -> None:
    meter = PairMeter()
    for now, count in enumerate([0, 5_000_000, 100, 200]):
        meter.look(float(now), {"a": LinkSnapshot(count, count, waits=True, arrival_bytes_per_s=1.0)}, LINE)
    (found,) = meter.figures(3.0, LINE)
    assert found.up_bytes_per_s == found.down_bytes_per_s == 5e6


def test_peers_measured_longest_ago_go_first() -> None:
    meter = PairMeter()
    for number in range(NETWORK_PEERS + 10):
        meter.look(float(number), {f"p{number}": LinkSnapshot(0, 0, 0.01)}, LINE)
    found = meter.figures(300.0, LINE)
    assert [one.peer for one in found] == [f"p{number}" for number in range(10, NETWORK_PEERS + 10)]


looks = st.builds(
    LinkSnapshot,
    st.integers(0, 1 << 60),
    st.integers(0, 1 << 60),
    st.one_of(st.none(), st.floats()),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.floats()),
)


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.dictionaries(st.sampled_from("abc"), looks)), max_size=12),
    st.builds(OwnLine, st.floats(0, math.inf), st.floats(0, math.inf)),
)
def test_whatever_links_do_the_figures_can_be_sent(
    seen: list[tuple[float, dict[str, LinkSnapshot]]], line: OwnLine
) -> None:
    meter, now = PairMeter(), 0.0
    for passed_s, links in seen:
        now += passed_s
        meter.look(now, links, line)
        for one in meter.figures(now, line):
            assert decode(PairFigures, encode(one)) == one
            assert 0 <= one.rtt_s <= NETWORK_RTT_S
            assert 0 <= max(one.up_bytes_per_s, one.down_bytes_per_s) <= LINE_BYTES_PER_S


def test_only_what_changed_by_a_fifth_is_told_anew() -> None:
    changes = ReportChanges()
    first = [PairFigures("a", 0.010, 1e6), PairFigures("b", 0.010)]
    assert changes.due(0.0, first) == first
    changes.told(0.0, first)
    assert changes.due(30.0, [PairFigures("a", 0.011, 1.1e6), PairFigures("b", 0.010)]) == []
    moved = PairFigures("b", 0.013)
    assert changes.due(30.0, [first[0], moved]) == [moved]
    limited = PairFigures("a", 0.010, 1e6, up_limited=True)
    assert changes.due(30.0, [limited, first[1]]) == [limited]


def test_what_no_conductor_took_is_told_again_and_a_new_one_is_told_all() -> None:
    changes, figures = ReportChanges(), [PairFigures("a", 0.010)]
    assert changes.due(0.0, figures) == changes.due(1.0, figures) == figures
    changes.told(1.0, figures)
    assert changes.due(1.0 + REFRESH_S, figures) == figures
    assert changes.due(2.0, figures) == []
    changes.forget()
    assert changes.due(2.0, figures) == figures


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=200))
def test_all_is_told_in_few_reports_however_much_there_is(rtts: list[float]) -> None:
    changes = ReportChanges()
    figures = [PairFigures(f"p{number}", rtt_s) for number, rtt_s in enumerate(rtts)]
    told: set[str] = set()
    for turn in range(-(-len(figures) // NETWORK_REPORT_PAIRS)):
        due = changes.due(30.0 * turn, figures)
        assert 0 < len(due) <= NETWORK_REPORT_PAIRS
        assert not told & {one.peer for one in due}
        told |= {one.peer for one in due}
        changes.told(30.0 * turn, due)
    assert told == {one.peer for one in figures}
