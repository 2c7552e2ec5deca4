"""Dialing of peers: the address book, and one dial per peer at a time, shared by all its callers.

`wire/happy_eyeballs.py` decides the order and timing of the attempts. The first authenticated link wins
and the other attempts are cancelled, but if it is relayed, direct attempts may finish. Has no sockets: the owner passes
`attempt`. Hearsay addresses (reported by other peers) are dialed within the limits of
`wire/host/dial_quota.py`. Invariants: a dial runs only while some caller waits for it; callers receive the
reason of each failed address; the book is bounded in peers and in addresses per peer.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio
from multiaddr import Multiaddr

from peerd.core.addr import is_dialable, is_relayed, normal, split_peer
from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import ADDRS_PER_PEER, PEERS_KNOWN
from peerd.wire.budget.book import Book, User
from peerd.wire.faults import Faults
from peerd.wire.happy_eyeballs import STAGGER_S, AddressHistory, NetworkSurroundings, order
from peerd.wire.host.dial_quota import DialQuota
from peerd.wire.race import RaceRun

__all__ = ["STAGGER_S", "AddressBook", "Dialer"]


class AddressBook:
    """Addresses of each peer, without /p2p, with their history of dials."""

    def __init__(self) -> None:
        self._book = BoundedDict[PeerId, dict[Multiaddr, AddressHistory]](PEERS_KNOWN)
        self._successes = 0

    def learn(self, peer: PeerId, addrs: Iterable[Multiaddr], heard: User | None = None) -> None:
        """Add addresses, except those of another peer and those that cannot be dialed.

        `heard`: the user that reported them, or None if they are from our own configuration.
        """
        known = self._book.pop(peer, {})
        for addr in addrs:
            bare, named = split_peer(normal(addr))
            if named not in (None, peer) or not is_dialable(bare):
                continue
            past = known.pop(bare, None) or AddressHistory(heard=heard)
            past.heard = past.heard and heard
            known[bare] = past
            while len(known) > ADDRS_PER_PEER:
                # The oldest that has never worked, else the oldest.
                del known[next((a for a, past in known.items() if not past.worked), next(iter(known)))]
        if known:
            self._book[peer] = known  # now the newest entry

    def worked(self, peer: PeerId, addr: Multiaddr) -> None:
        """Record that a dial of `addr` reached `peer`."""
        bare = split_peer(normal(addr))[0]
        if bare not in self._book.get(peer, {}):
            self.learn(peer, [bare])
        if bare in self._book.get(peer, {}):
            self._successes += 1
            self._book[peer][bare] = AddressHistory(self._successes, heard=self._book[peer][bare].heard)

    def failed(self, peer: PeerId, addr: Multiaddr, now: float) -> None:
        """Record that a dial of `addr` did not reach `peer`."""
        past = self._book.get(peer, {}).get(addr)
        if past is not None:
            past.failed_s = now

    def unproven(self, peer: PeerId, addr: Multiaddr) -> User | None:
        """The user that reported `addr` of `peer`; None if it has ever worked, or is from our configuration."""
        past = self._book.get(peer, {}).get(addr)
        return None if past is None or past.worked else past.heard

    def forget_failures(self) -> None:
        """Forget failed dials, because this machine has changed networks."""
        for known in self._book.values():
            for past in known.values():
                past.failed_s = -math.inf

    def addrs(self, peer: PeerId, around: NetworkSurroundings | None = None, now: float = math.inf) -> list[Multiaddr]:
        """Addresses of `peer`, the most promising first."""
        return order(self._book.get(peer, {}), around or NetworkSurroundings(), now)


@dataclass(eq=False)
class _Flight:
    race: RaceRun
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    done: trio.Event = field(default_factory=trio.Event)
    waiters: int = 0
    landed: bool = False


class Dialer:
    """Dials peers at the book's addresses, with a single flight per peer."""

    def __init__(
        self,
        book: AddressBook,
        attempt: Callable[[Multiaddr, PeerId], Awaitable[object]],
        surroundings: Callable[[], NetworkSurroundings] = NetworkSurroundings,
        restraint: DialQuota | None = None,
        faults: Faults | None = None,
    ) -> None:
        """`attempt(address, peer)` returns once there is an authenticated link, or raises Unreachable."""
        self._book, self._attempt, self._surroundings = book, attempt, surroundings
        self._restraint, self._faults = restraint or DialQuota(Book()), faults or Faults()
        self._flights: dict[PeerId, _Flight] = {}

    def learn(self, peer: PeerId, addrs: Iterable[Multiaddr], heard: User | None = None) -> None:
        """Add addresses to the book; a running dial uses them, too."""
        self._book.learn(peer, addrs, heard)
        if peer in self._flights:
            self._flights[peer].race.learned()

    async def reach(self, peer: PeerId, nursery: trio.Nursery) -> None:
        """Wait until `peer` is connected, or raise Unreachable with the reasons.

        All callers share one dial. It runs in `nursery`, so that it continues if one of several callers is cancelled.
        """
        flight = self._flights.get(peer)
        if flight is None:
            flight = self._flights[peer] = _Flight(self._race(peer))
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
            reasons = "; ".join(flight.race.reasons) or "no address is known"
            raise Unreachable(f"cannot connect to {peer}: {reasons}", peer)

    def connected(self, peer: PeerId, *, relayed: bool = False) -> None:
        """End the dial of `peer`, because there is a link to it, from the dial or from elsewhere."""
        flight = self._flights.get(peer)
        if flight is not None:
            flight.landed = True
            flight.race.stop(direct_may_end=relayed)
            self._forget(peer, flight)
            flight.done.set()

    def _forget(self, peer: PeerId, flight: _Flight) -> None:
        if self._flights.get(peer) is flight:
            del self._flights[peer]

    def _race(self, peer: PeerId) -> RaceRun:
        around = self._surroundings()

        async def attempt(addr: Multiaddr) -> None:
            heard = self._book.unproven(peer, addr)
            if heard is not None and (why := self._restraint.begin(trio.current_time(), addr, heard)) is not None:
                raise Unreachable(why, peer)
            await self._attempt(addr, peer)
            if heard is not None:
                self._restraint.worked(addr, heard)
            self._book.worked(peer, addr)
            self.connected(peer, relayed=is_relayed(addr))

        return RaceRun(
            lambda: self._book.addrs(peer, around, trio.current_time()),
            attempt,
            lambda addr: self._book.failed(peer, addr, trio.current_time()),
        )

    async def _fly(self, peer: PeerId, flight: _Flight) -> None:
        try:
            with flight.scope:
                await self._faults.contain(flight.race.run, lambda: f"the dial to {peer}")
        finally:
            self._forget(peer, flight)
            flight.done.set()
