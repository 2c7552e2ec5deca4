"""Ledger of a step: the microbatches that make it up, and the peer that holds the gradient of each in each stage.

Pure bookkeeping for the conductor: no time-outs, no peers' liveness. What a trainer's report asks of it costs as much
as that trainer has under way, however large the batch. Invariants (`check`): never more entries than the batch has
microbatches, and of no more than BATCH_TRAINERS; `missing[s]` names exactly the entries without a holder in stage s;
`open` names, by trainer, exactly those that are not done or lack a holder, in the order of their `since`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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
    lacking: int  # number of stages in which nobody holds it
    done: bool = False  # its trainer has finished all its stages at least once; see `Ledger.finish`

    @property
    def is_open(self) -> bool:
        """True while somebody still has to do something for it."""
        return not self.done or self.lacking > 0


@dataclass(slots=True)
class Ledger:
    """`capacity` microbatches make a batch; each needs a holder in every one of `stages` stages."""

    stages: int
    capacity: int
    entries: dict[Mb, Entry] = field(default_factory=dict)
    missing: list[set[Mb]] = field(default_factory=list)
    by_trainer: dict[str, dict[int, None]] = field(default_factory=dict)  # numbers of the entries, as admitted
    open: dict[str, dict[Mb, None]] = field(default_factory=dict)  # of trainers that have some
    under_way: Counter[str] = field(default_factory=Counter)  # number of entries that are not `done`, by trainer
    undone: int = 0  # of all trainers together
    credit: Counter[str] = field(default_factory=Counter)  # number of gradients, by holder

    def __post_init__(self) -> None:
        self.missing = [set() for _ in range(self.stages)]

    def clear(self) -> None:
        self.entries.clear()
        self.by_trainer.clear()
        self.open.clear()
        self.under_way.clear()
        self.undone = 0
        self.credit.clear()
        for lacking in self.missing:
            lacking.clear()

    @property
    def full(self) -> bool:
        return len(self.entries) >= self.capacity

    def admit(self, mb: Mb, now: float) -> bool:
        """Count `mb` towards the batch; False when that is full, or of too many trainers. Harmless when repeated."""
        if mb in self.entries:
            return True
        if self.full or (mb.trainer not in self.by_trainer and len(self.by_trainer) >= BATCH_TRAINERS):
            return False
        self.by_trainer.setdefault(mb.trainer, {})[mb.seq] = None
        self.open.setdefault(mb.trainer, {})[mb] = None
        self.entries[mb] = Entry([NOBODY] * self.stages, [None] * self.stages, now, self.stages)
        self._count_undone(mb, 1)
        for lacking in self.missing:
            lacking.add(mb)
        return True

    def finish(self, mb: Mb) -> None:
        """Its trainer says that `mb` is done in all stages."""
        entry = self.entries[mb]
        if not entry.done:
            entry.done = True
            self._count_undone(mb, -1)
            self._close(mb, entry)

    def hold(self, mb: Mb, stage: int, holder: str, proof: Proof = None) -> None:
        """`holder` has accumulated `mb` in `stage`; a later report replaces an earlier one."""
        entry = self.entries[mb]
        if entry.holders[stage] != holder or proof is not None:
            entry.proofs[stage] = proof
        if entry.holders[stage] == NOBODY != holder:
            entry.lacking -= 1
            self.missing[stage].discard(mb)
        self._uncredit(entry.holders[stage])
        if holder != NOBODY:
            self.credit[holder] += 1
        entry.holders[stage] = holder
        self._close(mb, entry)

    def unhold(self, mb: Mb, stage: int, now: float) -> None:
        """Nobody holds `mb` in `stage` any more."""
        entry = self.entries.get(mb)
        if entry is not None and entry.holders[stage] != NOBODY:
            self._uncredit(entry.holders[stage])
            entry.holders[stage], entry.proofs[stage] = NOBODY, None
            entry.since = now
            entry.lacking += 1
            self.missing[stage].add(mb)
            waiting = self.open.setdefault(mb.trainer, {})
            waiting.pop(mb, None)  # it is the newest now
            waiting[mb] = None

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
        entry = self.entries.pop(mb, None)
        if entry is None:
            return
        if not entry.done:
            self._count_undone(mb, -1)
        for holder in entry.holders:
            self._uncredit(holder)
        _forget(self.by_trainer, mb.trainer, mb.seq)
        _forget(self.open, mb.trainer, mb)
        for lacking in self.missing:
            lacking.discard(mb)

    def open_of(self, trainer: str) -> Iterator[Mb]:
        """The trainer's microbatches that are not done, or needed by some stage, the oldest first."""
        return iter(self.open.get(trainer, {}))

    def _uncredit(self, holder: str) -> None:
        if holder != NOBODY:
            self.credit[holder] -= 1
            if not self.credit[holder]:
                del self.credit[holder]

    def _close(self, mb: Mb, entry: Entry) -> None:
        if not entry.is_open:
            _forget(self.open, mb.trainer, mb)

    def _count_undone(self, mb: Mb, change: int) -> None:
        self.undone += change
        self.under_way[mb.trainer] += change
        if not self.under_way[mb.trainer]:
            del self.under_way[mb.trainer]

    def complete(self, settled: Sequence[bool]) -> bool:
        """True when the batch is full and held everywhere. Stages that are `settled` have their mean already."""
        return self.full and all(ready or not lacking for ready, lacking in zip(settled, self.missing, strict=True))

    def is_missing(self, mb: Mb, settled: Sequence[bool]) -> bool:
        """True while some stage still needs `mb`."""
        return any(not ready and mb in lacking for ready, lacking in zip(settled, self.missing, strict=True))

    def of_trainer(self, trainer: str) -> list[int]:
        """The trainer's microbatches in this batch, in order of admission."""
        return list(self.by_trainer.get(trainer, ()))

    def begun(self) -> dict[str, tuple[int, float]]:
        """Number of microbatches that each trainer has to do still, or to do again, and the start of the oldest of
        them.
        """
        found: dict[str, tuple[int, float]] = {}
        for trainer, waiting in self.open.items():
            since = [self.entries[mb].since for mb in waiting if self.entries[mb].lacking]
            if since:
                found[trainer] = len(since), since[0]
        return found

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat, because the peer that held them is gone."""
        found = [
            Redo(mb.seq, stage)
            for mb in self.open_of(trainer)
            if self.entries[mb].done
            for stage, holder in enumerate(self.entries[mb].holders)
            if holder == NOBODY and not settled[stage]
        ]
        return sorted(found, key=lambda redo: (redo.seq, redo.stage))

    def assigned(self, stage: int, group: Iterable[str]) -> dict[str, list[Mb]]:
        """Microbatches that each member of the stage contributes, sorted, so that every repeat says the same."""
        parts: dict[str, list[Mb]] = {peer: [] for peer in group}
        for mb, entry in self.entries.items():
            parts[entry.holders[stage]].append(mb)
        for part in parts.values():
            part.sort()
        return parts

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        assert len(self.entries) <= self.capacity
        assert {Mb(name, seq) for name, seqs in self.by_trainer.items() for seq in seqs} == self.entries.keys()
        assert all(self.by_trainer.values())
        assert all(self.open.values())
        assert self.under_way == Counter(mb.trainer for mb, entry in self.entries.items() if not entry.done)
        assert self.undone == self.under_way.total()
        waiting = [mb for of_one in self.open.values() for mb in of_one]
        assert sorted(waiting) == sorted(mb for mb, entry in self.entries.items() if entry.is_open)
        for of_one in self.open.values():
            since = [self.entries[mb].since for mb in of_one]
            assert since == sorted(since)
        for stage, lacking in enumerate(self.missing):
            assert lacking == {mb for mb, entry in self.entries.items() if entry.holders[stage] == NOBODY}
        holders = Counter(holder for entry in self.entries.values() for holder in entry.holders if holder != NOBODY)
        assert self.credit == holders
        assert all(entry.lacking == entry.holders.count(NOBODY) for entry in self.entries.values())


V = TypeVar("V")


def _forget(by_trainer: dict[str, dict[V, None]], trainer: str, one: V) -> None:
    """Take `one` out; a trainer without any is not named."""
    of_trainer = by_trainer.get(trainer)
    if of_trainer is not None:
        of_trainer.pop(one, None)
        if not of_trainer:
            del by_trainer[trainer]


class Counted:
    """The batches of the last steps: for a trainer that has not heard how its step ended."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, dict[str, frozenset[int]]]] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, step: int, batch: Mapping[str, Iterable[int]]) -> None:
        """The batch that was averaged in `step`: the numbers of each trainer's microbatches."""
        self._batches.append((step, {trainer: frozenset(seqs) for trainer, seqs in batch.items()}))

    def restart(self, step: int, batch: Iterable[Mb]) -> None:
        """Only the batch of `step` is certain."""
        self._batches.clear()
        by_trainer: dict[str, list[int]] = {}
        for mb in batch:
            by_trainer.setdefault(mb.trainer, []).append(mb.seq)
        self.add(step, by_trainer)

    def of(self, trainer: str, step: int) -> list[int] | None:
        """The trainer's microbatches in the batch of `step`, sorted; None: not remembered."""
        for known, batch in self._batches:
            if known == step:
                return sorted(batch.get(trainer, ()))
        return None

    def __contains__(self, mb: object) -> bool:
        if not isinstance(mb, Mb):
            return False
        return any(mb.seq in batch.get(mb.trainer, ()) for _, batch in self._batches)
