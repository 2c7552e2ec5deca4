"""Trainers of a run with experts, as whole roles under the virtual clock: many microbatches wait at once, the trunks
average and stay equal, and what fails begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from trio.testing import MockClock

from peerd.core.errors import ConfigError
from peerd.core.experts.contract import ExpertAsk, ExpertReply
from peerd.core.run.runfile import (
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
from peerd.role import RoleContext
from peerd.sim.programs import swarm
from peerd.sim.world import World, WorldConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.expert_network import NearExperts
from tests.kit.virtualroles import Roles, virtual_run
from tests.kit.world import home_line

pytestmark = pytest.mark.slow

EXPERTS = ExpertsSection(block="ffn", grid=[2, 2], top_k=2, k_min=1)


def run_with(folder: Path, **sections: Any) -> RunFile:
    settings: dict[str, Any] = {
        "model": ModelSection(d_model=8, heads=1, layers=2, context=8),
        "optimizer": OptimizerSection(name="adamw", lr=1e-2),
        "experts": EXPERTS,
    }
    return virtual_run(folder, (4000,), **settings | sections)


def with_experts(network: NearExperts) -> Callable[[RoleContext], TrainerRole]:
    def built(ctx: RoleContext) -> TrainerRole:
        assert ctx.services is not None
        ctx.services.__dict__["expert_calls"] = lambda worker: network  # in place of calls over the network
        return TrainerRole(ctx)

    return built


async def start(world: World, roles: Roles, network: NearExperts, count: int) -> None:
    boot = await world.start("boot")
    world.bootstrap.append(boot.full_addr)
    for number in range(count):
        await world.start(f"trainer{number}", program=roles.program(with_experts(network)))


def told(roles: Roles, name: str = "trainer0") -> Any:
    return roles.live[name].status()


def digests(roles: Roles) -> set[tuple[int, bytes]]:
    states = [role.replica.post.state for role in roles.of(TrainerRole)]
    return {(state.position.step, state.trunk.trunk.digest()) for state in states}


async def test_sixty_four_microbatches_wait_for_experts_at_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(tmp_path, batch=BatchSection(target_samples=128))
    roles, network = Roles(run, tmp_path), NearExperts(run, delay_s=1.0)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=120), roles.story()
        assert network.most_waiting == 64
        experts = told(roles)["experts"]
        assert experts["updates"] >= 128
        assert experts["staleness"]["most"] > 0
        assert experts["began_again"] == {}


async def test_two_trainers_average_their_trunks_while_each_experts_update_is_its_own(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path)
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.05, delay_s=0.2)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 2)
        both = lambda: all(told(roles, f"trainer{i}")["microbatches"]["counted"] > 10 for i in range(2))  # noqa: E731
        assert await world.until(both, within_s=60), roles.story()
        assert await world.until(lambda: len(digests(roles)) == 1, within_s=30), roles.story()
        assert network.updates.total() > 100


async def test_a_delayed_run_flies_on_while_its_gradients_are_averaged(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, optimizer=OptimizerSection(name="adamw", lr=1e-2, delayed=True))
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.05, delay_s=0.2)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 2)
        assert await world.until(lambda: told(roles)["step"] >= 6, within_s=240), roles.story()
        assert await world.until(lambda: len(digests(roles)) == 1, within_s=30), roles.story()


async def test_loss_falls(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(
        tmp_path,
        pipeline=PipelineSection(microbatch=4),
        batch=BatchSection(target_samples=32),
        optimizer=OptimizerSection(name="adamw", lr=3e-2),
        evaluate=EvaluateSection(every_steps=10, samples=8),
        checkpoint=CheckpointSection(every_steps=10),
    )
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.05, delay_s=0.1)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: len(told(roles)["evaluations"]) >= 3, within_s=600), roles.story()
        losses = [one["loss"] for one in told(roles)["evaluations"]]
        assert losses[2] < losses[0] < 6.0


async def test_a_microbatch_without_enough_answers_begins_again_and_says_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, experts=msgspec.structs.replace(EXPERTS, k_min=2))
    roles, network = Roles(run, tmp_path), NearExperts(run)
    silent = True

    def spoil(verb: str, ask: ExpertAsk, reply: ExpertReply) -> ExpertReply | None:
        return None if silent and verb == "forward" and ask.uid.layer == 1 else reply

    network.spoil = spoil
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: "too few answers" in str(told(roles)["waits_for"]), within_s=60), roles.story()
        assert told(roles)["step"] == 0
        assert told(roles)["experts"]["began_again"]["too_few_experts"] > 1
        events = [e for e in roles.logs["trainer0"].recent(200) if e["name"] == "flight.began_again"]
        assert events
        assert len(events) < 10, "many fail alike: the log tells it now and then"
        assert "1.0.0" in str(events[0]["reason"])
        silent = False
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=120), roles.story()
        assert "too few" not in str(told(roles)["waits_for"])
        counts = told(roles)["microbatches"]
        assert counts["lost"] == 0


async def test_a_newcomer_takes_the_trunk_from_a_trainer_and_goes_on_with_it(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, limits=LimitsSection(microbatches_in_flight=4))
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.05, delay_s=0.2)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 3, within_s=120), roles.story()
        await world.start("late", program=roles.program(with_experts(network)))
        late = lambda: told(roles, "late")["microbatches"]["counted"] > 5  # noqa: E731
        assert await world.until(late, within_s=240), roles.story()
        assert await world.until(lambda: len(digests(roles)) == 1, within_s=30), roles.story()


async def test_nobody_else_may_call_a_trunk(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(tmp_path)
    roles, network = Roles(run, tmp_path), NearExperts(run, delay_s=0.2)
    async with World(1, swarm(), WorldConfig(line=home_line)).running() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 1, within_s=60), roles.story()
        handlers = roles.of(TrainerRole)[0].replica.post._handlers()
        assert handlers.forward is handlers.backward is handlers.loss is handlers.passes is None


@pytest.mark.parametrize(
    ("role", "experts", "words"),
    [
        (StageRole, EXPERTS, "no stages to serve; allowed: --role trainer, expert, backbone"),
        (TrainerRole, msgspec.structs.replace(EXPERTS, layers=3), "allowed for role trainer: up to 2 layers"),
    ],
)
def test_a_role_that_has_nothing_to_compute_with_is_refused_before_it_joins(
    tmp_path: Path, role: Any, experts: ExpertsSection, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        role.check_run(run_with(tmp_path, experts=experts))
