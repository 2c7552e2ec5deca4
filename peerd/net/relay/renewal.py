"""Fresh circuits before old ones are used up: what this side dialed over a relay that limits circuits.

A relay cuts a circuit when its bytes or its time are over. Shortly before, another one is opened; the host then uses
the newer connection for new streams, and the older one drains. Where that fails the circuit ends by itself and whoever
needs the peer dials again. Invariant: per peer the youngest circuit alone is renewed, one try at a time, and no two
within _PAUSE_S: a relay that allows next to nothing would have both ends shake hands without end.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.net.relay.circuit_link import CircuitLink

_log = logging.getLogger("peerd.net")
_LOOK_S = 5.0
_PAUSE_S = 1.0


class Renewal:
    """The youngest circuit to each peer."""

    def __init__(self, renew: Callable[[PeerId, CircuitLink], Awaitable[None]]) -> None:
        """`renew(peer, old)` opens and joins another circuit the same way; Unreachable where that fails."""
        self._renew = renew
        self._youngest: dict[PeerId, CircuitLink] = {}
        self._trying: set[PeerId] = set()
        self._worn = trio.Event()

    def opened(self, peer: PeerId, circuit: CircuitLink) -> None:
        """This side dialed it."""
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
            _log.info("no fresh circuit to %s: %s", peer, error.args[0])
            await trio.sleep(_LOOK_S)
        finally:
            self._trying.discard(peer)
