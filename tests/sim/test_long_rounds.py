"""Averaging rounds that take as long as lines need, in virtual time: each ends, and nobody trains alone meanwhile."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from peerd.averaging.allreduce import AllReduceService, Vector
from peerd.averaging.allreduce_round import AveragingPlan
from peerd.run.runfile import BatchSection, LimitsSection, ModelSection
from roles.trainer import TrainerRole
from tests.kit.virtual_time import virtual
from tests.sim.test_averaging_rounds import program
from tests.worlds.machines.workers import InlineWorker
from tests.worlds.roles.virtualroles import PacedDevice, Roles, start_replicas, virtual_run
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.simnet import NetConfig, SimLine
from tests.worlds.simulation.world import World, WorldConfig

PATIENCE_S, PART_BYTES = 10.0, 1_700_000  # on 0.5 Mb/s a part takes 27 s
MODEL = ModelSection(d_model=768, heads=4, layers=2, context=8)  # its gradient has 60 MB
BATCH = BatchSection(target_samples=4)
WIDE, NARROW = 0.3, 0.15  # Mb/s: a round takes half an hour on average
LIMITS = LimitsSection(upload_mbit=WIDE, download_mbit=WIDE)
WINDOW_BYTES = 32 << 10  # a buffer of a second, as routers have
CHANGE_S = 240.0  # from one change of the lines to the next


async def average(mbit_s: list[float], elements: int) -> float:
    """Seconds of one round of peers with such lines, in equal shares."""
    async with World(1, program, WorldConfig(line=lambda _: SimLine(latency_s=0.02))).running() as world:
        nodes = [await world.start(line=slow(rate)) for rate in mbit_s]
        averaging = [AllReduceService(node.rpc, node.id) for node in nodes]
        for node in nodes:
            for other in nodes:
                node.host.learn(other.id, [other.addr])
        names = tuple(sorted(node.id.text for node in nodes))
        plan = AveragingPlan(b"round".ljust(16), names, PART_BYTES, PATIENCE_S)
        began, sums = trio.current_time(), list[Vector]()

        async def take_part(one: AllReduceService) -> None:
            sums.append(await one.sum(plan, np.ones(elements, "float32"), InlineWorker()))

        async with trio.open_nursery() as nursery:
            for one in averaging:
                nursery.start_soon(take_part, one)
        assert all((found == len(nodes)).all() for found in sums)
        return trio.current_time() - began


@pytest.mark.parametrize("mbit_s", [[0.5, 20.0], [0.5, 20.0, 20.0], [0.5, 0.4, 50.0, 50.0]])
@virtual
async def test_a_part_that_takes_longer_than_the_patience_ends_no_round(mbit_s: list[float]) -> None:
    took_s = await average(mbit_s, 850_000)
    print(f"{took_s:.0f} s")
    assert took_s > 3 * PATIENCE_S


def slow(mbit_s: float) -> SimLine:
    return SimLine(latency_s=0.03, up_mbit_s=mbit_s, down_mbit_s=mbit_s)


async def change_lines(world: World) -> None:
    """The replicas' lines become narrow and wide, in turns."""
    number = 0
    while True:
        for name in ("replica0", "replica1"):
            world.net.set_line(name, slow((WIDE, NARROW)[number % 2]))
        number += 1
        await trio.sleep(CHANGE_S)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
@virtual
async def test_rounds_of_half_an_hour_on_lines_that_halve_and_double_all_end(tmp_path: Path) -> None:
    run = virtual_run(tmp_path, (20000,), run="long", model=MODEL, batch=BATCH, limits=LIMITS)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.2))
    config = WorldConfig(line=lambda _: slow(WIDE), net=NetConfig(window_bytes=WINDOW_BYTES))
    async with World(1, swarm(), config).running() as world, trio.open_nursery() as nursery:
        world.bootstrap.append((await world.start("boot")).full_addr)
        await start_replicas(world, roles, 2)
        nursery.start_soon(change_lines, world)
        told, began = set[str](), trio.current_time()

        def made() -> bool:
            replicas = [role.replica for role in roles.of(TrainerRole)]
            told.update(str(one.status()["waits_for"]) for one in replicas)
            return all(one.position.step >= 2 for one in replicas)

        assert await world.until(made, within_s=4 * 3600, step_s=5.0), roles.story()
        print(f"two steps in {(trio.current_time() - began) / 60:.0f} minutes")
        assert trio.current_time() - began > 2400, "the rounds are not as long as they should be"
        assert roles.replica_step() == 2, "one of them trained alone"
        assert len({role.replica.post.served.module.digest() for role in roles.of(TrainerRole)}) == 1
        assert not [note for note in roles.conductor_notes() if "attempt" in note or "aside" in note]
        assert any("s left" in text for text in told), told
        nursery.cancel_scope.cancel()
