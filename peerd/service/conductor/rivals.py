"""Rival conductors: asks the peers of stage 0, in parallel and for a bounded time, and weighs the claims of others.

A term alone moves no duty. Only a peer that itself answers that it conducts can take the duty over. Of two parts of a
run that meet the one with more proven work goes on: that with more than a third of the known members behind it, and of
two such the one that made more steps. At equal work the followers of each decide: the members that report here against
those whose records name the other, and only members that were part of the run before, where this peer knows any.
Between equals, and while this peer's reign has made no step, the later term decides, and of one term the earlier place
in the order; a stranger's does not where known members report here. Terms far above ours are not believed. So two that
conduct for a moment agree on one of them, and the claim of a peer without followers costs a look.
Hostile input: any term and position, from any peer of stage 0; silence; records.
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
from peerd.core.messages.swarm import Conducts, Position, PostsHeld, WhichPosts, WhoConducts
from peerd.machine.positions.proven_positions import Backing
from peerd.net.host.host import Host
from peerd.service.conductor.conductor_client import ConductorClient
from peerd.service.rpc.rpc import Rpc

log = logging.getLogger("peerd.service.conductor.rivals")

POSTS: Final = "posts/1/held"  # the method that `posts` calls
_CONNECT_S = 3.0
_ANSWER_S = 3.0


def believed(own: int, heard: int) -> int:
    """The later of both terms; a heard one further above ours than conductors can have come and gone is ignored."""
    jump = TERM_JUMP if own else TERM_FIRST  # a peer that has just come knows no term
    return max(own, heard) if heard <= own + jump else own


def next_term(own: int, heard: int) -> int:
    """The term of a new reign."""
    return min(believed(own, heard) + 1, TERM_MAX)


@dataclass(frozen=True, slots=True)
class ConductorClaim:
    """Our own claim as a conductor. `followers`: the members that report to us; `established`: peers that are known as
    members of the run; `has_stepped`: they made a step with us, and stand at `current`.
    """

    term: int
    followers: Collection[str]
    has_stepped: bool
    current: Position | None = None
    established: Collection[str] = ()
    backers: frozenset[str] = frozenset()  # the peer itself and its followers


class Rivals:
    """One peer's view of the other conductors of its run."""

    def __init__(self, run: bytes, rpc: Rpc, host: Host, following: ConductorClient) -> None:
        self._run, self._rpc, self._host, self.following = run, rpc, host, following
        self._at_once = trio.CapacityLimiter(LOOKED_AT_ONCE)
        self._doubted: set[PeerId] = set()  # conductors whose position was reported in the log as not proven
        self._named: set[PeerId] = set()  # peers whose term was reported in the log as not believed

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
        """Those of the peers that can be reached."""
        found: set[PeerId] = set()

        async def look(peer: PeerId) -> None:
            if await self._linked(peer):
                found.add(peer)

        await self._side_by_side(look, list(peers)[:LOOKED_AT_PEERS])
        return found

    async def posts(self, peers: Iterable[PeerId]) -> dict[PeerId, Collection[int]]:
        """The stages that each of the peers serves by its own word; those that cannot be asked are left out.

        Of one that is too busy to say, its records count.
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
                found[peer] = ()  # it has no part in the run, or none yet
            else:
                found[peer] = answer.body.stages

        await self._side_by_side(ask, list(peers)[:LOOKED_AT_PEERS])
        return found

    async def answers(self, peer: PeerId) -> bool:
        """True when the peer answers a call, be it with a refusal."""
        async with self._at_once:
            try:
                await self._rpc.call(peer, "swarm/6/who", WhoConducts(self._run), Conducts, timeout_s=_ANSWER_S)
            except (Unreachable, TooSlow):
                return False
            except RemoteError:
                pass
        return True

    def better(self, ours: ConductorClaim, peer: PeerId, told: Conducts, backing: Backing) -> bool:
        """True when `peer`, which answers that it conducts, has the better claim to the duty that is ours.

        `backing`: which of the two parts enough known members stand behind.
        """
        by_work = self._more_work(ours, peer, told, backing)
        return by_work if by_work is not None else self._better_followed(ours, peer, told.term)

    def _more_work(self, ours: ConductorClaim, peer: PeerId, told: Conducts, backing: Backing) -> bool | None:
        """True if the other part of the run has more proven work, False if ours has; None if work does not decide.

        A part counts with the members that are known to be in it: a peer that trains by itself for long yields.
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
                "%s conducts another part of this run at step %d, which too few members known here bear out; this part"
                " goes on from step %d (to join the other: --trust %s)",
                peer.short, there.step, here.step, peer.text,
            )  # fmt: skip
        return False

    def _better_followed(self, ours: ConductorClaim, peer: PeerId, claimed: int) -> bool:
        term = ours.term
        if believed(term, claimed) != max(term, claimed):
            if peer not in self._named:
                self._named = {*list(self._named)[-LOOKED_AT_PEERS:], peer}
                log.warning("%s says that it conducts in term %d: that is not believed", peer.short, claimed)
            return False
        mine = {self.following.own.text, *ours.followers} - {peer.text}
        theirs = {peer.text, *self.following.followers_of(peer)} - mine
        if others := set(ours.established) - {self.following.own.text}:  # records of strangers are free
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
