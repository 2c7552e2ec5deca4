"""Ledger of a step: its microbatches, and for each stage the peer that holds each microbatch's gradient.

Pure bookkeeping for the conductor: no timeouts, no liveness of peers. The cost of a trainer's report depends on what
that trainer has under way, and the cost of a member's report on what it holds, however large the batch is. Invariants
(`check`): never more entries than the batch has microbatches, and of at most BATCH_TRAINERS trainers; `missing[s]`
counts exactly the entries without a holder in stage s, and `held[s]` lists the others by holder; `open` lists, by
trainer, exactly the entries that are not done or lack a holder, in the order of their `since`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from peerd.core.limits import BATCH_TRAINERS
from peerd.messages.swarm import Mb, Receipt, Redo

NOBODY = ""
Proof = Receipt | int | None  # the holder's receipt, the session of its own report, or only a trainer's word
_STEPS_REMEMBERED = 32  # a trainer that is out of contact for longer does not learn the outcome of its last batch


@dataclass(slots=True)
class Entry:
    """One admitted microbatch."""

    holders: list[str]
    proofs: list[Proof]  # that they hold it; only verified if a holder denies it
    since: float  # when it was admitted, or last lost a gradient
    lacking: int  # number of stages without a holder
    done: bool = False  # its trainer has finished all its stages at least once; see `BatchLedger.finish`

    @property
    def is_open(self) -> bool:
        """True while it needs more work."""
        return not self.done or self.lacking > 0


@dataclass(slots=True)
class BatchLedger:
    """The microbatches of one batch, `capacity` at most. Each needs a holder in each of `stages` stages."""

    stages: int
    capacity: int
    entries: dict[Mb, Entry] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)  # by stage
    by_trainer: dict[str, dict[int, None]] = field(default_factory=dict)  # entries' numbers, in order of admission
    open: dict[str, dict[int, Entry]] = field(default_factory=dict)  # by trainer, if it has any, and number
    under_way: Counter[str] = field(default_factory=Counter)  # number of entries that are not `done`, by trainer
    undone: int = 0  # the same, of all trainers together
    newcomers: int = 0  # microbatches given to newcomers so far, including those that were not finished in time
    given_back: Counter[str] = field(default_factory=Counter)  # entries that each trainer lost before they were done
    unsaid: int = 0  # entries that are not `done` but held in every stage, as members have reported
    held: list[dict[str, dict[Mb, None]]] = field(default_factory=list)  # by stage and holder, if it has any
    summed: list[set[Mb]] = field(default_factory=list)  # by stage, those in a partial sum or on their way into one
    ceded: list[set[Mb]] = field(default_factory=list)  # of these, by stage, those that their holders no longer have

    def __post_init__(self) -> None:
        self.missing = [0] * self.stages
        self.held = [{} for _ in range(self.stages)]
        self.summed = [set() for _ in range(self.stages)]
        self.ceded = [set() for _ in range(self.stages)]

    def clear(self) -> None:
        self.entries.clear()
        self.by_trainer.clear()
        self.open.clear()
        self.under_way.clear()
        self.undone = self.unsaid = self.newcomers = 0
        self.missing = [0] * self.stages
        for held in self.held:
            held.clear()
        for mbs in (*self.summed, *self.ceded):
            mbs.clear()

    def shed(self, most: int) -> bool:
        """Free some entries of a finished batch that is no longer used; False if nothing is left.

        Freeing thousands of entries takes milliseconds, so it is done in parts.
        """
        for _ in range(min(most, len(self.entries))):
            self.entries.popitem()
        for held in self.held:
            for _ in range(min(most, len(held))):
                held.popitem()
        return bool(self.entries) or any(self.held)

    @property
    def full(self) -> bool:
        return len(self.entries) >= self.capacity

    def admit(self, mb: Mb, now: float) -> bool:
        """Add `mb` to the batch; False if the batch is full or has too many trainers. Idempotent."""
        if mb in self.entries:
            return True
        if self.full or (mb.trainer not in self.by_trainer and len(self.by_trainer) >= BATCH_TRAINERS):
            return False
        self.by_trainer.setdefault(mb.trainer, {})[mb.seq] = None
        entry = Entry([NOBODY] * self.stages, [None] * self.stages, now, self.stages)
        self.entries[mb] = self.open.setdefault(mb.trainer, {})[mb.seq] = entry
        self._count_undone(mb, 1)
        for stage in range(self.stages):
            self.missing[stage] += 1
        return True

    def finish(self, mb: Mb) -> None:
        """Record the trainer's report that `mb` is done in all stages."""
        entry = self.entries[mb]
        if not entry.done:
            entry.done = True
            self._count_undone(mb, -1)
            self.unsaid -= not entry.lacking
            self._close(mb, entry)

    def hold(self, mb: Mb, stage: int, holder: str, proof: Proof = None) -> None:
        """Record that `holder` has accumulated `mb` in `stage`, replacing earlier reports unless `mb` is `summed`."""
        if mb in self.summed[stage]:
            return
        entry = self.entries[mb]
        before, held = entry.holders[stage], self.held[stage]
        if before != holder or proof is not None:
            entry.proofs[stage] = proof
        if before == holder:
            return
        entry.holders[stage] = holder
        if holder in held:
            held[holder][mb] = None
        else:
            held[holder] = {mb: None}
        if before != NOBODY:
            _forget(held, before, mb)
            return
        self.missing[stage] -= 1
        entry.lacking -= 1
        if not entry.lacking:
            self.unsaid += not entry.done
            self._close(mb, entry)

    def unhold(self, mb: Mb, stage: int, now: float) -> None:
        """Record that nobody holds `mb` in `stage` any more; while it is `summed`, this waits for its `release`."""
        entry = self.entries.get(mb)
        if mb in self.summed[stage]:
            self.ceded[stage].add(mb)
        elif entry is not None and entry.holders[stage] != NOBODY:
            _forget(self.held[stage], entry.holders[stage], mb)
            entry.holders[stage], entry.proofs[stage] = NOBODY, None
            entry.since = now
            self.unsaid -= not entry.lacking and not entry.done
            entry.lacking += 1
            self.missing[stage] += 1
            waiting = self.open.setdefault(mb.trainer, {})
            waiting.pop(mb.seq, None)  # it is the newest now
            waiting[mb.seq] = entry

    def unhold_of(self, peer: str, mbs: Iterable[Mb], stage: int, now: float) -> None:
        """Record that `peer` does not have these microbatches, which it was credited with."""
        for mb in mbs:
            entry = self.entries.get(mb)
            if entry is not None and entry.holders[stage] == peer:
                self.unhold(mb, stage, now)

    def lose(self, peer: str, now: float) -> None:
        """Record that everything that `peer` held is lost."""
        for stage, held in enumerate(self.held):
            for mb in list(held.get(peer, ())):
                self.unhold(mb, stage, now)

    def keep_only(self, peer: str, stage: int, held: frozenset[Mb], now: float) -> None:
        """Apply a report of what `peer` holds in `stage`: anything else that was credited to it is lost."""
        for mb in list(self.held[stage].get(peer, ())):
            if mb not in held:
                self.unhold(mb, stage, now)
            else:
                self.ceded[stage].discard(mb)

    def sum_up(self, stage: int, mbs: Iterable[Mb]) -> None:
        """Record that these microbatches enter a partial sum: until their `release`, losing a holder has no effect."""
        self.summed[stage].update(mbs)

    def release(self, stage: int, mbs: Iterable[Mb], now: float) -> None:
        """Record that these microbatches left their sum: their holders hold them again, unless lost meanwhile."""
        for mb in mbs:
            if mb in self.summed[stage]:
                self.summed[stage].discard(mb)
                if mb in self.ceded[stage]:
                    self.ceded[stage].discard(mb)
                    self.unhold(mb, stage, now)

    def unsummed(self, stage: int, peer: str) -> tuple[Mb, ...]:
        """Microbatches that `peer` holds in `stage` and that are in no partial sum, in any order."""
        held, summed = self.held[stage].get(peer, ()), self.summed[stage]
        return tuple(mb for mb in held if mb not in summed) if summed else tuple(held)

    def drop(self, mb: Mb) -> None:
        """Remove `mb` from the batch; its slot becomes free, and sums that contain it become void."""
        entry = self.entries.pop(mb, None)
        if entry is None:
            return
        if not entry.done:
            self._count_undone(mb, -1)
            self.unsaid -= not entry.lacking
        for stage, holder in enumerate(entry.holders):
            self.missing[stage] -= holder == NOBODY
            _forget(self.held[stage], holder, mb)
            self.summed[stage].discard(mb)
            self.ceded[stage].discard(mb)
        _forget(self.by_trainer, mb.trainer, mb.seq)
        _forget(self.open, mb.trainer, mb.seq)

    def open_of(self, trainer: str) -> Iterator[Mb]:
        """The trainer's microbatches that are not done, or lack a holder in some stage, oldest first."""
        return (Mb(trainer, seq) for seq in self.open.get(trainer, {}))

    def credit(self) -> dict[str, int]:
        """Number of gradients that each holder has, in all stages together."""
        found = Counter[str]()
        for held in self.held:
            found.update({holder: len(mbs) for holder, mbs in held.items()})
        return dict(found)

    def waiting_since(self, before: float) -> list[str]:
        """Trainers with a microbatch that has been open since `before` or longer."""
        return [name for name, waiting in self.open.items() if next(iter(waiting.values())).since <= before]

    def _close(self, mb: Mb, entry: Entry) -> None:
        if not entry.is_open:
            _forget(self.open, mb.trainer, mb.seq)

    def _count_undone(self, mb: Mb, change: int) -> None:
        self.undone += change
        self.under_way[mb.trainer] += change
        if not self.under_way[mb.trainer]:
            del self.under_way[mb.trainer]

    def complete(self, settled: Sequence[bool]) -> bool:
        """True if the batch is full, and held in every stage that is not `settled` (has its mean already)."""
        return self.full and all(ready or not count for ready, count in zip(settled, self.missing, strict=True))

    def is_missing(self, mb: Mb, settled: Sequence[bool]) -> bool:
        """True while a stage that is not `settled` lacks `mb`."""
        entry = self.entries.get(mb)
        if entry is None or not entry.lacking:
            return False
        return any(not ready and holder == NOBODY for ready, holder in zip(settled, entry.holders, strict=True))

    def lacks(self, mb: Mb, stage: int) -> bool:
        """True if `mb` is in the batch and nobody holds it in this stage."""
        entry = self.entries.get(mb)
        return entry is not None and entry.holders[stage] == NOBODY

    def of_trainer(self, trainer: str) -> list[int]:
        """Numbers of the trainer's microbatches in this batch, in order of admission."""
        return list(self.by_trainer.get(trainer, ()))

    def begun(self) -> dict[str, tuple[int, float]]:
        """By trainer: number of microbatches that it has to compute or repeat, and the start time of the oldest."""
        if not self.unsaid:  # then all open microbatches are still to be computed
            return {name: (len(waiting), next(iter(waiting.values())).since) for name, waiting in self.open.items()}
        found: dict[str, tuple[int, float]] = {}
        for trainer, waiting in self.open.items():
            since = [entry.since for entry in waiting.values() if entry.lacking]
            if since:
                found[trainer] = len(since), since[0]
        return found

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat because the peer that held them is gone."""
        waiting = self.open.get(trainer, {})
        if len(waiting) == self.under_way[trainer]:  # it has not finished any of them
            return []
        found = [
            Redo(seq, stage)
            for seq, entry in waiting.items()
            if entry.done
            for stage, holder in enumerate(entry.holders)
            if holder == NOBODY and not settled[stage]
        ]
        return sorted(found, key=lambda redo: (redo.seq, redo.stage))

    def assigned(self, stage: int, group: Iterable[str]) -> dict[str, tuple[Mb, ...]]:
        """Microbatches that each member of the group contributes to a sum, in any order.

        The group must hold everything in the stage that is not summed yet.
        """
        parts = {peer: self.unsummed(stage, peer) for peer in group}
        assert not self.missing[stage]
        left_out = self.held[stage].keys() - parts.keys()
        assert not any(self.unsummed(stage, peer) for peer in left_out), "this holder would be left out of the sum"
        return parts

    def check(self) -> None:
        """Raise AssertionError if an invariant is violated."""
        assert len(self.entries) <= self.capacity
        assert {Mb(name, seq) for name, seqs in self.by_trainer.items() for seq in seqs} == self.entries.keys()
        assert all(self.by_trainer.values())
        assert all(self.open.values())
        assert self.under_way == Counter(mb.trainer for mb, entry in self.entries.items() if not entry.done)
        assert self.undone == self.under_way.total()
        assert self.unsaid == sum(not entry.done and not entry.lacking for entry in self.entries.values())
        waiting = [(Mb(name, seq), entry) for name, of_one in self.open.items() for seq, entry in of_one.items()]
        assert all(self.entries[mb] is entry for mb, entry in waiting)
        assert sorted(mb for mb, _ in waiting) == sorted(mb for mb, entry in self.entries.items() if entry.is_open)
        for of_one in self.open.values():
            since = [entry.since for entry in of_one.values()]
            assert since == sorted(since)
        for stage, count in enumerate(self.missing):
            held = {mb: holder for holder, mbs in self.held[stage].items() for mb in mbs}
            assert held == {mb: e.holders[stage] for mb, e in self.entries.items() if e.holders[stage] != NOBODY}
            assert count + len(held) == len(self.entries)
            assert sum(map(len, self.held[stage].values())) == len(held)
        assert all(mbs for held in self.held for mbs in held.values())
        assert all(mb in self.entries and not self.lacks(mb, s) for s, mbs in enumerate(self.summed) for mb in mbs)
        assert all(ceded <= summed for ceded, summed in zip(self.ceded, self.summed, strict=True))
        assert all(entry.lacking == entry.holders.count(NOBODY) for entry in self.entries.values())


K = TypeVar("K")
V = TypeVar("V")


def _forget(by_name: dict[str, dict[K, V]], name: str, one: K) -> None:
    """Remove `one` from the entries of `name`, and the name if it has no other entry."""
    of_one = by_name.get(name)
    if of_one is not None:
        of_one.pop(one, None)
        if not of_one:
            del by_name[name]


class Counted:
    """The batches of the last steps, for trainers that have not learned how their step ended."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, Mapping[str, Collection[int]]]] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, step: int, batch: Mapping[str, Collection[int]]) -> None:
        """Record the batch averaged in `step`, as numbers by trainer. The mapping must not change afterwards."""
        self._batches.append((step, batch))

    def restart(self, step: int, batch: Iterable[Mb]) -> None:
        """Keep only the batch of `step`, as no other is certain."""
        self._batches.clear()
        by_trainer: dict[str, set[int]] = {}
        for mb in batch:
            by_trainer.setdefault(mb.trainer, set()).add(mb.seq)
        self.add(step, by_trainer)

    def of(self, trainer: str, step: int) -> list[int] | None:
        """The trainer's microbatches in the batch of `step`, sorted, or None if the step is not remembered."""
        for known, batch in self._batches:
            if known == step:
                return sorted(batch.get(trainer, ()))
        return None

    def __contains__(self, mb: object) -> bool:
        if not isinstance(mb, Mb):
            return False
        trainer, seq = mb.trainer, mb.seq
        return any(trainer in batch and seq in batch[trainer] for _, batch in self._batches)
