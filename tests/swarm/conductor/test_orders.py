"""Orders to members: who is slow, by this peer's clock, and who fails."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from peerd.core.errors import TooSlow
from peerd.messages.swarm import Position
from peerd.swarm.conductor.orders import ConductingConfig, OrderContext, Orders
from peerd.swarm.events import ConductorConfig, Event, MoveEnded, SendMove
from tests.worlds.simulation.heapsim import StandInSigner

POST = f"{StandInSigner(b'm' * 32).peer_id.text}/0"


class Member:
    """Calls to a member that fails after so long; it may say itself that it was too slow."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s

    async def call(self, peer: object, method: str, body: object, kind: object, *, timeout_s: float) -> Any:
        await trio.sleep(min(self._after_s, timeout_s))
        raise TooSlow("the deadline passed")


@pytest.mark.parametrize(("after_s", "slow"), [(0.1, False), (100.0, True)])
async def test_a_member_is_slow_by_this_peers_clock_and_not_by_its_own_word(
    autojump_clock: MockClock, after_s: float, slow: bool
) -> None:
    ended: list[Event] = []
    config = ConductingConfig(bytes(16), ConductorConfig(stages=1, microbatches=1), 8, 60.0)
    orders = Orders(config, cast(Any, Member(after_s)))
    await orders.move(SendMove(POST, Position(5, b"now"), commit=False), OrderContext(1, 4, ended.append))
    assert ended == [MoveEnded(POST, None, slow=slow)]
