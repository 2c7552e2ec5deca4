"""The table of links: connected peers, bounds, the link in use to each, watchers, and the bytes that have passed.

Does not dial or accept. Of several links to a peer new streams take the best (`machine.connectivity.path_selection`),
one that is silent while others are not last of all (`net.host.failover`); the others are superseded, stand by for its
end, and are closed once they have been idle for some seconds. Invariants: a
peer is up exactly while it has a usable link, and every change is told to watchers at once and in order; limits hold
for every link; those that came in are in the book, and where that, or the table, is full, the fullest place there makes
room (see `make_room`): no number of identities, open streams or idle hours lets one place keep out the others. Links
that we dialed are not ended for incoming ones.
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
from peerd.machine.budget.book import EVERYBODY, REGION, Book, Means, User
from peerd.machine.connectivity.dial_quota import blocks_of
from peerd.machine.connectivity.path_selection import Path, PathKind, choose
from peerd.net.faults import Faults
from peerd.net.link.link import Link
from peerd.net.link.stream import StreamOwner
from peerd.signals import Signal

_log = logging.getLogger("peerd.net")


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The first link to this peer stands."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The last link to this peer is gone, and why."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerTold:
    """A connected peer introduced itself, or had news of itself: Host.info has it. `link` is where it said so."""

    peer: PeerId
    link: StreamOwner


PeerEvent = PeerUp | PeerDown | PeerTold


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds on the number of links."""

    total: int = limits.LINKS
    inbound: int = limits.LINKS_INBOUND
    per_peer: int = limits.LINKS_PER_PEER
    idle_s: float = 10.0  # a link without streams for so long may be closed to make room
    drain_s: float = 5.0  # a superseded link without streams for so long is closed; see Links.run


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """One connected peer: bytes on the wire over its present links, and what they look like."""

    peer: PeerId
    bytes_in: int
    bytes_out: int
    streams: int
    links: int
    rtt_s: float | None
    remote: str
    initiator: bool  # we dialed
    way: str  # local, direct, punched or relayed: of the link in use, as is what stands above from rtt_s on
    why: str  # that link and no other


@dataclass(frozen=True, slots=True)
class HostTraffic:
    """Bytes on the wire since the start, and the connected peers."""

    bytes_in: int
    bytes_out: int
    links: int
    streams: int
    peers: dict[PeerId, PeerTraffic] = field(default_factory=dict)


class Links:
    """All links of one host."""

    def __init__(self, bounds: LinkLimits, own: PeerId, book: Book, faults: Faults | None = None) -> None:
        self._bounds, self._own, self._book, self._faults = bounds, own, book, faults or Faults()
        self._usable: dict[PeerId, list[Link]] = {}  # newest last
        self._best: dict[PeerId, tuple[Link, str]] = {}  # the one in use, and why
        self._distrusted: set[Link] = set()  # those that were silent though the peer was asked; while it is
        self._moved: list[Callable[[PeerId], None]] = []
        self._news = Signal()  # a link was superseded
        self._all: dict[Link, None] = {}  # oldest first, with those that are on their way out
        self._booked: dict[Link, User] = {}  # those that came in, less those that made room
        self._cut: set[Link] = set()  # those that made room, until they have ended
        self._kept: dict[PeerId, int] = {}  # peers whose links are needed though nothing moves on them
        self.blocks: frozenset[str] = frozenset()  # of addresses from which anybody was ever connected, as hearsay's
        self._past_in = self._past_out = 0  # bytes of links that are gone
        self._watchers: dict[int, tuple[trio.MemorySendChannel[PeerEvent], bool]] = {}  # and whether for PeerTold, too
        self._next_watcher = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Link]:
        return iter(list(self._all))

    def to(self, peer: PeerId) -> list[Link]:
        """All that stand to this peer, the newest last."""
        return list(self._usable.get(peer, ()))

    def peers(self) -> list[PeerId]:
        """Connected peers, the longest connected first."""
        return list(self._usable)

    def best(self, peer: PeerId) -> Link | None:
        """The link to use for a new stream."""
        found = self._best.get(peer)
        if found is not None and not found[0].usable:
            self._choose(peer)
            found = self._best.get(peer)
        return None if found is None else found[0]

    def when_moved(self, told: Callable[[PeerId], None]) -> None:
        """Call `told` whenever new streams to a peer begin to take another link, the first one included."""
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
            _log.debug("new streams to %s take %s (%s)", peer, best, why)
            for told in self._moved:
                with self._faults.guard(f"news of a link to {peer}"):
                    told(peer)

    def distrust(self, link: Link) -> None:
        """Have new streams take other links to its peer, if there are any, for as long as this one is silent."""
        if link in self._usable.get(link.peer, ()):
            self._distrusted.add(link)
            self._choose(link.peer)

    def ask_others(self, silent: Link) -> None:
        """Ask the peers of all links in use that say nothing either: what took one away may have taken more."""
        for link in self:
            if link is not silent and link.streams and link.superseded_at is None:
                link.doubt(patient=True)

    async def run(self) -> None:
        """Close superseded links that are idle.

        Should the two sides ever disagree about which that is, the one with the smaller peer id decides: the other
        waits three times as long.
        """
        while True:
            due = min((self._due(link) for link in self._all), default=math.inf)
            with trio.move_on_at(due):
                await self._news.wait()
                continue
            for peer, links in list(self._usable.items()):
                if len(links) > 1:
                    self._choose(peer)  # round trips may have been measured by now
            async with trio.open_nursery() as nursery:
                for link in self:
                    if not link.streams and self._due(link) <= trio.current_time():
                        nursery.start_soon(link.close, "a better connection took over")

    def _due(self, link: Link) -> float:
        """Time at which to look at a link again, or to close it, if it has no streams and the better one lives."""
        if link.superseded_at is None or not link.usable:
            return math.inf
        wait_s = self._bounds.drain_s * (1 if self._own.raw < link.peer.raw else 3)
        best = self.best(link.peer)
        needed = link.streams or (best is not None and best.silence.doubted)
        return (trio.current_time() if needed else max(link.idle_since, link.superseded_at)) + wait_s

    def direct(self, peer: PeerId) -> Link | None:
        """As `best`, but None when that leads over a relay, as it does only where no other link stands and is heard."""
        best = self.best(peer)
        return None if best is None or best.way == PathKind.RELAYED else best

    def keep(self, peer: PeerId) -> None:
        """Never close this peer's links for being idle: once more than `let_go` was called."""
        self._kept[peer] = self._kept.get(peer, 0) + 1

    def let_go(self, peer: PeerId) -> None:
        """One `keep` is over."""
        count = self._kept.pop(peer, 0) - 1
        if count > 0:
            self._kept[peer] = count

    def make_room(self, user: User, *, inbound: bool) -> str | None:
        """Have room for one more link of `user`; the reason, if there is none.

        For one that comes in, where a peer, place or region has all that it may have, one of its own gives way; where
        the table is full, one of the fullest region's fullest place: strangers before members, of that place the one
        that was idle longest, else the one that came last. A link in use gives way only to a place that has less, so
        that nobody gains by replacing others, and members' links only to members'.
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
                why = self._book.objection(Means.LINKS, user)
                return why or f"all together have {len(self._booked)}"
            self._end_for_room(link)
        return None

    def _full_scope(self, user: User) -> int | None:
        full = len(self._booked) >= self._bounds.inbound or len(self._all) - len(self._cut) >= self._bounds.total
        return EVERYBODY if full else self._book.scope(Means.LINKS, user)

    def _to_give_way(self, user: User, scope: int) -> Link | None:
        own = self._book.fullness(Means.LINKS, user)

        def worth(link: Link) -> tuple[bool, int, int, bool, int, float]:
            strange, region, place, peer = self._book.fullness(Means.LINKS, link.user)
            idle = self._is_idle(link)
            return strange, region, place, idle, peer, -link.idle_since if idle else link.opened_at

        def may(link: Link) -> bool:
            strange, region, place, _ = self._book.fullness(Means.LINKS, link.user)
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
        link.abort("closed to make room")

    def _give_back(self, link: Link) -> None:
        user = self._booked.pop(link, None)
        if user is not None:
            self._book.give(Means.LINKS, user)

    def add(self, link: Link) -> None:
        """Take a link that stands, after `make_room`. A peer with too many loses the oldest that is not in use."""
        if not link.initiator and self._book.take(Means.LINKS, link.user) is None:
            self._booked[link] = link.user
        mine = self._usable.setdefault(link.peer, [])
        mine.append(link)
        self._all[link] = None
        self.blocks |= blocks_of([link.remote])
        self._choose(link.peer)
        if not link.initiator:
            for other in mine[:-1]:
                other.doubt()  # who dials again has perhaps lost what stood before, as when a router forgets it
        if len(mine) == 1:
            self._tell(PeerUp(link.peer))
        elif len(staying := [other for other in mine if other not in self._cut]) > self._bounds.per_peer:
            best = self.best(link.peer)
            next(other for other in staying if other is not best).abort("this peer has too many connections")

    def leaving(self, link: Link, reason: str) -> None:
        """The link takes no new streams."""
        mine = self._usable.get(link.peer, [])
        self._distrusted.discard(link)
        if link in mine:
            mine.remove(link)
            self._choose(link.peer)
            if not mine:
                del self._usable[link.peer]
                self._tell(PeerDown(link.peer, reason))

    def remove(self, link: Link) -> None:
        """The link has ended."""
        self.leaving(link, link.reason or "closed")
        self._give_back(link)
        self._cut.discard(link)
        if link in self._all:
            del self._all[link]
            self._past_in += link.bytes_in
            self._past_out += link.bytes_out

    def told(self, link: StreamOwner) -> None:
        """The peer introduced itself over `link`."""
        if link.peer in self._usable:
            self._tell(PeerTold(link.peer, link))

    @contextmanager
    def watch(self, *, told: bool = False) -> Iterator[trio.MemoryReceiveChannel[PeerEvent]]:
        """Events from now on, PeerTold if `told`.

        A watcher that leaves limits.WATCH_EVENTS unread loses the newest, with a warning.
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
            if isinstance(event, PeerTold) and not told:
                continue
            try:
                watcher.send_nowait(event)
            except trio.WouldBlock:
                _log.warning("a watcher of connections does not keep up: %s is lost", event)

    def traffic(self) -> HostTraffic:
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
