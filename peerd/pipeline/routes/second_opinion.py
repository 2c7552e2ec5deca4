"""Microbatches that a stage peer reports as not finite: who reported it, whom to ask next, and when to drop them.

A peer that has a finite input but no finite result reports this under its own name. Another peer of its stage, if there
is one, then computes the microbatch as well. If its result is finite, the first peer is at fault; if not, the two
agree. They count as two only if two different peers sent them the input, because one peer can make any number of
successors fail. If no other peer can be asked, the report of one peer is a *lone* report. It counts for that
microbatch, and a trainer accepts a bounded number of them per step (`LoneReports`); beyond that, the peer is treated as
failing. Pure bookkeeping. Hostile input: any peer may report this of any microbatch that it gets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from peerd.core.errors import PeerdError

_ASKED: Final = 2  # peers of one stage that must agree on one microbatch
_LEAST_LONE: Final = 8  # lone reports accepted in any step; a conductor needs that many to see that a run has diverged
_LONE_SHARE: Final = 8  # one in this many microbatches of a batch may be dropped on a lone report


class MicrobatchNotFinite(PeerdError):
    """A microbatch has no finite output or gradient at `stage`, as `peers` report; it must be dropped."""

    def __init__(self, stage: int, peers: Collection[str], reason: str) -> None:
        super().__init__(reason)
        self.stage, self.peers = stage, sorted(peers)


class SecondOpinion:
    """The stage peers' reports that one microbatch has no finite result."""

    def __init__(self) -> None:
        self._said: dict[int, dict[str, str]] = {}  # by stage and peer, the peer that sent it the input

    def say(self, stage: int, peer: str, brought_by: str = "") -> None:
        """Record that `peer` reports a result that is not finite.

        `brought_by`: the peer of the previous stage that sent the input, or "" for the trainer.
        """
        self._said.setdefault(stage, {})[peer] = brought_by

    def said_by(self, stage: int) -> set[str]:
        """The peers of a stage that have reported a result that is not finite."""
        return set(self._said.get(stage, ()))

    @property
    def accused(self) -> list[tuple[int, str]]:
        """Stages and peers that were wrong if the microbatch turns out to be finite."""
        return [(stage, peer) for stage, said in sorted(self._said.items()) for peer in sorted(said)]

    def asks_another(self, stage: int, others: Collection[str]) -> bool:
        """True if another peer of the stage should compute the microbatch as well. `others`: those available."""
        said = self._said.get(stage, {})
        return len(said) < _ASKED and not said.keys() >= set(others)

    def is_agreed(self, stage: int) -> bool:
        """Return True if two peers of the stage, which got the input from different peers, report the same."""
        brought = list(self._said.get(stage, {}).values())
        return len(brought) >= _ASKED and (len(set(brought)) > 1 or not brought[0])


class LoneReports:
    """The lone reports that one trainer has accepted in the current step; `microbatches`: the size of a batch."""

    def __init__(self, microbatches: int) -> None:
        self.most = max(_LEAST_LONE, microbatches // _LONE_SHARE)
        self._step, self._taken = -1, 0

    def take(self, step: int) -> bool:
        """Count one more in `step`; returns False if there were too many to be accepted."""
        if step != self._step:
            self._step, self._taken = step, 0
        if self._taken >= self.most:
            return False
        self._taken += 1
        return True
