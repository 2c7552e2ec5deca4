"""Role `trainer`: sends shuffled text to the stages, keeps each microbatch until it counts, reports progress.

With a model in several stages it computes nothing itself: it sends samples to the first stage, and activations pass
from stage to stage. With a model of one stage it trains a replica of its own and sends its microbatches nowhere else:
data parallel training, in which each peer works at its own pace and all peers average once the swarm has completed the
batch. The conductor decides which microbatches a step counts; `TrainerLedger` records them. It evaluates on held-out
text when the conductor requests it. With experts, the replica is the trunk, and each microbatch is a task that waits
for the experts of other peers (`experts/trainer`). Ends when the run has made all its steps.
"""

from __future__ import annotations

import math
from collections import deque
from contextlib import closing, nullcontext
from typing import ClassVar

import trio

from peerd.core.errors import ConfigError
from peerd.core.limits import MICROBATCHES
from peerd.data.corpus_digest import check_text
from peerd.experts.model.trunk import check_trunk
from peerd.experts.trainer.asynchronous_flights import AsynchronousFlights, FlightPlan, flights_of
from peerd.experts.trainer.expert_flights import ExpertFlights
from peerd.messages.progress import TrainerProgress
from peerd.messages.swarm import MemberInfo, TrainerAnswer
from peerd.model.stage.dry_run import try_layers, try_layers_if_here
from peerd.pipeline.microbatch import Microbatch
from peerd.pipeline.routes.in_flight import LIMITED, InFlight
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.pipeline.stage.final_state import FinalState
from peerd.pipeline.stage.member import StageMember
from peerd.pipeline.trainer.contributor import Contributor
from peerd.pipeline.trainer.trainer_data import TrainerData
from peerd.pipeline.trainer_relay import TrainerRelay
from peerd.role.role import RoleContext
from peerd.run.runfile import RunFile
from peerd.swarm.batch.trainer_ledger import Holding
from peerd.wire.rate.work_rate import WorkRate

_COMPARED_AGAIN_S = (1.0, 1.0, 2.0, 4.0, 8.0)  # pauses between comparisons with the texts of simultaneous starters
_AHEAD = 4  # minimum of microbatches kept ready: as many as the next report may request
_REPLICA_IN_FLIGHT = 2  # one being computed and the next; any more would wait here while other peers are free
_POSITION_S = 2.0  # for saving the data position, after everything else of a leaving trainer,
_LAST_POSITION_S = 30.0  # and at the end of the run
_LAST_EVALUATION_S = 60.0  # for a run with experts, whose hosts may have left by then
_TELL_S = 0.15  # of a delayed replica's work in one report, as each report costs the conductor and all members
_DELAYED_IN_FLIGHT = 32  # maximum, where reports are slow because they are sent beside the gradients


class TrainerRole:
    """Role of a peer that supplies microbatches to a run."""

    name: ClassVar[str] = "trainer"
    needs_run: ClassVar[bool] = True

    def __init__(self, ctx: RoleContext) -> None:
        assert ctx.run is not None
        self._ctx = ctx
        self._run: RunFile = ctx.run
        assert ctx.services is not None
        self._services = ctx.services
        self._contributor: Contributor[Microbatch] = Contributor(ctx, self._services, self)
        self._books = self._contributor.books
        self._is_replica = ctx.run.pipeline.stages == 1
        # If role `stage` runs in this process, its post is the replica.
        self.replica = StageMember(ctx) if self._is_replica and "stage" not in ctx.beside else None
        keeps = self.replica is not None and ctx.run.experts is None
        self._final = FinalState(ctx, self._services, self.replica) if keeps and self.replica is not None else None
        self._flights: ExpertFlights | None = None
        if self.replica is not None and ctx.run.experts is not None:
            calls = self._services.expert_calls(ctx.worker("coding"))
            self._flights = flights_of(ctx, self.replica, calls, calls.status)
        self._pipeline = self._flights or self._services.pipeline(self._books.grant_of, self._books.evaluation_grant)
        self._data = TrainerData(ctx)
        self._wanted = trio.Event()  # set when the ledger has too few samples waiting
        self._evaluated_step = -1
        self._evaluating: set[trio.CancelScope] = set()
        self._valid_loss = math.nan
        self._losses: dict[int, list[float]] = {}  # mean loss per sample of finished microbatches, by step
        self._step_loss = math.nan
        self._held_out: list[Microbatch] = []
        self._evaluations: deque[tuple[int, float]] = deque(maxlen=500)
        self._tally = self._services.tally("trainer", ctx.data_dir / "brought.json", ctx.worker("files"))
        self._rate = WorkRate(ctx.clock.now())
        most = ctx.run.limits.microbatches_in_flight or MICROBATCHES
        self._flow = InFlight(min(most, ctx.run.batch.target_samples // ctx.run.pipeline.microbatch))
        self._counted = 0  # counted microbatches at the last step

    @classmethod
    def check_run(cls, run: RunFile) -> None:
        """Check the run file before joining (`role.ChecksRun`): the text, and the layers if they are here."""
        check_text(run)
        if run.experts is not None:
            check_trunk(run)
        elif run.pipeline.stages == 1:
            try_layers(run)
        else:
            try_layers_if_here(run)

    # --- lifecycle --------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        with closing(self._data):
            await self._data.open()
            digests = await self._data.prompt_digests()
            await self._services.settings.compare(digests)
            self._rate = WorkRate(self._ctx.clock.now())
            with self._relaying.serving() if self._relaying is not None else nullcontext():
                await self._train_to_the_end(task_status, read_through=digests is not None)

    async def _train_to_the_end(self, task_status: trio.TaskStatus[None], *, read_through: bool) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self.replica is not None:
                await nursery.start(self.replica.run)
            if self._flights is not None:
                await nursery.start(self._services.experts.run)
            if not isinstance(self._pipeline, ExpertFlights):
                nursery.start_soon(self._pipeline.run)
            if isinstance(self._flights, AsynchronousFlights):
                plan = FlightPlan(self._data.take, self._goes_on, self._contributor.tell)
                nursery.start_soon(self._flights.fly, plan)
            else:
                nursery.start_soon(self._feed)
            nursery.start_soon(self._contributor.publish_now_and_then)
            nursery.start_soon(self._tally.run)
            nursery.start_soon(self._compare_again if read_through else self._compare_late)
            if self.replica is None:  # otherwise the replica compares
                nursery.start_soon(self._services.settings.keep_comparing)
            task_status.started()
            await self._contributor.follow()
            evaluates = self.replica is None or self.replica.step == self._books.step  # else its stage is not ready
            if self._final is not None:
                await self._final.fetched(self._books.step)
            await self._finish(evaluates=evaluates)
            if self.replica is not None:
                if self._final is not None:
                    await self._final.given(self._books.step)
                await self.replica.leave()
            nursery.cancel_scope.cancel()

    async def _compare_again(self) -> None:
        """Compare our text with those of peers that started at the same time, once they have published theirs."""
        for pause_s in _COMPARED_AGAIN_S:
            await trio.sleep(pause_s)
            await self._services.settings.refuse_texts_of_few()

    async def _compare_late(self) -> None:
        """Compare a large text once it has been read. The ConfigError says how much of it training has used by then."""
        try:
            differences = await self._services.settings.compare_late(await self._data.digests())
            if self._services.settings.has_tokens:
                await self._compare_again()
        except ConfigError as error:
            counted = self._books.tally.counted
            raise ConfigError(
                f"{error}. The text was checked during training: by step {self._books.step}, {counted} "
                "microbatches of it had been counted"
            ) from error
        if differences:
            self._ctx.log.event("data.differs", level="warning", reason="; ".join(differences))

    async def leave(self) -> None:
        """Start no more microbatches, let those in progress end, and say goodbye."""
        await self._contributor.hand_in()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._data.save_position)
            if self.replica is not None:
                await self.replica.leave()
            await self._contributor.say_goodbye()
            nursery.cancel_scope.deadline = trio.current_time() + _POSITION_S

    @property
    def unsaved(self) -> str | None:
        """A sentence on the replica's state that would be lost if this process ended now; None if nothing would."""
        return self.replica.unsaved if self.replica is not None else None

    def status(self) -> dict[str, object]:
        replica = {"replica": self.replica.status()} if self.replica is not None else {}
        experts = {"experts": self._flights.status()} if self._flights is not None else {}
        return (
            replica
            | experts
            | {
                "step": self._books.step,
                "next_step_in_s": self._services.following.step_in_s,
                "loss": self._step_loss,
                "valid_loss": self._valid_loss,
                "valid_step": self._evaluated_step,
                "samples_per_s": self._samples_per_s,
                "tokens_per_s": self._samples_per_s * self._run.model.context,
                "microbatches": self._counts(),
                "in_flight_why": self._in_flight_why(),
                "retries": self._pipeline.retries,
                "relayed_bytes": self._relaying.relayed_bytes if self._relaying is not None else 0,
                "payload_bytes": self._pipeline.sent_bytes + self._pipeline.received_bytes,
                "evaluations": [{"step": step, "loss": loss} for step, loss in self._evaluations],
                "skipped_rows": self._data.skipped or None,
                "complete": self._contributor.complete,
                "waits_for": self._waits_for(),
            }
        )

    def _counts(self) -> dict[str, int]:
        return self._contributor.counts() | (self._flights.under_way() if self._flights is not None else {})

    @property
    def _samples_per_s(self) -> float:
        return self._rate.at(self._ctx.clock.now())

    def _waits_for(self) -> str | None:
        reason = "the first samples" if self._contributor.answer is None else None
        reasons = dict.fromkeys([self._contributor.waits_for, self._pipeline.waits_for])
        waits = "; ".join(text for text in reasons if text)  # one's failure may be due to the other's reason
        ours, final = self._data, self._final.waits_for if self._final is not None else None
        return final or ours.preparing or self._services.view.waits_for() or waits or ours.problem or reason

    # --- samples ----------------------------------------------------------------------------------------------

    async def _feed(self) -> None:
        """Keep a few microbatches of samples ready."""
        while True:
            while len(self._books.waiting) < max(_AHEAD, self._contributor.in_flight()):
                load = await self._data.take()
                short = not self._books.waiting  # the last report requested less than it could have
                self._books.waiting.append(load)
                if short and len(self._books.open()) < self._contributor.in_flight():
                    self._contributor.tell()
            self._wanted = trio.Event()
            await self._wanted.wait()

    # --- training ---------------------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Number of microbatches to keep open: enough that no stage peer is idle while others answer."""
        wanted, peers = self._run.limits.microbatches_in_flight, self._pipeline.peers()
        if not self._is_replica:
            return wanted or self._flow.wanted(2 + 2 * max(1, peers))
        if not peers:
            return 0  # it still loads the state: a microbatch admitted to the batch would delay the step
        if self._flights is not None:
            return self._flights.places_wanted()
        return wanted or max(_REPLICA_IN_FLIGHT, self._done_unheard())

    def _goes_on(self) -> bool:
        """True while new microbatches may start."""
        return not self._contributor.leaving and not self._contributor.complete

    @property
    def _relaying(self) -> TrainerRelay | None:
        """The relay for stage peers that cannot connect to each other, or None for a replica, which has one stage."""
        if self._is_replica or isinstance(self._pipeline, ExpertFlights):
            return None
        return self._pipeline.relaying

    def _in_flight_why(self) -> str:
        """The reason that no more microbatches are in flight; empty for a replica without experts."""
        if self._flights is not None:
            return self._flights.in_flight_why
        if self._is_replica:
            return ""
        return LIMITED if self._run.limits.microbatches_in_flight else self._flow.why

    def told_together(self) -> int:
        """Number of microbatches per report: 1, or for a delayed replica the number that it computes in _TELL_S."""
        if not self._is_replica or not self._run.optimizer.delayed or self._run.limits.microbatches_in_flight:
            return 1
        return max(1, min(int(_TELL_S / self._microbatch_s), self._most_unheard // 2))

    def _done_unheard(self) -> int:
        """Number of microbatches that a delayed replica computes while it waits for the answer that admits more.

        Gradients fill the link meanwhile, so answers take long. A microbatch that just misses a report waits for two
        answers.
        """
        if not self._run.optimizer.delayed:
            return 0
        unheard = self.told_together() + math.ceil(2 * self._contributor.answer_s / self._microbatch_s)
        return min(self._most_unheard, unheard)

    @property
    def _microbatch_s(self) -> float:
        """Seconds in which this peer's replica computes a microbatch."""
        return self._run.pipeline.microbatch / max(self._services.calls.samples_per_s(0), 1e-3)

    @property
    def _most_unheard(self) -> int:
        return min(_DELAYED_IN_FLIGHT, self._run.batch.target_samples // self._run.pipeline.microbatch // 2)

    def refill(self, waiting: list[Microbatch]) -> None:
        """Wake `_feed`, which appends samples to `waiting`, or offer ready gradients for a place in the batch."""
        if self._flights is not None:
            self._flights.offer(waiting, len(self._books.open()))
        self._wanted.set()

    async def train(self, step: int, seq: int, load: Microbatch) -> list[Holding]:
        """Send the microbatch through all stages and back; returns the holder of its gradient in each stage."""
        started = self._ctx.clock.now()
        holdings = await self._pipeline.train(step, seq, load)
        now = self._ctx.clock.now()
        if not self._is_replica:
            self._flow.returned(now, now - started, len(self._books.open()))
        self._losses.setdefault(step, []).append(load.loss_sum / self._run.pipeline.microbatch)
        self._rate.worked(now)
        return holdings

    async def repeat(self, step: int, seq: int, stage: int, load: Microbatch) -> Holding:
        """Have one stage computed again; returns the new holder."""
        return await self._pipeline.repeat(step, seq, stage, load)

    def dropped(self, step: int, load: Microbatch, error: MicrobatchNotFinite) -> None:
        """Log a warning, with stage and documents, about a microbatch that is dropped for good."""
        self._ctx.log.event(
            "microbatch.dropped",
            level="warning",
            step=step,
            stage=error.stage,
            by=[peer[-8:] for peer in error.peers],
            samples=list(load.origins),
            reason=str(error),
        )

    def note_members(self, members: list[MemberInfo]) -> None:
        """Set the stage peers that receive microbatches; with a replica of its own, only this peer."""
        if self._is_replica:
            members = [m for m in members if m.peer == self._ctx.host.id.text]
        self._pipeline.update(members)

    def stepped(self, before: int) -> None:
        """End the step's loss and rate, and count this trainer's contribution."""
        losses = [loss for step, found in sorted(self._losses.items()) if step < self._books.step for loss in found]
        self._losses = {step: found for step, found in self._losses.items() if step == self._books.step}
        if losses:
            self._step_loss = sum(losses) / len(losses)
        samples = len(losses) * self._run.pipeline.microbatch
        if self._flights is not None:
            samples = self._flights.samples_since(samples)
        self._rate.stepped(self._ctx.clock.now(), samples)
        counted, self._counted = self._books.tally.counted - self._counted, self._books.tally.counted
        self._tally.add(samples=counted * self._run.pipeline.microbatch)
        self._ctx.log.event("trainer.stepped", level="debug", step=before, loss=self._step_loss)
        every = self._run.checkpoint.every_steps
        if every and self._books.step % every == 0:
            self._nursery.start_soon(self._data.save_position)

    # --- evaluation and progress ------------------------------------------------------------------------------

    def answered(self, answer: TrainerAnswer) -> None:
        """Evaluate if the conductor requests it. If it requests another trainer, cancel an evaluation whose grant is
        too old.
        """
        if answer.evaluate and not answer.complete:
            self._evaluate_if_due(answer.step)
        elif not answer.evaluate and answer.step > self._evaluated_step + self._run.evaluate.every_steps:
            for scope in self._evaluating:
                scope.cancel()

    def _evaluate_if_due(self, step: int) -> None:
        every = self._run.evaluate.every_steps
        if every and step % every == 0 and step > self._evaluated_step:
            self._evaluated_step = step
            self._nursery.start_soon(self._evaluate_while_granted, step)

    async def _evaluate_while_granted(self, step: int) -> None:
        with trio.CancelScope() as scope:
            self._evaluating.add(scope)
            try:
                await self._evaluate(step)
            finally:
                self._evaluating.remove(scope)

    async def _evaluate(self, step: int) -> None:
        """Compute the mean loss of held-out samples, the same ones each time."""
        if not self._held_out:
            self._held_out = await self._data.held_out()
        total = 0.0
        for load in self._held_out:
            try:
                total += await self._pipeline.evaluate(load.tokens, load.targets)
            except MicrobatchNotFinite as error:
                total = math.nan
                reason = f"the evaluation of the held-out samples failed: {error}"
                self._ctx.log.event("trainer.evaluation_failed", level="warning", step=step, reason=reason)
                break
        self._valid_loss = total / self._run.evaluate.samples
        self._evaluations.append((step, self._valid_loss))
        self._ctx.log.event("trainer.evaluated", step=step, loss=round(self._valid_loss, 4))

    async def _finish(self, *, evaluates: bool) -> None:
        """Make the last evaluation, if this trainer is to make it; publish the last progress; save the position."""
        answer = self._contributor.answer
        if evaluates and answer is not None and answer.evaluate and self._run.evaluate.every_steps:
            self._evaluated_step = answer.step
            with trio.move_on_after(math.inf if self._flights is None else _LAST_EVALUATION_S):
                await self._evaluate(answer.step)
        await self._contributor.publish()
        with trio.move_on_after(_LAST_POSITION_S):
            await self._data.save_position()
        tally = self._books.tally
        self._ctx.log.event(
            "trainer.finished",
            step=self._books.step,
            loss=self._step_loss,
            counted=tally.counted,
            redone=tally.redone,
            requeued=tally.requeued,
            lost=tally.lost,
        )

    def progress(self) -> TrainerProgress:
        """This trainer's record for the directory."""
        tally = self._books.tally
        return TrainerProgress(
            step=self._books.step,
            loss=self._step_loss,
            valid_loss=self._valid_loss,
            valid_step=max(0, self._evaluated_step),
            samples_per_s=self._samples_per_s,
            tokens_per_s=self._samples_per_s * self._run.model.context,
            microbatches=tally.counted,
            redone=tally.redone,
            lost=tally.lost,
            waits_for=(self._waits_for() or "")[:200],
            addrs=self._services.directory.own_addrs(),
            client=self._services.directory.only_dials,
        )
