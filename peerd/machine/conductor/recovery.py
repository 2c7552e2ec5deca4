"""Choice of the position a swarm goes on from: the newest that every stage can reach, with a quorum behind it.

A member can reach what it holds, has prepared or has saved. Any peer can claim step 10^9: a position ahead of what the
conductor knows counts only when enough established members claim it: more than a third of those of the stage that took
part in a commit, or that the conductor before named, present or not (`Established`); of those that serve another stage
by now nobody waits for what they left behind. Where none are known (a cold start) it needs more than a third of the
stage's members that are anywhere but at the start, so that the lone survivor of a run counts, and one liar among three
does not. Positions behind what the conductor knows, and the start, need no quorum: they take no member ahead.
Hostile input: any position, in hellos of any peer. A claim that does not count makes its member one that is not ready.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from peerd.core.limits import ESTABLISHED_MEMBERS
from peerd.core.messages.swarm import Position
from peerd.machine.swarm.posts import peer_of
from peerd.machine.swarm.roster import START, RosterEntry


class Established:
    """The members, by stage, that were part of the run before now; kept, up to a number, after they are gone."""

    def __init__(self, own: str, known: Mapping[str, int]) -> None:
        """`own`: the conductor's own peer; `known`: the stage of each that the conductor before named as ready."""
        self._own = own
        self.additions = 0
        self._stage: dict[str, int] = {}
        self._of: dict[int, dict[str, None]] = {}
        for peer, stage in known.items():
            self.add(peer, stage)

    def add(self, peer: str, stage: int) -> None:
        """The peer took part in a commit of this stage."""
        self.additions += 1
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

    def knows_of(self, stage: int) -> bool:
        """True when members of this stage are known."""
        return bool(self._of.get(stage))

    def back(self, stage: int, claims: Set[str], anywhere: int, elsewhere: Set[str]) -> bool:
        """True when the members that claim a position are a quorum of the stage.

        `anywhere`: the number of its members that claim any position but the start. `elsewhere`: see `moved_away`.
        """
        known = self._of.get(stage, {}).keys() - elsewhere
        if not known:
            return 3 * len(claims) > anywhere
        claims = claims & known
        # The conductor's own peer was established too: a claim of one other alone is no more than its own knowledge.
        alone = len(claims) == 1 and self._own in known - claims
        return 3 * len(claims) > len(known) and not alone

    def moved_away(self, members: Iterable[str]) -> set[str]:
        """The posts that are not among the members any more while their peers are, with other posts."""
        there = set(members)
        peers = {peer_of(post) for post in there}
        return {post for post in self._stage if post not in there and peer_of(post) in peers}


@dataclass(frozen=True, slots=True)
class Knowledge:
    """The conductor's facts for the choice. `known`: the position that it knows the swarm to be at; None: not yet."""

    stages: int
    first_save: int  # the first step after which peers write checkpoints
    established: Established
    known: Position | None
    announced: int  # the newest step believed of a peer out of reach, or of kept checkpoints
    forsaken: bool = False  # what is missing was waited for long enough: the start will do
    barred: Set[Position] = frozenset()  # the run diverged there: nobody goes back to them

    def ahead(self, position: Position) -> bool:
        """True when the position needs a quorum: it is not behind what the conductor knows."""
        return position not in (START, self.known) and (self.known is None or position.step >= self.known.step)


def best_position(knowledge: Knowledge, members: Mapping[str, RosterEntry]) -> Position | None:
    """The newest position that every stage can reach; None when there is none.

    Every peer can make the parameters of step 0 again. But going back to them from a step that some peer may have saved
    (`first_save` or later) would throw away work that returns with that peer; so it is done only when that is forsaken.
    """
    claims: list[dict[Position, set[str]]] = [{} for _ in range(knowledge.stages)]
    anywhere, holders = [0] * knowledge.stages, Counter[Position]()
    for peer, member in members.items():
        for position in member.reach:
            claims[member.stage].setdefault(position, set()).add(peer)
        anywhere[member.stage] += member.is_anywhere
        holders[member.position] += 1
    established = knowledge.established
    elsewhere = established.moved_away(members)

    def reaches(stage: int, position: Position, by: Set[str]) -> bool:
        if position in knowledge.barred:
            return False
        return not knowledge.ahead(position) or established.back(stage, by, anywhere[stage], elsewhere)

    reach = [{p for p, by in of.items() if reaches(stage, p, by)} for stage, of in enumerate(claims)]
    common = set.intersection(*reach) - {START}
    newest = max((p.step for found in reach for p in found), default=0)
    if all(claims) and (knowledge.forsaken or max(newest, knowledge.announced) < knowledge.first_save):
        common.add(START)
    return max(common, key=lambda p: (p.step, holders[p], p.lineage), default=None)


def agreeing_on(stage: int, target: Position, members: Mapping[str, RosterEntry]) -> set[str]:
    """The members of a stage whose last mean led, or leads, to `target`, and has the majority's digest.

    A conductor that died may not have compared all digests: a member that was sent another sum must not step with it.
    """
    means = {p: m.digest for p, m in sorted(members.items()) if m.stage == stage and target in (m.position, m.prepared)}
    most = Counter(means.values()).most_common(1)
    return {peer for peer, digest in means.items() if digest == most[0][0]}


def furthest(members: Mapping[str, RosterEntry]) -> tuple[str, int] | None:
    """The peer that claims the latest step of all, and that step; None: no member is past the start."""
    found = [(max(p.step for p in m.reach), peer) for peer, m in sorted(members.items()) if m.is_anywhere]
    return max(found)[::-1] if found else None
