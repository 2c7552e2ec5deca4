"""Choice of the groups of a stage that sum next, and the orders to their members.

Members that are in no sum yet bring their own microbatches, in the groups of `GroupTopology.order`. Once every
microbatch is in a sum, groups join the sums, each member bringing the one that it keeps, round after round until there
is one. A member that did not get what its mates have, because its group failed, gets a copy. A flat stage is one group
of all, and nothing to join. Decides only: `stage_close` keeps the attempts and judges them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from peerd.core.messages.swarm import Mb
from peerd.machine.averaging.moshpit import MoshpitGroup
from peerd.machine.averaging.shares import NoSplit
from peerd.machine.averaging.topology import GroupTopology, Ordered, OrderedGroup
from peerd.machine.averaging.work_split import Split
from peerd.machine.batch.batches import Batches
from peerd.machine.batch.ledger import Ledger
from peerd.machine.conductor.attempt import GroupAttempt
from peerd.machine.conductor.partial_sums import PartialSum, PartialSums
from peerd.machine.swarm.events import SendPrepare

_DOUBLINGS = 10  # of the time of an attempt
_LARGER = 2  # times the largest group that was planned: larger ones would cost more than to begin anew


@dataclass(slots=True)
class StageClose:
    """Averaging in one stage, until its members have one sum of the whole batch."""

    sums: PartialSums
    attempts: dict[bytes, GroupAttempt] = field(default_factory=dict)
    sides: tuple[int, ...] = ()  # how many sums each group of a later round joins
    largest: int = 0  # members of a group, as planned
    left: set[str] = field(default_factory=set)  # members that the others of their groups have gone on without
    wide: bool = False  # sums differed: the stage is flat, or its groups are as large as can be, until the step is made
    in_vain: Counter[str] = field(default_factory=Counter)  # copies that members took, and that differed
    absent: Counter[str] = field(default_factory=Counter)  # how often members did not have the sum they were to bring
    first: PartialSum | None = None  # the sum of the first factors, while the second ones are summed
    spared_until: float | None = None  # when members in sums get microbatches again; None: none are to be done
    spared: tuple[int, set[str]] = (-1, set())  # these members, at a version of the roster
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made
    longest_s: float | None = None  # that an attempt took in this step until a member had its sum
    looked: object = None  # what there was at the last look for attempts to begin

    def whole(self, entries: int) -> PartialSum | None:
        """The only sum, if it has `entries` microbatches and members can step with it; else None."""
        top = self.sums.tops[0] if len(self.sums.tops) == 1 else None
        return top if top is not None and top.last and len(top.contents) == entries else None

    def complete(self, due: Ledger) -> PartialSum | None:
        """The only sum, if it has as many microbatches as the batch, and nobody is behind; else None."""
        if self.attempts or len(self.sums.tops) != 1 or not due.full:
            return None
        (top,) = self.sums.tops
        behind = {peer for peer in top.behind() if self.sums.stand(peer) is not None} - self.left
        return None if len(top.contents) < len(due.entries) or behind else top

    def fault(self, ledger: Ledger) -> str:
        """The reason that the only sum is not that of the whole batch, with everything in it once; "" where it is."""
        (top,) = self.sums.tops
        if fault := self.sums.fault(ledger):
            return fault
        if top.contents != ledger.entries.keys():
            return "it has other microbatches than the batch"
        if top.leads + (self.first.leads if self.first is not None else 0) != 1:
            return "it lacks what only one member may bring"
        return ""

    def leads(self) -> bool:
        """True when what only one member may bring is in a sum, or on its way into one."""
        led = any(top.leads for top in self.sums.tops) or any(one.leads for one in self.attempts.values())
        return led or self.first is not None

    def has_all_of(self, first: PartialSum) -> bool:
        """True when those who keep the sum of first factors are those who brought one each, and are still there."""
        here = [peer for peer, stand in first.bringers if self.sums.stand(peer) == stand]
        return len(here) == len(first.bringers) and sorted(here) == sorted(first.kept)

    def view(self, version: int) -> object:
        """What decides on the attempts to begin, besides microbatches; `version`: the roster's."""
        kept = [len(top.kept) for top in self.sums.tops]
        return version, [*self.attempts], kept, self.failures, self.first is None

    @property
    def prepared(self) -> Collection[str]:
        """Members that have the sum of the whole batch."""
        return self.sums.tops[0].kept if self.settled else ()

    def calm(self) -> None:
        """Reset the pause between attempts if no sum is kept and no attempt is under way."""
        if not self.sums and not self.attempts:
            self.failures, self.not_before, self.problem = 0, 0.0, ""

    def time_siblings(self, attempt: GroupAttempt, until: float) -> None:
        """Other groups that make the sum which this attempt has made are waited for until then."""
        for other in self.attempts.values():
            same = other.parts == attempt.parts and other.copies is attempt.copies is None
            if same and attempt.parts and other.late_at is None:
                other.late_at = until

    def time_late(self, now: float, least_s: float, factor: float) -> None:
        """Once half of all members have answered, wait for no attempt longer than `least_s`, or `factor` times as long
        as the longest one took: a few members must not hold the stage up.
        """
        waiting = {peer for attempt in self.attempts.values() for peer in attempt.waiting}
        prepared = {peer for attempt in self.attempts.values() for peer in attempt.prepared}
        if self.longest_s is None or len({*prepared, *self.sums.members()} - waiting) < len(waiting):
            return
        for attempt in self.attempts.values():
            if attempt.late_at is None:
                attempt.late_at = now + max(least_s, factor * self.longest_s)

    def others_have(self, attempt: GroupAttempt) -> bool:
        """True when another group has made the sum that this one makes."""
        return bool(attempt.parts) and any(top.parts == attempt.parts for top in self.sums.tops)

    def busy(self) -> set[str]:
        """Members of attempts that are under way."""
        return {peer for attempt in self.attempts.values() for peer in attempt.group}

    def due(self, now: float) -> float | None:
        """The next deadline of this stage, where nothing is reported before; None: there is none."""
        if self.settled:
            return None
        found = [at for attempt in self.attempts.values() if (at := attempt.due) is not None]
        later = [at for at in (self.not_before, self.spared_until) if at is not None and at > now]
        return min([*found, *later], default=None)


class GroupOrders:
    """See the module's header. `note` takes what a person may want to know."""

    def __init__(
        self, grouping: GroupTopology, batches: Batches, rng: random.Random, factors: bool, note: Callable[[str], None]
    ) -> None:
        self._grouping, self._batches, self._rng, self._factors = grouping, batches, rng, factors
        self.note = note

    def next(
        self, now: float, stage: int, close: StageClose, ready: tuple[str, ...], lineage: bytes
    ) -> list[GroupAttempt]:
        """The attempts to begin now, if any; raises NoSplit when a group has nobody that can sum."""
        sums, ledger = close.sums, self._batches.due
        close.left -= {peer for peer in close.left if ledger.unsummed(stage, peer)}
        if not sums and not close.attempts:
            close.left.clear()
        # They have given what they hold, or are about to: if they did so again it would count twice.
        away = {*close.busy(), *sums.members(), *sums.bringers(), *close.left}
        free = tuple(peer for peer in ready if peer not in away)
        order = _Order(now, stage, close, lineage)
        if close.first is not None and not sums:
            return self._second(order, close.first) if not close.attempts else []
        led = close.leads()
        if any(ledger.unsummed(stage, peer) for peer in free) or (free and not led and not close.attempts):
            return self._of_members(order, free)
        if close.attempts:
            return []
        if not led:
            raise NoSplit("what only one member may bring is lost")
        return self._of_sums(order, frozenset(ready), free)

    def _of_members(self, order: _Order, free: tuple[str, ...]) -> list[GroupAttempt]:
        """Sums of the microbatches of members that are in no sum yet."""
        close, stage, ledger = order.close, order.stage, self._batches.due
        if any(ledger.unsummed(stage, peer) for peer in close.busy()):
            return []  # once its attempt has ended, its sum is made anew with these
        alone = not close.sums and not close.attempts
        how = self._planned(order, free, anew=alone)
        own = ledger.assigned(stage, free)
        leader, last = "" if close.leads() else min(free), alone and len(how.groups) == 1
        tasks = (_Task(one, {peer: own[peer] for peer in one.meeting.peers}, leader, last=last) for one in how.groups)
        return [self._attempt(order, task) for task in tasks]

    def _planned(self, order: _Order, members: tuple[str, ...], *, anew: bool) -> Ordered:
        how = self._grouping.order(order.stage, members, wide=order.close.wide)
        if how.news:
            self.note(how.news)
        if anew:
            order.close.sides, order.close.largest = how.sides, max(len(one.meeting.peers) for one in how.groups)
        return how

    def _of_sums(self, order: _Order, ready: Collection[str], free: tuple[str, ...]) -> list[GroupAttempt]:
        """Copies of sums for those that lack them, or else the groups that join the sums that there are."""
        close, tops = order.close, order.close.sums.tops
        whole = len(tops) == 1
        if not whole and self._factors and close.first is None and any(top.last for top in tops):
            raise NoSplit("a sum that was made of factors cannot be joined to others")
        lacking = [(top, [peer for peer in top.behind() if peer in ready and peer not in close.left]) for top in tops]
        found = list[_Task]()
        for top, behind in lacking:
            most = max(1, _LARGER * max(close.largest, 2) - 1)
            parts = [behind[at : at + most] for at in range(0, len(behind), most)]
            holders = list(top.kept)
            for at, part in enumerate(parts[: len(holders)]):  # others get theirs when these have it
                group = self._grouping.copy(order.stage, holders[at:] + holders[:at], part)
                if group.meeting.senders[0] not in {peer for task in found for peer in task.one.meeting.senders}:
                    found += self._bring(order, [group], (top,), top.last, top)
        if not found:
            found = self._ended(order, tops[0]) if whole else self._joined(order, free)
        return [self._attempt(order, task) for task in found]

    def _ended(self, order: _Order, top: PartialSum) -> list[_Task]:
        """Each member by itself makes a sum that turned out to be the last one ready for the step."""
        if top.last or (self._factors and order.close.first is None):
            return []
        return self._bring(order, [OrderedGroup(MoshpitGroup((peer,)), None) for peer in top.kept], (top,), True)

    def _joined(self, order: _Order, free: tuple[str, ...]) -> list[_Task]:
        """The groups that join sums. In the last ones listen those that hold nothing, and are in no sum (`free`)."""
        close, tops = order.close, order.close.sums.tops
        depth = max(top.depth for top in tops)
        side = close.sides[depth] if depth < len(close.sides) else len(tops)
        runs = -(-len(tops) // side)
        last = runs == 1 and (not self._factors or close.first is not None)
        bounds, found = [at * len(tops) // runs for at in range(runs + 1)], list[_Task]()
        for begin, end in itertools.pairwise(bounds):
            run = tuple(tops[begin:end])
            listeners = free if last and not self._factors else ()
            groups = self._meetings(order, run, side, listeners) if len(run) > 1 else ()
            found += self._bring(order, groups, run, last)
        for top in tops:
            top.parts = ()  # members keep only what they bring
        return found

    def _meetings(
        self, order: _Order, run: tuple[PartialSum, ...], side: int, free: tuple[str, ...]
    ) -> tuple[OrderedGroup, ...]:
        """The groups that join these sums; of those that are `free`, as many listen as the groups have room for."""
        clusters = [sorted(top.kept) for top in run]
        groups = self._grouping.meet(order.stage, clusters)
        room = _LARGER * max(order.close.largest, side) - max(len(one.meeting.peers) for one in groups)
        if room < 0:
            raise NoSplit("so few members are left of a group that the next ones would be too large")
        heard = free[: room * len(groups)]
        return self._grouping.meet(order.stage, clusters, heard) if heard else groups

    def _bring(
        self,
        order: _Order,
        groups: Sequence[OrderedGroup],
        parts: tuple[PartialSum, ...],
        last: bool,
        copied: PartialSum | None = None,
    ) -> list[_Task]:
        """The tasks of groups whose senders bring these sums, each the one that it keeps. Of a listener the order names
        the sum that it keeps, if any.
        """
        kept = {peer: attempt for part in parts for peer, attempt in part.kept.items()}
        own = order.close.sums.own(self._batches.due, parts)
        gone = tuple(mb for holder, mbs in own.items() if holder not in kept for mb in mbs)
        found = list[_Task]()
        for one in groups:
            assigned = {peer: own.get(peer, ()) for peer in one.meeting.peers}
            if gone:  # of members that could not say later that these were counted
                assigned[one.meeting.peers[0]] += gone
            brings = {peer: kept[peer] for peer in one.meeting.senders}
            brings |= {peer: newest for peer in one.meeting.listeners if (newest := _newest(parts, peer))}
            for peer in one.meeting.peers:
                order.close.sums.unkeep(peer, but=brings.get(peer, b""))  # each keeps no other sum than that
            found.append(_Task(one, assigned, "", parts, brings, last, copied))
        return found

    def _second(self, order: _Order, first: PartialSum) -> list[GroupAttempt]:
        """Sums of the second factors: of the same members, with the same microbatches."""
        members = tuple(sorted(first.kept))
        how, own = self._planned(order, members, anew=True), self._batches.due.assigned(order.stage, members)
        last = len(how.groups) == 1
        tasks = (
            _Task(one, {peer: own[peer] for peer in one.meeting.peers}, "", (), dict(first.kept), last)
            for one in how.groups
        )
        return [self._attempt(order, task) for task in tasks]

    def _attempt(self, order: _Order, task: _Task) -> GroupAttempt:
        """The attempt, with an order to each member."""
        close, one, meeting = order.close, task.one, task.one.meeting
        brought = frozenset(mb for own in task.own.values() for mb in own) if not task.parts else frozenset[Mb]()
        attempt = GroupAttempt(
            name=self._rng.randbytes(16),
            group=meeting.peers,
            helpers=one.helpers,
            parts=task.parts,
            brought=brought,
            stands={peer: found for peer in meeting.peers if (found := close.sums.stand(peer)) is not None},
            began=order.now,
            leads=task.leader in meeting.peers,
            last=task.last,
            copies=task.copied,
            waiting=set(meeting.peers),
        )
        common = SendPrepare(
            peer="",
            attempt=attempt.name,
            lineage=order.lineage,
            group=meeting.peers,
            assigned=(),
            split=self._sized(task, close),
            # Lines may carry less than is known of them: after each attempt in vain the next one gets twice the time.
            most_s=one.most_s * 2.0 ** min(close.failures, _DOUBLINGS),
            listeners=meeting.listeners,
            copy=meeting.copy,
            copies=meeting.copies,
            last=task.last,
            second=close.first is not None and not task.parts,
        )
        for peer in (*meeting.peers, *sorted(one.helpers)):
            own, brings = task.own.get(peer, ()), task.brings.get(peer, b"")
            attempt.orders[peer] = replace(common, peer=peer, assigned=own, brings=brings, leads=peer == task.leader)
        return attempt

    def _sized(self, task: _Task, close: StageClose) -> Split | None:
        """The split for vectors of this size: of both factors only where one order has both."""
        split = task.one.split
        if split is None or not self._factors or (task.last and close.first is None):
            return split
        return replace(split, elements=split.further if close.first is not None else split.elements, further=0)


def _newest(parts: tuple[PartialSum, ...], peer: str) -> bytes:
    """The attempt that gave the member the largest sum that it keeps of these and their parts; b"": it keeps none."""
    sums = (one for part in parts for one in part.all() if peer in one.kept)
    return max(((one.depth, one.kept[peer]) for one in sums), default=(0, b""))[1]


@dataclass(frozen=True, slots=True)
class _Order:
    """What all orders of one turn have in common."""

    now: float
    stage: int
    close: StageClose
    lineage: bytes


@dataclass(frozen=True, slots=True)
class _Task:
    """One group's task. `own`: each member's microbatches in it; `brings`: attempts that gave what members bring."""

    one: OrderedGroup
    own: dict[str, tuple[Mb, ...]]
    leader: str  # brings what only one member may; empty: another group has it, or had it
    parts: tuple[PartialSum, ...] = ()
    brings: dict[str, bytes] = field(default_factory=dict)
    last: bool = True
    copied: PartialSum | None = None
