"""Which figures a report tells: what changed first, nothing twice without need, all of it in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import NETWORK_REPORT_PAIRS
from peerd.core.messages.network import PairFigures
from peerd.machine.network.pair_meter import REFRESH_S, ReportChanges


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
