"""Queue of gradients that have come back and wait for a place in the batch of an asynchronous trunk.

If more microbatches come back than the trunk's batches have places for, several share a place: it counts as one
microbatch, with the mean of their gradients. So the queue has a fixed length, no microbatch waits for a step, and none
is lost. All methods but `len` add tensors, and run on the device's worker.
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
        for number, gradient in other.gradients.items():
            self.gradients[number] = self.gradients[number] + gradient
        self.oldest = min(self.oldest, other.oldest)
        self.flights += other.flights
        self.loss_sum += other.loss_sum


class LandingQueue:
    """At most `most` places wait, the oldest first."""

    def __init__(self, most: int) -> None:
        self._most = max(1, most)
        self._waiting = deque[LandedFlights]()
        self.too_old = 0  # microbatches that were dropped, since they waited for too many steps
        self.shared = 0  # microbatches that found no place of their own

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, flight: Flight) -> None:
        """Take the gradients of a microbatch that has come back."""
        era = flight.era
        landed = LandedFlights(dict(flight.gradients), era.at, era.loads, 1, flight.loss_sum)
        while self._waiting and self._waiting[0].loads != era.loads:  # the trunk has taken over another state
            self._waiting.popleft()
        if len(self._waiting) < self._most:
            self._waiting.append(landed)
        else:
            self.shared += 1
            min(reversed(self._waiting), key=lambda one: one.flights).join(landed)

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
