"""The conductor is killed right after replicas have joined: the rest end under one conductor, and no work is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from peerd.run.runfile import AveragingSection, OptimizerSection
from roles.trainer import TrainerRole
from tests.kit.amount import thorough
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import PacedDevice, Roles, replica_world, virtual_run

STEPS = 24


@pytest.mark.parametrize("seed", [0, *map(thorough, range(1, 6))])
@virtual
async def test_two_new_replicas_whose_conductor_is_killed_go_on_as_one_swarm(tmp_path: Path, seed: int) -> None:
    """A conductor that gathers takes no news: who reports to it must wait, or no time would pass here."""
    run = virtual_run(
        tmp_path,
        (40_000,),
        optimizer=OptimizerSection(name="adamw", lr=1e-3, total_steps=STEPS),
        averaging=AveragingSection(sender_timeout_s=2.0),
    )
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.03))
    async with replica_world(roles, 1, seed=seed, step=4) as world:
        first = next(node for node in world.living() if node.name == "replica0")
        for name in ("replica1", "replica2"):
            await world.start(name, program=roles.program(TrainerRole))

        def joined() -> bool:
            replicas = [role.replica for role in roles.of(TrainerRole)]
            return len(replicas) == 3 and len({r.position for r in replicas}) == 1 and all(r.members for r in replicas)

        assert await world.until(joined, within_s=60, step_s=0.02), roles.story()
        await world.kill(first)
        left = roles.of(TrainerRole)
        first_order, second_order = (role._contributor._following.order() for role in left)
        assert first_order == second_order, "they would not ask the same peer"
        done = await world.until(lambda: all(r.replica.position.step >= STEPS for r in left), within_s=300)
        assert done, roles.story()
        assert [role._contributor.books.tally.lost for role in left] == [0, 0]
    notes = roles.conductor_notes()
    taken = [note for note in notes if "conducts the run" in note]
    assert len(taken) == 2, f"one for each life of a conductor: {notes}"
