"""Chaos among hosts of experts and trainers of the trunk between them: then all is mended, and within two minutes each
expert has one host, and all trainers take part in new steps. As `test_chaos`.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
import trio

from peerd.run.runfile import ExpertsSection, RunFile
from roles.expert import ExpertRole
from roles.trainer import TrainerRole
from tests.sim.test_chaos import CASES, access_of
from tests.worlds.network.world import home_line
from tests.worlds.roles.chaos import STEPS, Chaos, in_no_thread
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

HOSTS, TRAINERS, EXPERTS, ROOM = 4, 2, 8, 4
BACK_WITHIN_S = 120.0


class ExpertChaos(Chaos):
    """Hosts with room for twice the experts, and trainers; either may be hit."""

    async def begin(self) -> None:
        """Start the swarm, until all experts are hosted and all trainers train."""
        await self._boot()
        for _ in range(HOSTS):
            await self._start("host", ExpertRole)
        assert await self._world.until(lambda: self.owners() == [1] * EXPERTS, within_s=BACK_WITHIN_S), self.story()
        for _ in range(TRAINERS):
            await self._start("trainer", TrainerRole)
        assert await self._world.until(lambda: min(self.steps()) >= 3, within_s=BACK_WITHIN_S), self.story()

    def owners(self) -> list[int]:
        """Counts of hosts, one for each expert that has any."""
        hosts = [role.host for role in self._roles.of(ExpertRole)]
        every = {uid for host in hosts for uid in host.experts}
        return [sum(uid in host.experts for host in hosts) for uid in every]

    async def goes_on(self) -> None:
        """Wait until all are back, each expert has one host, and every trainer takes part in new steps."""
        seen: set[int] = set()

        def on() -> bool:
            steps = self.steps()
            if self.owners() != [1] * EXPERTS or self._parted():
                seen.clear()
            seen.add(max(steps, default=0))
            here = self._roles.live.keys() >= set(self._names)
            return here and len(seen) > STEPS and max(steps) - min(steps) <= 1

        assert await self._world.until(on, within_s=BACK_WITHIN_S), f"{self.owners()}\n{self.story()}"

    async def _join(self, _name: str, _for_s: float) -> None:
        trains = self._rng.random() < 0.3
        self._tell(f"a {'trainer' if trains else 'host'} joins")
        await self._start(*(("trainer", TrainerRole) if trains else ("host", ExpertRole)))


def run_of(folder: Path, rng: random.Random, at_home: bool, asynchronous: bool) -> RunFile:
    """A run with experts, as drawn. `asynchronous`: its trunk is."""
    delayed = rng.random() < 0.5 and not asynchronous
    trunk: Literal["synchronous", "asynchronous"] = "asynchronous" if asynchronous else "synchronous"
    return virtual_run(
        folder,
        (40_000,),
        model={"d_model": 8, "heads": 1, "layers": 2, "context": 8},
        optimizer={"name": "adamw", "lr": 1e-3, "delayed": delayed, "trunk": trunk},
        batch={"target_samples": 8},
        checkpoint={"every_steps": rng.choice([0, 4]), "keep": 2},
        experts=ExpertsSection(
            block="ffn", grid=[2, 2], top_k=2, announce_s=2.0, timeout_s=2.0, checkpoint_updates=rng.choice([2, 20])
        ),
        limits={"experts": ROOM, "microbatches_in_flight": 8},  # as many as a batch has
        access=access_of(rng, at_home),
    )


async def mended(case: int, roles: Roles, rng: random.Random, at_home: bool) -> list[int]:
    """The hosts of each expert in the end."""
    async with World(case, swarm(), WorldConfig(line=home_line)).running() as world:
        chaos = ExpertChaos(world, roles, rng, at_home)
        await chaos.run()
        return chaos.owners()


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_home", [False, True], ids=["public", "at home"])
def test_every_expert_has_one_host_after_misfortunes_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: int, at_home: bool
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(trio.to_thread, "run_sync", in_no_thread)
    rng = random.Random(f"expert chaos {case} {at_home}")
    run = run_of(tmp_path, rng, at_home, case % 2 == 1)
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, 0.1))
    assert run_virtual(mended, case, roles, rng, at_home, seed=case) == [1] * EXPERTS
