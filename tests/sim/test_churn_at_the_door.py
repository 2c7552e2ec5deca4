"""Churn at the door: newcomers behind two addresses while a stage peer is killed every 20 s, in virtual time.

Each newcomer serves, or says why it does not, within half a minute; no step takes long; nobody starts over; no honest
peer is put aside.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import trio

from peerd.run.runfile import BatchSection, CheckpointSection, ModelSection, PipelineSection, RunFile
from tests.kit.amount import thorough
from tests.kit.virtual_time import virtual
from tests.worlds.network.world import home_line
from tests.worlds.roles.at_the_door import AtTheDoor
from tests.worlds.roles.chaos import in_no_thread
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

KILL_EACH_S, GAP_S, SAYS_S = 20.0, 15.0, 30.0
MICROBATCH_S = 0.1  # of a device


def run_of(folder: Path, stages: int) -> RunFile:
    return virtual_run(
        folder,
        (40_000,),
        model=ModelSection(d_model=8, heads=1, layers=stages, context=8),
        pipeline=PipelineSection(stages=stages, microbatch=1),
        batch=BatchSection(target_samples=16),
        checkpoint=CheckpointSection(every_steps=5, keep=3),
    )


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("joiners", "within_s", "stages", "seed"),
    [(10, 42.0, 2, 1), thorough(40, 60.0, 2, 1), thorough(40, 60.0, 3, 2)],
)
@virtual
async def test_newcomers_serve_and_steps_go_on_while_stage_peers_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joiners: int, within_s: float, stages: int, seed: int
) -> None:
    monkeypatch.setattr(trio.to_thread, "run_sync", in_no_thread)
    roles = Roles(run_of(tmp_path, stages), tmp_path / "peers", partial(PacedDevice, MICROBATCH_S))
    async with World(seed, swarm(), WorldConfig(line=home_line)).running() as world:
        door = AtTheDoor(world, roles, random.Random(f"churn {seed}"))
        await door.begin(2 * roles.run.pipeline.stages, trainers=2)
        await door.churn(joiners, within_s, KILL_EACH_S, within_s + SAYS_S)
        print(door.report())
        assert door.gaps[0][0] <= GAP_S, door.report()
        assert door.fell_back == [], door.report()
        assert door.put_aside() == [], door.report()
        assert max(one.silent_s for one in door.newcomers.values()) <= SAYS_S, door.report()
        assert door.unserved() == {}, door.report()
