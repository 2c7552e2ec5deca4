"""A swarm with experts in virtual time: distant hosts, which fail a tenth of the requests, and trainers on fast lines.

The setting of Learning@home, section 4. Hosts, trainers, directory and calls are peerd's own code; delays and failures
are simulated.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import trio
from torch import Tensor

from peerd.core.errors import Refused
from peerd.experts.model.hosted_expert import HostedExpert
from peerd.experts.model.trunk import TrunkModule
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.role.role import RoleContext
from peerd.rpc.rpc import Answer, Incoming, Rpc
from peerd.run.grid import Uid
from peerd.run.runfile import (
    BatchSection,
    CheckpointSection,
    EvaluateSection,
    ExpertOptimizerSection,
    ExpertsSection,
    LimitsSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from roles.expert import ExpertRole
from roles.trainer import TrainerRole
from scripts.benchmarks._report import Figure, Report
from scripts.benchmarks._virtual_pipeline import booted
from tests.kit.local_experts import LocalExperts
from tests.worlds.roles.virtualroles import Roles
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.simnet import SimLine

FAILING = 0.1  # share of the requests to experts that fail
HOSTS, TRAINERS, LAYERS = 4, 4, 2
GRIDS = {4: [4], 16: [4, 4], 64: [8, 8]}
LOOKS = 20  # evaluations
TAIL = 5  # last evaluations, whose mean is the final result
ADAM: dict[str, Any] = {"name": "adamw", "beta1": 0.0, "beta2": 0.99}  # no momentum, since stale gradients act like it

# Evaluates the trunk with all experts as they are now. Returns a value for the curve.
Judge = Callable[[TrunkModule, Mapping[Uid, HostedExpert]], float]


@dataclass(frozen=True, slots=True)
class Weather:
    """Conditions of the network. `in_flight`: microbatches of all trainers; `delay_s`: round trip of a microbatch."""

    in_flight: int
    delay_s: float

    @property
    def text(self) -> str:
        return f"{self.in_flight} under way, {self.delay_s:g} s"


NEAR, FAR = Weather(16, 0.1), Weather(64, 1.0)


@dataclass(frozen=True, slots=True)
class Rates:
    """Learning rates of the trunk and of the experts, and the samples of a microbatch."""

    trunk: float
    experts: float
    microbatch: int


@dataclass(frozen=True, slots=True)
class Mixture:
    """One mixture under given conditions. `microbatches` counts those of all trainers together."""

    experts: int  # of each layer
    weather: Weather
    microbatches: int
    seed: int = 1

    def run(self, name: str, rates: Rates, experts: dict[str, Any], **sections: Any) -> RunFile:
        """A run with an asynchronous trunk. `sections` are its model and data; the rest is the same for all."""
        each = experts | {"grid": GRIDS[self.experts], "grace_s": 1.0}
        each |= {"checkpoint_updates": 1 << 20, "checkpoint_s": 3600.0}
        hosted, in_flight = 2 * LAYERS * self.experts // HOSTS, self.weather.in_flight // TRAINERS
        return RunFile(
            run=name,
            seed=self.seed,
            pipeline=PipelineSection(microbatch=rates.microbatch),
            optimizer=OptimizerSection(**ADAM, lr=rates.trunk, trunk="asynchronous"),
            batch=BatchSection(target_samples=8 * rates.microbatch),
            evaluate=EvaluateSection(every_steps=0),
            checkpoint=CheckpointSection(every_steps=0),
            experts=ExpertsSection(**each, optimizer=ExpertOptimizerSection(**ADAM, lr=rates.experts)),
            limits=LimitsSection(experts=hosted, microbatches_in_flight=in_flight),
            **sections,
        )

    def learn(self, run: RunFile, judge: Judge, trainer: type[TrainerRole] = TrainerRole) -> Curve:
        """Train in virtual time."""
        with tempfile.TemporaryDirectory() as folder:
            found = ExpertSwarm(run, self.weather, Path(folder), judge, trainer)
            return run_virtual(found.learn, self.microbatches, min(LOOKS, self.microbatches), seed=self.seed)


def learned(curve: Callable[[Mixture], Curve], mixtures: Sequence[Mixture]) -> dict[Mixture, Curve]:
    """Curves of all mixtures, computed in two processes."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        return dict(zip(mixtures, pool.map(curve, mixtures), strict=True))


def report(title: str, sections: Sequence[Sequence[Figure]], curves: Mapping[Mixture, Curve]) -> Report:
    """The figures and, as more keys, the curves."""
    extra = {
        "curves": {f"{one.experts} {one.weather.text}": [found.at, found.values] for one, found in curves.items()},
        "microbatches": next(iter(curves)).microbatches,
    }
    note = "in virtual time: real roles, hosts, directory and calls; a tenth of the requests to experts is refused"
    return Report(title, sections, note, extra)


class FailingRpc:
    """A peer's Rpc, which refuses a share of the calls to its experts."""

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
    """Role `expert` that fails a share of its requests."""

    def __init__(self, ctx: RoleContext) -> None:
        rng = random.Random(f"{ctx.run.seed if ctx.run else 0} {ctx.host.id}")
        super().__init__(replace(ctx, rpc=FailingRpc(ctx.rpc, rng)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Curve:
    """Results (`values`) after numbers of microbatches (`at`), and the trainers' status at the end (`told`)."""

    at: list[float]
    values: list[float]
    told: list[dict[str, Any]]
    seconds: float  # virtual

    @property
    def end(self) -> float:
        """Final result: the mean of the last evaluations."""
        return statistics.mean(self.values[-TAIL:])

    def staleness(self, key: str) -> list[Figure]:
        """Figures on the staleness of gradients when they are used."""
        experts = statistics.mean(trainer["experts"]["staleness"]["mean"] for trainer in self.told)
        trunk = statistics.mean(trainer["experts"]["trunk_staleness"]["mean"] for trainer in self.told)
        return [
            Figure(f"{key}_expert_stale", "  updates of others while it waits", experts, digits=1),
            Figure(f"{key}_trunk_stale", "  steps that the trunk's gradients are old", trunk, digits=1),
        ]


class ExpertSwarm:
    """The swarm of one run. `learn` trains it and returns its curve."""

    def __init__(
        self, run: RunFile, weather: Weather, folder: Path, judge: Judge, trainer: type[TrainerRole] = TrainerRole
    ) -> None:
        self.run, self.weather, self._judge, self._trainer = run, weather, judge, trainer
        self.roles = Roles(run, folder)

    async def learn(self, microbatches: int, looks: int) -> Curve:
        """Train until the trainers together have finished `microbatches`, with `looks` evaluations, shown on stderr."""
        round_trip_s = self.weather.delay_s / (2 * LAYERS)
        near, far = SimLine(latency_s=0.0025), SimLine(latency_s=round_trip_s / 2, jitter_s=round_trip_s / 10)
        async with booted(self.run.seed, near) as world:
            for number in range(HOSTS):
                await world.start(f"host{number}", line=far, program=self.roles.program(FailingHost))
            whole = LAYERS * len(self._places())
            assert await world.until(lambda: len(self._experts()) == whole, within_s=600), self.roles.story()
            for number in range(TRAINERS):
                await world.start(f"trainer{number}", line=near, program=self.roles.program(self._trainer))
            assert await world.until(self._is_ready, within_s=600), self.roles.story()
            began, at, values = trio.current_time(), [0.0], [self.result()]
            for look in range(1, looks + 1):
                goal = look * microbatches // looks
                assert await world.until(lambda goal=goal: self._flown() >= goal, within_s=3600), self.roles.story()
                at.append(float(self._flown()))
                values.append(self.result())
                self._tell(at[-1], trio.current_time() - began, values[-1])
            told = [role.status() for role in self.roles.of(self._trainer)]
            return Curve(at, values, told, trio.current_time() - began)

    def _tell(self, flown: float, virtual_s: float, result: float) -> None:
        text = f"{self.run.run}, {len(self._places())} experts a layer, {self.weather.text}"
        print(f"{text}: {result:.3f} after {flown:.0f} microbatches, {virtual_s:.1f} virtual s", file=sys.stderr)

    def result(self) -> float:
        """Evaluate the first trainer's trunk with all hosts' experts, as they are now."""
        return self._judge(self._first().replica.post.state.trunk.trunk, self._experts())

    def _first(self) -> Any:
        return self.roles.of(self._trainer)[0]

    def _is_ready(self) -> bool:
        replica = self._first().replica
        return replica.post is not None and replica.built

    def _flown(self) -> int:
        return sum(role._flights.counts.came_back for role in self.roles.of(self._trainer))

    def _experts(self) -> dict[Uid, HostedExpert]:
        hosts = self.roles.of(ExpertRole)
        return {uid: hosted.model for host in hosts for uid, hosted in host.host.experts.items()}

    def _places(self) -> range:
        sides = (self.run.experts or ExpertsSection()).grid
        return range(sides[0] * (sides[1] if len(sides) > 1 else 1))


def flown(
    run: RunFile, trunk: TrunkModule, experts: Mapping[Uid, HostedExpert], tokens: Tensor, targets: Tensor
) -> TrunkMicrobatch:
    """Send a batch forward through all layers, with all experts available and without training. Returns its flight."""
    network = LocalExperts(run)
    network.experts = dict(experts)
    flight = TrunkMicrobatch(trunk, tokens, targets, None)
    scores = flight.depart()
    while scores is not None:
        asks = flight.ask(network.choose(flight.layer, scores, trunk.section.top_k))
        scores = flight.go_on(network.forward(asks, flight.samples))
    return flight
