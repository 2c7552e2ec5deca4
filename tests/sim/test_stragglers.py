"""A stage peer whose device stands still for a while, though its links live: late calls go to its mate as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from tests.kit.amount import few
from tests.kit.virtual_time import virtual
from tests.worlds.roles.two_stages import MICROBATCH_S, STAGES, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("handover", "stage"),
    few([(mode, stage) for mode in ("direct", "trainer") for stage in (0, 1)], ("direct", 1)),
)
@pytest.mark.thorough
@virtual
async def test_a_device_that_stands_still_costs_a_step_seconds_and_not_a_minute(
    tmp_path: Path, handover: str, stage: int
) -> None:
    roles = Roles(two_stage_run(tmp_path, handover), tmp_path / "roles", StallingDevice)
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
