"""Shares by bandwidth, closed form: known answers, the paper's table, and what must hold for any lines."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from peerd.averaging.shares import UNITS, MemberLine, Mode, NoSplit, apportioned, bound_s_per_byte, shares

NODE, CLIENT, AUX = Mode.NODE, Mode.CLIENT, Mode.AUX
TINY = 3 / UNITS  # shares come in whole billionths


def swarm(*peers: tuple[Mode, float | None]) -> list[MemberLine]:
    """Lines of the same rate in both directions, named in this order."""
    return [MemberLine(f"p{i:03}", mode, rate, rate) for i, (mode, rate) in enumerate(peers)]


def nodes(*rates: float) -> list[MemberLine]:
    return swarm(*((NODE, rate) for rate in rates))


rates = st.floats(1e3, 1e10)
unknown_too = st.one_of(st.none(), rates)


@st.composite
def swarms(draw: st.DrawFn, rate: st.SearchStrategy[float | None] = unknown_too) -> list[MemberLine]:
    modes = draw(st.lists(st.sampled_from(Mode), min_size=2, max_size=12))
    modes[:2] = [NODE, draw(st.sampled_from((NODE, CLIENT)))]  # somebody may sum, and two send
    return [MemberLine(f"p{i:03}", mode, draw(rate), draw(rate)) for i, mode in enumerate(modes)]


VECTORS = [
    (nodes(1, 1, 1, 1), 1.5, (0.25, 0.25, 0.25, 0.25)),
    (nodes(1, 1, 1, 4), 1.0, (0, 0, 0, 1)),
    (swarm((NODE, 1), (NODE, 1), (NODE, 1), (CLIENT, 0.5)), 2.0, (1 / 3, 1 / 3, 1 / 3, 0)),
    (swarm((NODE, 1), (NODE, 1), (NODE, 1), (NODE, 1), (AUX, 10)), 1.0, (0, 0, 0, 0, 1)),
    (nodes(*[0.2] * 16), 9.375, (1 / 16,) * 16),
    (nodes(*[1.0] * 8, *[0.2] * 16), 5.0, (1 / 8,) * 8 + (0.0,) * 16),
    (nodes(*[0.2] * 16, 2.5), 5.614035, (0.00819,) * 16 + (0.8690,)),
    (nodes(3, 5), 1 / 3, (0.5, 0.5)),  # with two senders each moves one vector, whoever sums
]


@pytest.mark.parametrize(("lines", "xi", "expected"), VECTORS)
def test_known_answers(lines: list[MemberLine], xi: float, expected: tuple[float, ...]) -> None:
    found = shares(lines)
    assert found.xi_s_per_byte == pytest.approx(xi, rel=1e-6)
    assert list(found.fractions.values()) == pytest.approx(list(expected), abs=1e-5)
    assert found.why


# DeDLOC, Table 1: seconds of all-reduce, parameter server and adaptive averaging, as measured there; Gb/s.
TABLE_1 = [
    ((1.0,) * 8, (1.19, 4.73, 1.20)),
    ((0.2,) * 16, (5.3, 39.6, 5.3)),
    ((1.0,) * 8 + (0.2,) * 16, (5.69, 14.1, 2.96)),
    ((0.2,) * 16 + (2.5,), (5.3, 3.22, 3.18)),
]
MODEL_1 = [(0.99, 3.96, 0.99), (5.30, 42.4, 5.30), (5.42, 13.0, 2.83), (5.32, 3.62, 3.17)]


@pytest.mark.parametrize(("row", "model"), list(zip(TABLE_1, MODEL_1, strict=True)))
def test_the_model_foretells_the_papers_table(
    row: tuple[tuple[float, ...], tuple[float, ...]], model: tuple[float, ...]
) -> None:
    seconds = 5.3 / 9.375  # fitted on one number: 16 equal peers
    lines, measured = nodes(*row[0]), row[1]
    found = shares(lines)
    best = max(lines, key=lambda line: line.up_bytes_per_s or 0).peer
    equal = {line.peer: 1 / len(lines) for line in lines}
    server = {line.peer: float(line.peer == best) for line in lines}
    times = [seconds * bound_s_per_byte(lines, split) for split in (equal, server, found.fractions)]
    assert times == pytest.approx(list(model), rel=0.005)
    assert times == pytest.approx(list(measured), rel=0.18)
    assert found.xi_s_per_byte * seconds == pytest.approx(times[2])


@given(swarms())
def test_shares_add_up_and_clients_have_none(lines: list[MemberLine]) -> None:
    found = shares(lines)
    assert list(found.fractions) == [line.peer for line in lines]
    assert sum(round(f * UNITS) for f in found.fractions.values()) == UNITS
    assert math.fsum(found.fractions.values()) == pytest.approx(1, abs=1e-12)
    assert all(0 <= fraction <= 1 for fraction in found.fractions.values())
    assert all(found.fractions[line.peer] == 0 for line in lines if line.mode is CLIENT)


@given(swarms(), st.integers(0, 1 << 30))
def test_the_order_of_the_peers_changes_no_bit(lines: list[MemberLine], seed: int) -> None:
    shuffled = lines.copy()
    random.Random(seed).shuffle(shuffled)
    one, other = shares(lines), shares(shuffled)
    assert (one.fractions, one.xi_s_per_byte, one.why) == (other.fractions, other.xi_s_per_byte, other.why)


@given(swarms(rates), st.integers(0, 11), st.floats(1, 100))
def test_a_wider_line_never_gets_a_smaller_share(lines: list[MemberLine], which: int, factor: float) -> None:
    line = lines[which % len(lines)]
    assert line.up_bytes_per_s is not None
    assert line.down_bytes_per_s is not None
    wider = MemberLine(line.peer, line.mode, line.up_bytes_per_s * factor, line.down_bytes_per_s * factor)
    before, after = shares(lines), shares([wider if other is line else other for other in lines])
    assert after.fractions[line.peer] >= before.fractions[line.peer] - TINY
    assert after.xi_s_per_byte <= before.xi_s_per_byte * (1 + 1e-9)


@given(swarms(rates))
def test_no_simpler_division_is_faster(lines: list[MemberLine]) -> None:
    found = shares(lines)
    time = bound_s_per_byte(lines, found.fractions)
    owners = [line.peer for line in lines if line.mode is not CLIENT]
    for rivals in [owners, *([owner] for owner in owners)]:
        rival = {line.peer: (line.peer in rivals) / len(rivals) for line in lines}
        assert time <= bound_s_per_byte(lines, rival) * (1 + 1e-4)  # a billionth of a share on a very slow line
    assert found.xi_s_per_byte == pytest.approx(time, rel=1e-4)


def test_an_unknown_line_counts_as_the_mean_of_the_known() -> None:
    assert shares(swarm((NODE, 2), (NODE, None), (NODE, 4))) == shares(nodes(2, 3, 4))
    half = [MemberLine("a", NODE, 2.0), MemberLine("b", NODE, None, 3.0), MemberLine("c", NODE, 4.0, 9.0)]
    assert list(shares(half).fractions.values()) == list(shares(nodes(2, 3, 4)).fractions.values())


@pytest.mark.parametrize("clients", [0, 1, 5])
def test_if_nothing_is_known_nodes_share_equally_and_clients_get_nothing(clients: int) -> None:
    found = shares(swarm(*[(NODE, None)] * 4, *[(CLIENT, None)] * clients))
    assert list(found.fractions.values()) == [0.25] * 4 + [0.0] * clients
    assert found.xi_s_per_byte == 0


@given(st.lists(st.sampled_from((NODE, CLIENT, AUX)), max_size=8))
def test_a_swarm_without_rates_shares_equally_or_says_why_not(modes: list[Mode]) -> None:
    lines = swarm(*((mode, None) for mode in modes))
    if not {NODE, CLIENT} & set(modes) or not {NODE, AUX} & set(modes):
        with pytest.raises(NoSplit):
            shares(lines)
    else:
        found = shares(lines)
        assert all(found.fractions[line.peer] == 0 for line in lines if line.mode is CLIENT)


def test_single_peers() -> None:
    assert shares(nodes(7)).fractions == {"p000": 1.0}
    assert shares(swarm((NODE, 7), (AUX, 100))).fractions == {"p000": 1.0, "p001": 0.0}
    assert shares(swarm((CLIENT, 2), (AUX, 100))).fractions == {"p000": 0.0, "p001": 1.0}
    for alone in (swarm((CLIENT, 7)), swarm((AUX, 7)), []):
        with pytest.raises(NoSplit):
            shares(alone)


def test_lines_that_carry_nothing_get_nothing_and_all_such_is_an_error() -> None:
    assert shares(nodes(0, 1, 1, 1)).fractions["p000"] == 0
    with pytest.raises(NoSplit):
        shares(nodes(0, 0, 0))


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError):
        shares([MemberLine("a"), MemberLine("b", NODE, 1.0, rate)])


def test_a_peer_named_twice_is_refused() -> None:
    with pytest.raises(ValueError):
        shares([MemberLine("a"), MemberLine("a")])


@pytest.mark.parametrize(
    ("total", "scores", "counts"),
    [(10, (0.5, 0.3, 0.2), [5, 3, 2]), (7, (1, 1, 1), [3, 2, 2]), (0, (1, 2), [0, 0]), (5, (0, 1), [0, 5])],
)
def test_whole_numbers_by_highest_averages(total: int, scores: tuple[float, ...], counts: list[int]) -> None:
    assert apportioned(total, scores) == counts


@given(st.integers(0, 1 << 31), st.lists(st.floats(0, 1e300), min_size=1, max_size=40))
def test_whole_numbers_add_up_and_stay_near_what_is_due(total: int, scores: list[float]) -> None:
    if max(scores) == 0:
        with pytest.raises(ValueError):
            apportioned(total, scores)
        return
    counts = apportioned(total, scores)
    assert sum(counts) == total
    whole = math.fsum(score / max(scores) for score in scores)
    for count, score in zip(counts, scores, strict=True):
        due = total * (score / max(scores)) / whole
        assert due * (1 - 1e-9) - 2 <= count <= due * (1 + 1e-9) + len(scores)


@given(st.integers(1, 1 << 31), st.lists(st.floats(0, 1e12) | st.sampled_from([1.0, 1 / 3]), min_size=1, max_size=20))
def test_what_is_divided_is_what_exact_fractions_divide(total: int, scores: list[float]) -> None:
    assume(max(scores) > 0)
    top = Fraction(max(scores))
    weights = [int(Fraction(score) * (1 << 52) / top) for score in scores]
    counts = [total * weight // sum(weights) for weight in weights]
    for _ in range(total - sum(counts)):
        i = max(range(len(scores)), key=lambda i: (Fraction(weights[i], counts[i] + 1), -i))
        counts[i] += 1
    assert apportioned(total, scores) == counts
