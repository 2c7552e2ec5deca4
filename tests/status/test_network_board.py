"""The network in the status of peers of a running swarm, in virtual time: of a member and of one that looks on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from peerd.log import EventLog
from peerd.role.run_services import RunServices
from peerd.run.runfile import OptimizerSection
from peerd.status.status_board import StatusBoard
from peerd.status.swarm_status import NetworkStatus
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.clock import run_virtual


async def look(seed: int, roles: Roles) -> tuple[NetworkStatus, NetworkStatus, list[str]]:
    """The network on the board of a member and on that of a watcher after a minute, and the members."""
    async with replica_world(roles, 3, seed=seed, step=1) as world, trio.open_nursery() as nursery:
        members = [world.nodes[name].id.text for name in roles.live]
        for role in roles.live.values():
            nursery.start_soon(role._services.link_watch.run)
        watcher = await world.start("watcher")
        found = []
        for node in (world.nodes[next(iter(roles.live))], watcher):
            net = node.host, node.rpc, node.dht
            services = roles.live[node.name]._services if node.name in roles.live else None
            services = services or RunServices(roles.run, *net, node.clock)
            board = StatusBoard(net, node.clock, EventLog(node.clock), roles.run, services)
            await nursery.start(board.run)
            await trio.sleep(60.0)
            await board.swarm()
            await trio.sleep(3.0)
            network = (await board.swarm()).network
            assert network is not None
            found.append(network)
        nursery.cancel_scope.cancel()
    return found[0], found[1], members


@pytest.mark.thorough
@pytest.mark.slow
def test_round_trips_between_members_are_measured_and_shown_to_whoever_looks(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = virtual_run(tmp_path, (8000,), optimizer=OptimizerSection(name="sgd", lr=1e-3, total_steps=400))
    inside, outside, members = run_virtual(look, 1, Roles(run, tmp_path / "peers", partial(PacedDevice, 1.0)), seed=1)
    for told in (inside, outside):
        assert told.why is None
        assert {name for pair in told.pairs for name in (pair.one, pair.other)} == set(members)
        assert told.pairs_measured == 3
        assert all(10 <= (pair.rtt_ms or 0) <= 250 for pair in told.pairs)
