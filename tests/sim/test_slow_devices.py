"""Devices that take long for a microbatch, as old machines do: nobody is given up, and the swarm keeps its pace."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.kit.virtual_time import virtual
from tests.worlds.roles.two_stages import two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles

MICROBATCH_S = 20.0
STEPS, PEERS, STAGES = 2, 2, 2  # peers: of each stage


@pytest.mark.slow
@virtual
async def test_slow_devices_are_waited_for_and_nobody_has_to_do_a_microbatch_again(tmp_path: Path) -> None:
    run = two_stage_run(tmp_path, "direct")
    roles = Roles(run, tmp_path / "roles", lambda: PacedDevice(MICROBATCH_S))
    async with two_stages(roles) as world:
        since = trio.current_time()
        made = await world.until(lambda: min(roles.steps(), default=0) >= STEPS, within_s=10_000)
        assert made, roles.story()
        (took_s, status) = trio.current_time() - since, roles.live["trainer"].status()
    step_s = MICROBATCH_S * (run.batch.target_samples / PEERS + STAGES - 1)
    print(f"{took_s / step_s:.2f} steps' time for {STEPS} steps, retries: {status['retries']}")
    assert status["retries"] == 0
    assert status["microbatches"] == status["microbatches"] | {"redone": 0, "requeued": 0, "lost": 0}  # type: ignore
    assert took_s <= 1.5 * STEPS * step_s, roles.story()
