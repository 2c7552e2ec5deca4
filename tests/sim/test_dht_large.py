"""Directories of a thousand and of ten thousand nodes: how fast, and what a fifth of hostile nodes can do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.dht.node.node_state import KademliaConfig
from tests.worlds.simulation.dht_churn import Loss, measure_loss
from tests.worlds.simulation.dht_grid import GridPlan, GridSwarm, next_rows
from tests.worlds.simulation.dht_hostile import HostilePlan, measure_hostile
from tests.worlds.simulation.dht_hot import HotPlan, measure_hot
from tests.worlds.simulation.heapsim import HeapSimConfig


def test_rows_of_the_best_live_prefixes_are_read_until_each_sample_has_enough() -> None:
    ranks = [[0, 1, 2, 3], [3, 0, 1, 2]]
    assert next_rows(ranks, {}, 2) == [0, 1, 3]
    assert next_rows(ranks, {0: {5}, 1: set(), 3: {1}}, 2) == [2]
    assert next_rows(ranks, {0: {5}, 1: set(), 2: {1}, 3: {1}}, 2) == []


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0.0, 0.2])
def test_all_live_prefixes_of_a_batch_are_found_in_a_swarm_of_three_hundred(dead: float) -> None:
    swarm = GridSwarm(3, GridPlan(nodes=300, sides=(32,), readers=2, dead=dead))
    report = swarm.read(32)
    assert report.missed == 0
    assert report.lookups >= 2 * 32 * (1 - dead) - 8
    assert report.mean_ms <= (1000 if dead else 300)


@pytest.mark.slow
@pytest.mark.thorough
def test_ten_thousand_nodes_answer_a_cold_batch_within_260_ms_and_8_messages_a_lookup() -> None:
    swarm = GridSwarm(1, GridPlan(nodes=10_000, readers=3))
    for side in swarm.plan.sides:
        report = swarm.read(side)
        assert report.missed == 0
        assert report.mean_ms <= 260
        assert report.asked_per_lookup <= 8.3


@pytest.mark.slow
def test_lookups_succeed_with_a_fifth_of_the_nodes_gone() -> None:
    assert measure_loss(2, Loss(nodes=500, values=50, lookups=500)) >= 0.999


@pytest.mark.slow
def test_a_fifth_of_hostile_nodes_keeps_no_more_than_one_lookup_in_a_hundred_from_its_value() -> None:
    report = measure_hostile(1, HostilePlan())
    assert report.success >= 0.99
    assert report.slowest_s <= 2.0
    assert report.asked_per_lookup <= 10


@pytest.mark.slow
@pytest.mark.thorough
def test_copies_on_the_way_spread_the_readers_of_a_hot_key_and_bring_it_a_hop_nearer() -> None:
    # Small tables make the ways of a few hundred nodes as long as those of ten thousand; most readers are clients.
    config = HeapSimConfig(clients=0.6, node=KademliaConfig(k=8, wide=()))
    plan = HotPlan(nodes=1500, readers=1100, every_s=0.02)
    holders_only = measure_hot(1, replace(plan, max_age_s=0), config)
    with_copies = measure_hot(1, plan, config)
    assert holders_only.success == with_copies.success == 1.0
    assert holders_only.copied == 0 < with_copies.copied <= plan.readers / 5
    assert with_copies.holders_asked <= 0.8 * holders_only.holders_asked
    assert with_copies.busiest <= 0.9 * holders_only.busiest
    assert with_copies.asked_per_lookup <= 0.95 * holders_only.asked_per_lookup
    assert with_copies.mean_ms <= 0.8 * holders_only.mean_ms


@pytest.mark.slow
@pytest.mark.thorough
def test_a_fifth_of_hostile_nodes_keeps_a_hot_key_from_no_more_than_one_reader_in_a_hundred() -> None:
    report = measure_hot(1, HotPlan(readers=500, every_s=0.03, hostile=0.2))
    assert report.success >= 0.99
    assert report.asked_per_lookup <= 10
