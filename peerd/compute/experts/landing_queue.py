"""Queue of gradients that have come back and wait for a place in the batch of an asynchronous trunk.

If more microbatches come back than the trunk's batches have places for, several share a place: it counts as one
microbatch, with the mean of their gradients. So the queue has a fixed length, and no microbatch waits for a step. A
place is as old as the oldest microbatch in it, so an old one shares no place with younger ones, unless that is the next
to be taken. All methods but `len` add tensors, and run on the device's worker.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from peerd.compute.experts.flight import Flight


@dataclass(slots=True)
class LandedFlights:
    """Microbatches that share a place; `gradients` and `loss_sum` are sums over them."""

    gradients: dict[int, Tensor]  # of parameters, by number
    oldest: int  # global steps of the oldest parameters that one was computed with
    loads: int
    flights: int
    loss_sum: float

    @torch.no_grad()
    def join(self, other: LandedFlights) -> None:
        """Share the place with another one."""
        sums = {number: self.gradients[number] + gradient for number, gradient in other.gradients.items()}
        self.gradients |= sums  # all, or none where there is no memory for them
        self.oldest = min(self.oldest, other.oldest)
        self.flights += other.flights
        self.loss_sum += other.loss_sum


class LandingQueue:
    """At most `most` places wait, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._waiting = deque[LandedFlights]()
        # Microbatches that were dropped: they waited for too many steps, or the trunk has another state,
        self.too_old = 0
        self.unusable = 0  # or their gradients could not be summed
        self.shared = 0  # microbatches that found no place of their own

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, flight: Flight, loads: int) -> None:
        """Take the gradients of a microbatch that has come back, unless it is of another load than the trunk's."""
        era = flight.era
        while self._waiting and self._waiting[0].loads != loads:  # the trunk has taken over another state
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
        """The oldest one computed with parameters of load `loads` and step `least` or later, or None.

        Those that are older are dropped, and counted in `too_old`.
        """
        while self._waiting:
            landed = self._waiting.popleft()
            if landed.loads == loads and landed.oldest >= least:
                return landed
            self.too_old += landed.flights
        return None
