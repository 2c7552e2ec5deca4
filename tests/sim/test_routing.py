"""The routing benchmark: all policies go through the same roles, and by costs alone flows take less time than turns."""

from __future__ import annotations

import random
import statistics

import pytest
import torch

from peerd.pipeline.routes.cheapest_route import CheapestRoute
from peerd.pipeline.routes.route_policy import RoutePolicy
from scripts.benchmarks import routing
from scripts.benchmarks._routing_flow import FlowRoutes
from tests.worlds.machines.in_turn import InTurn
from tests.worlds.machines.routesim import RouteSim


@pytest.mark.slow
def test_all_policies_make_steps_through_the_same_roles() -> None:
    torch.set_num_threads(1)
    scene = routing.Scene(seed=1, stages=2, peers=6, microbatches=8, warm=1, steps=1)
    found = routing.measured(scene)
    assert list(found) == ["flow", "ours", "swarm"], "by the seed another one is first"
    assert set(found) == set(routing.POLICIES)
    for one in found.values():
        assert len(one.steps_s) == scene.steps
        assert min(one.steps_s) > routing.least_s(scene)
        assert -0.01 < one.wasted < 0.5


def seconds(scene: routing.Scene, policy: str, *, lines: bool) -> float:
    """Of a step, the mean of those after the first five; devices and pairs of peers cost time, and nothing else.

    `lines`: tensors between the same two peers wait for each other.
    """
    rng = random.Random(f"routing {scene.seed}")
    seats = {f"p{number:02d}": seat for number, seat in enumerate(routing.seats_of(scene, rng))}
    stages = [[name for name, seat in seats.items() if seat.stage == stage] for stage in range(scene.stages)]
    delay_s, rate = routing.network()

    def computing_s(name: str) -> float:
        return routing.SLOWEST_S / seats[name].speed

    def far_s(one: str, other: str) -> float:
        return float(delay_s[seats[one].place if one else 0, seats[other].place])

    def tensor_s(one: str, other: str) -> float:
        return float(routing.ACTIVATION_BYTES / rate[seats[one].place, seats[other].place])

    def between_s(one: str, other: str) -> float:
        return far_s(one, other) + (tensor_s(one, other) if one else 0.0)

    def cost(one: str, other: str) -> float:
        return (computing_s(one) + computing_s(other)) / 2 + between_s(one, other)

    policies: dict[str, RoutePolicy] = {
        "swarm": InTurn(),
        "flow": FlowRoutes(scene.microbatches, cost, lambda name: seats[name].speed, scene.seed),
        "ours": CheapestRoute(random.Random(1)),
    }
    if lines:
        sim = RouteSim(stages, policies[policy], computing_s, far_s, line_s=tensor_s)
    else:
        sim = RouteSim(stages, policies[policy], computing_s, between_s)
    return statistics.mean([sim.run(scene.microbatches, scene.microbatches) for _ in range(12)][5:])


@pytest.mark.slow
@pytest.mark.parametrize("lines", [False, True])
def test_flows_take_much_less_time_than_turns_and_ours_about_as_little_as_one_that_knows_all_costs(lines: bool) -> None:
    found = {
        policy: statistics.mean(seconds(routing.Scene(seed), policy, lines=lines) for seed in (1, 2, 3))
        for policy in routing.POLICIES
    }
    print(*(f"{policy} {seconds_a_step:.1f} s" for policy, seconds_a_step in found.items()))
    assert found["ours"] < 0.7 * found["swarm"]
    assert found["ours"] < 1.05 * found["flow"]  # measured: 1.02, and 0.94 with lines
