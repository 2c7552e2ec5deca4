"""Orders to members: how long a move may take where it takes long."""

from __future__ import annotations

from typing import Any, cast

import trio
from trio.testing import MockClock

from peerd.core.errors import TooSlow
from peerd.core.messages.swarm import Moved, Position
from peerd.machine.swarm.events import ConductorConfig, Event, MoveEnded, SendMove
from peerd.service.conductor.orders import ConductingConfig, Orders, Reign
from peerd.sim.heapsim import StandInSigner

POST = f"{StandInSigner(b'm' * 32).peer_id.text}/0"
NOW = Position(5, b"now")


class SlowDisk:
    """Calls to a member that reads a checkpoint for so long; a further order waits for the same reading."""

    def __init__(self, takes_s: float) -> None:
        self._done_at = trio.current_time() + takes_s

    async def call(self, peer: object, method: str, body: object, kind: object, *, timeout_s: float) -> Any:
        with trio.move_on_after(timeout_s):
            await trio.sleep_until(self._done_at)
            return type("Replied", (), {"body": Moved(NOW)})
        raise TooSlow("the deadline passed")


async def test_a_member_that_is_slow_gets_twice_as_long_with_each_order(autojump_clock: MockClock) -> None:
    ended: list[Event] = []
    config = ConductingConfig(bytes(16), ConductorConfig(stages=1, microbatches=1), 8, 60.0)
    orders, reign = Orders(config, cast(Any, SlowDisk(takes_s=150.0))), Reign(1, 4, ended.append)
    for _ in range(2):
        await orders.move(SendMove(POST, NOW, commit=False), reign)
    assert ended == [MoveEnded(POST, None, slow=True), MoveEnded(POST, NOW)]
    assert trio.current_time() == 150.0
