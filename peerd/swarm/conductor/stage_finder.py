"""Finds the stage that this peer serves, when it joins and when it moves.

A newcomer asks the conductor for its list of members. If nobody conducts, the records of the run count instead, but
only those of peers that confirm their record when asked: a record outlives its peer by a minute, and a peer that has
restarted serves nothing yet. A peer that can only dial cannot be asked; its record counts unless it has announced its
arrival after that record. A peer whose turn it is to move (`swarm/stage_choice`) moves only if no peer confirms
that it serves the empty stage, no peer is about to serve it, and a stage-mate with the state confirms that it stays.
Hostile input: records, arrivals, the list, answers. A peer that falsely claims to serve a stage delays a move by 60 s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Final

import trio

from peerd.core.clock import Clock
from peerd.core.errors import RemoteError, other_run_file
from peerd.core.ids import PeerId
from peerd.messages.swarm import MemberInfo, PostsHeld, WhichPosts
from peerd.rpc.methods.declaration import Declaration, Shows
from peerd.rpc.rpc_types import Answer, Incoming
from peerd.swarm.conductor.conductor_client import ConductorClient
from peerd.swarm.conductor.rivals import POSTS, Rivals
from peerd.swarm.stage_choice import Arrival, Move, Need, Seat, VacancyWatch, place

DECLARED: Final = {POSTS: Declaration(shows=Shows.NOTHING, rows=None, memory_bytes=0, device_s=0.0)}
_TOGETHER_S: Final = 1.0  # until we read the arrivals, so that peers that join at the same time see each other
_LOOK_S: Final = 1.0  # between checks of the list
_DOUBT_S: Final = 60.0  # wait if a peer claims to serve the empty stage, or others may be moving there
_DIRECTORY_S: Final = 10.0  # limit for the directory, which asks many peers


class StageFinder:
    """Chooses the stage of one peer. `run`: the run's fingerprint."""

    def __init__(self, run: bytes, following: ConductorClient, rivals: Rivals, clock: Clock) -> None:
        self._run, self._following, self._rivals, self._clock = run, following, rivals, clock
        self._directory, self._own = following.directory, following.own
        self._vacancies = VacancyWatch(self._own.text, self._directory.stages)
        self._leaving: int | None = None  # the stage that this peer is about to leave; mates must not rely on it

    async def answer(self, posts: Callable[[], list[int]]) -> None:
        """Answer other peers that ask which stages this peer serves, until cancelled. `posts` returns these stages."""

        async def held(call: Incoming[WhichPosts]) -> Answer[PostsHeld]:
            if call.body.run != self._run:
                raise other_run_file()
            return Answer(PostsHeld([stage for stage in posts() if stage != self._leaving]))

        rpc = self._following.rpc
        rpc.serve(POSTS, WhichPosts, held, declared=DECLARED[POSTS])
        try:
            await trio.sleep_forever()
        finally:
            rpc.unserve("posts/1")

    # --- joining ----------------------------------------------------------------------------------------------

    async def choose(self, since: float, has: Sequence[int], planned: int | None = None) -> tuple[int, str]:
        """Choose the stage to serve. Returns the stage and the reason.

        `since`: our arrival; `has`: stages of which we have states, the newest first; `planned`: the stage of this peer
        in the run's plan, if any. Raises RemoteError if the directory cannot be reached.
        """
        if planned is not None:
            await self._directory.announce_arrival(since, has, takes=planned)
            return planned, "the run's plan says so"
        await self._directory.announce_arrival(since, has)
        await trio.sleep(_TOGETHER_S)
        coming = await self._arrivals()  # before `_need`: a peer that begins to serve in between is then in the list
        need = await self._need(coming)
        stage, why = place(need, [*coming, Arrival(since, self._own.text, tuple(has))], self._own.text)
        await self._directory.announce_arrival(since, has, takes=stage)
        return stage, why

    async def serves_now(self, announced: Callable[[], Awaitable[None]]) -> None:
        """Withdraw the announcement that this peer is about to serve; if the directory fails, it expires later.

        `announced` waits until this peer's record is published. Without it others would see neither the record nor the
        arrival.
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
        """Wait until this peer should move. Then it does not move again for a while. `step`: step of its own state."""
        self.stays()
        followed: PeerId | None = None
        while True:
            await trio.sleep(_LOOK_S)
            conductor = self._following.conductor
            if conductor is not None and not self._following.fails(conductor) and conductor != followed:
                followed = conductor
                self._vacancies.forget()  # a new conductor first gathers its members
            move = self._vacancies.look(trio.current_time(), self._living())
            if move is not None and await self._is_backed(move, step()):
                self._vacancies.moved(trio.current_time())
                return move

    def _living(self) -> list[MemberInfo]:
        """The conductor's last list, without peers of stage 0 that we cannot reach.

        If stage 0 is lost, no conductor removes them from the list.
        """
        return [
            member
            for member in self._following.members
            if member.stage != 0 or not self._following.fails(PeerId.parse(member.peer))
        ]

    async def goes(self, stage: int) -> None:
        """Announce that this peer moves to `stage`. If the directory fails, other peers may move there, too."""
        with trio.move_on_after(_DIRECTORY_S), suppress(RemoteError):
            await self._directory.announce_arrival(self._clock.wall(), takes=stage)

    async def may_leave(self, stage: int, mates: Sequence[str]) -> bool:
        """True if one of these stage-mates serves the stage. Then no mate may rely on this peer, until `stays`."""
        self._leaving = stage  # first, so that of two mates that ask at once neither relies on the other
        held = await self._rivals.posts(map(PeerId.parse, mates))
        if any(stage in stages for stages in held.values()):
            return True
        self.stays()
        return False

    def stays(self) -> None:
        """End the effect of `may_leave`: this peer has left the stage, or stays there, and mates may rely on it."""
        self._leaving = None

    async def _is_backed(self, move: Move, step: int) -> bool:
        """True if the directory and other peers confirm the move, by the rules in the module's docstring."""
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
        self.stays()  # timed out
        return False


def _by_turns(posts: Iterable[tuple[PeerId, int]], stages: int) -> list[PeerId]:
    """The peers of these posts, in turns: one of each stage, then a second one of each, and so on."""
    of = [sorted(peer for peer, at in posts if at == stage) for stage in range(stages)]
    return list(dict.fromkeys(peer for row in zip_longest(*of) for peer in row if peer is not None))
