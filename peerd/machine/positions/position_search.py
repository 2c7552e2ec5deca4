"""Search for the position that a swarm goes on from: when enough members have reported, and the moves that follow.

A new conductor gathers members (`GatheringWait`) and then takes the newest position that every stage can reach
(`recovery`). Later the same is looked for when a stage has long lost the current state, and when members turn out to be
further than the conductor knew. A step known by hearsay only, from a record, counts as present for a while; one that a
reachable keeper has, for long. A state that is nowhere is forsaken in the end: then the start is a position, too; what
comes back later is taken up again if a quorum is behind it. Decides only; roster and course are the conductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

from peerd.core.limits import KEPT_SETS
from peerd.core.messages.swarm import Position
from peerd.machine.positions.failed_moves import FailedMoves
from peerd.machine.positions.gathering import GatheringWait
from peerd.machine.positions.phases import Phase, RunPhase
from peerd.machine.positions.proven_positions import EstablishedMembers, ProvenPositions
from peerd.machine.positions.recovery import (
    PositionChoice,
    RecoveryKnowledge,
    agreeing_on,
    best_position,
    means_by_target,
    unproven,
)
from peerd.machine.swarm.events import ConductorConfig, Origin, SendMove
from peerd.machine.swarm.posts import peer_of, short
from peerd.machine.swarm.roster import START, Roster

_FEW_MOST: Final = 8  # times that members are gathered anew for it: a liar may claim a position, and take it back


@dataclass(slots=True)
class _Judged:
    """Judgements on positions, which hold until members move or the evidence changes: each costs a look at many."""

    proven: dict[Position, bool] = field(default_factory=dict)
    made: dict[Position, bool] = field(default_factory=dict)
    means: dict[tuple[int, Position], dict[str, bytes]] | None = None
    newest: dict[str, int] = field(default_factory=dict)  # step of each member
    only_doubted: bool | None = None  # is there a position to go on from only by doubted words?
    wanted: list[Position] | None = None
    unproven: dict[Position, list[str]] | None = None


class PositionSearch:
    """See the module's header. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, origin: Origin, roster: Roster, course: RunPhase, now: float) -> None:
        self._config, self._own = config, origin.own
        self._place_of = origin.place_of or str  # without it each peer is a place of its own
        self._roster, self._course = roster, course
        self._gathering = GatheringWait(config, now)
        self._believes_hearsay = True
        self._kept_known = not origin.cold  # after a restart, once it was looked which keepers are within reach
        self._broken_since: float | None = None  # since then a stage has no member with the current state
        self.established = EstablishedMembers(origin.own, origin.established)
        self.failed_moves = FailedMoves()
        self._cold = origin.cold
        self.proven = ProvenPositions(origin.own, self.established, origin.seen, origin.trusted, origin.signers)
        self.announced_step = 0  # newest step reported of a peer out of reach: counts for a while
        self.kept_step = 0  # newest step that a reachable peer keeps
        self.nobody_has = False  # True: of the states that no member has, nobody who had one can be reached
        self.lost = False  # True: every stage has members, and there is no common position to go on from
        self._lost_since = math.inf
        self._was_over = False  # the gathering wait, when it was last looked at
        self._few_left = _FEW_MOST
        self._had_few = False
        self._few_since = math.inf  # since then a step that few bear out is the only one to go on from
        self._follows_from: tuple[object, ...] = ()  # what the best position was found from
        self._best: PositionChoice | None = None
        self._judged_from: tuple[object, ...] = ()
        self._judged = _Judged()
        self._forsaken = False
        self._lacking: list[int] = []  # the stages without the current position, while it was looked for
        self.barred: set[Position] = set()  # positions at which the run diverged

    # --- what is heard ----------------------------------------------------------------------------------------

    def expect(self, peers: Iterable[str]) -> None:
        """Members that are reported alive: wait for them before deciding."""
        self._gathering.expect(peers)

    def unexpect(self, peer: str) -> None:
        """The peer cannot be reached: do not wait for it."""
        self._gathering.unexpect(peer)

    def heard(self, now: float, peer: str) -> None:
        """The peer has said hello while members are gathered."""
        self._gathering.heard(now, peer)

    def begin(self, now: float) -> None:
        """Members are gathered once more."""
        self._broken_since, self._was_over = None, False
        self._few_since, self._had_few = math.inf, False
        self._gathering.begin(now)

    def arrived(self, position: Position) -> None:
        """All members have this position: no stage lacks it."""
        self.proven.see(position)
        self._cold = False
        self._broken_since, self._forsaken, self._lacking = None, False, []

    def look(self, now: float) -> None:
        """Time passed: hearsay expires."""
        self._believes_hearsay = self._gathering.believes_hearsay(now)
        self.failed_moves.look(now)

    # --- what follows -----------------------------------------------------------------------------------------

    def best(self) -> Position | None:
        """The newest position that every stage can reach, as far as it is backed; None: there is none."""
        choice = self._choice()
        return choice.position if choice is not None else None

    def _choice(self) -> PositionChoice | None:
        announced = max(self.announced_step if self._believes_hearsay else 0, self.kept_step)
        state = self.known, self._course.commits, announced, self._forsaken, self._newest_kept, frozenset(self.barred)
        follows_from = self._roster.stands, self.proven.version, self.failed_moves.version, *state
        if follows_from != self._follows_from:  # it is asked for with each report while members are gathered
            self._follows_from = follows_from
            self._best = best_position(self._knowledge(announced), self._roster.entries)
        return self._best

    def _knowledge(self, announced: int = 0) -> RecoveryKnowledge:
        known, members = self.known, self._roster.entries
        return RecoveryKnowledge(
            self._config.stages,
            self._config.first_save,
            self.proves,
            lambda stage, position, by: (
                (position == known and not self._cold) or self.proven.holds(stage, position, by, members)
            ),
            self._agreeing,
            self._is_made,
            self._has_half,
            self._is_known,
            announced,
            self._newest_kept,
            in_doubt=self.proven.knows_nothing(members),
            doubted=self.failed_moves.doubted,
            forsaken=self._forsaken,
        )

    @property
    def _newest_kept(self) -> int:
        """The newest step that counts as kept: keepers are looked at only while something is lacking."""
        return self.kept_step if self.lacks else 0

    def proves(self, position: Position) -> bool:
        """True for a position that was surely the run's; see `ProvenPositions`."""
        found = self._judgements().proven
        if position not in found:
            proven = position == self.known or self.proven.proves(position, self._roster)
            found[position] = position not in self.barred and proven
        return found[position]

    def _judgements(self) -> _Judged:
        versions = self._roster.stands, self.proven.version, self.failed_moves.version
        judged_from = *versions, self.known, frozenset(self.barred)
        if judged_from != self._judged_from:
            self._judged_from, self._judged = judged_from, _Judged()
        return self._judged

    def keepers(self, kept: Mapping[str, Collection[Position]], network_of: Callable[[str], str]) -> None:
        """Take the positions that keepers within reach keep; only those count that are proven."""
        self.proven.keepers(kept, network_of)
        self._kept_known = True
        steps = [p.step for positions in kept.values() for p in positions if self.proves(p)]
        self.kept_step = max(steps, default=0)

    def wanted(self) -> list[Position]:
        """Proven positions that members claim, or keepers keep, the newest first: what members lack may be fetched."""
        judged = self._judgements()
        if judged.wanted is None:
            claimed = self._roster.witnessed() | self.proven.announced
            found = (p for p in sorted(claimed, reverse=True) if p != START and self.proves(p))
            judged.wanted = list(islice(found, KEPT_SETS))
        return judged.wanted

    def unproven(self) -> dict[Position, list[str]]:
        """Claimed positions that are not proven, the newest first, each with the members that claim it."""
        judged = self._judgements()
        if judged.unproven is None:  # each member that waits is told of one of them
            judged.unproven = unproven(self._knowledge(), self._roster.entries)
        return judged.unproven

    @property
    def known(self) -> Position | None:
        """The swarm's position as the conductor itself knows it; a new conductor's own peer's. None: unknown."""
        own = self._roster.entries.get(self._own)
        return self._course.target or self._course.current or (own.position if own is not None else None)

    def is_ahead(self, peer: str) -> bool:
        """True when the member reports a later position than the conductor knew, with enough others behind it."""
        known, position = self.known, self._roster.entries[peer].position
        return known is not None and position.step > known.step and self.proves(position) and self.best() == position

    def is_apart(self, position: Position) -> bool:
        """True for a position that this conductor never saw: perhaps of a part of the run that was cut off.

        Of positions older than all that it remembers it says nothing: whoever was away for long has one of these.
        """
        return position not in (START, self.known) and self.proven.missed(position)

    def is_over(self, now: float) -> bool:
        """True when the gathering wait is over."""
        over = self._gathering.over(now, self._roster.entries)
        over = over and (self._kept_known or now >= self._gathering.latest)
        self._was_over = over and not self._waits_for_half(now)
        return self._was_over

    def _waits_for_half(self, now: float) -> bool:
        """True while few bear out the only step to go on from: the others may only be cut off, and have another sum."""
        choice = self._choice()
        few = choice is not None and choice.by_few
        if few:
            self._few_since = min(self._few_since, now)
        elif self._few_since < math.inf and self._had_few and self._few_left:
            self._few_left -= 1  # a member came that may be the first of several
            self._gathering.begin(now)
            self._had_few = False
            return True
        self._had_few = few
        return few and now - self._few_since < self._config.hearsay_s

    def decide(self, now: float) -> Position | None:
        """The position to go on from, at the end of gathering; None: there is none, or members are gathered anew."""
        target = self.best()
        return None if self._gathering.begins_anew(now, target is not None) else target

    def moves(self, target: Position) -> list[SendMove]:
        """The orders that bring members to `target`: commit a prepared step, or restore a checkpoint."""
        stages, members = range(self._config.stages), self._roster.entries
        choice = self._choice()
        few = choice is not None and choice.by_few and choice.position == target
        may_step = set[str]().union(*(self._may_step(stage, target, by_few=few) for stage in stages))
        orders = list[SendMove]()
        for peer, member in sorted(members.items()):
            if peer in self.failed_moves.doubted and target != START:
                continue
            commit = target == member.prepared and peer in may_step
            if member.position != target and (commit or target in (START, *member.saved)):
                orders.append(SendMove(peer, target, commit=commit))
        return orders

    def _may_step(self, stage: int, target: Position, *, by_few: bool) -> Set[str]:
        """The members of a stage that may step to `target` with what they have prepared.

        `by_few`: also where they are less than half of it; see `best_position`.
        """
        agreeing = self._agreeing(stage, target)
        return agreeing if by_few or self._is_made(target) or self._has_half(stage, target, agreeing) else set()

    def _agreeing(self, stage: int, target: Position) -> Set[str]:
        """The members of a stage whose prepared mean for `target` counts.

        If the step was made, its conductor had compared all digests, and that of most is right. If not, it is right
        where more than half of the stage have it.
        """

        def settles(by: Set[str]) -> bool:
            has_most = self.established.knows_of(stage) and self._part(stage, target, by) > 0.5
            return has_most or self._is_made(target)

        return agreeing_on(self._means(stage, target), self.established, settles)

    def _means(self, stage: int, target: Position) -> Mapping[str, bytes]:
        """The digests of the last means of a stage's members that led, or lead, to `target`."""
        judged = self._judgements()
        if judged.means is None:
            judged.means = means_by_target(self._roster.entries)
        return judged.means.get((stage, target), {})

    def _with_means(self, stage: int, step: int) -> set[str]:
        """The members of a stage with a mean that led, or leads, to this step, of whatever lineage."""
        members = self._roster.entries.items()
        return {post for post, m in members if m.stage == stage and (m.prepared or m.position).step == step}

    def _has_half(self, stage: int, target: Position, by: Set[str]) -> bool:
        """True when these are half of the known members of a stage; where none is known, of those with such a mean."""
        return self._part(stage, target, by) >= 0.5

    def _part(self, stage: int, target: Position, by: Set[str]) -> float:
        others = partial(self._with_means, stage, target.step)
        return self.established.part(stage, by, self._roster.entries, others)

    def _is_known(self, post: str) -> bool:
        """True for a member that was part of the run; also where nobody who was is in its stage."""
        stage, members = self._roster.entries[post].stage, self._roster.entries
        return post in self.established or not self.established.has_any(stage, members)

    def _is_made(self, target: Position) -> bool:
        """True when the step to `target` was surely made, or ordered here."""
        found = self._judgements().made
        if target not in found:
            found[target] = self.proven.is_made(target, self._roster.entries)
        return found[target] or target == self._course.ordered

    def falls_back(self, now: float) -> bool:
        """True when a stage has long been without the current position, and there is an older one to go on from."""
        if not (lagging := self._roster.lagging_stages(self._course.current)):
            self._broken_since = None
            return False
        self._lacking = lagging
        if self._broken_since is None:
            self._broken_since = now
        else:
            return self._is_broken(now) and self.best() is not None
        return False

    def look_lost(self, now: float) -> bool:
        """Recompute `lost`, that no common position is left; True when it has changed."""
        waits = self._is_broken(now) or (self._course.phase is Phase.GATHERING and self.is_over(now))
        before = self.lost
        self.lost = waits and not self._roster.empty_stages() and self.best() is None
        if self.lost:
            self._lost_since = min(self._lost_since, now)
            self._forsaken |= now - self._lost_since >= self._patience_s
        elif self._course.phase is not Phase.GATHERING or self._roster.empty_stages():
            self._lost_since = math.inf  # else a claim that is taken back, and made again, would start the wait over
        return self.lost != before

    @property
    def lacks(self) -> bool:
        """True while it is unknown what all stages can reach, or a stage is without the current position."""
        return self._course.current is None or self._broken_since is not None

    @property
    def _will_forsake(self) -> bool:
        return self.lost and self._patience_s < math.inf

    @property
    def _patience_s(self) -> float:
        """Seconds that a state which is nowhere is waited for."""
        config = self._config
        if self.kept_step or self._only_doubted():
            return config.forsake_most_s
        if self._course.current is not None:
            return config.forsake_s
        if all(map(self.established.knows_of, self.without_any_state())):  # they may be on their way
            return config.forsake_s if self.nobody_has else config.forsake_unseen_s
        there = [entry for post, entry in self._roster.entries.items() if self._newest_of(post)]
        stepped = [entry for entry in there if entry.digest]  # since they began: the run was under way just now
        if 2 * len(stepped) <= len(there):
            return config.forsake_most_s if self._comes_back() else min(config.hearsay_s, config.forsake_most_s)
        return config.forsake_s if self.nobody_has else config.forsake_unseen_s

    def _only_doubted(self) -> bool:
        """True when there would be a position to go on from if no member's word were doubted: it may be a slow disk."""
        if not self.failed_moves.doubted:
            return False
        judged = self._judgements()
        if judged.only_doubted is None:
            found = best_position(replace(self._knowledge(), doubted=()), self._roster.entries)
            judged.only_doubted = found is not None
        return judged.only_doubted

    def _comes_back(self) -> bool:
        """True where a run that was there before comes back, as far as one can tell.

        Where nobody can judge claims, more than a third of the peers here, by place, have to agree on one: the peers of
        a run that comes back do. Else a few strangers at each new run's beginning would hold it up for that long.
        """
        entries, place_of = self._roster.entries, self._place_of
        if not self.proven.knows_nothing(entries):
            return True
        here = {place_of(peer_of(post)) for post in entries}
        return any(3 * len({place_of(peer_of(p)) for p in by}) > len(here) for by in self.unproven().values())

    def loss(self, target: Position) -> str:
        """The text on what it costs to go to `target`; "" where nothing is lost."""
        current = self._course.current
        newest = max(map(self._newest_of, self._roster.entries), default=0)
        before = current.step if current is not None else newest
        if target.step >= before:
            return ""
        back = f"the swarm goes back from step {before} to step {target.step}"
        lacking = self._lacking if current is not None else self.without_any_state()
        if current in self.barred:
            return f"the run diverged at step {before}: {back}"
        if not lacking:
            return f"not all stages have the state of step {before}: {back}"
        names = f"stage {lacking[0]}" if len(lacking) == 1 else f"stages {', '.join(map(str, lacking))}"
        was = "was" if len(lacking) == 1 else "were"
        return f"{names} {was} lost with {'its' if len(lacking) == 1 else 'their'} last peer: {back}"

    def without_any_state(self) -> list[int]:
        """The stages of which no member has a state beyond the start that counts."""
        held = {entry.stage for post, entry in self._roster.entries.items() if self._newest_of(post)}
        return [stage for stage in range(self._config.stages) if stage not in held]

    def _newest_of(self, post: str) -> int:
        """The newest step that the member can reach, of those that are proven, or that nobody here can judge."""
        newest = self._judgements().newest
        if post not in newest:
            in_doubt = self.proven.knows_nothing(self._roster.entries)
            reach = self._roster.entries[post].reach
            newest[post] = max((p.step for p in reach if in_doubt or self.proves(p)), default=0)
        return newest[post]

    def _is_broken(self, now: float) -> bool:
        return self._broken_since is not None and now - self._broken_since >= self._config.broken_s

    def due(self, now: float) -> float:
        """The next deadline; infinite where there is none."""
        due = math.inf
        if self._course.phase is Phase.GATHERING and self._gathering.due > now:
            due = self._gathering.due
        if self._course.phase is Phase.GATHERING and (few := self._few_since + self._config.hearsay_s) > now:
            due = min(due, few)
        if self._broken_since is not None and (decided := self._broken_since + self._config.broken_s) > now:
            due = min(due, decided)
        if self.lost:
            due = min(due, max(now, self._lost_since + self._patience_s))
        return due

    def problem(self) -> str:
        """The reason that the gathered members do not go on yet."""
        if not self._was_over and self._had_few and (best := self.best()) is not None:
            patience_s = self._config.hearsay_s
            few = f"less than half of a stage's members bear out step {best.step}"
            return f"{few}: the others are waited for, {patience_s:.0f} s at most, and then it goes on from there"
        if not self._was_over or self.best() is not None:
            return "the conductor gathers the members"
        doubted = self.unproven()
        told = ""
        if doubted:
            position, posts = next(iter(doubted.items()))
            told = f"; peer {short(posts[0])} says that it has step {position.step}, which nobody known here bears out"
            told += f" (to take its word: --trust {peer_of(posts[0])})"
        begins_anew = f"; without it the run begins anew after {self._patience_s:.0f} s" if self._will_forsake else ""
        missing = "a peer or a checkpoint with newer state is missing"
        return f"no position that every stage can reach: {missing}{told}{begins_anew}"
