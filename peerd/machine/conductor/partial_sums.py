"""Sums that groups of a stage have made on the way to the sum of the whole batch.

A sum has contents (microbatches), members that have brought their own gradients to it, and members that keep it.
Members' own microbatches are summed first; then groups join the sums that there are. So when a group fails only its own
sum is lost: the others are there, also when a member that brought something is not. A sum whose state is in doubt is
given up, and its members' gradients are summed again. Invariants (`fault`): a microbatch, and the gradient of a
member's session, is in one of the sums that are not part of a larger one, once; each of these microbatches is in the
batch (`Ledger.summed`). Bookkeeping only: `stage_close` orders what is summed.
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

    `stands`: of those that keep it. `bringers`: the members whose own gradients are in it, as they were then. `parts`:
    the sums that it was made of, which remain if all members that keep it are lost. It has no parts if it was made of
    members' own gradients, or if its parts were dropped.
    """

    contents: frozenset[Mb]
    count: int  # of microbatches, as often as each was summed: if it exceeds the contents the sum is wrong
    kept: dict[str, bytes]
    stands: dict[str, Stand]
    bringers: tuple[tuple[str, Stand], ...]
    digest: bytes
    parts: tuple[PartialSum, ...] = ()
    depth: int = 0  # number of rounds before the one that made it
    leads: int = 0  # how often it has what only one member of the stage may bring
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
        news = {peer: attempt for peer, attempt in other.kept.items() if peer not in self.kept}
        self.kept |= news
        self.stands |= {peer: other.stands[peer] for peer in news}
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

    def bringers(self) -> set[str]:
        """The members whose own gradients are in a sum: they must not be summed once more."""
        return {peer for top in self.tops for peer, stand in top.bringers if self.stand(peer) == stand}

    def is_of_use(self, parts: tuple[PartialSum, ...], copies: PartialSum | None) -> bool:
        """True when a sum of these parts, or the copy of a sum, has a place here: its parts are here, or others have
        made the same sum.
        """
        if copies is not None:
            return copies in self.tops
        return all(part in self.tops for part in parts) or any(top.parts == parts for top in self.tops)

    def add(self, found: PartialSum, copies: PartialSum | None = None) -> PartialSum | None:
        """Take in a sum in place of its parts, or join it to the same one that others have; returns this.

        `copies`: the sum that it is a copy of. Returns None, and forgets the sum, where it has no place.
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
        """Take note that a member has let go of its sums, but for the one that this attempt gave it."""
        for one in (one for top in self.tops for one in top.all()):
            if one.kept.get(peer, but) != but:
                del one.kept[peer]

    def forget_lost(self, ledger: Ledger, now: float) -> None:
        """Members that are gone keep nothing; a sum that nobody keeps is lost, down to the parts that somebody keeps.

        So is one that has a microbatch which is not in the batch any more.
        """
        for one in (one for top in self.tops for one in top.all()):
            for peer in [peer for peer in one.kept if self.stand(peer) != one.stands[peer]]:
                del one.kept[peer]
        self.tops = [found for top in self.tops for found in self._left_of(ledger, top, now, frozenset())]

    def forget_outgrown(self, ledger: Ledger, now: float) -> None:
        """Give up sums with the gradients of members that hold more by now, whether or not these keep them: their own
        microbatches are summed anew, all together.
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

    def _left_of(self, ledger: Ledger, one: PartialSum, now: float, more: frozenset[str]) -> list[PartialSum]:
        """The sum, or what is left of it: parts that somebody keeps, without gradients of members that hold `more`."""
        outgrown = any(peer in more and self.stand(peer) == stand for peer, stand in one.bringers)
        if one.kept and one.contents <= ledger.summed[self._stage] and not outgrown:
            return [one]
        if one.parts:
            return [found for part in one.parts for found in self._left_of(ledger, part, now, more)]
        self.release(ledger, one.contents, now)
        return []

    def forget_all(self, ledger: Ledger, now: float) -> None:
        """Begin anew with the members' own microbatches."""
        tops, self.tops = self.tops, []
        for top in tops:
            self.release(ledger, top.contents, now)

    def release(self, ledger: Ledger, mbs: Iterable[Mb], now: float) -> None:
        """These are in no sum any more: those whose holders have lost them must be done again."""
        missing = ledger.missing[self._stage]
        ledger.release(self._stage, mbs, now)
        if ledger.missing[self._stage] != missing:
            self._lost()

    def own(self, ledger: Ledger, parts: Iterable[PartialSum]) -> dict[str, tuple[Mb, ...]]:
        """The microbatches of each member that are in these sums, also of those that are gone."""
        found: dict[str, list[Mb]] = {}
        for mb in (mb for part in parts for mb in part.contents):
            found.setdefault(ledger.entries[mb].holders[self._stage], []).append(mb)
        return {holder: tuple(mbs) for holder, mbs in found.items()}

    def fault(self, ledger: Ledger) -> str:
        """What is wrong with the sums: no step may be made with them; "" where nothing is."""
        contents = set[Mb]().union(*(top.contents for top in self.tops))
        bringers = [bringer for top in self.tops for bringer in top.bringers]
        if len(contents) != sum(top.count for top in self.tops):
            return "a microbatch is in it twice"
        if not contents <= ledger.summed[self._stage]:
            return "it has a microbatch that is not in the batch"
        if len(bringers) != len({*bringers}):
            return "a member's gradient is in it twice"
        if sum(top.leads for top in self.tops) > 1:
            return "what only one member may bring is in it twice"
        return ""

    def check(self, ledger: Ledger) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert not self.fault(ledger), self.fault(ledger)
        assert all(one.kept for one in self.tops)
        assert all(one.kept.keys() <= one.stands.keys() for top in self.tops for one in top.all())
