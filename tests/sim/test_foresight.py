"""A swarm under virtual time foretells its steps: the directory says when one ends, and groups stand before it does."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from peerd.averaging.allreduce import AllReduceService
from peerd.run.runfile import OptimizerSection, RunFile
from peerd.status.swarm_view import foretold_by, swarm_view
from roles.trainer import TrainerRole
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run
from tests.worlds.simulation.world import Node

MICROBATCH_S = 4.0
STEPS = 4


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return virtual_run(tmp_path, (8000,), optimizer=OptimizerSection(name="sgd", lr=1e-3, total_steps=STEPS))


@pytest.fixture
def unlinked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, list[str]]]:
    """The time at which each member began each round, with the peers of its group that it had no link to then."""
    found: list[tuple[float, list[str]]] = []
    plain = AllReduceService.sum

    async def noted(self: AllReduceService, plan: Any, *rest: Any) -> Any:
        linked = {peer.text for peer in self._rpc._host.connected()}
        found.append((trio.current_time(), sorted({*plan.group} - linked - {self._own})))
        return await plain(self, plan, *rest)

    monkeypatch.setattr(AllReduceService, "sum", noted)
    return found


class Watcher:
    """Somebody who asks the directory every second when the step ends."""

    def __init__(self, node: Node, run: RunFile) -> None:
        self.node, self.run = node, run
        self.told: list[tuple[float, float | None]] = []

    async def watch(self) -> None:
        while True:
            swarm = await swarm_view(self.node.dht, self.run)
            self.told.append((trio.current_time(), foretold_by(swarm, self.node.clock.wall())))
            await trio.sleep(1.0)

    def errors(self, began: float, ended: float) -> list[float]:
        """By how many seconds the forecasts in the second half of this step were wrong."""
        half = [(at, due) for at, due in self.told if (began + ended) / 2 < at < ended]
        assert half, self.told
        assert all(due is not None for _, due in half), half
        return [abs(at + (due or 0.0) - ended) for at, due in half]


def cut_followers(roles: Roles) -> None:
    """Break the link between two replicas of which neither conducts; their reports go on."""
    one, other = (role for role in roles.of(TrainerRole) if not role.replica._services.conducting.acting)
    for link in [link for link in one._ctx.host.links if link.peer == other._ctx.host.id]:
        link.abort("cut by the test")


@pytest.mark.slow
@virtual
async def test_steps_are_foretold_in_the_directory_and_rounds_begin_with_all_links(
    tmp_path: Path, run: RunFile, unlinked: list[tuple[float, list[str]]]
) -> None:
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    made: list[float] = []
    async with replica_world(roles, 3, seed=1, step=0) as world:
        watcher = Watcher(world.nodes["boot"], roles.run)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watcher.watch)
            for step in range(1, STEPS + 1):
                done = await world.until(lambda step=step: roles.replica_step() >= step, within_s=200)  # type: ignore[misc]
                assert done, roles.story()
                made.append(trio.current_time())
                if step < STEPS:
                    await trio.sleep(7 * MICROBATCH_S)
                    cut_followers(roles)
            nursery.cancel_scope.cancel()
    assert made[-1] - made[-2] > 24 / 3 * MICROBATCH_S
    for began, ended in pairwise(made[1:]):
        errors = watcher.errors(began, ended)
        assert max(errors) <= 1.5 * MICROBATCH_S, errors
    assert len(unlinked) >= 3 * STEPS
    assert [missing for _, missing in unlinked if missing] == []
