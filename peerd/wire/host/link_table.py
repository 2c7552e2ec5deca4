"""The table of links: connected peers, limits, the best link to each peer, watchers, and traffic counters.

Does not dial or accept. If there are several links to a peer, new streams use the best one
(`wire.path_selection`); a link that is silent while others are not is the last choice
(`wire.host.failover`). The others are superseded: they remain as a reserve until they have been idle for some seconds.

Invariants: a peer is up exactly while it has a usable link, and watchers receive every change at once and in order;
every link is within the limits. Incoming links are accounted in the book. If the book's limits or the table's are
reached, a link of the place (address block) with the most is closed (see `make_room`), so that no place can keep out
the others by many identities, open streams or long idle connections. Links that this host dialed are never closed for
incoming ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import trio

from peerd.core import limits
from peerd.core.ids import PeerId
from peerd.core.signals import Signal
from peerd.wire.budget.book import EVERYBODY, REGION, Book, Resource, User
from peerd.wire.faults import Faults
from peerd.wire.host.dial_quota import blocks_of
from peerd.wire.link.link import Link
from peerd.wire.link.link_stream import StreamOwner
from peerd.wire.path_selection import Path, PathKind, choose

_log = logging.getLogger("peerd.wire")


@dataclass(frozen=True, slots=True)
class PeerUp:
    """Event: the first link to this peer is established."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDown:
    """Event: the last link to this peer has ended, for this reason."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerIdentified:
    """Event: an identify message of a connected peer arrived on `link`; `Host.info` returns its content."""

    peer: PeerId
    link: StreamOwner


PeerEvent = PeerUp | PeerDown | PeerIdentified


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Limits on the number of links, and times in seconds."""

    total: int = limits.LINKS
    inbound: int = limits.LINKS_INBOUND
    per_peer: int = limits.LINKS_PER_PEER
    idle_s: float = 10.0  # a link without streams for this long may be closed to make room
    drain_s: float = 5.0  # a superseded link without streams for this long is closed; see Links.run


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """Traffic and links of one connected peer; bytes are those on the wire over its current links."""

    peer: PeerId
    bytes_in: int
    bytes_out: int
    streams: int
    links: int
    rtt_s: float | None
    remote: str
    initiator: bool  # this side dialed
    way: str  # local, direct, punched or relayed; this and the fields from rtt_s on are of the best link
    why: str  # reason for the choice of that link


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Traffic of the host since its start, and of each connected peer; bytes on the wire."""

    bytes_in: int
    bytes_out: int
    links: int
    streams: int
    peers: dict[PeerId, PeerTraffic] = field(default_factory=dict)


class Links:
    """Table of all links of one host: adds and removes them, and selects the best link to each peer."""

    def __init__(self, bounds: LinkLimits, own: PeerId, book: Book, faults: Faults | None = None) -> None:
        self._bounds, self._own, self._book, self._faults = bounds, own, book, faults or Faults()
        self._usable: dict[PeerId, list[Link]] = {}  # newest last
        self._best: dict[PeerId, tuple[Link, str]] = {}  # the link for new streams, and the reason
        self._distrusted: set[Link] = set()  # silent although the peer was pinged, until the peer answers
        self._moved: list[Callable[[PeerId], None]] = []
        self._news = Signal()  # a link was superseded
        self._all: dict[Link, None] = {}  # oldest first, including those that are ending
        self._booked: dict[Link, User] = {}  # incoming links, without those that made room
        self._cut: set[Link] = set()  # links that made room, until they have ended
        self._kept: dict[PeerId, int] = {}  # peers whose idle links must not be closed; number of `keep` calls
        self.blocks: frozenset[str] = frozenset()  # address blocks of all peers ever connected (dial_quota)
        self._past_in = self._past_out = 0  # bytes of ended links
        self._watchers: dict[int, tuple[trio.MemorySendChannel[PeerEvent], bool]] = {}  # channel, wants PeerIdentified
        self._next_watcher = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._all))

    def to(self, peer: PeerId) -> list[Link]:
        """All usable links to this peer, newest last."""
        return list(self._usable.get(peer, ()))

    def peers(self) -> list[PeerId]:
        """Connected peers, the longest connected first."""
        return list(self._usable)

    def best(self, peer: PeerId) -> Link | None:
        """The link to use for a new stream, or None if the peer is not connected."""
        found = self._best.get(peer)
        if found is not None and not found[0].usable:
            self._choose(peer)
            found = self._best.get(peer)
        return None if found is None else found[0]

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """Call `told` whenever the best link to a peer changes, and for its first link."""
        self._moved.append(told)

    def _choose(self, peer: PeerId) -> None:
        links = [link for link in self._usable.get(peer, ()) if link.usable]
        before = self._best.pop(peer, None)
        if not links:
            return
        heard = [link for link in links if not (link in self._distrusted and link.silence.doubted)]
        self._distrusted.difference_update(heard)
        among = heard or links
        current = among.index(before[0]) if before is not None and before[0] in among else None
        number, why = choose([_path(link) for link in among], current, prefer_ours=self._own.raw < peer.raw)
        best = among[number]
        if heard:
            for link in links:
                if link not in heard:
                    link.hurry()
        self._best[peer] = (best, why)
        now = trio.current_time()
        for link in links:
            link.superseded_at = None if link is best else link.superseded_at or now
        if len(links) > 1:
            self._news.notify()
        if before is None or before[0] is not best:
            _log.debug("new streams to %s use %s (%s)", peer, best, why)
            for told in self._moved:
                with self._faults.guard(f"a callback about the links to {peer}"):
                    told(peer)

    def distrust(self, link: Link) -> None:
        """Use other links to this link's peer for new streams, if there are any, while this link is silent."""
        if link in self._usable.get(link.peer, ()):
            self._distrusted.add(link)
            self._choose(link.peer)

    def ask_others(self, silent: Link) -> None:
        """Ping the peers of all other links with streams that are silent too: one cause may have cut off several."""
        for link in self:
            if link is not silent and link.streams and link.superseded_at is None:
                link.doubt(patient=True)

    async def run(self) -> None:
        """Close superseded links that are idle, until cancelled.

        If the two sides disagree on which link is superseded, the one with the smaller peer id decides, because the
        other waits three times as long.
        """
        while True:
            due = min((self._due(link) for link in self._all), default=math.inf)
            with trio.move_on_at(due):
                await self._news.wait()
                continue
            for peer, links in list(self._usable.items()):
                if len(links) > 1:
                    self._choose(peer)  # round trips may have been measured since
            async with trio.open_nursery() as nursery:
                for link in self:
                    if not link.streams and self._due(link) <= trio.current_time():
                        nursery.start_soon(link.close, "a better connection took over")

    def _due(self, link: Link) -> float:
        """Time at which to check a link again, or to close it if it has no streams and the better link is alive."""
        if link.superseded_at is None or not link.usable:
            return math.inf
        wait_s = self._bounds.drain_s * (1 if self._own.raw < link.peer.raw else 3)
        best = self.best(link.peer)
        needed = link.streams or (best is not None and best.silence.doubted)
        return (trio.current_time() if needed else max(link.idle_since, link.superseded_at)) + wait_s

    def direct(self, peer: PeerId) -> Link | None:
        """Like `best`, but None if that is relayed, which happens only if no other link is alive."""
        best = self.best(peer)
        return None if best is None or best.way == PathKind.RELAYED else best

    def keep(self, peer: PeerId) -> None:
        """Do not close this peer's idle links for new ones, until `let_go` was called as often as `keep`."""
        self._kept[peer] = self._kept.get(peer, 0) + 1

    def let_go(self, peer: PeerId) -> None:
        """Undo one `keep`."""
        count = self._kept.pop(peer, 0) - 1
        if count > 0:
            self._kept[peer] = count

    def make_room(self, user: User, *, inbound: bool) -> str | None:
        """Close a link if one more link of `user` exceeds a limit. Returns the reason if that is impossible, else None.

        For an incoming link: if its peer, place or region has reached its limit, one of their own links is closed. If
        the table is full, a link of the fullest place in the fullest region is closed: strangers' links before
        members', in that place the one that was idle longest, or else the newest. A link in use is closed only for a
        place that has fewer links, so that nobody gains by replacing others, and members' links only for members.
        For an outgoing link, if the table is full: the link that was idle longest is closed.
        """
        if not inbound:
            if len(self._all) - len(self._cut) < self._bounds.total:
                return None
            idle = [link for link in self._all if link not in self._cut and self._is_idle(link)]
            if not idle:
                return f"there are {len(self._all)}"
            self._end_for_room(min(idle, key=lambda link: link.idle_since))
            return None
        while (scope := self._full_scope(user)) is not None:
            link = self._to_give_way(user, scope)
            if link is None:
                why = self._book.objection(Resource.LINKS, user)
                return why or f"all together have {len(self._booked)}"
            self._end_for_room(link)
        return None

    def _full_scope(self, user: User) -> int | None:
        full = len(self._booked) >= self._bounds.inbound or len(self._all) - len(self._cut) >= self._bounds.total
        return EVERYBODY if full else self._book.scope(Resource.LINKS, user)

    def _to_give_way(self, user: User, scope: int) -> Link | None:
        own = self._book.fullness(Resource.LINKS, user)

        def worth(link: Link) -> tuple[bool, int, int, bool, int, float]:
            strange, region, place, peer = self._book.fullness(Resource.LINKS, link.user)
            idle = self._is_idle(link)
            return strange, region, place, idle, peer, -link.idle_since if idle else link.opened_at

        def may(link: Link) -> bool:
            strange, region, place, _ = self._book.fullness(Resource.LINKS, link.user)
            if strange < own[0]:
                return False
            if scope < REGION or self._is_idle(link) or strange > own[0]:
                return True
            same = link.user.region == user.region
            return (region, place) > (own[1] + (not same), own[2] + 1)

        among = [link for link in self._booked if scope == EVERYBODY or link.user[scope] == user[scope]]
        if scope == 0:
            return next((link for link in among if link is not self.best(link.peer)), None)
        return max(filter(may, among), key=worth, default=None)

    def _is_idle(self, link: Link) -> bool:
        overdue = trio.current_time() - self._bounds.idle_s
        return not link.streams and link.peer not in self._kept and link.idle_since <= overdue

    def _end_for_room(self, link: Link) -> None:
        self._cut.add(link)
        self._give_back(link)
        link.abort("closed for a new connection")

    def _give_back(self, link: Link) -> None:
        user = self._booked.pop(link, None)
        if user is not None:
            self._book.give(Resource.LINKS, user)

    def add(self, link: Link) -> None:
        """Add an authenticated link, after `make_room`. If its peer has too many, ends the oldest except the best."""
        if not link.initiator and self._book.take(Resource.LINKS, link.user) is None:
            self._booked[link] = link.user
        mine = self._usable.setdefault(link.peer, [])
        mine.append(link)
        self._all[link] = None
        self.blocks |= blocks_of([link.remote])
        self._choose(link.peer)
        if not link.initiator:
            for other in mine[:-1]:
                other.doubt()  # a peer that dials again may have lost its earlier links, as when a NAT forgets them
        if len(mine) == 1:
            self._tell(PeerUp(link.peer))
        elif len(staying := [other for other in mine if other not in self._cut]) > self._bounds.per_peer:
            best = self.best(link.peer)
            next(other for other in staying if other is not best).abort("this peer has too many connections")

    def leaving(self, link: Link, reason: str) -> None:
        """Stop using a link for new streams."""
        mine = self._usable.get(link.peer, [])
        self._distrusted.discard(link)
        if link in mine:
            mine.remove(link)
            self._choose(link.peer)
            if not mine:
                del self._usable[link.peer]
                self._tell(PeerDown(link.peer, reason))

    def remove(self, link: Link) -> None:
        """Remove a link that has ended."""
        self.leaving(link, link.reason or "closed")
        self._give_back(link)
        self._cut.discard(link)
        if link in self._all:
            del self._all[link]
            self._past_in += link.bytes_in
            self._past_out += link.bytes_out

    def told(self, link: StreamOwner) -> None:
        """Notify watchers that the peer's identify message arrived on `link`."""
        if link.peer in self._usable:
            self._tell(PeerIdentified(link.peer, link))

    @contextmanager
    def watch(self, *, told: bool = False) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        """A channel of events from now on, with PeerIdentified only if `told`.

        If limits.WATCH_EVENTS events are unread, newer ones are dropped with a warning.
        """
        send, receive = trio.open_memory_channel[PeerEvent](limits.WATCH_EVENTS)
        number = self._next_watcher
        self._next_watcher += 1
        self._watchers[number] = send, told
        try:
            with send, receive:
                yield receive
        finally:
            del self._watchers[number]

    def _tell(self, event: PeerEvent) -> None:
        for watcher, told in self._watchers.values():
            if isinstance(event, PeerIdentified) and not told:
                continue
            try:
                watcher.send_nowait(event)
            except trio.WouldBlock:
                _log.warning("a subscriber to connection events is too slow; dropped event %s", event)

    def traffic(self) -> HostTraffic:
        """Traffic counters of the host and of each connected peer."""
        peers = {peer: self._traffic_of(peer, links) for peer, links in self._usable.items()}
        return HostTraffic(
            bytes_in=self._past_in + sum(link.bytes_in for link in self._all),
            bytes_out=self._past_out + sum(link.bytes_out for link in self._all),
            links=len(self._all),
            streams=sum(len(link.streams) for link in self._all),
            peers=peers,
        )

    def _traffic_of(self, peer: PeerId, links: list[Link]) -> PeerTraffic:
        best, why = self._best.get(peer, (links[-1], ""))
        return PeerTraffic(
            peer=peer,
            bytes_in=sum(link.bytes_in for link in links),
            bytes_out=sum(link.bytes_out for link in links),
            streams=sum(len(link.streams) for link in links),
            links=len(links),
            rtt_s=best.rtt_s,
            remote=str(best.remote),
            initiator=best.initiator,
            way=best.way.word,
            why=why,
        )


def _path(link: Link) -> Path:
    return Path(link.way, link.rtt_s, link.opened_at, link.initiator)
