"""A swarm that learns digits in virtual time: hosts of experts far away, of whose answers some fail, and trainers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trio
from torch import Tensor

from benchmarks._digit_trunk import PIXELS, DigitStream, accuracy
from peerd.core.errors import Refused
from peerd.core.run.runfile import (
    BatchSection,
    CheckpointSection,
    DataSection,
    EvaluateSection,
    ExpertOptimizerSection,
    ExpertsSection,
    LimitsSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.role import RoleContext
from peerd.service.rpc.rpc import Answer, Incoming, Rpc
from peerd.sim.programs import swarm
from peerd.sim.simnet import SimLine
from peerd.sim.world import World, WorldConfig
from peerd.training.trainer_data import TrainerData
from roles.expert import ExpertRole
from roles.trainer import TrainerRole
from tests.worlds.roles.virtualroles import Roles

FAILING = 0.1  # of the requests to experts
HOSTS, TRAINERS, LAYERS = 4, 4, 2
MICROBATCH = 32
GRIDS = {4: [4], 16: [4, 4], 64: [8, 8]}


@dataclass(frozen=True, slots=True)
class Weather:
    """What the trainers live with. `in_flight`: microbatches of all together; `delay_s`: of each, there and back."""

    in_flight: int
    delay_s: float


NEAR, FAR = Weather(16, 0.1), Weather(64, 1.0)


def run_of(experts: int, weather: Weather, seed: int) -> RunFile:
    adam = {"name": "adamw", "beta1": 0.0, "beta2": 0.99}  # what is so stale has momentum enough
    return RunFile(
        run="digits",
        seed=seed,
        model=ModelSection(d_model=32, heads=1, layers=LAYERS, context=PIXELS),
        pipeline=PipelineSection(microbatch=MICROBATCH),
        optimizer=OptimizerSection(**adam, lr=1e-3, trunk="asynchronous"),
        batch=BatchSection(target_samples=8 * MICROBATCH),
        data=DataSection(shuffle_buffer=1),
        evaluate=EvaluateSection(every_steps=0),
        checkpoint=CheckpointSection(every_steps=0),
        experts=ExpertsSection(
            grid=GRIDS[experts],
            hidden=32,
            balance=0.05 / PIXELS,  # the loss is a mean over 64 tokens, of which one is predicted
            grace_s=1.0,
            checkpoint_updates=1 << 20,
            checkpoint_s=3600.0,
            optimizer=ExpertOptimizerSection(**adam, lr=3e-4),
        ),
        limits=LimitsSection(
            experts=2 * LAYERS * experts // HOSTS, microbatches_in_flight=weather.in_flight // TRAINERS
        ),
    )


class FailingRpc:
    """A peer's calls, which refuses a share of those that others make to its experts."""

    def __init__(self, rpc: Rpc, rng: random.Random) -> None:
        self._rpc, self._rng = rpc, rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rpc, name)

    def serve(self, method: str, request: Any, handler: Callable[[Any], Awaitable[Answer[Any]]], **more: Any) -> None:
        async def fails(call: Incoming[Any]) -> Answer[Any]:
            if self._rng.random() < FAILING:
                raise Refused("this request fails, as a tenth of them do")
            return await handler(call)

        self._rpc.serve(method, request, fails if method.startswith("expert/1/") else handler, **more)


class FailingHost(ExpertRole):
    """Role `expert` on a peer that fails now and then."""

    def __init__(self, ctx: RoleContext) -> None:
        rng = random.Random(f"{ctx.run.seed if ctx.run else 0} {ctx.host.id}")
        super().__init__(replace(ctx, rpc=FailingRpc(ctx.rpc, rng)))  # type: ignore[arg-type]


class DigitData(TrainerData):
    """A trainer's text that is digits."""

    samples: Tensor

    def _open(self) -> Any:
        return DigitStream(self.samples, self._ctx.host.id.text)

    async def prompt_digests(self) -> dict[str, str]:
        return {}


class DigitTrainer(TrainerRole):
    """Role `trainer`, whose samples are digits."""

    samples: Tensor

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        self._data = DigitData(ctx)
        self._data.samples = self.samples


@dataclass(frozen=True, slots=True)
class Curve:
    """Accuracy in percent at numbers of microbatches; and what status tells in the end."""

    at: list[float]
    values: list[float]
    told: list[dict[str, Any]]
    seconds: float  # virtual


class DigitSwarm:
    """The swarm of one run; `learn` gives its curve."""

    def __init__(self, run: RunFile, weather: Weather, folder: Path, train: Tensor, test: Tensor) -> None:
        self.run, self.weather, self._test = run, weather, test
        self.roles = Roles(run, folder)
        self._trainer = type("DigitTrainer", (DigitTrainer,), {"samples": train})

    async def learn(self, microbatches: int, looks: int, tell: Callable[[str], None] = lambda text: None) -> Curve:
        """Train until all trainers together have flown so many microbatches."""
        round_trip_s = self.weather.delay_s / (2 * LAYERS)
        near, far = SimLine(latency_s=0.0025), SimLine(latency_s=round_trip_s / 2, jitter_s=round_trip_s / 10)
        async with World(self.run.seed, swarm(), WorldConfig()).running() as world:
            boot = await world.start("boot", line=near)
            world.bootstrap.append(boot.full_addr)
            for number in range(HOSTS):
                await world.start(f"host{number}", line=far, program=self.roles.program(FailingHost))
            whole = LAYERS * len(self._experts_wanted())
            assert await world.until(lambda: len(self._experts()) == whole, within_s=600), self.roles.story()
            for number in range(TRAINERS):
                await world.start(f"trainer{number}", line=near, program=self.roles.program(self._trainer))
            began, at, values = trio.current_time(), [0.0], [self.accuracy()]
            for look in range(1, looks + 1):
                goal = look * microbatches // looks
                assert await world.until(lambda goal=goal: self._flown() >= goal, within_s=3600), self.roles.story()
                at.append(float(self._flown()))
                values.append(self.accuracy())
                tell(f"{at[-1]:.0f} microbatches, {trio.current_time() - began:.1f} s: {values[-1]:.1f} %")
            told = [role.status() for role in self.roles.of(DigitTrainer)]
            return Curve(at, values, told, trio.current_time() - began)

    def accuracy(self) -> float:
        """Of the trunk that the first trainer has, and all hosts' experts, as they are now."""
        trainer = self.roles.of(DigitTrainer)[0]
        if trainer.replica.post is None or not trainer.replica.built:
            return 0.0
        return accuracy(self.run, trainer.replica.post.state.trunk.trunk, self._experts(), self._test)

    def _flown(self) -> int:
        return sum(role._flights.counts.came_back for role in self.roles.of(DigitTrainer))

    def _experts(self) -> dict[Any, Any]:
        hosts = self.roles.of(ExpertRole)
        return {uid: hosted.model for host in hosts for uid, hosted in host.host.experts.items()}

    def _experts_wanted(self) -> range:
        sides = (self.run.experts or ExpertsSection()).grid
        return range(sides[0] * (sides[1] if len(sides) > 1 else 1))
