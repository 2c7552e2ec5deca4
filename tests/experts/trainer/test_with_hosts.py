"""Trainers and hosts of experts as whole roles in a simulated world: calls go over the network, hosts come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trio.testing import MockClock

from peerd.run.runfile import BatchSection, ExpertsSection, LimitsSection, ModelSection, OptimizerSection
from roles.expert import ExpertRole
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.expert_host import PlainHost
from tests.worlds.roles.virtualroles import Roles, virtual_run

pytestmark = pytest.mark.slow

EXPERTS = ExpertsSection(block="ffn", grid=[2, 2], top_k=2, announce_s=2.0, timeout_s=2.0)


def told(roles: Roles) -> Any:
    return roles.live["trainer"].status()


async def test_a_trainer_goes_on_when_the_host_of_all_experts_is_gone_and_another_comes(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    run = virtual_run(
        tmp_path,
        (4000,),
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        optimizer=OptimizerSection(name="adamw", lr=1e-2, delayed=True),
        batch=BatchSection(target_samples=8),
        experts=EXPERTS,
    )
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        first = await world.start("host", program=roles.program(PlainHost))
        await world.start("trainer", program=roles.program(TrainerRole))
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=120), roles.story()
        hosted = roles.live["host"].experts
        assert sum(expert.version for expert in hosted.values()) >= told(roles)["experts"]["calls"]["backwards"] > 0
        await world.kill(first)
        before = told(roles)["step"]
        assert await world.until(lambda: "begins again" in str(told(roles)["waits_for"]), within_s=60), roles.story()
        await world.start("other", program=roles.program(PlainHost))
        assert await world.until(lambda: told(roles)["step"] >= before + 3, within_s=240), roles.story()
        calls = told(roles)["experts"]["calls"]
        assert sum(calls["failed"].values()) > 0
        assert told(roles)["experts"]["began_again"]["too_few_experts"] > 0
        assert told(roles)["microbatches"]["lost"] == 0
        assert told(roles)["experts"]["in_flight"] <= 64


async def test_trainers_and_the_real_role_of_hosts_train_together(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = virtual_run(
        tmp_path,
        (4000,),
        model=ModelSection(d_model=8, heads=1, layers=2, context=8),
        optimizer=OptimizerSection(name="adamw", lr=1e-2),
        batch=BatchSection(target_samples=8),
        experts=EXPERTS,
        limits=LimitsSection(experts=4),
    )
    roles = Roles(run, tmp_path)
    async with home_world() as world:
        for number in range(2):
            await world.start(f"host{number}", program=roles.program(ExpertRole))
        hosts = roles.of(ExpertRole)
        everything = lambda: sum(len(host.host.experts) for host in hosts) == 8  # noqa: E731
        assert await world.until(everything, within_s=60), roles.story()
        for name in ("trainer", "second"):
            await world.start(name, program=roles.program(TrainerRole))
        assert await world.until(lambda: told(roles)["step"] >= 2, within_s=240), roles.story()
        stats = [host.host.server.stats for host in hosts]  # what came together is one update
        assert sum(one.backwards for one in stats) >= told(roles)["experts"]["updates"] > 0
        hosted = [one.model.version for host in hosts for one in host.host.experts.values()]
        assert sum(hosted) == sum(one.updates for one in stats) > 0
        counted = lambda: roles.live["second"].status()["microbatches"]["counted"] > 0  # noqa: E731
        assert await world.until(counted, within_s=60), roles.story()
