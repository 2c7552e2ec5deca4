"""Resting: the members that contribute no gradients for now, since their lines or devices would hold everybody up.

At each step's end the conductor compares how long the step took with the model of `machine/averaging/contributors`, and
asks it who should contribute to the next ones. A member that rests keeps its place: it stays known, it may conduct, it
sums for the others if it can be reached, and it gets no microbatches and makes no steps. When its gradients are worth
their time again it catches up like a newcomer. A newcomer whose line is known rests before it has fetched anything.

Nobody rests by one look alone, and nobody comes back by one, so figures that vary make no member come and go. What was
measured is doubted after a while: a member whose line was measured, or whose device was slow, is tried again as soon as
the steps made without it took many times as long as a try costs, ever more rarely. What a peer states of its line
counts until it states something else. Where the last contributors of a stage go, those that rest contribute again.
Decides only. Figures are strangers' word: a liar makes itself rest, or slows the step as it could before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import FORESEEABLE_S, LINE_BYTES_PER_S
from peerd.core.messages.contributions import Rest
from peerd.core.messages.swarm import MAX_MEMBERS, Position
from peerd.machine.averaging.contributors import (
    LEAST,
    ContributorChoice,
    ContributorRates,
    StepCost,
    with_unknown,
)
from peerd.machine.swarm.events import ConductorConfig, Note
from peerd.machine.swarm.posts import peer_of, short
from peerd.machine.swarm.roster import Roster

_LOOKS_TO_REST = 2  # steps after which a contributor should rest, one after the other, before it does
_LOOKS_TO_RETURN = 3
_LEAST_S = 1e-6  # of computing
_TRY_SHARE = 30.0  # a try may cost one part in so many of the time since the last one
_TRY_LEAST_S = 600.0
_TRIES_MOST = 6  # doublings of the pause


@dataclass(slots=True)
class _Resting:
    """One member that rests: why, in which stage, since when, and how often it was tried again before."""

    rest: Rest
    stage: int
    since: float
    tries: int = 0


class _Measured(NamedTuple):
    """The duration of the last step over that of the model: of computing, and of averaging (at most 1)."""

    computing: float = 1.0
    averaging: float = 1.0


class Resting:
    """See the module's header. `pace` is microbatches a second of a post's device; 0: unknown."""

    def __init__(self, config: ConductorConfig, roster: Roster, pace: Callable[[str], float]) -> None:
        self._config, self._roster, self._pace = config, roster, pace
        self._resting: dict[str, _Resting] = {}
        self.peers = set[str]()  # that rest
        self._tries = BoundedDict[str, int](MAX_MEMBERS)  # of members that were tried, and contribute or are to
        self._no_help = BoundedDict[str, None](
            MAX_MEMBERS
        )  # members that were lost while they rested: nobody waits for them
        self._looks = BoundedDict[str, int](MAX_MEMBERS)  # how often in a row a member's place was to change
        self._measured: _Measured | None = None  # None: no step was made yet
        self._opened_at: float | None = None
        self._filled_at: float | None = None

    def __contains__(self, post: object) -> bool:
        return post in self._resting

    def of(self, post: str) -> Rest | None:
        """Returns the reason that a member rests, or None if it contributes."""
        found = self._resting.get(post)
        return found.rest if found is not None else None

    def at_work(self, stage: int, position: Position | None) -> list[str]:
        """Members of a stage that stand at `position` and contribute, sorted."""
        return [post for post in self._roster.at(stage, position) if post not in self._resting]

    # --- what happens -----------------------------------------------------------------------------------------

    def filled(self, now: float) -> None:
        """The batch of the step under way is whole."""
        self._filled_at = now

    def came(self, now: float, post: str, current: Position | None) -> list[Note]:
        """A member has come, or has said more of itself; where its line is too slow it rests at once."""
        entry = self._roster.entries.get(post)
        if self._measured is None or entry is None or post in self._resting or entry.position == current:
            return []
        return self._look_at(now, entry.stage, current, only=post)

    def lost(self, post: str, stage: int, current: Position | None) -> None:
        """A member is gone; where no contributor of its stage is left, those that rest contribute."""
        if post in self._resting:
            self._no_help[post] = None
        self._forget([post])
        if not self.at_work(stage, current):
            self._forget(self._of_stage(stage))
        self._tell_lines(stage)

    def restart(self) -> None:
        """The swarm goes on from elsewhere than a step, or is done: everybody contributes, and steps are timed anew."""
        self._forget(list(self._resting))
        self._opened_at = self._filled_at = None
        for stage in self._roster.stages:
            self._tell_lines(stage)

    def step_made(self, now: float, current: Position) -> list[Note]:
        """A step was made, and led to `current`: look at who should contribute to the next ones."""
        self._measure(now, current)
        self._opened_at, self._filled_at = now, None
        notes = list[Note]()
        if self._config.weighs and self._measured is not None:
            for stage in self._roster.stages:
                notes += self._look_at(now, stage, current)
        return notes

    # --- measuring --------------------------------------------------------------------------------------------

    def _measure(self, now: float, current: Position) -> None:
        """Compare the step that was made with the model: computing first, then averaging."""
        if self._opened_at is None or self._filled_at is None:
            return
        computing_s, averaging_s = self._filled_at - self._opened_at, now - self._filled_at
        computed = averaged = 0.0
        for stage in self._roster.stages:
            if workers := self.at_work(stage, current):
                choice = self._choice(stage, self._roster.of_stage(stage), _Measured())
                computed = max(computed, choice.computing_s(workers))
                averaged = max(averaged, choice.averaging_s(workers))
        seen = not self._config.delayed and computed > 0  # else it is not seen how long the batch took
        self._measured = _Measured(
            max(computing_s, _LEAST_S) / computed if seen else 1.0,
            min(1.0, averaging_s / averaged) if averaged > 0 else self._known.averaging,
        )

    @property
    def _known(self) -> _Measured:
        return self._measured or _Measured()

    # --- choosing ---------------------------------------------------------------------------------------------

    def _look_at(self, now: float, stage: int, current: Position | None, only: str = "") -> list[Note]:
        """Choose who of a stage rests; `only`: among its contributors and this newcomer, of which alone it decides."""
        posts, workers = self._roster.of_stage(stage), self.at_work(stage, current)
        if len(posts) <= LEAST or not workers:
            return self._return(self._of_stage(stage))
        if only:
            posts = sorted({*workers, only})
        tried = {post for post in posts if self._may_be_tried(now, post)}
        choice = self._choice(stage, posts, self._known, self._other_stages(stage, current), tried)
        absent = frozenset(posts).difference(workers)
        rests = choice.choose(absent)
        back = [] if only else self._to_return(sorted(absent - rests), workers, tried)
        begin = [post for post in sorted(absent & rests) if post not in self._resting]
        begin += [] if only else self._to_leave(workers, rests)
        contributing = frozenset(posts) - rests
        notes = self._return(back) + [self._lay_off(now, post, choice, contributing) for post in begin]
        self._tell_lines(stage)
        return notes

    def _to_leave(self, workers: Sequence[str], rests: frozenset[str]) -> list[str]:
        """The contributors that were to rest at the last looks as well; nobody, while too few others are there."""
        for post in workers:
            if post not in rests:
                self._looks.pop(post, None)
        found = self._often([post for post in workers if post in rests], _LOOKS_TO_REST, self._tries)
        return found if len(workers) - len(found) >= min(LEAST, len(workers)) else []

    def _to_return(self, found: Sequence[str], workers: Sequence[str], tried: Container[str]) -> list[str]:
        """The resting members, of those that should contribute, that have been found often enough to be worth it."""
        resting = [post for post in found if post in self._resting]
        return resting if len(workers) < LEAST else self._often(resting, _LOOKS_TO_RETURN, tried)

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
        """The choice among these posts of a stage; what is known of those that are `tried` again does not count."""
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
        known = [
            with_unknown(one, line=lines.is_measured(one.peer), pace=True) if one.peer in tried else one
            for one in found
        ]
        return ContributorChoice(known, cost, helpers)

    def _other_stages(self, stage: int, current: Position | None) -> tuple[float, float]:
        """Seconds of computing and averaging that the other stages need, with their contributors of now."""
        computing_s = averaging_s = 0.0
        for other in self._roster.stages:
            if other != stage and (workers := self.at_work(other, current)):
                choice = self._choice(other, self._roster.of_stage(other), self._known)
                computing_s = max(computing_s, choice.computing_s(workers))
                averaging_s = max(averaging_s, choice.averaging_s(workers))
        return computing_s, averaging_s

    def _may_be_tried(self, now: float, post: str) -> bool:
        """True when what is known of a resting member is so old that it may have changed."""
        found = self._resting.get(post)
        if found is None:
            return False
        if not self._roster.lines.is_measured(post) and found.rest.needed_bytes_per_s:
            return False  # its line is the reason, and it says itself what that carries
        costs_s = max(0.0, found.rest.with_s - found.rest.without_s)
        return now - found.since >= max(_TRY_LEAST_S, _TRY_SHARE * costs_s) * 2.0 ** min(found.tries, _TRIES_MOST)

    # --- changes ----------------------------------------------------------------------------------------------

    def _lay_off(self, now: float, post: str, choice: ContributorChoice, contributing: frozenset[str]) -> Note:
        others = contributing - {post}
        with_s, without_s = choice.step_s(others | {post}), choice.step_s(others)
        rest = Rest(
            min(with_s, FORESEEABLE_S),
            min(without_s, FORESEEABLE_S),
            min(choice.needed_bytes_per_s(others, post) or 0.0, LINE_BYTES_PER_S),
        )
        stage = self._roster.entries[post].stage
        self._resting[post] = _Resting(rest, stage, now, self._tries.pop(post, 0))
        self.peers.add(peer_of(post))
        self._looks.pop(post, None)
        told = f"with its gradients a step would take {with_s:.1f} s, and takes {without_s:.1f} s without them"
        return Note(f"peer {short(post)} rests: {told}")

    def _return(self, posts: Iterable[str]) -> list[Note]:
        notes = list[Note]()
        for post in posts:
            stage, self._tries[post] = self._resting[post].stage, self._resting[post].tries + 1
            self._forget([post])
            self._tell_lines(stage)
            notes.append(Note(f"peer {short(post)} contributes again, once it has caught up"))
        return notes

    def _forget(self, posts: Iterable[str]) -> None:
        for post in posts:
            self._resting.pop(post, None)
            self.peers.discard(peer_of(post))
            self._looks.pop(post, None)

    def _of_stage(self, stage: int) -> list[str]:
        return [post for post, found in self._resting.items() if found.stage == stage]

    def _tell_lines(self, stage: int) -> None:
        able = frozenset(post for post in self._of_stage(stage) if post not in self._no_help)
        self._roster.lines.lay_off(stage, able)
