"""Choice of the groups of a stage that sum next, and the orders to their members.

Members that are in no sum yet contribute their own microbatches, in the groups of `GroupTopology.order`. Once every
microbatch is in a sum, groups join the sums, round after round, until one is left; each member contributes the sum that
it stores. A member whose group failed, and that lacks what its mates have, gets a copy. A flat stage is one group of
all members, with nothing to join. Decides only: `stage_close` tracks the attempts and judges them.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from peerd.averaging.moshpit import MoshpitGroup
from peerd.averaging.shares import NoSplit
from peerd.averaging.topology import GroupTopology, OrderedGroup, SumTopology
from peerd.averaging.work_split import Split
from peerd.messages.swarm import Mb
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.batch.batches import Batches
from peerd.swarm.events import SendPrepare
from peerd.swarm.steps.attempt import GroupAttempt
from peerd.swarm.steps.partial_sums import PartialSum, PartialSums

_DOUBLINGS = 10  # of the time limit of an attempt
_LARGER = 2  # times the largest planned group: with larger ones, starting again would be cheaper


@dataclass(slots=True)
class StageClose:
    """Averaging in one stage, until its members have one sum of the whole batch."""

    sums: PartialSums
    attempts: dict[bytes, GroupAttempt] = field(default_factory=dict)
    sides: tuple[int, ...] = ()  # number of sums that each group of a later round joins, by round
    largest: int = 0  # members of the largest group, as planned
    left: set[str] = field(default_factory=set)  # members that their groups have left behind
    wide: bool = False  # sums differed: until the step is made, the stage is flat or its groups are largest
    in_vain: Counter[str] = field(default_factory=Counter)  # by member, copies that differed from the original
    absent: Counter[str] = field(default_factory=Counter)  # by member, how often it lacked the sum to contribute
    first: PartialSum | None = None  # the sum of the first factors, while the second ones are summed
    spared_until: float | None = None  # members in sums get no microbatches until then, or None if none are missing
    spared: tuple[int, set[str]] = (-1, set())  # cache of these members, with the roster's version
    settled: bool = False
    failures: int = 0
    not_before: float = 0.0
    problem: str = ""  # why no attempt can be made
    longest_s: float | None = None  # longest time in this step until a member of an attempt had its sum
    looked: object = None  # `view` when attempts were last considered

    def whole(self, entries: int) -> PartialSum | None:
        """The only remaining sum, if it has `entries` microbatches and members can step with it; otherwise None."""
        top = self.sums.tops[0] if len(self.sums.tops) == 1 else None
        return top if top is not None and top.last and len(top.contents) == entries else None

    def complete(self, due: BatchLedger) -> PartialSum | None:
        """The only remaining sum, if it has as many microbatches as the batch and no member lacks it; else None."""
        if self.attempts or len(self.sums.tops) != 1 or not due.full:
            return None
        (top,) = self.sums.tops
        behind = {peer for peer in top.behind() if self.sums.stand(peer) is not None} - self.left
        return None if len(top.contents) < len(due.entries) or behind else top

    def fault(self, ledger: BatchLedger) -> str:
        """Reason that the only remaining sum does not contain the whole batch exactly once, or "" if it does."""
        (top,) = self.sums.tops
        if fault := self.sums.fault(ledger):
            return fault
        if top.contents != ledger.entries.keys():
            return "it has other microbatches than the batch"
        if top.leads + (self.first.leads if self.first is not None else 0) != 1:
            return "it lacks the leader's part"
        return ""

    def leads(self) -> bool:
        """True if the leader's part (`PartialSum.leads`) is in a sum, or on its way into one."""
        led = any(top.leads for top in self.sums.tops) or any(one.leads for one in self.attempts.values())
        return led or self.first is not None

    def has_all_of(self, first: PartialSum) -> bool:
        """True if exactly the contributors to the sum of first factors store it, and all are still members."""
        here = [peer for peer, stand in first.bringers if self.sums.stand(peer) == stand]
        return len(here) == len(first.bringers) and sorted(here) == sorted(first.kept)

    def view(self, version: int) -> object:
        """Everything but microbatches that decides which attempts can begin. `version`: the roster's."""
        kept = [len(top.kept) for top in self.sums.tops]
        return version, [*self.attempts], kept, self.failures, self.first is None

    @property
    def prepared(self) -> Collection[str]:
        """Members that have the sum of the whole batch."""
        return self.sums.tops[0].kept if self.settled else ()

    def calm(self) -> None:
        """Reset the pause between attempts if no sum is stored and no attempt is under way."""
        if not self.sums and not self.attempts:
            self.failures, self.not_before, self.problem = 0, 0.0, ""

    def time_siblings(self, attempt: GroupAttempt, until: float) -> None:
        """Set the deadline `until` for other groups that make the same sum as this attempt."""
        for other in self.attempts.values():
            same = other.parts == attempt.parts and other.copies is attempt.copies is None
            if same and attempt.parts and other.late_at is None:
                other.late_at = until

    def time_late(self, now: float, least_s: float, factor: float) -> None:
        """Once half of all members have answered, set deadlines for all attempts, so that a few do not hold up the
        stage.

        The deadline is `least_s` from now, or `factor` times the longest attempt so far, whichever is longer.
        """
        waiting = {peer for attempt in self.attempts.values() for peer in attempt.waiting}
        prepared = {peer for attempt in self.attempts.values() for peer in attempt.prepared}
        if self.longest_s is None or len({*prepared, *self.sums.members()} - waiting) < len(waiting):
            return
        for attempt in self.attempts.values():
            if attempt.late_at is None:
                attempt.late_at = now + max(least_s, factor * self.longest_s)

    def others_have(self, attempt: GroupAttempt) -> bool:
        """True if another group has made the sum that this attempt makes."""
        return bool(attempt.parts) and any(top.parts == attempt.parts for top in self.sums.tops)

    def busy(self) -> set[str]:
        """Members of attempts that are under way."""
        return {peer for attempt in self.attempts.values() for peer in attempt.group}

    def due(self, now: float) -> float | None:
        """Next deadline of this stage, if no report arrives earlier, or None if there is none."""
        if self.settled:
            return None
        found = [at for attempt in self.attempts.values() if (at := attempt.due) is not None]
        later = [at for at in (self.not_before, self.spared_until) if at is not None and at > now]
        return min([*found, *later], default=None)


class GroupOrders:
    """Plans the groups, attempts and orders of all stages. `note` receives texts for the log."""

    def __init__(
        self, grouping: GroupTopology, batches: Batches, rng: random.Random, factors: bool, note: Callable[[str], None]
    ) -> None:
        self._grouping, self._batches, self._rng, self._factors = grouping, batches, rng, factors
        self.note = note

    def next(
        self, now: float, stage: int, close: StageClose, ready: tuple[str, ...], lineage: bytes
    ) -> list[GroupAttempt]:
        """Attempts to begin now, if any. Raises NoSplit if a group has no peer that can sum."""
        sums, ledger = close.sums, self._batches.due
        close.left -= {peer for peer in close.left if ledger.unsummed(stage, peer)}
        if not sums and not close.attempts:
            close.left.clear()
        # These have contributed their microbatches, or are about to: contributing again would count them twice.
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
            raise NoSplit("the leader's part is lost")
        return self._of_sums(order, frozenset(ready), free)

    def _of_members(self, order: _Order, free: tuple[str, ...]) -> list[GroupAttempt]:
        """Attempts to sum the microbatches of members that are in no sum yet."""
        close, stage, ledger = order.close, order.stage, self._batches.due
        if any(ledger.unsummed(stage, peer) for peer in close.busy()):
            return []  # once its attempt has ended, its sum is made again with these
        alone = not close.sums and not close.attempts
        how = self._planned(order, free, anew=alone)
        own = ledger.assigned(stage, free)
        leader, last = "" if close.leads() else min(free), alone and len(how.groups) == 1
        tasks = (_Task(one, {peer: own[peer] for peer in one.meeting.peers}, leader, last=last) for one in how.groups)
        return [self._attempt(order, task) for task in tasks]

    def _planned(self, order: _Order, members: tuple[str, ...], *, anew: bool) -> SumTopology:
        how = self._grouping.order(order.stage, members, wide=order.close.wide)
        if how.news:
            self.note(how.news)
        if anew:
            order.close.sides, order.close.largest = how.sides, max(len(one.meeting.peers) for one in how.groups)
        return how

    def _of_sums(self, order: _Order, ready: Collection[str], free: tuple[str, ...]) -> list[GroupAttempt]:
        """Attempts to copy sums to members that lack them; if there are none, attempts to join the existing sums."""
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
            for at, part in enumerate(parts[: len(holders)]):  # the others copy from these later
                group = self._grouping.copy(order.stage, holders[at:] + holders[:at], part)
                if group.meeting.senders[0] not in {peer for task in found for peer in task.one.meeting.senders}:
                    found += self._bring(order, [group], (top,), top.last, top)
        if not found:
            found = self._ended(order, tops[0]) if whole else self._joined(order, free)
        return [self._attempt(order, task) for task in found]

    def _ended(self, order: _Order, top: PartialSum) -> list[_Task]:
        """Tasks if members cannot step with the only sum left (it is not `last`): each member converts its own copy."""
        if top.last or (self._factors and order.close.first is None):
            return []
        return self._bring(order, [OrderedGroup(MoshpitGroup((peer,)), None) for peer in top.kept], (top,), True)

    def _joined(self, order: _Order, free: tuple[str, ...]) -> list[_Task]:
        """Tasks of groups that join sums. In the last round, `free` members (in no sum, holding nothing) listen."""
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
            top.parts = ()  # members store only what they contribute
        return found

    def _meetings(
        self, order: _Order, run: tuple[PartialSum, ...], side: int, free: tuple[str, ...]
    ) -> tuple[OrderedGroup, ...]:
        """The groups that join these sums. As many of the `free` members listen as the groups have room for."""
        clusters = [sorted(top.kept) for top in run]
        groups = self._grouping.meet(order.stage, clusters)
        room = _LARGER * max(order.close.largest, side) - max(len(one.meeting.peers) for one in groups)
        if room < 0:
            raise NoSplit("a group has so few members left that the next groups would be too large")
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
        """Tasks of groups whose senders contribute these sums, each the one that it stores. The order to a listener
        names the sum that it stores, if any.
        """
        kept = {peer: attempt for part in parts for peer, attempt in part.kept.items()}
        own = order.close.sums.own(self._batches.due, parts)
        gone = tuple(mb for holder, mbs in own.items() if holder not in kept for mb in mbs)
        found = list[_Task]()
        for one in groups:
            assigned = {peer: own.get(peer, ()) for peer in one.meeting.peers}
            if gone:  # microbatches of members that can no longer report that these were counted
                assigned[one.meeting.peers[0]] += gone
            brings = {peer: kept[peer] for peer in one.meeting.senders}
            brings |= {peer: newest for peer in one.meeting.listeners if (newest := _newest(parts, peer))}
            for peer in one.meeting.peers:
                order.close.sums.unkeep(peer, but=brings.get(peer, b""))  # each stores no other sum than that
            found.append(_Task(one, assigned, "", parts, brings, last, copied))
        return found

    def _second(self, order: _Order, first: PartialSum) -> list[GroupAttempt]:
        """Attempts to sum the second factors, of the same members with the same microbatches."""
        members = tuple(sorted(first.kept))
        how, own = self._planned(order, members, anew=True), self._batches.due.assigned(order.stage, members)
        last = len(how.groups) == 1
        tasks = (
            _Task(one, {peer: own[peer] for peer in one.meeting.peers}, "", (), dict(first.kept), last)
            for one in how.groups
        )
        return [self._attempt(order, task) for task in tasks]

    def _attempt(self, order: _Order, task: _Task) -> GroupAttempt:
        """The attempt for a task, with an order to each member and helper."""
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
            # Lines may be slower than known: after each failed attempt the next one gets twice the time.
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
        """The task's split, sized for its vectors. It covers both factors only if one order sums both."""
        split = task.one.split
        if split is None or not self._factors or (task.last and close.first is None):
            return split
        return replace(split, elements=split.further if close.first is not None else split.elements, further=0)


def _newest(parts: tuple[PartialSum, ...], peer: str) -> bytes:
    """Attempt from which a member has the largest sum that it stores of these and their parts; b"" if none."""
    sums = (one for part in parts for one in part.all() if peer in one.kept)
    return max(((one.depth, one.kept[peer]) for one in sums), default=(0, b""))[1]


@dataclass(frozen=True, slots=True)
class _Order:
    """Values that are common to all orders planned in one call of `GroupOrders.next`."""

    now: float
    stage: int
    close: StageClose
    lineage: bytes


@dataclass(frozen=True, slots=True)
class _Task:
    """One group's task. `own`: each member's microbatches; `brings`: attempts that the contributed sums are from."""

    one: OrderedGroup
    own: dict[str, tuple[Mb, ...]]
    leader: str  # contributes the leader's part; empty: another group contributes it, or has done so
    parts: tuple[PartialSum, ...] = ()
    brings: dict[str, bytes] = field(default_factory=dict)
    last: bool = True
    copied: PartialSum | None = None
