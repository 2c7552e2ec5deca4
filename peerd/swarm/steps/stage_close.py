"""Closing of a step: each stage averages, in attempts of its groups, until its members have one sum.

`GroupOrders` chooses the groups that sum next. A group that fails repeats alone, without its lost members: the sums of
others stay, including what the lost members contributed to them. Members that do not answer in time once half of their
group have are left behind, since the sum exists. `Blame` weighs the reports of failed attempts: a member's report of
lost peers counts only for peers of its own group. `Agreement` investigates sums that differ. Decides only; the
conductor collects the outputs (`take`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Container

from peerd.averaging.shares import NoSplit
from peerd.averaging.topology import GroupTopology
from peerd.swarm.batch.batches import Batches
from peerd.swarm.events import CancelAttempt, ConductorConfig, Note, Output, PrepareEnded, Probe
from peerd.swarm.roster import Roster
from peerd.swarm.steps.agreement import Agreement, SummingPeers
from peerd.swarm.steps.attempt import GroupAttempt
from peerd.swarm.steps.blame import Blame
from peerd.swarm.steps.group_orders import GroupOrders, StageClose
from peerd.swarm.steps.partial_sums import PartialSum, PartialSums

_HEAR_S = 0.5  # wait for further reports when a member has lost a peer: others lose it at about the same time
_LATE_FACTOR = 3.0  # the other members may take this many times as long as the first half took
_RETRY_MOST_S = 5.0
_ABSENT_MOST = 2  # times in a step that a member may lack the sum it should contribute, without being blamed
_JURY = 3  # members of a group whose different sums show who is at fault, if the stage has that many


class StageClosing:
    """The averaging attempts of all stages of one run."""

    def __init__(
        self,
        config: ConductorConfig,
        batches: Batches,
        roster: Roster,
        blame: Blame,
        resting: Container[str],
        rng: random.Random,
    ) -> None:
        """`resting`: posts that contribute nothing for now. They are in no group and get no microbatches."""
        self._config, self._batches, self._roster, self._rng = config, batches, roster, rng
        self.blame, self._resting = blame, resting
        self._grouping = GroupTopology(roster.lines, config.group_size)
        self._groups = GroupOrders(self._grouping, batches, rng, config.factors, blame.note)
        self._agreements = [Agreement() for _ in range(config.stages)]
        self._step = 0  # step of the batch
        self._out = blame.out  # one list, so that a note precedes the orders that follow from it
        self.stages = [self._anew(stage) for stage in range(config.stages)]
        self.changed = False  # True: what trainers see has changed; the conductor resets this

    def _anew(self, stage: int) -> StageClose:
        return StageClose(PartialSums(stage, self._roster, self._note_change))

    def _note_change(self) -> None:
        self.changed = True

    # --- what the conductor calls -----------------------------------------------------------------------------

    def start(self, step: int) -> bytes:
        """Begin to close `step`, whose batch is complete; returns the lineage of the position it leads to."""
        self._step = step
        return self._rng.randbytes(8)

    def renew(self, now: float) -> None:
        """Discard all attempts and sums, because there is another batch, or another position."""
        for stage in range(len(self.stages)):
            self._forget(now, stage)
            self.stages[stage] = self._anew(stage)

    def reopen(self, now: float) -> None:
        """Discard the attempts and sums with microbatches that are no longer in the batch, which has shrunk."""
        for stage, close in enumerate(self.stages):
            summed = self._batches.due.summed[stage]
            for attempt in [*close.attempts.values()]:
                if not attempt.brought <= summed or close.first is not None or attempt.parts:
                    self._cancel(now, stage, attempt)
            if close.first is not None:
                self._forget(now, stage)
            self._look_for_losses(now, stage)
            close.settled = False
            close.calm()
            self._spare(now, close)

    def _spare(self, now: float, close: StageClose) -> None:
        """Exempt members whose gradients are in sums from computing the missing microbatches, for a while."""
        if close.spared_until is None and (close.sums or close.attempts):
            close.spared_until = now + self._config.lease_s

    def spared(self, now: float, stage: int) -> set[str]:
        """Members exempt from computing the remaining microbatches, since others can: their own gradients are in a sum,
        which would have to be made again.
        """
        close = self.stages[stage]
        if close.spared_until is None or now >= close.spared_until or math.isinf(close.spared_until):
            return set()
        version, found = close.spared
        if version != self._roster.version:  # cached, as all members ask
            found = {*close.sums.members(), *close.busy()}
            found = found if found < self._workers(stage) else set()
            close.spared = self._roster.version, found
        return found

    def _workers(self, stage: int) -> set[str]:
        """The members of a stage that contribute, at any position."""
        return {post for post in self._roster.of_stage(stage) if post not in self._resting}

    def _forget(self, now: float, stage: int) -> None:
        """Discard a stage's attempts and sums, and start again from what its members hold."""
        close = self.stages[stage]
        for attempt in [*close.attempts.values()]:
            self._cancel(now, stage, attempt)
        close.sums.forget_all(self._batches.due, now)
        close.first, close.settled = None, False

    @property
    def settled(self) -> list[bool]:
        """Per stage, True if it has its mean."""
        return [close.settled for close in self.stages]

    def awaited(self) -> set[str]:
        """Members that have not yet reported the end of their part in an attempt."""
        return {peer for close in self.stages for attempt in close.attempts.values() for peer in attempt.waiting}

    def prepared(self) -> list[str]:
        """Members that have their stage's mean, stage by stage."""
        return [peer for close in self.stages for peer in sorted(close.prepared)]

    def problem(self) -> str:
        """Reason that a stage cannot even attempt to average, or "" if all can."""
        for stage, close in enumerate(self.stages):
            if close.problem:
                return f"stage {stage} cannot average: {close.problem}"
        return ""

    def due(self, now: float) -> float | None:
        """Next deadline of any stage, or None if there is none."""
        return min((at for close in self.stages if (at := close.due(now)) is not None), default=None)

    def lost(self, now: float, peer: str) -> None:
        """Cancel the attempts that need a member or helper that is gone. The roster no longer has it, and its
        microbatches are lost. Not to be called while members make the step, since their sums are complete then.
        """
        for stage, close in enumerate(self.stages):
            for attempt in [one for one in close.attempts.values() if one.involves(peer)]:
                self._grouping.observe(len(attempt.group), (peer,))
                self._give_up(now, stage, attempt)
            if close.first is not None and peer in close.first.kept:
                self._forget(now, stage)
            self._look_for_losses(now, stage)
            close.settled = close.settled and close.whole(len(self._batches.due.entries)) is not None
            if self._batches.due.missing[stage]:
                self._spare(now, close)

    def step_made(self, step: int) -> None:
        """Record a completed step: strikes fade, and innocent summing peers get their shares back."""
        self.blame.step_made()
        for stage, agreement in enumerate(self._agreements):
            agreement.step_made(step)
            self._rest(stage)

    def take(self) -> list[Output]:
        """The outputs to carry out now, in order; each is returned once."""
        out, self._out[:] = [*self._out], []
        return out

    # --- attempts ---------------------------------------------------------------------------------------------

    def may_begin(self, now: float, stage: int) -> bool:
        """True if a stage has no sum of the batch, the pause after a failed attempt is over, and something has changed
        since attempts were last considered.
        """
        close = self.stages[stage]
        if self._batches.due.missing[stage]:
            close.looked = None
            return False
        return not close.settled and now >= close.not_before and close.looked != close.view(self._roster.version)

    def begin(self, now: float, stage: int, ready: tuple[str, ...], lineage: bytes) -> bool:
        """Order the attempts that the `ready` members can begin now; True if there are any. Requires `may_begin`."""
        close = self.stages[stage]
        if close.first is not None and not (close.has_all_of(close.first) and close.first.kept.keys() <= {*ready}):
            self._forget(now, stage)
        close.sums.forget_outgrown(self._batches.due, now)
        self._look_for_losses(now, stage)
        if self._batches.due.missing[stage]:  # a discarded sum contained microbatches that nobody holds
            return False
        try:
            found, close.problem = self._groups.next(now, stage, close, ready, lineage), ""
        except NoSplit as error:
            if close.sums or close.first is not None:
                self.blame.note(f"stage {stage} starts averaging again: {error}")
                self._forget(now, stage)
            else:
                self.changed |= close.problem != str(error)
                close.problem = str(error)
            close.not_before = now + self._config.retry_s
            return False
        close.spared_until = None
        for attempt in found:
            close.attempts[attempt.name] = attempt
            self._batches.due.sum_up(stage, attempt.brought)
            self._out += attempt.orders.values()
        if not found:
            self._look_whether_whole(now, stage)
        close.time_late(now, self._config.late_s, _LATE_FACTOR)
        close.looked = close.view(self._roster.version)
        return bool(found)

    def look(self, now: float) -> None:
        """Act on deadlines: judge accusations, leave late members behind, and end exemptions (`spared`)."""
        for close in self.stages:
            if close.spared_until is not None and now >= close.spared_until:
                close.spared_until = math.inf
                self._roster.change(listed=False)
        for stage, attempt in self._under_way():
            if attempt.name not in self.stages[stage].attempts:
                continue
            if attempt.heard_at is not None and now >= attempt.heard_at:
                self._judge_accused(now, stage, attempt)
            elif attempt.late_at is not None and now >= attempt.late_at and not attempt.accused:
                self._end_late(now, stage, attempt)

    def _end_late(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """End an attempt that took too long. Its sum counts if at least half of the group have it."""
        if attempt.prepared and (attempt.copies is not None or 2 * len(attempt.prepared) >= len(attempt.group)):
            self._leave_behind(now, stage, attempt)
        elif self.stages[stage].others_have(attempt):  # the members get copies
            self._cancel(now, stage, attempt)
        else:
            for peer in sorted(attempt.waiting):
                self.blame.failed(now, peer, "does not report that it averaged")
            self._fail(now, stage, attempt)

    def _late_at(self, now: float, attempt: GroupAttempt) -> float:
        """Deadline for the other members, given how long this attempt has taken so far."""
        return now + max(self._config.late_s, _LATE_FACTOR * (now - attempt.began))

    def _under_way(self) -> list[tuple[int, GroupAttempt]]:
        return [(stage, one) for stage, close in enumerate(self.stages) for one in close.attempts.values()]

    def _leave_behind(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """End the attempt without the members that have not answered."""
        newcomers = self.blame.newcomers(self._together(stage, attempt), attempt.waiting)
        if len(newcomers) < len(attempt.waiting):  # established members are late, too: all of them may be overloaded
            newcomers = []
        for peer in newcomers:
            self.blame.let_go(now, peer, "does not report that it averaged")
        for peer in sorted(attempt.waiting.difference(newcomers)):
            self.blame.note(f"peer …{peer[-8:]} has not reported that it averaged: the others continue")
            self.blame.failed(now, peer, "does not report that it averaged")
        self.stages[stage].left |= attempt.waiting
        attempt.waiting.clear()
        self._all_answered(now, stage, attempt)

    def ended(self, now: float, end: PrepareEnded) -> None:
        """Process the report of a member or helper that its part in an attempt has ended."""
        stage, attempt = next(((s, one) for s, one in self._under_way() if one.name == end.attempt), (0, None))
        if attempt is None:
            return
        if end.peer in attempt.helpers and not end.ok:
            self.blame.let_go(now, end.peer, "failed averaging")
            self._fail(now, stage, attempt)
        if end.peer not in attempt.waiting:
            return
        attempt.waiting.discard(end.peer)
        if end.ok:
            self._ok(now, stage, attempt, end)
        elif end.declines:
            self._fail(now, stage, attempt)
            self.blame.declined(now, end.peer, others=len(self._workers(stage)) > 1)
        elif end.absent and attempt.orders[end.peer].brings:
            self._absent(now, stage, attempt, end.peer)
        elif self.blame.newcomers(self._together(stage, attempt), [end.peer]):
            self.blame.let_go(now, end.peer, "failed averaging")  # and its report of others is ignored
            self._fail(now, stage, attempt)
        else:
            self._not_ok(now, stage, attempt, end)

    def _ok(self, now: float, stage: int, attempt: GroupAttempt, end: PrepareEnded) -> None:
        close = self.stages[stage]
        attempt.prepared.add(end.peer)
        attempt.digests[end.peer] = end.digest
        if attempt.waiting:
            half = 2 * len(attempt.prepared) >= len(attempt.group)
            if attempt.late_at is None and (half or attempt.copies is not None):
                attempt.late_at = self._late_at(now, attempt)
        elif attempt.accused:
            self._judge_accused(now, stage, attempt)
        else:
            self._all_answered(now, stage, attempt)
        close.longest_s = max(close.longest_s or 0.0, now - attempt.began)
        close.time_late(now, self._config.late_s, _LATE_FACTOR)

    def _absent(self, now: float, stage: int, attempt: GroupAttempt, peer: str) -> None:
        """Handle a member that lacks the sum it should contribute. It is at fault only if this happens repeatedly."""
        close = self.stages[stage]
        close.sums.unkeep(peer)
        self._fail(now, stage, attempt)
        self._look_for_losses(now, stage)
        close.absent[peer] += 1
        if close.absent[peer] > _ABSENT_MOST:
            self.blame.failed(now, peer, "does not store the sums that it received")

    def _not_ok(self, now: float, stage: int, attempt: GroupAttempt, end: PrepareEnded) -> None:
        assigned = attempt.assigned(end.peer)
        missing, refused = assigned & set(end.missing), assigned & set(end.refused)
        lost = [peer for peer in dict.fromkeys(end.lost) if peer != end.peer]
        helpers, mates = ([peer for peer in lost if peer in known] for known in (attempt.helpers, attempt.group))
        if newcomers := self.blame.newcomers(self._together(stage, attempt), mates):
            mates = [mate for mate in mates if mate not in newcomers]
        explained = missing or refused or helpers or newcomers
        if mates and not explained:
            self._accuse(now, stage, attempt, end.peer, mates)
            return
        self._fail(now, stage, attempt)
        for peer in (*helpers, *newcomers):
            self.blame.let_go(now, peer, "failed averaging")
        if refused:
            self.blame.refused(now, end.peer, refused)
        if missing:
            self.blame.missing(now, self._step, (stage, end.peer), missing)
        if not explained:
            self._grouping.observe(len(attempt.group), (end.peer,))
            self.blame.failed(now, end.peer, "failed averaging")

    def _accuse(self, now: float, stage: int, attempt: GroupAttempt, by: str, mates: list[str]) -> None:
        """Record that a member has lost these peers, and wait a moment for others to report the same."""
        attempt.accused += [(by, mate) for mate in mates]
        if attempt.heard_at is None:
            attempt.heard_at = now + _HEAR_S
        if len(attempt.group) <= 2 or not attempt.waiting:
            self._judge_accused(now, stage, attempt)

    def _judge_accused(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        accused = sorted({mate for _, mate in attempt.accused})
        self._grouping.observe(len(attempt.group), accused)
        self._out += [Probe(peer) for peer in accused]
        members = self._together(stage, attempt)
        self._fail(now, stage, attempt)
        self.blame.contradict(now, attempt.accused, len(members))

    def _together(self, stage: int, attempt: GroupAttempt) -> set[str]:
        """All members that average in the stage: faults are judged among these, as a single group may be too small."""
        close = self.stages[stage]
        return {*attempt.group, *close.busy(), *close.sums.members()}

    def _all_answered(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """Compare the digests of the sum, including those of other groups that made it: if equal, it counts."""
        close, found = self.stages[stage], attempt.result()
        if attempt.copies is not None and any(one != attempt.copies.digest for one in attempt.digests.values()):
            self._copy_differs(now, stage, attempt, attempt.copies)
            return
        if len(set(found.digests.values())) > 1:
            self._fail(now, stage, attempt)
            self._judge_different(now, stage, attempt, found)
            return
        del close.attempts[attempt.name]
        self._grouping.observe(len(attempt.group))
        top = close.sums.add(found, attempt.copies)
        if top is None:
            close.sums.release(self._batches.due, attempt.brought, now)
            self._begin_anew(now, stage, "a sum does not fit the others")
            return
        close.time_siblings(attempt, self._late_at(now, attempt))
        self._look_for_losses(now, stage)
        if len(set(top.digests.values())) > 1:  # groups got different sums of the same contents
            self._forget(now, stage)
            self._pause(now, stage)
            self._judge_different(now, stage, attempt, top)
        else:
            self._look_whether_whole(now, stage)

    def _look_for_losses(self, now: float, stage: int) -> None:
        """Forget sums that are lost, and cancel attempts to join or copy them: these would count microbatches twice."""
        close = self.stages[stage]
        close.sums.forget_lost(self._batches.due, now)
        for attempt in [*close.attempts.values()]:
            if attempt.name in close.attempts and not close.sums.is_of_use(attempt.parts, attempt.copies):
                self._give_up(now, stage, attempt)

    def _copy_differs(self, now: float, stage: int, attempt: GroupAttempt, top: PartialSum) -> None:
        """Handle members that report another sum than the one they copied. Nobody is blamed, since either side may be
        wrong. Another member provides the next copy; after two failed copies a member is left without the sum.
        """
        close, holder = self.stages[stage], attempt.group[0]
        others = {peer for peer, digest in attempt.digests.items() if digest != top.digest}
        self._fail(now, stage, attempt)
        self.blame.note(f"stage {stage}: a copy of a sum differs from it, and is repeated")
        given = top.kept.pop(holder, b"")
        if holder in others or not given:
            close.sums.unkeep(holder)
        else:
            top.kept[holder] = given  # moves it to the end
        close.in_vain.update(others)
        close.left |= {peer for peer in others if peer == holder or close.in_vain[peer] > 1}
        self._look_for_losses(now, stage)

    def _begin_anew(self, now: float, stage: int, why: str) -> None:
        """Discard all sums of a stage that are inconsistent: a step with them would be wrong."""
        self._out.append(Note(f"stage {stage} starts averaging again: {why}", warning=True))
        self._forget(now, stage)
        self._pause(now, stage)

    def _look_whether_whole(self, now: float, stage: int) -> None:
        """Settle the stage once all members that can have the sum of the batch have it."""
        close, due = self.stages[stage], self._batches.due
        top, has_first = close.complete(due), self._config.factors and close.first is None
        if top is None or not (top.last or has_first):
            return
        if wrong := close.fault(due):
            self._begin_anew(now, stage, f"its sum cannot be right: {wrong}")
        elif not top.last:
            self._sum_second(now, stage, top)
        else:
            close.settled = True
            self._agreements[stage].agreed()

    def _sum_second(self, now: float, stage: int, first: PartialSum) -> None:
        """Continue with the second factors, if all that contributed the first ones are still present."""
        self._forget(now, stage)
        if self.stages[stage].has_all_of(first):
            self.stages[stage].first = first
        else:
            self._begin_anew(now, stage, "a contributor of first factors cannot contribute second ones")

    def _judge_different(self, now: float, stage: int, attempt: GroupAttempt, found: PartialSum) -> None:
        """Handle different sums: repeat without helpers, then without newcomers; then `Agreement` finds the culprit."""
        if attempt.helpers:  # strangers, and a round works without them
            for peer in sorted(attempt.helpers):
                alone = len(attempt.helpers) == 1
                self.blame.let_go(now, peer, "summed in a round in which members got different sums", proven=alone)
            return
        if not self._may_judge(stage, attempt):
            self.blame.note(f"stage {stage}: a few members got different sums: larger groups repeat the round")
            self.stages[stage].wide = True
            self._forget(now, stage)
            return
        if newcomers := self.blame.newcomers(self._together(stage, attempt), found.kept):
            for peer in newcomers:
                alone = len(newcomers) == 1
                self.blame.let_go(now, peer, "took part in a round in which members got different sums", proven=alone)
            return
        able = frozenset(peer for peer in found.kept if not self._roster.lines.is_client(peer))
        summing = SummingPeers(found.summers, able)
        told = self._agreements[stage].judge(self._step, found.digests, summing, self._roster.since)
        self.blame.note(f"stage {stage}: {told.note}")
        for peer in told.guilty:
            self.blame.put_aside(now, peer, "reports another sum than others of its stage")
        self._rest(stage)

    def _may_judge(self, stage: int, attempt: GroupAttempt) -> bool:
        """False for a small group among several, whose members may collude: the peer at fault can be found only if all
        members, or as many as possible, sum together what they hold.
        """
        positions = {stand.position for stand in attempt.stands.values()}
        here = [peer for peer in self._workers(stage) if self._roster.entries[peer].position in positions]
        size = len(attempt.group)
        return not attempt.parts and (size >= len(here) or (self.stages[stage].wide and size >= _JURY))

    def _rest(self, stage: int) -> None:
        self._roster.lines.rest(stage, self._agreements[stage].idle)

    def _fail(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """End this attempt; the next one follows after an exponential pause."""
        if attempt.name in self.stages[stage].attempts:
            self._give_up(now, stage, attempt)
            self._pause(now, stage)

    def _pause(self, now: float, stage: int) -> None:
        """Start the pause before the next attempt. Failures at the same time, or during it, do not lengthen it."""
        close = self.stages[stage]
        self.changed = True
        if now < close.not_before:
            return
        close.not_before = now + min(_RETRY_MOST_S, self._config.retry_s * 2**close.failures)
        close.failures += 1

    def _give_up(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """Cancel the attempt. Sums of factors start again, since second factors need all contributors of the first."""
        if self.stages[stage].first is not None:
            self._forget(now, stage)
        else:
            self._cancel(now, stage, attempt)

    def _cancel(self, now: float, stage: int, attempt: GroupAttempt) -> None:
        """Cancel the attempt; members hold again what they contributed."""
        close = self.stages[stage]
        if close.attempts.pop(attempt.name, None) is not None:
            self._out.append(CancelAttempt(attempt.name))
            close.sums.release(self._batches.due, attempt.brought, now)
