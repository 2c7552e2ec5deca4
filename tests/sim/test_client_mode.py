"""Training under virtual time with peers that can only dial: nobody gets in, and they are of use all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peerd.averaging.rounds.line_info import own_line
from peerd.run.runfile import BatchSection, ModelSection, OptimizerSection, PipelineSection, RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.virtual_time import virtual
from tests.worlds.network.world import home_world
from tests.worlds.roles.training import pinned
from tests.worlds.roles.virtualroles import Roles, virtual_run
from tests.worlds.simulation.programs import stack_on, swarm
from tests.worlds.simulation.world import Node, World

STEPS = 12


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    optimizer, batch = OptimizerSection(name="adamw", lr=1e-3, total_steps=STEPS), BatchSection(target_samples=8)
    return virtual_run(tmp_path, (4000,) * 10, stages=2, optimizer=optimizer, batch=batch)


async def shut(node: Node, *, task_status: trio.TaskStatus[None]) -> None:
    """A node that listens nowhere, and knows it: as behind a router, without a relay."""
    stack = stack_on(node)
    stack.host.takes_inbound = False
    await stack.run([], node.world.bootstrap, task_status=task_status)


def of_stage(roles: Roles, stage: int, network: Any) -> Any:
    return roles.program(StageRole, network, run=pinned(roles.run, stage))


async def finished(world: World, roles: Roles) -> None:
    done = await world.until(lambda: min(roles.steps(), default=0) >= STEPS, within_s=600, step_s=0.5)
    assert done, f"stalled at {roles.steps()}\n{roles.story()}"
    for stage in range(roles.run.pipeline.stages):
        peers = [role for role in roles.of(StageRole) if role.stage == stage]
        assert len({role.post.served.module.digest() for role in peers}) == 1


@pytest.mark.slow
@virtual
async def test_a_stage_peer_and_a_trainer_that_only_dial_take_their_part(run: RunFile, tmp_path: Path) -> None:
    roles = Roles(run, tmp_path / "peers")
    async with home_world(7) as world:
        # The oldest peer of stage 0 is the one that nobody can dial: it must not conduct.
        hidden = await world.start("hidden", program=of_stage(roles, 0, shut))
        for stage in (0, 1):
            await world.start(f"stage{stage}", program=of_stage(roles, stage, swarm()))
        await world.start("trainer", program=roles.program(TrainerRole))
        await world.start("shy", program=roles.program(TrainerRole, shut))
        served: set[str] = set()

        def done() -> bool:
            role = roles.live["hidden"]
            served.update(["hidden"] if role.built and role.post.state.model.held else [])
            return min(roles.steps(), default=0) >= STEPS

        assert await world.until(done, within_s=900, step_s=0.05), f"{roles.steps()}\n{roles.story()}"
        await finished(world, roles)
        assert served == {"hidden"}, "no trainer found the peer that had dialed it"
        hidden_role = roles.live["hidden"]
        assert hidden_role._services.following.conductor == roles.live["stage0"]._services.following.own
        assert hidden_role.post._rounds.line().mode == "client"
        assert own_line(roles.live["stage0"]._services.line_speeds(), "node").mode == "node"
        for name in ("trainer", "shy"):
            assert roles.live[name].status()["microbatches"]["lost"] == 0
        assert hidden.host.listen_addrs() == []


@pytest.mark.slow
@pytest.mark.parametrize("network", [swarm, lambda: shut])
@virtual
async def test_a_stage_that_only_dials_has_links_to_the_one_before_it_and_needs_no_relay(
    run: RunFile, tmp_path: Path, network: Any
) -> None:
    """Whether the trainer can reach it or not: the stage before it can."""
    roles = Roles(run, tmp_path / "peers")
    async with home_world(9) as world:
        await world.start("first", program=of_stage(roles, 0, swarm()))
        hidden = await world.start("hidden", program=of_stage(roles, 1, shut))
        await world.start("trainer", program=roles.program(TrainerRole, network()))
        await finished(world, roles)
        ways = roles.live["first"].post.status()["handover"]["next"]
        assert ways == {hidden.id.text: "direct"}
        trainer = roles.live["trainer"].status()
        assert (trainer["microbatches"]["lost"], trainer["relayed_bytes"]) == (0, 0)


@pytest.mark.slow
@virtual
async def test_replicas_that_only_dial_average_with_one_that_can_be_dialed(run: RunFile, tmp_path: Path) -> None:
    whole = msgspec.structs.replace(
        run,
        model=ModelSection(d_model=8, heads=1, layers=1, context=8),
        pipeline=PipelineSection(stages=1, microbatch=1),
    )
    roles = Roles(whole, tmp_path / "peers")
    async with home_world(8) as world:
        await world.start("open", program=roles.program(TrainerRole))
        for number in range(2):
            await world.start(f"shy{number}", program=roles.program(TrainerRole, shut))

        def steps() -> list[int]:
            return [role.replica.position.step for role in roles.of(TrainerRole) if role.replica is not None]

        done = await world.until(lambda: len(steps()) == 3 and min(steps()) >= STEPS, within_s=600, step_s=0.5)
        assert done, f"stalled at {steps()}\n{roles.story()}"
        replicas = [role.replica for role in roles.of(TrainerRole)]
        assert len({replica.post.served.module.digest() for replica in replicas}) == 1
