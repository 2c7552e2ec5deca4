"""Several roles, and several posts, in one process: any set trains, exactly, in whichever order they begin."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from trio.testing import MockClock

from peerd.role.role import Role, RoleContext
from peerd.run.runfile import RunFile
from roles.aggregator import AuxAggregatorRole
from roles.backbone import BackboneRole
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.network.world import home_line, home_world
from tests.worlds.roles.training import pinned
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

ALL = (BackboneRole, StageRole, TrainerRole, AuxAggregatorRole)
# Every pair in a pipeline; the other order in which they begin, and whole replicas, take as long again.
PAIRS = [
    pytest.param(
        pair, stages, marks=() if stages == 2 and pair in [*itertools.combinations(ALL, 2)] else pytest.mark.thorough
    )
    for pair in itertools.permutations(ALL, 2)
    for stages in (2, 1)
]
# Three and four, in each order; of these one order of all four in every run of the tests.
MORE = [
    pytest.param(
        roles,
        stages,
        marks=() if stages == 2 and roles == ALL[::-1] else pytest.mark.thorough,
    )
    for roles in (*itertools.permutations(ALL, 3), *itertools.permutations(ALL, 4))
    for stages in (2, 1)
]
# Sets that can be the first process of a run.
FIRST = [
    pytest.param(
        roles, stages, marks=() if (roles, stages) in [((StageRole, TrainerRole), 1)] else pytest.mark.thorough
    )
    for roles in (
        *itertools.permutations((StageRole, TrainerRole)),
        *itertools.permutations((StageRole, TrainerRole, AuxAggregatorRole)),
        (TrainerRole, AuxAggregatorRole),
        ALL,
        (AuxAggregatorRole, TrainerRole, BackboneRole, StageRole),
    )
    for stages in (2, 1)
]


class Together:
    """Roles that begin in the order in which they are given, and end together."""

    def __init__(self, classes: tuple[type[Role], ...], ctx: RoleContext) -> None:
        self.roles: list[Any] = []
        for cls in classes:
            folder = ctx.data_dir / cls.name
            folder.mkdir(exist_ok=True)
            beside = frozenset(other.name for other in classes if other is not cls)
            self.roles.append(cls(replace(ctx, data_dir=folder, beside=beside)))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as nursery:
            for role in self.roles:
                nursery.start_soon(role.run)
                await trio.sleep(0.01)
            task_status.started()

    def status(self) -> dict[str, object]:
        return {role.name: role.status() for role in self.roles}


def together(*classes: type[Role]) -> Callable[[RoleContext], Together]:
    return partial(Together, classes)


def names_of(pair: tuple[type, ...]) -> str:
    return "-".join(role.name for role in pair)  # type: ignore[attr-defined]


async def finished(world: World, roles: Roles, trainer: Any) -> None:
    done = await world.until(lambda: bool(trainer.status()["complete"]), within_s=300)
    assert done, roles.story()
    assert trainer.status()["microbatches"]["lost"] == 0
    stages = [post for role in held(roles, StageRole) for post in role.posts]
    replicas = [role.replica for role in held(roles, TrainerRole) if role.replica is not None]
    posts = stages + [post for replica in replicas for post in replica.posts]
    assert await world.until(lambda: all(post.step == STEPS for post in posts), within_s=60), roles.story()


def held(roles: Roles, kind: type) -> list[Any]:
    """The roles of one kind in all processes."""
    found = [role for one in roles.live.values() for role in (one.roles if isinstance(one, Together) else [one])]
    return [role for role in found if isinstance(role, kind)]


def check(run: RunFile, roles: Roles, batches: Batches) -> None:
    """All posts hold what plain torch has after the same steps."""
    torch.set_num_threads(1)
    assert batches.faults(run.batch.target_samples // run.pipeline.microbatch) == []
    members = held(roles, StageRole)
    members += [role.replica for role in held(roles, TrainerRole) if role.replica is not None]
    modules = [post.served.module for member in members for post in member.posts]
    assert {module.stage for module in modules} == set(range(run.pipeline.stages))
    assert differences(run, plain_torch(run, batches), modules) == []


def stage_helped(both: Together, stages: int) -> int:
    """The first stage that the helper's own process does not serve; -1 where it serves them all."""
    members: list[Any] = [role for role in both.roles if isinstance(role, StageRole)]
    members += [role.replica for role in both.roles if isinstance(role, TrainerRole) and role.replica is not None]
    served = {post.stage for member in members for post in member.posts}
    return next((stage for stage in range(stages) if stage not in served), -1)


async def train_together(run: RunFile, roles: Roles, world: World, held_here: tuple[Any, ...]) -> None:
    """Beside the process `both`, whatever a run cannot do without: a peer for each stage, and a trainer; to its end."""
    stages = run.pipeline.stages
    if stages > 1 or StageRole not in held_here:
        for number in range(stages if StageRole not in held_here else 1):
            await world.start(f"stage{number}", program=roles.program(StageRole))
    if TrainerRole not in held_here:
        await world.start("trainer", program=roles.program(TrainerRole))
    assert await world.until(lambda: bool(held(roles, TrainerRole)), within_s=30)
    await finished(world, roles, held(roles, TrainerRole)[0])


def check_helper(roles: Roles, stages: int) -> None:
    """The helper of the process `both`, if it has one, sums for a stage that the process does not serve."""
    both = roles.live["both"]
    if "aux" in both.status():
        assert both.status()["aux"]["stage"] == stage_helped(both, stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "stages"), PAIRS + MORE, ids=lambda told: told if isinstance(told, int) else names_of(told)
)
async def test_any_roles_train_in_one_process(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, several: tuple[Any, ...], stages: int
) -> None:
    run = run_file("sgd", "float64", write_texts(tmp_path), stages)
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        await world.start("both", program=roles.program(together(*several)))
        await train_together(run, roles, world, several)
        check(run, roles, batches)
        assert roles.live["both"].status().keys() == {role.name for role in several}
        check_helper(roles, stages)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("several", "stages"), FIRST, ids=lambda told: told if isinstance(told, int) else names_of(told)
)
async def test_roles_train_in_the_first_process_of_a_run(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, several: tuple[Any, ...], stages: int
) -> None:
    """It has nobody to join through, waits for what the run cannot do without, and others join through it."""
    run = run_file("sgd", "float64", write_texts(tmp_path), stages)
    roles = Roles(run, tmp_path)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        first = await world.start("both", program=roles.program(together(*several)))
        await trio.sleep(20.0)
        world.bootstrap.append(first.full_addr)
        await train_together(run, roles, world, several)
        check(run, roles, batches)


@pytest.mark.slow
async def test_one_process_serves_two_stages(tmp_path: Path, autojump_clock: MockClock, batches: Batches) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=2)
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        both = changed(run, limits={"stage": [0, 1]})
        await world.start("both", program=roles.program(StageRole, run=both))
        await world.start("stage1", program=roles.program(StageRole, run=pinned(run, 1)))
        await world.start("trainer", program=roles.program(TrainerRole))
        await finished(world, roles, roles.live["trainer"])
        check(run, roles, batches)
        status = roles.live["both"].status()
        assert [post["stage"] for post in status["posts"]] == [0, 1]


@pytest.mark.slow
async def test_a_post_is_left_and_entered_again_while_training_goes_on(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    run = run_file("adamw", "float64", write_texts(tmp_path), stages=2)
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        for stage in (0, 1, 1):
            name = f"stage{len(roles.live)}"
            await world.start(name, program=roles.program(StageRole, run=pinned(run, stage)))
        await world.start("trainer", program=roles.program(TrainerRole))
        member: StageRole = roles.live["stage2"]
        assert await world.until(lambda: member.step >= 2, within_s=60), roles.story()
        with trio.fail_after(30):
            await member.exit(1)
        assert member.posts == []
        await member.enter(0)  # another stage than before
        assert await world.until(lambda: member.step >= 5, within_s=60), roles.story()
        with trio.fail_after(30):
            await member.exit(0)
        await member.enter(1)
        await finished(world, roles, roles.live["trainer"])
        check(run, roles, batches)


@pytest.mark.slow
async def test_a_helper_gives_way_to_a_post_of_its_stage(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    run = run_file("sgd", "float64", write_texts(tmp_path), stages=2)
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        await world.start("stage1", program=roles.program(StageRole, run=pinned(run, 1)))
        both = await world.start(
            "both", program=roles.program(together(AuxAggregatorRole, StageRole), run=pinned(run, 0))
        )
        await world.start("trainer", program=roles.program(TrainerRole))
        aux, member = roles.live[both.name].roles
        await finished(world, roles, roles.live["trainer"])
        assert (aux.status()["stage"], member.status()["stage"]) == (1, 0)
        check(run, roles, batches)
