"""The rule for moves between stages, which moves as few as lift the weakest."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from peerd.swarm.rebalance.loads import PeerLoad, StageLoads, Transfer
from peerd.swarm.rebalance.rebalance_rule import RebalanceConfig, RebalanceRule
from tests.kit.amount import some

PRICE_S = RebalanceConfig((1.0,)).price_s


def swarm(*counts: int, rate: float = 1.0) -> list[PeerLoad]:
    """So many equal peers in each stage."""
    return [PeerLoad(f"{stage}-{n}", stage, rate) for stage, count in enumerate(counts) for n in range(count)]


def ours(stages: int, *work: float) -> RebalanceRule:
    return RebalanceRule(RebalanceConfig(work or (1.0,) * stages))


def in_the_end(rule: RebalanceRule, loads: list[PeerLoad], now: float = 0.0) -> list[Transfer]:
    """The moves that the rule begins when nothing else changes."""
    if moves := rule.look(now, loads):
        return moves
    due = rule.due(now)
    return rule.look(due, loads) if due < float("inf") else []


def moved(loads: list[PeerLoad], moves: list[Transfer]) -> list[PeerLoad]:
    """Loads of equal stages after these moves."""
    to = {one.peer: one.target for one in moves}
    return [PeerLoad(one.peer, to.get(one.peer, one.stage), one.rate) for one in loads]


@pytest.mark.parametrize("counts", [(3, 3, 3), (4, 3, 3), (1, 1), (4, 4, 5, 5)])
def test_nobody_moves_where_no_move_lifts_the_weakest_stage(counts: tuple[int, ...]) -> None:
    rule = ours(len(counts))
    assert in_the_end(rule, swarm(*counts)) == []
    assert rule.due(0.0) == float("inf")


def test_a_peer_of_the_strongest_stage_moves_to_the_weakest() -> None:
    (move,) = in_the_end(ours(3), swarm(4, 2, 5))
    assert (move.source, move.target) == (2, 1)


def test_several_move_at_once_when_several_stages_are_short() -> None:
    loads = swarm(2, 9, 2, 9)
    moves = in_the_end(ours(4), loads)
    assert len(moves) > 1
    assert {one.target for one in moves} == {0, 2}
    after = Counter(one.stage for one in moved(loads, moves))
    assert min(after.values()) > 2


def test_an_empty_stage_is_filled() -> None:
    moves = in_the_end(ours(2), swarm(3, 0))
    assert [(one.source, one.target) for one in moves] == [(0, 1)]


def test_a_small_lack_waits_for_a_newcomer_and_a_large_one_does_not() -> None:
    small, large = ours(2), ours(2)
    assert small.look(0.0, swarm(15, 13)) == []
    assert large.look(0.0, swarm(20, 4)) == []
    assert small.due(0.0) == pytest.approx(PRICE_S)  # one peer's work for a peer's move
    small.look(PRICE_S / 2, swarm(15, 14))  # a newcomer has come
    assert small.due(PRICE_S / 2) == float("inf")
    assert small.look(10 * PRICE_S, swarm(15, 14)) == []
    assert large.due(0.0) <= PRICE_S
    assert len(large.look(PRICE_S, swarm(20, 4))) == 8


def test_a_lack_that_would_outweigh_its_price_before_the_next_look_is_not_waited_for() -> None:
    late, soon = ours(2), ours(2)
    assert len(late.look(0.0, swarm(15, 13), PRICE_S)) == 1
    assert soon.look(0.0, swarm(15, 13), PRICE_S / 2) == []
    assert soon.due(0.0) == pytest.approx(PRICE_S / 2)
    assert len(soon.look(PRICE_S / 2, swarm(15, 13), PRICE_S / 2)) == 1


def test_what_was_lost_before_counts_when_the_lack_grows() -> None:
    rule = ours(2)
    rule.look(0.0, swarm(15, 13))
    rule.look(0.75 * PRICE_S, swarm(15, 12))
    assert rule.due(0.75 * PRICE_S) == pytest.approx(PRICE_S)


def test_a_fast_peer_changes_places_with_a_slow_one() -> None:
    loads = [PeerLoad("fast", 0, 8.0), *(PeerLoad(f"slow{n}", 0, 1.0) for n in range(4)), PeerLoad("one", 1, 1.0)]
    moves = in_the_end(ours(2), loads)
    assert [one.peer for one in moves] == ["fast", "one"]
    assert StageLoads(moved(loads, moves), (1.0, 1.0)).throughput == 5.0


def test_a_stage_with_more_work_gets_more_peers() -> None:
    loads = [PeerLoad(f"a{n}", 0, 1.0) for n in range(6)] + [PeerLoad(f"b{n}", 1, 0.25) for n in range(2)]
    moves = in_the_end(ours(2, 1.0, 4.0), loads)
    assert {one.source for one in moves} == {0}
    staffing = StageLoads(loads, (1.0, 4.0))
    for one in moves:
        staffing.move(one)
    assert staffing.throughput > 0.5


def test_a_peer_that_may_not_move_stays() -> None:
    loads = [PeerLoad(f"a{n}", 0, 1.0, stays=n != 3) for n in range(9)] + [PeerLoad("b", 1, 1.0)]
    assert [one.peer for one in in_the_end(ours(2), loads)] == ["a3"]


def test_a_stage_is_the_weakest_by_rates_not_by_peers() -> None:
    assert StageLoads(swarm(4, 3, 5), (1.0,) * 3).weakest() == 1
    assert StageLoads([PeerLoad("a", 0, 5.0), PeerLoad("b", 1, 1.0), PeerLoad("c", 1, 1.0)], (1.0, 1.0)).weakest() == 1


@pytest.mark.parametrize("seed", some(range(200), 20))
def test_whatever_the_loads_moves_lift_the_throughput_and_leave_no_stage_empty(seed: int) -> None:
    rng = random.Random(seed)
    stages = rng.randint(1, 6)
    work = [rng.choice((0.5, 1.0, 3.0)) for _ in range(stages)]
    peers = [rng.randrange(stages) for _ in range(rng.randint(1, 30))]
    loads = [
        PeerLoad(f"p{n:02d}", stage, rng.choice((1.0, 2.0, 4.0)) / work[stage], stays=rng.random() < 0.2)
        for n, stage in enumerate(peers)
    ]
    moves = in_the_end(ours(stages, *work), loads)
    assert in_the_end(ours(stages, *work), rng.sample(loads, len(loads))) == moves  # in whatever order they are named
    staffing = StageLoads(loads, work)
    before, served = staffing.throughput, [bool(count) for count in staffing.count]
    for one in moves:
        assert loads[int(one.peer[1:])].stage == one.source
        staffing.move(one)
    assert len({one.peer for one in moves}) == len(moves)
    assert all(now or not was for now, was in zip(map(bool, staffing.count), served, strict=True))
    assert staffing.throughput > before or not moves
