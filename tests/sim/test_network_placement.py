"""Placement by the measured network in a running swarm: peers of one stage come to be nearer each other, exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from trio.testing import MockClock

from peerd.run.runfile import RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.network.world import home_world
from tests.worlds.roles.virtualroles import PacedDevice, Roles
from tests.worlds.simulation.simnet import SimPath
from tests.worlds.simulation.world import World

PLACES = {f"stage{number}": number // 3 for number in range(6)}
THREE_PLACES = {f"stage{number}": number // 3 for number in range(9)}
SLOW_S = 0.6  # of a microbatch
FAR = SimPath(latency_s=0.3)  # each peer meets all others of its stage, and one of the next
WITHIN_S = 900.0


def stages(roles: Roles) -> dict[str, list[int]]:
    return {
        name: [post.stage for post in role.posts] for name, role in roles.live.items() if isinstance(role, StageRole)
    }


def far_pairs(roles: Roles) -> int:
    """Pairs of peers that share a stage, and are not of one place."""
    found = stages(roles)
    pairs = itertools.combinations(sorted(found), 2)
    return sum(PLACES[a] != PLACES[b] and bool({*found[a]} & {*found[b]}) for a, b in pairs)


def is_settled(roles: Roles) -> bool:
    return all(len(posts) == 1 for posts in stages(roles).values())


def unending(tmp_path: Path) -> RunFile:
    run = run_file("sgd", "float64", write_texts(tmp_path))
    return changed(run, optimizer={"total_steps": 0}, pipeline={"placement": "network", "microbatch": 4})


def none_alone(roles: Roles) -> bool:
    """Each peer serves one stage, and each stage has two at the least."""
    served = [stage for posts in stages(roles).values() for stage in posts]
    return is_settled(roles) and all(served.count(stage) >= 2 for stage in (0, 1))


def is_exact(roles: Roles, batches: Batches) -> bool:
    """Each step took each sample once; the newest weights, where both stages have them, are plain torch's."""
    modules = [post.state.served.module for role in roles.of(StageRole) for post in role.posts]
    newest = max(module.step for module in modules)
    latest = [module for module in modules if module.step == newest]
    both = {module.stage for module in latest} == {0, 1}
    wrong = differences(roles.run, plain_torch(roles.run, batches, newest), latest, newest) if both else []
    return [*batches.faults(4, newest - 1), *wrong] == []


async def stage_peers(world: World, roles: Roles, places: dict[str, int], fast_s: float = SLOW_S) -> None:
    """Peers one after the other, so that each place gets both stages; a microbatch takes `fast_s` in place 0."""
    for one, other in itertools.combinations(places, 2):
        if places[one] != places[other]:
            world.net.set_path(one, other, FAR)
    for name, place in places.items():
        roles.worker = lambda place=place: PacedDevice(SLOW_S if place else fast_s)
        await world.start(name, program=roles.program(StageRole))
        assert await world.until(lambda name=name: bool(stages(roles).get(name)), within_s=60)


@pytest.mark.slow
@pytest.mark.thorough
async def test_fewer_pairs_of_a_stage_are_far_from_each_other(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    run = unending(tmp_path)
    roles = Roles(run, tmp_path / "peers")
    async with home_world() as world:
        await stage_peers(world, roles, PLACES)
        before = far_pairs(roles)
        assert before >= 4
        await world.start("trainer", program=roles.program(TrainerRole))
        nearer: Callable[[], bool] = lambda: is_settled(roles) and far_pairs(roles) < before  # noqa: E731
        assert await world.until(nearer, within_s=WITHIN_S), roles.story()
        whys = [str(event["why"]) for event in roles.events("stage.moved")]
        assert whys
        assert all("measured network" in why for why in whys)
        assert is_exact(roles, batches)


@pytest.mark.slow
@pytest.mark.thorough
async def test_the_run_goes_on_when_all_of_the_fastest_place_leave_at_once(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches
) -> None:
    roles = Roles(unending(tmp_path), tmp_path / "peers")
    async with home_world() as world:
        await stage_peers(world, roles, THREE_PLACES, fast_s=0.3)
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: bool(roles.events("stage.moved")), within_s=WITHIN_S), roles.story()
        for node in [node for node in world.living() if THREE_PLACES.get(node.name) == 0]:
            await world.kill(node)  # in the midst of moves, and the conductor among them
        before = max(roles.steps())
        assert await world.until(lambda: min(roles.steps()) >= before + 3, within_s=60), roles.story()
        assert await world.until(lambda: none_alone(roles), within_s=300), roles.story()
        assert set(stages(roles)) == {name for name, place in THREE_PLACES.items() if place}
        assert is_exact(roles, batches)
