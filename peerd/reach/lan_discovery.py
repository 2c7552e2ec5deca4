"""Discovery of peers in the local network: announces this peer's addresses, and connects to the peers found.

A discovered address is only a hint. It is dialed like any other, but only if it belongs to one of this machine's
networks, so a stranger in a shared network cannot make us dial other hosts. Few are dialed at a time, and each peer at
most once a minute. As usual, the directory rejects a peer of another run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import trio
from multiaddr import Multiaddr

from peerd.core.addr import ip_of, is_relayed, reach, split_peer
from peerd.core.bounded_dict import BoundedDict
from peerd.core.clock import Clock
from peerd.core.errors import RemoteError
from peerd.core.ids import PeerId
from peerd.core.limits import LAN_DIALS, LAN_PEERS
from peerd.reach.mdns import Mdns, NoDiscovery, addrs_in, available
from peerd.wire.host.host import Host

_log = logging.getLogger("peerd.lan")
_TOLD: Final = 6  # at most, of our addresses are announced


class Finder(Protocol):
    """Discovery among peers of the local network."""

    async def run(self, addrs: Sequence[Multiaddr], found: Callable[[bytes], None]) -> None:
        """Announce `addrs`, and call `found` with others' announcements, until cancelled.

        Raises NoDiscovery with the reason if this machine cannot do that.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LanConfig:
    """Settings of the discovery. Times in seconds."""

    again_s: float = 60.0  # before an unconnected neighbour is dialed again; longer after each failure
    retry_s: float = 300.0  # before failed discovery is retried
    settle_s: float = 1.0  # several addresses often change together


@dataclass(slots=True)
class _Neighbour:
    addrs: list[Multiaddr]
    next_s: float = 0.0  # do not dial before this time
    failures: int = 0


class LanDiscovery:
    """Finds peers in the local network and connects to them. Idle until `run`."""

    def __init__(
        self, host: Host, finder: Finder, met: Callable[[PeerId, Multiaddr], None], config: LanConfig | None = None
    ) -> None:
        """`met` is called with each neighbour that was reached, and its address."""
        self._host, self._finder, self._met = host, finder, met
        self._config = config or LanConfig()
        self._neighbours = BoundedDict[PeerId, _Neighbour](LAN_PEERS)
        self._dials = 0
        self._problem: str | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Announce and find peers until cancelled; restart whenever this host's addresses change."""
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(self._try_again)
            task_status.started()
            while True:
                addrs = self._own_addrs()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._find, addrs)
                    while addrs == self._own_addrs():
                        await self._host.whereabouts.readdressed()
                        await trio.sleep(self._config.settle_s)
                    nursery.cancel_scope.cancel()

    def status(self) -> dict[str, Any]:
        """Plain data: the numbers of neighbours found and connected, and the current problem."""
        connected = set(self._host.connected())
        return {
            "found": len(self._neighbours),
            "connected": sum(peer in connected for peer in self._neighbours),
            "problem": self._problem,
        }

    def _own_addrs(self) -> list[Multiaddr]:
        """Our addresses that neighbours can use."""
        addrs = [addr for addr in self._host.addrs() if not is_relayed(addr) and ip_of(addr) is not None]
        return [addr for addr in addrs if self._is_near(addr)][:_TOLD]

    def _is_near(self, addr: Multiaddr) -> bool:
        """True if it is in a network of this machine, or private if this machine's networks are unknown."""
        ip, networks = ip_of(addr), self._host.whereabouts.networks()
        if ip is None or reach(addr) == 0:
            return False
        return any(ip in network for network in networks) or (not networks and reach(addr) == 1)

    async def _find(self, addrs: Sequence[Multiaddr]) -> None:
        if not addrs:
            return  # this host listens only on its own machine
        while True:
            try:
                await self._finder.run(addrs, self._found)
            except NoDiscovery as error:
                self._problem = str(error)
                _log.warning("no discovery in the local network: %s", error)
            await trio.sleep(self._config.retry_s)

    def _found(self, text: bytes) -> None:
        """Store an announcement and dial its peer."""
        by_peer: dict[PeerId, list[Multiaddr]] = {}
        for addr in addrs_in(text):
            bare, peer = split_peer(addr)
            if peer is not None and peer != self._host.id and self._is_near(bare):
                by_peer.setdefault(peer, []).append(bare)
        for peer, addrs in list(by_peer.items())[:1]:  # one announcement is of one peer
            neighbour = self._neighbours[peer] = self._neighbours.get(peer) or _Neighbour(addrs)
            neighbour.addrs = addrs
        self._dial_some()

    async def _try_again(self) -> None:
        while True:
            await trio.sleep(self._config.again_s)
            self._dial_some()

    def _dial_some(self) -> None:
        now, connected = trio.current_time(), set(self._host.connected())
        for peer, neighbour in self._neighbours.items():
            if self._dials < LAN_DIALS and now >= neighbour.next_s and peer not in connected and self._nursery:
                neighbour.next_s = now + self._config.again_s * (1 + neighbour.failures)
                self._dials += 1
                self._nursery.start_soon(self._dial, peer, neighbour)

    async def _dial(self, peer: PeerId, neighbour: _Neighbour) -> None:
        try:
            await self._host.connect(peer, neighbour.addrs)
            neighbour.failures = 0
            self._met(peer, neighbour.addrs[0])
        except RemoteError as error:
            neighbour.failures += 1
            _log.debug("cannot connect to LAN neighbour %s: %s", peer, error)
        finally:
            self._dials -= 1
        self._dial_some()


def own_finder(clock: Clock) -> Finder | None:
    """The finder of this machine: multicast DNS, if the extra `peerd[lan]` is installed."""
    return Mdns(clock.rng("lan")) if available() else None
