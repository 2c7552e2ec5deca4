"""Microbatches that a stage peer calls not finite: who said so, whom to ask next, and when the microbatch is dropped.

A peer that has a finite input and no finite result answers so under its own name. Another peer of its stage, where
there is one, computes the microbatch as well. If its result is finite, the first one is at fault; if not, the two
agree. They count as two only if two different peers brought them the input, since one peer can make any number of
successors fail. Where nobody else can be asked, one peer's word is a `lone` one. It counts for that microbatch, and a
trainer takes a bounded number of them a step (`LoneWords`): beyond that, the peer is treated as one that fails. Pure
bookkeeping. Hostile input: any peer may say this of any microbatch that it gets.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from peerd.core.errors import PeerdError

_ASKED: Final = 2  # peers of one stage, for one microbatch
_LEAST_LONE: Final = 8  # words that are taken in any step: as many as a conductor needs to see that a run has diverged
_LONE_SHARE: Final = 8  # of so many microbatches of a batch, one may be dropped at one peer's word


class MicrobatchNotFinite(PeerdError):
    """A microbatch has no finite output or gradient at `stage`, by the word of `peers`; it is to be dropped."""

    def __init__(self, stage: int, peers: Collection[str], reason: str) -> None:
        super().__init__(reason)
        self.stage, self.peers = stage, sorted(peers)


class SecondOpinion:
    """What stage peers have said of one microbatch."""

    def __init__(self) -> None:
        self._said: dict[int, dict[str, str]] = {}  # by stage and peer, the peer that brought it the input

    def say(self, stage: int, peer: str, brought_by: str = "") -> None:
        """`peer` says that its result is not finite. `brought_by`: the peer of the stage before; "": the trainer."""
        self._said.setdefault(stage, {})[peer] = brought_by

    def said_by(self, stage: int) -> set[str]:
        """The peers of a stage that have said so."""
        return set(self._said.get(stage, ()))

    @property
    def accused(self) -> list[tuple[int, str]]:
        """Stages and peers that were wrong if the microbatch is finite after all."""
        return [(stage, peer) for stage, said in sorted(self._said.items()) for peer in sorted(said)]

    def asks_another(self, stage: int, others: Collection[str]) -> bool:
        """True while one of `others`, the peers of the stage that can be asked, is to compute it as well."""
        said = self._said.get(stage, {})
        return len(said) < _ASKED and not said.keys() >= set(others)

    def is_agreed(self, stage: int) -> bool:
        """True when two peers of the stage agree that did not get the input from the same peer."""
        brought = list(self._said.get(stage, {}).values())
        return len(brought) >= _ASKED and (len(set(brought)) > 1 or not brought[0])


class LoneWords:
    """The words of single peers that one trainer has taken in the step under way; `microbatches` make a batch."""

    def __init__(self, microbatches: int) -> None:
        self.most = max(_LEAST_LONE, microbatches // _LONE_SHARE)
        self._step, self._taken = -1, 0

    def take(self, step: int) -> bool:
        """Count one more in `step`; False when there were too many to be believed."""
        if step != self._step:
            self._step, self._taken = step, 0
        if self._taken >= self.most:
            return False
        self._taken += 1
        return True
