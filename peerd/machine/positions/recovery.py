"""Choice of the position a swarm goes on from: the newest that every stage can reach, and that is proven.

A member can reach what it holds, has prepared or has saved. Any peer can claim any position, ahead of the swarm's or
behind it, in a lineage of its own making. So only proven positions count (`ProvenPositions`). Where a step was
prepared, and perhaps not made, the state that few of a stage report counts only if doubting it costs more than a step.
Hostile input: any position, in hellos of any peer. A claim that does not count makes its member one that is not ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Set
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
    has_half: Callable[[int, Set[str]], bool]  # are these half of the known members of a stage?
    announced: int  # the newest step believed of a peer out of reach, or of kept checkpoints
    kept: int = 0  # the newest proven step of which a keeper within reach keeps all states
    in_doubt: bool = False  # the conductor has no evidence of its own: claims that it cannot judge are waited for
    forsaken: bool = False  # what is missing was waited for long enough: the start will do


@dataclass(frozen=True, slots=True)
class Choice:
    """A position to go on from. `by_few`: a stage reaches it by the word of less than half of its known members."""

    position: Position
    by_few: bool = False


def best_position(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> Choice | None:
    """Returns the newest position that every stage can reach, or None if there is no such position.

    A step that was perhaps not made counts by the word of half of each stage's known members, dead ones included: the
    only survivor may be a liar, or was sent a wrong sum. Where that would cost more than this step, few suffice.
    Every peer can make the parameters of step 0 again. But going back to them from a step that some peer may have saved
    (`first_save` or later) would throw away work that returns with that peer; so it is done only when that is forsaken.
    Likewise for going back behind what a keeper has.
    """
    claims: list[dict[Position, set[str]]] = [{} for _ in range(knowledge.stages)]
    holders = Counter[Position]()
    for post, member in members.items():
        for position in member.reach:
            claims[member.stage].setdefault(position, set()).add(post)
        holders[member.position] += 1
    claimed = set[Position]().union(*claims)
    proven = {position for position in claimed if knowledge.proves(position)}
    found: list[Choice] = []
    for position in proven - {START}:
        by = [_reached_by(knowledge, members, stage, position, of.get(position)) for stage, of in enumerate(claims)]
        if all(by):
            sure = knowledge.is_made(position) or all(map(knowledge.has_half, range(knowledge.stages), by))
            found.append(Choice(position, by_few=not sure))
    newest = max((p.step for p in (claimed if knowledge.in_doubt else proven)), default=0)
    if all(claims) and (knowledge.forsaken or max(newest, knowledge.announced) < knowledge.first_save):
        found.append(Choice(START))

    def rank(choice: Choice) -> tuple[int, int, bytes]:
        position = choice.position
        return position.step, holders[position], position.lineage

    best = max(found, key=rank, default=None)
    sure_ones = [c for c in found if not c.by_few and best is not None and c.position.step >= best.position.step - 1]
    best = max(sure_ones, key=rank, default=best)
    if best is not None and best.position.step < knowledge.kept and not knowledge.forsaken:
        return None  # members fetch what is kept, and go on from there
    return best


def _reached_by(
    knowledge: RecoveryKnowledge,
    members: Mapping[str, RosterEntry],
    stage: int,
    position: Position,
    claimed_by: Set[str] | None,
) -> Set[str]:
    """The members of a stage that reach `position`, as far as their word counts; empty where it does not."""
    if not claimed_by:
        return set()
    by = {post for post in claimed_by if members[post].has(position)}
    if len(by) < len(claimed_by):
        by |= claimed_by & knowledge.may_step(stage, position)
    return by if by and knowledge.holds(stage, position, by) else set()


def unproven(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> dict[Position, list[str]]:
    """Claimed positions that are not proven, the newest first, each with the members that claim it."""
    found: dict[Position, list[str]] = {}
    for post, member in sorted(members.items()):
        for position in member.reach - {START}:
            found.setdefault(position, []).append(post)
    order = sorted(found, key=lambda p: (-p.step, p.lineage))
    return {position: found[position] for position in order if not knowledge.proves(position)}


def agreeing_on(
    stage: int, target: Position, members: Mapping[str, RosterEntry], voters: Container[str], *, made: bool
) -> set[str]:
    """The members of a stage whose last mean led, or leads, to `target`, and has the digest of most of the `voters`.

    Where no voter has one, all vote. `made`: the step to it was surely made; else all votes must be for one digest, as
    they are where a step is ordered: a member that was sent another sum must not step with it.
    """
    means = {p: m.digest for p, m in sorted(members.items()) if m.stage == stage and target in (m.position, m.prepared)}
    votes = Counter([digest for post, digest in means.items() if post in voters] or means.values())
    if not votes or (not made and len(votes) > 1):
        return set()
    most = votes.most_common(1)[0][0]
    return {post for post, digest in means.items() if digest == most}
