"""Queue of completed gradients that wait for a slot in the batch of an asynchronous trunk.

If more microbatches complete than the trunk's batches have slots for, several share a slot: it counts as one
microbatch, with the mean of their gradients. The queue therefore has a fixed length, and no microbatch waits for a
step. A slot is as old as its oldest microbatch, so an old microbatch does not join a slot with younger ones, unless
that slot is the next to be taken. All methods but `len` add tensors, and run on the device's worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.experts.model.trunk_microbatch import TrunkMicrobatch


@dataclass(slots=True)
class LandedFlights:
    """Microbatches that share a slot; `gradients` and `loss_sum` are sums over them."""

    gradients: dict[int, Tensor]  # of parameters, by number
    oldest: int  # step of the oldest parameters that computed one of them
    loads: int
    flights: int
    loss_sum: float

    @torch.no_grad()
    def join(self, other: LandedFlights) -> None:
        """Add the microbatches of `other` to this slot."""
        sums = {number: self.gradients[number] + gradient for number, gradient in other.gradients.items()}
        self.gradients |= sums  # all at once, so that a lack of memory changes nothing
        self.oldest = min(self.oldest, other.oldest)
        self.flights += other.flights
        self.loss_sum += other.loss_sum


class GradientQueue:
    """Queue of at most `most` slots, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._waiting = deque[LandedFlights]()
        # Dropped microbatches: they waited for too many steps, or the trunk has loaded another state,
        self.too_old = 0
        self.unusable = 0  # or their gradients could not be summed
        self.shared = 0  # microbatches that joined an occupied slot

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, flight: TrunkMicrobatch, loads: int) -> None:
        """Add the gradients of a completed microbatch, unless the trunk has loaded another state since."""
        era = flight.era
        while self._waiting and self._waiting[0].loads != loads:  # the trunk has loaded another state
            self.too_old += self._waiting.popleft().flights
        if era.loads != loads:
            self.too_old += 1
            return
        landed = LandedFlights(dict(flight.gradients), era.at, era.loads, 1, flight.loss_sum)
        if len(self._waiting) < self._most:
            self._waiting.append(landed)
        else:
            older = [one for one in reversed(self._waiting) if one.oldest <= landed.oldest] or [self._waiting[0]]
            min(older, key=lambda one: one.flights).join(landed)
            self.shared += 1

    def take(self, loads: int, least: int) -> LandedFlights | None:
        """Take the oldest slot computed with parameters of load `loads` and step `least` or later, or None.

        Older ones are dropped, and counted in `too_old`.
        """
        while self._waiting:
            landed = self._waiting.popleft()
            if landed.loads == loads and landed.oldest >= least:
                return landed
            self.too_old += landed.flights
        return None
