"""Fresh circuits for those that are nearly used up: soon, and never without end."""

from __future__ import annotations

from typing import cast

import pytest
import trio
import trio.testing

from peerd.core.addr import circuit_addr
from peerd.core.ids import PeerId
from peerd.reach.messages.circuit_message import Limit
from peerd.reach.relay.circuit_link import CircuitLink
from peerd.reach.relay.renewal import Renewal
from peerd.wire.link.link_stream import Stream
from tests.worlds.network.hosts import keypair

PEER, RELAY = keypair("peer").peer_id, keypair("relay").peer_id


async def test_a_relay_that_allows_next_to_nothing_is_not_asked_without_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    at: list[float] = []

    def used_up() -> None:
        """A circuit that may carry one byte, and has."""
        circuit = CircuitLink(cast(Stream, None), circuit_addr(None, RELAY), Limit(0, 1))
        renewal.opened(PEER, circuit)
        circuit._count(1, 0)

    async def renew(peer: PeerId, old: CircuitLink) -> None:
        at.append(trio.current_time())
        used_up()

    renewal = Renewal(renew)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(renewal.run)
        used_up()
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert at[0] == pytest.approx(0.0)
    assert 10 <= len(at) <= 61
