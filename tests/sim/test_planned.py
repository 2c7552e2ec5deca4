"""A swarm whose run has a plan: the named peers take its stages and its routes, all others fill the gaps, exactly."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from peerd.core.keys import Keypair
from peerd.pipeline.direct import DirectPipeline
from peerd.run.runfile import PlanSection, RunFile
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.exact import STEPS, Batches, differences, plain_torch, run_file, write_texts
from tests.kit.runs import changed
from tests.worlds.network.world import home_world
from tests.worlds.roles.virtualroles import PacedDevice, Roles

SEED = 1
PLANNED = (("c", "b"), ("a", "d"))  # by stage; need alone would give a and c stage 0, b and d stage 1
FOLLOWS = {"b": "d", "c": "a"}


def peer_id(name: str) -> str:
    """The id of a node of the world."""
    return Keypair(random.Random(f"{SEED}/{name}/identity").randbytes(32)).peer_id.text


def planned(run: RunFile) -> RunFile:
    stages = [[peer_id(name) for name in names] for names in PLANNED]
    pairs = [[PLANNED[0].index(one), PLANNED[1].index(other)] for one, other in FOLLOWS.items()]
    return changed(run, pipeline={"placement": "plan"}, plan=PlanSection(stages=stages, follows=[pairs]))


def stages(roles: Roles) -> dict[str, list[int]]:
    return {
        name: [post.stage for post in role.posts] for name, role in roles.live.items() if isinstance(role, StageRole)
    }


class RoutesTaken:
    """Counts the routes on which microbatches leave."""

    def __init__(self, patch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        name_of = {peer_id(name): name for name in names}
        chosen = DirectPipeline._choose

        async def choose(pipeline: DirectPipeline, *asked: Any) -> Any:
            way = await chosen(pipeline, *asked)
            self.counts[tuple(name_of[peer] for peer in way.route)] += 1
            return way

        patch.setattr(DirectPipeline, "_choose", choose)


@pytest.mark.slow
async def test_planned_peers_take_their_stages_and_routes_and_train_exactly(
    tmp_path: Path, autojump_clock: MockClock, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = planned(run_file("sgd", "float64", write_texts(tmp_path)))
    routes = RoutesTaken(monkeypatch, "abcd")
    roles = Roles(run, tmp_path / "peers", worker=lambda: PacedDevice(0.2))
    async with home_world(SEED) as world:
        for name in "abcd":
            await world.start(name, program=roles.program(StageRole))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: min(roles.steps()) >= STEPS, within_s=600), roles.story()
        assert stages(roles) == {"b": [0], "c": [0], "a": [1], "d": [1]}
        modules = [post.served.module for member in roles.of(StageRole) for post in member.posts]
        assert differences(run, plain_torch(run, batches), modules) == []
    as_planned = sum(count for route, count in routes.counts.items() if FOLLOWS.get(route[0]) == route[-1])
    assert as_planned > 0.9 * sum(routes.counts.values()), routes.counts
    assert set(routes.counts) >= {("b", "d"), ("c", "a")}


@pytest.mark.slow
async def test_others_take_the_places_of_planned_peers_that_are_away(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no planned peer of stage 1 is there, a peer that the plan does not name serves it."""
    run = planned(run_file("sgd", "float64", write_texts(tmp_path)))
    run = changed(run, optimizer={"total_steps": 0})
    roles = Roles(run, tmp_path / "peers", worker=lambda: PacedDevice(0.2))
    async with home_world(SEED) as world:
        for name in ("b", "other"):
            await world.start(name, program=roles.program(StageRole))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: len(roles.steps()) == 2 and min(roles.steps()) >= 2, within_s=300)
        assert stages(roles) == {"b": [0], "other": [1]}
        routes = RoutesTaken(monkeypatch, ("b", "d", "other"))
        await world.start("d", program=roles.program(StageRole))
        step = max(roles.steps())
        assert await world.until(lambda: min(roles.steps()) >= step + 4, within_s=300), roles.story()
        assert stages(roles) == {"b": [0], "other": [1], "d": [1]}
        assert await world.until(lambda: routes.counts["b", "d"] > 5, within_s=300), routes.counts
        (d,) = [node for node in world.living() if node.name == "d"]
        await world.kill(d)
        step = max(roles.steps())
        assert await world.until(lambda: min(roles.steps()) >= step + 2, within_s=300), roles.story()
