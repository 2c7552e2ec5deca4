"""The conductor's map: the worse word of both ends, liars within their own pairs, bounds, settling, fading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.core.limits import NETWORK_PEERS
from peerd.messages.network import PairFigures
from peerd.placement.network.network_map import FADE_S, NOTHING, RATE_FADE_S, SETTLE_S, STEP, NetworkMap, PairView


def told(*reports: tuple[str, PairFigures], now: float = 0.0) -> NetworkMap:
    network = NetworkMap()
    for teller, figures in reports:
        network.take(now, teller, [figures])
    network.check()
    return network


def test_where_both_ends_contradict_the_higher_delay_and_the_lower_rate_count() -> None:
    network = told(("a", PairFigures("b", 0.01, 5e6, 9e6)), ("b", PairFigures("a", 0.03, 2e6, 1e6)))
    assert network.view(0.0, "a", "b") == PairView(0.03, 1e6, 2e6)
    assert network.view(0.0, "b", "a") == PairView(0.03, 2e6, 1e6)
    assert network.view(0.0, "a", "c") == NOTHING


def test_one_end_is_enough_where_the_other_has_measured_nothing() -> None:
    network = told(("a", PairFigures("b", 0.01, 0.0, 9e6)))
    assert network.view(0.0, "b", "a") == PairView(0.01, 9e6, None)
    assert network.others("b") == ["a"]
    assert list(network.pairs()) == [("a", "b")]


def test_what_is_not_told_again_fades_and_is_dropped() -> None:
    network = told(("a", PairFigures("b", 0.01, 1e6)))
    assert network.view(FADE_S, "a", "b").rtt_s == 0.01
    assert network.view(FADE_S + 1, "a", "b") == NOTHING
    network.take(FADE_S + 1, "c", [PairFigures("a", 0.02)])
    assert network.peers() == ["a", "c"]
    assert len(network) == 1
    network.check()


def test_a_rate_fades_by_its_own_age() -> None:
    network = told(("a", PairFigures("b", 0.01, 1e6, rate_age_s=RATE_FADE_S - 10)))
    assert network.view(10.0, "a", "b") == PairView(0.01, 1e6, None, RATE_FADE_S)
    assert network.view(11.0, "a", "b") == PairView(0.01, None, None, 11.0)


def test_a_measurement_that_jumps_does_not_make_the_map_flap() -> None:
    network, seen = NetworkMap(), set()
    for turn in range(40):
        network.take(30.0 * turn, "a", [PairFigures("b", 0.010 if turn % 2 else 0.014)])
        seen.add(network.view(30.0 * turn + 29, "a", "b").rtt_s)
    assert len(seen) <= 2
    network.take(1200.0, "a", [PairFigures("b", 0.2)])
    assert network.view(1200.0, "a", "b").rtt_s < 0.02  # type: ignore[operator]
    assert network.view(1200.0 + 8 * SETTLE_S, "a", "b").rtt_s == pytest.approx(0.2, rel=STEP - 1)


def limited(peer: str, rate: float, up: bool, down: bool) -> PairFigures:
    return PairFigures(peer, 0.01, rate, rate, up_limited=up, down_limited=down)


def test_a_limit_of_a_pair_needs_the_word_of_both_ends() -> None:
    network = told(("a", limited("b", 1e5, True, True)), ("b", limited("a", 2e5, False, True)))
    assert network.limits(0.0, "a") == network.limits(0.0, "b") == {("a", "b"): 2e5}
    assert told(("a", limited("b", 1e5, True, True))).limits(0.0, "a") == {}
    assert told(("a", limited("b", 1e5, True, True)), ("b", limited("a", 1e5, False, False))).limits(0.0, "a") == {}
    network.take(1.0, "b", [limited("a", 2e5, False, False)])
    assert network.limits(1.0, "a") == {}


def test_a_stranger_that_tells_without_end_pushes_nobody_out() -> None:
    network = NetworkMap(most_figures=50)
    for number in range(10):
        network.take(0.0, "a", [PairFigures(f"p{number}", 0.01)])
    for number in range(500):
        network.take(1.0, "liar", [PairFigures(f"q{number}", 0.01)])
        network.check()
    assert len(network.others("a")) == 10
    assert len(network) == 50
    for number in range(NETWORK_PEERS + 5):
        network.take(2.0, "b", [PairFigures(f"r{number}", 0.01)])
    network.check()
    assert len(network.others("a")) == 10
    assert network.view(2.0, "b", "r0") == NOTHING


figures = st.builds(
    PairFigures,
    st.sampled_from("abcdel"),
    st.floats(0, 60),
    st.floats(0, 125e9),
    st.floats(0, 125e9),
    st.floats(0, 86_400),
    st.floats(0, 86_400),
    st.booleans(),
    st.booleans(),
)
reports = st.lists(st.tuples(st.floats(0, 900), st.sampled_from("abcd"), st.lists(figures, max_size=4)), max_size=12)


@given(reports, st.lists(st.tuples(st.floats(0, 900), st.lists(figures, max_size=4)), max_size=12))
def test_a_liar_changes_no_pair_of_others_and_makes_none_of_its_own_better(
    honest: list[tuple[float, str, list[PairFigures]]], lies: list[tuple[float, list[PairFigures]]]
) -> None:
    """With and without a liar `l`, told at any times in between: pairs of others are the same."""
    without, with_liar, now = NetworkMap(), NetworkMap(), 0.0
    for number, (passed_s, teller, said) in enumerate(honest):
        now += passed_s
        without.take(now, teller, said)
        with_liar.take(now, teller, said)
        if number < len(lies):
            with_liar.take(now + lies[number][0] / 1e3, "l", lies[number][1])
        with_liar.check()
        for one in "abcde":
            for other in "abcde":
                if one != other:
                    assert with_liar.view(now, one, other) == without.view(now, one, other)
            alone, both = without.view(now, one, "l"), with_liar.view(now, one, "l")
            assert alone.rtt_s is None or (both.rtt_s or 0.0) >= alone.rtt_s
            assert alone.there is None or (both.there is not None and both.there <= alone.there)
            assert alone.back is None or (both.back is not None and both.back <= alone.back)
            assert with_liar.limits(now, one).keys() - without.limits(now, one).keys() <= {(one, "l"), ("l", one)}


@given(st.lists(st.tuples(st.floats(0, 2000), st.sampled_from("abcd"), st.lists(figures, max_size=6)), max_size=30))
def test_whatever_is_told_the_map_stays_within_its_bounds(said: list[tuple[float, str, list[PairFigures]]]) -> None:
    network, now = NetworkMap(most_figures=7), 0.0
    for passed_s, teller, told_now in said:
        now += passed_s
        network.take(now, teller, told_now)
        network.check()
        for one, other in network.pairs():
            there, back = network.view(now, one, other), network.view(now, other, one)
            assert (there.rtt_s, there.there, there.back) == (back.rtt_s, back.back, back.there)
            assert there.age_s >= 0
