"""Chaos without malice: peers are killed, stand still, are cut off, leave and join at random; then all is mended.

From then on every peer takes part in new steps within a minute, whatever came together before. A case draws its run,
its swarm and its misfortunes from its number; `PEERD_CHAOS_CASES=200` tries so many. A failure tells what was done.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from peerd.core.errors import LocalError
from peerd.core.run.runfile import (
    AveragingSection,
    BatchSection,
    CheckpointSection,
    ModelSection,
    OptimizerSection,
    PipelineSection,
    RunFile,
)
from peerd.sim.clock import run_virtual
from peerd.sim.programs import swarm
from peerd.sim.world import World, WorldConfig
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.kit.virtualroles import PacedDevice, Roles, virtual_run
from tests.kit.world import home_line

CASES = range(int(os.environ.get("PEERD_CHAOS_CASES", "6")))
MISFORTUNES = 8
LAST_S = (3.0, 8.0, 14.0, 25.0, 40.0)
PAUSES_S = (0.0, 1.0, 5.0, 15.0)
LEAVES_WITHIN_S = 30.0
BACK_WITHIN_S = 60.0
STEPS = 4


class Chaos:
    """A swarm and its misfortunes, each drawn by `rng`."""

    def __init__(self, world: World, roles: Roles, rng: random.Random, stages: int) -> None:
        self._world, self._roles, self._rng, self._stages = world, roles, rng, stages
        self._names: list[str] = []
        self.told: list[str] = []

    async def begin(self) -> None:
        """Start the swarm: two peers a stage, or one more, and two trainers; of one stage, four replicas."""
        boot = await self._world.start("boot")
        self._world.bootstrap.append(boot.full_addr)
        for _ in range(2 * self._stages + self._rng.randrange(2) if self._stages > 1 else 0):
            await self._start("stage", StageRole)
        for _ in range(2 if self._stages > 1 else 4):
            await self._start("trainer", TrainerRole)
        assert await self._world.until(lambda: min(self.steps()) >= 3, within_s=BACK_WITHIN_S), self.story()

    async def _start(self, kind: str, role: type) -> None:
        name = f"{kind}{len(self._names)}"
        self._names.append(name)
        await self._world.start(name, program=self._roles.program(role))

    async def strike(self) -> None:
        """Let misfortunes come, some of them together, and mend all that is left to mend."""
        kinds = (self._kill, self._kill, self._stall, self._stall, self._cut, self._join, self._leave)
        async with trio.open_nursery() as nursery:
            for _ in range(MISFORTUNES):
                nursery.start_soon(self._rng.choice(kinds), self._rng.choice(self._names), self._rng.choice(LAST_S))
                await trio.sleep(self._rng.choice(PAUSES_S))
        self._world.net.heal()
        for name in self._names:
            self._world.net.resume(name)
        self._tell("all is mended")

    async def goes_on(self) -> None:
        """Wait until every peer takes part in new steps."""
        seen: set[int] = set()

        def on() -> bool:
            steps = self.steps()
            seen.add(max(steps))
            return len(steps) == len(self._names) and len(seen) > STEPS and max(steps) - min(steps) <= 1

        assert await self._world.until(on, within_s=BACK_WITHIN_S), self.story()

    def steps(self) -> list[int]:
        return [role.status()["step"] for role in self._roles.live.values()]

    def story(self) -> str:
        """Misfortunes so far, the status of each peer, and its last events."""
        stands = [f"{name}: {role.status()}" for name, role in sorted(self._roles.live.items())]
        return "\n".join([*self.told, *stands, self._roles.story()])

    def _tell(self, text: str) -> None:
        self.told.append(f"{trio.current_time():.1f} {text}")

    # --- misfortunes ------------------------------------------------------------------------------------------

    async def _kill(self, name: str, for_s: float) -> None:
        if self._world.nodes[name].up:
            silent = self._rng.random() < 0.5
            self._tell(f"{name} is killed{' silently' if silent else ''} for {for_s} s")
            await self._world.kill(self._world.nodes[name], silent=silent)
            await self._back(name, for_s)

    async def _back(self, name: str, after_s: float) -> None:
        await trio.sleep(after_s)
        await self._world.restart(self._world.nodes[name])

    async def _stall(self, name: str, for_s: float) -> None:
        self._tell(f"{name} stands still for {for_s} s")
        self._world.net.stall(name)
        await trio.sleep(for_s)
        self._world.net.resume(name)

    async def _cut(self, name: str, _for_s: float) -> None:
        other, both = self._rng.choice([one for one in self._names if one != name]), self._rng.random() < 0.5
        self._tell(f"{name} does not reach {other}{', nor the reverse' if both else ''}")
        self._world.net.block(name, other, both=both)
        await trio.lowlevel.checkpoint()

    async def _join(self, _name: str, _for_s: float) -> None:
        trains = self._stages == 1 or self._rng.random() < 0.3
        self._tell(f"a {'trainer' if trains else 'stage peer'} joins")
        await self._start("trainer" if trains else "stage", TrainerRole if trains else StageRole)

    async def _leave(self, name: str, for_s: float) -> None:
        role: Any = self._roles.live.get(name)
        if role is None or not self._world.nodes[name].up:
            return
        self._tell(f"{name} leaves for {for_s} s")
        node, patience = self._world.nodes[name], trio.move_on_after(LEAVES_WITHIN_S)
        gone = node.gone  # it may be killed meanwhile, and is brought back by that
        try:
            with patience:
                await role.leave()
        except* LocalError:
            assert gone.is_set() or not node.up, "only of a process that is gone, no call can be made"
        assert not patience.cancelled_caught, f"{name} does not come to leave\n{self.story()}"
        if node.up and not gone.is_set():
            await self._world.kill(node)
            await self._back(name, for_s)


def run_of(folder: Path, rng: random.Random, stages: int) -> RunFile:
    return virtual_run(
        folder,
        (40_000,),
        model=ModelSection(d_model=8, heads=1, layers=max(2, stages), context=8),
        pipeline=PipelineSection(stages=stages, microbatch=1, handover=rng.choice(["direct", "trainer"])),
        optimizer=OptimizerSection(name="adamw", lr=1e-3, delayed=rng.random() < 0.4),
        batch=BatchSection(target_samples=rng.choice([8, 24])),
        averaging=AveragingSection(sender_timeout_s=rng.choice([4.0, 10.0])),
        checkpoint=CheckpointSection(every_steps=rng.choice([0, 2, 4]), keep=2),
    )


async def mended(case: int, roles: Roles, rng: random.Random, stages: int) -> None:
    async with World(case, swarm(), WorldConfig(line=home_line)).running() as world:
        chaos = Chaos(world, roles, rng, stages)
        await chaos.begin()
        await chaos.strike()
        await chaos.goes_on()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_swarm_goes_on_after_misfortunes_of_all_kinds(tmp_path: Path, case: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(f"chaos {case}")
    stages = (2, 3, 1)[case % 3]
    run = run_of(tmp_path, rng, stages)
    print(f"case {case}: {stages} stages, {run.pipeline.handover}, delayed {run.optimizer.delayed}")
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, rng.choice([0.1, 0.3])))
    run_virtual(mended, case, roles, rng, stages, seed=case)
