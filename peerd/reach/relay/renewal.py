"""Renewal of circuits over relays with limits: this side replaces the circuits that it dialed before they run out.

A relay closes a circuit when its bytes or its time are used up. Shortly before, this side opens another one; the host
then uses the newer connection for new streams, and the older one drains. If that fails, the circuit ends, and the next
user of the peer dials again. Invariants: per peer, only the youngest circuit is renewed, one attempt at a time, and at
most once per _PAUSE_S, since a relay with tiny limits would otherwise cause endless handshakes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.reach.relay.circuit_link import CircuitLink

_log = logging.getLogger("peerd.reach")
_LOOK_S = 5.0
_PAUSE_S = 1.0


class Renewal:
    """Replaces the youngest circuit to each peer in time."""

    def __init__(self, renew: Callable[[PeerId, CircuitLink], Awaitable[None]]) -> None:
        """`renew(peer, old)` opens and authenticates another circuit over the same relay, or raises Unreachable."""
        self._renew = renew
        self._youngest: dict[PeerId, CircuitLink] = {}
        self._trying: set[PeerId] = set()
        self._worn = trio.Event()

    def opened(self, peer: PeerId, circuit: CircuitLink) -> None:
        """Register a circuit that this side dialed."""
        if circuit.limit is not None:
            self._youngest[peer] = circuit
            circuit.when_worn = self._look

    def _look(self) -> None:
        self._worn.set()

    async def run(self) -> None:
        """Renew until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                with trio.move_on_after(_LOOK_S):
                    await self._worn.wait()
                self._worn = trio.Event()
                for peer, circuit in list(self._youngest.items()):
                    if circuit.closed:
                        del self._youngest[peer]
                    elif circuit.is_worn(trio.current_time()) and peer not in self._trying:
                        self._trying.add(peer)
                        nursery.start_soon(self._try, peer, circuit)

    async def _try(self, peer: PeerId, circuit: CircuitLink) -> None:
        try:
            await self._renew(peer, circuit)
            await trio.sleep(_PAUSE_S)
        except Unreachable as error:
            _log.info("the circuit to %s was not renewed: %s", peer, error.args[0])
            await trio.sleep(_LOOK_S)
        finally:
            self._trying.discard(peer)
