"""Choice of the position a swarm goes on from: the newest that every stage can reach, and that is proven.

A member can reach what it holds, has prepared or has saved. Any peer can claim any position, ahead of the swarm's or
behind it, in a lineage of its own making. So only proven positions count (`ProvenPositions`). Where a step was
prepared, and perhaps not made, the state that few of a stage report counts only if doubting it costs more than a step.
Hostile input: any position, in hellos of any peer. A claim that does not count makes its member one that is not ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass

from peerd.core.messages.swarm import Position
from peerd.machine.swarm.roster import START, RosterEntry


@dataclass(frozen=True, slots=True)
class RecoveryKnowledge:
    """The conductor's facts for the choice. `proves`: was a position surely the run's?"""

    stages: int
    first_save: int  # the first step after which peers write checkpoints
    proves: Callable[[Position], bool]
    holds: Callable[[int, Position, Set[str]], bool]  # do these members of a stage surely hold a proven state?
    may_step: Callable[[int, Position], Set[str]]  # the members of a stage whose prepared mean counts
    is_made: Callable[[Position], bool]  # was the step there surely made, and not only prepared?
    has_half: Callable[[int, Position, Set[str]], bool]  # are these half of the known members of a stage?
    knows: Callable[[str], bool]  # was this member, or nobody of its stage, part of the run before?
    announced: int  # the newest step believed of a peer out of reach, or of kept checkpoints
    kept: int = 0  # the newest proven step of which a keeper within reach keeps all states
    in_doubt: bool = False  # the conductor has no evidence of its own: claims that it cannot judge are waited for
    doubted: Collection[str] = ()  # members whose word on where they could go does not count
    forsaken: bool = False  # what is missing was waited for long enough: the start will do


@dataclass(frozen=True, slots=True)
class PositionChoice:
    """A position to go on from. `by_few`: a stage reaches it by the word of less than half of its known members."""

    position: Position
    by_few: bool = False


def best_position(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> PositionChoice | None:
    """Returns the newest position that every stage can reach, or None if there is no such position.

    A step that was perhaps not made counts by the word of half of each stage's known members, dead ones included: the
    only survivor may be a liar, or was sent a wrong sum. Where that would cost more than this step, few suffice if one
    that was part of the run has stepped.
    Every peer can make the parameters of step 0 again. But going back to them from a step that some peer may have saved
    (`first_save` or later) would throw away work that returns with that peer; so it is done only when that is forsaken.
    Likewise for going back behind what a keeper has.
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
            break  # it would cost more than a step
        if position == START:
            choice = PositionChoice(START) if may_begin else None
        else:
            choice = _choice(knowledge, members, position, claims)
        if choice is not None and best is None and position.step < knowledge.kept and not knowledge.forsaken:
            return None  # members fetch what is kept, and go on from there
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
    """The position as one to go on from; None if not every stage reaches it by a word that counts."""
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
    """Claimed positions that are not proven, the newest first, each with the members that claim it."""
    found: dict[Position, list[str]] = {}
    for post, member in sorted(members.items()):
        for position in member.reach - {START}:
            found.setdefault(position, []).append(post)
    order = sorted(found, key=lambda p: (-p.step, p.lineage))
    return {position: found[position] for position in order if not knowledge.proves(position)}


def means_by_target(members: Mapping[str, RosterEntry]) -> dict[tuple[int, Position], dict[str, bytes]]:
    """By stage and target: the digests of the last means of its members that led, or lead, there."""
    found: dict[tuple[int, Position], dict[str, bytes]] = {}
    for post, member in sorted(members.items()):
        found.setdefault((member.stage, member.position), {})[post] = member.digest
        if member.prepared is not None:
            found.setdefault((member.stage, member.prepared), {})[post] = member.digest
    return found


def agreeing_on(means: Mapping[str, bytes], voters: Container[str], settles: Callable[[Set[str]], bool]) -> Set[str]:
    """Those of a stage's members whose mean for a target has the digest of most of the `voters`.

    `means`: the digests of all of them. Where no voter has one, all vote. Where votes differ, one that was sent another
    sum must not step with it: only members that settle the matter agree then.
    """
    votes = Counter([digest for post, digest in means.items() if post in voters] or means.values())
    if not votes:
        return set()
    most = votes.most_common(1)[0][0]
    agreeing = {post for post, digest in means.items() if digest == most}
    return agreeing if len(votes) == 1 or settles(agreeing) else set()
