"""A stage mate that is stopped (SIGSTOP): it accepts connections and answers nothing. Steps pause once, for seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import trio

from tests.kit.virtual_time import virtual
from tests.worlds.roles.two_stages import MICROBATCH_S, STAGES, two_stage_run, two_stages
from tests.worlds.roles.virtualroles import PacedDevice, Roles

STOPPED_S, PAUSE_S = 20.0, 7.0
LOOK_S = 0.02


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.4])
@virtual
async def test_a_stopped_stage_mate_costs_one_pause_of_seconds(tmp_path: Path, after_s: float) -> None:
    roles = Roles(two_stage_run(tmp_path, "direct"), tmp_path / "roles", partial(PacedDevice, MICROBATCH_S))
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
