"""Rival conductors: asks the peers of stage 0 in parallel, for a bounded time, and compares their claims with ours.

Only a peer that itself answers that it conducts can replace this peer; a term alone is not enough. If two parts of a
run meet, the part with more proven work continues: the one that more than a third of the known members signed; if that
is true of both, the one that made more steps. If work does not decide, the followers do: members that report to this
peer against members whose records name the other. Only members that were part of the run before count, if this peer
knows any. With equally many followers, or if no step was made under this peer, the later term wins, and for equal terms
the earlier peer in the order; but a stranger does not win while known members report here. Terms far above ours are
not credible. So two peers that conduct for a moment agree on one of them, and the claim of a peer without followers
only costs a check. Hostile input: any term and position, from any peer of stage 0; silence; records.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import trio

from peerd.core.errors import Overloaded, RemoteError, TooSlow, Unreachable
from peerd.core.ids import PeerId
from peerd.core.limits import LOOKED_AT_ONCE, LOOKED_AT_PEERS, TERM_FIRST, TERM_JUMP, TERM_MAX
from peerd.messages.swarm import Conducts, Position, PostsHeld, WhichPosts, WhoConducts
from peerd.rpc.rpc import Rpc
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.positions.proven_positions import Backing
from peerd.wire.host.host import Host

log = logging.getLogger("peerd.swarm.conductor.rivals")

POSTS: Final = "posts/1/held"  # the method that `posts` calls
_CONNECT_S = 3.0
_ANSWER_S = 3.0


def believed(own: int, heard: int) -> int:
    """The later term, unless `heard` is further above ours than conductors can have changed: then `own`."""
    jump = TERM_JUMP if own else TERM_FIRST  # a newcomer knows no term
    return max(own, heard) if heard <= own + jump else own


def next_term(own: int, heard: int) -> int:
    """The term of a new tenure."""
    return min(believed(own, heard) + 1, TERM_MAX)


@dataclass(frozen=True, slots=True)
class ConductorClaim:
    """Our own claim to be the conductor.

    `followers`: members that report to us; `has_stepped`: they made a step with us, and are at `current`;
    `established`: peers that are known as members of the run.
    """

    term: int
    followers: Collection[str]
    has_stepped: bool
    current: Position | None = None
    established: Collection[str] = ()
    backers: frozenset[str] = frozenset()  # this peer and its followers


class Rivals:
    """One peer's view of the other conductors of its run."""

    def __init__(self, run: bytes, rpc: Rpc, host: Host, following: ConductorClient) -> None:
        self._run, self._rpc, self._host, self.following = run, rpc, host, following
        self._at_once = trio.CapacityLimiter(LOOKED_AT_ONCE)
        self._doubted: set[PeerId] = set()  # conductors whose position was logged as not proven
        self._named: set[PeerId] = set()  # peers whose term was logged as not credible

    async def conducting(self) -> dict[PeerId, Conducts]:
        """The peers of stage 0 that answer that they conduct, each with its answer."""
        own, linked = self.following.own, set(self._host.connected())
        order = [peer for peer in self.following.order() if peer != own]
        others = [peer for peer in order if peer in linked or not self.following.suspected(peer)]
        others.sort(key=lambda peer: peer not in linked)  # stable: in order otherwise
        found: dict[PeerId, Conducts] = {}

        async def ask(peer: PeerId) -> None:
            told = await self._ask(peer)
            if told is not None:
                found[peer] = told

        await self._side_by_side(ask, others[:LOOKED_AT_PEERS])
        return found

    async def reachable(self, peers: Iterable[PeerId]) -> set[PeerId]:
        """The peers that can be reached. At most LOOKED_AT_PEERS are tried."""
        found: set[PeerId] = set()

        async def look(peer: PeerId) -> None:
            if await self._linked(peer):
                found.add(peer)

        await self._side_by_side(look, list(peers)[:LOOKED_AT_PEERS])
        return found

    async def posts(self, peers: Iterable[PeerId]) -> dict[PeerId, Collection[int]]:
        """The stages that each peer says it serves, without the peers that cannot be reached.

        For a peer that is too busy to answer, its records count.
        """
        found: dict[PeerId, Collection[int]] = {}

        async def ask(peer: PeerId) -> None:
            if not await self._linked(peer):
                return
            try:
                body = WhichPosts(self._run)
                answer = await self._rpc.call(peer, POSTS, body, PostsHeld, timeout_s=_ANSWER_S)
            except (Unreachable, TooSlow):
                return
            except Overloaded:
                found[peer] = [stage for other, stage in self.following.directory.announced if other == peer]
            except RemoteError:
                found[peer] = ()  # it takes no part in the run yet
            else:
                found[peer] = answer.body.stages

        await self._side_by_side(ask, list(peers)[:LOOKED_AT_PEERS])
        return found

    async def answers(self, peer: PeerId) -> bool:
        """True if the peer answers a call, even with a refusal."""
        async with self._at_once:
            try:
                await self._rpc.call(peer, "swarm/6/who", WhoConducts(self._run), Conducts, timeout_s=_ANSWER_S)
            except (Unreachable, TooSlow):
                return False
            except RemoteError:
                pass
        return True

    def better(self, ours: ConductorClaim, peer: PeerId, told: Conducts, backing: Backing) -> bool:
        """True if `peer`, which answers that it conducts, has a better claim to the duty than this peer.

        `backing`: which of the two parts enough known members have signed for.
        """
        by_work = self._more_work(ours, peer, told, backing)
        return by_work if by_work is not None else self._better_followed(ours, peer, told.term)

    def _more_work(self, ours: ConductorClaim, peer: PeerId, told: Conducts, backing: Backing) -> bool | None:
        """True if the other part of the run has more proven work, False if ours has, None if work does not decide.

        Steps count only with the signatures of known members: a peer that has trained alone for long does not win.
        """
        here, there = ours.current, told.current
        if here is None or there is None or here == there or backing is Backing.NEITHER:
            return None
        if backing is Backing.THEIRS:
            return True
        if backing is Backing.BOTH:
            return there.step > here.step if here.step != there.step else None
        if there.step > here.step and peer not in self._doubted:
            self._doubted = {*list(self._doubted)[-LOOKED_AT_PEERS:], peer}
            log.warning(
                "%s conducts another part of this run at step %d, for which too few known members have signed; this"
                " part continues from step %d (to join the other part: --trust %s)",
                peer.short, there.step, here.step, peer.text,
            )  # fmt: skip
        return False

    def _better_followed(self, ours: ConductorClaim, peer: PeerId, claimed: int) -> bool:
        term = ours.term
        if believed(term, claimed) != max(term, claimed):
            if peer not in self._named:
                self._named = {*list(self._named)[-LOOKED_AT_PEERS:], peer}
                log.warning("%s claims to conduct in term %d: ignored, the term is too high", peer.short, claimed)
            return False
        mine = {self.following.own.text, *ours.followers} - {peer.text}
        theirs = {peer.text, *self.following.followers_of(peer)} - mine
        if others := set(ours.established) - {self.following.own.text}:  # a stranger can publish any number of records
            mine, theirs = mine & {*others, self.following.own.text}, theirs & others
        if len(theirs) > len(mine):
            return True
        is_stranger = bool(others) and peer.text not in others and mine != {self.following.own.text}
        if (ours.has_stepped or is_stranger) and len(theirs) < len(mine):
            return False
        order = self.following.order()
        places = {one: place for place, one in enumerate(order)}
        earlier = places.get(peer, len(order)) < places.get(self.following.own, len(order))
        return claimed > term or (claimed == term and earlier)

    async def _ask(self, peer: PeerId) -> Conducts | None:
        if not await self._linked(peer):
            self.following.suspect(peer)
            return None
        try:
            body = WhoConducts(self._run)
            told = (await self._rpc.call(peer, "swarm/6/who", body, Conducts, timeout_s=_ANSWER_S)).body
        except RemoteError:
            return None
        self.following.trust(peer)
        return told

    async def _linked(self, peer: PeerId) -> bool:
        if peer not in self._host.connected():
            with trio.move_on_after(_CONNECT_S), suppress(RemoteError):
                await self._host.connect(peer)
        return peer in self._host.connected()

    async def _side_by_side(self, look: Callable[[PeerId], Awaitable[None]], peers: list[PeerId]) -> None:
        async def one(peer: PeerId) -> None:
            async with self._at_once:
                await look(peer)

        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(one, peer)
