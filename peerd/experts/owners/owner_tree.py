"""Tree of the owners of one expert, sans-IO: which owner continued from which, by claims and checkpoints.

Which of two owners counts depends only on the directory's contents and on which peers can be reached, so that all peers
come to the same result. Hostile input: claims and checkpoints of any generation, and cyclic chains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from peerd.core.ids import PeerId
from peerd.experts.rules.orphan_watch import SeenClaim
from peerd.messages.experts import CheckpointRef

_DEPTH: Final = 16  # owners of a chain that are considered
_NODES: Final = 64  # owners of one expert that are compared, besides those that continue from a known one

Seat = Callable[[PeerId], str | None]  # the network of a peer, None if there is no connection to it


class ExpertReign(NamedTuple):
    """An owner of an expert in one generation."""

    generation: int
    owner: PeerId


@dataclass(slots=True)
class KeptCopy:
    """A checkpoint, and the peers that claim to hold it."""

    pointer: CheckpointRef
    holders: list[PeerId] = field(default_factory=list)

    @property
    def reign(self) -> ExpertReign:
        """The owner that made the checkpoint."""
        return ExpertReign(self.pointer.generation, self.pointer.peer)


@dataclass(slots=True)
class OwnerTree:
    """Claims, checkpoints and the links between their owners. Used for one look-up, in which networks do not change.

    `seat`: the network of a peer.
    """

    seat: Seat
    claims: dict[ExpertReign, SeenClaim] = field(default_factory=dict)
    holders: dict[ExpertReign, set[PeerId]] = field(default_factory=dict)  # of checkpoints
    handed: set[tuple[ExpertReign, ExpertReign]] = field(default_factory=set)  # (owner, its heir)
    _former: dict[ExpertReign, ExpertReign] = field(default_factory=dict)  # owner -> the owner from which it continued
    _seats: dict[PeerId, str | None] = field(default_factory=dict)
    _voices: dict[ExpertReign, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, claims: Iterable[SeenClaim], copies: Iterable[KeptCopy], seat: Seat) -> OwnerTree:
        """The tree of one expert. The pointers of `copies` must have valid signatures."""
        tree, copies, newest = cls(seat), [*copies], dict[ExpertReign, int]()
        for claim in claims:
            reign = ExpertReign(claim.generation, claim.peer)
            tree.claims[reign] = claim
            newest[reign] = claim.version
        for copy in copies:
            tree.holders.setdefault(copy.reign, set()).update(copy.holders)
            newest[copy.reign] = max(newest.get(copy.reign, 0), copy.pointer.version)
        for copy in copies:
            former = copy.pointer.former
            if former is not None and copy.pointer.continues():
                reign = ExpertReign(former.generation, former.peer)
                # An owner that made more updates has kept the expert: its earlier offer makes no heir.
                offered = former.heir == copy.pointer.owner and copy.pointer.generation == former.generation + 1
                given = offered and former.version >= newest.get(reign, 0)
                tree.link(reign, copy.reign, given=given)
        return tree

    def link(self, former: ExpertReign, later: ExpertReign, *, given: bool) -> None:
        """Record that one owner continued from another. `given`: the other handed the expert over."""
        self._former.setdefault(later, former)
        if given:
            self.handed.add((former, later))

    def nodes(self, line: Collection[ExpertReign] = ()) -> list[ExpertReign]:
        """All owners: those of `line`, then those that continue from it, then at most `_NODES` others.

        Within each of the three, the owners for which most networks vouch come first.
        """
        every = sorted({*self.claims, *self.holders}, key=lambda r: (*(-n for n in self.voices(r)), r))
        known = [r for r in every if r in line]
        linked = [r for r in every if r not in line and self.below(r, line)]
        first = {*known, *linked}
        others = [r for r in every if r not in first]
        return [*known, *linked, *others[:_NODES]]

    def before(self, reign: ExpertReign) -> Iterator[ExpertReign]:
        """The owners from which this one continued, latest first."""
        for _ in range(_DEPTH):
            if reign not in self._former:
                return
            reign = self._former[reign]
            yield reign

    def below(self, reign: ExpertReign, others: Iterable[ExpertReign]) -> bool:
        """True if an owner continued from one of these, directly or not."""
        wanted = set(others)
        return any(each in wanted for each in self.before(reign))

    def voices(self, reign: ExpertReign) -> tuple[int, int]:
        """Numbers of networks, besides the owner's own, and of peers that vouch for an owner."""
        if reign not in self._voices:
            self._voices[reign] = self.voices_without(reign, frozenset())
        return self._voices[reign]

    def voices_without(self, reign: ExpertReign, peers: Set[PeerId]) -> tuple[int, int]:
        """The `voices` of an owner if these peers do not count."""
        seats = [self._seat(peer) for peer in self.holders.get(reign, set()) - peers if peer != reign.owner]
        known = [at for at in seats if at is not None]
        return len(set(known) - {self._seat(reign.owner)}), len(known)

    def beats(self, one: ExpertReign, other: ExpertReign, *, living: bool = False) -> bool:
        """True if `one` owns the expert rather than `other`.

        `living`: both claim it now. Then an owner that continues from the other needs at least one peer that vouches
        for it, since anybody can make such a chain; and of two without a link, neither wins unless more networks vouch
        for it.
        """
        if (one, other) in self.handed or (other, one) in self.handed:
            return (other, one) in self.handed
        if self.below(one, [other]):
            mine, besides = self.voices(one), self.voices_without(other, self.holders.get(one, set()))
            return mine >= besides and (not living or mine > (0, 0))
        if self.below(other, [one]):
            return not self.beats(other, one, living=living)
        mine, others = self.voices(one), self.voices(other)
        if living:
            return mine[0] > others[0]
        return mine > others if mine != others else self.comes_first(one, other)

    def comes_first(self, one: ExpertReign, other: ExpertReign) -> bool:
        """Order of two owners if networks do not decide; the same on every peer that knows these links."""
        if self.below(one, [other]) or self.below(other, [one]):
            return self.below(other, [one])
        return (-one.generation, one.owner) > (-other.generation, other.owner)

    def best(self) -> ExpertReign | None:
        """The owner that counts if nothing was known before, or None if there is none."""
        found: ExpertReign | None = None
        for reign in self.nodes():
            if found is None or self.beats(reign, found):
                found = reign
        return found

    def _seat(self, peer: PeerId) -> str | None:
        if peer not in self._seats:
            self._seats[peer] = self.seat(peer)
        return self._seats[peer]
