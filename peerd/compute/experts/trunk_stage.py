"""Trunk as a stage that is held: its sum of gradients cannot be taken apart.

A microbatch is computed in many short jobs, with answers of experts in between that nobody could give a second time. So
what is in the sum is remembered by name only: where something in it must not count, all of it is forgotten, and what is
wanted is flown again.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from peerd.compute.experts.flight import Flight
from peerd.compute.experts.landing_queue import LandedFlights, LandingQueue
from peerd.compute.experts.trunk import TrunkModule
from peerd.compute.model.grad_sums import to_make_again
from peerd.compute.model.served_stage import ServedStage, Stale
from peerd.core.messages.swarm import Mb
from peerd.core.run.runfile import RunFile


class TrunkStage(ServedStage):
    """The only stage of a run with experts."""

    def __init__(self, run: RunFile, device: str) -> None:
        self.trunk = TrunkModule(run, device)
        super().__init__(run, 0, device, self.trunk)

    def flight(self, step: int | None, tokens: Tensor, targets: Tensor) -> Flight:
        """A microbatch of `step` that is to be flown; None: one to be judged, with whatever parameters there are.

        ValueError for other tensors than a microbatch has.
        """
        self._at(step)
        return Flight(self.trunk, tokens.long(), targets.long(), None if step is None else self.trunk.era)

    def land(self, step: int, mb: Mb, flight: Flight) -> None:
        """Add the gradients of a flight that has come back to the sum of `step`, once."""
        ahead, era = self._at(step), flight.era
        if era.loads != self.trunk.loads or not 0 <= step - era.at <= self.trunk.ahead:
            raise Stale(f"the microbatch was computed at step {era.at}, the call is at {step}")
        book = self._early if ahead else self._held
        if mb not in book:
            self.trunk.add(flight.gradients, ahead)
            self._note(book, mb, era.at)

    def free_flight(self, tokens: Tensor, targets: Tensor) -> Flight:
        """A microbatch of no step yet, for an asynchronous trunk. ValueError as `flight`."""
        return Flight(self.trunk, tokens.long(), targets.long(), self.trunk.era)

    def land_next(self, step: int, mb: Mb, queue: LandingQueue) -> LandedFlights | None:
        """Take the next gradients of `queue` as microbatch `mb` of `step`, and add their mean to its sum, once.

        Returns None if none wait that are young enough. ValueError for gradients that cannot be summed, which are
        dropped.
        """
        self._under_way(step)
        if mb in self._held:
            return LandedFlights({}, self.trunk.step, self.trunk.loads, 0, 0.0)
        landed = queue.take(self.trunk.loads, step - self.trunk.most_stale)
        if landed is not None:
            try:
                self.trunk.add(landed.gradients, 0, 1.0 / landed.flights)
            except ValueError:
                queue.unusable += landed.flights
                raise
            self._note(self._held, mb, landed.oldest)
        return landed

    def keep_only(self, step: int, wanted: Iterable[Mb]) -> list[Mb]:
        """Returns what is wanted but not held; forgets the sum of `step` when it has something else in it."""
        self._under_way(step)
        missing, forget = to_make_again(self._held, wanted)
        if forget:
            self._drop_due()
        return missing

    def unusable(self, step: int) -> list[Mb]:
        """All that is held, when the sum of `step` has left the range of numbers: it is forgotten."""
        self._under_way(step)
        if self.trunk.sum_is_finite():
            return []
        lost = sorted(self._held)
        self._drop_due()
        return lost

    def _drop_due(self) -> None:
        self._held.clear()
        self.trunk.empty_sum()
