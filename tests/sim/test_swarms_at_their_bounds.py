"""Swarms at the bounds of their messages go on: more checkpoints than a report names, lists that come in parts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peerd.core.limits import SAVED_TOLD
from peerd.run.runfile import BatchSection, CheckpointSection, OptimizerSection
from peerd.swarm.batch import trainer_ledger
from peerd.swarm.conductor import tenure
from peerd.swarm.steps.member_list import MemberList
from roles.stage import StageRole
from tests.kit.virtual_time import virtual
from tests.worlds.roles.virtualroles import Roles, pipeline_world, virtual_run

STEPS = 110


@pytest.mark.slow
@pytest.mark.thorough
@virtual
async def test_a_run_that_keeps_100_checkpoints_makes_110_steps(tmp_path: Path) -> None:
    run = virtual_run(
        tmp_path,
        (4000,) * 4,
        optimizer=OptimizerSection(name="sgd", lr=1e-2, total_steps=STEPS),
        batch=BatchSection(target_samples=2),
        checkpoint=CheckpointSection(every_steps=1, keep=100),
    )
    roles = Roles(run, tmp_path / "peers")
    async with pipeline_world(roles, 2, "trainer", seed=1) as world:
        done = await world.until(lambda: min(roles.steps(), default=0) >= STEPS, within_s=1200, step_s=0.5)
        assert done, f"stalled at {roles.steps()}\n{roles.story()}"
        members: list[Any] = roles.of(StageRole)
        (saved, told) = [len(m.post.saving.positions) for m in members], [len(m.post.saving.told) for m in members]
    assert saved == [100, 100]
    assert told == [SAVED_TOLD, SAVED_TOLD]


@pytest.mark.slow
@virtual
async def test_a_swarm_goes_on_when_every_answer_and_report_holds_one_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_ledger, "REPORT_DONE_BYTES", 1)
    monkeypatch.setattr(tenure, "MemberList", partial(MemberList, news_bytes=1))
    run = virtual_run(
        tmp_path,
        (4000,) * 4,
        stages=2,
        optimizer=OptimizerSection(name="sgd", lr=1e-2, total_steps=12),
        batch=BatchSection(target_samples=8),
    )
    roles = Roles(run, tmp_path / "peers")
    async with pipeline_world(roles, 4, "trainer", seed=3) as world:
        (conductor,) = roles.conductors()
        await world.kill(world.nodes[conductor])
        done = await world.until(lambda: min(roles.steps(), default=0) >= 12, within_s=300, step_s=0.5)
        assert done, f"stalled at {roles.steps()}\n{roles.story()}"
        assert len(roles.of(StageRole)[0].members) == 3
        assert roles.live["trainer"].status()["microbatches"]["lost"] == 0
