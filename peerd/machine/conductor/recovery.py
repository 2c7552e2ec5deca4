"""Which position a swarm can go on from: what each member holds, has prepared or has saved, and whose word that is.

Anyone can say that it stands at step 10^9. A position ahead of what the conductor knows counts only when enough members
say so that were there before: more than a third of those of the stage that took part in a commit, or that the conductor
before named, present or not (`Established`). Where nobody is known so (a cold start) it needs more than a third of the
stage's members that are anywhere but at the start, so that the lone survivor of a run counts, and one liar among three
does not. Positions behind what the conductor knows, and the start, need no such backing: they take nobody ahead.
Hostile input: any position, in hellos of anyone. A claim that does not count makes its member one that is not ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass

from peerd.core.limits import ESTABLISHED_MEMBERS
from peerd.core.messages.swarm import Position
from peerd.machine.swarm.roster import START, RosterEntry


class Established:
    """The members, by stage, that were part of the run before now; kept, up to a number, after they are gone."""

    def __init__(self, own: str, known: Mapping[str, int]) -> None:
        """`own`: the conductor's own peer; `known`: the stage of each that the conductor before named as ready."""
        self._own = own
        self._stage: dict[str, int] = {}
        self._of: dict[int, dict[str, None]] = {}
        for peer, stage in known.items():
            self.add(peer, stage)

    def add(self, peer: str, stage: int) -> None:
        """The peer took part in a commit of this stage."""
        if peer in self._stage:
            del self._of[self._stage[peer]][peer]
        self._stage[peer] = stage
        known = self._of.setdefault(stage, {})
        known[peer] = None  # the latest comes last
        if len(known) > ESTABLISHED_MEMBERS:
            first = next(iter(known))
            del known[first], self._stage[first]

    def __contains__(self, peer: object) -> bool:
        return peer in self._stage

    def back(self, stage: int, claims: Set[str], anywhere: int) -> bool:
        """Are these members of the stage enough for what they say together? `anywhere`: how many say anything."""
        known = self._of.get(stage, {}).keys()
        if not known:
            return 3 * len(claims) > anywhere
        claims = claims & known
        # The conductor's own peer was there as well: what one other says alone is not more than what itself knows.
        alone = len(claims) == 1 and self._own in known - claims
        return 3 * len(claims) > len(known) and not alone


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the conductor goes by. `known`: the position that it knows the swarm to be at; None: not yet."""

    stages: int
    first_save: int  # the first step after which peers write checkpoints
    established: Established
    known: Position | None
    announced: int  # the newest step that anyone out of reach is believed to be at, or to keep the checkpoints of

    def ahead(self, position: Position) -> bool:
        """Does it need backing?"""
        return position not in (START, self.known) and (self.known is None or position.step >= self.known.step)


def best_position(knowledge: Knowledge, members: Mapping[str, RosterEntry]) -> Position | None:
    """The newest position that every stage can reach; None when there is none.

    Everyone can make the parameters of step 0 again. But back to them from a step that somebody may have saved
    (`first_save` or later) would throw work away that returns with a peer.
    """
    claims: list[dict[Position, set[str]]] = [{} for _ in range(knowledge.stages)]
    anywhere, holders = [0] * knowledge.stages, Counter[Position]()
    for peer, member in members.items():
        for position in member.reach:
            claims[member.stage].setdefault(position, set()).add(peer)
        anywhere[member.stage] += member.is_anywhere
        holders[member.position] += 1
    reach = [
        {p for p, by in of.items() if not knowledge.ahead(p) or knowledge.established.back(stage, by, anywhere[stage])}
        for stage, of in enumerate(claims)
    ]
    common = set.intersection(*reach) - {START}
    newest = max((p.step for found in reach for p in found), default=0)
    if all(claims) and max(newest, knowledge.announced) < knowledge.first_save:
        common.add(START)
    return max(common, key=lambda p: (p.step, holders[p], p.lineage), default=None)


def agreeing_on(stage: int, target: Position, members: Mapping[str, RosterEntry]) -> set[str]:
    """Those of a stage whose last mean led, or leads, to `target`, and is the same as that of most of them.

    A conductor that died may not have compared all of them: who was sent another sum must not step with it.
    """
    means = {p: m.digest for p, m in sorted(members.items()) if m.stage == stage and target in (m.position, m.prepared)}
    most = Counter(means.values()).most_common(1)
    return {peer for peer, digest in means.items() if digest == most[0][0]}


def furthest(members: Mapping[str, RosterEntry]) -> tuple[str, int] | None:
    """The peer that says that it could be further than all others, and at which step; None: nobody is anywhere."""
    found = [(max(p.step for p in m.reach), peer) for peer, m in sorted(members.items()) if m.is_anywhere]
    return max(found)[::-1] if found else None
