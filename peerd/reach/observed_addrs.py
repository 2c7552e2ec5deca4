"""Observed addresses: how connected peers see our address, and what most of them agree on.

Stores one observation per peer. For each IP version it finds the address and the external port that a majority of
networks report. Hostile input: invented addresses and ports, floods of observers. If the table is full, the network
with most entries loses its newest one, so that a crowd from one network cannot displace the others. Invariants: at most
limits.OBSERVERS entries; only public addresses reported by peers outside count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from multiaddr import Multiaddr

from peerd.core.addr import ip_of, reach, tcp_place
from peerd.core.ids import PeerId
from peerd.core.limits import OBSERVERS
from peerd.reach.network_votes import majority, network_of


@dataclass(frozen=True, slots=True)
class ObservedAddr:
    """One connected peer's observation of our address. `seen` is None if it did not report one."""

    peer: PeerId
    at: Multiaddr  # the peer's address as we see it
    seen: Multiaddr | None
    mapped: bool  # `seen` belongs to our listening port: we dialed from it, or the peer dialed `seen`
    accepted: bool  # the peer dialed us
    tests: bool  # it performs dial-backs for us

    @property
    def outside(self) -> bool:
        """True if the peer has a public address, so that it sees us like any stranger does."""
        return reach(self.at) == 2


@dataclass(frozen=True, slots=True)
class ObservedView:
    """The majority's view of our address, for one IP version."""

    ip: str | None = None
    mapped: Multiaddr | None = None
    split: bool = False  # several peers see our external port, and see different ones
    observers: int = 0
    port_observers: int = 0  # machines that see our external port


class AddrObservers:
    """The peers' observations of our address, by peer."""

    def __init__(self) -> None:
        self._sights: dict[PeerId, ObservedAddr] = {}  # longest known first
        self._places: dict[PeerId, str] = {}
        self._views: dict[int, ObservedView] = {}

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._sights

    def __len__(self) -> int:
        return len(self._sights)

    def get(self, peer: PeerId) -> ObservedAddr | None:
        return self._sights.get(peer)

    def place(self, peer: PeerId) -> str:
        """The network of a known peer."""
        return self._places[peer]

    def outside(self) -> Iterator[ObservedAddr]:
        """The observations of peers with a public address."""
        return (sight for sight in self._sights.values() if sight.outside)

    def put(self, sight: ObservedAddr) -> PeerId | None:
        """Store an observation, replacing the peer's earlier one. Returns the peer that was dropped for it, if any."""
        if sight.seen is not None and (tcp_place(sight.seen) is None or ip_of(sight.seen) is None):
            sight = replace(sight, seen=None)
        self._sights[sight.peer] = sight
        self._places[sight.peer] = network_of(sight.at)
        self._views.clear()
        if len(self._sights) <= OBSERVERS:
            return None
        crowd = Counter(self._places.values()).most_common(1)[0][0]
        newest = next(peer for peer in reversed(self._sights) if self._places[peer] == crowd)
        self.drop(newest)
        return newest

    def drop(self, peer: PeerId) -> None:
        """Forget a peer, if it is known."""
        if self._sights.pop(peer, None) is not None:
            del self._places[peer]
            self._views.clear()

    def view(self, version: int) -> ObservedView:
        """The majority's view for this IP version; empty if there is no majority."""
        if version not in self._views:
            self._views[version] = self._look(version)
        return self._views[version]

    def _look(self, version: int) -> ObservedView:
        told = [
            (sight.at, sight.seen, sight.mapped)
            for sight in self.outside()
            if sight.seen is not None and reach(sight.seen) == 2 and version_of(sight.seen) == version
        ]
        ip = majority([(at, str(ip_of(seen))) for at, seen, _ in told])
        ports = [(at, seen) for at, seen, mapped in told if mapped]
        mapped = majority(ports)
        split = mapped is None and len({seen for _, seen in ports}) > 1
        seers = len({ip_of(at) for at, _ in ports})
        return ObservedView(ip, mapped, split=split, observers=len(told), port_observers=seers)


def version_of(addr: Multiaddr) -> int:
    """The IP version of an address, or 0 if it has no IP."""
    ip = ip_of(addr)
    return ip.version if ip is not None else 0
