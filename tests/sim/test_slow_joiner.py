"""A newcomer on a line on which a state takes longer than a step, under virtual time: it arrives, with one state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from peerd.compute.worker import InlineWorker
from peerd.core.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.simnet import Line
from peerd.sim.world import World, WorldConfig
from roles.trainer import TrainerRole
from tests.kit.world import home_line
from tests.sim.test_training_swarm import Roles

T = TypeVar("T")

SLOW = Line(latency_s=0.03, up_mbit_s=1, down_mbit_s=1)  # a gradient takes 3 s, a state 8, a step of the others 4


class Device(InlineWorker):
    """One on which a microbatch takes half a second."""

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        return await super().run(job, name=name, cost_s=0.5 if name == "backward" else cost_s, urgent=urgent)


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    (tmp_path / "text.txt").write_bytes(bytes((13 * j * j + j // 3) % 251 for j in range(20000)))
    return RunFile(
        run="slow",
        seed=5,
        model=ModelSection(d_model=48, heads=2, layers=2, context=8),
        pipeline=PipelineSection(stages=1, microbatch=1),
        optimizer=OptimizerSection(name="adamw", lr=1e-3),
        batch=BatchSection(target_samples=24),
        data=DataSection(path=str(tmp_path / "*.txt"), holdout=0.1),
        evaluate=EvaluateSection(every_steps=0),
        checkpoint=CheckpointSection(every_steps=0),
    )


async def join(seed: int, roles: Roles) -> list[dict[str, Any]]:
    """What a newcomer logs until it holds what the others do."""
    async with World(seed, swarm(), WorldConfig(line=home_line)).running() as world:
        boot = await world.start("boot")
        world.bootstrap.append(boot.full_addr)
        for number in range(3):
            await world.start(f"replica{number}", program=roles.program(TrainerRole))

        def step() -> int:
            return max((role._replica.position.step for role in roles.of(TrainerRole)), default=0)

        assert await world.until(lambda: step() >= 6, within_s=120), roles.story()
        began = step()
        await world.start("slow", line=SLOW, program=roles.program(TrainerRole))

        def there() -> bool:
            replicas = [role._replica for role in roles.of(TrainerRole) if role._replica._served is not None]
            modules = [replica._served.module for replica in replicas]
            places = {replica.position for replica in replicas}
            return len(replicas) == 4 and len(places) == 1 and len({module.digest() for module in modules}) == 1

        assert await world.until(there, within_s=300), roles.story()
        assert step() > began + 2  # they did not wait for it
        return roles.logs["slow"].recent(500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_whose_line_carries_a_gradient_a_step_arrives_though_a_state_takes_longer(
    tmp_path: Path, run: RunFile, seed: int
) -> None:
    torch.set_num_threads(1)
    log = run_virtual(join, seed, Roles(run, tmp_path / "peers", Device), seed=seed)
    assert [event["name"] for event in log].count("downloaded") == 1, log
    assert [event for event in log if event["name"] == "caught up"], log
