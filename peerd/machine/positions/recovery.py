"""Choice of the position a swarm goes on from: the newest that every stage can reach, and that is proven.

A member can reach what it holds, has prepared or has saved. Any peer can claim any position, ahead of the swarm's or
behind it, in a lineage of its own making. So only proven positions count (`ProvenPositions`).
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
    announced: int  # the newest step believed of a peer out of reach, or of kept checkpoints
    kept: int = 0  # the newest proven step of which a keeper within reach keeps all states
    in_doubt: bool = False  # the conductor has no evidence of its own: claims that it cannot judge are waited for
    forsaken: bool = False  # what is missing was waited for long enough: the start will do


def best_position(knowledge: RecoveryKnowledge, members: Mapping[str, RosterEntry]) -> Position | None:
    """Returns the newest position that every stage can reach, or None if there is no such position.

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

    def reaches(stage: int, position: Position) -> bool:
        claimed_by = claims[stage].get(position, set())
        by = {post for post in claimed_by if members[post].has(position)}
        if len(by) < len(claimed_by):
            by |= claimed_by & knowledge.may_step(stage, position)
        return bool(by) and knowledge.holds(stage, position, by)

    common = {p for p in proven - {START} if all(reaches(stage, p) for stage in range(knowledge.stages))}
    newest = max((p.step for p in (claimed if knowledge.in_doubt else proven)), default=0)
    if all(claims) and (knowledge.forsaken or max(newest, knowledge.announced) < knowledge.first_save):
        common.add(START)
    best = max(common, key=lambda p: (p.step, holders[p], p.lineage), default=None)
    if best is not None and best.step < knowledge.kept and not knowledge.forsaken:
        return None  # members fetch what is kept, and go on from there
    return best


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
