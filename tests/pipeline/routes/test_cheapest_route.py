"""Routes by flow: shares follow speeds, near peers follow each other, liars gain little, and choosing stays cheap."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.messages.handover import Hop
from peerd.pipeline.routes.cheapest_route import CheapestRoute
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.machines.routesim import RECEIPT, RouteSim

EAST = {"a0", "b0", "a1", "b1", "a2", "b2"}
SIX = [[f"{letter}{stage}" for letter in "abcdef"] for stage in range(3)]
LIAR = "a1"


def never(one: str, other: str) -> bool:
    return False


def flow() -> CheapestRoute:
    return CheapestRoute(random.Random(1))


def alike(one: str, other: str) -> float:
    return 0.05


def coasts(one: str, other: str) -> float:
    return 0.02 if not one or (one in EAST) == (other in EAST) else 1.0


def test_shares_follow_speeds() -> None:
    speeds = {"a1": 4.0, "b1": 2.0, "c1": 1.0, "d1": 1.0}
    sim = RouteSim([["a0"], list(speeds), ["a2"]], flow(), lambda name: 0.8 / speeds.get(name, 80.0), alike)
    sim.run(48, 12)
    sim.served.clear()
    sim.run(800, 12)
    for name, speed in speeds.items():
        assert abs(sim.served[name] - 100 * speed) < 40, sim.served


def test_peers_that_are_near_each_other_follow_each_other() -> None:
    """Four of six peers a stage are far from the other two; all are as fast, and half the load would fit anywhere."""
    found = []
    for policy in (flow(), InTurn()):
        sim = RouteSim(SIX, policy, lambda name: 0.2, coasts)
        sim.run(100, 18)
        sim.routes.clear()
        seconds = sim.run(200, 18)
        crossings = sum((a in EAST) != (b in EAST) for route in sim.routes for a, b in pairwise(route))
        found.append((crossings, seconds))
    (ours, ours_s), (turns, turns_s) = found
    assert ours < 0.1 * turns
    assert ours_s < 0.5 * turns_s


def test_microbatches_do_not_wait_for_each_other_on_one_line_where_another_is_as_near() -> None:
    one = flow()
    for name, far_s in (("a1", 1.0), ("b1", 1.1)):
        for _ in range(8):
            hops = [Hop("a0", RECEIPT, 0.01, 0.0, far_s + 0.01), Hop(name, RECEIPT, 0.01)]
            sent = one.sent(["a0", name])
            one.ended(sent)
            one.answered(0.0, sent, hops, far_s + 0.02)
    found = []
    for _ in range(4):
        found.append(one.choose(0.0, [["a0"], ["a1", "b1"]], never)[1])
        one.sent(["a0", found[-1]])
    assert found == ["a1", "b1", "a1", "b1"]


def test_what_others_of_ours_took_on_a_line_does_not_count_once_they_are_over() -> None:
    """a1 is 0.4 s away; b1 0.3 s, measured while eight others were on the way to it: 0.9 s."""
    one = flow()
    for name, far_s, others in (("a1", 0.4, 0), ("b1", 0.9, 8)):
        for _ in range(8):
            hops = [Hop("a0", RECEIPT, 0.01, 0.0, far_s + 0.01), Hop(name, RECEIPT, 0.01)]
            under_way = [one.sent(["a0", name]) for _ in range(others + 1)]
            one.answered(0.0, under_way[-1], hops, far_s + 0.02)
            for sent in under_way:
                one.ended(sent)
    assert one.choose(0.0, [["a0"], ["a1", "b1"]], never)[1] == "b1"
    for _ in range(2):
        one.sent(["a0", "b1"])
    assert one.choose(0.0, [["a0"], ["a1", "b1"]], never)[1] == "a1"


def test_a_newcomer_is_tried_but_not_flooded() -> None:
    """Until it has answered it may be as slow as the slowest."""
    one, speeds = flow(), {"a0": 1.0, "b0": 1.0, "c0": 4.0}
    for name, service_s in speeds.items():
        for _ in range(2):
            sent = one.sent([name])
            one.ended(sent)
            one.answered(0.0, sent, [Hop(name, RECEIPT, service_s)], service_s)
    chosen = list[str]()
    for _ in range(12):
        chosen += one.choose(0.0, [["new", *speeds]], never)
        one.sent([chosen[-1]])
    assert 1 <= chosen.count("new") <= 2


def test_with_nothing_known_the_turns_decide() -> None:
    one = flow()
    assert one.choose(0.0, [["b0", "a0"], ["c1", "a1"]], never) == ["b0", "c1"]


def test_two_that_are_cut_off_from_each_other_do_not_follow_unless_nobody_else_is_left() -> None:
    def cut(one: str, other: str) -> bool:
        return (one, other) == ("a0", "a1")

    one = flow()
    assert one.choose(0.0, [["a0"], ["a1", "b1"]], cut) == ["a0", "b1"]
    assert one.choose(0.0, [["a0", "b0"], ["a1"]], cut) == ["b0", "a1"]
    assert one.choose(0.0, [["a0"], ["a1"]], cut) == ["a0", "a1"]


def test_a_peer_that_gives_nothing_back_gets_few() -> None:
    one, stages = flow(), [[f"{letter}0" for letter in "abcdef"]]
    for name in stages[0]:
        one.answered(0.0, one.sent([name]), [Hop(name, RECEIPT, 1.0)], 1.0)
        one.ended(one.sent([name]))
    kept = []
    for _ in range(200):
        sent = one.sent(one.choose(0.0, stages, never))
        if sent.route == ["a0"]:
            kept.append(sent)
        else:
            one.answered(0.0, sent, [Hop(sent.route[0], RECEIPT, 1.0)], 1.0)
            one.ended(sent)
    assert len(kept) <= 3


# --- liars ------------------------------------------------------------------------------------------------------------
def claims_nothing(hops: list[Hop]) -> list[Hop]:
    """It says that all its time was spent beyond the next stage's peer."""
    if hops[0].peer != LIAR:
        return hops
    whole_s = hops[0].service_s + hops[0].wait_s + hops[0].onward_s
    return [msgspec.structs.replace(hops[0], service_s=0.0, wait_s=0.0, onward_s=whole_s), *hops[1:]]


def blames_the_next(hops: list[Hop]) -> list[Hop]:
    """It says that all its time was the next one's computing: hops pass through its hands."""
    if hops[0].peer != LIAR:
        return hops
    own_s = hops[0].service_s + hops[0].wait_s
    first = msgspec.structs.replace(hops[0], service_s=0.0, wait_s=0.0, onward_s=hops[0].onward_s + own_s)
    return [first, *(msgspec.structs.replace(hop, service_s=hop.service_s + own_s) for hop in hops[1:])]


def claims_less(hops: list[Hop]) -> list[Hop]:
    return [msgspec.structs.replace(hops[0], service_s=0.0, wait_s=0.0), *hops[1:]] if hops[0].peer == LIAR else hops


@pytest.mark.slow
def test_a_liar_that_is_slow_gets_less_than_a_fair_share() -> None:
    for lie in (claims_nothing, blames_the_next, claims_less):
        sim = RouteSim(SIX, flow(), lambda name: 1.0 if name == LIAR else 0.2, alike, lie)
        sim.run(100, 18)
        sim.served.clear()
        sim.run(600, 18)
        assert sim.served[LIAR] <= 100, (lie.__name__, sim.served)


def test_a_liar_that_blames_the_next_ones_takes_nothing_from_them() -> None:
    shares = []
    for lie in (lambda hops: hops, blames_the_next):
        sim = RouteSim(SIX, flow(), lambda name: 1.0 if name == LIAR else 0.2, alike, lie)
        sim.run(100, 18)
        sim.served.clear()
        sim.run(600, 18)
        shares.append([sim.served[name] for name in SIX[2]])
    assert all(abs(lied - 100) <= abs(honest - 100) + 25 for honest, lied in zip(*shares, strict=True)), shares


# --- properties -------------------------------------------------------------------------------------------------------
TIMES = st.floats(0.0, 1e6)


@pytest.mark.slow
@given(st.data())
def test_any_claims_leave_routes_that_lead_through_all_stages(data: st.DataObject) -> None:
    one, stages = flow(), [[f"{letter}{stage}" for letter in "abc"] for stage in range(3)]
    under_way = []
    for step in range(data.draw(st.integers(1, 30))):
        options = [data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)) for names in stages]
        route = one.choose(float(step), options, never)
        assert all(name in names for name, names in zip(route, options, strict=True))
        under_way.append(one.sent(route))
        if data.draw(st.booleans()):
            sent = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            hops = [Hop(name, RECEIPT, *data.draw(st.tuples(TIMES, TIMES, TIMES))) for name in sent.route]
            one.answered(float(step), sent, hops, data.draw(TIMES))
            one.ended(sent)
    for sent in under_way:
        one.ended(sent)
    assert not one._under_way
    assert not one._between


@pytest.mark.slow
def test_of_many_peers_a_sample_is_compared_and_what_is_known_stays_bounded() -> None:
    asked = 0

    def counting(one: str, other: str) -> bool:
        nonlocal asked
        asked += 1
        return False

    one, stages = flow(), [[f"p{stage}-{number}" for number in range(125)] for stage in range(8)]
    for step in range(100):
        sent = one.sent(one.choose(float(step), stages, counting))
        one.answered(float(step), sent, [Hop(name, RECEIPT, 0.1, 0.0, 0.0) for name in sent.route], 1.0)
        one.ended(sent)
    assert asked <= 100 * 8 * 16 * 16
    few = {name for names in stages for name in names[:2]}
    one.update(dict.fromkeys(few, 0.0))
    assert one._costs.remembered <= 16 + 16 * 17


def test_hops_of_peers_that_do_not_serve_are_not_remembered() -> None:
    one = flow()
    one.update({"a0": 0.0})
    for number in range(100):
        sent = one.sent(["a0"])
        one.answered(0.0, sent, [Hop("a0", RECEIPT, 1.0, 0.0, 1.0), Hop(f"stranger{number}", RECEIPT, 1.0)], 5.0)
        one.ended(sent)
    assert one._costs.remembered == 0
