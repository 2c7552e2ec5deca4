"""`peerd join`'s line: once a minute by the clock, with what moves or why nothing does."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from peerd.daemon.daemon import DaemonPlan
from peerd.run.runfile import RunFile
from peerd.status.snapshot import decode_status
from peerd.status.swarm_status import StandstillStatus, SwarmStatus
from peerd.status.view.progress_line import progress_line, tell_progress
from roles.backbone import BackboneRole

MOVING: dict[str, Any] = {
    "step": 1204,
    "total_steps": 10_000,
    "loss": 3.412,
    "samples_per_s": 214.3,
    "left_s": 7800.0,
    "shares": {"samples": 0.18, "brought": None, "bytes_aggregated": 0.0},
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "step 1,204 of 10,000 · loss 3.412 · 214 samples/s, mine 18 % · 2 h 10 min left"),
        (
            {"standstill": {"why": "stage 1 has no peers", "for_s": 40.0}, "left_s": None},
            "step 1,204 of 10,000 · loss 3.412 · stands still for 40 s: stage 1 has no peers",
        ),
        ({"loss": None, "shares": {}, "left_s": None}, "step 1,204 of 10,000 · 214 samples/s"),
        (
            {"own_wait": "the state of step 40 from a stage-mate", "loss": None, "left_s": None, "total_steps": None},
            "step 1,204 · 214 samples/s, mine 18 % · this peer waits: the state of step 40 from a stage-mate",
        ),
        ({"complete": True}, "step 1,204 of 10,000 · loss 3.412 · the run is complete"),
    ],
)
def test_the_line_says_how_it_goes(changes: dict[str, Any], line: str) -> None:
    assert progress_line(decode_status(MOVING | changes, SwarmStatus)) == line


def test_before_anything_is_known_it_says_that() -> None:
    still = StandstillStatus(why="stage 0 has no peers", for_s=61.0)
    assert progress_line(SwarmStatus(standstill=still)) == (
        "nothing of the run is known yet · stands still for 1 min 01 s: stage 0 has no peers"
    )


async def test_it_comes_once_a_minute_however_long_a_look_takes(autojump_clock: trio.testing.MockClock) -> None:
    told: list[float] = []

    class Slow:
        async def swarm(self) -> SwarmStatus:
            await trio.sleep(1.0)
            return decode_status(MOVING, SwarmStatus)

    began = trio.current_time()
    with trio.move_on_after(190.0):
        await tell_progress(Slow(), lambda line: told.append(round(trio.current_time() - began, 3)))
    assert told == [61.0, 121.0, 181.0]


def test_a_backbone_and_a_quiet_terminal_get_no_lines() -> None:
    class Trainer:
        name = "trainer"

    def tells(role: Any, level: str = "info", **changes: Any) -> bool:
        plan = DaemonPlan(
            roles=(role,), run=RunFile(run="x"), bootstrap=(), listen=(), data_dir=None, log_level=level, **changes
        )  # type: ignore[arg-type]
        return plan.tells_progress

    assert tells(Trainer)
    assert not tells(Trainer, "warn")
    assert not tells(Trainer, announce=lambda addr: None)
    assert not tells(BackboneRole)
