"""Contributor: one peer's microbatches in a run's batches, no matter where they are computed. Not a role.

Follows the run's conductor: reports the microbatches it wants to begin, has begun and has finished, and carries out the
orders in each answer. `swarm/batch/trainer_ledger` keeps the state. `Work` supplies and computes the microbatches:
role `trainer` sends text through the stages; the library takes gradients from a user's own training loop. Publishes its
progress in the DHT.

Invariants: a microbatch begins only after the conductor admitted it. A microbatch that the conductor drops is
cancelled. A finished microbatch is reported until the conductor accepts the report.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

import trio

from peerd.core.errors import RemoteError
from peerd.core.signals import Signal
from peerd.messages.progress import TrainerProgress, encode_progress, pause_s, progress_key
from peerd.messages.swarm import MAX_MICROBATCHES, Done, MemberInfo, Seqs, TrainerAnswer, TrainerSync
from peerd.pipeline.routes.second_opinion import MicrobatchNotFinite
from peerd.role.role import RoleContext
from peerd.role.run_services import RunServices
from peerd.swarm.batch.trainer_ledger import (
    Begun,
    DropMicrobatch,
    Holding,
    Order,
    Repeat,
    Start,
    TrainerLedger,
    told_at_once,
)
from peerd.swarm.steps.member_list import KnownMembers

T = TypeVar("T")  # load of a microbatch

_SYNC_WAIT_S = 2.0  # longest wait of a report without news at the conductor
_ANSWER_S = 8.0  # for its answer, in addition to that wait
_PUBLISH_S = 3.0
_PUBLISH_RARELY_S = 15.0  # a quarter of a record's life
_RECORD_TTL_S = 60.0
_LEAVE_PATIENCE_S = 4.0


class Work(Protocol[T]):
    """The source of microbatches and their computation. All methods are called on the event loop."""

    def in_flight(self) -> int:
        """Number of microbatches that should be open now. 0 means that no new one may begin."""
        ...

    def told_together(self) -> int:
        """Number of finished microbatches to collect in one report while no step waits for them; at least 1."""
        ...

    def refill(self, waiting: list[T]) -> None:
        """Append new loads, which have no number yet, to `waiting`. Called before each report."""
        ...

    async def train(self, step: int, seq: int, load: T) -> list[Holding]:
        """Compute microbatch `seq` of `step` in every stage. Returns the holder of its gradient in each stage.

        Raises MicrobatchNotFinite if the microbatch has no finite gradient; it is then dropped for good.
        """
        ...

    async def repeat(self, step: int, seq: int, stage: int, load: T) -> Holding:
        """Compute a microbatch again in one stage that lost the peer with its gradient.

        Returns the new holder. Raises MicrobatchNotFinite as `train` does.
        """
        ...

    def dropped(self, step: int, load: T, error: MicrobatchNotFinite) -> None:
        """Inform the user that a microbatch was dropped for good. Its samples are not queued again."""
        ...

    def note_members(self, members: list[MemberInfo]) -> None:
        """Process the conductor's member list."""
        ...

    def stepped(self, before: int) -> None:
        """Called after the swarm made the step that follows `before`."""
        ...

    def answered(self, answer: TrainerAnswer) -> None:
        """Process the conductor's answer. Called after the ledger processed it."""
        ...

    def progress(self) -> TrainerProgress:
        """The progress record to publish."""
        ...


class Contributor(Generic[T]):
    """One peer's microbatches in a run. `follow` returns when the run has made all its steps."""

    def __init__(self, ctx: RoleContext, services: RunServices, work: Work[T]) -> None:
        self._ctx, self._services, self._work = ctx, services, work
        self._following = services.following
        session = int.from_bytes(ctx.clock.secure_bytes(4), "big") >> 2
        self.books: TrainerLedger[T] = TrainerLedger(session)
        self.answer: TrainerAnswer | None = None
        self.complete = False
        self.leaving = False
        self._longest_s = [0.0, 0.0]  # waits for answers to reports with news: last step, this step
        self._waits_for: str | None = None
        self._scopes: dict[int, list[trio.CancelScope]] = {}
        self._idle: trio.CancelScope | None = None  # scope of a report without news; news cancels it
        self._dirty = False
        self._said: list[Done] = []
        self._said_not_finite: list[int] = []
        self._refused = False  # the conductor cannot accept news now and has none for us
        self._heard = Signal()  # notified at each answer
        self._changes = -1
        self._seen, self._listed = 0, KnownMembers()

    @property
    def waits_for(self) -> str | None:
        """What the conductor or the connection to it waits for, as text. None if neither waits."""
        return self._following.waits_for or self._waits_for

    def counts(self) -> dict[str, int]:
        """Numbers of microbatches by outcome, for status."""
        tally = self.books.tally
        return {
            "in_flight": len(self.books.open()),
            "begun": tally.begun,
            "counted": tally.counted,
            "redone": tally.redone,
            "requeued": tally.requeued,
            "lost": tally.lost,
            "not_finite": tally.not_finite,
        }

    @property
    def answer_s(self) -> float:
        """Longest recent wait, in seconds, for the answer to a report with news.

        It covers the last step and this one, because the links are saturated for a part of each step.
        """
        return max(self._longest_s)

    # --- following the conductor ------------------------------------------------------------------------------

    def in_flight(self) -> int:
        """Number of microbatches that should be open now."""
        return 0 if self.leaving or self.complete else self._work.in_flight()

    def tell(self) -> None:
        """Report news at once: cancels a pending report without news, for which the conductor delays its answer."""
        self._dirty = True
        if self._idle is not None:
            self._idle.cancel()

    async def follow(self) -> None:
        """Exchange reports and answers with the conductor until the run is complete.

        A report without news waits at the conductor until there is a change.
        """
        async with trio.open_nursery() as nursery:
            while not self.complete:
                self._dirty = False
                self._work.refill(self.books.waiting)
                self.books.wish(self.in_flight())
                with trio.CancelScope() as scope:
                    self._idle = scope if not self.books.news() else None
                    asked = trio.current_time()
                    answer = await self._following.ask(
                        "swarm/6/trainer", self._report, TrainerAnswer, _SYNC_WAIT_S + _ANSWER_S
                    )
                    self._idle = None
                    if self._said:
                        self._longest_s[1] = max(self._longest_s[1], trio.current_time() - asked)
                    self._refused = self._has_news and not answer.taken and answer.version == self._seen
                    self._take(answer, nursery)
                self._idle = None
                self._heard.notify()
            nursery.cancel_scope.cancel()

    @property
    def _has_news(self) -> bool:
        """True if the current report has news that the conductor must accept."""
        return bool(self._said or self._said_not_finite or self.books.unknown)

    @property
    def _in_a_hurry(self) -> bool:
        return self._dirty or self._listed.more or (self._has_news and not self._refused)

    def _report(self) -> TrainerSync:
        if self._following.changes != self._changes:
            self._changes, self._seen = self._following.changes, 0
            self._listed.forget()
            self._refused = False
            self.books.repeat_all()
        self._said, later = told_at_once(self.books.news())
        self._said_not_finite = self.books.not_finite[: MAX_MICROBATCHES - len(self.books.unknown)]
        return TrainerSync(
            run=self._services.fingerprint,
            term=self.answer.term if self.answer else 0,
            step=self.books.step,
            open=Seqs.of([*later, *self.books.open()]),
            done=self._said,
            seen=self._seen,
            seen_members=self._listed.version,
            wait_s=0.0 if self._in_a_hurry else _SYNC_WAIT_S,
            early=Seqs.of(self.books.early()),
            unknown=Seqs.of(dict.fromkeys([*self.books.unknown, *self._said_not_finite])),
        )

    def _take(self, answer: TrainerAnswer, nursery: trio.Nursery) -> None:
        self.answer = answer
        self._seen = answer.version
        if (members := self._listed.take(answer.members)) is not None:
            self._work.note_members(self._following.note_members(members))
        self._waits_for = answer.waits_for or None
        self._following.note_forecast(answer.forecast, answer.waits_for)
        before = self.books.step
        orders = self.books.answered(answer, self._said, self._said_not_finite)
        if self.books.step != before:
            self._longest_s = [self._longest_s[1], 0.0]
            self._work.stepped(before)
        self._tell_repeats(orders)
        for order in orders:
            self._carry_out(order, nursery)
        self._work.answered(answer)
        self.complete = answer.complete

    def _tell_repeats(self, orders: list[Order[T]]) -> None:
        """Log the orders to repeat, one line for each step and stage, because a lost peer holds many microbatches."""
        found = Counter((order.item.step, order.stage) for order in orders if isinstance(order, Repeat))
        for (step, stage), number in found.items():
            reason = "the peer that held these gradients is gone"
            self._ctx.log.event("microbatches.redone", step=step, stage=stage, microbatches=number, reason=reason)

    def _carry_out(self, order: Order[T], nursery: trio.Nursery) -> None:
        match order:
            case Start(item):
                nursery.start_soon(self._train, item)
            case Repeat(item, stage):
                nursery.start_soon(self._repeat, item, stage)
            case DropMicrobatch(item):
                for scope in self._scopes.pop(item.seq, []):
                    scope.cancel()

    async def _train(self, item: Begun[T]) -> None:
        assert item.step is not None
        with self._scope(item):
            try:
                holdings = await self._work.train(item.step, item.seq, item.load)
            except MicrobatchNotFinite as error:
                self._drop(item, item.step, error)
                return
            self.books.finish(item, [one.peer for one in holdings], [one.receipt for one in holdings])
            if self.books.pressing(self._work.told_together()):
                self.tell()

    async def _repeat(self, item: Begun[T], stage: int) -> None:
        assert item.step is not None
        with self._scope(item):
            try:
                holder, receipt = await self._work.repeat(item.step, item.seq, stage, item.load)
            except MicrobatchNotFinite as error:
                self._drop(item, item.step, error)
                return
            self.books.repeated(item, stage, holder, receipt)
            self.tell()

    def _drop(self, item: Begun[T], step: int, error: MicrobatchNotFinite) -> None:
        """Drop a microbatch for good. Stages that hold its gradient remove it from their sums before they average."""
        if self.books.items.get(item.seq) is item:
            self.books.dismiss(item)
            self._work.dropped(step, item.load, error)
            for scope in self._scopes.pop(item.seq, []):
                scope.cancel()
            self.tell()

    def _scope(self, item: Begun[T]) -> trio.CancelScope:
        scope = trio.CancelScope()
        self._scopes.setdefault(item.seq, []).append(scope)
        return scope

    # --- leaving ----------------------------------------------------------------------------------------------

    async def hand_in(self, unfinished: bool = True) -> None:
        """Begin no new microbatches; wait up to 4 s until those begun are finished and reported.

        If `unfinished` is False, cancel those begun at once; the conductor gives their places in the batch to others.
        """
        self.leaving = True
        if not unfinished:
            self._give_back()
        with trio.move_on_after(_LEAVE_PATIENCE_S):
            while any(i.admitted and (not i.finished or i.unsaid) for i in self.books.items.values()):
                await self._heard.wait()

    async def say_goodbye(self) -> None:
        """Notify the conductor that this peer trains no longer, so that no step waits for its microbatches."""
        await self._following.say_goodbye(self._services.fingerprint)

    def _give_back(self) -> None:
        for seq in self.books.open():
            del self.books.items[seq]
            for scope in self._scopes.pop(seq, []):
                scope.cancel()
        self.tell()

    # --- publishing -------------------------------------------------------------------------------------------

    async def publish_now_and_then(self) -> None:
        """Publish the progress periodically, less often during long steps."""
        while True:
            await self.publish()
            await trio.sleep(pause_s(self._following.step_in_s, _PUBLISH_S, _PUBLISH_RARELY_S))

    async def publish(self) -> None:
        """Publish the progress record in the DHT. It expires after 60 s."""
        value = encode_progress(self._work.progress())
        try:
            await self._ctx.dht.put(progress_key(self._services.run.run), value, ttl_s=_RECORD_TTL_S)
            await self._services.settings.publish()
        except RemoteError as error:
            self._ctx.log.event("dht.announce_failed", level="warning", reason=str(error))
