"""Reservations at relays: kept while nobody can dial this peer, otherwise one as a spare; announces relayed addresses.

Executes the decisions of `reach/relay/relay_reservations`: requests reservations at connected relays through
`Circuits`, connects to further peers if there are too few, and notices losses: a relay that is gone, and a relay that
has restarted, which is found on a new link before the old one has ended. `Circuits` checks what a relay promises.
Invariant: only addresses of current reservations are announced, at most limits.RESERVATION_ADDRS of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.addr import is_relayed, reach
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import RESERVATION_ADDRS
from peerd.reach.messages.circuit_message import HOP
from peerd.reach.relay.circuit_transport import Circuits
from peerd.reach.relay.relay_reservations import (
    Candidate,
    FindRelays,
    Release,
    Reservations,
    ReservationsConfig,
    Reserve,
)
from peerd.wire.host.host import Host, PeerDown, PeerIdentified
from peerd.wire.path_selection import PathKind
from peerd.wire.timer import Timer

_log = logging.getLogger("peerd.reach")
CIRCUITS = "circuits"  # source of announced relayed addresses
_SEARCHED = 3  # peers that one search connects to
_CONNECT_S = 15.0
_LOST_KEPT = 8  # former relays that are tried again


class PeerSource(Protocol):
    """A source of further peers, such as the DHT."""

    def entry_peers(self) -> Collection[PeerId]:
        """The peers through which we joined; they are preferred as relays."""
        ...

    def contacts(self) -> Mapping[PeerId, Iterable[Multiaddr]]:
        """Peers that can be dialed and might relay."""
        ...

    def look_around(self) -> None:
        """Start to look for more peers."""


class RelayReservations:
    """Our reservations at relays. Idle until `run`; requests nothing until `want`."""

    def __init__(
        self,
        host: Host,
        circuits: Circuits,
        clock: Clock,
        guide: PeerSource | None = None,
        config: ReservationsConfig | None = None,
    ) -> None:
        self._host, self._circuits, self._clock, self._guide = host, circuits, clock, guide
        self._machine = Reservations(clock.rng("reservations"), config)
        self._nursery: trio.Nursery | None = None
        self._timer = Timer(lambda: self._machine.wake_at(clock.now()), self.look)
        self._lost = BoundedDict[PeerId, None](_LOST_KEPT)
        self._heard: list[Callable[[], None]] = []
        host.when_moved(self._moved)

    @property
    def relays(self) -> list[PeerId]:
        """Relays that accept circuits for us now."""
        return list(self._circuits.reservations)

    def on_change(self, hear: Callable[[], None]) -> None:
        """Register `hear`, which is called when a reservation is gained or lost; it must not block."""
        self._heard.append(hear)

    def want(self, needs_them: bool, *, spare: bool = False) -> None:
        """Set whether others need relays to reach us. `spare`: keep one reservation even if they do not."""
        self._machine.want(needs_them, spare=spare)
        self.look()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep reservations until cancelled."""
        try:
            with self._host.watch(told=True) as events:
                async with trio.open_nursery() as self._nursery:
                    for peer in self._host.connected():
                        self._consider(peer)
                    self.look()
                    self._nursery.start_soon(self._timer.run)
                    task_status.started()
                    async for event in events:
                        if isinstance(event, PeerDown):
                            self._gone(event.peer)
                        elif isinstance(event, PeerIdentified):
                            self._consider(event.peer)
                        self.look()
        finally:
            self._nursery = None

    def look(self) -> None:
        """Request, renew or drop the reservations for which this is due now, or search for more relays."""
        if self._nursery is None:
            return
        now = self._clock.now()
        for output in self._machine.step(now):
            match output:
                case Reserve(peer):
                    self._nursery.start_soon(self._reserve, peer)
                case Release(peer):
                    self._circuits.forget(peer)
                case FindRelays():
                    self._nursery.start_soon(self._search)
        self._announce()
        self._timer.rearm()

    def _consider(self, peer: PeerId) -> None:
        """Consider a connected peer as a relay, if it is one and our link to it is neither relayed nor hole-punched."""
        link, info = self._host.links.direct(peer), self._host.info(peer)
        if link is None or info is None:
            return
        named = any(reach(addr) == 2 and not is_relayed(addr) for addr in info.addrs)
        if HOP in info.protocols and (link.way == PathKind.DIRECT or (link.way == PathKind.LOCAL and named)):
            preferred = self._guide is not None and peer in self._guide.entry_peers()
            self._machine.offers(Candidate(peer, link.remote, link.rtt_s, preferred))
        elif peer not in self._circuits.reservations:
            self._machine.gone(self._clock.now(), peer)

    def _moved(self, peer: PeerId) -> None:
        """Ask a relay again that is now reached over another link: after a restart it has lost our reservation."""
        if self._machine.moved(self._clock.now(), peer):
            self.look()

    def _gone(self, peer: PeerId) -> None:
        now = self._clock.now()
        if peer in self._machine.held(now):
            _log.info("lost the relay %s", peer)
            self._lost[peer] = None
        self._machine.gone(now, peer)
        self._circuits.forget(peer)

    async def _reserve(self, peer: PeerId) -> None:
        try:
            held = await self._circuits.reserve(peer)
        except RemoteError as error:
            _log.info("no reservation at relay %s: %s", peer, error)
            self._machine.refused(self._clock.now(), peer)
            if peer not in self._machine.held(self._clock.now()):
                self._circuits.forget(peer)
        else:
            now = self._clock.now()
            self._machine.granted(now, peer, held.expires_at - now)
        self.look()

    async def _search(self) -> None:
        """Connect to further peers: lost relays first, then known contacts. Identify shows whether they relay."""
        there = {*self._host.connected(), self._host.id}
        contacts = self._guide.contacts() if self._guide is not None else {}
        if self._guide is not None:
            self._guide.look_around()
        for peer, addrs in contacts.items():
            self._host.learn(peer, addrs, checked=True)
        found = [peer for peer in dict.fromkeys((*reversed(self._lost), *contacts)) if peer not in there]

        async def connect(peer: PeerId) -> None:
            try:
                with trio.move_on_after(_CONNECT_S):
                    await self._host.connect(peer)
            except RemoteError as error:
                _log.debug("cannot connect to a possible relay: %s", error)

        async with trio.open_nursery() as nursery:
            for peer in found[:_SEARCHED]:
                nursery.start_soon(connect, peer)

    def _announce(self) -> None:
        held = self._circuits.reservations.values()
        addrs = [addr for place in held for addr in place.addrs[:RESERVATION_ADDRS]]
        if addrs == self._host.whereabouts.announced(CIRCUITS):
            return
        self._host.whereabouts.announce(CIRCUITS, addrs)
        for hear in self._heard:
            hear()
