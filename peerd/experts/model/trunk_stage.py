"""The trunk as a served stage, whose microbatches cannot be recomputed.

A microbatch is computed in many short jobs, with experts' answers in between that cannot be obtained a second time. So
only the names of the microbatches in the sum are kept. If one of them must not count, the whole sum is cleared, and the
wanted microbatches are computed again from the start.
"""

from __future__ import annotations

from torch import Tensor

from peerd.experts.model.landing_queue import GradientQueue, LandedFlights
from peerd.experts.model.trunk import TrunkModule
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.messages.swarm import Mb
from peerd.model.stage.microbatch_books import KeptMicrobatch, Stale
from peerd.model.stage.served_stage import ServedStage
from peerd.run.runfile import RunFile


class TrunkStage(ServedStage):
    """The only stage of a run with experts."""

    def __init__(self, run: RunFile, device: str) -> None:
        self.trunk = TrunkModule(run, device)
        super().__init__(run, 0, device, self.trunk)

    def flight(self, step: int | None, tokens: Tensor, targets: Tensor) -> TrunkMicrobatch:
        """Start a microbatch of `step`, or, if that is None, one for evaluation, which uses the current parameters.

        Raises ValueError if the tensors are not those of a microbatch.
        """
        self._ahead(step)
        return TrunkMicrobatch(self.trunk, tokens.long(), targets.long(), None if step is None else self.trunk.era)

    def land(self, step: int, mb: Mb, flight: TrunkMicrobatch) -> None:
        """Add the gradients of a completed flight to the sum of `step`, once."""
        ahead, book, era = self._ahead(step), self._book(step), flight.era
        if era.loads != self.trunk.loads or not 0 <= step - era.at <= self.trunk.ahead:
            raise Stale(f"the microbatch was computed at step {era.at}, the call is at {step}")
        if mb not in book:
            self.trunk.add(flight.gradients, ahead)
            book[mb] = KeptMicrobatch(era.at)

    def free_flight(self, tokens: Tensor, targets: Tensor) -> TrunkMicrobatch:
        """Start a microbatch that has no step yet, for an asynchronous trunk. Raises ValueError like `flight`."""
        return TrunkMicrobatch(self.trunk, tokens.long(), targets.long(), self.trunk.era)

    def land_next(self, step: int, mb: Mb, queue: GradientQueue) -> LandedFlights | None:
        """Take the next gradients from `queue` as microbatch `mb` of `step`, and add their mean to the sum, once.

        Returns None if none of the waiting gradients are recent enough. Raises ValueError for gradients that cannot be
        summed, which are dropped.
        """
        self._at_current(step)
        if mb in self._held:
            return LandedFlights({}, self.trunk.step, self.trunk.loads, 0, 0.0)
        landed = queue.take(self.trunk.loads, step - self.trunk.most_stale)
        if landed is not None:
            try:
                self.trunk.add(landed.gradients, 0, 1.0 / landed.flights)
            except ValueError:
                queue.unusable += landed.flights
                raise
            self._held[mb] = KeptMicrobatch(landed.oldest)
        return landed
