"""Sums that groups of a stage have made on the way to the sum of the whole batch.

A sum has contents (microbatches), and members that keep it. Members' own microbatches are summed first; then groups
join the sums that there are. So when a group fails only its own sum is lost: the others are there, also when a member
that brought something is not. Invariants (`check`): no microbatch is in two of the sums that are not part of a larger
one, and every one of them is in the batch (`Ledger.summed`). Bookkeeping only: `stage_close` orders what is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from peerd.core.messages.swarm import Mb, Position
from peerd.machine.batch.ledger import Ledger
from peerd.machine.swarm.roster import Roster


class Stand(NamedTuple):
    """What a member must still be to have what it had: another session knows of nothing, nor does another position."""

    session: int
    position: Position


@dataclass(slots=True, eq=False)
class PartialSum:
    """One sum. `kept`: members that have it, in the order of their groups, and the attempt that gave it to each.

    `stands`: of all that brought something, and of those that keep it. `parts`: the sums that it was made of, which are
    there still where all who keep it are lost; none: microbatches, or they have been let go of.
    """

    contents: frozenset[Mb]
    kept: dict[str, bytes]
    stands: dict[str, Stand]
    digest: bytes
    parts: tuple[PartialSum, ...] = ()
    depth: int = 0  # number of rounds before the one that made it
    leads: bool = False  # it has what only one member of the stage may bring
    last: bool = False  # those who keep it can make a step with it, if it is of the whole batch
    digests: dict[str, bytes] = field(default_factory=dict)  # as each member reported it
    summers: frozenset[str] = frozenset()  # all that summed a share of it, but for its parts'

    def all(self) -> Iterator[PartialSum]:
        """This one and everything that it was made of."""
        yield self
        for part in self.parts:
            yield from part.all()

    def members(self) -> dict[str, None]:
        """All that keep this sum, or one that it was made of."""
        return {peer: None for one in self.all() for peer in one.kept}

    def behind(self) -> list[str]:
        """Those that keep a part of it, and not the whole."""
        return [peer for peer in self.members() if peer not in self.kept]

    def join(self, other: PartialSum) -> None:
        """Another group has made the same sum, or has copied it."""
        self.kept |= {peer: attempt for peer, attempt in other.kept.items() if peer not in self.kept}
        self.stands |= other.stands
        self.digests |= other.digests
        self.summers |= other.summers


class PartialSums:
    """The sums of one stage that are not part of a larger one (`tops`), in order, and their loss.

    `summed` in a batch's ledger is theirs: what enters a sum, or an attempt at one, stays held there until `release`.
    """

    def __init__(self, stage: int, roster: Roster, lost: Callable[[], None]) -> None:
        """`lost` is called when microbatches are, which must be done again."""
        self._stage, self._roster, self._lost = stage, roster, lost
        self.tops: list[PartialSum] = []

    def __bool__(self) -> bool:
        return bool(self.tops)

    def stand(self, peer: str) -> Stand | None:
        """What a member is now; None: it is none."""
        entry = self._roster.entries.get(peer)
        return Stand(entry.session, entry.position) if entry is not None and entry.stage == self._stage else None

    def members(self) -> dict[str, None]:
        """All that keep any of the sums."""
        return {peer: None for top in self.tops for peer in top.members()}

    def add(self, found: PartialSum, copies: PartialSum | None = None) -> PartialSum:
        """Take in a sum in place of its parts, or join it to the same one that others have; returns this.

        `copies`: the sum that it is a copy of.
        """
        same = (top for top in self.tops if top is copies or (found.parts and top.parts == found.parts))
        if (top := next(same, None)) is not None:
            top.join(found)
            return top
        at = min((self.tops.index(part) for part in found.parts if part in self.tops), default=len(self.tops))
        self.tops.insert(at, found)
        self.tops = [top for top in self.tops if top not in found.parts]
        return found

    def forget_lost(self, ledger: Ledger, now: float) -> None:
        """Members that are gone keep nothing; a sum that nobody keeps is lost, down to the parts that somebody keeps.

        So is one that has a microbatch which is not in the batch any more.
        """
        kept = list[PartialSum]()
        for top in self.tops:
            for one in top.all():
                for peer in [peer for peer in one.kept if self.stand(peer) != one.stands[peer]]:
                    del one.kept[peer]
            kept += self._kept(ledger, top, now)
        self.tops = kept

    def _kept(self, ledger: Ledger, one: PartialSum, now: float) -> list[PartialSum]:
        if one.kept and one.contents <= ledger.summed[self._stage]:
            return [one]
        if one.parts:
            return [found for part in one.parts for found in self._kept(ledger, part, now)]
        self.release(ledger, one.contents, one.stands, now)
        return []

    def forget_outgrown(self, ledger: Ledger, now: float) -> None:
        """Give up sums of members that hold more by now: their own microbatches are summed anew, all together."""
        for top in list(self.tops):
            more = [peer for peer in top.members() if ledger.unsummed(self._stage, peer)]
            brought = {ledger.entries[mb].holders[self._stage] for mb in top.contents} if more else set[str]()
            for peer in more:
                for one in top.all():
                    one.kept.pop(peer, None)
            if brought.intersection(more):
                self.tops.remove(top)
                for one in top.all():
                    if not one.parts:
                        self.release(ledger, one.contents, one.stands, now)
        self.forget_lost(ledger, now)

    def forget_all(self, ledger: Ledger, now: float) -> None:
        """Begin anew with the members' own microbatches."""
        for top in self.tops:
            for one in top.all():
                if not one.parts:
                    self.release(ledger, one.contents, one.stands, now)
        self.tops = []

    def release(self, ledger: Ledger, mbs: Iterable[Mb], stands: dict[str, Stand], now: float) -> None:
        """These are in no sum any more: those whose holders are gone are lost."""

        def keeps(holder: str) -> bool:
            return holder in stands and self.stand(holder) == stands[holder]

        missing = ledger.missing[self._stage]
        ledger.release(self._stage, mbs, keeps, now)
        if ledger.missing[self._stage] != missing:
            self._lost()

    def own(self, ledger: Ledger, parts: Iterable[PartialSum]) -> dict[str, tuple[Mb, ...]]:
        """The microbatches of each member that are in these sums, also of those that are gone."""
        found: dict[str, list[Mb]] = {}
        for mb in (mb for part in parts for mb in part.contents):
            found.setdefault(ledger.entries[mb].holders[self._stage], []).append(mb)
        return {holder: tuple(mbs) for holder, mbs in found.items()}

    def check(self, ledger: Ledger) -> None:
        """Raise AssertionError when an invariant is broken."""
        contents = [mb for top in self.tops for mb in top.contents]
        assert len(contents) == len(set(contents))
        assert ledger.summed[self._stage].issuperset(contents)
        assert all(one.kept for one in self.tops)
