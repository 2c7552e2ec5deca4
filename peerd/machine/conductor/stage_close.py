"""Closing of a step: each stage averages, in attempts, until its members have one sum.

Members that do not answer in time once half have are left behind: the sum is there. `Blame` weighs the reports of
failed attempts: a member's report of lost peers counts only for those it met in that attempt. `Agreement` looks into
sums that differ. Decides only; the conductor takes the outputs from here (`take`).
"""

from __future__ import annotations

import random

from peerd.machine.averaging.shares import NoSplit
from peerd.machine.averaging.topology import Grouping
from peerd.machine.batch.batches import Batches
from peerd.machine.conductor.agreement import Agreement, Summing
from peerd.machine.conductor.attempt import StageClose
from peerd.machine.conductor.blame import Blame
from peerd.machine.swarm.events import CancelAttempt, ConductorConfig, Output, PrepareEnded, Probe, SendPrepare
from peerd.machine.swarm.roster import Roster

_HEAR_S = 0.5  # wait for others' reports when a member has lost a peer: they lose it in the same moments
_LATE_FACTOR = 3.0  # times as long as the first half of the members took, the rest may take
_RETRY_MOST_S = 5.0
_DOUBLINGS = 10  # of the time of an attempt


class Closing:
    """The attempts of all stages of one run. See the module's header."""

    def __init__(
        self, config: ConductorConfig, batches: Batches, roster: Roster, blame: Blame, rng: random.Random
    ) -> None:
        self._config, self._batches, self._roster, self._rng = config, batches, roster, rng
        self.blame = blame
        self._grouping = Grouping(roster.lines, config.group_size)
        self._agreements = [Agreement() for _ in range(config.stages)]
        self._step = 0  # the batch's
        self._out = blame.out  # one list: a note stands before the orders that follow from it
        self.stages = [StageClose() for _ in range(config.stages)]
        self.changed = False  # what trainers see has changed; the conductor takes this from here

    # --- what the conductor calls -----------------------------------------------------------------------------

    def start(self, step: int) -> bytes:
        """Begin the close of `step`, whose batch is whole; returns the lineage of the position it leads to."""
        self.renew()
        self._step = step
        return self._rng.randbytes(8)

    def renew(self) -> None:
        """Forget all attempts and means: another batch, or another position."""
        for close in self.stages:
            self._cancel(close)
        self.stages = [StageClose() for _ in self.stages]

    @property
    def settled(self) -> list[bool]:
        """Per stage, True when it has its mean."""
        return [close.settled for close in self.stages]

    def awaited(self) -> set[str]:
        """Members that have not yet reported the end of their part in an attempt."""
        return {peer for close in self.stages if close.attempt for peer in close.waiting}

    def prepared(self) -> list[str]:
        """Members that have their stage's mean, stage by stage."""
        return [peer for close in self.stages for peer in sorted(close.prepared)]

    def problem(self) -> str:
        """The reason that a stage cannot even try to average; "" where all can."""
        for stage, close in enumerate(self.stages):
            if close.problem:
                return f"stage {stage} cannot average: {close.problem}"
        return ""

    def due(self) -> float | None:
        """The next deadline of any stage; None: there is none."""
        return min((at for close in self.stages if (at := close.due) is not None), default=None)

    def lost(self, peer: str, stage: int | None) -> None:
        """A member of `stage`, or a helper (None), is gone: call off the attempts that need it."""
        for close in self.stages:
            if close.involves(peer):
                self._grouping.observe(len(close.group), (peer,))
                self._cancel(close)
        if stage is not None:
            close = self.stages[stage]
            close.prepared.discard(peer)
            if close.settled and not close.prepared:
                self.stages[stage] = StageClose()

    def step_made(self, step: int) -> None:
        """A step was made: strikes fade, and innocent summers get their shares back."""
        self.blame.step_made()
        for stage, agreement in enumerate(self._agreements):
            agreement.step_made(step)
            self._rest(stage)

    def take(self) -> list[Output]:
        """The outputs to carry out now, in order; each is returned once."""
        out = list(self._out)
        self._out.clear()
        return out

    # --- attempts ---------------------------------------------------------------------------------------------

    def may_begin(self, now: float, stage: int) -> bool:
        """True while a stage has no sum and no attempt under way, and the pause after a failed one is over."""
        close = self.stages[stage]
        return not close.settled and not close.attempt and now >= close.not_before

    def begin(self, now: float, stage: int, group: tuple[str, ...], lineage: bytes) -> None:
        """Order one more attempt of these members, if they can average; `may_begin` must be true."""
        close = self.stages[stage]
        try:
            how, close.problem = self._grouping.order(stage, group), ""
        except NoSplit as error:
            self.changed |= close.problem != str(error)
            close.problem, close.not_before = str(error), now + self._config.retry_s
            return
        assigned = self._batches.due.assigned(stage, group)
        close.attempt, close.group, close.helpers, close.began = self._rng.randbytes(16), group, how.helpers, now
        close.waiting, close.prepared, close.digests = set(group), set(), {}
        if how.news:
            self.blame.note(how.news)
        # Lines may carry less than is known of them: after each attempt in vain the next one gets twice the time.
        most_s = how.most_s * 2.0 ** min(close.failures, _DOUBLINGS)
        orders = []
        for peer in (*group, *sorted(close.helpers)):
            part, rounds = assigned.get(peer, ()), how.rounds.get(peer, ())
            orders.append(SendPrepare(peer, close.attempt, lineage, group, part, how.split, rounds, most_s))
        close.orders = {order.peer: order for order in orders}
        self._out += orders

    def look(self, now: float) -> None:
        """Act on deadlines: judge accusations, and leave late members behind."""
        for close in self.stages:
            if close.attempt and close.heard_at is not None and now >= close.heard_at:
                self._judge_accused(now, close)
            elif close.attempt and close.late_at is not None and now >= close.late_at and not close.accused:
                self._leave_behind(now, close)

    def _leave_behind(self, now: float, close: StageClose) -> None:
        """End the attempt without the members that have not answered."""
        newcomers = self.blame.newcomers(close.group, close.waiting)
        if len(newcomers) < len(close.waiting):  # members are late as well: all that are late may be overloaded
            newcomers = []
        for peer in newcomers:
            self.blame.let_go(now, peer, "does not say that it averaged")
        for peer in sorted(close.waiting.difference(newcomers)):
            self.blame.note(f"peer …{peer[-8:]} has not said that it averaged: the others go on")
            self.blame.failed(now, peer, "does not say that it averaged")
        close.waiting.clear()
        self._all_answered(now, close)

    def ended(self, now: float, end: PrepareEnded) -> None:
        """A member, or a helper, reports the end of its part in an attempt."""
        close = next((c for c in self.stages if c.attempt and c.attempt == end.attempt), None)
        if close is None:
            return
        if end.peer in close.helpers and not end.ok:
            self.blame.let_go(now, end.peer, "failed averaging")
            self._fail(now, close)
        if end.peer not in close.waiting:
            return
        close.waiting.discard(end.peer)
        if end.ok:
            self._ok(now, close, end)
        elif end.declines:
            self.blame.declined(now, end.peer, others=len(close.group) > 1)
            self._fail(now, close)
        elif self.blame.newcomers(close.group, [end.peer]):
            self.blame.let_go(now, end.peer, "failed averaging")  # and its report of others is ignored
            self._fail(now, close)
        else:
            self._not_ok(now, close, end)

    def _ok(self, now: float, close: StageClose, end: PrepareEnded) -> None:
        close.prepared.add(end.peer)
        close.digests[end.peer] = end.digest
        if close.waiting:
            if close.late_at is None and 2 * len(close.prepared) >= len(close.group):
                close.late_at = now + max(self._config.late_s, _LATE_FACTOR * (now - close.began))
        elif close.accused:
            self._judge_accused(now, close)
        else:
            self._all_answered(now, close)

    def _not_ok(self, now: float, close: StageClose, end: PrepareEnded) -> None:
        assigned = close.assigned(end.peer)
        missing, refused = assigned & set(end.missing), assigned & set(end.refused)
        lost = [peer for peer in dict.fromkeys(end.lost) if peer != end.peer]
        helpers = [peer for peer in lost if peer in close.helpers]
        mates = [peer for peer in lost if peer in close.met(end.peer)]
        if newcomers := self.blame.newcomers(close.group, mates):
            mates = [mate for mate in mates if mate not in newcomers]
        for peer in (*helpers, *newcomers):
            self.blame.let_go(now, peer, "failed averaging")
        if refused:
            self.blame.refused(now, end.peer, refused)
        if missing:
            self.blame.missing(now, self._step, (self.stages.index(close), end.peer), missing)
        explained = missing or refused or helpers or newcomers
        if mates and not explained:
            self._accuse(now, close, end.peer, mates)
            return
        if not explained:
            self._grouping.observe(len(close.group), (end.peer,))
            self.blame.failed(now, end.peer, "failed averaging")
        self._fail(now, close)

    def _accuse(self, now: float, close: StageClose, by: str, mates: list[str]) -> None:
        """A member has lost these peers: wait a moment for others to report the same."""
        close.accused += [(by, mate) for mate in mates]
        if close.heard_at is None:
            close.heard_at = now + _HEAR_S
        if len(close.group) <= 2 or not close.waiting:
            self._judge_accused(now, close)

    def _judge_accused(self, now: float, close: StageClose) -> None:
        accused = sorted({mate for _, mate in close.accused})
        self._grouping.observe(len(close.group), accused)
        self._out += [Probe(peer) for peer in accused]
        self.blame.contradict(now, close.accused, len(close.group))
        self._fail(now, close)

    def _all_answered(self, now: float, close: StageClose) -> None:
        """Compare the digests of all sums: equal ones settle the stage, different ones cost the attempt."""
        stage = self.stages.index(close)
        if len(set(close.digests.values())) <= 1:
            close.settled, close.attempt, close.late_at = True, b"", None
            self._agreements[stage].agreed()
            self._grouping.observe(len(close.group))
            return
        if close.helpers:  # strangers, and a round can do without them
            for peer in sorted(close.helpers):
                alone = len(close.helpers) == 1
                self.blame.let_go(now, peer, "summed where members ended with different sums", proven=alone)
        elif newcomers := self.blame.newcomers(close.group, close.group):
            for peer in newcomers:
                alone = len(newcomers) == 1
                self.blame.let_go(now, peer, "took part where members ended with different sums", proven=alone)
        else:
            self._judge_different(now, stage, close)
        self._fail(now, close)

    def _judge_different(self, now: float, stage: int, close: StageClose) -> None:
        """Established members report different sums: ask `Agreement` for the culprits."""
        able = frozenset(peer for peer in close.group if not self._roster.lines.is_client(peer))
        summing = Summing(close.summers(), able)
        found = self._agreements[stage].judge(self._step, close.digests, summing, self._roster.since)
        self.blame.note(f"stage {stage}: {found.note}")
        for peer in found.guilty:
            self.blame.put_aside(now, peer, "has another sum than its stage-mates")
        self._rest(stage)

    def _rest(self, stage: int) -> None:
        """Pass the peers that get no share for now to the lines."""
        self._roster.lines.rest(stage, self._agreements[stage].idle)

    def _fail(self, now: float, close: StageClose) -> None:
        """End this attempt; the next one follows after an exponential pause."""
        self._cancel(close)
        close.not_before = now + min(_RETRY_MOST_S, self._config.retry_s * 2**close.failures)
        close.failures += 1
        self.changed = True

    def _cancel(self, close: StageClose) -> None:
        """Call the attempt off."""
        if close.attempt:
            self._out.append(CancelAttempt(close.attempt))
            close.attempt, close.late_at, close.heard_at, close.accused = b"", None, None, []
