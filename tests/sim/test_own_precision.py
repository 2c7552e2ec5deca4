"""Peers that compute in different precisions train together, and hold the same parameters."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from trio.testing import MockClock

from peerd.run.runfile import BatchSection, LimitsSection, fingerprint
from roles.stage import StageRole
from roles.trainer import TrainerRole
from tests.worlds.network.world import home_world
from tests.worlds.roles.misfortunes import public_ip
from tests.worlds.roles.virtualroles import Roles, virtual_run

STEPS = 6


async def test_a_stage_of_two_precisions_keeps_one_state(tmp_path: Path, autojump_clock: MockClock) -> None:
    run = virtual_run(tmp_path, (20_000,), stages=2, batch=BatchSection(target_samples=8))
    half = msgspec.structs.replace(run, limits=LimitsSection(precision="bf16"))
    assert fingerprint(half) == fingerprint(run), "it is each peer's own matter"
    roles = Roles(run, tmp_path / "peers")
    async with home_world() as world:
        for number in range(4):
            program = roles.program(StageRole, run=half if number % 2 else run)
            await world.start(f"stage{number}", program=program, ip=public_ip(number))
        await world.start("trainer", program=roles.program(TrainerRole))
        done = await world.until(lambda: len(roles.steps()) == 4 and min(roles.steps()) >= STEPS, within_s=120)
        assert done, roles.story()
        served = {name: roles.live[name].post for name in (f"stage{number}" for number in range(4))}
        computes = {name: post.state.served.module._precision._dtype for name, post in served.items()}
        assert set(computes.values()) == {None, torch.bfloat16}
        for stage in range(2):
            there = [post for post in served.values() if post.stage == stage and post.state.position.step >= STEPS]
            assert len({(post.state.position, post.state.served.module.digest()) for post in there}) == 1
            assert sum(post.serving.samples > 0 for post in there) == len(there) == 2
