"""Trainers of a run with experts, as whole roles under the virtual clock: many microbatches wait at once, the trunks
average and stay equal, and what fails begins again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from trio.testing import MockClock

from peerd.core.errors import ConfigError
from peerd.role.role import RoleContext
from peerd.run.expert_network import ExpertCall, ExpertReply
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
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.expert_network import NearExperts
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.world import World

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
    for number in range(count):
        await world.start(f"trainer{number}", program=roles.program(with_experts(network)))


def told(roles: Roles, name: str = "trainer0") -> Any:
    return roles.live[name].status()


def digests(roles: Roles) -> set[tuple[int, bytes]]:
    states = [role.replica.post.state for role in roles.of(TrainerRole)]
    return {(state.position.step, state.trunk.trunk.digest()) for state in states}


async def test_sixty_four_microbatches_wait_for_experts_at_once(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(tmp_path, batch=BatchSection(target_samples=64))
    roles, network = Roles(run, tmp_path), NearExperts(run, delay_s=1.0)
    async with home_world() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=120), roles.story()
        assert network.most_waiting == 64
        experts = told(roles)["experts"]
        assert experts["updates"] >= 128
        assert experts["staleness"]["most"] > 0
        assert experts["began_again"] == {}


@dataclass(frozen=True)
class Company:
    """A trainer that trained alone, and then with a newcomer."""

    handlers: tuple[object, ...]  # of calls of others to the first one's trunk
    alone: int  # steps of the first one by itself
    counted: tuple[int, int]  # microbatches of each
    trunks: set[tuple[int, bytes]]  # their steps and the digests of their trunks, when these were equal, or at the end
    updates: int  # of experts


async def keep_company(run: RunFile, folder: Path) -> Company:
    roles, network = Roles(run, folder), NearExperts(run, lr=0.05, delay_s=0.2)
    async with home_world() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 3, within_s=120), roles.story()
        handlers = roles.of(TrainerRole)[0].replica.post._handlers()
        alone, names = told(roles)["step"], ("trainer0", "late")
        await world.start("late", program=roles.program(with_experts(network)))
        counted = lambda: [told(roles, name)["microbatches"]["counted"] for name in names]  # noqa: E731
        assert await world.until(lambda: min(counted()) > 10, within_s=240), roles.story()
        await world.until(lambda: len(digests(roles)) == 1, within_s=30)
        one, other = counted()
        all_handlers = (handlers.forward, handlers.loss, handlers.passes)
        return Company(all_handlers, alone, (one, other), digests(roles), network.updates.total())


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Company:
    folder = tmp_path_factory.mktemp("company")
    run = run_with(folder, batch=BatchSection(target_samples=12), limits=LimitsSection(microbatches_in_flight=4))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return run_virtual(keep_company, run, folder, seed=1)


def test_two_trainers_average_their_trunks_while_each_experts_update_is_its_own(company: Company) -> None:
    assert min(company.counted) > 10
    assert len(company.trunks) == 1
    assert company.updates > 100


def test_a_newcomer_takes_the_trunk_from_a_trainer_and_goes_on_with_it(company: Company) -> None:
    ((step, _),) = company.trunks
    assert step > company.alone >= 3


def test_nobody_else_may_call_a_trunk(company: Company) -> None:
    assert company.handlers == (None,) * 3


async def test_a_delayed_run_flies_on_while_its_gradients_are_averaged(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    optimizer = OptimizerSection(name="adamw", lr=1e-2, delayed=True)
    run = run_with(tmp_path, optimizer=optimizer, batch=BatchSection(target_samples=12))
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.05, delay_s=0.2)
    async with home_world() as world:
        await start(world, roles, network, 2)
        assert await world.until(lambda: told(roles)["step"] >= 6, within_s=240), roles.story()
        assert await world.until(lambda: len(digests(roles)) == 1, within_s=30), roles.story()


async def test_loss_falls(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = run_with(
        tmp_path,
        pipeline=PipelineSection(microbatch=8),
        batch=BatchSection(target_samples=32),
        optimizer=OptimizerSection(name="adamw", lr=5e-2),
        evaluate=EvaluateSection(every_steps=6, samples=8),
        checkpoint=CheckpointSection(every_steps=6),
    )
    roles, network = Roles(run, tmp_path), NearExperts(run, lr=0.1, delay_s=0.1)
    async with home_world() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: len(told(roles)["evaluations"]) >= 3, within_s=600), roles.story()
        losses = [one["loss"] for one in told(roles)["evaluations"]]
        assert losses[2] < losses[0] < 6.0


async def test_a_microbatch_without_enough_answers_begins_again_and_says_so(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = run_with(tmp_path, experts=msgspec.structs.replace(EXPERTS, k_min=2))
    roles, network = Roles(run, tmp_path), NearExperts(run, delay_s=0.2)
    silent = True

    def spoil(verb: str, ask: ExpertCall, reply: ExpertReply) -> ExpertReply | None:
        return None if silent and verb == "forward" and ask.uid.layer == 1 else reply

    network.spoil = spoil
    async with home_world() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: "too few answers" in str(told(roles)["waits_for"]), within_s=60), roles.story()
        assert told(roles)["step"] == 0
        assert told(roles)["experts"]["began_again"]["too_few_experts"] > 20
        events = [e for e in roles.logs["trainer0"].recent(200) if e["name"] == "flight.began_again"]
        assert events
        assert len(events) < 10, "many fail alike: the log tells it now and then"
        assert "1.0.0" in str(events[0]["reason"])
        silent = False
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=120), roles.story()
        assert "too few" not in str(told(roles)["waits_for"])
        counts = told(roles)["microbatches"]
        assert counts["lost"] == 0


@pytest.mark.parametrize("trunk", ["synchronous", "asynchronous"])
async def test_a_microbatch_that_finds_no_memory_begins_again_and_its_trainer_goes_on(
    tmp_path: Path, autojump_clock: MockClock, trunk: Any
) -> None:
    run = run_with(tmp_path, optimizer=OptimizerSection(name="adamw", lr=1e-2, trunk=trunk))
    roles, network = Roles(run, tmp_path, partial(PacedDevice, 0.01)), NearExperts(run, delay_s=0.2)
    async with home_world() as world:
        await start(world, roles, network, 1)
        assert await world.until(lambda: told(roles)["step"] >= 1, within_s=60), roles.story()
        device: Any = roles.devices["trainer0"]
        fails = ["begin a flight", "forward", "backward"] * 2
        device.fails = lambda name: "before" if name in fails and not fails.remove(name) else ""  # type: ignore[func-returns-value]
        again = lambda: told(roles)["experts"]["began_again"].get("no_memory", 0)  # noqa: E731
        assert await world.until(lambda: again() == 6, within_s=60), roles.story()
        step = told(roles)["step"]
        assert await world.until(lambda: told(roles)["step"] >= step + 2, within_s=60), roles.story()
        assert not [event for event in roles.logs["trainer0"].recent(200) if event["name"] == "role.failed"]


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
    run = run_with(tmp_path, experts=experts)
    (tmp_path / "text0.txt").write_text("a text without zero bytes " * 100)
    with pytest.raises(ConfigError, match=words):
        role.check_run(run)
