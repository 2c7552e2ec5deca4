"""The line that `peerd join` prints once a minute: step, loss and speed of the run, and this peer's share in it.

step 1,204 of 10,000 · loss 3.412 · 214 samples/s, mine 18 % · 2 h 10 min left
step 1,204 of 10,000 · stands still for 40 s: stage 1 has no peers
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import trio

from peerd.screen import units
from peerd.status.swarm_status import SwarmStatus
from peerd.status.view.swarm_words import left, own_share, position

PERIOD_S: Final = 60.0


class SwarmSource(Protocol):
    """Source of the swarm's part of a snapshot: the daemon's `StatusBoard`."""

    async def swarm(self) -> SwarmStatus: ...


async def tell_progress(board: SwarmSource, say: Callable[[str], None]) -> None:
    """Call `say` with the progress line every minute, until cancelled."""
    due = trio.current_time()
    while True:
        due += PERIOD_S
        await trio.sleep_until(due)
        say(progress_line(await board.swarm()))


def progress_line(swarm: SwarmStatus) -> str:
    """Format the swarm's part of a snapshot as one line."""
    first = position(swarm) if swarm.step is not None else "nothing of the run is known yet"
    return " · ".join([first, *_movement(swarm)])


def _movement(swarm: SwarmStatus) -> list[str]:
    told = [f"loss {units.loss(swarm.loss)}"] if units.known(swarm.loss) is not None else []
    if swarm.complete:
        return [*told, "the run is complete"]
    if swarm.standstill is not None:
        return [*told, f"stands still for {units.duration(swarm.standstill.for_s)}: {swarm.standstill.why}"]
    if swarm.step is not None:
        rate, part = units.rate(swarm.samples_per_s), own_share(swarm)
        told.append(rate if part is None else f"{rate}, mine {units.share(part)}")
    if left(swarm):
        told.append(left(swarm))
    if swarm.own_wait:
        told.append(f"this peer waits: {swarm.own_wait}")
    return told
