"""Placing: finds the stage that this peer serves, when it joins and when it moves, with evidence from the living.

A newcomer asks the conductor for its list of members. Where nobody conducts, the run's records count instead, but only
those of peers that say so when they are asked: a record outlives its peer by a minute, and a peer that came back serves
nothing yet. Of a peer that nobody can ask they count unless it has announced that it came after them. A peer that has
its turn to move (`machine/swarm/placement`) moves only when no peer that announces the empty stage says that it serves
it, nobody is on the way there, and a stage-mate with the state says that it stays. Hostile input: records, arrivals,
the list, answers. A peer that claims a stage and does not serve it delays a move by _DOUBT_S, no longer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Final

import trio

from peerd.core.clock import Clock
from peerd.core.errors import OTHER_RUN_FILE, Refused, RemoteError
from peerd.core.ids import PeerId
from peerd.core.messages.swarm import MemberInfo, PostsHeld, WhichPosts
from peerd.machine.rpc.declaration import Declaration, Shows
from peerd.machine.swarm.placement import Arrival, Move, Need, Seat, VacancyWatch, place
from peerd.service.conductor.conductor_client import ConductorClient
from peerd.service.conductor.rivals import POSTS, Rivals
from peerd.service.rpc.types import Answer, Incoming

DECLARED: Final = {POSTS: Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0)}
_TOGETHER_S: Final = 1.0  # for others that join at the same moment to be seen
_LOOK_S: Final = 1.0  # between looks at the list
_DOUBT_S: Final = 60.0  # a stage that only the list calls empty, or that others are on their way to, waits so long
_DIRECTORY_S: Final = 10.0  # for the directory, which asks many


class StageFinder:
    """See the module's header. `run`: the run's fingerprint."""

    def __init__(self, run: bytes, following: ConductorClient, rivals: Rivals, clock: Clock) -> None:
        self._run, self._following, self._rivals, self._clock = run, following, rivals, clock
        self._directory, self._own = following.directory, following.own
        self._vacancies = VacancyWatch(self._own.text, self._directory.stages)
        self._leaving: int | None = None  # the stage that this peer is about to leave: a mate must not rely on it

    async def answer(self, posts: Callable[[], list[int]]) -> None:
        """Tell others that ask which stages this peer serves, until cancelled. `posts`: these stages."""

        async def held(call: Incoming[WhichPosts]) -> Answer[PostsHeld]:
            if call.body.run != self._run:
                raise Refused(OTHER_RUN_FILE)
            return Answer(PostsHeld([stage for stage in posts() if stage != self._leaving]))

        rpc = self._following.rpc
        rpc.serve(POSTS, WhichPosts, held, declared=DECLARED[POSTS])
        try:
            await trio.sleep_forever()
        finally:
            rpc.unserve("posts/1")

    # --- joining ----------------------------------------------------------------------------------------------

    async def choose(self, since: float, has: Sequence[int], planned: int | None = None) -> tuple[int, str]:
        """The stage to serve, and the reason. `since`: our arrival; `has`: stages we have states of, the newest first.

        `planned`: the stage that the run's plan gives this peer. Raises RemoteError when there is no directory.
        """
        if planned is not None:
            await self._directory.announce_arrival(since, has, takes=planned)
            return planned, "the run's plan says so"
        await self._directory.announce_arrival(since, has)
        await trio.sleep(_TOGETHER_S)
        coming = await self._arrivals()  # first: if one of them comes to serve meanwhile, it is seen there
        need = await self._need(coming)
        stage, why = place(need, [*coming, Arrival(since, self._own.text, tuple(has))], self._own.text)
        await self._directory.announce_arrival(since, has, takes=stage)
        return stage, why

    async def serves_now(self, announced: Callable[[], Awaitable[None]]) -> None:
        """Say that this peer is no longer on its way. A directory that fails is no error: what was said expires.

        `announced`: waits until its records are there. Before that, others would see it neither here nor on its way.
        """
        with trio.move_on_after(_DIRECTORY_S), suppress(RemoteError):
            await announced()
            await self._directory.withdraw_arrival()

    async def _need(self, coming: Sequence[Arrival]) -> Need:
        stages = self._directory.stages
        listing = await self._following.list_members(self._run)
        if listing is not None:
            seats = [Seat(m.peer, m.stage) for m in listing.members if m.since]
            return Need(stages, seats, listing.held, listing.capacity)
        announced = await self._directory.refresh()
        posts = await self._rivals.posts(_by_turns(announced, stages))
        came = {one.peer: one.since for one in coming}
        living = [
            entry
            for (peer, stage), entry in announced.items()
            if stage in posts.get(peer, ())
            or (peer not in posts and entry.progress.client and came.get(peer.text, 0.0) <= entry.progress.since)
        ]
        seats = [Seat(entry.peer.text, entry.progress.stage) for entry in living]
        return Need(stages, seats, frozenset(entry.progress.stage for entry in living if entry.progress.step))

    async def _arrivals(self) -> list[Arrival]:
        """Other peers that are about to serve a stage."""
        return [one for one in await self._directory.arrivals(self._clock.wall()) if one.peer != self._own.text]

    # --- moving -----------------------------------------------------------------------------------------------

    async def next_move(self, step: Callable[[], int]) -> Move:
        """Wait until this peer is to move; from then on it stays for a while. `step`: that of its own state."""
        self.stays()
        followed: PeerId | None = None
        while True:
            await trio.sleep(_LOOK_S)
            conductor = self._following.conductor
            if conductor is not None and not self._following.fails(conductor) and conductor != followed:
                followed = conductor
                self._vacancies.forget()  # it gathers its members
            move = self._vacancies.look(trio.current_time(), self._living())
            if move is not None and await self._is_backed(move, step()):
                self._vacancies.moved(trio.current_time())
                return move

    def _living(self) -> list[MemberInfo]:
        """The last list; where stage 0 is lost there is no conductor to strike its peers off: those that fail us go."""
        return [
            member
            for member in self._following.members
            if member.stage != 0 or not self._following.fails(PeerId.parse(member.peer))
        ]

    async def goes(self, stage: int) -> None:
        """Say that this peer is on its way to `stage`. A directory that fails is no error: others may come, too."""
        with trio.move_on_after(_DIRECTORY_S), suppress(RemoteError):
            await self._directory.announce_arrival(self._clock.wall(), takes=stage)

    async def may_leave(self, stage: int, mates: Sequence[str]) -> bool:
        """True when one of these stage-mates says that it serves the stage; none may rely on us then, until `stays`."""
        self._leaving = stage  # first, so that of two mates that ask at once neither relies on the other
        held = await self._rivals.posts(map(PeerId.parse, mates))
        if any(stage in stages for stages in held.values()):
            return True
        self.stays()
        return False

    def stays(self) -> None:
        """Mates may rely on this peer again: it has left, or stays where it is."""
        self._leaving = None

    async def _is_backed(self, move: Move, step: int) -> bool:
        """True when the evidence is for the move: see the module's header."""
        with trio.move_on_after(_DIRECTORY_S):
            try:
                coming = await self._arrivals()  # first, as in `choose`
                announced = await self._directory.refresh()
            except RemoteError:
                return False
            serving = {peer for peer, stage in announced if stage == move.target and peer != self._own}
            if move.empty_s < _DOUBT_S:
                awaited = any(one.takes in (None, move.target) for one in coming)
                if awaited or any(move.target in held for held in (await self._rivals.posts(serving)).values()):
                    return False
            with_state = set(move.ready)
            for mate in move.mates:
                entry = announced.get((PeerId.parse(mate), move.source))
                if step == 0 or (not move.ready and entry is not None and entry.progress.step >= step):
                    with_state.add(mate)
            return await self.may_leave(move.source, sorted(with_state))
        self.stays()  # it took too long
        return False


def _by_turns(posts: Iterable[tuple[PeerId, int]], stages: int) -> list[PeerId]:
    """The peers of these posts, one of each stage after the other: some of each come first."""
    of = [sorted(peer for peer, at in posts if at == stage) for stage in range(stages)]
    return list(dict.fromkeys(peer for row in zip_longest(*of) for peer in row if peer is not None))
