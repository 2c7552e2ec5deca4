"""A stage that lost all its peers: a newcomer takes it, or a peer that idles beside it moves there; the run goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from peerd.run.runfile import CheckpointSection, PipelineSection, RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.roles.training import pinned
from tests.worlds.roles.virtualroles import Roles, virtual_run
from tests.worlds.simulation.faults import inject, stall
from tests.worlds.simulation.world import World

WITHIN_S = 15.0


def run_of(tmp_path: Path, every_steps: int = 4) -> RunFile:
    return virtual_run(
        tmp_path,
        (40_000,),
        stages=2,
        pipeline=PipelineSection(stages=2, microbatch=2),
        checkpoint=CheckpointSection(every_steps=every_steps, keep=2),
    )


@asynccontextmanager
async def training(roles: Roles, stage_peers: int) -> AsyncIterator[World]:
    """A boot node, so many peers that choose their stages, and a trainer; begun."""
    async with home_world() as world:
        for number in range(stage_peers):
            await world.start(f"stage{number}", program=roles.program(StageRole), ip=public_ip(number))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: len(roles.steps()) == stage_peers and min(roles.steps()) >= 6, within_s=60)
        yield world


async def lose(world: World, roles: Roles, stage: int) -> str:
    """Kill all peers of a stage, one in the middle of a sentence."""
    names = roles.serving(stage)
    for node in [node for node in world.living() if node.name in names]:
        await world.kill(node)
    return names[0]


async def goes_on(world: World, roles: Roles, within_s: float = WITHIN_S) -> None:
    """Steps are made: by then, and from wherever it goes on."""
    steps: list[int] = []
    trainer: Any = roles.live["trainer"]

    def moved_on() -> bool:
        if not steps or trainer.status()["step"] != steps[-1]:
            steps.append(trainer.status()["step"])
        return len(steps) > 3

    began = trio.current_time()
    assert await world.until(moved_on, within_s=within_s), roles.story()
    print(f"went on after {trio.current_time() - began:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1])
async def test_a_newcomer_serves_the_stage_whose_peer_was_killed(
    tmp_path: Path, autojump_clock: MockClock, stage: int
) -> None:
    roles = Roles(run_of(tmp_path), tmp_path / "peers")
    async with training(roles, 2) as world:
        await lose(world, roles, stage)
        await trio.sleep(2.0)
        await world.start("new", program=roles.program(StageRole))
        await goes_on(world, roles)
        assert roles.serving(stage) == ["new"]
        assert "with the state of step" not in str(roles.live["new"].status()["waits_for"]), "the swarm came to it"
        warned = [event for event in roles.events("conductor.noted") if event["level"] == "warn"]
        assert len(warned) == 1
        assert f"stage {stage} was lost with its last peer: the swarm goes back from step" in str(warned[0]["note"])


@pytest.mark.slow
async def test_its_own_checkpoint_does_not_lead_a_restarted_peer_past_an_empty_stage(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    roles = Roles(run_of(tmp_path), tmp_path / "peers")
    async with training(roles, 3) as world:
        most = max((0, 1), key=lambda stage: len(roles.serving(stage)))
        again = roles.serving(most)[1]
        (node,) = [node for node in world.living() if node.name == again]
        with trio.fail_after(30):
            await roles.live[again].leave()
        await world.kill(node)
        await lose(world, roles, 1 - most)
        await world.restart(node)
        await goes_on(world, roles)
        assert roles.serving(1 - most) == [again]


@pytest.mark.slow
async def test_peers_that_lost_power_together_go_back_to_what_is_on_their_disks(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Stage records outlive their peers by a minute: those of peers that came back do not count."""
    roles = Roles(run_of(tmp_path), tmp_path / "peers")
    async with training(roles, 6) as world:
        lost = [node for node in world.living() if node.name.startswith("stage")]
        gone = roles.serving(1)[1:]
        for node in lost:
            await world.kill(node, silent=True)
        await trio.sleep(3.0)
        async with trio.open_nursery() as nursery:
            for node in [node for node in lost if node.name not in gone]:
                nursery.start_soon(world.restart, node)
        await goes_on(world, roles, within_s=30)
        assert min(roles.steps()) > 4, "it went on from step 4, which all have saved"


@pytest.mark.slow
@pytest.mark.parametrize("peers", [3, 5])
@pytest.mark.thorough
async def test_one_peer_moves_to_a_stage_that_lost_all_its_own(
    tmp_path: Path, autojump_clock: MockClock, peers: int
) -> None:
    roles = Roles(run_of(tmp_path, every_steps=0), tmp_path / "peers")
    async with training(roles, peers) as world:
        few = min((0, 1), key=lambda stage: len(roles.serving(stage)))
        before = roles.serving(1 - few)
        await lose(world, roles, few)
        await goes_on(world, roles, 60.0)
        await trio.sleep(60.0)
        assert len(roles.serving(few)) == 1, "exactly one has moved"
        assert len(roles.serving(1 - few)) == len(before) - 1
        (moved,) = roles.events("stage.moved")
        assert (moved["before"], moved["stage"]) == (1 - few, few)
        assert f"stage {few} has had no peer for" in str(moved["why"])
        await goes_on(world, roles)


@pytest.mark.slow
async def test_a_stage_that_is_lost_while_the_conductor_stands_still_is_filled_again(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    stall_s = 5.0  # it answers again before another takes the duty, and its mate has overtaken it
    roles = Roles(run_of(tmp_path), tmp_path / "peers")
    async with training(roles, 3) as world:
        few = min((0, 1), key=lambda stage: len(roles.serving(stage)))
        (conducts,) = roles.conductors()
        assert conducts not in roles.serving(few)
        await inject(world, [stall(conducts, 0.0, stall_s)])
        await lose(world, roles, few)
        await goes_on(world, roles, stall_s + WITHIN_S)


@pytest.mark.slow
async def test_a_peer_whose_stage_the_user_has_set_never_moves(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_of(tmp_path)
    roles = Roles(run, tmp_path / "peers")
    async with home_world() as world:
        for number, stage in enumerate((0, 0, 1)):
            await world.start(f"stage{number}", program=roles.program(StageRole, run=pinned(run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: len(roles.steps()) == 3 and min(roles.steps()) >= 6, within_s=60)
        await lose(world, roles, 1)
        await trio.sleep(120.0)
        assert roles.serving(0) == ["stage0", "stage1"]
        assert roles.events("stage.moved") == []


@pytest.mark.slow
async def test_newcomers_that_come_together_fill_both_gaps(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_of(tmp_path)
    roles = Roles(run, tmp_path / "peers")
    async with training(roles, 2) as world:
        await lose(world, roles, 0)
        await lose(world, roles, 1)
        async with trio.open_nursery() as nursery:
            for name in ("new0", "new1"):
                nursery.start_soon(lambda name=name: world.start(name, program=roles.program(StageRole)))
        # Records of the dead live for a minute: till then a newcomer that no member answers takes no stage.
        assert await world.until(lambda: roles.serving(0) != [] and roles.serving(1) != [], within_s=90)
