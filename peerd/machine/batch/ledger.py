"""Ledger of a step: the microbatches that make it up, and the peer that holds the gradient of each in each stage.

Pure bookkeeping for the conductor: no time-outs, no peers' liveness. Invariants (`check`): never more entries
than the batch has microbatches, and of no more than BATCH_TRAINERS; `missing[s]` names exactly the entries without a
holder in stage s.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from peerd.core.limits import BATCH_TRAINERS
from peerd.core.messages.swarm import Mb, Receipt, Redo

NOBODY = ""
Proof = Receipt | int | None  # the holder's receipt, the session in which it said so itself, or a trainer's word alone
_STEPS_REMEMBERED = 32  # a trainer that hears nothing for so long does not learn what became of its last batch


@dataclass(slots=True)
class Entry:
    """One admitted microbatch."""

    holders: list[str]
    proofs: list[Proof]  # that they hold it; looked at only when one says that it does not
    since: float  # when it was admitted, or last lost a gradient
    done: bool = False  # its trainer has finished all its stages at least once; see `Ledger.finish`


@dataclass(slots=True)
class Ledger:
    """`capacity` microbatches make a batch; each needs a holder in every one of `stages` stages."""

    stages: int
    capacity: int
    entries: dict[Mb, Entry] = field(default_factory=dict)
    missing: list[set[Mb]] = field(default_factory=list)
    undone: set[Mb] = field(default_factory=set)  # not `done`
    trainers: Counter[str] = field(default_factory=Counter)  # of how many entries, of those that have some

    def __post_init__(self) -> None:
        self.missing = [set() for _ in range(self.stages)]

    def clear(self) -> None:
        self.entries.clear()
        self.undone.clear()
        self.trainers.clear()
        for lacking in self.missing:
            lacking.clear()

    @property
    def full(self) -> bool:
        return len(self.entries) >= self.capacity

    def admit(self, mb: Mb, now: float) -> bool:
        """Count `mb` towards the batch; False when that is full, or of too many trainers. Harmless when repeated."""
        if mb in self.entries:
            return True
        if self.full or (mb.trainer not in self.trainers and len(self.trainers) >= BATCH_TRAINERS):
            return False
        self.trainers[mb.trainer] += 1
        self.entries[mb] = Entry([NOBODY] * self.stages, [None] * self.stages, now)
        self.undone.add(mb)
        for lacking in self.missing:
            lacking.add(mb)
        return True

    def finish(self, mb: Mb) -> None:
        """Its trainer says that `mb` is done in all stages."""
        self.entries[mb].done = True
        self.undone.discard(mb)

    def hold(self, mb: Mb, stage: int, holder: str, proof: Proof = None) -> None:
        """`holder` has accumulated `mb` in `stage`; a later report replaces an earlier one."""
        entry = self.entries[mb]
        if entry.holders[stage] != holder or proof is not None:
            entry.proofs[stage] = proof
        entry.holders[stage] = holder
        self.missing[stage].discard(mb)

    def unhold(self, mb: Mb, stage: int, now: float) -> None:
        """Nobody holds `mb` in `stage` any more."""
        entry = self.entries.get(mb)
        if entry is not None and entry.holders[stage] != NOBODY:
            entry.holders[stage], entry.proofs[stage] = NOBODY, None
            entry.since = now
            self.missing[stage].add(mb)

    def unhold_of(self, peer: str, mbs: Iterable[Mb], stage: int, now: float) -> None:
        """`peer` has not got these, though it was said to hold them."""
        for mb in mbs:
            entry = self.entries.get(mb)
            if entry is not None and entry.holders[stage] == peer:
                self.unhold(mb, stage, now)

    def lose(self, peer: str, now: float) -> None:
        """All that `peer` held is lost."""
        for mb, entry in self.entries.items():
            for stage, holder in enumerate(entry.holders):
                if holder == peer:
                    self.unhold(mb, stage, now)

    def keep_only(self, peer: str, stage: int, held: frozenset[Mb], now: float) -> None:
        """`peer` says what it holds in `stage`: anything else that was credited to it is lost."""
        for mb, entry in self.entries.items():
            if entry.holders[stage] == peer and mb not in held:
                self.unhold(mb, stage, now)

    def drop(self, mb: Mb) -> None:
        """`mb` does not count any more; its place in the batch is free."""
        if self.entries.pop(mb, None) is not None:
            self.undone.discard(mb)
            self.trainers[mb.trainer] -= 1
            if not self.trainers[mb.trainer]:
                del self.trainers[mb.trainer]
            for lacking in self.missing:
                lacking.discard(mb)

    def drop_open(self, unwanted: Callable[[Mb, Entry], bool]) -> list[Mb]:
        """Drop every entry that is not done, or needed by some stage, and that `unwanted` picks; returns them sorted.

        The others, most of a batch, are not looked at: this is asked with every report.
        """
        gone = sorted(mb for mb in self.undone.union(*self.missing) if unwanted(mb, self.entries[mb]))
        for mb in gone:
            self.drop(mb)
        return gone

    def complete(self, settled: Sequence[bool]) -> bool:
        """True when the batch is full and held everywhere. Stages that are `settled` have their mean already."""
        return self.full and all(ready or not lacking for ready, lacking in zip(settled, self.missing, strict=True))

    def is_missing(self, mb: Mb, settled: Sequence[bool]) -> bool:
        """True while some stage still needs `mb`."""
        return any(not ready and mb in lacking for ready, lacking in zip(settled, self.missing, strict=True))

    def of_trainer(self, trainer: str) -> list[int]:
        """The trainer's microbatches in this batch, in order of admission."""
        return [mb.seq for mb in self.entries if mb.trainer == trainer]

    def unfinished(self) -> Counter[str]:
        """Number of microbatches that each trainer has under way."""
        return Counter(mb.trainer for mb in self.undone)

    def begun(self) -> dict[str, tuple[int, float]]:
        """Number of microbatches that each trainer has to do still, or to do again, and the start of the oldest of
        them.
        """
        found: dict[str, tuple[int, float]] = {}
        for mb in set[Mb]().union(*self.missing):
            count, since = found.get(mb.trainer, (0, math.inf))
            found[mb.trainer] = count + 1, min(since, self.entries[mb].since)
        return found

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat, because the peer that held them is gone."""
        found = [
            Redo(mb.seq, stage)
            for stage, lacking in enumerate(self.missing)
            if not settled[stage]
            for mb in lacking
            if mb.trainer == trainer and self.entries[mb].done
        ]
        return sorted(found, key=lambda redo: (redo.seq, redo.stage))

    def assigned(self, stage: int, group: Iterable[str]) -> dict[str, list[Mb]]:
        """Microbatches that each member of the stage contributes, sorted, so that every repeat says the same."""
        parts: dict[str, list[Mb]] = {peer: [] for peer in group}
        for mb in sorted(self.entries):
            parts[self.entries[mb].holders[stage]].append(mb)
        return parts

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self.entries) <= self.capacity
        assert self.trainers == Counter(mb.trainer for mb in self.entries)
        assert self.undone == {mb for mb, entry in self.entries.items() if not entry.done}
        for stage, lacking in enumerate(self.missing):
            assert lacking == {mb for mb, entry in self.entries.items() if entry.holders[stage] == NOBODY}


class Counted:
    """The batches of the last steps: for a trainer that has not heard how its step ended."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, frozenset[Mb]]] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, step: int, batch: Iterable[Mb]) -> None:
        """The batch that was averaged in `step`."""
        self._batches.append((step, frozenset(batch)))

    def restart(self, step: int, batch: Iterable[Mb]) -> None:
        """Only the batch of `step` is certain."""
        self._batches.clear()
        self.add(step, batch)

    def of(self, trainer: str, step: int) -> list[int] | None:
        """The trainer's microbatches in the batch of `step`, sorted; None: not remembered."""
        for known, batch in self._batches:
            if known == step:
                return sorted(mb.seq for mb in batch if mb.trainer == trainer)
        return None

    def __contains__(self, mb: object) -> bool:
        return any(mb in batch for _, batch in self._batches)
