"""Counted work: the samples that each peer contributed to the steps that a conductor saw made, for the leaderboard.

A batch is recorded when all stages have its mean: each peer gets the samples whose gradients it holds, in each stage,
and those that it contributed as a trainer. They count when its step is made. This counts work, not results: if the run
goes back and repeats a step, that step's samples count each time. A new conductor adds its counts to those of its
predecessor (`go_on_from`). At most `most` peers are remembered; those with the fewest samples are dropped first, and
start at zero if they return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sized
from typing import Final, NamedTuple

from peerd.core.limits import COUNTED_PEERS
from peerd.swarm.posts import peer_of

_MOST: Final = (1 << 62) - 1  # largest number in a record


class PeerWork(NamedTuple):
    """Numbers of samples that one peer has contributed."""

    computed: int = 0  # in each stage: those whose gradients it held
    brought: int = 0  # as a trainer

    def plus(self, computed: int, brought: int) -> PeerWork:
        return PeerWork(min(self.computed + computed, _MOST), min(self.brought + brought, _MOST))


class CountedWork:
    """Samples of each peer in completed steps. `samples`: number of samples in a microbatch."""

    def __init__(self, samples: int, most: int = COUNTED_PEERS) -> None:
        self._samples, self._most = samples, most
        self.of: dict[str, PeerWork] = {}
        self.since_step: int | None = None  # first step whose samples are counted; None before it is known
        self.step = 0  # step that the last counted batch led to
        self._closed: tuple[dict[str, int], dict[str, int]] = {}, {}  # samples of a batch whose step may still fail

    def batch_closed(self, held: Mapping[str, int], brought: Mapping[str, Sized]) -> None:
        """Record the batch of the step that members now make. It replaces an earlier one whose step was not made.

        `held`: number of gradients of each post; `brought`: each trainer's microbatches.
        """
        computed = Counter[str]()
        for post, count in held.items():
            computed[peer_of(post)] += count * self._samples
        self._closed = computed, {trainer: len(seqs) * self._samples for trainer, seqs in brought.items()}

    def step_made(self, step: int) -> None:
        """Count the batch that was closed last, which led to `step`."""
        (computed, brought), self._closed = self._closed, ({}, {})
        for peer, samples in computed.items():
            self._add(peer, computed=samples)
        for peer, samples in brought.items():
            self._add(peer, brought=samples)
        self._note(step - 1)
        self.step = step
        self._drop_least()

    def go_on_from(self, since_step: int, step: int, rows: Iterable[tuple[str, PeerWork]]) -> None:
        """Add the counts of the previous conductor, from `since_step` to `step`."""
        for peer, work in rows:
            self._add(peer, *work)
        if self.since_step is None:
            self.step = step
        self._note(since_step)
        self._drop_least()

    def largest(self, most: int) -> list[tuple[str, PeerWork]]:
        """At most `most` peers, those with the most samples first."""
        return sorted(self.of.items(), key=_rank)[:most]

    def _add(self, peer: str, computed: int = 0, brought: int = 0) -> None:
        self.of[peer] = self.of.get(peer, PeerWork()).plus(computed, brought)

    def _note(self, since_step: int) -> None:
        self.since_step = since_step if self.since_step is None else min(self.since_step, since_step)

    def _drop_least(self) -> None:
        if len(self.of) > self._most:
            self.of = dict(self.largest(self._most))


def _rank(entry: tuple[str, PeerWork]) -> tuple[int, str]:
    peer, work = entry
    return -(work.computed + work.brought), peer
