"""Measures this peer's links, reports changes to the run's conductor, and reads the conductor's map.

While this peer follows a conductor, all open links are measured once a second (`placement/network/pair_meter`), and
changes are reported every half minute. Measuring sends nothing. If the conductor does not accept a report, its content
is sent again with the next one; a new conductor gets everything. Hostile input: a map with any content. It is shown as
the statement of one peer, within bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from peerd.core.clock import Clock
from peerd.core.errors import ProtocolViolation, RemoteError
from peerd.core.ids import PeerId
from peerd.messages.encoding import Empty
from peerd.messages.network import MappedPair, NetworkMapRequest, NetworkPart, NetworkReport
from peerd.placement.network.pair_meter import LinkSnapshot, OwnLine, PairMeter, ReportChanges
from peerd.rpc.rpc import Rpc
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.wire.host.host import Host
from peerd.wire.link.link import Link

LOOK_S: Final = 1.0
FIRST_REPORT_S: Final = 6.0  # after the start
REPORT_S: Final = 30.0
_REPORT_TIMEOUT_S: Final = 10.0
_PAGE_TIMEOUT_S: Final = 3.0
PAGES: Final = 8  # of a map: 4,096 pairs in total


class HasLine(Protocol):
    """Upload and download rates of an internet connection in bytes/s, as `line_speeds` returns them."""

    @property
    def up_bytes_per_s(self) -> float: ...

    @property
    def down_bytes_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class NamedPair:
    """One pair of a map, with peer ids."""

    one: str
    other: str
    figures: MappedPair


@dataclass(slots=True)
class ReadMap:
    """A conductor's map, as far as it was read."""

    total_peers: int = 0
    pairs: list[NamedPair] = field(default_factory=list)
    more: bool = False  # there are more pairs that were not read


class LinkWatch:
    """Measures and reports the links of one peer. `line` returns the rates of our own line."""

    def __init__(
        self, run: bytes, net: tuple[Host, Rpc], clock: Clock, following: ConductorClient, line: Callable[[], HasLine]
    ) -> None:
        self._run, self._line, self._following = run, line, following
        self._host, self._rpc = net
        self._rng = clock.rng("network reports")
        self.meter, self._changes = PairMeter(), ReportChanges()
        self._told: tuple[PeerId | None, int] = None, 0  # the conductor that got our reports, and `changes` then

    async def run(self) -> None:
        """Measure and report until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_again_and_again)
            nursery.start_soon(self._report_now_and_then)

    def _own_line(self) -> OwnLine:
        line = self._line()
        return OwnLine(line.up_bytes_per_s, line.down_bytes_per_s)

    # --- measuring --------------------------------------------------------------------------------------------

    async def _look_again_and_again(self) -> None:
        while True:
            if self._following.conductor is not None:
                self.meter.look(trio.current_time(), self._links(), self._own_line())
            await trio.sleep(LOOK_S)

    def _links(self) -> dict[str, LinkSnapshot]:
        """The current figures of the links to all connected peers."""
        looks = {}
        for peer in self._host.connected():
            best, links = self._host.links.best(peer), self._host.links.to(peer)
            if best is None:
                continue
            rtt_s = best.mux.pings.latest_s(None)
            looks[peer.text] = LinkSnapshot(
                sum(map(_bytes_sent, links)),
                sum(link.bytes_in for link in links),
                rtt_s if rtt_s is not None else best.mux.rtt_min_s,
                waits=best.mux.waiting_bytes > 0,
                paced=best.paced,
                arrival_bytes_per_s=self._rpc.arrival_rate(peer),
            )
        return looks

    # --- reporting --------------------------------------------------------------------------------------------

    async def _report_now_and_then(self) -> None:
        await trio.sleep(FIRST_REPORT_S)
        while True:
            await self._report()
            await trio.sleep(REPORT_S * self._rng.uniform(0.9, 1.1))

    async def _report(self) -> None:
        """Send changes to the conductor. Does nothing if there are none, or if there is no conductor."""
        following, now = self._following, trio.current_time()
        conductor = following.conductor
        if conductor is None:
            return
        if self._told != (conductor, following.changes):
            self._told = conductor, following.changes
            self._changes.forget()
        due = self._changes.due(now, self.meter.figures(now, self._own_line()))
        if not due:
            return
        try:
            body = NetworkReport(self._run, due)
            await self._rpc.call(conductor, "network/1/report", body, Empty, timeout_s=_REPORT_TIMEOUT_S)
        except RemoteError:
            return  # sent again with the next report
        self._changes.told(now, due)

    # --- reading the map --------------------------------------------------------------------------------------

    async def read_map(self, conductor: PeerId) -> ReadMap:
        """Fetch the map of `conductor`, at most 8 pages. Raises RemoteError."""
        found, ask = ReadMap(), NetworkMapRequest(self._run)
        for _ in range(PAGES):
            part = (await self._rpc.call(conductor, "network/1/map", ask, NetworkPart, timeout_s=_PAGE_TIMEOUT_S)).body
            pairs = [_named(part, pair) for pair in part.pairs]
            found.total_peers, found.more = part.total_peers, part.more
            found.pairs += pairs
            if not part.more or not pairs:
                break
            ask = NetworkMapRequest(self._run, pairs[-1].one, pairs[-1].other)
        return found


def _bytes_sent(link: Link) -> int:
    """Bytes that the other side has acknowledged, if the system reports them; else bytes that were sent."""
    infos = link.tcp_infos().values()
    return sum(info.bytes_acked for info in infos) if infos else link.bytes_out


def _named(part: NetworkPart, pair: MappedPair) -> NamedPair:
    if max(pair.one, pair.other) >= len(part.peers):
        raise ProtocolViolation("a part of the network's map has a pair with an unknown peer")
    return NamedPair(part.peers[pair.one], part.peers[pair.other], pair)
