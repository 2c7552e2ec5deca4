"""Proof of positions: which positions were surely positions of the run, so that a swarm may resume from them.

A peer can claim any position. A position is proven if
* the conductor's own peer took part in the commit that led there, was notified of it when it joined, or holds its
  state;
* more than a third of the established members, dead ones included, report that they reached it;
* more than a third of them signed that they stepped there (a commit proof), which needs no living witness;
* a peer that the user trusts has reached it or stores it: a bootstrap peer of the run file, or one named by `--trust`;
* two keepers in different networks store its state, and the conductor knows neither members nor a trusted keeper.

The start is always proven. Up to a third of the established members, and any number of strangers, prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Set
from enum import Enum, auto
from typing import Final

from peerd.core.bounded_dict import BoundedDict
from peerd.core.limits import ESTABLISHED_MEMBERS, ESTABLISHED_STEPS, REMEMBERED_POSITIONS
from peerd.messages.swarm import Position
from peerd.swarm.posts import peer_of
from peerd.swarm.roster import START, Roster, RosterEntry

_BEFORE: Final = -1  # step of a commit under an earlier conductor
KEEPERS: Final = 2  # keepers in different networks whose common position counts


class Backing(Enum):
    """Which of two parts of a run is confirmed by enough of the members that a conductor knows."""

    OURS = auto()
    THEIRS = auto()
    BOTH = auto()
    NEITHER = auto()


class EstablishedMembers:
    """The members, by stage, that were part of the run before; some are remembered after they are gone."""

    def __init__(self, own: str, known: Mapping[str, int]) -> None:
        """`own`: the conductor's own post; `known`: the stage of each member that its predecessor named as ready."""
        self._own = peer_of(own)
        self.additions = 0
        self._stage: dict[str, int] = {}
        self._of: dict[int, dict[str, int]] = {}  # by stage, the step of each one's last commit
        self._peers: frozenset[str] | None = None
        self._resting = set[str]()  # members that made no step recently, since the conductor let them rest
        for peer, stage in known.items():
            self.add(peer, stage)

    def add(self, peer: str, stage: int, step: int = _BEFORE) -> None:
        """Record that the peer took part in the commit of `step` in this stage."""
        self.additions += 1
        self._peers = None
        self._resting.discard(peer)
        if peer in self._stage:
            del self._of[self._stage[peer]][peer]
        self._stage[peer] = stage
        known = self._of.setdefault(stage, {})
        known[peer] = step  # the latest comes last
        if len(known) > ESTABLISHED_MEMBERS:
            self._forget(next(iter(known)))

    def rest(self, posts: Iterable[str]) -> None:
        """Record which posts rest. They have no vote on steps that they do not make while others of their stage do."""
        self._resting.update(post for post in posts if post in self._stage)
        self._peers = None

    def _known(self, stage: int, members: Container[str]) -> Set[str]:
        """The known members of a stage that have a vote; resting ones only if no other is present."""
        known = self._of.get(stage, {}).keys()
        at_work = known - self._resting
        return at_work if any(post in members for post in at_work) else known

    def step_made(self, step: int) -> None:
        """Forget those that took no part in the last ESTABLISHED_STEPS steps, so that they do not vote for ever."""
        for known in self._of.values():
            for peer, at in list(known.items()):
                if at == _BEFORE:
                    known[peer] = step
                elif at < step - ESTABLISHED_STEPS:
                    self._forget(peer)

    def _forget(self, peer: str) -> None:
        self.additions += 1
        self._peers = None
        self._resting.discard(peer)
        del self._of[self._stage.pop(peer)][peer]

    def __contains__(self, peer: object) -> bool:
        return peer in self._stage

    def knows_of(self, stage: int) -> bool:
        """True if members of this stage are known."""
        return bool(self._of.get(stage))

    @property
    def peers(self) -> frozenset[str]:
        """The peers of all these members, except resting ones, unless all rest."""
        if self._peers is None:
            self._peers = frozenset(map(peer_of, self._stage.keys() - self._resting or self._stage))
        return self._peers

    def vouch(self, stage: int, claims: Set[str], members: Collection[str]) -> bool:
        """True if more than a third of a stage's established members that are present claim to hold a state.

        Members that are gone, or that serve another stage now, are not counted. `claims`: those that claim it;
        `members`: all that are present. If all its established members are gone, newcomers do not vouch for what they
        had; if none are known, they do.
        """
        known = self._known(stage, members)
        present = {post for post in known if post in members}
        return 3 * len(claims & present) > len(present) if present else not known - self._moved_away(members)

    def part(self, stage: int, posts: Set[str], members: Collection[str], others: Callable[[], Set[str]]) -> float:
        """Fraction of a stage's known members that are in `posts`. Dead ones count; those in other stages now do not.

        If none is known, the fraction of `others`.
        """
        known = self._known(stage, members) - self._moved_away(members) or others()
        return len(known & posts) / max(1, len(known))

    def has_any(self, stage: int, members: Collection[str]) -> bool:
        """True if a known member of the stage is present."""
        return any(post in members for post in self._of.get(stage, ()))

    def _moved_away(self, members: Collection[str]) -> set[str]:
        """Posts that are no longer members, although their peers still are, at other posts."""
        there = set(map(peer_of, members))
        return {post for post in self._stage if post not in members and peer_of(post) in there}

    def compare(self, ours: Set[str], theirs: Set[str]) -> Backing:
        """Which of two parts of the run has enough known members: more than a third of them."""
        enough = [3 * len(part & self.peers) > len(self.peers) for part in (ours, theirs)]
        if len(self.peers - {self._own}) == 0 or not any(enough):
            return Backing.NEITHER
        return Backing.BOTH if all(enough) else Backing.OURS if enough[0] else Backing.THEIRS

    def back(self, witnesses: Set[str]) -> bool:
        """True if the `witnesses` (peers) are more than a third of the established ones.

        The conductor's own peer is established, too: if it does not confirm a position, a single other witness is not
        enough.
        """
        witnesses = witnesses & self.peers
        alone = len(witnesses) == 1 and self._own in self.peers - witnesses
        return 3 * len(witnesses) > len(self.peers) and not alone


class ProvenPositions:
    """The conductor's evidence of the run's positions. `version` changes when other positions may be proven."""

    def __init__(
        self,
        own: str,
        established: EstablishedMembers,
        seen: Iterable[Position] = (),
        trusted: Collection[str] = (),
        signers: Callable[[Position], Set[str]] | None = None,
    ) -> None:
        """`signers` returns the peers that validly signed a commit to a position, as far as proofs are available."""
        self.established = established
        self._own, self._trusted = own, frozenset(trusted)
        self._signers = signers
        self._seen = BoundedDict[Position, None](REMEMBERED_POSITIONS)
        self._kept: dict[Position, None] = {}  # stored by keepers that count
        self.announced: frozenset[Position] = frozenset()  # stored by any keepers
        self._changes = 0
        for position in seen:
            self._seen[position] = None

    @property
    def version(self) -> tuple[int, int]:
        return self._changes, self.established.additions

    def see(self, position: Position) -> None:
        """Record that the swarm is at this position under this conductor."""
        if position not in self._seen:
            self._changes += 1
        self._seen[position] = None

    def saw(self, position: Position) -> bool:
        """True if the conductor's own peer saw the swarm at this position."""
        return position in self._seen

    def missed(self, position: Position) -> bool:
        """True for a position that the conductor's own peer did not see although it remembers older ones."""
        oldest = next(iter(self._seen), None)
        return oldest is not None and position.step >= oldest.step and position not in self._seen

    def is_kept(self, position: Position) -> bool:
        """True if a trusted keeper or, where none is, keepers in enough networks store the state of this position."""
        return position in self._kept

    def keepers(self, kept: Mapping[str, Collection[Position]], network_of: Callable[[str], str]) -> None:
        """Record the positions that reachable keepers store. `network_of`: a keeper's network, or "" if unknown."""
        networks: dict[Position, set[str]] = {}
        proven: dict[Position, None] = {}
        for peer, positions in kept.items():
            network = {network_of(peer)} - {""}
            for position in positions:
                networks.setdefault(position, set()).update(network)
                if peer in self._trusted:
                    proven[position] = None
        if not self.established.peers and not self._trusted & kept.keys():  # there is nobody else to ask
            proven |= {position: None for position, found in networks.items() if len(found) >= KEEPERS}
        announced = frozenset(networks) | proven.keys()
        if (proven, announced) != (self._kept, self.announced):
            self._kept, self.announced = proven, announced
            self._changes += 1

    def look_again(self) -> None:
        """Record that commit proofs have arrived."""
        self._changes += 1

    def knows_nothing(self, members: Mapping[str, RosterEntry]) -> bool:
        """True for a conductor without any evidence of its own, which cannot judge claims."""
        own = members.get(self._own)
        return not (self._seen or self.established.peers or (own is not None and own.is_anywhere))

    def trusts(self, post: str) -> bool:
        """True for the conductor's own post, and for those of peers that the user trusts."""
        return post == self._own or peer_of(post) in self._trusted

    def holds(self, stage: int, position: Position, claims: Set[str], members: Mapping[str, RosterEntry]) -> bool:
        """True if the `claims` of a stage's members to hold the state of a proven position count.

        If keepers store the state of that position, any member may have fetched it, so every claim counts.
        """
        return (
            any(map(self.trusts, claims))
            or position in self.announced
            or self.established.vouch(stage, claims, members.keys())
        )

    def proves(self, position: Position, roster: Roster) -> bool:
        """True if the swarm may resume from `position`."""
        if position == START or position in self._seen or position in self._kept:
            return True
        own = roster.entries.get(self._own)
        if own is not None and position in own.reach:
            return True
        return self._is_backed(position, roster.witnesses(position))

    def is_made(self, position: Position, members: Mapping[str, RosterEntry]) -> bool:
        """True if the step to `position` was surely made, and not only prepared."""
        own = members.get(self._own)
        if position in self._seen or position in self._kept or (own is not None and own.has(position)):
            return True
        return self._is_backed(position, {post for post, m in members.items() if m.has(position) or position in m.seen})

    def _is_backed(self, position: Position, posts: Set[str]) -> bool:
        """True if `posts` include a trusted peer or enough established members, or enough of these signed the step."""
        witnesses = set(map(peer_of, posts))
        if witnesses & self._trusted or self.established.back(witnesses):
            return True
        return self._signers is not None and self.established.back(self._signers(position))
