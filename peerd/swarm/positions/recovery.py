"""Choice of the position that a swarm resumes from: the newest that every stage can reach, and that is proven.

A member can reach what it holds, has prepared or has saved. Any peer can claim any position, ahead of the swarm's or
behind it, in a lineage that it made up. So only proven positions count (`ProvenPositions`). If a step was prepared, and
perhaps not made, a state that few members of a stage report counts only if doubting it would cost more than one step.
Hostile input: any position, in hellos of any peer. A member whose claim does not count is simply not ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass

from peerd.messages.swarm import Position
from peerd.swarm.roster import START, RosterEntry


@dataclass(frozen=True, slots=True)
class RecoveryKnowledge:
    """The conductor's facts for the choice."""

    stages: int
    first_save: int  # the first step after which peers write checkpoints
    proves: Callable[[Position], bool]  # was this position surely the run's?
    holds: Callable[[int, Position, Set[str]], bool]  # do these members of a stage surely hold a proven state?
    may_step: Callable[[int, Position], Set[str]]  # the members of a stage whose prepared mean counts
    is_made: Callable[[Position], bool]  # was the step to this position surely made, and not only prepared?
    has_half: Callable[[int, Position, Set[str]], bool]  # are these half of the known members of a stage?
    knows: Callable[[str], bool]  # was this member, or nobody of its stage, part of the run before?
    announced: int  # the newest step believed of an unreachable peer, or of stored checkpoints
    kept: int = 0  # the newest proven step of which a reachable keeper stores all states
    in_doubt: bool = False  # the conductor has no evidence of its own: it waits for claims that it cannot judge
    doubted: Collection[str] = ()  # members whose claims to reach other positions do not count
    forsaken: bool = False  # the missing state was waited for long enough: the start is acceptable


@dataclass(frozen=True, slots=True)
class PositionChoice:
    """A position to resume from. `by_few`: less than half of the known members of some stage claim to reach it."""

    position: Position
    by_few: bool = False


def best_position(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> PositionChoice | None:
    """The newest position that every stage can reach, or None if there is none.

    A step that was perhaps not made counts if half of each stage's known members claim it, dead ones included: the only
    survivor may be a liar, or may have received a wrong sum. If doubting it would cost more than this step, few are
    enough, provided that one of them was part of the run and has stepped.

    Every peer can create the parameters of step 0 again. But going back to them from a step that some peer may have
    saved (`first_save` or later) would discard work that returns with that peer, so this is done only once the state is
    forsaken. The same holds for going back behind what a keeper stores.
    """
    claims: list[dict[Position, set[str]]] = [{} for _ in range(knowledge.stages)]
    holders = Counter[Position]()
    for post, member in members.items():
        for position in [member.position] if post in knowledge.doubted else member.reach:
            claims[member.stage].setdefault(position, set()).add(post)
        holders[member.position] += 1
    claimed = set[Position]().union(*claims)
    proven = {position for position in claimed if knowledge.proves(position)}
    newest = max((p.step for p in (claimed if knowledge.in_doubt else proven)), default=0)
    may_begin = all(claims) and (knowledge.forsaken or max(newest, knowledge.announced) < knowledge.first_save)
    best: PositionChoice | None = None  # by few
    for position in sorted(proven | {START}, key=lambda p: (p.step, holders[p], p.lineage), reverse=True):
        if best is not None and position.step < best.position.step - 1:
            break  # going further back would cost more than a step
        if position == START:
            choice = PositionChoice(START) if may_begin else None
        else:
            choice = _choice(knowledge, members, position, claims)
        if choice is not None and best is None and position.step < knowledge.kept and not knowledge.forsaken:
            return None  # members fetch what is stored, and resume from it
        if choice is not None and not choice.by_few:
            return choice
        best = best or choice
    return best


def _choice(
    knowledge: RecoveryKnowledge,
    members: Mapping[str, RosterEntry],
    position: Position,
    claims: Sequence[Mapping[Position, Set[str]]],
) -> PositionChoice | None:
    """The position as one to resume from, or None if some stage does not reach it by claims that count."""
    reached_by = list[Set[str]]()
    for stage, claimed in enumerate(claims):
        claimed_by = claimed.get(position, set[str]())
        by = {post for post in claimed_by if members[post].has(position)}
        if len(by) < len(claimed_by):
            by |= claimed_by & knowledge.may_step(stage, position)
        if not by or not knowledge.holds(stage, position, by):
            return None
        reached_by.append(by)
    if knowledge.is_made(position) or all(
        knowledge.has_half(stage, position, by) for stage, by in enumerate(reached_by)
    ):
        return PositionChoice(position)
    stepped = any(members[post].has(position) and knowledge.knows(post) for by in reached_by for post in by)
    return PositionChoice(position, by_few=True) if stepped else None


def unproven(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> dict[Position, list[str]]:
    """Claimed positions that are not proven, newest first, each with the members that claim it."""
    found: dict[Position, list[str]] = {}
    for post, member in sorted(members.items()):
        for position in member.reach - {START}:
            found.setdefault(position, []).append(post)
    order = sorted(found, key=lambda p: (-p.step, p.lineage))
    return {position: found[position] for position in order if not knowledge.proves(position)}


def means_by_target(members: Mapping[str, RosterEntry]) -> dict[tuple[int, Position], dict[str, bytes]]:
    """By stage and target: the digests of members' last means that led there, or would lead there."""
    found: dict[tuple[int, Position], dict[str, bytes]] = {}
    for post, member in sorted(members.items()):
        found.setdefault((member.stage, member.position), {})[post] = member.digest
        if member.prepared is not None:
            found.setdefault((member.stage, member.prepared), {})[post] = member.digest
    return found


def agreeing_on(means: Mapping[str, bytes], voters: Container[str], settles: Callable[[Set[str]], bool]) -> Set[str]:
    """The members of a stage whose mean for a target has the digest that most of the `voters` have.

    `means`: the digests of all of the stage's members. If no voter has one, all of them vote. If votes differ, a member
    that received another sum must not step with it: then the members with the majority's digest count only if they
    settle the matter (`settles`).
    """
    votes = Counter([digest for post, digest in means.items() if post in voters] or means.values())
    if not votes:
        return set()
    most = votes.most_common(1)[0][0]
    agreeing = {post for post, digest in means.items() if digest == most}
    return agreeing if len(votes) == 1 or settles(agreeing) else set()
