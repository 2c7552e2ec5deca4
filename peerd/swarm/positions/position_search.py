"""Search for the position that a swarm resumes from: when enough members have reported, and the moves that follow.

A new conductor gathers members (`GatheringWait`) and then chooses the newest position that every stage can reach
(`recovery`). Later it searches again if a stage has lacked the current state for long, or if members turn out to be
further than the conductor knew. A step known only by hearsay, from a record, counts as present for a while; one that a
reachable keeper stores, for a long time. A state that nobody has is forsaken in the end: then the start is acceptable.
If it returns later, the swarm uses it if a quorum confirms it. Decides only; roster and phase are the conductor's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Final

from peerd.core.limits import KEPT_SETS
from peerd.messages.swarm import Position
from peerd.swarm.events import ConductorConfig, Origin, SendMove
from peerd.swarm.positions.failed_moves import FailedMoves
from peerd.swarm.positions.gathering import GatheringWait
from peerd.swarm.positions.phases import Phase, RunPhase
from peerd.swarm.positions.proven_positions import EstablishedMembers, ProvenPositions
from peerd.swarm.positions.recovery import (
    PositionChoice,
    RecoveryKnowledge,
    agreeing_on,
    best_position,
    means_by_target,
    unproven,
)
from peerd.swarm.posts import peer_of, short
from peerd.swarm.roster import START, Roster

_FEW_MOST: Final = 8  # restarts of the gathering for a step that few confirm: a liar may claim and withdraw it


@dataclass(slots=True)
class _Judged:
    """Cached judgements on positions, valid until members move or evidence changes. Each needs a long scan."""

    proven: dict[Position, bool] = field(default_factory=dict)
    made: dict[Position, bool] = field(default_factory=dict)
    means: dict[tuple[int, Position], dict[str, bytes]] | None = None
    newest: dict[str, int] = field(default_factory=dict)  # newest step that each member can reach
    only_doubted: bool | None = None  # is there a position to resume from only if doubted claims count?
    wanted: list[Position] | None = None
    unproven: dict[Position, list[str]] | None = None


class PositionSearch:
    """Position search of one conductor. Times are arguments, in seconds."""

    def __init__(self, config: ConductorConfig, origin: Origin, roster: Roster, course: RunPhase, now: float) -> None:
        self._config, self._own = config, origin.own
        self._place_of = origin.place_of or str  # without it each peer is a place of its own
        self._roster, self._course = roster, course
        self._gathering = GatheringWait(config, now)
        self._believes_hearsay = True
        self._kept_known = not origin.cold  # after a restart: True once it is known which keepers can be reached
        self._broken_since: float | None = None  # time since which a stage has no member with the current state
        self.established = EstablishedMembers(origin.own, origin.established)
        self.failed_moves = FailedMoves()
        self._cold = origin.cold
        self.proven = ProvenPositions(origin.own, self.established, origin.seen, origin.trusted, origin.signers)
        self.announced_step = 0  # newest step reported of an unreachable peer; counts for a while
        self.kept_step = 0  # newest step that a reachable peer stores
        self.nobody_has = False  # True: no peer that had the missing states can be reached
        self.lost = False  # True: every stage has members, but there is no common position to resume from
        self._lost_since = math.inf
        self._was_over = False  # last result of `is_over`
        self._few_left = _FEW_MOST
        self._had_few = False
        self._few_since = math.inf  # time since which a step that few confirm is the only one to resume from
        self._follows_from: tuple[object, ...] = ()  # inputs of the cached best position
        self._best: PositionChoice | None = None
        self._judged_from: tuple[object, ...] = ()
        self._judged = _Judged()
        self._forsaken = False
        self._lacking: list[int] = []  # stages that lacked the current position at the last search
        self.barred: set[Position] = set()  # positions at which the run diverged

    # --- what is reported -------------------------------------------------------------------------------------

    def expect(self, peers: Iterable[str]) -> None:
        """Wait for these members, which are reported alive, before deciding."""
        self._gathering.expect(peers)

    def unexpect(self, peer: str) -> None:
        """Stop waiting for a peer that cannot be reached."""
        self._gathering.unexpect(peer)

    def heard(self, now: float, peer: str) -> None:
        """Record that the peer has reported while members are gathered."""
        self._gathering.heard(now, peer)

    def begin(self, now: float) -> None:
        """Start to gather members again."""
        self._broken_since, self._was_over = None, False
        self._few_since, self._had_few = math.inf, False
        self._gathering.begin(now)

    def arrived(self, position: Position) -> None:
        """Record that all members have this position, so that no stage lacks it."""
        self.proven.see(position)
        self._cold = False
        self._broken_since, self._forsaken, self._lacking = None, False, []

    def look(self, now: float) -> None:
        """Expire hearsay, and doubts about members that failed to move."""
        self._believes_hearsay = self._gathering.believes_hearsay(now)
        self.failed_moves.look(now)

    # --- what follows -----------------------------------------------------------------------------------------

    def best(self) -> Position | None:
        """The newest position that every stage can reach and that is confirmed, or None if there is none."""
        choice = self._choice()
        return choice.position if choice is not None else None

    def _choice(self) -> PositionChoice | None:
        announced = max(self.announced_step if self._believes_hearsay else 0, self.kept_step)
        state = self.known, self._course.commits, announced, self._forsaken, self._newest_kept, frozenset(self.barred)
        follows_from = self._roster.stands, self.proven.version, self.failed_moves.version, *state
        if follows_from != self._follows_from:  # cached, as each report while members are gathered needs it
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
        """The newest step that counts as stored. Keepers count only while something is lacking."""
        return self.kept_step if self.lacks else 0

    def proves(self, position: Position) -> bool:
        """True if the position was surely the run's, and is not barred; see `ProvenPositions`."""
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
        """Record the positions that reachable keepers store; only proven ones count."""
        self.proven.keepers(kept, network_of)
        self._kept_known = True
        steps = [p.step for positions in kept.values() for p in positions if self.proves(p)]
        self.kept_step = max(steps, default=0)

    def wanted(self) -> list[Position]:
        """Proven positions that members claim or keepers store, newest first, for members that lack their state."""
        judged = self._judgements()
        if judged.wanted is None:
            claimed = self._roster.witnessed() | self.proven.announced
            found = (p for p in sorted(claimed, reverse=True) if p != START and self.proves(p))
            judged.wanted = list(islice(found, KEPT_SETS))
        return judged.wanted

    def unproven(self) -> dict[Position, list[str]]:
        """Claimed positions that are not proven, newest first, each with the members that claim it."""
        judged = self._judgements()
        if judged.unproven is None:  # each waiting member is sent one of them
            judged.unproven = unproven(self._knowledge(), self._roster.entries)
        return judged.unproven

    @property
    def known(self) -> Position | None:
        """The swarm's position as the conductor itself knows it, or None if unknown.

        For a new conductor, this is the position of its own peer.
        """
        own = self._roster.entries.get(self._own)
        return self._course.target or self._course.current or (own.position if own is not None else None)

    def is_ahead(self, peer: str) -> bool:
        """True if the member reports a later position than the conductor knew, and enough others confirm it."""
        known, position = self.known, self._roster.entries[peer].position
        return known is not None and position.step > known.step and self.proves(position) and self.best() == position

    def is_apart(self, position: Position) -> bool:
        """True for a position that this conductor never saw; it may be that of a part of the run that was cut off.

        False for positions older than all that it remembers: any peer that was away for long has one of these.
        """
        return position not in (START, self.known) and self.proven.missed(position)

    def is_over(self, now: float) -> bool:
        """True if the gathering wait is over."""
        over = self._gathering.over(now, self._roster.entries)
        over = over and (self._kept_known or now >= self._gathering.latest)
        self._was_over = over and not self._waits_for_half(now)
        return self._was_over

    def _waits_for_half(self, now: float) -> bool:
        """True while few confirm the only step to resume from: the others may be cut off, and have another sum."""
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
        """The position to resume from at the end of gathering; None if there is none, or if gathering starts over."""
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
        """The members of a stage that may step to `target` with the mean that they have prepared.

        `by_few`: even if they are less than half of the stage; see `best_position`.
        """
        agreeing = self._agreeing(stage, target)
        return agreeing if by_few or self._is_made(target) or self._has_half(stage, target, agreeing) else set()

    def _agreeing(self, stage: int, target: Position) -> Set[str]:
        """The members of a stage whose prepared mean for `target` counts.

        If the step was made, its conductor had compared all digests, and the majority's is right. Otherwise a mean is
        right if more than half of the stage have it.
        """

        def settles(by: Set[str]) -> bool:
            has_most = self.established.knows_of(stage) and self._part(stage, target, by) > 0.5
            return has_most or self._is_made(target)

        return agreeing_on(self._means(stage, target), self.established, settles)

    def _means(self, stage: int, target: Position) -> Mapping[str, bytes]:
        """Digests of the last means of a stage's members that led to `target`, or would lead there."""
        judged = self._judgements()
        if judged.means is None:
            judged.means = means_by_target(self._roster.entries)
        return judged.means.get((stage, target), {})

    def _with_means(self, stage: int, step: int) -> set[str]:
        """The members of a stage with a mean that led to this step, or would lead there, in any lineage."""
        members = self._roster.entries.items()
        return {post for post, m in members if m.stage == stage and (m.prepared or m.position).step == step}

    def _has_half(self, stage: int, target: Position, by: Set[str]) -> bool:
        """True if these are half of the known members of a stage, or, if none is known, of those with such a mean."""
        return self._part(stage, target, by) >= 0.5

    def _part(self, stage: int, target: Position, by: Set[str]) -> float:
        others = partial(self._with_means, stage, target.step)
        return self.established.part(stage, by, self._roster.entries, others)

    def _is_known(self, post: str) -> bool:
        """True for a member that was part of the run, or if no such member is present in its stage."""
        stage, members = self._roster.entries[post].stage, self._roster.entries
        return post in self.established or not self.established.has_any(stage, members)

    def _is_made(self, target: Position) -> bool:
        """True if the step to `target` was surely made, or was ordered by this conductor."""
        found = self._judgements().made
        if target not in found:
            found[target] = self.proven.is_made(target, self._roster.entries)
        return found[target] or target == self._course.ordered

    def falls_back(self, now: float) -> bool:
        """True if a stage has lacked the current position for long, and there is an older one to resume from."""
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
        """Recompute `lost` (no common position is left). Returns True if it has changed."""
        waits = self._is_broken(now) or (self._course.phase is Phase.GATHERING and self.is_over(now))
        before = self.lost
        self.lost = waits and not self._roster.empty_stages() and self.best() is None
        if self.lost:
            self._lost_since = min(self._lost_since, now)
            self._forsaken |= now - self._lost_since >= self._patience_s
        elif self._course.phase is not Phase.GATHERING or self._roster.empty_stages():
            self._lost_since = math.inf  # while gathering, repeated and withdrawn claims do not restart the wait
        return self.lost != before

    @property
    def lacks(self) -> bool:
        """True while it is unknown what all stages can reach, or while a stage lacks the current position."""
        return self._course.current is None or self._broken_since is not None

    @property
    def _will_forsake(self) -> bool:
        return self.lost and self._patience_s < math.inf

    @property
    def _patience_s(self) -> float:
        """Seconds that the swarm waits for a state that nobody has."""
        config = self._config
        if self.kept_step:
            return config.forsake_most_s + config.fetch_s
        if self._only_doubted():
            return config.forsake_most_s
        if self._course.current is not None:
            return config.forsake_s
        if all(map(self.established.knows_of, self.without_any_state())):  # they may be on their way
            return config.forsake_s if self.nobody_has else config.forsake_unseen_s
        there = [entry for post, entry in self._roster.entries.items() if self._newest_of(post)]
        stepped = [entry for entry in there if entry.digest]  # since they started: the run was under way just now
        if 2 * len(stepped) <= len(there):
            return config.forsake_most_s if self._comes_back() else min(config.hearsay_s, config.forsake_most_s)
        return config.forsake_s if self.nobody_has else config.forsake_unseen_s

    def _only_doubted(self) -> bool:
        """True if only doubted claims give a position to resume from. They may be true: a disk may be slow."""
        if not self.failed_moves.doubted:
            return False
        judged = self._judgements()
        if judged.only_doubted is None:
            found = best_position(replace(self._knowledge(), doubted=()), self._roster.entries)
            judged.only_doubted = found is not None
        return judged.only_doubted

    def _comes_back(self) -> bool:
        """True if an earlier run is returning, as far as one can tell.

        If nobody can judge claims, more than a third of the peers here, counted by place, have to claim the same
        position, as the peers of a returning run do. Otherwise a few strangers at the beginning of each new run would
        hold it up.
        """
        entries, place_of = self._roster.entries, self._place_of
        if not self.proven.knows_nothing(entries):
            return True
        here = {place_of(peer_of(post)) for post in entries}
        return any(3 * len({place_of(peer_of(p)) for p in by}) > len(here) for by in self.unproven().values())

    def loss(self, target: Position) -> str:
        """Text on what is lost by going to `target`, or "" if nothing is lost."""
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
        """Stages of which no member has a state beyond the start that counts."""
        held = {entry.stage for post, entry in self._roster.entries.items() if self._newest_of(post)}
        return [stage for stage in range(self._config.stages) if stage not in held]

    def _newest_of(self, post: str) -> int:
        """Newest step that the member can reach, of positions that are proven, or that nobody here can judge."""
        newest = self._judgements().newest
        if post not in newest:
            in_doubt = self.proven.knows_nothing(self._roster.entries)
            reach = self._roster.entries[post].reach
            newest[post] = max((p.step for p in reach if in_doubt or self.proves(p)), default=0)
        return newest[post]

    def _is_broken(self, now: float) -> bool:
        return self._broken_since is not None and now - self._broken_since >= self._config.broken_s

    def due(self, now: float) -> float:
        """Next deadline, or infinity if there is none."""
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
        """Reason that the gathered members do not resume yet."""
        if not self._was_over and self._had_few and (best := self.best()) is not None:
            patience_s = self._config.hearsay_s
            few = f"less than half of a stage's members confirm step {best.step}"
            return f"{few}: waiting for the others, at most {patience_s:.0f} s, then resuming from it"
        if not self._was_over or self.best() is not None:
            return "the conductor gathers the members"
        doubted = self.unproven()
        told = ""
        if doubted:
            position, posts = next(iter(doubted.items()))
            told = f"; peer {short(posts[0])} claims to have step {position.step}, which no known member confirms"
            told += f" (to accept this: --trust {peer_of(posts[0])})"
        begins_anew = f"; without it the run begins anew after {self._patience_s:.0f} s" if self._will_forsake else ""
        missing = "a peer or a checkpoint with newer state is missing"
        return f"no position that every stage can reach: {missing}{told}{begins_anew}"
