"""Bookkeeping of a stage's partial sums: gradients that groups have summed on the way to the sum of the whole batch.

A sum has contents (microbatches), members that contributed their own gradients to it (`bringers`), and members that
store it (`kept`). First, groups sum their members' own microbatches; then groups join existing sums. So if a group
fails, only its own sum is lost: the other sums remain, even if a member that contributed to one is gone. A sum whose
state is in doubt is discarded, and its members' gradients are summed again. Invariants (`fault`): among the sums that
are not part of a larger one, each microbatch, and each gradient of a member's session, occurs once; each of these
microbatches is in the batch (`BatchLedger.summed`). Bookkeeping only: `stage_close` orders what is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from peerd.messages.swarm import Mb, Position
from peerd.swarm.batch.batch_ledger import BatchLedger
from peerd.swarm.roster import Roster


class MemberState(NamedTuple):
    """Session and position of a member. If either changes, the member has lost its gradients and sums."""

    session: int
    position: Position


@dataclass(slots=True, eq=False)
class PartialSum:
    """One partial sum.

    `kept`: members that store it, in the order of their groups, each with the attempt from which it has the sum.
    `stands`: session and position of each of these members. `bringers`: members whose own gradients it contains, with
    their session and position at that time. `parts`: the sums that it was made of, which remain if all members that
    store it are lost. It has no parts if it was made of members' own gradients, or if its parts were dropped.
    """

    contents: frozenset[Mb]
    count: int  # of microbatches, as often as each was summed: if it exceeds the contents, the sum is wrong
    kept: dict[str, bytes]
    stands: dict[str, MemberState]
    bringers: tuple[tuple[str, MemberState], ...]
    digest: bytes
    parts: tuple[PartialSum, ...] = ()
    depth: int = 0  # number of rounds before the one that produced it
    leads: int = 0  # how often it contains the leader's part: shared buffers, which exactly one member contributes
    last: bool = False  # members that store it can step with it if it is of the whole batch
    digests: dict[str, bytes] = field(default_factory=dict)  # as reported by each member
    summers: frozenset[str] = frozenset()  # all that summed a share of it, excluding those of its parts

    def all(self) -> Iterator[PartialSum]:
        """Iterate over this sum and everything that it was made of."""
        yield self
        for part in self.parts:
            yield from part.all()

    def members(self) -> dict[str, None]:
        """Members that store this sum, or one that it was made of, in order (an ordered set)."""
        return {peer: None for one in self.all() for peer in one.kept}

    def behind(self) -> list[str]:
        """Members that store a part of this sum but not the sum itself."""
        return [peer for peer in self.members() if peer not in self.kept]

    def join(self, other: PartialSum) -> None:
        """Add the members of another group that has made the same sum, or has copied it."""
        news = {peer: attempt for peer, attempt in other.kept.items() if peer not in self.kept}
        self.kept |= news
        self.stands |= {peer: other.stands[peer] for peer in news}
        self.digests |= other.digests
        self.summers |= other.summers


class PartialSums:
    """Partial sums of one stage. `tops`: those that are not part of a larger one, in order.

    This class maintains the stage's entry of `BatchLedger.summed`: microbatches that enter a sum, or an attempt at one,
    stay marked there until `release`.
    """

    def __init__(self, stage: int, roster: Roster, lost: Callable[[], None]) -> None:
        """`lost` is called when microbatches are lost and must be computed again."""
        self._stage, self._roster, self._lost = stage, roster, lost
        self.tops: list[PartialSum] = []

    def __bool__(self) -> bool:
        return bool(self.tops)

    def stand(self, peer: str) -> MemberState | None:
        """Session and position of a member, or None if the peer is not a member of this stage."""
        entry = self._roster.entries.get(peer)
        return MemberState(entry.session, entry.position) if entry is not None and entry.stage == self._stage else None

    def members(self) -> dict[str, None]:
        """All members that store any of the sums or their parts."""
        return {peer: None for top in self.tops for peer in top.members()}

    def bringers(self) -> set[str]:
        """Members whose own gradients are in a sum and must not be summed again."""
        return {peer for top in self.tops for peer, stand in top.bringers if self.stand(peer) == stand}

    def is_of_use(self, parts: tuple[PartialSum, ...], copies: PartialSum | None) -> bool:
        """True if a sum of these `parts`, or a copy of the sum `copies`, can be added.

        For parts, this means that they are still here, or that another group has made the same sum.
        """
        if copies is not None:
            return copies in self.tops
        return all(part in self.tops for part in parts) or any(top.parts == parts for top in self.tops)

    def add(self, found: PartialSum, copies: PartialSum | None = None) -> PartialSum | None:
        """Add a sum in place of its parts, or merge it with the same sum of another group; returns the sum now stored.

        `copies`: the sum that it is a copy of. Returns None, and ignores the new sum, if it does not fit (`is_of_use`)
        or if a microbatch would occur twice.
        """
        if not self.is_of_use(found.parts, copies):
            return None
        same = (top for top in self.tops if top is copies or (found.parts and top.parts == found.parts))
        if (top := next(same, None)) is not None:
            top.join(found)
            return top
        others = [top for top in self.tops if top not in found.parts]
        if any(not found.contents.isdisjoint(top.contents) for top in others):
            return None
        at = min((self.tops.index(part) for part in found.parts), default=len(self.tops))
        self.tops.insert(at, found)
        self.tops = [top for top in self.tops if top not in found.parts]
        return found

    def unkeep(self, peer: str, but: bytes = b"") -> None:
        """Record that a member has discarded its sums, except the one from attempt `but`."""
        for one in (one for top in self.tops for one in top.all()):
            if one.kept.get(peer, but) != but:
                del one.kept[peer]

    def forget_lost(self, ledger: BatchLedger, now: float) -> None:
        """Remove members that are gone. Replace a sum that nobody stores by those of its parts that somebody stores.

        A sum with a microbatch that is no longer in the batch is lost, too.
        """
        for one in (one for top in self.tops for one in top.all()):
            for peer in [peer for peer in one.kept if self.stand(peer) != one.stands[peer]]:
                del one.kept[peer]
        self.tops = [found for top in self.tops for found in self._left_of(ledger, top, now, frozenset())]

    def forget_outgrown(self, ledger: BatchLedger, now: float) -> None:
        """Discard each sum with gradients of a member that holds further microbatches by now.

        Such a member's own microbatches are then summed again, all together.
        """
        while True:
            more = frozenset(peer for peer in ledger.held[self._stage] if ledger.unsummed(self._stage, peer))
            for peer in more:
                self.unkeep(peer)
            tops, self.tops = self.tops, []
            for top in tops:
                self.tops += self._left_of(ledger, top, now, more)
            if self.tops == tops:
                break
        self.forget_lost(ledger, now)

    def _left_of(self, ledger: BatchLedger, one: PartialSum, now: float, more: frozenset[str]) -> list[PartialSum]:
        """The sum, or what is left of it: parts that are still stored and contain no gradient of a member in `more`."""
        outgrown = any(peer in more and self.stand(peer) == stand for peer, stand in one.bringers)
        if one.kept and one.contents <= ledger.summed[self._stage] and not outgrown:
            return [one]
        if one.parts:
            return [found for part in one.parts for found in self._left_of(ledger, part, now, more)]
        self.release(ledger, one.contents, now)
        return []

    def forget_all(self, ledger: BatchLedger, now: float) -> None:
        """Discard all sums, to start again from the members' own microbatches."""
        tops, self.tops = self.tops, []
        for top in tops:
            self.release(ledger, top.contents, now)

    def release(self, ledger: BatchLedger, mbs: Iterable[Mb], now: float) -> None:
        """Record that these microbatches are in no sum any more; those that no member holds must be repeated."""
        missing = ledger.missing[self._stage]
        ledger.release(self._stage, mbs, now)
        if ledger.missing[self._stage] != missing:
            self._lost()

    def own(self, ledger: BatchLedger, parts: Iterable[PartialSum]) -> dict[str, tuple[Mb, ...]]:
        """Microbatches in these sums by holder, including holders that are gone."""
        found: dict[str, list[Mb]] = {}
        for mb in (mb for part in parts for mb in part.contents):
            found.setdefault(ledger.entries[mb].holders[self._stage], []).append(mb)
        return {holder: tuple(mbs) for holder, mbs in found.items()}

    def fault(self, ledger: BatchLedger) -> str:
        """Reason that no step may be made with the sums, or "" if they are consistent."""
        contents = set[Mb]().union(*(top.contents for top in self.tops))
        bringers = [bringer for top in self.tops for bringer in top.bringers]
        if len(contents) != sum(top.count for top in self.tops):
            return "a microbatch is in it twice"
        if not contents <= ledger.summed[self._stage]:
            return "it has a microbatch that is not in the batch"
        if len(bringers) != len({*bringers}):
            return "a member's gradient is in it twice"
        if sum(top.leads for top in self.tops) > 1:
            return "the leader's part is in it twice"
        return ""

    def check(self, ledger: BatchLedger) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert not self.fault(ledger), self.fault(ledger)
        assert all(one.kept for one in self.tops)
        assert all(one.kept.keys() <= one.stands.keys() for top in self.tops for one in top.all())
