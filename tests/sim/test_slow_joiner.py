"""A newcomer on a line on which a state takes longer than a step, under virtual time: it arrives, with one state."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peerd.core.run.runfile import ModelSection
from peerd.sim.clock import run_virtual
from peerd.sim.simnet import SimLine
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run

SLOW = SimLine(latency_s=0.03, up_mbit_s=1, down_mbit_s=1)  # a gradient takes 3 s, a state 8, a step of the others 4


async def join(seed: int, roles: Roles) -> list[dict[str, Any]]:
    """The log of a newcomer until it has the others' state."""
    async with replica_world(roles, 3, seed=seed, step=6) as world:
        began = roles.replica_step()
        await world.start("slow", line=SLOW, program=roles.program(TrainerRole))

        def there() -> bool:
            replicas = [role.replica for role in roles.of(TrainerRole) if role.replica.built]
            modules = [replica.post.served.module for replica in replicas]
            places = {replica.position for replica in replicas}
            return len(replicas) == 4 and len(places) == 1 and len({module.digest() for module in modules}) == 1

        assert await world.until(there, within_s=300), roles.story()
        assert roles.replica_step() > began + 2  # they did not wait for it
        return roles.logs["slow"].recent(500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, thorough(2)])
def test_whose_line_carries_a_gradient_a_step_arrives_though_a_state_takes_longer(tmp_path: Path, seed: int) -> None:
    torch.set_num_threads(1)
    run = virtual_run(tmp_path, (20000,), run="slow", model=ModelSection(d_model=48, heads=2, layers=2, context=8))
    log = run_virtual(join, seed, Roles(run, tmp_path / "peers", partial(PacedDevice, 0.5)), seed=seed)
    assert [event["name"] for event in log].count("stage.downloaded") == 1, log
    assert [event for event in log if event["name"] == "stage.caught_up"], log
