"""Placement by the measured network: which posts a plan is made for, and how fast they are taken to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.placement.network.network_map import PairView
from peerd.placement.problem import PlacementProblem, StageWork
from peerd.swarm.conductor import replanner
from peerd.swarm.conductor.replanner import Replanner
from peerd.swarm.rebalance.loads import PeerLoad
from tests.worlds.machines.workers import InlineWorker

STAGES = [StageWork(4e6, 1e5, 1e12)] * 2
WORKING = [PeerLoad("a", 0, 1.0), PeerLoad("b", 0, 2.0), PeerLoad("c", 1, 1.0), PeerLoad("d", 1, 1.0)]
RESTS = PeerLoad("r", 0, 0.0)


async def planned(monkeypatch: pytest.MonkeyPatch, loads: Sequence[PeerLoad]) -> tuple[list[str], list[float]]:
    """The devices, and their speeds, for which the conductor of these loads makes its plan."""
    found: list[PlacementProblem] = []

    def search(problem: PlacementProblem, *_: object) -> dict[int, int]:
        found.append(problem)
        return {}

    monkeypatch.setattr(replanner, "replanned", search)
    roster = SimpleNamespace(lines=SimpleNamespace(rates=lambda post: (1e8, 1e8)))
    machine = SimpleNamespace(rebalancing=SimpleNamespace(loads=loads, price_s=1.0), roster=roster)
    network = SimpleNamespace(view=lambda now, one, other: PairView(0.01, 1e8, 1e8))
    driver: Any = SimpleNamespace(tenure=SimpleNamespace(machine=machine, network=network))
    clock: Any = SimpleNamespace(rng=Random)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Replanner(driver, clock, STAGES, 64, InlineWorker()).run)
        await trio.sleep(30)
        nursery.cancel_scope.cancel()
    (problem,) = found
    return [device.name for device in problem.devices], [device.speed for device in problem.devices]


async def test_posts_that_rest_are_no_fast_devices(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    names, speeds = await planned(monkeypatch, [*WORKING, RESTS])
    assert names == ["a", "b", "c", "d"]
    assert speeds == [1e12, 2e12, 1e12, 1e12]


async def test_while_no_rate_is_known_the_network_alone_counts(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, speeds = await planned(monkeypatch, [PeerLoad(load.peer, load.stage, 0.0) for load in WORKING])
    assert names == ["a", "b", "c", "d"]
    assert speeds == [math.inf] * 4
