"""Chaos without malice: peers are killed, stand still, are cut off, slow down, leave and join; then all is mended.

From then on every peer takes part in new steps within a minute, whatever came together before; and what was made, by
whatever ways, is what plain torch makes of the same batches. A case draws its run, its swarm and its misfortunes from
its number; `PEERD_CHAOS_CASES=200` tries so many. A failure tells what was done.
"""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import torch
import trio

from peerd.run.check import check
from peerd.run.runfile import AccessSection, BoundarySection, RunFile
from tests.worlds.network.members import ORGANIZER
from tests.worlds.network.world import home_line
from tests.worlds.roles.chaos import Chaos, in_no_thread
from tests.worlds.roles.history import Histories
from tests.worlds.roles.virtualroles import PacedDevice, Roles, virtual_run
from tests.worlds.simulation.clock import run_virtual
from tests.worlds.simulation.programs import swarm
from tests.worlds.simulation.world import World, WorldConfig

CASES = range(int(os.environ.get("PEERD_CHAOS_CASES", "4")))


def run_of(folder: Path, rng: random.Random, stages: int, at_home: bool) -> RunFile:
    """A run as drawn that may be run, one in three with lossy codes; at home one in three with tokens."""
    while check(run := _drawn(folder, rng, stages, at_home)):
        pass
    return run


def _drawn(folder: Path, rng: random.Random, stages: int, at_home: bool) -> RunFile:
    lossy = rng.random() < 1 / 3
    return virtual_run(
        folder,
        (40_000,),
        model={"d_model": 8, "heads": 1, "layers": max(2, stages), "context": 8, "dtype": "float64"},
        pipeline={
            "stages": stages,
            "microbatch": 1,
            "placement": rng.choice(["load", "network"]),
            "boundary": BoundarySection(code=rng.choice(["auto", "bf16", "int8"]) if lossy else "none"),
        },
        optimizer={"name": rng.choice(["sgd", "adamw"]), "lr": 1e-3, "delayed": rng.random() < 0.3},
        batch={"target_samples": rng.choice([8, 24])},
        averaging={
            "code": rng.choice(["none", "fp16", "dynamic8", "powersgd"]) if lossy else "none",
            "sender_timeout_s": rng.choice([4.0, 10.0]),
            "group_size": rng.choice([0, 0, 3]),
        },
        checkpoint={"every_steps": rng.choice([0, 2, 4]), "keep": 2},
        limits={"microbatches_in_flight": rng.choice([0, 0, 4])},
        access=access_of(rng, at_home),
    )


def access_of(rng: random.Random, at_home: bool) -> AccessSection:
    """At home one in three with tokens."""
    if at_home and rng.random() < 1 / 3:
        return AccessSection(allow="tokens", organizer=ORGANIZER.peer_id.text)
    return AccessSection()


async def mended(case: int, roles: Roles, rng: random.Random, histories: Histories, at_home: bool) -> str:
    """Faults in what was made, and the story with them; "": there are none."""
    async with World(case, swarm(), WorldConfig(line=home_line)).running() as world:
        chaos = Chaos(world, roles, rng, at_home)
        await chaos.run()
        faults = histories.faults(roles.run, chaos.states())
        return "\n".join([*faults, chaos.story()] if faults else [])


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("at_home", [False, True], ids=["public", "at home"])
def test_a_swarm_goes_on_exactly_after_misfortunes_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: int, at_home: bool
) -> None:
    torch.set_num_threads(1)
    rng = random.Random(f"chaos {case} {at_home}")
    stages = (2, 3, 1)[case % 3]
    run = run_of(tmp_path, rng, stages, at_home)
    print(f"case {case}: {run.pipeline}, {run.averaging}, {run.optimizer.name}, delayed {run.optimizer.delayed}")
    roles = Roles(run, tmp_path / "peers", partial(PacedDevice, rng.choice([0.1, 0.3])))
    monkeypatch.setattr(trio.to_thread, "run_sync", in_no_thread)
    histories = Histories()
    histories.watch(monkeypatch)
    assert run_virtual(mended, case, roles, rng, histories, at_home, seed=case) == ""
