"""Rebalancing in a live swarm in virtual time, with real stage peers that are killed and join, and a real conductor.

Stage roles and a trainer train a small model in four equal stages on equal devices. Peers are killed and others join at
random times; sometimes four are killed at once. Since each second of a peer costs some milliseconds of processor time,
only --full runs sixty peers for eight hours with 7.5 changes per hour, as in `rebalance`; otherwise fewer peers run for
a shorter time, with faster steps and more changes. Every few seconds, the capacity of the weakest stage is compared
with the best possible for the same peers. `kept` is the share over the whole time. `used` is the share that steps used;
in the rest, stages wait for each other at the beginning and end of steps. `none` is the same swarm with
`pipeline.placement: fixed`, where newcomers still choose the weakest stage. At the end, the parameters are compared
with those of a plain torch process that made the same steps. Costs that are not measured are reduced: idle connections
are checked every five minutes, and few peers store the directory's records.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import msgspec
import pytest
import torch
import trio

from peerd.dht.dht import DhtConfig
from peerd.dht.node.node_state import KademliaConfig
from peerd.run.runfile import BatchSection, PipelineSection, RunFile
from peerd.wire.host.host import HostConfig
from peerd.wire.link.config import LinkConfig
from peerd.wire.yamux.stream import YamuxConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from scripts.benchmarks._report import Figure, Report
from tests.kit.exact import Batches, differences, plain_torch, run_file, write_texts
from tests.worlds.network.world import home_world
from tests.worlds.roles.virtualroles import PacedDevice, Roles
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World

STAGES: Final = 4
A_PEER: Final = 4  # microbatches of a step per peer of a stage
HOUR_S: Final = 3600.0
BURST: Final = 4  # kills at once, in one of four cases
IDLE_S: Final = 300.0  # between checks of an idle connection
QUIET: Final = swarm(
    HostConfig(link=LinkConfig(yamux=YamuxConfig(keepalive_s=IDLE_S, dead_after_s=3 * IDLE_S))),
    DhtConfig(node=KademliaConfig(k=8, wide=(), copies=2, enough=1, spare=0)),
)


@dataclass(frozen=True, slots=True)
class Live:
    """Settings of one simulation."""

    peers: int = 60
    hours: float = 8.0
    changes_per_hour: float = 7.5  # kills, and as many arrivals
    microbatch_s: float = 20.0
    placement: str = "load"
    seed: int = 1

    def run_file(self, folder: Path) -> RunFile:
        run = run_file("sgd", "float64", write_texts(folder))
        model = msgspec.structs.replace(run.model, d_model=64, heads=1, layers=STAGES, context=8)
        optimizer = msgspec.structs.replace(run.optimizer, total_steps=0)
        pipeline = PipelineSection(stages=STAGES, microbatch=1, placement=self.placement)  # type: ignore[arg-type]
        batch = BatchSection(target_samples=A_PEER * self.peers // STAGES)
        changes = {"model": model, "optimizer": optimizer, "pipeline": pipeline, "batch": batch}
        return msgspec.structs.replace(run, run="live", **changes)


@dataclass(slots=True)
class Seen:
    """Results of one simulation."""

    done_s: float = 0.0  # peer seconds of the weakest stage
    best_s: float = 0.0  # the same for the best possible division
    used_s: float = 0.0  # peer seconds of each stage that steps used
    steps: int = 0
    moves: int = 0
    failed: int = 0
    deaths: int = 0
    longest_step_s: float = 0.0
    faults: list[str] = field(default_factory=list)

    @property
    def kept(self) -> float:
        return 100.0 * self.done_s / max(self.best_s, 1e-9)

    @property
    def used(self) -> float:
        return 100.0 * self.used_s / max(self.best_s, 1e-9)


class Simulation:
    """A swarm that runs for some virtual hours."""

    def __init__(self, live: Live, folder: Path) -> None:
        self._live, self._rng = live, random.Random(f"live {live.seed}")
        self._roles = Roles(live.run_file(folder), folder / "peers", lambda: PacedDevice(live.microbatch_s))
        self._joined = 0
        self.seen = Seen()

    async def run(self, batches: Batches) -> None:
        """Run the simulation. `batches` records the batches of all steps."""
        async with home_world(self._live.seed) as world:
            for _ in range(self._live.peers):
                await self._join(world)
            await world.start("trainer", program=self._roles.program(TrainerRole, QUIET))
            await world.until(lambda: min(self._roles.steps(), default=0) >= 2, within_s=3600.0)
            with trio.move_on_after(self._live.hours * HOUR_S):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._watch)
                    nursery.start_soon(self._deaths, world)
                    nursery.start_soon(self._arrivals, world)
            self._check(batches)

    async def _join(self, world: World) -> None:
        name = f"peer{self._joined:03d}"
        self._joined += 1
        await world.start(name, program=self._roles.program(StageRole, QUIET))

    async def _deaths(self, world: World) -> None:
        while True:
            size = BURST if self._rng.random() < 1 / BURST else 1
            await trio.sleep(self._rng.expovariate(self._live.changes_per_hour / HOUR_S) * size)
            for _ in range(size):
                living = sorted(name for name, role in self._roles.live.items() if isinstance(role, StageRole))
                lost = self._rng.choice(living)
                self.seen.deaths += 1
                await world.kill(next(node for node in world.living() if node.name == lost))

    async def _arrivals(self, world: World) -> None:
        while True:
            await trio.sleep(self._rng.expovariate(self._live.changes_per_hour / HOUR_S))
            await self._join(world)

    async def _watch(self) -> None:
        """Record the stages' capacity and steps every few seconds."""
        every_s, at, stepped_at = 5.0, 0, trio.current_time()
        while True:
            await trio.sleep(every_s)
            posts = [post for role in self._roles.of(StageRole) for post in role.posts if post.state.built]
            newest = max((post.step for post in posts), default=0)
            if newest > at:
                steps = newest - at if at else 0
                self.seen.steps += steps
                self.seen.used_s += steps * self._roles.run.batch.target_samples * self._live.microbatch_s
                at, stepped_at = newest, trio.current_time()
            self.seen.longest_step_s = max(self.seen.longest_step_s, trio.current_time() - stepped_at)
            serving = Counter(post.stage for post in posts if post.step >= newest - 1)
            peers = len(self._roles.of(StageRole))
            self.seen.done_s += every_s * min(serving[stage] for stage in range(STAGES))
            self.seen.best_s += every_s * (peers // STAGES)

    def _check(self, batches: Batches) -> None:
        run, seen = self._roles.run, self.seen
        events = [event for log in self._roles.logs.values() for event in log.recent(200)]
        seen.moves = sum(event["name"] == "stage.moved" for event in events)
        seen.failed = sum(event["name"] == "stage.move_failed" for event in events)
        modules = [post.state.served.module for role in self._roles.of(StageRole) for post in role.posts]
        newest = max(module.step for module in modules)
        whole = run.batch.target_samples // run.pipeline.microbatch
        latest = [module for module in modules if module.step == newest]
        seen.faults += batches.faults(whole, newest)
        if len({module.stage for module in latest}) == STAGES:
            seen.faults += differences(run, plain_torch(run, batches, newest), latest, newest)
        else:
            seen.faults.append("the end came in the midst of a step")


def simulate(live: Live) -> Seen:
    """Run one simulation. The same seed gives the same result."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        simulation, batches = Simulation(live, Path(folder)), Batches()
        batches.watch(patch)
        run_virtual(simulation.run, batches, seed=live.seed)
        return simulation.seen


def measure(full: bool) -> Report:
    live = Live() if full else Live(peers=16, hours=0.5, changes_per_hour=40.0, microbatch_s=5.0)
    # Each simulation has its own process with one thread, since more threads slow down such a small model.
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        runs = dict(zip(("ours", "none"), pool.map(simulate, [live, replace(live, placement="fixed")]), strict=True))
    sections = []
    for name, seen in runs.items():
        faults = "steps and parameters that differ from those of plain torch"
        sections.append(
            [
                Figure(f"{name}_kept", f"{name}: capacity kept", seen.kept, "%", 2),
                Figure(f"{name}_used", "  used", seen.used, "%", 2),
                Figure(f"{name}_steps", "  steps", seen.steps, "", 0),
                Figure(f"{name}_deaths", "  deaths", seen.deaths, "", 0),
                Figure(f"{name}_moves", "  moves", seen.moves, "", 0),
                Figure(f"{name}_longest_step_s", "  longest step", seen.longest_step_s, "s", 0),
                Figure(f"{name}_faults", f"  {faults}", len(seen.faults), "", 0, at_most=0),
            ]
        )
    size = f"{live.peers} peers, {live.hours} h, {live.changes_per_hour:.0f} deaths and arrivals an hour"
    return Report("Rebalancing, live", sections, f"{size}; --full: 60 peers, 8 h, two hours of two cores")
