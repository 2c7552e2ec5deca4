"""Reaching peers: the address book, and one dial per peer at a time however many callers wait for it.

Addresses are tried best first, each next one a little later or as soon as one fails; the first authenticated link wins
and the others are dropped. Knows nothing of sockets: `attempt` is given. Invariants: a dial lives while somebody waits
for it; callers get each address's reason; the book is bounded per peer and in peers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.core.addr import is_dialable, reach, split_peer
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, PEERS_KNOWN

STAGGER_S = 0.25  # RFC 8305's connection attempt delay


class AddressBook:
    """Addresses per peer, without their /p2p part; those that worked come first, then the nearest."""

    def __init__(self) -> None:
        self._book: dict[PeerId, dict[Multiaddr, bool]] = {}  # address -> it has worked

    def learn(self, peer: PeerId, addrs: Iterable[Multiaddr]) -> None:
        """Add addresses; those that name another peer or cannot be dialed are left out."""
        known = self._book.pop(peer, {})
        for addr in addrs:
            bare, named = split_peer(addr)
            if named not in (None, peer) or not is_dialable(bare):
                continue
            worked = known.pop(bare, False)
            known[bare] = worked
            while len(known) > ADDRS_PER_PEER:
                # The oldest that never worked, else the oldest.
                del known[next((a for a, ok in known.items() if not ok), next(iter(known)))]
        if known:
            self._book[peer] = known  # now the youngest entry
        while len(self._book) > PEERS_KNOWN:
            del self._book[next(iter(self._book))]

    def worked(self, peer: PeerId, addr: Multiaddr) -> None:
        """`addr` led to `peer`."""
        bare = split_peer(addr)[0]
        self.learn(peer, [bare])
        if bare in self._book.get(peer, {}):
            self._book[peer][bare] = True

    def addrs(self, peer: PeerId) -> list[Multiaddr]:
        known = self._book.get(peer, {})
        return sorted(known, key=lambda addr: (not known[addr], reach(addr)))


@dataclass(eq=False)
class _Flight:
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    waiters: int = 0
    reasons: list[str] = field(default_factory=list)
    landed: bool = False


class Dialer:
    """Single flight per peer over the book's addresses."""

    def __init__(self, book: AddressBook, attempt: Callable[[Multiaddr, PeerId], Awaitable[object]]) -> None:
        """`attempt(address, peer)` returns once an authenticated link stands, or raises Unreachable."""
        self._book, self._attempt = book, attempt
        self._flights: dict[PeerId, _Flight] = {}

    async def reach(self, peer: PeerId, nursery: trio.Nursery) -> None:
        """Wait for the one dial to `peer`; it runs in `nursery`, so that a caller may leave without ending it."""
        flight = self._flights.get(peer)
        if flight is None:
            flight = self._flights[peer] = _Flight()
            nursery.start_soon(self._fly, peer, flight)
        flight.waiters += 1
        try:
            await flight.done.wait()
        finally:
            flight.waiters -= 1
            if not flight.waiters and not flight.done.is_set():
                flight.scope.cancel()
                self._forget(peer, flight)
        if not flight.landed:
            reasons = "; ".join(flight.reasons) or "no address is known"
            raise Unreachable(f"cannot connect to {peer}: {reasons}", peer)

    def connected(self, peer: PeerId) -> None:
        """A link to `peer` stands, whoever made it: the flight is over."""
        flight = self._flights.get(peer)
        if flight is not None:
            flight.landed = True
            flight.scope.cancel()
            self._forget(peer, flight)
            flight.done.set()

    def _forget(self, peer: PeerId, flight: _Flight) -> None:
        if self._flights.get(peer) is flight:
            del self._flights[peer]

    async def _fly(self, peer: PeerId, flight: _Flight) -> None:
        try:
            with flight.scope:
                await self._race(peer, flight)
        finally:
            self._forget(peer, flight)
            flight.done.set()

    async def _race(self, peer: PeerId, flight: _Flight) -> None:
        tried: set[Multiaddr] = set()
        async with trio.open_nursery() as nursery:
            while untried := [addr for addr in self._book.addrs(peer) if addr not in tried]:
                tried.add(untried[0])
                failed = trio.Event()
                nursery.start_soon(self._try, peer, untried[0], flight, failed)
                with trio.move_on_after(STAGGER_S):
                    await failed.wait()

    async def _try(self, peer: PeerId, addr: Multiaddr, flight: _Flight, failed: trio.Event) -> None:
        try:
            await self._attempt(addr, peer)
        except Unreachable as error:
            flight.reasons.append(f"{addr}: {error.args[0]}")
            failed.set()
        else:
            self._book.worked(peer, addr)
            self.connected(peer)
