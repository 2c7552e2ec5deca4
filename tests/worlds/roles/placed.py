"""A run whose devices, stages and routes are those of a placement, on a simulated network with a link for each pair.

Each pipeline has one trainer, at its first stage's device: on the same site, so that nothing passes between the two
takes time.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import trio

from peerd.placement.problem import Network, StagePlacement
from peerd.run.runfile import RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.runs import changed
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import NetConfig, SimPath
from tests.worlds.simulation.world import Node, World, WorldConfig

WINDOW_BYTES: Final = 32 << 10  # of one connection: what is under way delays what comes after it
PATIENCE_S: Final = 3_000.0
LOOK_S: Final = 0.005

Link = tuple[float, float]  # seconds of delay, bytes a second
FREE: Final[Link] = (0.0, math.inf)


@dataclass(frozen=True)
class PlacedRun:
    """A placement, and the network between its devices."""

    network: Network
    placement: StagePlacement

    def chains(self) -> list[list[int]]:
        """The devices of each pipeline, by stage: from each device of the first stage, who follows whom."""
        steps = [dict(pairs) for pairs in self.placement.follows]
        chains = [[device] for device in self.placement.members(0)]
        for chain in chains:
            for step in steps:
                chain.append(step[chain[-1]])
        return chains

    def link(self, source: int, target: int) -> Link:
        """Between two devices."""
        if source == target:
            return FREE
        return float(self.network.delay_s[source, target]), float(self.network.rate[source, target])

    def paths(self) -> Iterator[tuple[str, str, Link]]:
        """Every ordered pair of nodes with a link of its own: devices, and the trainer of each pipeline."""
        devices = [device for device, stage in enumerate(self.placement.stage_of) if stage >= 0]
        for source in devices:
            for target in devices:
                yield device_name(source), device_name(target), self.link(source, target)
        chains = self.chains()
        for number, chain in enumerate(chains):
            for device in devices:
                yield trainer_name(number), device_name(device), self.link(chain[0], device)
                yield device_name(device), trainer_name(number), self.link(device, chain[0])
            for other, far in enumerate(chains):
                yield trainer_name(number), trainer_name(other), self.link(chain[0], far[0])


def device_name(device: int) -> str:
    return f"device{device}"


def trainer_name(number: int) -> str:
    return f"trainer{number}"


@asynccontextmanager
async def placed_world(placed: PlacedRun, roles: Roles, seed: int) -> AsyncIterator[World]:
    """The world with all peers of the placement, which train; every trainer is held to its route."""
    config = WorldConfig(net=NetConfig(window_bytes=WINDOW_BYTES))
    async with World(seed, swarm(), config).running() as world:
        for source, target, (delay_s, rate) in placed.paths():
            if source != target and (delay_s, rate) != FREE:
                world.net.set_path(source, target, SimPath(latency_s=delay_s, mbit_s=rate * 8e-6), both=False)
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        peers = {
            device: await _start_stage(world, roles, device, stage)
            for device, stage in enumerate(placed.placement.stage_of)
            if stage >= 0
        }
        for number, chain in enumerate(placed.chains()):
            route = [peers[device].id.text for device in chain]
            program = roles.program(TrainerRole, run=with_equal_shares(roles.run, placed), route=route)
            await world.start(trainer_name(number), program=program)
        yield world


async def _start_stage(world: World, roles: Roles, device: int, stage: int) -> Node:
    own = changed(roles.run, limits={"stage": stage})
    return await world.start(device_name(device), program=roles.program(StageRole, run=own))


def with_equal_shares(run: RunFile, placed: PlacedRun) -> RunFile:
    """The run as a trainer has it that begins no more than its pipeline's share of the batch."""
    share = run.batch.target_samples // run.pipeline.microbatch // len(placed.placement.members(0))
    return changed(run, limits={"microbatches_in_flight": share})


async def step_times(world: World, roles: Roles, steps: int) -> list[float]:
    """Virtual time at which every stage peer has made step 1, 2 ... `steps`."""
    found: list[float] = []
    with trio.fail_after(PATIENCE_S):
        while len(found) < steps:
            await trio.sleep(LOOK_S)
            made: Any = min(roles.steps(), default=0)
            found += [trio.current_time()] * (made - len(found))
    return found[:steps]
