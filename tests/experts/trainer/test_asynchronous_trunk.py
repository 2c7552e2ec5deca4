"""An asynchronous trunk, as whole roles under the virtual clock: each trainer has its microbatches in flight, whatever
the batch and the others are; no step waits for a slow trainer; trunks stay equal, and old gradients are bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from peerd.role.role import RoleContext
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    EvaluateSection,
    ExpertsSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.expert_network import NearExperts
from tests.worlds.roles.virtualroles import Roles, virtual_run
from tests.worlds.simulation.world import World

pytestmark = pytest.mark.slow

EXPERTS = ExpertsSection(block="ffn", grid=[2, 2], top_k=2, k_min=1)


def asynchronous(**keys: Any) -> OptimizerSection:
    return OptimizerSection(**{"name": "adamw", "lr": 1e-2, "trunk": "asynchronous"} | keys)


def run_with(folder: Path, **sections: Any) -> RunFile:
    settings: dict[str, Any] = {
        "model": ModelSection(d_model=8, heads=1, layers=2, context=8),
        "optimizer": asynchronous(),
        "experts": EXPERTS,
        "batch": BatchSection(target_samples=8),
    }
    return virtual_run(folder, (40_000,), **settings | sections)


class Trainers:
    """Trainers with experts of their own network each; all of these share one set of experts."""

    def __init__(self, world: World, run: RunFile, folder: Path, **experts: Any) -> None:
        self.world, self.run = world, run
        self.roles = Roles(run, folder)
        self.network = NearExperts(run, **experts)

    async def start(self, name: str, delay_s: float | None = None) -> None:
        """A trainer; `delay_s`: of its own line to the experts."""
        network = self.network
        if delay_s is not None:
            network = NearExperts(self.run, delay_s=delay_s)
            network.experts = self.network.experts
        await self.world.start(name, program=self.roles.program(built_with(network)))

    def told(self, name: str) -> Any:
        return self.roles.live[name].status()

    def in_flight(self) -> list[int]:
        return [role.status()["experts"]["in_flight"] for role in self.roles.of(TrainerRole)]

    def steps(self) -> list[int]:
        return [role.status()["step"] for role in self.roles.of(TrainerRole)]

    def losses(self) -> list[float]:
        """Held-out losses by step, whichever trainer evaluated."""
        found = [one for role in self.roles.of(TrainerRole) for one in role.status()["evaluations"]]
        return [one["loss"] for one in sorted(found, key=lambda one: one["step"])]

    def digests(self) -> set[tuple[int, bytes]]:
        states = [role.replica.post.state for role in self.roles.of(TrainerRole)]
        return {(state.position.step, state.trunk.trunk.digest()) for state in states}


def built_with(network: NearExperts) -> Callable[[RoleContext], TrainerRole]:
    def built(ctx: RoleContext) -> TrainerRole:
        assert ctx.services is not None
        ctx.services.__dict__["expert_calls"] = lambda worker: network  # in place of calls over the network
        return TrainerRole(ctx)

    return built


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize("trainers", [1, 3, 10])
async def test_each_trainer_has_in_flight_what_its_limits_allow(
    tmp_path: Path, autojump_clock: MockClock, trainers: int, limit: int
) -> None:
    run = run_with(tmp_path, limits=LimitsSection(microbatches_in_flight=limit))
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path, delay_s=1.0)
        for number in range(trainers):
            await swarm.start(f"trainer{number}")
        full = [limit or 64] * trainers
        assert await world.until(lambda: swarm.in_flight() == full, within_s=60), swarm.in_flight()
        first = min(swarm.steps())
        assert await world.until(lambda: min(swarm.steps()) >= first + 2, within_s=120), swarm.roles.story()
        seen = [swarm.in_flight() for _ in range(20) if await world.until(lambda: True, within_s=1)]
        assert seen == [full] * 20


async def test_no_step_waits_for_a_slow_trainer_and_its_gradients_count(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, limits=LimitsSection(microbatches_in_flight=8), optimizer=asynchronous(most_stale=1000))
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path)
        await swarm.start("quick", delay_s=0.05)
        assert await world.until(lambda: min(swarm.steps()) >= 2, within_s=120), swarm.roles.story()
        await swarm.start("slow", delay_s=5.0)  # half a minute for a microbatch
        assert await world.until(lambda: swarm.in_flight() == [8, 8], within_s=20), swarm.in_flight()
        before = swarm.told("quick")["step"]
        await world.until(lambda: False, within_s=20)
        assert swarm.told("quick")["step"] - before > 30
        assert swarm.told("slow")["microbatches"]["counted"] == 0
        counted = lambda: swarm.told("slow")["microbatches"]["counted"] >= 4  # noqa: E731
        assert await world.until(counted, within_s=60), swarm.roles.story()
        assert swarm.told("slow")["experts"]["trunk_staleness"]["most"] > 30


async def test_gradients_that_are_too_old_are_dropped_and_the_log_says_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, limits=LimitsSection(microbatches_in_flight=8), optimizer=asynchronous(most_stale=3))
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path)
        await swarm.start("quick", delay_s=0.05)
        await swarm.start("slow", delay_s=4.0)
        dropped = lambda: swarm.told("slow")["experts"]["too_old"] >= 8  # noqa: E731
        assert await world.until(dropped, within_s=120), swarm.roles.story()
        assert [event for event in swarm.roles.logs["slow"].recent(200) if event["name"] == "flight.too_old"]
        assert swarm.told("slow")["experts"]["in_flight"] == 8
        for name in ("quick", "slow"):
            assert swarm.told(name)["experts"]["trunk_staleness"]["most"] <= 3


async def test_more_flights_than_places_share_them_and_trunks_stay_equal(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, batch=BatchSection(target_samples=4))
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path, lr=0.05, delay_s=0.1)
        await swarm.start("one")
        await swarm.start("two")
        assert await world.until(lambda: min(swarm.steps()) >= 4, within_s=120), swarm.roles.story()
        assert await world.until(lambda: len(swarm.digests()) == 1, within_s=30), swarm.roles.story()
        experts = [swarm.told(name)["experts"] for name in ("one", "two")]
        assert all(told["shared_a_place"] > 0 and told["wait_for_a_place"] <= 4 for told in experts)
        assert all(told["began_again"] == {} and told["too_old"] == 0 for told in experts)


async def test_a_newcomer_takes_the_trunk_and_loss_falls(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(
        tmp_path,
        pipeline=PipelineSection(microbatch=4),
        batch=BatchSection(target_samples=32),
        optimizer=asynchronous(lr=3e-2),
        evaluate=EvaluateSection(every_steps=8, samples=8),
        checkpoint=CheckpointSection(every_steps=8),
        limits=LimitsSection(microbatches_in_flight=8),
    )
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path, lr=0.1, delay_s=0.1)
        await swarm.start("one")
        assert await world.until(lambda: min(swarm.steps()) >= 4, within_s=120), swarm.roles.story()
        await swarm.start("late")
        assert await world.until(lambda: swarm.told("late")["microbatches"]["counted"] > 8, within_s=60)
        assert await world.until(lambda: len(swarm.losses()) >= 4, within_s=60)
        losses = swarm.losses()
        assert losses[-1] < losses[0] - 1 < 5.0
        assert await world.until(lambda: len(swarm.digests()) == 1, within_s=30), swarm.roles.story()


async def test_a_trainer_that_comes_back_goes_on_from_its_checkpoint(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(
        tmp_path, checkpoint=CheckpointSection(every_steps=2), limits=LimitsSection(microbatches_in_flight=8)
    )
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path, delay_s=0.2)
        await swarm.start("one")
        assert await world.until(lambda: min(swarm.steps()) >= 5, within_s=120), swarm.roles.story()
        swarm.roles.lives["one"].cancel()
        assert await world.until(lambda: swarm.steps() == [0] or not swarm.steps(), within_s=30)
        assert await world.until(lambda: bool(swarm.steps()) and min(swarm.steps()) >= 6, within_s=60)
        assert swarm.in_flight() == [8]


async def test_a_trunk_that_computes_nothing_finite_goes_back_to_its_checkpoint(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    checkpoint = CheckpointSection(every_steps=2)
    run = run_with(tmp_path, checkpoint=checkpoint, limits=LimitsSection(microbatches_in_flight=8))
    async with home_world() as world:
        swarm = Trainers(world, run, tmp_path, delay_s=0.2)
        await swarm.start("one")
        assert await world.until(lambda: min(swarm.steps()) >= 5, within_s=120), swarm.roles.story()
        (role,) = swarm.roles.of(TrainerRole)
        trunk = role.replica.post.state.trunk.trunk
        trunk._flat.fill_(1e30)  # finite, and of no use
        trunk.loads += 1  # those under way do not count: they began with better ones
        at = role.status()["step"]
        dropped = lambda: role.status()["microbatches"]["not_finite"] >= 8  # noqa: E731
        assert await world.until(dropped, within_s=60), swarm.roles.story()
        events = [event for event in swarm.roles.logs["one"].recent(200) if event["name"] == "microbatch.dropped"]
        assert events
        assert all(event["samples"] for event in events)
        assert await world.until(lambda: min(swarm.steps()) > at + 2, within_s=120), swarm.roles.story()
