"""Ledger of a step: the microbatches that make it up, and the peer that holds the gradient of each in each stage.

Pure bookkeeping for the conductor: no time-outs, no peers' liveness. What a trainer's report asks of it costs as much
as that trainer has under way, and what a member's does as much as it holds, however large the batch. Invariants
(`check`): never more entries than the batch has microbatches, and of no more than BATCH_TRAINERS; `missing[s]` counts
exactly the entries without a holder in stage s, `held[s]` names the others, by holder; `open` names, by trainer,
exactly those that are not done or lack a holder, in the order of their `since`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    missing: list[int] = field(default_factory=list)  # by stage
    by_trainer: dict[str, dict[int, None]] = field(default_factory=dict)  # numbers of the entries, as admitted
    open: dict[str, dict[int, Entry]] = field(default_factory=dict)  # by trainer, of those that have some, and number
    under_way: Counter[str] = field(default_factory=Counter)  # number of entries that are not `done`, by trainer
    undone: int = 0  # of all trainers together
    newcomers: int = 0  # microbatches that newcomers were given so far, also those that they did not finish in time
    given_back: Counter[str] = field(default_factory=Counter)  # entries that each trainer lost before it was done
    unsaid: int = 0  # number of entries that are not `done`, and held in every stage: members have said so
    held: list[dict[str, dict[Mb, None]]] = field(default_factory=list)  # by stage and holder, of those that have some
    summed: list[set[Mb]] = field(default_factory=list)  # by stage, those in a partial sum or on their way into one
    ceded: list[set[Mb]] = field(default_factory=list)  # of these, by stage, those that their holders have no longer

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
        """Let go of some of a batch that is over, and not looked at any more; False when nothing is left.

        To free thousands of entries takes milliseconds.
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
        """Count `mb` towards the batch; False when that is full, or of too many trainers. Harmless when repeated."""
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
        """Its trainer says that `mb` is done in all stages."""
        entry = self.entries[mb]
        if not entry.done:
            entry.done = True
            self._count_undone(mb, -1)
            self.unsaid -= not entry.lacking
            self._close(mb, entry)

    def hold(self, mb: Mb, stage: int, holder: str, proof: Proof = None) -> None:
        """`holder` has accumulated `mb` in `stage`; a later report replaces an earlier one, unless `mb` is `summed`."""
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
        """Nobody holds `mb` in `stage` any more; while it is `summed` this has no effect before its `release`."""
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
        """`peer` has not got these, though it was said to hold them."""
        for mb in mbs:
            entry = self.entries.get(mb)
            if entry is not None and entry.holders[stage] == peer:
                self.unhold(mb, stage, now)

    def lose(self, peer: str, now: float) -> None:
        """All that `peer` held is lost."""
        for stage, held in enumerate(self.held):
            for mb in list(held.get(peer, ())):
                self.unhold(mb, stage, now)

    def keep_only(self, peer: str, stage: int, held: frozenset[Mb], now: float) -> None:
        """`peer` says what it holds in `stage`: anything else that was credited to it is lost."""
        for mb in list(self.held[stage].get(peer, ())):
            if mb not in held:
                self.unhold(mb, stage, now)
            else:
                self.ceded[stage].discard(mb)

    def sum_up(self, stage: int, mbs: Iterable[Mb]) -> None:
        """These enter a partial sum of `stage`: the loss of a holder costs them nothing until they are released."""
        self.summed[stage].update(mbs)

    def release(self, stage: int, mbs: Iterable[Mb], now: float) -> None:
        """These are in no partial sum any more: their holders hold them, unless they have lost them meanwhile."""
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
        """`mb` does not count any more; its place in the batch is free, and sums that have it are of no use."""
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
        """The trainer's microbatches that are not done, or needed by some stage, the oldest first."""
        return (Mb(trainer, seq) for seq in self.open.get(trainer, {}))

    def credit(self) -> dict[str, int]:
        """Number of gradients of each holder, in all stages."""
        found = Counter[str]()
        for held in self.held:
            found.update({holder: len(mbs) for holder, mbs in held.items()})
        return dict(found)

    def waiting_since(self, before: float) -> list[str]:
        """Trainers with something that is open since `before`, or longer."""
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
        """True when the batch is full and held everywhere. Stages that are `settled` have their mean already."""
        return self.full and all(ready or not count for ready, count in zip(settled, self.missing, strict=True))

    def is_missing(self, mb: Mb, settled: Sequence[bool]) -> bool:
        """True while some stage still needs `mb`."""
        entry = self.entries.get(mb)
        if entry is None or not entry.lacking:
            return False
        return any(not ready and holder == NOBODY for ready, holder in zip(settled, entry.holders, strict=True))

    def lacks(self, mb: Mb, stage: int) -> bool:
        """True while nobody holds `mb`, which is in the batch, in this stage."""
        entry = self.entries.get(mb)
        return entry is not None and entry.holders[stage] == NOBODY

    def of_trainer(self, trainer: str) -> list[int]:
        """The trainer's microbatches in this batch, in order of admission."""
        return list(self.by_trainer.get(trainer, ()))

    def begun(self) -> dict[str, tuple[int, float]]:
        """Number of microbatches that each trainer has to do still, or to do again, and the start of the oldest of
        them.
        """
        if not self.unsaid:  # then all that is open has to be done
            return {name: (len(waiting), next(iter(waiting.values())).since) for name, waiting in self.open.items()}
        found: dict[str, tuple[int, float]] = {}
        for trainer, waiting in self.open.items():
            since = [entry.since for entry in waiting.values() if entry.lacking]
            if since:
                found[trainer] = len(since), since[0]
        return found

    def redo(self, trainer: str, settled: Sequence[bool]) -> list[Redo]:
        """Microbatches that the trainer has to repeat, because the peer that held them is gone."""
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
        """Microbatches that each of the group contributes to a sum, in any order.

        The group has all that is held in the stage and not summed yet.
        """
        parts = {peer: self.unsummed(stage, peer) for peer in group}
        assert not self.missing[stage]
        left_out = self.held[stage].keys() - parts.keys()
        assert not any(self.unsummed(stage, peer) for peer in left_out), "it would be left out of the sum"
        return parts

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
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
    """Take `one` out; a trainer, or a holder, without any is not named."""
    of_one = by_name.get(name)
    if of_one is not None:
        of_one.pop(one, None)
        if not of_one:
            del by_name[name]


class Counted:
    """The batches of the last steps: for a trainer that has not heard how its step ended."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, Mapping[str, Collection[int]]]] = deque(maxlen=_STEPS_REMEMBERED)

    def add(self, step: int, batch: Mapping[str, Collection[int]]) -> None:
        """The batch that was averaged in `step`: the numbers of each trainer's microbatches, which stay as they are."""
        self._batches.append((step, batch))

    def restart(self, step: int, batch: Iterable[Mb]) -> None:
        """Only the batch of `step` is certain."""
        self._batches.clear()
        by_trainer: dict[str, set[int]] = {}
        for mb in batch:
            by_trainer.setdefault(mb.trainer, set()).add(mb.seq)
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
        trainer, seq = mb.trainer, mb.seq
        return any(trainer in batch and seq in batch[trainer] for _, batch in self._batches)
