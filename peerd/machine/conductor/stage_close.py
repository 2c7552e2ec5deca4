"""Closing a step: each stage averages, in attempts, until its members have one sum; what failed attempts tell of whom.

Evidence, not claims. What a member says to miss counts only within what it was to bring, and then a receipt decides
whose fault it is: the holder's that signed it in its present session; nobody's, of a session before; else the trainer's
that credited it. What it says of others who failed counts only of those it met in that attempt (`Standing`); sums that
differ are looked into by `Agreement`. Who does not answer when at least half have is left behind: the sum is there.
Decides only. The conductor, which owns the members, is told whom to let go (`aside`) and whether the batch shrank.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from peerd.core.messages.swarm import Mb
from peerd.machine.averaging.shares import NoSplit
from peerd.machine.averaging.topology import Grouping
from peerd.machine.averaging.work_split import Lines
from peerd.machine.batch.batches import Batches
from peerd.machine.batch.credit import CreditFault, fault_of
from peerd.machine.batch.probation import Probation
from peerd.machine.conductor.agreement import Agreement, Summing
from peerd.machine.conductor.standing import PutAside, Standing
from peerd.machine.swarm.events import (
    CancelAttempt,
    ConductorConfig,
    Note,
    Origin,
    Output,
    PrepareEnded,
    Probe,
    SendPrepare,
)
from peerd.machine.swarm.posts import peer_of

_HEAR_S = 0.5  # for what others say when a member has lost somebody: they lose it in the same moments
_LATE_FACTOR = 3.0  # times as long as the first half of the members took, the rest may take
_RETRY_MOST_S = 5.0


@dataclass(slots=True)
class StageClose:
    """One attempt at a time, until one succeeds.

    `prepared` have the mean, `waiting` are to say whether they have it, `helpers` only sum for them.
    """

    attempt: bytes = b""  # empty: none under way
    group: tuple[str, ...] = ()
    helpers: frozenset[str] = frozenset()
    assigned: dict[str, frozenset[Mb]] = field(default_factory=dict)
    meets: dict[str, frozenset[str]] = field(default_factory=dict)  # whom each meets, in a grid; else all meet all
    summers: frozenset[str] = frozenset()
    waiting: set[str] = field(default_factory=set)
    prepared: set[str] = field(default_factory=set)
    digests: dict[str, bytes] = field(default_factory=dict)
    began: float = 0.0
    late_at: float | None = None  # when who has not answered is left behind; None: too few have
    accused: list[tuple[str, str]] = field(default_factory=list)  # by whom, who
    heard_at: float | None = None  # when that is judged; None: nobody is accused
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made

    def involves(self, peer: str) -> bool:
        """Does the attempt under way need this peer?"""
        return bool(self.attempt) and (peer in self.group or peer in self.helpers)

    def met(self, peer: str) -> Collection[str]:
        """Whom of the members a member meets."""
        return self.meets.get(peer, self.group)

    @property
    def due(self) -> float | None:
        """When to look at it without being told anything."""
        if self.settled:
            return None
        if not self.attempt:
            return self.not_before
        return min((at for at in (self.late_at, self.heard_at) if at is not None), default=None)


class Closing:
    """The stages of one run. `session` tells a living member's, `since` when a member joined."""

    def __init__(
        self,
        config: ConductorConfig,
        batches: Batches,
        lines: Lines,
        rng: random.Random,
        origin: Origin,
    ) -> None:
        self._config, self._batches, self._lines, self._rng = config, batches, lines, rng
        self._verify, self._probation = origin.verify, Probation(origin.place_of)
        batches.trainers.probation, batches.verify = self._probation, origin.verify
        batches.tell = lambda text: self.out.append(Note(text))
        self.standing = Standing(config.ban_s)
        self.grouping = Grouping(lines, config.group_size)
        self._agreements = [Agreement() for _ in range(config.stages)]
        self.session: Callable[[str], int | None] = lambda peer: None
        self.since: Callable[[str], float] = lambda peer: 0.0
        self.proven: Callable[[str], bool] = lambda peer: True  # has the member helped to make a step?
        self.step = 0  # the batch's
        self._refusals: dict[str, set[str]] = {}  # whose microbatches each member could not sum
        self.stages = [StageClose() for _ in range(config.stages)]
        self.aside: list[PutAside] = []  # whom the conductor is to let go of: it takes them from here
        self.shrank = False  # microbatches were dropped: the batch is not whole; the conductor takes this too
        self.changed = False  # what all see is different now; likewise
        self.out: list[Output] = []

    # --- what the conductor calls -----------------------------------------------------------------------------

    def keeps_out(self, now: float, peer: str) -> bool:
        """Is this peer put aside, or a newcomer from a place whose newcomers have to wait?"""
        newcomer = self.session(peer) is None and not self.proven(peer)
        return self.standing.banned(peer, now) or (newcomer and self._probation.waits(now, peer))

    def renew(self) -> None:
        """No stage has anything: another batch, or another position."""
        for close in self.stages:
            self.cancel(close)
        self.stages = [StageClose() for _ in self.stages]

    @property
    def settled(self) -> list[bool]:
        return [close.settled for close in self.stages]

    def due(self) -> float | None:
        """When `look` has something to do at the latest."""
        return min((at for close in self.stages if (at := close.due) is not None), default=None)

    def lost(self, peer: str, stage: int | None) -> None:
        """The member, of `stage`, or the helper, is gone."""
        for close in self.stages:
            if close.involves(peer):
                self.grouping.observe(len(close.group), (peer,))
                self.cancel(close)
        if stage is not None:
            close = self.stages[stage]
            close.prepared.discard(peer)
            if close.settled and not close.prepared:
                self.stages[stage] = StageClose()

    def step_made(self, step: int) -> None:
        """A step was made: everybody's strikes fade."""
        self.standing.step_made()
        self._refusals.clear()
        for stage, agreement in enumerate(self._agreements):
            agreement.step_made(step)
            self._rest(stage)

    def cancel(self, close: StageClose) -> None:
        """Call the attempt off."""
        if close.attempt:
            self.out.append(CancelAttempt(close.attempt))
            close.attempt, close.late_at, close.heard_at, close.accused = b"", None, None, []

    # --- attempts ---------------------------------------------------------------------------------------------

    def begin(self, now: float, stage: int, group: tuple[str, ...], lineage: bytes) -> None:
        """Order one more attempt of these members, if it is time and they can average."""
        close = self.stages[stage]
        if close.settled or close.attempt or now < close.not_before:
            return
        try:
            how, close.problem = self.grouping.order(stage, group), ""
        except NoSplit as error:
            self.changed |= close.problem != str(error)
            close.problem, close.not_before = str(error), now + self._config.retry_s
            return
        assigned = self._batches.due.assigned(stage, group)
        close.attempt, close.group, close.helpers, close.began = self._rng.randbytes(16), group, how.helpers, now
        close.assigned = {peer: frozenset(mbs) for peer, mbs in assigned.items()}
        close.waiting, close.prepared, close.digests, close.meets = set(group), set(), {}, {}
        self.out += [Note(how.news)] if how.news else []
        orders = []
        for peer in (*group, *sorted(close.helpers)):
            part, rounds = tuple(assigned.get(peer, ())), how.rounds.get(peer, ())
            orders.append(SendPrepare(peer, close.attempt, lineage, group, part, how.split, rounds))
        close.meets = {order.peer: frozenset(order.meets) for order in orders if order.rounds}
        close.summers = frozenset(peer for order in orders for peer in order.summers)
        self.out += orders

    def look(self, now: float) -> None:
        """Judge what has been heard long enough, and leave behind who does not answer."""
        for close in self.stages:
            if close.attempt and close.heard_at is not None and now >= close.heard_at:
                self._judge_accused(now, close)
            elif close.attempt and close.late_at is not None and now >= close.late_at and not close.accused:
                newcomers = self._newcomers(close, close.waiting)
                for peer in newcomers:
                    self._let_go_of(now, peer, "does not say that it averaged")
                for peer in sorted(close.waiting.difference(newcomers)):
                    self.out.append(Note(f"peer …{peer[-8:]} has not said that it averaged: the others go on"))
                    self._put(self.standing.failed(now, peer, "does not say that it averaged"))
                close.waiting.clear()
                self._all_answered(now, close)

    def ended(self, now: float, end: PrepareEnded) -> None:
        """A member, or a helper, says how its part in an attempt ended."""
        close = next((c for c in self.stages if c.attempt and c.attempt == end.attempt), None)
        if close is None:
            return
        if end.peer in close.helpers and not end.ok:
            self._let_go_of(now, end.peer, "failed averaging")
            self._fail(now, close)
        if end.peer not in close.waiting:
            return
        close.waiting.discard(end.peer)
        if not end.ok:
            if self._newcomers(close, [end.peer]):
                self._let_go_of(now, end.peer, "failed averaging")  # and what it says of others is not heard
                self._fail(now, close)
            else:
                self._not_ok(now, close, end)
            return
        close.prepared.add(end.peer)
        close.digests[end.peer] = end.digest
        if close.waiting:
            if close.late_at is None and 2 * len(close.prepared) >= len(close.group):
                close.late_at = now + max(self._config.late_s, _LATE_FACTOR * (now - close.began))
        elif close.accused:
            self._judge_accused(now, close)
        else:
            self._all_answered(now, close)

    def _all_answered(self, now: float, close: StageClose) -> None:
        """Everybody says that it has the sum: the same one?"""
        stage = self.stages.index(close)
        agreement = self._agreements[stage]
        if len(set(close.digests.values())) <= 1:
            close.settled, close.attempt, close.late_at = True, b"", None
            agreement.agreed()
            self.grouping.observe(len(close.group))
            return
        if close.helpers:  # strangers, and a round can do without them
            for peer in sorted(close.helpers):
                self._let_go_of(now, peer, "summed where members ended with different sums")
        elif newcomers := self._newcomers(close, close.group):
            for peer in newcomers:
                self._let_go_of(now, peer, "took part where members ended with different sums")
        else:
            able = frozenset(peer for peer in close.group if not self._lines.is_client(peer))
            found = agreement.judge(self.step, close.digests, Summing(close.summers, able), self.since)
            self.out.append(Note(f"stage {stage}: {found.note}"))
            for peer in found.guilty:
                self._put(self.standing.put_aside(now, peer, "has another sum than its stage-mates"))
            self._rest(stage)
        self._fail(now, close)

    def _rest(self, stage: int) -> None:
        """Tell the lines who gets no share for now."""
        self._lines.rest(stage, self._agreements[stage].idle)

    def _fail(self, now: float, close: StageClose) -> None:
        """This attempt is over: another one soon."""
        self.cancel(close)
        close.not_before = now + min(_RETRY_MOST_S, self._config.retry_s * 2**close.failures)
        close.failures += 1
        self.changed = True

    # --- whose fault ------------------------------------------------------------------------------------------

    def _newcomers(self, close: StageClose, peers: Collection[str]) -> list[str]:
        """Those of them who have not yet helped to make a step, where others of the attempt's group have."""
        if not any(map(self.proven, close.group)):
            return []
        return sorted(peer for peer in peers if peer in close.group and not self.proven(peer))

    def _let_go_of(self, now: float, newcomer: str, why: str) -> None:
        """A round can do without this one."""
        self._put(self.standing.let_go(now, newcomer, self._probation.failed(now, newcomer), why))

    def _not_ok(self, now: float, close: StageClose, end: PrepareEnded) -> None:
        assigned = close.assigned.get(end.peer, frozenset())
        missing, refused = assigned & set(end.missing), assigned & set(end.refused)
        lost = [peer for peer in dict.fromkeys(end.lost) if peer != end.peer]
        helpers = [peer for peer in lost if peer in close.helpers]
        mates = [peer for peer in lost if peer in close.met(end.peer)]
        if newcomers := self._newcomers(close, mates):
            mates = [mate for mate in mates if mate not in newcomers]
        for peer in (*helpers, *newcomers):
            self._let_go_of(now, peer, "failed averaging")
        if refused:
            self._judge_refused(now, end.peer, refused)
        if missing:
            self._judge_missing(now, self.stages.index(close), end.peer, missing)
        if mates and not (missing or refused or helpers or newcomers):
            close.accused += [(end.peer, mate) for mate in mates]
            if close.heard_at is None:
                close.heard_at = now + _HEAR_S
            if len(close.group) <= 2 or not close.waiting:
                self._judge_accused(now, close)
            return
        if not (missing or refused or helpers or newcomers):
            self.grouping.observe(len(close.group), (end.peer,))
            self._put(self.standing.failed(now, end.peer, "failed averaging"))
        self._fail(now, close)

    def _judge_accused(self, now: float, close: StageClose) -> None:
        accused = sorted({mate for _, mate in close.accused})
        self.grouping.observe(len(close.group), accused)
        self.out += [Probe(peer) for peer in accused]
        for found in self.standing.contradict(now, close.accused, len(close.group), self.since):
            self._put(found)
        self._fail(now, close)

    def _judge_missing(self, now: float, stage: int, member: str, mbs: frozenset[Mb]) -> None:
        """What the member was said to hold is not there."""
        faults = fault_of(self._batches.due, self.step, (stage, member), mbs, self._verify, self.session)
        trainers = sorted({mb.trainer for mb, fault in faults.items() if fault is CreditFault.TRAINER})
        void = {trainer for trainer in trainers if self._strike(now, trainer, "credits peers with what they never got")}
        self._batches.due.unhold_of(member, mbs, stage, now)
        voided = [mb for mb in sorted(mbs) if mb.trainer in void and mb.trainer != peer_of(member)]
        self.shrank |= self._batches.void(voided)
        if CreditFault.HOLDER in faults.values():
            self._put(self.standing.failed(now, member, "has lost what it signed to hold"))

    def _judge_refused(self, now: float, member: str, mbs: frozenset[Mb]) -> None:
        """The member could not sum these values: they are out of the batch, everywhere."""
        trainers = sorted({mb.trainer for mb in mbs})
        known = self._refusals.setdefault(member, set())
        known.update(trainers)
        self.shrank |= self._batches.void(sorted(mbs))
        if len(known) > max(1, self._batches.trainers.count() / 3):  # so many do not err at once
            known.clear()
            self._put(self.standing.put_aside(now, member, "refuses what many trainers bring"))
            return
        for trainer in trainers:
            self._strike(now, trainer, "brings values that cannot be summed")

    def _strike(self, now: float, trainer: str, why: str) -> bool:
        """The trainer gets less to do; True from its second time on."""
        often = self._batches.trainers.strike(now, trainer)
        self.out.append(Note(f"trainer …{trainer[-8:]} {why}: it is given less"))
        return often > 1

    def _put(self, found: PutAside | None) -> None:
        if found is not None:
            self.out.append(Note(found.text()))
            self.aside.append(found)
