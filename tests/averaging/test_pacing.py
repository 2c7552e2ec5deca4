"""A round whose lines are known holds its connections to even rates, and lets go of them whatever happens."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from trio.testing import MockClock

from peerd.averaging.allreduce import AllReduceService
from peerd.averaging.allreduce_round import AveragingPlan, RoundFailed
from peerd.averaging.pacing import RoundPacing
from peerd.core.ids import PeerId
from tests.averaging.test_allreduce import Node, group, run_all

Rates = dict[str, list[float]]  # by peer, one after the other


def recorded() -> tuple[Rates, RoundPacing]:
    """Of the first of four peers that own equal shares of a round."""
    names = tuple(PeerId(bytes([0, 36, 8, 1, 18, 32]) + bytes([i]) * 32).text for i in range(4))
    rates: Rates = {}
    plan = AveragingPlan(b"a" * 16, names, 1024, 5.0, shares=(0.25,) * 4, s_per_byte=1e-6)
    return rates, RoundPacing(lambda peer, rate: rates.setdefault(peer.text, []).append(rate), plan, names[0])


def test_each_peer_is_told_once_and_in_the_end_nothing_is_held_back() -> None:
    rates, evenly = recorded()
    owners = sorted(evenly._rates)
    for owner in (*owners, *owners):  # we call it, and it calls us
        evenly.begin(owner)
    assert rates == {owner: [0.95 * 0.5e6] for owner in owners}
    evenly.end()
    assert rates == {owner: [0.95 * 0.5e6, math.inf] for owner in owners}


def test_calls_on_the_same_connection_keep_a_rate_of_their_own() -> None:
    rates, evenly = recorded()
    evenly._rates = dict.fromkeys(evenly._rates, 1.0)
    owner = min(evenly._rates)
    evenly.begin(owner)
    assert rates == {owner: [20e3]}


@pytest.mark.parametrize("s_per_byte", [0.0, 1e-6])
@pytest.mark.parametrize("fails", [False, True])
async def test_each_connection_of_a_round_is_paced_and_let_go(
    autojump_clock: MockClock, s_per_byte: float, fails: bool
) -> None:
    async with group(3) as (_, nodes):
        rates: Rates = {}

        def pacer(peer: PeerId, rate: float) -> None:
            rates.setdefault(peer.text, []).append(rate)

        first = nodes[0]
        first.averaging._pacer = pacer
        how = replace(even(nodes), s_per_byte=s_per_byte)
        taking = nodes[:2] if fails else nodes
        results = await run_all(taking, [np.ones(3000, dtype="float32") for _ in taking], how)
        assert all(isinstance(result, RoundFailed) for result in results) == fails
        assert isinstance(first.averaging, AllReduceService)
        others = {node.id.text for node in nodes[1:]}
        assert set(rates) == (others if s_per_byte else set())  # whoever never came could be called, too
        assert all(found[0] < math.inf and found[-1] == math.inf for found in rates.values())


def even(nodes: list[Node]) -> AveragingPlan:
    return AveragingPlan(b"a" * 16, tuple(node.id.text for node in nodes), 1024, 5.0, shares=(0.5, 0.25, 0.25))
