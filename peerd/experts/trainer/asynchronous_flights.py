"""Flights of a trainer whose trunk is asynchronous: a constant number in flight, independent of the trunk's steps.

A flight is a microbatch on its way through trunk and experts and back. A flight begins as soon as another one has come
back, with the current parameters, and without a place in a batch. When it has come back, its gradients wait in
`GradientQueue`, and the trainer requests one place in the batch for each entry of that queue. So the conductor assigns
places only to gradients that exist: no step waits for a slow trainer, and no trainer waits for a step. A microbatch
whose parameters would be more than `optimizer.most_stale` steps old when it counts, or were freed for lack of memory,
is dropped: the experts have learnt from it, the trunk does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import trio

from peerd.codec.format.frame import TensorFrame
from peerd.core.signals import Signal
from peerd.experts.model.earlier_parameters import TooOld
from peerd.experts.model.landing_queue import GradientQueue
from peerd.experts.model.trunk_microbatch import TrunkMicrobatch
from peerd.experts.trainer.expert_flights import ExpertFlights
from peerd.messages.swarm import Mb, MemberInfo
from peerd.model.shapes.trunk_memory import IN_FLIGHT, gradients_in_memory, places_at_once
from peerd.model.stage.microbatch_books import Stale
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.routes.in_flight import LIMITED
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.pipeline.stage.member import StageMember
from peerd.role.role import RoleContext
from peerd.run.expert_network import ExpertNetwork
from peerd.swarm.batch.trainer_ledger import Holding

_NOTHING: Final = TensorFrame("uint8", (0,), b"")


@dataclass(frozen=True, slots=True)
class FlightPlan:
    """Callbacks of the trainer that its flights call."""

    take: Callable[[], Awaitable[Microbatch]]  # returns the next samples
    goes_on: Callable[[], bool]  # True while further flights may begin
    landed: Callable[[], None]  # called after each flight


def flights_of(
    ctx: RoleContext,
    member: StageMember,
    network: ExpertNetwork,
    calls: Callable[[], Mapping[str, object]] = dict,
) -> ExpertFlights:
    """The flights of a run's trainer, of the kind that `optimizer.trunk` selects. Arguments as of `ExpertFlights`."""
    assert ctx.run is not None
    kind = AsynchronousFlights if ctx.run.optimizer.asynchronous else ExpertFlights
    return kind(ctx, member, network, calls)


class AsynchronousFlights(ExpertFlights):
    """Flights that do not wait for the trunk's steps; a place in a batch is requested after they come back."""

    def __init__(
        self,
        ctx: RoleContext,
        member: StageMember,
        network: ExpertNetwork,
        calls: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        super().__init__(ctx, member, network, calls)
        self._batch = places_at_once(self._run)
        self._queue: GradientQueue | None = None  # set once the trunk is built
        self._not_finite = deque[tuple[MicrobatchNotFinite, tuple[str, ...]]]()  # with the origins of their samples
        self._under_way = 0
        self._changed = Signal()  # a flight may begin or has come back

    # --- flights ------------------------------------------------------------------------------------------------

    async def fly(self, plan: FlightPlan) -> None:
        """Keep flights running until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                while self._under_way < (self.most_in_flight if plan.goes_on() and self.peers() else 0):
                    self._under_way += 1
                    nursery.start_soon(self._fly, plan, await plan.take())
                await self._changed.wait()

    async def _fly(self, plan: FlightPlan, load: Microbatch) -> None:
        try:
            flight = await self._again_until_done(partial(self._there_and_back, load), None, drops=True)
            await self._come_down(flight)
        except TooOld as error:
            self.counts.too_old(1, str(error))
        except MicrobatchNotFinite as error:
            if len(self._not_finite) < self._batch:
                self._not_finite.append((error, load.origins))
        finally:
            self._under_way -= 1
            self._changed.notify()
        plan.landed()

    async def _there_and_back(self, load: Microbatch) -> TrunkMicrobatch:
        stage = self._post.state.trunk
        flight = await self._work(partial(stage.free_flight, *self._texts(load.tokens, load.targets)), "begin a flight")
        with self.counts.one_away():
            await self._there(flight)
            await self._back(flight)
        return flight

    async def _come_down(self, flight: TrunkMicrobatch) -> None:
        """Queue the gradients of a flight, to wait for a place in a batch."""
        if self._queue is None:
            self._queue = GradientQueue(min(self._batch, self._gradients_in_memory()))
        queue, stage = self._queue, self._post.state.trunk
        await self._work(lambda: queue.add(flight, stage.trunk.loads), "add gradients")
        self.counts.samples += self._run.pipeline.microbatch

    def offer(self, waiting: list[Microbatch], opened: int) -> None:
        """Append empty loads to `waiting`, one for each place wanted beyond the `opened` and the waiting ones."""
        waiting += [Microbatch(_NOTHING, _NOTHING) for _ in range(self.places_wanted() - opened - len(waiting))]

    def places_wanted(self) -> int:
        """Places to request in the trunk's batch: one for each waiting entry, and one for each microbatch that was not
        finite.

        The conductor must learn of the latter, because they may show that the run has diverged.
        """
        return len(self._not_finite) + (len(self._queue) if self._queue is not None else 0)

    def update(self, members: Iterable[MemberInfo]) -> None:
        """As `ExpertFlights.update`; also begins flights that were waiting for members."""
        super().update(members)
        self._changed.notify()

    # --- places in a batch --------------------------------------------------------------------------------------

    async def train(self, step: int, seq: int, load: Microbatch) -> list[Holding]:
        """Add the gradients that have waited longest to the sum of `step`; returns their holder.

        Raises MicrobatchNotFinite if a microbatch without finite gradients waits: it takes this place and is dropped.
        """
        mb = Mb(self._ctx.host.id.text, seq)
        while not await self._lands(step, mb, load):
            if not self.places_wanted():
                await self._changed.wait()
        self._post.serving.worked(self._run.pipeline.microbatch, 0.0)
        return [Holding(mb.trainer, self._post.receipt(step, mb))]

    async def _lands(self, step: int, mb: Mb, load: Microbatch) -> bool:
        """Do the work of `train`. Returns False if no gradients wait."""
        while self._queue is not None or self._not_finite:
            await self._step_is_open(step)
            if self._not_finite:
                error, load.origins = self._not_finite.popleft()
                raise error
            assert self._queue is not None
            await self._sum_is_open(step)
            try:
                landed = await self._work(partial(self._post.state.trunk.land_next, step, mb, self._queue), "land")
            except Stale:
                continue  # the trunk has made a step meanwhile
            except ValueError as error:
                self.counts.cannot_be_summed(self._queue.unusable, error)
                self._queue.unusable = 0
                continue
            self.counts.too_old(self._queue.too_old)
            self._queue.too_old = 0
            if landed is None:
                return False
            if landed.flights:
                self.counts.counted(step - landed.oldest)
                load.loss_sum = landed.loss_sum / landed.flights
            return True
        return False

    def under_way(self) -> dict[str, int]:
        """Number of flights, for status."""
        return {"in_flight": self.counts.away}

    def samples_since(self, counted: int) -> int:
        """Samples of flights that came back since the last call; `counted` is not needed."""
        return self.counts.samples_since()

    @property
    def in_flight_why(self) -> str:
        """The reason why no more microbatches are in flight, as text."""
        return LIMITED if self._run.limits.microbatches_in_flight else f"{IN_FLIGHT} unless limits say otherwise"

    def status(self) -> dict[str, object]:
        """As `ExpertFlights.status`, plus the flights that wait for a place or have shared one."""
        waiting = {"wait_for_a_place": len(self._queue) if self._queue is not None else 0}
        shared = {"shared_a_place": self._queue.shared if self._queue is not None else 0}
        return super().status() | waiting | shared

    def _gradients_in_memory(self) -> int:
        return gradients_in_memory(self._trunk_bytes)
