"""Client of the conductor: finds and follows the stage-0 peer that has served longest and can be reached.

Every peer of a run sorts the peers of stage 0 in the same way: peers that can be dialed first, then those that have
served longest, then by peer id. So all find the same conductor without an election. If a peer cannot be reached, it is
suspected for a while, and the next one in the order is asked. The next one accepts the duty only if it suspects all
peers before it, too (`duty`). If a peer refuses, others are asked as well: the first in the order may have been away,
and now follow a later one. If all refuse for long, `duty` skips those that refuse, because otherwise a peer that claims
to be the first could block the duty forever. `ask` calls the current conductor; when the conductor changes, `changes`
increases, and the caller reports again all that the new one cannot know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import trio

from peerd.core.bounded_dict import BoundedDict
from peerd.core.errors import Cause, Refused, RemoteError, TooSlow
from peerd.core.ids import PeerId
from peerd.core.limits import REPORTS_AT_ONCE, REPORTS_PER_S, SUSPECTS
from peerd.core.signals import Signal
from peerd.messages.encoding import Empty
from peerd.messages.swarm import Forecast, Leave, ListMembers, MemberInfo, MembersListed
from peerd.rpc.rpc import Answer, Rpc
from peerd.swarm.directory import Directory
from peerd.swarm.posts import peer_of, post_name
from peerd.swarm.steps.member_list import KnownMembers
from peerd.wire.rate.suspicion import Suspicion

A = TypeVar("A", bound=msgspec.Struct)


class ConductorLinks(Protocol):
    """Checks of the links to conductors, as `ConductorClient` needs them."""

    def doubt(self, peer: PeerId) -> float:
        """Check that `peer` is alive, because an answer is overdue. Returns the seconds since its last byte arrived."""
        ...

    async def probe(self, peer: PeerId) -> None:
        """Ping `peer`, connecting first if needed. Raises RemoteError if it does not answer within some seconds."""
        ...


_SUSPECT_S, _SUSPECT_MOST_S = 6.0, 600.0
_PATIENT_TIMES = 3  # failures in a row before each further one doubles the time
_RETRY_S = 0.3
_ROUNDS = 2  # refusals, by all peers in turn, before `duty` skips a peer
_STUBBORN = 25  # refusals in a row (about 10 s) by all reachable peers before a suspect is asked
_FURTHER = 10  # further peers of the order that are asked for each refusal of the first one
_OVERDUE_S, _LOOK_S = 2.0, 1.0  # delay of an answer before its link is checked, and between checks
_FAILURES_ON_FULL_LINE = 6  # failures (about a minute) after which a peer on a full line is suspected
_ANEW_S = 3.0  # to reach a peer again whose link has ended
_REFRESH_S = 3.0
_GOODBYE_S = 1.0
_LIST_S = 3.0  # for each part of the conductor's list
_PARTS = 64  # at most, of one list
_FOLLOWED = 4  # conductors that are remembered: the last one may have published no counts
_ASKED = 4  # peers of stage 0 that are asked for the list; the first reachable one should conduct


@dataclass(frozen=True, slots=True)
class ListedMembers:
    """The conductor's list of members. `held`: stages of which a member has a state later than the initial one.

    `capacity`: microbatches per second that each stage can process; empty if unknown.
    """

    members: list[MemberInfo]
    held: frozenset[int]
    capacity: tuple[float, ...] = ()


@dataclass(slots=True)
class ConductorClient:
    """Follows the conductor of one run. `joined_since`: when this peer joined stage 0, or None if it serves another."""

    rpc: Rpc
    own: PeerId
    directory: Directory
    joined_since: float | None = None
    ways: ConductorLinks | None = None
    conductor: PeerId | None = None
    accepted_by: PeerId | None = None  # the peer that accepted our last report, or took over our duty
    # Other peers that accepted our reports as conductors, the latest last.
    followed: BoundedDict[PeerId, None] = field(default_factory=lambda: BoundedDict(_FOLLOWED))
    changes: int = 0
    cause: Callable[[], str | None] = lambda: None  # why this peer may reach nobody: its own clock or token
    answered: bool = False  # True once a conductor has accepted a report of ours
    differs: bool = False  # True while the conductor refuses us because our run file differs
    run_waits_for: str = ""  # why the run is stalled, by the conductor's last answer; "" if it is not
    members: list[MemberInfo] = field(default_factory=list)  # the conductor's last list
    established: dict[str, int] = field(default_factory=dict)  # post that contributed to a step -> its stage
    resting: set[str] = field(default_factory=set)  # those of `established` that rest
    told: Signal = field(default_factory=Signal)  # notified with each list of members
    _waits_for: str | None = None
    _helped: set[str] = field(default_factory=set)  # peers of `established` that contributed to a step
    _forecast: tuple[float, Forecast] | None = None  # (received at, forecast)
    _suspicion: Suspicion[PeerId] = field(
        default_factory=lambda: Suspicion(_SUSPECT_S, _SUSPECT_MOST_S, SUSPECTS, steady=_PATIENT_TIMES)
    )
    _failed_at: float = float("-inf")  # time of the last failed call
    # Stage-0 peers that the directory does not list -> (True if they cannot be dialed, serving since).
    _seen: dict[PeerId, tuple[bool, float]] = field(default_factory=dict)
    _refreshed: float = float("-inf")
    # Peer of stage 0 -> number of refusals since a peer last accepted our report.
    _refusals: BoundedDict[PeerId, int] = field(default_factory=lambda: BoundedDict(SUSPECTS))
    _denied: bool = False  # True if a refusal since then had another reason than that the peer does not conduct
    _reported: dict[str, float] = field(default_factory=dict)  # kind of report -> when its rate limit is free again

    @property
    def waits_for(self) -> str | None:
        """Why no conductor accepts our reports (our own clock or token, if that is the cause), or None if one does."""
        return self._waits_for and (self.cause() or self._waits_for)

    def order(self) -> list[PeerId]:
        """Peers of stage 0 in the order in which they conduct. Peers that cannot be dialed come last."""
        announced = self.directory.announced.values()
        elsewhere = {entry.peer for entry in announced}
        known = {peer: told for peer, told in self._seen.items() if peer not in elsewhere}
        for entry in announced:
            if entry.progress.stage == 0:
                known[entry.peer] = (entry.progress.client, entry.progress.since)
        known.pop(self.own, None)
        if self.joined_since is not None:
            known[self.own] = (self.directory.only_dials, self.joined_since)
        return [peer for _, peer in sorted((rank, peer) for peer, rank in known.items())]

    def note_members(self, members: Iterable[MemberInfo]) -> list[MemberInfo]:
        """Store the conductor's list: the members' addresses, and the order of conductors. Returns its valid entries.

        The list has peers that have just joined, which the directory may not know yet. So all peers use the same order
        if the conductor is lost a moment later.
        """
        self.members = known = self.directory.learn_members(members)
        ready = {post_name(m.peer, m.stage): m.stage for m in known if m.ready and m.helped}
        stages = set(ready.values())  # of stages without ready members, we keep the previous posts
        late = {post_name(m.peer, m.stage) for m in known}  # members that lag behind are kept
        kept = {p: s for p, s in self.established.items() if s not in stages or p in late}
        self.established = kept | ready
        self.resting = {post for m in known if m.rests and (post := post_name(m.peer, m.stage)) in kept}
        helped = self._helped | {m.peer for m in known if m.helped}  # a new conductor does not know them at first
        self._helped = helped & set(map(peer_of, self.established))
        self.told.notify()
        alive = {m.peer for m in known}
        for peer in [p for p in self._seen if p.text not in alive and p != self.conductor]:
            del self._seen[peer]
        self._seen |= {PeerId.parse(m.peer): (m.client, m.since) for m in known if m.stage == 0 and m.since}
        return known

    def serves(self, peer: str) -> bool:
        """True if the conductor that we follow lists this peer as serving and as a contributor to an earlier step."""
        return peer in self._helped

    def posts(self) -> set[tuple[PeerId, int]]:
        """Members that should be alive, as (peer, stage), from the directory and the conductor's last list."""
        return {*self.directory.announced, *((PeerId.parse(m.peer), m.stage) for m in self.members if m.since)}

    def alive(self) -> set[tuple[PeerId, int]]:
        """Members on the conductor's last list, and members that have joined since by their records, as (peer, stage).

        A record outlives its peer by a minute, so records of peers that the conductor has removed do not count.
        """
        listed = {(PeerId.parse(m.peer), m.stage) for m in self.members if m.since}
        newest = max((m.since for m in self.members), default=0.0)
        came = {post for post, entry in self.directory.announced.items() if entry.progress.since > newest}
        return listed | came

    def known(self) -> set[PeerId]:
        """The peers of `posts()`."""
        return {peer for peer, _ in self.posts()}

    def announced_step(self) -> int:
        """The newest step in any record of a stage peer, or of a keeper of checkpoints."""
        steps = [entry.progress.step for entry in self.directory.announced.values()]
        steps += [position.step for positions in self.directory.kept.values() for position in positions]
        return max(steps, default=0)

    def followers_of(self, conductor: PeerId) -> set[str]:
        """The peers whose records say that they follow this conductor."""
        announced = self.directory.announced.values()
        return {entry.peer.text for entry in announced if entry.progress.conductor == conductor.text}

    def note_stage0(self, peer: PeerId, since: float, client: bool) -> None:
        """Record since when a peer of stage 0 serves. `client`: it can dial, but not be dialed."""
        self._seen[peer] = client, since

    def note_forecast(self, forecast: Forecast | None, waits_for: str = "") -> None:
        """Store the conductor's forecast of the current step, and its text on what the step waits for."""
        self.run_waits_for = waits_for
        self._forecast = (trio.current_time(), forecast) if forecast is not None else None

    @property
    def forecast(self) -> Forecast | None:
        """The conductor's last forecast of the current step, minus the time since then. None if unknown."""
        if self._forecast is None:
            return None
        at, told = self._forecast
        passed_s = trio.current_time() - at
        return Forecast(max(0.0, told.whole_in_s - passed_s), max(0.0, told.step_in_s - passed_s))

    @property
    def step_in_s(self) -> float | None:
        """Seconds until the current step should be done, or None if unknown."""
        return self.forecast.step_in_s if self.forecast is not None else None

    def duty(self) -> PeerId:
        """The peer that should conduct, in our view: ourselves only if all peers before us are suspected or refuse."""
        order = self.order()
        rounds = _ROUNDS + len(order) / _FURTHER  # by then every peer in the order has refused
        for peer in order:
            if peer == self.own or not (self.suspected(peer) or self._refusals.get(peer, 0) > rounds):
                return peer
        return self.own

    def suspect(self, peer: PeerId) -> None:
        """Suspect a peer that could not be reached, so that the next one in the order is asked for a while.

        The time grows with failures in a row, so that a client tries few of many records that lead to no peer.
        """
        self._suspicion.failed(trio.current_time(), peer, anew=True)
        self._let_go_of(peer)

    def _suspect_longer(self, began: float) -> None:
        """Extend all suspicions by the time since `began`, which a failed call took.

        Otherwise, if the first two peers of the order are dead, each is asked after the other's suspicion has expired,
        and the third is never asked.
        """
        now, began = trio.current_time(), max(began, self._failed_at)  # parallel calls count each second once
        self._failed_at = now
        self._suspicion.prolong(began, now - began)

    def _let_go_of(self, peer: PeerId) -> None:
        if self.conductor == peer:  # otherwise another conductor is known already
            self.conductor = None
        if self.accepted_by == peer:
            self.accepted_by = None

    def hand_to(self, peer: PeerId) -> None:
        """Follow this peer, which has answered that it conducts."""
        self.trust(peer)
        self.conductor = self.accepted_by = peer

    def _note_refusal(self, peer: PeerId, error: Refused) -> None:
        """Record that a peer refused our report. Others are asked, too; `waits_for` keeps the most helpful reason."""
        elsewhere = error.cause is Cause.NOT_CONDUCTING
        self._refusals[peer] = self._refusals.get(peer, 0) + 1
        if not elsewhere:
            self.differs = peer != self.own and error.cause is Cause.OTHER_RUN_FILE
        if not (elsewhere and self._denied):
            self._waits_for = f"the conductor: {error}"
        self._denied = self._denied or not elsewhere
        self._let_go_of(peer)

    def suspected(self, peer: PeerId) -> bool:
        """True while this peer is suspected."""
        return self._suspicion.is_aside(trio.current_time(), peer)

    def fails(self, peer: PeerId) -> bool:
        """True if our last attempt to reach this peer failed."""
        return peer in self._suspicion

    def trust(self, peer: PeerId) -> None:
        self._suspicion.forgive(peer)

    async def refresh(self) -> None:
        """Read the stage records if they are older than 3 s, or than 0.3 s while no peer of stage 0 is known."""
        if trio.current_time() - self._refreshed >= (_REFRESH_S if self.order() else _RETRY_S):
            self._refreshed = trio.current_time()
            await self.directory.refresh()

    async def ask(
        self, method: str, make: Callable[[], msgspec.Struct], reply: type[A], timeout_s: float, by: str = ""
    ) -> A:
        """Call the conductor until one answers. `make` builds the request for each try; `by` identifies the caller."""
        while True:
            await self._pace(method + by)
            peer = await self._choose()
            if peer != self.conductor:
                self.conductor = peer
                self.changes += 1
                self._forecast = None
            began, before = trio.current_time(), self.rpc.came_bytes(peer)
            try:
                answer = await self._call(peer, method, make(), reply, timeout_s)
            except Refused as error:
                self._note_refusal(peer, error)
                await self.refresh()
                await trio.sleep(_RETRY_S)
            except RemoteError as error:
                self._waits_for, self._denied = f"the conductor: {error}", False
                on_full_line = isinstance(error, TooSlow) and self.rpc.came_bytes(peer) != before
                if not await self._reaches_anew(peer, on_full_line):
                    self._suspect_longer(began)
                    self.suspect(peer)
                await trio.sleep(0.05)
            else:
                self.trust(peer)
                self.accepted_by = peer
                if peer != self.own:
                    self.followed[peer] = None
                self._refusals.clear()
                self._waits_for, self.answered, self.differs, self._denied = None, True, False, False
                return answer.body

    async def _call(
        self, peer: PeerId, method: str, body: msgspec.Struct, reply: type[A], timeout_s: float
    ) -> Answer[A]:
        """One call. While its answer is overdue, the link is checked repeatedly, so that a dead link ends soon."""
        if self.ways is None or peer == self.own:
            return await self.rpc.call(peer, method, body, reply, timeout_s=timeout_s)
        failure: RemoteError | None = None
        answer: Answer[A] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._doubt, self.ways, peer, getattr(body, "wait_s", 0.0) + _OVERDUE_S)
            try:
                answer = await self.rpc.call(peer, method, body, reply, timeout_s=timeout_s)
            except RemoteError as error:
                failure = error  # raised outside of the nursery, so not in an exception group
            nursery.cancel_scope.cancel()
        if answer is None:
            assert failure is not None
            raise failure
        return answer

    async def _doubt(self, ways: ConductorLinks, peer: PeerId, overdue_s: float) -> None:
        await trio.sleep(overdue_s)
        while True:
            ways.doubt(peer)
            await trio.sleep(_LOOK_S)

    async def _reaches_anew(self, peer: PeerId, on_full_line: bool) -> bool:
        """True if a peer whose call failed answers a ping, on a new connection if needed.

        Until a call succeeds, returns True only once, so that a peer that answers pings but no calls is suspected at
        its second failure; with `on_full_line`, when its answer may be queued behind other bytes, some failures later.
        """
        suspect = self._suspicion.get(peer)
        if on_full_line and (suspect is None or suspect.failures < _FAILURES_ON_FULL_LINE):
            self._suspicion.count(trio.current_time(), peer)
            return True
        if self.ways is None or peer == self.own or self.fails(peer):
            return False
        with trio.move_on_after(_ANEW_S), suppress(RemoteError):
            await self.ways.probe(peer)
            self._suspicion.count(trio.current_time(), peer)
            return True
        return False

    async def _pace(self, kind: str) -> None:
        """Rate limit on reports, in case a conductor always answers at once and without news."""
        reported = self._reported.get(kind, 0.0)
        ahead_s = reported - trio.current_time() - REPORTS_AT_ONCE / REPORTS_PER_S
        if ahead_s > 0:
            await trio.sleep(ahead_s)
        self._reported[kind] = max(reported, trio.current_time()) + 1 / REPORTS_PER_S

    async def say_goodbye(self, run: bytes, stage: int | None = None) -> None:
        """Notify the conductor that we leave `stage`, or stop training (None), so that no step waits for us.

        A conductor that leaves stage 0 sends nothing, because it ends its own tenure.
        """
        if self.conductor is None or (self.conductor == self.own and not stage):
            return
        with trio.move_on_after(_GOODBYE_S), suppress(RemoteError):  # otherwise it notices when the connection closes
            await self.rpc.call(self.conductor, "swarm/6/leave", Leave(run, stage), Empty, timeout_s=_GOODBYE_S)

    async def list_members(self, run: bytes) -> ListedMembers | None:
        """Fetch the conductor's list, for a peer that serves nothing yet. None if no reachable peer conducts."""
        await self.refresh()
        for peer in [one for one in self.order() if not self.suspected(one)][:_ASKED]:
            try:
                if (listing := await self._list_of(peer, run)) is not None:
                    return listing
            except Refused:
                continue  # it does not conduct
            except RemoteError:
                self.suspect(peer)
        return None

    async def _list_of(self, peer: PeerId, run: bytes) -> ListedMembers | None:
        """The list of a peer that conducts, or None if it does not end within 64 parts."""
        known = KnownMembers()
        for _ in range(_PARTS):
            body = ListMembers(run, known.version)
            told = (await self.rpc.call(peer, "swarm/6/members", body, MembersListed, timeout_s=_LIST_S)).body
            if (members := known.take(told.members)) is not None:
                return ListedMembers(self.note_members(members), frozenset(told.held), tuple(told.capacity))
        return None

    async def _choose(self) -> PeerId:
        """The peer to ask now. Waits until stage 0 has a peer."""
        if self.conductor is not None:
            return self.conductor
        while True:
            await self.refresh()
            now, order = trio.current_time(), self.order()
            awake = [peer for peer in order if not self.suspected(peer)]
            # Our own line may have failed. If nobody else is left, or all others have refused for long, ask the suspect
            # with the fewest failures again before its time is over.
            if all(self._refusals.get(peer, 0) > _STUBBORN for peer in awake):
                tried = [(at, self._suspicion.get(peer)) for at, peer in enumerate(order) if self.suspected(peer)]
                if rested := [(one.failures, at) for at, one in tried if one and now - one.failed_at >= _SUSPECT_S]:
                    return order[min(rested)[1]]
            if awake:
                return min(enumerate(awake), key=lambda at: self._refusals.get(at[1], 0) + at[0] / _FURTHER)[1]
            self._waits_for = "stage 0 has no peers" if not order else "no peer of stage 0 can be reached"
            await trio.sleep(_RETRY_S)
