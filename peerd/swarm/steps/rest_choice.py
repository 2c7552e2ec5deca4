"""Resting members: those that contribute no gradients for now, since their line or device would slow everybody down.

After each step the conductor compares the step's duration with the model of `averaging/contributors`, and asks
the model which members should contribute to the next steps. A resting member remains a member: it stays on the roster,
it may conduct, and it sums for the others if it can be reached; it gets no microbatches and makes no steps. When its
gradients are worth their time again, it catches up like a newcomer. A newcomer whose network line is known may rest
before it has fetched any state.

A contributor rests only after several comparisons in a row, and returns only after several, so that noise causes no
changes. A member that is behind, such as a newcomer, is evaluated by itself and rests at once. Measurements are
distrusted after a while: a member whose line was measured, or whose device was slow, is tried again once the steps made
without it took many times as long as a trial costs, and less often after each trial. A line that a peer declares counts
until it declares another. If the last contributors of a stage leave, its resting members contribute again.

Decides only. The figures come from untrusted peers: a liar makes itself rest, or slows the step as it could before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from peerd.averaging.contributors import (
    HARMLESS,
    LEAST,
    WORTH_RESTING,
    ContributorChoice,
    ContributorRates,
    StepCost,
    with_unknown,
)
from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import FORESEEABLE_S, LINE_BYTES_PER_S
from peerd.messages.contributions import Rest
from peerd.messages.swarm import MAX_MEMBERS, Position
from peerd.swarm.events import ConductorConfig, Note
from peerd.swarm.posts import peer_of, short
from peerd.swarm.roster import Roster

_LOOKS_TO_REST = 2  # successive steps after which a contributor should rest, before it does
_LOOKS_TO_RETURN = 3  # successive comparisons in which a resting member does no harm, before it returns
_LEAST_S = 1e-6  # lower bound on the time of computing
_LOOKED_AT = 32  # absent members of a stage that are evaluated at each step
_TRY_SHARE = 30.0  # a trial may cost at most 1 / _TRY_SHARE of the time since the last one
_TRY_LEAST_S = 600.0  # least pause between trials
_TRIES_MOST = 6  # doublings of the pause between trials


@dataclass(slots=True)
class _Resting:
    """One resting member: the reason, its stage, since when it rests, and the number of earlier trials."""

    rest: Rest
    stage: int
    since: float
    tries: int = 0


class _Measured(NamedTuple):
    """Ratios of the last step's durations to those of the model: of computing, and of averaging (at most 1)."""

    computing: float = 1.0
    averaging: float = 1.0


class RestChoice:
    """Decides which members rest. `pace`: microbatches per second of a post's device, or 0 if unknown."""

    def __init__(self, config: ConductorConfig, roster: Roster, pace: Callable[[str], float]) -> None:
        self._config, self._roster, self._pace = config, roster, pace
        self._resting: dict[str, _Resting] = {}
        self.peers = set[str]()  # peers that rest
        self._tries = BoundedDict[str, int](MAX_MEMBERS)  # number of trials of members that contribute, or are about to
        self._no_help = BoundedDict[str, None](MAX_MEMBERS)  # lost while they rested: they do not sum for others
        self._looks = BoundedDict[str, int](MAX_MEMBERS)  # successive comparisons in favour of a change
        self._weighed = BoundedDict[str, Rest | None](MAX_MEMBERS)  # results for members that reported in this step
        self._last_looked: dict[int, str] = {}  # by stage, the last absent member that was evaluated
        self.begins: Callable[[list[str]], None] = lambda posts: None  # called with members that begin to rest
        self._measured: _Measured | None = None  # None: no step was made yet
        self._opened_at: float | None = None
        self._filled_at: float | None = None

    def __contains__(self, post: object) -> bool:
        return post in self._resting

    def of(self, post: str) -> Rest | None:
        """Reason that a member rests, or None if it contributes."""
        found = self._resting.get(post)
        return found.rest if found is not None else None

    def at_work(self, stage: int, position: Position | None) -> list[str]:
        """Members of a stage that are at `position` and contribute, sorted."""
        return [post for post in self._roster.at(stage, position) if post not in self._resting]

    # --- what happens -----------------------------------------------------------------------------------------

    def filled(self, now: float) -> None:
        """Record that the batch of the current step is complete."""
        self._filled_at = now

    def came(self, now: float, post: str, current: Position | None) -> list[Note]:
        """Evaluate a member that has joined or reported again; it rests at once if its line is too slow.

        Each member is evaluated once per step, however often it reports.
        """
        entry = self._roster.entries.get(post)
        if not self._config.weighs or self._measured is None or entry is None or entry.position == current:
            return []
        if post in self._resting:
            return []
        if post not in self._weighed:
            notes = self._look_at_absent(now, entry.stage, [post], current)
            self._weighed[post] = self.of(post)
            return notes
        if (rest := self._weighed[post]) is not None:
            self._begin(now, post, rest)
            self._tell_lines(entry.stage)
        return []

    def lost(self, post: str, stage: int, current: Position | None) -> None:
        """Record that a member is gone. If no contributor of its stage is left, its resting members contribute.

        `current` is None while members are on their way to another position: then it is not known yet who is left.
        """
        if post in self._resting:
            self._no_help[post] = None
            self._tries[post] = self._resting[post].tries
            self._forget([post])
        if current is not None and not self.at_work(stage, current):
            self._forget(self._of_stage(stage))
        self._tell_lines(stage)

    def restart(self) -> None:
        """Let everybody contribute, and restart the timing of steps.

        Called when the swarm resumes from a position that no step of this conductor led to, or when the run is
        complete.
        """
        self._forget(list(self._resting))
        self._opened_at = self._filled_at = None
        for stage in self._roster.stages:
            self._tell_lines(stage)

    def step_made(self, now: float, current: Position) -> list[Note]:
        """Record a step that led to `current`, and choose the next contributors. Returns notes for the log."""
        if not self._config.weighs:
            return []
        self._measure(now, current)
        self._opened_at, self._filled_at = now, None
        self._weighed.clear()
        notes = list[Note]()
        if self._measured is not None:
            for stage in self._roster.stages:
                notes += self._look_at_workers(now, stage, current)
                notes += self._look_at_absent(now, stage, self._in_turn(stage, current), current)
        return notes

    # --- measuring --------------------------------------------------------------------------------------------

    def _measure(self, now: float, current: Position) -> None:
        """Compare the duration of the completed step with the model: computing first, then averaging."""
        if self._opened_at is None or self._filled_at is None:
            return
        computing_s, averaging_s = self._filled_at - self._opened_at, now - self._filled_at
        computed = averaged = 0.0
        for stage in self._roster.stages:
            if workers := self.at_work(stage, current):
                choice = self._choice(stage, workers, _Measured())
                computed = max(computed, choice.computing_s(workers))
                averaged = max(averaged, choice.averaging_s(workers))
        seen = not self._config.delayed and computed > 0  # a delayed run does not show how long the batch took
        self._measured = _Measured(
            max(computing_s, _LEAST_S) / computed if seen else 1.0,
            min(1.0, averaging_s / averaged) if averaged > 0 else self._known.averaging,
        )

    @property
    def _known(self) -> _Measured:
        return self._measured or _Measured()

    # --- choosing ---------------------------------------------------------------------------------------------

    def _look_at_workers(self, now: float, stage: int, current: Position) -> list[Note]:
        """Choose which contributors of a stage rest: those that the model rejects after several steps in a row.

        Members that are not at `current` are left out, since what they would contribute is only their own claim.
        """
        workers = self.at_work(stage, current)
        if len(workers) <= LEAST:
            return []
        choice = self._choice(stage, workers, self._known, self._other_stages(stage, current))
        rests = choice.choose()
        for post in workers:
            if post not in rests:
                self._looks.pop(post, None)
        leaving = self._often(sorted(rests), _LOOKS_TO_REST, self._tries)
        contributing = frozenset(workers) - rests
        notes = [self._lay_off(now, post, choice, contributing) for post in leaving]
        self._tell_lines(stage)
        return notes

    def _look_at_absent(self, now: float, stage: int, posts: Sequence[str], current: Position | None) -> list[Note]:
        """Compare a step with and without each of `posts`: newcomers that are not at `current`, and resting members."""
        workers = self.at_work(stage, current)
        if len(workers) < LEAST:
            return self._return(self._of_stage(stage))
        if not posts:
            return []
        tried = {post for post in posts if self._may_be_tried(now, post)}
        others_s = self._other_stages(stage, current)
        choice = self._choice(stage, [*workers, *posts], self._known, others_s, tried)
        without_s, notes = choice.step_s(workers), list[Note]()
        for post in posts:
            with_s, found = choice.step_s([*workers, post]), self._resting.get(post)
            if found is None and with_s > WORTH_RESTING * without_s:
                notes.append(self._lay_off(now, post, choice, frozenset(workers)))
            elif found is not None and post not in tried:
                found.rest = msgspec.structs.replace(found.rest, with_s=_told(with_s), without_s=_told(without_s))
            if found is not None and with_s > HARMLESS * without_s:
                self._looks.pop(post, None)
            elif found is not None and self._often([post], _LOOKS_TO_RETURN, tried):
                notes += self._return([post])
        self._tell_lines(stage)
        return notes

    def _in_turn(self, stage: int, current: Position) -> list[str]:
        """Some of the stage's newcomers and resting members, different ones at each step."""
        absent = [post for post in self._roster.of_stage(stage) if self._roster.entries[post].position != current]
        absent += [post for post in self._of_stage(stage) if self._roster.entries[post].position == current]
        after = [post for post in absent if post > self._last_looked.get(stage, "")]
        found = (after + [post for post in absent if post not in set(after)])[:_LOOKED_AT]
        self._last_looked[stage] = found[-1] if found else ""
        return found

    def _often(self, posts: Iterable[str], looks: int, at_once: Container[str]) -> list[str]:
        found = list[str]()
        for post in posts:
            self._looks[post] = self._looks.get(post, 0) + 1
            if self._looks[post] >= looks or post in at_once:
                found.append(post)
        return found

    def _choice(
        self,
        stage: int,
        posts: Sequence[str],
        measured: _Measured,
        others_s: tuple[float, float] = (0.0, 0.0),
        tried: Container[str] = (),
    ) -> ContributorChoice:
        """Model of a step with these posts of a stage. Measurements of posts in `tried` are ignored."""
        lines = self._roster.lines
        found = [ContributorRates(lines.member_line(post), self._pace(post)) for post in posts]
        cost = StepCost(
            microbatches=self._config.microbatches * measured.computing,
            vector_bytes=lines.likely_vector_bytes(tuple(posts)) * measured.averaging,
            overlaps=self._config.delayed,
            other_computing_s=others_s[0],
            other_averaging_s=others_s[1],
        )
        helpers = [lines.member_line(info.peer) for info in lines.helpers() if info.stage == stage]
        helpers += [lines.member_line(post) for post in self._helping(stage) if post not in posts]
        known = [
            with_unknown(one, line=lines.is_measured(one.peer), pace=True) if one.peer in tried else one
            for one in found
        ]
        return ContributorChoice(known, cost, helpers)

    def _other_stages(self, stage: int, current: Position | None) -> tuple[float, float]:
        """Seconds of computing and of averaging that the other stages need with their present contributors."""
        computing_s = averaging_s = 0.0
        for other in self._roster.stages:
            if other != stage and (workers := self.at_work(other, current)):
                choice = self._choice(other, workers, self._known)
                computing_s = max(computing_s, choice.computing_s(workers))
                averaging_s = max(averaging_s, choice.averaging_s(workers))
        return computing_s, averaging_s

    def _may_be_tried(self, now: float, post: str) -> bool:
        """True if what is known of a resting member is so old that it may have changed."""
        found = self._resting.get(post)
        if found is None:
            return False
        if not self._roster.lines.is_measured(post) and found.rest.needed_bytes_per_s:
            return False  # it rests because of its line, whose rate it declares itself
        costs_s = max(0.0, found.rest.with_s - found.rest.without_s)
        return now - found.since >= max(_TRY_LEAST_S, _TRY_SHARE * costs_s) * 2.0 ** min(found.tries, _TRIES_MOST)

    # --- changes ----------------------------------------------------------------------------------------------

    def _lay_off(self, now: float, post: str, choice: ContributorChoice, contributing: frozenset[str]) -> Note:
        others = contributing - {post}
        with_s, without_s = choice.step_s(others | {post}), choice.step_s(others)
        needed = choice.needed_bytes_per_s(others, post) or 0.0
        self._begin(now, post, Rest(_told(with_s), _told(without_s), min(needed, LINE_BYTES_PER_S)))
        told = f"with its gradients a step would take {with_s:.1f} s, and takes {without_s:.1f} s without them"
        return Note(f"peer {short(post)} rests: {told}")

    def _begin(self, now: float, post: str, rest: Rest) -> None:
        stage = self._roster.entries[post].stage
        self._resting[post] = _Resting(rest, stage, now, self._tries.pop(post, 0))
        self.peers.add(peer_of(post))
        self.begins([post])
        self._looks.pop(post, None)

    def _return(self, posts: Iterable[str]) -> list[Note]:
        notes = list[Note]()
        for post in posts:
            stage, self._tries[post] = self._resting[post].stage, self._resting[post].tries + 1
            self._no_help.pop(post, None)
            self._forget([post])
            self._tell_lines(stage)
            notes.append(Note(f"peer {short(post)} will contribute again once it has caught up"))
        return notes

    def _forget(self, posts: Iterable[str]) -> None:
        for post in posts:
            self._resting.pop(post, None)
            self.peers.discard(peer_of(post))
            self._looks.pop(post, None)

    def _of_stage(self, stage: int) -> list[str]:
        return [post for post, found in self._resting.items() if found.stage == stage]

    def _helping(self, stage: int) -> list[str]:
        return [post for post in self._of_stage(stage) if post not in self._no_help]

    def _tell_lines(self, stage: int) -> None:
        self._roster.lines.lay_off(stage, frozenset(self._helping(stage)))


def _told(seconds: float) -> float:
    return min(seconds, FORESEEABLE_S)
