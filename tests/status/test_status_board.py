"""The board of a peer in a running swarm, in virtual time: who is gone, how old its figures are."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import trio
from msgspec import structs

from peerd.log import EventLog
from peerd.run.runfile import OptimizerSection
from peerd.screen.units import known
from peerd.status.status_board import SWARM_RARELY_S, RoleState, StatusBoard
from peerd.status.swarm_status import SwarmStatus
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.clock import run_virtual


def gone(swarm: SwarmStatus) -> list[str]:
    return [peer.peer for peer in swarm.stage_peers() if peer.gone]


async def watch_a_death(seed: int, roles: Roles) -> tuple[SwarmStatus, SwarmStatus, str, float]:
    """The swarm as the conductor's board has it before and after a replica is killed; the seconds until it is marked,
    from when the conductor lists it no more.
    """
    async with replica_world(roles, 3, seed=seed, step=1) as world, trio.open_nursery() as nursery:
        (name,) = roles.conductors()
        victim = next(n for n in roles.live if n != name)
        node, role, lost = world.nodes[name], roles.live[name], world.nodes[victim].id.text
        net = node.host, node.rpc, node.dht
        board = StatusBoard(net, node.clock, EventLog(node.clock), roles.run, role._services)

        async def tick() -> None:
            while True:
                board.note_roles([RoleState("trainer", "running", 0, "", role.status())])
                await trio.sleep(1.0)

        await nursery.start(board.run)
        nursery.start_soon(tick)
        await trio.sleep(3.0)
        await board.swarm()
        await trio.sleep(60.0)
        before = await board.swarm()
        trainers = [structs.replace(row, step=0) for row in board._swarm.trainers]  # old records
        board._swarm = structs.replace(board._swarm, trainers=trainers)
        assert board._swarm_now().step == role.status()["step"] > 0
        await world.kill(world.nodes[victim])
        following = role._services.following

        def listed() -> bool:
            return any(member.peer == lost for member in following.members)

        assert await world.until(lambda: not listed(), within_s=60)
        since = trio.current_time()
        while lost not in gone(after := await board.swarm()):
            await trio.sleep(0.5)
            assert trio.current_time() - since < 30, after
        took = trio.current_time() - since
        nursery.cancel_scope.cancel()
    return before, after, lost, took


@pytest.mark.slow
def test_a_dead_peer_is_marked_within_five_seconds_and_old_figures_are_looked_up_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = virtual_run(tmp_path, (8000,), optimizer=OptimizerSection(name="sgd", lr=1e-3, total_steps=400))
    before, after, lost, took = run_virtual(
        watch_a_death, 1, Roles(run, tmp_path / "peers", partial(PacedDevice, 1.0)), seed=1
    )
    assert took <= 5.0
    assert gone(after) == [lost]
    assert gone(before) == []
    assert len(before.stage_peers()) == 3
    assert (known(before.age_s) or 0.0) < SWARM_RARELY_S
    assert known(before.samples_per_s)
    assert known(before.left_s)
    assert before.total_steps == 400
    assert 0.2 < (known(before.shares["samples"]) or 0.0) < 0.5
    assert before.curve.train
    assert before.standstill is None
