"""Flights: a trainer's microbatches through its own trunk and other peers' experts, many at once.

For role `trainer` it replaces the pipeline of a run without experts, with the same interface. Each microbatch is a trio
task: its segments are jobs on the device's worker, and between them it waits for experts. Its gradient is added to the
sum only after all of it has come back. A flight that got too few answers or no memory, or whose parameters are gone,
begins again from its text after a growing pause, and logs that. Experts that it had reached have already learnt from
it; this is not undone.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

import trio
from torch import Tensor

from peerd.codec.format.frame import TensorFrame
from peerd.codec.frames import from_frame
from peerd.codec.layout import NotFinite
from peerd.core.errors import NoMemory, RemoteError
from peerd.experts.model.earlier_parameters import TooOld
from peerd.experts.model.trunk_microbatch import Scores, TrunkMicrobatch
from peerd.experts.trainer.flight_counts import FlightCounts
from peerd.messages.swarm import Mb, MemberInfo
from peerd.model.shapes.trunk_memory import flights_at_once
from peerd.model.stage.microbatch_books import Stale
from peerd.model.stage.stage_module import ResultNotFinite
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.pipeline.stage.member import StageMember
from peerd.pipeline.stage.post import Post
from peerd.role.role import RoleContext
from peerd.run.expert_network import ExpertCall, ExpertNetwork, ExpertReply
from peerd.run.runfile import ExpertsSection, RunFile
from peerd.swarm.batch.trainer_ledger import Holding
from peerd.wire.rate.backoff import backoff_s

T = TypeVar("T")

_AGAIN_S: Final = 0.25  # pause after the first failure in a row
_AGAIN_MOST_S: Final = 10.0
_NOT_FINITE_BORNE: Final = 2  # failures in a row for values that are not finite before a microbatch is dropped
_CLOSING_S: Final = 0.05  # between two checks whether the sum is still being averaged


class ExpertFlights:
    """The flights of one trainer. The interface is that of `pipeline.direct.DirectPipeline`."""

    def __init__(
        self,
        ctx: RoleContext,
        member: StageMember,
        network: ExpertNetwork,
        calls: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """`calls` returns the outcomes of the calls to experts, for status."""
        assert ctx.run is not None
        self._ctx, self._member, self._network, self._calls = ctx, member, network, calls
        self._run: RunFile = ctx.run
        self._section = ctx.run.experts or ExpertsSection()
        self._ready = False
        self.counts = FlightCounts(ctx.log, ctx.clock)
        self.retries = 0  # restarts of flights
        self.sent_bytes = 0
        self.received_bytes = 0

    # --- microbatches -------------------------------------------------------------------------------------------

    async def train(self, step: int, seq: int, load: Microbatch) -> list[Holding]:
        """Send a microbatch through trunk and experts and back, and repeat this until its gradient is in the sum of
        `step`; returns the only holder of the gradient.
        """
        mb = Mb(self._ctx.host.id.text, seq)
        await self._again_until_done(lambda: self._train(step, mb, load), step)
        return [Holding(mb.trainer, self._post.receipt(step, mb))]

    async def repeat(self, step: int, seq: int, stage: int, load: Microbatch) -> Holding:
        """Train the microbatch again, because the sum with its gradient is lost."""
        return (await self.train(step, seq, load))[0]

    async def evaluate(self, tokens: TensorFrame, targets: TensorFrame) -> float:
        """The loss summed over the samples, with the current parameters of trunk and experts."""

        async def judge() -> float:
            flight = await self._begin(None, tokens, targets)
            await self._there(flight)
            return await self._work(flight.loss, "loss")

        return await self._again_until_done(judge, None)

    async def _train(self, step: int, mb: Mb, load: Microbatch) -> None:
        flight = await self._begin(step, load.tokens, load.targets)
        with self.counts.one_away():
            await self._there(flight)
            await self._back(flight)
        await self._sum_is_open(step)
        stage = self._post.state.trunk
        await self._work(lambda: stage.land(step, mb, flight), "land")
        self._post.serving.worked(self._run.pipeline.microbatch, 0.0)
        load.loss_sum = flight.loss_sum

    async def _begin(self, step: int | None, tokens: TensorFrame, targets: TensorFrame) -> TrunkMicrobatch:
        stage = self._post.state.trunk
        return await self._work(lambda: stage.flight(step, *self._texts(tokens, targets)), "begin a flight")

    @staticmethod
    def _texts(tokens: TensorFrame, targets: TensorFrame) -> tuple[Tensor, Tensor]:
        return from_frame(tokens, (None, None)), from_frame(targets, (None, None))

    async def _there(self, flight: TrunkMicrobatch) -> None:
        """Forward through all layers of experts."""
        scores: Scores | None = await self._work(flight.depart, "forward")
        while scores is not None:
            chosen = await self._network.choose(flight.layer, scores, self._section.top_k)
            asks = await self._work(partial(flight.ask, chosen), "ask")
            self._sends(asks)
            replies = await self._network.forward(asks, flight.samples)
            self._received(replies)
            scores = await self._work(partial(flight.go_on, replies), "forward")
            self.counts.cannot_be_used(flight.wrong)

    async def _back(self, flight: TrunkMicrobatch) -> None:
        """Backward through the same layers."""
        asks: list[ExpertCall] | None = await self._work(flight.turn, "backward")
        while asks is not None:
            self._sends(asks)
            replies = await self._network.backward(asks)
            self._received(replies)
            self.counts.learnt(replies)
            asks = await self._work(partial(flight.go_back, replies), "backward")
            self.counts.cannot_be_used(flight.wrong)

    async def _again_until_done(
        self, fly: Callable[[], Awaitable[T]], step: int | None, drops: bool | None = None
    ) -> T:
        """Run `fly` and return its result; restart it while it fails. (The conductor may cancel it meanwhile.)

        `drops`: raise MicrobatchNotFinite and TooOld, on which the microbatch is dropped; by default only if `step` is
        given.
        """
        drops = step is not None if drops is None else drops
        failures = not_finite = 0
        while True:
            await self._step_is_open(step)
            pause_s, dropped = 0.0, None
            try:
                result = await fly()
            except Stale as error:
                if drops and isinstance(error, TooOld):
                    raise
                self.counts.stale_flights += 1
            except (RemoteError, ValueError, NotFinite, NoMemory) as error:
                failures += 1
                own = isinstance(error, ResultNotFinite | NotFinite)  # not an expert's fault: their answers are checked
                not_finite = not_finite + 1 if own else 0
                if drops and not_finite >= _NOT_FINITE_BORNE:
                    dropped = MicrobatchNotFinite(0, [self._ctx.host.id.text], str(error))
                else:
                    self.counts.failed(error)
                    pause_s = backoff_s(failures, _AGAIN_S, _AGAIN_MOST_S)
            else:
                self.counts.succeeded()
                return result
            # After the handlers, because a handled error keeps the flight and the parameters that it began with alive.
            if dropped is not None:
                raise dropped
            if pause_s:
                await trio.sleep(pause_s)
            self.retries += 1

    async def _step_is_open(self, step: int | None) -> None:
        """Wait until the trunk accepts microbatches of `step`.

        The conductor's answer, which assigns `step`, may arrive before or after our trunk reaches that step.
        """
        while step is not None and not 0 <= step - self._post.step <= int(self._run.optimizer.delayed):
            await self._post.state.stepped.wait()

    async def _sum_is_open(self, step: int) -> None:
        """Wait while the sum of `step` is being averaged."""
        while self._post.serving.closing and step <= self._post.step:
            with trio.move_on_after(_CLOSING_S):  # if averaging fails, the sum is open again without a step
                await self._post.state.stepped.wait()

    async def _work(self, job: Callable[[], T], name: str) -> T:
        """Run a job on the trunk's device, and count its time as this peer's work."""

        def timed() -> tuple[T, float]:
            began = time.perf_counter()
            return job(), time.perf_counter() - began

        result, seconds = await self._post.state.work(timed, name)
        self._post.serving.worked(0, seconds)
        return result

    def _sends(self, asks: Sequence[ExpertCall]) -> None:
        self.sent_bytes += sum(len(frame.payload) for ask in asks for frame in ask.frames)

    def _received(self, replies: Sequence[ExpertReply | None]) -> None:
        self.received_bytes += sum(len(reply.frame.payload) for reply in replies if reply is not None)

    # --- for the trainer ----------------------------------------------------------------------------------------

    @property
    def _post(self) -> Post:
        post = self._member.post
        assert post is not None
        return post

    def update(self, members: Iterable[MemberInfo]) -> None:
        """Record from the member list whether our own trunk is at the swarm's position."""
        own = self._ctx.host.id.text
        self._ready = any(member.ready and member.peer == own for member in members)

    def peers(self) -> int:
        """Number of trunks to compute with: 1 if our own is ready, else 0."""
        return int(self._ready and self._member.built)

    @property
    def _trunk_bytes(self) -> int:
        trunk = self._post.state.trunk.trunk
        return trunk.layout.count * trunk.dtype.itemsize

    def places_wanted(self) -> int:
        """Places in the trunk's batch to request or to occupy: one for each microbatch in flight."""
        return self.most_in_flight

    @property
    def most_in_flight(self) -> int:
        """The largest number of microbatches that this trainer has in flight.

        `limits.microbatches_in_flight` if it is set, else 64, or fewer if their gradients would exceed 1 GiB.
        """
        return flights_at_once(self._run, self._trunk_bytes)

    def offer(self, waiting: list[Microbatch], opened: int) -> None:
        """Does nothing: here the loads are samples, which the trainer itself appends to `waiting`."""

    def under_way(self) -> dict[str, int]:
        """Microbatch counts for status that replace the ledger's; empty here, since the ledger contains all flights."""
        return {}

    def samples_since(self, counted: int) -> int:
        """Samples done since the last call, `counted` of which had a place in a batch."""
        return counted

    @property
    def in_flight_why(self) -> str:
        """The reason why no more microbatches are in flight, as text."""
        batches = 2 if self._run.optimizer.delayed else 1
        places = batches * self._run.batch.target_samples // self._run.pipeline.microbatch
        return f"all trainers together have {places} at most: the trunk is synchronous"

    def status(self) -> dict[str, object]:
        """Plain data on the flights and on the calls to experts."""
        return {**self.counts.told(), "calls": dict(self._calls())}

    @property
    def waits_for(self) -> str | None:
        """The failure since the last flight that came back, as text, or None."""
        return self.counts.problem
