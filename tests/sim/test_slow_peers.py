"""Slow peers of two stages, in virtual time: devices that take long for a microbatch, one that stands still for a while
though its links live, and a stage mate that is stopped (SIGSTOP): it accepts connections and answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from tests.kit.virtual_time import virtual
from tests.worlds.roles.two_stages import MICROBATCH_S, STAGES, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles

pytestmark = pytest.mark.slow

OLD_MACHINE_S = 20.0
STEPS, PEERS = 2, 2  # of each stage


@virtual
async def test_slow_devices_are_waited_for_and_nobody_has_to_do_a_microbatch_again(tmp_path: Path) -> None:
    run = two_stage_run(tmp_path)
    roles = Roles(run, tmp_path / "roles", lambda: PacedDevice(OLD_MACHINE_S))
    async with two_stages(roles) as world:
        since = trio.current_time()
        made = await world.until(lambda: min(roles.steps(), default=0) >= STEPS, within_s=10_000)
        assert made, roles.story()
        (took_s, status) = trio.current_time() - since, roles.live["trainer"].status()
    step_s = OLD_MACHINE_S * (run.batch.target_samples / PEERS + 1)
    print(f"{took_s / step_s:.2f} steps' time for {STEPS} steps, retries: {status['retries']}")
    assert status["retries"] == 0
    assert status["microbatches"] == status["microbatches"] | {"redone": 0, "requeued": 0, "lost": 0}  # type: ignore
    assert took_s <= 1.5 * STEPS * step_s, roles.story()


T = TypeVar("T")

STALL_S = 60.0
WORK = {"forward", "backward"}


class StallingDevice(PacedDevice):
    """One that begins no forward or backward until a time, if there is one; the rest it does."""

    def __init__(self) -> None:
        super().__init__(MICROBATCH_S)
        self.until = 0.0

    async def run(self, job: Callable[[], T], *, name: str, cost_s: float = 0.0, urgent: bool = False) -> T:
        if name in WORK:
            await trio.sleep_until(self.until)
        return await super().run(job, name=name, cost_s=cost_s, urgent=urgent)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.thorough
@virtual
async def test_a_device_that_stands_still_costs_a_step_seconds_and_not_a_minute(tmp_path: Path, stage: int) -> None:
    roles = Roles(two_stage_run(tmp_path), tmp_path / "roles", StallingDevice)
    async with two_stages(roles) as world:

        def at(step: int) -> Callable[[], bool]:
            return lambda: max(roles.steps(), default=0) >= step

        assert await world.until(at(4), within_s=120), roles.story()
        stalled = next(
            name
            for name, number in STAGES.items()
            if number == stage and not roles.live[name]._services.conducting.acting
        )
        device = roles.live[stalled].post.serving._worker
        device.until = trio.current_time() + STALL_S
        longest = 0.0
        while trio.current_time() < device.until:
            before = trio.current_time()
            assert await world.until(at(max(roles.steps()) + 1), within_s=2 * STALL_S), roles.story()
            longest = max(longest, trio.current_time() - before)
        assert roles.live["trainer"].status()["microbatches"]["lost"] == 0, roles.story()
        longest_s = longest
    print(f"the longest step took {longest_s:.1f} s")
    assert longest_s < STALL_S / 3


STOPPED_S, PAUSE_S = 20.0, 7.0
LOOK_S = 0.02


@pytest.mark.thorough
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
@virtual
async def test_a_stopped_stage_mate_costs_one_pause_of_seconds(tmp_path: Path, after_s: float) -> None:
    roles = Roles(two_stage_run(tmp_path), tmp_path / "roles", partial(PacedDevice, MICROBATCH_S))
    async with two_stages(roles) as world:
        assert await world.until(lambda: min(roles.steps(), default=0) >= 5, within_s=120), roles.story()
        stopped = [name for name in STAGES if STAGES[name] == 1 and name not in roles.conductors()][-1]
        step = max(roles.steps())
        assert await world.until(lambda: max(roles.steps()) > step, within_s=30, step_s=LOOK_S)
        made_at, step = trio.current_time(), max(roles.steps())
        await trio.sleep(after_s)
        world.net.stall(stopped)
        until, longest = trio.current_time() + STOPPED_S, 0.0
        while trio.current_time() < until:
            await trio.sleep(LOOK_S)
            longest = max(longest, trio.current_time() - made_at)
            if max(roles.steps()) > step:
                made_at, step = trio.current_time(), max(roles.steps())
        longest_s = longest
    print(f"the longest pause took {longest_s:.1f} s")
    assert longest_s <= PAUSE_S, roles.conductor_notes()
